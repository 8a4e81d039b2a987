"""The prose of Python's standard library."""

from pathlib import Path

import pytest

from megajax.data.inputs import DOCSTRINGS, library_folder, prose
from megajax.data.records import TextDocuments

SOURCE = '''"""Of the module.

It has words."""
class A:
    """Of the class."""
    def f(self):
        r"""Of a function \\d.

        >>> f()
        1

        After the example."""
        def g(): "Inner."
    async def h(self): "Of the class."
def k(): b"No text."
x = """No docstring."""
'''


def test_docstrings_in_the_order_of_the_file():
    """Without examples and repetitions."""
    assert prose(Path("a.py"), SOURCE.encode()) == [
        "Of the module.\n\nIt has words.\n\nOf the class.\n\nOf a function \\d.\n\nAfter the example.\n\nInner."
    ]


def test_topics_are_documents_and_some_files_have_no_prose():
    source = b'topics = {"a": "First one.\\n", "b": "\\n>>> x\\n", "c": "Another.", "d": 4}'
    assert prose(Path("pydoc_data", "topics.py"), source) == ["First one.", "Another."]
    for source in b"", b"x = 1", b"def f(:", b"\xff\xfe", b"x = 1\0", b"(" * 9999, b"# coding: nothing\nx":
        assert prose(Path("a.py"), source) == []


@pytest.mark.parametrize("folder", ["asyncio", "pydoc_data", pytest.param("", marks=pytest.mark.full)])
def test_the_corpus_of_this_python(folder, monkeypatch):
    monkeypatch.setattr("megajax.data.inputs.library_folder", lambda: library_folder() / folder)
    documents = TextDocuments(DOCSTRINGS)
    texts = list(documents)
    assert len(texts) > (20 if folder else 400) and sum(map(len, texts)) > (40_000 if folder else 1_000_000)
    assert documents.num_documents == len(texts)
