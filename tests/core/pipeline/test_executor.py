"""The executor: memory that does not grow with the microbatches, nothing weight-sized kept, no cost without a pipe; and
weight gradients that wait, which cost no product, no collective and no residual more."""

import functools
import itertools
import sys
from collections import Counter
from pathlib import Path

import jax
import numpy as np
import pytest
from counting import configured, equations, gradient_arguments, gradients_jaxpr, product_flops, program_of
from tiny import QWEN3, full, tiny_config, tiny_program

from megajax.core.pipeline.executor import Pipeline
from megajax.core.program.memory import factor_bytes, residual_bytes
from megajax.core.program.train_step import loss_and_gradients
from megajax.data.synthetic import random_batch
from megajax.verify import COLLECTIVES, named_leaves

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))
from pipeline import hand_written


def temp_bytes(compiled) -> int:
    return compiled.memory_analysis().temp_size_in_bytes


@functools.cache
def step_bytes(schedule: str, num_microbatches: int, chunks: int = 1, **options) -> tuple[int, int]:
    """Temporary bytes of a compiled step on four stages, and those that its table predicts for the buffers."""
    model = {"hidden_size": 128, "num_heads": 4, "sequence_length": 64, "num_layers": 8}
    config = tiny_config((1, 4, 1), schedule=schedule, chunks=chunks, global_batch=num_microbatches, **options, **model)
    program = tiny_program(config)
    outputs = 0 if program.schedule.turns_at_once else 4 * 64 * 128
    predicted = program.schedule.num_slots * (residual_bytes(program) + outputs)
    if program.schedule.deferral is not None:
        predicted += program.schedule.num_factor_slots * factor_bytes(program)
    return temp_bytes(loss_and_gradients(program).lower(*gradient_arguments(program)).compile()), predicted


STEADY = [  # schedule, chunks, vocabulary, weight gradients
    full("1f1b", 1, "replicated", "together"),
    full("interleaved", 2, "split", "together"),
    full("interleaved", 2, "split", "deferred"),
    full("1f1b", 1, "replicated", "deferred"),
]


@pytest.mark.parametrize(("schedule", "chunks", "vocabulary", "weight_gradients"), STEADY)
def test_buffers_do_not_grow_with_the_microbatches(schedule, chunks, vocabulary, weight_gradients):
    """1F1B and interleaved with 64 microbatches need the memory of 8, to 1% (what is left is the tokens themselves)."""
    options = {"vocabulary": vocabulary, "weight_gradients": weight_gradients}
    few, many = (step_bytes(schedule, m, chunks, **options)[0] for m in (8, 64))
    assert many == pytest.approx(few, rel=0.01)


DEFERRED = {"weight_gradients": "deferred"}


# Tokens are a prime number that divides no dim of a weight, so that an array without them is known by its size.
ROWS, TOKENS = 2, 17


@pytest.fixture
def kept_and_weights(monkeypatch) -> dict[str, tuple]:
    """What a stage keeps of a microbatch, by the method that says it, and its weights, as types, of the program that is
    traced next."""
    found = {}

    def recorded(name: str) -> None:
        method = getattr(Pipeline, name)

        def record(pipeline):
            assert name not in found
            types = method(pipeline)
            found[name] = jax.tree.leaves(types), jax.tree.leaves(pipeline.layers.weights)
            return types

        monkeypatch.setattr(Pipeline, name, record)

    recorded("residual_types")
    recorded("factor_types")
    return found


REMATS = ["none", "selective", "layer", "stage"]
KINDS = [
    (remat, num_layers, scan_layers, "bf16" if (num_layers == 5) == (scan_layers == "true") else "fp32", chunks)
    for (remat, num_layers, scan_layers), chunks in zip(
        itertools.product(REMATS, [4, 5], ["true", "false"]), itertools.cycle([1, 1, 2]), strict=False
    )
]


