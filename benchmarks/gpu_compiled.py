"""A train step compiled for H200s without one: how long it would take by what its kernels compute, move and send, and
what its communication overlaps with.

    python benchmarks/gpu_compiled.py PRESET [train.py's flags] [--what times|kernels|overlap]

It needs JAX's CUDA packages (`pip install 'jax[cuda13]'`), and no GPU. **Nothing is measured.** Kernels run one after
the other in the order of the program, loops as often as they run, of a conditional the longest branch. Products take
their arithmetic at 80% of the peak, attention at the plan's share of it, other kernels their bytes at the bandwidth
that copies reach: operands and results once, of slices what is sliced; so our own kernels (`kernel_calls`) are counted
without their arithmetic. Collectives use the link one at a time, at the rates that NCCL reaches in a server; exposed is
how long kernels wait for one. `ceiling` and `all_hidden`, without what is exposed, are the MFU of such a step.

times: one JSON object. kernels: the products, kernels and collectives that take most time, by what they are of.
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

H200 = MACHINES["h200"]
PRODUCTS, COPIES, ALL_REDUCE, OTHERS = 0.8, 4.3e12, 475e9, 370e9  # of the peak; bytes/s
BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4, "s64": 8, "u64": 8, "f64": 8}
BYTES |= {"f8e4m3fn": 1, "f8e5m2": 1}
ARRAY = re.compile(r"\b([a-z]+\d*(?:e\dm\d(?:fn)?)?)\[([\d,]*)\]")
INSTRUCTION = re.compile(r"^\s*(ROOT )?%?([\w.\-]+) = (.*?[\]})]) ([a-z][a-z\-]*)\((.*?)\)(.*)$")
SLICES, UPDATES = {"dynamic-slice", "slice", "gather"}, {"dynamic-update-slice": 1, "scatter": 2}  # operand written
FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "iota", "partition-id"}
COLLECTIVE = re.compile(r"(all-gather|all-reduce|all-to-all|reduce-scatter|collective-permute)(-start|-done)?")
TIMES = ("products", "attention", "kernels", "exposed")  # one after the other; "sent" is not


def computations(text: str) -> Iterator[tuple[str, bool, list[str]]]:
    """Names, whether it is the program's entry, and instructions, in the order they are issued."""
    for block in text.split("\n\n"):
        head, *lines = block.strip().splitlines() or [""]
        if head.endswith("{"):
            entry = head.startswith("ENTRY")
            yield head.split()[1 if entry else 0].lstrip("%"), entry, [line.strip() for line in lines]


def arrays(type_: str) -> list[tuple[str, list[int]]]:
    """The dtype and dims of every array in a type."""
    return [(name, [int(size) for size in dims.split(",") if size]) for name, dims in ARRAY.findall(type_)]


def array_bytes(type_: str) -> int:
    """Bytes of all arrays in a type."""
    return sum(BYTES.get(name, 4) * math.prod(dims) for name, dims in arrays(type_))


def peak(dtype: str) -> float:
    """FLOP/s of products of this dtype."""
    return H200.peak["fp8" if dtype.startswith("f8") else "bf16" if BYTES[dtype] == 2 else "fp32"]


def group_size(rest: str) -> int:
    """How many devices take part in a collective."""
    if named := re.search(r"replica_groups=mesh\[(.*?)\] \{(.*?)\}", rest):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", named.group(1)))
        return math.prod(int(sizes[name]) for name in re.findall(r"'(\w+)'", named.group(2)))
    if counted := re.search(r"replica_groups=\[\d+,(\d+)\]", rest):
        return int(counted.group(1))
    listed = re.search(r"replica_groups=\{\{([\d,]*)\}", rest)
    return listed.group(1).count(",") + 1 if listed else 2  # a permute has none


