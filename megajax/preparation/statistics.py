"""A preparation's figures, and their table."""

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import Console

from megajax.core.errors import Damaged
from megajax.data.text.records import TextFiles
from megajax.host.transcript import printable
from megajax.preparation.contamination import TestSets
from megajax.preparation.corpus import CleanedShards
from megajax.preparation.deciding import dropped_in
from megajax.preparation.duplicates import index_bytes
from megajax.preparation.plan import PreparationTask
from megajax.preparation.shards import CONTAMINATED, EXACT, KEPT, NEAR, RULES, WorkFolder

COPIES = {EXACT: "exact", NEAR: "near"}  # rules that drop copies, and their names in `dropped_in`
_EXAMPLES = 3
_PLACE = 40  # most characters of a place in the table
_SNIPPET = 80  # most characters of an example


@dataclass
class Totals:
    """Totals over all shards, added up from their summaries."""

    counts: Counter[str] = field(default_factory=Counter)  # documents, bytes etc. by name
    rules: npt.NDArray[np.int64] = field(
        default_factory=lambda: np.zeros(len(RULES) + 1, np.int64)
    )  # documents by rule
    cuts: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(3, np.int64))  # as in `clean_shard`
    seconds: dict[str, float] = field(default_factory=dict)  # of each task, summed over all workers
    first: dict[int, list[int]] = field(default_factory=dict)  # the first shards or groups that a rule affected
    first_broken: tuple[int, int, str] | None = None  # file, number and problem

    def add(self, summary: Mapping[str, Any], names: Sequence[str] = ()) -> None:
        """Add a summary's counts, and its seconds for the tasks `names`."""
        for name, value in summary.items():
            if isinstance(value, int):
                self.counts[name] += value
        for name, seconds in zip(names, summary.get("seconds", ()), strict=True):
            self.seconds[name] = self.seconds.get(name, 0.0) + seconds


def report(
    task: PreparationTask,
    corpus: CleanedShards,
    work: WorkFolder,
    files: TextFiles,
    tokenizer_size: int,
    totals: Totals,
) -> dict[str, Any]:
    """All figures of a preparation except times, with the first documents that each rule dropped as examples."""
    counts = totals.counts
    examples = {rule: [*itertools.islice(_examples(corpus, work, files, totals, rule), _EXAMPLES)] for rule in RULES}
    dropped = {name: {"count": int(totals.rules[rule]), "examples": examples[rule]} for rule, name in RULES.items()}
    of_sentences = {"sentences": counts["sequences"], "single_sentence_documents": counts["single"]}
    file, line, problem = totals.first_broken or (0, 0, "")
    _, pieces, characters = totals.cuts.tolist()
    return {
        "output": task.output,
        "documents_in": counts["documents"],
        "documents": int(totals.rules[KEPT]),
        "tokens": counts["tokens"],
        **(of_sentences if task.options.split_sentences else {}),
        "input_bytes": sum(files.sizes),
        "dominated": files.dominated(),
        "text_bytes_in": counts["text_bytes"],
        "text_bytes": counts["kept_bytes"],
        "tokenizer_size": tokenizer_size,
        "dropped": dropped,
        "contaminated": {
            "dropped": int(totals.rules[CONTAMINATED]),
            "cut": int(totals.cuts[0]),
            "pieces": pieces,
            "characters": characters,
        },
        "broken_lines": {
            "count": counts["broken"],
            "first": f"{files.files[file]}:{line}: {problem}" if totals.first_broken else None,
        },
        "skipped_files": counts["skipped_files"],
        "test_sets": list(_overlaps(task, corpus, work)),
        "duplicate_index": {
            "bytes_per_document": index_bytes(task.options),
            "pairs_compared": counts["compared"],
        },
    }


def throughput(figures: Mapping[str, Any], totals: Totals, seconds: Mapping[str, float]) -> dict[str, float]:
    """Megabytes of input text per second: for each task on one core, for each stage, and for all of them. The last two
    are meaningless if the preparation was resumed."""
    megabytes = figures["text_bytes_in"] / 1e6
    rates = {f"{name}_mb_per_second_and_core": megabytes / max(spent, 1e-9) for name, spent in totals.seconds.items()}
    rates |= {f"{stage}_mb_per_second": megabytes / max(spent, 1e-9) for stage, spent in seconds.items()}
    return rates | {"mb_per_second": megabytes / sum(seconds.values())}


def workers_of(did: Mapping[str, Mapping[str, Sequence[float]]]) -> dict[str, dict[str, dict[str, float]]]:
    """For each stage, the pieces and seconds of each worker, HOST:PROCESS."""
    return {
        stage: {who: {"pieces": int(count), "seconds": round(spent, 2)} for who, (count, spent) in sorted(done.items())}
        for stage, done in did.items()
    }


def print_table(figures: dict[str, Any], console: Console) -> None:
    """Print a report as a table."""
    for line in _lines(figures, console.width):
        console.print(printable(line), highlight=False, markup=False, soft_wrap=True)


def check_report(figures: dict[str, Any], file: Path) -> None:
    """Check that a report, which was read from `file`, can be printed."""
    try:
        _lines(figures, _SNIPPET)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        raise Damaged(file, "damaged", "another PREFIX, or --overwrite") from None


