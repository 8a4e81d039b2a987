"""The short run of the fuzzer; `python tests/fuzzing/fuzz.py` is the long one."""

from pathlib import Path

import pytest
from fuzz import fuzz
from readers import READERS, Reader


@pytest.mark.parametrize("reader", [reader for reader in READERS if reader.short], ids=lambda reader: reader.name)
def test_mutated_files_are_read_or_refused(reader: Reader, tmp_path: Path) -> None:
    """In one line, soon, and in memory in proportion to the file."""
    (tmp_path / "files").mkdir()
    outcome = fuzz(reader, reader.short, folder=tmp_path / "files")
    assert not outcome.failures
    assert outcome.accepted + outcome.refused == reader.short
