"""Every mistake that a user is told of says what would be valid."""

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "megajax"
ELSEWHERE = {  # pieces of messages that say it in a variable
    "advice}",
    "_ADVICE}",
    "_VALID}",
    "near}",  # megajax/settings/flags.py and presets.py: the nearest names
    "option.flag} {problem}",  # megajax/options.py: `Option.problem`
    "name} {reason}",  # megajax/settings/flags.py: what `_Value` says
    "where}: {error}",  # megajax/settings/presets.py: what is wrong with a base
    "path}: {error}",  # megajax/host/reading.py: of `TooLong`
    "flag}: {file}: {error}",  # megajax/data/records.py, megajax/tasks/sources.py: of `reading.TooLong`
    "its standard error says why",
}


def messages() -> Iterator[tuple[str, str]]:
    """The place and the source of the argument of every `UserError(…)`."""
    for file in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "UserError":
                yield f"{file.relative_to(PACKAGE)}:{node.lineno}", ast.unparse(node)


def test_what_would_be_valid_is_said() -> None:
    found = dict(messages())
    silent = [
        f"{place}: {message}"
        for place, message in found.items()
        if "valid" not in message and not any(piece in message for piece in ELSEWHERE)
    ]
    assert len(found) > 150 and not silent, "\n".join(silent)
