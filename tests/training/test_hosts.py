"""Which groups lie on one host, and what mends the others."""

import itertools
import math
import re
from dataclasses import dataclass

from jax.sharding import Mesh

from megajax.core.mesh import make_mesh, rank_groups
from megajax.training.hosts import host_lines

BLOCK = "processes numbered host by host (--distributed.process-id, srun --distribution=block)"


@dataclass(frozen=True)
class Device:
    """Stands for a device of a process."""

    id: int
    process_index: int


def mesh_of(per_process: list[int], **sizes: int) -> Mesh:
    """A mesh of the devices of processes that have so many each."""
    owners = [process for process, count in enumerate(per_process) for _ in range(count)]
    return make_mesh([Device(number, owner) for number, owner in enumerate(owners)], **sizes)


def test_what_a_run_says():
    four, two, one = [4] * 4, [0, 0, 2, 2], [0, 1, 2, 3]
    mixed, shards = mesh_of(four, tensor=4, context=2, expert=2), mesh_of(four, replica=2, data=8)  # shards of ZeRO
    dealt = [number % 2 for number in range(8)]  # in turn, as srun --distribution=cyclic does
    assert host_lines(mesh_of(four, tensor=16), [0] * 4) == []
    for mesh, hosts, told, mends in (
        (mesh_of(four, pipe=2, tensor=8), two, "hosts: 2 with 8 devices each; every tensor group", ""),
        (mesh_of(four, data=16), one, "hosts: 4 with 4 devices each", ""),
        (mixed, two, "every tensor and context group stays on one host; expert groups span up to 2", "--mesh.expert 1"),
        (mixed, one, "", "context and expert groups communicate"),
        (mixed, one, "", "--mesh.context 1 --mesh.expert 1"),
        (mesh_of([1, 1], data=2), [0, 1], "hosts: 2 with 1 device each", ""),
        (mesh_of([1] * 8, data=2, tensor=4), dealt, "", f": {BLOCK}"),
        (mesh_of([1] * 8, tensor=8), dealt, "", f"--mesh.tensor 4 (and more --mesh.data or --mesh.pipe), {BLOCK}"),
        (shards, two, "every data group", ""),
        (shards, one, "", "--optimizer.zero-ranks 4"),
        (mesh_of([4, 8], data=3, tensor=4), [0, 1], "hosts: 2 with 4 to 8 devices each", ""),
    ):
        line, *warning = host_lines(mesh, hosts)
        assert told in line and mends in "".join(warning) and len(warning) == bool(mends)


def test_every_warning_is_true_and_mends():
    """On all meshes of 12 devices on hosts of several sizes and orders: who does as it says has every group on one
    host, and without a warning they are."""
    warned = 0
    orders = [0, 1] * 6, [0, 0, 1, 1, 2, 2] * 2
    for hosts in ([0] * 6 + [1] * 6, [0] * 4 + [1] * 8, [2] * 3 + [0] * 6 + [1] * 3, *orders):
        for sizes in itertools.product((1, 2, 3, 4, 6, 12), repeat=3):
            if 12 % math.prod(sizes) == 0:
                mesh = dict(zip(("expert", "context", "tensor"), sizes, strict=True))
                lines = host_lines(mesh_of([1] * 12, data=12 // math.prod(sizes), **mesh), hosts)
                assert len(lines) == 1 + (not _together(mesh, hosts)), (mesh, hosts)
                if len(lines) == 2:
                    mended = {axis: int(size) for axis, size in re.findall(r"--mesh\.(\w+) (\d+)", lines[1])}
                    in_order = sorted(hosts) if BLOCK in lines[1] else hosts
                    assert _together(mesh | mended, in_order), (lines, hosts)
                    warned += 1
    assert warned > 50


def _together(mesh: dict[str, int], hosts: list[int]) -> bool:
    """Whether every group of these axes lies on one host."""
    groups = rank_groups(make_mesh([Device(i, i) for i in range(12)], data=12 // math.prod(mesh.values()), **mesh))
    return all(len({hosts[i] for i in group}) == 1 for axis in mesh for group in groups.get(axis, []))
