"""A plan as figures and as text: what a training step needs on every device, and how long it takes."""

from dataclasses import asdict, fields
from typing import Any

from megajax.core.backend import CPU, GPU
from megajax.core.models.flops import step_flops
from megajax.core.models.registry import FAMILIES
from megajax.core.models.staged import count_active_parameters, count_parameters
from megajax.core.program.program import training_way
from megajax.core.program.weight import stacks_of
from megajax.plan.communication import communication, sent_by_axes, totals
from megajax.plan.compiled import Compilation, scanned
from megajax.plan.expert_loop import ExpertLoop
from megajax.plan.machines import GIB, Machine
from megajax.plan.memory import Memory, backend_of, memory, padding
from megajax.plan.sizes import Sizes
from megajax.plan.time import StepModel, in_order
from megajax.plan.traced import step_cost
from megajax.plan.update import dealt
from megajax.plan.whole_run import WholeRun
from megajax.settings.config import Config

_UNKNOWN = WholeRun()
_NAMES = {
    "main_weights": "main weights",
    "average": "averaged weights",
    "frozen_copies": "float8 copies of frozen weights",
    "copies": "float8 copies of weights",
    "gathered": "gathered weights",
    "gradients": "gradient accumulators",
    "kept": "stored activations",
    "factors": "factors of deferred weight gradients",
    "p2p_transfers": "communication: p2p between stages",
    "unrolled": "for unrolled layers, at most",
}
_EXPERT_KERNEL = "  experts without a capacity: each product is one kernel"
_OWN_KERNEL = "  attention by our own kernel, an estimate (without it: --model.attention blocks)"
_NOT_COUNTED = "what layers compute and hold for a moment beside the products of megajax.Weights.columns and rows"
_TRACED = {True: ", as in the traced program", False: "; the traced program differs"}


def figures(
    preset: str, config: Config, machine: Machine, compilation: Compilation | None, run: WholeRun = _UNKNOWN
) -> dict[str, Any]:
    """The plan of a valid configuration's training step as JSON, with a compiler's figures if it was compiled."""
    needed, model = memory(config, backend_of(machine)), StepModel(config, machine)
    time = model.time(config.pipeline)
    plan: dict[str, Any] = {
        "preset": preset,
        "gpu": machine.name,
        "mesh": config.mesh.sizes,
        "devices": config.mesh.num_devices,
        "parameters": count_parameters(config.model),
        "active_parameters": count_active_parameters(config.model),
        "layers": sum((stack.layer_index >= 0).sum(-1) for stack in stacks_of(config).values()).ravel().tolist(),
        "padding": padding(config, needed),
        "memory": asdict(needed) | {"total": needed.total, "usable": machine.usable, "of_gpu": machine.memory},
        "fits": needed.total <= machine.usable,
        "compiled": None,
        "communication": [
            {"axes": axes.split(","), "kind": kind, "count": count, "bytes_sent": sent}
            for (axes, kind), (count, sent) in sent_by_axes(config).items()
        ],
        "flops": step_flops(config.model, config.train.global_batch),
        "muon_flops": sum(each.flops(config.optimizer.muon_steps) for each in dealt(Sizes(config))),
        "bubble": time.bubble,
        "stage_seconds": time.stages,
        "step_seconds": time.seconds,
        "step_parts": time.parts,
        "tokens_per_second": time.tokens_per_second,
        "mfu": time.mfu,
        "mfu_causal": time.mfu_causal,
        "own_kernel": model.work.kernel is not None,
        "expert_kernel": model.work.groups_by_kernel,
        "expert_loop": time.expert_loop and asdict(time.expert_loop),
        "not_counted": _NOT_COUNTED if FAMILIES[config.model.family].own else "",
    }
    plan["whole_run"] = run.figures(time.tokens_per_second, config.mesh.num_devices)
    return plan | ({"compiled": _compiled(config, compilation)} if compilation else {})


def _compiled(config: Config, compilation: Compilation) -> dict[str, Any]:
    """A compiler's figures, next to the estimate for the same devices, and whether the traced step communicates as
    predicted."""
    backend = GPU if compilation.gpus else CPU
    config = scanned(config)
    predicted = memory(config, backend)
    expected = totals(communication(config, step_cost(config, backend), backend))
    compiled = compilation.result()
    return {
        "compiler": compiled.compiler,
        "state": compiled.state,
        "temporaries": compiled.temporaries,
        "predicted_temporaries": predicted.of_step,
        "communication_as_predicted": expected == totals(compiled.collectives),
        "seconds": compiled.seconds,
    }


def text(plan: dict[str, Any], config: Config) -> str:
    """The figures of a configuration as lines of text."""
    cost = f"planned in {plan['seconds']:.1f} s with {plan['peak_bytes'] / GIB:.2f} GiB on this machine"
    return "\n".join(["", _head(plan, config), *_memory(plan, config), *_communication(plan), *_time(plan), "", cost])


