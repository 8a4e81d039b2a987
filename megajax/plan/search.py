"""Find the mesh, schedule and memory options that train a model fastest on a number of GPUs: try all, with models of a
step's time (`plan/time.py`) and memory (`plan/memory.py`).
"""

import itertools
import math
import shlex
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from operator import attrgetter, itemgetter
from typing import Any

from megajax.core.axes import AXES, EXPERT, ROW_AXES
from megajax.core.backend import Backend
from megajax.core.errors import UserError
from megajax.core.models.config import ModelConfig
from megajax.core.options import options
from megajax.core.pipeline.config import PipelineConfig
from megajax.core.pipeline.placement import Placement
from megajax.core.pipeline.schedule import SCHEDULES
from megajax.host.garbage import rarely_collected
from megajax.host.signals import Stopped, stop_signals
from megajax.plan.costs import StepCost
from megajax.plan.enumeration import WIDEST, SearchLimits, on_meshes, variants, with_ways
from megajax.plan.machines import GIB, Machine, peak_of
from megajax.plan.memory import Memory, MemoryModel, backend_of, memory
from megajax.plan.placing import fewer_beside_the_head
from megajax.plan.sizes import steady_state_microbatches
from megajax.plan.time import PlannedTime, Shared, StepModel, step_time
from megajax.plan.traced import step_cost
from megajax.settings.config import Config
from megajax.settings.option_errors import as_flag
from megajax.settings.pipeline_checks import has_table
from megajax.settings.validation import check_context, validate

VARIED = (
    *(f"mesh.{axis}" for axis in AXES), "pipeline.schedule", "pipeline.chunks", "pipeline.vocabulary",
    "pipeline.layers", "pipeline.weight_gradients", "pipeline.paired_microbatches",
    "train.microbatch", "train.remat", "optimizer.zero", "optimizer.zero_ranks", "sequence_parallel",
    "model.context_attention", "model.scan_layers",
)  # fmt: skip
_SAVING = "train.remat", "model.scan_layers"  # what only saves memory
_OTHERS = (
    "optimizer.zero", "optimizer.zero_ranks", "sequence_parallel", "pipeline.weight_gradients",
    "pipeline.paired_microbatches", "pipeline.vocabulary",
)  # fmt: skip
_BUT_MICROBATCH = attrgetter(*_SAVING, *_OTHERS)  # what varies on a mesh
_BUT_SAVING = attrgetter("train.microbatch", *_OTHERS)
_SLOWEST = 1.25  # times the fastest step found in half of the memory
_AS_FAST = 1.05  # times the fastest step: what a prediction was off by on an H200 (docs/plan.md)
_MOST_CHUNKS = 12
_MOST_NEAR = 2000  # numbers of devices to look at for one that has a mesh
_MOST_CELLS = 4096  # in a table whose buffers cannot be found from a shorter one


Watch = Callable[[str, int], AbstractContextManager[Callable[[int], object]]]
"""Shows a phase, given its name and the number of its parts; gets the number of finished ones."""


def _unwatched(name: str, total: int) -> AbstractContextManager[Callable[[int], object]]:
    return nullcontext(lambda done: None)


@dataclass(frozen=True)
class Candidate:
    """A configuration that fits in memory: a base configuration and its pipeline."""

    base: Config
    pipeline: PipelineConfig
    parts: dict[str, float] = field(compare=False)  # seconds by part, with the pipeline's time by formula
    memory: Memory
    seconds: float  # of a step
    bytes: int  # on a device

    @property
    def config(self) -> Config:
        return replace(self.base, pipeline=self.pipeline)


@dataclass(frozen=True)
class Planned:
    """One of the best candidates, with its step time and memory."""

    config: Config
    time: PlannedTime
    memory: Memory


@dataclass(frozen=True)
class Found:
    """The result of a search."""

    best: list[Planned]  # of each kind of mesh or, if asked for, all; fastest first
    recommended: Planned  # of the best within 5% of the fastest, the one on the simplest mesh
    fitting: list[Candidate]  # all that fit, fastest first
    tried: int  # number of configurations, including those that do not fit
    complete: bool  # false if a signal came before all were tried
    safer: Planned | None  # the fastest that needs at most half of the memory, if the best one needs more

    @property
    def frontier(self) -> list[Candidate]:
        """The Pareto frontier of time and memory, fastest first."""
        chosen: list[Candidate] = []
        for each in self.fitting:
            if not chosen or each.bytes < chosen[-1].bytes:
                chosen.append(each)
        return chosen

    @property
    def checked(self) -> list[Planned]:
        """Those to compile: the fastest and the recommended one."""
        return [plan for plan in self.best if plan in (self.best[0], self.recommended)]


