"""Users' mistakes in every command but fine-tuning: one line, and nothing is written.

In the tests' process, where what `ending.run` makes of it is seen; `test_processes` shows that a process does the same.
What only the parser or the configuration looks at is tested with them: test_flags.py, test_options.py, test_config.py.
"""

import shutil
from pathlib import Path

import numpy as np
import pytest
from golden import GOLDEN, SEARCH, TRAIN
from mistakes import assert_refused, assert_says, by_line, golden, one_line
from processes import Commands, Run
from tiny import full

from megajax.data.text.indexed import IndexedWriter

pytestmark = pytest.mark.usefixtures("no_waiting")


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory, straight: Run) -> Path:
    """Files that no command can do with; a dataset with an id too large stands beside a tokenizer."""
    folder = tmp_path_factory.mktemp("odd")
    for name, text in {"empty": "", "short": "Two words.\n\nFour more.\n", "few": "some text"}.items():
        (folder / f"{name}.txt").write_text(text)
    (folder / "other.png").write_bytes(b"\x89PNG")
    (folder / "bad.jsonl").write_text('{"text": "a b"}\n{"words": "a b"}\n')
    (folder / "run" / "data").mkdir(parents=True)
    (folder / "run" / "notes.txt").write_text("mine")
    shutil.copy(folder / "few.txt", folder / "run" / "data")
    shutil.copytree(straight.folder / "data" / "tokenizer", folder / "beside")
    with IndexedWriter(folder / "beside" / "set", 301) as writer:
        for _ in range(10):
            writer.add_document(np.arange(50))
        writer.add_document(np.array([300, 0]))
    return folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, straight: Run) -> Path:
    """A run that no other worker of pytest locks."""
    return shutil.copytree(straight.folder, tmp_path_factory.mktemp("trained") / "run")


TRAINING = [
    (
        TRAIN,
        """
        --train.steps DIGITS | --evaluate mnli | --evaluate lambada=ODD/no.jsonl | --resume must |
        --train.global-batch 1000000 | --lora.rank 4 | --profile 3:2 | --profile 101 | --profile x
        """,
    ),
    (  # said before the data is read
        f"{TRAIN} --data.path ODD/empty.txt --optimizer.decay-steps 0",
        "--profile 19:21 | --optimizer.schedule wsd --optimizer.cooldown-steps 16",
    ),
    # While it is read: tests/data has every kind of bad file.
    (f"{TRAIN} LOADED --data.path", "ODD/short.txt => ODD/short.txt | ODD/bad.jsonl => ODD/bad.jsonl:2"),
    # A run directory that holds another model or corpus, or no run: tests/runs has others.
    (
        "train.py TINY --run-dir TRAINED",
        """
        --model.num-layers 4 => model.num_layers 3, not 4 |
        --model.vocab-multiple 128 => model.padded_vocab_size 320, not 384 |
        --train.ramp-start 3 --train.ramp-increment 5 --train.ramp-samples 12 --train.microbatch 2 |
        --init-step 5 | --resume never | --data.path ODD/missing.txt
        """,
    ),
    ("train.py TINY --data.path ODD/few.txt --run-dir", "ODD/run | ODD/run/notes.txt | TRAINED/checkpoints/7"),
    # An export, a dataset or a picture would be taken for one of a run's checkpoints or its data.
    (
        "-m megajax",
        """
        convert export-hf TRAINED TRAINED/checkpoints/7 => PATH | prepare TINY --output TRAINED/data/more |
        schedule --microbatches 2 --plot TRAINED/loss.png
        """,
    ),
]

EVALUATING = [
    (
        "eval.py",
        """
        => TASK | hellaswag => eval harness hellaswag | perplexity => --checkpoint | perplexity --checkpoint ODD |
        lambada --checkpoint TRAINED --data ODD/bad.jsonl --overlap 2 |
        wikitext103 --checkpoint TRAINED --data ODD/empty.txt --overlap 33
        """,
    ),
    (
        "eval.py perplexity --checkpoint TRAINED",
        "--train.steps 3 | --mesh.data 2 | --step 11 | --step ١٠ | --overlap 33",
    ),
]

OTHER_COMMANDS = [
    (
        "-m megajax",
        """
        generate --checkpoint TRAINED --prompt a --max-tokens 10000000000 |
        prepare ODD/few.txt --output ODD/o --workers 100000 | prepare ODD/few.txt --output ODD/o --decontaminate |
        prepare LONG --output ODD/o => INPUT | convert export-hf TRAINED ODD/out --adapter |
        schedule --mesh.pipe 2 => --microbatches | schedule --microbatches 1000000000000 |
        schedule --mesh.pipe 4 --microbatches 100000000 | plan => PRESET | SEARCH 0 | SEARCH 2 --plot ODD/a.pdf |
        SEARCH 2 --plot ODD/other.png | verify smollm2-135m --mesh.tensor 2 | verify demo --devices 0
        """.replace("SEARCH", SEARCH),
    ),
    (
        "-m megajax schedule --microbatches 2",
        """
        --plot ODD/LONG.png | --plot ODD/no/folder.png | --mesh.pipe 2 --pipeline.chunks 2 | --forward-time 0 |
        --weight-gradient-time nan | --microbatch 2
        """,
    ),
]


@pytest.mark.parametrize(("line", "named"), by_line(*TRAINING, *EVALUATING, *OTHER_COMMANDS, *golden(GOLDEN)))
def test_one_line_and_nothing_written(commands: Commands, trained: Path, odd: Path, line: str, named: str) -> None:
    """TRAINED is a run of GPT-2, ODD the folder of odd files."""
    names = {"TINY": str(commands.preset), "TRAINED": trained, "ODD": odd, "LONG": "a" * 300, "DIGITS": "9" * 4400}
    names["LOADED"] = f"--tokenizer.path {trained}/data/tokenizer"
    assert_refused(commands, line, named, names)


PROCESSES = [
    ("train.py TINY --run-dir ODD/new --nonsense", "--nonsense"),
    full("eval.py perplexity --checkpoint ODD/no", "no"),
]


@pytest.mark.parametrize(("line", "word"), PROCESSES)
def test_processes(commands: Commands, line: str, word: str, tmp_path: Path) -> None:
    """Exit code and the one line of a process, early and late mistakes."""
    line = line.replace("TINY", str(commands.preset)).replace("ODD", str(tmp_path))
    assert_says(one_line(commands.run_process(*line.split())), word.replace("ODD", str(tmp_path)))
    assert not list(tmp_path.iterdir())
