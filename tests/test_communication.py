"""What a training step communicates, counted on its jaxpr: nothing runs, nothing is compiled."""

import itertools
import math
from collections import Counter

import jax
import jax.numpy as jnp
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
from jax.sharding import PartitionSpec as P
from tiny import LLAMA, QWEN3, full, tiny_config, tiny_program

from megajax.core.mesh import mesh_spec
from megajax.core.parallel.collectives import varying_axes
from megajax.core.parallel.random import Dropout
from megajax.core.program.train_step import train_step
from megajax.verify import COLLECTIVES, collectives, collectives_of

# Of activations, beside the layers: one for the embedding forward, one for the head backward; an embedding that is not
# linear in its weights runs forward once more in its backward. Where a layer is recomputed: one, and a second one if a
# LayerNorm comes after it.
MODELS = {
    "gpt2": ({}, 2, 1),
    "bert-pre": ({"family": "bert"}, 2, 1),
    "bert-post": ({"family": "bert", "layer_order": "post"}, 3, 2),
    "llama": (LLAMA, 2, 1),
    "qwen3": (QWEN3, 2, 1),
}


@pytest.mark.parametrize(
    ("remat", "name"),
    [
        *(("none", name) if name == "gpt2" else full("none", name) for name in MODELS),
        *(full("layer", name) for name in MODELS),
    ],
)
def test_tensor_all_reduces_of_a_layer(remat, name):
    """Per layer and microbatch 2 forward and 2 backward, more where the forward is recomputed."""
    words, at_the_ends, recomputed = MODELS[name]
    per_layer = 2 + (recomputed if remat == "layer" else 0) + 2
    found = over("tensor", step_collectives((1, 1, 2), 4, remat=remat, **words))
    assert {collective.kind for collective in found} == {"all-reduce"}
    assert count_shapes(found)[ACTIVATION] == 4 * (per_layer * LAYERS + at_the_ends)


def test_heads_of_keys_that_are_held_several_times_are_summed_once_a_step():
    """And the norms of queries and keys, which every device has whole and uses for its own heads."""
    counts = count_shapes(over("tensor", step_collectives((1, 1, 4), 4, zero=0, **QWEN3)))
    size = QWEN3["head_size"]
    once = {(1, 1, LAYERS, HIDDEN, 2, size): 2, (1, 1, LAYERS, size): 2}  # keys and values; both norms
    assert {shape: counts[shape] for shape in once} == once
    assert not {(size,), (HIDDEN, 2, size), (HIDDEN, 1, size)} & {*counts}


REMATS = {"none": 2, "selective": 2, "layer": 1 + 2, "stage": 2 + 2}  # all-reduces of a layer's backward


TICKS = {"gpipe": 2 * (4 + 1), "1f1b": 4 + 2, "interleaved": 2 * 4 + 4}


@pytest.mark.parametrize(
    ("schedule", "remat"),
    [case if case == ("interleaved", "layer") else full(*case) for case in itertools.product(TICKS, REMATS)],
)
def test_tensor_all_reduces_of_a_stage(schedule, remat):
    """The same per layer in a pipe's tick: 2 where it runs forward, the rest where backward, of a chunk's layers."""
    chunks, ticks = 2 if schedule == "interleaved" else 1, TICKS[schedule]
    found = over("tensor", step_collectives((1, 2, 2), 4, schedule=schedule, chunks=chunks, remat=remat))
    layers = -(-LAYERS // (2 * chunks))
    ends = 2  # the embedding in each forward, the head in each backward
    assert count_shapes(found)[ACTIVATION] == ticks * ((2 + REMATS[remat]) * layers + ends)


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


def test_embedding_and_head_communicate_a_few_scalars_per_token():
    """Each all-reduces one activation, the embedding forward, the head backward; the head 3 numbers per token."""
    program, _ = traced((1, 1, 2), 1)
    model = program.model
    specs = jax.tree.map(mesh_spec, model.logical_specs["shared"])
    dropout = Dropout.at(0.1, 0, jnp.int32(0), jnp.arange(ROWS, dtype=jnp.int32))

    def embed(shared, tokens_BT):
        batch = {"tokens": tokens_BT}
        context = model.context(batch, dropout)
        return jax.grad(lambda shared: jnp.sum(model.ends(shared).embed(batch, context)))(shared)

    def head(shared, tokens_BT):
        x_BTD = jnp.ones(ACTIVATION)

        def loss(shared, x_BTD):
            context = model.context({"tokens": tokens_BT}, dropout)
            return model.ends(shared).losses(x_BTD, {"targets": tokens_BT}, context)["next_token"]

        return jax.grad(loss, (0, 1))(shared, x_BTD)

    def found(function, out_specs) -> Counter:
        mapped = jax.shard_map(function, mesh=program.mesh, in_specs=(specs, P()), out_specs=out_specs)
        tokens = jax.ShapeDtypeStruct((ROWS, TOKENS), "int32")
        return count_shapes(collectives(mapped, model.shapes["shared"], tokens))

    assert found(embed, specs) == {ACTIVATION: 1}
    assert found(head, (specs, P())) == {ACTIVATION: 1, (ROWS, TOKENS): 3}


def test_what_a_step_communicates_in_bytes():
    """Tensor parallel, forward and backward: 4 activations a layer, 2 at the ends and 3 numbers per token; no more."""
    found = [c for c in over("tensor", step_collectives((1, 1, 2), 4)) if c.count > 1]
    total = sum(collective.num_bytes * collective.count for collective in found)
    assert total == 4 * 4 * ((4 * LAYERS + 2) * math.prod(ACTIVATION) + 3 * ROWS * TOKENS)
