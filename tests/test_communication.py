"""What a training step communicates, counted on its jaxpr: nothing runs, nothing is compiled."""

import math
from collections import Counter

import jax
import pytest
from counting import (
    ACTIVATION,
    HIDDEN,
    LAYERS,
    ROWS,
    TOKENS,
    count_shapes,
    equations,
    local_shapes,
    over,
    step_collectives,
    traced,
)
from tiny import QWEN3, full, tiny_config, tiny_program

from megajax.core.parallel.collectives import varying_axes
from megajax.core.program.train_step import train_step
from megajax.verify import COLLECTIVES, collectives_of


def test_heads_of_keys_that_are_held_several_times_are_summed_once_a_step():
    """And the norms of queries and keys, which every device has whole and uses for its own heads."""
    counts = count_shapes(over("tensor", step_collectives((1, 1, 4), 4, zero=0, **QWEN3)))
    size = QWEN3["head_size"]
    once = {(1, 1, LAYERS, HIDDEN, 2, size): 2, (1, 1, LAYERS, size): 2}  # keys and values; both norms
    assert {shape: counts[shape] for shape in once} == once
    assert not {(size,), (HIDDEN, 2, size), (HIDDEN, 1, size)} & {*counts}


@pytest.mark.parametrize(
    ("mesh", "remat"),
    [((1, 1, 2), "none")]
    + [full(mesh, "none") for mesh in ((2, 2, 2), (1, 1, 8))]
    + [full(mesh, "layer") for mesh in ((1, 1, 2), (2, 2, 2), (1, 1, 8))],
)
def test_no_vocabulary_is_communicated(mesh, remat):
    """No operand over the tensor axis has the vocabulary's dim, whole or a device's share of it."""
    sizes = {101, 128, 128 // mesh[2]}
    found = over("tensor", step_collectives(mesh, 4, remat=remat))
    assert found and not [c for c in found if any(sizes & set(shape) for shape in c.shapes)]


@pytest.mark.parametrize(
    ("mesh", "num_microbatches", "family", "scalars"),
    [
        full((2, 2, 2), 1, "gpt2", 1),
        ((2, 2, 2), 4, "gpt2", 1),
        *(full((2, 1, 1), number, "gpt2", 1) for number in (1, 4, 16)),
        full((2, 2, 2), 4, "bert", 3),  # two losses, and how many orders were found
    ],
)
def test_gradients_are_reduced_once_a_step(mesh, num_microbatches, family, scalars):
    """Over data, every gradient leaf in one all-reduce however many microbatches; beside them two scalars for every
    loss, itself and the number of its targets. Shared weights are summed over the pipe in the same all-reduce."""
    program, (state, _) = traced(mesh, num_microbatches, zero=0, family=family)
    found = over("data", step_collectives(mesh, num_microbatches, zero=0, family=family))
    blocks, shared = (
        Counter(local_shapes(program, state.params[part], program.layout.specs.params[part]))
        for part in ("blocks", "shared")
    )
    assert {collective.kind for collective in found} == {"all-reduce"}
    assert count_shapes(found) == blocks + shared + Counter({(): 2 * scalars})
    assert count_shapes(over("pipe", found)) == shared + Counter({(): scalars})


def axes_in_conditionals(jaxpr) -> list[tuple]:
    """The conditionals, each with the axes of the collectives in its branches."""
    found = []
    for eqn in inner(jaxpr):
        if eqn.primitive.name == "cond":
            branches = [each for branch in eqn.params["branches"] for each in inner(branch.jaxpr)]
            called = [each for each in branches if each.primitive.name in COLLECTIVES]
            found.append((eqn, {axis for each in called for axis in each.params.get("axes", ())}))
    return found


def inner(jaxpr) -> list:
    return [eqn for eqn, _, _ in equations(jaxpr)]


@pytest.mark.parametrize(
    ("schedule", "ticks", "num_layers"),
    [
        ("interleaved", 2 * 2 + 4, 5),  # with padded slots
        *(full("1f1b", 2 + 2, layers) for layers in (5, 6)),
        *(full("gpipe", 2 * (2 + 1), layers) for layers in (5, 6)),
        full("interleaved", 2 * 2 + 4, 6),
    ],
)
def test_stages_hand_over_outside_conditionals(schedule, ticks, num_layers):
    """Two permutes a tick, up and down, over the pipe alone; inside conditionals there is the tensor axis only."""
    chunks = 2 if schedule == "interleaved" else 1
    program, arguments = traced((2, 2, 2), 2, schedule=schedule, chunks=chunks, num_layers=num_layers)
    step = jax.make_jaxpr(train_step(program))(*arguments)
    permutes = [c for c in collectives_of(step) if c.kind == "permute"]
    assert [(c.axes, c.count) for c in permutes] == [(("pipe",), ticks)] * 2
    assert set().union(*(axes for _, axes in axes_in_conditionals(step.jaxpr))) == {"tensor"}


@pytest.mark.parametrize(
    ("schedule", "ticks"), [full("1f1b", 2 + 2), full("gpipe", 2 * (2 + 1)), ("interleaved", 2 * 2 + 4)]
)
def test_a_split_vocabulary_is_run_by_all_stages_at_once(schedule, ticks):
    """Over the pipe: an activation for the embedding, two for the head and one for the embedding's gradient; a few
    numbers per token; no vocabulary. Each under a predicate that no stage index goes into."""
    chunks = 2 if schedule == "interleaved" else 1
    program, arguments = traced((1, 2, 2), 2, schedule=schedule, chunks=chunks, vocabulary="split")
    step = jax.make_jaxpr(train_step(program))(*arguments)
    found = [c for c in over("pipe", collectives_of(step)) if c.kind == "all-reduce"]
    in_loop = count_shapes([c for c in found if c.count > 1])
    assert in_loop == {ACTIVATION: 4 * ticks, (ROWS, TOKENS): 3 * ticks}
    over_pipe = [eqn for eqn, axes in axes_in_conditionals(step.jaxpr) if "pipe" in axes]
    assert len(over_pipe) == 3 and not any("pipe" in varying_axes(eqn.invars[0].aval) for eqn in over_pipe)


@pytest.mark.parametrize(("vocabulary", "share"), [("replicated", 2), ("split", 8)])
def test_table_bytes_of_a_stage(vocabulary, share):
    """The balanced vocabulary divides a stage's part of the table, and of its gradients and moments, by the pipe."""
    program = tiny_program(tiny_config((1, 4, 2), vocabulary=vocabulary))

    def tables(state) -> list:
        """Itself and AdamW's two moments."""
        adam = next(part for part in state.optimizer if hasattr(part, "mu"))
        return [tree["shared"]["table"] for tree in (state.params, adam.mu, adam.nu)]

    found = local_shapes(program, tables(program.layout.shapes), tables(program.layout.specs))
    assert found == [(128 // share, HIDDEN)] * 3


def test_a_pipe_of_one_has_no_permutes_and_no_conditionals():
    """Accumulation over microbatches is the same loop with everything decided while tracing."""
    program, arguments = traced((1, 1, 2), 4)
    names = {eqn.primitive.name for eqn in inner(jax.make_jaxpr(train_step(program))(*arguments).jaxpr)}
    assert "scan" in names and not names & {"cond", "ppermute"}


def test_what_a_step_communicates_in_bytes():
    """Tensor parallel, forward and backward: 4 activations a layer, 2 at the ends and 3 numbers per token; no more."""
    found = [c for c in over("tensor", step_collectives((1, 1, 2), 4)) if c.count > 1]
    total = sum(collective.num_bytes * collective.count for collective in found)
    assert total == 4 * 4 * ((4 * LAYERS + 2) * math.prod(ACTIVATION) + 3 * ROWS * TOKENS)
