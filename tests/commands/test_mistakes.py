"""Users' mistakes in every command but fine-tuning: one line, and nothing is written.

In the tests' process, where what `ending.run` makes of it is seen; `test_processes` shows that a process does the same.
What only the parser or the configuration looks at is tested with them: test_flags.py, test_options.py, test_config.py.
"""

import os
import shutil
from pathlib import Path

import pytest
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


TRAIN = "train.py TINY --run-dir ODD/new"
TRAINING = [
    (
        TRAIN,
        """
        --train.steps 0 | --train.steps DIGITS | --optimizer.weight-decay DIGITS | --data.sources NESTED |
        --data.path=a\0b | --data.path= | --model.layer-order post | --evaluate mnli | --evaluate lambada=ODD/no.jsonl |
        --resume must | --train.global-batch 1000000 | --tokenizer.path /does/not/exist |
        LOADED --model.vocab-size 270 | --model.vocab-size 256 | --profile 3:2 | --profile 101 | --profile x
        """,
    ),
    (  # said before the data is read
        f"{TRAIN} --data.path ODD/empty.txt --optimizer.decay-steps 0",
        "--profile 19:21 | --optimizer.schedule wsd --optimizer.cooldown-steps 16",
    ),
    (
        "train.py",
        "ODD/nul.toml => nul.toml | ODD/no.toml => no.toml | TINY --resume must",
    ),
    # A corpus that is missing, unreadable, empty, of the wrong encoding or form, or shorter than a sequence; an .idx
    # that is truncated, or promises what the .bin does not hold, or has no .bin; an id that the model has no row for.
    *(
        (
            f"{TRAIN} {tokenizer} --data.path",
            """
            ODD/no.txt | ODD/folder.txt | ODD/empty.txt | ODD/blank.txt | ODD/latin.txt |
            ODD/short.txt => ODD/short.txt | ODD/bad.jsonl => ODD/bad.jsonl:2
            """,
        )
        for tokenizer in ("", "LOADED")
    ),
    (
        f"{TRAIN} --data.path",
        """
        UNREADABLE | ODD/cut/set => ODD/cut/set.idx | ODD/none/set => ODD/none/set.idx |
        ODD/longer/set => ODD/longer/set.idx | ODD/length/set => ODD/length/set.bin |
        ODD/offset/set => ODD/offset/set.idx | ODD/documents/set => ODD/documents/set.idx |
        ODD/alone/set => ODD/alone/set.bin | ODD/short/set => ODD/short/set.bin | ODD/beyond/set => --model.vocab-size
        """,
    ),
    # A run directory that holds another model or corpus, no run, or cannot be.
    (
        "train.py TINY --run-dir TRAINED",
        """
        --model.num-layers 4 => model.num_layers 3, not 4 |
        --model.vocab-multiple 128 => model.padded_vocab_size 320, not 384 | --precision fp64 |
        --train.ramp-start 3 --train.ramp-increment 5 --train.ramp-samples 12 --train.microbatch 2 |
        --data.skip 5:9 20:10 | --train.freeze layers.0 layer.1 | --init-step 5 | --resume never | --mesh.data 2 |
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
        => TASK | perplexity => --checkpoint | perplexity --checkpoint ODD | perplexity --checkpoint ODD/no-run |
        perplexity --checkpoint LONG | perplexity --checkpoint= | lambada --checkpoint TRAINED => --data |
        lambada --checkpoint TRAINED --data ODD/bad.jsonl => ODD/bad.jsonl:2 |
        lambada --checkpoint TRAINED --data ODD/bad.jsonl --overlap 2 | wikitext103 --checkpoint TRAINED => --data |
        wikitext103 --checkpoint TRAINED --data ODD/bad.jsonl |
        wikitext103 --checkpoint TRAINED --data ODD/empty.txt --overlap 33
        """,
    ),
    (
        "eval.py perplexity --checkpoint TRAINED",
        """
        --train.steps 3 | --mesh.data 2 | --train.microbatch 100000000000 | --step 11 | --step new | --step ١٠ |
        --step DIGITS | --overlap 0 | --overlap 33 | --overlap DIGITS | --data ODD/no.txt | --data ODD/latin.txt |
        --data ODD/empty.txt | --data LONG
        """,
    ),
]

