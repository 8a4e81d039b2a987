"""One mutant tried: planted in a process of its own, which imports `megajax` with it and verifies its configuration.

A process that has imported JAX, but neither used it nor imported `megajax`, is forked for each: imports take 1.2 s.
"""

import gc
import hashlib
import json
import os
import pickle
import re
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from mutant import SMALL, Mutant
from planting import ROOT, plant
from quick import caught_quickly

# "check": whether it is caught; "places": also where; "quick": by what should catch it alone (`quick.py`)
Form = Literal["check", "places", "quick"]
TIMEOUT = 300  # seconds; stages that wait for each other for ever are found by nothing else


@dataclass(frozen=True)
class Outcome:
    """What became of a mutant.

    Attributes:
        name: its own; of a configuration without a mutant "none: " and the options.
        way: how it was caught; "nothing" if not.
        said: what was said of it, one line.
        place: [layer, site, backward] of the first activation that differs; None where none was named.
        checks: names of the checks that failed.
        where: of each, what it names; of a refusal the functions that were being traced, the innermost one first.
        seconds: of processor time.
    """

    name: str
    way: str
    said: str
    place: list | None
    checks: list[str]
    where: list[str]
    seconds: float


def try_one(name: str, mutant: Mutant | None, options: dict[str, Any], cache: Path | None, form: Form) -> Outcome:
    """In a process that has not imported `megajax`: plant a mutant, and verify the configuration of `options`."""
    began = time.process_time()
    if mutant is not None:
        plant(mutant)
    _set_up(cache)
    import jax

    config = small_config(**options)
    way, said, place, checks, where = "nothing", "", None, [], []
    verdict: Any = None
    try:
        if form == "quick":
            way, said = caught_quickly(None if mutant is None else mutant.way, config)
        else:
            from megajax.verify.check import check

            verdict = check(config, jax.devices(), steps=2)
    except Exception as error:
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "/megajax/" in frame.filename]
        where = [f"{Path(frame.filename).relative_to(ROOT)}: {frame.name}" for frame in reversed(frames)]
        way, said = "types", f"{type(error).__name__}: {_first_line(error)}"
    if verdict is not None:
        checks = [finding.name for finding in verdict.failed]
        where = [finding.where for finding in verdict.failed]
        if checks:
            alone = all("communication" in check for check in checks)
            way, said = ("communication" if alone else "numbers"), f"{checks[0]}: {where[0]}"
        if way == "numbers" and form == "places":
            place, said = first_place(config, verdict, cache)
    return Outcome(name, way, said, place, checks, where, round(time.process_time() - began, 2))


def first_place(config: Any, verdict: Any, cache: Path | None) -> tuple[list | None, str]:
    """What `verify` names: the first activation of the first step that differs, and all that it says."""
    import jax

    from megajax.verify import verify
    from megajax.verify.axes import AxesThatDiffer

    verify.recorded = partial(_recorded, verify.recorded, cache)
    axes = tuple(axis for axis in ("data", "pipe", "tensor") if getattr(config.mesh, axis) > 1)
    said = verify.first_place(AxesThatDiffer((axes,), config, verdict.failed), verdict, jax.devices())
    named = re.match(r"(\w+) of (?:layer (\d+)|the head), (forward|backward):", said)
    if named is None:
        return None, said
    site, layer, direction = named.groups()
    return [-1 if layer is None else int(layer), site, direction == "backward"], said


