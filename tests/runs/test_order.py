"""What a start changes in the order of samples: none is repeated or left out, and the place follows from what is
stored."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from tiny import tiny_config, user_error

from megajax.data.config import Source, skipped_samples
from megajax.data.samples.blend import Blend, BlendedSamples
from megajax.runs.data import _sources, has_whole_run_data, make_run_data, open_run_data
from megajax.runs.order import Order, OrderSegment, default_corpora, known_corpora, next_order, read_order, write_order
from megajax.settings.config import Config


class Corpus:
    """Samples that say whose they are."""

    sequence_length, epoch_size = 8, 100

    def __init__(self, name: str) -> None:
        self.name = name

    def __getitem__(self, number: int) -> tuple[str, int]:
        return self.name, number


def opened(part: OrderSegment):
    """The samples of a part's corpora, as they are opened."""
    corpora = [Corpus(name) for name, _ in part.corpora]
    return corpora[0] if len(corpora) == 1 else BlendedSamples(corpora, [weight for _, weight in part.corpora])


def drawn(parts: list[OrderSegment], steps: int) -> list[list[tuple[str, int]]]:
    """The samples of every step of a run, each from the start that drew them."""
    found = []
    for number, part in enumerate(parts):
        order = Order(parts[: number + 1])
        samples = order.samples(opened(part))
        for step in range(part.step, parts[number + 1].step if number + 1 < len(parts) else steps):
            first = order.sizes.first_sample(step)
            found.append([samples[first + row] for row in range(order.sizes.at(step).size)])
    return found


