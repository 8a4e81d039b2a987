"""Preferences: pairs packed in rows, and their loss, against a plain computation of every answer by itself."""

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tiny import tiny_config, user_error

from megajax.core.batch import IGNORED
from megajax.data.tasks.preferences import PreferenceRows
from megajax.data.tasks.records import Records
from megajax.data.tasks.registry import TaskConfig
from megajax.data.tasks.samples import read_records
from megajax.library.plain import PlainModel
from megajax.runs.task_data import records_digest
from megajax.settings.config import Config
from megajax.training.reference import _content, _kept

RECORDS = [
    {"prompt": "abc", "chosen": "de", "rejected": "fghi"},
    {"prompt": "b", "chosen": "cd", "rejected": "c"},
    {"prompt": "same", "chosen": "x", "rejected": "x"},
    {"prompt": "too long for a row", "chosen": "x", "rejected": "y"},
]


class Letters:
    """A tokenizer of letters."""

    end_of_text, ends, chat_template, special_tokens = 100, [100], None, ()

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        return [[ord(letter) - ord("a") for letter in text] for text in texts]

    encode_continuations = encode_batch

    def with_begin(self, ids: list[int]) -> list[int]:
        return ids


def entries_of(tmp_path: Path, *records: Any) -> Records:
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, records)))
    return read_records("preferences", [str(tmp_path / "pairs.jsonl")], TaskConfig(), "--data.train")


def rows_of(tmp_path: Path, records: list[Any]) -> PreferenceRows:
    return PreferenceRows(entries_of(tmp_path, *records).entries, Letters(), sequence_length=16)  # type: ignore[arg-type]


def config_of(**words: Any) -> Config:
    config = tiny_config(num_layers=1, dropout=0.0, reset_attention=True, **words)
    return dataclasses.replace(config, train=dataclasses.replace(config.train, loss="preferences", dpo_beta=0.5))


