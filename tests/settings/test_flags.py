"""The command line: every field a flag, and errors of one line."""

import re
from pathlib import Path

import pytest
import tomli_w
from tiny import user_error

from megajax.core.errors import UserError
from megajax.core.options import options
from megajax.data.tasks.sources import task_files
from megajax.data.text.inputs import find_inputs
from megajax.settings.checks import check_given
from megajax.settings.config import Config
from megajax.settings.flags import COMMON, Parser, parse, parsed
from megajax.settings.other_names import OURS, REMOVED, nearest
from megajax.settings.presets import load_preset, resolve


def fails(*argv: str) -> str:
    return user_error(parse, argv, "Train.")


FLAGS = {  # of every kind of value; that every field has one is seen in --help
    "model.num_layers": "16",
    "optimizer.learning_rate": "1e-3",
    "data.path": "x",
    "precision": "bf16",
    "optimizer.zero": "3",
    "model.scan_layers": "true",
    "pipeline.layers": "auto",
    "profile": "10:13",
    "data.sources": "[{ path = 'a', weight = 2 }]",
    "data.validation": "[{ path = 'a', name = 'b' }]",
}


@pytest.mark.parametrize(("key", "text"), FLAGS.items())
def test_a_field_is_a_flag(key: str, text: str) -> None:
    option = options(Config)[key]
    expected = resolve(load_preset("demo"), {key: parsed(option, text)})
    assert expected != resolve(load_preset("demo"))
    assert parse(["demo", option.flag, text], "Train.") == expected
    assert parse(["demo", f"{option.flag}={text}"], "Train.") == expected


def test_a_list_is_separated_by_spaces(tmp_path: Path) -> None:
    """What is separated otherwise is told how, if its parts exist. A flag given again replaces the list."""
    assert parse(["finetune/mnli-demo", "--data.train", "a", "b,c"], "").data.train == ("a", "b,c")
    assert parse(["finetune/mnli-demo", "--data.train", "a", "b", "--data.train", "d"], "").data.train == ("d",)
    files = [str(tmp_path / name) for name in "ab"]
    for file in files:
        Path(file).touch()
    one, told = ",".join(files), f" (separated by spaces: {' '.join(files)})"
    assert user_error(task_files, [one], "mnli", "--data.train").endswith(told)
    assert user_error(find_inputs, one, "INPUT").endswith(told)
    assert "(separated" not in user_error(find_inputs, one, "--data.path")
    assert "(separated" not in user_error(find_inputs, f"{one}c", "INPUT")
    named = ",".join(f"{name}={file}" for name, file in zip(("lambada", "wikitext103"), files, strict=True))
    config = parse(["demo", "--data.path", "x", "--evaluate", named], "")
    assert user_error(check_given, config).endswith(f" (separated by spaces: {named.replace(',', ' ')})")


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("--lr", "--optimizer.learning-rate"),
        ("--tp", "--mesh.tensor"),
        ("--tensor_model_parallel_size", "--mesh.tensor"),
        ("--bf16", "--precision bf16"),
        ("--seq-length", "--model.sequence-length"),
        ("--gradient-accumulation-steps", "--train.global-batch / (--train.microbatch x --mesh.data), which follows"),
        ("--config", "PRESET, the first argument"),
        ("--mesh.tp", "--mesh.tensor"),
    ],
)
def test_other_systems_names(theirs: str, ours: str) -> None:
    assert fails("demo", theirs, "1").startswith(f"{theirs}: unknown flag; megajax calls it {ours}")


def test_other_systems_names_are_answered_with_options() -> None:
    """All of them; in presets and from Python by the key."""
    table = options(Config)
    flags = {option.flag: key for key, option in table.items()}
    for name, text in OURS.items():
        flag = re.split("[ ,]", text)[0]
        assert nearest(name, [*flags, "--devices"], "") == f"megajax calls it {text}"
        if flag in flags:  # PRESET, and an option of `plan`, have no key in a file
            assert nearest(name, table, "") == f"megajax calls it {text.replace(flag, flags[flag], 1)}"
    with pytest.raises(UserError, match=r"^--model.n-layer: unknown key; megajax calls it model.num_layers$"):
        resolve(load_preset("demo"), {"model.n_layer": 3})


@pytest.mark.parametrize("key", REMOVED)
def test_removed_options(key: str, tmp_path: Path) -> None:
    """A stored run or preset with what it is fixed to goes on; anything else is refused by name."""
    fixed, instead, section, name = REMOVED[key].fixed, REMOVED[key].instead, *key.rpartition(".")[::2]
    is_now = f"megajax removed it, and it is always {fixed!r}" + f"; valid: {instead}" * bool(instead)
    flag = "--" + key.replace("_", "-")
    assert key not in options(Config) and fails("demo", flag, "3") == f"{flag}: unknown flag; {is_now}"
    preset = tmp_path / "mine.toml"
    for value in (fixed, *REMOVED[key].same):
        preset.write_text('base = "demo"\n' + tomli_w.dumps({section: {name: value}} if section else {name: value}))
        assert resolve(load_preset(preset)) == resolve(load_preset("demo") | {"run_dir": "runs/mine"})
    with pytest.raises(UserError, match=f"^{re.escape(f'{preset}: {key}: unknown key; {is_now}')}"):
        preset.write_text(preset.read_text().rpartition("=")[0] + "= 77\n")
        load_preset(preset)


