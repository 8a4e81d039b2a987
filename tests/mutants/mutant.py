"""What a mutant is, and the small configurations that mutants are tried on. Plain data: `megajax` is not imported here,
because a mutant has to be planted before it is."""

from dataclasses import dataclass, field
from typing import Any, Literal

Way = Literal["types", "numbers", "communication"]


@dataclass(frozen=True)
class Place:
    """Where the first wrong number of a step is.

    Attributes:
        site: of `parallel/sites.py`; the name of a weight where only its gradient is wrong; "weights" where only the
            update is; "communication" where no number is.
        layer: global index, -1 in the head; None of what belongs to none.
        backward: the gradient there, not the activation.
        axis: the mesh axis, or one of those, that has to have more than one device for it.
        or_else: other sites that are as right, because it first goes wrong at several at once.
    """

    site: str
    layer: int | None = None
    backward: bool = False
    axis: str = ""
    or_else: tuple[str, ...] = ()


def forward(layer: int, site: str, axis: str, *or_else: str) -> Place:
    """An activation."""
    return Place(site, layer, False, axis, or_else)


def backward(layer: int, site: str, axis: str, *or_else: str) -> Place:
    """The gradient of an activation."""
    return Place(site, layer, True, axis, or_else)


def gradient(weight: str, axis: str, *or_else: str, layer: int | None = None) -> Place:
    """The gradient of a weight, all activations and their gradients being right; a part of the weight's name."""
    return Place(weight, layer, True, axis, or_else)


def update(axis: str) -> Place:
    """The norm of all gradients, or the new weights, all gradients being right."""
    return Place("weights", None, False, axis)


@dataclass(frozen=True)
class Mutant:
    """A fault in the parallel code that one text of `megajax/` becomes.

    Attributes:
        name: in words.
        old, new: the text, which stands exactly once in `megajax/`, and what takes its place.
        on: options of `tiny_config` (`SMALL`), its mesh with them, on which the fault shows.
        way: how it is caught: "types", any refusal while the step is traced (types of `shard_map`, shapes, the
            schedule's check); "numbers"; or "communication" alone.
        place: where its first wrong number is, written down before any was tried; None where tracing refuses it.
    """

    name: str
    old: str
    new: str
    on: dict[str, Any]
    way: Way
    place: Place | None = None
    more: dict[str, Any] = field(default_factory=dict)

    @property
    def options(self) -> dict[str, Any]:
        """Of the configuration."""
        return self.on | self.more


# Beside what `trial.small_config` sets: the first update is of full size, and all gradients are clipped.
SMALL = {
    **{"precision": "fp64", "num_layers": 2, "hidden_size": 16, "num_heads": 4, "sequence_length": 8},
    **{"vocab_size": 21, "vocab_multiple": 8, "global_batch": 4, "microbatch": 1},
}

ON_TENSOR = {"mesh": (1, 1, 2)}
ON_SEQUENCE = {"mesh": (1, 1, 2), "sequence_parallel": True}
ON_DATA = {"mesh": (2, 1, 1)}
ON_PIPE = {"mesh": (1, 2, 1)}
ON_VOCABULARY = {"mesh": (1, 2, 1), "vocabulary": "split"}
ON_PADDED = {"mesh": (1, 2, 1), "num_layers": 3}
ON_RING = {"mesh": (1, 2, 1), "schedule": "interleaved", "chunks": 2, "num_layers": 4}
ON_DEFERRED = {"mesh": (1, 2, 1), "weight_gradients": "deferred", "num_layers": 4}
OF_BERT = {"family": "bert"}
OF_SPANS = {"family": "bert", "head": "span"}
OF_DOCUMENTS = {"reset_attention": True}
OF_FEW_KEYS = {
    **{"norm": "rmsnorm", "positions": "rotary", "activation": "swiglu", "bias": "none", "query_key_norm": True},
    **{"head_size": 4, "num_kv_heads": 2, "mlp_size": 24, "sliding_window": 5},
}
