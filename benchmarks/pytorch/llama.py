"""Llama, Qwen2, Qwen3 and Mistral of `transformers`, the same function of the same weights as our decoder with rotary
positions, on one device: attention by PyTorch's `scaled_dot_product_attention`.

Letters: B batch, T tokens, V vocabulary.
"""

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from megajax.core.models.config import ModelConfig

IGNORED = -1  # target of a token that is not predicted

# Where our weights are, by the words of their names: of a layer, and of the ends.
OF_LAYER = {
    "attention_norm": "input_layernorm",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.output": "self_attn.o_proj",
    "attention.query_norm": "self_attn.q_norm",
    "attention.key_norm": "self_attn.k_norm",
    "mlp_norm": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}
OF_ENDS = {"table": "model.embed_tokens.weight", "final_norm": "model.norm", "output": "lm_head.weight"}
LAST = {"weight": "weight", "scale": "weight", "bias": "bias"}


class Llama(nn.Module):
    """The model up to its loss."""

    inputs = ("tokens", "targets")
    residual = ("o_proj.weight", "down_proj.weight")  # end the names of the weights before the residual additions

    def __init__(self, config: ModelConfig):
        super().__init__()
        settings = dict(
            vocab_size=config.padded_vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.mlp_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            head_dim=config.head_size,
            max_position_embeddings=config.sequence_length,
            rms_norm_eps=config.norm_epsilon,
            rope_parameters=rope(config),
            tie_word_embeddings=config.tied_embedding,
            use_cache=False,
            attn_implementation="sdpa",
        )
        windowed = {"sliding_window": config.sliding_window or None}
        qwen = windowed | {"use_sliding_window": config.sliding_window > 0, "max_window_layers": 0}
        if config.query_key_norm:
            made: Any = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**settings | qwen))
        elif config.bias == "query-key-value":
            made = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**settings | qwen))
        elif config.sliding_window:
            made = transformers.MistralForCausalLM(transformers.MistralConfig(**settings | windowed))
        else:
            made = transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings))
        self.model, self.config = made, config
        self.padded = config.padded_vocab_size - config.vocab_size

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        """Sum of the cross-entropy over the targets that are not `IGNORED`, in fp32."""
        logits_BTV = self.model(input_ids=tokens_BT).logits
        if self.padded:
            logits_BTV = logits_BTV[..., : self.config.vocab_size]
        logits_NV, targets_N = logits_BTV.flatten(0, 1).float(), targets_BT.flatten()
        return F.cross_entropy(logits_NV, targets_N, ignore_index=IGNORED, reduction="sum")

    @staticmethod
    def num_targets(arrays: dict[str, np.ndarray]) -> np.ndarray:
        """Of the loss in a batch."""
        return np.array(np.count_nonzero(arrays["targets"] != IGNORED))

    def canonical_weights(self, params: dict) -> dict[str, Tensor]:
        """The parameters by name, from the nested dict of our canonical weights."""
        found = {}
        for (*path, last), leaf in _leaves(params["shared"]):
            name = OF_ENDS[".".join(path) or last]
            found[f"model.{name}" if not path else f"model.{name}.{LAST[last]}"] = torch.tensor(leaf)
        for (*path, last), leaf_L in _leaves(params["blocks"]):
            for layer, leaf in enumerate(leaf_L):
                name = f"model.model.layers.{layer}.{OF_LAYER['.'.join(path)]}.{LAST[last]}"
                found[name] = torch.tensor(_turned(leaf, path[-1]) if last == "weight" else leaf.flatten())
        return found


def rope(config: ModelConfig) -> dict[str, Any]:
    """The rotary angles as transformers writes them."""
    parameters: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta}
    if config.rope_scaling != "none":
        parameters |= {"rope_type": config.rope_scaling, "factor": config.rope_factor}
    if config.rope_scaling == "llama3":
        parameters |= {
            "low_freq_factor": config.rope_low_frequency,
            "high_freq_factor": config.rope_high_frequency,
            "original_max_position_embeddings": config.rope_original_length,
        }
    return parameters


def _turned(weight: np.ndarray, name: str) -> np.ndarray:
    """A matrix as PyTorch's `Linear` has it, [out, in]; ours are [in, out], dims of heads as they are."""
    inner = weight.ndim - 1 if name in ("output", "down") else 1
    return weight.reshape(int(np.prod(weight.shape[:inner])), -1).T


def _leaves(tree: dict, *path: str) -> list[tuple[tuple[str, ...], np.ndarray]]:
    found = []
    for name, value in tree.items():
        found += _leaves(value, *path, name) if isinstance(value, dict) else [((*path, name), np.asarray(value))]
    return found
