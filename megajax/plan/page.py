"""A page about a search, for a browser without a network: every configuration that fits is a point, by the memory it
needs and the time of its step, with its parts and its flags, and can be filtered. `page.html` is the page without its
data."""

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict
from html import escape
from operator import attrgetter
from pathlib import Path
from typing import Any

from megajax.core.options import as_flag, options
from megajax.plan.machines import Machine
from megajax.plan.search import VARIED, Candidate, Found, schedule_in_words
from megajax.settings.config import Config

_TEMPLATE = Path(__file__).with_name("page.html")
_MARK = '<meta name="generator" content="megajax plan">'
_MOST = 20_000  # points; more are as many megabytes as a browser draws slowly


def is_page(path: Path) -> bool:
    """Whether a file is such a page."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            return _MARK in file.read(400)
    except OSError:
        return False


def page_of_search(found: Found, preset: str, original: Config, machine: Machine) -> str:
    """The page; `original` is the configuration of `preset`."""
    data = json.dumps(page_data(found, preset, original, machine), separators=(",", ":"))
    page = _TEMPLATE.read_text(encoding="utf-8").replace("TITLE", escape(_title(found, preset, machine)))
    return page.replace("/*DATA*/null", data.replace("<", "\\u003c"))


def page_data(found: Found, preset: str, original: Config, machine: Machine) -> dict[str, Any]:
    """What the page shows: columns whose distinct values stand once, and the numbers of every point. Bytes are in MiB,
    seconds in units of 0.1 ms."""
    shown = _shown(found)
    first = shown[0].config
    return {
        "title": _title(found, preset, machine),
        "usable": round(machine.usable / 2**20),
        "command": ["megajax train", preset, *_fixed(first, original)],
        "tokens": first.train.global_batch * first.model.sequence_length,
        "devices": first.mesh.num_devices,
        "columns": [_column(key, shown, original) for key in VARIED],
        "schedules": _coded(schedule_in_words(each.pipeline) if each.base.mesh.pipe > 1 else "-" for each in shown),
        "frontier": [number for number, each in enumerate(shown) if id(each) in set(map(id, found.frontier))],
        "seconds": [each.seconds for each in shown],
        "bytes": [round(each.bytes / 2**20) for each in shown],
        "time": _numbers([each.parts for each in shown], 1e4),
        "memory": _numbers([asdict(each.memory) for each in shown], 2**-20),
    }


def _title(found: Found, preset: str, machine: Machine) -> str:
    devices, fitting = found.best[0].config.mesh.num_devices, len(found.fitting)
    some = f", the fastest {_MOST:,} shown" if fitting > _MOST else ""
    return f"{preset} on {devices} {machine.name.upper()}s: {fitting:,} of {found.tried:,} configurations fit{some}"


def _shown(found: Found) -> list[Candidate]:
    """The fastest, and all on the frontier."""
    some = found.fitting[:_MOST]
    here = set(map(id, some))
    return [*some, *(each for each in found.frontier if id(each) not in here)]


def _fixed(config: Config, original: Config) -> list[str]:
    """The flags of what the search does not vary."""
    of = {key: attrgetter(key) for key in options(Config) if key not in VARIED}
    return [as_flag(key, get(config)) for key, get in of.items() if get(config) != get(original)]


def _column(key: str, shown: list[Candidate], original: Config) -> dict[str, Any]:
    get = _getter(key)
    coded = _coded(map(get, shown))
    usual = attrgetter(key)(original)
    return coded | {
        "name": key.removeprefix("mesh."),
        "flags": ["" if value == usual else as_flag(key, value) for value in coded["values"]],
    }


def _getter(key: str) -> Callable[[Candidate], Any]:
    if key.startswith("pipeline."):
        return attrgetter(key)
    of = attrgetter(key)
    return lambda each: of(each.base)


def _coded(values: Iterable[Any]) -> dict[str, Any]:
    """The distinct values, in order, and which of them every point has."""
    listed = list(values)
    distinct = sorted(set(listed), key=lambda value: (isinstance(value, str), value))
    place = {value: number for number, value in enumerate(distinct)}
    return {"values": distinct, "index": [place[value] for value in listed]}


def _numbers(parts: list[dict[str, Any]], scale: float) -> dict[str, list[int]]:
    """Every part that some point has, longest first."""
    names = dict.fromkeys(name for each in parts for name in each)
    found = {name: [round(scale * each.get(name, 0)) for each in parts] for name in names}
    return {
        name.replace("_", " "): found[name]
        for name in sorted(names, key=lambda name: -sum(found[name]))
        if any(found[name])
    }
