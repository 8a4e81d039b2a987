"""Links, quoted errors and examples of the pages."""

import ast
import importlib
import json
import operator
import pkgutil
import re
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from blocks import PAGES, ROOT, blocks

from megajax.core.pipeline import schedule
from megajax.core.pipeline.deferral import PassTimes
from megajax.data.tasks import instructions, records, registry, samples
from megajax.data.tasks.registry import TaskConfig
from megajax.settings.flags import parse


@cache
def _anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and the site make them."""
    found: set[str] = set()
    inside = {number for _, first, lines in blocks(page) for number in range(first, first + len(lines))}
    for number, line in enumerate(page.read_text().splitlines(), 1):
        if number not in inside and (heading := re.match(r"#+ (.*)", line)):
            words = re.sub(r"[^\w\- ]", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading[1]).lower())
            found.add(words.strip().replace(" ", "-"))
    return found


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md"], ids=lambda page: str(page.relative_to(ROOT)))
def test_links(page: Path) -> None:
    """On GitHub, where README and the source stand beside the pages; on the site `make docs` checks them again."""
    text = re.sub(r"`[^`\n]*`", "", page.read_text())
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"https?://", target):
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), f"{page.name}: {target}"
        assert not anchor or anchor in _anchors(linked), f"{page.name}: {target}"


@cache
def _texts() -> list[str]:
    """Every text of the code; what is filled in is "…"."""
    found = []
    for file in (ROOT / "megajax").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = (part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


def test_errors_are_quoted_as_they_are() -> None:
    """The first column of the tables of troubleshooting, each in one text of the code, "…" standing for anything."""
    texts = _texts()
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    quotes = re.findall(r"^\| `([^`]*)` \|", page, re.MULTILINE)
    assert len(quotes) > 30
    missing = []
    for quote in quotes:
        parts = [part.strip() for part in quote.removeprefix("error: ").split("…")]
        assert max(map(len, parts)) > 6, quote
        missing += [] if any(_holds(text, parts) for text in texts) else [quote]
    assert not missing, "\n".join(missing)


def _holds(text: str, parts: list[str]) -> bool:
    """Whether the parts stand in the text, one behind the other."""
    place = 0
    for part in parts:
        place = text.find(part, place)
        if place < 0:
            return False
        place += len(part)
    return True


def test_extras_exist() -> None:
    """Those that pages and messages tell to install."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"].keys()
    texts = [*_texts(), *(page.read_text() for page in PAGES)]
    named = {name for text in texts for found in re.findall(r"megajax\[([\w,]+)\]", text) for name in found.split(",")}
    assert named and named <= extras, named - extras


def _recipe(name: str, *modules: ModuleType) -> Any:
    """A function of docs/extending.md, which reads the names of modules."""
    codes = ["\n".join(lines) for language, _, lines in blocks(ROOT / "docs" / "extending.md") if language == "python"]
    namespace: dict[str, Any] = {}
    for module in modules:
        namespace |= vars(module)
    exec(next(code for code in codes if f"def {name}(" in code), namespace)
    return namespace[name]


def test_the_schedule_of_the_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/extending.md's new schedule is one, checked as any other, deferred weight gradients included."""
    monkeypatch.setattr(schedule, "SCHEDULES", dict(schedule.SCHEDULES))
    gpipe_fifo = _recipe("gpipe_fifo", schedule)
    for stages, microbatches in ((1, 3), (2, 2), (4, 8), (3, 7)):
        made = schedule.make_schedule("gpipe-fifo", stages, microbatches)
        assert made.num_ticks == 2 * (microbatches + stages - 1)
        schedule.make_schedule("gpipe-fifo", stages, microbatches, 1, PassTimes())
    assert (np.diff(gpipe_fifo(4, 8, 1).backward, axis=0) == 1).all()


