"""What only a compiler can show of the rows of `parity_grid.py`: losses, gradients and updates of compiled steps are
those of one device, to rounding. By default one, in half precision: all that is algebra is compared in
`test_field.py`."""

import dataclasses
import functools
import math

import jax
import numpy as np
import pytest
from parity_grid import TABLE, on_stages
from tiny import MIXTURE, full, tiny_config, tiny_program

from megajax import verify
from megajax.core.pipeline import executor
from megajax.core.precision import E4M3
from megajax.core.private import has_fusion_emitters
from megajax.core.program.state import TrainState
from megajax.settings.config import Config
from megajax.verify import Trace, check, compare
from megajax.verify.check import all_checks
from megajax.verify.comparison import LIMITS, limits_of_edges, relative
from megajax.verify.forms import in_blocks, in_fp64, one_device, plain, steady, with_axes
from megajax.verify.run import MeshRun, drawn_state, run

STEPS = 3  # the last one's loss has seen two updates, of moments after one step and after two


@functools.cache
def alone(config: Config, rounded: bool) -> MeshRun:
    return run(one_device(config), jax.devices(), STEPS, operand_dtype=E4M3 if rounded else None)


@pytest.mark.full
@pytest.mark.parametrize("name", [name for name, row in TABLE.items() if "compiled" in row.how], ids=str)
def test_what_is_left_is_rounding(name: str) -> None:
    """In fp64, in blocks. What is computed in 8 bits has its operands rounded to e4m3: no number lies within rounding
    of fp64 of an edge between two of these, so that a wrong scale shows. Experts have the same tokens."""
    config, rounded = TABLE[name].config, TABLE[name].config.precision == "fp8"
    config = in_fp64(steady(with_full_updates(config)))
    expected = alone(plain(config), rounded)
    actual = run(config, jax.devices(), STEPS, operand_dtype=E4M3 if rounded else None, backend=in_blocks(config))
    found = [*all_checks(expected, actual)]
    assert len(found) > 5 and all(finding.passed for finding in found), found
    for figure, limit in (("loss", LIMITS["fp64"].loss), ("grad_norm", LIMITS["fp64"].gradient)):
        steps = zip(expected.metrics, actual.metrics, strict=True)
        assert max(relative(found[figure], wanted[figure]) for wanted, found in steps) < limit, figure
    assert expected.loads.keys() == actual.loads.keys()
    assert all((actual.loads[name] == load).all() for name, load in expected.loads.items())


def with_full_updates(config: Config) -> Config:
    return dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, warmup_steps=0))


@pytest.mark.full
def test_the_fp8_step_is_near_that_of_one_device_in_fp8() -> None:
    config = steady(TABLE["fp8: 2x2x2 interleaved-2 selective zero=3 sequence"].config)
    expected, actual = (run(each, jax.devices(), STEPS) for each in (plain(config), config))
    limits = limits_of_edges(config.model.num_layers)
    rounding = run(with_axes(config, ()), jax.devices(), STEPS)  # what it does alone is within them, too
    for each in (actual, rounding):
        found = [*all_checks(expected, each, limits)]
        assert all(finding.passed for finding in found), found


@pytest.mark.full
def test_with_all_layers_in_bf16_the_step_is_that_of_bf16() -> None:
    config = tiny_config((1, 1, 2), precision="fp64", num_layers=3, microbatch=4)
    in_bf16 = dataclasses.replace(config, model=dataclasses.replace(config.model, bf16_layers="2,1"))
    expected = run(config, jax.devices(), 2).metrics[0]["loss"]
    assert relative(run(in_bf16, jax.devices(), 2, operand_dtype=E4M3).metrics[0]["loss"], expected) < 1e-12


@pytest.mark.full
def test_verify() -> None:
    """A mixture in fp8, of which few numbers may decide which expert a token chooses."""
    found = check(tiny_config((1, 2, 2), precision="fp8", num_layers=2, global_batch=4, expert_capacity=1.0, **MIXTURE))
    assert found.passed, found.failed
    kinds = [finding.name for finding in found.findings if "losses" in finding.name]
    assert kinds == ["fp64 losses", "fp8-in-fp64 losses", "fp8 losses"]


trace = functools.partial(verify.trace, quick_compile=True)  # the numbers count here, not the time
ROWS = 24
SIZE = {"num_layers": 5, "global_batch": ROWS, "microbatch": 4}


