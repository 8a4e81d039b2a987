"""The exact comparison of a mesh with one device: what it says of what is equal, and that every row of it can fail."""

import dataclasses
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from unittest.mock import Mock

import pytest
from tiny import MIXTURE, full, tiny_config

from jaxequal import numbers
from jaxequal.interpreter import UnknownPrimitive
from megajax.core.backend import CPU
from megajax.core.errors import RunError
from megajax.core.program import scoring, transfer
from megajax.core.program.communication import Collective
from megajax.generation import programs
from megajax.verify.beside import _generation as generated
from megajax.verify.beside import beside_training
from megajax.verify.check import verify
from megajax.verify.exact import _step as exact_step
from megajax.verify.exact import check_exactly, compare_exactly, compare_with_plan
from megajax.verify.fields import ExactStep, run_step
from megajax.verify.verdict import Finding, Verdict

SMALL = {"num_layers": 2, "hidden_size": 16, "num_heads": 4, "sequence_length": 8, "vocab_size": 21}
SMALL |= {"vocab_multiple": 8, "global_batch": 4, "dropout": 0.0}


def config_of(mesh: tuple[int, ...], **others):
    return tiny_config(mesh, **SMALL | others)


@pytest.fixture(scope="module")
def one() -> ExactStep:
    return run_step(config_of((1, 1, 1), ema=0.5), branches=False)


@pytest.mark.parametrize("repeats", [1, full(2)])
def test_a_mesh_is_one_device(repeats: int) -> None:
    """Also with other random numbers; with batches that grow."""
    config = config_of((2, 1, 1), ema=0.5, precision="bf16", global_batch=2)
    config = dataclasses.replace(
        config, train=dataclasses.replace(config.train, global_batch=4, ramp_start=2, ramp_increment=2, ramp_samples=4)
    )
    result = check_exactly(config, repeats=repeats)
    assert result.passed and result.first == "", result.verdict.failed
    names = [finding.name for finding in result.verdict.findings]
    assert len(set(names)) == len(names) == 14 and all(name.startswith("exact ") for name in names), names


def test_every_row_can_fail(one: ExactStep) -> None:
    """What differs is named, with its layers, and how."""
    assert all(finding.passed for finding in compare_exactly(one, one))

    def failed(**changed) -> dict[str, str]:
        found = compare_exactly(one, dataclasses.replace(one, **changed))
        return {finding.name: finding.where for finding in found if not finding.passed}

    def twice(values: dict, name: str, layer: int | slice = slice(None)) -> dict:
        new = values[name].copy()
        new[:, :, layer] = numbers.add(new[:, :, layer], new[:, :, layer])
        return values | {name: new}

    grads = failed(gradients=twice(one.gradients, "blocks/mlp/up/weight", 1))
    assert grads == {
        "exact gradients": "blocks/mlp/up/weight, layer 1, step 1: different numbers "
        f"(1 of {len(one.gradients)} differ)"
    }
    whole = failed(gradients=twice(one.gradients, "shared/final_norm/scale"))
    assert "shared/final_norm/scale, step 1: 2 times what it should be" in whole["exact gradients"]
    for part, name in (("params", "weights after one step"), ("average", "moving average, by its definition")):
        state = one.taken.state | {part: twice(one.taken.state[part], "shared/final_norm/scale")}
        found = failed(taken=dataclasses.replace(one.taken, state=state))
        assert [*found] == [f"exact {name}"]
    metrics = one.taken.metrics | {"loss": one.taken.metrics["loss"] + 1}
    assert failed(taken=dataclasses.replace(one.taken, metrics=metrics)) == {
        "exact losses": "step 1, loss: different numbers (1 of 1 differ)"
    }
    metrics = one.taken.metrics | {"grad_norm": one.taken.metrics["grad_norm"] + 1}
    found = failed(otherwise=dataclasses.replace(one.otherwise, metrics=metrics))
    assert [*found] == ["exact step with its other branches"] and "grad_norm" in str(found)
    assert [*failed(skipped=["optimizer/0/mu"])] == ["exact state after the skipped step, bit for bit"]
    assert [*failed(unequal=["(3,)"])] == ["exact replicas of all results"]
    extra = Collective("all-reduce", ("data",), ((3,),), 12, 1)
    assert compare_with_plan(one).passed
    found = compare_with_plan(dataclasses.replace(one, collectives=[*one.collectives, extra]))
    assert found.where == "1 instead of 0 all-reduce over data of [3], an operand of 12 bytes" and not found.passed


