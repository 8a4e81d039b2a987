"""A run takes a folder that is its own or empty; everything else stays as it is."""

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny import tiny_config

from megajax.config import Config, to_toml
from megajax.data.files import mark as mark_temporary
from megajax.data.tokenizers import train_tokenizer
from megajax.errors import UserError
from megajax.presets import load_preset, resolve
from megajax.runs.directory import claim, claimed, kept_config
from megajax.runs.formats import FORMAT
from megajax.runs.lock import RunLock
from megajax.runs.ownership import MARK, run_format

OLD_RUN = Path(__file__).parent / "written_by_format_1" / "run"


def entries(folder: Path) -> dict[str, bytes | None]:
    """Everything below a folder."""
    return {str(path): path.read_bytes() if path.is_file() else None for path in sorted(folder.rglob("*"))}


def old_config() -> Config:
    """The configuration of the run of format 1."""
    return resolve(load_preset(OLD_RUN / "config.toml"))


def write(folder: Path, **files: str) -> None:
    """Text files, `__` for a slash and `_dot_` for a dot in their names."""
    for name, text in files.items():
        file = folder / name.replace("__", "/").replace("_dot_", ".")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


def a_project(folder: Path) -> None:
    write(folder, data__corpus_dot_txt="mine", train_dot_py="mine")


def only_data(folder: Path) -> None:
    write(folder, data__corpus_dot_txt="mine")


def a_copied_configuration_beside_data(folder: Path) -> None:
    shutil.copy(OLD_RUN / "config.toml", folder)
    only_data(folder)


def another_program(folder: Path) -> None:
    """The names of a run, but none of its files."""
    only_data(folder)
    write(folder, config_dot_toml="[model]\nname = 'mine'\n", checkpoints__best_dot_pt="mine", loss_dot_png="mine")
    write(folder, metrics_dot_jsonl='{"epoch": 1}\n', run_dot_json='{"lr": 1}\n')


def an_old_run_with_other_data(folder: Path) -> None:
    shutil.copytree(OLD_RUN, folder, dirs_exist_ok=True)
    (folder / "data" / "report.json").write_text("{}")


def an_old_run_with_other_checkpoints(folder: Path) -> None:
    shutil.copytree(OLD_RUN, folder, dirs_exist_ok=True)
    write(folder, checkpoints__best_dot_pt="mine")


def an_old_run_with_other_figures(folder: Path) -> None:
    shutil.copytree(OLD_RUN, folder, dirs_exist_ok=True)
    (folder / "metrics.jsonl").write_text('{"epoch": 1}\n')


def a_mark_of_another_program(folder: Path) -> None:
    shutil.copytree(OLD_RUN, folder, dirs_exist_ok=True)
    (folder / MARK).write_text('{"format": 2}\n')


def only_a_tokenizer(folder: Path) -> None:
    train_tokenizer(["ab"], 258).save(folder / "data" / "tokenizer")


def half_a_corpus_and_more(folder: Path) -> None:
    write(folder, data_dot_partial__tokens_dot_bin_dot_partial="old", notes_dot_txt="mine")


def a_partial_folder(folder: Path) -> None:
    write(folder, data_dot_partial__notes_dot_txt="mine")


FOREIGN = [
    a_project,
    only_data,
    a_copied_configuration_beside_data,
    another_program,
    an_old_run_with_other_data,
    an_old_run_with_other_checkpoints,
    an_old_run_with_other_figures,
    a_mark_of_another_program,
    only_a_tokenizer,
    half_a_corpus_and_more,
    a_partial_folder,
]


@pytest.mark.parametrize("resume", ["auto", "never", "must"])
@pytest.mark.parametrize("make", FOREIGN)
def test_other_folders_are_refused(make: Callable[[Path], None], resume: str, tmp_path: Path) -> None:
    """In one line that names the flag; nothing is touched, whatever `--resume` is."""
    make(tmp_path)
    before = entries(tmp_path)
    config = dataclasses.replace(old_config(), resume=resume)  # type: ignore[arg-type]
    line = rf"--run-dir {tmp_path} is not empty and holds no run, but \S+; valid: an empty or new folder, or "
    with pytest.raises(UserError, match=line) as error, claimed(tmp_path, config, RunLock(tmp_path)):
        pytest.fail()
    assert "\n" not in str(error.value)
    assert entries(tmp_path) == before


def whole(folder: Path) -> None:
    """With what users leave there: a log, notes."""
    write(folder, train_dot_log="mine", notes__a_dot_txt="mine")


def imported(folder: Path) -> None:
    """As `convert import-hf` leaves it."""
    shutil.rmtree(folder / "data")
    train_tokenizer(["ab"], 258).save(folder / "data" / "tokenizer")
    (folder / "metrics.jsonl").unlink()
    (folder / "checkpoints" / "3").rename(folder / "checkpoints" / "0")


