"""What is compiled is kept for the next start: in the user's cache folder, or where `--compilation-cache` says."""

import dataclasses
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import jax
import pytest
from jax.experimental import serialize_executable
from tiny import tiny_config

from megajax.start.compilation_cache import keep_compiled

TESTS = Path(__file__).parents[1]
PROGRAM = """
import jax
import jax.numpy as jnp
from megajax.start import launch
from tiny import tiny_config
jax.monitoring.register_event_listener(lambda event, **_: print(event) if "cache_" in event else None)
launch.start(tiny_config())
def loss(x, w):
    for _ in range(20):
        x = jnp.tanh(x @ w) + jnp.sort(x)
    return (x * x).sum()
print(jax.jit(jax.grad(loss, (0, 1)))(jnp.ones((8, 8)) / 3, jnp.ones((8, 8)) / 7))
"""


@pytest.mark.full
def test_a_second_start_compiles_nothing_and_computes_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a killed process left half-written is removed."""
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder, found = tmp_path / "megajax" / "compiled", []
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=TESTS, capture_output=True, text=True, check=True)
        assert not done.stderr
        found.append(done.stdout)
        assert folder.stat().st_mode & 0o777 == 0o700
        assert len(list(folder.glob("jit_loss*-cache"))) == 1
        assert not (folder / "half-cache").exists()
        (folder / "half-cache").touch()
    assert "cache_misses" in found[0] and "cache_hits" in found[1] and "cache_misses" not in found[1]
    assert len({text[text.index("(Array") :] for text in found}) == 1


@pytest.fixture
def changed(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """JAX's settings that a start changes, which they are not."""
    found: dict[str, Any] = {}
    monkeypatch.setattr(jax.config, "update", found.__setitem__)
    monkeypatch.setattr(warnings, "filterwarnings", lambda *_: None)
    return found


def keep(**named: Any) -> None:
    keep_compiled(dataclasses.replace(tiny_config(), **named))


def test_where_and_how_much(changed: dict[str, Any], tmp_path: Path) -> None:
    """The user's own setting of JAX stays, unless a flag says something else."""
    keep()
    assert not changed
    keep(compilation_cache="off")
    assert changed == {"jax_compilation_cache_dir": None}
    keep(compilation_cache=str(tmp_path / "a" / "b"), compilation_cache_size=0.5)
    assert changed["jax_compilation_cache_dir"] == str(tmp_path / "a" / "b") and (tmp_path / "a" / "b").is_dir()
    assert changed["jax_compilation_cache_max_size"] == 15 * 2**25  # a sixteenth is for what XLA measures on GPUs


def test_what_xla_measured_on_gpus_has_a_bound(changed: dict[str, Any], tmp_path: Path, monkeypatch) -> None:
    """The oldest go, at a start; programs for CPUs measure nothing."""
    tuned = tmp_path / "xla_gpu_per_fusion_autotune_cache_dir"
    tuned.mkdir()
    for age, name in enumerate(("new", "old", "oldest")):
        (tuned / name).write_bytes(bytes(2**15))
        os.utime(tuned / name, (1e9 - age, 1e9 - age))
    keep(compilation_cache=str(tmp_path), compilation_cache_size=2**-10)
    assert {each.name for each in tuned.iterdir()} == {"new", "old"}
    assert changed["jax_persistent_cache_enable_xla_caches"] == "none"
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    keep(compilation_cache=str(tmp_path))
    assert changed["jax_persistent_cache_enable_xla_caches"] == tuned.name and len(list(tuned.iterdir())) == 2


def test_a_folder_that_cannot_be_used_is_no_error(changed: dict[str, Any], tmp_path: Path, capsys, monkeypatch) -> None:
    """It is said of one that was named."""
    (tmp_path / "file").touch()
    keep(compilation_cache=str(tmp_path / "file"))
    said = capsys.readouterr().err
    assert said == f"warning: --compilation-cache {tmp_path / 'file'}: File exists; compiled programs are not cached\n"
    assert changed == {"jax_compilation_cache_dir": None}
    monkeypatch.setitem(jax.config.values, "jax_compilation_cache_dir", None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    keep()
    assert not capsys.readouterr().err and changed == {"jax_compilation_cache_dir": None}


def test_nothing_is_kept_where_jaxlib_does_not_take_it_back(changed, tmp_path: Path, capfd, monkeypatch) -> None:
    """On some CPUs it refuses its own programs (jax#38445), in C++."""
    refuse = lambda *_: os.write(2, b"E cpu_aot_loader.cc: Target machine feature +prefer-no-gather\n")  # noqa: E731
    monkeypatch.setattr(serialize_executable, "deserialize_and_load", refuse)
    keep(compilation_cache=str(tmp_path))
    assert changed == {"jax_compilation_cache_dir": None} and not capfd.readouterr().err
