"""Presets, TOML files with values of a configuration: finding and reading them, and replacing values by flags."""

import difflib
import posixpath
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field
from pathlib import Path
from typing import Any

from megajax import reading, remote
from megajax.config import Config
from megajax.errors import UserError
from megajax.options import options, sections, shown, suggest
from megajax.paths import check_path, identity, scheme
from megajax.tasks.registry import PRETRAINING, TASKS
from megajax.validation import check_values


def preset_folders() -> tuple[Path, ...]:
    """The folders where bare names are looked up: ./configs, then the package's, in a checkout a link to its own."""
    return Path("configs"), Path(__file__).resolve().parent / "configs"


def preset_names() -> list[str]:
    """The bare names of all presets, sorted."""
    return sorted({file.stem for folder in preset_folders() for file in folder.glob("*.toml")})


def names_in_folders() -> list[str]:
    """Names of the presets in folders of the preset folders, sorted."""
    files = (file for folder in preset_folders() for file in folder.glob("*/*.toml"))
    return sorted({f"{file.parent.name}/{file.stem}" for file in files})


def _nearest(name: str, known: list[str]) -> str:
    near = [each for each in known if each.rpartition("/")[2] == name]
    near = near or difflib.get_close_matches(name, known, n=2)
    near = near or difflib.get_close_matches("/".join(name.split("/")[-2:]), known, n=2)  # of a path, its end
    return f"did you mean {' or '.join(near)}?" if near else ""


