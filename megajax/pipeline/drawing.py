"""Draw a schedule as text, one row per stage."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from megajax.pipeline.excerpt import Part, excerpt
from megajax.pipeline.table import Schedule

if TYPE_CHECKING:
    from rich.text import Text

# One per chunk, then from the beginning; forward, backward, and weight gradients apart.
STYLES = (
    ("blue", "cyan", "bright_blue", "bright_cyan"),
    ("green", "yellow", "bright_green", "bright_yellow"),
    ("magenta", "red", "bright_magenta", "bright_red"),
)
_NOTHING = (".", "bright_black")
_MOST_NAMES = 4  # weight gradients named in a cell; of more, the first and the last
_Texts = list[tuple[str, str]]  # text and style of forward, backward, deferred weight gradients


def cell_name(microbatch: int, chunk: int, num_chunks: int) -> str:
    """A microbatch, and a letter for the chunk if there are several: `3`, `3b`."""
    letter = "" if num_chunks == 1 else chr(ord("a") + chunk) if num_chunks <= 26 else f".{chunk}"
    return f"{microbatch}{letter}"


def draw_text(schedule: Schedule, width: int | None = None) -> "Iterator[Text]":
    """Lines of the table: ticks from left to right, one row per stage, continued below after `width` characters. Every
    tick shows the forward, the backward, and deferred weight gradients as `w3,4`, in the column of the forward those
    that replace one. A large schedule is drawn in excerpts, each under its name, and the last line says what is left
    out.
    """
    from rich.text import Text

    shown, cell = excerpt(schedule), _cell_of(schedule)
    for part in shown.parts:
        if not shown.is_complete:
            yield Text(part.words())
        yield from _draw_part(schedule, part, shown.stages, cell, width)
    if not shown.is_complete:
        yield Text(f"left out: {shown.left_out()}, which --json has")


def _cell_of(schedule: Schedule) -> Callable[[int, int], _Texts]:
    """A function from tick and stage to the texts and styles of the cell."""
    rows, num_chunks = schedule.cells(), schedule.num_chunks

    def text(kind: int, ran: list[tuple[int, int]]) -> tuple[str, str]:
        if not ran:
            return _NOTHING
        names = [cell_name(microbatch, chunk, num_chunks) for microbatch, chunk in ran]
        shown = ",".join(names) if len(names) <= _MOST_NAMES else f"{names[0]}..{names[-1]}"
        return "w" * (kind == 2) + shown, STYLES[kind][ran[0][1] % len(STYLES[kind])]

    def cell(tick: int, stage: int) -> _Texts:
        early, forward, backward, late = rows[tick][stage]
        first = text(2, early) if early else text(0, forward)
        return [first, text(1, backward), *([text(2, late)] if schedule.deferral else [])]

    return cell


def _draw_part(
    schedule: Schedule, part: Part, stages: tuple[int, ...], cell: Callable[[int, int], _Texts], width: int | None
) -> "list[Text]":
    from rich.text import Text

    num_chunks = schedule.num_chunks
    names = [cell_name(schedule.num_microbatches - 1, c, num_chunks) for c in range(num_chunks)]
    size = max(len(str(schedule.num_ticks - 1)), *map(len, names))
    label = max(len("tick"), len(f"stage {schedule.num_stages - 1}"))
    lines: list[Text] = []
    room = 0
    for tick in range(part.first, part.past):
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
