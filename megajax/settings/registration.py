"""`megajax.register`: names for options, without a fork. No JAX until a name is registered that needs it."""

from collections.abc import Callable, MutableMapping
from functools import wraps
from typing import Any, get_args

from megajax.core.config import LOSSES, METRICS
from megajax.core.errors import UserError, brief, told
from megajax.core.models.registry import ACTIVATIONS, ATTENTION_GATES, FAMILIES, GATED, NORMS, SCORES
from megajax.core.optim.config import OPTIMIZERS, SCHEDULES, Shape
from megajax.data.config import DATA_SETS
from megajax.settings.config import TRACKERS

_TABLES: dict[str, MutableMapping[str, Any]] = {
    "activation": ACTIVATIONS,
    "attention-gate": ATTENTION_GATES,
    "data": DATA_SETS,
    "gated-activation": ACTIVATIONS,
    "loss": LOSSES,
    "metric": METRICS,
    "norm": NORMS,
    "optimizer": OPTIMIZERS,
    "schedule": SCHEDULES,
    "scores": SCORES,
    "tracker": TRACKERS,
}
KINDS = (*sorted([*_TABLES, "family", "pipeline"]),)
_VALID = {  # of those whose calls know neither kind nor name
    "activation": "a function of an array",
    "attention-gate": "a function of heads' outputs and of their gates, arrays",
    "gated-activation": "a function of the gate's product and of the other one, arrays",
    "metric": "a function of logits and batch, [B, T]",
    "norm": "a function of the ModelConfig that returns an nnx.Module",
    "schedule": "a function of a share, an array",
    "scores": "a function of scores, queries' and keys' positions, and heads, arrays",
    "tracker": "a function of the run directory that returns a megajax.Tracker",
}
_SAME_SHAPE = ("activation", "attention-gate", "gated-activation")  # as their first argument
_registered: set[tuple[str, str]] = set()


@brief
def register(kind: str, name: str, thing: Callable[..., Any]) -> None:
    """Make `name` a valid value of an option, for presets and flags too, if a module named by `--plugins` does this.

    Args:
        kind: what it is, and so which option and which `thing`:

            - `activation`, `--model.activation`: a function of an array, without a gate.
            - `attention-gate`, `--model.attention-gate`: a function of what attention's heads return, [B, T, H, K], and
              of their gates, a product of the layer's input. It returns the same shape, of every number by itself.
            - `data`, `--data.set`: a function of the configuration that returns a data set, or one for training and one
              for validation: objects with `len` and `[i]`, as for `Model.train`.
            - `family`, `--model.family`: a `megajax.Family`, or the class of a layer (docs/own-model.md).
            - `gated-activation`, `--model.activation`: a function of two products, that with the gate matrix first.
            - `loss`, `--train.loss`: a `Loss`, or a function of logits and batch.
            - `metric`, `--train.metrics`: a function of logits and batch, [B, T], whose mean is reported.
            - `norm`, `--model.norm`: a function of the `ModelConfig` that returns an `nnx.Module`.
            - `optimizer`, `--optimizer.name`: a function of the learning rate's schedule that returns an optax
              transformation, such as `optax.lion`.
            - `pipeline`, `--pipeline.schedule`: a function as in `megajax/core/pipeline/schedule.py`.
            - `scores`, `--model.scores`: a function of attention's scores (products of queries and keys, divided by the
              root of the head size), of the positions of both in the sequence, and of the head: arrays of four dims, of
              which some are 1. It returns what goes into the softmax.
            - `schedule`, `--optimizer.schedule`: a function from the progress of the decay, 0 to 1, to the
              height of the learning rate between its floor, 0, and its peak, 1.
            - `tracker`, `--track`: a function of the run directory that returns a `megajax.Tracker`.
        name: lowercase letters, digits, hyphens.
        thing: see above.
    """
    if kind not in KINDS:
        raise UserError(f"register: kind {kind!r}; valid: {', '.join(KINDS)}")
    if not name or not all(part.isalnum() and part == part.lower() for part in name.split("-")):
        raise UserError(f"register: name {name!r}; valid: lowercase letters, digits, hyphens")
    if not callable(thing) and not hasattr(thing, "function") and not hasattr(thing, "layer"):
        raise UserError(f"register: {kind} {name}: {thing!r:.80}; valid: a function")
    table: MutableMapping[str, Any] | None = _TABLES.get(kind)
    made: Any = _named(kind, name, thing) if kind in _VALID else thing
    if kind == "family":
        from megajax.core.models.own_family import entry_of

        table, made = FAMILIES, entry_of(thing)
    elif table is None:
        from megajax.core.pipeline.schedule import SCHEDULES as TICKS
        from megajax.core.pipeline.schedule import ScheduleKind

        table, made = TICKS, ScheduleKind(thing)
    taken = name in table or (kind == "schedule" and name in get_args(Shape))
    if taken and (kind, name) not in _registered:
        raise UserError(f"register: {kind} {name} is one of megajax's own; valid: another name")
    if kind == "gated-activation" and not taken:
        GATED.append(name)
    _registered.add((kind, name))
    table[name] = made


def _named(kind: str, name: str, thing: Callable[..., Any]) -> Callable[..., Any]:
    """The function, with the kind and name in what is said of its mistakes."""

    @wraps(thing)
    def call(*args: Any, **options: Any) -> Any:
        with told(f"{kind} {name}", _VALID[kind]):
            result = thing(*args, **options)
        if kind in _SAME_SHAPE and getattr(result, "shape", None) != args[0].shape:
            shapes = f"{[*getattr(result, 'shape', ())]} for {[*args[0].shape]}"
            raise UserError(f"{kind} {name} returned an array of shape {shapes}; valid: the same shape")
        return result

    return call
