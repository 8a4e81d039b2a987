"""One part of `gpu_node.py`, by all processes of a run: its cases one after the other, each a line of JSON.

    gpu_node_cases.py --part collectives|axes|recipes --device gpu|cpu [--simulated N] [--reference] [--first N]
        [--seconds N] [--distributed.…]

--reference: on one device, what the axes are compared with.
"""

import json
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import paired

from megajax.host.ending import run
from megajax.settings.config import Config
from megajax.settings.flags import parse
from megajax.start.launch import start

STEPS = 3
SIZES = [2**20, 2**24, 2**27, 2**30]  # bytes of the whole array of a collective
SMALL_SIZES = [2**16, 2**20]  # without GPUs
CALLS = 10  # of a collective, each time
Case = tuple[str, Callable[[], dict]]

# The axes: small models in fp32, so that only the order of sums differs.
TINY = "--precision fp32 --model.num-layers 8 --model.hidden-size 64 --model.num-heads 8 --model.sequence-length 128 "
TINY += "--model.vocab-size 1000 --train.global-batch 16 --train.microbatch 1"
MODELS = {
    "dense": f"llama-demo {TINY} --model.num-kv-heads 8 --model.mlp-size 128",
    "mixture": f"moe-demo {TINY} --model.num-kv-heads 8 --model.num-experts 16 --model.expert-size 32",
    "dropless": f"moe-demo {TINY} --model.num-kv-heads 8 --model.num-experts 16 --model.expert-size 32 "
    "--model.expert-capacity 0",
}
AXES = {  # name -> model and mesh; N is the number of devices, H half of it
    "data, ZeRO-1": ("dense", "--mesh.data N"),
    "data, ZeRO-0": ("dense", "--mesh.data N --optimizer.zero 0"),
    "data, ZeRO-3": ("dense", "--mesh.data N --optimizer.zero 3"),
    "tensor": ("dense", "--mesh.tensor N"),
    "tensor, sequence split": ("dense", "--mesh.tensor N --sequence-parallel"),
    "pipe, 1F1B": ("dense", "--mesh.pipe N"),
    "pipe, interleaved, deferred": (
        "dense",
        "--mesh.data 2 --mesh.pipe H --pipeline.schedule interleaved --pipeline.chunks 2 --pipeline.vocabulary split "
        "--pipeline.weight-gradients deferred",
    ),
    "context, heads": ("dense", "--mesh.context N --model.context-attention heads"),
    "context, gather": ("dense", "--mesh.context N --model.context-attention gather"),
    "expert": ("mixture", "--mesh.expert N"),
    "expert, dropless": ("dropless", "--mesh.expert N"),
    "data 2, tensor": ("dense", "--mesh.data 2 --mesh.tensor H"),
}

# The fastest of 8 by `megajax plan --search`, with few microbatches (docs/decoders.md).
RECIPES = {
    "h200": {
        "llama3-8b, data 8": "llama3-8b --mesh.data 8 --train.microbatch 2 --train.global-batch 64",
        "llama3-8b, data 8, fp8": "llama3-8b --mesh.data 8 --train.global-batch 64 --precision fp8",
        "llama3-8b, tensor 8": "llama3-8b --mesh.tensor 8 --sequence-parallel --train.global-batch 8",
        "gpt2-2.5b, data 8": "gpt2-2.5b --mesh.data 8 --train.microbatch 32 --train.remat selective "
        "--model.dropout 0 --train.global-batch 512",
    },
    "h100": {
        "llama3-8b, data 4, pipe 2": "llama3-8b --mesh.data 4 --mesh.pipe 2 --pipeline.schedule interleaved "
        "--pipeline.chunks 8 --pipeline.vocabulary split --train.global-batch 64",
        "llama3-8b, tensor 8": "llama3-8b --mesh.tensor 8 --sequence-parallel --train.global-batch 8",
        "gpt2-2.5b, data 8": "gpt2-2.5b --mesh.data 8 --train.microbatch 16 --train.remat selective "
        "--model.dropout 0 --train.global-batch 256",
    },
}
TINY_RECIPES = {  # without GPUs
    "llama, data 8": MODELS["dense"] + " --mesh.data 8",
    "llama, data 4, pipe 2": MODELS["dense"] + " --mesh.data 4 --mesh.pipe 2 --pipeline.schedule interleaved "
    "--pipeline.chunks 2 --pipeline.vocabulary split",
}


