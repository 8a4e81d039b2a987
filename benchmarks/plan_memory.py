"""What `megajax plan` says of a step's memory beside what XLA allocates: docs/benchmarks/planning.md has some of it.

Every case is compiled in a process of its own, for simulated CPU devices with layers as one scan, or with `--h200`
for H200s (which needs JAX's CUDA packages). A row is what `memory_analysis()` has beside the arguments, what the model
says, and their ratio.

    python benchmarks/plan_memory.py [--h200] [--cases 0 5 12] [--unrolled]
"""

import argparse
import dataclasses
import json
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megajax.core.axes import AXES, CONTEXT
from megajax.core.options import options
from megajax.settings.config import Config
from megajax.settings.presets import load_preset, resolve
from megajax.start.launch import imagine_devices

_SECTIONS = "train.", "pipeline.", "optimizer.", "model.", ""
_ROW = "| {:<16} | {:<8} | {} | {} | {} | {:.2f} |"
CASES = """
gpt2-355m 1x1x1 global_batch=4 microbatch=4 remat=none precision=fp32
gpt2-355m 2x1x2 global_batch=16 microbatch=2 remat=none
gpt2-355m 2x1x4 global_batch=32 microbatch=4 remat=selective sequence_parallel=true
gpt2-355m 2x2x2 global_batch=32 microbatch=2 remat=layer precision=fp32
gpt2-355m 2x2x2 global_batch=32 microbatch=2 remat=layer
gpt2-355m 1x4x2 global_batch=8 microbatch=1 remat=none precision=fp32
gpt2-355m 2x4x1 global_batch=16 microbatch=1 remat=selective schedule=gpipe
gpt2-355m 1x4x2 global_batch=16 microbatch=2 remat=none schedule=interleaved chunks=2 vocabulary=split
gpt2-355m 1x4x2 global_batch=16 microbatch=2 remat=layer weight_gradients=deferred
gpt2-355m 4x2x1 global_batch=32 microbatch=4 remat=stage zero=3
gpt2-355m 8x1x1 global_batch=64 microbatch=8 remat=layer zero=3 precision=fp32
gpt2-355m 8x1x1 global_batch=32 microbatch=4 remat=layer zero=0 precision=fp16
gpt2-8.3b 8x1x8 global_batch=64 microbatch=8
bert-336m 2x1x4 global_batch=64 microbatch=8 remat=none precision=fp32
bert-336m 2x2x2 global_batch=64 microbatch=8 remat=selective precision=fp32
bert-336m 1x4x2 global_batch=32 microbatch=4 remat=none sequence_parallel=true schedule=interleaved chunks=3
bert-336m 8x1x1 global_batch=64 microbatch=4 remat=layer zero=0 precision=fp32
bert-336m 1x8x1 global_batch=32 microbatch=2 remat=stage layer_order=post
bert-336m 4x1x2 global_batch=64 microbatch=16 remat=layer precision=fp16 gradient_dtype=fp16
bert-336m 2x2x2 global_batch=32 microbatch=4 remat=none zero=3 vocabulary=split precision=fp32
bert-336m 1x4x2 global_batch=32 microbatch=4 remat=selective weight_gradients=deferred schedule=gpipe precision=fp32
llama3.2-1b 1x1x8 global_batch=2 microbatch=1 remat=selective precision=fp32
llama3.2-1b 1x1x8 global_batch=2 microbatch=1 remat=none sequence_parallel=true
llama3.2-1b 2x2x2 global_batch=8 microbatch=1 remat=layer sequence_parallel=true precision=fp32
llama3.2-1b 2x4x1 global_batch=8 microbatch=1 remat=selective zero=3 sequence_length=2048
llama3.2-1b 1x2x4 global_batch=8 microbatch=2 remat=none precision=fp32 sequence_length=2048
llama3.2-1b 1x4x2 global_batch=8 microbatch=1 schedule=interleaved chunks=2 vocabulary=split precision=fp32
llama3.2-1b 8x1x1 global_batch=16 microbatch=2 remat=layer sequence_length=1024
llama3-8b 2x1x8 global_batch=4 microbatch=1
llama3-8b 2x4x8 global_batch=16 microbatch=1 sequence_parallel=true precision=fp32
qwen3-0.6b 2x2x2 global_batch=8 microbatch=1 remat=none precision=fp32
qwen3-0.6b 4x1x2 global_batch=16 microbatch=1 remat=selective precision=fp32
mistral-7b 1x2x8 global_batch=4 microbatch=1 remat=layer
gpt2-355m 1x1x1 global_batch=2 microbatch=1 remat=none precision=fp64
""".strip().splitlines()
GPU_CASES = """
gpt2-355m 1x1x1 global_batch=16 microbatch=8 remat=none dropout=0.0
gpt2-355m 2x2x2 global_batch=32 microbatch=2 remat=layer dropout=0.0
gpt2-1.2b 8x1x1 global_batch=128 microbatch=8 remat=selective
gpt2-8.3b 8x1x8 global_batch=64 microbatch=8
gpt2-8.3b 1x8x8 global_batch=64 microbatch=4 remat=selective dropout=0.0
llama3-8b 1x1x8 global_batch=2 microbatch=1
llama3-8b 1x2x4 global_batch=8 microbatch=1 sequence_parallel=true remat=layer
llama3-8b 8x1x1 global_batch=16 microbatch=1 zero=3 remat=layer
bert-336m 4x1x2 global_batch=128 microbatch=16 remat=none dropout=0.0
bert-3.9b 1x4x2 global_batch=64 microbatch=4 remat=layer weight_gradients=deferred
llama3.2-1b 1x1x8x1 global_batch=8 sequence_length=32768
llama3-8b 1x1x8x8 global_batch=8 remat=layer sequence_length=131072
""".strip().splitlines()


