"""What every test relies on: eight simulated devices, strict arrays, and where real data lies."""

import gc
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # the tests marked `gpu` are run with JAX_PLATFORMS=cuda,cpu

import hypothesis
import jax
import pytest

from megajax.core.private import has_fusion_emitters
from megajax.start.launch import avoid_known_faults, give_back_freed_memory

# Eight devices share a few cores here, so a collective may wait long for its slowest member: slow is not failed.
XLA_FLAGS = [
    "--xla_cpu_collective_call_warn_stuck_timeout_seconds=300",
    "--xla_cpu_collective_call_terminate_timeout_seconds=1200",
]
# Tests compile for far longer than they compute, so they take the machine code that is soonest there. The commands that
# they start inherit this. Version 0.12 has no more fusion emitters to turn off.
if os.environ["JAX_PLATFORMS"] == "cpu":
    XLA_FLAGS += ["--xla_backend_optimization_level=0"]
    XLA_FLAGS += ["--xla_cpu_parallel_codegen_split_count=1"]  # no threads to compile with: the workers keep all cores
    XLA_FLAGS += ["--xla_cpu_use_fusion_emitters=false"] if has_fusion_emitters() else []
os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *XLA_FLAGS])

avoid_known_faults()  # an import of JAX does not read the flags yet

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")

# An example's first run may compile for seconds.
hypothesis.settings.register_profile("default tests", deadline=None, max_examples=25)
hypothesis.settings.register_profile("full tests", deadline=None, max_examples=100)
hypothesis.settings.load_profile("default tests")

gc.set_threshold(100_000, 50, 100)  # tracing makes many objects that live long: collections took a quarter of its time


def pytest_configure(config: pytest.Config) -> None:
    """More examples where the long grids are selected too (`make test-full`)."""
    hypothesis.settings.load_profile("default tests" if "not full" in config.option.markexpr else "full tests")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Comparisons with other libraries are not even imported where they are not selected: torch takes 20 s."""
    compares = collection_path.name.startswith("test_peer_") or collection_path.name == "test_pytorch_baseline.py"
    return True if compares and "not peer" in config.option.markexpr else None


def pytest_collection_finish() -> None:
    """Collections of garbage, which a damaged checkpoint asks for, do not look at modules and tests: 0.3 s each."""
    gc.freeze()


@pytest.fixture(scope="session")
def workers_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all of pytest's workers share."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@pytest.fixture(scope="session", autouse=True)
def compiled(workers_folder: Path) -> None:
    """Keep what this session compiles, so that no program is compiled twice, whatever process runs it; not among the
    user's caches."""
    settings = {
        "jax_compilation_cache_dir": str(workers_folder / "compiled"),
        "jax_persistent_cache_min_compile_time_secs": 0.5,
    }
    for name, value in settings.items():
        os.environ[name.upper()] = str(value)  # of the commands that tests start
        jax.config.update(name, value)


@pytest.fixture(scope="session", autouse=True)
def bytecode(workers_folder: Path) -> None:
    """Where nothing is written beside modules, each process that tests start would compile 2,000 of them for seconds:
    the first one keeps them for all."""
    if sys.dont_write_bytecode:
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        os.environ["PYTHONPYCACHEPREFIX"] = str(workers_folder / "bytecode")


@pytest.fixture(scope="session")
def test_data() -> Path:
    """Folder of real corpora and tokenizers; tests that use it are skipped where it does not exist."""
    folder = Path(os.environ.get("MEGAJAX_TEST_DATA") or Path(__file__).parents[2] / "shared" / "data")
    if not folder.is_dir():
        pytest.skip(f"no test data at {folder} (MEGAJAX_TEST_DATA names another folder)")
    return folder


@pytest.fixture(scope="session")
def gpt2_tokenizer(test_data: Path) -> Any:
    """The tokenizer of GPT-2."""
    from megajax.data.text.tokenizers import load_tokenizer

    return load_tokenizer(test_data / "gpt2-bpe")


@pytest.fixture
def no_names_stay() -> Iterator[None]:
    """What a test registers is forgotten after it."""
    from megajax.core.models.registry import FAMILIES, GATED
    from megajax.core.pipeline.schedule import SCHEDULES
    from megajax.settings import registration

    tables, gated = [*registration._TABLES.values(), FAMILIES, SCHEDULES], [*GATED]
    before, names = [dict(table) for table in tables], set(registration._registered)
    yield
    for table, was in zip(tables, before, strict=True):
        table.clear()
        table.update(was)
    GATED[:] = gated
    registration._registered.clear()
    registration._registered.update(names)


_room = 4 * 2**30  # bytes that a worker may have


@pytest.fixture(autouse=True)
def room_for_programs() -> Iterator[None]:
    """What was compiled is forgotten where it has grown large: the whole grid has thousands of programs. Not again
    before 2 GiB more: not all that is free is given back."""
    global _room
    yield
    if _resident() > _room:
        jax.clear_caches()
        gc.unfreeze()
        gc.collect()
        gc.freeze()
        give_back_freed_memory()
        _room = max(_room, _resident() + 2 * 2**30)


def _resident() -> int:
    """Bytes of this process; 0 where nobody says it."""
    pages = Path("/proc/self/statm")
    return int(pages.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if pages.exists() else 0


@pytest.fixture
def no_waiting() -> Iterator[None]:
    """Who opens a named pipe to read would wait for ever."""
    signal.alarm(300)
    yield
    signal.alarm(0)


@pytest.fixture
def quick_collections() -> None:
    """Python's collections of garbage look only at what is made from now on, for tests that have many of them."""
    gc.freeze()


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """An S3 server with a bucket called `bucket`, which this process and those that it starts find."""
    from s3 import S3Server

    server = S3Server()
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    yield server
    server.close()
