"""Mutants of what crosses devices: `parallel/collectives.py`, `boundary.py` and `shards.py`."""

from mutant import (
    OF_BERT,
    OF_DOCUMENTS,
    OF_SPANS,
    ON_DATA,
    ON_PIPE,
    ON_RING,
    ON_SEQUENCE,
    ON_TENSOR,
    ON_VOCABULARY,
    Mutant,
    backward,
    forward,
    gradient,
    update,
)

ZERO3 = ON_DATA | {"zero": 3}
THREE_STAGES = {"mesh": (1, 3, 1), "num_layers": 3}
SHARED_VOCABULARY = {"mesh": (1, 2, 2), "vocabulary": "split"}

F = 'return lax.pcast(x, axes, to="varying")'
G = "return lax.psum(x, axes)"
MAX = "return lax.pmax(x, axes)"
ALL_GATHER = 'return lax.all_gather(x, axes, axis=dim % x.ndim, tiled=True, to="invarying" if invariant else "varying")'
ROLLED = ALL_GATHER.replace("return", "x =") + "\n    return jnp.roll(x, x.shape[dim] // axis_size(axes), dim)"
SCATTER = "return lax.psum_scatter(x, axes, scatter_dimension=dim % x.ndim, tiled=True)"
BROADCAST = "return lax.psum(jnp.where(mine, x, jnp.zeros((), x.dtype)), PIPE)"
PAIRS = "(stage, (stage + step) % p) for stage in range(p) if ring or 0 <= stage + step < p"
OWN = "axis_index(axes) * size, size, dim"
VARY = 'return lax.pcast(x, missing, to="varying") if missing else x'


def with_backward(forward: str, backward: str) -> str:
    """`forward` of x with a gradient of its own; lines of the body of a function."""
    return (
        f"entered = jax.custom_vjp(lambda x: {forward})\n"
        f"    entered.defvjp(lambda x: ({forward}, None), lambda _, grad: ({backward},))\n"
        "    return entered(x)"
    )


