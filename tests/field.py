"""Steps in numbers that are never rounded (`jaxequal`), on meshes beside one device: nothing is compiled."""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np

from jaxequal.numbers import elements
from megajax.core.program.program import Batch
from megajax.core.program.train_step import loss_and_gradients
from megajax.settings.config import Config
from megajax.verify.comparison import named_leaves
from megajax.verify.exact import compare_exactly, compare_with_plan
from megajax.verify.fields import Drawn, ExactStep, Values, run_step
from megajax.verify.forms import in_blocks, plain

SMALL = {"hidden_size": 16, "vocab_multiple": 8}

alone = functools.cache(run_step)  # of a configuration in its plainest form


def assert_exact(config: Config, branches: bool = True, planned: bool = True, **forms: Any) -> ExactStep:
    """Losses, figures, gradients and the new state of a step are those of one device, whose layers are scanned, and
    with `branches` also if it clips or is a spike, or is skipped, which changes nothing; what it communicates is as
    `planned`, if asked for, which takes a third longer. `forms` are fields of the backend."""
    step = run_step(config, dataclasses.replace(in_blocks(config), **forms), branches=branches)
    scanned = dataclasses.replace(config, model=dataclasses.replace(config.model, scan_layers="true"))
    found = [*compare_exactly(alone(plain(scanned), branches=branches), step)]
    if planned and step.in_plan:
        found.append(compare_with_plan(step))
    failed = [f"{finding.name}: {finding.where}" for finding in found if not finding.passed]
    assert len(found) > 7 and not failed, failed
    return step


def loss_and_exact_gradients(config: Config, batch: Batch) -> Values:
    """Their elements, of the same random weights on every mesh, in canonical form; the loss is one of them."""
    drawn = Drawn(config)
    program, layout, of_step = drawn.program, drawn.program.layout, jax.ShapeDtypeStruct((), np.int32)
    values = {name: array[None, None] for name, array in batch.items()}
    function, types = loss_and_gradients(program), (layout.computed_shapes, program.batch_types, of_step)
    loss, grads = drawn.run(function, *zip(types, (drawn.weights[1], values, np.zeros((1, 1), np.int32)), strict=True))
    of_grads = jax.eval_shape(function, *types)[1]
    found = named_leaves(drawn.run(layout.canonical_weights, (of_grads, grads))) | {"loss": loss}
    return {name: elements(x) for name, x in found.items()}
