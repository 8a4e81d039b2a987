"""Train small models in bf16 and in fp8, and compare their losses and gradient norms: the figures and the picture of
docs/float8.md.

    python benchmarks/float8.py --output FOLDER [--presets P ...] [--seeds S ...] [--steps N] [flags of train.py]
    python benchmarks/float8.py --draw docs/float8.png

The first trains what FOLDER does not have yet, so it may be stopped and started again, and adds its figures to
docs/benchmarks/float8.json; the second draws them. A CPU is slower in fp8 than in bf16, and computes what a GPU does
except for the order of sums.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from megajax.runs.metrics import read_metrics

ROOT = Path(__file__).resolve().parents[1]
FIGURES = ROOT / "docs" / "benchmarks" / "float8.json"
PRESETS = {"bert-demo": [], "llama-demo": [], "moe-demo": [], "gpt-4x512": ["--train.eval-batches", 8]}
COLOURS = {"bf16": "#4477aa", "fp8": "#ee6677"}
EVERY = 5  # steps whose mean is a point


def main() -> None:
    """Train or draw."""
    parser = argparse.ArgumentParser(description="Losses in bf16 and fp8.")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--presets", nargs="+", default=list(PRESETS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--draw", type=Path)
    args, flags = parser.parse_known_args()
    if args.output:
        for seed in args.seeds:
            for preset in args.presets:
                for precision in COLOURS:
                    train(args.output.resolve(), preset, precision, seed, args.steps, flags)
    print(table(json.loads(FIGURES.read_text())))
    if args.draw:
        draw(args.draw, json.loads(FIGURES.read_text()))


def train(output: Path, preset: str, precision: str, seed: int, steps: int, flags: list[str]) -> None:
    """A run, and its figures beside those that are there."""
    folder, path = output / f"{preset}-{precision}-{seed}", ROOT / "benchmarks" / f"{preset}.toml"
    given: list[Any] = ["--precision", precision, "--seed", seed, "--train.steps", steps, "--run-dir", folder]
    given += ["--optimizer.decay-steps", steps, "--optimizer.warmup-steps", min(40, steps // 4)]
    given += ["--train.eval-every", steps, "--checkpoint.every", steps, "--sample.tokens", 0]
    if path.exists():
        given += ["--data.path", "python-stdlib"]
    command = ["train.py", path if path.exists() else preset, *given, *PRESETS.get(preset, []), *flags]
    if subprocess.run([sys.executable, *map(str, command)], cwd=ROOT, stdout=subprocess.DEVNULL).returncode:
        sys.exit(f"{folder.name} did not end")
    lines = read_metrics(folder)
    trained, validated = ([line for line in lines if name in line] for name in ("grad_norm", "validation_loss"))
    found = {
        "steps": steps,
        "final": round(validated[-1]["validation_loss"], 5),
        "last_losses": round(float(np.mean([line["loss"] for line in trained[-20:]])), 5),
        "loss": means(trained, "loss"),
        "grad_norm": means(trained, "grad_norm"),
    }
    figures = json.loads(FIGURES.read_text()) if FIGURES.exists() else {}
    figures.setdefault(preset, {}).setdefault(precision, {})[str(seed)] = found
    FIGURES.write_text(json.dumps(figures, separators=(",", ":")) + "\n")
    print(f"{folder.name}: {found['final']:.4f}", flush=True)


def means(lines: list[dict[str, Any]], name: str) -> list[float]:
    """Of every few steps."""
    values = np.array([line[name] for line in lines])
    return [round(float(part.mean()), 4) for part in np.split(values, range(EVERY, len(values), EVERY))]


def table(figures: dict[str, Any]) -> str:
    """Validation losses after the last step, and the norms of the last quarter."""
    heads = ["model", "steps", "seeds", "bf16", "fp8", "fp8 / bf16 - 1, by seed", "gradient norms, fp8 / bf16"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for preset, of in figures.items():
        seeds = sorted(of.get("bf16", {}).keys() & of.get("fp8", {}).keys())
        if not seeds:
            continue
        pairs = [(of["bf16"][seed], of["fp8"][seed]) for seed in seeds]
        losses = [[run["final"] for run in runs] for runs in zip(*pairs, strict=True)]
        ratios = ", ".join(f"{b['final'] / a['final'] - 1:+.2%}" for a, b in pairs)
        quarter = [[np.mean(run["grad_norm"][-len(run["grad_norm"]) // 4 :]) for run in pair] for pair in pairs]
        norms = ", ".join(f"{b / a:.3f}" for a, b in quarter)
        cells = [preset, pairs[0][0]["steps"], len(seeds), *(f"{np.mean(each):.4f}" for each in losses), ratios, norms]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def draw(file: Path, figures: dict[str, Any]) -> None:
    """Losses above, gradient norms below, a column for each model."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(max(5, 3.2 * len(figures)), 5), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, len(figures), squeeze=False)
    for column, (preset, of) in enumerate(figures.items()):
        for row, name in enumerate(("loss", "grad_norm")):
            own = axes[row, column]
            for precision, runs in of.items():
                for number, run in enumerate(runs.values()):
                    steps = np.arange(1, len(run[name]) + 1) * EVERY
                    label = precision if number == 0 else None
                    own.plot(steps, run[name], color=COLOURS[precision], lw=1, alpha=0.8, label=label)
            own.grid(alpha=0.3)
            own.set_yscale("log")
            own.yaxis.set_major_formatter("{x:g}")
            own.yaxis.set_minor_formatter(lambda x, _: f"{x:g}" if f"{x:e}"[0] in "23456" else "")
        axes[0, column].set_title(preset)
        axes[1, column].set_xlabel("step")
    axes[0, 0].set_ylabel("loss (nats)")
    axes[1, 0].set_ylabel("gradient norm")
    axes[0, 0].legend(frameon=False)
    figure.savefig(file)


if __name__ == "__main__":
    main()