def test_the_loss_is_that_of_every_answer_by_itself(tmp_path: Path) -> None:
    samples = rows_of(tmp_path, RECORDS)
    assert len(samples) == 2 and samples.counts == {"pairs longer than 16 tokens together, left out": 1}
    samples.reference = np.array([0.25, -0.5], np.float32)
    batch = {name: np.stack([sample[name] for sample in (samples[0], samples[1])]) for name in samples.form.entries}
    plain = PlainModel(config_of())
    weights = plain.init()

    def log_p(asked: str, said: str) -> float:
        ids = np.array([*Letters().encode_batch([asked + said])[0], Letters.end_of_text])[None]
        z = np.asarray(plain(weights, ids[:, :-1]), np.float64)
        z -= np.log(np.exp(z).sum(-1, keepdims=True))
        found = np.take_along_axis(z, ids[:, 1:, None], -1)[0, :, 0]
        return float(found[len(asked) - 1 :].sum())

    gained = [
        0.5 * (log_p(each["prompt"], each["chosen"]) - log_p(each["prompt"], each["rejected"]) - reference)
        for each, reference in zip(RECORDS, samples.reference.tolist(), strict=False)
    ]
    wanted = np.mean([np.log1p(np.exp(-each)) for each in gained])
    assert float(plain.loss(weights, batch)) == pytest.approx(wanted, rel=1e-5)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def says(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


Q, A, B = user("q"), says("a"), says("b")


@pytest.mark.parametrize("prompt", [{"prompt": [Q]}, {"prompt": "q"}, {"prompt": None}, {}], ids=str)
def test_forms_of_conversations(tmp_path: Path, prompt: Any) -> None:
    """Whole ones, as published ones are, beside a prompt of any form or none; what both begin with is the prompt."""
    found = entries_of(
        tmp_path,
        prompt | {"chosen": [Q, A], "rejected": [Q, B]},
        prompt | {"chosen": [Q, A], "rejected": [Q, A, user("r"), B]},  # one is the beginning of the other
        prompt | {"chosen": [Q, A, user("r"), A], "rejected": [Q, B, user("s"), B]},  # they part in an earlier turn
        prompt | {"chosen": [Q, A, user("r"), A], "rejected": [Q, A, user("s"), B]},
        prompt | {"chosen": [Q, A], "rejected": [Q, A]},
    )
    counts = [(len(each.chosen.answers), len(each.rejected.answers)) for each in found.entries]
    assert counts == [(1, 1), (1, 2), (2, 2), (2, 2)] and found.entries[1].rejected.answers == (1, 3)
    assert {each.context for each in found.entries} == {"q"} and found.entries[0].rejected.messages == (Q, B)
    assert [line.partition(", first")[0] for line in found.lines()] == ["1 pairs with equal answers, skipped"]


def test_answers_alone_and_prompts_that_no_conversation_has(tmp_path: Path) -> None:
    whole = {"chosen": [Q, A, Q, A], "rejected": [Q, A, Q, B]}
    answers = {"prompt": [Q, A, Q], "chosen": [A], "rejected": [B]}
    found = entries_of(tmp_path, answers, whole, whole | {"prompt": "other"})
    assert len(set(map(repr, found.entries))) == 1 and found.entries[0].rejected.answers == (3,)
    assert found.lines()[0].startswith("1 prompts that their conversations lack, ignored, first --data.train: ")


def test_texts_that_begin_alike(tmp_path: Path) -> None:
    """As in Anthropic's HH-RLHF, also where they part in an earlier turn; no word is cut."""
    talk, turn = "\n\nHuman: q\n\nAssistant:", "\n\nHuman: c\n\nAssistant: d"
    sides = (talk, " I will", " I would"), (talk, " Yes", " Yes, sure"), (talk, f" a b.{turn}", f" a e.{turn}")
    for prompt, one, other in (*sides, ("Translate", " this", " that"), ("", "Yes", "Yellow")):
        whole = {"chosen": prompt + one, "rejected": prompt + other}
        given, found = entries_of(tmp_path, {"prompt": prompt, "chosen": one, "rejected": other}, whole).entries
        assert given == found
    assert "equal answers" in user_error(entries_of, tmp_path, {"chosen": talk, "rejected": talk})


def test_what_instructions_say_of_templates_and_weights_counts_here_too(tmp_path: Path) -> None:
    pair = {"chosen": [Q, A], "rejected": [Q, B]}
    skipped = pair | {"weight": 0}, pair | {"chosen": [Q, says("a", weight=0)]}
    args = {"chat_template_kwargs": {"enable_thinking": False}}
    found = entries_of(tmp_path, pair | args, *skipped, {"prompt": "q", "chosen": "a", "rejected": "b", "weight": 0})
    assert found.lines()[0].startswith("3 pairs with weight 0, skipped, first ")
    (entry,) = found.entries
    assert entry.chosen.template_args == entry.rejected.template_args == args["chat_template_kwargs"]
    assert records_digest([entry]) != records_digest(entries_of(tmp_path, pair).entries), "a run that goes on notices"
    turns = {"chosen": [Q, says("c", weight=0), Q, A], "rejected": [Q, says("d", weight=0), Q, B]}
    assert entries_of(tmp_path, turns).entries[0].chosen.answers == (3,)


@pytest.mark.parametrize(
    ("record", "problem"),
    [
        ({"prompt": "a", "chosen": "b"}, 'no "rejected"; valid: JSON lines'),
        ({"chosen": [user("a"), says("b")], "rejected": [user("c"), says("b")]}, '"chosen" does not answer a prompt'),
        ({"prompt": [Q], "chosen": [A], "rejected": [user("c"), B]}, '"rejected" does not answer a prompt'),
        ({"prompt": "a", "chosen": "b", "rejected": None}, '"rejected" is not text; valid: text'),
        ({"chosen": [Q, A], "rejected": None}, '"rejected" is not a list; valid: a list'),
        ({"chosen": [Q, A], "rejected": [Q, B], "tools": [{}]}, '"tools" are not supported; valid: messages without'),
        ({"chosen": [Q | {"weight": 1}, A], "rejected": [Q | {"weight": 1}, B]}, "1 is to be trained on; valid"),
        ({"prompt": [], "chosen": [], "rejected": []}, '"chosen" does not answer a prompt; valid: messages'),
        ({"prompt": "a", "chosen": ["b"], "rejected": "c"}, '"chosen" is not text; valid: text'),
    ],
)
def test_what_is_no_pair_is_told_in_one_line(tmp_path: Path, record: Any, problem: str) -> None:
    assert problem in user_error(rows_of, tmp_path, [record])


def test_targets_are_of_the_answers_alone(tmp_path: Path) -> None:
    sample = SimpleNamespace(**rows_of(tmp_path, RECORDS)[1])
    assert sample.tokens.tolist()[:5] == [1, 2, 3, 1, 2] and sample.positions.tolist()[:5] == [0, 1, 2, 0, 1]
    assert sample.targets.tolist()[:6] == [2, 3, 100, 2, 100, IGNORED]
    assert sample.answer.tolist()[:6] == [1, 1, 1, -1, -1, 0]


def test_a_reference_is_read_as_it_was_written_for_these_pairs_or_not_at_all(tmp_path: Path) -> None:
    values = np.array([1.5, -2, 0], np.float32)
    whole, file, older = _content(values, "pairs"), tmp_path / "a.npy", tmp_path / "data" / "a.npy"
    others = [_content(values[:2], "pairs"), _content(values, "others"), _content(values + np.inf, "pairs")]
    cut = [whole[:size] for size in range(len(whole))]
    flipped = [whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :] for at in range(len(whole))]
    for damaged in (*others, *cut, *flipped, whole + b"x", b"PK\3\4" + whole):
        file.write_bytes(damaged)
        assert _kept(file, "pairs", 3) is None
    older.parent.mkdir()
    for place, content in (file, whole), (older, whole[:-32]):
        place.write_bytes(content)
        assert (_kept(place, "pairs", 3) == values).all()
