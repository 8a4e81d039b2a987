"""From raw text to a tokenized dataset in stages; an interrupted stage resumes.

This process handles only the numbers of shards and groups, never a document. It starts functions that `Workers` run;
these read and write the work folder and return summaries.
"""

import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from megajax.core.errors import UserError
from megajax.data.text.digests import INDEX, TOKENS, root_of_parts, tokenizer_digests
from megajax.data.text.indexed import dataset_files, tokenizer_folder
from megajax.data.text.inputs import absolute, valid_paths
from megajax.data.text.records import TextFiles
from megajax.data.text.tokenizers import has_only_tokenizer_files, load_tokenizer, named_tokenizer
from megajax.host.files import folder_atomically, write_atomically
from megajax.host.transcript import printable
from megajax.preparation import writing
from megajax.preparation.corpus import CleanedShards, Numbering
from megajax.preparation.deciding import drop_copies
from megajax.preparation.division import divide
from megajax.preparation.outputs import begin_writing, finished, report_file, work_folder
from megajax.preparation.plan import TRAINED, PreparationTask, claimed, make_plan, remove
from megajax.preparation.running import Show, measuring
from megajax.preparation.shards import KEPT, RULES, ResumableError, WorkFolder
from megajax.preparation.stages import (
    ANALYSIS,
    CLEANING,
    analyse_shard,
    clean_shard,
    collect_test_sets,
    sample_texts,
    save_tokenizer,
    train,
)
from megajax.preparation.statistics import COPIES, Totals, check_report, report, throughput, workers_of
from megajax.preparation.workers import Workers
from megajax.settings.option_errors import check

_STEPS_OF_COPIES = 5
_FIRST = 3  # shards or groups that a rule's examples may come from


def prepare_dataset(task: PreparationTask, *, workers: Workers, overwrite: bool, show: Show) -> dict[str, Any]:
    """Make PREFIX.bin, PREFIX.idx, PREFIX.tokenizer and PREFIX.report.json, each atomically; returns the report.

    PREFIX.work holds intermediate results, from which the same call resumes after an interruption. If the dataset is
    already complete, the call only returns its report. With `overwrite` it starts over and replaces the result of
    another preparation. The result does not depend on the workers. Raises `RunError` if one of them died.
    """
    check(task.options)
    files = TextFiles(task.inputs, "INPUT")
    plan = make_plan(task, files)
    work = work_folder(task.output, workers.shared)
    if not overwrite and (report := finished(work, plan)):
        check_report(report, report_file(task.output))
        return report
    with claimed(work, plan, overwrite) as (resumed, data):
        report = _Run(task, files, work, data, workers, show).report() | {"plan": plan, "resumed": resumed}
        write_atomically(report_file(task.output), printable(json.dumps(report, indent=1, ensure_ascii=False)) + "\n")
        remove(work.folder)
    return report


