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
from megajax.data.tasks.registry import TaskConfig
from megajax.data.tasks.samples import read_records
from megajax.library.plain import PlainModel
from megajax.settings.config import Config

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


def rows_of(tmp_path: Path, records: list[Any], tokenizer: Any = None) -> PreferenceRows:
    file = tmp_path / "pairs.jsonl"
    file.write_text("\n".join(map(json.dumps, records)))
    found = read_records("preferences", [str(file)], TaskConfig(), "--data.train")
    return PreferenceRows(found.entries, tokenizer or Letters(), sequence_length=16)


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


def test_forms_of_records(tmp_path: Path) -> None:
    """Conversations with a prompt of their own, or that begin alike."""
    user, *answers = ({"role": role, "content": text} for role, text in (("user", "q"), *[("assistant", "a")] * 2))
    answers[1]["content"] = "b"
    file = tmp_path / "pairs.jsonl"
    pairs = [
        {"prompt": [user], "chosen": [answers[0]], "rejected": [answers[1]]},
        {"chosen": [user, answers[0]], "rejected": [user, answers[1]]},
    ]
    file.write_text("\n".join(map(json.dumps, pairs)))
    one, other = read_records("preferences", [str(file)], TaskConfig(), "--data.train").entries
    assert one == other and one.context == "q" and one.rejected.answers == (1,)
    assert [each["content"] for each in one.rejected.messages] == ["q", "b"]


@pytest.mark.parametrize(
    ("record", "problem"),
    [
        ({"prompt": "a", "chosen": "b"}, 'no "rejected"; valid: JSON lines'),
        ({"chosen": "b", "rejected": "c"}, "prompt"),
        ({"prompt": [], "chosen": [], "rejected": []}, '"chosen" does not answer a prompt; valid: messages'),
        ({"prompt": "a", "chosen": ["b"], "rejected": "c"}, "the message is not an object; valid"),
    ],
)
def test_what_is_no_pair_is_told_in_one_line(tmp_path: Path, record: Any, problem: str) -> None:
    assert problem in user_error(rows_of, tmp_path, [record])


def test_targets_are_of_the_answers_alone(tmp_path: Path) -> None:
    sample = SimpleNamespace(**rows_of(tmp_path, RECORDS)[1])
    assert sample.tokens.tolist()[:5] == [1, 2, 3, 1, 2] and sample.positions.tolist()[:5] == [0, 1, 2, 0, 1]
    assert sample.targets.tolist()[:6] == [2, 3, 100, 2, 100, IGNORED]
    assert sample.answer.tolist()[:6] == [1, 1, 1, -1, -1, 0]
