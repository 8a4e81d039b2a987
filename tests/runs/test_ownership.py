"""A run takes a folder that is its own or empty; everything else stays as it is."""

import dataclasses
import json
from pathlib import Path

import pytest
from tiny import tiny_config

from megajax.config import to_toml
from megajax.data.files import mark as mark_temporary
from megajax.data.files import write_atomically
from megajax.data.tokenizers import train_tokenizer
from megajax.errors import UserError
from megajax.runs.directory import check_claim, claimed, stored_config
from megajax.runs.lock import RunLock
from megajax.runs.ownership import FORMAT, MARK, marked_format
from megajax.runs.trained import check_run

FOREIGN = {  # files of a folder that is no run, by name
    "a project": {"data/corpus.txt": "mine", "train.py": "mine"},
    "the names of a run": {
        **{"data/report.json": "{}", "checkpoints/3/state/a": "mine", "loss.png": "mine"},
        **{"config.toml": to_toml(tiny_config()), "metrics.jsonl": '{"step": 1, "loss": 2.5}\n'},
    },
    "a mark of another program": {"config.toml": to_toml(tiny_config()), MARK: '{"format": 2}\n'},
    "a mark that is damaged": {"config.toml": to_toml(tiny_config()), MARK: '{"program": "megajax", "form'},
    "half a corpus": {"data.partial/notes.txt": "mine"},
    "a tokenizer": {f"data/tokenizer/{name}": text for name, text in train_tokenizer(["ab"], 258).files.items()},
}


def entries(folder: Path) -> dict[str, bytes | None]:
    """Everything below a folder."""
    return {str(path): path.read_bytes() if path.is_file() else None for path in sorted(folder.rglob("*"))}


@pytest.mark.parametrize("resume", ["auto", "never", "must"])
@pytest.mark.parametrize("folder", FOREIGN)
def test_other_folders_are_refused(folder: str, resume: str, tmp_path: Path) -> None:
    """In one line that names the flag; nothing is touched, whatever `--resume` is."""
    for name, text in FOREIGN[folder].items():
        write_atomically(tmp_path / name, text)
    before = entries(tmp_path)
    config = dataclasses.replace(tiny_config(), resume=resume)  # type: ignore[arg-type]
    line = rf"--run-dir {tmp_path} is not empty and holds no run, but \S+; valid: an empty or new folder, or "
    with pytest.raises(UserError, match=line) as error, claimed(tmp_path, config, RunLock(tmp_path)):
        pytest.fail()
    assert "\n" not in str(error.value)
    assert entries(tmp_path) == before


def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    (tmp_path / MARK).write_text(json.dumps({"program": "megajax", "format": FORMAT + 1}))
    (tmp_path / "config.toml").write_text(to_toml(tiny_config()))
    with pytest.raises(UserError, match=rf"^--run-dir \S+ was written by a newer .* format {FORMAT + 1}; valid: "):
        check_claim(tmp_path, tiny_config())
    with pytest.raises(UserError, match=r"^--checkpoint \S+ was written by a newer version"):
        check_run(tmp_path)


def take(run: Path) -> None:
    lock = RunLock(run)
    with claimed(run, tiny_config(), lock):
        lock.release()


def test_new_and_empty_folders_are_taken(tmp_path: Path) -> None:
    """And know their own again, however early the run was killed, with what users leave there."""
    (tmp_path / "empty").mkdir()
    for run in (tmp_path / "empty", tmp_path / "some" / "new"):
        for _ in range(2):
            take(run)
            assert [entry.name for entry in run.iterdir()] == [MARK]
            assert json.loads((run / MARK).read_text()) == {"program": "megajax", "format": FORMAT}
    (tmp_path / "empty" / "train.log").write_text("mine")
    take(tmp_path / "empty")
    half = tmp_path / "half" / f"{MARK}.partial"
    half.mkdir(parents=True)
    mark_temporary(half)
    take(tmp_path / "half")
    assert [entry.name for entry in (tmp_path / "half").iterdir()] == [MARK]
    assert marked_format(tmp_path / "half") == FORMAT


def test_a_run_that_cannot_begin_leaves_nothing(tmp_path: Path) -> None:
    """Neither a mark nor the folders that were made; what was there stays, and so does what was begun."""
    (tmp_path / "empty").mkdir()
    for run in (tmp_path / "empty", tmp_path / "some" / "new"):
        with pytest.raises(UserError, match="no data"), claimed(run, tiny_config(), RunLock(run)):
            raise UserError("no data")
    assert [entry.name for entry in tmp_path.rglob("*")] == ["empty"]
    begun = tmp_path / "begun"
    with pytest.raises(UserError), claimed(begun, tiny_config(), RunLock(begun)):
        (begun / "data").mkdir()
        raise UserError("no data")
    assert (begun / MARK).is_file()


def test_a_configuration_with_values_missing(tmp_path: Path) -> None:
    """A preset in the place of config.toml has the defaults, the precision's too."""
    text = to_toml(tiny_config()).replace('precision = "fp32"\n', "")
    (tmp_path / "config.toml").write_text(text)
    assert "precision" not in text and stored_config(tmp_path, {}).precision == "fp32"
    assert stored_config(tmp_path, {"precision": "bf16"}).precision == "bf16"
    with pytest.raises(UserError, match=r"--precision fp64: .* holds a run in fp32; valid: fp32"):
        stored_config(tmp_path, {"precision": "fp64"})
