"""Weight gradients that wait: they cost no product, no collective and no residual more, and the memory that the tables
predict; on a pipe of one stage nothing of it is there."""

import itertools
from collections import Counter

import pytest
from counting import configured, equations, gradients_jaxpr, product_flops, program_of
from tiny import QWEN3

from megajax.program.memory import residual_bytes
from megajax.verify import COLLECTIVES


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
REMATS = ["none", "selective", "layer", "stage"]
QUICK = [("none", "held several times, sequence"), ("layer", "zero 3")]


@pytest.mark.parametrize(
    ("remat", "place"),
    [
        kind if kind in QUICK else pytest.param(*kind, marks=pytest.mark.full)
        for kind in itertools.product(REMATS, PLACES)
    ],
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
