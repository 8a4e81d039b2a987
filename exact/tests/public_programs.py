"""Small parallel programs after public ones, each with the plain function that it should compute and bugs to plant.

The default of an argument is its dims and the axes that divide them; `<8` makes it integers below 8. The docstring is
what the program is after, then five pieces of its source and the bugs that replace them.
"""

import inspect
from functools import reduce

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import PartitionSpec

MESH = {"x": 4, "y": 2}
RING, BACK = [(n, (n + 1) % 4) for n in range(4)], [((n + 1) % 4, n) for n in range(4)]
TRI = np.tri(8, dtype=bool)


def planted(program, bug):
    """A program on shards with one of its bugs, or with none if that is 0; the plain function; arguments of both."""
    dims = {name: each.default for name, each in inspect.signature(program).parameters.items()}
    plain, out = dims.pop("plain"), [argument(each)[0] for each in dims.pop("out").split(",")]
    _, text, body = inspect.getsource(program).split('"""')
    if bug:
        old, new = text.split("\n")[1].strip().split("; ")[bug - 1].split(" → ")
        assert body.count(old) == 1, f"{old} stands in {program.__name__} {body.count(old)} times"
        body = body.replace(old, new)
    exec(f"def on_shards({', '.join(dims)}):{body}", globals(), names := {})
    specs, arrays = zip(*map(argument, dims.values()), strict=True)
    out_specs = tuple(out) if len(out) > 1 else out[0]
    return jax.shard_map(names["on_shards"], in_specs=specs, out_specs=out_specs, check_vma=False), plain, arrays


def argument(text):
    """Its spec, and an array or the form of one."""
    dims = [dim.partition("/") for dim in text.split() if dim[0] != "<"]
    spec, shape = PartitionSpec(*(tuple(axes) or None for _, _, axes in dims)), [int(size) for size, _, _ in dims]
    if text[:1] == "<":
        return spec, jnp.array(np.random.default_rng(0).integers(int(text[1 : text.index(" ")]), size=shape))
    return spec, jax.ShapeDtypeStruct(shape, jnp.float32)


def attention(q, k, v, mask):
    return jax.nn.softmax(jnp.where(mask, q @ k.T, -jnp.inf)) @ v


def xent(w, x, labels):
    return -jnp.take_along_axis(jax.nn.log_softmax(x @ w), labels[:, None], 1).mean()


def rounded(x, w, over=lambda top: top):
    top = over(lax.stop_gradient(jnp.abs(x).max(1)[:, None]))
    return jnp.round(127 * x / top) @ w * top


