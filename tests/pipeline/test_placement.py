"""Placement of layers on stages: canonical order, no layer lost, the extra ones in a contiguous run."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megajax.pipeline.placement import Placement

placements = st.builds(Placement, st.integers(1, 30), st.integers(1, 8), st.integers(1, 3))


@given(placements)
def test_every_layer_has_one_slot_in_order(placement):
    """Going through the chunks, in each through the stages, the layers come in canonical order, each once."""
    index = placement.layer_index
    assert index.shape == (placement.num_chunks, placement.num_stages, placement.layers_per_chunk)
    assert index[index >= 0].tolist() == list(range(placement.num_layers))
    assert set(index[index < 0]) <= {-1}
    assert placement.padded == (index < 0).any()


@given(placements)
def test_the_extra_layers_are_a_contiguous_run(placement):
    """The first virtual stages hold one layer more than the others; padded slots come last in their stage."""
    rows = placement.layer_index.reshape(-1, placement.layers_per_chunk)
    counts = (rows >= 0).sum(1)
    assert (np.diff(counts) <= 0).all() and counts.max() - counts.min() <= 1
    assert counts[0] == placement.layers_per_chunk
    assert all((row[:count] >= 0).all() for row, count in zip(rows, counts, strict=True))


@settings(max_examples=20)  # every one compiles
@given(placements)
def test_stages_and_back(placement):
    """The round trip is exact, and padding is zeros, of which nothing comes back, whatever stands there."""
    canonical = np.random.default_rng(0).normal(size=(placement.num_layers, 2, 3)).astype(np.float32)
    pipelined = np.array(placement.to_stages(jnp.asarray(canonical)))
    index = placement.layer_index
    assert pipelined.shape == (*index.shape, 2, 3)
    np.testing.assert_array_equal(pipelined[index >= 0], canonical)
    assert not pipelined[index < 0].any()
    pipelined[index < 0] = np.nan
    np.testing.assert_array_equal(placement.to_canonical(jnp.asarray(pipelined)), canonical)


def test_the_documented_interleaved_example():
    """16 layers, 4 stages, 2 chunks: stage 0 has layers 1-2 and 9-10, stage 3 has 7-8 and 15-16 (REFERENCE §3)."""
    index = Placement(16, 4, 2).layer_index + 1
    expected = [[1, 2, 9, 10], [3, 4, 11, 12], [5, 6, 13, 14], [7, 8, 15, 16]]
    assert [index[:, stage].ravel().tolist() for stage in range(4)] == expected


@pytest.mark.parametrize("placement", [Placement(8, 4), Placement(7, 4)], ids=["even", "padded"])
def test_gradients_pass_through_the_placement(placement):
    """`to_stages` is linear, and its transpose is `to_canonical`."""
    weights = jnp.arange(placement.num_layers, dtype=float)
    pipelined_grad = jnp.asarray(np.random.default_rng(0).normal(size=placement.layer_index.shape).astype(np.float32))
    (grad,) = jax.vjp(placement.to_stages, weights)[1](pipelined_grad)
    np.testing.assert_array_equal(grad, placement.to_canonical(pipelined_grad))