SEARCH = "plan gpt2-355m --no-compile --search --devices"
OTHER_COMMANDS = [
    (
        "-m megajax",
        """
        generate --checkpoint TRAINED --prompt a --max-tokens 10000000000 |
        generate --checkpoint TRAINED --prompt LONGLONG => prompt 1 | generate --checkpoint TRAINED --prompt-file LONG |
        generate --prompt a --checkpoint LONG | prepare ODD/few.txt --output ODD/o --workers 100000 |
        prepare ODD/few.txt --output ODD/o --vocab-size 2147483647 |
        prepare ODD/few.txt --output ODD/o --decontaminate | prepare ODD/few.txt --output ODD/LONG |
        prepare ODD/few.txt --output ODD/few.txt/o | prepare LONG --output ODD/o => INPUT |
        convert import-hf ODD/LONG ODD/new => PATH | convert import-hf ODD ODD/LONG => RUN |
        convert export-hf TRAINED ODD/few.txt/hf => PATH | convert export-hf TRAINED ODD/out --adapter |
        schedule --mesh.pipe 2 => --microbatches | schedule --microbatches 1000000000000 | schedule --microbatches 0 |
        schedule --mesh.pipe 4 --microbatches 100000000 | plan => PRESET | plan nothing => nothing |
        plan gpt2-8.3b --gpus h100 | plan gpt2-8.3b --gpu h300 | plan gpt2-8.3b --precision bf16 --gpu v100 |
        plan gpt2-8.3b --mesh.data 3 | SEARCH 0 | SEARCH 2 --plot ODD/a.pdf |
        SEARCH 2 --plot ODD/few.txt | SEARCH 2 --plot ODD/other.png | SEARCH 2 --gpu h1 |
        SEARCH 2 --gpu v100 --precision bf16 | verify => PRESET | verify gpt2-8.3bb => gpt2-8.3bb |
        verify smollm2-135m --mesh.tensor 2 | verify demo --device 8 | verify demo --devices 0 |
        verify demo --steps many | verify demo --mesh.tensor 3 |
        verify demo --mesh.pipe 2 --pipeline.chunks 2
        """.replace("SEARCH", SEARCH),
    ),
    (
        "-m megajax schedule --microbatches 2",
        """
        --plot ODD/LONG.png | --plot ODD/a.pdf | --plot ODD/no/folder.png | --mesh.pipe 0 | --mesh.pipe 100000 |
        --pipeline.schedule zigzag | --pipeline.chunks 2 --pipeline.schedule interleaved |
        --mesh.pipe 2 --pipeline.schedule interleaved => --pipeline.chunks 1 | --mesh.pipe 2 --pipeline.chunks 2 |
        --forward-time 0 | --input-gradient-time=-1 | --weight-gradient-time nan | --weight-gradient-time inf |
        --pipeline.weight-gradients later | --microbatch 2
        """,
    ),
]
# The whole lines of some.
GOLDEN = {
    f"{TRAIN} --mesh.data 3": "--mesh.data 3 x --mesh.pipe 1 x --mesh.tensor 1 needs 3 devices, but there are 1; "
    "valid: sizes whose product is 1, or --simulate-devices 3",
    f"{TRAIN} --data.path ODD/beside/set": "ODD/beside/set.bin: token id 300 at position 500 is beyond the vocabulary; "
    "valid: 0 to 299, with --model.vocab-size 300; the largest id here is 300",
    "eval.py perplexitty --checkpoint TRAINED": "TASK 'perplexitty'; did you mean perplexity? valid: instructions, "
    "lambada, mnli, perplexity, preferences, qqp, race, squad1, squad2, wikitext103, harness",
    "-m megajax plan gpt2-8.3b --mesh.tensor 7": "--mesh.tensor 7 does not divide --model.num-heads 32; valid: 1, 2, "
    "4, 8, 16, 32; the nearest valid mesh: --mesh.data 1 --mesh.pipe 1 --mesh.tensor 8",
    f"-m megajax {SEARCH} 1009": "--devices 1009: no valid mesh of that size; --mesh.data must divide "
    "--train.global-batch 512, --mesh.pipe must not exceed --model.num-layers 24, and --mesh.tensor must divide "
    "--model.num-heads 16, --model.mlp-size 4096 and the padded vocabulary of 51200; valid: for example 960 or 1024",
    "-m megajax verify demo --mesh.data 3": "--train.global-batch 8 is not divisible by --mesh.data 3 x "
    "--train.microbatch 1; valid: a multiple of 3; the nearest valid mesh: --mesh.data 4 --mesh.pipe 1 --mesh.tensor 1",
}


@pytest.mark.parametrize(("line", "named"), by_line(*TRAINING, *EVALUATING, *OTHER_COMMANDS, *golden(GOLDEN)))
def test_one_line_and_nothing_written(
    commands: Commands, trained: Path, odd: Path, tmp_path: Path, line: str, named: str
) -> None:
    """TRAINED is a run of GPT-2, ODD the folder of odd files."""
    names = {"TINY": str(commands.preset), "TRAINED": trained, "ODD": odd, "LONG": "a" * 300, "DIGITS": "9" * 4400}
    names |= {"LONGISH": "a" * 220, "LONGLONG": "a" * 1000, "NESTED": "[" * 3000}
    names["UNREADABLE"] = str(unreadable(tmp_path / "closed.txt"))
    names["LOADED"] = f"--tokenizer.path {trained}/data/tokenizer"
    assert_refused(commands, line, named, names)


def unreadable(file: Path) -> Path:
    """A file that may not be read; root may read every one but this."""
    file.write_text("text")
    file.chmod(0)
    return Path("/proc/self/mem") if os.access(file, os.R_OK) else file


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
