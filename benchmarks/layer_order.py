"""The paper's figure 7 in small: BERT with the LayerNorms after the residual additions (a, "post") and before attention
and MLP (b, "pre"), at two learning rates.

    python benchmarks/layer_order.py --output FOLDER [flags of train.py]
    python benchmarks/layer_order.py --draw docs/layer-order.png

The first trains both orders at every rate with every seed, one after the other, and writes its figures to
docs/benchmarks/layer-order.json. What is finished is not trained again, so it can be stopped and goes on. The second
draws them. Both print a table.
"""

import argparse
import dataclasses
import json
import math
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from megajax.data.text.indexed import IndexedDataset
from megajax.runs.metrics import read_metrics

ROOT = Path(__file__).resolve().parents[1]
PRESET = ROOT / "benchmarks" / "layer_order.toml"
FIGURES = ROOT / "docs" / "benchmarks" / "layer-order.json"
NAMES = {"post": "(a) LayerNorm after the addition", "pre": "(b) LayerNorm before"}
COLOURS = {"post": "#ee6677", "pre": "#4477aa"}


@dataclasses.dataclass(frozen=True)
class Case:
    """One training."""

    order: str
    rate: float
    seed: int

    @property
    def name(self) -> str:
        return f"{self.order}-{self.rate:g}-{self.seed}"


def main() -> None:
    """Train what is not there yet, or draw; print all."""
    parser = argparse.ArgumentParser(description="Figure 7 of the paper in small.")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--rates", type=float, nargs="+", default=[3e-4, 1e-3])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--draw", type=Path)
    args, flags = parser.parse_known_args()
    if args.output:
        cases = [Case(order, rate, seed) for rate in args.rates for seed in args.seeds for order in NAMES]
        FIGURES.write_text(json.dumps(trained(cases, args.output, flags), separators=(",", ":")) + "\n")
    figures = json.loads(FIGURES.read_text())
    curves = {Case(*run["case"]): in_numbers(run["validation"]) for run in figures["runs"]}
    print(table(curves, figures["unigram_entropy"]))
    if args.draw:
        draw(args.draw, curves, figures["unigram_entropy"])


def trained(cases: list[Case], output: Path, flags: list[str]) -> dict[str, Any]:
    """The curves of all cases, and what the corpus's frequencies alone give."""
    output.mkdir(parents=True, exist_ok=True)
    corpus = output / "corpus"
    if not corpus.with_suffix(".idx").exists():
        size = ["--split-sentences", "--tokenizer", "wordpiece", "--vocab-size", "1024", "--duplicates", "keep"]
        call("-m", "megajax", "prepare", "python-stdlib", "--output", corpus, *size)
    runs = []
    for number, case in enumerate(cases, start=1):
        began = time.perf_counter()
        found = curve(train(case, corpus, output / case.name, flags))
        runs.append({"case": dataclasses.astuple(case), "validation": found})
        step, loss = found[-1]
        seconds = time.perf_counter() - began
        print(f"{number}/{len(cases)} {case.name}: {loss} after {step} steps, {seconds:.0f} s", flush=True)
    return {"unigram_entropy": unigram_entropy(corpus), "runs": runs}


def call(*command: object) -> str:
    """Run Python in the repository's root; its standard output."""
    line = [sys.executable, *map(str, command)]
    done = subprocess.run(line, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(done.returncode)
    return done.stdout


def train(case: Case, corpus: Path, folder: Path, flags: list[str]) -> Path:
    """The finished run of a case."""
    chosen = ["--model.layer-order", case.order, "--optimizer.learning-rate", case.rate, "--seed", case.seed]
    call("train.py", PRESET, "--run-dir", folder.resolve(), "--data.path", corpus.resolve(), *chosen, *flags)
    return folder


def curve(folder: Path) -> list[tuple[int, float | None]]:
    """Steps and masked-LM losses of the validations of a run, null where a loss is not finite."""
    lines = [line for line in read_metrics(folder) if "validation_loss" in line]
    return [(line["step"], line["validation_masked_lm_loss"]) for line in lines]


def in_numbers(curve: list[tuple[int, float | None]]) -> list[tuple[int, float]]:
    """Steps and losses, infinite where they were not finite."""
    return [(step, math.inf if loss is None else loss) for step, loss in curve]


def unigram_entropy(corpus: Path) -> float:
    """Of the corpus's tokens, in nats: the loss of whoever knows no more than how often each occurs."""
    counts = np.bincount(np.asarray(IndexedDataset(corpus).tokens))
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())


def table(curves: dict[Case, list[tuple[int, float]]], entropy: float) -> str:
    """The last validation losses, a row for every rate and seed."""
    lines = ["| learning rate | seed | (a) post | (b) pre |", "|---|---|---|---|"]
    pairs = dict.fromkeys((case.rate, case.seed) for case in curves)
    for rate, seed in pairs:
        post, pre = (curves[Case(order, rate, seed)][-1][1] for order in ("post", "pre"))
        lines.append(f"| {rate:g} | {seed} | {post:.3f} | {pre:.3f} |")
    return "\n".join([*lines, "", f"unigram entropy of the corpus: {entropy:.3f} nats"])


def draw(file: Path, curves: dict[Case, list[tuple[int, float]]], entropy: float) -> None:
    """The validation curves, a panel for every rate."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rates = list(dict.fromkeys(case.rate for case in curves))
    figure = Figure(figsize=(9, 4), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    for axes, rate in zip(figure.subplots(1, len(rates), sharey=True, squeeze=False)[0], rates, strict=True):
        for order, name in NAMES.items():
            for number, case in enumerate(case for case in curves if (case.rate, case.order) == (rate, order)):
                axes.plot(*zip(*curves[case], strict=True), color=COLOURS[order], label=None if number else name)
        axes.axhline(entropy, color="#888888", linestyle=":", label="unigram entropy")
        axes.set_title(f"learning rate {rate:g}")
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
    figure.axes[0].set_ylabel("masked-LM validation loss (nats)")
    figure.axes[-1].legend(frameon=False)
    figure.savefig(file)


if __name__ == "__main__":
    main()
