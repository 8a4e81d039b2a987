"""A page about a search, for a browser without a network: every configuration that fits is a point, by the memory it
needs and the time of its step, with its parts and its flags, and can be filtered. `page.html` is the page without its
data."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from html import escape
from operator import attrgetter
from pathlib import Path
from typing import Any

from megajax.plan.machines import Machine
from megajax.plan.search import VARIED, Candidate, Found, changed_flags, schedule_in_words
from megajax.settings.config import Config
from megajax.settings.option_errors import as_flag

_TEMPLATE = Path(__file__).with_name("page.html")
_MARK = '<meta name="generator" content="megajax plan">'
Searches = Sequence[tuple[Machine, Found]]  # of several GPUs
_MOST = 20_000  # points; more are as many megabytes as a browser draws slowly


def is_page(path: Path) -> bool:
    """Whether a file is such a page."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            return _MARK in file.read(400)
    except OSError:
        return False


def page_of_search(searches: Searches, preset: str, original: Config) -> str:
    """The page; `original` is the configuration of `preset`."""
    data = json.dumps(page_data(searches, preset, original), separators=(",", ":"))
    some = f", the fastest {_MOST:,} shown" if sum(len(found.fitting) for _, found in searches) > _MOST else ""
    title = escape(title_of(searches, preset) + some)
    page = _TEMPLATE.read_text(encoding="utf-8").replace("TITLE", title)
    return page.replace("/*DATA*/null", data.replace("<", "\\u003c"))


def page_data(searches: Searches, preset: str, original: Config) -> dict[str, Any]:
    """What the page shows: columns whose distinct values stand once, and the numbers of every point. Bytes are in MiB,
    seconds in units of 0.1 ms."""
    named = [(machine.name, point) for machine, result in searches for point in _shown(result, _MOST // len(searches))]
    named.sort(key=lambda pair: (pair[1].seconds, pair[1].bytes))
    shown = [point for _, point in named]
    first = shown[0].config
    gpus = _coded(name for name, _ in named)
    return {
        "usable": [round(machine.usable / 2**20) for machine, _ in sorted(searches, key=lambda pair: pair[0].name)],
        "command": ["megajax train", preset, *changed_flags(first, original, but=VARIED)],
        "tokens": first.train.global_batch * first.model.sequence_length,
        "devices": first.mesh.num_devices,
        "gpu": {"name": "GPU", "flags": [""] * len(searches)} | gpus,  # in the order of their names
        "columns": [_column(key, shown, original) for key in VARIED],
        "schedules": _coded(schedule_in_words(point.pipeline) if point.base.mesh.pipe > 1 else "-" for point in shown),
        "seconds": [point.seconds for point in shown],
        "bytes": [round(point.bytes / 2**20) for point in shown],
        "time": _numbers([point.parts for point in shown], 1e4),
        "memory": _numbers([asdict(point.memory) for point in shown], 2**-20),
    }


def title_of(searches: Searches, preset: str) -> str:
    """What was searched, and how many configurations fit."""
    devices = searches[0][1].best[0].config.mesh.num_devices
    gpus = " or ".join(f"{machine.name.upper()}s" for machine, _ in searches)
    pairs = [(len(found.fitting), found.tried) for _, found in searches]
    fitting, tried = (sum(numbers) for numbers in zip(*pairs, strict=True))
    return f"{preset} on {devices} {gpus}: {fitting:,} of {tried:,} configurations fit"


def _shown(result: Found, most: int) -> list[Candidate]:
    """The fastest, and all on the frontier."""
    some = result.fitting[:most]
    here = set(map(id, some))
    return [*some, *(point for point in result.frontier if id(point) not in here)]


def _column(key: str, shown: list[Candidate], original: Config) -> dict[str, Any]:
    get = attrgetter(key)
    coded = _coded(get(point if key.startswith("pipeline.") else point.base) for point in shown)
    usual = get(original)
    return coded | {
        "name": key.removeprefix("mesh."),
        "flags": ["" if value == usual else as_flag(key, value) for value in coded["values"]],
    }


def _coded(values: Iterable[Any]) -> dict[str, Any]:
    """The distinct values, in order, and which of them every point has."""
    listed = list(values)
    distinct = sorted(set(listed), key=lambda value: (isinstance(value, str), value))
    place = {value: number for number, value in enumerate(distinct)}
    return {"values": distinct, "index": [place[value] for value in listed]}


def _numbers(parts: list[dict[str, Any]], scale: float) -> dict[str, list[int]]:
    """Every part that some point has, longest first."""
    names = dict.fromkeys(name for point in parts for name in point)
    scaled = {name: [round(scale * point.get(name, 0)) for point in parts] for name in names}
    return {
        name.replace("_", " "): scaled[name]
        for name in sorted(names, key=lambda name: -sum(scaled[name]))
        if any(scaled[name])
    }
