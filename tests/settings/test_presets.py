"""Presets: their names, mistakes in them, presets that are based on others, and the configuration that is printed."""

import dataclasses
import shutil
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny import user_error

from megajax.commands import train
from megajax.core.options import options
from megajax.settings.config import Config, lasting, to_toml
from megajax.settings.flags import parse, print_left_out, read_command
from megajax.settings.preset_files import preset_folders, preset_names
from megajax.settings.presets import load_preset, read_preset, read_run, resolve

PRESETS = Path(__file__).parents[2] / "configs"


def message(call: Any, *arguments: Any) -> str:
    """The one line of the `UserError` that the call raises."""
    said = user_error(call, *arguments)
    assert "valid" in said or "did you mean" in said
    return said


def write(file: Path, text: str) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


def test_bare_names_are_found_from_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_preset("demo") == load_preset(PRESETS / "demo.toml")
    assert {"demo", "gpt2-8.3b"} <= set(preset_names())
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "demo.toml").write_text("seed = 77")
    assert load_preset("demo") == {"seed": 77, "run_dir": "runs/demo"}


def test_the_resolved_config_is_a_preset_that_gives_the_identical_config(tmp_path: Path) -> None:
    awkward = {"sample.prompt": 'a "b"\n\t\\ é 語', "optimizer.epsilon": 1e-300, "model.init_std": 0.1 + 0.2, "seed": 9}
    config = resolve(load_preset("gpt2-8.3b"), awkward)
    assert resolve(load_preset(write(tmp_path / "gpt2-8.3b.toml", to_toml(config)))) == config


def test_values_of_a_preset(tmp_path: Path) -> None:
    """A boolean for a choice, a whole number for any; the run directory is named after the preset unless given."""
    preset = load_preset(write(tmp_path / "mine.toml", "[model]\nscan_layers = true\ndropout = 0"))
    assert preset["model.scan_layers"] == "true" and isinstance(preset["model.dropout"], float)
    assert preset["run_dir"] == "runs/mine"
    assert load_preset(write(tmp_path / "mine.toml", 'run_dir = "there"'))["run_dir"] == "there"
    assert resolve(load_preset("demo"), {"run_dir": "here"}).run_dir == "here"


@pytest.mark.parametrize(
    ("overrides", "layers"),
    [
        ({}, "3,2,2,1"),
        ({"mesh.pipe": 4, "mesh.data": 2}, "3,2,2,1"),
        ({"mesh.pipe": 2}, "auto"),
        ({"mesh.pipe": 2, "pipeline.layers": "5,3"}, "5,3"),
        ({"mesh.pipe": 2, "pipeline.schedule": "interleaved", "pipeline.chunks": 2}, "3,2,2,1"),  # still one for each
        ({"pipeline.schedule": "interleaved", "pipeline.chunks": 2}, "auto"),
        ({"mesh.pipe": 2, "pipeline.layers": "even"}, "even"),
    ],
)
def test_numbers_of_layers_are_for_a_number_of_stages(overrides: dict[str, Any], layers: str, tmp_path: Path) -> None:
    config = resolve(load_preset("demo"), {"mesh.pipe": 4, "pipeline.layers": "3,2,2,1"})
    theirs = load_preset(write(tmp_path / "config.toml", to_toml(config)))
    assert resolve(theirs, overrides).pipeline.layers == layers