@rarely_collected()
def search(
    config: Config,
    devices: int,
    machine: Machine,
    *,
    given: Iterable[str] = (),
    count: int = 10,
    of_all: bool = False,
    watch: Watch = _unwatched,
) -> Found:
    """Search all meshes of `devices` GPUs with every schedule, chunk count, microbatch size, recomputation, sequence
    parallelism and deferral, the faster context attention, with ZeRO 1 and 3, even stages, fewer layers beside the head
    or a split vocabulary, with layers unrolled or as a scan; `context` is for long sequences, and `tensor` for the
    devices of a server, unless nothing fits otherwise. What only saves memory is not tried where half of it is free
    without, nor what would be slower by a quarter than another in half of it, even if no stage waited.
    Model, batch, precision and those keys of `VARIED` that are `given` stay fixed. `count` of the best are planned in
    full, one of each kind of mesh, or the fastest `of_all`. If a deferred signal comes meanwhile, the rest is not
    tried. Raises `UserError` if nothing fits, or if the model has no such mesh, with the reason."""
    peak_of(machine, config.precision)
    fixed = frozenset(given)
    if "mesh.context" in fixed:
        check_context(config)
    tried, smallest, fitting, before = 0, None, list[Candidate](), list[Config]()
    for limits in (SearchLimits(4096, machine.server), WIDEST):
        meshes = list(on_meshes(config, devices, fixed, limits))
        if meshes == before:
            continue
        tried, smallest, fitting = _tried(config, meshes, machine, fixed, watch)
        before = meshes
        if fitting:
            break
        if stop_signals.number:
            raise Stopped(stop_signals.number, f" after {tried:,} configurations, none of which fits")
    else:
        raise _nothing(config, devices, machine, smallest, fixed)
    fitting.sort(key=lambda point: (point.seconds, point.bytes))
    complete = not stop_signals.number
    kinds: dict[frozenset[str], list[Candidate]] = {}
    for point in fitting:
        kinds.setdefault(frozenset() if of_all else _kind(point.base), []).append(point)
    groups = itertools.islice(kinds.values(), count)
    best = [plan for points in groups for plan in _best(points, devices, machine, count if of_all else 1)]
    best.sort(key=_speed)
    near = [plan for plan in best if not of_all and plan.time.seconds <= _AS_FAST * best[0].time.seconds]
    recommended = min(near, key=lambda plan: (len(_kind(plan.config)), *_speed(plan)), default=best[0])
    small = [point for point in fitting if point.bytes <= machine.usable / 2]
    needs_more = best[0].memory.total > machine.usable / 2
    safer = _best(small, devices, machine, 1)[0] if small and needs_more else None
    return Found(best, recommended, fitting, tried, complete, safer)


def _kind(config: Config) -> frozenset[str]:
    """The axes besides `data` that divide the work."""
    return frozenset(axis for axis, size in config.mesh.sizes.items() if size > 1 and axis != "data")


def _speed(plan: Planned) -> tuple[float, int]:
    """What plans are sorted by: the fastest first and, of equally fast ones, the one that needs least memory."""
    return plan.time.seconds, plan.memory.total


def _tried(
    config: Config, meshes: list[Config], machine: Machine, fixed: frozenset[str], watch: Watch
) -> tuple[int, Any, list]:
    """The number of configurations, the one with the fewest bytes, and all that fit."""
    tried, smallest, fitting, backend = 0, None, list[Candidate](), backend_of(machine)
    fastest = math.inf  # in half of the memory
    layers = config.pipeline.layers if "pipeline.layers" in fixed else ""
    devices = meshes[0].mesh.num_devices
    several = f"{len(meshes)} mesh{'es' * (len(meshes) != 1)}"
    with watch(f"searching {several} of {devices} {machine.name.upper()}s", len(meshes)) as tell:
        for number, base in enumerate(_until_stopped(iter(meshes))):
            tell(number)
            known, ample = _OnMesh(machine, backend), _Ample()
            if _has_faster_way(base, fixed, machine):
                continue
            too_large = set()  # a larger microbatch needs more memory
            too_slow = set()  # what saves more memory is slower
            for variant in _until_stopped(variants(base, fixed, machine.server)):
                if _BUT_MICROBATCH(variant) in too_large or _BUT_SAVING(variant) in too_slow:
                    continue
                possible = list(_pipelines_of(variant, fixed))
                pipelines = [one for one in possible if not ample.has(variant, one)]
                if not pipelines:
                    continue
                if variant.train.remat == "none" and "train.remat" not in fixed and _selects_free(variant, known):
                    continue  # the selective one saves less and takes as long
                if variant.mesh.replica > 1 and "optimizer.zero_ranks" not in fixed and not known.gains(variant):
                    continue
                model = partial(known.model, variant)
                if fastest < math.inf and model().least > _SLOWEST * fastest:
                    too_slow.add(_BUT_SAVING(variant))
                    continue
                needs = MemoryModel(variant, backend, known.cost(variant))
                sizes = list(_sizes(variant, pipelines, layers, model, needs, machine.usable))
                tried += len(sizes)
                least = min(sizes, key=itemgetter(0), default=None)
                if least is not None and (smallest is None or least[0] < smallest[0]):
                    smallest = least[0], replace(variant, pipeline=least[2])
                if least is not None and least[0] > machine.usable and pipelines == possible:
                    too_large.add(_BUT_MICROBATCH(variant))
                for size, needed, pipeline in sizes:
                    if size <= machine.usable / 2:
                        ample.add(variant, pipeline)
                    if size <= machine.usable:
                        time = model().time(pipeline, exact=False)
                        fitting.append(Candidate(variant, pipeline, time.parts, needed, time.seconds, size))
                        if size <= machine.usable / 2:
                            fastest = min(fastest, time.seconds)
    return tried, smallest, fitting


