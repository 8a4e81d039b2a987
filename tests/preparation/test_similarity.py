"""Long documents: their pairs are many, and told by sketches; what is dropped is what exact similarities say."""

import itertools

import numpy as np
import pytest
from tiny import full

from megajax.preparation import similarity
from megajax.preparation.corpus import CleanedShards
from megajax.preparation.deciding import drop_copies, dropped_in
from megajax.preparation.duplicates import band_hashes
from megajax.preparation.prepare_options import PrepareOptions
from megajax.preparation.shards import KEPT, NEAR, WorkFolder
from megajax.preparation.similarity import SKETCH, estimate, gram_set, jaccard, sketches
from megajax.preparation.workers import processes

LENGTH = 30_000  # characters


def long_texts(number: int) -> list[str]:
    """A text of random words, and others in each of which more of them are replaced."""
    rng = np.random.default_rng(0)
    known = np.array(["".join(rng.choice(list("etaoinshrdlu"), rng.integers(3, 9))) for _ in range(2000)])
    base = rng.choice(known, LENGTH // 5)
    replaced = [rng.random(len(base)) < place / 50 for place in range(number)]
    return [" ".join(np.where(places, rng.choice(known, len(base)), base))[:LENGTH] for places in replaced]


def test_estimates_are_close() -> None:
    texts = [*long_texts(13)[::3], "ab" * LENGTH, "short"]
    places, found = sketches(texts)
    assert places == [0, 1, 2, 3, 4] and found.shape == (5, SKETCH)
    exact = {pair: jaccard(*(gram_set(texts[place]) for place in pair)) for pair in itertools.combinations(places, 2)}
    assert min(exact.values()) < 0.55 < 0.8 < max(exact.values())
    for (one, other), expected in exact.items():
        assert abs(estimate(found[one], found[other]) - expected) < 5 * (expected * (1 - expected) / SKETCH) ** 0.5
    assert estimate(found[0], found[0]) == 1


@pytest.mark.parametrize("threshold", [full(0.5), 0.7])
def test_few_pairs_are_compared_by_their_texts(tmp_path, monkeypatch, threshold: float) -> None:
    """What is dropped, with its original, and those that an estimate leaves open."""
    texts = long_texts(14)
    texts += [texts[2][: LENGTH - 50] + "x" * 50, "short", "short too"]
    sets = list(map(gram_set, texts))
    work, (sketched, found) = WorkFolder(tmp_path, "x"), sketches(texts)
    work.save("clean", 0, {"starts": work.save_texts(0, texts)})
    work.save_bands(0, band_hashes(texts, threshold))
    rule = np.full(len(texts), KEPT, np.uint8)
    digest = np.arange(2 * len(texts), dtype=np.uint64).reshape(-1, 2)
    work.save("tokens", 0, {"rule": rule, "sketched": np.array(sketched), "sketches": found, "digest": digest})
    CleanedShards.combined([{"pieces": len(texts), "texts": len(texts), "bytes": 0, "files": [0, 0, 0]}]).save(work)
    compared = []
    monkeypatch.setattr(similarity, "jaccard", lambda *grams: compared.append(grams) or jaccard(*grams))
    with processes(1) as workers:
        *_, (_, candidates) = drop_copies(work, PrepareOptions(jaccard=threshold), workers)
    dropped, originals, similarities = dropped_in(work, "near", 0)

    expected = np.full(len(texts), KEPT, np.uint8)
    for document in range(len(texts)):
        similar = (jaccard(sets[document], sets[one]) > threshold for one in range(document) if expected[one] == KEPT)
        expected[document] = NEAR if any(similar) else KEPT
    assert dropped.tolist() == np.flatnonzero(expected == NEAR).tolist() and expected[14] == NEAR
    for document, original, found in zip(dropped, originals, similarities, strict=True):
        assert found == jaccard(sets[document], sets[original]) > threshold
    pairs = (jaccard(*pair) for pair in itertools.combinations(sets[:15], 2))
    close = sum(abs(each - threshold) < 10 * (threshold * (1 - threshold) / SKETCH) ** 0.5 for each in pairs)
    assert len(compared) <= min(len(dropped) + close, 0.7 * candidates)
