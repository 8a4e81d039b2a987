"""`megajax generate` on a run that was trained with a pipe: what it prints, as it streams, and what it refuses."""

import io
import json
import os
import re
import shutil
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from saved_tokenizers import write_saved
from tiny import tiny_config, tiny_program, user_error

from megajax.__main__ import main
from megajax.core.program.program import Program
from megajax.data.text.chat import Chat
from megajax.data.text.tokenizer import Tokenizer
from megajax.data.text.tokenizers import named_tokenizer, train_tokenizer
from megajax.generation import writer
from megajax.generation.choice import Sampling
from megajax.generation.decoder import Decoder
from megajax.generation.generate_options import GenerateOptions
from megajax.generation.text import Screen, Stops, TextStream, Until, continuation_text
from megajax.generation.writer import Writer
from megajax.runs.checkpoint import Checkpoints
from megajax.settings.config import to_toml
from megajax.verify.run import drawn_state

PROMPTS = ("the end", "abba", "naïve", "")


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A checkpoint after step 7 of a run on (2, 2, 1), its weights random."""
    return written(tmp_path_factory.mktemp("run"), train_tokenizer(["the end of the end"], 260), 16, (2, 2, 1))


def written(folder: Path, tokenizer: Tokenizer, sequence_length: int, mesh: tuple[int, int, int]) -> Path:
    tokenizer.save(folder / "data" / "tokenizer")
    sizes = {"num_layers": 3, "vocab_size": tokenizer.size, "init_std": 0.3, "sequence_length": sequence_length}
    config = tiny_config(mesh, zero=3, sequence_parallel=mesh[1] > 1, **sizes)
    (folder / "config.toml").write_text(to_toml(config))
    program = tiny_program(config)
    checkpoints = Checkpoints(folder, program.layout, keep=1)
    checkpoints.save(7, program.layout.from_canonical(drawn_state(program)))
    checkpoints.wait()
    checkpoints.close()
    return folder


_decoders: dict[Any, Decoder] = {}


def shared_decoder(program: Program, params: Any, sampling: Sampling, ends: Collection[int], **how: Any) -> Decoder:
    """`Decoder`, with what a command before compiled for the same programs."""
    key = program.config.model, program.config.mesh, sampling, tuple(ends), how["logprobs"]
    if key not in _decoders:
        _decoders[key] = Decoder(program, params, sampling, ends, **how)
    _decoders[key].renew(params)
    return _decoders[key]


@pytest.fixture
def command(monkeypatch, capsys):
    """A function that runs the command and returns its standard output; what it sets for the process is restored."""
    monkeypatch.setattr(writer, "Decoder", shared_decoder)
    monkeypatch.setattr(os, "environ", os.environ.copy())
    precision = jax.config.jax_default_matmul_precision

    def call(*arguments: object) -> str:
        main(["generate", *map(str, arguments)])
        return capsys.readouterr().out

    yield call
    jax.config.update("jax_default_matmul_precision", precision)


def prompt_flags(*prompts: str) -> list[str]:
    return [word for prompt in prompts for word in ("--prompt", prompt)]


@pytest.mark.slow
def test_texts_are_the_same_on_every_mesh_and_as_they_stream(run, command, tmp_path):
    """With --json, from a file, and streamed; prompts and continuations, why they end, and how fast."""
    flags = ("--checkpoint", run, "--max-tokens", 6, "--temperature", 0.9, "--top-k", 50, "--seed", 4)
    report = json.loads(command(*flags, *prompt_flags(*PROMPTS), "--json", "--logprobs").splitlines()[-1])
    found = report["continuations"]
    assert [entry["prompt"] for entry in found] == list(PROMPTS)
    assert {entry["stopped_by"] for entry in found} <= {"length", "end"}
    assert all(entry["tokens"] == 6 for entry in found if entry["stopped_by"] == "length")
    assert all(len(entry["logprobs"]) == len(entry["ids"]) == entry["tokens"] for entry in found)
    assert report["step"] == 7 and report["tokens"] == sum(entry["tokens"] for entry in found)
    assert report["tokens_per_second"] == pytest.approx(report["tokens"] / report["seconds"])
    (tmp_path / "prompts.txt").write_text("\n".join(PROMPTS[2::-1]) + "\r\n\n", encoding="utf-8")
    mesh = ("--mesh.data", 2, "--mesh.tensor", 4, "--batch", 2)
    stop = found[1]["text"][2:4]
    assert len(stop) == 2 and stop.isascii(), "of two tokens"
    streamed = command(*flags, "--prompt-file", tmp_path / "prompts.txt", *mesh, "--stop", "no such text", stop)
    texts = [entry["prompt"] + entry["text"].split(stop)[0] for entry in found[2::-1]]
    assert streamed == "".join(f"--- {number} of 3\n{text}\n" for number, text in enumerate(texts, start=1))


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--prompt a --top-p 0", "--top-p 0.0; valid: more than 0 and at most 1"),
        ("--prompt a --stop=", "--stop is empty; valid: one character or more"),
        ("--prompt a --template-args {}x", "--template-args: not JSON: .*; valid: a JSON object"),
        ("--prompt a --chat --template-args [1]", "--template-args is not an object; valid: variables"),
        ('--prompt a --chat --template-args {"messages":1}', "--template-args: messages .*; valid: other variables"),
        ('--prompt a --template-args {"a":1}', "--template-args without --chat; valid"),
        ("--prompt a --logprobs", "--logprobs without --json; valid: with --json"),
        ("--prompt a --mesh.pipe 2", "--mesh.pipe 2: .*; valid: --mesh.pipe 1"),
        ("--prompt a --prompt aaaaaaaaaaaaaaaaa", "prompt 2 has 17 tokens; valid: at most 16"),
        ("", "--prompt and --prompt-file are missing"),
        ("--prompt a --prompt-file FOLDER/empty.txt", "--prompt and --prompt-file are both given"),
        ("--prompt-file FOLDER/empty.txt", "empty.txt: no prompt in it"),
    ],
)
def test_mistakes_are_one_line(run, command, tmp_path, flags, words):
    (tmp_path / "empty.txt").write_text(" \n\n")
    assert re.search(words, user_error(command, "--checkpoint", run, *flags.replace("FOLDER", str(tmp_path)).split()))


@pytest.fixture(scope="module")
def chatting(tmp_path_factory) -> Path:
    """A run whose tokenizer has Mistral's template."""
    saved = write_saved(tmp_path_factory.mktemp("saved"), "mistral")
    return written(tmp_path_factory.mktemp("chat"), named_tokenizer(str(saved)), 64, (1, 1, 1))