INTO = 'lax.pcast(x, axes, to="varying")'
COLLECTIVES = [
    Mutant("f does not sum the gradient", F, with_backward(INTO, "grad"), ON_TENSOR, "types"),
    Mutant(
        "f takes the mean of the gradients, not their sum",
        F,
        with_backward(INTO, "lax.pmean(grad, axes)"),
        ON_TENSOR,
        "numbers",
        backward(-1, "final_norm", "tensor"),
    ),
    Mutant(
        "f sums the gradient twice",
        F,
        with_backward(INTO, "lax.psum(lax.psum(grad, axes), axes)"),
        ON_TENSOR,
        "numbers",
        backward(-1, "final_norm", "tensor"),
    ),
    Mutant("g does not sum", G, "return x", ON_TENSOR, "types"),
    Mutant(
        "g takes the mean",
        G,
        "return lax.pmean(x, axes)",
        ON_TENSOR,
        "numbers",
        forward(0, "input", "tensor"),
    ),
    Mutant(
        "g sums twice",
        G,
        "return lax.psum(lax.psum(x, axes), axes)",
        ON_TENSOR,
        "numbers",
        forward(0, "input", "tensor"),
    ),
    Mutant(
        "g sums over data",
        G,
        'return lax.psum(x, ("data",) if axes == TENSOR else axes)',
        {"mesh": (2, 1, 2)},
        "types",
    ),
    Mutant("the maximum of the logits is a device's own", MAX, "return x", ON_TENSOR, "types"),
    Mutant(
        "sums over axes are not taken",
        "return lax.psum(tree, tuple(axes)) if axes else tree",
        "return tree",
        ON_DATA,
        "types",
    ),
    Mutant(
        "sums over axes leave the first one out",
        "return lax.psum(tree, tuple(axes)) if axes else tree",
        "return lax.psum(tree, tuple(axes)[1:]) if axes[1:] else tree",
        ON_DATA,
        "types",
    ),
    Mutant(
        "gradients and losses are means over devices",
        "for index, total in zip(group, sum_over([leaves[index] for index in group], axes), strict=True):\n"
        "            leaves[index] = total",
        "for index, total in zip(group, sum_over([leaves[index] for index in group], axes), strict=True):\n"
        "            leaves[index] = total / lax.psum(1, axes)",
        ON_PIPE,
        "numbers",
        gradient("table", "pipe", "position", "final_norm", "loss"),
    ),
    Mutant(
        "gradients are summed twice over the axes that they lack",
        "leaves[index] = total",
        "leaves[index] = lax.psum(total, axes) if axes else total",
        ON_PIPE,
        "numbers",
        gradient("table", "pipe", "position", "final_norm", "loss"),
    ),
    Mutant(
        "the tied embedding's gradient is the larger one of the two stages",
        "return lax.psum(tree, tuple(axes)) if axes else tree",
        "rest = tuple(axis for axis in axes if axis != PIPE)\n"
        "    tree = lax.psum(tree, rest) if rest else tree\n"
        "    return jax.tree.map(lambda x: lax.pmax(x, PIPE), tree) if PIPE in axes else tree",
        ON_PIPE,
        "numbers",
        gradient("table", "pipe", "position", "final_norm"),
    ),
    Mutant(
        "gradients are not summed over tensor where the sequence is split",
        "sorted(varying_axes(leaf) - axes)",
        "sorted(varying_axes(leaf) - axes - {TENSOR})",
        ON_SEQUENCE,
        "types",
    ),
    Mutant(
        "ZeRO updates another device's shard",
        OWN,
        "(axis_size(axes) - 1 - axis_index(axes)) * size, size, dim",
        ON_DATA,
        "numbers",
        update("data"),
    ),
    Mutant(
        "every device has the first tokens' positions",
        OWN,
        "axis_index(axes) * 0, size, dim",
        ON_SEQUENCE,
        "numbers",
        forward(0, "input", "tensor"),
    ),
    Mutant(
        "gathered tokens stand in another order",
        ALL_GATHER,
        ROLLED,
        ON_SEQUENCE,
        "numbers",
        forward(0, "query", "tensor"),
    ),
    Mutant(
        "gathered weights stand in another order",
        ALL_GATHER,
        ROLLED,
        ZERO3,
        "numbers",
        forward(0, "input", "data"),
    ),
    Mutant(
        "gathered along the wrong dim",
        ALL_GATHER,
        ALL_GATHER.replace("dim % x.ndim", "(dim + 1) % x.ndim"),
        ON_SEQUENCE,
        "types",
    ),
    Mutant(
        "a reduce-scatter of tokens does not sum",
        SCATTER,
        "return own_shard(x, dim % x.ndim, axes)",
        ON_SEQUENCE,
        "numbers",
        forward(0, "input", "tensor"),
    ),
    Mutant(
        "a reduce-scatter of gradients does not sum",
        SCATTER,
        "return own_shard(x, dim % x.ndim, axes)",
        ON_DATA,
        "numbers",
        gradient("", "data"),
    ),
    Mutant(
        "a reduce-scatter of gradients takes the mean",
        SCATTER,
        SCATTER + " / axis_size(axes)",
        ZERO3,
        "numbers",
        gradient("", "data"),
    ),
    Mutant(
        "a reduce-scatter hands out the parts in reverse",
        SCATTER,
        "size = axis_size(axes)\n"
        "    x = lax.psum_scatter(x, axes, scatter_dimension=dim % x.ndim, tiled=True)\n"
        "    return lax.ppermute(x, axes, [(i, size - 1 - i) for i in range(size)])",
        ON_SEQUENCE,
        "numbers",
        forward(0, "input", "tensor"),
    ),
    Mutant(
        "what a stage hands to all is the sum of all stages'",
        BROADCAST,
        "return lax.psum(x, PIPE)",
        ON_VOCABULARY,
        "numbers",
        forward(-1, "last_output", "pipe"),
    ),
    Mutant("what a stage hands to all stays there", BROADCAST, "return x", ON_VOCABULARY, "types"),
    Mutant(
        "activations go to the stage before",
        PAIRS,
        "(stage, (stage - step) % p) for stage in range(p) if ring or 0 <= stage - step < p",
        ON_PIPE,
        "numbers",
        forward(1, "input", "pipe"),
    ),
    Mutant(
        "activations go one stage too far",
        PAIRS,
        "(stage, (stage + 2 * step) % p) for stage in range(p)",
        THREE_STAGES,
        "numbers",
        forward(1, "input", "pipe"),
    ),
    Mutant(
        "gradients go up",
        "return _send(x, -1, ring)",
        "return _send(x, +1, ring)",
        ON_PIPE,
        "numbers",
        backward(0, "output", "pipe"),
    ),
    Mutant(
        "the ring is open",
        PAIRS,
        "(stage, (stage + step) % p) for stage in range(p) if 0 <= stage + step < p",
        ON_RING,
        "numbers",
        forward(2, "input", "pipe"),
    ),
    Mutant(
        "the last stage sends nothing",
        PAIRS,
        "(stage, (stage + step) % p) for stage in range(p - 1) if ring or 0 <= stage + step < p",
        THREE_STAGES,
        "numbers",
        backward(1, "output", "pipe"),
    ),
    Mutant(
        "of several axes the last one counts slowest",
        "return lax.axis_index(axes)",
        "return lax.axis_index(axes if isinstance(axes, str) else tuple(reversed(axes)))",
        SHARED_VOCABULARY,
        "numbers",
        forward(0, "input", "pipe"),
    ),
    Mutant("nothing is declared varying", VARY, "return x", ON_DATA, "types"),
    Mutant(
        "zeros are the same on all devices",
        "return vary(zeros, sorted(varying_axes(shape_dtype)))",
        "return zeros",
        ON_PIPE,
        "types",
    ),
]

