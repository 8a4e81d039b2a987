"""Files on remote stores, by fsspec's own in memory; and what refuses URLs."""

import gzip
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from megajax.commands import train
from megajax.core.errors import UserError
from megajax.data.text.inputs import check_input
from megajax.data.text.records import TextDocuments
from megajax.host import remote
from megajax.host.paths import check_path, check_place, scheme
from megajax.settings.flags import read_command
from megajax.settings.origins import printed
from megajax.settings.presets import load_preset

FILES = {
    "one.jsonl": b'{"text": "first"}\n{"text": "second"}\n',
    "sub/three.txt": b"third",
    "two.txt.gz": gzip.compress(b"fourth"),
    ".hidden/no.txt": b"no",
    ".hidden.txt": b"no",
}


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(remote, "SCHEMES", (*remote.SCHEMES, "memory"))
    store = fsspec.filesystem("memory")
    for name, content in FILES.items():
        store.pipe(f"/bucket/texts/{name}", content)
    yield "memory://bucket"
    store.rm("/bucket", recursive=True)


def test_a_folder_and_files(bucket: str) -> None:
    assert list(TextDocuments(f"{bucket}/texts")) == ["first", "second", "third", "fourth"]
    assert list(TextDocuments(f"{bucket}/texts/one.jsonl")) == ["first", "second"]
    assert list(TextDocuments(f"{bucket}/texts/two.txt.gz")) == ["fourth"]
    files, is_file = remote.find(f"{bucket}/texts", "INPUT")
    assert not is_file and [file.size for file in files] == [len(FILES[n]) for n in list(FILES)[:3]]
    assert files[0].url == "memory:///bucket/texts/one.jsonl"


def test_parquet(bucket: str, tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"text": ["a row", "another"]}), tmp_path / "rows.parquet")
    fsspec.filesystem("memory").pipe("/bucket/rows.parquet", (tmp_path / "rows.parquet").read_bytes())
    assert list(TextDocuments(f"{bucket}/rows.parquet")) == ["a row", "another"]


def test_one_line_for_each_mistake(bucket: str) -> None:
    fsspec.filesystem("memory").pipe({"/bucket/web.idx": b"", "/bucket/broken.gz": b"no gzip"})
    for url, problem in {
        f"{bucket}/none": "does not exist; valid: ",
        f"{bucket}/web": "mapped into memory, so it must be on a file system; valid: a local copy",
        f"{bucket}/web.bin": "mapped into memory, so it must be on a file system; valid: a local copy",
        f"{bucket}/broken.gz": "truncated or damaged: .*; valid: ",
        **{
            f"{name}://bucket": f"{name}:// is not supported; valid: http://, https://, gs://, s3://, hf://, file://"
            for name in ("nowhere", "ssh", "gist", "box", "zip", "SFTP")
        },
    }.items():
        with pytest.raises(UserError, match=problem):
            list(TextDocuments(url))


@pytest.mark.parametrize(("url", "extra", "package"), [("gs://b/x", "gcs", "gcsfs"), ("s3://b/x", "s3", "s3fs")])
def test_a_missing_package_names_its_extra(url: str, extra: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)  # as if it were not installed
    monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, url.partition(":")[0], raising=False)
    with pytest.raises(UserError, match=rf"--data.path {url}: .*; valid: pip install 'megajax\[{extra}\]'"):
        check_input(url, "--data.path")


@pytest.mark.parametrize("wrapped", [FileNotFoundError, OSError])
def test_a_host_that_is_not_known_is_one_short_line(bucket: str, wrapped: type[OSError]) -> None:
    """However its library wraps that; a stack of pools and retries says no more."""

    def fail(*_: object, **__: object) -> None:
        try:
            raise OSError(
                "HTTPSConnectionPool(host='x', port=443): Max retries exceeded (Caused by NameResolutionError(…))"
            )
        except OSError as error:
            raise wrapped("x") from error

    words = r"^INPUT memory://bucket/x: cannot be read: the host name cannot be resolved; valid: a readable URL$"
    with pytest.MonkeyPatch.context() as patch, pytest.raises(UserError, match=words):
        patch.setattr("fsspec.implementations.memory.MemoryFileSystem.info", fail)
        remote.find(f"{bucket}/x", "INPUT")


