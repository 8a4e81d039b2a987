"""A train step compiled for H200s without one: what it moves through their memory, or what its communication overlaps
with.

    python benchmarks/gpu_compiled.py PRESET [train.py's flags] [--what traffic|overlap]

It needs JAX's CUDA packages (`pip install 'jax[cuda13]'`), and no GPU. traffic: the bytes of every kernel that is
neither a product nor attention: its operands and results once, of slices what is sliced, loops as often as they run.
The time they allow is their bytes at the bandwidth that copies reach, and the arithmetic at the rate that large
products reach, one after the other: a ceiling of the speed, not a measurement. Prints one JSON object.

overlap: per part of the program (the loop over ticks, the branches of its conditionals, what comes after it) every
collective with what XLA runs between its start and its end: matrix products, other kernels, conditionals (a stage's
forward or backward); or that it is synchronous.
"""

import json
import math
import os
import re
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import paired

from megajax.core.backend import GPU
from megajax.core.models.flops import step_flops
from megajax.core.program.overlap import scans_layers
from megajax.host.ending import run
from megajax.plan.compiled import for_h200s
from megajax.plan.machines import MACHINES
from megajax.settings.config import Config
from megajax.start.launch import imagine_devices

PEAK, PRODUCTS, COPIES = MACHINES["h200"].peak["bf16"], 790e12, 4.3e12  # FLOP/s by the data sheet, reached; bytes/s
BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4, "s64": 8, "u64": 8, "f64": 8}
ARRAY = re.compile(r"\b([a-z]+\d*)\[([\d,]*)\]")
INSTRUCTION = re.compile(r"^\s*(ROOT )?%?([\w.\-]+) = (.*?[\]})]) ([a-z][a-z\-]*)\((.*?)\)(.*)$")
SLICES, UPDATES = {"dynamic-slice", "slice", "gather"}, {"dynamic-update-slice": 1, "scatter": 2}  # operand written
FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "iota", "partition-id"}
COLLECTIVE = re.compile(
    r" (all-gather|all-reduce|all-to-all|reduce-scatter|collective-permute)(-start|-done)?\(%?([\w.\-]+)"
)


def computations(text: str) -> Iterator[tuple[str, bool, list[str]]]:
    """Names, whether it is the program's entry, and instructions, in the order they are issued."""
    for block in text.split("\n\n"):
        head, *lines = block.strip().splitlines() or [""]
        if head.endswith("{"):
            entry = head.startswith("ENTRY")
            yield head.split()[1 if entry else 0].lstrip("%"), entry, [line.strip() for line in lines]


def array_bytes(type_: str) -> int:
    """Bytes of all arrays in a type."""
    return sum(
        BYTES.get(name, 4) * math.prod(int(size) for size in dims.split(",") if size)
        for name, dims in ARRAY.findall(type_)
    )


class Traffic:
    """Bytes by kind of kernel in a compiled program's text."""

    def __init__(self, text: str):
        self.computations: dict[str, list[re.Match]] = {}
        self.types: dict[str, str] = {}
        entry = ""
        for name, is_entry, lines in computations(text):
            entry = name if is_entry else entry
            self.computations[name] = [match for line in lines if (match := INSTRUCTION.match(line))]
            self.types |= {match.group(2): match.group(3) for match in self.computations[name]}
        self.kernels, self.products, self.attention = 0, 0, 0
        self.bytes = self._of(entry)

    def _of(self, name: str) -> float:
        total = 0.0
        for match in self.computations[name]:
            _, _, type_, operation, operands, rest = match.groups()
            called = re.findall(r"(?:calls|body|to_apply)=%?([\w.\-]+)", rest)
            if operation == "while":
                trips = re.search(r"known_trip_count[^\d]*(\d+)", rest)
                total += (int(trips.group(1)) if trips else 1) * self._of(called[0])
            elif operation == "conditional":
                branches = re.search(r"branch_computations=\{([^}]*)\}", rest)
                names = branches.group(1) if branches else ", ".join(re.findall(r"_computation=%?([\w.\-]+)", rest))
                total += max(self._of(branch.strip().lstrip("%")) for branch in names.split(","))
            elif operation == "call" or operation.startswith("async"):
                total += sum(self._of(one) for one in called)
            elif operation == "custom-call":
                self.attention += "fmha" in rest or "mosaic_gpu" in rest
                self.products += "cublas" in rest or "gemm" in rest
            elif operation in ("fusion", "fusion-start") and "gemm" in rest:
                self.products += 1
            elif operation in ("fusion", "fusion-start"):
                self.kernels += 1
                total += self._fusion(called[0])
            elif operation.endswith("-done"):
                continue
            elif operation not in FREE:
                self.kernels += 1
                arguments = _names(operands)
                total += array_bytes(type_) + sum(array_bytes(self.types.get(one, "")) for one in arguments)
        return total

    def _fusion(self, name: str) -> int:
        """A fused kernel reads its parameters, or of one that is only sliced the slices; and writes its root, or of an
        update in place the update."""
        made = {match.group(2): match for match in self.computations[name]}

        def source(one: str) -> str:
            """What a name stands for: a bitcast moves nothing."""
            return source(_names(made[one].group(5))[0]) if made[one].group(4) == "bitcast" else one

        uses: dict[str, list[tuple[str, int, str]]] = {}  # operation, which operand, type of the result
        root = ""
        for own, match in made.items():
            root = own if match.group(1) else root
            if match.group(4) != "bitcast":
                for place, operand in enumerate(_names(match.group(5))):
                    uses.setdefault(source(operand), []).append((match.group(4), place, match.group(3)))
        read = written = 0
        for own, match in made.items():
            if match.group(4) == "parameter":
                slices = [array_bytes(type_) for operation, _, type_ in uses.get(own, []) if operation in SLICES]
                updates = [use for use in uses.get(own, []) if use[0] in UPDATES and use[1] == 0]
                only_parts = 0 < len(slices) + len(updates) == len(uses.get(own, []))
                read += sum(slices) if only_parts else array_bytes(match.group(3))
        results = _names(made[root].group(5)) if made[root].group(4) == "tuple" else [root]
        for result in map(source, results):
            operands, place = _names(made[result].group(5)), UPDATES.get(made[result].group(4))
            written += array_bytes(made[result].group(3) if place is None else self.types[operands[place]])
        return read + written


