"""A plan in words and as figures: what a training step needs of every device, and how long it takes."""

from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from megajax.backend import CPU, GPU
from megajax.config import Config
from megajax.models.family import count_parameters, step_flops
from megajax.plan.communication import bytes_by_axis, communication, totals
from megajax.plan.compiled import CompiledStep
from megajax.plan.machines import Machine
from megajax.plan.memory import Memory, backend_of, memory
from megajax.plan.time import StepTime, step_time

_GIB, _GB = 2**30, 1e9
_NAMES = {
    "main_weights": "main weights",
    "gradients": "sums of gradients",
    "kept": "kept activations",
    "factors": "factors of weight gradients that wait",
    "hand_overs": "communication: hand-overs between stages",
}


@dataclass(frozen=True)
class Plan:
    """What is known of a training step.

    Attributes:
        preset: its name.
        config: a valid configuration.
        machine: the GPUs.
        compiled: what a compiler makes of the step; None if it was not asked.
        seconds: that the plan took.
        peak_bytes: of this machine's memory that it took.
    """

    preset: str
    config: Config
    machine: Machine
    compiled: CompiledStep | None
    seconds: float
    peak_bytes: int

    @cached_property
    def memory(self) -> Memory:
        """By the model, on a device."""
        return memory(self.config, backend_of(self.machine))

    @cached_property
    def time(self) -> StepTime:
        return step_time(self.config, self.machine)

    @cached_property
    def communication(self) -> dict[tuple[str, str], tuple[int, int]]:
        """By axes and kind, how many collectives the device that sends most takes part in, and the bytes it has of
        their operands; over axes of one device nothing is sent."""
        sizes = asdict(self.config.mesh)
        found: dict[tuple[str, str], tuple[int, int]] = {}
        for (names, kind), (count, size) in bytes_by_axis(communication(self.config), sent=True).items():
            axes = ",".join(axis for axis in names.split(",") if sizes[axis] > 1)
            before = found.get((axes, kind), (0, 0))
            if axes:
                found[axes, kind] = before[0] + count, before[1] + size
        return found

    @property
    def flops(self) -> int:
        """Of a step, as the model's arithmetic is counted (`models/family.step_flops`)."""
        return step_flops(self.config.model, self.config.train.global_batch)

    @cached_property
    def expected(self) -> Memory | None:
        """What the model says for the devices that were compiled for."""
        if self.compiled is None:
            return None
        return memory(self.config, GPU if self.compiled.gpus else CPU)

    @cached_property
    def as_traced(self) -> bool | None:
        """Whether the theory of communication is what the traced step has; None if none was traced."""
        if self.compiled is None:
            return None
        return totals(communication(self.config)) == totals(self.compiled.collectives)


def figures(plan: Plan) -> dict[str, Any]:
    """The plan for a program, as JSON has it."""
    config, machine, needed, time = plan.config, plan.machine, plan.memory, plan.time
    compiled = plan.compiled
    return {
        "preset": plan.preset,
        "gpu": machine.name,
        "mesh": asdict(config.mesh),
        "devices": config.mesh.num_devices,
        "parameters": count_parameters(config.model),
        "memory": asdict(needed) | {"total": needed.total, "usable": machine.usable, "of_gpu": machine.memory},
        "fits": needed.total <= machine.usable,
        "compiled": compiled
        and {
            "compiler": compiled.compiler,
            "state": compiled.state,
            "temporaries": compiled.temporaries,
            "predicted_temporaries": plan.expected.of_step if plan.expected else None,
            "communication_as_predicted": plan.as_traced,
            "seconds": compiled.seconds,
        },
        "communication": [
            {"axes": axes.split(","), "kind": kind, "count": count, "bytes": size}
            for (axes, kind), (count, size) in plan.communication.items()
        ],
        "flops": plan.flops,
        "bubble": time.bubble,
        "step_seconds": time.seconds,
        "step_parts": time.parts,
        "tokens_per_second": time.tokens_per_second,
        "mfu": time.mfu,
        "seconds": plan.seconds,
        "peak_bytes": plan.peak_bytes,
    }


