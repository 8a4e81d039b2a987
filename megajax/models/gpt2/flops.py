"""The matrix products of a training step of GPT-2."""

from megajax.models.config import ModelConfig
from megajax.models.flops import MatrixProduct


def step_products(model: ModelConfig, sequences: int, query_block: int) -> list[MatrixProduct]:
    """All products of a step; attention takes the queries in blocks, each against the keys up to its end."""
    tokens, hidden, layers = sequences * model.sequence_length, model.hidden_size, model.num_layers
    shapes = {
        "qkv": (hidden, 3 * hidden, layers),
        "attention output": (hidden, hidden, layers),
        "MLP up": (hidden, model.mlp_size, layers),
        "MLP down": (model.mlp_size, hidden, layers),
        "head": (hidden, model.padded_vocab_size, 1),
    }
    products = []
    for name, (inner, columns, count) in shapes.items():
        products += [
            MatrixProduct(f"{name}, forward", count, 1, tokens, inner, columns),
            MatrixProduct(f"{name}, input gradient", count, 1, tokens, columns, inner),
            MatrixProduct(f"{name}, weight gradient", count, 1, inner, tokens, columns),
        ]
    heads, head_size, length = sequences * model.num_heads, model.head_size, model.sequence_length
    for start in range(0, length, query_block):
        end = min(start + query_block, length)
        block = end - start
        products += [  # forward: scores; gradient of the probabilities
            MatrixProduct(f"attention scores, keys up to {end}", 2 * layers, heads, block, head_size, end),
            # forward: result; gradient of the queries
            MatrixProduct(f"attention sums, keys up to {end}", 2 * layers, heads, block, end, head_size),
            # gradients of keys and values
            MatrixProduct(f"attention gradients, keys up to {end}", 2 * layers, heads, head_size, block, end),
        ]
    return products
