"""`exact.compare`: programs divided by hand over meshes that do not exist, right and with the usual mistakes."""

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from agreement import floats
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

import jaxequal
from jaxequal import Comparison, compare
from jaxequal.errors import RunError, UserError

pytestmark = pytest.mark.usefixtures("as_users_do")
P = PartitionSpec
MESH = AbstractMesh((2, 4), ("data", "tensor"), (AxisType.Auto,) * 2)


def sharded(body: Callable, in_specs: Any, out_specs: Any, **others: Any) -> Callable:
    return jax.shard_map(body, mesh=MESH, in_specs=in_specs, out_specs=out_specs, **others)


# A tensor-parallel MLP.

WEIGHTS = {"up": floats(8, 16), "down": floats(16, 8)}
MLP_SPECS = ({"up": P(None, "tensor"), "down": P("tensor")}, P("data"))
X = floats(4, 8)


def mlp(weights, x, reduce=lambda y: y):
    hidden = checkpoint_name(jax.nn.gelu(x @ weights["up"]), "hidden")
    return checkpoint_name(reduce(hidden @ weights["down"]), "down")


def mlp_by(reduce: Callable, **others: Any) -> Callable:
    return sharded(functools.partial(mlp, reduce=reduce), MLP_SPECS, P("data"), **others)


right_mlp = mlp_by(lambda y: lax.psum(y, "tensor"))


def test_equal() -> None:
    found = jaxequal.compare(right_mlp, mlp, (WEIGHTS, X))
    assert found and found.equal and isinstance(found, Comparison)
    assert str(found) == repr(found) == found.words == "equal: all 32 numbers of 1 output"


@pytest.mark.parametrize(
    ("reduce", "words"),
    [
        (
            lambda y: y,
            ["the first named value that differs is down: f lacks 32 of its 32 numbers; equal before it: hidden"],
        ),
        (lambda y: y, ["a shard_map of f has a result float32[4, 8] that devices should share but do not"]),
        (lambda y: 2 * lax.psum(y, "tensor"), ["in 32 of 32 numbers, the first at [0, 0]: f has 2 times what g has"]),
        (lambda y: lax.pmean(y, "tensor"), ["f has 1/4 times what g has"]),
        (lambda y: lax.psum(y, ("data", "tensor")), ["is down", "f lacks 32"]),
        (lambda y: lax.psum(y, "data"), ["should share but do not"]),
        (lambda y: 0 * lax.psum(y, "tensor"), ["f has 0"]),
        (lambda y: jnp.roll(lax.psum(y, "tensor"), 1, 1), ["f has them at other places", "all named values are equal"]),
        (lambda y: lax.psum(y, "tensor") * jnp.array([[1], [-1]]), ["in 16 of 32 numbers", "f has -1 times"]),
    ],
)
def test_a_wrong_sum(reduce: Callable, words: list[str]) -> None:
    found = compare(mlp_by(reduce, check_vma=False), mlp, (WEIGHTS, X))
    assert not found and all(each in found.words for each in words), found


def test_gradients() -> None:
    """Of a loss, with JAX's own transposes of collectives; one psum too many in the loss is the ranks' number of times
    the gradient."""

    def gradients(f: Callable) -> Callable:
        return jax.grad(lambda weights, x: (f(weights, x) ** 2).sum(), argnums=(0, 1))

    assert compare(gradients(right_mlp), gradients(mlp), (WEIGHTS, X))
    found = compare(gradients(mlp_by(lambda y: 3 * lax.psum(y, "tensor"))), gradients(mlp), (WEIGHTS, X))
    assert "output [0]['down'], in 128 of 128 numbers" in found.words and "f has 9 times" in found.words, found
    assert "3 of 3 outputs differ" in found.words

    def pullback(f: Callable) -> Callable:
        return lambda weights, x, gradient: jax.vjp(f, weights, x)[1](gradient)

    assert compare(pullback(right_mlp), pullback(mlp), (WEIGHTS, X, X))


# Attention.

QKV = [floats(2, 8, 4, 4)] * 3  # batch, length, heads, size


def attention(q, k, v):
    scores = jnp.einsum("bthk,bshk->bhts", q, k) / 2
    causal = jnp.arange(q.shape[1])[:, None] >= jnp.arange(k.shape[1])
    return jnp.einsum("bhts,bshk->bthk", jax.nn.softmax(jnp.where(causal, scores, -jnp.inf)), v)


