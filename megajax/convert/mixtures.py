"""The experts of a decoder in the Hugging Face format, in which every product of every expert is a tensor of its own on
disk. In memory transformers 5 fuses them, and `save_pretrained` can write that too."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from megajax.convert.parts import Lacks, OptionGroup
from megajax.convert.settings import Fields
from megajax.convert.weights import TensorPlace, linear, spelling
from megajax.core.models.config import ModelConfig

LAYER = "model.layers.{layer}."  # before the names of a layer's tensors


@dataclass(frozen=True)
class ExpertFields:
    """How a class stores experts; the defaults are those of most."""

    number: str = "num_experts"  # field with their number
    number_too: str = "num_local_experts"  # another name that transformers accepts for it; empty: none
    size: str = "moe_intermediate_size"  # field with an expert's width
    module: str = "mlp"  # a layer's module with the router and the experts
    products: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")  # gate, up and down
    renormalized: bool = False  # whether shares always sum to 1; otherwise a field says so
    renormalizes: bool = False  # and what that means if it is missing
    shared: str = ""  # field with the width of a shared expert that has a gate; empty: there is none
    shared_module: str = "shared_expert"  # in `module`
    fixed: Mapping[str, Any] = field(default_factory=dict)  # other fields that have one value
    no_mlps: tuple[str, ...] = ()  # fields that list layers with an MLP; must be empty or null
    biased: bool = False  # whether scores are sigmoids, with biases for choosing

    @property
    def _named(self) -> dict[str, str]:
        """Fields by the options that have the same values."""
        named = {"num_experts": self.number, "experts_per_token": "num_experts_per_tok", "expert_size": self.size}
        return named | ({"shared_expert_size": self.shared} if self.shared else {})

    @property
    def scores(self) -> str:
        """The value of `model.router_scores`."""
        return "sigmoid" if self.biased else "softmax"

    def options(self) -> OptionGroup:
        """Numbers and sizes of experts, and what scores and biases routers have."""
        options = (*self._named, "mlp_size", "router_scores", "balance")
        return OptionGroup(options, self._read, self._write, self._lacks)

    def _read(self, fields: Fields) -> dict[str, Any]:
        for name in self.no_mlps:
            fields.check(name, [], None)
        values = {option: fields.value(name, option) for option, name in self._named.items()}
        experts, chosen = values["num_experts"], values["experts_per_token"]
        if chosen > experts:
            raise fields.refusal("num_experts_per_tok", chosen, f"1 to {experts}, {self.number}")
        values["mlp_size"] = fields.value("intermediate_size", "mlp_size", values["expert_size"])
        return values | {"router_scores": self.scores, "balance": "bias" if self.biased else "none"}

    def _write(self, model: ModelConfig) -> dict[str, Any]:
        values = {name: getattr(model, option) for option, name in self._named.items()}
        values |= {name: [] for name in self.no_mlps}
        return {"intermediate_size": model.mlp_size, "output_router_logits": False} | values

    def _lacks(self, model: ModelConfig) -> Lacks:
        lacking: Lacks = {} if model.num_experts else {"num_experts": 8}
        lacking |= {"shared_expert_size": 8} if self.shared and not model.shared_expert_size else {}
        lacking |= {"router_scores": self.scores} if model.router_scores != self.scores else {}
        return lacking | ({"balance": "bias" if self.biased else "none"} if model.biases_routers != self.biased else {})

    def _names(self) -> tuple[str, str, str]:
        gate, up, down = (f"{LAYER}{self.module}.experts.{{expert}}.{name}.weight" for name in self.products)
        return gate, up, down

    def fused(self) -> dict[str, tuple[str, ...]]:
        """What transformers 5 has in memory, as in `TensorPlaces`."""
        gate, up, down = self._names()
        return {f"{LAYER}mlp.experts.gate_up_proj": (gate, up), f"{LAYER}mlp.experts.down_proj": (down,)}

    def of_exchange(self) -> dict[str, Any]:
        """What an `Exchange` says about tensors besides their places."""
        in_memory = spelling((f".{self.module}.gate.", ".mlp.gate."))
        return {"spelling": in_memory, "fused": self.fused()}

    def places(self) -> dict[str, TensorPlace]:
        """The places of a layer's weights."""
        (gate, up, down), shared = self._names(), f"{LAYER}{self.module}.{self.shared_module}"
        return {
            "mlp/router/weight": TensorPlace(f"{LAYER}{self.module}.gate.weight", "ED", turned=True),
            "mlp/router/bias": TensorPlace(f"{LAYER}{self.module}.gate.e_score_correction_bias", "E"),
            "mlp/gate/weight": TensorPlace(gate, "XD", turned=True),
            "mlp/up/weight": TensorPlace(up, "XD", turned=True),
            "mlp/down/weight": TensorPlace(down, "DX", turned=True),
            "mlp/shared_expert_gate": TensorPlace(f"{shared}_gate.weight", "1D", turned=True),
            **linear("mlp/shared/gate", f"{shared}.gate_proj", "SD"),
            **linear("mlp/shared/up", f"{shared}.up_proj", "SD"),
            **linear("mlp/shared/down", f"{shared}.down_proj", "DS"),
        }


class JoinedExpertFields(ExpertFields):
    """Experts in tensors of all of a layer on disk too, in which columns of gate and up take turns, with biases."""

    def fused(self) -> dict[str, tuple[str, ...]]:
        return {}

    def places(self) -> dict[str, TensorPlace]:
        router, experts = f"{LAYER}{self.module}.router.", f"{LAYER}{self.module}.experts."
        gate, up, down = self.products
        places = {
            "mlp/router/weight": TensorPlace(f"{router}weight", "ED", turned=True),
            "mlp/router/logit_bias": TensorPlace(f"{router}bias", "E"),
        }
        products = ("gate", gate, "DY", 0, "11"), ("up", up, "DY", 1, "11"), ("down", down, "XD", 0, "")
        for ours, name, dims, part, parts in products:
            places[f"mlp/{ours}/weight"] = TensorPlace(f"{experts}{name}", f"E{dims}", part, parts)
            places[f"mlp/{ours}/bias"] = TensorPlace(f"{experts}{name}_bias", f"E{dims[1]}", part, parts)
        return places


MIXTRAL = ExpertFields(
    number="num_local_experts",
    number_too="num_experts",
    size="intermediate_size",
    module="block_sparse_moe",
    products=("w1", "w3", "w2"),
    renormalized=True,
    fixed={"router_jitter_noise": 0.0},
)
QWEN3_MOE = ExpertFields(fixed={"decoder_sparse_step": 1}, no_mlps=("mlp_only_layers",))
QWEN3_NEXT = replace(QWEN3_MOE, number_too="", renormalizes=True, shared="shared_expert_intermediate_size")
QWEN3_5_MOE = replace(QWEN3_NEXT, renormalized=True, fixed={}, no_mlps=())
OLMOE = ExpertFields(size="intermediate_size", fixed={"clip_qkv": None})
GPT_OSS = JoinedExpertFields(
    number="num_local_experts",
    number_too="num_experts",
    size="intermediate_size",
    products=("gate_up_proj", "gate_up_proj", "down_proj"),
    renormalized=True,
)
DEEPSEEK = ExpertFields(number="n_routed_experts", number_too="num_experts", shared_module="shared_experts")
BIASED_DEEPSEEK = replace(DEEPSEEK, biased=True)
KIMI = replace(BIASED_DEEPSEEK, number="num_local_experts", module="block_sparse_moe", products=MIXTRAL.products)
