"""`megajax prepare`: make a tokenized dataset of text."""

import json
from collections.abc import Sequence
from pathlib import Path

from megajax.core.errors import UserError
from megajax.core.options import Option, Range
from megajax.core.traits import IS_PATH
from megajax.data.text.inputs import check_input
from megajax.host.paths import check_place
from megajax.preparation.prepare_options import PrepareOptions
from megajax.runs.ownership import check_outside_runs
from megajax.settings.flags import Parser, add_flag


def main(argv: Sequence[str]) -> None:
    """Clean, de-duplicate, decontaminate and tokenize text into a dataset PREFIX.bin and PREFIX.idx."""
    usage = "megajax prepare INPUT ... --output PREFIX [--flag value ...]"
    parser = Parser("Turn raw text into a tokenized dataset: clean, deduplicate, remove test sets, tokenize.", usage)
    parser.add_path(
        "inputs",
        nargs="+",
        metavar="INPUT",
        help="text, .jsonl, .json, .csv or .parquet files (.gz, .zst, .bz2 and .xz too), folders, also at gs:// or "
        "s3://; hf://NAME[/CONFIGURATION][:SPLIT][#COLUMN]; or the word python-stdlib or python-docstrings",
    )
    files = "PREFIX of the files to write: .bin, .idx, .tokenizer, .report.json"
    add_flag(parser, Option("output", str, "", files, traits=(IS_PATH,)), required=True)
    parser.add_config_flags(owner=PrepareOptions)
    parser.add_path("--decontaminate", nargs="+", default=[], metavar="PATH", help="test sets to remove from the text")
    at_least = Range(lambda x: 0 <= x <= 1024, "1 to 1024, or 0: one for each core")
    add_flag(parser, Option("workers", int, 0, "processes; 0: one for each core", at_least))
    of_cluster = "use a Dask cluster's workers: its scheduler's address or file, or local:N to start N workers here"
    add_flag(parser, Option("cluster", str, "", of_cluster, traits=(IS_PATH,)))
    parser.add_argument("--overwrite", action="store_true", help="start over and replace an earlier result")
    parser.add_argument("--json", action="store_true", help="print the report as a single JSON object")
    args = parser.parse_args(argv)
    workers, cluster = getattr(args, "workers", 0), getattr(args, "cluster", "")
    if cluster and workers:
        raise UserError(f"--workers {workers} with --cluster: a cluster has its own; valid: one of the two")
    if args.output.rpartition("/")[2] in ("", ".", ".."):
        raise UserError(f"--output {args.output!r}; valid: a path without a suffix, such as corpora/wiki")
    check_place(args.output, "--output")
    for path in args.inputs:
        check_input(path, "INPUT")
    for path in args.decontaminate:
        check_input(path, "--decontaminate")
    check_outside_runs(Path(args.output), "--output")

    from rich.console import Console

    from megajax.host.children import num_cores
    from megajax.preparation.cluster import connected
    from megajax.preparation.plan import PreparationTask
    from megajax.preparation.prepare import prepare_dataset
    from megajax.preparation.running import Show
    from megajax.preparation.statistics import print_table
    from megajax.preparation.workers import processes

    task = PreparationTask(args.inputs, args.output, PrepareOptions(**parser.overrides(args)), args.decontaminate)
    show = Show(shown=not args.json)
    try:
        with connected(cluster) if cluster else processes(workers or num_cores()) as running:
            report = prepare_dataset(task, workers=running, overwrite=args.overwrite, show=show)
    finally:
        show.close()
    if args.json:
        print(json.dumps(report))
    else:
        print_table(report, Console())
