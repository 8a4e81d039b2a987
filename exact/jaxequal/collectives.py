"""The devices of a mesh, and primitives that communicate between them: (devices, equation, values) -> value."""

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxequal.arrays import dims, largest, rule, total
from jaxequal.errors import RunError
from jaxequal.numbers import Value

COLLECTIVES: dict[str, Callable[..., Any]] = {}


@dataclass(frozen=True)
class Devices:
    """Some or all devices of a mesh."""

    sizes: Mapping[str, int]  # of the mesh's axes
    coordinates: np.ndarray  # [devices, axes]

    @classmethod
    def grid(cls, sizes: Mapping[str, int]) -> "Devices":
        """All devices."""
        places = [*itertools.product(*map(range, sizes.values()))]
        return cls(sizes, np.array(places, int).reshape(len(places), len(sizes)))

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self.coordinates)

    def spread(self, x: Value) -> Value:
        """The value with an entry for every device."""
        return np.broadcast_to(x, (len(x), self.count, *x.shape[2:]))

    def groups(self, equation: Any) -> np.ndarray:
        """The devices that communicate with each other, [groups, members], all of which must be among these."""
        axes = equation.params.get("axes", equation.params.get("axis_name"))
        groups = self.along([axis for axis in ((axes,) if isinstance(axes, str) else axes) if isinstance(axis, str)])
        if groups is None:
            raise RunError(f"only some of the devices that communicate over {axes} run a {equation.primitive.name}")
        parts = equation.params.get("axis_index_groups") or [range(groups.shape[1])]
        return groups[:, np.array(parts)].reshape(-1, len(parts[0]))

    def along(self, axes: Sequence[str]) -> np.ndarray | None:
        """The devices that only these axes tell apart, [groups, members], if all of them are among these."""
        names = [*self.sizes]
        columns = [names.index(axis) for axis in axes]
        others = [column for column in range(len(names)) if column not in columns]
        size = math.prod(self.sizes[names[column]] for column in columns)
        order = np.lexsort(self.coordinates[:, [*others, *columns]].T[::-1])
        groups = order[: self.count // size * size].reshape(-1, size)
        of_others = self.coordinates[groups][:, :, np.array(others, int)]
        return None if self.count % size or (of_others != of_others[:, :1]).any() else groups

    def shared(self, groups: np.ndarray, results: Value) -> Value:
        """Give every member the result of its group, [fields, groups, …]."""
        return results if len(groups) == 1 else self.scattered(groups, [results] * groups.shape[1])

    def scattered(self, groups: np.ndarray, parts: Sequence[Value]) -> Value:
        """Give each member of every group its part, [fields, groups, …]."""
        out = np.empty((len(parts[0]), self.count, *parts[0].shape[2:]), parts[0].dtype)
        for members, part in zip(groups.T, parts, strict=True):
            out[:, members] = part
        return out

    def addends(self, x: Value, axes: Sequence[str]) -> Value:
        """Values that add up to one along these axes: it on the first devices, 0 on others."""
        later = self.coordinates[:, [[*self.sizes].index(axis) for axis in axes]].any(1)
        return np.where(later.reshape(1, -1, *[1] * (x.ndim - 2)), 0, x)

    def summed(self, x: Value, axes: Sequence[str], dtype: Any) -> Value:
        """The sum along these axes, on each device."""
        groups = self.along(axes)
        assert groups is not None, "a shard_map is run by all devices that its axes tell apart"
        return self.shared(groups, total(self.spread(x)[:, groups], 2, dtype))

    def slices(self, spec: Any, shape: Sequence[int]) -> Iterator[tuple[slice, ...]]:
        """Which part of an array every device has, with a slice of fields before."""
        for own in self.coordinates:
            at, slices = dict(zip(self.sizes, own.tolist(), strict=True)), [slice(None)]
            for entry, size in itertools.zip_longest(spec.partitions, shape):
                index, count = 0, 1
                for axis in () if entry is None else (entry,) if isinstance(entry, str) else entry:
                    index, count = index * self.sizes[axis] + at[axis], count * self.sizes[axis]
                slices.append(slice(index * size // count, (index + 1) * size // count))
            yield tuple(slices)


_rule = functools.partial(rule, table=COLLECTIVES)


@_rule("axis_index")
def _axis_index(devices: Devices, equation: Any) -> Value:
    own = devices.coordinates[:, [*devices.sizes].index(equation.params["axis_name"])].astype(np.int32)
    return own[None, :1] if (own == own[0]).all() else own[None]


@_rule("psum", "psum_invariant", "unreduced_psum", "pmax", "pmin")
def _reduced(devices: Devices, equation: Any, *values: Value) -> Any:
    """Over dims, too: those of a `vmap` with a name."""
    way: Any = {"pmax": np.argmax, "pmin": np.argmin}.get(equation.primitive.name)
    out = []
    axes = equation.params["axes"]
    groups = devices.groups(equation) if any(isinstance(axis, str) for axis in axes) else None
    for x, variable in zip(values, equation.invars, strict=True):
        places = dims(axis for axis in axes if isinstance(axis, int))
        for dim in sorted(places, reverse=True) if way else ():
            x = largest(x, dim, way)
        x = total(x, places, variable.aval.dtype) if places and not way else x
        if groups is not None:
            x = devices.spread(x)[:, groups]
            x = devices.shared(groups, largest(x, 2, way) if way else total(x, 2, variable.aval.dtype))
        out.append(x)
    return out if equation.primitive.multiple_results else out[0]


@_rule("all_gather", "all_gather_invariant", "all_gather_reduced")
def _all_gather(devices: Devices, equation: Any, x: Value) -> Value:
    groups, dim = devices.groups(equation), equation.params["all_gather_dimension"]
    x = devices.spread(x)[:, groups]
    whole = _joined(x, dim) if equation.params["tiled"] else np.moveaxis(x, 2, dim + 2)
    return devices.shared(groups, whole)


@_rule("reduce_scatter", "unreduced_reduce_scatter")
def _reduce_scatter(devices: Devices, equation: Any, x: Value) -> Value:
    groups, dim = devices.groups(equation), equation.params["scatter_dimension"] + 2
    sums = total(devices.spread(x)[:, groups], 2, equation.invars[0].aval.dtype)
    parts = np.split(sums, groups.shape[1], dim)
    return devices.scattered(groups, parts if equation.params["tiled"] else [part.squeeze(dim) for part in parts])


@_rule("all_to_all")
def _all_to_all(devices: Devices, equation: Any, x: Value) -> Value:
    """As if `tiled`, whatever that says: JAX adds and removes dims before and after it."""
    groups, split, joined = devices.groups(equation), equation.params["split_axis"], equation.params["concat_axis"]
    parts = np.split(devices.spread(x)[:, groups], groups.shape[1], split + 3)
    return devices.scattered(groups, [_joined(part, joined) for part in parts])


@_rule("ppermute")
def _ppermute(devices: Devices, equation: Any, x: Value) -> Value:
    """JAX numbers a group's members in the order of the mesh's axes, not in that of `axis_name`."""
    groups, x = np.sort(devices.groups(equation)), devices.spread(x)
    out = np.zeros_like(x)
    for source, target in equation.params["perm"]:
        out[:, groups[:, target]] = x[:, groups[:, source]]
    return out


@_rule("ragged_all_to_all")
def _ragged_all_to_all(devices: Devices, equation: Any, x: Value, out: Value, *more: Value) -> Value:
    """Every member sends rows of each size from each place, to each place."""
    groups, x, out = devices.groups(equation), devices.spread(x), devices.spread(out).copy()
    first, size, offset, _ = (devices.spread(each)[0] for each in more)
    for members in groups:
        for source in members:
            for n, target in enumerate(members):
                start, rows, at = first[source, n], size[source, n], offset[source, n]
                out[:, target, at : at + rows] = x[:, source, start : start + rows]
    return out


def _joined(x: Value, dim: int) -> Value:
    """[fields, groups, members, …] with members one after the other along `dim`."""
    x = np.moveaxis(x, 2, dim + 2)
    return x.reshape(*x.shape[: dim + 2], -1, *x.shape[dim + 4 :])
