"""The matrix products of a training step, and their FLOPs."""

from collections import Counter
from collections.abc import Iterator, Mapping

from megajax.core.models.attention_mask import AttentionMask
from megajax.core.models.config import ModelConfig
from megajax.core.models.family import MatrixProduct, family_of
from megajax.core.models.lora_config import attention_sizes, linear_sizes


def step_products(config: ModelConfig, sequences: int, query_block: int) -> list[MatrixProduct]:
    """All matrix products of a training step; attention processes `query_block` queries at a time."""
    return family_of(config).products(config, sequences, query_block)


def step_flops(config: ModelConfig, sequences: int) -> int:
    """FLOPs of a step over `sequences` sequences, counted as in the paper: for GPT-2 `72 B s L h² (1 + s/6h + V/12Lh)`.

    For any decoder this is, per token, 6 N for the N weights in products (all but norms, biases, and an embedding table
    that is not also the head) plus 12 L H K S for attention, regardless of masking. A row of a choice task has as many
    sequences as texts. BERT's logits are those of the tokens that can be masked.
    """
    return sum(product.flops for product in step_products(config, sequences, config.sequence_length))


def layer_products(model: ModelConfig, sequences: int, query_block: int) -> Iterator[MatrixProduct]:
    """All products of the layers, those of prediction modules among them; with experts, those that the tokens choose.
    Attention processes `query_block` queries at a time, against the keys that one of them may see."""
    hidden, layers, linear = model.hidden_size, model.num_layers + model.num_predicting, sum(model.linear)
    softmax = layers - linear
    gated = 2 if model.gated else 1
    shapes = {f"attention {name}": size for name, size in attention_sizes(model).items()}
    if not model.latent_size:
        into = [shapes.pop(name) for name in [*shapes] if name != "attention output"]
        shapes |= {"qkv": (hidden, sum(columns for _, columns in into))}
    tokens = sequences * model.sequence_length
    yield from weight_products(tokens, shapes, softmax) if softmax else ()
    if linear:
        shapes = {f"linear attention {name}": size for name, size in linear_sizes(model).items()}
        yield from weight_products(tokens, shapes, linear)
        # Each token of a head multiplies its state by a key, adds an outer product, and multiplies it by a query.
        of_tokens, key, value = tokens * model.linear_heads, model.linear_key_size, model.linear_value_size
        yield MatrixProduct("linear attention, states", 9 * linear, of_tokens, 1, key, value)
    sparse = layers - model.dense_layers if model.num_experts else 0
    if sparse:
        own = {"experts up": (hidden, gated * model.expert_size), "experts down": (model.expert_size, hidden)}
        yield from weight_products(tokens * model.experts_per_token, own, sparse)
        own = {"router": (hidden, model.num_experts)}
        own |= {"shared expert gate": (hidden, 1)} if model.shared_expert_gate else {}
        yield from weight_products(tokens, own, sparse)
    for name, width, count in (
        ("MLP", model.mlp_size, layers - sparse),
        ("shared expert", model.shared_expert_size, sparse),
    ):
        mlp = {f"{name} up": (hidden, gated * width), f"{name} down": (width, hidden)}
        yield from weight_products(tokens, mlp, count) if width and count else ()
    heads, length = sequences * model.num_heads, model.sequence_length
    sizes = Counter((model.head_size, model.value_head_size))
    for block, keys in AttentionMask.of_model(model, length).block_sizes(length, query_block):
        for size, times in sizes.items():  # of keys, of values
            # forward: scores; gradient of the probabilities
            yield MatrixProduct(f"attention scores, {keys} keys", times * softmax, heads, block, size, keys)
            # forward: result; gradient of the queries
            yield MatrixProduct(f"attention sums, {keys} keys", times * softmax, heads, block, keys, size)
            # gradients of keys and values
            yield MatrixProduct(f"attention gradients, {keys} keys", times * softmax, heads, size, block, keys)


def weight_products(tokens: int, shapes: Mapping[str, tuple[int, int]], count: int = 1) -> Iterator[MatrixProduct]:
    """Products of `tokens` tokens with weights [inner, columns] by name, each `count` times."""
    for name, (inner, columns) in shapes.items():
        yield MatrixProduct(f"{name}, forward", count, 1, tokens, inner, columns)
        yield MatrixProduct(f"{name}, input gradient", count, 1, tokens, columns, inner)
        yield MatrixProduct(f"{name}, weight gradient", count, 1, inner, tokens, columns)
