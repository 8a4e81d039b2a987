"""Places that may not be written or read, for `hostile_folders.py`: every command refuses them and changes nothing."""

import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from full_disk import Command

from megajax.core.errors import RunError, UserError

NOBODY = 65534


def as_anybody() -> None:
    """Give up root's rights over the files of others; what is started has none."""
    libc = ctypes.CDLL(None)
    for capability in 1, 2, 3:  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH, CAP_FOWNER
        libc.prctl(24, capability, 0, 0, 0)  # PR_CAPBSET_DROP


def forbid(path: Path, mode: int) -> None:
    """Make a file or folder somebody else's, with these rights of others."""
    if os.geteuid() == 0:
        os.chown(path, NOBODY, NOBODY)
    path.chmod(mode)


def below(folder: Path) -> dict[str, tuple[int, int, str]]:
    """Kind and rights, owner and content of everything below a folder, of a file also when it was changed."""
    found = {}
    for path in sorted([folder, *folder.rglob("*")]):
        look, content = path.lstat(), ""
        if path.is_file():
            content = f"{look.st_mtime_ns} {hashlib.sha256(path.read_bytes()).hexdigest()}"
        found[str(path.relative_to(folder))] = look.st_mode, look.st_uid, content
    return found


def read_only(folder: Path, made: Path, command: Callable[..., Command]) -> Iterator[tuple[str, Command]]:
    """What may not be written, or read, in every place where a command writes or reads; all commands must refuse it.

    Args:
        folder: empty, to be filled.
        made: with a finished run `run` and a model `hf`.
        command: of its arguments.
    """

    def forbidden(name: str, mode: int = 0o755, inside: str = "", of: Path | None = None) -> Path:
        path = folder / name
        if of:
            shutil.copytree(of, path)
        (path / inside).mkdir(parents=True, exist_ok=True)
        forbid(path / inside, mode)
        return path

    preset, text = made / "preset.toml", made / "corpus.txt"
    trains = "train.py", preset, "--run-dir"
    yield "train: run directory, empty", command(*trains, forbidden("empty"))
    yield "train: run directory with a run", command(*trains, forbidden("old", of=made / "run"), "--train.steps", 110)
    yield "train: parent", command(*trains, forbidden("parent") / "run")
    yield "train: grandparent", command(*trains, forbidden("grandparent") / "a" / "run")
    half = forbidden("data", inside="data", of=made / "started")
    yield "train: RUN/data of a run that has just begun", command(*trains, half)
    secret = folder / "secret.txt"
    shutil.copy(text, secret)
    forbid(secret, 0o600)
    yield "train: text that may not be read", command(*trains, folder / "new", "--data.path", secret)
    hidden = forbidden("hidden", 0o700)
    yield "train: folder of texts that may not be read", command(*trains, folder / "new", "--data.path", hidden)
    prepares = "-m", "megajax", "prepare", text, "--vocab-size", 300, "--workers", 1, "--json", "--output"
    yield "prepare: output's folder", command(*prepares, forbidden("corpora") / "set")
    (folder / "work").mkdir()
    yield "prepare: text that may not be read", command(*prepares[:3], secret, *prepares[4:], folder / "work" / "set")
    converts = "-m", "megajax", "convert"
    for action, source in (("export-hf", made / "run"), ("import-hf", made / "hf")):
        target = forbidden(f"{action} empty")
        yield f"convert {action}: target, empty", command(*converts, action, source, target)
        yield f"convert {action}: target's folder", command(*converts, action, source, forbidden(action) / "new")
    unreadable = forbidden("run", 0o700, inside="checkpoints", of=made / "run")
    yield (
        "convert export-hf: checkpoints that may not be read",
        command(*converts, "export-hf", unreadable, folder / "hf"),
    )


def forbidden_folders(root: Path, made: Path, command: Callable[..., Command]) -> Iterator[tuple[str, int, str]]:
    """Start each of `read_only` below a folder, see that nothing there has changed, and say how it ended.

    Raises:
        RunError: it succeeded, or changed something.
        UserError: this user may write everywhere.
    """
    probe = root / "probe"
    probe.mkdir()
    forbid(probe, 0o555)
    code = f"import os; exit(os.access({str(probe)!r}, os.W_OK))"
    if subprocess.run([sys.executable, "-c", code], preexec_fn=as_anybody).returncode:
        raise UserError("root's rights cannot be given up, or this user may write everywhere; valid: Linux's root")
    folder = root / "forbidden"
    folder.mkdir()
    for name, forbidden in read_only(folder, made, command):
        before = below(root)
        code, line = forbidden.end(forbidden.start(preexec=as_anybody), root)
        if code == 0 or below(root) != before:
            changed = sorted(set(before.items()) ^ set(below(root).items()))
            raise RunError(f"{name}: it ended with {code}, {line}, and these have changed: {changed}")
        yield name, code, line