def test_a_run_goes_on_by_its_own_configuration_and_a_copy_begins_another(tmp_path: Path) -> None:
    """Wherever the run directory lies now; what the copy names is somebody else's."""
    config = resolve(load_preset("demo"), {"run_dir": "theirs", "model.dropout": 0.25, "simulate_devices": 8})
    for name, beside in (("marked", "run.json"), ("before the mark", "checkpoints")):
        (tmp_path / name / beside).mkdir(parents=True)
        (tmp_path / name / "config.toml").write_text(to_toml(config))
        preset = load_preset(tmp_path / name / "config.toml")
        assert (preset["run_dir"], preset["model.dropout"]) == (str(tmp_path / name), 0.25)
        assert preset["simulate_devices"] == 8
        assert read_preset(tmp_path / name / "config.toml").left_out == {}
    for copy in ("config.toml", "mine.toml"):
        (tmp_path / copy).write_text(to_toml(config))
        preset = load_preset(tmp_path / copy)
        assert preset["run_dir"] == f"runs/{Path(copy).stem}" and "simulate_devices" not in preset
        assert read_preset(tmp_path / copy).left_out == {"run_dir": "theirs", "simulate_devices": 8}
    elsewhere = read_preset(tmp_path / "marked" / "config.toml", str(tmp_path / "new"))
    assert elsewhere.left_out == {"run_dir": "theirs", "simulate_devices": 8}
    assert not read_preset(tmp_path / "marked" / "config.toml", str(tmp_path / "marked" / ".." / "marked")).left_out
    based = read_preset(write(tmp_path / "mine.toml", 'base = "marked/config.toml"'))
    assert based.values["run_dir"] == "runs/mine" and "simulate_devices" not in based.values and not based.left_out
    assert based.values["model.dropout"] == 0.25
    own = read_preset(write(tmp_path / "mine.toml", 'run_dir = "there"'))
    assert own.values["run_dir"] == "there" and own.left_out == {}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[model]\nnum_layer = 3", "model.num_layer: unknown key; did you mean model.num_layers"),
        ("steps = 3", "steps: unknown key; did you mean train.steps?"),
        ("[checkpoint]\nzzz = 3", "checkpoint.zzz: unknown key; valid: checkpoint.every, "),
        ("[modle]\nnum_layers = 3", "modle = {'num_layers': 3}; valid tables: [model], [lora], [mesh]"),
        ("model = 3", "model = 3; valid tables: [model]"),
        ('[model]\nnum_layers = "8"', "model.num_layers = '8'; valid: a whole number"),
        ("[model]\nscan_layers = 1", "model.scan_layers = 1; valid: auto, true, false"),
        ("seed = 1\n[model\n", "not TOML"),
        ("seed = 1\n[model]\nnum_layers = = 2\n", "line 3"),
    ],
)
def test_a_mistake_in_a_preset_names_the_file_the_key_and_what_is_valid(text: str, words: str, tmp_path: Path) -> None:
    found = message(load_preset, write(tmp_path / "mine.toml", text))
    assert found.startswith(f"{tmp_path / 'mine.toml'}: ")
    assert words in found


def test_files_that_are_no_presets(tmp_path: Path) -> None:
    assert str(tmp_path / "no.toml") in message(load_preset, tmp_path / "no.toml")
    assert "config.toml" in message(load_preset, tmp_path)
    (tmp_path / "bytes.toml").write_bytes(b"seed = 1 # \xff")
    assert "byte 11 is not UTF-8" in message(load_preset, tmp_path / "bytes.toml")


