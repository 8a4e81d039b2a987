"""The experts of a decoder in the Hugging Face format, in which every product of every expert is a tensor of its own on
disk. In memory transformers 5 fuses them, and `save_pretrained` can write that too."""

from dataclasses import dataclass, replace
from typing import Any

from megajax.convert.parts import Lacks, OptionGroup
from megajax.convert.settings import Fields
from megajax.convert.weights import Spelling, TensorPlace, linear, spelling
from megajax.core.models.config import ModelConfig


@dataclass(frozen=True)
class ExpertFields:
    """How a class stores experts."""

    number: str  # field with their number
    number_too: str  # another name that transformers accepts for it; empty: none
    size: str  # field with an expert's width
    module: str  # a layer's module with the router and the experts
    products: tuple[str, str, str]  # gate, up and down
    renormalized: bool = False  # whether shares always sum to 1; otherwise a field says so
    renormalizes: bool = False  # and what that means if it is missing
    shared: str = ""  # field with the width of a shared expert that has a gate; empty: there is none
    shared_module: str = "shared_expert"  # in `module`
    fixed: tuple[tuple[str, Any], ...] = ()  # other fields that have one value
    quantized: str = ""  # as in `Exchange`
    no_mlps: tuple[str, ...] = ()  # fields that list layers with an MLP; must be empty or null

    def parts(self) -> tuple[OptionGroup, ...]:
        """What config.json says about experts."""
        balance = OptionGroup(("balance",), lambda _: {}, lambda _: {"output_router_logits": False}, _lacks_balance)
        return self.sizes(), balance

    def sizes(self) -> OptionGroup:
        """Numbers and sizes of experts."""
        sizes = ("num_experts", "experts_per_token", "mlp_size", "expert_size")
        options = (*sizes, *["shared_expert_size"] * bool(self.shared))
        return OptionGroup(options, self._read, self._write, self._lacks)

    def _read(self, fields: Fields) -> dict[str, Any]:
        for name in self.no_mlps:
            fields.check(name, [], None)
        experts = fields.value(self.number, "num_experts")
        chosen = fields.value("num_experts_per_tok", "experts_per_token")
        if chosen > experts:
            raise fields.refusal("num_experts_per_tok", chosen, f"1 to {experts}, {self.number}")
        size = fields.value(self.size, "expert_size")
        inner = fields.value("intermediate_size", "mlp_size", size)
        found = {"num_experts": experts, "experts_per_token": chosen, "mlp_size": inner, "expert_size": size}
        found |= {"shared_expert_size": fields.value(self.shared, "shared_expert_size")} if self.shared else {}
        return found

    def _write(self, model: ModelConfig) -> dict[str, Any]:
        numbers = {self.number: model.num_experts, "num_experts_per_tok": model.experts_per_token}
        sizes = {"intermediate_size": model.mlp_size} | {self.size: model.expert_size}
        sizes |= {self.shared: model.shared_expert_size} if self.shared else {}
        return numbers | sizes | {name: [] for name in self.no_mlps}

    def _lacks(self, model: ModelConfig) -> Lacks:
        lacking: Lacks = {} if model.num_experts else {"num_experts": 8}
        return lacking | ({"shared_expert_size": 8} if self.shared and not model.shared_expert_size else {})

    def _names(self, layer: str) -> tuple[str, str, str]:
        gate, up, down = (f"{layer}{self.module}.experts.{{expert}}.{name}.weight" for name in self.products)
        return gate, up, down

    def fused(self, layer: str) -> dict[str, tuple[str, ...]]:
        """What transformers 5 has in memory, as in `TensorPlaces`; `layer` is the prefix of a layer's names."""
        gate, up, down = self._names(layer)
        return {f"{layer}mlp.experts.gate_up_proj": (gate, up), f"{layer}mlp.experts.down_proj": (down,)}

    @property
    def spelling(self) -> Spelling:
        """In memory the router is in `mlp` in all classes."""
        return spelling((f".{self.module}.gate.", ".mlp.gate."))

    def places(self, layer: str) -> dict[str, TensorPlace]:
        """The places of a layer's weights; `layer` as in `fused`."""
        (gate, up, down), shared = self._names(layer), f"{layer}{self.module}.{self.shared_module}"
        return {
            "mlp/router/weight": TensorPlace(f"{layer}{self.module}.gate.weight", "ED", turned=True),
            "mlp/router/bias": TensorPlace(f"{layer}{self.module}.gate.e_score_correction_bias", "E"),
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

    def fused(self, layer: str) -> dict[str, tuple[str, ...]]:
        return {}

    def places(self, layer: str) -> dict[str, TensorPlace]:
        router, experts = f"{layer}{self.module}.router.", f"{layer}{self.module}.experts."
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


def _lacks_balance(model: ModelConfig) -> Lacks:
    return {"balance": "none"} if model.biases_routers else {}


_PRODUCTS = ("gate_proj", "up_proj", "down_proj")
MIXTRAL = ExpertFields(
    "num_local_experts",
    "num_experts",
    "intermediate_size",
    "block_sparse_moe",
    ("w1", "w3", "w2"),
    renormalized=True,
    fixed=(("router_jitter_noise", 0.0),),
)
QWEN3_MOE = ExpertFields(
    "num_experts",
    "num_local_experts",
    "moe_intermediate_size",
    "mlp",
    _PRODUCTS,
    fixed=(("decoder_sparse_step", 1),),
    no_mlps=("mlp_only_layers",),
)
QWEN3_NEXT = replace(QWEN3_MOE, number_too="", renormalizes=True, shared="shared_expert_intermediate_size")
QWEN3_5_MOE = replace(QWEN3_NEXT, renormalized=True, fixed=(), no_mlps=())
OLMOE = ExpertFields(
    "num_experts", "num_local_experts", "intermediate_size", "mlp", _PRODUCTS, fixed=(("clip_qkv", None),)
)
GPT_OSS = JoinedExpertFields(
    "num_local_experts",
    "num_experts",
    "intermediate_size",
    "mlp",
    ("gate_up_proj", "gate_up_proj", "down_proj"),
    renormalized=True,
    quantized="mxfp4",
)
DEEPSEEK = ExpertFields(
    "n_routed_experts", "num_experts", "moe_intermediate_size", "mlp", _PRODUCTS, shared_module="shared_experts"
)
KIMI = replace(DEEPSEEK, number="num_local_experts", module="block_sparse_moe", products=MIXTRAL.products)
