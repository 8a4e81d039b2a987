"""On which hosts the groups of a mesh lie, for the first lines of a run on several hosts."""

import itertools
import math
from collections import Counter
from collections.abc import Collection, Sequence

import numpy as np
from jax.sharding import Mesh

from megajax.core.axes import DEVICE_ORDER, REPLICA


def _layer_axes(mesh: Mesh) -> list[str]:
    """The axes whose groups communicate in every layer, innermost first; those of a pipe and of data do so rarely,
    unless ZeRO's groups are meant to be on one host."""
    outside = DEVICE_ORDER.index(REPLICA if REPLICA in mesh.axis_names else "data")
    return [*reversed(DEVICE_ORDER[outside + 1 :])]


def host_lines(mesh: Mesh, hosts: Sequence[int]) -> list[str]:
    """A line that says which groups stay on one host, and a warning with what mends it if some do not; nothing for a
    single host. `hosts` has the number of each process's host."""
    host_of = np.vectorize(lambda device: hosts[device.process_index])(mesh.devices)
    counts = Counter(host_of.ravel().tolist())
    if len(counts) == 1:
        return []
    spans = {axis: _most_hosts(host_of, mesh, axis) for axis in _layer_axes(mesh) if mesh.shape[axis] > 1}
    spanning = {axis: count for axis, count in spans.items() if count > 1}
    parts = [f"{len(counts)} with {_devices(counts.values())} each"]
    if together := [axis for axis in spans if axis not in spanning]:
        parts.append(f"every {' and '.join(together)} group stays on one host")
    parts += [f"{axis} groups span up to {count} hosts" for axis, count in spanning.items()]
    return [f"hosts: {'; '.join(parts)}", *([_warning(mesh, host_of, spanning)] if spanning else [])]


def _most_hosts(host_of: np.ndarray, mesh: Mesh, axis: str) -> int:
    """The most hosts that a group of an axis lies on."""
    groups = np.moveaxis(host_of, mesh.axis_names.index(axis), -1).reshape(-1, mesh.shape[axis])
    return max(len({*group}) for group in groups.tolist())


def _warning(mesh: Mesh, host_of: np.ndarray, spanning: dict[str, int]) -> str:
    """What keeps every group on one host: with processes numbered host by host, exactly the sizes whose product
    divides the number of devices of each host."""
    order = [mesh.axis_names.index(axis) for axis in DEVICE_ORDER if axis in mesh.axis_names]
    in_order = host_of.transpose(order).ravel().tolist()
    runs, counts = [host for host, _ in itertools.groupby(in_order)], Counter(in_order)
    flags, left = [], math.gcd(*counts.values())
    for axis in _layer_axes(mesh):
        size = math.gcd(mesh.shape[axis], left)
        left //= size
        if size < mesh.shape[axis]:
            flags.append(f"--optimizer.zero-ranks {size}" if axis == "data" else f"--mesh.{axis} {size}")
    more = " (and more --mesh.data or --mesh.pipe)" if any("--mesh" in flag for flag in flags) else ""
    mends = [f"{' '.join(flags)}{more}"] if flags else []
    if len(runs) > len(counts):
        mends.append("processes numbered host by host (--distributed.process-id, srun --distribution=block)")
    return (
        f"warning: {' and '.join(spanning)} groups communicate in every layer, here over the network between hosts; to "
        f"keep each on one: {', '.join(mends)}"
    )


def _devices(numbers: Collection[int]) -> str:
    low, high = min(numbers), max(numbers)
    return f"{low} to {high} devices" if low < high else f"{low} device{'s' * (low > 1)}"
