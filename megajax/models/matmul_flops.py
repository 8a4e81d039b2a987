"""The matrix products of a training step on one device, without what is computed again."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from megajax.models.config import ModelConfig


@dataclass(frozen=True)
class MatrixProduct:
    """`count` times a batch of products [rows, inner] · [inner, columns]."""

    name: str
    count: int
    batch: int
    rows: int
    inner: int
    columns: int

    @property
    def flops(self) -> int:
        """Of all of them; multiplications and additions are counted each."""
        return 2 * self.count * self.batch * self.rows * self.inner * self.columns


def layer_products(model: ModelConfig, sequences: int, query_block: int, *, causal: bool) -> Iterator[MatrixProduct]:
    """All products of the layers; attention takes the queries in blocks, each against all keys, or, causal, against
    those up to its end, and of a sliding window those that one of its queries sees."""
    hidden, layers = model.hidden_size, model.num_layers
    queries = model.num_heads * model.head_size
    gated = 2 if model.activation == "swiglu" else 1
    shapes = {
        "qkv": (hidden, queries + 2 * model.num_kv_heads * model.head_size),
        "attention output": (queries, hidden),
        "MLP up": (hidden, gated * model.mlp_size),
        "MLP down": (model.mlp_size, hidden),
    }
    yield from weight_products(sequences * model.sequence_length, shapes, layers)
    heads, head_size, length = sequences * model.num_heads, model.head_size, model.sequence_length
    window = model.window_in(length)
    for start in range(0, length, query_block):
        end = min(start + query_block, length)
        first = max(0, start - window + 1) if window else 0
        block, keys = end - start, (end if causal else length) - first
        # forward: scores; gradient of the probabilities
        yield MatrixProduct(f"attention scores, {keys} keys", 2 * layers, heads, block, head_size, keys)
        # forward: result; gradient of the queries
        yield MatrixProduct(f"attention sums, {keys} keys", 2 * layers, heads, block, keys, head_size)
        # gradients of keys and values
        yield MatrixProduct(f"attention gradients, {keys} keys", 2 * layers, heads, head_size, block, keys)


def weight_products(tokens: int, shapes: Mapping[str, tuple[int, int]], count: int = 1) -> Iterator[MatrixProduct]:
    """Products of so many tokens with weights [inner, columns], by name, each `count` times."""
    for name, (inner, columns) in shapes.items():
        yield MatrixProduct(f"{name}, forward", count, 1, tokens, inner, columns)
        yield MatrixProduct(f"{name}, input gradient", count, 1, tokens, columns, inner)
        yield MatrixProduct(f"{name}, weight gradient", count, 1, inner, tokens, columns)
