"""Users' mistakes in every command but fine-tuning: one line, and nothing is written.

In the tests' process, where what `ending.run` makes of it is seen; `test_processes` shows that a process does the same.
What only the parser or the configuration looks at is tested with them: test_flags.py, test_options.py, test_config.py.
"""

import shutil
from pathlib import Path

import pytest
from golden import GOLDEN, SEARCH, TRAIN
from mistakes import assert_refused, assert_says, by_line, golden, one_line
from odd_files import write_odd_files
from processes import Commands, Run
from tiny import full

pytestmark = pytest.mark.usefixtures("no_waiting")


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory, straight: Run) -> Path:
    return write_odd_files(tmp_path_factory.mktemp("odd"), straight.folder / "data" / "tokenizer")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, straight: Run) -> Path:
    """A run that no other worker of pytest locks."""
    return shutil.copytree(straight.folder, tmp_path_factory.mktemp("trained") / "run")


TRAINING = [
    (
        TRAIN,
        """
        --train.steps 0 | --train.steps DIGITS | --data.sources NESTED | --data.path=a\0b | --data.path= |
        --model.layer-order post | --evaluate mnli | --evaluate lambada=ODD/no.jsonl | --resume must |
        --train.global-batch 1000000 | --tokenizer.path /does/not/exist | --lora.rank 4 |
        LOADED --model.vocab-size 270 | --model.vocab-size 256 | --profile 3:2 | --profile 101 | --profile x
        """,
    ),
    (  # said before the data is read
        f"{TRAIN} --data.path ODD/empty.txt --optimizer.decay-steps 0",
        "--profile 19:21 | --optimizer.schedule wsd --optimizer.cooldown-steps 16",
    ),
    ("train.py", "ODD/nul.toml => nul.toml | ODD/no.toml => no.toml | TINY --resume must"),
    # Before and while it is read: tests/data has every kind of bad file.
    (
        f"{TRAIN} --data.path",
        """
        ODD/folder.txt | ODD/latin.txt | ODD/short.txt => ODD/short.txt | ODD/bad.jsonl => ODD/bad.jsonl:2 |
        ODD/cut/set => ODD/cut/set.idx | ODD/short/set => ODD/short/set.bin
        """,
    ),
    (f"{TRAIN} LOADED --data.path", "ODD/short.txt => ODD/short.txt | ODD/bad.jsonl => ODD/bad.jsonl:2"),
    # A run directory that holds another model or corpus, no run, or cannot be.
    (
        "train.py TINY --run-dir TRAINED",
        """
        --model.num-layers 4 => model.num_layers 3, not 4 |
        --model.vocab-multiple 128 => model.padded_vocab_size 320, not 384 |
        --train.ramp-start 3 --train.ramp-increment 5 --train.ramp-samples 12 --train.microbatch 2 |
        --data.skip 5:9 20:10 | --train.freeze layers.0 layer.1 | --init-step 5 | --resume never |
        --data.path ODD/missing.txt
        """,
    ),
    (
        "train.py TINY --data.path ODD/few.txt --run-dir",
        """
        ODD/run | ODD/run --resume never | ODD/run/notes.txt | ODD/new/LONG/run | ODD/LONGISH | ODD/few.txt/some/run |
        ODD/circle/run | TRAINED/checkpoints/7
        """,
    ),
    ("train.py TINY --run-dir= --data.path", "ODD/LONG"),
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
        => TASK | perplexity => --checkpoint | perplexity --checkpoint ODD | perplexity --checkpoint LONG |
        perplexity --checkpoint= | lambada --checkpoint TRAINED => --data |
        lambada --checkpoint TRAINED --data ODD/bad.jsonl --overlap 2 | wikitext103 --checkpoint TRAINED => --data |
        wikitext103 --checkpoint TRAINED --data ODD/bad.jsonl |
        wikitext103 --checkpoint TRAINED --data ODD/empty.txt --overlap 33
        """,
    ),
    (
        "eval.py perplexity --checkpoint TRAINED",
        """
        --train.steps 3 | --mesh.data 2 | --train.microbatch 100000000000 | --step 11 | --step new | --step ١٠ |
        --step DIGITS | --overlap 33 | --data ODD/latin.txt | --data LONG
        """,
    ),
]

OTHER_COMMANDS = [
    (
        "-m megajax",
        """
        generate --checkpoint TRAINED --prompt a --max-tokens 10000000000 |
        generate --checkpoint TRAINED --prompt LONGLONG => prompt 1 | generate --checkpoint TRAINED --prompt-file LONG |
        prepare ODD/few.txt --output ODD/o --workers 100000 | prepare ODD/few.txt --output ODD/o --decontaminate |
        prepare ODD/few.txt --output ODD/LONG | prepare ODD/few.txt --output ODD/few.txt/o |
        prepare LONG --output ODD/o => INPUT |
        convert import-hf ODD/LONG ODD/new => PATH | convert import-hf ODD ODD/LONG => RUN |
        convert export-hf TRAINED ODD/few.txt/hf => PATH | convert export-hf TRAINED ODD/out --adapter |
        schedule --mesh.pipe 2 => --microbatches | schedule --microbatches 1000000000000 | schedule --microbatches 0 |
        schedule --mesh.pipe 4 --microbatches 100000000 | plan => PRESET | plan nothing => nothing |
        plan gpt2-8.3b --gpus h100 | plan gpt2-8.3b --gpu h300 | plan gpt2-8.3b --precision bf16 --gpu v100 |
        plan gpt2-8.3b --mesh.data 3 | SEARCH 0 | SEARCH 2 --plot ODD/a.pdf |
        SEARCH 2 --plot ODD/few.txt | SEARCH 2 --plot ODD/other.png | SEARCH 2 --gpu h1 |
        SEARCH 2 --gpu v100 --precision bf16 | verify => PRESET | verify gpt2-8.3bb => gpt2-8.3bb |
        verify smollm2-135m --mesh.tensor 2 | verify demo --device 8 | verify demo --devices 0 |
        verify demo --steps many
        """.replace("SEARCH", SEARCH),
    ),
    (
        "-m megajax schedule --microbatches 2",
        """
        --plot ODD/LONG.png | --plot ODD/a.pdf | --plot ODD/no/folder.png | --mesh.pipe 0 | --mesh.pipe 100000 |
        --pipeline.schedule zigzag | --pipeline.chunks 2 --pipeline.schedule interleaved |
        --mesh.pipe 2 --pipeline.schedule interleaved => --pipeline.chunks 1 | --mesh.pipe 2 --pipeline.chunks 2 |
        --forward-time 0 | --weight-gradient-time nan |
        --pipeline.weight-gradients later | --microbatch 2
        """,
    ),
]


@pytest.mark.parametrize(("line", "named"), by_line(*TRAINING, *EVALUATING, *OTHER_COMMANDS, *golden(GOLDEN)))
def test_one_line_and_nothing_written(commands: Commands, trained: Path, odd: Path, line: str, named: str) -> None:
    """TRAINED is a run of GPT-2, ODD the folder of odd files."""
    names = {"TINY": str(commands.preset), "TRAINED": trained, "ODD": odd, "LONG": "a" * 300, "DIGITS": "9" * 4400}
    names |= {"LONGISH": "a" * 220, "LONGLONG": "a" * 1000, "NESTED": "[" * 3000}
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