def counted(parts: list[OrderSegment], steps: int) -> list[list[tuple[str, int]]]:
    """The same, sample by sample, with counters for everything."""
    found, number, begin, total, part = [], 0, 0, 0, parts[0]
    before: dict[str, int] = {}
    taken: dict[str, int] = {}
    for step in range(steps):
        for new in parts:
            if new.step == step:
                begin, before = (number, dict(taken)) if new.corpora != part.corpora else (begin, before)
                part = new
        full, start, increment, samples = part.batch
        size = min(full, start + total * ((full - start) // increment) // samples * increment) if start else full
        total, rows = total + size, []
        while len(rows) < size:
            source, own = Blend([weight for _, weight in part.corpora]).place(number - begin)
            name, own = part.corpora[source][0], before.get(part.corpora[source][0], 0) + own
            taken[name] = own + 1
            rows += [] if any(first <= number <= last for first, last in part.skip) else [(name, own)]
            number += 1
        found.append(rows)
    return found


ALONE, OTHER = ((".", 1.0),), (("source-0", 1.0),)
BLEND, WEIGHTS = ((".", 0.7), ("source-0", 0.3)), ((".", 0.25), ("source-0", 0.25), ("source-1", 0.5))
RAMP = (8, 2, 3, 40)
CHANGES = {
    "a batch": [(0, (4, 0, 0, 0), ALONE, ()), (3, (6, 0, 0, 0), ALONE, ()), (5, (2, 0, 0, 0), ALONE, ())],
    "into a ramp and within": [(0, (2, 0, 0, 0), ALONE, ()), (2, RAMP, ALONE, ()), (4, (8, 2, 2, 20), ALONE, ())],
    "a ramp that would be over": [(0, (4, 0, 0, 0), ALONE, ()), (12, RAMP, ALONE, ())],
    "blends": [(0, (4, 0, 0, 0), ALONE, ()), (3, (4, 0, 0, 0), BLEND, ()), (5, (4, 0, 0, 0), WEIGHTS, ()),
               (9, (4, 0, 0, 0), OTHER, ()), (10, (4, 0, 0, 0), ALONE, ())],
    "ranges": [(0, (4, 0, 0, 0), ALONE, ((3, 5), (8, 8))), (2, (4, 0, 0, 0), ALONE, ((0, 13), (20, 22))),
               (4, (4, 0, 0, 0), ALONE, ())],
    "the next sample begins a range": [(0, (4, 0, 0, 0), ALONE, ((8, 11),)), (2, (4, 0, 0, 0), ALONE, ((12, 12),)),
                                       (3, (4, 0, 0, 0), ALONE, ((13, 14),))],
    "all of it": [(0, (4, 0, 0, 0), BLEND, ((1, 2),)), (3, (6, 0, 0, 0), BLEND, ((14, 30),)),
                  (4, (6, 0, 0, 0), WEIGHTS, ((30, 33), (50, 60))), (6, RAMP, BLEND, ((60, 61),))],
}  # fmt: skip


@pytest.mark.parametrize("changes", CHANGES.values(), ids=CHANGES)
def test_every_step_draws_what_counting_gives(changes):
    parts = [OrderSegment(*each) for each in changes]
    found = drawn(parts, 14)
    assert found == counted(parts, 14)
    everything = [sample for step in found for sample in step]
    assert len(set(everything)) == len(everything)


def test_nothing_is_left_out_without_ranges():
    parts = [OrderSegment(*each) for each in CHANGES["blends"]]
    found = sorted(sample for step in drawn(parts, 20) for sample in step)
    for name in (".", "source-0", "source-1"):
        own = [number for each, number in found if each == name]
        assert own == list(range(len(own))) != []


def of(config: Config, batch: int = 8, skip: tuple[str, ...] = (), sources: tuple[Source, ...] = ()) -> Config:
    data = replace(config.data, path="" if sources else "text", skip=skip, sources=sources)
    return replace(config, train=replace(config.train, global_batch=batch), data=data)


def test_starts_are_noted_where_they_change_the_order(tmp_path: Path):
    """Starts after steps 0, 10, 20 (unchanged), 30, 15 (a fallback) and 15; nothing is written before the first
    change."""
    first = of(tiny_config())
    starts = [(first, 0), (first, 10), (of(first, 4), 20), (of(first, 4), 25), (of(first, 4, ("9:9", "3:8")), 30)]
    last = None
    for config, step in starts:
        order = next_order(config, tmp_path, default_corpora(config), last, step)
        write_order(config, tmp_path, order)
        assert read_order(config, tmp_path).parts == order.parts
        assert (tmp_path / "order.json").exists() == (step >= 20)
        last = config
    assert [part.step for part in order.parts] == [0, 20, 30]
    assert [part.batch[0] for part in order.parts] == [8, 4, 4]
    assert order.parts[-1].skip == ((3, 9),) and order.sizes.first_sample(30) == 20 * 8 + 10 * 4
    fallen = order.at(15)
    assert [part.step for part in fallen.parts] == [0, 15] and fallen.parts[-1].skip == ((3, 9),)
    write_order(config, tmp_path, fallen)
    (tmp_path / "data").mkdir()
    (tmp_path / "order.json").rename(tmp_path / "data" / "order.json")  # where earlier versions noted it
    write_order(config, tmp_path, fallen)
    shutil.rmtree(tmp_path / "data")
    assert known_corpora(first, tmp_path, 20) == {".": "text"} and known_corpora(first, tmp_path, 0) == {}
    assert read_order(config, tmp_path).parts == fallen.parts
    again = next_order(first, tmp_path, default_corpora(first), config, 15)
    assert [part.step for part in again.parts] == [0], "what began at this step was never trained"


def test_a_run_without_changes_has_the_order_of_its_configuration(tmp_path: Path):
    """Also with a blend, and after a start that changed something was undone before it trained."""
    config = of(tiny_config(), sources=(Source(path="a", weight=3.0), Source(path="b", weight=1.0)))
    assert read_order(config, tmp_path).parts == (
        OrderSegment(0, (8, 0, 0, 0), (("source-0", 3.0), ("source-1", 1.0)), ()),
    )
    changed = of(config, 4)
    write_order(changed, tmp_path, next_order(changed, tmp_path, ["."], config, 5))
    write_order(config, tmp_path, next_order(config, tmp_path, default_corpora(config), changed, 5))
    assert read_order(config, tmp_path).parts == Order([OrderSegment.of(config, default_corpora(config))]).parts


def test_a_corpus_is_known_by_its_path(tmp_path: Path):
    """A run that has trained may name others, which it tokenizes like the first; one that has not may not. Where its
    data were deleted, they are made again."""
    paths = [tmp_path / f"{name}.txt" for name in "ab"]
    for path in paths:
        path.write_text(f"Some text of {path.name}, in a line.\n\n" * 400)
    first = tiny_config(vocab_size=300)
    first = replace(first, data=replace(first.data, path=str(paths[0])))
    folder = tmp_path / "data"
    known = {".": str(paths[0])}
    assert make_run_data(first, folder) == ["."] == make_run_data(first, folder, known)
    other = replace(first, data=replace(first.data, path=str(paths[1])))
    assert "was made from" in user_error(make_run_data, other, folder)
    missing = replace(first, data=replace(first.data, path=str(tmp_path / "c.txt")))
    assert "c.txt does not exist" in user_error(lambda: make_run_data(missing, folder, known))
    assert not (folder / "source-0").exists()
    assert make_run_data(other, folder, known) == ["source-0"]
    sources = tuple(Source(path=str(paths[number]), weight=1.0) for number in (1, 0, 0))
    blend = replace(first, data=replace(first.data, path="", sources=sources))
    assert not has_whole_run_data(blend, folder, known)
    corpora = make_run_data(blend, folder, known)
    assert corpora == ["source-0", ".", "source-1"] and has_whole_run_data(blend, folder, known)
    data = open_run_data(blend, folder, corpora=corpora)
    assert [corpus.report.source for corpus in data.corpora] == [str(paths[number]) for number in (1, 0, 0)]
    assert {corpus.tokenizer == data.tokenizer for corpus in data.corpora} == {True}
    shutil.rmtree(folder)
    known |= {"source-0": str(paths[1]), "source-1": ""}  # the run no longer draws from the last one
    assert [*_sources(blend, folder, known)] == ["source-0", ".", "source-2"]
    assert make_run_data(first, folder, known) == ["."]


def test_ranges_are_joined():
    assert skipped_samples(("none",)) == ()
    assert skipped_samples(("7:9", "0:0", "10:12", "20:30", "25:26")) == ((0, 0), (7, 12), (20, 30))


LARGE = '{"parts": [{"step": 0, "batch": [1000000000000, 1, 1, 1], "corpora": [], "skip": []}]}'
WEIGHTLESS = LARGE.replace("1000000000000", "4").replace("[]", '[[".", 0]]', 1)
OTHER_FILES = ["{}", '{"parts": []}', "[1]", '{"parts": [{"step": 3}]}', '{"parts": [[]]}', LARGE, WEIGHTLESS]


@pytest.mark.parametrize("text", OTHER_FILES)
def test_another_file(tmp_path: Path, text: str):
    (tmp_path / "order.json").write_text(text)
    found = user_error(read_order, of(tiny_config()), tmp_path)
    assert found.endswith("order.json: not the order of a run's samples; valid: the file as it was")