def initial(config: Config) -> TrainState:
    """The state that all begin with; what a mesh draws by itself: tests/core/models/test_gpt.py."""
    return drawn_state(tiny_program(plain(config)))


@functools.cache
def reference(config: Config, steps: int) -> Trace:
    return trace(plain(config), steps, canonical=initial(config))


DEEPER = {"num_layers": 5, "mesh": (2, 2, 2)}
HALF = {  # the stages of "deferred" have one without a layer
    "small": {"num_layers": 2, "mesh": (2, 1, 2)},
    "together": DEEPER,
    "deferred": DEEPER | {"schedule": "interleaved", "chunks": 2, "layers": "2,0,1,2", "weight_gradients": "deferred"},
}


@pytest.mark.parametrize(
    ("precision", "summed_in", "form"),
    [
        ("fp16", "fp16", "small"),  # the one with a loss scale; the one that is compiled by default
        *(full("fp16", summed_in, "together") for summed_in in ("fp16", "fp32")),
        *(full("bf16", summed_in, form) for summed_in in ("bf16", "fp32") for form in ("together", "deferred")),
        full("fp16", "fp16", "deferred"),
    ],
)
def test_half_precision_is_near_fp32(precision: str, summed_in: str, form: str) -> None:
    """Losses and gradients, without fp16's scale, with ZeRO and a split sequence. The first of five updates is with a
    learning rate of 0, so that the last step sees moments after three."""
    options = {"precision": precision, "sequence_parallel": True, "optimizer": {"gradient_dtype": summed_in}}
    config = tiny_config(**SIZE | options | HALF[form])
    whole = tiny_config(**SIZE | {"num_layers": config.model.num_layers})
    result = compare(reference(whole, 5), trace(config, 5, canonical=initial(whole)))
    limits = LIMITS[precision]
    assert result.loss_error < limits.loss and result.gradient_error < limits.gradient, result


CHUNKS = {"schedule": "interleaved", "chunks": 2, "vocabulary": "split", "zero": 3, "remat": "layer"}


@pytest.mark.full
@pytest.mark.parametrize(
    "options",
    [{"zero": 1}, CHUNKS | {"weight_gradients": "together"}, CHUNKS | {"weight_gradients": "deferred"}],
    ids=["1f1b", "together", "deferred"],
)
def test_as_users_compile(options: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests take the machine code that is soonest there (conftest.py): here, once, with XLA's defaults."""
    expected, flags = reference(tiny_config(**SIZE), 2), {"xla_backend_optimization_level": 3}
    flags |= {"xla_cpu_use_fusion_emitters": True} if has_fusion_emitters() else {}
    compiled = jax.stages.Lowered.compile
    monkeypatch.setattr(jax.stages.Lowered, "compile", lambda lowered, _: compiled(lowered, flags))
    config = tiny_config((2, 2, 2), sequence_parallel=True, **SIZE | options)
    result = compare(expected, trace(config, 2, canonical=initial(config)))
    assert result.within(), result


IDLE = [
    "1x8x1 interleaved-2 split deferred",
    "1x4x1 interleaved-2 layer",
    "1x4x1 selective deferred",
    "1x4x1 gpipe-1 split stage deferred",
]


@pytest.mark.full
@pytest.mark.parametrize("words", IDLE)
def test_what_stands_in_idle_ticks_is_never_used(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """NaN in place of zero, in every buffer, inbox and wire and in slots for factors, changes not a bit. There are
    groups of microbatches that are stretched, and a real inbox."""
    config, filled = tiny_config(**on_stages(words)), []
    expected = trace(config, 3, canonical=initial(config))
    result = compare(reference(config, 3), expected)
    assert result.within(), result

    def nan(types, *leading: int):
        zeros = real(types, *leading)
        filled.extend(leaf for leaf in jax.tree.leaves(zeros) if np.issubdtype(leaf.dtype, np.floating))
        return jax.tree.map(
            lambda x: x * np.asarray(math.nan, x.dtype) if np.issubdtype(x.dtype, np.floating) else x, zeros
        )

    real = executor.idle
    monkeypatch.setattr(executor, "idle", nan)
    actual = trace(config, 3, canonical=initial(config))
    assert len(filled) >= 5
    assert actual.losses == expected.losses and compare(expected, actual).gradient_error == 0.0
