"""The model of a step's time (`megajax/plan/time.py`) beside published figures: the paper's on V100s, two systems' on
H100s. Nothing runs.

    python benchmarks/plan_paper.py

Prints the tables of which docs/benchmarks/planning.md has a part.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megajax.plan.machines import MACHINES
from megajax.plan.time import PlannedTime, step_time
from megajax.settings.config import Config
from megajax.settings.presets import load_preset, resolve

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


def table(figures: Iterator[Figure]) -> None:
    print("| figure | | published | model | error |\n|---|---|---|---|---|")
    for each in figures:
        numbers = f"{each.published:{each.form}} | {each.ours:{each.form}} | {each.error:+.1%}"
        print(f"| {each.name} | {each.use} | {numbers} |")


def main() -> None:
    table(of_the_paper())
    print()
    table(of_others())
    print("\n| part of a step on V100s, ms | 1.2B on 1 | 1.2B on 8 | 8.3B on 8 | 8.3B on 512 |\n|---|---|---|---|---|")
    runs = [
        on_v100(paper(preset, mesh, batch))
        for preset, mesh, batch in (
            ("gpt2-1.2b", (1, 1, 1), 8),
            ("gpt2-1.2b", (1, 1, 8), 8),
            ("gpt2-8.3b", (1, 1, 8), 8),
            ("gpt2-8.3b", (64, 1, 8), 512),
        )
    ]
    for part in runs[-1].parts:
        print(f"| {part} | {' | '.join(f'{1e3 * run.parts.get(part, 0):.0f}' for run in runs)} |")
    print(f"| together | {' | '.join(f'{1e3 * run.seconds:.0f}' for run in runs)} |")


if __name__ == "__main__":
    main()
