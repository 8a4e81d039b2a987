"""`megajax generate` on a run that was trained with a pipe: what it prints, and what it refuses."""

import json
import os
import shutil
from pathlib import Path

import jax
import pytest
from tiny import tiny_config, tiny_program

from megajax.cli import main
from megajax.config import to_toml
from megajax.data.tokenizers import train_tokenizer
from megajax.errors import UserError
from megajax.runs.checkpoint import Checkpoints

PROMPTS = ("the end", "abba", "naïve", "")


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A checkpoint after step 7 of a run on (2, 2, 1), its weights random."""
    folder = tmp_path_factory.mktemp("run")
    tokenizer = train_tokenizer(["the end of the end"], 260)
    tokenizer.save(folder / "data" / "tokenizer")
    sizes = {"num_layers": 3, "vocab_size": tokenizer.size, "init_std": 0.3, "sequence_length": 16}
    config = tiny_config((2, 2, 1), zero=3, sequence_parallel=True, **sizes)
    (folder / "config.toml").write_text(to_toml(config))
    layout = tiny_program(config).layout
    checkpoints = Checkpoints(folder, layout, keep=1)
    checkpoints.save(7, layout.init())
    checkpoints.wait()
    checkpoints.close()
    return folder


@pytest.fixture
def command(monkeypatch, capsys):
    """A function that runs the command and returns its standard output; what it sets for the process is restored."""
    monkeypatch.setattr(os, "environ", os.environ.copy())
    precision = jax.config.jax_default_matmul_precision

    def call(*arguments: object) -> str:
        main(["generate", *map(str, arguments)])
        return capsys.readouterr().out

    yield call
    jax.config.update("jax_default_matmul_precision", precision)


def prompt_flags(*prompts: str) -> list[str]:
    return [word for prompt in prompts for word in ("--prompt", prompt)]


def test_texts_are_the_same_on_every_mesh_and_as_they_stream(run, command, tmp_path):
    """With --json, from a file, and streamed; prompts and continuations, why they end, and how fast."""
    flags = ("--checkpoint", run, "--max-tokens", 6, "--temperature", 0.9, "--top-k", 50, "--seed", 4)
    report = json.loads(command(*flags, *prompt_flags(*PROMPTS), "--json").splitlines()[-1])
    found = report["continuations"]
    assert [entry["prompt"] for entry in found] == list(PROMPTS)
    assert {entry["stopped_by"] for entry in found} <= {"length", "end"}
    assert all(entry["tokens"] == 6 for entry in found if entry["stopped_by"] == "length")
    assert report["step"] == 7 and report["tokens"] == sum(entry["tokens"] for entry in found)
    assert report["tokens_per_second"] == pytest.approx(report["tokens"] / report["seconds"])
    (tmp_path / "prompts.txt").write_text("\n".join(PROMPTS[2::-1]) + "\r\n\n", encoding="utf-8")
    mesh = ("--mesh.data", 2, "--mesh.tensor", 4, "--batch", 2)
    streamed = command(*flags, "--prompt-file", tmp_path / "prompts.txt", *mesh)
    texts = [entry["prompt"] + entry["text"] for entry in found[2::-1]]
    assert streamed == "".join(f"--- {number} of 3\n{text}\n" for number, text in enumerate(texts, start=1))


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--prompt a --top-p 0", "--top-p 0.0; valid: more than 0 and at most 1"),
        ("--prompt a --top-p 1.5", "--top-p 1.5; valid"),
        ("--prompt a --temperature=-1", "--temperature -1.0; valid: 0 to"),
        ("--prompt a --top-k=-1", "--top-k -1; valid: 0 to"),
        ("--prompt a --max-tokens 0", "--max-tokens 0; valid: 1 to"),
        ("--prompt a --seed=-1", "--seed -1; valid: 0 to"),
        ("--prompt a --batch 0", "--batch 0; valid: 1 to"),
        ("--prompt a --mesh.pipe 2", "--mesh.pipe 2: .*; valid: --mesh.pipe 1"),
        ("--prompt a --mesh.tensor 3", "--mesh.tensor 3 .*; valid"),
        ("--prompt a --step 3", "--step 3; valid: latest, best, or one of 7"),
        ("--prompt a --precision fp64", "--precision fp64: .*; valid: fp32"),
        ("--prompt a --prompt aaaaaaaaaaaaaaaaa", "prompt 2 has 17 tokens; valid: at most 16"),
        ("", "--prompt and --prompt-file are not given"),
        ("--prompt a --prompt-file FOLDER/empty.txt", "--prompt and --prompt-file are both given"),
        ("--prompt-file FOLDER/empty.txt", "empty.txt: no prompt in it"),
        ("--prompt-file FOLDER/latin1.txt", "latin1.txt: not UTF-8"),
        ("--prompt-file FOLDER/none.txt", "none.txt: cannot be read"),
        ("--prompt a --checkpoint FOLDER", "no config.toml there; valid"),
        ("--prompt a --checkpoint FOLDER/untold", "has no tokenizer for text; valid"),
    ],
)
def test_mistakes_are_one_line(run, command, tmp_path, flags, words):
    (tmp_path / "empty.txt").write_text(" \n\n")
    (tmp_path / "latin1.txt").write_bytes("naïve".encode("latin-1"))
    (tmp_path / "untold").mkdir()
    shutil.copy(run / "config.toml", tmp_path / "untold")
    with pytest.raises(UserError, match=words) as caught:
        command("--checkpoint", run, *flags.replace("FOLDER", str(tmp_path)).split())
    assert len(str(caught.value).splitlines()) == 1


def test_a_run_must_be_named(command):
    with pytest.raises(UserError, match="--checkpoint"):
        command("--prompt", "a")