BORDERS = [
    Mutant(
        "a split sequence is not summed over pipe",
        "return self._over_others(g, scatter_sum(y_BTD, TOKENS, TENSOR), axes)",
        "return scatter_sum(y_BTD, TOKENS, TENSOR)",
        SHARED_VOCABULARY,
        "numbers",
        forward(0, "input", "pipe"),
        more={"sequence_parallel": True},
    ),
    Mutant(
        "embeddings are not summed over pipe",
        "return g(y_BTD, axes)",
        "return g(y_BTD)",
        ON_VOCABULARY,
        "numbers",
        forward(0, "input", "pipe"),
    ),
    Mutant(
        "a split sequence is gathered into no region",
        "return self._over_others(f, gather_shards(x_BTD, TOKENS, TENSOR), axes)",
        "return x_BTD",
        ON_SEQUENCE,
        "types",
    ),
    Mutant(
        "tokens are numbered from each device's first one",
        "first = axis_index(TENSOR) * size if self.sequence_parallel else 0",
        "first = 0",
        ON_SEQUENCE,
        "numbers",
        forward(0, "input", "tensor"),
    ),
    Mutant(
        "every device has the entries of the first tokens",
        "return own_shard(x, dim, TENSOR) if self.sequence_parallel else x",
        "return x[(slice(None),) * dim + (slice(x.shape[dim] // axis_size(TENSOR)),)] if self.sequence_parallel else x",
        ON_SEQUENCE,
        "numbers",
        forward(0, "input", "tensor"),
    ),
    Mutant(
        "masked tokens are looked for at each device's first tokens",
        "own_BM = places_BM - axis_index(TENSOR) * size",
        "own_BM = places_BM - axis_index(TENSOR) * 0",
        ON_SEQUENCE,
        "numbers",
        forward(-1, "logits", "tensor"),
        more=OF_BERT,
    ),
    Mutant(
        "masked tokens that a device does not have count",
        "return g(jnp.where(here_BM[..., None], found_BMD, jnp.zeros((), x_BTD.dtype)), TENSOR)",
        "return g(found_BMD, TENSOR)",
        ON_SEQUENCE,
        "numbers",
        forward(-1, "logits", "tensor"),
        more=OF_BERT,
    ),
    Mutant(
        "the parts of a span's logits stand in reverse",
        "here = jnp.arange(devices, dtype=jnp.int32) == axis_index(TENSOR)",
        "here = jnp.arange(devices, dtype=jnp.int32) == devices - 1 - axis_index(TENSOR)",
        ON_SEQUENCE,
        "numbers",
        forward(-1, "losses", "tensor", "loss"),
        more=OF_SPANS,
    ),
    Mutant(
        "the first token is that of the last device",
        "here = axis_index(TENSOR) == 0",
        "here = axis_index(TENSOR) == axis_size(TENSOR) - 1",
        ON_SEQUENCE,
        "numbers",
        forward(-1, "losses", "tensor", "loss"),
        more=OF_BERT,
    ),
    Mutant(
        "every device's first token counts",
        "here = axis_index(TENSOR) == 0",
        "here = axis_index(TENSOR) >= 0",
        ON_SEQUENCE,
        "numbers",
        forward(-1, "losses", "tensor", "loss"),
        more=OF_BERT,
    ),
    Mutant(
        "chosen tokens enter as if they were not split",
        "replace(self, sequence_parallel=False, chosen=True)",
        "replace(self, sequence_parallel=False)",
        ON_SEQUENCE,
        "types",
        more=OF_BERT,
    ),
    Mutant(
        "every device has the positions of the first tokens of its documents",
        'own_BT = self.boundary.own_tokens(batch["positions"])',
        'own_BT = batch["positions"][:, : x_BTD.shape[1]]',
        ON_SEQUENCE,
        "numbers",
        forward(0, "input", "tensor"),
        more=OF_DOCUMENTS,
    ),
    Mutant(
        "every device has the types of the first tokens",
        "self.boundary.own_tokens(types_BT)",
        "types_BT[:, : x_BTD.shape[1]]",
        ON_SEQUENCE,
        "numbers",
        forward(0, "input", "tensor"),
        more=OF_BERT,
    ),
    Mutant(
        "every device has the padding of the first tokens",
        "own_BT1 = self.boundary.own_tokens(padding_BT)[..., None]",
        "own_BT1 = padding_BT[:, : x_BTD.shape[1], None]",
        ON_SEQUENCE,
        "numbers",
        gradient("table", "tensor"),
        more=OF_SPANS,
    ),
]

SHARDS = [
    Mutant(
        "ZeRO scatters gradients that are not summed",
        "return self._map(scatter_sum, jax.tree.map(lambda grad: grad.astype(dtype), grads))",
        "return self._map(own_shard, jax.tree.map(lambda grad: grad.astype(dtype), grads))",
        ZERO3,
        "numbers",
        gradient("", "data"),
    ),
    Mutant(
        "ZeRO does not gather the weights",
        "return self._map(lambda shard, dim: gather_shards(shard, dim, invariant=invariant), shards)",
        "return shards",
        ZERO3,
        "types",
    ),
    Mutant(
        "ZeRO takes the first device's shard",
        "return self._map(own_shard, weights)",
        "lax = jax.lax\n"
        "        return self._map(lambda x, dim: lax.dynamic_slice_in_dim("
        "x, 0 * lax.axis_index('data'), x.shape[dim] // lax.axis_size('data'), dim % x.ndim), weights)",
        ON_DATA,
        "numbers",
        update("data"),
    ),
]
