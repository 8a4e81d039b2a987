"""What is printed of a mesh, and its figures."""

import dataclasses
import json
import math

import pytest
from test_shrink import on_mesh, preset

from megajax.verify.check import AxesThatDiffer, Result, first_in_words
from megajax.verify.recording import Difference, Place
from megajax.verify.report import Report
from megajax.verify.shrink import shrink
from megajax.verify.verdict import Finding, Verdict

CONFIG = on_mesh(preset("gpt2-8.3b"), (64, 1, 8))
SMALL = shrink(CONFIG, 16)
RIGHT = Finding("fp64 losses", 3e-16, 1e-12, "step 2")
WRONG = Finding("fp64 gradients", math.inf, 1e-12, "blocks/mlp/up/weight, layer 1, step 1", (1,))


def printed(capsys, result: Result) -> tuple[str, dict]:
    report = Report("gpt2-8.3b", CONFIG, SMALL)
    report.start("one device, fp64")
    for finding in result.verdict.findings:
        report.found(finding)
    report.close(result)
    return capsys.readouterr().out, report.figures(result)


def test_of_a_right_mesh(capsys) -> None:
    text, figures = printed(capsys, Result(Verdict((RIGHT,))))
    lines = text.splitlines()
    assert lines[0] == "gpt2-8.3b on 64 x 1 x 8 (data x pipe x tensor), on 16 simulated devices"
    assert lines[1].startswith("folded to 4 x 1 x 4") and "num_layers 72 -> 2" in lines[2]
    assert "fp64 losses" in text and "3.0e-16" in text and "limit 1e-12" in text and "DIFFERS" not in text
    assert "nothing differs: 1 checks" in lines[-1]
    assert figures["passed"] and figures["mesh"] == (64, 1, 8) and figures["verified_mesh"] == (4, 1, 4)
    assert figures["checks"][0]["figure"] == 3e-16 and figures["first_difference"] is None
    json.dumps(figures)


@pytest.mark.parametrize(
    ("sets", "words"),
    [
        ([("data",)], "data alone"),
        ([("data",), ("pipe",)], "data alone, or pipe alone"),
        ([("data", "tensor")], "data with tensor"),
        ([()], "none: it differs on one device"),
    ],
)
def test_of_a_wrong_mesh(capsys, sets, words) -> None:
    axes, first = AxesThatDiffer(tuple(sets), SMALL.config), "mlp_up of layer 1, forward: different numbers"
    text, figures = printed(capsys, Result(Verdict((RIGHT, WRONG)), axes, first))
    assert "1 of 2 checks differ" in text and f"axes       {words}" in text
    assert "first      mlp_up of layer 1, forward" in text and "blocks/mlp/up/weight, layer 1, step 1  DIFFERS" in text
    assert figures["axes"] == [list(axes) for axes in sets] and not figures["passed"]


@pytest.mark.parametrize(
    ("finding", "words"),
    [
        (WRONG, "a gradient of weights, or its reduction: blocks/mlp/up/weight, layer 1"),
        (Finding("fp64 gradients", 1.0, 1e-12, "x, step 2"), "the update of the weights: x, step 2"),
        (Finding("fp64 losses", 1.0, 1e-12, "step 1, loss/x"), "forward: the sum of the losses: step 1, loss/x"),
        (
            Finding("fp64 other figures of the steps", 1.0, 1e-12, "grad_norm, step 1"),
            "the norm of the gradients: grad",
        ),
        (Finding("fp64 weights after the last step", 1.0, 1e-12, "x"), "the update of the weights: x"),
        (Finding("fp64 communication, against theory", 1, 0, "2 instead of 1"), "against theory: 2 instead of 1"),
    ],
)
def test_what_it_is_where_no_activation_differs(finding, words) -> None:
    assert words in first_in_words(None, (finding,))


def test_the_losses_come_before_gradients() -> None:
    """Where they differ in the first step, and no activation forward."""
    backward = Difference(Place(1, "output", True), "different numbers", [0], 4, 1.0)
    forward = dataclasses.replace(backward, place=Place(1, "output", False))
    failed = (dataclasses.replace(WRONG, name="fp64 losses", where="step 1"),)
    assert first_in_words(backward, failed).endswith("the sum of the losses: step 1")
    assert first_in_words(backward, (WRONG,)) == str(backward) and first_in_words(forward, failed) == str(forward)