def test_a_preset_says_only_what_differs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a name, and by a file beside the preset, over several of them; the nearest one wins."""
    monkeypatch.chdir(tmp_path)  # else the checkout's ./configs are found first
    medium = write(tmp_path / "medium.toml", 'base = "gpt2-355m"\nseed = 7\nrun_dir = "there"\n[train]\nsteps = 9000\n')
    large = write(tmp_path / "more" / "large.toml", 'base = "../medium.toml"\n[train]\nmicrobatch = 4\n')
    given = load_preset("gpt2-355m")
    assert load_preset(medium) == given | {"seed": 7, "run_dir": "there", "train.steps": 9000}
    found, of_one = read_preset(large), {"run_dir": "runs/large"}  # a directory is of one preset
    assert found.values == given | {"seed": 7, "train.steps": 9000, "train.microbatch": 4} | of_one
    assert [found.origins[key] for key in ("train.microbatch", "train.steps", "train.remat")] == [
        str(large),
        str(large.parent / "../medium.toml"),
        "preset gpt2-355m",
    ]


@pytest.mark.parametrize("text", ["sources = [{ path = 'a', weight = 1 }]", "path = 'b'"])
def test_one_corpus_takes_the_place_of_the_others_of_a_base(tmp_path: Path, text: str) -> None:
    base = "sources = [{ path = 'c', weight = 1 }]" if text == "path = 'b'" else "path = 'c'"
    write(tmp_path / "base.toml", f'base = "llama3-8b"\n[data]\n{base}\n')
    data = resolve(load_preset(write(tmp_path / "mine.toml", f'base = "base.toml"\n[data]\n{text}\n'))).data
    assert (data.path, [source.path for source in data.sources]) in (("", ["a"]), ("b", []))


def test_bases_that_are_not_there_or_go_in_a_circle(tmp_path: Path) -> None:
    mine = tmp_path / "mine.toml"
    for base, said in (
        ("'gpt2-355'", "no preset 'gpt2-355'; did you mean gpt2-355m"),
        ("'../no/no.toml'", "no such file"),
        ("'mine.toml'", f"forms a cycle: {mine} -> {mine}; valid"),
        ("'other.toml'", "bad.toml: base = 'gpt3': no preset 'gpt3'"),
        ("'round.toml'", f"forms a cycle: {mine} -> {tmp_path / 'round.toml'} -> {tmp_path / 'linked.toml'}; valid"),
        ("3", "base = 3; valid: the name of a preset"),
        ("['demo']", "base = ['demo']; valid: the name"),
        ("'a\\\\u0000.toml'", "NUL|null"),
    ):
        write(mine, f"base = {base}\n".replace("'a\\\\u0000.toml'", '"a\\u0000.toml"'))
        write(tmp_path / "other.toml", 'base = "bad.toml"')
        write(tmp_path / "bad.toml", 'base = "gpt3"')
        write(tmp_path / "round.toml", 'base = "linked.toml"')
        (tmp_path / "linked.toml").unlink(missing_ok=True)
        (tmp_path / "linked.toml").symlink_to(mine)
        found = message(load_preset, mine)
        assert any(words in found for words in said.split("|")), found
    write(mine, 'base = "demo"\n[model]\nnum_layer = 3\n')
    assert message(load_preset, mine).startswith(f"{mine}: model.num_layer: unknown key; did you mean")


def test_all_that_is_missing_is_said_at_once(tmp_path: Path) -> None:
    mine = write(tmp_path / "mine.toml", "[model]\nnum_layers = 2\nhidden_size = 8\nnum_heads = 2\n")
    found = message(resolve, load_preset(mine))
    flags = "--model.sequence-length, --model.vocab-size, --train.global-batch, --train.microbatch, "
    assert found.startswith(f"{flags}--optimizer.learning-rate and --train.steps missing; valid: these flags, ")
    assert "in the preset model.sequence_length, model.vocab_size, train.global_batch, " in found
    write(mine, f"base = 'demo'\n{mine.read_text()}")
    assert resolve(load_preset(mine)).model.num_layers == 2


def printed(capsys: pytest.CaptureFixture[str], *argv: object) -> str:
    train.main([*map(str, argv), "--print-config"])
    found = capsys.readouterr()
    assert found.err == ""
    return found.out


@pytest.mark.parametrize("name", ["gpt2-355m", "qwen3-0.6b", "finetune/squad2-336m", "finetune/instructions-demo"])
def test_the_printed_configuration_is_a_preset_that_gives_it(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--mesh.data", "2", "--sample.prompt", 'a "b"\n#é', "--optimizer.epsilon", "1e-300"]
    sources = ["--data.sources", "[{ path = 'a', weight = 2 }, { path = 'b#', weight = 1 }]"]
    flags += ["--data.train", "x y", "z"] if "/" in name else sources
    mine = write(tmp_path / "mine.toml", printed(capsys, name, *flags))
    expected = parse([name, *flags], "")
    assert resolve(load_preset(mine), {"run_dir": expected.run_dir}) == expected
    assert load_preset(mine)["run_dir"] == "runs/mine", "which no flag has named"
    tables = tomllib.loads(mine.read_text())
    assert sum(len(entry) if isinstance(entry, dict) else 1 for entry in tables.values()) == len(options(Config)) - 2


def test_a_run_s_configuration_is_printed_without_its_directory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And the run directory and the devices that a flag names are kept."""
    config = parse(["demo", "--run-dir", str(tmp_path / "run"), "--simulate-devices", "4"], "")
    write(tmp_path / "run" / "config.toml", to_toml(config))
    (tmp_path / "run" / "checkpoints").mkdir()
    text = printed(capsys, tmp_path / "run" / "config.toml", "--train.steps", 300)
    assert f"{tmp_path / 'run' / 'config.toml'}, of a run" in text
    tables = tomllib.loads(text)
    assert "run_dir" not in tables and "simulate_devices" not in tables and tables["train"]["steps"] == 300
    mine = write(tmp_path / "mine.toml", printed(capsys, "demo", "--run-dir", "here", "--simulate-devices", 8))
    assert {"run_dir": "here", "simulate_devices": 8}.items() <= load_preset(mine).items()


