"""What communication overlaps with on GPUs: the scheduled program of a train step, compiled for H200s without one.

It needs a machine with JAX's CUDA packages (`pip install 'jax[cuda13]'`), and no GPU. Per part of the program (the loop
over ticks, the branches of its conditionals, what comes after it) every collective is listed with what XLA runs between
its start and its end: matrix products, other kernels, conditionals (a stage's forward or backward); or that it is
synchronous.

    python benchmarks/gpu_schedule.py gpt2-1.2b --model.num-layers 4 --mesh.data 2 --mesh.pipe 2 --mesh.tensor 2 \
        --train.global-batch 32 --train.microbatch 4 --model.dropout 0 [other flags of train.py]
"""

import os
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megajax.plan.compiled import for_h200s
from megajax.settings.config import Config
from megajax.settings.flags import parse
from megajax.start.launch import imagine_devices

KINDS = "all-gather|all-reduce|all-to-all|reduce-scatter|collective-permute"
COLLECTIVE = re.compile(rf" ({KINDS})(-start|-done)?\(%?([\w.\-]+)")
OPERATION = re.compile(r"^(?:ROOT )?%?([\w.\-]+) = .*?[\]})] ([a-z][a-z\-]*)\(")


def step_text(config: Config) -> str:
    """The train step's optimized, scheduled HLO; its bytes are printed."""
    imagine_devices(config)
    began = time.perf_counter()
    compiled = for_h200s(config)
    memory, devices = compiled.memory_analysis(), config.mesh.num_devices
    held, temporary = memory.argument_size_in_bytes / 2**30, memory.temp_size_in_bytes / 2**30
    print(f"compiled in {time.perf_counter() - began:.0f} s for {devices} H200 with {os.environ['XLA_FLAGS']}")
    print(f"a device holds {held:.2f} GiB of state and batch, and {temporary:.2f} GiB of temporaries")
    return compiled.as_text()


def computations(text: str) -> Iterator[tuple[str, list[str]]]:
    """Names and instructions, in the order they are issued."""
    for block in re.split(r"\n\n", text):
        head, *lines = block.strip().splitlines() or [""]
        if head.endswith("{"):
            yield head.split()[1 if head.startswith("ENTRY") else 0].lstrip("%"), [line.strip() for line in lines]


def kind(line: str, operation: str) -> str | None:
    """What an instruction counts as; None: nothing that takes time."""
    if operation == "custom-call":
        return "matrix products" if "cublas" in line or "gemm" in line else "custom calls"
    if operation == "fusion":
        return "matrix products" if "gemm" in line else "kernels"
    return {"conditional": "conditionals", "while": "loops", "copy": "kernels"}.get(operation)


def overlaps(lines: list[str]) -> Iterator[tuple[str, str, str]]:
    """Kind, type of the operand, and what runs meanwhile, of every collective."""
    running: dict[str, tuple[str, str, Counter]] = {}
    for line in lines:
        operation, collective = OPERATION.match(line), COLLECTIVE.search(line)
        if collective and operation:
            name, form, operand = collective.groups()
            shape = next(iter(re.findall(r"[a-z]+\d+\[[\d,]*\]", line)), "")
            if form == "-start":
                running[operation.group(1)] = name, shape, Counter()
            elif form == "-done":
                name, shape, meanwhile = running.pop(operand)
                counts = [f"{number} {what}" for what, number in sorted(meanwhile.items())]
                yield name, shape, ", ".join(counts) or "nothing"
            else:
                yield name, shape, "synchronous"
        elif operation and (what := kind(line, operation.group(2))):
            for _, _, meanwhile in running.values():
                meanwhile[what] += 1


def main() -> None:
    config = parse(sys.argv[1:], "Compile a train step for H200s and list what its communication overlaps with.")
    for name, lines in computations(step_text(config)):
        found = list(overlaps(lines))
        if found:
            holds = Counter(match.group(2) for line in lines if (match := OPERATION.match(line)))
            parts = [f"{holds[what]} {what}s" for what in ("while", "conditional") if holds[what]]
            print(f"{name}{' with ' + ', '.join(parts) if parts else ''}")
            for collective, shape, meanwhile in found:
                print(f"  {collective:<19} {shape:<28} {meanwhile}")


if __name__ == "__main__":
    main()
