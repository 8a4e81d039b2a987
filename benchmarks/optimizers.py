"""How many tokens Muon needs for the validation loss that AdamW ends with, each at the best of some learning rates: the
figures and the picture of docs/benchmarks/parallelism.md.

    python benchmarks/optimizers.py PRESET --output FOLDER [--rates R ...] [--seeds S ...] [flags of train.py]
    python benchmarks/optimizers.py --draw docs/muon.png

The first trains both at every rate with the first seed, then both at their best rate with the other seeds, one after
the other, and adds its figures to docs/benchmarks/muon.json. What is finished is not trained again, so it can be
stopped and goes on. The second draws them. Both print tables.
"""

import argparse
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

from megajax import load_preset
from megajax.runs.metrics import read_metrics

ROOT = Path(__file__).resolve().parents[1]
FIGURES = ROOT / "docs" / "benchmarks" / "muon.json"
NAMES = {"adamw": "AdamW", "muon": "Muon"}
COLOURS = {"adamw": "#4477aa", "muon": "#ee6677"}
Curve = list[tuple[int, float]]  # tokens and validation losses


def main() -> None:
    """Train what is not there yet, or draw; print all."""
    parser = argparse.ArgumentParser(description="Tokens to AdamW's loss.")
    parser.add_argument("preset", nargs="?", default="demo")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--rates", type=float, nargs="+", default=[1.5e-3, 3e-3, 6e-3, 1.2e-2, 2.4e-2])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--draw", type=Path)
    args, flags = parser.parse_known_args()
    figures = json.loads(FIGURES.read_text()) if FIGURES.exists() else {}
    if args.output:
        figures[args.preset] = trained(args.preset, args.output.resolve(), args.rates, args.seeds, flags)
        FIGURES.write_text(json.dumps(figures, separators=(",", ":")) + "\n")
    for preset, found in figures.items():
        print(f"{preset}\n\n{of_rates(found['rates'])}\n\n{of_seeds(found['curves'], found['best'])}\n")
    if args.draw:
        draw(args.draw, figures[args.preset])


def trained(preset: str, output: Path, rates: list[float], seeds: list[int], flags: list[str]) -> dict[str, Any]:
    """The last losses by optimizer and rate with the first seed; the best rates; and their curves by seed."""
    corpus = output / "corpus"
    if not corpus.with_suffix(".idx").exists():
        size = load_preset(preset).model.vocab_size
        call("-m", "megajax", "prepare", "python-stdlib", "--output", corpus, "--vocab-size", size)

    def curve(name: str, rate: float, seed: int) -> Curve:
        folder = output / f"{name}-{rate:g}-{seed}"
        chosen = ["--optimizer.name", name, "--optimizer.learning-rate", rate, "--seed", seed]
        call("train.py", preset, "--run-dir", folder, "--data.path", corpus, *chosen, *flags)
        found = tokens_and_losses(folder)
        print(f"{folder.name}: {found[-1][1]:.4f}", flush=True)
        return found

    last = {name: {f"{rate:g}": curve(name, rate, seeds[0])[-1][1] for rate in rates} for name in NAMES}
    best = {name: min(rates, key=lambda rate: last[name][f"{rate:g}"]) for name in NAMES}
    curves = {name: {str(seed): curve(name, best[name], seed) for seed in seeds} for name in NAMES}
    return {"rates": last, "best": best, "curves": curves}


def call(*command: object) -> None:
    """Run Python in the repository's root."""
    done = subprocess.run([sys.executable, *map(str, command)], cwd=ROOT, stdout=subprocess.DEVNULL)
    if done.returncode:
        sys.exit(done.returncode)


def tokens_and_losses(folder: Path) -> Curve:
    """Of a run's validations."""
    seen, found = 0, []
    for line in read_metrics(folder):
        seen += line.get("tokens", 0)
        if "validation_loss" in line:
            found.append((seen, line["validation_loss"] or math.inf))
    return found


def tokens_to(curve: Curve, wanted: float) -> float:
    """Tokens after which a curve, straight between validations, has a loss; infinite where it never has."""
    before = curve[0]
    for tokens, loss in curve:
        if loss <= wanted:
            share = (before[1] - wanted) / (before[1] - loss) if before[1] > loss else 1.0
            return before[0] + share * (tokens - before[0])
        before = tokens, loss
    return math.inf


def of_rates(last: dict[str, dict[str, float]]) -> str:
    """The last validation losses."""
    rates = list(last["adamw"])
    lines = [f"| learning rate | {' | '.join(rates)} |", "|---" * (len(rates) + 1) + "|"]
    lines += [f"| {NAMES[name]} | {' | '.join(f'{of[rate]:.3f}' for rate in rates)} |" for name, of in last.items()]
    return "\n".join(lines)


def of_seeds(curves: dict[str, dict[str, Curve]], best: dict[str, float]) -> str:
    """A row for every seed."""
    lines = [
        f"| seed | AdamW at {best['adamw']:g} | Muon at {best['muon']:g} | tokens to AdamW's |",
        "|---|---|---|---|",
    ]
    for seed in curves["adamw"]:
        adamw, muon = (curves[name][seed] for name in NAMES)
        share = tokens_to(muon, adamw[-1][1]) / adamw[-1][0]
        reached = f"{share:.0%}" if share < math.inf else "not reached"
        lines.append(f"| {seed} | {adamw[-1][1]:.3f} | {muon[-1][1]:.3f} | {reached} |")
    return "\n".join(lines)


def draw(file: Path, found: dict[str, Any]) -> None:
    """The validation curves of all seeds."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for name, curves in found["curves"].items():
        for number, curve in enumerate(curves.values()):
            label = None if number else f"{NAMES[name]}, learning rate {found['best'][name]:g}"
            axes.plot(*zip(*curve, strict=True), color=COLOURS[name], label=label)
    axes.set_xlabel("tokens")
    axes.set_ylabel("validation loss (nats)")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(file)


if __name__ == "__main__":
    main()