def imported_without_a_tokenizer(folder: Path) -> None:
    imported(folder)
    shutil.rmtree(folder / "data")


def killed_before_the_first_checkpoint(folder: Path) -> None:
    shutil.rmtree(folder / "checkpoints" / "3")
    (folder / "metrics.jsonl").write_text("")


def killed_while_saving(folder: Path) -> None:
    (folder / "checkpoints" / "6.orbax-checkpoint-tmp-1" / "state").mkdir(parents=True)
    (folder / "checkpoints" / "damaged-4-0").mkdir()
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')


def killed_before_the_configuration(folder: Path) -> None:
    (folder / "config.toml").rename(folder / "config.toml.partial")
    shutil.rmtree(folder / "checkpoints" / "3")
    (folder / "tensorboard").mkdir()


def killed_after_the_data(folder: Path) -> None:
    killed_before_the_configuration(folder)
    for name in ("config.toml.partial", "metrics.jsonl", "checkpoints", "tensorboard"):
        shutil.rmtree(folder / name) if (folder / name).is_dir() else (folder / name).unlink()


def killed_while_tokenizing(folder: Path) -> None:
    killed_after_the_data(folder)
    (folder / "data").rename(folder / "data.partial")
    (folder / "data.partial" / "report.json").unlink()
    (folder / "data.partial" / "tokens.bin").rename(folder / "data.partial" / "tokens.bin.partial")


def of_several_corpora(folder: Path) -> None:
    killed_after_the_data(folder)
    for name in ("source-0", "source-1", "validation-wiki"):
        shutil.copytree(OLD_RUN / "data", folder / "data" / name)
    for file in ("report.json", "tokens.bin", "tokens.idx"):
        (folder / "data" / file).unlink()
    (folder / "data" / "source-1").rename(folder / "data" / "source-1.partial")
    (folder / "data" / "source-1.partial" / "report.json").unlink()


OWN = [
    whole,
    imported,
    imported_without_a_tokenizer,
    killed_before_the_first_checkpoint,
    killed_while_saving,
    killed_before_the_configuration,
    killed_after_the_data,
    killed_while_tokenizing,
    of_several_corpora,
]


@pytest.mark.parametrize("make", OWN)
def test_runs_without_a_mark_are_known(make: Callable[[Path], None], tmp_path: Path) -> None:
    """Whatever state a version without marks left one in; it is marked, and nothing else changes."""
    run = shutil.copytree(OLD_RUN, tmp_path / "run")
    make(run)
    before = entries(run)
    assert run_format(run) == 1
    tokenizer = dataclasses.replace(old_config().tokenizer, path="given")
    claim(run, dataclasses.replace(old_config(), tokenizer=tokenizer))
    assert run_format(run) == FORMAT
    assert {name: content for name, content in entries(run).items() if Path(name).name != MARK} == before


def test_new_and_empty_folders_are_taken(tmp_path: Path) -> None:
    """And know their own again, however early the run was killed."""
    (tmp_path / "empty").mkdir()
    for run in (tmp_path / "empty", tmp_path / "some" / "new"):
        for _ in range(2):
            claim(run, old_config())
            assert [entry.name for entry in run.iterdir()] == [MARK]
            assert json.loads((run / MARK).read_text()) == {"program": "megajax", "format": FORMAT}
    half = tmp_path / "half" / f"{MARK}.partial"
    half.mkdir(parents=True)
    mark_temporary(half)
    claim(tmp_path / "half", old_config())
    assert [entry.name for entry in (tmp_path / "half").iterdir()] == [MARK]


def test_a_run_that_cannot_begin_leaves_nothing(tmp_path: Path) -> None:
    """Neither a mark nor the folders that were made; what was there stays, and so does what was begun."""
    (tmp_path / "empty").mkdir()
    for run in (tmp_path / "empty", tmp_path / "some" / "new"):
        with pytest.raises(UserError, match="no data"), claimed(run, old_config(), RunLock(run)):
            raise UserError("no data")
    assert [entry.name for entry in tmp_path.rglob("*")] == ["empty"]
    begun = tmp_path / "begun"
    with pytest.raises(UserError), claimed(begun, old_config(), RunLock(begun)):
        (begun / "data").mkdir()
        raise UserError("no data")
    assert (begun / MARK).is_file()


def test_a_configuration_with_values_missing(tmp_path: Path) -> None:
    """A preset in the place of config.toml has the defaults, the precision's too."""
    text = to_toml(tiny_config()).replace('precision = "fp32"\n', "")
    (tmp_path / "config.toml").write_text(text)
    assert "precision" not in text and kept_config(tmp_path, {}).precision == "fp32"
    assert kept_config(tmp_path, {"precision": "bf16"}).precision == "bf16"
    with pytest.raises(UserError, match=r"--precision fp64: .* holds a run in fp32; valid: fp32"):
        kept_config(tmp_path, {"precision": "fp64"})
