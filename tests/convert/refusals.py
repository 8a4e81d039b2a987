"""How a model that is not ours is refused."""

import re
from pathlib import Path

import pytest

from megajax.convert.importing import open_source
from megajax.errors import UserError


def refusal(folder: Path, **overrides) -> str:
    """The one line that an import of the folder ends with."""
    with pytest.raises(UserError) as error:
        open_source(folder, overrides)
    assert "\n" not in str(error.value)
    return str(error.value)


def assert_setting_refused(folder: Path, field: str, valid: str) -> None:
    """For a field of config.json, with what would be valid."""
    line = refusal(folder)
    assert "config.json" in line and field in line and re.search(f"valid: .*{valid}", line), line
