"""Whether the devices of this process can hold a run, before anything is allocated."""

import contextlib
import math
import os
from pathlib import Path

import jax
import jax.numpy as jnp

from megajax.core.errors import UserError
from megajax.core.program.memory import computed_bytes, factor_bytes, gathered_bytes, kept_bytes, whole_bytes
from megajax.core.program.program import Program


def check_memory(program: Program, *, training: bool, rows: int = 0) -> None:
    """Check, before anything is allocated, that this process's devices can hold what is certainly needed: weights; when
    training, optimizer state and the factors of deferred weight gradients; and for one microbatch the logits, the
    scores of one attention block, and each layer's output (one layer's without training) for `rows` rows that a device
    computes at once. More is needed in reality, so what passes may still not fit.

    Raises:
        UserError: they cannot hold it.
    """
    config, layout = program.config, program.layout
    parts = {"weights": computed_bytes(layout)}
    if training:
        parts = kept_bytes(layout) | gathered_bytes(layout) | whole_bytes(layout)
    if training and program.schedule.deferral is not None:
        parts["factors of deferred weight gradients"] = program.schedule.num_factor_slots * factor_bytes(program)
    parts |= _microbatch_bytes(program, rows, every_layer=training and config.train.remat != "stage")
    devices = [device for device in program.mesh.devices.flat if device.process_index == jax.process_index()]
    available = _device_bytes(devices)
    if sum(parts.values()) > available:
        model, needed = config.model, ", ".join(f"{name} {_gib(size)}" for name, size in parts.items() if size > 2**26)
        raise UserError(
            f"--model.num-layers {model.num_layers}, --model.hidden-size {model.hidden_size}, "
            f"--model.vocab-size {model.vocab_size}, --model.sequence-length {model.sequence_length} "
            f"and --train.microbatch {config.train.microbatch} need {_gib(sum(parts.values()))} on "
            f"each of {len(devices)} devices ({needed}), which have {_gib(available)}; valid: use a "
            "smaller model or more devices"
        )


def _microbatch_bytes(program: Program, rows: int, every_layer: bool) -> dict[str, int]:
    """Bytes on one device for `rows` rows that are computed at once, by part."""
    config, model, backend = program.config, program.config.model, program.backend
    width = jnp.dtype(program.layout.compute_dtype).itemsize
    shapes = program.form.shapes(rows, tokens=model.sequence_length)
    tokens, block = math.prod(shapes["tokens"]), min(backend.block_of(model.sequence_length), model.sequence_length)
    stacks = program.layout.stacks.values()
    layers = sum(stack.num_chunks * stack.layers_per_chunk for stack in stacks) if every_layer else 1
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
    limits = [math.inf]
    with contextlib.suppress(OSError, ValueError):
        limits.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    for limit in "/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes":
        with contextlib.suppress(OSError, ValueError):  # "max" means no limit
            limits.append(int(Path(limit).read_text()))
    return min(limits)


def _gib(size: float) -> str:
    return f"{size / 2**30:,.1f} GiB"
