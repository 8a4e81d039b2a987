"""Decoders of other words than GPT-2's, split over eight devices, against ones written plainly in numpy from the
weights.

Letters: B batch, T and S tokens, D model, H heads, K head size, F feed-forward, V vocabulary.
"""

import dataclasses

import numpy as np
import pytest
from plain import ATTENTION_WEIGHTS, EMBEDDING, MLP_OUTPUT, Plain, cross_entropy, place, random_weights
from tiny import tiny_config, tiny_program

from megajax.batch import IGNORED
from megajax.config import Config
from megajax.program.synthetic import random_batch
from megajax.program.train_step import loss_and_gradients

STEP = 3
QUICKLY = {"xla_backend_optimization_level": 0}  # compile with little optimisation of the machine code


class NumpyDecoder(Plain):
    """A decoder by the words of its configuration, all of them."""

    def __init__(self, config: Config, weights: dict, rate: float, step: int):
        super().__init__(config, weights, rate, step)
        self.model = config.model

    def activation(self, x_BTF: np.ndarray) -> np.ndarray:
        assert self.model.activation == "gelu-tanh"
        return x_BTF / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x_BTF + 0.044715 * x_BTF**3)))

    def norm(self, weights: dict, x: np.ndarray, *, of_heads: bool = False) -> np.ndarray:
        centered = x if of_heads or self.model.norm == "rmsnorm" else x - x.mean(-1, keepdims=True)
        square = np.mean(centered**2, axis=-1, keepdims=True)
        return centered / np.sqrt(square + self.model.norm_epsilon) * weights["scale"] + weights.get("bias", 0)

    def rotated(self, x_BTHK: np.ndarray, position_BT: np.ndarray) -> np.ndarray:
        """By complex numbers, as the paper writes them: pair p turns by theta^(-2p/K) a token."""
        half, model = x_BTHK.shape[-1] // 2, self.model
        frequency_P = model.rope_theta ** (-np.arange(half) / half)
        if model.rope_scaling == "linear":
            frequency_P /= model.rope_factor
        if model.rope_scaling == "llama3":
            length_P, original = 2 * np.pi / frequency_P, model.rope_original_length
            share_P = (original / length_P - model.rope_low_frequency) / (
                model.rope_high_frequency - model.rope_low_frequency
            )
            between_P = (1 - share_P) * frequency_P / model.rope_factor + share_P * frequency_P
            frequency_P = np.where(
                length_P > original / model.rope_low_frequency,
                frequency_P / model.rope_factor,
                np.where(length_P < original / model.rope_high_frequency, frequency_P, between_P),
            )
        turn_BTP = np.exp(1j * position_BT[..., None] * frequency_P)
        turned = (x_BTHK[..., :half] + 1j * x_BTHK[..., half:]) * turn_BTP[:, :, None]
        return np.concatenate([turned.real, turned.imag], axis=-1)

    def attention(self, weights: dict, x_BTD: np.ndarray, place: tuple, layer: int) -> np.ndarray:
        seen_BTS, position_BT = place
        q_BTHK, k_BSHK, v_BSHK = (
            np.einsum("BTD,DHK->BTHK", x_BTD, weights[part]["weight"]) + weights[part].get("bias", 0)
            for part in ("query", "key", "value")
        )
        if self.model.query_key_norm:
            q_BTHK = self.norm(weights["query_norm"], q_BTHK, of_heads=True)
            k_BSHK = self.norm(weights["key_norm"], k_BSHK, of_heads=True)
        if self.model.positions == "rotary":
            q_BTHK, k_BSHK = self.rotated(q_BTHK, position_BT), self.rotated(k_BSHK, position_BT)
        group = self.model.num_heads // self.model.num_kv_heads
        k_BSHK, v_BSHK = (np.repeat(x, group, axis=2) for x in (k_BSHK, v_BSHK))
        scores_BHTS = np.einsum("BTHK,BSHK->BHTS", q_BTHK, k_BSHK) / np.sqrt(q_BTHK.shape[-1])
        scores_BHTS = np.where(seen_BTS[:, None], scores_BHTS, -np.inf)
        exp_BHTS = np.exp(scores_BHTS - scores_BHTS.max(-1, keepdims=True))
        probability_BHTS = self.dropped(exp_BHTS / exp_BHTS.sum(-1, keepdims=True), layer, ATTENTION_WEIGHTS)
        y_BTHK = np.einsum("BHTS,BSHK->BTHK", probability_BHTS, v_BSHK)
        y_BTD = np.einsum("BTHK,HKD->BTD", y_BTHK, weights["output"]["weight"]) + weights["output"].get("bias", 0)
        return self.dropped(y_BTD, layer, 1)

    def mlp(self, weights: dict, x_BTD: np.ndarray, layer: int) -> np.ndarray:
        up_BTF = x_BTD @ weights["up"]["weight"] + weights["up"].get("bias", 0)
        if self.model.activation == "swiglu":
            gate_BTF = x_BTD @ weights["gate"]["weight"] + weights["gate"].get("bias", 0)
            up_BTF = up_BTF * gate_BTF / (1 + np.exp(-gate_BTF))
        else:
            up_BTF = self.activation(up_BTF)
        down_BTD = up_BTF @ weights["down"]["weight"] + weights["down"].get("bias", 0)
        return self.dropped(down_BTD, layer, MLP_OUTPUT)

    def loss(self, batch: dict) -> float:
        """Mean over the targets that are not ignored."""
        shared, tokens_BT = self.weights["shared"], batch["tokens"]
        index_T = np.arange(tokens_BT.shape[1])
        position_BT = batch.get("positions", np.broadcast_to(index_T, tokens_BT.shape))
        behind_TS = index_T[:, None] - index_T[None]
        seen_BTS = (behind_TS >= 0) & (behind_TS <= position_BT[..., None])
        if self.model.sliding_window:
            seen_BTS &= behind_TS < self.model.sliding_window
        x_BTD = shared["table"][tokens_BT]
        if self.model.positions == "learned":
            x_BTD = x_BTD + shared["positions"][position_BT]
        x_BTD = self.dropped(x_BTD, EMBEDDING)
        for layer in range(self.model.num_layers):
            block = self.block(layer)
            normal_BTD = self.norm(block["attention_norm"], x_BTD)
            x_BTD = x_BTD + self.attention(block["attention"], normal_BTD, (seen_BTS, position_BT), layer)
            x_BTD = x_BTD + self.mlp(block["mlp"], self.norm(block["mlp_norm"], x_BTD), layer)
        table_VD = shared["table" if self.model.tied_embedding else "output"][: self.model.vocab_size]
        losses_BT = cross_entropy(self.norm(shared["final_norm"], x_BTD) @ table_VD.T, batch["targets"])
        return losses_BT[batch["targets"] != IGNORED].mean()