def ring_attention(q, k, v, turns: int = 4, rescaled: bool = True):
    """Keys and values go around; the largest score, the sum of exponentials and the output so far are kept apart."""
    here, length = lax.axis_index("tensor"), q.shape[1]

    def turn(state, step):
        top, total, out, k, v = state
        positions = (here - step) % 4 * length + jnp.arange(length)
        causal = (here * length + jnp.arange(length))[:, None] >= positions
        scores = jnp.where(causal, jnp.einsum("bthk,bshk->bhts", q, k) / 2, -jnp.inf)
        new = jnp.maximum(top, scores.max(-1))
        weights, old = jnp.exp(scores - new[..., None]), jnp.exp(top - new) if rescaled else 1
        out = out * jnp.moveaxis(jnp.broadcast_to(old, top.shape), 1, 2)[..., None]
        out = out + jnp.einsum("bhts,bshk->bthk", weights, v)
        k, v = (lax.ppermute(x, "tensor", [(n, (n + 1) % 4) for n in range(4)]) for x in (k, v))
        return (new, total * old + weights.sum(-1), out, k, v), None

    lowest = lax.pcast(jnp.full((2, 4, length), -jnp.inf), ("data", "tensor"), to="varying")[: len(q)]
    begin = (lowest, jnp.exp(lowest), jnp.zeros_like(q), k, v)
    (_, total, out, _, _), _ = lax.scan(turn, begin, jnp.arange(turns))
    return out / jnp.moveaxis(total, 1, 2)[..., None]


def by_heads(q, k, v, back: tuple[int, int] = (1, 2)):
    """Every device has all heads of some tokens, then some heads of all tokens, and back."""
    q, k, v = (lax.all_to_all(x, "tensor", 2, 1, tiled=True) for x in (q, k, v))
    return lax.all_to_all(attention(q, k, v), "tensor", *back, tiled=True)


@pytest.mark.parametrize(
    ("body", "equal"),
    [
        (ring_attention, True),
        (functools.partial(ring_attention, turns=3), False),
        (functools.partial(ring_attention, rescaled=False), False),
        (by_heads, True),
    ],
)
def test_attention_over_sequences(body: Callable, equal: bool) -> None:
    spec = P("data", "tensor")
    assert bool(compare(sharded(body, (spec,) * 3, spec), attention, QKV)) is equal


def test_a_softmax_of_shards() -> None:
    def softmax(x, over: Any = "tensor"):
        top = lax.pmax(x.max(-1, keepdims=True), "tensor")
        weights = jnp.exp(x - top)
        return weights / lax.psum(weights.sum(-1, keepdims=True), over)

    spec = P("data", "tensor")
    assert compare(sharded(softmax, spec, spec), jax.nn.softmax, (floats(4, 8),))
    wrong = sharded(functools.partial(softmax, over="data"), spec, spec)
    assert not compare(wrong, jax.nn.softmax, (floats(4, 8),))


def test_a_pipeline() -> None:
    """Four stages, five microbatches; numbers of idle turns have the same name and are no difference."""

    def stage(weights, x):
        return checkpoint_name(jnp.tanh(x @ weights), "stage")

    def plain(weights, x):
        return lax.scan(lambda y, w: (jax.vmap(stage, (None, 0))(w, y), None), x, weights)[0]

    def divided(weights, x, shift: int = 1):
        here, size = lax.axis_index("tensor"), len(x)

        def tick(state, n):
            y = stage(weights[0], jnp.where(here == 0, x[jnp.clip(n, 0, size - 1)], state))
            return lax.ppermute(y, "tensor", [(d, (d + shift) % 4) for d in range(4)]), y

        start = lax.pcast(jnp.zeros_like(x[0]), "tensor", to="varying")
        _, ys = lax.scan(tick, start, jnp.arange(size + 3))
        return lax.psum(jnp.where(here == 3, ys[3:], 0), "tensor")

    args = floats(4, 3, 3), floats(5, 2, 3)
    assert compare(sharded(divided, (P("tensor"), P()), P()), plain, args)
    found = compare(sharded(functools.partial(divided, shift=3), (P("tensor"), P()), P()), plain, args)
    assert "the first named value that differs is stage: f lacks 90 of its 120 numbers" in found.words, found


# Others' code.


