"""What a device holds in training besides activations: weights, optimizer state and gradients, in bytes, and whether
they fit.

Per parameter, with d the size of `data` (Megatron-LM's figures, docs/memory.md): 18 bytes in fp16 or bf16 with fp32
gradients, or 6 + 12/d with ZeRO-1; 20 and 4 + 16/d with gradients in half precision; 16 and 8 + 8/d in fp32.
"""

import contextlib
import dataclasses
import math
import os
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from megajax.core.errors import UserError
from megajax.core.parallel.shards import NOT_SHARDED
from megajax.core.program.bind import trace_pipeline
from megajax.core.program.program import Program
from megajax.core.program.state import StateLayout
from megajax.core.trees import Tree


def state_bytes(program: Program) -> dict[str, int]:
    """Bytes on one device by part: those of `kept_bytes`, plus those of `gathered_bytes` and `gradients`, which exist
    during a step: their sums, and, if these are in half precision, the fp32 copy for the optimizer. As in the published
    figures, fp32 shards of fp32 sums are not counted twice. Nothing is computed."""
    layout = program.layout
    others = jnp.dtype(program.gradient_dtype) != jnp.dtype(layout.main_dtype)
    gradients = trace_pipeline(program, lambda pipeline: _bytes((*pipeline.totals()[:2], pipeline.sums(0))))
    trained = sum(weight.size(weight.owned) for weight in jax.tree.leaves(layout.trained(layout.weights)))
    gradients += trained * jnp.dtype(layout.main_dtype).itemsize if others else 0
    return kept_bytes(layout) | gathered_bytes(layout) | {"gradients": gradients}


def residual_bytes(program: Program) -> int:
    """Bytes of residuals that a device saves for one microbatch and chunk until its backward."""
    return trace_pipeline(program, lambda pipeline: _bytes(pipeline.residual_types()))


def factor_bytes(program: Program) -> int:
    """Bytes of factors that a device saves for one chunk until its weight gradients are computed."""
    return trace_pipeline(program, lambda pipeline: _bytes(pipeline.factor_types()))


def _bytes(tree: Tree) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def kept_bytes(layout: StateLayout) -> dict[str, int]:
    """Bytes on one device of everything that lasts from step to step, by part: `weights`, `main weights`, `moments`,
    with `train.ema` the `average`, and the `float8 copies` of frozen weights if there are any."""
    state, specs = layout.shapes, layout.specs
    others = {"average": (state.average, specs.average), "float8 copies": (state.copies, specs.copies)}
    return {
        "weights": _local_bytes(layout, state.params, specs.params),
        "main weights": 0 if state.main is None else _local_bytes(layout, state.main, specs.main),
        "moments": _local_bytes(layout, state.optimizer, specs.optimizer),
    } | {name: _local_bytes(layout, *each) for name, each in others.items() if each[0]}


def gathered_bytes(layout: StateLayout) -> dict[str, int]:
    """Bytes on one device of the layers' `gathered weights` during a step, if a step leaves them sharded."""
    late = jax.tree.map(lambda weight: weight.late, layout.weights)
    shapes = jax.tree.map(lambda shape, late: shape if late else None, layout.computed_shapes, late)
    specs = jax.tree.map(lambda spec, late: spec if late else None, layout.computed_specs, late)
    return {"gathered weights": _local_bytes(layout, shapes, specs)} if layout.gathers_late else {}


def whole_bytes(layout: StateLayout) -> dict[str, int]:
    """Bytes on one device of the whole gradients, weights and updates during a step, if the optimizer needs these."""
    whole = 3 * _bytes(layout.trained(layout.canonical_shapes.params))
    return {"whole gradients, weights and updates": whole} if layout.mixing else {}


def left_by_zero(layout: StateLayout) -> tuple[list[str], int, int]:
    """What ZeRO cannot save: the weights without a dim that it can shard, by name; bytes on one device of their main
    copies, moments and averages; and bytes of the zeros that pad those of other weights."""
    names, whole, padding = dict[str, None](), 0, 0
    for path, leaf in jax.tree_util.tree_leaves_with_path(dataclasses.replace(layout.shapes, params=None, copies=None)):
        weight = layout.weight_at(path)
        if weight is None or not weight.zero_stage:
            continue
        size = math.prod(weight.stage_shape(weight.owned)) * leaf.dtype.itemsize
        if weight.zero == NOT_SHARDED:
            whole, names["/".join(weight.path)] = whole + size, None
        elif weight.zero.padding:
            padding += size * weight.zero.padding // weight.padded[weight.zero.dim]
    return [*names], whole, padding


