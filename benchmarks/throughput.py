"""Tokens per second of a training step, beside PyTorch's in the same run, and how much of it is matrix products.

    python benchmarks/throughput.py [PRESET] [train.py's flags] [--peer torch] [--device cpu|gpu] [--threads N]
        [--rounds N] [--steps N] [--python FILE] [--trace FOLDER] [--json]

PRESET is benchmarks/gpt-4x512.toml unless given. Every side is a process of its own; they step in turn, A B A B, and
`ratio` is the median over the rounds of the peer's time by ours, `cpu_ratio` that of CPU time, which says more where
other jobs run on the machine. The peer is the faster of PyTorch eager and compiled: our own GPT-2 in PyTorch, or the
BERT, Llama, Qwen or Mistral of transformers. As in training, a step is awaited after the next one has started.
`matmul_share` is the time that the step's own matrix products take, each measured alone in the same run and causal
attention's only where a block of queries sees keys, by the time of the step. Model FLOP/s count as the paper does. Our
side runs in --python, where JAX may be another version.

With --trace, on a GPU, two further steps are traced: FOLDER/kernels.txt has milliseconds and launches a step of every
kernel, most time first, and FOLDER/step.hlo the compiled program that names most of them. All steps then start their
kernels one by one, and not as a graph.
"""

import argparse
import dataclasses
import json
import os
import statistics
import sys
import time
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import paired
from paired import BENCHMARKS, KEEP_FREED_MEMORY, SHARED_GPU, Side, ratios
from pytorch.peers import peer_of

from megajax.core.errors import UserError
from megajax.core.models.flops import MatrixProduct, step_flops
from megajax.host.ending import run
from megajax.plan.machines import peak_of_device
from megajax.settings.config import Config
from megajax.start.launch import give_back_freed_memory, may_use_gpus, start

PEERS = {"torch, eager": [], "torch, compiled": ["--compile"]}
TRACED = 2  # steps


def work(config: Config, folder: Path | None) -> None:
    """Be our side: train on one batch of random tokens; when asked, measure the step's products, or trace steps."""
    if folder is not None:
        config = dataclasses.replace(config, profile="1")  # kernels one by one, not as a graph
    start(config)
    import flax
    import jax

    from megajax.core.models.flops import step_products
    from megajax.core.program.memory import state_bytes

    program, compiled, state, batch, compile_seconds = compiled_step(config)
    give_back_freed_memory()  # as the training loop does

    def step() -> jax.Array:
        nonlocal state
        state, metrics = compiled(state, batch)
        return metrics["loss"]

    def products() -> dict:
        block = program.backend.block_of(config.model.sequence_length)
        kernel = program.backend.attention[0] == "kernel"
        if kernel or (program.backend.fused_attention and config.model.dropout == 0):
            block = config.model.sequence_length  # cuDNN's own products are not known: counted whole
        of_microbatch = step_products(config.model, config.train.microbatch, block)
        dtype = jax.tree.leaves(program.layout.shapes.params)[0].dtype
        seconds = [product_seconds(product, dtype) for product in of_microbatch]
        return {
            "seconds": program.num_microbatches * sum(s * p.count for s, p in zip(seconds, of_microbatch, strict=True)),
            "flops": program.num_microbatches * sum(product.flops for product in of_microbatch),
            "each": {
                product.name: product.flops / product.count / second / 1e9
                for product, second in zip(of_microbatch, seconds, strict=True)
            },
        }

    def memory() -> dict:
        statistics_ = jax.local_devices()[0].memory_stats()
        return {"peak_bytes": statistics_["peak_bytes_in_use"] if statistics_ else resident_bytes()}

    def trace() -> dict:
        if folder is None:
            return {}
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "step.hlo").write_text(compiled.as_text())
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = options.host_tracer_level = 0
        jax.profiler.start_trace(folder, profiler_options=options)
        jax.block_until_ready([step() for _ in range(TRACED)])
        jax.profiler.stop_trace()
        return kernels(folder)

    device = jax.devices()[0]
    about = {
        "jax": jax.__version__,
        "flax": flax.__version__,
        "device": device.device_kind,
        "compile_seconds": compile_seconds,
        "state_bytes": sum(state_bytes(program).values()),
    }
    paired.serve(step, {"products": products, "memory": memory, "trace": trace}, **about)


