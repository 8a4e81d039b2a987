"""Users' mistakes in every command but fine-tuning: one line, and nothing is written.

In the tests' process, where what `ending.run` makes of it is seen; `test_processes` shows that a process does the same.
What only the parser or the configuration looks at is tested with them: test_flags.py, test_options.py, test_config.py.
"""

import os
import shutil
from pathlib import Path

import pytest
from mistakes import assert_refused, assert_says, by_line, one_line
from odd_files import write_odd_files
from processes import Commands, Run

pytestmark = pytest.mark.usefixtures("no_waiting")


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory, straight: Run) -> Path:
    return write_odd_files(tmp_path_factory.mktemp("odd"), straight.folder / "data" / "tokenizer")


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
    (f"{TRAIN} --train.steps 0", r"--train\.steps 0", "1 to 1000000000"),
    (f"{TRAIN} --train.steps {DIGITS}", "^error: --train.steps '9+.*; valid: a whole number, 0 to 1000000000"),
    (
        f"{TRAIN} --optimizer.weight-decay {DIGITS}",
        "^error: --optimizer.weight-decay .*; valid: a finite number, 0 to 1000",
    ),
    (f"{TRAIN} --data.sources {'[' * 3000}", "^error: --data.sources .*; valid: TOML as in"),
    (f"{TRAIN} --data.path=a\0b", "; valid: arguments without NUL"),
    (f"{TRAIN} --model.layer-order post", "^error: --model.layer-order post with --model.family decoder; valid: pre"),
    ("train.py ODD/nul.toml", r"nul\.toml: run_dir", "valid: text in UTF-8, without NUL"),
    ("train.py ODD/no.toml", r"no\.toml", "demo"),
    (f"{TRAIN} --evaluate mnli", "^error: --evaluate mnli; valid: lambada=FILE, wikitext103=FILE"),
    (f"{TRAIN} --evaluate lambada=ODD/no.jsonl", "--evaluate lambada=.*no.jsonl: no such file"),
    (f"{TRAIN} --resume must", "--resume", "checkpoint", "valid"),
    ("train.py TINY --resume must", "--resume must, but --run-dir runs/tiny"),  # where it would be by default
    (f"{TRAIN} --train.global-batch 1000000", "a table of 1000000 forwards; valid: at most 250000"),
    (f"{TRAIN} --tokenizer.path /does/not/exist", "/does/not/exist"),
    (f"{TRAIN} {LOADED} --model.vocab-size 270", r"--model\.vocab-size 270", "300"),
    (f"{TRAIN} --model.vocab-size 256", r"--model\.vocab-size 256", "257"),
    *((f"{TRAIN} --profile {steps}", f"^error: --profile {steps}; valid: FIRST:LAST") for steps in ("3:2", "101", "x")),
    # Said before the data is read.
    *(
        (f"{TRAIN} --data.path ODD/empty.txt --optimizer.decay-steps 0 {flags}", words)
        for flags, words in (
            ("--profile 19:21", "^error: --profile 19:21: training ends after step 20; valid: "),
            ("--optimizer.schedule wsd --optimizer.cooldown-steps 16", "cooldown-steps 16 .* 20 after 5 .*: 1 to 15$"),
        )
    ),
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
    (f"{TRAIN} --data.path ODD/beyond/set", r"set\.bin", r"\b300\b", r"--model\.vocab-size"),
    (f"{TRAIN} --data.path ODD/beside/set", r"set\.bin", r"\b300\b", r"--model\.vocab-size"),
    # A run directory that holds another model or corpus, no run, or cannot be.
    (f"{AGAIN} --model.num-layers 4", "num.layers", r"\b3\b", r"\b4\b", "run-dir"),
    (f"{AGAIN} --model.vocab-multiple 128", "vocab", "320", "384"),
    (f"{AGAIN} --precision fp64", "fp32", "fp64"),
    (
        f"{AGAIN} --train.ramp-start 3 --train.ramp-increment 5 --train.ramp-samples 12 --train.microbatch 2",
        "steps of 3 sequences, not divisible by",
    ),
    (f"{AGAIN} --data.skip 5:9 20:10", "--data.skip 20:10; valid: none, or FIRST:LAST, both included, such as"),
    (f"{AGAIN} --train.freeze layers.0 layer.1", "--train.freeze 'layer.1'; valid: embedding, head, layers, layers.N"),
    (f"{AGAIN} --init-step 5", "--init-step 5 without --init; valid: --init with the directory of a run"),
    (f"{AGAIN} --resume never", "--resume never", "already holds a run", "valid: a new --run-dir, or"),
    (f"{AGAIN} --mesh.data 2", r"--mesh\.data 2", "devices"),
    (f"{AGAIN} --data.path ODD/missing.txt", r"--data\.path: ODD/missing\.txt does not exist", "; valid: "),
    (f"{HERE} ODD/run", "--run-dir", "not empty and holds", "valid: an empty or new folder"),
    (f"{HERE} ODD/run --resume never", "--resume never", "not empty"),
    (f"{HERE} ODD/run/notes.txt", "--run-dir", r"notes\.txt", "folder"),
    (f"{HERE} ODD/new/{LONG}/run", "--run-dir .*File name too long", "; valid: "),
    (f"{HERE} ODD/{'a' * 220}", "--run-dir .*; valid: at most 200 bytes"),
    (f"{HERE} ODD/few.txt/some/run", "--run-dir .*: ODD/few.txt is not a folder; valid: "),
    (f"{HERE} ODD/circle/run", "--run-dir .*symbolic links", "; valid: "),
    (f"train.py TINY --run-dir= --data.path ODD/{LONG}", "--data.path", "; valid: "),
    # Another run, an export, a dataset or a picture would be taken for one of a run's checkpoints or its data.
    (
        "train.py TINY --run-dir TRAINED/checkpoints/7",
        "--run-dir .* lies in the run directory TRAINED, as its checkpoints; valid",
    ),
    ("-m megajax convert export-hf TRAINED TRAINED/checkpoints/7", "PATH .* lies in the run directory"),
    ("-m megajax prepare TINY --output TRAINED/data/more", "--output .* lies in the run directory"),
    ("-m megajax schedule --microbatches 2 --plot TRAINED/loss.png", "--plot .* lies in the run directory"),
]

