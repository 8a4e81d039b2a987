"""A user's mistake: exit code 2, one line that names the flag or file and what would be valid, nothing half-written.

In the tests' process, where what `ending.run` makes of it is seen; `test_processes` shows that a process does the same.
"""

import os
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest
from mistakes import assert_says, mistake, one_line, redundant, train_mistake
from processes import Commands, Run, contents

from megajax.data.indexed import IndexedWriter
from megajax.data.tokenizers import load_tokenizer


@pytest.mark.parametrize(
    ("line", "words"),
    [
        redundant("train.py PRESET --run-dir DIR/run --mesh.data 3", [r"--mesh\.data 3", "devices", "valid"]),
        redundant("train.py PRESET --run-dir DIR/run --data.path DIR/no.txt", [r"no\.txt", "does not exist"]),
        ("train.py PRESET --run-dir DIR/run --nonsense", ["--nonsense"]),
        redundant("eval.py perplexitty --checkpoint DIR", ["perplexitty", r"\bperplexity\b"]),
        ("eval.py perplexity --checkpoint DIR/no-run", ["--checkpoint", "no-run", r"config\.toml"]),
        ("-m megajax schedule --mesh.pipe 2 --microbatches 0", ["--microbatches 0; valid: 1 to 1000000000"]),
    ],
)
def test_processes(commands: Commands, line: str, words: list[str], tmp_path: Path) -> None:
    """Exit code and the one line of a process, early and late mistakes."""
    line = line.replace("PRESET", str(commands.preset)).replace("DIR", str(tmp_path))
    assert_says(one_line(commands.run_process(*line.split())), *words)
    assert not list(tmp_path.iterdir())


def write_text(folder: Path, kind: str) -> tuple[Path, list[str]]:
    """A text source with something wrong, and what the message must say."""
    file = folder / f"{kind}.txt"
    if kind == "missing":
        return file, [r"missing\.txt", "does not exist"]
    if kind == "unreadable":
        file.write_text("text")
        file.chmod(0)
        if os.access(file, os.R_OK):  # root may read everything but this
            return Path("/proc/self/mem"), ["/proc/self/mem"]
        return file, [r"unreadable\.txt"]
    if kind == "folder":
        file.mkdir()
        return file, [r"folder\.txt", "no text|no file"]
    if kind == "jsonl":
        file = file.with_suffix(".jsonl")
        file.write_text('{"text": "good"}\n{"txt": "bad"}\n')
        return file, [r"jsonl\.jsonl:2", '"text"']
    data, words = {
        "empty": (b"", ["no text"]),
        "blank": (b" \n\n \t\n", ["no text"]),
        "latin1": ("naïve text, ".encode("latin-1") * 500, ["UTF-8"]),
        "short": (b"Two words.\n\nFour more.\n", ["short|at least", r"\b33\b|\b32\b|sequence"]),
    }[kind]
    file.write_bytes(data)
    return file, [rf"{kind}\.txt", *words]


@pytest.mark.parametrize(
    ("kind", "tokenizer"),
    [
        *((kind, "trained") for kind in ("missing", "unreadable", "empty", "latin1", "short")),
        *((kind, "loaded") for kind in ("jsonl", "short")),
        *(redundant(kind, "trained") for kind in ("folder", "jsonl", "blank")),
        *(redundant(kind, "loaded") for kind in ("missing", "unreadable", "folder", "empty", "blank", "latin1")),
    ],
)
def test_texts(commands: Commands, straight: Run, kind: str, tokenizer: str, tmp_path: Path) -> None:
    """A corpus that is missing, unreadable, empty, of the wrong encoding or form, or shorter than a sequence."""
    path, words = write_text(tmp_path, kind)
    loaded = ("--tokenizer.path", straight.folder / "data" / "tokenizer") if tokenizer == "loaded" else ()
    assert_says(train_mistake(commands, tmp_path / "run", "--data.path", path, *loaded), *words)


