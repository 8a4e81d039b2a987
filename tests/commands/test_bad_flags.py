"""Flags and presets with a mistake in them: each is answered at once, by one line, before anything is allocated."""

import os
from pathlib import Path

import pytest
from mistakes import assert_says, mistake, one_line, redundant, train_mistake
from processes import Commands, Run, contents

from megajax.program import memory


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--mesh.data 3", [r"--mesh\.data 3", "devices", "valid"]),
        redundant("--mesh.pipe 2 --simulate-devices 4", [r"--mesh\.pipe 2", r"\b4\b", "valid"]),
        ("--mesh.tensor 8 --simulate-devices 8", [r"--mesh\.tensor 8", r"--model\.num-heads 4", "valid: 1, 2, 4"]),
        (
            "--mesh.tensor 2 --simulate-devices 2 --model.vocab-size 301 --model.vocab-multiple 1",
            [r"--mesh\.tensor 2", "vocabulary", "301", "valid"],
        ),
        redundant(
            "--mesh.tensor 2 --simulate-devices 2 --model.num-heads 1 --model.hidden-size 33",
            [r"--mesh\.tensor 2", "num-heads 1|MLP", "valid: 1"],
        ),
        ("--model.hidden-size 33", [r"--model\.hidden-size 33", r"--model\.num-heads 4", "valid"]),
        (
            "--mesh.data 2 --simulate-devices 2 --train.global-batch 9",
            [r"--train\.global-batch 9", r"--mesh\.data 2", r"--train\.microbatch 1", "multiple of 2"],
        ),
        redundant("--train.microbatch 3", [r"--train\.global-batch 8", r"--train\.microbatch 3", "multiple of 3"]),
        ("--mesh.dat 2", [r"--mesh\.dat\b", r"--mesh\.data"]),
        ("--nonsense", ["--nonsense"]),
        ("--train.steps", [r"--train\.steps", "value", "whole number"]),
        ("--train.steps ten", [r"--train\.steps", "ten", "whole number"]),
        ("--train.steps 0", [r"--train\.steps 0", "1 to 1000000000"]),
        ("--precision fp8", ["--precision", "fp32", "bf16", "fp64"]),
        ("--resume must", ["--resume", "checkpoint", "valid"]),
        ("--data.path=", [r"--data\.path", "folder|file"]),
        redundant("--tokenizer.path /does/not/exist", ["/does/not/exist"]),
        redundant("--model.vocab-size 256", [r"--model\.vocab-size 256", "257"]),
    ],
)
def test_flags(commands: Commands, arguments: str, words: list[str], tmp_path: Path) -> None:
    """Sizes that do not fit each other or the devices, flags that do not exist or have wrong values."""
    assert_says(train_mistake(commands, tmp_path / "run", *arguments.split()), *words)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("num_heads", "number_heads", [r"bad\.toml", "number_heads", "num_heads"]),
        ("[checkpoint]", "[checkpoints]", [r"bad\.toml", "checkpoints", r"\[checkpoint\]"]),
        ("steps = 20", 'steps = "20"', [r"bad\.toml", r"train\.steps", "'20'", "whole number"]),
        ("steps = 20", "steps = 20.5", [r"bad\.toml", r"train\.steps", r"20\.5", "whole number"]),
        ("[model]", "[model", [r"bad\.toml", "TOML", "line 1"]),
        ("num_layers = 3", "", ["num_layers|num-layers"]),
    ],
)
def test_presets(commands: Commands, old: str, new: str, words: list[str], tmp_path: Path) -> None:
    """An unknown key or table, a wrong type, malformed TOML, a value given nowhere."""
    preset = tmp_path / "bad.toml"
    preset.write_text(commands.preset.read_text().replace(old, new, 1))
    assert_says(train_mistake(commands, tmp_path / "run", preset=preset), *words)


def test_presets_that_are_not_there(commands: Commands, tmp_path: Path) -> None:
    """A bare name and a file; the message lists the names there are. And no preset at all."""
    assert_says(train_mistake(commands, tmp_path / "run", preset="no-such"), "no-such", "demo")
    assert_says(train_mistake(commands, tmp_path / "run", preset=tmp_path / "no.toml"), r"no\.toml", "demo")
    assert_says(mistake(commands, "train.py"), "PRESET", "demo")