def _local_bytes(layout: StateLayout, shapes: Tree, specs: Tree) -> int:
    def size(leaf: jax.ShapeDtypeStruct, spec: PartitionSpec) -> int:
        return math.prod(NamedSharding(layout.mesh, spec).shard_shape(leaf.shape)) * leaf.dtype.itemsize

    return sum(jax.tree.leaves(jax.tree.map(size, shapes, specs)))


def check_memory(program: Program, *, training: bool, rows: int = 0) -> None:
    """Check, before anything is allocated, that this process's devices can hold what is certainly needed: weights; when
    training, optimizer state and the factors of deferred weight gradients; and for one microbatch the logits, the
    scores of one attention block, and each layer's output (one layer's without training) for `rows` rows that a device
    computes at once. More is needed in reality, so what passes may still not fit.

    Raises:
        UserError: they cannot hold it.
    """
    config, layout = program.config, program.layout
    computed = {"weights": _local_bytes(layout, layout.computed_shapes, layout.computed_specs)}
    parts = kept_bytes(layout) | gathered_bytes(layout) | whole_bytes(layout) if training else computed
    if training and program.schedule.deferral is not None:
        parts["factors of deferred weight gradients"] = program.schedule.num_factor_slots * factor_bytes(program)
    parts |= _microbatch_bytes(program, rows, every_layer=training and config.train.remat != "stage")
    devices = [device for device in program.mesh.devices.flat if device.process_index == jax.process_index()]
    there = _device_bytes(devices)
    if sum(parts.values()) > there:
        model, needed = config.model, ", ".join(f"{name} {_gib(size)}" for name, size in parts.items() if size > 2**26)
        raise UserError(
            f"--model.num-layers {model.num_layers}, --model.hidden-size {model.hidden_size}, "
            f"--model.vocab-size {model.vocab_size}, --model.sequence-length {model.sequence_length} "
            f"and --train.microbatch {config.train.microbatch} need {_gib(sum(parts.values()))} on "
            f"each of {len(devices)} devices ({needed}), which have {_gib(there)}; valid: use a "
            "smaller model or more devices"
        )


def _microbatch_bytes(program: Program, rows: int, every_layer: bool) -> dict[str, int]:
    """Bytes on one device for `rows` rows that are computed at once, by part."""
    config, model, backend = program.config, program.config.model, program.backend
    width = jnp.dtype(program.layout.compute_dtype).itemsize
    shapes = program.form.shapes(rows, tokens=model.sequence_length)
    tokens, block = math.prod(shapes["tokens"]), min(backend.block_of(model.sequence_length), model.sequence_length)
    placement = program.layout.placement
    layers = placement.num_chunks * placement.layers_per_chunk if every_layer else 1
    group = model.num_heads // model.num_kv_heads
    at_once = group * block * model.sequence_length * max(4, width)  # for one key head
    of_all_tokens = program.model.boundary.context in ("none", "heads")
    scores = at_once if rows and not backend.fused_attention and of_all_tokens else 0
    split = config.mesh.tensor * (config.mesh.pipe if config.splits_vocabulary else 1)
    here = tokens // config.mesh.context // (config.mesh.tensor if config.sequence_parallel else 1)
    predicted = max(math.prod(shapes[name]) for name in program.form.targets.values()) // config.mesh.context
    return {
        "activations": layers * here * model.hidden_size * width,
        "attention scores": scores,
        "logits": predicted * model.padded_vocab_size // split * width if model.head == "pretraining" else 0,
    }


def _device_bytes(devices: list[jax.Device]) -> float:
    """Memory of each of this process's devices; CPU devices share the machine's."""
    if devices[0].platform == "cpu":
        return _machine_bytes() / len(devices)
    limits = [(device.memory_stats() or {}).get("bytes_limit", math.inf) for device in devices]
    return min(limits)


def _machine_bytes() -> float:
    """Memory of this machine, or of the container that this process runs in."""
    found = [math.inf]
    with contextlib.suppress(OSError, ValueError):
        found.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    for limit in "/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes":
        with contextlib.suppress(OSError, ValueError):  # "max" means no limit
            found.append(int(Path(limit).read_text()))
    return min(found)


def _gib(size: float) -> str:
    return f"{size / 2**30:,.1f} GiB"