@pytest.mark.parametrize(
    ("remat", "num_layers", "scan_layers", "precision", "chunks", "weight_gradients"),
    [  # by default every value of each
        pytest.param(*kind, weight_gradients, marks=[] if number % 2 == number // 4 % 2 and few else pytest.mark.full)
        for number, kind in enumerate(KINDS)
        for weight_gradients, few in [
            ("together", kind[1] == 4 and kind[0] in ("none", "stage")),
            ("deferred", kind[1] == 5 and kind[0] in ("selective", "layer")),
        ]
    ],
)
def test_nothing_weight_sized_is_kept(
    kept_and_weights, remat, num_layers, scan_layers, precision, chunks, weight_gradients
):
    """All that is kept has a token dim, but for the states of dropout; with remat of layers it is their input only, of
    stages the stage's. Of deferred weight gradients, beside it, inputs and output gradients of the products."""
    layout = {"weight_gradients": weight_gradients}
    layout |= {"sequence_length": TOKENS, "microbatch": ROWS, "global_batch": 2 * ROWS, "num_layers": num_layers}
    layout |= {"schedule": "interleaved" if chunks > 1 else "1f1b", "chunks": chunks}
    config = tiny_config((1, 2, 2), remat=remat, precision=precision, scan_layers=scan_layers, **layout)
    program = tiny_program(config)
    jax.eval_shape(loss_and_gradients(program), *gradient_arguments(program))
    residuals, weights = kept_and_weights["residual_types"]
    deferred = weight_gradients == "deferred"
    assert kept_and_weights.keys() == {"residual_types", *(["factor_types"] if deferred else [])}
    slots = -(-num_layers // (2 * chunks))  # of a chunk
    assert {leaf.shape[0] for leaf in weights} == {slots * chunks}
    x_size = ROWS * TOKENS * config.model.hidden_size
    heads, up = x_size // 2, 4 * x_size // 2  # half of the heads, half of the MLP
    if deferred:  # the inputs of the four products, and what comes back of their outputs
        factors = [leaf.size // slots for leaf in kept_and_weights["factor_types"][0]]
        assert sorted(factors) == sorted([x_size, heads, x_size, up, *[heads] * 3, x_size, up, x_size])
    if remat == "stage":
        assert [leaf.size for leaf in residuals] == [x_size]
        return
    assert {leaf.shape[0] for leaf in residuals} == {slots}
    small = ROWS * config.model.num_heads // 2  # a state of dropout for every head
    sizes = [leaf.size // slots for leaf in residuals]
    assert all(leaf.size // (slots * chunks) % TOKENS and leaf.size // (slots * chunks) > small for leaf in weights)
    assert all(size % TOKENS == 0 or size <= small for size in sizes), residuals
    large = [size for size in sizes if size > small]
    if remat == "layer":
        assert large == [x_size]
    elif remat == "selective":  # x; queries, keys, values and heads; the MLP's inner ones; attention's output
        statistics = [ROWS * TOKENS * config.model.num_heads // 2] * 2  # of attention, for a head's query two numbers
        assert sorted(large) == sorted([x_size, *[heads] * 4, *statistics, x_size, up])
    else:
        assert sum(large) > 7 * x_size


def matrix_products(program) -> int:
    found = equations(gradients_jaxpr(program))
    return sum(times for eqn, times, _ in found if eqn.primitive.name == "dot_general")


def test_selective_recomputes_no_matrix_product():
    """What it drops is cheap: the products of a step are those of `none`; a layer's remat runs its forward again."""
    products = {remat: matrix_products(tiny_program(tiny_config(remat=remat, global_batch=2))) for remat in REMATS}
    layers_and_microbatches = 4 * 2
    assert products["selective"] == products["none"] == products["stage"]  # one stage is not recomputed: it is at hand
    attention = 2  # of all heads: scores, and weights times values
    assert products["layer"] - products["none"] == layers_and_microbatches * (5 + attention)


LOOPS = [full("none", "true"), full("layer", "false")]  # remat, scan_layers


@pytest.mark.parametrize(("remat", "scan_layers"), LOOPS)
def test_it_is_the_hand_written_loop(remat, scan_layers):
    """On one device, loss and every gradient are those of accumulating `value_and_grad` over the microbatches, and the
    compiled program needs no more temporary bytes, within 5%."""
    size = {"hidden_size": 64, "num_heads": 4, "sequence_length": 96}
    program = tiny_program(tiny_config(remat=remat, scan_layers=scan_layers, global_batch=4, **size))
    types = gradient_arguments(program)
    ours, plain = (loop.lower(*types).compile() for loop in (loss_and_gradients(program), hand_written(program)))
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda leaf: rng.normal(0, 0.1, leaf.shape).astype(np.float32), types[0])
    arguments = (params, random_batch(program.config, 0), np.int32(0))
    (loss, gradients), (expected_loss, expected) = ours(*arguments), plain(*arguments)
    assert float(loss) == pytest.approx(float(expected_loss), rel=1e-6)
    gradients, expected = named_leaves(gradients), named_leaves(expected)
    assert gradients.keys() == expected.keys()
    for name, leaf in expected.items():
        np.testing.assert_allclose(gradients[name], leaf, rtol=1e-5, atol=1e-6 * np.abs(leaf).max(), err_msg=name)
    assert temp_bytes(ours) <= 1.05 * temp_bytes(plain)


def work(jaxpr) -> tuple[Counter, list[Counter]]:
    """How often every matrix product, by what it computes, and every collective, by kind, axes and shapes, runs in a
    step; what stands in a loop of which the jaxpr does not know the turns is apart, loop by loop: of one turn a tick.
    """
    counts: dict[int | None, Counter] = {None: Counter()}
    for eqn, times, loop in equations(jaxpr):
        name, shapes = eqn.primitive.name, tuple(var.aval.shape for var in eqn.invars)
        if name == "while":
            counts[id(eqn)] = Counter()
        elif name == "dot_general":
            counts[loop]["product", product_flops(eqn)] += times
        elif name in COLLECTIVES:
            axes = eqn.params["axes"] if "axes" in eqn.params else eqn.params["axis_name"]
            counts[loop][COLLECTIVES[name], str(axes), shapes] += times
    return counts.pop(None), list(counts.values())


# mesh, ZeRO, split sequence, words: with what stands at the boundary of a layer, weights in shards, parts of a weight
PLACES = {
    "plain": ((1, 2, 2), 1, False, {}),
    "sequence": ((1, 2, 2), 1, True, {}),
    "zero 3": ((2, 2, 2), 3, False, {}),
    "zero 3, sequence": ((2, 2, 2), 3, True, {}),
    "gated, zero 3, sequence": ((2, 2, 2), 3, True, QWEN3),
    "held several times": ((1, 2, 4), 1, False, QWEN3),
    "held several times, sequence": ((1, 2, 4), 1, True, QWEN3),
    "bert": ((2, 2, 2), 3, True, {"family": "bert", "layer_order": "post"}),
}
QUICK = [("none", "held several times, sequence")]


@pytest.mark.parametrize(
    ("remat", "place"),
    [kind if kind in QUICK else full(*kind) for kind in itertools.product(REMATS, PLACES)],
)
def test_as_many_products_and_collectives_as_together(remat, place):
    """And what a chunk keeps of its forward is as large. A chunk runs forward, backward and, apart, its weight
    gradients: in these are products of their factors, with a split sequence the gathering that the backward then does
    without, with ZeRO 3 the scattering; nothing that waits for another stage."""
    mesh, zero, sequence_parallel, words = PLACES[place]
    layout = {"zero": zero, "sequence_parallel": sequence_parallel, "sequence_length": 20, "num_layers": 4}
    together, deferred = (
        program_of(configured(mesh, 4, remat=remat, weight_gradients=kind, **layout, **words))
        for kind in ("together", "deferred")
    )
    (whole, none), (rest, loops) = (work(gradients_jaxpr(program)) for program, _ in (together, deferred))
    assert not none and len(loops) == 2 and loops[0] == loops[1]  # in place of a forward, and after a backward
    assert rest + loops[0] == whole
    layers, ticks, gated = 2, 4 + 2, "norm" in words
    kinds = Counter({kind: 0 for kind in COLLECTIVES.values()})
    for (kind, *_), count in loops[0].items():
        kinds[kind] += count
    assert kinds["product"] == ticks * layers * (7 if gated else 6)
    assert kinds["all-gather"] == (ticks * layers * 2 if sequence_parallel and remat != "layer" else 0)
    assert kinds["reduce-scatter"] == (kinds["product"] if zero == 3 else 0)
    assert set(+kinds) <= {"product", "all-gather", "reduce-scatter"}
    assert residual_bytes(together[0]) == residual_bytes(deferred[0])


def test_one_stage_defers_nothing():
    """Its step is the very same program: it has no idle time."""
    steps = [
        str(gradients_jaxpr(program_of(configured((1, 1, 2), 2, weight_gradients=kind))[0]))
        for kind in ("together", "deferred")
    ]
    assert steps[0] == steps[1]