DIGITS = "9" * 4400
LARGE = [  # flag, value, what is valid
    ("--model.hidden-size", "1000000000000", "1 to 1000000"),
    ("--model.num-layers", "100000000", "1 to 10000"),
    ("--model.vocab-size", "9999999999999", "1 to 100000000"),
    ("--train.steps", "99999999999999999999", "0 to 1000000000"),
    ("--optimizer.decay-steps", "99999999999999999999", "0 to 1000000000"),
    ("--train.global-batch", "1000000000000", "1 to 1000000"),
    ("--simulate-devices", "100000", "0 to 1024"),
    ("--mesh.data", "0", "1 to 100000"),
    ("--mesh.data", "-1", "1 to 100000"),
    ("--optimizer.learning-rate", "1e300", "more than 0 and at most 1e+30"),
    ("--optimizer.learning-rate", "nan", "a finite number, more than 0 and at most 1e+30"),
    ("--optimizer.learning-rate", "inf", "a finite number, more than 0 and at most 1e+30"),
    ("--optimizer.weight-decay", DIGITS, "a finite number, 0 to 1000"),
    ("--train.steps", DIGITS, "a whole number, 0 to 1000000000"),
    ("--train.steps", "٣", "a whole number, 0 to 1000000000"),
    ("--model.dropout", "０.１", "a finite number, 0 or more and less than 1"),
    ("--train.steps", "", "a whole number, 0 to 1000000000"),
    ("--train.steps", "1 0", "a whole number, 0 to 1000000000"),
    ("--seed", "0x10", "a whole number, 0 to 2147483647"),
    ("--data.sources", "[" * 3000, "TOML as in"),
    ("--data.path", "a\0b", "arguments without NUL"),
]


@pytest.mark.parametrize(("flag", "value", "valid"), LARGE, ids=[f"{flag} {value[:30]!r}" for flag, value, _ in LARGE])
def test_numbers_that_cannot_be_meant(commands: Commands, flag: str, value: str, valid: str, tmp_path: Path) -> None:
    """Too large, not in the digits 0 to 9, no number at all; a long one is not repeated in full."""
    line = train_mistake(commands, tmp_path / "run", f"{flag}={value}")
    assert ("\0" in value or line.startswith(f"error: {flag} ")) and f"; valid: {valid}" in line and len(line) < 300


def test_what_no_memory_holds(commands: Commands, straight: Run, tmp_path: Path, monkeypatch) -> None:
    """Each number may be valid and their product too large: the state of a training, the weights of an evaluation and
    its microbatch, more microbatches than a schedule's table has room for."""
    large = ("--model.hidden-size", 1_000_000, "--model.num-layers", 10_000)
    line = train_mistake(commands, tmp_path / "run", *large)
    assert_says(
        line, r"--model\.num-layers 10000, --model\.hidden-size 1000000", r"need [\d,.]+ GiB on each of 1", "have"
    )
    assert_says(train_mistake(commands, tmp_path / "run", *large, "--profile-pipeline"), r"need [\d,.]+ GiB", "valid")
    line = train_mistake(commands, tmp_path / "run", "--train.global-batch", 1_000_000)
    assert_says(line, r"--train\.global-batch", "a table of 1000000 forwards; valid: at most 250000")
    monkeypatch.setattr(memory, "_machine_bytes", lambda: 2**20)  # the weights take 250 KiB
    rows = mistake(
        commands, "eval.py", "perplexity", "--checkpoint", straight.folder, "--train.microbatch", 1000, "--mesh.data", 1
    )
    assert_says(rows, r"--train\.microbatch 1000 need", "valid")
    monkeypatch.setattr(memory, "_machine_bytes", lambda: 2**16)
    for script in (("eval.py", "perplexity"), ("-m", "megajax", "generate", "--prompt", "a")):
        assert_says(mistake(commands, *script, "--checkpoint", straight.folder), r"need [\d,.]+ GiB", "valid")
    assert not list(tmp_path.iterdir())


