"""One GPU: attention, the rate of matrix products, our step in several forms, PyTorch's, and the best of both in turn.

As a whole it has run only on CPUs (`--device cpu`, a tiny model); most of its parts ran on an H200 by themselves.

    benchmarks/gpu.sh [PRESET] [train.py's flags] [--device gpu|cpu] [--minutes N] [--out PREFIX]

PRESET is gpt2-1.2b. First come the implementations of attention (`gpu_forms.py`): which are right here, and how fast
they are beside PyTorch's. Then every form of the step is a process of its own, measured by
itself, and at last the fastest of ours and the fastest of PyTorch's run in turn, A B A B. A form that fails (out of
memory, say) is listed as failed, and what does not fit into the minutes as left out. Results go to PREFIX.json and
PREFIX.md, written anew after every result.
"""

import datetime
import json
import os
import statistics
import sys
import time
from contextlib import ExitStack
from importlib.metadata import distributions
from pathlib import Path

import gpu_forms
import paired
from paired import BENCHMARKS, Failed, Side

from megajax.core.errors import UserError
from megajax.core.models.flops import step_flops
from megajax.host.ending import run
from megajax.plan.machines import MACHINES
from megajax.settings.config import Config
from megajax.settings.flags import parse

DATA_SHEET = MACHINES["h200"].peak["bf16"]  # FLOP/s: what MFU is measured by
STEPS, ROUNDS = 5, 3
PACKAGES = ("jax", "jaxlib", "flax", "torch", "nvidia-cudnn-cu13", "jax-cuda13-plugin")  # whose versions are kept
RESERVE = 75.0  # seconds kept for the best two in turn
ATTENTION = 0.45  # share of the time

# Ours, by expectation (docs/gpu.md): rows of a microbatch, recomputation, layers scanned, dropout, attention.
OURS = [(16, "none", False, 0.0, "cudnn"), (16, "none", False, 0.1, "kernel"), (16, "none", False, 0.0, "kernel")]
OURS += [(24, "none", False, 0.0, "cudnn"), (16, "selective", True, 0.0, "cudnn"), (16, "none", False, 0.1, "blocks")]
OURS += [(8, "none", False, 0.0, "cudnn"), (24, "selective", False, 0.0, "cudnn"), (8, "layer", True, 0.0, "cudnn")]
TINY = ["--precision=fp32", "--model.num-layers=2", "--model.hidden-size=64", "--model.num-heads=4"]
TINY += ["--model.sequence-length=128", "--model.vocab-size=1000"]


class Report:
    """The figures so far, in their two files."""

    def __init__(self, prefix: Path, config: Config, device: str):
        self.prefix, self.config = prefix, config
        self.tables: dict = {
            **paired.this_run(),
            "command": " ".join(["benchmarks/gpu.sh", *sys.argv[1:]]),
            "device": device,
            "versions": {each.name: each.version for each in distributions() if each.name in PACKAGES},
            "attention": {},
            "forms": [],
            "pairs": {},
            "left_out": [],
        }
        prefix.parent.mkdir(parents=True, exist_ok=True)

    def flops_per_second(self, rows: int, seconds: float) -> float:
        return step_flops(self.config.model, 1) * rows / seconds

    def write(self) -> None:
        """Both files, anew."""
        Path(f"{self.prefix}.json").write_text(json.dumps(self.tables, indent=1) + "\n")
        Path(f"{self.prefix}.md").write_text(self.text())

    def text(self) -> str:
        """The tables in Markdown."""
        tables, model = self.tables, self.config.model
        versions = ", ".join(f"{name} {version}" for name, version in tables["versions"].items())
        lines = [
            f"# One GPU: {tables['device']}, {tables['date']}",
            "",
            f"`{tables['command']}` on {tables['machine']}; {versions}. Model: {model.num_layers} layers x "
            f"{model.hidden_size}, {model.num_heads} heads, sequence {model.sequence_length}, {self.config.precision}.",
            "MFU is of 989 TFLOP/s; the share of products is their time, each measured alone, by the step's.",
            "",
            "| side | batch | remat | layers | dropout | attention | ms | tokens/s | TFLOP/s | MFU | products | GiB |",
            "|---|---|---|---|---|---|---|---|---|---|---|---|",
        ]
        for form in tables["forms"]:
            start = f"| {form['side']} | {form['batch']} | {form['remat']} | {form['layers']} | {form['dropout']} | "
            start += f"{form['attention']} |"
            if "failed" in form:
                lines.append(f"{start} failed: {form['failed']} | | | | | |")
                continue
            share = f"{form['matmul_share']:.1%}" if "matmul_share" in form else ""
            lines.append(
                f"{start} {form['seconds'] * 1e3:.1f} | {form['tokens_per_second']:,.0f} | {form['tflops']:.4g} | "
                f"{form['mfu']:.1%} | {share} | {form['peak_bytes'] / 2**30:.1f} |"
            )
        lines += [f"| left out for want of time | {form} |" for form in tables["left_out"]]
        if tables["pairs"]:
            pairs = tables["pairs"]
            lines += [
                "",
                f"In turn, {ROUNDS} rounds: ours {pairs['ours']}, PyTorch {pairs['peer']}: ratio {pairs['ratio']:.3f}.",
            ]
        return "\n".join([*lines, *gpu_forms.tables(tables["attention"])]) + "\n"


