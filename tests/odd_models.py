"""Odd but valid configurations of the decoders of transformers that we import, drawn by a number: sizes that no
published model has, every kind of positions and windows, and what else each class can be; and a mesh that fits."""

import math
import random
from typing import Any

from hugging_face import DECODERS, DEEPSEEKS, HYBRIDS, MIXTURES, QWEN_HYBRIDS, SETTINGS

Fields = dict[str, Any]
MIXED = (*MIXTURES, *(kind for kind in QWEN_HYBRIDS if "num_experts" in SETTINGS[kind]))
ODD_KINDS = ("gpt2", *DECODERS, *MIXTURES, *DEEPSEEKS, *HYBRIDS)
SQUARE = ("llama", "gemma3_text", "olmo3", "olmoe", "olmo_hybrid")  # whose heads must divide the width
FILLED = ("olmo3", "olmoe", "olmo_hybrid")  # and whose heads must add up to it
LATENT = (*DEEPSEEKS, "kimi_linear")
BY_LAYER = ("gemma3_text", "olmo3")  # rotary positions
SWITCHED = ("qwen2", "qwen3", "qwen3_moe")  # whose windows have a switch
FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"


def odd_model(kind: str, number: int) -> tuple[Fields, dict[str, int]]:
    """Fields of a config.json of this `model_type`, and sizes of a mesh; always the same ones for a number."""
    return _Model(kind, random.Random(f"{kind} {number}")).drawn()


def divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]


