"""The figures of a preparation, and a table of them."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from rich.console import Console

from megajax.data.indexed import IndexedDataset
from megajax.data.records import TextFiles
from megajax.data.tokenizer import Tokenizer
from megajax.host.transcript import printable
from megajax.preparation.contamination import TestSets
from megajax.preparation.duplicates import Copies, Shards, index_bytes
from megajax.preparation.plan import Task
from megajax.preparation.shards import CONTAMINATED, KEPT, NEAR, RULES, SHORT
from megajax.preparation.similarity import place
from megajax.preparation.stages import ANALYSIS, CLEANING

_EXAMPLES = 3
_PLACE = 40  # characters of a place in the table
_SNIPPET = 80  # characters of an example


def report(
    task: Task,
    corpus: Shards,
    files: TextFiles,
    tokenizer: Tokenizer,
    test_sets: TestSets,
    copies: dict[int, Copies],
) -> dict[str, Any]:
    """All figures of a preparation except its times, of the dataset that it wrote. `copies` are those that a rule
    dropped; examples are the first documents that each rule dropped."""
    dataset = IndexedDataset(task.output)
    counts = np.bincount(corpus.rule, minlength=len(RULES) + 1)
    dropped = {}
    for rule, name in RULES.items():
        first = np.flatnonzero(corpus.rule == rule)[:_EXAMPLES].tolist()
        examples = [_example(corpus, files, document) for document in first]
        for number, example in enumerate(examples if rule in copies else []):
            example["copy_of"] = _place(corpus, files, int(copies[rule].originals[number]))
            example["jaccard"] = round(float(copies[rule].similarity[number]), 4)
        dropped[name] = {"count": int(counts[rule]), "examples": examples}
    broken = np.concatenate([*corpus.loaded("clean", "broken")]).tolist()
    problems = [str(problem) for problem in corpus.loaded("clean", "problem") if problem]
    sizes = (np.diff(starts)[corpus.kept(shard)] for shard, starts in enumerate(corpus.loaded("clean", "starts")))
    of_sentences = {
        "sentences": len(dataset.sequence_lengths),
        "single_sentence_documents": int((np.diff(dataset.document_index) == 1).sum()),
    }
    compared = copies[NEAR].candidates if NEAR in copies else 0
    return {
        "output": task.output,
        "documents_in": int(sum(corpus.loaded("clean", "documents"))),
        "documents": int(counts[KEPT]),
        "tokens": dataset.num_tokens,
        **(of_sentences if task.options.split_sentences else {}),
        "input_bytes": sum(files.sizes),
        "text_bytes_in": int(sum(corpus.loaded("clean", "text_bytes"))),
        "text_bytes": sum(int(size.sum()) for size in sizes),
        "tokenizer_size": tokenizer.size,
        "dropped": dropped,
        "contaminated": _contaminated(corpus),
        "broken_lines": {
            "count": len(broken),
            "first": f"{files.files[broken[0][0]]}:{broken[0][1]}: {problems[0]}" if broken else None,
        },
        "skipped_files": int(sum(corpus.loaded("clean", "skipped_files"))),
        "test_sets": list(_overlaps(task, corpus, test_sets)),
        "duplicate_index": {"bytes_per_document": index_bytes(task.options), "pairs_compared": compared},
    }


def throughput(corpus: Shards, found: dict[str, Any], seconds: dict[str, float]) -> dict[str, float]:
    """Megabytes of input text a second: of each task on one core, and of the preparation unless it was resumed."""
    tasks = dict[str, float]()
    for stage, names in ("clean", CLEANING), ("tokens", ANALYSIS):
        tasks |= dict(zip(names, np.sum([*corpus.loaded(stage, "seconds")], axis=0), strict=True))
    megabytes = found["text_bytes_in"] / 1e6
    rates = {f"{name}_mb_per_second_and_core": megabytes / max(spent, 1e-9) for name, spent in tasks.items()}
    return rates | {"mb_per_second": megabytes / sum(seconds.values())}


def print_table(found: dict[str, Any], console: Console) -> None:
    """Print a report as a table; examples are cut to the width of the console."""

    def row(name: str, count: int, more: str = "") -> str:
        return f"{name:<17}{count:>12,}{more and '  '}{more}"

    seconds, broken = found["seconds"], found["broken_lines"]
    lines = [row("read", found["documents_in"], f"{found['text_bytes_in'] / 1e6:,.1f} MB of text")]
    for name, rule in found["dropped"].items():
        lines.append(row(name, -rule["count"]))
        lines += [f"    {_line(example)}"[: console.width] for example in rule["examples"]]
    contaminated = found["contaminated"]
    if contaminated["cut"]:
        of = f"{contaminated['cut']:,} documents were cut"
        lines.append(row("pieces", contaminated["pieces"], of))
    if contaminated["characters"]:
        lines.append(
            f"    {contaminated['characters']:,} characters dropped or cut out for what they share with test sets"
        )
    kept = f"{found['text_bytes'] / 1e6:,.1f} MB of text, {found['tokens']:,} tokens"
    lines.append(row("kept", found["documents"], kept))
    if "sentences" in found:
        single = f"{found['single_sentence_documents']:,} documents have one only, which makes no pair"
        lines.append(row("sentences", found["sentences"], single))
    if broken["count"]:
        lines.append(f"{broken['count']} broken lines passed over, the first: {broken['first']}")
    if found["skipped_files"]:
        lines.append(f"{found['skipped_files']} files that are not UTF-8 passed over")
    for test_set in found["test_sets"]:
        lines.append(
            f"{test_set['path']}: {_share(test_set, 'overlap')} of its {test_set['grams']:,} 8-grams stand in the text,"
            f" {_share(test_set, 'overlap_kept')} in what is kept"
        )
        if test_set["too_short"]:
            lines.append(
                f"  {test_set['too_short']:,} of its documents are shorter than 8 words and were not looked for"
            )
    stages = ", ".join(f"{stage} {spent:.1f}" for stage, spent in seconds.items())
    lines.append(f"{sum(seconds.values()):.1f} s{' since it was resumed' if found['resumed'] else ''}: {stages}")
    lines.append(f"written: {found['output']}.bin, .idx, .tokenizer (a folder) and .report.json")
    for line in lines:
        console.print(printable(line), highlight=False, markup=False, soft_wrap=True)


def _line(example: dict[str, Any]) -> str:
    place, original = (
        name if len(name) <= _PLACE else "…" + name[-_PLACE:] for name in (example["place"], example.get("copy_of", ""))
    )
    copy = f" is {example['jaccard']:.2f} of {original}" if original else ""
    return f"{place}{copy}: {example['text']}"


def _place(corpus: Shards, files: TextFiles, document: int) -> str:
    """The place of a document in the input, FILE:NUMBER."""
    shard, number = place(corpus.starts, document)
    source, line = corpus.work.load("clean", shard, "source", "number")
    return f"{files.files[source[number]]}:{line[number]}"


def _example(corpus: Shards, files: TextFiles, document: int) -> dict[str, Any]:
    """The place and the first characters of a document."""
    text = corpus.work.text(*place(corpus.starts, document))
    return {"place": _place(corpus, files, document), "text": " ".join(text[: 4 * _SNIPPET].split())[:_SNIPPET]}


def _contaminated(corpus: Shards) -> dict[str, int]:
    """Documents dropped for test sets, those cut, the pieces that these became beyond one each, and characters lost."""
    cuts = np.concatenate([np.empty((0, 3), np.int64), *corpus.loaded("clean", "cuts")])
    dropped = np.flatnonzero(corpus.rule == CONTAMINATED).tolist()
    characters = sum(len(corpus.work.text(*place(corpus.starts, document))) for document in dropped)
    _, pieces, cut_out = cuts.sum(axis=0).tolist()
    return {"dropped": len(dropped), "cut": len(cuts), "pieces": pieces, "characters": characters + cut_out}


def _share(test_set: dict[str, Any], name: str) -> str:
    """A share of a test set's grams as a count and in percent."""
    return f"{round(test_set[name] * test_set['grams']):,} ({test_set[name] * 100:.2g}%)"


def _overlaps(task: Task, corpus: Shards, test_sets: TestSets) -> Iterator[dict[str, Any]]:
    """The share of each test set's different 8-grams in the whole text (paper §5.2), and in the documents that stay.

    Documents that are too short do not count as text; duplicates do, but add no gram to their originals'.
    """
    everywhere, kept = np.zeros(len(test_sets.grams), bool), np.zeros(len(test_sets.grams), bool)
    for shard, hits in enumerate(corpus.loaded("clean", "hits")):
        rule = np.append(corpus.rule[corpus.starts[shard] : corpus.starts[shard + 1]], CONTAMINATED)  # for what was cut
        rules = rule[hits[:, 0]]
        everywhere[hits[rules != SHORT, 1]] = True
        kept[hits[rules == KEPT, 1]] = True
    for path, grams, too_short in zip(task.test_sets, test_sets.members, test_sets.too_short, strict=True):
        total = max(1, len(grams))
        yield {
            "path": path,
            "grams": len(grams),
            "too_short": too_short,
            "overlap": int(everywhere[grams].sum()) / total,
            "overlap_kept": int(kept[grams].sum()) / total,
        }