LONG = "a" * 300
OTHER_COMMANDS = [  # arguments, what the line says
    (
        f"eval.py perplexity --checkpoint RUN --train.microbatch {10**11}",
        "--train.microbatch 100000000000; valid: 1",
    ),
    ("eval.py perplexity --checkpoint RUN --step ١٠", "--step ١٠; valid: latest, best, or one of 10, 15, 20"),
    (f"eval.py perplexity --checkpoint RUN --step {DIGITS}", "valid: latest, best, or one of 10, 15, 20"),
    (f"eval.py perplexity --checkpoint RUN --overlap {DIGITS}", "; valid: a whole number"),
    (f"eval.py perplexity --checkpoint {LONG}", "File name too long; valid: names of at most 255 bytes"),
    ("eval.py perplexity --checkpoint=", "--checkpoint is empty; valid: "),
    (f"eval.py perplexity --checkpoint RUN --data {LONG}", "--data 'aaa"),
    (
        "eval.py perplexitty --checkpoint RUN",
        "TASK 'perplexitty'; did you mean perplexity? valid: instructions, lambada, mnli, perplexity, qqp, race, "
        "squad1, squad2, wikitext103",
    ),
    (f"-m megajax generate --checkpoint RUN --prompt a --max-tokens {10**10}", "--max-tokens 10000000000; valid: 1 to"),
    (f"-m megajax generate --checkpoint {LONG} --prompt a", "--checkpoint 'aaa"),
    (f"-m megajax generate --checkpoint RUN --prompt-file {LONG}", "--prompt-file 'aaa"),
    ("-m megajax prepare DIR/text --output DIR/o --workers 100000", "--workers 100000; valid: 1 to 1024, or 0"),
    (f"-m megajax prepare DIR/text --output DIR/o --vocab-size {2**31 - 1}", "--vocab-size 2147483647; valid: 1 to"),
    (f"-m megajax prepare DIR/text --output DIR/{LONG}", "File name too long; valid: "),
    (f"-m megajax prepare {LONG} --output DIR/o", "INPUT 'aaa"),
    ("-m megajax prepare DIR/text --output DIR/text/o", "DIR/text is no folder; valid: "),
    ("-m megajax prepare DIR/text --output DIR/o --decontaminate", "--decontaminate needs a value; valid: "),
    (f"-m megajax convert import-hf DIR/{LONG} DIR/new", "PATH 'DIR/aaa"),
    (f"-m megajax convert import-hf DIR DIR/{LONG}", "RUN 'DIR/aaa"),
    ("-m megajax convert export-hf RUN DIR/text/hf", "PATH DIR/text/hf: DIR/text is no folder; valid: "),
    (f"-m megajax schedule --microbatches {10**12}", "--microbatches 1000000000000; valid: 1 to"),
    (f"-m megajax schedule --microbatches 2 --plot DIR/{LONG}.png", "--plot 'DIR/aaa"),
]


@pytest.mark.parametrize(("line", "words"), OTHER_COMMANDS, ids=[line[:70] for line, _ in OTHER_COMMANDS])
def test_other_commands(commands: Commands, straight: Run, line: str, words: str, tmp_path: Path) -> None:
    """Numbers that cannot be meant, paths that cannot be; nothing is written."""
    (tmp_path / "text").write_text("some text")
    before = contents(straight.folder)
    filled = [word.replace("RUN", str(straight.folder)).replace("DIR", str(tmp_path)) for word in line.split()]
    assert words.replace("DIR", str(tmp_path)) in mistake(commands, *filled)
    assert contents(straight.folder) == before and [entry.name for entry in tmp_path.iterdir()] == ["text"]


@pytest.mark.parametrize("kind", ["long", "long new", "below a file", "in a circle", "empty"])
def test_run_directories_that_cannot_be(commands: Commands, kind: str, tmp_path: Path) -> None:
    """A name too long for the file system, or for a temporary one beside it; a file as a folder; links in a circle."""
    (tmp_path / "file").write_text("mine")
    (tmp_path / "circle").symlink_to("circle")
    run, words = {
        "long": (tmp_path / "new" / LONG / "run", "File name too long"),
        "long new": (tmp_path / ("a" * 220), "valid: at most 200 bytes"),
        "below a file": (tmp_path / "file" / "some" / "run", f"{tmp_path / 'file'} is no folder"),
        "in a circle": (tmp_path / "circle" / "run", "symbolic links"),
        "empty": ("", "--data.path"),
    }[kind]
    if kind == "empty":  # the preset's: only the path of the text is wrong
        line = mistake(commands, "train.py", commands.preset, "--run-dir=", "--data.path", tmp_path / LONG)
    else:
        line = mistake(commands, "train.py", commands.preset, "--run-dir", run)
    assert words in line and "; valid: " in line
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["circle", "file"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may enter every folder")
def test_a_run_directory_below_a_folder_that_may_not_be_entered(commands: Commands, tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir(mode=0)
    line = mistake(commands, "train.py", commands.preset, "--run-dir", tmp_path / "closed" / "run")
    assert_says(line, "--run-dir", "Permission denied", "valid")


def test_text_in_a_preset_that_no_path_takes(commands: Commands, tmp_path: Path) -> None:
    """NUL, which no argument can have."""
    preset = tmp_path / "bad.toml"
    preset.write_text('run_dir = "a\\u0000b"\n' + commands.preset.read_text())
    assert_says(one_line(commands.run("train.py", preset)), r"bad\.toml: run_dir", "valid: text in UTF-8, without NUL")