class _Ample:
    """Which configurations on one mesh leave half of the memory free. None is tried that is like them and only saves
    memory: one that recomputes more, or scans its layers."""

    def __init__(self) -> None:
        self._found = set[tuple]()

    def add(self, config: Config, pipeline: PipelineConfig) -> None:
        """Note one, before those that save more."""
        self._found |= {self._key(config, pipeline, scan) for scan in ("true", config.model.scan_layers)}

    def has(self, config: Config, pipeline: PipelineConfig) -> bool:
        """Whether this one would only save memory."""
        return self._key(config, pipeline, config.model.scan_layers) in self._found

    def _key(self, config: Config, pipeline: PipelineConfig, scan: str) -> tuple:
        return *_BUT_SAVING(config), pipeline.schedule, pipeline.chunks, scan


class _OnMesh:
    """What is computed once for configurations on one mesh: traced costs, and models of times, one for all that take
    equally long but for the pipeline."""

    def __init__(self, machine: Machine, backend: Backend):
        self._machine, self._backend, self._shared = machine, backend, Shared()

    def cost(self, config: Config) -> StepCost:
        like = "cost", config.train.remat, config.sequence_parallel, config.splits_vocabulary
        return self._shared.once(like, lambda: step_cost(config, self._backend, scaled=True))

    def model(self, config: Config) -> StepModel:
        like = "model", config.train.microbatch, *_BUT_MICROBATCH(config)
        return self._shared.once(like, lambda: StepModel(config, self._machine, self.cost(config), self._shared))

    def gains(self, config: Config) -> bool:
        """Whether a step is faster if ZeRO shards over fewer ranks, which takes more memory; decided once for a stage
        of ZeRO."""

        def faster() -> bool:
            over_all = replace(config, optimizer=replace(config.optimizer, zero_ranks=0))
            plain = replace(config.pipeline, schedule="1f1b", chunks=1)
            fewer, more = (self.model(each).time(plain, exact=False).seconds for each in (config, over_all))
            return fewer < more

        return self._shared.once(("gains", config.optimizer.zero), faster)


def _has_faster_way(base: Config, fixed: frozenset[str], machine: Machine) -> bool:
    """Whether the other way of context attention is faster, decided once for a mesh."""
    ways = with_ways(base.model, base.mesh, fixed)
    first = next(variants(base, fixed, machine.server), None)
    if len(ways) == 1 or first is None:
        return False

    def seconds(way: ModelConfig) -> float:
        config = replace(first, model=replace(first.model, context_attention=way.context_attention))
        return StepModel(config, machine, step_cost(config, backend_of(machine), scaled=True)).least

    return min(ways, key=seconds).context_attention != base.model.context_attention


def _until_stopped(configs: Iterator[Config]) -> Iterator[Config]:
    return itertools.takewhile(lambda _: not stop_signals.number, configs)


def command(preset: str, config: Config, original: Config) -> str:
    """The command line that trains `config`; `original` is the preset's configuration."""
    return " ".join(["megajax train", shlex.quote(preset), *changed_flags(config, original)])


def changed_flags(config: Config, original: Config, but: Collection[str] = ()) -> list[str]:
    """The flags of options that are not as in the `original`, but some."""
    of = {key: attrgetter(key) for key in options(Config) if key not in but}
    return [as_flag(key, get(config)) for key, get in of.items() if get(config) != get(original)]