class Estimate:
    """Seconds and bytes of a compiled program's text, and what they are of."""

    def __init__(self, text: str):
        self.computations: dict[str, list[re.Match]] = {}
        self.types: dict[str, str] = {}
        entry = ""
        for name, is_entry, lines in computations(text):
            entry = name if is_entry else entry
            self.computations[name] = [match for line in lines if (match := INSTRUCTION.match(line))]
            self.types |= {match.group(2): match.group(3) for match in self.computations[name]}
        self.of: Counter[tuple[str, str]] = Counter()  # seconds by kind and scope
        self.total = self._of(entry, 1)

    def _of(self, name: str, times: float) -> Counter[str]:
        """One run of a computation, which runs so many times in all."""
        total: Counter[str] = Counter()
        clock = free = 0.0  # now, and when the link is free
        ends: dict[str, float] = {}
        for match in self.computations[name]:
            _, own, _, operation, operands, rest = match.groups()
            collective = COLLECTIVE.fullmatch(operation)
            if collective is None:
                found = self._kernel(match, times)
            elif collective.group(2) == "-done":
                found = Counter(exposed=max(0.0, ends.pop(_names(operands)[0]) - clock))
            else:
                seconds = self._sent(match, collective.group(1))
                free = max(free, clock) + seconds
                ends[own] = free
                found = Counter(sent=seconds)
                if collective.group(2) is None:
                    found["exposed"] = ends.pop(own) - clock
            if operation not in ("while", "conditional", "call") and not operation.startswith("async"):
                scope = re.search(r'op_name="([^"]*)"', rest)
                for kind in found.keys() - {"bytes", "calls"}:
                    self.of[kind, scope.group(1) if scope else own] += times * found[kind]
            clock += sum(found[kind] for kind in TIMES)
            total.update(found)
        return total

    def _kernel(self, match: re.Match, times: float) -> Counter[str]:
        """One run of an instruction that is no collective."""
        _, _, type_, operation, operands, rest = match.groups()
        called = re.findall(r"(?:calls|body|to_apply)=%?([\w.\-]+)", rest)
        if operation == "while":
            trips = re.search(r"known_trip_count[^\d]*(\d+)", rest)
            number = int(trips.group(1)) if trips else 1
            return Counter({kind: number * each for kind, each in self._of(called[0], number * times).items()})
        if operation == "conditional":
            branches = re.search(r"branch_computations=\{([^}]*)\}", rest)
            names = branches.group(1) if branches else ", ".join(re.findall(r"_computation=%?([\w.\-]+)", rest))
            found = [self._of(branch.strip().lstrip("%"), times) for branch in names.split(",")]
            return max(found, key=lambda each: sum(each[kind] for kind in TIMES))
        if operation == "call" or operation.startswith("async"):
            return sum((self._of(each, times) for each in called), Counter())
        fused = operation in ("fusion", "fusion-start")
        inside = self.computations[called[0]] if fused else [match]
        for each in inside:
            if each.group(4) == "dot" or "cublas" in each.group(6):
                return Counter(products=self._product(each))
            if "fmha" in each.group(6):
                return Counter(attention=self._attention(each))
        if operation in FREE or operation.endswith("-done"):
            return Counter()
        moved = array_bytes(type_) + sum(array_bytes(self.types.get(each, "")) for each in _names(operands))
        if fused:
            moved = self._fusion(called[0])
        return Counter(bytes=moved, kernels=moved / COPIES, calls=int("mosaic" in rest))

    def _product(self, match: re.Match) -> float:
        _, _, type_, _, operands, rest = match.groups()
        types = [self.types[each] for each in _names(operands)]
        (dtype, left), (_, result) = arrays(types[0])[0], arrays(type_)[0]
        dims = re.search(r'lhs_contracting_dim(?:s=\{|ensions":\[)([\d,"]*)', rest)
        summed = math.prod(left[int(dim)] for dim in re.findall(r"\d+", dims.group(1) if dims else ""))
        moved = sum(map(array_bytes, types)) + array_bytes(type_)
        return max(2 * math.prod(result) * summed / (PRODUCTS * peak(dtype)), moved / COPIES)

    def _attention(self, match: re.Match) -> float:
        (dtype, (*_, length, heads, size)), (_, (*_, keys, _, _)), *_ = arrays(match.group(6))
        batch = math.prod(arrays(match.group(6))[0][1][:-3])
        passes = 2.5 if "Backward" in match.group(6) else 1.0
        causal = 0.5 if "CAUSAL" in match.group(6) else 1.0
        flops = 4 * batch * length * heads * size * keys * passes * causal
        return flops / (H200.efficiency.attention * peak(dtype))

    def _sent(self, match: re.Match, kind: str) -> float:
        _, _, type_, operation, operands, rest = match.groups()
        given = sum(array_bytes(self.types[each]) for each in _names(operands))
        whole = max(given, array_bytes(type_) - given * operation.endswith("-start"))
        size = group_size(rest)
        share = 1.0 if kind == "collective-permute" else (size - 1) / size
        return 2 * share * whole / ALL_REDUCE if kind == "all-reduce" else share * whole / OTHERS

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
    """Bytes a device holds, what it does, and the model FLOP/s that this allows."""
    began = time.perf_counter()
    compiled = compile_step(config)
    memory, found = compiled.memory_analysis(), Estimate(compiled.as_text()).total
    flops = step_flops(config.model, config.train.global_batch) / config.mesh.num_devices
    seconds = sum(found[kind] for kind in TIMES)
    return {
        "layers": "scanned" if scans_layers(config, GPU) else "unrolled",
        "state_gib": memory.argument_size_in_bytes / 2**30,
        "temporary_gib": memory.temp_size_in_bytes / 2**30,
        "ms": 1e3 * seconds,
        **{f"{kind}_ms": 1e3 * found[kind] for kind in (*TIMES, "sent")},
        "traffic_gb": found["bytes"] / 1e9,
        "kernel_calls": found["calls"],
        "ceiling": flops / seconds / peak("bf16"),
        "all_hidden": flops / (seconds - found["exposed"]) / peak("bf16"),
        "compile_seconds": time.perf_counter() - began,
    }


def print_kernels(config: Config, most: int = 40) -> None:
    """List what takes most time: milliseconds of a step, kind, and the end of the name of what it is of."""
    of = Estimate(compile_step(config).as_text()).of
    for (what, scope), seconds in of.most_common(most):
        print(f"{1e3 * seconds:9.3f} {what:<9} {'backward ' * ('transpose' in scope)}{'/'.join(scope.split('/')[-4:])}")


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
    for match in filter(None, map(INSTRUCTION.match, lines)):
        _, own, type_, operation, operands, _ = match.groups()
        if collective := COLLECTIVE.fullmatch(operation):
            name, form = collective.groups()
            if form == "-done":
                name, shape, meanwhile = running.pop(_names(operands)[0])
                counts = [f"{number} {what}" for what, number in sorted(meanwhile.items())]
                yield name, shape, ", ".join(counts) or "nothing"
                continue
            shape = next(iter(re.findall(r"[a-z]+\d+\[[\d,]*\]", type_)), "")
            if form == "-start":
                running[own] = name, shape, Counter()
            else:
                yield name, shape, "synchronous"
        elif what := kind(match.string, operation):
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
    own, _, config = paired.command_line(__doc__, "", what=("times", "kernels", "overlap"))
    if own.what == "times":
        print(json.dumps(report(config)))
    else:
        {"kernels": print_kernels, "overlap": print_overlaps}[own.what](config)


if __name__ == "__main__":
    run(main)