def find_preset(name_or_file: str | Path) -> Path:
    """The file of a preset, given by its bare name, of one in a folder as finetune/mnli-336m, or as a file.

    Raises:
        UserError: there is none.
    """
    if scheme(name_or_file):
        return remote.fetch(str(name_or_file), "PRESET")
    check_path(name_or_file, "PRESET")
    path, name = Path(name_or_file), str(name_or_file)
    bare = path.name == name or (".." not in path.parts and not reading.kind(path))
    if path.suffix != ".toml" and bare:
        for candidate in (folder / f"{path}.toml" for folder in preset_folders()):
            if reading.is_file(candidate):
                return candidate
    there = reading.kind(path)
    if there == "a folder":
        raise UserError(f"{path} is a folder; valid: a preset's name, or a TOML file such as {path / 'config.toml'}")
    if there and there != "a file":
        raise UserError(f"{path} is {there}; valid: a preset's name, or a TOML file")
    if not there:
        valid = f"valid: a TOML file, or one of {', '.join(preset_names())}"
        known = [*preset_names(), *names_in_folders()]
        beside = difflib.get_close_matches(path.stem, [file.stem for file in path.parent.glob("*.toml")], n=1)
        near = f"did you mean {path.with_name(beside[0])}.toml?" if beside else ""
        raise UserError(f"no preset {name!r}; {near or _nearest(name.removesuffix('.toml'), known) or valid}")
    return path


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a TOML file.

    Raises:
        UserError: it cannot be read or is malformed, with the line.
    """
    try:
        return reading.parse_toml(reading.read_bytes(path).decode())
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; valid: a TOML file that can be read") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: byte {error.start} is not UTF-8; valid: a TOML file in UTF-8") from None
    except UserError:
        raise
    except ValueError as error:
        raise UserError(f"{path}: not TOML: {error}; valid: TOML, as in configs/demo.toml") from None


@dataclass(frozen=True)
class Preset:
    """What a preset says, and what it takes from the presets that it is based on.

    Attributes:
        path: its file.
        values: by key, in the types of the configuration; `run_dir` always has one.
        origins: by key, the file that says the value, in words; not there for what no file says.
        of_run: whether it is a run's own configuration, in its directory.
        left_out: by key, values of a run that its copy does not follow.
    """

    path: Path
    values: dict[str, Any]
    origins: dict[str, str]
    of_run: bool = False
    left_out: dict[str, Any] = field(default_factory=dict)


def read_preset(name_or_file: str | Path, run_dir: str = "") -> Preset:
    """A preset. What it does not say is said by its `base`, a name or a file beside it, and so on. Its `run_dir` is

    - for the config.toml of a run directory: that directory, wherever it lies now;
    - for a copy of one, which would name the directory of a run that goes on elsewhere: runs/ and its name;
    - for any other preset: what it says itself, else runs/ and its name.

    A run's simulated devices are those of its own config.toml only, too: neither a copy nor what is based on it has
    them. Where `run_dir` is given, the run directory that is used, the config.toml of another one counts as a copy.

    Raises:
        UserError: there is no such preset; its file is malformed TOML or has an unknown key or a value of another type;
            a base is missing, or based on this preset.
    """
    own, *bases = _with_bases(str(name_or_file))
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for file in reversed(bases):
        inherited = {key: value for key, value in file.values.items() if key not in file.of_start}
        values = _replaced(values, inherited)
        origins |= dict.fromkeys(inherited, file.words)
    here = _lies_in_run(own.path) and (not run_dir or identity(run_dir) == identity(own.path.parent))
    left_out = {} if here or not own.of_run else {key: own.values[key] for key in _OF_START if key in own.values}
    kept = {key: value for key, value in own.values.items() if key not in left_out}
    values = _replaced(values, kept)
    origins |= dict.fromkeys(kept, own.words)
    run_dir = str(own.path.parent) if here else kept.get("run_dir") or f"runs/{own.path.stem}"
    return Preset(own.path, values | {"run_dir": run_dir}, origins, here, left_out)


def load_preset(name_or_file: str | Path) -> dict[str, Any]:
    """The values of a preset by key; see `read_preset`.

    Raises:
        UserError: as there.
    """
    return read_preset(name_or_file).values


@dataclass(frozen=True)
class _File:
    """What one file of a preset says itself.

    Attributes:
        path: where it is read.
        place: the same, of a file on a remote store its URL.
        base: the preset that it is based on, as it is named there; empty: none.
        of_run: whether training wrote it.
    """

    path: Path
    place: str
    values: dict[str, Any]
    base: str
    of_run: bool

    @property
    def words(self) -> str:
        """What it is called in words."""
        inside = next((folder for folder in preset_folders()[1:] if folder in self.path.parents), None)
        name = f"preset {self.path.relative_to(inside).with_suffix('')}" if inside else self.place
        return f"{name}, of a run" if self.of_run else name

    @property
    def of_start(self) -> tuple[str, ...]:
        """Keys that nothing takes from it that is based on it: a directory is of one run."""
        return _OF_START if self.of_run else ("run_dir",)


_OF_START = ("run_dir", "simulate_devices")  # what belongs to a run and its machine, not to what is like it


def _with_bases(name_or_file: str) -> list[_File]:
    """The files of a preset: its own, that of its base, and so on."""
    path = find_preset(name_or_file)
    url = bool(scheme(name_or_file))
    files, seen = [_read(path, name_or_file if url else str(path))], [name_or_file if url else identity(path)]
    while (last := files[-1]).base:
        told = f"{last.place}: base = {shown(last.base)}"
        name = _beside(last.place, last.base)
        try:
            path = find_preset(name)
        except UserError as error:
            raise UserError(f"{told}: {error}") from None
        place = name if scheme(name) else str(path)
        seen.append(name if scheme(name) else identity(path))
        if seen[-1] in seen[:-1]:
            circle = [file.place for file in files[seen.index(seen[-1]) :]]
            raise UserError(
                f"{told} goes in a circle: {' -> '.join([*circle, place])}; valid: a preset that is not based on this "
                "one"
            )
        files.append(_read(path, place))
    return files


def _beside(place: str, base: str) -> str:
    """A base as it is found: a name where all names are, a file from the folder of the preset that names it."""
    if scheme(base) or not base.endswith(".toml"):
        return base
    if not scheme(place):
        return str(Path(place).parent / base)
    store, _, file = place.partition("://")
    return f"{store}://{posixpath.normpath(posixpath.join(posixpath.dirname(file), base))}"


def _read(path: Path, place: str) -> _File:
    tables = read_toml(path)
    of_run, base = is_of_run(tables), tables.pop("base", "")
    if not isinstance(base, str):
        raise UserError(f"{place}: base = {shown(base)}; valid: the name of a preset, or a TOML file, as text")
    values = {}
    for name, entry in tables.items():
        if isinstance(entry, dict) and name in sections(Config):
            values.update({f"{name}.{key}": value for key, value in entry.items()})
        elif isinstance(entry, dict) or name in sections(Config):
            known = ", ".join(f"[{section}]" for section in sections(Config))
            near = suggest(name, sections(Config), "") if isinstance(entry, dict) else ""
            raise UserError(f"{place}: {name} = {shown(entry)}; valid tables: {known}{near and f' ({near})'}")
        else:
            values[name] = entry
    return _File(
        path, place, {key: _convert(key, value, f"{place}: {key}") for key, value in values.items()}, base, of_run
    )


_TABLES = {"model", "mesh", "pipeline", "train", "optimizer", "data", "tokenizer", "checkpoint", "sample"}
_VALUES = {"seed", "precision", "run_dir", "resume", "simulate_devices"}


def is_of_run(tables: Mapping[str, Any]) -> bool:
    """Whether a preset has every value, as training writes one, which nobody does by hand, and no base, not even an
    empty one, as `--print-config` writes it."""
    whole = tables.keys() >= _TABLES | _VALUES and "base" not in tables
    return whole and all(isinstance(tables[name], dict) for name in _TABLES)


def _lies_in_run(path: Path) -> bool:
    return path.name == "config.toml" and any((path.parent / name).exists() for name in ("run.json", "checkpoints"))


def _convert(key: str, value: object, name: str) -> Any:
    """`value` as the type of `key`; `name` is the key with its file, or the flag, for error messages."""
    table = options(Config)
    if key not in table:
        section = key.rpartition(".")[0]
        valid = ", ".join(known for known in table if known.rpartition(".")[0] == section)
        raise UserError(f"{name}: unknown key; {suggest(key, table, f'valid: {valid}')}")
    try:
        return table[key].convert(value)
    except ValueError:
        raise UserError(f"{name} = {shown(value)}; valid: {table[key].valid}") from None


def _replaced(values: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    """Values with others in their place; one corpus takes the place of several, and several that of one."""
    left = dict(values)
    for key, other in (("data.path", "data.sources"), ("data.sources", "data.path")):
        if others.get(key) and other not in others:
            left.pop(other, None)
    return left | dict(others)


def of_task(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values that follow from a task, where nothing else is said, by key."""
    task = TASKS.get(values.get("task.name", PRETRAINING))
    if task is None:
        return {}
    resets = {"data.reset_attention": True} if task.continues_text else {}
    return {"model.head": task.head, "model.num_classes": task.classes} | resets