def schedule_in_words(pipeline: PipelineConfig) -> str:
    """For example `interleaved x 2, deferred, split vocabulary`."""
    chunks = f" x {pipeline.chunks}" if pipeline.chunks > 1 else ""
    words = ", deferred" * (pipeline.weight_gradients == "deferred") + ", uneven" * bool(pipeline.counts)
    return f"{pipeline.schedule}{chunks}{words}{', split vocabulary' * (pipeline.vocabulary == 'split')}"


def _best(fitting: list[Candidate], devices: int, machine: Machine, count: int) -> list[Planned]:
    """The fastest by the times of their tables; among equally fast ones, the one with the least memory."""
    chosen: list[Planned] = []
    taken: set[tuple[int, ...]] = set()
    backend = backend_of(machine)
    for point in fitting:
        like = round(1e9 * point.seconds), point.base.mesh.pipe, point.base.mesh.row_shards, point.pipeline.chunks
        if like in taken:
            continue
        taken.add(like)
        config = point.config
        validate(config, devices)
        cost = step_cost(config, backend, scaled=True)
        planned = Planned(config, step_time(config, machine, cost), memory(config, backend, cost))
        if planned.memory.total <= machine.usable:
            chosen.append(planned)
        if len(chosen) == 4 * count:  # more than needed, because the formula is not exact
            break
    return sorted(chosen, key=_speed)[:count]


def _selects_free(config: Config, known: _OnMesh) -> bool:
    """Whether selective recomputation takes no time in these models: it recomputes no product and no collective."""
    kinds = known.cost(replace(config, train=replace(config.train, remat="selective"))).kinds.values()
    return all((layer.regions, layer.backward) == (plain.regions, plain.backward) for _, layer, plain in kinds)


def _pipelines_of(config: Config, fixed: frozenset[str]) -> Iterator[PipelineConfig]:
    """Every schedule and chunk count whose table and buffers can be computed quickly."""
    mesh, train = config.mesh, config.train
    m = train.global_batch // (mesh.row_shards * train.microbatch)
    for pipeline in _pipelines(config.pipeline, mesh.pipe, len(config.model.layers_of_periods)):
        other = [key for key in ("schedule", "chunks") if getattr(pipeline, key) != getattr(config.pipeline, key)]
        if not fixed.isdisjoint(f"pipeline.{key}" for key in other) or not has_table(pipeline, mesh.pipe, m):
            continue
        fewer = steady_state_microbatches(pipeline.schedule, mesh.pipe, m)
        if mesh.pipe == 1 or mesh.pipe * pipeline.chunks * fewer <= _MOST_CELLS:
            yield pipeline


def _sizes(
    config: Config,
    pipelines: list[PipelineConfig],
    layers: str,
    model: Callable[[], StepModel],
    needs: MemoryModel,
    usable: int,
) -> Iterator[tuple[int, Memory, PipelineConfig]]:
    """The pipelines with placements of the layers (or only as `layers` says) and the bytes needed on a device. Of those
    whose first placement needs more than is `usable`, no other is tried."""
    mesh = config.mesh
    for pipeline in pipelines:
        by_slots: dict[int, tuple[int, Memory]] = {}  # bytes, and those by part, by slots per chunk
        for placed in _placed(pipeline, layers, config, model):
            slots = Placement.of(config.model.layers_of_periods, mesh.pipe, placed).layers_per_chunk
            if slots not in by_slots:
                needed = needs.memory(replace(config, pipeline=placed))
                by_slots[slots] = needed.total, needed
            yield *by_slots[slots], placed
            if min(size for size, _ in by_slots.values()) > usable:
                break


def _placed(
    even: PipelineConfig, layers: str, config: Config, model: Callable[[], StepModel]
) -> Iterator[PipelineConfig]:
    """The pipeline with the layers placed in every way to try, or as `layers` says, if that is possible."""
    if not layers:
        yield even
        yield from fewer_beside_the_head(model(), even)
    elif layers == "auto":
        yield [even, *fewer_beside_the_head(model(), even)][-1]
    elif len((given := replace(even, layers=layers)).counts) in (0, config.mesh.pipe * even.chunks):
        yield given