def compiled_step(config: Config) -> tuple[Any, Any, Any, Any, float]:
    """The program, its compiled train step, a fresh state, a batch of random tokens, and the seconds to compile."""
    from megajax.core.program.program import Program
    from megajax.core.program.train_step import train_step
    from megajax.data.synthetic import random_batch

    program = Program.on(config)
    rows = program.local_rows
    arrays = random_batch(config, 0) | paired.random_arrays(config, 0)
    batch = program.put_batch({name: array[rows] for name, array in arrays.items()}, rows)
    state = program.layout.init()
    began = time.perf_counter()
    compiled = train_step(program).lower(state, batch).compile()
    return program, compiled, state, batch, time.perf_counter() - began


def step_seconds(program: Any, steps: int, *, warm_up: int) -> float:
    """Median time of a step that is awaited before the next one."""
    import jax

    from megajax.core.program.train_step import train_step
    from megajax.data.synthetic import placed_batch

    state, batch, seconds = program.layout.init(), placed_batch(program, 0), []
    for _ in range(warm_up + steps):
        began = time.perf_counter()
        state, metrics = train_step(program)(state, batch)
        jax.block_until_ready(metrics)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[warm_up:])


def kernels(folder: Path) -> dict:
    """Write the kernels of the folder's last trace; milliseconds a step of kernels, and of gaps between them."""
    import jax

    *_, last = sorted(folder.glob("plugins/profile/*/*.xplane.pb"))
    planes = jax.profiler.ProfileData.from_file(str(last)).planes
    lines = [line for plane in planes if plane.name.startswith("/device:GPU") for line in plane.lines]
    events = sorted(
        (each.start_ns, each.start_ns + each.duration_ns, each.name) for line in lines for each in line.events
    )
    if not events:
        raise UserError(f"--trace {folder}: the trace has no kernels; valid: on a GPU")
    own: dict[str, list[float]] = defaultdict(list)
    busy, end = 0.0, 0.0
    for begin, until, name in events:
        own[name].append((until - begin) / 1e6 / TRACED)
        busy, end = busy + max(0.0, until - max(begin, end)), max(end, until)
    rows = sorted(own.items(), key=lambda item: -sum(item[1]))
    text = "".join(f"{sum(each):9.3f} ms {len(each) / TRACED:7.1f}  {name}\n" for name, each in rows)
    (folder / "kernels.txt").write_text(text)
    span = end - events[0][0]
    return {"kernel_milliseconds": busy / 1e6 / TRACED, "gap_milliseconds": (span - busy) / 1e6 / TRACED}


def product_seconds(product: MatrixProduct, dtype) -> float:
    """Median time of one of a product's batches, operands as a product likes them best."""
    import jax
    import jax.numpy as jnp
    from device_time import milliseconds

    shapes = ((product.batch, product.rows, product.inner), (product.batch, product.inner, product.columns))
    if product.batch == 1:
        shapes = tuple(shape[1:] for shape in shapes)
    x, y = (jax.random.normal(jax.random.key(i), shape, jnp.float32).astype(dtype) for i, shape in enumerate(shapes))
    return milliseconds(lambda x, y: [jnp.matmul(x, y)], [x, y]) / 1e3


