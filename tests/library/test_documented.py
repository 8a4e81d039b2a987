"""docs/library.md, its blocks run in order as they are written."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import megajax

ROOT = Path(__file__).parents[2]
SMALL = {  # the demo's model would take minutes here
    **{"model.num_layers": 2, "model.hidden_size": 16, "model.num_heads": 2, "model.sequence_length": 16},
    **{"model.vocab_size": 270, "model.vocab_multiple": 16, "optimizer.warmup_steps": 1, "precision": "fp32"},
}


def python_blocks(page: Path) -> list[str]:
    parts = page.read_text().split("```python\n")[1:]
    return [part.partition("```")[0] for part in parts]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a text, and presets cut small."""
    monkeypatch.chdir(tmp_path)
    sentences = [f"The quick brown fox jumps over {number} lazy dogs." for number in range(120)]
    (tmp_path / "corpus.txt").write_text("\n\n".join(sentences))
    load = megajax.load_preset
    monkeypatch.setattr(megajax, "load_preset", lambda name, given: load(name, SMALL | given), raising=False)
    return tmp_path


@pytest.mark.full  # half a minute of compiling
def test_the_page(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    blocks = python_blocks(ROOT / "docs" / "library.md")
    assert len(blocks) == 3 and len(blocks[0].splitlines()) <= 10
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, "docs/library.md", "exec"), names)
    out = capsys.readouterr().out
    model, again, plain, ids = names["model"], names["again"], names["plain"], names["ids"]
    assert isinstance(model, megajax.Model) and isinstance(plain, megajax.PlainModel)
    assert again.step == 4 and model.step == 3  # type: ignore[attr-defined]
    logits = np.asarray(model.logits(ids))
    assert logits.shape == (*ids.shape, 270) and str(logits.shape) in out, out  # type: ignore[attr-defined]
    np.testing.assert_allclose(np.asarray(plain(model.weights(), ids)), logits, atol=1e-5)
    assert float(plain.loss(model.weights(), ids)) == pytest.approx(model.loss(ids), rel=1e-6)


def test_what_is_offered() -> None:
    """Every name, by the place that type checkers read as well; no JAX before one is used."""
    script = (
        "import sys, megajax\n"
        "assert 'jax' not in sys.modules and 'numpy' not in sys.modules\n"
        "assert set(megajax.__all__) <= set(dir(megajax)) and megajax.UserError is not None\n"
        "assert 'jax' not in sys.modules\n"
        "assert not hasattr(megajax, 'nothing')\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
    for name in megajax.__all__:
        assert getattr(megajax, name).__doc__, name