def collectives(machine: Any) -> list[Case]:
    """Every kind by size, on all devices at once: the time of a call and the bytes that a device sends in it."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax import lax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from megajax.core.config import MeshConfig
    from megajax.core.program.communication import Collective
    from megajax.plan.communication import seconds_of

    count, axis = jax.device_count(), "data"
    mesh, whole, shards = Mesh(np.array(jax.devices()), (axis,)), PartitionSpec(), PartitionSpec(axis)
    ring = [(i, (i + 1) % count) for i in range(count)]
    # What each does, how its operand and its result are sharded, and how often the operand on a device is in the whole.
    kinds: Mapping[str, tuple[Callable, PartitionSpec, PartitionSpec, int]] = {
        "all-reduce": (lambda x: lax.psum(x, axis), shards, whole, 1),
        "all-gather": (lambda x: lax.all_gather(x, axis, tiled=True), shards, shards, count),
        "reduce-scatter": (lambda x: lax.psum_scatter(x, axis, tiled=True), shards, shards, 1),
        "all-to-all": (lambda x: lax.all_to_all(x, axis, 0, 0, tiled=True), shards, shards, 1),
        "permute": (lambda x: lax.ppermute(x, axis, ring), shards, shards, 1),
    }

    def case(kind: str, num_bytes: int) -> Callable[[], dict]:
        def measured() -> dict:
            does, operand, result, times = kinds[kind]
            own = max(count, num_bytes // times // 2 // count * count)  # bf16 numbers of a device's operand
            place = NamedSharding(mesh, operand)
            x = jax.jit(lambda: jnp.ones(own * count, jnp.bfloat16), out_shardings=place)()
            call = jax.jit(jax.shard_map(does, mesh=mesh, in_specs=operand, out_specs=result))
            jax.block_until_ready(call(x))
            seconds = []
            for _ in range(3):
                began = time.perf_counter()
                jax.block_until_ready([call(x) for _ in range(calls)][-1])
                seconds.append((time.perf_counter() - began) / calls)
            asked = Collective(kind, (axis,), ((own,),), 2 * own, 1)
            planned, sent = seconds_of(asked, MeshConfig(data=count), machine), asked.bytes_sent(count)
            took = statistics.median(seconds)
            return {
                "ms": 1e3 * took,
                "planned_ms": 1e3 * planned,
                "gb_per_s": sent / took / 1e9,
                "planned_gb_per_s": sent / planned / 1e9 if planned else 0.0,
            }

        return measured

    sizes, calls = (SMALL_SIZES, 1) if jax.default_backend() == "cpu" else (SIZES, CALLS)
    return [(f"{kind}, {size / 2**20:g} MiB", case(kind, size)) for kind in kinds for size in sizes]


def axes(one: bool) -> list[Case]:
    """Losses and gradient norms of three steps on every mesh, or on one device."""
    import jax

    from megajax.core.program.program import Program
    from megajax.core.program.train_step import train_step
    from megajax.data.synthetic import placed_batch

    count = jax.device_count()
    scanned = ["--model.scan-layers", "true"] if jax.default_backend() == "cpu" else []  # compiles faster

    def case(model: str, mesh: str) -> Callable[[], dict]:
        def measured() -> dict:
            words = mesh.replace("N", str(count)).replace("H", str(count // 2))
            config = parse([*MODELS[model].split(), *words.split(), *scanned], "")
            program = Program.on(config, jax.devices()[: 1 if one else None])
            state, found = program.layout.init(), []
            for number in range(STEPS):
                state, metrics = train_step(program)(state, placed_batch(program, number))
                found.append([float(metrics[name]) for name in ("loss", "grad_norm")])
            losses, norms = map(list, zip(*found, strict=True))
            return {"model": model, "losses": losses, "norms": norms}

        return measured

    if one:
        return [(model, case(model, "")) for model in MODELS]
    return [(name, case(model, mesh)) for name, (model, mesh) in AXES.items()]


def recipes(machine: Any) -> list[Case]:
    """A few steps of each, beside what the plan predicts."""
    import jax
    from throughput import compiled_step

    from megajax.core.models.flops import step_flops
    from megajax.plan.machines import peak_of_device
    from megajax.plan.time import step_time

    def case(flags: str) -> Callable[[], dict]:
        def measured() -> dict:
            config = parse(flags.split(), "")
            _, compiled, state, batch, compiling = compiled_step(config)
            seconds = []
            for _ in range(2 + STEPS):
                began = time.perf_counter()
                state, metrics = compiled(state, batch)
                jax.block_until_ready(metrics)
                seconds.append(time.perf_counter() - began)
            took, rows = statistics.median(seconds[2:]), config.train.global_batch
            peak = peak_of_device(jax.devices()[0].device_kind, "bf16")
            flops = step_flops(config.model, rows) / took / jax.device_count()
            memory = jax.local_devices()[0].memory_stats() or {}
            return {
                "flags": flags,
                "ms": 1e3 * took,
                "planned_ms": 1e3 * step_time(config, machine).seconds,
                "tokens_per_second": rows * config.model.sequence_length / took,
                "mfu": flops / peak if peak else None,
                "peak_gib": memory.get("peak_bytes_in_use", 0) / 2**30,
                "compile_seconds": compiling,
            }

        return measured

    large = RECIPES.get(machine.name, RECIPES["h100"])
    return [(name, case(flags)) for name, flags in (large if jax.default_backend() != "cpu" else TINY_RECIPES).items()]


def first_config(own: Any, flags: list[str]) -> Config:
    """What JAX is started with: the precision of the part's cases, the devices, the other processes."""
    precision = "bf16" if own.part == "recipes" and own.device == "gpu" else "fp32"
    words = ["demo", "--precision", precision, *flags]
    if own.simulated:
        words += ["--simulate-devices", str(own.simulated)]
    return parse(words, "")


