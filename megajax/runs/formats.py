"""The formats that runs and their checkpoints were written in, and how an older one becomes today's.

A checkpoint is read in the form that it was written in and then upgraded on the mesh, one format after the other and
leaf by leaf; a leaf that is split over devices stays so, in the memory in which it is. What a format holds follows from
today's: a target is a tree of `ShapeDtypeStruct` with shardings, the canonical state (`program/state.py`) or a part of
it.

1. Attention's query, key and value are one leaf `qkv`: weight [L, D, 3, H, K], bias [L, 3, H, K].
2. They are leaves `query`, `key` and `value`: weights [L, D, H, K], biases [L, H, K].
3. What BERT is pretrained by is `head`, with the parts `masked`, `pooler` and `order`: before, the model had `masked`,
   and `pair` with `pooler` and `output`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
from jax import Array, lax
from jax.sharding import NamedSharding, PartitionSpec

from megajax.errors import UserError
from megajax.program.transfer import moved

Tree = Any

FORMAT = 3  # of what is written today


@dataclass(frozen=True)
class Change:
    """What a format changed.

    Attributes:
        before: its target -> that of the format before it.
        upgrade: its target, arrays of the format before it -> arrays of its own.
    """

    before: Callable[[Tree], Tree]
    upgrade: Callable[[Tree, Tree], Tree]


def check_known(number: int, name: str) -> None:
    """Refuse a format of the future.

    Raises:
        UserError: that says that `name` has it.
    """
    if number > FORMAT:
        raise UserError(
            f"{name} was written by a newer version of megajax, in format {number}; valid: format {FORMAT} or older, "
            "or that version"
        )


def written_as(target: Tree, number: int) -> Tree:
    """The target of format `number`, of today's."""
    return _targets(target, number)[-1]


def upgraded(target: Tree, number: int, stored: Tree) -> Tree:
    """Today's form of arrays that were stored in format `number`; `target` is today's."""
    later = _targets(target, number)[:-1]
    for newer, wanted in zip(range(number + 1, FORMAT + 1), reversed(later), strict=True):
        stored = _CHANGES[newer].upgrade(wanted, stored)
    return stored


def _targets(target: Tree, number: int) -> list[Tree]:
    """Targets from today's format down to `number`."""
    targets = [target]
    for newer in range(FORMAT, number, -1):
        targets.append(_CHANGES[newer].before(targets[-1]))
    return targets


_PARTS = ("query", "key", "value")


def _is_divided(node: Tree) -> bool:
    """Whether a node of a tree has query, key and value as leaves of their own."""
    return isinstance(node, Mapping) and all(name in node for name in _PARTS)


def _joined(target: Tree) -> Tree:
    """Every `query`, `key`, `value` as one `qkv`, in which a dim of 3 stands before the heads."""

    def join(part: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        dims = [*part.sharding.spec, *[None] * (part.ndim - len(part.sharding.spec))]
        spec = PartitionSpec(*dims[:-2], None, *dims[-2:])
        place = NamedSharding(part.sharding.mesh, spec, memory_kind=part.sharding.memory_kind)
        shape = (*part.shape[:-2], len(_PARTS), *part.shape[-2:])
        return jax.ShapeDtypeStruct(shape, part.dtype, sharding=place)

    def node(found: Tree) -> Tree:
        if not _is_divided(found):
            return found
        others = {name: leaf for name, leaf in found.items() if name not in _PARTS}
        return others | {"qkv": jax.tree.map(join, found["query"])}

    return jax.tree.map(node, target, is_leaf=_is_divided)


def _divided(target: Tree, stored: Tree) -> Tree:
    """Every `qkv` as `query`, `key` and `value`, where the target has those."""

    def divide(joint: Array, *parts: jax.ShapeDtypeStruct) -> tuple[Array, ...]:
        places = tuple(NamedSharding(part.sharding.mesh, part.sharding.spec) for part in parts)
        divided = jax.jit(_divide, out_shardings=places)(moved(joint))
        return tuple(moved(array, part.sharding.memory_kind) for array, part in zip(divided, parts, strict=True))

    def node(wanted: Tree, found: Tree) -> Tree:
        if not _is_divided(wanted):
            return found
        leaves, structure = jax.tree.flatten(found["qkv"])
        divided = [
            divide(*each) for each in zip(leaves, *(jax.tree.leaves(wanted[name]) for name in _PARTS), strict=True)
        ]
        parts = {
            name: jax.tree.unflatten(structure, column)
            for name, column in zip(_PARTS, zip(*divided, strict=True), strict=True)
        }
        return {name: leaf for name, leaf in found.items() if name != "qkv"} | parts

    return jax.tree.map(node, target, stored, is_leaf=_is_divided)


def _divide(joint: Array) -> tuple[Array, ...]:
    return tuple(lax.index_in_dim(joint, number, joint.ndim - 3, keepdims=False) for number in range(len(_PARTS)))


def _without_head(target: Tree) -> Tree:
    """Every `head` of pretraining as its parts by their earlier names."""

    def node(found: Tree) -> Tree:
        if not _has_head(found):
            return found
        head = found["head"]
        pair = {"pooler": head["pooler"]["dense"], "output": head["order"]}
        return {name: leaf for name, leaf in found.items() if name != "head"} | {"masked": head["masked"], "pair": pair}

    return jax.tree.map(node, target, is_leaf=_has_head)


def _with_head(target: Tree, stored: Tree) -> Tree:
    """`masked` and `pair` as parts of `head`, where the target has it."""

    def node(wanted: Tree, found: Tree) -> Tree:
        if not _has_head(wanted):
            return found
        pair = found["pair"]
        head = {"masked": found["masked"], "pooler": {"dense": pair["pooler"]}, "order": pair["output"]}
        return {name: leaf for name, leaf in found.items() if name not in ("masked", "pair")} | {"head": head}

    return jax.tree.map(node, target, stored, is_leaf=_has_head)


def _has_head(node: Tree) -> bool:
    return isinstance(node, Mapping) and isinstance(node.get("head"), Mapping) and "masked" in node["head"]


_CHANGES = {2: Change(_joined, _divided), 3: Change(_without_head, _with_head)}  # by the format they lead to