def _head(plan: dict[str, Any], config: Config) -> str:
    pipe = f", {config.pipeline.schedule}" if config.mesh.pipe > 1 else ""
    chunks = f" x {config.pipeline.chunks} chunks" if config.pipeline.chunks > 1 else ""
    split = ", sequence parallel" if config.sequence_parallel else ""
    split += f", attention by {training_way(config)}" if config.mesh.context > 1 else ""
    gpus = f"{plan['devices']} {plan['gpu'].upper()}{'s' * (plan['devices'] > 1)}"
    active = f", {plan['active_parameters']:,} of them active," if config.model.num_experts else ""
    return (
        f"{plan['preset']}: {plan['parameters']:,} parameters{active} on {gpus}, "
        f"{config.mesh}; {config.precision}{pipe}{chunks}{split}, "
        f"{config.optimizer.zero_flags}, --train.remat {config.train.remat}"
        f"{'; planned as if all weights were trained, without --train.freeze' * bool(config.train.freeze)}"
    )


def _memory(plan: dict[str, Any], config: Config) -> list[str]:
    needed, compiled = plan["memory"], plan["compiled"]
    names = [field.name for field in fields(Memory) if needed[field.name]]
    left = needed["usable"] - needed["total"]
    too_much = f"{-left / GIB:.1f} too much (--devices N searches for what does)"
    verdict = f"fits, {left / GIB:.1f} left" if left >= 0 else f"does not fit, {too_much}"
    if left < 0 <= left + needed["unrolled"]:
        verdict = f"may not fit, up to {-left / GIB:.1f} too much (--model.scan-layers true needs less)"
    lines = [
        "",
        "memory per device, GiB",
        *(f"  {_NAMES.get(name, name):<40} {needed[name] / GIB:9.3f}" for name in names),
        f"  {'total':<40} {needed['total'] / GIB:9.3f}  of {needed['usable'] / GIB:.1f} usable "
        f"of {needed['of_gpu'] / GIB:.0f}: {verdict}",
        *_layers(plan, config),
    ]
    if compiled is None:
        return [*lines, "  not compiled; analytical estimate (docs/plan.md)"]
    of_step = compiled["predicted_temporaries"]
    return [
        *lines,
        "  layers compiled as one scan; for unrolled layers, the default on GPUs, the plan counts more (docs/plan.md)",
        f"  compiled by {compiled['compiler']}: {compiled['state'] / GIB:.3f} state and batch, "
        f"{compiled['temporaries'] / GIB:.3f} of temporaries, where the estimate is {of_step / GIB:.3f} "
        f"({of_step / max(1, compiled['temporaries']):.2f} times)",
    ]


def _layers(plan: dict[str, Any], config: Config) -> list[str]:
    """The layers of stages that are padded to the fullest, and what that costs."""
    placement = Sizes(config).placement
    most, size = placement.layers_per_chunk, plan["padding"] / GIB
    unit = "layers" if "" in config.model.kinds else "periods"
    return [f"  {unit} {placement}, padded to {most}: up to {size:.3f} hold none"] if placement.padded else []


def _communication(plan: dict[str, Any]) -> list[str]:
    rows = [
        f"  {','.join(row['axes']):<17} {row['kind']:<16} {row['count']:>9,} {row['bytes_sent'] / 1e9:12.3f}"
        for row in plan["communication"]
    ]
    title = f"  {'axes':<17} {'kind':<16} {'count':>9} {'GB sent':>12}"
    traced = _TRACED[plan["compiled"]["communication_as_predicted"]] if plan["compiled"] else ""
    return ["", f"communication per device and step{traced}", *([title, *rows] if rows else ["  none"])]


def _time(plan: dict[str, Any]) -> list[str]:
    flops, devices, seconds = plan["flops"], plan["devices"], plan["step_seconds"]
    muon = f"; Muon's matrices {plan['muon_flops'] / 1e12:,.3f} TFLOP" if plan["muon_flops"] else ""
    stages = f"the stages work {min(plan['stage_seconds']):.3f} to {max(plan['stage_seconds']):.3f} s"
    parts = (f"{name} {part / seconds:.0%}" for name, part in in_order(plan["step_parts"]))
    return [
        "",
        f"arithmetic: {flops / 1e15:,.2f} PFLOP per step, {flops / devices / 1e12:,.2f} TFLOP per device{muon}",
        *([f"bubble: {plan['bubble']:.1%} of the pipeline's time; {stages}"] if plan["mesh"]["pipe"] > 1 else []),
        f"predicted (docs/plan.md): {seconds:.3f} s per step, "
        f"{plan['tokens_per_second']:,.0f} tokens/s, {plan['tokens_per_second'] / devices:,.0f} a GPU, "
        f"MFU {plan['mfu']:.1%} with full attention, {plan['mfu_causal']:.1%} causal",
        f"  of which {', '.join(parts)}",
        *_whole_run(**plan["whole_run"]),
        *([f"  not counted: {plan['not_counted']}"] if plan["not_counted"] else []),
        *([_OWN_KERNEL] if plan["own_kernel"] else []),
        *([_EXPERT_KERNEL] if plan["expert_kernel"] else []),
        *([f"  {ExpertLoop(**plan['expert_loop']).line}"] if plan["expert_loop"] else []),
    ]


def _whole_run(days: float = 0.0, gpu_hours: float = 0.0, cost: float = 0.0) -> list[str]:
    paid = f", which cost {cost:,.0f}" if cost else ""
    return [f"  all --tokens in {days:,.1f} days, {gpu_hours:,.0f} GPU-hours{paid}"] if days else []
