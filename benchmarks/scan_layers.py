"""Layers as one scan or unrolled: speed of the demo's step, and how compile time grows.

    python benchmarks/scan_layers.py [--rounds 9]

Prints one JSON object a line: tokens/s of both forms from paired runs A B A B beside the machine's matrix-product rate,
then the compile time of scanned and unrolled steps for several numbers of layers, microbatches and simulated devices.
"""

import argparse
import dataclasses
import json
import statistics
import time
from pathlib import Path
from sys import path

path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp

from megajax.core.config import MeshConfig
from megajax.core.models.family import count_parameters
from megajax.core.program.program import Program
from megajax.core.program.synthetic import random_batch
from megajax.core.program.train_step import train_step
from megajax.settings.config import Config
from megajax.settings.presets import load_preset, resolve
from megajax.start.launch import avoid_known_faults

jax.config.update("jax_num_cpu_devices", 8)


def program(config: Config) -> Program:
    """The program of `config` on the first simulated devices."""
    mesh = config.mesh
    return Program.on(config, jax.devices()[: mesh.num_devices])


def matmul_rate(size: int = 2048, rounds: int = 5) -> float:
    """FLOP/s of one large fp32 matrix product."""
    x = jnp.ones((size, size), jnp.float32)
    product = jax.jit(jnp.matmul)
    product(x, x).block_until_ready()
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        product(x, x).block_until_ready()
        times.append(time.perf_counter() - start)
    return 2 * size**3 / statistics.median(times)


def speed(config: Config, rounds: int) -> None:
    """Tokens/s of the scanned and the unrolled step in turn."""
    forms = {}
    for scan in ("true", "false"):
        one = program(dataclasses.replace(config, model=dataclasses.replace(config.model, scan_layers=scan)))
        batch = one.put_batch(random_batch(one.config, 0), one.local_rows)
        forms[scan] = [train_step(one), one.layout.init(), batch]
    times: dict[str, list[float]] = {scan: [] for scan in forms}
    for _ in range(rounds + 1):  # the first round compiles
        for scan, form in forms.items():
            step, state, batch = form
            start = time.perf_counter()
            form[1], metrics = step(state, batch)
            jax.block_until_ready(metrics)
            times[scan].append(time.perf_counter() - start)
    tokens = config.train.global_batch * config.model.sequence_length
    scanned, unrolled = (statistics.median(times[scan][1:]) for scan in ("true", "false"))
    ratio = statistics.median(b / a for a, b in zip(times["true"][1:], times["false"][1:], strict=True))
    rate = matmul_rate()
    result = {
        "scanned_tokens_per_second": round(tokens / scanned),
        "unrolled_tokens_per_second": round(tokens / unrolled),
        "unrolled_over_scanned_time": round(ratio, 3),
        "matmul_gflops": round(rate / 1e9),
        "scanned_model_gflops": round(6 * count_parameters(config.model) * tokens / scanned / 1e9),
    }
    print(json.dumps(result), flush=True)


def compile_time(config: Config, scan: str, layers: int, microbatches: int, mesh: MeshConfig) -> None:
    """Seconds to trace and compile one step."""
    model = dataclasses.replace(config.model, num_layers=layers, scan_layers=scan)
    train = dataclasses.replace(config.train, global_batch=microbatches * mesh.data, microbatch=1)
    one = program(dataclasses.replace(config, model=model, train=train, mesh=mesh))
    state = jax.eval_shape(one.layout.init)
    tokens = jax.ShapeDtypeStruct((train.global_batch, model.sequence_length), jnp.int32)
    start = time.perf_counter()
    train_step(one).lower(state, {"tokens": tokens, "targets": tokens}).compile()
    result = {"scan_layers": scan, "layers": layers, "microbatches": microbatches}
    print(json.dumps(result | {"mesh": list(dataclasses.astuple(mesh)), "compile_s": time.perf_counter() - start}))


def main() -> None:
    avoid_known_faults()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    config = resolve(load_preset("demo"))
    speed(config, parser.parse_args().rounds)
    one = MeshConfig()
    cases = [("true", n, 8, one) for n in (4, 16, 64)] + [("false", n, 8, one) for n in (4, 16)]
    cases += [("true", 16, m, one) for m in (1, 64)]
    meshes = [(2, 1, 1), (8, 1, 1), (1, 1, 2), (1, 1, 8), (1, 2, 1), (1, 8, 1), (2, 2, 2)]
    cases += [("true", 16, 8, MeshConfig(data=d, pipe=p, tensor=t)) for d, p, t in meshes]
    for case in cases:
        compile_time(config, *case)


if __name__ == "__main__":
    main()
