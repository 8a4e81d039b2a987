"""Whether every device computes right, and every group of devices communicates right: `--train.selftest`.

Small integers stand in the formats that training computes in. Their sums are exact in any order, so results are
compared without a tolerance.
"""

import time
from collections.abc import Sequence
from functools import partial
from itertools import groupby
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import PartitionSpec

from megajax.core.errors import RunError
from megajax.core.options import counted
from megajax.core.parallel import collectives
from megajax.core.parallel.collectives import axis_index, axis_size, own_shard, vary
from megajax.core.precision import COMPUTE_DTYPE
from megajax.core.program.program import Program
from megajax.host.processes import gathered, host_names, say

_SIZE, _LARGEST, _ROUNDS = 512, 4, 4  # of matrices, and of their numbers; e4m3 has all whole numbers up to 16


def selftest(program: Program) -> None:
    """Raises `RunError` with the devices that differ from what is exact."""
    began = time.perf_counter()
    mesh = program.mesh
    dtypes = dict.fromkeys([jnp.dtype(jnp.float32), jnp.dtype(COMPUTE_DTYPE[program.config.precision])])
    dtypes |= dict.fromkeys([jnp.dtype(program.operand_dtype)] if program.operand_dtype else [])
    axes = tuple(axis for axis in mesh.axis_names if mesh.shape[axis] > 1)
    names = [f"products in {dtype.name}" for dtype in dtypes] + ["sums"]
    names += [f"{name} over {axis}" for axis in axes for name in _EXCHANGES]
    tested = partial(_wrong, tuple(dtypes), axes, tuple(mesh.axis_names))
    none = PartitionSpec()
    compiled = jax.jit(program.region(tested, (none, none, none), PartitionSpec(tuple(mesh.axis_names))))
    wrong = np.zeros((mesh.size, len(names)), int)
    for seed in range(_ROUNDS):
        a, b = np.random.default_rng(seed).integers(-_LARGEST, _LARGEST + 1, (2, _SIZE, _SIZE))
        right = (a.astype(np.float64) @ b).astype(np.int32)
        wrong += gathered(compiled(a.astype(np.int32), b.astype(np.int32), right))
    hosts, devices = host_names(), mesh.devices.ravel()
    found = []
    for name, counts in zip(names, wrong.T, strict=True):
        both = zip(devices, counts, strict=True)
        where = [f"{located([device], hosts)}, {count:,} numbers" for device, count in both if count]
        found += [f"{name}: {', '.join(where)}"] if where else []
    if found:
        raise RunError(f"--train.selftest: wrong, so no step is trained: {'; '.join(found)}")
    over = f" and exchanges over {', '.join(axes)}" if axes else ""
    seconds = time.perf_counter() - began
    say(f"self-test: products, sums{over} are exact on {counted(mesh.size, 'device')} ({seconds:.1f} s)")


def located(devices: Sequence[jax.Device], hosts: Sequence[str]) -> str:
    """Devices with kind, process and host."""
    parts = []
    for process, several in groupby(devices, lambda device: device.process_index):
        here = [*several]
        ids = ", ".join(str(device.id) for device in here)
        kind = f"device{'s' * (len(here) > 1)} {ids} ({here[0].device_kind})"
        parts.append(f"{kind} of process {process} on {hosts[process]}")
    return " and ".join(parts)


def _wrong(
    dtypes: tuple[Any, ...], axes: tuple[str, ...], every: tuple[str, ...], a_NN: Array, b_NN: Array, right_NN: Array
) -> Array:
    """How many numbers of each test are wrong on this device, [1, tests]."""
    counts = [_unequal(_product(a_NN, b_NN, dtype), right_NN) for dtype in dtypes]
    counts.append(_unequal(_sums(a_NN), jnp.sum(a_NN, axis=0)))
    for axis in axes:
        # What each device of the group has, which all of them know: its number decides.
        devices = axis_size(axis)
        place_DN, number_DN = (lax.broadcasted_iota(jnp.int32, (devices, devices * _SIZE), dim) for dim in (0, 1))
        all_DN = (place_DN * 5 + number_DN * 3) % 17 - 8
        own_N = _here(all_DN, axis)[axis_index(axis)].astype(jnp.float32)
        for communicate, expected in _EXCHANGES.values():
            counts.append(_unequal(communicate(own_N, axis), expected(all_DN, axis)))
    return vary(jnp.stack([vary(count, every) for count in counts])[None], every)


def _unequal(found: Array, right: Array) -> Array:
    return jnp.sum(found != right.astype(found.dtype))


def _product(a_NN: Array, b_NN: Array, dtype: Any) -> Array:
    return jnp.matmul(a_NN.astype(dtype), b_NN.astype(dtype), preferred_element_type=jnp.float32)


def _sums(a_NN: Array) -> Array:
    return jnp.sum(a_NN.astype(jnp.float32), axis=0)


def _here(all_DN: Array, axis: str) -> Array:
    """The same, as something that differs on the devices of the axis."""
    return vary(all_DN, [axis])


_EXCHANGES: dict[str, tuple[Any, Any]] = {  # what is done with a device's numbers, and what comes of all of them
    "all-reduce": (collectives.g, lambda all_DN, axis: jnp.sum(all_DN, axis=0)),
    "reduce-scatter": (
        lambda own_N, axis: collectives.scatter_sum(own_N, 0, axis),
        lambda all_DN, axis: own_shard(_here(jnp.sum(all_DN, axis=0), axis), 0, axis),
    ),
    "all-gather": (
        lambda own_N, axis: collectives.gather_shards(own_N, 0, axis),
        lambda all_DN, axis: all_DN.reshape(-1),
    ),
    "all-to-all": (
        lambda own_N, axis: collectives.exchange(own_N, 0, 0, axis),
        lambda all_DN, axis: own_shard(_here(all_DN, axis), 1, axis).reshape(-1),
    ),
    "permute": (
        lambda own_N, axis: collectives.send(own_N, axis, +1, ring=True),
        lambda all_DN, axis: _here(all_DN, axis)[axis_index(axis) - 1],
    ),
}