def measure(report: Report, name: str, command: list[str], form: dict, environment: dict) -> Side | None:
    """Measure one form into the report. Returns its process, still running, or None where it failed."""
    print(f"{name}: {form}", file=sys.stderr)
    side = None
    try:
        side = Side(name, [command], environment=environment)
        seconds = statistics.median(side.ask(f"steps {STEPS}")["seconds"])
        rows, length = form["batch"], report.config.model.sequence_length
        rate = report.flops_per_second(rows, seconds)
        form |= {"seconds": seconds, "tokens_per_second": rows * length / seconds, "tflops": rate / 1e12}
        form |= {"mfu": rate / DATA_SHEET, "losses": side.about["losses"]} | side.ask("memory")
        if name == "megajax":
            products = side.ask("products")
            form |= {"matmul_share": products["seconds"] / seconds, "products_gflops": products["each"]}
            form["matmul_tflops"] = products["flops"] / products["seconds"] / 1e12
    except Failed as error:
        form["failed"] = str(error)
        side = None
    report.tables["forms"].append({"side": name} | form)
    report.write()
    return side


def sweep(report: Report, flags: list[str], device: str, seconds: float) -> None:
    """All forms that fit into the time, then the best two in turn."""
    began = time.perf_counter()
    environment = {"JAX_PLATFORMS": "cpu"} if device == "cpu" else {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}

    def found(table: str, result: dict) -> None:
        print(f"attention, {table}: {result}", file=sys.stderr)
        report.tables["attention"].setdefault(table, []).append(result)
        report.write()

    gpu_forms.measure(device, ATTENTION * seconds, os.environ | environment, found)
    ours = [sys.executable, str(BENCHMARKS / "throughput.py"), *flags, "--device", device, "--serve"]
    torch = [sys.executable, str(BENCHMARKS / "pytorch" / "baseline.py"), *flags, "--device", device]
    torch += ["--compile", "--serve"]
    longest = 0.0
    commands: dict[str, dict[float, list[str]]] = {"megajax": {}, "torch, compiled": {}}
    forms = [("megajax", *form) for form in OURS]
    forms[2:2] = [("torch, compiled", rows, "none", False, 0.0, "auto") for rows in (16, 8)]
    for name, rows, remat, scanned, dropout, attention in forms:
        form = {"batch": rows, "remat": remat, "layers": "scanned" if scanned else "unrolled", "dropout": dropout}
        form["attention"] = attention if device == "gpu" else "auto"
        elapsed = time.perf_counter() - began
        if elapsed + longest + RESERVE > seconds:
            report.tables["left_out"].append(f"{name} {form}")
            continue
        command = [*(ours if name == "megajax" else torch), "--model.dropout", str(dropout), "--train.remat", remat]
        command += ["--train.microbatch", str(rows), "--train.global-batch", str(rows)]
        command += ["--model.scan-layers", str(scanned).lower(), "--model.attention", form["attention"]]
        side = measure(report, name, command, form, environment)
        if side is not None:
            side.close()
            if dropout == 0:
                commands[name][form["tokens_per_second"]] = command
        longest = max(longest, time.perf_counter() - began - elapsed)
    if all(commands.values()):
        in_pairs(report, {name: found[max(found)] for name, found in commands.items()}, environment)
    report.write()


def in_pairs(report: Report, commands: dict[str, list[str]], environment: dict) -> None:
    """The fastest form of either side, in turn; per token where their batches differ."""
    try:
        with ExitStack() as stack:
            sides = [
                stack.enter_context(Side(name, [command], environment=environment | paired.SHARED_GPU))
                for name, command in commands.items()
            ]
            (ours, theirs), _ = paired.in_turn(sides, ROUNDS, STEPS)
        rows = [int(command[command.index("--train.global-batch") + 1]) for command in commands.values()]
        ratios = [ratio * rows[0] / rows[1] for ratio in paired.ratios(theirs, ours)]
        report.tables["pairs"] = {
            "ours": f"batch {rows[0]}, {statistics.median(ours) * 1e3:.1f} ms",
            "peer": f"batch {rows[1]}, {statistics.median(theirs) * 1e3:.1f} ms",
            "ratio": statistics.median(ratios),
            "ratios": ratios,
        }
    except Failed as error:
        report.tables["left_out"].append(f"in turn: {error}")


def main() -> None:
    """Parse the command line and run."""
    own, flags, config = paired.command_line(__doc__, "gpt2-1.2b", device=("gpu", "cpu"), minutes=9.5, out=str)
    if own.device == "cpu":
        flags = [flags[0], *TINY, *flags[1:]]
        config = parse(flags, "")
    prefix = Path(own.out or f"docs/benchmarks/gpu-{datetime.date.today().isoformat()}")
    name = "cpu"
    if own.device == "gpu":
        import torch

        if not torch.cuda.is_available():
            raise UserError("--device gpu: PyTorch finds no GPU here; valid: --device cpu, a tiny model")
        name = torch.cuda.get_device_name()
    report = Report(prefix, config, name)
    sweep(report, flags, own.device, own.minutes * 60)
    print(report.text())
    print(f"written: {prefix}.json, {prefix}.md", file=sys.stderr)


if __name__ == "__main__":
    run(main)
