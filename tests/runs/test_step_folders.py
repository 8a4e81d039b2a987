"""The folders in checkpoints/, and which of them stay."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megajax.errors import UserError
from megajax.runs import step_folders
from megajax.runs.step_folders import Retention

LOSSES = {10: 3.0, 20: 1.0, 30: 2.0, 40: 1.0, 50: 4.0}


@pytest.mark.parametrize("hidden", ["checkpoints", "7"])
@pytest.mark.parametrize("look", [step_folders.candidates, step_folders.complete])
def test_what_may_not_be_read_is_a_mistake_not_an_empty_folder(
    hidden: str, look: Callable[[Path], list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, listed = tmp_path / "checkpoints", Path.iterdir
    for step in (3, 7):
        (folder / str(step) / "state").mkdir(parents=True)
    assert look(folder) == [3, 7]

    def refuse(path: Path) -> Iterator[Path]:
        if path.name == hidden:
            raise PermissionError(13, "Permission denied", str(path))
        return listed(path)

    monkeypatch.setattr(Path, "iterdir", refuse)
    with pytest.raises(UserError, match=rf"/{hidden}: cannot be read: Permission denied; valid: "):
        look(folder)


@pytest.mark.parametrize(
    ("keep", "kept"),
    [
        (Retention(1), [60]),
        (Retention(2), [50, 60]),
        (Retention(9), [10, 20, 30, 40, 50, 60]),
        (Retention(1, best=1), [40, 60]),  # of equal losses the later step's
        (Retention(1, best=2), [20, 40, 60]),
        (Retention(1, best=3), [20, 30, 40, 60]),
        (Retention(1, every=30), [30, 60]),
        (Retention(1, best=1, every=20), [20, 40, 60]),
        (Retention(2, best=1, every=100), [40, 50, 60]),
    ],
)
def test_what_is_kept(keep: Retention, kept: list[int]) -> None:
    """Whatever order the steps come in; step 60 has no validation loss."""
    steps = [60, 10, 50, 20, 40, 30]
    assert sorted(set(steps) - set(keep.removed(steps, LOSSES))) == kept


def test_step_0_is_a_multiple_of_anything_and_nothing_of_0() -> None:
    """Imported weights stay where every K-th is kept."""
    assert Retention(1, every=5).removed([0, 1, 2], {}) == [1]
    assert Retention(1).removed([0, 1, 2], {}) == [0, 1]
    assert Retention(1).removed([], {}) == []