LLAMA = {"norm": "rmsnorm", "positions": "rotary", "activation": "swiglu", "bias": "none"}
WORDS = {
    "llama 3.1": LLAMA
    | {"num_kv_heads": 4, "head_size": 6, "mlp_size": 40, "tied_embedding": False, "rope_scaling": "llama3"}
    | {"rope_factor": 8.0, "rope_original_length": 64, "rope_theta": 50.0},
    "qwen 3 with a window": LLAMA
    | {"num_kv_heads": 2, "head_size": 10, "query_key_norm": True, "norm_epsilon": 0.1, "sliding_window": 4},
    "qwen 2 of one head of keys": LLAMA
    | {"num_kv_heads": 1, "head_size": 4, "bias": "query-key-value", "rope_scaling": "linear", "rope_factor": 3.0},
    "gpt-2 without biases": {"bias": "none", "num_kv_heads": 4, "norm": "layernorm", "sliding_window": 5},
    "layernorm with swiglu": {"activation": "swiglu", "positions": "rotary", "head_size": 4, "query_key_norm": True},
}
DEFAULT = ("llama 3.1", "qwen 3 with a window")


@pytest.mark.parametrize(
    "name", [name if name in DEFAULT else pytest.param(name, marks=pytest.mark.full) for name in WORDS]
)
@pytest.mark.parametrize("documents", [True, pytest.param(False, marks=pytest.mark.full)])
def test_training_loss_is_numpy_s(name: str, documents: bool) -> None:
    """Dropout at its four sites included, on four devices of a tensor group, twice as many as the second model has
    heads of keys."""
    size = {"num_layers": 2, "sequence_length": 12, "global_batch": 4, "microbatch": 2, "dropout": 0.2}
    config = tiny_config((2, 1, 4), reset_attention=documents, **size, **WORDS[name])
    config = dataclasses.replace(config, seed=5)
    program = tiny_program(config)
    batch, weights = random_batch(config, STEP), random_weights(program)
    arguments = place(program, weights), program.put_batch(batch, program.local_rows), np.int32(STEP)
    loss = loss_and_gradients(program).lower(*arguments).compile(QUICKLY)(*arguments)[0]
    assert float(loss) == pytest.approx(NumpyDecoder(config, weights, 0.2, STEP).loss(batch), rel=1e-5)
    others = {"rope_theta": 2.0} if config.model.rotary else {"sliding_window": 3}
    other = dataclasses.replace(config, model=dataclasses.replace(config.model, **others))
    assert abs(NumpyDecoder(other, weights, 0.2, STEP).loss(batch) / float(loss) - 1) > 1e-4