def test_a_store_that_fails_while_it_is_read(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    documents = TextDocuments(f"{bucket}/texts/one.jsonl")

    def fail(*_: object) -> None:
        raise RuntimeError("connection\nlost")

    monkeypatch.setattr("fsspec.implementations.memory.MemoryFileSystem.open", fail)
    with pytest.raises(UserError, match=r"cannot read memory:///bucket/texts/one.jsonl: connection lost; valid: "):
        list(documents)


def test_a_preset(bucket: str) -> None:
    text = b'base = "demo"\n[train]\nsteps = 7\n'
    fsspec.filesystem("memory").pipe("/bucket/mine.toml", text)
    found = load_preset(f"{bucket}/mine.toml")
    assert (found["train.steps"], found["run_dir"]) == (7, "runs/mine")
    with pytest.raises(UserError, match=r"PRESET memory://bucket/none.toml does not exist; valid: a file"):
        load_preset(f"{bucket}/none.toml")


def test_a_preset_is_read_once_and_into_memory(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is left behind however the command ends; its messages name the URL."""
    store, opened = fsspec.filesystem("memory"), []
    store.pipe("/bucket/mine.toml", b'base = "demo"\n')
    store.pipe("/bucket/based.toml", b'base = "none.toml"\n')
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    system, given = type(store), type(store).open
    monkeypatch.setattr(system, "open", lambda self, path, *more: opened.append(path) or given(self, path, *more))
    command = read_command([f"{bucket}/mine.toml", "--seed", "3"], "", "train.py")
    assert (command.config().seed, opened) == (3, ["/bucket/mine.toml"])
    assert f"The configuration of {bucket}/mine.toml, with" in printed(command.config(), command.preset, {})
    with pytest.raises(SystemExit):
        read_command([f"{bucket}/mine.toml", "--help"], "", "train.py")
    assert "CPU devices to simulate" in capsys.readouterr().out and opened == ["/bucket/mine.toml"] * 2
    with pytest.raises(UserError, match=rf"{bucket}/based.toml: base = .*: PRESET {bucket}/none.toml does not exist; "):
        read_command([f"{bucket}/based.toml"], "", "train.py")
    assert not list(tmp_path.iterdir())


def test_elsewhere_urls_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing of their name is made."""
    monkeypatch.chdir(tmp_path)
    for path in ("gs://bucket/run", "s3://bucket/run", Path("gs://bucket/run"), "hf://some/thing"):
        for check in (check_path, check_place):
            with pytest.raises(UserError, match=r"--run-dir \S+: \w+:// is only for .*; valid: a path on a file"):
                check(path, "--run-dir")
    assert not scheme("a/path") and not scheme("C:") and scheme("S3://b") == "s3"
    with pytest.raises(UserError, match="--run-dir gs://bucket/run"):
        train.main(["demo", "--run-dir", "gs://bucket/run"])
    assert not list(tmp_path.iterdir())


def test_presets_that_are_based_on_remote_ones(bucket: str, tmp_path: Path) -> None:
    """By a URL, and by a file beside a remote preset; a circle is one line."""
    store = fsspec.filesystem("memory")
    store.pipe("/bucket/presets/base.toml", b'base = "demo"\nseed = 3\n')
    store.pipe("/bucket/presets/more/mine.toml", b'base = "../base.toml"\n[train]\nsteps = 7\n')
    mine = tmp_path / "own.toml"
    mine.write_text(f'base = "{bucket}/presets/more/mine.toml"\n[model]\nnum_layers = 2\n')
    found = load_preset(str(mine))
    assert (found["seed"], found["train.steps"], found["model.num_layers"]) == (3, 7, 2)
    assert load_preset(f"{bucket}/presets/more/mine.toml")["run_dir"] == "runs/mine"
    store.pipe("/bucket/presets/base.toml", b'base = "more/mine.toml"')
    places = [f"{bucket}/presets/{name}" for name in ("base.toml", "more/mine.toml", "base.toml")]
    with pytest.raises(UserError, match=f"forms a cycle: {' -> '.join(places)}; valid: "):
        load_preset(places[0])
