"""What a tiny model's train step communicates, from its jaxpr: nothing runs, nothing is compiled."""

import math
from collections import Counter
from collections.abc import Iterator
from functools import cache

import jax
import pytest
from jax.sharding import NamedSharding
from tiny import abstract_batch, tiny_config, tiny_program

from megajax.core.models.context_attention import elements_sent
from megajax.core.program.train_step import loss_and_gradients, train_step
from megajax.plan.sizes import Sizes
from megajax.settings.config import Config
from megajax.verify import Collective, collectives

LAYERS, HIDDEN, TOKENS, ROWS = 6, 24, 17, 3  # no size of an activation is that of the vocabulary, 128 rows
ACTIVATION = (ROWS, TOKENS, HIDDEN)


def configured(mesh: tuple[int, int, int], num_microbatches: int, **options) -> Config:
    batch = {"microbatch": ROWS, "global_batch": ROWS * num_microbatches * mesh[0]}
    return tiny_config(mesh, **{"num_layers": LAYERS, "sequence_length": TOKENS, "dropout": 0.0} | batch | options)


def traced(mesh: tuple[int, int, int], num_microbatches: int, **options):
    """A program, and the abstract arguments of its train step."""
    return program_of(configured(mesh, num_microbatches, **options))


def step_collectives(mesh: tuple[int, int, int], num_microbatches: int, **options) -> list[Collective]:
    return collectives_of_a_step(configured(mesh, num_microbatches, **options))


@cache
def program_of(config: Config):
    program = tiny_program(config)
    return program, (program.layout.shapes, abstract_batch(config))


def gradients_jaxpr(program):
    """Of loss and gradients."""
    return jax.make_jaxpr(loss_and_gradients(program))(*gradient_arguments(program)).jaxpr


def gradient_arguments(program) -> tuple:
    """Types of weights, batch and step."""
    return program.layout.shapes.params, abstract_batch(program.config), jax.ShapeDtypeStruct((), "int32")


@cache
def collectives_of_a_step(config: Config) -> list[Collective]:
    program, arguments = program_of(config)
    return collectives(train_step(program), *arguments)


def assert_sent_for_attention(config: Config, found: list[Collective]) -> None:
    """As many elements as `elements_sent` says, in all, by devices that share sequences."""
    sizes, count = Sizes(config), config.mesh.context
    attention = [each for each in found if each.axes == ("context",) and each.kind != "all-reduce"]
    sent = sum(each.count * each.bytes_sent(count) for each in attention)
    elements = elements_sent(config.model, config.mesh.sizes, config.train.remat, config.precision)[sizes.way]
    assert sent == pytest.approx(elements * sizes.rows * sizes.item * sizes.backward_runs.count)


def over(axis: str, found: list[Collective]) -> list[Collective]:
    return [collective for collective in found if axis in collective.axes]


def of_kind(kind: str, found: list[Collective]) -> list[Collective]:
    return [collective for collective in found if collective.kind == kind]


def count_shapes(found: list[Collective]) -> Counter:
    """How often an operand of each shape is communicated."""
    counts: Counter = Counter()
    for collective in found:
        for shape in collective.shapes:
            counts[shape] += collective.count
    return counts


def local_shapes(program, tree, specs) -> list[tuple[int, ...]]:
    """Shapes of a device's shards of a tree of arrays."""
    placed = jax.tree.map(lambda leaf, spec: NamedSharding(program.mesh, spec).shard_shape(leaf.shape), tree, specs)
    return jax.tree.leaves(placed, is_leaf=lambda leaf: isinstance(leaf, tuple))


def equations(jaxpr, times: int = 1, loop: int | None = None) -> Iterator[tuple]:
    """Every equation, how often it runs, and the loop in which it stands whose turns the jaxpr does not know, of which
    it counts one; every branch of a conditional counts as taken."""
    for eqn in jaxpr.eqns:
        yield eqn, times, loop
        inner = times * eqn.params["length"] if eqn.primitive.name == "scan" else times
        around = id(eqn) if eqn.primitive.name == "while" else loop
        for value in eqn.params.values():
            for part in value if isinstance(value, tuple | list) else (value,):
                part = getattr(part, "jaxpr", part)
                if hasattr(part, "eqns"):
                    yield from equations(part, inner, around)


def product_flops(product) -> int:
    (contracted, _), _ = product.params["dimension_numbers"]
    shape = product.invars[0].aval.shape
    return 2 * product.outvars[0].aval.size * math.prod(shape[dim] for dim in contracted)