OTHERS = "instructions, lambada, mnli, perplexity, qqp, race, squad1, squad2, wikitext103"
EVALUATING: list[tuple[str, ...]] = [
    ("eval.py", "TASK"),
    ("eval.py perplexity", "--checkpoint"),
    ("eval.py perplexity --checkpoint ODD", r"config\.toml"),
    ("eval.py perplexity --checkpoint ODD/no-run", "--checkpoint", "no-run", r"config\.toml"),
    (
        f"eval.py perplexity --checkpoint {LONG}",
        "--checkpoint .*: File name too long; valid: names of at most 255 bytes",
    ),
    ("eval.py perplexity --checkpoint=", "--checkpoint is empty; valid: "),
    ("eval.py perplexitty --checkpoint TRAINED", rf"TASK 'perplexitty'; did you mean perplexity\? valid: {OTHERS}"),
    (f"{EVAL} --train.steps 3", r"--train\.steps"),
    (f"{EVAL} --mesh.data 2", r"--mesh\.data 2", "devices"),
    (f"{EVAL} --train.microbatch {10**11}", "--train.microbatch 100000000000; valid: 1"),
    *(
        (f"{EVAL} --step {step}", f"--step {step[:9]}.*; valid: latest, best, or one of 10, 15, 20")
        for step in ("11", "new", "١٠", DIGITS)
    ),
    *((f"{EVAL} --overlap {overlap}", f"--overlap {overlap}", "1 to 32") for overlap in (0, 33)),
    (f"{EVAL} --overlap {DIGITS}", "--overlap", "; valid: a whole number"),
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
]

