"""The number of workers that a machine gives."""

import os

import pytest

from megajax.preparation.workers import num_cores


@pytest.mark.parametrize(("cores", "expected"), [(6, 6), (None, 1)])
def test_cores_where_the_system_tells_no_affinity(monkeypatch: pytest.MonkeyPatch, cores, expected) -> None:
    """As on macOS: all cores, or one if nobody knows."""
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    assert num_cores() == expected
