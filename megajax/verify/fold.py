"""Fold large meshes to small ones."""

import math

from megajax.config import MeshConfig
from megajax.errors import UserError


def fold(mesh: MeshConfig, most: int) -> MeshConfig:
    """The mesh itself if it has at most `most` devices, else a smaller mesh with the same axes. Its smallest axis is as
    large as possible, since an axis of two cannot tell left from right; its sizes divide the originals if possible.

    Raises:
        UserError: no such mesh fits on so few devices.
    """
    if mesh.num_devices <= most:
        return mesh
    sizes = tuple(mesh.sizes.values())
    least = 2 ** sum(size > 1 for size in sizes)
    if least > most:
        raise UserError(f"--devices {most} for a mesh of {shown(mesh)}; valid: {least} or more, 2 for every axis")
    fitting: list[tuple[int, ...]] = [()]
    for size in sizes:
        possible = range(2, size + 1) if size > 1 else (1,)
        fitting = [(*own, part) for own in fitting for part in possible if math.prod(own) * part <= most]

    def worth(own: tuple[int, ...]) -> tuple[int, int, int, tuple[int, ...]]:
        divides = sum(size % part == 0 for size, part in zip(sizes, own, strict=True))
        smallest = min((part for part, size in zip(own, sizes, strict=True) if size > 1), default=1)
        return divides, smallest, math.prod(own), own[1:]

    best = max(fitting, key=worth)
    return MeshConfig(**dict(zip(mesh.sizes, best, strict=True)))


def shown(mesh: MeshConfig) -> str:
    """A mesh in messages."""
    return " x ".join(map(str, mesh.sizes.values()))