@pytest.mark.slow
def test_a_chat(run, chatting, command, monkeypatch, tmp_path):
    """One turn is what the template makes of it, a file has whole conversations, and a conversation goes on."""
    flags = ("--checkpoint", chatting, "--max-tokens", 4, "--temperature", 0, "--batch", 1)
    (asked,) = json.loads(command(*flags, "--chat", "--prompt", "Which day?", "--json"))["continuations"]
    (as_text,) = json.loads(command(*flags, "--prompt", "<s>[INST] Which day? [/INST]", "--json"))["continuations"]
    assert asked["text"] == as_text["text"] and asked["prompt_tokens"] == as_text["prompt_tokens"]
    turn = {"role": "user", "content": "Which day?"}
    assert asked["messages"] == [turn]
    turns = [turn, {"role": "assistant", "content": asked["text"].strip()}, {"role": "user", "content": "And then?"}]
    (tmp_path / "turns.jsonl").write_text("\n".join(json.dumps({"messages": each}) for each in (turns, turns[:1])))
    streamed = command(*flags, "--chat", "--prompt-file", tmp_path / "turns.jsonl")
    assert streamed.splitlines()[-1] == asked["text"].splitlines()[-1]
    monkeypatch.setattr("sys.stdin", io.StringIO("Which day?\n\n And then?"))
    spoken = command(*flags, "--interactive")
    assert spoken.startswith(asked["text"] + "\n") and len(spoken) > len(asked["text"]) + 1
    args = {"messages": turns[:1], "chat_template_kwargs": {"bos_token": "<s><s>"}}
    (tmp_path / "args.jsonl").write_text(json.dumps(args))
    (varied,) = json.loads(command(*flags, "--chat", "--prompt-file", tmp_path / "args.jsonl", "--json"))[
        "continuations"
    ]
    assert varied["prompt_tokens"] == asked["prompt_tokens"] + 1 and varied["messages"] == [turn]
    monkeypatch.setattr("sys.stdin", io.StringIO("na\udcefve"))  # as without a locale
    assert "standard input is not UTF-8; valid: text in UTF-8" in user_error(command, *flags, "--interactive")
    (tmp_path / "text").write_text("a")
    (tmp_path / "ended").write_text(json.dumps({"messages": turns[:2]}))
    for words, problem in {
        ("--chat", "--prompt-file", tmp_path / "text"): "conversation 1: not JSON",
        ("--chat", "--prompt-file", tmp_path / "ended"): "conversation 1 ends with a message of the assistant; valid: ",
        ("--interactive", "--prompt", "a"): "--interactive with --prompt; valid: one of them",
        ("--interactive", "--checkpoint", run): "has no chat template; valid: without --chat",
    }.items():
        assert problem in user_error(command, *flags, *words)


def test_variables_of_the_template(chatting, tmp_path):
    """Those of the command line are its own, in every answer."""
    run = tmp_path / "run"
    shutil.copytree(chatting, run)
    tokenizer = named_tokenizer(str(run / "data" / "tokenizer"))
    (template,) = [file for file in (run / "data" / "tokenizer").iterdir() if "[INST]" in file.read_text()]
    template.write_text("{{ messages[-1].content }} {{ mood }}")
    writer = Writer(run, "latest", GenerateOptions(), {}, chat=True, template_args={"mood": "gladly"})
    assert writer._ids(Chat([{"role": "user", "content": "Which day?"}], "it"), "it") == tokenizer.encode(
        "Which day? gladly"
    )