def test_branches_are_taken_both_ways() -> None:
    """A step that counts as a spike is skipped, and the same step that does not is not."""
    config = config_of((1, 1, 1))
    config = dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, skip_above=2.0))
    step = run_step(config, CPU)
    both = [bool(outcome.metrics["skipped"].all()) for outcome in (step.taken, step.otherwise)]
    assert sorted(both) == [False, True] and step.skipped == []


@pytest.mark.parametrize(
    ("module", "name", "wrong", "row"),
    [
        (programs, "slot_positions", lambda real: lambda *given: 0 * real(*given), "generation with a cache"),
        (scoring, "gather_shards", lambda real: lambda x, *given, **named: real(x[::-1], *given, **named), "scores"),
        (
            transfer,
            "own_shard",
            lambda real: lambda x, dim, axis: real(x, dim, axis)[..., ::-1],
            "transfer of checkpoints",
        ),
    ],
)
def test_programs_beside_training(module, name, wrong, row, monkeypatch) -> None:
    config = config_of((2, 1, 2))
    monkeypatch.setattr(module, name, wrong(getattr(module, name)))
    assert [finding.name for finding in beside_training(config) if not finding.passed] == [f"exact {row}"]


def test_first_dense_layers_of_a_mixture_have_caches() -> None:
    """They belong to the embedding elsewhere."""
    wrong, where = generated(config_of((1, 1, 2), **MIXTURE | {"dense_layers": 1, "num_experts": 4}), 0)
    assert not wrong and "of 1 rows" in where


def test_a_primitive_that_is_not_known_leaves_the_compiled_comparison(monkeypatch) -> None:
    def refuse(*given, **named):
        raise UnknownPrimitive("no rule for the primitive fft (mine.py:3)")

    monkeypatch.setitem(verify.__globals__, "check_exactly", refuse)
    monkeypatch.setitem(verify.__globals__, "check", lambda *given, **named: Verdict(()))
    (finding,) = verify(config_of((1, 1, 1))).verdict.findings
    assert finding.passed and finding.where == "no rule for the primitive fft (mine.py:3)"
    with pytest.raises(UnknownPrimitive):
        verify(config_of((1, 1, 1)), compiled=False)


def test_what_is_refused_beside_the_step_is_a_verdict(monkeypatch) -> None:
    """A program that cannot be traced, or a collective that only some devices reach, ends in a finding."""
    config = config_of((1, 1, 2))
    monkeypatch.setattr("megajax.verify.exact.findings", lambda *given: iter(()))
    monkeypatch.setattr(scoring, "gather_shards", lambda x, *given, **named: x.undefined)
    dead, done = Future(), Future()
    dead.set_exception(BrokenProcessPool())
    monkeypatch.setattr("megajax.verify.beside.Transfer", refuse := Mock(side_effect=ValueError("not divisible")))
    result = check_exactly(config, beside=dead)  # another process has not told it
    assert [finding.name for finding in result.verdict.failed] == ["exact scores", "exact transfer of checkpoints"]
    assert "exact scores: AttributeError" in result.first and "scoring.py" in result.first
    assert "ValueError: not divisible" in result.verdict.failed[1].where
    done.set_result(told := [Finding("exact scores", 1, 0, "loss")])
    assert [*check_exactly(config, beside=done).verdict.findings] == told

    monkeypatch.setattr("megajax.verify.exact.findings", lambda *given: iter(told))
    monkeypatch.setattr("megajax.verify.exact.recorded_step", refuse)
    result = check_exactly(config)
    assert result.axes and result.first.startswith("exact scores: loss; what differs first was not found: ValueError")

    refuse.side_effect = RunError("only some of the devices that communicate over tensor run a psum")
    monkeypatch.setattr("megajax.verify.exact.run_step", refuse)
    finding = exact_step("one device", config, CPU, 0)
    assert isinstance(finding, Finding) and "only some of the devices" in finding.where