def _recorded(record: Callable, cache: Path | None, config: Any, devices: Any, **options: Any) -> Any:
    """`record`, once for every program of one device, which most mutants leave as it is."""
    from megajax.program.program import Program
    from megajax.program.train_step import train_step_with_gradients
    from megajax.verify.run import in_precision

    if config.mesh.num_devices > 1 or cache is None:
        return record(config, devices, **options)
    with in_precision(config):
        program = Program.on(config, devices[:1])
        text = train_step_with_gradients(program).lower(program.layout.shapes, program.batch_types).as_text()
    file = cache / f"recorded-{hashlib.sha256(text.encode()).hexdigest()}"
    if file.exists():
        return pickle.loads(file.read_bytes())
    recording = record(config, devices, **options)
    recording._seen = {place: dict(seen) for place, seen in recording._seen.items()}
    part = file.with_suffix(f".{os.getpid()}")
    part.write_bytes(pickle.dumps(recording))
    part.replace(file)
    return recording


def small_config(**options: Any) -> Any:
    """`SMALL` with other options; its first update is of full size, and all gradients are clipped."""
    import dataclasses

    from tiny import tiny_config

    config = tiny_config(**SMALL | options)
    optimizer = dataclasses.replace(config.optimizer, warmup_steps=0, clip_norm=0.1)
    return dataclasses.replace(config, optimizer=optimizer)


def import_what_is_slow() -> None:
    """All that `megajax` needs, but not `megajax`."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    import flax.nnx
    import jax.experimental.shard_map  # noqa: F401
    import optax  # noqa: F401

    assert flax.nnx and "megajax" not in sys.modules
    gc.collect()
    gc.freeze()
    gc.disable()  # a trial is short


def try_all(
    trials: Iterable[tuple[str, Mutant | None, dict[str, Any]]],
    cache: Path | None,
    at_once: int = 1,
    form: Form = "check",
) -> Iterator[Outcome]:
    """The outcomes of trials, each in a fork of this process, which must not have used JAX; as they end."""
    waiting = list(trials)
    running: dict[int, tuple[int, str, float]] = {}  # pipe -> process, name, beginning
    while waiting or running:
        while waiting and len(running) < at_once:
            trial = waiting.pop(0)
            pipe, process = _forked(lambda trial=trial: try_one(*trial, cache, form))
            running[pipe] = process, trial[0], time.monotonic()
        ready, _, _ = select.select(list(running), [], [], 1.0)
        late = [pipe for pipe, (_, _, began) in running.items() if time.monotonic() - began > TIMEOUT]
        for pipe in {*ready, *late}:
            process, name, _ = running.pop(pipe)
            if pipe in ready:
                with os.fdopen(pipe) as lines:
                    text = lines.read()
            else:
                os.kill(process, signal.SIGKILL)
                text = ""
            _, status, used = os.wait4(process, 0)
            seconds = round(used.ru_utime + used.ru_stime, 2)
            if text:
                yield Outcome(**json.loads(text) | {"seconds": seconds})
            else:
                what = "no end" if pipe in late else f"the process died ({status})"
                yield Outcome(name, "death", what, None, [], [], seconds)


def _forked(function: Callable[[], Outcome]) -> tuple[int, int]:
    """A pipe from which the outcome comes, and the process that has it."""
    reads, writes = os.pipe()
    process = os.fork()
    if process:
        os.close(writes)
        return reads, process
    try:
        os.close(reads)
        with os.fdopen(writes, "w") as lines:
            lines.write(json.dumps(asdict(function())))
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def _set_up(cache: Path | None) -> None:
    """As `tests/conftest.py`: eight devices, strict arrays, the machine code that is soonest there."""
    import jax

    flags = ["--xla_backend_optimization_level=0", "--xla_cpu_parallel_codegen_split_count=1"]
    flags += ["--xla_cpu_use_fusion_emitters=false"] if jax.__version_info__ < (0, 11) else []
    os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *flags])
    from megajax.launch import avoid_known_faults

    avoid_known_faults()
    jax.config.update("jax_enable_x64", True)  # in the threads that take what is recorded, too
    jax.config.update("jax_num_cpu_devices", 8)
    jax.config.update("jax_numpy_rank_promotion", "raise")
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    if cache is not None:
        jax.config.update("jax_compilation_cache_dir", str(cache))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.05)


def _first_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
