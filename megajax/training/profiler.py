"""`--profile STEPS`: a profile of some steps in RUN/profile, and their time by part of the model and pass. The compiled
program's text says which scope (`jax.named_scope`) each traced operation comes from."""

import contextlib
import re
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from megajax.host.files import free_name, scratch
from megajax.host.paths import identity
from megajax.host.processes import is_first_process, say
from megajax.settings.config import Config, profiled_steps

PARTS = {  # scopes of the program and their names; if an operation has several, the last one counts
    "embedding": "embedding",
    "layer": "rest of the layers",
    "norm": "norms",
    "attention": "attention, products",
    "attend": "attention, scores",
    "mlp": "MLP",
    "head": "head and loss",
    "gradient_sums": "gradient accumulators",
    "gradient_norm": "gradient norm and clipping",
    "optimizer": "optimizer",
    "weight_gradients": "deferred weight gradients",
}
REST = "rest of the step"
PASSES = ("forward", "recomputed", "backward", "")
_COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "collective-permute", "all-to-all")


class StepTrace:
    """Profiles the steps `first` to `last` (0: none) of `--profile` on process 0, into the folder `profile` of the run
    directory. Earlier starts have `finished` steps."""

    def __init__(self, config: Config, finished: int):
        self._run_dir, self._folder = Path(config.run_dir), identity(config.run_dir)
        self._stack = contextlib.ExitStack()
        self._place: Path | None = None  # set while tracing
        steps = config.train.steps
        self.first = self.last = 0
        if not config.profile or finished >= steps:
            return
        first, last = profiled_steps(config.profile, finished, steps)
        if finished < first and last <= steps:
            self.first, self.last = first, last
        else:
            say(
                f"--profile {config.profile}: nothing is traced, because this start trains steps "
                f"{finished + 1} to {steps}"
            )

    @property
    def _is_there(self) -> bool:
        """Whether the run directory has been neither removed nor replaced."""
        return self._folder is not None and identity(self._run_dir) == self._folder

    def start(self) -> None:
        """Start tracing, before the first step to trace and while nothing is running."""
        if not is_first_process() or not self._is_there:
            return
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # tracing Python would cost the host more than all its work
        with contextlib.suppress(OSError, RuntimeError):  # `finish` reports that there is no trace
            self._place = self._stack.enter_context(scratch(self._run_dir / "profile"))
            jax.profiler.start_trace(self._place, profiler_options=options)

    def close(self) -> None:
        """Drop an unfinished trace."""
        if self._place is not None and self._is_there:
            with contextlib.suppress(OSError, RuntimeError):
                jax.profiler.stop_trace()
            self._place = None
            self._stack.close()

    def finish(self, program_text: str) -> list[str]:
        """Stop tracing after the last step; returns lines about it. `program_text` is the step's compiled HLO."""
        if not is_first_process():
            return []
        if self._place is None or not self._is_there:  # leave it running: stopping would make JAX recreate the folder
            return [f"{self._run_dir / 'profile'} could not be written: nothing was profiled"]
        try:
            jax.profiler.stop_trace()
            (session,) = (self._place / "plugins" / "profile").iterdir()
            sessions = self._run_dir / "profile" / "plugins" / "profile"
            sessions.mkdir(parents=True, exist_ok=True)
            target = free_name(sessions / session.name)
            session.rename(target)
        except (OSError, RuntimeError, ValueError) as error:
            return [f"{self._run_dir / 'profile'} could not be written: {' '.join(str(error).split())[:300]}"]
        finally:
            self._place = None
            self._stack.close()
        count = self.last - self.first + 1
        title = f"profile of step {self.first}" if count == 1 else f"profile of steps {self.first} to {self.last}"
        try:
            rows = table(times(target, operations(program_text)), count)
        except Exception as error:  # the format is internal to JAX
            rows = [f"its time could not be attributed: {type(error).__name__}: {' '.join(str(error).split())[:200]}"]
        return [f"{title}: {target}", *rows]


Operation = tuple[str, str]  # opcode, and its source in the program: scopes and transformations joined by slashes