def _names(operands: str) -> list[str]:
    return re.findall(r"%([\w.\-]+)", operands)


def compile_step(config: Config) -> Any:
    """The train step."""
    imagine_devices(config)
    return for_h200s(config)


def report(config: Config) -> dict:
    """Bytes a device holds, bytes it moves, and the model FLOP/s that they allow."""
    began = time.perf_counter()
    compiled = compile_step(config)
    memory, traffic = compiled.memory_analysis(), Traffic(compiled.as_text())
    flops = step_flops(config.model, config.train.global_batch) / config.mesh.num_devices
    recomputed = 4 / 3 if config.train.remat in ("layer", "stage") else 1.0
    seconds = flops * recomputed / PRODUCTS + traffic.bytes / COPIES
    tokens = config.train.global_batch * config.model.sequence_length / config.mesh.num_devices
    return {
        "microbatch": config.train.microbatch,
        "layers": "scanned" if scans_layers(config, GPU) else "unrolled",
        "remat": config.train.remat,
        "dropout": config.model.dropout,
        "state_gib": memory.argument_size_in_bytes / 2**30,
        "temporary_gib": memory.temp_size_in_bytes / 2**30,
        "traffic_gb": traffic.bytes / 1e9,
        "traffic_ms_per_8192_tokens": traffic.bytes / COPIES * 1e3 * 8192 / tokens,
        "mfu_ceiling": flops / seconds / PEAK,
        "products": traffic.products,
        "attention_calls": traffic.attention,
        "other_kernels": traffic.kernels,
        "compile_seconds": time.perf_counter() - began,
    }


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
        operation, collective = INSTRUCTION.match(line), COLLECTIVE.search(line)
        if collective and operation:
            name, form, operand = collective.groups()
            shape = next(iter(re.findall(r"[a-z]+\d+\[[\d,]*\]", line)), "")
            if form == "-start":
                running[operation.group(2)] = name, shape, Counter()
            elif form == "-done":
                name, shape, meanwhile = running.pop(operand)
                counts = [f"{number} {what}" for what, number in sorted(meanwhile.items())]
                yield name, shape, ", ".join(counts) or "nothing"
            else:
                yield name, shape, "synchronous"
        elif operation and (what := kind(line, operation.group(4))):
            for _, _, meanwhile in running.values():
                meanwhile[what] += 1


def print_overlaps(config: Config) -> None:
    """List the collectives of every part that has some."""
    began, compiled = time.perf_counter(), compile_step(config)
    memory, devices = compiled.memory_analysis(), config.mesh.num_devices
    held, temporary = memory.argument_size_in_bytes / 2**30, memory.temp_size_in_bytes / 2**30
    print(f"compiled in {time.perf_counter() - began:.0f} s for {devices} H200 with {os.environ['XLA_FLAGS']}")
    print(f"a device holds {held:.2f} GiB of state and batch, and {temporary:.2f} GiB of temporaries")
    for name, _, lines in computations(compiled.as_text()):
        found = list(overlaps(lines))
        if found:
            holds = Counter(match.group(4) for line in lines if (match := INSTRUCTION.match(line)))
            parts = [f"{holds[what]} {what}s" for what in ("while", "conditional") if holds[what]]
            print(f"{name}{' with ' + ', '.join(parts) if parts else ''}")
            for collective, shape, meanwhile in found:
                print(f"  {collective:<19} {shape:<28} {meanwhile}")


def main() -> None:
    """Compile and report."""
    own, _, config = paired.command_line(__doc__, "", what=("traffic", "overlap"))
    if own.what == "overlap":
        print_overlaps(config)
    else:
        print(json.dumps(report(config)))


if __name__ == "__main__":
    run(main)