class _Run:
    """The stages of a preparation. `work` is the work folder, `data` its subfolder for this plan."""

    def __init__(
        self, task: PreparationTask, files: TextFiles, work: WorkFolder, data: WorkFolder, workers: Workers, show: Show
    ) -> None:
        self._task, self._options, self._files = task, task.options, files
        self._work, self._data, self._workers, self._show = work, data, workers, show
        self._totals, self._seconds = Totals(), dict[str, float]()

    def report(self) -> dict[str, Any]:
        """Run all stages; returns the report without its plan."""
        seconds = self._seconds
        with measuring(seconds, "reading"):
            num_shards = self._read()
        with measuring(seconds, "cleaning"):
            corpus = self._clean(num_shards)
        with measuring(seconds, "tokenizer"):
            tokenizer_size = self._tokenizer(corpus)
        with measuring(seconds, "analysis"):
            self._analyse(corpus)
        with measuring(seconds, "duplicates"):
            layout = self._decide(corpus, tokenizer_size)
        with measuring(seconds, "writing"):
            digests = self._write(layout)
        with measuring(seconds, "report"):
            found = report(self._task, corpus, self._data, self._files, tokenizer_size, self._totals)
        found |= {"digests": digests, "seconds": seconds, "workers": workers_of(self._workers.did)}
        return found | {"throughput": throughput(found, self._totals, seconds)}

    def _map(self, stage: str, name: str, function: Callable[..., Any], pieces: Iterable[tuple[Any, ...]], total: int,
              num_bytes: int = 0) -> Iterator[Any]:  # fmt: skip
        """Yield a function's result for each piece, in order."""
        self._show.begin(stage, name, total, num_bytes)
        for done, result in enumerate(self._workers.run(stage, function, pieces), start=1):
            self._show.advance(done)
            yield result

    def _read(self) -> int:
        """Divide the input into shards; returns their number."""
        piece = (self._data, [absolute(path) for path in self._task.test_sets], self._options)
        list(self._workers.run("reading", collect_test_sets, [piece]))
        return divide(self._files, self._data, self._options, self._workers, self._show)

    def _clean(self, num_shards: int) -> CleanedShards:
        pieces = ((self._data, shard, self._options) for shard in range(num_shards))
        summaries = self._map("cleaning", "cleaning", clean_shard, pieces, num_shards, sum(self._files.sizes))
        corpus = CleanedShards.combined(self._counted(summaries))
        if not self._totals.counts["documents"]:
            example = f" ({self._first_broken})" if self._totals.first_broken else ""
            valid = "valid: another --text-key" if example else valid_paths("INPUT")
            raise UserError(f"INPUT: no text in {', '.join(self._task.inputs)}{example}; {valid}")
        corpus.save(self._data)
        return corpus

    def _counted(self, summaries: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """Yield the summaries of cleaned shards; raises `ResumableError` if too many lines are broken."""
        totals, limit = self._totals, self._task.options.max_broken
        numbering = Numbering()
        for summary in summaries:
            before, (file, line) = numbering.before(summary["files"]), summary["first_broken"]
            if summary["broken"] and not totals.first_broken:
                totals.first_broken = file, line + (before if file == summary["files"][0] else 0), summary["problem"]
            totals.add(summary, CLEANING)
            totals.cuts += summary["cuts"]
            if totals.counts["broken"] > limit:
                raise ResumableError(
                    f"{self._first_broken}; more than --max-broken {limit} lines are broken; "
                    'valid: {"KEY": "text"} in UTF-8 on each, KEY as in --text-key, of at most --max-document'
                )
            yield summary

    @property
    def _first_broken(self) -> str:
        assert self._totals.first_broken
        file, number, problem = self._totals.first_broken
        return f"{self._files.files[file]}:{number}: {problem}"

    def _tokenizer(self, corpus: CleanedShards) -> int:
        """Train a tokenizer or save the given one; returns its vocabulary size."""
        choice = self._options.tokenizer
        if not (self._data / "tokenizer").exists():
            if choice in TRAINED:
                groups = [(self._data, group) for group in range(corpus.num_groups)]
                list(self._map("tokenizer", "choosing texts for a tokenizer", sample_texts, groups, len(groups)))
                name = f"training the tokenizer ({choice})"
                list(self._map("tokenizer", name, train, [(self._data, self._options)], 1))
            else:
                save_tokenizer(self._data, named_tokenizer(choice, flag="--tokenizer"))
        return load_tokenizer(self._data.wait_for("tokenizer")).size

    def _analyse(self, corpus: CleanedShards) -> None:
        pieces = ((self._data, shard, self._options) for shard in range(corpus.num_shards))
        name, size = "tokenizing", self._totals.counts["text_bytes"]
        summaries = self._map("analysis", name, analyse_shard, pieces, corpus.num_shards, size)
        for shard, found in enumerate(summaries):
            self._totals.add(found, ANALYSIS)
            self._drop(shard, {rule: found["rules"][rule] for rule in RULES})

    def _drop(self, where: int, counts: dict[int, int]) -> None:
        """Record how many documents each rule dropped in a shard or group."""
        for rule, count in counts.items():
            self._totals.rules[rule] += count
            if count and len(first := self._totals.first.setdefault(rule, [])) < _FIRST:
                first.append(where)

    def _decide(self, corpus: CleanedShards, tokenizer_size: int) -> writing.Layout:
        """Find copies and decide which documents are kept; returns their layout in the dataset."""
        self._show.begin("duplicates", "looking for duplicates", _STEPS_OF_COPIES)
        if self._options.duplicates != "keep":
            for index, (step, count) in enumerate(drop_copies(self._data, self._options, self._workers)):
                self._show.begin("duplicates", f"duplicates: {step}", _STEPS_OF_COPIES)
                self._show.advance(index)
                self._totals.counts["compared"] = count if step == "pairs" else 0
        groups = [(self._data, group, self._options) for group in range(corpus.num_groups)]
        summaries = []
        for group, summary in enumerate(self._workers.run("duplicates", writing.final_rules, groups)):
            self._drop(group, {rule: summary["dropped"].get(name, 0) for rule, name in COPIES.items()})
            for name in "documents", "sequences", "tokens", "single", "text_bytes":
                total = {"documents": "kept", "text_bytes": "kept_bytes"}.get(name, name)
                self._totals.counts[total] += sum(summary[name])
            summaries.append(summary)
        totals = self._totals
        totals.rules[KEPT] = totals.counts["kept"]
        if not totals.rules[KEPT]:
            dropped = ", ".join(f"{totals.rules[rule]} {name}" for rule, name in RULES.items() if totals.rules[rule])
            raise UserError(
                f"INPUT: none of the {len(corpus)} documents is left: {dropped}; valid: a lower --min-tokens "
                f"than {self._options.min_tokens}, longer documents, or a less strict --duplicates or "
                "--decontaminate-how"
            )
        layout = writing.Layout.combined(summaries, tokenizer_size)
        layout.save(self._data)
        return layout

    def _write(self, layout: writing.Layout) -> dict[str, str]:
        """Write the dataset and its tokenizer; returns their digests."""
        begin_writing(self._work)
        index_file, tokens_file = dataset_files(self._task.output)
        folder = tokenizer_folder(self._task.output)
        with folder_atomically(folder, ours=has_only_tokenizer_files) as new:
            load_tokenizer(self._data.wait_for("tokenizer")).save(new)
        digests = {}
        for name, key in (writing.TOKENS, TOKENS), (writing.INDEX, INDEX):
            parts = -(-layout.size(name) // writing.PART_BYTES)
            pieces = [(self._data, name, part) for part in range(parts)]
            list(self._map("writing", "writing", writing.write_part, pieces, parts, layout.size(name)))
            digests[key] = root_of_parts(writing.blocks(self._data, name, parts))
        writing.publish(self._data, index_file, tokens_file)
        return digests | tokenizer_digests(folder)
