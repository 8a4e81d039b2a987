"""The commands of README.md, CONTRIBUTING.md and docs, as they are written there."""

import re
import shlex
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
_SHELL = ("", "bash", "sh", "console")  # languages of blocks of commands; none is one, too
_FENCE = re.compile(r"^( *)(```+)\s*(\S*)")


@dataclass(frozen=True)
class Command:
    """A command of a page.

    Attributes:
        page: its path in the repository.
        line: number of its first line.
        text: in one line, without comments.
    """

    page: str
    line: int
    text: str

    @property
    def words(self) -> list[str]:
        """As a shell splits it; without what runs it elsewhere, sets variables, or takes what it prints."""
        words = shlex.split(re.sub(r" [>|] .*", "", self.text))
        while words and (re.match(r"\w+=", words[0]) or words[0] == "srun"):
            words.pop(0)
        return words

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: {self.text}"


def blocks(page: Path) -> Iterator[tuple[str, int, list[str]]]:
    """Language, number of the first line, and lines of every fenced block, without the block's own indentation."""
    lines = page.read_text(encoding="utf-8").splitlines()
    opened: tuple[str, str, int] | None = None
    for number, line in enumerate(lines, 1):
        fence = _FENCE.match(line)
        if opened and line.strip() == opened[0]:
            _, language, first = opened
            yield language, first, textwrap.dedent("\n".join(lines[first - 1 : number - 1])).splitlines()
            opened = None
        elif fence and not opened:
            opened = fence[2], fence[3], number + 1
    assert not opened, f"{page}: a block that is never closed"


def commands() -> list[Command]:
    """Of all pages. In a block with a line that begins with `$ ` those lines are the commands, the others what they
    print; a line that ends with a backslash goes on in the next."""
    found = []
    for page in PAGES:
        for language, first, lines in blocks(page):
            if language not in _SHELL:
                continue
            typed = any(line.startswith("$ ") for line in lines)
            text, begin = "", 0
            for number, line in enumerate(lines, first):
                if typed and not text and not line.startswith("$ "):
                    continue
                text, begin = (f"{text} {line.strip()}", begin) if text else (line.removeprefix("$ ").strip(), number)
                if text.endswith("\\"):
                    text = text[:-1].rstrip()
                    continue
                text = " ".join(re.sub(r"(^|\s+)#( .*)?$", "", text).split())
                if text:
                    found.append(Command(str(page.relative_to(ROOT)), begin, text))
                text = ""
    return found


def files() -> dict[str, str]:
    """The files that pages show: blocks of TOML whose first line is their name, as `# mine.toml`."""
    found: dict[str, str] = {}
    for page in PAGES:
        for language, _, lines in blocks(page):
            if language == "toml" and (name := re.fullmatch(r"# ([\w.-]+\.toml)", lines[0])):
                assert name[1] not in found, f"{page}: {name[1]} is shown twice"
                found[name[1]] = "\n".join(lines) + "\n"
    return found
