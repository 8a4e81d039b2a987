"""Tokens per second of a training step, beside PyTorch's in the same run, and how much of it is matrix products.

    python benchmarks/throughput.py [PRESET] [train.py's flags] [--peer torch] [--device cpu|gpu] [--threads N]
        [--rounds N] [--steps N] [--json]

PRESET is benchmarks/gpt-4x512.toml unless given. Every side is a process of its own; they step in turn, A B A B, and
`ratio` is the median over the rounds of the peer's time by ours, `cpu_ratio` that of CPU time, which says more where
other jobs run on the machine. The peer is the faster of PyTorch eager and compiled: our own GPT-2 in PyTorch, or the
BERT, Llama, Qwen or Mistral of transformers.
`matmul_share` is the time that the step's own matrix products take, each measured alone in the same run and causal
attention's only where a block of queries sees keys, by the time of the step. Model FLOP/s count as the paper does.
"""

import argparse
import datetime
import json
import os
import platform
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from paired import KEEP_FREED_MEMORY, SHARED_GPU, Side, in_turn_with_cpu, parse_own, random_arrays, serve
from pytorch_peers import peer_of

from megajax.core.errors import UserError
from megajax.core.models.family import MatrixProduct, step_flops
from megajax.host.ending import run
from megajax.settings.config import Config
from megajax.settings.flags import parse
from megajax.start.launch import give_back_freed_memory, may_use_gpus, start

BENCHMARKS = Path(__file__).resolve().parent
DEFAULT = str(BENCHMARKS / "gpt-4x512.toml")
PEERS = {"torch, eager": [], "torch, compiled": ["--compile"]}


def work(config: Config) -> None:
    """Be our side: train on one batch of random tokens, and measure the step's products when asked."""
    start(config)
    import flax
    import jax

    from megajax.core.models.family import step_products
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

    device = jax.devices()[0]
    about = {
        "jax": jax.__version__,
        "flax": flax.__version__,
        "device": device.device_kind,
        "compile_seconds": compile_seconds,
        "state_bytes": sum(state_bytes(program).values()),
    }
    serve(step, {"products": products, "memory": memory}, **about)


def compiled_step(config: Config) -> tuple[Any, Any, Any, Any, float]:
    """The program, its compiled train step, a fresh state, a batch of random tokens, and the seconds to compile."""
    from megajax.core.program.program import Program
    from megajax.core.program.synthetic import random_batch
    from megajax.core.program.train_step import train_step

    program = Program.on(config)
    rows = program.local_rows
    arrays = random_batch(config, 0) | random_arrays(config, 0)
    batch = program.put_batch({name: array[rows] for name, array in arrays.items()}, rows)
    state = program.layout.init()
    began = time.perf_counter()
    compiled = train_step(program).lower(state, batch).compile()
    return program, compiled, state, batch, time.perf_counter() - began


