"""Read this first: what megajax computes, a transformer's forward pass and loss in NumPy, on one device in float64.

Everything in `megajax/core` computes these numbers on a mesh; tests compare it with this file. `Decoder` is GPT-2,
Llama, Qwen, Gemma, OLMo and GPT-OSS without experts; `tests/core/models` adds BERT and experts.

Letters: B batch, T and S tokens, D model, H heads, K head size, P pairs of it, F feed-forward, V vocabulary.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from scipy.special import erf

IGNORED = -1  # a target that does not count
EMBEDDING, ATTENTION_WEIGHTS, ATTENTION_OUTPUT, MLP_OUTPUT = 0xFFFF_FFFF, 0, 1, 2  # sites of dropout


class Transformer:
    """What the families have in common.

    Args:
        model: a `ModelConfig`, or anything with its attributes.
        weights: nested dicts, as of `megajax.Model.weights`; those of the layers, `blocks`, are stacked [L, …].
        dropout: drops numbers of x; called with x, the layer if any, and the site.
    """

    position_BT: np.ndarray

    def __init__(self, model: Any, weights: dict, dropout: Callable[..., np.ndarray] = lambda x, *site: x):
        self.model, self.dropped = model, dropout
        self.weights = mapped(lambda weight: np.asarray(weight, np.float64), weights)

    def norm(self, weights: dict, x: np.ndarray, *, of_heads: bool = False) -> np.ndarray:
        centered = x if of_heads or self.model.norm != "layernorm" else x - x.mean(-1, keepdims=True)
        square = np.mean(centered**2, axis=-1, keepdims=True)
        scale = weights["scale"] + (self.model.norm == "rmsnorm-1p")
        return centered / np.sqrt(square + self.model.norm_epsilon) * scale + weights.get("bias", 0)

    def gelu(self, x: np.ndarray) -> np.ndarray:
        if self.model.activation == "gelu":  # or else with tanh
            return x / 2 * (1 + erf(x / np.sqrt(2)))
        return x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))

    def layers(self, x_BTD: np.ndarray, seen_BTS: np.ndarray) -> np.ndarray:
        """All of them, each with its norms around attention and MLP, or after the additions."""
        for number in range(self.model.num_layers):
            block = mapped(lambda weight, number=number: weight[number], self.weights["blocks"])
            order, windowed = self.model.layer_order, self.model.windowed[number]
            behind_TS = np.subtract.outer(np.arange(seen_BTS.shape[1]), np.arange(seen_BTS.shape[2]))
            own_BTS = seen_BTS & (behind_TS < self.model.sliding_window) if windowed else seen_BTS

            def attention(y_BTD: np.ndarray, *, block=block, number=number, own_BTS=own_BTS) -> np.ndarray:
                return self.attention(block["attention"], y_BTD, own_BTS, number)

            def mlp(y_BTD: np.ndarray, *, block=block) -> np.ndarray:
                return self.mlp(block["mlp"], y_BTD)

            for part, run in ("attention", attention), ("mlp", mlp):
                norm = block[f"{part}_norm"]
                y_BTD = run(self.norm(norm, x_BTD) if order in ("pre", "sandwich") else x_BTD)
                if order in ("sandwich", "reordered"):
                    y_BTD = self.norm(block[f"{part}_output_norm"] if order == "sandwich" else norm, y_BTD)
                x_BTD = x_BTD + self.dropped(y_BTD, number, ATTENTION_OUTPUT if part == "attention" else MLP_OUTPUT)
                x_BTD = self.norm(norm, x_BTD) if order == "post" else x_BTD
        return x_BTD

    def rotated(self, x_BTHK: np.ndarray, layer: int) -> np.ndarray:
        """By complex numbers, as the paper writes them."""
        half = (self.model.rotary_size or x_BTHK.shape[-1]) // 2
        frequency_P, scale = frequencies(self.model, half)
        if self.model.windowed[layer] and self.model.window_rope_theta:
            frequency_P, scale = self.model.window_rope_theta ** (-np.arange(half) / half), 1.0
        turn_BTP = scale * np.exp(1j * self.position_BT[..., None] * frequency_P)
        turned = (x_BTHK[..., :half] + 1j * x_BTHK[..., half : 2 * half]) * turn_BTP[:, :, None]
        return np.concatenate([turned.real, turned.imag, x_BTHK[..., 2 * half :]], axis=-1)

    def placed(
        self, weights: dict, q_BTHK: np.ndarray, k_BSHK: np.ndarray, layer: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Queries and keys that know their positions."""
        if self.model.query_key_norm_over == "width":
            q_BTHK, k_BSHK = (
                self.norm(
                    {"scale": weights[name]["scale"].ravel()}, x.reshape(*x.shape[:2], -1), of_heads=True
                ).reshape(x.shape)
                for name, x in (("query_norm", q_BTHK), ("key_norm", k_BSHK))
            )
        elif self.model.query_key_norm:
            q_BTHK = self.norm(weights["query_norm"], q_BTHK, of_heads=True)
            k_BSHK = self.norm(weights["key_norm"], k_BSHK, of_heads=True)
        if self.model.positions == "rotary":
            return self.rotated(q_BTHK, layer), self.rotated(k_BSHK, layer)
        return q_BTHK, k_BSHK

    def attention(self, weights: dict, x_BTD: np.ndarray, seen_BTS: np.ndarray, layer: int) -> np.ndarray:
        q_BTHK, k_BSHK, v_BSHK = (
            np.einsum("BTD,DHK->BTHK", x_BTD, weights[part]["weight"]) + weights[part].get("bias", 0)
            for part in ("query", "key", "value")
        )
        q_BTHK, k_BSHK = self.placed(weights, q_BTHK, k_BSHK, layer)
        group = self.model.num_heads // self.model.num_kv_heads
        k_BSHK, v_BSHK = (np.repeat(x, group, axis=2) for x in (k_BSHK, v_BSHK))
        scores_BHTS = np.einsum("BTHK,BSHK->BHTS", q_BTHK, k_BSHK) / np.sqrt(
            self.model.query_scalar or q_BTHK.shape[-1]
        )
        scores_BHTS = np.where(seen_BTS[:, None], scores_BHTS, -np.inf)
        sink_H11 = np.reshape(weights.get("sinks", np.full(self.model.num_heads, -np.inf)), (-1, 1, 1))
        exp_BHTS = np.exp(scores_BHTS - scores_BHTS.max(-1, keepdims=True))
        total_BHT1 = exp_BHTS.sum(-1, keepdims=True) + np.exp(sink_H11 - scores_BHTS.max(-1, keepdims=True))
        probability_BHTS = self.dropped(exp_BHTS / total_BHT1, layer, ATTENTION_WEIGHTS)
        y_BTHK = np.einsum("BHTS,BSHK->BTHK", probability_BHTS, v_BSHK)
        if self.model.attention_gate == "sigmoid":
            gate_BTHK = np.einsum("BTD,DHK->BTHK", x_BTD, weights["attention_gate"]["weight"])
            y_BTHK = y_BTHK / (1 + np.exp(-gate_BTHK))
        return np.einsum("BTHK,HKD->BTD", y_BTHK, weights["output"]["weight"]) + weights["output"].get("bias", 0)

    def mlp(self, weights: dict, x_BTD: np.ndarray) -> np.ndarray:
        x_BTF = linear(weights["up"], x_BTD)
        if self.model.activation == "swiglu":
            gate_BTF = linear(weights["gate"], x_BTD)
            x_BTF = x_BTF * gate_BTF / (1 + np.exp(-gate_BTF))
        elif self.model.activation == "swiglu-clamped":
            limit, gate_BTF = self.model.swiglu_limit, linear(weights["gate"], x_BTD)
            gate_BTF = np.where(gate_BTF < limit, gate_BTF, limit)
            x_BTF = (1 + np.clip(x_BTF, -limit, limit)) * gate_BTF / (1 + np.exp(-self.model.swiglu_alpha * gate_BTF))
        elif self.model.activation == "geglu-tanh":
            x_BTF = x_BTF * self.gelu(linear(weights["gate"], x_BTD))
        else:
            x_BTF = self.gelu(x_BTF)
        return linear(weights["down"], x_BTF)


