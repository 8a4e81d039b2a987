"""The pictures of docs: each is one that `make pictures` makes, and none is older than what it shows."""

import sys

import pytest
from blocks import ROOT

sys.path.insert(0, str(ROOT / "docs" / "pictures"))
import draw

DRAWN_BY_HAND = {"architecture.svg", "mesh.svg"}


def test_every_picture_is_made() -> None:
    there = {file.name for kind in ("png", "svg") for file in (ROOT / "docs").rglob(f"*.{kind}")}
    assert there - DRAWN_BY_HAND == draw.PICTURES.keys() == draw.recorded().keys()


@pytest.mark.parametrize("name", draw.PICTURES)
def test_no_picture_is_older_than_what_it_shows(name: str) -> None:
    assert name not in draw.stale(), f"docs/{name}: its inputs changed; valid: make pictures"