@given(st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3), st.lists(st.text("ab\n", max_size=5), max_size=9))
def test_a_text_ends_before_the_first_stop_text(stops, pieces):
    """Whatever the pieces are; nothing of it is shown, and nothing else waits."""
    text, until, shown = "".join(pieces), Until(stops), ""
    done = (end for end in range(len(text) + 1) if any(text[:end].endswith(stop) for stop in stops))
    end = next(done, None)
    begin = len(text) if end is None else min(end - len(stop) for stop in stops if text[:end].endswith(stop))
    for number, piece in enumerate(pieces, start=1):
        shown += until.add(piece)
        so_far = "".join(pieces[:number])[:begin]
        assert so_far.startswith(shown) and until.stopped == (end is not None and len("".join(pieces[:number])) >= end)
        held = so_far[len(shown) :]
        assert until.stopped or not held or any(stop.startswith(held) for stop in stops)
    assert shown + until.end() == text[:begin]


def test_a_stop_text_of_several_tokens(tokenizer):
    """The ids up to its last one are the continuation's; its text ends before."""
    stops, ids = ["字 — ", "zz"], tokenizer.encode(TEXT)
    last = len(tokenizer.encode(TEXT.partition(stops[0])[0] + stops[0]))
    for count, stop in ((last - 1, None), (last, last), (len(ids), last)):
        assert Stops(tokenizer, [[], []], stops)(1, ids[:count]) == stop
    assert continuation_text(tokenizer, [], ids[:last], stops) == "naïve 漢"
    assert Stops(tokenizer, [[]], [])(0, ids) is None


TEXT = "naïve 漢字 — 𝒻ancy\nend"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """Every byte of a character is a token of its own."""
    return train_tokenizer(["abab abab"], 260)


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_no_character_is_cut(tokenizer, size):
    """What is shown is at any time the start of the text; nothing waits longer than its character."""
    ids, stream, shown = tokenizer.encode(TEXT), TextStream(tokenizer, tokenizer.encode("before")), ""
    for start in range(0, len(ids), size):
        shown += stream.add(ids[start : start + size])
        seen = len(tokenizer.decode(ids[: start + size]).rstrip("\ufffd"))
        assert shown == TEXT[:seen]
    assert shown + stream.end() == TEXT


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_words_that_go_on_are_one(size):
    """WordPiece tokens look by what stands before them."""
    tokenizer = train_tokenizer(["The quick brown foxes jumped unbelievably. " * 3] * 20, 100, "wordpiece")
    ids = tokenizer.encode("the unbelievable foxes, quick and brown; jumping over quicker boxes")
    start, rest = ids[:3], ids[3:]
    stream = TextStream(tokenizer, start)
    shown = "".join(stream.add(rest[number : number + size]) for number in range(0, len(rest), size))
    assert tokenizer.decode(start) + shown == tokenizer.decode(ids)
    assert continuation_text(tokenizer, start, rest) == shown


def test_bytes_that_are_no_character_are_shown_in_the_end(tokenizer):
    first = tokenizer.encode("漢")[:1]
    ids = [*first, *tokenizer.encode("a"), *first, *first]
    stream = TextStream(tokenizer, [])
    shown = "".join(stream.add([token]) for token in ids)
    assert shown == "\ufffda"
    assert shown + stream.end() == tokenizer.decode(ids)


def test_texts_come_in_order(tokenizer, capsys):
    """The second one is finished first, and waits for the first one's end."""
    screen = Screen(tokenizer, ["one", "two", "three"], [[], [], []])
    a, b = tokenizer.encode("a"), tokenizer.encode("b")
    screen.add(1, b, finished=True)
    screen.add(0, a, finished=False)
    assert capsys.readouterr().out == "--- 1 of 3\nonea"
    screen.add(2, a, finished=False)
    screen.add(0, [], finished=True)
    assert capsys.readouterr().out == "\n--- 2 of 3\ntwob\n--- 3 of 3\nthreea"
    screen.add(2, tokenizer.encode("漢")[:2], finished=True)
    assert capsys.readouterr().out == "\ufffd\n"


@pytest.mark.parametrize("terminal", [False, True])
def test_what_a_model_says_to_a_terminal_commands_nothing(tokenizer, capsys, monkeypatch, terminal):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    Screen(tokenizer, ["a\n\x1b[2J\x9b"], [[]]).add(0, tokenizer.encode("b"), finished=True)
    assert capsys.readouterr().out == ("a\n\\u001b[2J\\u009bb\n" if terminal else "a\n\x1b[2J\x9bb\n")