def test_the_task_of_the_recipe(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """docs/extending.md's task reads its files by the entry that the page shows."""
    entry = re.search(r'"boolq": (Task\(.*\))`', (ROOT / "docs" / "extending.md").read_text())
    assert entry
    monkeypatch.setitem(registry.TASKS, "boolq", eval(entry[1], vars(registry)))
    monkeypatch.setitem(samples._READERS, "boolq", _recipe("read_boolq", instructions, records))
    line = json.dumps({"question": "is the sky blue", "passage": "The sky is blue.", "answer": True})
    (tmp_path / "train.jsonl").write_text(f"{line}\n{line}\n")
    found = samples.read_records("boolq", [str(tmp_path)], TaskConfig(), "--data.train")
    assert [(pair.texts, pair.label) for pair in found.entries] == [(("is the sky blue", "The sky is blue."), 1)] * 2


def test_the_sweep_of_the_recipe(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any) -> None:
    """docs/recipes.md's script trains every pair of values, by flags that exist, and finds the best."""
    (code,) = ["\n".join(lines) for language, _, lines in blocks(ROOT / "docs" / "recipes.md") if language == "python"]

    def train(line: list[str], check: bool) -> None:
        config = parse(list(map(str, line[2:])), "a sweep")
        Path(config.run_dir).mkdir(parents=True)
        worse = abs(config.optimizer.learning_rate - 5e-4) + 1e-6 * config.train.global_batch
        scores = [{"loss": 1.0}, {"dev/accuracy": 1}, {"dev/accuracy": 90 - 1e4 * worse}]
        (Path(config.run_dir) / "metrics.jsonl").write_text("\n".join(map(json.dumps, scores)))

    monkeypatch.setattr(subprocess, "run", train)
    monkeypatch.setattr(sys, "argv", ["sweep.py", "finetune/qqp-demo", "--train.epochs", "1"])
    monkeypatch.chdir(tmp_path)
    exec(code, {})
    table = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert table[0] == ["dev/accuracy", "0.00025", "0.0005", "0.001"]
    assert table[1:3] == [["batch", "64", "86.86", "89.36", "84.36"], ["batch", "128", "86.22", "88.72", "83.72"]]
    assert " ".join(table[3]) == "best: --train.global-batch 64 --optimizer.learning-rate 0.0005"


def test_what_the_reference_names_is_there() -> None:
    named = re.findall(
        r"^\.\. auto(?:function|class|module):: (\S+)$", (ROOT / "docs/api.md").read_text(), re.MULTILINE
    )
    assert len(named) > 10
    for name in named:
        pkgutil.resolve_name(name)


def test_every_variable_of_the_environment_is_described() -> None:
    """Those that the code reads or sets, by the beginnings of their names."""
    page = (ROOT / "docs" / "environment.md").read_text()
    known = r"(?:XLA|JAX|XDG|SLURM|OMPI|KUBERNETES|JOB|WANDB|MLFLOW|CUDA)_[A-Z_]+"
    named = {text for text in _texts() if re.fullmatch(known, text)}
    assert len(named) > 10 and not [name for name in named if f"`{name}`" not in page]


def test_the_walks_name_functions() -> None:
    """Of architecture.md: every function is in its file."""
    walks = (ROOT / "docs" / "architecture.md").read_text().partition("## Five walks")[2].partition("\n## ")[0]
    steps = re.findall(r"`([\w/]+\.py)`((?:,? `[\w.]+`)+)", re.sub(r" \([^()]*\)", "", walks))
    assert len(steps) > 40
    for file, names in steps:
        module = importlib.import_module("megajax." + file.removesuffix(".py").replace("/", "."))
        for name in re.findall(r"`([\w.]+)`", names):
            assert callable(operator.attrgetter(name)(module)), (file, name)


def test_sizes_of_the_code() -> None:
    """README's lines of Python, within 8%."""
    readme = (ROOT / "README.md").read_text()
    (core, rest), *_ = re.findall(r"([\d,]+) lines of Python in `megajax/core`.*?is ([\d,]+) more", readme, re.DOTALL)
    lines = {file: len(file.read_text().splitlines()) for file in (ROOT / "megajax").rglob("*.py")}
    inside = sum(count for file, count in lines.items() if file.is_relative_to(ROOT / "megajax" / "core"))
    for told, is_ in ((core, inside), (rest, sum(lines.values()) - inside)):
        assert int(told.replace(",", "")) == pytest.approx(is_, rel=0.08)


@pytest.mark.full
def test_the_site(tmp_path: Path) -> None:
    """`make docs`: no warning, so no dead link and no missing anchor."""
    pytest.importorskip("sphinx", reason="needs the extra `docs`")
    command = [sys.executable, "-m", "sphinx", "--fail-on-warning", "--keep-going", "--quiet", "docs", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "api.html").stat().st_size > 20_000