class Decoder(Transformer):
    """GPT-2, and decoders of other words."""

    def logits(self, batch: dict) -> np.ndarray:
        """Of every token, [B, T, V]; `positions` in the batch begin anew with every document."""
        shared, tokens_BT = self.weights["shared"], batch["tokens"]
        index_T = np.arange(tokens_BT.shape[1])
        self.position_BT = batch.get("positions", np.broadcast_to(index_T, tokens_BT.shape))
        behind_TS = index_T[:, None] - index_T[None]
        seen_BTS = (behind_TS >= 0) & (behind_TS <= self.position_BT[..., None])
        x_BTD = shared["table"][tokens_BT] * (self.model.hidden_size**0.5 if self.model.scaled_embedding else 1)
        if self.model.positions == "learned":
            x_BTD = x_BTD + shared["positions"][self.position_BT]
        x_BTD = self.layers(self.dropped(x_BTD, EMBEDDING), seen_BTS)
        table_VD = shared["table" if self.model.tied_embedding else "output"][: self.model.vocab_size]
        return self.norm(shared["final_norm"], x_BTD) @ table_VD.T

    def loss(self, batch: dict) -> float:
        """Mean over the targets that are not ignored."""
        losses_BT = cross_entropy(self.logits(batch), batch["targets"])
        return losses_BT[batch["targets"] != IGNORED].mean()


