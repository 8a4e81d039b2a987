"""`exact.compare` never says "equal" of what it did not compare, and raises no alarm at ordinary JAX."""

import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from agreement import floats
from jax import lax
from jax.sharding import PartitionSpec

import jaxequal
from jaxequal import compare

pytestmark = pytest.mark.usefixtures("as_users_do")
P = PartitionSpec


X = floats(4, 8)

# What random elements of a field alone would not tell apart, and what they would take for different.

INT8 = jnp.array([[-1], [2], [3], [4], [5], [6], [7], [8]], jnp.int8)
SHARDS = {"t": 2}
LOSSES: dict[str, Callable] = {"relu6": jax.nn.relu6, "clip": lambda x: jnp.clip(x, -1, 1)}


def thrice(function: Callable) -> Callable:
    return lambda x: function(function(function(x)))


def repeated(x: Any) -> Any:
    return lax.scan(lambda y, _: (jax.nn.softmax(y), None), x, None, length=4)[0]


def reduced(reduce: Callable, after: Callable = lambda x: x) -> Callable:
    """A sum of two shards, and what follows."""
    return lambda x: after(jax.shard_map(lambda x: reduce(x, "t"), in_specs=P("t"), out_specs=P())(x))


def summed(after: Callable = lambda x: x) -> Callable:
    return lambda x: after(x.sum(0, keepdims=True))


def huber(inner: float) -> Callable:
    return lambda d: jnp.where(jnp.abs(d) < 1, inner * d * d, jnp.abs(d) - 0.5).sum()


def gradient(function: Callable) -> Callable:
    return jax.grad(lambda x: function(x).sum())


def on_rows(optimizer: optax.GradientTransformation, sharded: bool) -> Callable:
    """The update of a matrix, of whose rows each device has some."""

    def update(gradients, weights):
        return optimizer.update(gradients, optimizer.init(weights), weights)[0]

    return jax.shard_map(update, in_specs=(P("t"), P("t")), out_specs=P("t")) if sharded else update


# name -> f, g, another f that is right, arguments
HOLLOW: dict[str, tuple[Callable, Callable, Callable, Any]] = {
    "integer weights": (
        lambda x, w: 2 * jnp.einsum("ij,jk->ik", x, w),
        lambda x, w: jnp.einsum("ij,jk->ik", x, w),
        lambda x, w: x @ w.astype(jnp.float32),
        (floats(1, 8), INT8),
    ),
    **{
        f"three of {each.__name__}": (
            reduced(lax.pmean, thrice(each)),
            summed(thrice(each)),
            reduced(lax.psum, thrice(each)),
            (floats(2, 4),),
        )
        for each in (jax.nn.sigmoid, jax.nn.softmax)
    },
    "three beside a residual": (
        lambda x: x + thrice(jax.nn.softmax)(2 * x),
        lambda x: x + thrice(jax.nn.softmax)(x),
        lambda x: thrice(jax.nn.softmax)(x) + x,
        (floats(2, 4),),
    ),
    "softmax in a scan, beside a residual": (
        lambda x: x + repeated(2 * x),
        lambda x: x + repeated(x),
        lambda x: repeated(x) + x,
        (floats(2, 4),),
    ),
    "Huber": (huber(7), huber(0.5), lambda d: huber(0.5)(-d), (floats(8),)),
    **{
        f"{name}, gradient {of is gradient}": (
            of(reduced(lax.pmean, function)),
            of(summed(function)),
            of(reduced(lax.psum, function)),
            (floats(2, 4),),
        )
        for name, function in LOSSES.items()
        for of in (lambda f: f, gradient)
    },
    "a mask of floats": (
        lambda a, m: a,
        lambda a, m: jnp.where(m == 0, -jnp.inf, a),
        lambda a, m: jnp.where(m > 0.5, a, -jnp.inf),
        (floats(4, 4), jnp.tril(jnp.ones((4, 4)))),
    ),
    **{
        f"{name} on shards": (on_rows(each, True), on_rows(each, False), on_rows(each, False), (floats(4, 4),) * 2)
        for name, each in (
            ("lamb", optax.lamb(0.1)),
            ("lars", optax.lars(0.1)),
            ("adaptive_grad_clip", optax.adaptive_grad_clip(0.1)),
            ("clip_by_block_rms", optax.clip_by_block_rms(1.0)),
        )
    },
}


@pytest.mark.parametrize("name", HOLLOW)
def test_never_a_hollow_equal(name: str) -> None:
    f, g, right, args = HOLLOW[name]
    for seed in range(3):
        assert not compare(f, g, args, SHARDS, seed=seed)
        assert compare(right, g, args, SHARDS, seed=seed)