def test_adam_on_shards() -> None:
    """optax clips by the norm of what it is given: right on whole gradients, wrong on shards."""
    whole = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))

    def plain(weights, gradients):
        state = whole.init(weights)
        return whole.update(gradients, state)

    def of_all(gradients):
        norm = jnp.sqrt(lax.psum(sum((g**2).sum() for g in jax.tree.leaves(gradients)), "tensor"))
        return jax.tree.map(lambda g: jnp.where(norm < 1.0, g, g / norm), gradients)

    def divided(weights, gradients):
        adam = optax.adam(1e-3)
        updates, state = adam.update(of_all(gradients), adam.init(weights))
        return updates, (optax.EmptyState(), state)

    weights = {"a": floats(8, 4), "b": floats(4)}
    like = jax.eval_shape(plain, weights, weights)
    specs = jax.tree.map(lambda leaf: P("tensor") if leaf.shape else P(), like)
    assert compare(sharded(divided, P("tensor"), specs), plain, (weights, weights))
    found = compare(sharded(plain, P("tensor"), specs), plain, (weights, weights))
    assert not found and "output [0]['a']" in found.words, found


def test_a_layer_of_flax() -> None:
    """One attention of flax on some of the heads, its bias added once, and its sum over devices."""
    x = floats(2, 6, 8)
    nn = pytest.importorskip("flax.linen")
    whole, part = (nn.MultiHeadDotProductAttention(heads, qkv_features=2 * heads, out_features=8) for heads in (4, 1))
    weights = jax.eval_shape(lambda x: whole.init(jax.random.key(0), x), x)
    specs = jax.tree.map(lambda _: P(None, "tensor"), weights)
    for name in ("query", "key", "value"):
        specs["params"][name]["bias"] = P("tensor")
    specs["params"]["out"] = {"kernel": P("tensor"), "bias": P()}

    def divided(weights, x, count: int = 4):
        out = weights["params"]["out"]
        params = weights["params"] | {"out": out | {"bias": out["bias"] / count}}
        return lax.psum(part.apply({"params": params}, x), "tensor")

    assert compare(sharded(divided, (specs, P("data")), P("data")), whole.apply, (weights, x))
    four_biases = sharded(functools.partial(divided, count=1), (specs, P("data")), P("data"))
    assert not compare(four_biases, whole.apply, (weights, x))


def test_a_cross_entropy_of_shards() -> None:
    """optax's, and its gradient, of logits whose vocabulary is divided."""
    labels = np.array([3, 0, 7, 5])

    def plain(logits, labels):
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    def divided(logits, labels, first: Callable = lambda size: lax.axis_index("tensor") * size):
        top = lax.stop_gradient(lax.pmax(lax.stop_gradient(logits.max(-1)), "tensor"))
        total = lax.psum(jnp.exp(logits - top[:, None]).sum(-1), "tensor")
        own = labels[:, None] == first(logits.shape[1]) + jnp.arange(logits.shape[1])
        picked = lax.psum((logits * own).sum(-1), "tensor")
        return lax.pmean((jnp.log(total) + top - picked).mean(), "data")

    specs, args = (P("data", "tensor"), P("data")), (floats(4, 8), labels)
    right, wrong = sharded(divided, specs, P()), sharded(functools.partial(divided, first=lambda size: 0), specs, P())
    assert compare(right, plain, args) and not compare(wrong, plain, args)
    assert compare(jax.grad(right), jax.grad(plain), args) and not compare(jax.grad(wrong), jax.grad(plain), args)


def test_a_mean_of_means() -> None:
    """Devices have different numbers of targets, which a mask says; masks keep their values."""
    mask = np.arange(8)[:, None] < np.array([5, 3, 1])

    def loss(x, mask, total=lambda x: x):
        return total((x**2 * mask).sum()) / total(mask.sum())

    def divided(body: Callable) -> Callable:
        return sharded(body, (P("data"), P("data")), P())

    args = floats(8, 3), mask
    summed = divided(functools.partial(loss, total=lambda x: lax.psum(x, "data")))
    assert compare(summed, loss, args)
    found = compare(divided(lambda x, mask: lax.pmean(loss(x, mask), "data")), loss, args)
    assert found.words.startswith("different: the output, in 1 of 1 number"), found
    args = floats(8, 3), np.ones_like(mask)
    assert compare(divided(lambda x, mask: lax.pmean(loss(x, mask), "data")), loss, args)


def test_dropout() -> None:
    """Bits are those of `jax.random`: devices that use one key for different rows repeat them."""
    rows = np.arange(8)

    def dropped(key, rows, x):
        keys = jax.vmap(functools.partial(jax.random.fold_in, key))(rows)
        keep = jax.vmap(lambda key: jax.random.bernoulli(key, 0.5, x.shape[1:]))(keys)
        return jnp.where(keep, x / 0.5, 0)

    def divided(own_rows: Callable) -> Callable:
        body = lambda key, rows, x: dropped(key, own_rows(rows), x)  # noqa: E731
        return sharded(body, (P(), P("data"), P("data")), P("data"))

    args = jax.random.key(1), rows, floats(8, 5)
    assert compare(divided(lambda rows: rows), dropped, args)
    found = compare(divided(lambda rows: rows % 4), dropped, args)
    count = re.match(r"different: the output, in (\d+) of 40 numbers", found.words)
    assert count and 4 <= int(count[1]) <= 16, found  # half of half of them