def product_seconds(product: MatrixProduct, dtype) -> float:
    """Median time of one of a product's batches, operands as a product likes them best."""
    import jax
    import jax.numpy as jnp

    from megajax.core.program.measured import milliseconds, repeated

    shapes = ((product.batch, product.rows, product.inner), (product.batch, product.inner, product.columns))
    if product.batch == 1:
        shapes = tuple(shape[1:] for shape in shapes)
    x, y = (jax.random.normal(jax.random.key(i), shape, jnp.float32).astype(dtype) for i, shape in enumerate(shapes))
    multiply = repeated(lambda x, y: [jnp.matmul(x, y)])
    return milliseconds({"product": multiply}, [x, y])["product"] / 1e3


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
    commands = {"megajax": [sys.executable, str(Path(__file__)), *flags, "--serve"]}
    if own.peer:
        baseline = [sys.executable, str(BENCHMARKS / "pytorch_baseline.py"), *flags, "--serve", "--device", own.device]
        peers = PEERS if own.device == "cpu" else {"torch, compiled": ["--compile"]}  # all sides share a GPU's memory
        for name, extra in peers.items():
            commands[name] = [*baseline, *extra, "--threads", str(own.threads)]
    load = os.getloadavg()[0]
    sides = []
    try:
        for name, command in commands.items():
            print(f"{name}: compiling and warming up", file=sys.stderr)
            extra = KEEP_FREED_MEMORY if name in PEERS else {}
            sides.append(Side(name, [command], cores=pinned, environment=environment | extra))
        wall, cpu = in_turn_with_cpu(sides, own.rounds, own.steps)
        seconds, cpu_seconds = (dict(zip(commands, times, strict=True)) for times in (wall, cpu))
        peaks = {side.name: side.ask("memory")["peak_bytes"] for side in sides}  # before what the products take
        products = sides[0].ask("products")
    finally:
        for side in sides:
            side.close()
    tokens, flops = config.train.global_batch * config.model.sequence_length, step_flops(config.model, 1)
    flops *= config.train.global_batch
    ours = statistics.median(seconds["megajax"])
    report = {
        "tokens_per_second": tokens / ours,
        "tflops": flops / ours / 1e12,
        "matmul_tflops": products["flops"] / products["seconds"] / 1e12,
        "matmul_share": products["seconds"] / ours,
        "seconds_per_step": ours,
        "peak_bytes": peaks["megajax"],
        "state_bytes": sides[0].about["state_bytes"],
        "products_gflops": products["each"],
    }
    if own.peer:
        best = min(commands.keys() - {"megajax"}, key=lambda name: statistics.median(seconds[name]))
        ratios, cpu_ratios = (
            [theirs / us for theirs, us in zip(times[best], times["megajax"], strict=True)]
            for times in (seconds, cpu_seconds)
        )
        report |= {
            "peer": best,
            "peer_tokens_per_second": tokens / statistics.median(seconds[best]),
            "peer_peak_bytes": peaks[best],
            "ratio": statistics.median(ratios),
            "ratios": ratios,
            "cpu_ratio": statistics.median(cpu_ratios),
            "losses": {side.name: side.about["losses"] for side in sides},
        }
    return report | {
        "run": {
            "command": " ".join(["python", "benchmarks/throughput.py", *sys.argv[1:]]),
            "date": datetime.date.today().isoformat(),
            "machine": f"{platform.machine()}, {len(cores)} cores, load {load:.1f} at the start",
            "device": sides[0].about["device"],
            "threads": own.threads if own.device == "cpu" else None,
            "precision": config.precision,
            "sides": {side.name: side.about for side in sides},
            "seconds": seconds,
            "cpu_seconds": cpu_seconds,
        }
    }


def show(report: dict) -> None:
    """The figures in a few lines."""
    peer = {"tokens/s": report.get("peer_tokens_per_second", 0), "peak": report.get("peer_peak_bytes", 0)}
    print(f"{'':24}{'tokens/s':>12}{'peak GiB':>12}")
    print(f"{'megajax':24}{report['tokens_per_second']:12,.0f}{report['peak_bytes'] / 2**30:12.2f}")
    if "peer" in report:
        print(f"{report['peer']:24}{peer['tokens/s']:12,.0f}{peer['peak'] / 2**30:12.2f}")
        rounds = " ".join(f"{ratio:.3f}" for ratio in report["ratios"])
        print(f"ratio {report['ratio']:.3f}, rounds {rounds}; of CPU time {report['cpu_ratio']:.3f}")
    print(f"model {report['tflops']:.4g} TFLOP/s; its products alone {report['matmul_tflops']:.4g} TFLOP/s")
    print(f"matrix products are {report['matmul_share']:.1%} of the step")


def main() -> None:
    """Parse the command line, then measure, or serve."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--peer", choices=("torch",))
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--threads", type=int, default=min(2, len(os.sched_getaffinity(0))))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--serve", action="store_true")
    own, flags = parse_own(parser)
    if not flags or flags[0].startswith("--"):
        flags = [DEFAULT, *flags]
    config = parse(flags, str(__doc__).partition("\n")[0], "throughput.py [--peer torch] [--device cpu|gpu] [--json]")
    if own.serve:
        work(config)
        return
    report = measure(config, flags, own)
    show(report)
    if own.json:
        print(json.dumps(report))


if __name__ == "__main__":
    run(main)
