"""Presets as values of a configuration: the preset's own, those of its bases, and overrides by flags."""

import os
import posixpath
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field
from pathlib import Path
from typing import Any

from megajax.core.errors import UserError
from megajax.core.optim.config import Horizon
from megajax.core.options import MOST, options, sections, suggest
from megajax.core.traits import PerStart
from megajax.data.tasks.registry import PRETRAINING, TASKS
from megajax.host.paths import identity, scheme
from megajax.settings.checks import check_values
from megajax.settings.config import RUN_HORIZON, RUN_MARK, Config
from megajax.settings.option_errors import shown
from megajax.settings.other_names import means_nothing, nearest
from megajax.settings.plugins import Unproven, lasting, load_plugins_of
from megajax.settings.preset_files import find_preset, parse_toml, preset_folders, read_file

OF_START = ("run_dir", "simulate_devices")  # they belong to one run and its machine, and are not inherited


@dataclass(frozen=True)
class Preset:
    """The values of a preset and its bases."""

    place: str  # its file, as a path or URL
    values: dict[str, Any]  # by key, in the configuration's types; there is always a `run_dir`
    origins: dict[str, str]  # by key, which file sets the value, in words; defaults are missing
    of_run: bool = False  # whether it is a run's own configuration, in its directory
    left_out: dict[str, Any] = field(default_factory=dict)  # by key, values of a run that its copy does not use
    of_start: dict[str, Any] = field(default_factory=dict)  # by key, what a run's configuration has and cannot set
    horizon: Horizon | None = None  # of the run whose configuration it is; None: not stored


def read_run(run_dir: Path) -> Preset:
    """The configuration in a run directory; see `read_preset`."""
    return read_preset(run_dir / "config.toml", in_run=True)


def read_preset(name_or_file: str | Path, run_dir: str = "", *, in_run: bool | None = None) -> Preset:
    """Read a preset. Values that it lacks come from its `base`, a name or a file next to it, and so on.

    Its `run_dir` is its own value, else runs/ plus its name; for the config.toml in a run directory it is that
    directory, wherever it is now, unless another `run_dir` is given: then the preset is a copy. A copy does not take
    over the original run's `run_dir` and simulated devices, and neither does a preset based on it. Neither run nor copy
    has a base, or sets what belongs to one start. `in_run` says that it is a run's; otherwise the run's files do.
    """
    first, *bases = _with_bases(str(name_or_file), in_run)
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for file in reversed(bases):
        of_start = OF_START if file.of_run else ("run_dir",)  # a directory belongs to one run
        inherited = {key: value for key, value in file.values.items() if key not in of_start}
        values = _replaced(values, inherited)
        origins |= dict.fromkeys(inherited, file.words)
    path = Path(first.place)
    here = first.in_run and (not run_dir or identity(run_dir) == identity(path.parent))
    left_out = {} if here or not first.of_run else {key: first.values[key] for key in OF_START if key in first.values}
    followed = {key: value for key, value in first.values.items() if key not in left_out}
    values = _replaced(values, followed)
    origins |= dict.fromkeys(followed, first.words)
    run_dir = str(path.parent) if here else followed.get("run_dir") or f"runs/{path.stem}"
    values["run_dir"] = run_dir
    return Preset(first.place, values, origins, here, left_out, first.of_start, first.horizon)


def load_preset(name_or_file: str | Path) -> dict[str, Any]:
    """The values of a preset by key; see `read_preset`."""
    return read_preset(name_or_file).values


@dataclass(frozen=True)
class _File:
    """The contents of one file of a preset."""

    place: str  # path or URL
    values: dict[str, Any]
    base: str  # the preset it is based on, as written; empty: none
    of_run: bool  # whether it is a run's `config.toml`, or a copy of one
    in_run: bool  # whether it lies in that run's directory
    of_start: dict[str, Any]  # what a run has and does not set, by key
    horizon: Horizon | None  # of that run

    @property
    def words(self) -> str:
        """How messages name it."""
        path = Path(self.place)
        inside = next((folder for folder in preset_folders()[1:] if folder in path.parents), None)
        name = f"preset {path.relative_to(inside).with_suffix('')}" if inside else self.place
        return f"{name}, of a run" if self.of_run else name