def _lines(figures: dict[str, Any], width: int) -> list[str]:
    """The table, with examples cut to a width."""

    def row(name: str, count: int, more: str = "") -> str:
        return f"{name:<17}{count:>12,}{more and '  '}{more}"

    seconds, broken = figures["seconds"], figures["broken_lines"]
    lines = [row("read", figures["documents_in"], f"{figures['text_bytes_in'] / 1e6:,.1f} MB of text")]
    lines += [f"    {figures['dominated']}"] if figures.get("dominated") else []
    for name, rule in figures["dropped"].items():
        lines.append(row(name, -rule["count"]))
        lines += [f"    {_line(example)}"[:width] for example in rule["examples"]]
    contaminated = figures["contaminated"]
    if contaminated["cut"]:
        cut = f"{contaminated['cut']:,} documents were cut"
        lines.append(row("pieces", contaminated["pieces"], cut))
    if contaminated["characters"]:
        lines.append(f"    {contaminated['characters']:,} characters dropped or cut out as shared with test sets")
    kept = f"{figures['text_bytes'] / 1e6:,.1f} MB of text, {figures['tokens']:,} tokens"
    lines.append(row("kept", figures["documents"], kept))
    if "sentences" in figures:
        single = f"{figures['single_sentence_documents']:,} documents have only one, which makes no pair"
        lines.append(row("sentences", figures["sentences"], single))
    if broken["count"]:
        lines.append(f"{broken['count']} broken lines skipped; the first: {broken['first']}")
    if figures["skipped_files"]:
        lines.append(f"{figures['skipped_files']} files skipped that are not UTF-8")
    for test_set in figures["test_sets"]:
        lines.append(
            f"{test_set['path']}: {_share(test_set, 'overlap')} of its {test_set['grams']:,} 8-grams occur in the text,"
            f" {_share(test_set, 'overlap_kept')} in the documents kept"
        )
        if test_set["too_short"]:
            lines.append(
                f"  {test_set['too_short']:,} of its documents are shorter than 8 words and were not searched for"
            )
    stages = ", ".join(f"{stage} {spent:.1f}" for stage, spent in seconds.items())
    if len(workers := {who for done in figures["workers"].values() for who in done}) > 1:
        machines = len({who.rpartition(":")[0] for who in workers})
        lines.append(f"{len(workers)} workers on {machines} machine{'s' * (machines > 1)}")
    lines.append(f"{sum(seconds.values()):.1f} s{' since it was resumed' if figures['resumed'] else ''}: {stages}")
    lines.append(f"written: {figures['output']}.bin, .idx, .tokenizer (a folder) and .report.json")
    return lines


def _line(example: dict[str, Any]) -> str:
    source, original = (
        name if len(name) <= _PLACE else "…" + name[-_PLACE:] for name in (example["place"], example.get("copy_of", ""))
    )
    copy = f" is {example['jaccard']:.2f} of {original}" if original else ""
    return f"{source}{copy}: {example['text']}"


def _location(corpus: CleanedShards, work: WorkFolder, files: TextFiles, document: int) -> str:
    """A document's place in the input, FILE:NUMBER."""
    shard, index = corpus.locate(document)
    sources, numbers = work.load("clean", shard, "source", "number")
    file = int(sources[index])
    return f"{files.files[file]}:{corpus.number_in_file(shard, file, int(numbers[index]))}"


def _examples(
    corpus: CleanedShards, work: WorkFolder, files: TextFiles, totals: Totals, rule: int
) -> Iterator[dict[str, Any]]:
    """Yield the place and first characters of the first documents that a rule dropped."""
    for document, more in _dropped(corpus, work, totals, rule):
        text = work.text(*corpus.locate(document))
        example: dict[str, Any] = {"place": _location(corpus, work, files, document)}
        example["text"] = " ".join(text[: 4 * _SNIPPET].split())[:_SNIPPET]
        if more:
            original, similarity = more
            example |= {"copy_of": _location(corpus, work, files, original), "jaccard": round(similarity, 4)}
        yield example


def _dropped(
    corpus: CleanedShards, work: WorkFolder, totals: Totals, rule: int
) -> Iterator[tuple[int, tuple[int, float] | None]]:
    """Yield the first documents that a rule dropped; for copies also their original and similarity."""
    for where in totals.first.get(rule, ()):  # groups for copies, otherwise shards
        if rule in COPIES:
            arrays = dropped_in(work, COPIES[rule], where)
            for document, original, similarity in zip(*(each[:_EXAMPLES].tolist() for each in arrays), strict=True):
                yield document, (original, similarity)
        else:
            (rules,) = work.load("tokens", where, "rule")
            for number in np.flatnonzero(rules == rule)[:_EXAMPLES].tolist():
                yield int(corpus.starts[where]) + number, None


def _share(test_set: dict[str, Any], name: str) -> str:
    """A share of a test set's grams as a count and a percentage."""
    return f"{round(test_set[name] * test_set['grams']):,} ({test_set[name] * 100:.2g}%)"


def _overlaps(task: PreparationTask, corpus: CleanedShards, work: WorkFolder) -> Iterator[dict[str, Any]]:
    """The share of each test set's different 8-grams that occur in the whole text (paper §5.2), and in kept documents.

    Documents that are too short do not count as text. Duplicates do, but add no gram that their originals lack.
    """
    test_sets = TestSets.load(work.wait_for("test-sets.npz"))
    everywhere, kept = np.zeros(len(test_sets.grams), bool), np.zeros(len(test_sets.grams), bool)
    for group in range(corpus.num_groups if len(test_sets.grams) else 0):
        figures = work.load("final", group, "everywhere", "kept")
        everywhere[figures[0]], kept[figures[1]] = True, True
    for path, grams, too_short in zip(task.test_sets, test_sets.members, test_sets.too_short, strict=True):
        total = max(1, len(grams))
        yield {
            "path": path,
            "grams": len(grams),
            "too_short": too_short,
            "overlap": int(everywhere[grams].sum()) / total,
            "overlap_kept": int(kept[grams].sum()) / total,
        }
