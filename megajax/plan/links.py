"""How long a collective takes on a machine, from where the devices of its group stand.

Devices are numbered as `mesh.make_mesh` places them; servers hold neighbouring numbers. A ring passes through all
members of a server before it goes to the next one, and all of them lend it their network adapters; all groups of an
axis run at the same time, each on the adapters of its own members.
"""

from dataclasses import dataclass
from functools import lru_cache

from megajax.axes import DEVICE_ORDER
from megajax.config import MeshConfig
from megajax.plan.machines import Machine
from megajax.program.communication import Collective


@dataclass(frozen=True)
class Group:
    """The devices of a mesh axis, or of several together."""

    size: int  # how many
    neighbours: int  # how many of them a server has


@lru_cache(maxsize=65536)
def group_of(axes: tuple[str, ...], mesh: MeshConfig, server: int) -> Group:
    """The groups that a collective over these axes runs in."""
    size, stride, neighbours = 1, 1, 1
    for axis in reversed(DEVICE_ORDER):
        devices = getattr(mesh, axis)
        if axis in axes:
            size *= devices
            neighbours *= max(1, min(devices, server // stride))
        stride *= devices
    return Group(size, neighbours)


def seconds_of(collective: Collective, mesh: MeshConfig, machine: Machine) -> float:
    """Of one such collective, with nothing beside it."""
    kind, rates = collective.kind, machine.efficiency
    group = group_of(collective.axes, mesh, machine.server)
    if group.size == 1:
        return 0.0
    if group.neighbours >= group.size:
        rate = machine.link * (rates.all_reduce if kind == "all-reduce" else rates.others)
        latency = rates.server_latency
    else:
        adapters = 1 if kind == "permute" else group.neighbours
        rate = min(machine.link * rates.others, adapters * machine.network * rates.network)
        latency = rates.network_latency
    others = group.size - 1
    passes = {
        "permute": 1,  # to a neighbour, which for some of the devices is in another server
        "all-reduce": 2 * others / group.size,
        "reduce-scatter": others / group.size,
        "all-gather": others,  # its operand is a part
        "all-to-all": others / group.size,
    }
    return passes[kind] * collective.num_bytes / rate + latency
