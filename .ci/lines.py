"""Compare the lines of each room with its budget, `[tool.lines]` in pyproject.toml: part of `make lint`.

A commit that needs more raises its room's budget and says why. With --set the budgets become the lines there are.
"""

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "pyproject.toml"
ROOMS = "benchmarks", "exact/jaxequal", "exact/tests", "tests"
WINGS = "megajax", "megajax/core"  # whose folders are rooms; their own files count as one more


def lines() -> dict[str, int]:
    """The lines of Python in each room."""
    rooms = {name: (ROOT / name).rglob("*.py") for name in ROOMS}
    for wing in WINGS:
        rooms[wing] = (ROOT / wing).glob("*.py")
        for folder in sorted((ROOT / wing).iterdir()):
            name = folder.relative_to(ROOT).as_posix()
            if name not in WINGS and not folder.is_symlink() and any(folder.rglob("*.py")):
                rooms[name] = folder.rglob("*.py")
    return {name: sum(len(file.read_text().splitlines()) for file in files) for name, files in sorted(rooms.items())}


def main() -> None:
    there, text = lines(), FILE.read_text()
    if "--set" in sys.argv:
        table = "".join(f'"{name}" = {-(-count // 20) * 20}\n' for name, count in there.items())
        FILE.write_text(re.sub(r"(\[tool\.lines\].*\n)(?:\".*\n)*", lambda found: found[1] + table, text))
        return
    budget = tomllib.loads(text)["tool"]["lines"]
    wrong = [
        f"{name} has {count} lines, its budget {budget[name]}"
        for name, count in there.items()
        if count > budget.get(name, count)
    ]
    wrong += [f"{name} is no room; valid: without it" for name in budget.keys() - there.keys()]
    wrong += [f"{name} has no budget; valid: a line for it" for name in there.keys() - budget.keys()]
    print(
        "\n".join(f"pyproject.toml, [tool.lines]: {each}" for each in wrong)
        or f"{sum(there.values()):,} lines, each room within its budget"
    )
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