@lru_cache(maxsize=1024)
def _pipelines(pipeline: PipelineConfig, pipe: int, layers: int) -> list[PipelineConfig]:
    """Schedules with their chunk counts: up to 4, and those up to 12 that divide the layers. One stage has only one."""
    few = range(2, min(_MOST_CHUNKS, layers // pipe) + 1)
    many = [count for count in few if count <= 4 or layers % (count * pipe) == 0]
    chunks = {name: many if kind.chunked else [1] for name, kind in sorted(SCHEDULES.items())}
    pairs = [(name, count) for name in chunks for count in chunks[name]] if pipe > 1 else [("1f1b", 1)]
    return [replace(pipeline, schedule=name, chunks=count) for name, count in pairs]


def _nothing(
    config: Config, devices: int, machine: Machine, smallest: tuple[int, Config] | None, fixed: frozenset[str]
) -> UserError:
    """The error for an empty search: why everything is ruled out."""
    if smallest is not None:
        size, least = smallest
        known, mesh = options(Config), [f"mesh.{axis}" for axis in least.mesh.shown]
        values = ((key, attrgetter(key)(least)) for key in VARIED)
        flags = " ".join(as_flag(key, own) for key, own in values if key in mesh or own != known[key].default)
        return UserError(
            f"--devices {devices} --gpu {machine.name}: no configuration fits in memory; the smallest "
            f"({flags}) needs {size / GIB:.1f} GiB of the {machine.usable / GIB:.1f} GiB usable; "
            "valid: more --devices, another --gpu, a smaller model or batch"
        )
    for base in on_meshes(config, devices, fixed, WIDEST):
        for each in itertools.islice(variants(base, fixed, machine.server), 1):
            try:
                validate(replace(each, pipeline=replace(each.pipeline, layers=config.pipeline.layers)), devices)
            except UserError as error:
                return error
    model, batch = config.model, config.train.global_batch
    stays = "".join(f" {as_flag(key, attrgetter(key)(config))}" for key in VARIED if key in fixed)
    rows = " x ".join(f"--mesh.{axis}" for axis in AXES if axis in ROW_AXES and (axis != EXPERT or model.num_experts))
    units = len(model.layers_of_periods)
    divided = "--model.num-layers" if units == model.num_layers else "the layers or periods that stages divide,"
    ranks = ", --optimizer.zero-ranks must divide --mesh.data" * ("optimizer.zero_ranks" in fixed)
    batches, without = _nearest_batches(config, devices, machine, fixed), f"without{stays}" if stays else "1"
    near = "" if batches else _nearest(config, devices, fixed)
    valid = f"--train.global-batch {batches}, or {without}" if batches else f"for example {near}" if near else without
    return UserError(
        f"--devices {devices}{stays}: no valid mesh of that size; {rows} must divide "
        f"--train.global-batch {batch}{ranks}, --mesh.pipe must not exceed {divided} {units}, and --mesh.tensor "
        f"must divide --model.num-heads {model.num_heads}, --model.mlp-size {model.mlp_size} and the padded vocabulary "
        f"of {model.padded_vocab_size}; valid: {valid}"
    )


def _nearest_batches(config: Config, devices: int, machine: Machine, fixed: frozenset[str]) -> str:
    """The global batches next to this one that can be divided as what is fixed says, if it alone forbids all meshes."""
    train = config.train
    unit = math.prod(getattr(config.mesh, axis) for axis in ROW_AXES if f"mesh.{axis}" in fixed)
    unit *= train.microbatch if "train.microbatch" in fixed else 1
    below = train.global_batch // unit * unit
    if train.ramp_start or below == train.global_batch:
        return ""
    others = (replace(config, train=replace(train, global_batch=batch)) for batch in (below, below + unit) if batch)
    meshes = {other.train.global_batch: on_meshes(other, devices, fixed, WIDEST) for other in others}
    tried = {batch: (next(variants(base, fixed, machine.server), None) for base in on) for batch, on in meshes.items()}
    return " or ".join(str(batch) for batch, configs in tried.items() if any(configs))


def _nearest(config: Config, devices: int, fixed: frozenset[str]) -> str:
    """Numbers of devices close to this one for which there are meshes; none if what is fixed seems to allow no mesh."""
    unit = math.prod(getattr(config.mesh, axis) for axis in AXES if f"mesh.{axis}" in fixed)
    model, batch = config.model, config.train.batch_sizes.divisor
    most = batch * model.num_blocks * model.num_heads * max(1, model.sequence_length // WIDEST.tokens)
    around = min(devices, most)
    near = itertools.chain.from_iterable((around - step, around + step) for step in range(around + unit + 64))
    others = (count for count in dict.fromkeys(near) if 0 < count != devices and count % unit == 0)
    possible = itertools.islice(others, _MOST_NEAR)
    near_counts = (count for count in possible if next(on_meshes(config, count, fixed, WIDEST), None))
    return " or ".join(str(count) for count in sorted(itertools.islice(near_counts, 2)))
