"""GPT-2 in plain PyTorch, the same function of the same weights as our decoder in GPT-2's words, split as Megatron
splits it.

`group` is the process group of a tensor group, None where nothing is split; with it every module holds a shard and
computes on that. Letters: B batch, T tokens, N = B · T, D model, H heads, K head size, F feed-forward, V vocabulary.
"""

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megajax.core.models.config import ModelConfig

IGNORED = -1  # target of a token that is not predicted
Group = Any  # dist.ProcessGroup | None; a build of torch without distributed has no such class

# The dim that a weight is split along; what is not here is on every rank. The rows of qkv are ordered [H, 3, K].
SPLIT_DIM = {
    "table": 0,
    "qkv.weight": 0,
    "qkv.bias": 0,
    "output.weight": 1,
    "up.weight": 0,
    "up.bias": 0,
    "down.weight": 1,
}


def split_dim(name: str) -> int | None:
    """`SPLIT_DIM` by the parameter's full name."""
    return SPLIT_DIM.get(".".join(name.split(".")[-2:]))


class _F(torch.autograd.Function):
    """Identity forward, all-reduce backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.contiguous()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class _G(torch.autograd.Function):
    """All-reduce forward, in place, identity backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        dist.all_reduce(x, group=group)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def f(x: Tensor, group: Group) -> Tensor:
    """What goes into a product split by columns. Cast first: what the backward pass sums has the product's dtype."""
    if group is None:
        return x
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    return _F.apply(x, group)


def g(x: Tensor, group: Group) -> Tensor:
    """What comes out of a product split by rows."""
    return x if group is None else _G.apply(x, group)


class _VocabularyCrossEntropy(torch.autograd.Function):
    """Sum of the cross-entropy over the tokens that count; per token three numbers are all-reduced."""

    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, targets_N: Tensor, first: int, group: Group) -> Tensor:
        max_N = logits_NV.amax(-1).float()
        dist.all_reduce(max_N, dist.ReduceOp.MAX, group=group)
        shifted_NV = logits_NV - max_N[:, None]
        ids_N = targets_N - first
        inside_N = (ids_N >= 0) & (ids_N < logits_NV.shape[1])
        ids_N1 = ids_N.clamp(0, logits_NV.shape[1] - 1)[:, None]
        picked_N = shifted_NV.gather(1, ids_N1)[:, 0] * inside_N
        exp_NV = shifted_NV.exp_()
        sums_2N = torch.stack([exp_NV.sum(-1), picked_N])
        dist.all_reduce(sums_2N, group=group)
        counted_N = targets_N != IGNORED
        ctx.save_for_backward(exp_NV.div_(sums_2N[0, :, None]), ids_N1, inside_N, counted_N)
        ctx.dtype = logits_NV.dtype
        return ((sums_2N[0].log() - sums_2N[1]) * counted_N).sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        probability_NV, ids_N1, inside_N, counted_N = ctx.saved_tensors
        grad_NV = probability_NV.scatter_add_(1, ids_N1, -inside_N[:, None].to(probability_NV.dtype))
        return grad_NV.mul_((grad * counted_N)[:, None]).to(ctx.dtype), None, None, None


class LayerNorm(nn.LayerNorm):
    """Layer normalisation in the dtype of its input (statistics in fp32), which autocast would widen to fp32."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            return F.layer_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.bias.to(x.dtype), self.eps)


class RowLinear(nn.Linear):
    """A product split by rows; the bias is on every rank and added after the sum."""

    def __init__(self, in_size: int, out_size: int, group: Group) -> None:
        super().__init__(in_size, out_size)
        self.group = group

    def forward(self, y: Tensor) -> Tensor:
        if self.group is None:
            return F.linear(y, self.weight, self.bias)
        out = g(F.linear(y, self.weight), self.group)
        return out + self.bias.to(out.dtype)


class Attention(nn.Module):
    """Causal self-attention over this rank's heads."""

    def __init__(self, config: ModelConfig, tensor: int, group: Group) -> None:
        super().__init__()
        self.heads, self.head_size, self.group = config.num_heads // tensor, config.head_size, group
        width = self.heads * self.head_size
        self.qkv = nn.Linear(config.hidden_size, 3 * width)
        self.output = RowLinear(width, config.hidden_size, group)

    def forward(self, x_BTD: Tensor) -> Tensor:
        qkv = self.qkv(f(x_BTD, self.group)).unflatten(-1, (self.heads, 3, self.head_size))
        q_BHTK, k_BHTK, v_BHTK = qkv.transpose(1, 2).unbind(3)
        y_BHTK = F.scaled_dot_product_attention(q_BHTK, k_BHTK, v_BHTK, is_causal=True)
        return self.output(y_BHTK.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """`g(GeLU(f(x) A) B)`: A by columns, B by rows."""

    def __init__(self, config: ModelConfig, tensor: int, group: Group) -> None:
        super().__init__()
        width = config.mlp_size // tensor
        self.group = group
        self.up = nn.Linear(config.hidden_size, width)
        self.down = RowLinear(width, config.hidden_size, group)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(f(x_BTD, self.group)), approximate="tanh"))


