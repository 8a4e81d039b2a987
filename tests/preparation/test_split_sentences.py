"""`megajax prepare --split-sentences`: Megatron-LM's form for BERT."""

import numpy as np
import pytest
from test_prepare_command import jsonl
from test_prepare_command import run as prepare

from megajax.core.errors import UserError
from megajax.data.text.encoding import split_sentences
from megajax.data.text.indexed import IndexedDataset
from megajax.data.text.inputs import DOCSTRINGS, STANDARD_LIBRARY
from megajax.data.text.records import TextFiles
from megajax.data.text.tokenizers import load_tokenizer, train_tokenizer
from megajax.preparation.plan import PreparationTask, make_plan
from megajax.preparation.prepare_options import PrepareOptions

TEXTS = [" ".join(f"Word {n} has {k} and {n * k}." for k in range(1 + n % 7)) for n in range(60)]


def run(tmp_path, capsys, *arguments, inputs=()) -> dict:
    flags = ["--tokenizer", "wordpiece", "--vocab-size", "150", "--min-tokens", "0", "--duplicates", "keep"]
    return prepare(capsys, jsonl(tmp_path / "a.jsonl", *TEXTS), *inputs, *flags, *arguments)


def sentences(prefix) -> list[list[str]]:
    dataset, tokenizer = IndexedDataset(prefix), load_tokenizer(f"{prefix}.tokenizer")
    found = []
    for first, last in zip(dataset.document_index[:-1].tolist(), dataset.document_index[1:].tolist(), strict=True):
        borders = dataset.sequence_offsets(first, last)[1:-1] - dataset.document_offsets[len(found)]
        found.append([tokenizer.decode(ids) for ids in np.split(dataset.document(len(found)), borders)])
    return found


def test_a_sequence_for_every_sentence(tmp_path, capsys):
    """The same for any number of workers, and no end of text; the report counts them."""
    found = run(tmp_path, capsys, "--split-sentences", "--output", tmp_path / "m")
    expected = [[sentence.lower() for sentence in split_sentences(text)] for text in TEXTS]
    assert sentences(tmp_path / "m") == expected
    dataset = IndexedDataset(tmp_path / "m")
    assert found["tokens"] == dataset.num_tokens and found["documents"] == 60
    assert found["sentences"] == sum(map(len, expected)) == len(dataset.sequence_lengths)
    assert found["single_sentence_documents"] == sum(len(document) == 1 for document in expected) == 9
    run(tmp_path, capsys, "--split-sentences", "--output", tmp_path / "n", "--workers", 2)
    for suffix in ".bin", ".idx":
        assert (tmp_path / f"m{suffix}").read_bytes() == (tmp_path / f"n{suffix}").read_bytes()
    with pytest.raises(UserError, match="was made from other input or with other options"):
        run(tmp_path, capsys, "--output", tmp_path / "m")


def test_docstrings_are_another_input_than_the_code(tmp_path):
    plans = [
        make_plan(PreparationTask([word], str(tmp_path / "m"), PrepareOptions()), TextFiles([word], "INPUT"))
        for word in (STANDARD_LIBRARY, DOCSTRINGS)
    ]
    assert plans[0]["inputs"] == plans[1]["inputs"] and plans[0] != plans[1]


def test_documents_without_a_token_are_dropped(tmp_path, capsys):
    flags = "--split-sentences", "--output", tmp_path / "m", "--no-fix-unicode"
    found = run(tmp_path, capsys, *flags, inputs=[jsonl(tmp_path / "b.jsonl", "\x7f")])
    assert found["dropped"]["too short"]["count"] == 1 and found["documents"] == 60


def test_tokenizers_that_do_not_do(tmp_path, capsys):
    with pytest.raises(UserError, match=r"--split-sentences with --tokenizer bpe: .*; valid: --tokenizer wordpiece"):
        run(tmp_path, capsys, "--output", tmp_path / "m", "--split-sentences", "--tokenizer", "bpe")
    train_tokenizer(TEXTS, 260).save(tmp_path / "gpt")
    with pytest.raises(UserError, match=r"--tokenizer .*gpt has no \[CLS\] and .*; valid: a WordPiece vocabulary"):
        run(tmp_path, capsys, "--output", tmp_path / "m", "--split-sentences", "--tokenizer", tmp_path / "gpt")
    assert not list(tmp_path.glob("m*"))