def resolve(
    preset: Mapping[str, Any], overrides: Mapping[str, Any] | None = None, *, decay_follows: bool = True
) -> Config:
    """The configuration of values by key, such as `{"mesh.data": 2}`; overrides replace those of the preset.

    Args:
        preset: the values of a preset.
        overrides: those of flags.
        decay_follows: an `optimizer.decay_steps` that is given nowhere is `train.steps`; else it stays 0, so that a run
            that goes on can keep the value that it began with.

    Raises:
        UserError: an unknown key, a value that is not valid, or values that are given nowhere, all of them in one line.
    """
    overrides = {key: _convert(key, value, "--" + key.replace("_", "-")) for key, value in (overrides or {}).items()}
    values = _replaced({key: _convert(key, value, key) for key, value in preset.items()}, overrides)
    values = of_task(values) | values
    _check_complete(values)
    parts: dict[str, Any] = {"": {}} | {name: {} for name in sections(Config)}
    for key, value in values.items():
        section, _, name = key.rpartition(".")
        parts[section][name] = value
    config = Config(**parts[""], **{name: kind(**parts[name]) for name, kind in sections(Config).items()})
    check_values(config)
    return config.with_decay() if decay_follows else config


def _check_complete(values: Mapping[str, Any]) -> None:
    """Raises `UserError` where a value is missing that has no default, with all that are."""
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
