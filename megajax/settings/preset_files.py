"""The TOML files of presets: how they are found, by name or path, and how they are parsed."""

import difflib
from pathlib import Path
from typing import Any

from megajax.core.errors import UserError
from megajax.host import reading, remote
from megajax.host.paths import check_path, scheme


def preset_folders() -> tuple[Path, ...]:
    """The folders of presets: ./configs, then the package's (in a checkout a link to the same folder)."""
    return Path("configs"), Path(__file__).resolve().parents[1] / "configs"


def preset_names() -> list[str]:
    """The bare names of all presets, sorted."""
    return sorted({file.stem for folder in preset_folders() for file in folder.glob("*.toml")})


def names_in_folders() -> list[str]:
    """Names of the presets in subfolders of the preset folders, sorted."""
    files = (file for folder in preset_folders() for file in folder.glob("*/*.toml"))
    return sorted({f"{file.parent.name}/{file.stem}" for file in files})


def _nearest(name: str, known: list[str]) -> str:
    near = [each for each in known if each.rpartition("/")[2] == name]
    near = near or difflib.get_close_matches(name, known, n=2)
    near = near or difflib.get_close_matches("/".join(name.split("/")[-2:]), known, n=2)  # the end of a path
    return f"did you mean {' or '.join(near)}?" if near else ""


def find_preset(name_or_file: str | Path) -> Path:
    """The file of a preset, given its bare name, its name in a folder (finetune/mnli-336m), or a file."""
    check_path(name_or_file, "PRESET")
    path, name = Path(name_or_file), str(name_or_file)
    bare = path.name == name or (".." not in path.parts and not reading.kind(path))
    if path.suffix != ".toml" and bare:
        for candidate in (folder / f"{path}.toml" for folder in preset_folders()):
            if reading.is_file(candidate):
                return candidate
    kind = reading.kind(path)
    if kind == "a folder":
        raise UserError(f"{path} is a folder; valid: a preset's name, or a TOML file such as {path / 'config.toml'}")
    if kind and kind != "a file":
        raise UserError(f"{path} is {kind}; valid: a preset's name, or a TOML file")
    if not kind:
        valid = f"valid: a TOML file, or one of {', '.join(preset_names())}"
        known = [*preset_names(), *names_in_folders()]
        beside = difflib.get_close_matches(path.stem, [file.stem for file in path.parent.glob("*.toml")], n=1)
        near = f"did you mean {path.with_name(beside[0])}.toml?" if beside else ""
        what = "no such file" if path.suffix == ".toml" else "no preset"
        raise UserError(f"{what} {name!r}; {near or _nearest(name.removesuffix('.toml'), known) or valid}")
    return path


def read_file(location: str) -> bytes:
    """The contents of a preset, from a path or URL."""
    if scheme(location):
        return remote.read_bytes(location, "PRESET")
    try:
        return reading.read_bytes(location)
    except OSError as error:
        raise UserError(f"{location}: {error.strerror}; valid: a readable TOML file") from None


def parse_toml(content: bytes, location: str) -> dict[str, Any]:
    """Parse the TOML file from `location`."""
    try:
        return reading.parse_toml(content.decode())
    except UnicodeDecodeError as error:
        raise UserError(f"{location}: byte {error.start} is not UTF-8; valid: a TOML file in UTF-8") from None
    except ValueError as error:
        raise UserError(f"{location}: not TOML: {error}; valid: TOML, as in configs/demo.toml") from None
