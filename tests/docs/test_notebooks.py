"""The notebooks of docs run from the first cell to the last."""

import os
import sys
from pathlib import Path

import pytest
from blocks import ROOT

NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))


@pytest.mark.full
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda notebook: notebook.stem)
def test_notebooks_run(notebook: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbclient = pytest.importorskip("nbclient", reason="needs nbclient, nbformat and ipykernel")
    nbformat = pytest.importorskip("nbformat", reason="needs nbclient, nbformat and ipykernel")
    pytest.importorskip("ipykernel", reason="needs nbclient, nbformat and ipykernel")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    command = tmp_path / "megajax"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m megajax "$@"\n')
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    kernel = tmp_path / "kernels" / "python3"
    kernel.mkdir(parents=True)
    (kernel / "kernel.json").write_text(
        f'{{"argv": ["{sys.executable}", "-m", "ipykernel_launcher", "-f", "{{connection_file}}"],'
        ' "display_name": "Python 3", "language": "python"}'
    )
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path))
    content = nbformat.read(notebook, as_version=4)
    nbclient.NotebookClient(content, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