CAUSAL = jnp.tril(jnp.ones((8, 8), bool))


def masked(low: float) -> Callable:
    return lambda scores: jax.nn.softmax(jnp.where(CAUSAL, scores, low))


def scores_and_values(q, k, v):
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(jnp.where(CAUSAL, scores, -jnp.inf)), v)


ALIKE: dict[str, tuple[Callable, Callable, Any]] = {
    "root of a constant": (lambda x: x / jnp.sqrt(64.0), lambda x: x / 8, (X,)),
    "power 0.5": (lambda x: (x * x).sum() ** 0.5, lambda x: jnp.sqrt((x * x).sum()), (X,)),
    "power -0.5": (lambda x: (x * x).sum() ** -0.5, lambda x: lax.rsqrt((x * x).sum()), (X,)),
    "exp2": (lambda x: jnp.exp2(x * 1.4426950408889634), jnp.exp, (X,)),
    **{
        f"a mask of {low}": (masked(low), masked(-jnp.inf), (floats(8, 8),))
        for low in (-1e4, -1e9, -1e30, float(jnp.finfo(jnp.bfloat16).min), -0.7 * float(jnp.finfo(jnp.float32).max))
    },
    "attention of JAX": (
        lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=True),
        scores_and_values,
        (floats(1, 8, 2, 4),) * 3,
    ),
    "max of a multiple": (lambda x: (2 * x).max(-1), lambda x: 2 * x.max(-1), (X,)),
    "argmax of a multiple": (lambda x: jnp.argmax(x / 0.7, -1), lambda x: jnp.argmax(x, -1), (X,)),
    "top_k of a softmax": (lambda x: lax.top_k(jax.nn.softmax(x), 3)[1], lambda x: lax.top_k(x, 3)[1], (X,)),
}


@pytest.mark.parametrize("name", ALIKE)
def test_no_false_alarm(name: str) -> None:
    f, g, args = ALIKE[name]
    assert compare(f, g, args)


def test_what_was_not_compared_is_said() -> None:
    found = compare(lambda x: x * 0, lambda x: 0 * x, (X,))
    assert not found and found.words == "not compared: 32 numbers of the outputs are 0 whatever the arguments"
    deep = lambda x: functools.reduce(lambda y, _: jax.nn.softmax(y), range(8), x)  # noqa: E731
    assert not compare(deep, deep, (X,)) and compare(deep, deep, (X,)).words.startswith("not compared: more than 6 exp")


def test_arguments_that_keep_their_values() -> None:
    args = floats(4, 4), jnp.tril(jnp.ones((4, 4)))
    assert compare(lambda a, m: jnp.where(m, a, 0), lambda a, m: a * m, args).words.endswith(
        "; args[1] keeps its values"
    )
    assert not compare(lambda a, m: jnp.tril(a), lambda a, m: a * m, args)
    assert compare(lambda a, m: jnp.tril(a), lambda a, m: a * m, args, keep=[1])


def test_the_line_that_differs_without_names() -> None:
    def layers(factor: float) -> Callable:
        def layer(x, weights):
            up = jax.nn.gelu(x @ weights)
            return x + factor * up @ weights.T, None

        return lambda x, weights: lax.scan(layer, x, weights)[0]

    args = X, floats(12, 8, 16)
    found = compare(layers(2), layers(1), args)
    assert re.search(
        r"^f never has the value of g's dot_general at .*test_no_hollow_equal.py:\d+:\d+ \(.*layer\)$",
        found.words,
        re.M,
    )
    assert compare(layers(2), layers(2), args, gradients=True).words == "equal: all 1,600 numbers of 3 outputs"


def test_a_law_that_is_missing_is_named() -> None:
    found = compare(lambda x: jnp.exp(jnp.log(x) + 1), lambda x: x * jnp.exp(1.0), (X,))
    assert found.words.endswith("f takes exp of a log: see Limits in docs/exact.md")


@jaxequal.over_meshes(tensor=(1, 4))
def test_as_users_call_it(mesh: dict[str, int]) -> None:
    """A string, a static number, a step that is only a shape, gradients, a mesh of several."""

    def scaled(how: str, x, n: int, step):
        return x * n / step if how == "sum" else x

    step = jax.ShapeDtypeStruct((), jnp.int32)
    static = jax.jit(scaled, static_argnums=(0, 2))
    jaxequal.assert_equal(static, lambda how, x, n, step: (x + x) / step, ("sum", X, 2, step), mesh, gradients=True)
    with pytest.raises(AssertionError, match=r"^different: the output, in 32 of 32 numbers"):
        jaxequal.assert_equal(static, lambda how, x, n, step: x, ("sum", X, 2, step), mesh)
