"""The first part of `gpu.py`: is every form of attention right on this GPU, and how fast is it.

Each implementation is a process of its own (`gpu_attention.py`), since one that is wrong may end its process, or hang:
the case that did so is listed as failed, and the process goes on behind it.
"""

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

SCRIPT = str(Path(__file__).resolve().parent / "gpu_attention.py")
STARTING = 20.0  # seconds that a process may take beside its cases
HANGS = 60.0  # seconds without a line
ENDED = "the process ended or hung in this case"

# What is asked of which implementation, and its share of the time.
CHECKS = {"kernel": 4, "cudnn": 2, "blocks": 2}
SPEEDS = {"kernel": 5, "cudnn": 3, "torch": 2, "blocks": 2}
SHARE = sum(CHECKS.values()) + sum(SPEEDS.values())


def measure(
    device: str,
    seconds: float,
    environment: Mapping[str, str],
    found: Callable[[str, dict], None],
    script: str = SCRIPT,
) -> None:
    """All of it, in about so many seconds: `found` gets every result as it comes, by the table that it is for."""
    unit = seconds / SHARE
    checks, speeds = CHECKS, SPEEDS
    if device == "cpu":  # which has no other implementation
        checks, speeds = (
            {name: each[name] for name in each if name in ("blocks", "torch")} for each in (CHECKS, SPEEDS)
        )
    for implementation, share in checks.items():
        for result in cases(script, implementation, device, share * unit, environment, "--check"):
            found("right", {"implementation": implementation} | result)
    for implementation, share in speeds.items():
        for result in cases(script, implementation, device, share * unit, environment):
            found("speed", {"implementation": implementation} | result)


def cases(
    script: str, implementation: str, device: str, seconds: float, environment: Mapping[str, str], *more: str
) -> Iterator[dict]:
    """The results of an implementation, of which a process that ends early is begun again behind the case it was at."""
    command = [sys.executable, script, "--implementation", implementation, "--device", device, *more]
    yield from resumed(command, seconds, environment)


def resumed(command: Sequence[str], seconds: float, environment: Mapping[str, str], hangs: float = 0) -> Iterator[dict]:
    """What a process says of its cases, begun again with `--first` behind a case that ended it, or at which it was
    silent for `hangs` seconds."""
    first, end = 0, time.monotonic() + seconds
    for _ in range(4):
        left = max(1.0, end - time.monotonic())
        begun = None
        whole = [*command, "--seconds", f"{left:.0f}", "--first", str(first)]
        for result in spoken(whole, environment, left + STARTING + HANGS, hangs):
            begun = result if result.pop("begun", False) else None
            if begun is None:
                yield result
        if begun is None:
            return
        yield begun | {"failed": ENDED}
        first = begun["number"] + 1


def spoken(command: Sequence[str], environment: Mapping[str, str], seconds: float, hangs: float = 0) -> Iterator[dict]:
    """What a process says in JSON, line by line; it, with those it started, is ended after so many seconds, or when it
    is silent too long."""
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        text=True,
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    lines: queue.Queue[str | None] = queue.Queue()
    assert process.stdout is not None

    def read() -> None:
        for line in process.stdout:
            lines.put(line)
        lines.put(None)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    end = time.monotonic() + seconds
    try:
        while time.monotonic() < end:
            line = lines.get(timeout=max(0.1, min((hangs or HANGS) + STARTING, end - time.monotonic())))
            if line is None:
                return
            if line.startswith("{"):
                yield json.loads(line)
    except queue.Empty:
        return
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        reader.join()
        process.stdout.close()


def tables(found: Mapping[str, Sequence[dict]]) -> list[str]:
    """Markdown of what was found so far."""
    lines = [
        "",
        "## Attention",
        "",
        "What is right here, of small cases with and without dropout, documents, padding, …:",
    ]
    for implementation in CHECKS:
        own = [each for each in found.get("right", ()) if each["implementation"] == implementation]
        right, left_out = sum("right" in each for each in own), sum("left_out" in each for each in own)
        failed = [each for each in own if "failed" in each]
        lines += ["", f"- {implementation}: {right} right, {len(failed)} failed, {left_out} left out"]
        lines += [f"  - {_named(each)}: {each['failed']}" for each in failed]
    lines += ["", "Causal, 16,384 tokens of 2,048 features, bf16; TFLOP/s of the scores that are seen.", ""]
    lines += [
        "| implementation | attention | forward ms | TFLOP/s | backward ms | TFLOP/s |",
        "|---|---|---|---|---|---|",
    ]
    for each in sorted(found.get("speed", ()), key=lambda each: (_named(each), each["implementation"])):
        name = f"| {' '.join(filter(None, [each['implementation'], each.get('backend')]))} | {_named(each)} |"
        if "forward_ms" not in each:
            lines.append(f"{name} {each.get('failed') or each.get('left_out')} | | | |")
            continue
        forward, backward = each["forward_ms"], each["both_ms"] - each["forward_ms"]
        rates = each["forward_tflops"], each["backward_tflops"]
        lines.append(f"{name} {forward:.3f} | {rates[0]:.4g} | {backward:.3f} | {rates[1]:.4g} |")
    return lines


def _named(case: Mapping) -> str:
    """A case in words."""
    words = [f"head size {case['size']:3}, {case['length']} tokens"]
    words += [name for name in ("dropout", "documents", "padded") if case[name]]
    words += [f"window {case['window']}"] if case["window"] else []
    words += [f"{case['kv_heads']} of {case['heads']} heads"] if case["kv_heads"] != case["heads"] else []
    return ", ".join([*words, *([] if case["dtype"] == "bfloat16" else [case["dtype"]])])
