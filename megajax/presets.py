"""Preset files: where they are found, and reading them."""

import tomllib
from pathlib import Path
from typing import Any

from megajax.errors import UserError
from megajax.options import suggest


def preset_folders() -> tuple[Path, ...]:
    """Where bare names are looked up: ./configs, then the source checkout's."""
    return Path("configs"), Path(__file__).resolve().parents[1] / "configs"


def preset_names() -> list[str]:
    """The bare names there are, sorted."""
    return sorted({file.stem for folder in preset_folders() for file in folder.glob("*.toml")})


def find_preset(name_or_file: str | Path) -> Path:
    """The file of a preset, given by its bare name or as a file. Raises `UserError` where there is none."""
    path = Path(name_or_file)
    if path.suffix != ".toml" and path.name == str(name_or_file):
        for candidate in (folder / f"{path}.toml" for folder in preset_folders()):
            if candidate.is_file():
                return candidate
    if path.is_dir():
        raise UserError(f"{path} is a folder; valid: a preset's name, or a TOML file such as {path / 'config.toml'}")
    if not path.is_file():
        valid = f"valid: a TOML file, or one of {', '.join(preset_names())}"
        raise UserError(f"no preset {str(name_or_file)!r}; {suggest(path.stem, preset_names(), valid)}")
    return path


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a TOML file. Raises `UserError`, with the line where it is malformed."""
    try:
        return tomllib.loads(path.read_bytes().decode())
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; valid: a TOML file that can be read") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: byte {error.start} is not UTF-8; valid: a TOML file in UTF-8") from None
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{path}: not valid TOML: {error}") from None
