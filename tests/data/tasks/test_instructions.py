"""Instructions: what is read, which tokens count, how records are packed in rows, and what is refused."""

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from real_records import read
from saved_tokenizers import LLAMA3, TEXTS, TURNS, write_saved

from megajax.core.batch import IGNORED, text_form
from megajax.core.errors import UserError
from megajax.data.tasks.instructions import InstructionRows, encoded, packed
from megajax.data.tasks.records import Instruction
from megajax.data.text.tokenizers import load_tokenizer, train_tokenizer
from megajax.runs.task_data import records_digest

GPT2 = train_tokenizer(TEXTS, 300)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    return {kind: load_tokenizer(write_saved(folder / kind, kind)) for kind in ("llama3", "qwen", "mistral")}


def asked(prompt: str, completion: str) -> Instruction:
    return Instruction("f:1", prompt, completion)


def chat(*messages: dict[str, Any], **args: Any) -> Instruction:
    messages = messages or tuple(TURNS)
    answers = tuple(number for number, message in enumerate(messages) if message["role"] == "assistant")
    return Instruction("f:2", messages=messages, answers=answers, template_args=args)


def rows(records, tokenizer=GPT2, length=64, seed=None) -> InstructionRows:
    return InstructionRows(records, tokenizer, sequence_length=length, seed=seed)


@given(st.lists(st.integers(1, 20), max_size=30), st.randoms())
def test_packing(lengths, random):
    order = list(range(len(lengths)))
    random.shuffle(order)
    found = packed(lengths, order, 20)
    assert [number for row in found for number in row] == order
    sums = [sum(lengths[number] for number in row) for row in found]
    assert all(0 < total <= 20 for total in sums)
    assert all(total + lengths[after[0]] > 20 for total, after in zip(sums, found[1:], strict=False))


def test_completions_and_their_end_count():
    ((ids, says),) = encoded([asked("What?", " That.")], GPT2)
    assert ids == [*GPT2.encode("What?"), *GPT2.encode(" That."), GPT2.end_of_text]
    assert [token for token, said in zip(ids, says, strict=True) if said] == [*GPT2.encode(" That."), GPT2.end_of_text]
    ((ids, says),) = encoded([asked("", "a<|endoftext|>")], GPT2)
    assert (ids, says) == ([GPT2.end_of_text, *GPT2.encode("a"), GPT2.end_of_text], [False, True, True])


@pytest.mark.parametrize("kind", ["llama3", "mistral"])
def test_prompts_begin_as_the_tokenizer_says_and_completions_do_not(saved, kind):
    tokenizer = saved[kind]
    ((ids, says),) = encoded([asked("The text", " of words")], tokenizer)
    assert ids == [*tokenizer.encode_prompt("The text of words"), tokenizer.end_of_text]
    assert tokenizer.decode(np.array(ids)[says]).strip().startswith("of words")
    ((ids, says),) = encoded([asked("The te", "xt")], tokenizer)  # a word goes on without a space
    assert (
        tokenizer.decode([each for each in ids if each not in (*tokenizer.begin, tokenizer.end_of_text)]) == "The text"
    )


@pytest.mark.parametrize("kind", ["llama3", "qwen", "mistral"])
def test_every_turn_of_the_assistant_counts(saved, kind):
    tokenizer = saved[kind]
    ((ids, says),) = encoded([chat()], tokenizer)
    end = tokenizer.token(tokenizer.end_of_text)
    assert tokenizer.decode(np.array(ids)[says]) == f"Monday.{end}Tuesday — größer.{end}"
    assert ids.count(tokenizer.begin[0] if tokenizer.begin else -1) == len(tokenizer.begin)


def test_a_row_is_its_records_apart():
    records = [asked("What?", " That."), asked("Who?", " She, größer."), asked("The 4th text", " of words")]
    samples = rows(records)
    assert len(samples) == 1 and not samples.counts
    sample, done = samples[0], 0
    for ids, says in encoded(records, GPT2):
        place = slice(done, done + len(ids) - 1)
        assert sample["tokens"][place].tolist() == ids[:-1]
        assert sample["targets"][place].tolist() == [
            token if said else IGNORED for token, said in zip(ids[1:], says[1:], strict=True)
        ]
        assert sample["positions"][place].tolist() == list(range(len(ids) - 1))
        done = place.stop
    lengths = [len(ids) - 1 for ids, _ in encoded(records, GPT2)]
    assert [(number, span.stop - span.start) for number, span in samples.parts(0)] == [*enumerate(lengths)]
    assert (sample["targets"][done:] == IGNORED).all() and not sample["positions"][done:].any()
    assert {array.dtype for array in sample.values()} == {np.dtype(np.int32)}


