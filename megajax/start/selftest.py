"""Whether every device computes right, and every group of devices communicates right: `--train.selftest`.

Small integers stand in the formats that training computes in. Their sums are exact in any order, so results are
compared without a tolerance.

Letters: N numbers of each of the D devices of a group.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import PartitionSpec

from megajax.core.options import counted
from megajax.core.parallel import collectives
from megajax.core.parallel.collectives import axis_index, axis_size, own_shard, vary
from megajax.core.precision import COMPUTE_DTYPE
from megajax.core.program.program import Program
from megajax.host.processes import gathered, host_names, say

_SIZE, _LARGEST, _ROUNDS = 512, 4, 4  # of matrices, and of their numbers; e4m3 has all whole numbers up to 16
_Pair = tuple[Array, Array]  # what a device computes, and what is right


def selftest(program: Program) -> str:
    """The tests that differ from what is exact, with the devices; empty if none does, which is told."""
    began, mesh = time.perf_counter(), program.mesh
    axes = [axis for axis in mesh.axis_names if mesh.shape[axis] > 1]
    formats = (jnp.float32, COMPUTE_DTYPE[program.config.precision], program.operand_dtype)
    dtypes = dict.fromkeys(jnp.dtype(dtype) for dtype in formats if dtype)
    tests: dict[str, Callable[..., _Pair]] = {f"products in {dtype.name}": partial(_product, dtype) for dtype in dtypes}
    tests |= {"sums": _sums}
    tests |= {f"{name} over {axis}": partial(_exchange, name, axis) for axis in axes for name in _EXCHANGES}

    def wrong(*numbers: Array) -> Array:
        """How many numbers of each test are wrong on this device, [1, tests]."""
        pairs = [test(*numbers) for test in tests.values()]
        counts = [jnp.sum(found != right.astype(found.dtype)) for found, right in pairs]
        return jnp.stack([vary(count, mesh.axis_names) for count in counts])[None]

    compiled = jax.jit(program.region(wrong, (PartitionSpec(),) * 3, PartitionSpec(mesh.axis_names)))
    counts = np.zeros((mesh.size, len(tests)), int)
    for seed in range(_ROUNDS):
        a, b = np.random.default_rng(seed).integers(-_LARGEST, _LARGEST + 1, (2, _SIZE, _SIZE))
        counts += gathered(compiled(*(x.astype(np.int32) for x in (a, b, a @ b))))
    hosts, found = host_names(), []
    for name, by_device in zip(tests, counts.T, strict=True):
        at = [(device, count) for device, count in zip(mesh.devices.flat, by_device, strict=True) if count]
        where = [f"{located([device], hosts)}, {count:,} numbers" for device, count in at]
        found += [f"{name}: {', '.join(where)}"] * bool(where)
    if not found:
        over = f" and exchanges over {', '.join(axes)}" if axes else ""
        seconds = time.perf_counter() - began
        say(f"self-test: products, sums{over} are exact on {counted(mesh.size, 'device')} ({seconds:.1f} s)")
    return "; ".join(found)


def located(devices: Sequence[jax.Device], hosts: Sequence[str]) -> str:
    """Devices with kind, process and host."""
    groups = []
    for process, several in groupby(devices, lambda device: device.process_index):
        first, *others = several
        ids = ", ".join(str(device.id) for device in (first, *others))
        groups.append(
            f"device{'s' * bool(others)} {ids} ({first.device_kind}) of process {process} on {hosts[process]}"
        )
    return " and ".join(groups)


def _product(dtype: Any, a_NN: Array, b_NN: Array, right_NN: Array) -> _Pair:
    return jnp.matmul(a_NN.astype(dtype), b_NN.astype(dtype), preferred_element_type=jnp.float32), right_NN


def _sums(a_NN: Array, *_: Array) -> _Pair:
    return jnp.sum(a_NN.astype(jnp.float32), axis=0), jnp.sum(a_NN, axis=0)


def _exchange(name: str, axis: str, *_: Array) -> _Pair:
    """Every device knows what all devices of its group have: numbers that depend on the place."""
    devices = axis_size(axis)
    place_DN, number_DN = (lax.broadcasted_iota(jnp.int32, (devices, devices * _SIZE), dim) for dim in (0, 1))
    all_DN = vary((place_DN * 5 + number_DN * 3) % 17 - 8, [axis])
    return _EXCHANGES[name](all_DN[axis_index(axis)].astype(jnp.float32), all_DN, axis)


_EXCHANGES: dict[str, Callable[[Array, Array, str], _Pair]] = {
    "all-reduce": lambda x, all_DN, axis: (collectives.g(x, axis), all_DN.sum(0)),
    "reduce-scatter": lambda x, all_DN, axis: (collectives.scatter_sum(x, 0, axis), own_shard(all_DN.sum(0), 0, axis)),
    "all-gather": lambda x, all_DN, axis: (collectives.gather_shards(x, 0, axis), all_DN.reshape(-1)),
    "all-to-all": lambda x, all_DN, axis: (collectives.exchange(x, 0, 0, axis), own_shard(all_DN, 1, axis).reshape(-1)),
    "permute": lambda x, all_DN, axis: (collectives.send(x, axis, +1, ring=True), all_DN[axis_index(axis) - 1]),
}