def resident_bytes() -> int:
    """The most memory that this process has had."""
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure(config: Config, flags: list[str], own: argparse.Namespace) -> dict:
    """Run the sides in turn and put their figures together."""
    cores = sorted(os.sched_getaffinity(0))
    if own.device == "cpu" and own.threads > len(cores):
        raise UserError(f"--threads {own.threads}; valid: 1 to {len(cores)}, the cores of this machine")
    if own.peer and not (peer := peer_of(config.model)).installed:
        packages = " or ".join(peer.packages)
        raise UserError(f"--peer torch: {packages} is not installed; pip install -e '.[peer]' brings them")
    if own.device == "gpu" and not may_use_gpus(os.environ):
        raise UserError(
            "--device gpu: JAX's CUDA packages are not installed or JAX_PLATFORMS rules them out; valid: cpu"
        )
    pinned = [",".join(map(str, cores[: own.threads]))] if own.device == "cpu" else None
    environment = {"JAX_PLATFORMS": "cpu" if own.device == "cpu" else "cuda,cpu"}
    if own.peer and own.device == "gpu":
        environment |= SHARED_GPU
    trace = ["--trace", str(own.trace.absolute())] if own.trace else []
    commands = {"megajax": [own.python, str(Path(__file__)), *flags, "--serve", *trace]}
    if own.peer:
        baseline = [sys.executable, str(BENCHMARKS / "pytorch" / "baseline.py"), *flags, "--serve"]
        peers = PEERS if own.device == "cpu" else {"torch, compiled": ["--compile"]}  # all sides share a GPU's memory
        for name, extra in peers.items():
            commands[name] = [*baseline, "--device", own.device, *extra, "--threads", str(own.threads)]
    about = paired.this_run()
    with ExitStack() as stack:
        sides = []
        for name, command in commands.items():
            print(f"{name}: compiling and warming up", file=sys.stderr)
            extra = KEEP_FREED_MEMORY if name in PEERS else {}
            sides.append(stack.enter_context(Side(name, [command], cores=pinned, environment=environment | extra)))
        wall, cpu = paired.in_turn(sides, own.rounds, own.steps)
        peaks = {side.name: side.ask("memory")["peak_bytes"] for side in sides}  # before what the products take
        traced, products = sides[0].ask("trace"), sides[0].ask("products")
    seconds, cpu_seconds = (dict(zip(commands, times, strict=True)) for times in (wall, cpu))
    tokens, flops = config.train.global_batch * config.model.sequence_length, step_flops(config.model, 1)
    flops *= config.train.global_batch
    ours, device = statistics.median(seconds["megajax"]), sides[0].about["device"]
    peak = peak_of_device(device, config.precision)
    report = {
        "tokens_per_second": tokens / ours,
        "tflops": flops / ours / 1e12,
        "mfu": flops / ours / config.mesh.num_devices / peak if peak else None,
        "matmul_tflops": products["flops"] / products["seconds"] / 1e12,
        "matmul_share": products["seconds"] / ours,
        "seconds_per_step": ours,
        "peak_bytes": peaks["megajax"],
        "state_bytes": sides[0].about["state_bytes"],
        "products_gflops": products["each"],
        **traced,
    }
    if own.peer:
        best = min(commands.keys() - {"megajax"}, key=lambda name: statistics.median(seconds[name]))
        of_seconds, of_cpu = (ratios(times[best], times["megajax"]) for times in (seconds, cpu_seconds))
        report |= {
            "peer": best,
            "peer_tokens_per_second": tokens / statistics.median(seconds[best]),
            "peer_peak_bytes": peaks[best],
            "ratio": statistics.median(of_seconds),
            "ratios": of_seconds,
            "cpu_ratio": statistics.median(of_cpu),
            "losses": {side.name: side.about["losses"] for side in sides},
        }
    about |= {"device": device, "threads": own.threads if own.device == "cpu" else None, "precision": config.precision}
    about |= {"sides": {side.name: side.about for side in sides}, "seconds": seconds, "cpu_seconds": cpu_seconds}
    return report | {"run": about}


def show(report: dict) -> None:
    """The figures in a few lines."""
    peer = {"tokens/s": report.get("peer_tokens_per_second", 0), "peak": report.get("peer_peak_bytes", 0)}
    print(f"{'':24}{'tokens/s':>12}{'peak GiB':>12}")
    print(f"{'megajax':24}{report['tokens_per_second']:12,.0f}{report['peak_bytes'] / 2**30:12.2f}")
    if "peer" in report:
        print(f"{report['peer']:24}{peer['tokens/s']:12,.0f}{peer['peak'] / 2**30:12.2f}")
        rounds = " ".join(f"{ratio:.3f}" for ratio in report["ratios"])
        print(f"ratio {report['ratio']:.3f}, rounds {rounds}; of CPU time {report['cpu_ratio']:.3f}")
    mfu = f", MFU {report['mfu']:.1%}" if report["mfu"] else ""
    print(f"model {report['tflops']:.4g} TFLOP/s{mfu}; its products alone {report['matmul_tflops']:.4g} TFLOP/s")
    print(f"matrix products are {report['matmul_share']:.1%} of the step")


def main() -> None:
    """Parse the command line, then measure, or serve."""
    threads = min(2, len(os.sched_getaffinity(0)))
    own, flags, config = paired.command_line(
        __doc__, peer=(None, "torch"), device=("cpu", "gpu"), threads=threads, rounds=5, steps=2, trace=Path,
        python=sys.executable, json=False, serve=False,
    )  # fmt: skip
    if own.serve:
        work(config, own.trace)
        return
    report = measure(config, flags, own)
    show(report)
    if own.json:
        print(json.dumps(report))


if __name__ == "__main__":
    run(main)
