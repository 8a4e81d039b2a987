"""Draw a schedule as text, one row per stage. A large schedule is drawn in excerpts: the first and last stages in
warm-up, one group of microbatches in the steady state, and cool-down. No JAX here."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from megajax.core.pipeline.table import Schedule

if TYPE_CHECKING:
    from rich.text import Text

# Forward, backward, weight gradients; one style per chunk, which repeat.
STYLES = (
    ("blue", "cyan", "bright_blue", "bright_cyan"),
    ("green", "yellow", "bright_green", "bright_yellow"),
    ("magenta", "red", "bright_magenta", "bright_red"),
)
MOST_CELLS = 2000  # a larger schedule is drawn in excerpts
_MOST_TICKS = 48  # per excerpt
_MOST_STAGES = 32
_NOTHING = (".", "bright_black")
_LETTERS = "FBW"  # before what a forward, backward or weight gradient is of, as in the papers on zero bubbles
_MOST_NAMES = 4  # weight gradients named in a cell; of more, the first and the last
_Texts = list[tuple[str, str]]  # text and style of forward, backward, deferred weight gradients


@dataclass(frozen=True)
class TickRange:
    """Consecutive ticks from `first` up to but not including `past`."""

    name: str
    first: int
    past: int

    def words(self) -> str:
        return f"{self.name}: ticks {self.first:,} to {self.past - 1:,}"


@dataclass(frozen=True)
class Excerpt:
    """The drawn part of a schedule: ranges of ticks, and stages, both in order."""

    parts: tuple[TickRange, ...]
    stages: tuple[int, ...]
    of: tuple[int, int]  # ticks and stages of the whole schedule
    cells: int  # passes in it

    @property
    def is_complete(self) -> bool:
        return not self.left_out()

    def left_out(self) -> str:
        """What is not drawn, in words; empty if nothing is left out."""
        ticks, stages = self.of[0] - sum(part.past - part.first for part in self.parts), self.of[1] - len(self.stages)
        words = [f"{ticks:,} of {self.of[0]:,} ticks"] * (ticks > 0)
        if stages:
            gap = next(a for a, b in zip(self.stages, self.stages[1:], strict=False) if b > a + 1)
            words.append(f"stages {gap + 1} to {gap + stages}")
        return " and ".join(words)


def excerpt(schedule: Schedule) -> Excerpt:
    """The entire schedule if it is small, otherwise an excerpt."""
    ticks, p = schedule.num_ticks, schedule.num_stages
    passes = int(schedule.forward.active.sum() + schedule.backward.active.sum())
    cells = passes + (schedule.num_microbatches * schedule.num_virtual if schedule.deferral else 0)
    stages = tuple(range(p))
    if cells <= MOST_CELLS:
        return Excerpt((TickRange("all", 0, ticks),), stages, (ticks, p), cells)
    if p > _MOST_STAGES:
        half = _MOST_STAGES // 2
        stages = stages[:half] + stages[-half:]
    return Excerpt(tuple(_parts(schedule)), stages, (ticks, p), cells)


def _parts(schedule: Schedule) -> list[TickRange]:
    forward, backward = schedule.forward.active, schedule.backward.active
    ticks, group = schedule.num_ticks, max(schedule.num_virtual, 8)
    turn = int(backward[:, -1].argmax())
    turns = turn > _last(forward[:, -1])  # all forwards, then all backwards
    filled = 2 * schedule.num_stages if turns else int(backward[:, 0].argmax()) + 1
    drained = 2 * schedule.num_stages if turns else ticks - _last(forward[:, 0])
    begins, ends = min(filled, _MOST_TICKS, (ticks + 1) // 2), min(drained, _MOST_TICKS, ticks // 2)
    parts = [
        TickRange("warm-up" + " (its first ticks)" * (begins < filled), 0, begins),
        TickRange("cool-down" + " (its last ticks)" * (ends < drained), ticks - ends, ticks),
    ]
    length = min(2 * schedule.num_stages if turns else group, _MOST_TICKS, ticks - ends - begins)
    if length > 0:
        wanted = turn - length // 2 if turns else _group(schedule, (begins + ticks - ends - length) // 2)
        first = min(max(wanted, begins), ticks - ends - length)
        steady = bool((forward & backward)[first : first + length].all())
        name = "the turn" if turns else "steady" if steady else "middle"
        parts.insert(1, TickRange(name, first, first + length))
    return parts


def _last(active: np.ndarray) -> int:
    """The last tick in which something is active."""
    return len(active) - 1 - int(active[::-1].argmax())


def _group(schedule: Schedule, tick: int) -> int:
    """The tick nearest to `tick` in which the first stage starts a new group of `num_stages` microbatches."""
    forward = schedule.forward
    begins = (forward.chunk[:, 0] == 0) & (forward.microbatch[:, 0] % schedule.num_stages == 0)
    groups = np.flatnonzero(begins)
    return int(groups[np.abs(groups - tick).argmin()]) if groups.size else tick


def cell_name(microbatch: int, chunk: int, num_chunks: int) -> str:
    """A microbatch number, followed by a letter for the chunk if there are several: `3`, `3b`."""
    letter = "" if num_chunks == 1 else chr(ord("a") + chunk) if num_chunks <= 26 else f".{chunk}"
    return f"{microbatch}{letter}"


def draw_text(schedule: Schedule, width: int | None = None) -> "Iterator[Text]":
    """Lines of the table: ticks from left to right, one row per stage, continued below after `width` characters. Every
    tick shows the forward (`F3`), the backward (`B1`) and deferred weight gradients (`W3,4`), those that replace a
    forward in its column. A large schedule is drawn in excerpts, each under its name, and the last line says what is
    left out.
    """
    from rich.text import Text

    shown, cell = excerpt(schedule), _cell_of(schedule)
    for span in shown.parts:
        if not shown.is_complete:
            yield Text(span.words())
        yield from _draw_part(schedule, span, shown.stages, cell, width)
    if not shown.is_complete:
        yield Text(f"left out: {shown.left_out()}; --json has them")


def _cell_of(schedule: Schedule) -> Callable[[int, int], _Texts]:
    """A function that maps a tick and a stage to the texts and styles of the cell."""
    rows, num_chunks = schedule.cells(), schedule.num_chunks

    def text(kind: int, ran: list[tuple[int, int]]) -> tuple[str, str]:
        if not ran:
            return _NOTHING
        names = [cell_name(microbatch, chunk, num_chunks) for microbatch, chunk in ran]
        shown = ",".join(names) if len(names) <= _MOST_NAMES else f"{names[0]}..{names[-1]}"
        return _LETTERS[kind] + shown, STYLES[kind][ran[0][1] % len(STYLES[kind])]

    def cell(tick: int, stage: int) -> _Texts:
        early, forward, backward, late = rows[tick][stage]
        first = text(2, early) if early else text(0, forward)
        return [first, text(1, backward), *([text(2, late)] if schedule.deferral else [])]

    return cell


def _draw_part(
    schedule: Schedule, span: TickRange, stages: tuple[int, ...], cell: Callable[[int, int], _Texts], width: int | None
) -> "list[Text]":
    from rich.text import Text

    num_chunks = schedule.num_chunks
    names = [cell_name(schedule.num_microbatches - 1, c, num_chunks) for c in range(num_chunks)]
    size = max(len(str(schedule.num_ticks - 1)), 1 + max(map(len, names)))
    label = max(len("tick"), len(f"stage {schedule.num_stages - 1}"))
    lines: list[Text] = []
    room = 0
    for tick in range(span.first, span.past):
        cells = [cell(tick, stage) for stage in stages]
        sizes = [max(size, *(len(text) for text, _ in column)) for column in zip(*cells, strict=True)]
        if schedule.deferral and all(late == _NOTHING for *_, late in cells):
            cells, sizes = [row[:-1] for row in cells], sizes[:-1]
        needed = sum(sizes) + len(sizes) - 1
        if not lines or (width is not None and room < needed + 3):
            lines += [Text("tick".ljust(label), "bold"), *(Text(f"stage {s}".ljust(label), "bold") for s in stages)]
            room = width - label if width is not None else 0
        room -= needed + 3
        head, *rows = lines[-1 - len(stages) :]
        head.append(f" | {tick:<{needed}}")
        for row, columns in zip(rows, cells, strict=True):
            row.append(" | ", "bright_black")
            for n, ((text, style), wide) in enumerate(zip(columns, sizes, strict=True)):
                row.append(" " * (n > 0))
                row.append(text.rjust(wide), style)
    return lines