def _with_bases(name_or_file: str, in_run: bool | None) -> list[_File]:
    """The files of a preset: its own, its base's, and so on."""
    location = _locate(name_or_file)
    remote = bool(scheme(location))  # then its bases are chosen there, too
    files, seen = [_read(location, read_file(location), remote, in_run)], [_identity(location)]
    while (last := files[-1]).base:
        where = f"{last.place}: base = {shown(last.base)}"
        try:
            location = _locate(_beside(last.place, last.base))
            content = read_file(location)
        except UserError as error:
            raise UserError(f"{where}: {error}") from None
        seen.append(_identity(location))
        if seen[-1] in seen[:-1]:
            circle = [*(file.place for file in files[seen.index(seen[-1]) :]), location]
            raise UserError(
                f"{where} forms a cycle: {' -> '.join(circle)}; valid: a preset that is not based on this one"
            )
        remote |= bool(scheme(location))
        files.append(_read(location, content, remote))
    return files


def _locate(name_or_file: str) -> str:
    """The path or URL of a preset."""
    return name_or_file if scheme(name_or_file) else str(find_preset(name_or_file))


def _identity(location: str) -> object:
    """A value that differs for different preset files."""
    return location if scheme(location) else identity(location)


def _beside(location: str, base: str) -> str:
    """The location of a base: names stay as they are, files are relative to the preset that names them."""
    if scheme(base) or not base.endswith(".toml"):
        return base
    if not scheme(location):
        return str(Path(location).parent / os.path.expanduser(base))
    store, _, file = location.partition("://")
    return f"{store}://{posixpath.normpath(posixpath.join(posixpath.dirname(file), base))}"


def _lies_in_run(place: str) -> bool:
    marks = (Path(place).parent / name for name in ("run.json", "checkpoints"))
    return not scheme(place) and Path(place).name == "config.toml" and any(mark.exists() for mark in marks)


def _read(location: str, content: bytes, remote: bool, in_run: bool | None = None) -> _File:
    tables = parse_toml(content, location)
    if not tables:
        raise UserError(f"{location} is empty; valid: a preset, as in configs/demo.toml")
    of_run, base = tables.pop(RUN_MARK, False), tables.pop("base", "")
    if not isinstance(base, str):
        raise UserError(f"{location}: base = {shown(base)}; valid: the name of a preset, or a TOML file, as text")
    if not isinstance(of_run, bool):
        raise UserError(f"{location}: {RUN_MARK} = {shown(of_run)}; valid: true, or no such line")
    in_run = _lies_in_run(location) if in_run is None else in_run
    of_run |= in_run
    horizon = _horizon(tables.pop(RUN_HORIZON, None), location)
    values = {}
    for name, entry in tables.items():
        if isinstance(entry, dict) and name in sections(Config):
            values.update({f"{name}.{key}": value for key, value in entry.items()})
        elif isinstance(entry, dict) or name in sections(Config):
            known = ", ".join(f"[{section}]" for section in sections(Config))
            near = suggest(name, sections(Config), "") if isinstance(entry, dict) else ""
            raise UserError(f"{location}: {name} = {shown(entry)}; valid tables: {known}{near and f' ({near})'}")
        else:
            values[name] = entry
    table = options(Config)
    starts = [key for key in values if of_run and key in table and table[key].trait(PerStart) is not None]
    of_start = {key: value for key in starts if (value := values.pop(key)) != table[key].default}
    values = _converted(values, lambda key: f"{location}: {key}")
    if "plugins" in values and (of_run or remote):
        values["plugins"] = named = Unproven(values["plugins"])
        named.place = location
    if of_run and base:
        of_start, base = of_start | {"base": base}, ""
    return _File(location, values, base, of_run, in_run, of_start, horizon)


def _horizon(table: object, location: str) -> Horizon | None:
    """The horizon in a run's configuration."""
    if table is None:
        return None
    names = set(Horizon._fields)
    if not (isinstance(table, dict) and table.keys() == names and all(map(_is_steps, table.values()))):
        valid = f"steps as {' and '.join(Horizon._fields)}, or no such table"
        raise UserError(f"{location}: {RUN_HORIZON} = {shown(table)}; valid: {valid}")
    return Horizon(**table)


def _is_steps(value: object) -> bool:
    return type(value) is int and 0 <= value <= MOST


