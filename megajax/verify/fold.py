"""Large meshes folded to small ones."""

import math

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
    data, pipe, tensor = (range(2, min(size, most) + 1) if size > 1 else range(1, 2) for size in sizes)
    rows = ((d, p) for d in data for p in pipe if d * p <= most)
    fitting = [(d, p, t) for d, p in rows for t in tensor if d * p * t <= most]

    def worth(own: Sizes) -> tuple[int, int, int, tuple[int, ...]]:
        divides = sum(size % part == 0 for size, part in zip(sizes, own, strict=True))
        smallest = min((part for part, size in zip(own, sizes, strict=True) if size > 1), default=1)
        return divides, smallest, math.prod(own), own[1:]

    return mesh_of(max(fitting, key=worth))


def shown(sizes: Sizes) -> str:
    """A mesh in messages."""
    return " x ".join(map(str, sizes))
