"""Does fine-tuning learn? Every task's demo preset on the records of real files, on this machine.

    python benchmarks/finetuning.py --data FOLDER [--only TASK …] [--held-out]

`--data` has `glue/MNLI`, `glue/QQP`, `squad` and `race/RACE`, as the releases have their files. By default every task
is over-fitted: a few hundred records are trained on and scored (of RACE 100), and more than 90 percent, of SQuAD F1,
must be right. With `--held-out` the demo preset trains on all of QQP's records with five seeds, and other records are
scored: the median must be above the share of the larger class by 5 points. Prints a table, and ends with 1 where a
task falls short.
"""

import argparse
import itertools
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
GOAL = 90.0  # percent
MARGIN = 5.0  # points above the larger class
LESS = ("--model.dropout", 0, "--optimizer.weight-decay", 0, "--checkpoint.every", 100_000, "--train.log-every", 100)


def first_rows(source: Path, target: Path, count: int) -> None:
    """The header and the first records of a TSV file."""
    with source.open() as lines:
        target.write_text("".join(itertools.islice(lines, count + 1)))


def first_questions(source: Path, target: Path, count: int) -> None:
    """The first articles of a SQuAD file, their paragraphs cut off after so many questions."""
    content = json.loads(source.read_text())
    left, articles = count, []
    for article in content["data"]:
        paragraphs = []
        for paragraph in article["paragraphs"]:
            kept = paragraph["qas"][: max(left, 0)]
            left -= len(kept)
            if kept:
                paragraphs.append(paragraph | {"qas": kept})
        articles.append(article | {"paragraphs": paragraphs})
    target.write_text(json.dumps(content | {"data": [article for article in articles if article["paragraphs"]]}))


def first_exams(source: Path, target: Path, count: int) -> None:
    """The first passages of a RACE folder, as many as have so many questions."""
    target.mkdir()
    for file in sorted(source.glob("*.txt"), key=lambda file: int(file.stem)):
        if count <= 0:
            break
        count -= len(json.loads(file.read_text())["questions"])
        (target / file.name).write_text(file.read_text())


OVERFIT = {  # of each task: where the records are, how they are cut out, how many, and flags
    "mnli": ("glue/MNLI/train.tsv", first_rows, 300, ("--train.epochs", 60)),
    "qqp": ("glue/QQP/train.tsv", first_rows, 300, ("--train.epochs", 60)),
    "squad1": ("squad/dev-v1.1.json", first_questions, 200, ("--train.epochs", 80)),
    "squad2": ("squad/dev-v2.0-2articles.json", first_questions, 200, ("--train.epochs", 80)),
    "race": ("race/RACE/train/middle", first_exams, 100, ("--train.epochs", 60)),
}


def train(task: str, *flags: object) -> str:
    """What `train.py` prints with the task's demo preset.

    Raises:
        SystemExit: it failed.
    """
    preset = REPOSITORY / "configs" / "finetune" / f"{task}-demo.toml"
    command = [sys.executable, str(REPOSITORY / "train.py"), str(preset), *map(str, flags)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stdout[-2000:]}{done.stderr}")
    return done.stdout


def overfit(data: Path, tasks: list[str]) -> Iterator[tuple[str, bool]]:
    """A line of the table for every task, and whether it has reached the goal."""
    for task in tasks:
        source, cut, count, flags = OVERFIT[task]
        with tempfile.TemporaryDirectory() as folder:
            records = Path(folder) / Path(source).name
            cut(data / source, records, count)
            began = time.perf_counter()
            said = train(
                task, "--data.train", records, "--data.dev", records, "--run-dir", f"{folder}/run", *LESS, *flags
            )
            seconds = time.perf_counter() - began
            lines = (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()
        figures = [found for found in map(json.loads, lines) if "dev/records" in found][-1]
        figure = figures.get("dev/f1", figures.get("dev/accuracy"))
        steps = re.findall(r"after (\d+) steps", said)[-1]
        name = "F1" if "dev/f1" in figures else "accuracy"
        yield f"| {task} | {figures['dev/records']} | {steps} | {name} {figure:.1f} | {seconds:.0f} |", figure > GOAL


def held_out(data: Path) -> tuple[str, bool]:
    """A line about QQP's five seeds, and whether their median is above the larger class by the margin."""
    train_file, dev_file = data / "glue/QQP/train.tsv", data / "glue/QQP/dev.tsv"
    labels = [line.rstrip("\n").split("\t")[-1] for line in dev_file.read_text().splitlines()[1:]]
    larger = 100 * max(labels.count(label) for label in set(labels)) / len(labels)
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        train("qqp", "--data.train", train_file, "--data.dev", dev_file, "--run-dir", f"{folder}/seeds", "--seeds", 5)
        minutes = (time.perf_counter() - began) / 60
        report = json.loads((Path(folder) / "seeds" / "seeds.json").read_text())
    each = " ".join(f"{seed['accuracy']:.2f}" for seed in report["seeds"])
    text = f"QQP, {len(labels)} held-out records: median {report['median']:.2f} of {each}; larger class {larger:.2f}"
    return f"{text}; {minutes:.0f} minutes", report["median"] > larger + MARGIN


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder of the releases' files")
    parser.add_argument("--only", nargs="+", choices=OVERFIT, default=list(OVERFIT), help="over-fit these tasks")
    parser.add_argument("--held-out", action="store_true", help="QQP on held-out records with five seeds instead")
    args = parser.parse_args()
    if args.held_out:
        text, good = held_out(args.data)
        print(text, flush=True)
        sys.exit(0 if good else 1)
    print("| task | records | steps | on them, percent | seconds |\n|---|---|---|---|---|", flush=True)
    good = True
    for line, reached in overfit(args.data, args.only):
        print(line, flush=True)
        good &= reached
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