def _converted(values: Mapping[str, Any], name: Callable[[str], str]) -> dict[str, Any]:
    """Values by key as the types of these, without removed options that have what they are fixed to; `name` is what
    error messages call a key: its flag (a key may already be one), or the key with its file."""
    return {key: _convert(key, value, name(key)) for key, value in values.items() if not means_nothing(key, value)}


def _convert(key: str, value: object, name: str) -> Any:
    table = options(Config)
    if key not in table:
        section = key.rpartition(".")[0]
        valid = ", ".join(known for known in table if known.rpartition(".")[0] == section)
        raise UserError(f"{name}: unknown key; {nearest(key, table, f'valid: {valid}')}")
    try:
        return table[key].convert(value)
    except ValueError:
        raise UserError(f"{name} = {shown(value)}; valid: {table[key].valid}") from None


_OF_CORPUS = ("data.path", "data.sources", "data.validation")
_EITHER = (("data.path", "data.sources", "data.set"), ("optimizer.warmup_steps", "optimizer.warmup_fraction"))


def _replaced(values: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    """`values` with `others` replacing them. Of the keys in an entry of `_EITHER`, one replaces the others; a task
    replaces corpora, and another task what follows from it (`task_values`); epochs replace steps; and a new number of
    virtual stages replaces numbers of layers for another one by `auto`, or by `even`, where that is no choice."""
    left = dict(values)
    for keys in _EITHER:
        if any(others.get(key) not in (None, "", ()) for key in keys):
            left = {key: value for key, value in left.items() if key not in keys}
    if others.get("task.name", PRETRAINING) != PRETRAINING:
        replaced = {*_OF_CORPUS, *(task_values(others) if others["task.name"] != left.get("task.name") else ())}
        left = {key: value for key, value in left.items() if key not in replaced}
    if others.get("train.epochs") and "train.steps" not in others:
        left.pop("train.steps", None)
    before, now = (each.get("mesh.pipe", 1) * each.get("pipeline.chunks", 1) for each in (left, left | dict(others)))
    layers = left.get("pipeline.layers", "even")
    if now != before and layers not in ("even", "auto") and layers.count(",") + 1 != now:
        left["pipeline.layers"] = "auto"
    return left | dict(others)


def task_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Defaults that follow from a task, by key."""
    task = TASKS.get(values.get("task.name", PRETRAINING))
    if task is None:
        return {}
    resets = {"data.reset_attention": True, "train.loss": task.loss} if task.continues_text else {}
    return {"model.head": task.head, "model.num_classes": task.classes} | resets


def resolve(
    preset: Mapping[str, Any], overrides: Mapping[str, Any] | None = None, *, decay_follows: bool = True
) -> Config:
    """The configuration for values by key, such as `{"mesh.data": 2}`; overrides replace those of the preset.

    With `decay_follows`, `optimizer.decay_steps` defaults to `train.steps`. Otherwise it stays 0, so that a resumed run
    can keep the value that it started with.
    """
    load_plugins_of(preset, overrides or {})
    overrides = _converted(overrides or {}, lambda key: f"--{key.lstrip('-').replace('_', '-')}")
    values = _replaced(_converted(preset, lambda key: key), overrides)
    values = task_values(values) | values
    if "plugins" in values:
        values["plugins"] = lasting(values["plugins"])
    _check_complete(values)
    parts: dict[str, Any] = {"": {}} | {name: {} for name in sections(Config)}
    for key, value in values.items():
        section, _, name = key.rpartition(".")
        parts[section][name] = value
    config = Config(**parts[""], **{name: kind(**parts[name]) for name, kind in sections(Config).items()})
    check_values(config)
    return config.with_decay() if decay_follows else config


def _check_complete(values: Mapping[str, Any]) -> None:
    """Refuse a configuration without required values; the error names all of them."""
    table = options(Config)
    missing = [option for key, option in table.items() if option.default is MISSING and key not in values]
    if not missing:
        return
    if not values.get("train.steps") and not values.get("train.epochs"):
        missing.append(table["train.steps"])
    if len(missing) == 1:
        (option,) = missing
        raise UserError(f"{option.flag} missing ({option.help}); valid: that flag, or {option.key} in the preset")
    flags = [option.flag for option in missing]
    keys = ", ".join(option.key for option in missing)
    raise UserError(
        f"{', '.join(flags[:-1])} and {flags[-1]} missing; valid: these flags, in the preset {keys}, or there a base "
        "that has them"
    )