def test_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """`~` is the home folder in every path, also after a `=`, and in no other text."""
    monkeypatch.setenv("HOME", "/home/me")
    words = ["--run-dir=~/x", "--init=~/y", "--data.path=~", "--tokenizer.path=~/t", "--sample.prompt=~/p"]
    words += ["--data.validation", "[{ path = '~/v', name = 'v' }]"]
    config = parse(["demo", *words], "Train.")
    paths = config.run_dir, config.init, config.data.path, config.tokenizer.path
    assert paths == ("/home/me/x", "/home/me/y", "/home/me", "/home/me/t")
    assert config.sample.prompt == "~/p"
    assert (config.data.validation[0].path, config.data.validation[0].name) == ("/home/me/v", "v")


def test_one_corpus_or_several() -> None:
    several = "[{ path = 'a', weight = 2 }, { path = 'b', weight = 0.5 }]"
    data = parse(["demo", "--data.sources", several], "Train.").data
    assert [(source.path, source.weight) for source in data.sources] == [("a", 2.0), ("b", 0.5)] and data.path == ""
    again = resolve({**load_preset("demo"), "data.path": "", "data.sources": data.sources}, {"data.path": "c"}).data
    assert again.path == "c" and again.sources == ()
    both = ("--data.sources", several, "--data.path", "a")
    assert "--data.path and --data.sources are both given" in fails("demo", *both)
    for wrong in ("x", "3", "[{ path = 'a' }]", "[{ path = 'a', weight = '1' }]", "[{path = 'a', weight = 1, k = 2}]"):
        assert "valid: TOML as in [{ path = …, weight = … }, …]" in fails("demo", "--data.sources", wrong)
    assert "weight 0; valid: a path and a weight above 0" in fails("demo", "--data.sources", "[{path='a', weight=0}]")
    for wrong in ("[{name='a b', path='c'}]", "[{name='a', path='c'}, {name='a', path='d'}]", "[{name='a', path=''}]"):
        assert "valid: a path and a name of its own" in fails("demo", "--data.validation", wrong)


def test_gradients_are_summed_in_fp32_or_as_computed() -> None:
    flags = ["--precision", "bf16", "--optimizer.gradient-dtype"]
    assert parse(["demo", *flags, "bf16"], "Train.").optimizer.gradient_dtype == "bf16"
    assert "fp32, or --precision fp16" in fails("demo", *flags, "fp16")


def test_flags_in_any_place_and_the_last_one_wins() -> None:
    config = parse(["--mesh.data", "2", "demo", "--mesh.data=4", "--optimizer.learning-rate", "1e-4"], "Train.")
    assert (config.mesh.data, config.optimizer.learning_rate) == (4, 1e-4)
    flags = "--distributed.coordinator h:1 --distributed.num-processes 2 --distributed.process-id 1"
    assert parse(["demo", *flags.split()], "Train.").distributed.process_id == 1
    assert parse(["demo", "--distributed.process-id", "-1"], "Train.") == resolve(load_preset("demo"))
    assert parse(["demo", "--sample.prompt", ""], "Train.").sample.prompt == ""
    assert parse(["demo", "--deterministic"], "Train.").deterministic
    assert not parse(["demo", "--deterministic", "--no-deterministic"], "Train.").deterministic


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("", "PRESET missing; valid: a TOML file, or one of bert-"),
        ("--mesh.data 2", "PRESET missing"),
        ("demo --mesh.dat 2", "--mesh.dat: unknown flag; did you mean --mesh.data?"),
        ("demo --rundir x", "--rundir: unknown flag; did you mean --run-dir?"),
        ("demo -x", "-x: unknown flag; valid: the flags in --help"),
        ("demo other", "'other' is an unexpected argument; valid: train.py PRESET"),
        ("demo --model.dropout x", "--model.dropout 'x'; valid: a finite number"),
    ],
)
def test_one_line_names_the_flag_and_what_is_valid(line: str, words: str) -> None:
    assert fails(*line.split()).startswith(words)


def test_help_shows_the_values_of_the_preset_and_its_bases(tmp_path: Path, capsys) -> None:
    mine = tmp_path / "mine.toml"
    mine.write_text("base = 'gpt2-8.3b'\n[train]\nsteps = 4711\n")
    values = (("demo", "[def read(]"), (str(mine), "[3072]"), (str(mine), "[4711]"), ("", "[set by the preset]"))
    for argv, shown in ((f"{preset} --help".split(), shown) for preset, shown in values):
        with pytest.raises(SystemExit) as caught:
            parse(argv, "Train.")
        assert caught.value.code == 0
        text = capsys.readouterr().out
        assert shown in " ".join(text.replace('"', "").split())
        assert all(option.flag in text for option in options(Config).values())
        second, common, further = text.splitlines()[1], text.index("most often:"), text.index("The run:")
        assert "--help SECTION shows one section: model, lora, mesh" in second
        assert common < text.index("  --mesh.data") < further < text.index("  --seeds") and len(COMMON.split()) == 30


def test_another_command_takes_only_some_of_the_flags(tmp_path: Path) -> None:
    parser = Parser("Evaluate.", "eval.py TASK [--flag value ...]")
    parser.add_argument("task", choices=["perplexity"])
    parser.add_argument("--checkpoint", required=True, metavar="RUN", help="a run directory")
    parser.add_config_flags("mesh", "simulate_devices")
    args = parser.parse_args(["perplexity", "--checkpoint", str(tmp_path), "--mesh.data", "2", "--simulate-devices=2"])
    assert (args.task, args.checkpoint) == ("perplexity", str(tmp_path))
    assert parser.overrides(args) == {"mesh.data": 2, "simulate_devices": 2}
    with pytest.raises(UserError, match=r"--train.steps: unknown flag"):
        parser.parse_args(["perplexity", "--checkpoint", "x", "--train.steps", "3"])
    with pytest.raises(UserError, match=r"--checkpoint missing"):
        parser.parse_args(["perplexity"])
