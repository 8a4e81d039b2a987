"""How many tokens Muon needs for the validation loss that AdamW ends with, each at the best of some learning rates.

    python benchmarks/optimizers.py PRESET --output FOLDER [--rates R ...] [--seeds S ...] [flags of train.py]

trains both at every rate with the first seed, then both at their best rate with the other seeds, one after the other,
and prints a table and draws optimizers.png. What is finished is not trained again, so it can be stopped and goes on.
"""

import argparse
import math
import subprocess
import sys
from pathlib import Path

from megajax import load_preset
from megajax.runs.metrics import read_metrics

ROOT = Path(__file__).resolve().parents[1]
NAMES = {"adamw": "AdamW", "muon": "Muon"}
COLOURS = {"adamw": "#4477aa", "muon": "#ee6677"}
Curve = list[tuple[int, float]]  # tokens and validation losses


def main() -> None:
    """Train what is not there yet, then print and draw all."""
    parser = argparse.ArgumentParser(description="Tokens to AdamW's loss.")
    parser.add_argument("preset")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--rates", type=float, nargs="+", default=[7.5e-4, 1.5e-3, 3e-3, 6e-3, 1.2e-2])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    args, flags = parser.parse_known_args()
    corpus = args.output.resolve() / "corpus"
    if not corpus.with_suffix(".idx").exists():
        size = load_preset(args.preset).model.vocab_size
        call("-m", "megajax", "prepare", "python-stdlib", "--output", corpus, "--vocab-size", size)

    def curve(name: str, rate: float, seed: int) -> Curve:
        folder = args.output.resolve() / f"{name}-{rate:g}-{seed}"
        chosen = ["--optimizer.name", name, "--optimizer.learning-rate", rate, "--seed", seed]
        call("train.py", args.preset, "--run-dir", folder, "--data.path", corpus, *chosen, *flags)
        found = tokens_and_losses(folder)
        print(f"{folder.name}: {found[-1][1]:.4f}", flush=True)
        return found

    first, *others = args.seeds
    tried = {name: {rate: curve(name, rate, first) for rate in args.rates} for name in NAMES}
    print(of_rates(tried))
    best = {name: min(tried[name], key=lambda rate: tried[name][rate][-1][1]) for name in NAMES}
    curves = {(name, first): tried[name][best[name]] for name in NAMES}
    curves |= {(name, seed): curve(name, best[name], seed) for seed in others for name in NAMES}
    print(of_seeds(curves, best))
    draw(args.output / "optimizers.png", curves, best)


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


def of_rates(tried: dict[str, dict[float, Curve]]) -> str:
    """The last validation losses."""
    rates = list(tried["adamw"])
    lines = [f"| learning rate | {' | '.join(f'{rate:g}' for rate in rates)} |", "|---" * (len(rates) + 1) + "|"]
    lines += [f"| {NAMES[n]} | {' | '.join(f'{curves[r][-1][1]:.3f}' for r in rates)} |" for n, curves in tried.items()]
    return "\n".join(lines)


def of_seeds(curves: dict[tuple[str, int], Curve], best: dict[str, float]) -> str:
    """A row for every seed."""
    lines = [
        f"| seed | AdamW at {best['adamw']:g} | Muon at {best['muon']:g} | tokens to AdamW's |",
        "|---|---|---|---|",
    ]
    for seed in dict.fromkeys(seed for _, seed in curves):
        adamw, muon = (curves[name, seed] for name in NAMES)
        share = tokens_to(muon, adamw[-1][1]) / adamw[-1][0]
        reached = f"{share:.0%}" if share < math.inf else "not reached"
        lines.append(f"| {seed} | {adamw[-1][1]:.3f} | {muon[-1][1]:.3f} | {reached} |")
    return "\n".join(lines)


def draw(file: Path, curves: dict[tuple[str, int], Curve], best: dict[str, float]) -> None:
    """The validation curves of all seeds."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    labelled: set[str] = set()
    for (name, _), curve in curves.items():
        label = None if name in labelled else f"{NAMES[name]}, {best[name]:g}"
        labelled.add(name)
        axes.plot(*zip(*curve, strict=True), color=COLOURS[name], label=label)
    axes.set_xlabel("tokens")
    axes.set_ylabel("validation loss (nats)")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(file)


if __name__ == "__main__":
    main()
