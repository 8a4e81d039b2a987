"""Links, quoted errors and examples of the pages."""

import ast
import importlib
import json
import operator
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


@pytest.mark.full
def test_the_site(tmp_path: Path) -> None:
    """`make docs`: no warning, so no dead link and no missing anchor."""
    pytest.importorskip("sphinx", reason="needs the extra `docs`")
    command = [sys.executable, "-m", "sphinx", "--fail-on-warning", "--keep-going", "--quiet", "docs", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "api.html").stat().st_size > 20_000