class Programs:
    def contraction(a="4 8/x", b="8/x 4", out="1 1", plain=lambda a, b: a @ b):
        """https://github.com/jax-ml/jax/blob/main/docs/notebooks/shard_map.md
        psum → pmean; lax.psum(a @ b, "x") → a @ b; "x" → "y"; a @ b → (a @ b).T; b, "x" → b, ("x", "y")"""
        return lax.psum(a @ b, "x")

    def scattered_contraction(a="8 8/x", b="8/x 8", out="1/x 1", plain=lambda a, b: a @ b):
        """https://github.com/jax-ml/jax/blob/main/docs/notebooks/shard_map.md
        d=True) → d=True) / 4; n=0 → n=1; a @ → a[::-1] @; "x" → ("x", "y"); @ b → @ b[::-1]"""
        return lax.psum_scatter(a @ b, "x", scatter_dimension=0, tiled=True)

    def overlapped_gather(a="8/x 4", b="4 8/x", out="1 1/x", plain=lambda a, b: a @ b):
        """https://github.com/jax-ml/jax/blob/main/docs/notebooks/shard_map.md
        - turn → + turn; % 4 → % 3; "x", RING → "x", RING[:3]; range(4) → range(3); index("x") → index("y")"""
        index, product = lax.axis_index("x"), jnp.zeros((8, 2))
        for turn in range(4):
            product = lax.dynamic_update_slice(product, a @ b, ((index - turn) % 4 * 2, 0))
            a = lax.ppermute(a, "x", RING)
        return product

    def overlapped_scatter(a="8 8/x", b="8/x 4", out="1/x 1", plain=lambda a, b: a @ b):
        """https://github.com/jax-ml/jax/blob/main/docs/notebooks/shard_map.md
        - 1 → - 0; a, place → a, turn; "x", RING) → "x", RING[1:]); range(4) → range(3); "x", RING) + → "x", RING) -"""
        total = jnp.zeros((2, 4))
        for turn in range(4):
            place = (lax.axis_index("x") - 1 - turn) % 4
            total = lax.ppermute(total, "x", RING) + lax.dynamic_slice_in_dim(a, place * 2, 2) @ b
        return total

    def gathered_weights(w="8/x 8", x="8/x 8", out="", plain=lambda w, x: jnp.mean(jnp.tanh(x @ w) ** 2)):
        """https://github.com/jax-ml/jax/blob/main/docs/notebooks/shard_map.md
        pmean → psum; tanh → sin; ** 2 → ** 3; d=True)) → d=True)[::-1]); (w, → (lax.stop_gradient(w),"""
        return lax.pmean(jnp.mean(jnp.tanh(x @ lax.all_gather(w, "x", tiled=True)) ** 2), "x")

    def tensor_parallel(x="4/y 8", u="8 16/x", d="16/x 8", out="1/y 1", plain=lambda x, u, d: jax.nn.gelu(x @ u) @ d):
        """https://github.com/jax-ml/jax/blob/main/docs/notebooks/shard_map.md
        psum → pmean; "x" → "y"; (x @ u) → (lax.psum(x @ u, "x")); @ d → @ d[::-1]; gelu → silu"""
        return lax.psum(jax.nn.gelu(x @ u) @ d, "x")

    def pipeline(w="4/x 8 8", x="6 2 8", out="1 1 1", plain=lambda w, x: reduce(lambda h, v: jnp.tanh(h @ v), w, x)):
        """https://github.com/jax-ml/jax/blob/main/docs/notebooks/shard_map.md
        == 0 → == 1; "x", RING → "x", RING[1:]; [3:] → [2:8]; == 3 → == 2; min(t, 5) → min(t, 4)"""
        index, state, states = lax.axis_index("x"), jnp.zeros((2, 8)), []
        for t in range(9):
            states.append(jnp.tanh(jnp.where(index == 0, x[min(t, 5)], state) @ w[0]))
            state = lax.ppermute(states[-1], "x", RING)
        return lax.psum(jnp.where(index == 3, jnp.stack(states[3:]), 0.0), "x")

    def transposed(a="8/x 8", out="1/x 1", plain=lambda a: a.T):
        """https://docs.jax.dev/en/latest/_autosummary/jax.lax.all_to_all.html
        a.T → -a.T; a.T → a.T[::-1]; "x" → "y"; "x" → ("x", "y"); d=True) → d=True)[::-1]"""
        return lax.all_to_all(a.T, "x", 0, 1, tiled=True)

    def two_axes(a="8/x 8/y", b="8/y 4/x", out="1/x 1", plain=lambda a, b: a @ b):
        """https://github.com/jax-ml/jax/blob/main/docs/jep/14273-shard-map.md
        "y") → "x"); b, "x" → -b, "x"; True), "y") → True) / 2, "y"); psum → pmean; a @ → 2 * a @"""
        return lax.psum(a @ lax.all_gather(b, "x", axis=1, tiled=True), "y")

    def rule_30(c="<2 16/x", out="1/x", plain=lambda c: jnp.roll(c, 1) ^ (c | jnp.roll(c, -1))):
        """https://github.com/jax-ml/jax/blob/main/cloud_tpu_colabs/Pmap_Cookbook.ipynb
        [-1:] → [:1]; "x", RING → "x", BACK; "x", BACK → "x", RING; ^ → |; (c | → (c &"""
        left, right = lax.ppermute(c[-1:], "x", RING), lax.ppermute(c[:1], "x", BACK)
        return jnp.concatenate([left, c[:-1]]) ^ (c | jnp.concatenate([c[1:], right]))

    def wave(u="16/x 4", v="16/x 4", out="1/x 1", plain=lambda u, v: u - v + jnp.diff(jnp.pad(u, 1)[:, 1:-1], 2, 0)):
        """https://github.com/jax-ml/jax/blob/main/cloud_tpu_colabs/Wave_Equation.ipynb
        RING[:3] → RING; u[-1:] → u[:1]; BACK[:3] → BACK; u - v → u + v; [above, u, below] → [below, u, above]"""
        above, below = lax.ppermute(u[-1:], "x", RING[:3]), lax.ppermute(u[:1], "x", BACK[:3])
        return u - v + jnp.diff(jnp.concatenate([above, u, below]), 2, 0)

    def regression(w="4", x="16/x 4", y="16/x", out="1", plain=lambda w, x, y: w - x.T @ (x @ w - y) / 16):
        """https://github.com/jax-ml/jax/blob/main/docs/jax-101/06-parallelism.ipynb
        pmean → psum; "x" → "y"; 0.5 → 0.25; .mean → .sum; - y → + y"""
        return w - 0.5 * lax.pmean(jax.grad(lambda w: jnp.mean((x @ w - y) ** 2))(w), "x")

    def classifier(w="4 3", x="16/x 4", labels="<3 16/x", out="", plain=xent):
        """https://github.com/jax-ml/jax/blob/main/examples/spmd_mnist_classifier_fromscratch.py
        pmean → psum; "x" → "y"; labels) → labels[::-1]); w, x → w, 2 * x; (w, → (-w,"""
        return lax.pmean(xent(w, x, labels), "x")

    def decayed(w="4", x="16/x 4", out="", plain=lambda w, x: jnp.mean(x @ w) + 0.1 * jnp.sum(w**2)):
        """https://github.com/google/flax/blob/main/examples/imagenet/train.py
        pmean → psum; 0.1 → 0.4; "x" → "y"; .mean → .sum; w**2 → w**3"""
        return lax.pmean(jnp.mean(x @ w) + 0.1 * jnp.sum(w**2), "x")

    def batch_norm(x="16/x 4", out="1/x 1", plain=lambda x: (x - x.mean(0)) * lax.rsqrt(x.var(0) + 1e-5)):
        """https://github.com/google/flax/blob/main/flax/linen/normalization.py
        pmean → psum; "x") → "y"); mean**2 → mean; x.mean(0), → 2 * x.mean(0),; 1e-5 → 1e-6"""
        mean, square = lax.pmean((x.mean(0), (x**2).mean(0)), "x")
        return (x - mean) * lax.rsqrt(square - mean**2 + 1e-5)

    def clip(a="8/x 4", b="4", out="1/x 1, 1", plain=lambda *ab: optax.clip_by_global_norm(1.0).update(ab, None)[0]):
        """https://github.com/google-deepmind/optax/blob/main/optax/transforms/_clipping.py
        psum → pmean; + jnp.sum(b**2)) → * 1); a**2), "x") → a**2) + jnp.sum(b**2), "x"); < 1 → > 1; / norm → / 2"""
        norm = jnp.sqrt(lax.psum(jnp.sum(a**2), "x") + jnp.sum(b**2))
        return tuple(jnp.where(norm < 1.0, each, each / norm) for each in (a, b))

    def trust_ratio(w="8/x 4", u="8/x 4", out="1/x 1", plain=lambda w, u: u * jnp.sqrt((w**2).sum() / (u**2).sum())):
        """https://github.com/google-deepmind/optax/blob/main/optax/_src/transform.py
        "x" → "y"; of_w / of_u → of_u / of_w; return u → return w; of_u) → of_u) / 4; (w**2) → w"""
        of_w, of_u = lax.psum(((w**2).sum(), (u**2).sum()), "x")
        return u * jnp.sqrt(of_w / of_u)

    def flash_decoding(q="4", k="16/x 4", v="16/x 4", out="1", plain=lambda q, k, v: jax.nn.softmax(k @ q) @ v):
        """https://github.com/AI-Hypercomputer/maxtext/blob/main/src/maxtext/layers/attention_op.py
        max(), "x") → max(), "y"); @ v, → @ k,; k @ q → k @ -q; total / sums → total; weights.sum → weights.max"""
        scores = k @ q
        weights = jnp.exp(scores - lax.pmax(lax.stop_gradient(scores).max(), "x"))
        total, sums = lax.psum((weights @ v, weights.sum()), "x")
        return total / sums

    def ring_attention(q="8/x 4", k="8/x 4", v="8/x 4", out="1/x 1", plain=lambda *qkv: attention(*qkv, TRI)):
        """https://github.com/haoliuhl/ringattention/blob/main/ringattention/ringattention_jax.py
        index - → index +; RING) → RING[1:]); total * scale → total; top - new) → top + new); (index * 2, → (index,"""
        top, sums, total = jnp.full((2, 1), -jnp.inf), jnp.zeros((2, 1)), jnp.zeros((2, 4))
        index = lax.axis_index("x")
        for turn in range(4):
            seen = lax.dynamic_slice(TRI, (index * 2, (index - turn) % 4 * 2), (2, 2))
            scores = jnp.where(seen, q @ k.T, -jnp.inf)
            new = jnp.maximum(top, scores.max(1, keepdims=True))
            weights, scale = jnp.exp(scores - new), jnp.exp(top - new)
            top, sums, total = new, sums * scale + weights.sum(1, keepdims=True), total * scale + weights @ v
            k, v = lax.ppermute((k, v), "x", RING)
        return total / sums

    def gathered_keys(q="8/x 4", k="8/x 4", v="8/x 4", out="1/x 1", plain=lambda *qkv: attention(*qkv, TRI)):
        """https://github.com/vllm-project/tpu-inference/blob/main/tpu_inference/layers/common/cp_attention.py
        * 2, 2 → , 2; TRI → TRI.T; index("x") → index("y"); (k, v), → (k, k),; (k, v), → (k[::-1], v),"""
        seen = lax.dynamic_slice_in_dim(TRI, lax.axis_index("x") * 2, 2)
        return attention(q, *lax.all_gather((k, v), "x", tiled=True), seen)

    def embedding(table="8/x 4", tokens="<8 5", out="1 1", plain=lambda table, tokens: table[tokens]):
        """https://github.com/kingoflolz/mesh-transformer-jax/blob/master/mesh_transformer/layers.py
        2 * → 3 *; s - → s +; psum → pmean; index("x") → index("y"); @ table → @ table[::-1]"""
        return lax.psum(jax.nn.one_hot(tokens - 2 * lax.axis_index("x"), 2) @ table, "x")

    def vocabulary_loss(w="8 8/x", x="4 8", labels="<8 4", out="", plain=xent):
        """https://github.com/kingoflolz/mesh-transformer-jax/blob/master/mesh_transformer/layers.py
        True), "x") → True), "y"); - 2 → - 1; psum(jnp → pmean(jnp; of, "x" → of, "y"; psum(of → psum(-of"""
        logits = x @ w
        logits -= lax.pmax(lax.stop_gradient(logits).max(1, keepdims=True), "x")
        of = (jax.nn.one_hot(labels - 2 * lax.axis_index("x"), 2) * logits).sum(1)
        return jnp.mean(jnp.log(lax.psum(jnp.exp(logits).sum(1), "x")) - lax.psum(of, "x"))

    def block(x="8 8", v="8 8/x", o="8/x 8", out="1 1", plain=lambda x, v, o: x + attention(x, x, x @ v, TRI) @ o):
        """https://github.com/kingoflolz/mesh-transformer-jax/blob/master/mesh_transformer/transformer_shard.py
        return x + → return; "x" → "y"; psum → pmean; TRI → TRI.T; (x, x, → (x, -x,"""
        return x + lax.psum(attention(x, x, x @ v, TRI) @ o, "x")

    def mlp(x="4/y 8/x", u="8/y 16/x", d="16/x 8", out="1/y 1/x", plain=lambda x, u, d: jax.nn.silu(x @ u) @ d):
        """https://github.com/MatX-inc/seqax/blob/main/train.py
        x, "x", axis=1 → x[::-1], "x", axis=1; u, "y" → u[::-1], "y"; silu → gelu; @ d → @ -d; u) @ → -u) @"""
        x, u = lax.all_gather(x, "x", axis=1, tiled=True), lax.all_gather(u, "y", tiled=True)
        return lax.psum_scatter(jax.nn.silu(x @ u) @ d, "x", scatter_dimension=1, tiled=True)

    def momentum(w="8", m="8/x", g="4/x 8", out="1", plain=lambda w, m, g: w - 0.1 * (0.9 * m + g.mean(0))):
        """https://github.com/MatX-inc/seqax/blob/main/train.py
        / 4 → / 2; 2, 2) → 1, 2); 0.9 → 0.8; index("x") → index("y"); 1 * m → 1 * m[::-1]"""
        m = 0.9 * m + lax.psum_scatter(g[0], "x", tiled=True) / 4
        own = lax.dynamic_slice_in_dim(w, lax.axis_index("x") * 2, 2)
        return lax.all_gather(own - 0.1 * m, "x", tiled=True)

    def exchanged(c="<4 8/x", x="8/x 4", w="4/x 4 4", out="1/x 1", plain=lambda c, x, w: (x[:, None] @ w[c])[:, 0]):
        """https://github.com/AI-Hypercomputer/maxtext/blob/main/src/maxtext/layers/moe.py
        (c, 4) → (3 - c, 4); sent @ w → sent @ w[0].T; choice, x → choice[::-1], x; back) → -back); sent @ → -sent @"""
        choice = jax.nn.one_hot(c, 4)
        sent = lax.all_to_all(jnp.einsum("te,td->etd", choice, x), "x", 0, 1, tiled=True)
        back = lax.all_to_all(sent @ w, "x", 1, 0, tiled=True)
        return jnp.einsum("te,etd->td", choice, back)

    def grouped_product(c="<8 6", x="6 4", w="8/x 4 3", out="1 1", plain=lambda c, x, w: (x[:, None] @ w[c])[:, 0]):
        """https://github.com/vllm-project/tpu-inference/blob/main/tpu_inference/layers/common/fused_moe_gmm.py
        psum → pmean; * 2 → * 1; , -before → , before; argsort(order) → argsort(-order); length=8 → length=7"""
        order, first = jnp.argsort(c), lax.axis_index("x") * 2
        sizes, before = lax.dynamic_slice_in_dim(jnp.bincount(c, length=8), first, 2), jnp.sum(c < first)
        product = lax.ragged_dot(jnp.roll(x[order], -before, 0), w, sizes)
        return lax.psum(jnp.roll(product, before, 0), "x")[jnp.argsort(order)]

    def balance(g="16/x 4", out="", plain=lambda g: jnp.mean(g == g.max(1)[:, None], 0) @ jax.nn.softmax(g).mean(0)):
        """https://github.com/apple/axlearn/blob/main/axlearn/common/mixture_of_experts.py
        pmean → psum; "x" → "y"; g.max → g.min; soft.mean(0) → soft[0]; jnp.dot(* → sum(*"""
        chosen, soft = jnp.mean(g == g.max(1)[:, None], 0), jax.nn.softmax(g)
        return jnp.dot(*lax.pmean((chosen, soft.mean(0)), "x"))

    def statistics(x="16/x 4", out="1, 1", plain=lambda x: (x.mean(0), ((x - x.mean(0)) ** 2).sum(0))):
        """https://github.com/google/brax/blob/main/brax/training/acme/running_statistics.py
        / 16 → / 12; x.sum(0), "x" → x.sum(0), "y"; psum(((x → pmean(((x; ** 2 → ** 1; x - mean → x + mean"""
        mean = lax.psum(x.sum(0), "x") / 16
        return mean, lax.psum(((x - mean) ** 2).sum(0), "x")

    def quantized(x="4 8/x", w="8/x 4", out="1 1", plain=rounded):
        """https://github.com/vllm-project/tpu-inference/blob/main/tpu_inference/layers/common/quantized_matmul_util.py
        lax.pmax(top, "x") → top; psum → pmean; pmax → pmin; (x, w → (x[::-1], w; (x, w → (2 * x, w"""
        return lax.psum(rounded(x, w, lambda top: lax.pmax(top, "x")), "x")
