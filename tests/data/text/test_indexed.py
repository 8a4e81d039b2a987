"""The .bin and .idx files against a reader and a writer made here from the format's description alone."""

import errno
import itertools
import os
import struct
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megajax.core.errors import UserError
from megajax.data.text.indexed import IndexedDataset, IndexedWriter

FORMATS = {1: "B", 2: "b", 3: "h", 4: "i", 5: "q", 8: "H"}


def read_by_description(prefix: Path) -> tuple[int, list[list[int]], list[int]]:
    """Type code, the sequences, the document index."""
    index, tokens = Path(f"{prefix}.idx").read_bytes(), Path(f"{prefix}.bin").read_bytes()
    assert index[:9] == b"MMIDIDX\x00\x00"
    version, code, num_sequences, num_entries = struct.unpack("<QBQQ", index[9:34])
    assert version == 1
    lengths = struct.unpack(f"<{num_sequences}i", index[34 : 34 + 4 * num_sequences])
    start = 34 + 4 * num_sequences
    pointers = struct.unpack(f"<{num_sequences}q", index[start : start + 8 * num_sequences])
    documents = struct.unpack(f"<{num_entries}q", index[start + 8 * num_sequences :])
    sequences = [
        list(struct.unpack_from(f"<{n}{FORMATS[code]}", tokens, p)) for n, p in zip(lengths, pointers, strict=True)
    ]
    return code, sequences, list(documents)


def write_by_description(
    prefix: Path, sequences: list[list[int]], documents: list[int], *, code: int = 8, **lies: Any
) -> None:
    """As Megatron-LM writes it; every field can be made to lie."""
    letter = FORMATS.get(code, "H")
    size = struct.calcsize(letter)
    lengths = lies.get("lengths", [len(sequence) for sequence in sequences])
    pointers = lies.get("pointers", [size * sum(map(len, sequences[:number])) for number in range(len(sequences))])
    counts = lies.get("num_sequences", len(lengths)), lies.get("num_entries", len(documents))
    with open(f"{prefix}.idx", "wb") as file:
        file.write(lies.get("magic", b"MMIDIDX\x00\x00"))
        file.write(struct.pack("<QBQQ", lies.get("version", 1), code, *counts))
        file.write(struct.pack(f"<{len(lengths)}i", *lengths) + struct.pack(f"<{len(pointers)}q", *pointers))
        file.write(struct.pack(f"<{len(documents)}q", *documents))
    with open(f"{prefix}.bin", "wb") as file:
        for sequence in sequences:
            file.write(struct.pack(f"<{len(sequence)}{letter}", *sequence))


sentences_of = st.lists(st.lists(st.lists(st.integers(0, 256), max_size=6), max_size=5), max_size=8)


@given(documents=sentences_of, vocab_size=st.sampled_from([257, 65499, 65500, 100_000]))
def test_round_trip_of_sentences(tmp_path_factory, documents, vocab_size):
    """Documents of several sequences, of one, of none; Megatron-LM's form for BERT."""
    prefix = tmp_path_factory.mktemp("indexed") / "new" / "corpus.v1"
    documents = [*documents, [[0, vocab_size - 1]]] if documents else []
    with IndexedWriter(prefix, vocab_size) as writer:
        for number, document in enumerate(documents):
            writer.add_document(*(ids if number % 2 else np.array(ids, np.int32) for ids in document))
    sentences = [sentence for document in documents for sentence in document]
    firsts = np.cumsum([0, *map(len, documents)]).tolist()
    assert read_by_description(prefix) == (8 if vocab_size < 65500 else 4, sentences, firsts)
    assert sorted(os.listdir(prefix.parent)) == ["corpus.v1.bin", "corpus.v1.idx"]
    dataset = IndexedDataset(prefix)
    assert dataset.num_documents == len(documents) and dataset.document_index.tolist() == firsts
    assert dataset.num_tokens == sum(map(len, sentences))
    for number, document in enumerate(documents):
        assert dataset.document(number).tolist() == [token for sentence in document for token in sentence]
        first, last = firsts[number : number + 2]
        if first < last:
            offsets = dataset.sequence_offsets(first, last)
            parts = [dataset.tokens[a:b].tolist() for a, b in itertools.pairwise(offsets)]
            assert parts == document


@pytest.mark.parametrize("code", FORMATS)
def test_files_of_megatron_load(tmp_path, code):
    sequences = [[1, 2, 3], [4], [], [5, 6], [7]]
    write_by_description(tmp_path / "m", sequences, [0, 0, 2, 4, 4, 5, 5], code=code)
    dataset = IndexedDataset(tmp_path / "m")
    documents = [dataset.document(number).tolist() for number in range(dataset.num_documents)]
    assert documents == [[], [1, 2, 3, 4], [5, 6], [], [7], []]
    assert dataset.sequence_lengths.tolist() == [3, 1, 0, 2, 1]
    assert dataset.document_index.tolist() == [0, 0, 2, 4, 4, 5, 5]


GOOD = {"sequences": [[1, 2, 3], [4, 5]], "documents": [0, 1, 2]}


