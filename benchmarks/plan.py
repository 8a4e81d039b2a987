"""What `megajax plan` says beside what XLA allocates and what was published, and what a plan costs: the figures of
docs/benchmarks/planning.md.

    python benchmarks/plan.py memory [--h200] [--cases 0,5,12] [--unrolled]
    python benchmarks/plan.py paper
    python benchmarks/plan.py cost [--presets NAME,NAME]

memory: every case is compiled in a process of its own, for simulated CPU devices with layers as one scan, or with
`--h200` for H200s (which needs JAX's CUDA packages). A row is what `memory_analysis()` has beside the arguments, what
the model says, and their ratio. paper: the model of a step's time beside the paper's figures on V100s, and two systems'
on H100s; nothing runs. cost: how long `megajax plan` takes and how much memory, for every preset on three odd meshes,
or the nearest that it can have; processor seconds are of all threads.
"""

import argparse
import dataclasses
import json
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import paired

from megajax.core.axes import CONTEXT, PIPE, TENSOR
from megajax.core.config import MeshConfig
from megajax.core.errors import RunError, UserError
from megajax.core.options import options
from megajax.host.ending import run
from megajax.plan.machines import MACHINES
from megajax.plan.time import PlannedTime, step_time
from megajax.settings.config import Config
from megajax.settings.preset_files import preset_names
from megajax.settings.presets import load_preset, resolve
from megajax.settings.validation import nearest_mesh
from megajax.start.launch import imagine_devices

