"""`megajax verify`: what it says of meshes that are right or wrong."""

import json
import math

import pytest
from tiny import full, user_error

from megajax.__main__ import main
from megajax.commands import verify as command
from megajax.core.pipeline import stages
from megajax.core.program import bind


@pytest.fixture
def in_this_process(monkeypatch) -> None:
    """JAX has its devices already, and what tests set stays."""
    monkeypatch.setattr(command, "start", lambda config: None)
    monkeypatch.setattr(command, "num_cores", lambda: 1)


def verified(capsys, line: str) -> tuple[int, dict]:
    """The exit code, and the figures."""
    code = 0
    try:
        main(["verify", *line.split(), "--json"])
    except SystemExit as end:
        code = int(end.code or 0)
    (line,) = capsys.readouterr().out.splitlines()
    return code, json.loads(line)


def test_too_few_devices(in_this_process) -> None:
    assert "--devices 3" in user_error(verified, None, "demo --mesh.data 8 --mesh.pipe 2 --devices 3")


def test_numbers_that_json_does_not_have() -> None:
    found = command._finite({"checks": [(math.nan, math.inf, 1.0)]})
    assert json.dumps(found, allow_nan=False) == '{"checks": [[null, "inf", 1.0]]}'


@pytest.mark.slow
def test_auto_is_what_it_is_on_gpus_in_full_size(capsys, in_this_process, monkeypatch) -> None:
    """The order of layers is wrong where gradients are reduced during the last backward pass."""
    shifted = stages._shifted
    monkeypatch.setattr(stages, "_shifted", lambda each, end, reverse: shifted(each, end, not reverse))
    monkeypatch.setattr("megajax.verify.exact.beside_training", lambda config: ())
    code, found = verified(capsys, "llama3-8b --mesh.data 8 --exact")
    assert code == 1 and "gradient of weights, or its reduction: blocks/" in found["first_difference"]
    assert "--gpu h100: overlap_reductions true, overlap_gathers true" in found["notes"][0]


@pytest.mark.full
@pytest.mark.parametrize(
    "line",
    [
        "gpt2-8.3b --mesh.data 64 --mesh.tensor 8 --devices 8",
        "qwen3-8b --mesh.pipe 2 --mesh.tensor 4 --precision fp16 --pipeline.weight-gradients deferred",
        "bert-336m --mesh.data 2 --mesh.pipe 2 --precision fp32 --optimizer.zero 3",
        "configs/finetune/race-336m.toml --mesh.data 2 --mesh.tensor 2",
        "llama3-8b --lora.rank 8 --mesh.data 8 --mesh.tensor 2 --optimizer.zero 3 --devices 8 --optimizer.zero-ranks 4",
        "demo --precision fp64 --mesh.pipe 4 --pipeline.schedule interleaved --pipeline.chunks 2",
    ],
)
def test_meshes_that_are_right(capsys, in_this_process, line: str) -> None:
    code, found = verified(capsys, line)
    assert code == 0 and found["passed"] and found["axes"] is None, [c for c in found["checks"] if not c["passed"]]
    names = " ".join(check["name"] for check in found["checks"])
    assert all(what in names for what in ("losses", "gradients", "weights", "communication", "skipped", "rows"))
    assert found["seconds"] > 0 and found["peak_bytes"] > 0


@pytest.mark.full
@pytest.mark.parametrize("line", ["bert-336m --mesh.data 4 --mesh.pipe 4 --mesh.tensor 4", "demo --repeats 2"])
def test_only_exactly(capsys, in_this_process, monkeypatch, line: str) -> None:
    """On up to 64 devices, with a second process."""
    monkeypatch.setattr(command, "num_cores", lambda: 2)
    monkeypatch.setattr("megajax.verify.exact.beside_training", None)  # in this one
    code, found = verified(capsys, f"{line} --exact")
    assert code == 0 and found["verified_mesh"] == found["mesh"]
    assert all(check["name"].startswith("exact ") and check["limit"] == 0 for check in found["checks"])


@pytest.mark.parametrize("mesh", ["--mesh.data 2", full("--mesh.data 2 --mesh.tensor 2")])
@pytest.mark.slow
def test_a_mesh_that_is_wrong(capsys, in_this_process, monkeypatch, mesh: str) -> None:
    """Dropout by the row that a device counts, not by that of the batch: seen with `data`, at the first site."""
    index = bind.axis_index
    monkeypatch.setattr(bind, "axis_index", lambda axes: 0 * index(axes) if axes == bind.ROW_AXES else index(axes))
    monkeypatch.setattr("megajax.verify.exact.beside_training", lambda config: ())  # test_exact.py
    code, found = verified(capsys, f"demo {mesh} --model.dropout 0.1 --exact")
    assert code == 1 and not found["passed"] and found["axes"] == [["data"]]
    assert "input of layer 0, forward" in found["first_difference"]