class _Model:
    def __init__(self, kind: str, draws: random.Random):
        self.kind, self.draws, self.of = kind, draws, draws.randint
        self.pipe, self.tensor = draws.choice([1, 1, 2]), draws.choice([1, 1, 2, 3])
        self.expert = draws.choice([1, 2]) if kind in (*MIXED, *LATENT) and self.tensor < 3 else 1
        self.heads, self.layers = self.tensor * self.of(1, 4), self.of(self.pipe, 4)

    def drawn(self) -> tuple[Fields, dict[str, int]]:
        if self.kind == "gpt2":
            fields = self._gpt2()
        else:
            fields = self._sizes() | (self._deepseek() if self.kind in LATENT else self._decoder())
            if self.kind in MIXED:
                fields |= self._mixture()
            if self.kind in HYBRIDS:
                fields |= self._linear()
            if self.kind != "kimi_linear":
                fields["rope_parameters"] = self._positions(fields["max_position_embeddings"])
        return fields, {"pipe": self.pipe, "tensor": self.tensor, "expert": self.expert}

    def _likely(self, probability: float = 0.5) -> bool:
        return self.draws.random() < probability

    def _power(self, low: float, high: float) -> float:
        """A number between two powers of ten, with three digits."""
        return float(f"{10 ** self.draws.uniform(low, high):.2e}")

    def _of_keys(self, heads: int) -> int:
        """Heads of keys for these, of which a tensor group can have equal parts."""
        return self.draws.choice([n for n in divisors(heads) if n % self.tensor == 0 or self.tensor % n == 0])

    def _square(self) -> int:
        """A width that the heads divide, in even parts."""
        return self.heads * 2 * self.of(math.ceil(8 / self.heads), 5 + 8 // self.heads)

    def _gpt2(self) -> Fields:
        return {
            "vocab_size": self.of(11, 130),
            "n_positions": self.of(6, 40),
            "n_embd": self._square(),
            "n_layer": self.layers,
            "n_head": self.heads,
            "n_inner": self.draws.choice([None, self.tensor * self.of(5, 40)]),
            "activation_function": self.draws.choice(["gelu", "gelu_new"]),
            "layer_norm_epsilon": self._power(-7, -1),
            "tie_word_embeddings": self._likely(),
        }

    def _sizes(self) -> Fields:
        return {
            "vocab_size": self.of(11, 130),
            "max_position_embeddings": self.of(6, 40),
            "hidden_size": self._square() if self.kind in (*SQUARE, *LATENT) else self.of(16, 60),
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.heads if self.kind in LATENT else self._of_keys(self.heads),
            "intermediate_size": self.tensor * self.of(5, 30),
            "rms_norm_eps": self._power(-7, -2),
            "tie_word_embeddings": self._likely() and self.kind != "kimi_linear",
            "bos_token_id": None,
            "eos_token_id": None,
        }

    def _decoder(self) -> Fields:
        follows = self.kind in FILLED or (self.kind == "llama" and self._likely())  # the size of heads, from the width
        found: Fields = {} if follows else {"head_dim": 2 * self.of(2, 9)}
        if self.kind == "llama":
            found |= dict.fromkeys(("attention_bias", "mlp_bias"), self._likely())
        if self.kind == "gemma3_text":
            found["query_pre_attn_scalar"] = self.of(1, 40)
        if self.kind in QWEN_HYBRIDS:
            found["partial_rotary_factor"] = min(1.0, self.of(1, found["head_dim"] // 2) * 2.01 / found["head_dim"])
        return found | self._window()

    def _window(self) -> Fields:
        """A window of all layers, none, or some; it may be longer than the sequence."""
        size = self.draws.choice([self.of(2, 12), self.of(13, 99)])
        listed = {"layer_types": [self.draws.choice((FULL, SLIDING)) for _ in range(self.layers)]}
        if self.kind in ("mistral", "mixtral"):
            return {"sliding_window": self.draws.choice([None, size, size])}
        if self.kind in SWITCHED:
            found: Fields = {"use_sliding_window": self._likely(0.7), "sliding_window": size}
            found["max_window_layers"] = 0 if self.kind == "qwen3_moe" else self.of(0, self.layers + 1)
            lists = found["use_sliding_window"] and self.kind != "qwen3_moe" and self._likely()
            return found | (listed if lists else {})
        if self.kind == "gemma3_text" and self._likely(0.3):
            return {"sliding_window": size, "sliding_window_pattern": self.of(1, self.layers + 1)}
        if self.kind in (*BY_LAYER, "gpt_oss"):
            return {"sliding_window": size} | (listed if self._likely(0.7) else {})
        return {}

    def _linear(self) -> Fields:
        """Of linear attention: its sizes, and the layers that have it, in at least one period for each stage."""
        heads, period = self.tensor * self.of(1, 3), [LINEAR] * self.of(1, 2) + [FULL] * self.of(1, 2)
        types = (period * 2)[: self.of(len(period) * self.pipe, 2 * len(period))]
        return {
            **{"num_hidden_layers": len(types), "layer_types": types, "linear_conv_kernel_dim": self.of(1, 5)},
            **(self._kimi(heads, types) if self.kind == "kimi_linear" else self._olmo(heads)),
        }

    def _kimi(self, heads: int, types: list[str]) -> Fields:
        dense = self.of(0, types.index(FULL))
        mlps = ["dense"] * dense + ["sparse"] * (len(types) - dense)
        return {"linear_num_heads": heads, "linear_head_dim": self.of(2, 9), "mlp_layer_types": mlps}

    def _olmo(self, heads: int) -> Fields:
        sizes = {f"linear_{name}_head_dim": self.of(2, 9) for name in ("key", "value")}
        sizes |= {"linear_num_value_heads": heads, "linear_num_key_heads": self._of_keys(heads)}
        return sizes | {"linear_allow_neg_eigval": self._likely()}

    def _chosen(self, field: str) -> Fields:
        """Numbers of experts, and of those that a token gets."""
        experts = self.expert * self.of(2 if self.kind in ("deepseek_v3", "kimi_linear") else 1, 6)
        return {field: experts, "num_experts_per_tok": self.of(1, experts if self._likely(0.2) else (experts + 1) // 2)}

    def _mixture(self) -> Fields:
        found = self._chosen("num_local_experts" if self.kind in ("mixtral", "gpt_oss") else "num_experts")
        if self.kind in ("qwen3_moe", "olmoe", "qwen3_next"):
            found["norm_topk_prob"] = self._likely()
        if self.kind in ("qwen3_moe", *QWEN_HYBRIDS):
            found["moe_intermediate_size"] = self.tensor * self.of(3, 20)
        if self.kind in QWEN_HYBRIDS:
            found["shared_expert_intermediate_size"] = self.tensor * self.of(3, 9)
        if self.kind == "gpt_oss":
            found |= {"swiglu_alpha": self._power(-1, 0.7), "swiglu_limit": self._power(-1, 1)}
        return found

    def _deepseek(self) -> Fields:
        number = "num_local_experts" if self.kind == "kimi_linear" else "n_routed_experts"
        found = self._chosen(number)
        experts = found[number]
        groups = self.draws.choice(divisors(experts))
        if self.kind != "deepseek_v2":
            groups = groups if experts >= 2 * groups else 1  # the best two of a group rank it
            found |= {"norm_topk_prob": self._likely()} | (
                {"num_nextn_predict_layers": 0} if self.kind == "deepseek_v3" else {}
            )
        else:
            found["topk_method"] = self.draws.choice(["greedy", "group_limited_greedy"])
        # Transformers rotates pairs of DeepSeek-V2's features as complex numbers, which need even places in memory.
        even = 2 if self.kind == "deepseek_v2" else 1
        return found | {
            "n_group": groups,
            "topk_group": self.of(math.ceil(found["num_experts_per_tok"] * groups / experts), groups),
            "routed_scaling_factor": self._power(-0.5, 0.7),
            "first_k_dense_replace": self.of(0, self.layers - self.pipe),
            "n_shared_experts": self.of(1, 3),
            "moe_intermediate_size": self.tensor * self.of(3, 15),
            "q_lora_rank": None if self.kind == "kimi_linear" else self.draws.choice([None, self.of(6, 30)]),
            "kv_lora_rank": even * self.of(3, 15),
            "qk_nope_head_dim": even * self.of(1, 9),
            "qk_rope_head_dim": 2 * self.of(1, 6),
            "v_head_dim": self.of(1, 20),
        }

    def _positions(self, length: int) -> Fields:
        full: Fields = {"rope_theta": None} if self.kind == "olmo_hybrid" and self._likely() else self._rope(length)
        if self.kind not in BY_LAYER:
            return full
        return {
            FULL: full,
            SLIDING: self.draws.choice([full, {"rope_type": "default", "rope_theta": self._power(1, 5)}]),
        }

    def _rope(self, length: int) -> Fields:
        kind = self.draws.choice(["default", "linear", "llama3", "yarn", "yarn"])
        found: Fields = {"rope_type": kind, "rope_theta": self._power(1, 5)}
        if kind == "default":
            return found
        found["factor"] = self._power(0.1, 1)
        if kind == "linear":
            return found
        found["original_max_position_embeddings"] = self.of(4, length)
        if kind == "llama3":
            low = self._power(-1, 0.5)
            return found | {"low_freq_factor": low, "high_freq_factor": low + self._power(-1, 1)}
        slow = self._power(-1, 0.3)
        more: Fields = {"attention_factor": self._power(-0.5, 0.5)}
        more |= {} if self.kind in BY_LAYER else {"truncate": self._likely()}  # which transformers ignores by layer
        more |= {name: self._power(-0.5, 0.5) for name in ("mscale", "mscale_all_dim")}
        more |= {"beta_fast": max(slow, 1.0) + self._power(-1, 1.3), "beta_slow": slow}
        return found | {name: value for name, value in more.items() if self._likely()}
