"""Large meshes folded to small ones, and meshes near one that a model cannot have."""

import itertools
import math
from collections.abc import Iterator

from megajax.config import MeshConfig
from megajax.errors import UserError

Sizes = tuple[int, int, int]


def sizes_of(mesh: MeshConfig) -> Sizes:
    """(data, pipe, tensor)."""
    return mesh.data, mesh.pipe, mesh.tensor


def mesh_of(sizes: Sizes) -> MeshConfig:
    data, pipe, tensor = sizes
    return MeshConfig(data=data, pipe=pipe, tensor=tensor)


def fold(mesh: MeshConfig, most: int) -> MeshConfig:
    """The mesh itself, or one of at most so many devices that has every axis that it has: its smallest axis is as large
    as can be, an axis of two being unable to tell left from right; sizes divide those of the mesh where they can.

    Raises:
        UserError: so few devices have no such mesh.
    """
    if mesh.num_devices <= most:
        return mesh
    sizes = sizes_of(mesh)
    least = 2 ** sum(size > 1 for size in sizes)
    if least > most:
        raise UserError(f"--devices {most} for a mesh of {shown(sizes)}; valid: {least} or more, 2 for every axis")
    small = itertools.product(*(range(2, min(size, most) + 1) if size > 1 else [1] for size in sizes))
    fitting = [own for own in small if math.prod(own) <= most]

    def worth(own: Sizes) -> tuple:
        divides = sum(size % part == 0 for size, part in zip(sizes, own, strict=True))
        smallest = min((part for part, size in zip(own, sizes, strict=True) if size > 1), default=1)
        data, pipe, tensor = own
        return divides, smallest, math.prod(own), pipe, tensor

    return mesh_of(max(fitting, key=worth))


def shown(sizes: Sizes) -> str:
    """A mesh in messages."""
    return " x ".join(map(str, sizes))


def near(mesh: MeshConfig) -> Iterator[MeshConfig]:
    """Meshes of as many devices, the most similar first; then those of fewer."""
    sizes, devices = sizes_of(mesh), mesh.num_devices

    def distance(own: Sizes) -> float:
        return sum(abs(math.log(a / b)) for a, b in zip(own, sizes, strict=True))

    def of(number: int) -> list[Sizes]:
        divisors = [n for n in range(1, number + 1) if number % n == 0]
        return [(d, p, number // d // p) for d in divisors for p in divisors if number % (d * p) == 0]

    for number in range(devices, max(0, devices - 64), -1):
        yield from map(mesh_of, sorted(of(number), key=distance))