# What else programs have.


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_keys_are_those_of_jax(impl: str) -> None:
    def bits(key):
        one, two = jax.random.split(key)
        keys = jnp.stack([two, one, key])[jnp.array([2, 0])]
        return jax.random.bits(keys[1], (3,)), jax.random.randint(one, (2,), 0, 9), jax.random.key_data(keys)

    key = jax.random.key(5, impl=impl)
    known = jax.tree.map(np.asarray, bits(key))
    assert compare(bits, lambda key: jax.tree.map(jnp.asarray, known), (key,))
    assert not compare(bits, lambda key: jax.tree.map(lambda x: x + 1, known), (key,))


def test_constraints_and_meshes_in_context() -> None:
    """Of sizes or a mesh; explicit sharding is the identity, too. Devices that exist may be named."""

    def body(x):
        return lax.psum(x, "data")

    def in_context(x):
        jax.debug.print("{}", x)
        x = jax.device_put(lax.with_sharding_constraint(x, P("data")))
        return jax.shard_map(body, in_specs=P("data"), out_specs=P())(jax.jit(lambda x: 2 * x)(x))

    for mesh in ({"data": 2, "tensor": 4}, MESH, jax.make_mesh((2,), ("data",), (AxisType.Auto,))):
        assert compare(in_context, lambda x: 2 * (x[:2] + x[2:]), (floats(4, 3),), mesh=mesh)
    explicit = AbstractMesh((2,), ("data",), (AxisType.Explicit,))
    assert compare(lambda x: jax.sharding.reshard(x, P("data")) * 2, lambda x: x + x, (floats(4),), mesh=explicit)


def test_a_shard_map_in_a_shard_map() -> None:
    def outer(x):
        inner = jax.shard_map(lambda x: lax.psum(x.sum(0), "tensor"), in_specs=P("tensor"), out_specs=P())
        return lax.psum(inner(x) * (1 + lax.axis_index("data")), "data")

    f = jax.shard_map(outer, mesh=MESH, in_specs=P(None, "data"), out_specs=P(), axis_names={"data"})
    assert compare(f, lambda x: x[:, :2].sum(0) + 2 * x[:, 2:].sum(0), (floats(8, 4),))


def test_sums_in_groups_of_an_axis() -> None:
    def body(x):
        return lax.psum(x, "tensor", axis_index_groups=[[0, 2], [1, 3]])

    f = sharded(body, P("tensor"), P("tensor"), check_vma=False)
    assert compare(f, lambda x: jnp.tile(x[:2] + x[2:], (2, 1)), (floats(4, 3),))


def test_both_branches() -> None:
    """Where the order of random numbers decides, programs run with it and with its reverse; so does `isfinite`."""

    def clipped(x, limit=1.0, factor=1):
        norm = (x**2).sum()
        return jnp.where(norm < limit, x, factor * x / norm)

    def skipped(x, factor):
        return lax.cond(jnp.isfinite(x).all(), lambda: x, lambda: factor * x)

    for seed in range(3):
        assert compare(clipped, clipped, (X,), seed=seed)
        assert not compare(clipped, functools.partial(clipped, factor=2), (X,), seed=seed)
    assert compare(functools.partial(skipped, factor=3), functools.partial(skipped, factor=3), (X,))
    found = compare(functools.partial(skipped, factor=3), functools.partial(skipped, factor=4), (X,))
    assert "the output where isfinite says no, in 32 of 32 numbers" in found.words and "3/4 times" in found.words


def test_constants_are_compared_as_they_are() -> None:
    """0.5 is below 0.75, and multiples of 2^-24 have their order."""
    thresholds = jnp.array([0.5, 0.75, -3.25, 100.0, -1e6])

    def g() -> Any:
        return thresholds[:, None] < jnp.array([0.6015625, 2.0])

    assert compare(g, lambda: jnp.asarray(np.asarray(thresholds)[:, None] < np.array([0.6, 2.0])), ())


# What cannot be compared.


