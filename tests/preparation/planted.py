"""A corpus with planted copies and test-set leaks, and an independent reckoning of what should happen to it."""

import json
import random
from dataclasses import dataclass
from pathlib import Path

LETTERS = "abcdefghijklmnopqrstuvwxyz"


@dataclass
class Planted:
    """Attributes: corpus, test_set: files; near: document and its Jaccard similarity to an earlier one; leaked, exact:
    documents; texts: all of them."""

    corpus: Path
    test_set: Path
    near: dict[int, float]
    leaked: set[int]
    exact: set[int]
    texts: list[str]


def similarity(one: str, other: str) -> float:
    """Jaccard similarity of 5-gram sets, from its definition."""
    sets = [{text[start : start + 5] for start in range(len(text) - 4)} for text in (one.lower(), other.lower())]
    return len(sets[0] & sets[1]) / len(sets[0] | sets[1])


def plant(folder: Path, documents: int = 600, near: int = 150, leaked: int = 50, exact: int = 20) -> Planted:
    """Write `corpus.jsonl` and `test.jsonl`; no document is alike to another but those that are planted."""
    rng = random.Random(7)

    def words(count: int) -> list[str]:
        return ["".join(rng.choices(LETTERS, k=rng.randint(3, 9))) for _ in range(count)]

    tests = [words(40) for _ in range(leaked)]
    count = documents - near - exact
    originals = [words(rng.randint(350, 450)) for _ in range(count)]
    places = rng.sample(range(count), leaked)
    for test, place in zip(tests, places, strict=True):
        start = rng.randint(0, 300)
        originals[place][start:start] = [word.capitalize() for word in test[5 : 5 + rng.randint(8, 20)]]
    clean = [number for number in range(count) if number not in set(places)]
    texts = [" ".join(text) for text in originals]
    expected, copies = {}, set()
    for _ in range(near):
        source = rng.choice(clean)
        wanted = rng.uniform(0.6, 0.95)
        changed = list(originals[source])
        share = 0.6 * (1 - wanted) / (1 + wanted)  # of the words; a changed word also changes grams around it
        for place in rng.sample(range(len(changed)), round(share * len(changed))):
            changed[place] = words(1)[0]
        expected[len(texts)] = similarity(texts[source], " ".join(changed))
        texts.append(" ".join(changed))
    for _ in range(exact):
        copies.add(len(texts))
        texts.append(texts[rng.choice(clean)])
    corpus, test_set = folder / "corpus.jsonl", folder / "test.jsonl"
    corpus.write_text("".join(json.dumps({"id": number, "text": text}) + "\n" for number, text in enumerate(texts)))
    test_set.write_text("".join(json.dumps({"text": ", ".join(test) + "."}) + "\n" for test in tests))
    return Planted(corpus, test_set, expected, set(places), copies, texts)