MESHES = (3, 2, 2), (2, 5, 4), (1, 3, 8)
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
llama3-8b 16x4x1 schedule=interleaved chunks=8 vocabulary=split weight_gradients=deferred
llama3-8b 64x1x1 zero=3 microbatch=2
qwen3-8b 4x4x2 remat=layer sequence_parallel=true global_batch=64
gemma3-1b 8x1x1 microbatch=2
olmo3-7b 2x2x4 remat=selective sequence_parallel=true global_batch=32
smollm2-135m 4x1x1 microbatch=8 remat=none
bert-1.3b 2x4x2 remat=selective
gpt2-2.5b 1x8x1 schedule=gpipe remat=stage microbatch=2 global_batch=32
mistral-7b-v0.3 4x2x2 zero=3 remat=layer global_batch=64
olmoe-1b-7b 1x2x2 mesh.expert=4 expert_capacity=1.25 remat=layer
llama3.2-1b 2x1x4x1 sequence_length=16384 remat=layer
gpt2-1.2b 4x1x2 precision=fp32 remat=layer microbatch=4
""".strip().splitlines()  # nothing was fitted to the last twelve, which are in docs/plan.md
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
    axes = [f"mesh.{axis}" for axis in ("data", PIPE, *[CONTEXT] * (mesh.count("x") == 3), TENSOR)]
    values: dict = dict(zip(axes, map(int, mesh.split("x")), strict=True))
    known = options(Config)
    for name, text in (pair.split("=") for pair in given):
        key = next(found for section in _SECTIONS if (found := f"{section}{name}") in known)
        values[key] = known[key].parse(text)
    return resolve(load_preset(preset), values | {"model.scan_layers": "true" if scanned else "false"})


def compiled(case: str, *, gpus: bool, scanned: bool) -> dict:
    """Compile a case here."""
    config = configuration(case, scanned=scanned)
    imagine_devices(config)
    from megajax.core.backend import CPU, GPU
    from megajax.plan.compiled import Compilation
    from megajax.plan.memory import memory as predicted

    found, said = Compilation(config, gpus=gpus).result(), predicted(config, GPU if gpus else CPU)
    return {
        "measured": found.temporaries, "predicted": said.of_step, "state": found.state, "state_predicted": said.state,
        "parts": dataclasses.asdict(said), "seconds": found.seconds, "compiler": found.compiler,
    }  # fmt: skip


def last_line(*command: str) -> dict[str, Any]:
    """What a Python command prints in its last line."""
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, cwd=paired.BENCHMARKS.parent)
    if done.returncode:
        raise RunError(f"{' '.join(command)}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def memory(own: argparse.Namespace) -> None:
    """A row for every case."""
    cases, flags = GPU_CASES if own.h200 else CASES, ["--h200"] * own.h200 + ["--unrolled"] * own.unrolled
    ratios = []
    print("| model | mesh | other flags | measured MiB | predicted | ratio |\n|---|---|---|---|---|---|")
    for number in map(int, own.cases.split(",")) if own.cases else range(len(cases)):
        row = last_line(__file__, "memory", "--one", cases[number], *flags)
        preset, mesh, *given = cases[number].split()
        ratios.append(row["predicted"] / row["measured"])
        sizes = (f"{row[name] / 2**20:,.0f}" for name in ("measured", "predicted"))
        print(_ROW.format(preset, mesh, " ".join(given), *sizes, ratios[-1]), flush=True)
        assert abs(row["state"] - row["state_predicted"]) < 1024, row
    print(f"\n{len(ratios)} cases, ratios {min(ratios):.2f} to {max(ratios):.2f}")


def cost(own: argparse.Namespace) -> None:
    """A row for every preset and mesh."""
    print("| preset | mesh | GiB a device, planned | seconds | processor seconds | GiB |\n|---|---|---|---|---|---|")
    for preset in own.presets.split(",") if own.presets else preset_names():
        config = resolve(load_preset(preset))
        for sizes in MESHES:
            asked = MeshConfig(**dict(zip(("data", "pipe", "tensor"), sizes, strict=True)))
            rows = 4 * asked.data * config.train.microbatch
            train = dataclasses.replace(config.train, global_batch=rows)
            mesh = nearest_mesh(dataclasses.replace(config, train=train, mesh=asked))
            assert mesh is not None, preset
            flags = [f"--mesh.{axis}={size}" for axis, size in dataclasses.asdict(mesh).items()]
            before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
            found = last_line("-m", "megajax", "plan", preset, *flags, f"--train.global-batch={rows}", "--json")
            seconds, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
            used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
            assert found["compiled"]["communication_as_predicted"], (preset, flags)
            print(
                f"| {preset} | {mesh.data}x{mesh.pipe}x{mesh.tensor} | {found['memory']['total'] / 2**30:.1f} | "
                f"{seconds:.0f} | {used:.0f} | {found['peak_bytes'] / 2**30:.2f} |",
                flush=True,
            )


CALIBRATED, PREDICTED = "calibrated on", "predicted"


@dataclass(frozen=True)
class Figure:
    """A published figure beside ours.

    Attributes:
        name: what it is of.
        use: whether a rate was fitted to it.
        published, ours: the figure.
        form: how it is printed.
    """

    name: str
    use: str
    published: float
    ours: float
    form: str = ".0%"

    @property
    def error(self) -> float:
        return self.ours / self.published - 1


def paper(preset: str, mesh: tuple[int, int, int], batch: int, heads: int = 0) -> Config:
    """A run of the paper: fp16, gradients in fp16 added over data, every layer computed again."""
    changes = {f"mesh.{axis}": size for axis, size in zip(("data", "pipe", "tensor"), mesh, strict=True)}
    changes |= {"train.global_batch": batch, "train.microbatch": 8, "precision": "fp16"}
    changes |= {"optimizer.zero": 0, "optimizer.gradient_dtype": "fp16"} | ({"model.num_heads": heads} if heads else {})
    return resolve(load_preset(preset), changes)


def paper_flops(config: Config) -> float:
    """Of a step as the paper counts, with one recomputation: 96 B s L h² (1 + s / 6h + V / 16 L h)."""
    model = config.model
    s, h, layers, v = model.sequence_length, model.hidden_size, model.num_layers, model.padded_vocab_size
    return 96 * config.train.global_batch * s * layers * h**2 * (1 + s / (6 * h) + v / (16 * layers * h))


def on_v100(config: Config) -> PlannedTime:
    return step_time(config, MACHINES["v100"])


def rate(config: Config) -> float:
    """FLOP/s of a GPU."""
    return paper_flops(config) / config.mesh.num_devices / on_v100(config).seconds


def of_the_paper() -> Iterator[Figure]:
    """Figures of arXiv 1909.08053, §5.1, appendix D and §5.2."""
    one = paper("gpt2-1.2b", (1, 1, 1), 8)
    yield Figure("1.2B on one GPU, TFLOP/s", CALIBRATED, 39, rate(one) / 1e12, ".1f")
    for tensor, speedup in ((2, 1.64), (4, 2.34), (8, 2.98)):
        ours = on_v100(one).seconds / on_v100(paper("gpt2-1.2b", (1, 1, tensor), 8)).seconds
        yield Figure(f"strong scaling of 1.2B, batch 8, on {tensor} GPUs", CALIBRATED, speedup, ours, ".2f")
    for heads, efficiency in ((32, 0.77), (24, 0.80), (16, 0.82)):
        ours = rate(paper("gpt2-8.3b", (1, 1, 8), 8, heads)) / rate(one)
        yield Figure(f"weak scaling, 8.3B with {heads} heads on 8 GPUs", PREDICTED, efficiency, ours)
    many = paper("gpt2-8.3b", (64, 1, 8), 512)
    yield Figure("8.3B on 512 GPUs, 74% in the text on figure 5", PREDICTED, 0.74, rate(many) / rate(one))
    yield Figure("the same, 76% in the introduction", PREDICTED, 0.76, rate(many) / rate(one))
    yield Figure("the same, PFLOP/s", PREDICTED, 15.1, 512 * rate(many) / 1e15, ".1f")
    for name, preset, mesh, days in (
        ("2.5B on 128 GPUs", "gpt2-2.5b", (64, 1, 2), 2.27),
        ("8.3B with 24 heads on 512 GPUs", "gpt2-8.3b-24heads", (64, 1, 8), 2.10),
    ):
        ours = 68_507 * on_v100(paper(preset, mesh, 512)).seconds / 86_400
        yield Figure(f"an epoch of {name}, days", PREDICTED, days, ours, ".2f")


def h100(preset: str, **changes: object) -> PlannedTime:
    return step_time(resolve(load_preset(preset), changes), MACHINES["h100"])


def of_others() -> Iterator[Figure]:
    """MaxText and Megatron-LM on H100s. Sizes of models and batches are not in the sources that we have: assumed."""
    llama2 = {
        **{
            "model.mlp_size": 11_008,
            "model.num_kv_heads": 32,
            "model.vocab_size": 32_000,
            "model.rope_scaling": "none",
        },
        **{"model.sequence_length": 4096, "optimizer.zero": 3, "train.microbatch": 4, "data.reset_attention": False},
    }
    for devices, tflops, use in ((8, 492, CALIBRATED), (128, 375, PREDICTED)):
        time = h100("llama3-8b", **llama2, **{"mesh.data": devices, "train.global_batch": 4 * devices})
        yield Figure(f"MaxText, Llama-2-7B on {devices}, TFLOP/s", use, tflops, time.flops_per_second / 1e12, ".0f")
    gpt = {"model.dropout": 0.0, "model.sequence_length": 4096, "train.remat": "selective"}
    of_16b = {
        **{"model.num_layers": 32, "model.hidden_size": 6144, "model.num_heads": 48, "sequence_parallel": True},
        **{"mesh.data": 48, "mesh.tensor": 4, "train.global_batch": 768, "train.microbatch": 2},
    }
    yield Figure("Megatron-LM, 16B, tensor 4, MFU", CALIBRATED, 0.49, h100("gpt2-1.2b", **gpt, **of_16b).mfu)
    of_462b = {
        **{"model.num_layers": 112, "model.hidden_size": 18_432, "model.num_heads": 96, "sequence_parallel": True},
        **{"mesh.data": 48, "mesh.pipe": 16, "mesh.tensor": 8, "train.global_batch": 6144, "train.microbatch": 1},
        **{"pipeline.schedule": "interleaved", "pipeline.chunks": 7},
    }
    yield Figure("Megatron-LM, 462B, tensor 8, pipe 16, MFU", PREDICTED, 0.47, h100("gpt2-1.2b", **gpt, **of_462b).mfu)
    of_1_7b = {
        **{"model.num_layers": 24, "model.hidden_size": 2304, "model.num_heads": 24},
        **{"mesh.data": 48, "train.global_batch": 192, "train.microbatch": 4},
    }
    yield Figure("Megatron-LM, 1.7B, tensor 1, MFU", PREDICTED, 0.41, h100("gpt2-1.2b", **gpt, **of_1_7b).mfu)


def table(figures: Iterator[Figure]) -> str:
    lines = ["| figure | | published | model | error |", "|---|---|---|---|---|"]
    for each in figures:
        numbers = f"{each.published:{each.form}} | {each.ours:{each.form}} | {each.error:+.1%}"
        lines.append(f"| {each.name} | {each.use} | {numbers} |")
    return "\n".join(lines)


def main() -> None:
    """Parse the command line, compare, print."""
    own, words, usage = paired.own_flags(h200=False, cases=str, unrolled=False, presets=str, one=str)
    if own.one:
        print(json.dumps(compiled(own.one, gpus=own.h200, scanned=not own.unrolled)))
    elif words == ["memory"]:
        memory(own)
    elif words == ["cost"]:
        cost(own)
    elif words == ["paper"]:
        print(table(of_the_paper()), table(of_others()), sep="\n\n")
    else:
        raise UserError(f"{' '.join(words) or 'nothing'}; valid: memory, paper or cost, then {usage}")


if __name__ == "__main__":
    run(main)
