"""Users' mistakes in every command but fine-tuning: one line, and nothing is written.

In the tests' process, where what `ending.run` makes of it is seen; `test_processes` shows that a process does the same.
What only the parser or the configuration looks at is tested with them: test_flags.py, test_options.py, test_config.py.
"""

import json
import os
import shutil
import signal
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from mistakes import assert_refused, assert_says, by_line, mistake, one_line, train_mistake
from processes import Commands, Run, contents
from saved_tokenizers import write_pair

from megajax.data.indexed import IndexedWriter
from megajax.data.tokenizers import load_tokenizer
from megajax.program import memory


@pytest.fixture(autouse=True)
def no_waiting() -> Iterator[None]:
    """Who opens a named pipe to read would wait for ever."""
    signal.alarm(300)
    yield
    signal.alarm(0)


def dataset(folder: Path, length: int = 50, largest: int = 299) -> Path:
    """A prepared dataset of ten documents of some length and one with the largest id; its index."""
    folder.mkdir()
    with IndexedWriter(folder / "set", largest + 1) as writer:
        for _ in range(10):
            writer.add_document(np.arange(length))
        writer.add_document(np.array([largest, 0]))
    return folder / "set.idx"


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory, straight: Run) -> Path:
    """A folder with every kind of file that no command can do with."""
    folder = tmp_path_factory.mktemp("odd")
    texts = {"empty": b"", "blank": b" \n\n \t\n", "short": b"Two words.\n\nFour more.\n", "few": b"some text"}
    for name, text in (texts | {"latin": "naïve text, ".encode("latin-1") * 500}).items():
        (folder / f"{name}.txt").write_bytes(text)
    (folder / "bad.jsonl").write_text('{"text": "a b"}\n{"words": "a b"}\n')
    (folder / "run" / "data").mkdir(parents=True)
    (folder / "run" / "notes.txt").write_text("mine")
    shutil.copy(folder / "latin.txt", folder / "run" / "data")
    (folder / "folder.txt").mkdir()
    (folder / "circle").symlink_to("circle")
    (folder / "nul.toml").write_text('run_dir = "a\\u0000b"\n')
    dataset(folder / "short", length=2)
    dataset(folder / "beyond", largest=300)
    shutil.copytree(dataset(folder / "alone", largest=300).parent, folder / "beside")
    (folder / "alone" / "set.bin").unlink()
    shutil.copytree(straight.folder / "data" / "tokenizer", folder / "beside", dirs_exist_ok=True)
    data = dataset(folder / "cut").read_bytes()
    header, sequences = 34, 11  # magic 9, version 8, type 1, two counts of 8
    lies = {"length": ("<i", 4 * (sequences - 1), 1000), "offset": ("<q", 4 * sequences + 8, 1 << 40)}
    for name, (kind, where, value) in (lies | {"documents": ("<q", 12 * sequences + 8, 99)}).items():
        changed = bytearray(data)
        struct.pack_into(kind, changed, header + where, value)
        dataset(folder / name).write_bytes(changed)
    for name, content in (("cut", data[: len(data) // 2]), ("none", b""), ("longer", data + bytes(8))):
        (folder / "cut" / "set.idx" if name == "cut" else dataset(folder / name)).write_bytes(content)
    return folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, straight: Run) -> Path:
    """A run that no other worker of pytest locks."""
    return shutil.copytree(straight.folder, tmp_path_factory.mktemp("trained") / "run")


LONG, DIGITS = "a" * 300, "9" * 4400
TRAIN = "train.py TINY --run-dir ODD/new"
AGAIN = "train.py TINY --run-dir TRAINED"
EVAL = "eval.py perplexity --checkpoint TRAINED"
HERE = "train.py TINY --data.path ODD/few.txt --run-dir"
LOADED = "--tokenizer.path TRAINED/data/tokenizer"

TRAINING: list[tuple[str, ...]] = [
    (f"{TRAIN} --mesh.data 3", r"--mesh\.data 3", "devices", "valid"),
    (f"{TRAIN} --mesh.tensor 8 --simulate-devices 8", r"--mesh\.tensor 8", r"--model\.num-heads 4", "valid: 1, 2, 4"),
    (f"{TRAIN} --train.steps 0", r"--train\.steps 0", "1 to 1000000000"),
    (f"{TRAIN} --train.steps=", "--train.steps ''; valid: a whole number, 0 to 1000000000"),
    (f"{TRAIN} --train.steps {DIGITS}", "; valid: a whole number, 0 to 1000000000"),
    (f"{TRAIN} --optimizer.weight-decay {DIGITS}", "; valid: a finite number, 0 to 1000"),
    (f"{TRAIN} --data.sources {'[' * 3000}", "^error: --data.sources .*; valid: TOML as in"),
    (f"{TRAIN} --data.path=a\0b", "; valid: arguments without NUL"),
    ("train.py ODD/nul.toml", r"nul\.toml: run_dir", "valid: text in UTF-8, without NUL"),
    ("train.py", r"\bPRESET\b", "demo"),
    ("train.py no-such", "no-such", "demo"),
    ("train.py ODD/no.toml", r"no\.toml", "demo"),
    (f"{TRAIN} --resume must", "--resume", "checkpoint", "valid"),
    (f"{TRAIN} --train.global-batch 1000000", "a table of 1000000 forwards; valid: at most 250000"),
    (f"{TRAIN} --tokenizer.path /does/not/exist", "/does/not/exist"),
    (f"{TRAIN} {LOADED} --model.vocab-size 270", r"--model\.vocab-size 270", "300"),
    (f"{TRAIN} --model.vocab-size 256", r"--model\.vocab-size 256", "257"),
    # A corpus that is missing, unreadable, empty, of the wrong encoding or form, or shorter than a sequence.
    (f"{TRAIN} --data.path=", r"--data\.path", "folder|file"),
    *(
        (f"{TRAIN} --data.path ODD/{name} {tokenizer}", name.split("/")[0], *words)
        for name, *words in (
            ("no.txt", "does not exist"),
            ("folder.txt", "no text|no file"),
            ("empty.txt", "no text"),
            ("blank.txt", "no text"),
            ("latin.txt", "UTF-8"),
            ("short.txt", "short|at least", r"\b33\b|\b32\b|sequence"),
            ("bad.jsonl", r"bad\.jsonl:2", '"text"'),
        )
        for tokenizer in ("", LOADED)
    ),
    (f"{TRAIN} --data.path UNREADABLE", "UNREADABLE"),
    # An .idx that is truncated, or promises what the .bin does not hold, or has no .bin.
    *(
        (f"{TRAIN} --data.path ODD/{name}/set", r"set\.(idx|bin)")
        for name in ("cut", "none", "longer", "length", "offset", "documents", "alone")
    ),
    (f"{TRAIN} --data.path ODD/short/set", "short|at least", "33"),
    # An id that the model has no row for, even where the padding would have one.
    *(
        (f"{TRAIN} --data.path ODD/{name}/set", r"set\.bin", r"\b300\b", r"--model\.vocab-size")
        for name in ("beyond", "beside")
    ),
    # A run directory that holds another model or corpus, no run, or cannot be.
    (f"{AGAIN} --model.num-layers 4", "num.layers", r"\b3\b", r"\b4\b", "run-dir"),
    (f"{AGAIN} --model.vocab-multiple 128", "vocab", "320", "384"),
    (f"{AGAIN} --precision fp64", "fp32", "fp64"),
    (f"{AGAIN} --resume never", "--resume never", "not empty", "valid"),
    (f"{AGAIN} --mesh.data 2", r"--mesh\.data 2", "devices"),
    (f"{AGAIN} --data.path python-stdlib", r"--data\.path", "python-stdlib"),
    (f"{HERE} ODD/run", "--run-dir", "not empty and holds no run", "valid: an empty or new folder"),
    (f"{HERE} ODD/run --resume never", "--resume never", "not empty"),
    (f"{HERE} ODD/run/notes.txt", "--run-dir", r"notes\.txt", "folder"),
    (f"{HERE} ODD/new/{LONG}/run", "File name too long", "; valid: "),
    (f"{HERE} ODD/{'a' * 220}", "; valid: at most 200 bytes"),
    (f"{HERE} ODD/few.txt/some/run", "ODD/few.txt is no folder", "; valid: "),
    (f"{HERE} ODD/circle/run", "symbolic links", "; valid: "),
    (f"train.py TINY --run-dir= --data.path ODD/{LONG}", "--data.path", "; valid: "),
]

COMMANDS: list[tuple[str, ...]] = [
    ("eval.py", "TASK"),
    ("eval.py perplexity", "--checkpoint"),
    ("eval.py perplexity --checkpoint ODD", r"config\.toml"),
    ("eval.py perplexity --checkpoint ODD/no-run", "--checkpoint", "no-run", r"config\.toml"),
    (f"eval.py perplexity --checkpoint {LONG}", "File name too long; valid: names of at most 255 bytes"),
    ("eval.py perplexity --checkpoint=", "--checkpoint is empty; valid: "),
    (
        "eval.py perplexitty --checkpoint TRAINED",
        r"TASK 'perplexitty'; did you mean perplexity\? valid: instructions, lambada, mnli, perplexity, qqp, race, "
        "squad1, squad2, wikitext103",
    ),
    (f"{EVAL} --train.steps 3", r"--train\.steps"),
    (f"{EVAL} --mesh.data 2", r"--mesh\.data 2", "devices"),
    (f"{EVAL} --train.microbatch {10**11}", "--train.microbatch 100000000000; valid: 1"),
    *(
        (f"{EVAL} --step {step}", "valid: latest, best, or one of 10, 15, 20")
        for step in ("11", "newest", "١٠", DIGITS)
    ),
    *((f"{EVAL} --overlap {overlap}", f"--overlap {overlap}", "1 to 32") for overlap in (0, 33)),
    *((f"{EVAL} --overlap {overlap}", "--overlap", "; valid: a whole number") for overlap in ("x", DIGITS)),
    (f"{EVAL} --data ODD/no.txt", "--data", r"no\.txt"),
    (f"{EVAL} --data ODD/latin.txt", "--data", r"latin\.txt", "UTF-8"),
    (f"{EVAL} --data ODD/empty.txt", "--data", r"empty\.txt", "no text"),
    (f"{EVAL} --data {LONG}", "--data 'aaa"),
    ("eval.py lambada --checkpoint TRAINED", "--data"),
    ("eval.py lambada --checkpoint TRAINED --data ODD/bad.jsonl", r"bad\.jsonl:2", '"text"'),
    ("eval.py lambada --checkpoint TRAINED --data ODD/bad.jsonl --overlap 2", "--overlap", "lambada", "wikitext103"),
    ("eval.py wikitext103 --checkpoint TRAINED", "--data"),
    ("eval.py wikitext103 --checkpoint TRAINED --data ODD/bad.jsonl", "--data", r"bad\.jsonl", "plain text"),
    ("eval.py wikitext103 --checkpoint TRAINED --data ODD/empty.txt --overlap 33", "--overlap 33", "1 to 32"),
    (
        f"-m megajax generate --checkpoint TRAINED --prompt a --max-tokens {10**10}",
        "--max-tokens 10000000000; valid: 1 to",
    ),
    (f"-m megajax generate --checkpoint {LONG} --prompt a", "--checkpoint 'aaa"),
    (f"-m megajax generate --checkpoint TRAINED --prompt-file {LONG}", "--prompt-file 'aaa"),
    ("-m megajax prepare ODD/few.txt --output ODD/o --workers 100000", "--workers 100000; valid: 1 to 1024, or 0"),
    (f"-m megajax prepare ODD/few.txt --output ODD/o --vocab-size {2**31 - 1}", "--vocab-size 2147483647; valid: 1 to"),
    (f"-m megajax prepare ODD/few.txt --output ODD/{LONG}", "File name too long; valid: "),
    (f"-m megajax prepare {LONG} --output ODD/o", "INPUT 'aaa"),
    ("-m megajax prepare ODD/few.txt --output ODD/few.txt/o", "ODD/few.txt is no folder; valid: "),
    ("-m megajax prepare ODD/few.txt --output ODD/o --decontaminate", "--decontaminate needs a value; valid: "),
    (f"-m megajax convert import-hf ODD/{LONG} ODD/new", "PATH 'ODD/aaa"),
    (f"-m megajax convert import-hf ODD ODD/{LONG}", "RUN 'ODD/aaa"),
    ("-m megajax convert export-hf TRAINED ODD/few.txt/hf", "PATH ODD/few.txt/hf: ODD/few.txt is no folder; valid: "),
    (f"-m megajax schedule --microbatches {10**12}", "--microbatches 1000000000000; valid: 1 to"),
    (f"-m megajax schedule --microbatches 2 --plot ODD/{LONG}.png", "--plot 'ODD/aaa"),
]


@pytest.mark.parametrize(("line", "words"), by_line(TRAINING + COMMANDS))
def test_one_line_and_nothing_written(
    commands: Commands, trained: Path, odd: Path, tmp_path: Path, line: str, words: list[str]
) -> None:
    """TRAINED is a run of GPT-2, ODD the folder of odd files."""
    names = {"TINY": str(commands.preset), "TRAINED": trained, "ODD": odd}
    assert_refused(commands, line, words, names | {"UNREADABLE": str(unreadable(tmp_path / "closed.txt"))})


def unreadable(file: Path) -> Path:
    """A file that may not be read; root may read every one but this."""
    file.write_text("text")
    file.chmod(0)
    return Path("/proc/self/mem") if os.access(file, os.R_OK) else file


@pytest.mark.parametrize(
    ("line", "words"),
    by_line(
        [
            ("train.py TINY --run-dir ODD/new --nonsense", "--nonsense"),
            ("eval.py perplexity --checkpoint ODD/no-run", "--checkpoint", "no-run", r"config\.toml"),
            ("-m megajax schedule --mesh.pipe 2 --microbatches 0", "--microbatches 0; valid: 1 to 1000000000"),
        ]
    ),
)
def test_processes(commands: Commands, line: str, words: list[str], tmp_path: Path) -> None:
    """Exit code and the one line of a process, early and late mistakes."""
    line = line.replace("TINY", str(commands.preset)).replace("ODD", str(tmp_path))
    assert_says(one_line(commands.run_process(*line.split())), *words)
    assert not list(tmp_path.iterdir())


def test_what_no_memory_holds(commands: Commands, straight: Run, tmp_path: Path, monkeypatch) -> None:
    """Each number may be valid and their product too large: the state of a training, the weights of an evaluation and
    its microbatch."""
    large = ("--model.hidden-size", 1_000_000, "--model.num-layers", 10_000)
    line = train_mistake(commands, tmp_path / "run", *large)
    assert_says(
        line, r"--model\.num-layers 10000, --model\.hidden-size 1000000", r"need [\d,.]+ GiB on each of 1", "have"
    )
    assert_says(train_mistake(commands, tmp_path / "run", *large, "--profile-pipeline"), r"need [\d,.]+ GiB", "valid")
    monkeypatch.setattr(memory, "_machine_bytes", lambda: 2**20)  # the weights take 250 KiB
    rows = mistake(
        commands, "eval.py", "perplexity", "--checkpoint", straight.folder, "--train.microbatch", 1000, "--mesh.data", 1
    )
    assert_says(rows, r"--train\.microbatch 1000 need", "valid")
    monkeypatch.setattr(memory, "_machine_bytes", lambda: 2**16)
    for script in (("eval.py", "perplexity"), ("-m", "megajax", "generate", "--prompt", "a")):
        assert_says(mistake(commands, *script, "--checkpoint", straight.folder), r"need [\d,.]+ GiB", "valid")
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(os.geteuid() == 0, reason="root may enter every folder")
def test_a_run_directory_below_a_folder_that_may_not_be_entered(commands: Commands, tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir(mode=0)
    line = mistake(commands, "train.py", commands.preset, "--run-dir", tmp_path / "closed" / "run")
    assert_says(line, "--run-dir", "Permission denied", "valid")


def pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def replaced(old: str, new: str) -> Callable[[Path], object]:
    return lambda file: file.write_text(file.read_text().replace(old, new, 1))


CHANGED: list[tuple[str, Callable[[Path], object], str]] = [
    ("metrics.jsonl", pipe, "FILE.* is a named pipe"),
    ("metrics.jsonl", lambda file: file.write_text("Dear diary\n" * 20), "FILE.* holds no figures of a run"),
    ("metrics.jsonl", lambda file: file.write_text("x" * 100_000), "FILE.* line 1 has more than 65536 bytes"),
    ("config.toml", lambda file: file.write_text("a = " + "[" * 10_000), "FILE.* nested"),
    ("config.toml", lambda file: file.write_text("seed = " + "9" * 5000), "FILE.* digits"),
    ("config.toml", replaced("num_layers = 3", "num_layers = 5"), "FILE: model.num_layers is 5; valid: 3"),
    ("data/tokens.bin", lambda file: file.write_bytes(bytes(file.stat().st_size)), "FILE.* not what was written"),
    ("data/tokenizer/tokenizer.json", Path.unlink, "FILE.* No such file"),
    ("data/report.json", pipe, "FILE.* not the report of a corpus"),
]


@pytest.mark.parametrize(("name", "change", "problem"), CHANGED, ids=[f"{name} {said}" for name, _, said in CHANGED])
def test_changed_files_of_a_run(
    commands: Commands, half: Run, name: str, change: Callable[[Path], object], problem: str, tmp_path: Path
) -> None:
    """Training does not go on with them, and the run stays as it is; a configuration larger than the checkpoint is no
    damage, for evaluation either: the key that was changed is named, with the number that would be right."""
    run = shutil.copytree(half.folder, tmp_path / "run")
    change(run / name)
    before = contents(run / "checkpoints")
    preset = run / name if "is 5" in problem else commands.preset
    lines = [mistake(commands, "train.py", preset, "--run-dir", run)]
    if "is 5" in problem:
        lines.append(mistake(commands, "eval.py", "perplexity", "--checkpoint", run))
    for line in lines:
        assert_says(line, problem.replace("FILE", str(run / name)))
        assert "damaged" not in line
    assert contents(run / "checkpoints") == before


def test_a_run_without_a_checkpoint(commands: Commands, straight: Run, tmp_path: Path) -> None:
    shutil.copy(straight.folder / "config.toml", tmp_path)
    assert_says(mistake(commands, "eval.py", "perplexity", "--checkpoint", tmp_path), str(tmp_path))
    shutil.copytree(straight.folder / "data", tmp_path / "data")
    assert_says(mistake(commands, "eval.py", "perplexity", "--checkpoint", tmp_path), str(tmp_path), "no checkpoint")


def test_tokens_that_no_model_has(commands: Commands, half: Run, tmp_path: Path) -> None:
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    write_pair(folder, load_tokenizer(half.folder / "data" / "tokenizer"))
    vocabulary = json.loads((folder / "vocab.json").read_text())
    (folder / "vocab.json").write_text(json.dumps(vocabulary | {"large": 2**40}))
    line = train_mistake(commands, tmp_path / "run", "--tokenizer.path", folder)
    assert_says(line, "vocab.json: no vocabulary; valid: one JSON object of token: id")
