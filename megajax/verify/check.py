"""Compare a small configuration on its mesh with a single device."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax

from megajax.axes import PIPE, TENSOR
from megajax.config import Config, MeshConfig
from megajax.pipeline.config import PipelineConfig
from megajax.verify.comparison import LIMITS, Limits
from megajax.verify.run import MeshRun, run
from megajax.verify.shrink import shown
from megajax.verify.theory import check_collectives
from megajax.verify.verdict import Finding, Verdict, compare_runs, loss_scales, same_on_devices, same_on_mesh

STEPS = 3
_LEARNING_RATE, _EPSILON = 1e-3, 1e-4  # at most, at least


def check(
    config: Config,
    devices: Sequence[jax.Device] | None = None,
    *,
    steps: int = STEPS,
    own_precision: bool = True,
    quick_compile: bool = True,
    on_start: Callable[[str], None] = lambda text: None,
    on_finding: Callable[[Finding], None] = lambda finding: None,
) -> Verdict:
    """Compare `config`, which is small already, with one device in fp64: first in fp64, then in its own precision.

    Args:
        config: includes the mesh to check.
        devices: defaults to all devices.
        steps: number of steps; one more step overflows.
        own_precision: also check the configuration's precision if it is not fp64.
        quick_compile: leave the CPU's machine code unoptimised.
        on_start: called with the name of each run before it starts.
        on_finding: called with each finding as soon as it is known.
    """
    config = steady(config)
    devices = list(jax.devices() if devices is None else devices)
    options: dict[str, Any] = {"steps": steps, "quick_compile": quick_compile}
    found: list[Finding] = []
    limits: Limits | None = None

    def tell(checked: Iterable[Finding]) -> None:
        for finding in checked:
            found.append(finding)
            on_finding(finding)

    on_start("one device, fp64")
    reference = run(one_device(config), devices, with_fresh=True, with_states=True, **options)
    on_start(f"{shown(config.mesh)}, fp64")
    tell(all_checks(reference, run(exact(config), devices, with_fresh=True, **options)))
    if own_precision and config.precision != "fp64":
        options["states"] = reference.states
        on_start(f"{shown(config.mesh)}, {config.precision}")
        own = run(config, devices, **options)
        checked = Verdict(tuple(all_checks(reference, own)))
        if config.precision in ("bf16", "fp16") and Verdict(tuple(found)).passed and not checked.passed:
            on_start(f"one device, {config.precision}")
            limits = widened(reference, run(with_axes(config, ()), devices, **options))
        tell(all_checks(reference, own, limits))
    return Verdict(tuple(found), limits, reference)


def widened(reference: MeshRun, alone: MeshRun) -> Limits:
    """Limits for half precision if rounding alone, on one device, comes close to the usual ones: twice that rounding
    error, and at most ten times the usual limits."""
    usual = LIMITS[alone.config.precision]
    rounding = [finding.figure for finding in compare_runs(reference, alone)][:3]
    pairs = zip(dataclasses.astuple(usual), rounding, strict=True)
    return Limits(*(max(limit, min(2 * figure, 10 * limit)) for limit, figure in pairs))


def all_checks(reference: MeshRun, other: MeshRun, limits: Limits | None = None) -> Iterator[Finding]:
    """All checks of one run."""
    if other.fresh:
        yield from same_on_mesh(reference, other)
    yield from compare_runs(reference, other, limits)
    if other.config.precision == "fp16":
        yield loss_scales(other)
    yield from same_on_devices(other)
    yield check_collectives(other.config, other.collectives)


def steady(config: Config) -> Config:
    """The same with an Adam that does not amplify rounding: with a small epsilon, a gradient that is only rounding (the
    bias of the keys has one) would cause a full-size update."""
    given = config.optimizer
    rate, epsilon = min(given.learning_rate, _LEARNING_RATE), max(given.epsilon, _EPSILON)
    lowest = min(given.min_learning_rate, rate)
    optimizer = dataclasses.replace(given, learning_rate=rate, min_learning_rate=lowest, epsilon=epsilon)
    return dataclasses.replace(config, optimizer=optimizer)


def exact(config: Config) -> Config:
    """The same in fp64."""
    optimizer = dataclasses.replace(config.optimizer, gradient_dtype="fp32")  # of fp64: fp64
    return dataclasses.replace(config, precision="fp64", optimizer=optimizer)


def one_device(config: Config) -> Config:
    """The plainest form on one device in fp64: the batch in one piece, no recomputation, nothing sharded."""
    plain = dataclasses.replace(
        config,
        mesh=MeshConfig(),
        pipeline=PipelineConfig(),
        sequence_parallel=False,
        train=dataclasses.replace(config.train, microbatch=config.train.global_batch, remat="none"),
        optimizer=dataclasses.replace(config.optimizer, zero=0),
    )
    return exact(plain)


def with_axes(config: Config, axes: Sequence[str]) -> Config:
    """`config` on a mesh with only these axes, with the same number of microbatches."""
    mesh = MeshConfig(**{axis: size for axis, size in config.mesh.sizes.items() if axis in axes})
    train = config.train
    microbatches = train.global_batch // (config.mesh.row_shards * train.microbatch)
    microbatch = train.global_batch // (mesh.row_shards * microbatches)
    return dataclasses.replace(
        config,
        mesh=mesh,
        pipeline=config.pipeline if PIPE in axes else PipelineConfig(),
        sequence_parallel=config.sequence_parallel and TENSOR in axes,
        train=dataclasses.replace(train, microbatch=microbatch),
    )