def dataset(folder: Path, tokens: int = 500, largest: int = 299) -> Path:
    """A prepared dataset of ten documents; its prefix."""
    with IndexedWriter(folder / "set", largest + 1) as writer:
        for _ in range(10):
            writer.add_document(np.arange(tokens // 10) % 250)
        writer.add_document(np.array([largest, 0]))
    return folder / "set"


@pytest.mark.parametrize(
    "kind", ["cut", "lying length", *map(redundant, ["empty", "longer", "lying offset", "lying documents", "alone"])]
)
def test_prepared_datasets(commands: Commands, kind: str, tmp_path: Path) -> None:
    """An .idx that is truncated, or promises what the .bin does not hold, or has no .bin."""
    prefix = dataset(tmp_path)
    index = prefix.with_suffix(".idx")
    data = bytearray(index.read_bytes())
    header, sequences = 34, 11  # magic 9, version 8, type 1, two counts of 8
    if kind == "cut":
        del data[len(data) // 2 :]
    elif kind == "empty":
        data.clear()
    elif kind == "longer":
        data += b"\0" * 8
    elif kind == "lying length":
        struct.pack_into("<i", data, header + 4 * (sequences - 1), 1000)
    elif kind == "lying offset":
        struct.pack_into("<q", data, header + 4 * sequences + 8, 1 << 40)
    elif kind == "lying documents":
        struct.pack_into("<q", data, header + 12 * sequences + 8, 99)
    else:
        prefix.with_suffix(".bin").unlink()
    index.write_bytes(data)
    line = train_mistake(commands, tmp_path / "run", "--data.path", prefix)
    assert_says(line, r"set\.(idx|bin)")


@pytest.mark.parametrize("tokenizer", ["beside it", redundant("none")])
def test_token_ids_beyond_the_vocabulary(commands: Commands, straight: Run, tokenizer: str, tmp_path: Path) -> None:
    """A prepared dataset with an id that the model has no row for, even where the padding would have one."""
    prefix = dataset(tmp_path, largest=300)
    if tokenizer == "beside it":
        for file in (straight.folder / "data" / "tokenizer").iterdir():
            shutil.copy(file, tmp_path)
    line = train_mistake(commands, tmp_path / "run", "--data.path", prefix)
    assert_says(line, r"set\.bin", r"\b300\b", r"--model\.vocab-size")


@pytest.mark.full
def test_a_dataset_without_enough_documents(commands: Commands, tmp_path: Path) -> None:
    """One document cannot be split, 20 tokens are no sequence of 32."""
    assert_says(
        train_mistake(commands, tmp_path / "run", "--data.path", dataset(tmp_path, tokens=20)), "short|at least", "33"
    )


@pytest.mark.full
def test_a_tokenizer_that_is_too_large(commands: Commands, straight: Run, tmp_path: Path) -> None:
    """Its ids must fit --model.vocab-size."""
    size = load_tokenizer(straight.folder / "data" / "tokenizer").size
    flags = ("--tokenizer.path", straight.folder / "data" / "tokenizer", "--model.vocab-size", size - 1)
    assert_says(train_mistake(commands, tmp_path / "run", *flags), r"--model\.vocab-size", str(size))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--model.num-layers 4", ["num.layers", r"\b3\b", r"\b4\b", "run-dir"]),
        redundant("--model.vocab-multiple 128", ["vocab", "320", "384"]),
        redundant("--precision fp64", ["fp32", "fp64"]),
        ("--resume never", ["--resume never", "not empty", "valid"]),
        redundant("--mesh.data 2", [r"--mesh\.data 2", "devices"]),
        ("--data.path python-stdlib", [r"--data\.path", "python-stdlib"]),
    ],
)
def test_a_run_directory_that_does_not_fit(commands: Commands, straight: Run, arguments: str, words: list[str]) -> None:
    """Another model, another corpus, or not to be resumed: the run stays as it is, byte by byte."""
    assert_says(train_mistake(commands, straight.folder, *arguments.split()), *words)


def test_run_directories_that_hold_no_run(commands: Commands, tmp_path: Path) -> None:
    """One with any file in it, as the folder with the corpus, whatever `--resume` is, and a file in its place."""
    (tmp_path / "run" / "data").mkdir(parents=True)
    (tmp_path / "run" / "notes.txt").write_text("mine")
    shutil.copy(commands.preset.parent / "corpus.txt", tmp_path / "run" / "data")
    line = train_mistake(commands, tmp_path / "run", "--data.path", tmp_path / "run" / "data" / "corpus.txt")
    assert_says(line, "--run-dir", "not empty and holds no run", "valid: an empty or new folder")
    assert_says(train_mistake(commands, tmp_path / "run", "--resume", "never"), "--resume never", "not empty")
    assert_says(train_mistake(commands, tmp_path / "run" / "notes.txt"), "--run-dir", r"notes\.txt", "folder")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--mesh.data 2", [r"--mesh\.data 2", "devices"]),
        ("--step 11", ["--step 11", "10, 15, 20", "latest", "best"]),
        redundant("--step newest", ["--step newest", "latest", "best"]),
        redundant("--data DIR/no.txt", ["--data", r"no\.txt"]),
        ("--data DIR/latin1.txt", ["--data", r"latin1\.txt", "UTF-8"]),
        redundant("--data DIR/empty.txt", ["--data", r"empty\.txt", "no text"]),
        redundant("--train.steps 3", [r"--train\.steps"]),
        ("--overlap 33", ["--overlap 33", "1 to 32"]),
        redundant("--overlap 0", ["--overlap 0", "1 to 32"]),
        redundant("--overlap x", ["--overlap", "'x'", "whole number"]),
    ],
)
def test_eval(commands: Commands, straight: Run, arguments: str, words: list[str], tmp_path: Path) -> None:
    """A mesh, a step or a text that cannot be; the run stays as it is."""
    (tmp_path / "latin1.txt").write_bytes("naïve".encode("latin-1"))
    (tmp_path / "empty.txt").touch()
    before = contents(straight.folder)
    flags = arguments.replace("DIR", str(tmp_path)).split()
    assert_says(mistake(commands, "eval.py", "perplexity", "--checkpoint", straight.folder, *flags), *words)
    assert contents(straight.folder) == before


