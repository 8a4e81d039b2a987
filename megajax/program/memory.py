"""What a device holds for training beside activations: weights, optimizer state and gradients, in bytes.

Per parameter, with d the size of `data` (Megatron-LM's figures, docs/memory.md): 18 bytes in fp16 or bf16 with fp32
gradients, 6 + 12/d with ZeRO-1; 20 and 4 + 16/d with gradients in half precision; 16 and 8 + 8/d in fp32.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from megajax.program.parts import sum_bytes
from megajax.program.program import Program

Tree = Any


def state_bytes(program: Program) -> dict[str, int]:
    """Bytes on one device by part; `weights`, `main weights` and `moments` live from step to step, `gradients` while a
    step runs: their sums, and where those are in half precision what the optimizer gets, in fp32. As in the published
    figures, fp32 shards of fp32 sums are not counted again. Nothing is computed.
    """
    layout = program.layout
    state, specs = layout.shapes, layout.specs

    def local(shapes: Tree, specs: Tree) -> int:
        def size(leaf: jax.ShapeDtypeStruct, spec: PartitionSpec) -> int:
            return math.prod(NamedSharding(layout.mesh, spec).shard_shape(leaf.shape)) * leaf.dtype.itemsize

        return sum(jax.tree.leaves(jax.tree.map(size, shapes, specs)))

    owned = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, layout.main_dtype), state.params)
    converted = jnp.dtype(program.gradient_dtype) != jnp.dtype(layout.main_dtype)
    return {
        "weights": local(state.params, specs.params),
        "main weights": 0 if state.main is None else local(state.main, specs.main),
        "moments": local(state.optimizer, specs.optimizer),
        "gradients": sum_bytes(program) + (local(owned, layout.owned_specs) if converted else 0),
    }
