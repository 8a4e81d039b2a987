"""A node of GPUs: its collectives beside the plan's rates, every axis of the mesh against one GPU, the fastest recipes.

It has run only on simulated CPU devices (`--device cpu`).

    benchmarks/gpu_node.sh [--part collectives|axes|recipes] [--device gpu|cpu] [--processes N] [--minutes N]
        [--out PREFIX]

Every part is a run of its own (`gpu_node_cases.py`): a case that ends it, or hangs, is listed as failed, and the run is
begun again behind it. Results go to PREFIX.json and PREFIX.md, written anew after every result.
"""

import datetime
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import paired
from gpu_forms import resumed
from paired import BENCHMARKS

from megajax.core.errors import RunError, UserError
from megajax.host.ending import run

PARTS = {"collectives": 0.15, "axes": 0.4, "recipes": 0.45}  # and their shares of the time
HANGS = {"collectives": 60.0, "axes": 90.0, "recipes": 240.0}  # seconds that a case may take
SLOWER = {"gpu": 1, "cpu": 5}  # times as long
TOLERANCE = 1e-3  # of losses and gradient norms, relative; they are computed in fp32
SIMULATED = 8


class Report:
    """The results so far, in their two files."""

    def __init__(self, prefix: Path, about: dict):
        self.prefix, self.about = prefix, about
        self.found: dict[str, list[dict]] = {part: [] for part in PARTS}
        prefix.parent.mkdir(parents=True, exist_ok=True)

    def add(self, part: str, result: dict) -> None:
        """One more result, printed and written."""
        if "device" in result:
            self.about |= result
        else:
            self.found[part].append(result)
            print(f"{part}: {result['case']}: {_words(part, result)}", flush=True)
        Path(f"{self.prefix}.json").write_text(json.dumps(self.about | self.found, indent=1) + "\n")
        Path(f"{self.prefix}.md").write_text(self.text())

    @property
    def wrong(self) -> bool:
        """Whether an axis differs from one GPU, or anything failed."""
        return any("failed" in each or each.get("right") is False for every in self.found.values() for each in every)

    def text(self) -> str:
        """The tables in Markdown."""
        head = ", ".join(f"{name} {value}" for name, value in self.about.items())
        lines = [f"# One node of GPUs, {self.about['date']}", "", f"{head}."]
        for part, results in self.found.items():
            if results:
                lines += ["", f"## {part.capitalize()}", "", "| case | |", "|---|---|"]
                lines += [f"| {each['case']} | {_words(part, each)} |" for each in results]
        return "\n".join(lines) + "\n"


def _words(part: str, result: dict) -> str:
    """A result in words."""
    if why := result.get("failed") or result.get("left_out"):
        return f"{'failed' if 'failed' in result else 'left out'}: {why}"
    if part == "collectives":
        rates = f"{result['gb_per_s']:.1f} GB/s, the plan's {result['planned_gb_per_s']:.1f}"
        return f"{result['ms']:.3f} ms, the plan's {result['planned_ms']:.3f}; {rates}"
    if part == "axes":
        losses = " ".join(f"{loss:.5f}" for loss in result["losses"])
        return f"{'right' if result['right'] else 'WRONG'}: losses {losses}, off by {result['off']:.1e} at most"
    mfu = f", MFU {result['mfu']:.1%}" if result["mfu"] else ""
    took = f"{result['ms']:.1f} ms, the plan's {result['planned_ms']:.1f}; {result['tokens_per_second']:,.0f} tokens/s"
    return f"{took}{mfu}; {result['peak_gib']:.1f} GiB, compiled in {result['compile_seconds']:.0f} s"


def command_of(part: str, device: str, processes: int) -> tuple[list[str], dict[str, str]]:
    """The command that runs a part on all devices, and its environment."""
    script = [sys.executable, str(BENCHMARKS / "gpu_node_cases.py"), "--part", part, "--device", device]
    if device == "cpu":
        script += ["--simulated", str(SIMULATED // processes)]
    environment = {"JAX_PLATFORMS": "cpu" if device == "cpu" else "cuda,cpu", "GPUS": str(processes)}
    each = [str(BENCHMARKS.parent / "deploy" / "each-gpu.sh")] if processes > 1 else []
    return [*each, *script], environment


def reference(device: str) -> dict[str, dict]:
    """What one device computes, by model."""
    command, environment = command_of("axes", device, 1)
    found = resumed(
        [*command, "--reference"], 120 * SLOWER[device], os.environ | environment, SLOWER[device] * HANGS["axes"]
    )
    return {each["case"]: each for each in found if "case" in each}


def compared(result: dict, references: dict[str, dict]) -> dict:
    """A mesh's result with how far it is from one device's."""
    right = references.get(result.get("model", ""), {})
    if "losses" not in result or "losses" not in right:
        return (
            result if "losses" not in result else result | {"failed": f"one device: {right.get('failed', 'nothing')}"}
        )
    pairs = [pair for name in ("losses", "norms") for pair in zip(result[name], right[name], strict=True)]
    off = max(abs(one - other) / abs(other) for one, other in pairs)
    return result | {"off": off, "right": off <= TOLERANCE}


def main() -> None:
    """Parse the command line and run."""
    own, flags, usage = paired.own_flags(part=(None, *PARTS), device=("gpu", "cpu"), processes=0, minutes=10.0, out=str)
    if flags:
        raise UserError(f"{' '.join(flags)}: unknown; {usage}")
    if own.device == "cpu" and own.processes and SIMULATED % own.processes:
        raise UserError(f"--processes {own.processes}; valid: a number that divides {SIMULATED}")
    processes = own.processes or (1 if own.device == "cpu" else _gpus())
    report = Report(
        Path(own.out or f"docs/benchmarks/gpu-node-{datetime.date.today().isoformat()}"),
        paired.this_run() | {"processes": processes},
    )
    parts = [own.part] if own.part else [*PARTS]
    end, shares = time.monotonic() + 60 * own.minutes, sum(PARTS[part] for part in parts)
    for part in parts:
        seconds = max(30.0, (end - time.monotonic()) * PARTS[part] / shares)
        shares -= PARTS[part]
        references = reference(own.device) if part == "axes" else {}
        command, environment = command_of(part, own.device, processes)
        for result in resumed(command, seconds, os.environ | environment, SLOWER[own.device] * HANGS[part]):
            report.add(part, compared(result, references))
    print(f"written: {report.prefix}.json, {report.prefix}.md", file=sys.stderr)
    if report.wrong or not all(report.found[part] for part in parts):
        raise RunError(f"a case failed, or differs from one device, or a part has none; see {report.prefix}.md")


def _gpus() -> int:
    try:
        listed = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True).stdout
    except OSError:
        listed = ""
    if not listed:
        raise UserError("--device gpu: nvidia-smi lists no GPU; valid: --device cpu, simulated devices")
    return len(listed.splitlines())


if __name__ == "__main__":
    run(main)
