"""States go to the host's memory and back leaf by leaf: what the devices need beside the state is one leaf."""

import math
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from tiny import full, tiny_config, tiny_program

from megajax.core.mesh import make_mesh, shard_unused_axes
from megajax.core.program import transfer as transfer_module
from megajax.core.program.state import TrainState
from megajax.core.program.transfer import Transfer
from megajax.verify import named_leaves

CHUNKS = {"schedule": "interleaved", "chunks": 2, "num_layers": 6}
WIDE = {"hidden_size": 64, "num_heads": 8, "num_layers": 5, "vocab_size": 250, "bias": "none"}  # 2 and 4 divide no 5


def random_canonical(transfer: Transfer) -> TrainState:
    """A canonical state in host memory without a zero."""
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda leaf: jax.device_put(rng.uniform(1, 9, leaf.shape).astype(leaf.dtype), leaf.sharding), transfer.targets
    )


def bytes_of(leaf: Any) -> int:
    """Of a whole array, of all devices together."""
    return math.prod(leaf.shape) * leaf.dtype.itemsize


def device_bytes() -> int:
    """Bytes of all living arrays in the memories of the devices."""
    shards = [
        shard.data
        for array in jax.live_arrays()
        if array.sharding.memory_kind != "pinned_host"
        for shard in array.addressable_shards
    ]
    return sum({shard.unsafe_buffer_pointer(): shard.nbytes for shard in shards}.values())


@pytest.mark.parametrize(
    ("mesh", "zero", "precision", "others"),
    [
        ((2, 2, 2), 1, "bf16", {}),
        full((1, 4, 2), 0, "fp32", {}),
        full((5, 1, 1), 3, "bf16", {}),  # divides no dim: every device takes whole leaves, one at a time
        full((1, 5, 1), 0, "fp32", {}),  # divides the layers alone
        full((2, 3, 1), 3, "fp32", {}),  # divides nothing
        full((1, 3, 1), 0, "fp32", CHUNKS),  # divides the layers, of which a stage's are no neighbours
        full((2, 2, 2), 3, "bf16", CHUNKS),
        full((1, 2, 2), 1, "fp32", CHUNKS | {"layers": "3,0,1,2"}),
        # Of two kinds, whose stacks look alike but for their slots.
        full((1, 2, 1), 1, "fp32", {"linear_heads": 8, "linear_layers": "2,1,1,2", "num_layers": 6}),
        full((1, 3, 1), 0, "fp32", {"num_layers": 6, "layers": "4,0,2"}),  # divides the layers, though not as stages do
    ],
)
@pytest.mark.slow
def test_the_devices_hold_one_leaf_more(
    mesh: tuple[int, int, int], zero: int, precision: str, others: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the devices, where every layer lies in its slot, and back: bits as they were, and whenever a leaf is copied,
    what lives on the devices is the state, or what of it is there, and this leaf."""
    layout = tiny_program(tiny_config(mesh, zero=zero, precision=precision, **WIDE | others)).layout
    transfer = Transfer(layout)
    canonical = random_canonical(transfer)
    copies = 5 if mesh[0] == 5 else 1
    most = copies * max(map(bytes_of, jax.tree.leaves(canonical))) + 1000  # scalars are on all devices
    lived: list[int] = []
    plain = transfer_module.moved

    def moved(*arguments: Any) -> jax.Array:
        copy = plain(*arguments)
        lived.append(device_bytes())
        return copy

    monkeypatch.setattr(transfer_module, "moved", moved)
    before = device_bytes()
    state = transfer.to_devices(canonical)
    for name, slots in named_leaves(jax.device_get(state.params["blocks"])).items():
        layers = np.asarray(named_leaves(canonical.params["blocks"])[name], slots.dtype)
        index = layout.stacks.get(name.split("/")[0], layout.placement).layer_index
        slots = slots[..., *map(slice, layers.shape[1:])]  # without ZeRO's padding
        np.testing.assert_array_equal(slots[index >= 0], layers[index[index >= 0]], err_msg=name)
    state_bytes = sum(shard.data.nbytes for leaf in jax.tree.leaves(state) for shard in leaf.addressable_shards)
    assert device_bytes() <= before + state_bytes + 1000
    assert max(lived) <= before + state_bytes + most

    lived.clear()
    before = device_bytes()
    back = transfer.to_host(state)
    assert len(lived) == len(jax.tree.leaves(canonical)) or mesh[1] == 3
    assert before <= max(lived) <= before + most and device_bytes() <= before + 1000
    whole = sum(leaf.nbytes for leaf in jax.tree.leaves(back))
    on_hosts = sum(shard.data.nbytes for leaf in jax.tree.leaves(back) for shard in leaf.addressable_shards)
    # What belongs to no layer is on every stage's host where 5 divides none.
    assert on_hosts <= {3: 3.01, 5: 1.4}.get(mesh[1], 1.1) * copies * whole
    for (path, leaf), wanted in zip(jax.tree_util.tree_leaves_with_path(back), jax.tree.leaves(canonical), strict=True):
        name = jax.tree_util.keystr(path)
        if "loss_scale" not in name:  # fp16's only
            np.testing.assert_array_equal(np.asarray(leaf), np.asarray(wanted))


@pytest.mark.parametrize("mesh", [(2, 2, 2), full((1, 4, 2))])
def test_a_conversion_takes_no_more_than_the_largest_leaf(mesh: tuple[int, int, int]) -> None:
    """By the compiler's own account, for every device, both ways: what it writes and what it needs meanwhile; and no
    device gets all layers of a weight."""
    layout = tiny_program(tiny_config(mesh, **WIDE)).layout
    transfer = Transfer(layout)
    leaves = jax.tree_util.tree_leaves_with_path(transfer.targets.params)
    most = max(bytes_of(leaf) for _, leaf in leaves)
    there = jax.tree.leaves(layout.shapes.params)
    specs = jax.tree.leaves(layout.specs.params)
    large = 0
    for (path, target), pipelined, spec in zip(leaves, there, specs, strict=True):
        if bytes_of(target) < most / 16:
            continue
        large += layout.is_stacked(path)
        source = jax.ShapeDtypeStruct(pipelined.shape, pipelined.dtype, sharding=NamedSharding(layout.mesh, spec))
        canonical = target.update(sharding=NamedSharding(layout.mesh, target.sharding.spec))
        out = transfer.to_canonical(path, spec, target.sharding.spec, target.dtype).lower(source).compile()
        back = transfer.from_canonical(path, target.sharding.spec, spec).lower(canonical).compile()
        for program in (out, back):
            memory = program.memory_analysis()
            assert memory.output_size_in_bytes + memory.temp_size_in_bytes <= most, (path, memory)
        assert not layout.is_stacked(path) or "all-gather" not in out.as_text(), path
    assert large >= 4


def test_every_axis_divides_a_dim_that_it_can() -> None:
    """The one of which most is left."""
    mesh = make_mesh(jax.devices()[:8], data=2, pipe=2, tensor=2)
    first, second = ("data", "pipe"), ("data", "tensor")
    third = PartitionSpec(None, None, "tensor")
    assert shard_unused_axes(third, (4, 24, 8), mesh) == PartitionSpec(None, first, "tensor")
    assert shard_unused_axes(PartitionSpec(None, "data"), (5, 6), mesh) == PartitionSpec(None, "data")
    assert shard_unused_axes(PartitionSpec(None, second), (4, 12), mesh) == PartitionSpec("pipe", second)
    assert shard_unused_axes(PartitionSpec(), (), mesh) == PartitionSpec()
