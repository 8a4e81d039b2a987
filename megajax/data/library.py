"""Texts on every machine with Python: the source files of its standard library, and the prose in them."""

import ast
import inspect
import re
import sysconfig
import warnings
from pathlib import Path

STANDARD_LIBRARY = "python-stdlib"  # stands for the .py files of the running Python's standard library
DOCSTRINGS = "python-docstrings"  # stands for the prose in them
WORDS = (STANDARD_LIBRARY, DOCSTRINGS)

SKIPPED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}

_TOPICS = "pydoc_data", "topics.py"
_BLANK_LINES = re.compile(r"\n\s*\n")


def library_folder() -> Path:
    """Where the standard library lies."""
    return Path(sysconfig.get_path("stdlib"))


def prose(file: Path, source: bytes) -> list[str]:
    """The prose in a source file, as documents.

    One has the docstrings of the module, its classes and functions, in the order of the file, with blank lines between
    them; left out are paragraphs with interactive examples (`>>>`), and repetitions of a docstring. In the file of
    pydoc's topics, the language reference, every topic is one. There is none if the file is not of this Python.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of old escapes in strings
            tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    if file.parts[-2:] == _TOPICS:
        values = [value for node in ast.walk(tree) if isinstance(node, ast.Dict) for value in node.values]
        texts = [value.value for value in values if isinstance(value, ast.Constant) and isinstance(value.value, str)]
        return [text for value in texts if (text := _without_examples(value))]
    found: dict[str, None] = {}
    _collect(tree, found)
    return ["\n\n".join(found)] if found else []


def _without_examples(text: str) -> str:
    return "\n\n".join(part for part in _BLANK_LINES.split(text) if ">>>" not in part).strip()


def _collect(node: ast.AST, found: dict[str, None]) -> None:
    text = None
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        text = ast.get_docstring(node, clean=False)
    if text and (words := _without_examples(inspect.cleandoc(text))):
        found[words] = None
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.expr):
            _collect(child, found)