def test_a_run_s_configuration_does_not_set_what_belongs_to_one_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whoever wrote it: compiled programs are executed, a base and a tracker reach servers. A preset sets it."""
    of_start = {"compilation_cache": "/x", "track": "wandb", "profile": "3", "distributed.patience": 5.0}
    here = {"run_dir": "here"}
    plain, mine = resolve(load_preset("demo"), here), resolve(load_preset("demo"), of_start | here)
    text = f'base = "http://localhost:1/x.toml"\n{to_toml(mine)}'.replace("run_config = true\n", "")
    assert resolve(load_preset(write(tmp_path / "mine.toml", text.partition("\n")[2])), here) == mine
    run = write(tmp_path / "config.toml", text)
    assert resolve(read_run(tmp_path).values, here) == plain
    assert lasting(mine) == dataclasses.replace(plain, track="wandb")
    (tmp_path / "checkpoints").mkdir()
    given = read_command([str(run), "--track", "mlflow"], "", "")
    assert given.config().track == "mlflow"
    print_left_out(given, given.config())
    said = capsys.readouterr().out
    assert "compilation_cache = '/x', profile = '3', distributed.patience = 5.0, base = 'http://localhost:1/" in said


def test_overrides_from_python_may_be_numpy_s_or_paths() -> None:
    given = {"train.steps": np.int64(5), "optimizer.learning_rate": np.float32(0.5), "data.path": Path("a")}
    config = resolve(load_preset("demo"), given | {"sequence_parallel": np.bool_(False)})
    assert (config.train.steps, config.optimizer.learning_rate, config.data.path) == (5, 0.5, "a")
    assert "train.steps = " in message(resolve, load_preset("demo"), {"train.steps": np.arange(2)})


def test_another_task_replaces_what_follows_from_one(tmp_path: Path) -> None:
    """Though a run's configuration, with every value, says it."""
    mine = load_preset(write(tmp_path / "config.toml", to_toml(parse(["demo"], ""))))
    task = {"task.name": "preferences", "data.train": ["a"], "run_dir": "b"}
    config = resolve(mine, task)
    assert (config.data.reset_attention, config.train.loss, config.data.path) == (True, "preferences", "")
    again = load_preset(write(tmp_path / "config.toml", to_toml(config)))
    assert resolve(again, {"run_dir": "b", "task.name": "instructions"}).train.loss == "cross-entropy"
    assert "train.loss" in message(resolve, again, {"task.name": "instructions", "train.loss": "preferences"})


def test_a_preset_with_every_value_is_no_run_s_configuration(tmp_path: Path) -> None:
    """Unless megajax wrote it for a run: its `run_dir` counts, and so do its simulated devices for what is like it."""
    text = to_toml(parse(["demo", "--run-dir", "there", "--simulate-devices", "4"], ""))
    own = read_preset(write(tmp_path / "own.toml", text.replace("run_config = true\n", "")))
    assert own.values["run_dir"] == "there" and own.values["simulate_devices"] == 4 and not own.left_out
    copy = read_preset(write(tmp_path / "copy.toml", text))
    assert copy.left_out == {"run_dir": "there", "simulate_devices": 4}
    bad = write(tmp_path / "bad.toml", text.replace("run_config = true", "run_config = 1"))
    assert message(load_preset, bad).startswith(f"{bad}: run_config = 1; valid: ")
    for horizon in ("5", "{}", "{ warmup_steps = 1, decay_steps = -1 }"):
        bad = write(tmp_path / "bad.toml", f"run_horizon = {horizon}\n{text}")
        assert message(load_preset, bad).startswith(f"{bad}: run_horizon = ")


def test_presets_of_one_s_own_have_names_in_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside those of the package, which one of the same name there hides."""
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "configs" / "mine.toml", 'base = "demo"')
    write(tmp_path / "configs" / "late.toml", 'base = "mine"\nseed = 3')
    assert {"mine", "late", "demo"} <= set(preset_names()) and resolve(load_preset("late")).seed == 3
    shutil.copy(preset_folders()[1] / "llama-demo.toml", tmp_path / "configs" / "demo.toml")
    assert resolve(load_preset("late")).model.norm == "rmsnorm"