class Block(nn.Module):
    """One pre-LayerNorm transformer layer."""

    def __init__(self, config: ModelConfig, tensor: int, group: Group) -> None:
        super().__init__()
        self.attention_norm = LayerNorm(config.hidden_size)
        self.attention = Attention(config, tensor, group)
        self.mlp_norm = LayerNorm(config.hidden_size)
        self.mlp = MLP(config, tensor, group)

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD))
        return x_BTD + self.mlp(self.mlp_norm(x_BTD))


class GPT(nn.Module):
    """The model up to its loss; parameters have our names, matrices PyTorch's layout [out, in]."""

    inputs = ("tokens", "targets")
    residual = ("output.weight", "down.weight")  # end the names of the weights before the residual additions

    def __init__(
        self, config: ModelConfig, *, tensor: int = 1, rank: int = 0, group: Group = None, remat: bool = False
    ) -> None:
        super().__init__()
        self.group, self.remat = group, remat
        rows = config.padded_vocab_size // tensor
        self.first = rank * rows
        self.table = nn.Parameter(torch.empty(rows, config.hidden_size))
        self.positions = nn.Parameter(torch.empty(config.sequence_length, config.hidden_size))
        self.blocks = nn.ModuleList(Block(config, tensor, group) for _ in range(config.num_layers))
        self.final_norm = LayerNorm(config.hidden_size)
        # Added to the logits, where the product adds a bias for nothing: padded columns get no probability. No buffer,
        # which DistributedDataParallel would broadcast in every step.
        self.padding = None
        if config.padded_vocab_size > config.vocab_size:
            self.padding = torch.zeros(rows)
            self.padding[max(0, config.vocab_size - self.first) :] = torch.finfo(torch.bfloat16).min

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        """Sum of the cross-entropy over the targets that are not `IGNORED`, in fp32."""
        x_BTD = self.embed(tokens_BT) + self.positions[: tokens_BT.shape[1]]
        if torch.is_autocast_enabled(x_BTD.device.type):
            x_BTD = x_BTD.to(torch.get_autocast_dtype(x_BTD.device.type))
        for block in self.blocks:
            if self.remat:
                x_BTD = checkpoint(block, x_BTD, use_reentrant=False, preserve_rng_state=False)
            else:
                x_BTD = block(x_BTD)
        x_ND = f(self.final_norm(x_BTD), self.group).flatten(0, 1)
        logits_NV = F.linear(x_ND, self.table, self.padding)
        targets_N = targets_BT.flatten()
        if self.group is None:
            return F.cross_entropy(logits_NV.float(), targets_N, ignore_index=IGNORED, reduction="sum")
        return _VocabularyCrossEntropy.apply(logits_NV, targets_N, self.first, self.group)

    @staticmethod
    def num_targets(arrays: dict[str, np.ndarray]) -> np.ndarray:
        """Of the loss in a batch."""
        return np.array(np.count_nonzero(arrays["targets"] != IGNORED))

    def canonical_weights(self, params: dict) -> dict[str, Tensor]:
        """The whole of every parameter by name, from the nested dict of our canonical weights."""
        return {name: canonical_weight(params, name) for name, _ in self.named_parameters()}

    def embed(self, tokens_BT: Tensor) -> Tensor:
        """Rows of the table, [B, T, D]: every rank looks up the tokens it holds, `g` adds them up."""
        if self.group is None:
            return F.embedding(tokens_BT, self.table)
        ids_BT = tokens_BT - self.first
        inside_BT = (ids_BT >= 0) & (ids_BT < self.table.shape[0])
        rows_BTD = F.embedding(ids_BT.clamp(0, self.table.shape[0] - 1), self.table)
        return g(rows_BTD * inside_BT[..., None], self.group)


def canonical_weight(params: dict, name: str) -> Tensor:
    """The whole of a parameter in PyTorch's layout, from the nested dict of our canonical weights."""
    words = name.split(".")
    tree, layer = params["shared"], ...
    if words[0] == "blocks":
        tree, layer, words = params["blocks"], int(words[1]), words[2:]
    *path, last = words
    if path and path[-1] == "qkv":
        parts = [params["blocks"]["attention"][part][last][layer] for part in ("query", "key", "value")]
        joint = torch.tensor(np.stack(parts))  # [3, D, H, K] or [3, H, K]
        return joint.permute(2, 0, 3, 1).flatten(0, 2) if last == "weight" else joint.transpose(0, 1).flatten()
    for word in path:
        tree = tree[word]
    if path and path[-1].endswith("norm"):
        last = {"weight": "scale"}.get(last, last)
    leaf = torch.tensor(tree[last][layer])
    match [*path[-1:], last]:
        case "output", "weight":  # [H, K, D]
            return leaf.flatten(0, 1).T
        case (("up" | "down"), "weight"):  # [in, out]
            return leaf.T
    return leaf