_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.-]+) = .*?[\])}] ([a-z][\w-]*)\(", re.ASCII)
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.-]+) \(.*\{$", re.ASCII)
_OPERAND = re.compile(r"%([\w.-]+)", re.ASCII)
_SOURCE, _CALLED = re.compile(r'op_name="([^"]*)"'), re.compile(r"(?:calls|to_apply)=%?([\w.-]+)", re.ASCII)


def operations(program_text: str) -> dict[str, Operation]:
    """The instructions of a compiled program by name. One that the compiler made has no source; it gets the most
    frequent source among the instructions inside it, or else that of its first operand that has one."""
    found: dict[str, Operation] = {}
    calls: dict[str, str] = {}
    operands: dict[str, list[str]] = {}
    inside: dict[str, Counter[str]] = defaultdict(Counter)
    computation = ""
    for line in program_text.splitlines():
        if match := _COMPUTATION.match(line):
            computation = match[1]
        elif match := _INSTRUCTION.match(line):
            source = found_source[1] if (found_source := _SOURCE.search(line)) else ""
            found[match[1]] = match[2], source
            if source:
                inside[computation][source] += 1
                continue
            if called := _CALLED.search(line):
                calls[match[1]] = called[1]
            operands[match[1]] = _OPERAND.findall(line[match.end() :].partition(")")[0])
    for name in operands:  # in program order: operands come first
        most = inside[calls[name]].most_common(1) if name in calls else []
        sources = [source for source, _ in most] + [found[each][1] for each in operands[name] if each in found]
        found[name] = found[name][0], next(filter(None, sources), "")
    return found


def place_of(operation: Operation) -> tuple[str, str]:
    """The part of the step and the pass to which an operation belongs."""
    opcode, source = operation
    for collective in _COLLECTIVES:
        if opcode.startswith(collective):
            name = "p2p between stages" if collective == "collective-permute" else collective
            return f"communication: {name}", ""
    names = re.findall(r"\w+", source)
    part = next((name for name in reversed(names) if name in PARTS), None)
    if part is None:
        return REST, ""
    if part in ("gradient_sums", "gradient_norm", "optimizer"):
        return PARTS[part], ""
    if "rematted_computation" in names:
        return PARTS[part], "recomputed"
    return PARTS[part], "backward" if "transpose" in names or "weight_gradients" in names else "forward"


@dataclass(frozen=True)
class TracedTimes:
    """Time of traced operations in seconds."""

    by_place: dict[tuple[str, str], float]  # by part and pass, summed over devices
    devices: int  # their number
    span: float  # from the start of the first operation to the end of the last


def times(session: Path, known: dict[str, Operation]) -> TracedTimes:
    """The time of a program's operations in a trace; nested operations count only once."""
    found: dict[tuple[str, str], float] = defaultdict(float)
    devices, begins, ends = 0, [], []
    for file in sorted(session.glob("*.xplane.pb")):
        data = jax.profiler.ProfileData.from_file(str(file))
        planes = list(data.planes)
        gpus = [plane for plane in planes if plane.name.startswith("/device:GPU")]
        devices += len(gpus) or jax.local_device_count()
        for plane in gpus or [plane for plane in planes if plane.name == "/host:CPU"]:
            for line in plane.lines:
                events = _events(line.events, known)
                begins += [begin for begin, _, _ in events[:1]]
                ends += [end for _, end, _ in events]
                for name, seconds in _own_seconds(events):
                    found[place_of(known[name])] += seconds
    return TracedTimes(dict(found), max(1, devices), (max(ends) - min(begins)) / 1e9 if ends else 0.0)


def _events(events: Iterable[Any], known: dict[str, Operation]) -> list[tuple[float, float, str]]:
    """Begin and end in nanoseconds, and name, of all operations of a thread or stream, in order."""
    found = []
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):  # from JAX's types on Python 3.12
        for event in events:
            names = [str(value) for key, value in event.stats if key == "hlo_op"] or [event.name]
            if (name := names[0].lstrip("%")) in known:
                found.append((event.start_ns, event.start_ns + event.duration_ns, name))
    return sorted(found, key=lambda each: (each[0], -each[1]))


def _own_seconds(events: list[tuple[float, float, str]]) -> list[tuple[str, float]]:
    """The operations with their times in seconds, excluding operations nested inside them."""
    own = [(end - begin) / 1e9 for begin, end, _ in events]
    around: list[int] = []
    for number, (begin, end, _) in enumerate(events):
        while around and events[around[-1]][1] <= begin:
            around.pop()
        rest = begin
        for place in reversed(around):  # on a GPU's stream the next kernel can begin before the last one's end
            until = min(end, events[place][1])
            own[place] -= max(0.0, until - rest) / 1e9
            rest = max(rest, until)
        around.append(number)
    return [(name, seconds) for (_, _, name), seconds in zip(events, own, strict=True)]


def table(found: TracedTimes, steps: int) -> list[str]:
    """Milliseconds per step and device, by part and pass, longest first."""
    if not found.by_place:
        return ["the profile names no operations of the step; open it in XProf or Perfetto"]
    scale = 1e3 / (steps * found.devices)
    rows: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for (part, pass_), seconds in found.by_place.items():
        rows[part][pass_] += seconds * scale
    of_part = {part: sum(row.values()) for part, row in rows.items()}
    total = sum(of_part.values())
    lines = [f"{'ms a step and device':<34}" + "".join(f"{each or 'other':>12}" for each in (*PASSES, "share"))]
    for part, row in sorted(rows.items(), key=lambda item: -of_part[item[0]]):
        cells = (f"{row[each]:,.2f}" if each in row else "" for each in PASSES)
        lines.append(f"{part:<34}" + "".join(f"{cell:>12}" for cell in (*cells, f"{of_part[part] / total:.1%}")))
    sums = (f"{sum(row[each] for row in rows.values()):,.2f}" for each in PASSES)
    lines.append(f"{'all':<34}" + "".join(f"{cell:>12}" for cell in (*sums, "100.0%")))
    whole = 1e3 * found.span / steps
    lines.append(f"operations take {total:,.2f} ms of a step's {whole:,.2f} ms on a device")
    return lines