def test_what_is_too_long_is_cut_or_left_out():
    long = asked("What?", " of words" * 30)
    cut = rows([long, asked("What? " * 30, " That."), asked("a", "b")], length=16)
    assert cut.records == [long, asked("a", "b")] and len(cut) == 2
    assert list(cut.counts.values()) == [2, 1] and cut[0]["targets"][-1] != IGNORED
    assert [what[:13] for what in cut.counts] == ["records trunc", "records whose"]
    whole = asked("What?", " That.")
    ((ids, _),) = encoded([whole], GPT2)
    assert not rows([whole], length=len(ids) - 1).counts and rows([whole], length=len(ids) - 2).counts
    special = rows([asked("a<|endoftext|>b", "c"), asked("a", "c")])  # special tokens in a text
    assert list(special.counts.values()) == [1]


def test_the_seed_orders_the_records_and_dev_has_its_own_order():
    records = [asked(f"{number}?", f" {number}") for number in range(40)]
    made = [rows(records, seed=seed, length=16) for seed in (1, 1, 2, None)]
    first, again, other, dev = ([samples[n]["tokens"].tolist() for n in range(len(samples))] for samples in made)
    assert first == again and first != other
    in_order = [token for ids, _ in encoded(records, GPT2) for token in ids[:-1]]
    padding = text_form().padding(1, tokens=16)["tokens"][0, 0]
    assert [token for row in dev for token in row if token != padding] == [t for t in in_order if t != padding]


def write(folder: Path, *lines: Any) -> str:
    file = folder / "a.jsonl"
    file.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return str(file)


def test_both_forms_are_read(tmp_path):
    lines = [{"prompt": "a", "completion": "b", "id": 7}, "", {"prompt": "x", "messages": TURNS}]
    lines += [{"prompt": "a", "completion": ""}, {"messages": TURNS[:1]}]
    found = read("instructions", write(tmp_path, *lines))
    assert found.entries == [asked("a", "b"), chat()]
    assert [record.name.rpartition(":")[2] for record in found.entries] == ["1", "3"]
    assert [record.context for record in found.entries] == ["a", "Which day?"]
    assert [line.partition(",")[0][-10:] for line in found.lines()] == ["completion", " assistant"]
    with pytest.raises(UserError, match=r"a.jsonl:4: records with an empty completion, skipped; valid: text, or"):
        read("instructions", write(tmp_path, *lines), strict=True)


@pytest.mark.parametrize("field", ["weight", "train", "training", "trainable", "train_on_turn", "loss_mask", "masked"])
def test_fields_that_exclude_messages(tmp_path, saved, field):
    (no, yes) = (1.0, 0) if field == "masked" else (0, True)
    asks, first, asks_again, second = TURNS
    lines = [[asks | {field: no}, first | {field: value}, asks_again, second] for value in (no, yes, None)]
    lines += [[asks, first | {field: no}], [asks, first | {field: no}, asks_again, second | {field: no}]]
    found = read("instructions", write(tmp_path, *({"messages": line} for line in lines)), strict=True)
    assert [record.answers for record in found.entries] == [(3,), (1, 3), (1, 3)]
    assert [line.partition(",")[0] for line in found.lines()] == ["2 records with weight 0"]
    tokenizer = saved["qwen"]
    ((ids, says),) = encoded(found.entries[:1], tokenizer)
    assert tokenizer.decode(np.array(ids)[says]) == "Tuesday — größer.<|im_end|>"


def test_records_with_weights_and_variables_of_the_template(tmp_path, saved):
    lines = [{"prompt": "a", "completion": "b", "weight": weight} for weight in (0, 1, None)]
    lines += [{"messages": TURNS, "weight": weight} for weight in (0, 1)]
    lines += [{"messages": TURNS, "chat_template_kwargs": args} for args in ({"date": "a"}, {"date": "b"}, None)]
    found = read("instructions", write(tmp_path, *lines))
    assert [record.name.rpartition(":")[2] for record in found.entries] == ["2", "3", "5", "6", "7", "8"]
    _, _, plain, first, second, none = found.entries
    assert none == plain and records_digest([none]) == records_digest([plain])
    assert len({records_digest([record]) for record in (plain, first, second)}) == 3
    (tmp_path / "t").mkdir()
    tokenizer = load_tokenizer(write_saved(tmp_path / "t", "qwen"))
    tokenizer.chat_template = "{{ date }}{% for m in messages %}{{ m.content }}{% endfor %}"
    assert [tokenizer.decode(ids)[:2] for ids, _ in encoded([plain, first, second], tokenizer)] == ["Wh", "aW", "bW"]


