"""What the tests of checkpoints share."""

import functools
import gc
from collections.abc import Iterator

import pytest

from megajax.core.program.transfer import Transfer
from megajax.runs import checkpoint

transfer_of = functools.cache(Transfer)


@pytest.fixture(autouse=True)
def conversions_are_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for every start of a run."""
    monkeypatch.setattr(checkpoint, "Transfer", transfer_of)


@pytest.fixture
def find_abandoned_reads(quick_collections: None) -> Iterator[None]:
    """Orbax abandons its other reads when one fails: let Python find them here, not in another test."""
    yield
    gc.collect()
