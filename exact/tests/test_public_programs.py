"""`exact.compare` with programs after public ones: the right ones are equal, gradients too, and every bug is found."""

import jax
import pytest
from public_programs import MESH, Programs, planted

from jaxequal import compare

FEW = ("contraction", "regression", "clip", "embedding")
NAMES = [each for each in vars(Programs) if each[0] != "_"]


@pytest.mark.parametrize(
    "name", [each if each in FEW else pytest.param(each, marks=pytest.mark.full) for each in NAMES]
)
def test_right_and_with_bugs(name: str) -> None:
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):  # as others have it
        found = [compare(*planted(getattr(Programs, name), bug), MESH, gradients=True) for bug in range(6)]
    assert found[0], found[0]
    assert not any(found[1:]), found
