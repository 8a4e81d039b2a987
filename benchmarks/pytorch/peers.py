"""Which model in PyTorch is the same function as a configuration's, by its words. No torch here."""

import importlib
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megajax.core.errors import UserError
from megajax.core.models.config import ModelConfig


@dataclass(frozen=True)
class Peer:
    """A model in PyTorch.

    Attributes:
        module: that has it.
        name: its class there.
        packages: what it needs.
        splits: it can be split over processes and recompute its layers.
        values: the values that it knows of options of `ModelConfig`, by name; of others all.
    """

    module: str
    name: str
    packages: tuple[str, ...] = ("torch", "transformers")
    splits: bool = False
    values: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)

    @property
    def installed(self) -> bool:
        return all(map(importlib.util.find_spec, self.packages))

    def load(self) -> Any:
        """The class."""
        return getattr(importlib.import_module(self.module), self.name)


BERT = Peer("pytorch.hugging_face", "HuggingFace")
GPT = Peer(
    "pytorch.gpt",
    "GPT",
    packages=("torch",),
    splits=True,
    values={
        "norm": ("layernorm",),
        "norm_epsilon": (1e-5,),
        "activation": ("gelu-tanh",),
        "bias": ("all",),
        "query_key_norm": (False,),
        "tied_embedding": (True,),
        "sliding_window": (0,),
    },
)
LLAMA = Peer(
    BERT.module,
    BERT.name,
    values={
        "norm": ("rmsnorm",),
        "activation": ("swiglu",),
        "bias": ("none", "query-key-value"),
        "num_experts": (0,),
    },
)


def peer_of(model: ModelConfig) -> Peer:
    """The peer of a model. Raises `UserError` where there is none."""
    if model.family == "bert":
        return BERT
    peer = LLAMA if model.rotary else GPT
    values = dict(peer.values)
    if peer is GPT:
        values["num_kv_heads"] = (model.num_heads,)
    elif model.query_key_norm:
        values["bias"] = ("none",)  # as Qwen3, which has this norm
    for name, known in values.items():
        value = getattr(model, name)
        if value not in known:
            raise UserError(
                f"the PyTorch baseline has no --model.{name.replace('_', '-')} {_written(value)} "
                f"with --model.positions {model.positions}; valid: {', '.join(map(_written, known))}"
            )
    return peer


def _written(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