@pytest.mark.parametrize(
    ("f", "words"),
    [
        (lambda x: {"a": x, "b": x}, "output ['a'] is in f only"),
        (lambda x: {"b": x.T}, "output ['b'] is float32[8, 4] in f, float32[4, 8] in g"),
        (lambda x: {"b": x.astype(jnp.bfloat16)}, "output ['b'] is bfloat16[4, 8] in f, float32[4, 8] in g"),
        (lambda x: {"b": x > 0}, "output ['b'] is bool[4, 8] in f, float32[4, 8] in g"),
        (lambda x: x, "output ['b'] is in g only"),
    ],
)
def test_outputs_of_another_form(f: Callable, words: str) -> None:
    found = compare(f, lambda x: {"b": x}, (X,))
    assert not found and found.words == f"different: {words}"


@pytest.mark.parametrize(
    ("args", "others", "words"),
    [
        (X, {}, "args is a ShapeDtypeStruct; valid: a tuple of the functions' arguments"),
        (
            (X, {"ids": jax.ShapeDtypeStruct((2,), jnp.int32)}),
            {},
            "args[1]['ids'] is int32 without values; valid: an array",
        ),
        ((X, np.ones(2, complex)), {}, "args[1] is complex128; valid: floats"),
        ((X, X), {"repeats": 0}, "repeats is 0; valid: at least 1"),
        ((X, X), {"mesh": 8}, "mesh is a int; valid: a mesh, or"),
        ((X,), {}, "f cannot be traced: TypeError: "),
        ((X, floats(2, 3)), {}, "f cannot be traced: TypeError: dot_general"),
    ],
)
def test_mistakes(args: Any, others: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=re.escape(words)):
        compare(lambda x, y: x @ y, lambda x, y: x @ y, args, **others)


def test_devices_that_do_not_exist() -> None:
    def f(x):
        mesh = jax.make_mesh((512,), ("data",))
        return jax.shard_map(lambda x: x, mesh=mesh, in_specs=P(), out_specs=P())(x)

    with pytest.raises(
        UserError, match=r"f cannot be traced: ValueError: Number of devices .* jax.sharding.AbstractMesh"
    ):
        compare(f, lambda x: x, (X,))


def test_programs_without_a_result() -> None:
    """A primitive without a rule, a loop without an end, a collective that some devices do not reach."""
    with pytest.raises(RunError, match=r"^g: no rule for the primitive cholesky"):
        compare(lambda x: x, jnp.linalg.cholesky, (floats(3, 3),))
    with pytest.raises(RunError, match=r"^f: no rule for complex numbers"):
        compare(lambda x: jnp.fft.fft(x).real, lambda x: x, (X,))
    with pytest.raises(RunError, match=r"^f: a while loop goes on after"):
        compare(lambda x: lax.while_loop(lambda x: True, lambda x: x + 1, x), lambda x: x, (floats(),))

    def body(x):
        return lax.cond(lax.axis_index("data") == 0, lambda x: lax.psum(x, "data"), lambda x: x, x)

    with pytest.raises(RunError, match=r"^f: only some of the devices that communicate over"):
        compare(sharded(body, P("data"), P("data"), check_vma=False), lambda x: x, (X,))


def test_what_only_a_law_of_other_functions_makes_equal() -> None:
    """False alarms that the page tells, and the forms that avoid them."""
    x = floats(2, 8)

    def merged(x, log: bool):
        parts = x.reshape(2, 2, 4)
        top, sums = parts.max(-1), jnp.exp(parts - parts.max(-1, keepdims=True)).sum(-1)
        if log:
            return jax.nn.logsumexp(top + jnp.log(sums), -1)
        most = top.max(-1)
        return most + jnp.log((sums * jnp.exp(top - most[:, None])).sum(-1))

    whole = lambda x: jax.nn.logsumexp(x, -1)  # noqa: E731
    assert not compare(functools.partial(merged, log=True), whole, (x,))
    assert compare(functools.partial(merged, log=False), whole, (x,))


@pytest.mark.parametrize("page", ["README.md", "../README.md", "../docs/exact.md"])
def test_examples_of_the_pages(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    """They print what the block after them shows."""
    if page.startswith(".."):
        pytest.importorskip("megajax")
    text = (Path(__file__).parents[1] / page).read_text()
    examples = re.findall(r"```python\n(.*?)```\n+```text\n(.*?)```", text, re.DOTALL)
    names: dict[str, Any] = {}
    assert examples
    for code, printed in examples:
        exec(compile(code, page, "exec"), names)
        found = re.sub(r"(\.py):\d+:\d+", r"\1", capsys.readouterr().out)
        assert found == printed