@pytest.mark.parametrize(
    ("task", "arguments", "words"),
    [
        ("lambada", "--data DIR/bad.jsonl", [r"bad\.jsonl:2", '"text"']),
        redundant("lambada", "--data DIR/bad.jsonl --overlap 2", ["--overlap", "lambada", "wikitext103"]),
        redundant("lambada", "", ["--data"]),
        redundant("wikitext103", "", ["--data"]),
        redundant("wikitext103", "--data DIR/bad.jsonl", ["--data", r"bad\.jsonl", "plain text"]),
        redundant("wikitext103", "--data DIR/empty.txt --overlap 33", ["--overlap 33", "1 to 32"]),
    ],
)
def test_eval_tasks(
    commands: Commands, straight: Run, task: str, arguments: str, words: list[str], tmp_path: Path
) -> None:
    """Data or flags that a task does not take."""
    (tmp_path / "bad.jsonl").write_text('{"text": "a b"}\n{"words": "a b"}\n')
    (tmp_path / "empty.txt").touch()
    flags = arguments.replace("DIR", str(tmp_path)).split()
    assert_says(mistake(commands, "eval.py", task, "--checkpoint", straight.folder, *flags), *words)


def test_eval_of_what_is_not_there(commands: Commands, tmp_path: Path) -> None:
    """An unknown task lists the tasks; a run directory that does not exist is named."""
    line = mistake(commands, "eval.py", "perplexitty", "--checkpoint", tmp_path)
    assert_says(line, "perplexitty", r"\bperplexity\b")
    line = mistake(commands, "eval.py", "perplexity", "--checkpoint", tmp_path / "no-run")
    assert_says(line, "--checkpoint", "no-run", r"config\.toml")


@pytest.mark.full
def test_eval_without_a_run(commands: Commands, straight: Run, tmp_path: Path) -> None:
    """No task, no run directory, one that holds no run, and one without a checkpoint."""
    assert_says(mistake(commands, "eval.py"), "TASK")
    assert_says(mistake(commands, "eval.py", "perplexity"), "--checkpoint")
    assert_says(mistake(commands, "eval.py", "perplexity", "--checkpoint", tmp_path), r"config\.toml")
    shutil.copy(straight.folder / "config.toml", tmp_path)
    assert_says(mistake(commands, "eval.py", "perplexity", "--checkpoint", tmp_path), str(tmp_path))
    shutil.copytree(straight.folder / "data", tmp_path / "data")
    before = contents(tmp_path)
    assert_says(mistake(commands, "eval.py", "perplexity", "--checkpoint", tmp_path), str(tmp_path), "no checkpoint")
    assert contents(tmp_path) == before