GENERATE = "-m megajax generate --checkpoint TRAINED"
PREPARE = "-m megajax prepare ODD/few.txt --output ODD"
SCHEDULE = "-m megajax schedule --microbatches 2"
PLAN = "-m megajax plan gpt2-8.3b"
SEARCH = "-m megajax plan gpt2-355m --no-compile --search --devices"
VERIFY = "-m megajax verify demo"
OF_GPUS = "h100, h200, a100, v100, b200"
OTHER_COMMANDS: list[tuple[str, ...]] = [
    (f"{GENERATE} --prompt a --max-tokens {10**10}", "--max-tokens 10000000000; valid: 1 to"),
    (f"{GENERATE} --prompt {'a' * 1000}", "valid: at most 32"),
    (f"{GENERATE} --prompt-file {LONG}", "--prompt-file 'aaa"),
    (f"-m megajax generate --checkpoint {LONG} --prompt a", "--checkpoint 'aaa"),
    (f"{PREPARE}/o --workers 100000", "--workers 100000; valid: 1 to 1024, or 0"),
    (f"{PREPARE}/o --vocab-size {2**31 - 1}", "--vocab-size 2147483647; valid: 1 to"),
    (f"{PREPARE}/{LONG}", "--output .*: File name too long; valid: "),
    (f"-m megajax prepare {LONG} --output ODD/o", "INPUT 'aaa"),
    (f"{PREPARE}/few.txt/o", "--output ODD/few.txt/o: ODD/few.txt is not a folder; valid: "),
    (f"{PREPARE}/o --decontaminate", "--decontaminate needs a value; valid: "),
    (f"-m megajax convert import-hf ODD/{LONG} ODD/new", "PATH 'ODD/aaa"),
    (f"-m megajax convert import-hf ODD ODD/{LONG}", "RUN 'ODD/aaa"),
    (
        "-m megajax convert export-hf TRAINED ODD/few.txt/hf",
        "PATH ODD/few.txt/hf: ODD/few.txt is not a folder; valid: ",
    ),
    (
        "-m megajax convert export-hf TRAINED ODD/out --adapter",
        "--adapter: RUN .* was trained without adapters; valid: a run with --lora.rank",
    ),
    ("-m megajax schedule --mesh.pipe 2", "--microbatches missing; valid:"),
    (f"-m megajax schedule --microbatches {10**12}", "--microbatches 1000000000000; valid: 1 to"),
    ("-m megajax schedule --microbatches 0", "--microbatches 0; valid: 1 to 1000000000"),
    (
        "-m megajax schedule --microbatches 100000000 --mesh.pipe 4",
        "--microbatches 100000000 is a table of 400000000 forwards; valid: at most 250000",
    ),
    (f"{SCHEDULE} --plot ODD/{LONG}.png", "--plot 'ODD/aaa"),
    (
        f"{SCHEDULE} --plot ODD/a.pdf",
        "--plot ODD/a.pdf: unknown picture format; valid: a name that ends in .png or .svg",
    ),
    (f"{SCHEDULE} --plot ODD/no/folder.png", "--plot ODD/no/folder.png: cannot be written"),
    (f"{SCHEDULE} --mesh.pipe 0", "--mesh.pipe 0; valid: 1 to 100000"),
    (f"{SCHEDULE} --mesh.pipe 100000", "--mesh.pipe 100000 .*and 500 stages"),
    (f"{SCHEDULE} --pipeline.schedule zigzag", "--pipeline.schedule 'zigzag'; valid: 1f1b, gpipe, interleaved"),
    (
        f"{SCHEDULE} --pipeline.schedule interleaved --pipeline.chunks 2",
        "interleaved with --mesh.pipe 1; valid: --mesh.pipe 2",
    ),
    (f"{SCHEDULE} --pipeline.schedule interleaved --mesh.pipe 2", "--pipeline.chunks 1 with"),
    (f"{SCHEDULE} --pipeline.chunks 2 --mesh.pipe 2", "--pipeline.chunks 2 with --pipeline.schedule 1f1b"),
    (f"{SCHEDULE} --forward-time 0", "--forward-time 0.0; valid: 1e-06 to 1000000"),
    (f"{SCHEDULE} --input-gradient-time=-1", "--input-gradient-time -1.0; valid: 1e-06 to"),
    (f"{SCHEDULE} --weight-gradient-time nan", "--weight-gradient-time 'nan'; valid: a finite number, 1e-06 to"),
    (f"{SCHEDULE} --weight-gradient-time inf", "--weight-gradient-time 'inf'; valid: a finite number, 1e-06 to"),
    (f"{SCHEDULE} --pipeline.weight-gradients later", "--pipeline.weight-gradients 'later'; valid: together, deferred"),
    (f"{SCHEDULE} --pipeline.max-deferred -2", "--pipeline.max-deferred -2; valid: -1 to"),
    (f"{SCHEDULE} --microbatch 2", r"--microbatch: unknown flag; did you mean --microbatches\?"),
    ("-m megajax plan", "PRESET missing; valid: "),
    ("-m megajax plan nothing", "nothing"),
    (f"{PLAN} --gpus h100", "--gpus: unknown flag"),
    (f"{PLAN} --gpu h300", f"--gpu 'h300'.*; valid: {OF_GPUS}"),
    (f"{PLAN} --gpu v100", "--precision bf16 with --gpu v100.*; valid: .*fp16"),
    (f"{PLAN} --mesh.tensor 7", "--mesh.tensor 7 .*valid: 1, 2, 4.*; the nearest valid mesh: .*--mesh.tensor 8$"),
    (f"{PLAN} --mesh.data 3", "--mesh.data 3 .*valid: a multiple of 24; the nearest valid mesh: --mesh.data 4 "),
    (f"{PLAN} --devices 2", "--devices without --search; valid: --search, or without --devices"),
    (f"{SEARCH} 0", "--devices 0"),
    (f"{SEARCH} 2 --plot ODD/a.pdf", "--plot .*: unknown picture format; valid: a name that ends in .png"),
    (f"{SEARCH} 2 --plot ODD/few.txt", "--plot .*: unknown picture format"),
    (
        f"{SEARCH} 2 --plot ODD/other.png",
        "--plot ODD/other.png already exists and is not a picture of megajax plan; valid: another name",
    ),
    (f"{SEARCH} 2 --gpu h1", f"--gpu 'h1'; valid: {OF_GPUS}"),
    (f"{SEARCH} 1009", "--devices 1009: no valid mesh of that size"),
    (f"{SEARCH} 2 --gpu v100 --precision bf16", "--precision bf16 with --gpu v100, which does not support it"),
    ("-m megajax verify", "PRESET missing; valid: a TOML file, or one of"),
    ("-m megajax verify gpt2-8.3bb", r"no preset 'gpt2-8.3bb'; did you mean gpt2-"),
    (
        "-m megajax verify smollm2-135m --mesh.tensor 2",
        "the nearest valid mesh: --mesh.data 1 --mesh.pipe 1 --mesh.tensor 3",
    ),
    (f"{VERIFY} --device 8", r"--device: unknown flag; did you mean --devices\?"),
    (f"{VERIFY} --devices 0", "--devices 0; valid: 1 to 512"),
    (f"{VERIFY} --steps many", "--steps 'many'; valid: a whole number, 1 to 100"),
    (f"{VERIFY} --mesh.data 3", "--mesh.data 3 .*valid: a multiple of 3; the nearest valid mesh: --mesh.data 4"),
    (f"{VERIFY} --mesh.tensor 3", "--mesh.tensor 3 does not divide --model.num-heads 8; valid: 1, 2, 4, 8"),
    (f"{VERIFY} --mesh.data 8 --mesh.pipe 2 --devices 3", "--devices 3 for a mesh of 8 x 2 x 1; valid: 4"),
    (f"{VERIFY} --mesh.pipe 2 --pipeline.chunks 2", "--pipeline.chunks 2 with --pipeline.schedule 1f1b"),
]


@pytest.mark.parametrize(("line", "words"), by_line(TRAINING + EVALUATING + OTHER_COMMANDS))
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


PROCESSES = [
    ("train.py TINY --run-dir ODD/new --nonsense", "--nonsense"),
    ("eval.py perplexity --checkpoint ODD/no", "no"),
]


@pytest.mark.parametrize(("line", "word"), PROCESSES)
def test_processes(commands: Commands, line: str, word: str, tmp_path: Path) -> None:
    """Exit code and the one line of a process, early and late mistakes."""
    line = line.replace("TINY", str(commands.preset)).replace("ODD", str(tmp_path))
    assert_says(one_line(commands.run_process(*line.split())), word.replace("ODD", str(tmp_path)))
    assert not list(tmp_path.iterdir())
