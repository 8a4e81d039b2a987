"""Where the time of a training step goes on one device: its parts measured alone, beside their matrix products' time.

    python benchmarks/step_parts.py [PRESET] [train.py's flags] [--rounds N] [--json]

PRESET is benchmarks/gpt-4x512.toml unless given. A part's backward is its forward and backward less its forward. What
the parts leave of the whole step is the rest: residual additions, sums of gradients, copies, all-reduces over one
device, what waits for memory. The ceiling is the time that the products of a part take, each measured alone. Of a
mixture of experts dispatch and combine is what its router, and its experts on rows that are there already, leave.
"""

import json
import statistics
import time

import paired
from throughput import product_seconds, step_seconds

from megajax.core.models.flops import step_products
from megajax.host.ending import run
from megajax.settings.config import Config
from megajax.start.launch import start

# The parts as the table lists them, and which products (by the start of their names) belong to them.
PARTS = {"attention": ("qkv", "attention"), "MLP": ("MLP",), "norms": (), "head and loss": ("head",)}
PARTS |= {"router": ("router",), "experts": ("experts",), "dispatch and combine": ("shared expert",)}


def measure(config: Config, rounds: int) -> dict[str, tuple[float, float]]:
    """Seconds of a step spent in every part, and the ceiling of it: {part: (seconds, ceiling)}, `step` the whole."""
    start(config)
    import jax
    import jax.numpy as jnp
    from flax import nnx
    from jax.sharding import PartitionSpec

    from megajax.core.axes import BATCH_AXES
    from megajax.core.mesh import make_mesh
    from megajax.core.models.attention import attend_in_context
    from megajax.core.models.attention_mask import CAUSAL
    from megajax.core.models.context import Context
    from megajax.core.models.decoder.model import TransformerDecoder
    from megajax.core.models.experts import capacity_of
    from megajax.core.models.grouped import in_blocks
    from megajax.core.models.norms import norm_of
    from megajax.core.optim.adam import clip_by_norm, global_norm, update
    from megajax.core.parallel.boundary import F_AND_G
    from megajax.core.parallel.collectives import TENSOR, vary
    from megajax.core.parallel.random import Dropout, NamedKey
    from megajax.core.program.program import Program

    model, rows, layers = config.model, config.train.microbatch, config.model.num_layers
    program = Program(config, make_mesh(jax.devices()[:1]))
    decoder = TransformerDecoder(model, NamedKey.from_seed(0), F_AND_G, program.backend)
    dtype = program.layout.compute_dtype
    x_BTD = jax.random.normal(jax.random.key(0), (rows, model.sequence_length, model.hidden_size), jnp.float32)
    targets_BT = jax.random.randint(jax.random.key(1), (rows, model.sequence_length), 0, model.vocab_size, jnp.int32)

    def seconds(function, *arguments) -> float:
        jax.block_until_ready(function(*arguments))
        times = []
        for _ in range(rounds):
            began = time.perf_counter()
            jax.block_until_ready(function(*arguments))
            times.append(time.perf_counter() - began)
        return statistics.median(times)

    def both(module: nnx.Module, call, x_BTD) -> tuple[float, float]:
        """Seconds of the forward, and of forward and backward, of `call(module, x, dropout)`."""
        graph, weights = nnx.split(module, nnx.Param)
        weights = jax.tree.map(lambda leaf: leaf.astype(dtype), weights)

        def forward(weights, x_BTD):
            weights, x_BTD = vary((weights, x_BTD), BATCH_AXES)
            dropout = Dropout.at(model.dropout, 0, jnp.int32(0), vary(jnp.arange(rows, dtype=jnp.int32), BATCH_AXES))
            return call(nnx.merge(graph, weights), x_BTD, dropout)

        def pull(weights, x_BTD):
            y, pullback = jax.vjp(forward, weights, x_BTD)
            return y, pullback(jax.tree.map(jnp.ones_like, y))

        compiled = []
        for function in (forward, pull):
            region = jax.shard_map(
                function, mesh=program.mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec((*BATCH_AXES, TENSOR))
            )
            compiled.append(jax.jit(region))
        return tuple(seconds(function, weights, x_BTD.astype(dtype)) for function in compiled)

    def attention(module, x_BTD, dropout):
        return module(x_BTD, context_of(x_BTD, dropout), attend_in_context)[0]

    def context_of(x_BTD, dropout):
        return Context(dropout, CAUSAL, jnp.arange(x_BTD.shape[1], dtype=jnp.int32)[None])

    def through_experts(module, rows, dropout):
        return module._experts(rows, None if blocks is None else vary(blocks, BATCH_AXES), context_of(rows, dropout))

    def head(module, x_BTD, dropout):
        context = module.context({"tokens": targets_BT}, dropout)
        return module.losses(x_BTD, {"targets": targets_BT}, context)["next_token"][None]

    graph, weights = nnx.split(decoder.blocks)
    block = nnx.merge(graph, jax.tree.map(lambda leaf: leaf[0], weights))
    calls = {
        "attention": (block.attention, attention, layers),
        "MLP": (block.mlp, lambda module, x, dropout: module(x, context_of(x, dropout), 0)[0], layers),
        "norms": (norm_of(model), lambda module, x, _: module(x), 2 * layers),
        "head and loss": (decoder, head, 1),
    }
    inputs, blocks = {}, None  # of parts that do not take x
    if model.num_experts:
        mixture, chosen = calls.pop("MLP")[:2], rows * model.sequence_length * model.experts_per_token
        if model.expert_capacity:
            rows_of = model.num_experts, rows * capacity_of(model, model.sequence_length), model.hidden_size
        else:
            own = jnp.arange(chosen, dtype=jnp.int32) % model.num_experts
            backend, weight = program.backend, block.mlp.up.weight
            at_once = backend.blocks_at_once(weight[0].size * weight.dtype.itemsize)
            block, by_kernel = backend.expert_block, backend.expert_kernel
            blocks, _ = in_blocks(own, model.num_experts, block, at_once, by_kernel=by_kernel)
            rows_of = blocks.group_MG.size * block, model.hidden_size
        inputs["experts"] = jax.random.normal(jax.random.key(2), rows_of, jnp.float32)
        calls["router"] = block.mlp.router, lambda module, x, d: module(x, context_of(x, d), 0).share_BTK, layers
        calls |= {"experts": (block.mlp, through_experts, layers), "dispatch and combine": (*mixture, layers)}
    products = step_products(model, rows, program.backend.block_of(model.sequence_length))
    alone = {product.name: product.count * product_seconds(product, dtype) for product in products}
    found: dict[str, tuple[float, float]] = {}
    for part, (module, call, count) in calls.items():
        forward, whole = (count * s for s in both(module, call, inputs.get(part, x_BTD)))
        own = {name: s for name, s in alone.items() if name.startswith(PARTS[part])}
        halves = {name: s / 2 for name, s in own.items() if "scores" in name or "sums" in name}
        ahead = sum(halves.values()) + sum(s for name, s in own.items() if name.endswith("forward"))
        found[f"{part}, forward"] = forward, ahead
        found[f"{part}, backward"] = whole - forward, sum(own.values()) - ahead

    for half in ("forward", "backward") if model.num_experts else ():
        whole, ceiling = found[f"dispatch and combine, {half}"]
        whole -= sum(found[f"{part}, {half}"][0] for part in ("router", "experts"))
        found[f"dispatch and combine, {half}"] = whole, ceiling

    step, state = step_seconds(program, rounds, warm_up=1), program.layout.init()

    def optimize(params, optimizer):
        clipped = clip_by_norm(params, global_norm(params), 1.0)  # weights stand for gradients
        return update(program.optimizer, clipped, optimizer, params, jnp.asarray(True))

    main = state.params if state.main is None else state.main
    region = jax.shard_map(optimize, mesh=program.mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec())
    found["optimizer"] = seconds(jax.jit(region), main, state.optimizer), 0.0
    found["the rest"] = step - config.train.global_batch // rows * sum(s for s, _ in found.values()), 0.0
    found["step"] = step, sum(alone.values()) * (config.train.global_batch // rows)
    return found


def main() -> None:
    """Parse the command line, measure, print the table."""
    own, _, config = paired.command_line(__doc__, rounds=7, json=False)
    found = measure(config, own.rounds)
    step = found["step"][0]
    print("| part | ms | of the step | its products alone, ms |\n|---|---|---|---|")
    for part, (seconds, ceiling) in found.items():
        print(f"| {part} | {seconds * 1e3:.0f} | {seconds / step:.1%} | {ceiling * 1e3:.0f} |")
    if own.json:
        print(json.dumps({part: {"seconds": s, "ceiling": c} for part, (s, c) in found.items()}))


if __name__ == "__main__":
    run(main)
