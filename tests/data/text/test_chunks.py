"""The map from samples to sentences, against the plain loop over sentences."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megajax.data.text import chunks
from megajax.data.text.chunks import count_sentences, join
from megajax.data.text.indexed import IndexedDataset, IndexedWriter


def one_by_one(lengths: list[list[int]], numbers: list[int], target) -> list[tuple[list[int], int]]:
    """The sentences of every chunk, and its target, as Megatron-LM's loop finds them."""
    firsts = np.cumsum([0, *map(len, lengths)])
    found = []
    for number in numbers:
        filled = [(int(firsts[number]) + n, size) for n, size in enumerate(lengths[number]) if size]
        chunk: list[tuple[int, int]] = []
        for place, sentence in enumerate(filled):
            chunk.append(sentence)
            wanted, left = int(target(np.array([chunk[0][0]]))[0]), len(filled) - place - 1
            if left == 0 or (len(chunk) >= 2 and left > 1 and sum(size for _, size in chunk) >= wanted):
                found.append(([sentence for sentence, _ in chunk], wanted))
                chunk = []
    return found


def targets(firsts):
    return 3 + firsts * 7 % 20


@settings(max_examples=60, deadline=None)
@given(lengths=st.lists(st.lists(st.integers(0, 12), max_size=12), max_size=12), data=st.data())
def test_as_one_by_one(tmp_path_factory, lengths, data):
    """However many sentences are looked at in one go."""
    prefix = tmp_path_factory.mktemp("chunks") / "m"
    with IndexedWriter(prefix, 100) as writer:
        for document in lengths:
            writer.add_document(*([7] * length for length in document))
    documents = IndexedDataset(prefix)
    keep = data.draw(st.lists(st.booleans(), min_size=len(lengths), max_size=len(lengths)))
    numbers = np.flatnonzero(np.array(keep, bool))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks, "_BLOCK", data.draw(st.sampled_from([1, 5, 1 << 20])))
        found = join(documents, numbers, targets)
        counts = count_sentences(documents)
    expected = one_by_one(lengths, numbers.tolist(), targets)
    assert found.begins.tolist() == [sentences[0] for sentences, _ in expected]
    assert (found.begins + found.sizes).tolist() == [sentences[-1] + 1 for sentences, _ in expected]
    assert found.targets.tolist() == [wanted for _, wanted in expected]
    filled = [sum(map(bool, sizes)) for sizes in lengths]
    assert counts == (sum(map(bool, filled)), sum(filled), filled.count(1))
    alone = np.isin(found.begins, np.flatnonzero(np.repeat(filled, [len(sizes) for sizes in lengths]) == 1))
    assert ((found.sizes == 1) == alone).all(), "only a document of one sentence makes a chunk of one"