def test_arrays_and_joined_files(tmp_path):
    """An array of JSON, as many datasets are; archives whose members have marks of the byte order."""
    values = [{"prompt": "a", "completion": "b"}, {"messages": TURNS}]
    (tmp_path / "a.json").write_text(json.dumps(values, indent=2))
    marked = [b"\xef\xbb\xbf" + json.dumps(value).encode() + b"\n" for value in values]
    (tmp_path / "b.jsonl.gz").write_bytes(b"".join(map(gzip.compress, marked)))
    for name in "a.json", "b.jsonl.gz":
        found = read("instructions", str(tmp_path / name))
        assert found.entries == [asked("a", "b"), chat()]
        assert [record.name.rpartition(":")[2] for record in found.entries] == ["1", "2"]
    (tmp_path / "a.jsonl").write_text(json.dumps(values) + "\n" + json.dumps(values))
    assert read("instructions", str(tmp_path / "a.jsonl")).entries == [asked("a", "b"), chat()] * 2
    (tmp_path / "a.json").write_text(json.dumps([*values, {"prompt": "a"}]))
    with pytest.raises(UserError, match=r'a\.json:3: no key "completion"'):
        read("instructions", str(tmp_path / "a.json"))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"prompt": "a"}, ':2: no key "completion", there are "prompt"; valid: text under "completion"'),
        ({"prompt": "a", "completion": 3}, ':2: "completion" is not text; valid: text'),
        ({"prompt": "a", "completion": "\ud800"}, ':2: "completion" contains half a character'),
        ({"messages": {}}, ':2: "messages" is not a list; valid: a list'),
        ({"messages": [{"role": "user"}]}, ':2: message 1: no key "content", there are "role"'),
        ({"messages": [TURNS[0], "b"]}, ":2: message 2: the message is not an object; valid: an object"),
        ({"messages": TURNS, "tools": [{}]}, ':2: "tools" are not supported; valid: '),
        ({"messages": [TURNS[0], TURNS[1] | {"weight": 0.5}]}, ':2: message 2: "weight" is 0.5; valid: 0, 1, false or'),
        ({"messages": [TURNS[1] | {"train_detail": []}]}, ':2: message 1: "train_detail" is []; valid: no train_det'),
        ({"messages": [TURNS[1] | {"weight": 1, "train": False}]}, ":2: message 1: weight and train contradict each"),
        ({"messages": [TURNS[0] | {"weight": 1}, TURNS[1]]}, ":2: message 1 is to be trained on; valid: only messages"),
        ({"prompt": "a", "completion": "b", "tools": [{}]}, ':2: "tools" in a record of texts; valid: messages, or'),
        ({"messages": TURNS, "chat_template_kwargs": 3}, ":2: chat_template_kwargs is not an object; valid: "),
        ({"messages": TURNS, "chat_template_kwargs": {"tools": []}}, ":2: chat_template_kwargs: tools cannot be given"),
        ('["a"]', ":2: the record is not an object; valid: an object"),
        ('{\n "prompt": "a",\n "completion": "b"\n}\n', ":2: not JSON: "),
    ],
)
def test_bad_records_are_one_line(tmp_path, line, message):
    file = write(tmp_path, {"prompt": "a", "completion": "b"}, line)
    with pytest.raises(UserError) as refusal:
        read("instructions", file)
    assert f"--data.dev: {file}{message}" in str(refusal.value) and "; valid: " in str(refusal.value)


def test_refused_messages(saved):
    with pytest.raises(UserError, match=r"^f:2: these records have messages, but the tokenizer has no chat template;"):
        rows([chat()])
    with pytest.raises(UserError, match=r"^f:2: the chat template of the tokenizer cannot render it: Conversation"):
        rows([chat(TURNS[0], TURNS[0], TURNS[1])], saved["mistral"])
    assert "role" in LLAMA3 and len(rows([chat(TURNS[0], TURNS[0], TURNS[1])], saved["llama3"])) == 1