@pytest.mark.parametrize(
    "lie, problem",
    [
        ({"magic": b"TNTIDX\x00\x00\x00"}, "not an index of Megatron-LM"),
        ({"version": 2}, "not an index of Megatron-LM"),
        ({"code": 6}, "not an index of Megatron-LM"),
        ({"code": 9}, "not an index of Megatron-LM"),
        ({"num_sequences": 3}, "bytes are not those of 3 sequences"),
        ({"num_sequences": 2**63 + 1}, "bytes are not those of"),
        ({"num_entries": 2**64 - 1}, "bytes are not those of"),
        ({"lengths": [3, -2]}, "sequence 1 does not begin"),
        ({"lengths": [2, 2]}, "sequence 1 does not begin"),
        ({"lengths": [3, 1]}, "10 bytes are not those"),
        ({"lengths": [2**31 - 1, 2**31 - 1], "pointers": [0, 2 * (2**31 - 1)]}, "10 bytes are not those"),
        ({"pointers": [2, 8]}, "sequence 0 does not begin"),
        ({"pointers": [0, -(2**63)]}, "sequence 1 does not begin"),
        ({"documents": [0, 1]}, "documents do not go"),
        ({"documents": []}, "documents do not go"),
        ({"documents": [0, 2, 1, 2]}, "documents do not go"),
    ],
)
def test_lying_index(tmp_path, lie, problem):
    write_by_description(tmp_path / "m", **(GOOD | lie))
    with pytest.raises(UserError, match=rf"{tmp_path}/m\.(idx|bin): .*{problem}") as caught:
        IndexedDataset(tmp_path / "m")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("suffix", ["idx", "bin"])
def test_any_truncation_or_addition_is_found(tmp_path, suffix):
    write_by_description(tmp_path / "m", **GOOD)
    file = tmp_path / f"m.{suffix}"
    content = file.read_bytes()
    for changed in [*(content[:length] for length in range(len(content))), content + b"\0", content + content]:
        file.write_bytes(changed)
        with pytest.raises(UserError, match=r"m\.(idx|bin): "):
            IndexedDataset(tmp_path / "m")
    file.unlink()
    with pytest.raises(UserError, match=rf"m\.{suffix}: cannot be read"):
        IndexedDataset(tmp_path / "m")


def test_checks_reach_every_part_of_a_large_index(tmp_path, monkeypatch):
    monkeypatch.setattr("megajax.data.text.indexed._CHECK_SEQUENCES", 3)
    sequences = [[n] * (n % 4) for n in range(20)]
    good = {"sequences": sequences, "documents": list(range(21))}
    write_by_description(tmp_path / "m", **good)
    assert IndexedDataset(tmp_path / "m").document(19).tolist() == [19, 19, 19]
    pointers = [2 * sum(map(len, sequences[:number])) for number in range(20)]
    for wrong in range(20):
        changed = [pointer + 2 * (number == wrong) for number, pointer in enumerate(pointers)]
        write_by_description(tmp_path / "m", **good, pointers=changed)
        with pytest.raises(UserError, match=f"sequence {wrong} does not begin"):
            IndexedDataset(tmp_path / "m")


@pytest.mark.parametrize("existing", [False, True])
def test_failure_leaves_the_final_names_alone(tmp_path, existing):
    if existing:
        write_by_description(tmp_path / "m", **GOOD)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    with pytest.raises(KeyboardInterrupt), IndexedWriter(tmp_path / "m", 100) as writer:
        writer.add_document([1, 2])
        raise KeyboardInterrupt
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


@pytest.mark.parametrize("synced", [[], [None]], ids=["tokens", "index"])
def test_full_disk(tmp_path, monkeypatch, synced):
    results = [*synced, OSError(errno.ENOSPC, "No space left on device"), None]
    monkeypatch.setattr(os, "fsync", Mock(side_effect=results))
    message = r"m\.bin: cannot be written: No space left on device"
    with pytest.raises(UserError, match=message), IndexedWriter(tmp_path / "m", 100) as writer:
        writer.add_document([1, 2])
    assert list(tmp_path.iterdir()) == []


def test_an_old_index_never_lies_beside_new_tokens(tmp_path, monkeypatch):
    write_by_description(tmp_path / "m", **GOOD)
    replace = Path.replace

    def refuse_index(self, target):
        if target.suffix == ".idx":
            raise OSError(errno.EIO, "Input/output error")
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", refuse_index)
    with pytest.raises(UserError, match="cannot be written"), IndexedWriter(tmp_path / "m", 100) as writer:
        writer.add_document([1, 2])
    assert [file.name for file in tmp_path.iterdir()] == ["m.bin"]


@pytest.mark.parametrize("code", [2, 3, 4, 5, 8])
def test_ids_beyond_the_vocabulary(tmp_path, monkeypatch, code):
    monkeypatch.setattr("megajax.data.text.tokens._SCAN_TOKENS", 4)
    write_by_description(tmp_path / "m", [[1, 2, 3, 4, 5], [6, 50, 100]], [0, 1, 2], code=code)
    dataset = IndexedDataset(tmp_path / "m")
    dataset.check_vocabulary(101)
    message = (
        r"m\.bin: token id 50 at position 6 .*valid: 0 to 49, with --model\.vocab-size 50; the largest id here is 100"
    )
    with pytest.raises(UserError, match=message):
        dataset.check_vocabulary(50)
    if code != 8:
        write_by_description(tmp_path / "m", [[1, 2, -3]], [0, 1], code=code)
        with pytest.raises(UserError, match="token id -3 at position 2"):
            IndexedDataset(tmp_path / "m").check_vocabulary(1000)


def test_a_type_that_fits_needs_no_scan(tmp_path, monkeypatch):
    write_by_description(tmp_path / "m", **GOOD, code=8)
    dataset = IndexedDataset(tmp_path / "m")
    dataset.tokens = np.lib.stride_tricks.as_strided(np.zeros(1, np.uint16), (1 << 60,), (0,))  # a scan would never end
    dataset.check_vocabulary(65536)