def text(plan: Plan) -> str:
    """The plan in lines."""
    return "\n".join(["", *_head(plan), *_memory(plan), *_communication(plan), *_time(plan), *_cost(plan)])


def _head(plan: Plan) -> list[str]:
    config, mesh = plan.config, plan.config.mesh
    pipe = f", {config.pipeline.schedule}" if mesh.pipe > 1 else ""
    chunks = f" x {config.pipeline.chunks} chunks" if config.pipeline.chunks > 1 else ""
    split = ", sequence split" if config.sequence_parallel else ""
    return [
        f"{plan.preset}: {count_parameters(config.model):,} parameters on {mesh.num_devices} {plan.machine.name}, "
        f"{mesh}; {config.precision}{pipe}{chunks}{split}, "
        f"--optimizer.zero {config.optimizer.zero}, --train.remat {config.train.remat}"
    ]


def _memory(plan: Plan) -> list[str]:
    needed, machine, compiled = plan.memory, plan.machine, plan.compiled
    rows = [(_NAMES.get(name, name), size) for name, size in asdict(needed).items() if size]
    lines = ["", "memory of a device, GiB", *(f"  {name:<40} {size / _GIB:9.3f}" for name, size in rows)]
    left = machine.usable - needed.total
    verdict = f"fits, {left / _GIB:.1f} left" if left >= 0 else f"does not fit, {-left / _GIB:.1f} too much"
    lines.append(
        f"  {'together':<40} {needed.total / _GIB:9.3f}  of {machine.usable / _GIB:.1f} that a program gets of "
        f"{machine.memory / _GIB:.0f}: {verdict}"
    )
    if compiled is None or plan.expected is None:
        return [*lines, "  compiled for nothing: these are a model's figures (docs/plan.md)"]
    ratio = plan.expected.of_step / max(1, compiled.temporaries)
    lines.append("  layers as one scan; unrolled ones, the default on GPUs, keep more (docs/plan.md)")
    return [
        *lines,
        f"  compiled by {compiled.compiler}: {compiled.state / _GIB:.3f} state and batch, "
        f"{compiled.temporaries / _GIB:.3f} beside it; the model says {plan.expected.of_step / _GIB:.3f} for these "
        f"({ratio:.2f})",
    ]


def _communication(plan: Plan) -> list[str]:
    rows = [
        f"  {axes:<17} {kind:<16} {count:>9,} {size / _GB:12.3f}"
        for (axes, kind), (count, size) in plan.communication.items()
    ]
    title = f"  {'axes':<17} {'kind':<16} {'count':>9} {'GB':>12}"
    seen = {None: "", True: ", as in the traced program", False: "; the traced program's is another"}[plan.as_traced]
    none = [] if rows else ["  none"]
    return ["", f"communication of a device and step{seen}", *([title, *rows] if rows else none)]


def _time(plan: Plan) -> list[str]:
    time, devices = plan.time, plan.config.mesh.num_devices
    parts = (f"{name} {seconds / time.seconds:.0%}" for name, seconds in sorted(time.parts.items(), key=_most))
    return [
        "",
        f"arithmetic: {plan.flops / 1e15:,.2f} PFLOP a step, {plan.flops / devices / 1e12:,.2f} TFLOP a device",
        *([f"bubble: {time.bubble:.1%} of the pipe's time"] if plan.config.mesh.pipe > 1 else []),
        f"predicted (docs/plan-time.md): {time.seconds:.3f} s a step, {time.tokens_per_second:,.0f} tokens/s, "
        f"MFU {time.mfu:.1%}",
        f"  of it {', '.join(parts)}",
    ]


def _most(part: tuple[str, float]) -> float:
    return -part[1]


def _cost(plan: Plan) -> list[str]:
    return ["", f"planned in {plan.seconds:.1f} s with {plan.peak_bytes / _GIB:.2f} GiB on this machine"]