def configuration(case: str, *, scanned: bool = True) -> Config:
    """That of a line `PRESET DATAxPIPE[xCONTEXT]xTENSOR field=value …`."""
    preset, mesh, *given = case.split()
    axes = [f"mesh.{axis}" for axis in AXES if axis != CONTEXT or mesh.count("x") == 3]
    values: dict = dict(zip(axes, map(int, mesh.split("x")), strict=True))
    known = options(Config)
    for name, text in (pair.split("=") for pair in given):
        key = next(found for section in _SECTIONS if (found := f"{section}{name}") in known)
        values[key] = known[key].parse(text)
    return resolve(load_preset(preset), values | {"model.scan_layers": "true" if scanned else "false"})


def compare(case: str, *, gpus: bool, scanned: bool) -> dict:
    """Compile a case here."""
    config = configuration(case, scanned=scanned)
    imagine_devices(config)
    from megajax.core.backend import CPU, GPU
    from megajax.plan.compiled import compiled_step
    from megajax.plan.memory import memory

    found, said = compiled_step(config, gpus=gpus), memory(config, GPU if gpus else CPU)
    return {
        "measured": found.temporaries, "predicted": said.of_step, "state": found.state, "state_predicted": said.state,
        "parts": dataclasses.asdict(said), "seconds": found.seconds, "compiler": found.compiler,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--h200", action="store_true", help="compile for H200s")
    parser.add_argument("--cases", type=int, nargs="+", help="numbers of some")
    parser.add_argument("--unrolled", action="store_true", help="unroll the layers")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(compare(args.one, gpus=args.h200, scanned=not args.unrolled)))
        return
    cases = GPU_CASES if args.h200 else CASES
    flags = ["--h200"] * args.h200 + ["--unrolled"] * args.unrolled
    ratios = []
    print("| model | mesh | other flags | measured MiB | predicted | ratio |\n|---|---|---|---|---|---|")
    for number in args.cases or range(len(cases)):
        command = [sys.executable, __file__, "--one", cases[number], *flags]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{cases[number]}: {done.stderr[-2000:]}")
        row = json.loads(done.stdout.splitlines()[-1])
        preset, mesh, *given = cases[number].split()
        ratios.append(row["predicted"] / row["measured"])
        sizes = (f"{row[name] / 2**20:,.0f}" for name in ("measured", "predicted"))
        print(_ROW.format(preset, mesh, " ".join(given), *sizes, ratios[-1]), flush=True)
        assert abs(row["state"] - row["state_predicted"]) < 1024, row
    print(f"\n{len(ratios)} cases, ratios {min(ratios):.2f} to {max(ratios):.2f}")


if __name__ == "__main__":
    main()