def frequencies(model: Any, half: int) -> tuple[np.ndarray, float]:
    """Of the pairs of a head, of which pair p turns by theta^(-2p/K) a token, and what scales them."""
    frequency_P, original = model.rope_theta ** (-np.arange(half) / half), model.rope_original_length
    slower_P = frequency_P / model.rope_factor
    if model.rope_scaling == "linear":
        return slower_P, 1.0
    if model.rope_scaling == "llama3":
        length_P = 2 * np.pi / frequency_P
        share_P = (original / length_P - model.rope_low_frequency) / (
            model.rope_high_frequency - model.rope_low_frequency
        )
        between_P = (1 - share_P) * slower_P + share_P * frequency_P
        fast_P = length_P < original / model.rope_high_frequency
        slow_P = length_P > original / model.rope_low_frequency
        return np.where(slow_P, slower_P, np.where(fast_P, frequency_P, between_P)), 1.0
    if model.rope_scaling == "yarn":
        betas = np.array([model.rope_beta_fast, model.rope_beta_slow])
        first, last = 2 * half * np.log(original / (betas * 2 * np.pi)) / (2 * np.log(model.rope_theta))
        first, last = (np.floor(first), np.ceil(last)) if model.rope_truncate else (first, last)
        first, last = max(first, 0), min(last, 2 * half - 1)
        ramp_P = np.clip((np.arange(half) - first) / (0.001 if first == last else last - first), 0, 1)
        scale = model.rope_attention_factor or 1 + np.log(model.rope_factor) / 10
        return slower_P * ramp_P + frequency_P * (1 - ramp_P), scale
    return frequency_P, 1.0


def mapped(function: Callable[[np.ndarray], np.ndarray], weights: dict) -> dict:
    """`function` of every weight."""
    return {k: mapped(function, v) if isinstance(v, dict) else function(v) for k, v in weights.items()}


def linear(weights: dict, x: np.ndarray) -> np.ndarray:
    return x @ weights["weight"] + weights.get("bias", 0)


def cross_entropy(logits: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Of every target, the last dim of the logits being the classes; 0 where it is ignored."""
    highest = logits.max(-1, keepdims=True)
    normalizer = (highest + np.log(np.exp(logits - highest).sum(-1, keepdims=True)))[..., 0]
    picked = np.take_along_axis(logits, np.maximum(targets, 0)[..., None], -1)[..., 0]
    return np.where(targets == IGNORED, 0.0, normalizer - picked)
