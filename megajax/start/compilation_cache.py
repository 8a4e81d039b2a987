"""Cache compiled programs between starts, with JAX's cache in the user's cache folder.

JAX's keys include the program, jaxlib's version, XLA's flags and the processor's features, so versions and machines can
share a folder; JAX locks it against other processes. A program that cannot be cached is silently compiled again.
"""

import contextlib
import os
import sys
import tempfile
import warnings
from itertools import accumulate
from pathlib import Path

from megajax.host.paths import check_path, user_folder
from megajax.settings.config import Config

OFF = "off"
_SHORTEST = 0.1  # seconds; programs that compile faster are not cached
_WAITS = 1.0  # seconds to wait for other processes that use the folder
_TUNED = "xla_gpu_per_fusion_autotune_cache_dir"  # JAX's name of a setting, and of the folder inside the cache's
_TUNED_SHARE = 16  # of the cache's size, one part for what XLA measured on GPUs; the others for programs


def keep_compiled(config: Config) -> None:
    """Cache compiled programs as `--compilation-cache` says; without that flag, JAX's own setting is respected."""
    import jax

    named = config.compilation_cache
    if not named and getattr(jax.config, "jax_compilation_cache_dir", None):
        return
    if named and named != OFF:
        check_path(named, "--compilation-cache")
    folder = None if named == OFF else Path(named) if named else default_folder()
    problem = "" if folder is None else _problem(folder)
    if folder is None or problem or not _loads_compiled():
        if named and problem:
            print(f"warning: --compilation-cache {named}: {problem}; compiled programs are not cached", file=sys.stderr)
        jax.config.update("jax_compilation_cache_dir", None)
        return
    for text in "Error reading persistent compilation", "Error writing persistent compilation", "Cache value for key":
        warnings.filterwarnings("ignore", text)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    size = int(config.compilation_cache_size * 2**30)
    _shrink(folder / _TUNED, size // _TUNED_SHARE)
    jax.config.update("jax_compilation_cache_max_size", size - size // _TUNED_SHARE)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", _SHORTEST)
    jax.config.update("jax_persistent_cache_enable_xla_caches", _TUNED if jax.default_backend() != "cpu" else "none")


def default_folder() -> Path | None:
    """The default cache folder; None for a user without a home."""
    caches = user_folder("XDG_CACHE_HOME", "~/.cache")
    return caches and caches / "megajax" / "compiled"


def _problem(folder: Path) -> str:
    """Make the folder, and remove what killed processes left half-written; returns why it cannot be used."""
    from filelock import FileLock, Timeout

    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # whoever can write there can run code in our processes
        with FileLock(folder / ".lockfile", timeout=_WAITS):  # JAX's lock
            for entry in folder.glob("*-cache"):
                if not entry.with_name(f"{entry.name.removesuffix('-cache')}-atime").exists():  # JAX writes it last
                    entry.unlink()
    except Timeout:
        pass  # the folder is in use
    except (OSError, NotImplementedError) as error:  # filelock raises the latter if a filesystem has no locks
        return (error.strerror if isinstance(error, OSError) else None) or str(error)
    return ""


def _shrink(tuned: Path, most: int) -> None:
    """Remove the oldest of XLA's measurements, which have no limit of their own, until the rest has this many bytes."""
    with contextlib.suppress(OSError):  # none yet, or another process does the same
        ages = sorted(((entry.stat(), entry) for entry in tuned.iterdir()), key=lambda each: -each[0].st_mtime)
        for (_, entry), so_far in zip(ages, accumulate(each.st_size for each, _ in ages), strict=True):
            if so_far > most:
                entry.unlink(missing_ok=True)


def _loads_compiled() -> bool:
    """Whether a compiled program can be loaded: on some CPUs jaxlib refuses its own programs, each with a line from C++
    on standard error (jax#38445)."""
    import jax
    from jax.experimental.serialize_executable import deserialize_and_load, serialize

    try:
        if jax.default_backend() != "cpu":
            return True
        compiled = serialize(jax.jit(lambda x: x + 1).lower(0).compile())
        sys.stderr.flush()
        stderr = os.dup(2)
        with tempfile.TemporaryFile() as said:
            os.dup2(said.fileno(), 2)
            try:
                deserialize_and_load(*compiled)
            finally:
                os.dup2(stderr, 2)
                os.close(stderr)
            return os.fstat(said.fileno()).st_size == 0
    except Exception:  # of many kinds; if there is no device, others report it
        return False
