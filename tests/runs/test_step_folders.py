"""The folders in checkpoints/."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megajax.errors import UserError
from megajax.runs import step_folders


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
