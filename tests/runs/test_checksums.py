"""The checksum of an array notices what changes and does not see how it is divided."""

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from megajax.mesh import make_mesh
from megajax.runs.checksums import checksum, part_sums


def plain(array: np.ndarray) -> int:
    """By the definition, in Python's whole numbers; the same as in checkpoints of before."""
    words = array.view(np.uint32) if array.dtype != np.float64 else array[..., None].view(np.uint32)
    return (
        sum(
            int(words[place]) * (1 + sum(2 * 31**dim * index for dim, index in enumerate(place)))
            for place in np.ndindex(words.shape)
        )
        % 2**32
    )


@pytest.mark.parametrize("shape", [(), (37,), (5, 33), (3, 4, 6), (2, 1, 3, 2, 5)])
@pytest.mark.parametrize("dtype", [np.float32, np.int32, np.float64])
def test_any_changed_element_and_swapped_neighbours_are_noticed(shape: tuple[int, ...], dtype: type) -> None:
    """Every element, a change of the last bit, and neighbours in every dim."""
    array = np.random.default_rng(0).integers(1, 100, shape).astype(dtype)
    before = checksum(array)
    assert before == plain(array)
    for place in np.ndindex(shape):
        changed = array.copy()
        changed[place] = array[place] + 1 if dtype == np.int32 else np.nextafter(array[place], dtype(1000))
        assert checksum(changed) != before, place
        for dim in range(len(shape)):
            neighbour = tuple((index + (other == dim)) % shape[other] for other, index in enumerate(place))
            swapped = array.copy()
            swapped[place], swapped[neighbour] = array[neighbour], array[place]
            assert checksum(swapped) != before or array[place] == array[neighbour], (place, neighbour)


def test_the_sign_of_zero_is_noticed() -> None:
    assert checksum(np.float32(0.0)[...]) != checksum(np.float32(-0.0)[...])


@pytest.mark.parametrize("memory", ["device", "pinned_host"])
def test_it_does_not_depend_on_the_mesh(memory: str) -> None:
    """Divided over all, over some and over no devices, a part that several have counts once."""
    mesh = make_mesh(jax.devices()[:8], data=2, pipe=2, tensor=2)
    array = np.random.default_rng(0).normal(size=(5, 8, 4)).astype(np.float32)
    tree = {
        str(spec): jax.device_put(array, NamedSharding(mesh, spec, memory_kind=memory))
        for spec in (
            PartitionSpec(),
            PartitionSpec(None, ("pipe", "data"), "tensor"),
            PartitionSpec(None, None, "pipe"),
        )
    }
    assert set(part_sums(tree).values()) == {plain(array)} and len(tree) == 3