def main() -> None:
    """Start JAX, then the cases from the first on, as far as the time suffices."""
    own, flags, _ = paired.own_flags(
        part=("collectives", "axes", "recipes"), device=("gpu", "cpu"), simulated=0, reference=False, first=0,
        seconds=600.0,
    )  # fmt: skip
    end = time.monotonic() + own.seconds
    start(first_config(own, flags))
    import jax

    from megajax.host.processes import is_first_process, of_first_process
    from megajax.plan.machines import machine_of_device

    def speak(line: dict) -> None:
        if is_first_process():
            print(json.dumps(line), flush=True)

    kind = jax.devices()[0].device_kind
    machine = machine_of_device(kind, "bf16")
    speak({"device": kind, "devices": jax.device_count(), "plan": machine.name, "jax": jax.__version__})
    if own.part == "axes":
        cases = axes(own.reference)
    else:
        cases = collectives(machine) if own.part == "collectives" else recipes(machine)
    for number, (name, measured) in enumerate(cases):
        if number < own.first:
            continue
        if of_first_process(time.monotonic() > end):
            speak({"number": number, "case": name, "left_out": "no time left"})
            continue
        speak({"number": number, "case": name, "begun": True})
        try:
            result = measured()
        except Exception as error:  # of many kinds; if only this process has it, the others hang, and all begin again
            result = {"failed": f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"[:200]}
        speak({"number": number, "case": name, **result})


if __name__ == "__main__":
    run(main)
