"""Mutants of the sharded layers, of randomness and of the models: `parallel/layers.py`, `random.py`, `vocabulary.py`,
`deferred.py`, `mesh.py`, `models/`."""

from mutant import (
    OF_BERT,
    OF_FEW_KEYS,
    ON_DATA,
    ON_DEFERRED,
    ON_SEQUENCE,
    ON_TENSOR,
    ON_VOCABULARY,
    Mutant,
    backward,
    forward,
    gradient,
)

ON_SHARED_VOCABULARY = {"mesh": (1, 2, 2), "vocabulary": "split"}
ON_FOUR = {"mesh": (1, 1, 4), **OF_FEW_KEYS}
ON_EIGHT = {"mesh": (1, 2, 4), "weight_gradients": "deferred", **OF_FEW_KEYS}

PART = "return axis_index(TENSOR) * self.parts // axis_size(TENSOR)"
ROWS = (
    "return boundary.leave(jnp.where(inside_BT[..., None], rows_BTD, "
    "jnp.zeros((), table_VD.dtype)), boundary.vocabulary)"
)
LAYERS = [
    Mutant(
        "the bias is added before the sum",
        "y_BTD = self.boundary.leave(product_BTD)\n"
        "        return y_BTD if self.bias is None else y_BTD + self.bias[...][None, None, :]",
        "product_BTD = product_BTD if self.bias is None else product_BTD + self.bias[...][None, None, :]\n"
        "        return self.boundary.leave(product_BTD)",
        ON_TENSOR,
        "numbers",
        forward(0, "attention_output", "tensor"),
    ),
    Mutant(
        "a product by rows does not leave its region",
        "y_BTD = self.boundary.leave(product_BTD)",
        "y_BTD = product_BTD",
        ON_TENSOR,
        "types",
    ),
    Mutant(
        "a product by rows leaves its region twice",
        "y_BTD = self.boundary.leave(product_BTD)",
        "y_BTD = self.boundary.leave(self.boundary.leave(product_BTD))",
        ON_TENSOR,
        "numbers",
        forward(0, "attention_output", "tensor"),
    ),
    Mutant(
        "the gradient of a product by rows is summed too",
        "y_BTD = self.boundary.leave(product_BTD)",
        "leave = jax.custom_vjp(lambda y: self.boundary.leave(y))\n"
        "        leave.defvjp(lambda y: (leave(y), None), "
        "lambda _, grad: (vary(lax.psum(grad, TENSOR), (TENSOR,)),))\n"
        "        y_BTD = leave(product_BTD)",
        ON_TENSOR,
        "numbers",
        backward(1, "mlp_activation", "tensor"),
    ),
    Mutant(
        "a split sequence is not gathered for a product",
        "entered_BTD = boundary.enter(input_BTD) if boundary.regathers else input_BTD",
        "entered_BTD = input_BTD",
        ON_SEQUENCE,
        "types",
    ),
    Mutant(
        "a split sequence is not gathered for deferred weight gradients",
        "entered_BTD = boundary.enter(x_BTD) if boundary.regathers else x_BTD",
        "entered_BTD = x_BTD",
        {"mesh": (1, 2, 2), "weight_gradients": "deferred", "sequence_parallel": True},
        "types",
    ),
    Mutant(
        "the first head of keys for all that share them",
        PART,
        "return axis_index(TENSOR) * 0",
        ON_FOUR,
        "numbers",
        forward(0, "key", "tensor", "attention_heads"),
    ),
    Mutant(
        "heads of keys are dealt out in turn",
        PART,
        "return axis_index(TENSOR) % self.parts",
        ON_FOUR,
        "numbers",
        forward(0, "key", "tensor", "attention_heads"),
    ),
    Mutant(
        "the gradient of shared heads of keys is the first head's",
        "gradient, self._part, 1)",
        "gradient, 0 * self._part, 1)",
        ON_EIGHT,
        "numbers",
        gradient("attention/key", "tensor", "attention/value"),
    ),
    Mutant(
        "the input's gradient is twice what it is where weight gradients wait",
        "return dx, jax.tree.map(jnp.zeros_like, weights), (x, grads)",
        "return 2 * dx, jax.tree.map(jnp.zeros_like, weights), (x, grads)",
        ON_DEFERRED,
        "numbers",
        backward(3, "mlp_activation", "pipe"),
    ),
    Mutant(
        "the factor that waits is another product's gradient",
        "return dx, jax.tree.map(jnp.zeros_like, weights), (x, grads)",
        "return dx, jax.tree.map(jnp.zeros_like, weights), (x, grads[::-1])",
        ON_DEFERRED,
        "numbers",
        gradient("attention/query", "pipe", "attention/value"),
    ),
    Mutant(
        "every device has the whole MLP and all are summed",
        '"mlp": TENSOR,',
        '"mlp": None,',
        ON_TENSOR,
        "numbers",
        forward(0, "mlp_output", "tensor", "mlp_up"),
    ),
    Mutant(
        "gradients of shared heads of keys are summed in every layer",
        "return bool(_IN_REGIONS & {*logical}) and",
        "return False and",
        ON_FOUR,
        "communication",
        gradient("communication", "tensor"),
    ),
    Mutant(
        "every device has all rows of the batch",
        "ROWS = PartitionSpec(ROW_AXES)",
        "ROWS = PartitionSpec(None)",
        ON_DATA,
        "types",
    ),
]

RANDOM = [
    Mutant(
        "every data group has masks of its own",
        "return cls(rate, RandomBits.from_seed(seed).fold(step).fold(sample_B))",
        'return cls(rate, RandomBits.from_seed(seed).fold(jax.lax.axis_index("data")).fold(step).fold(sample_B))',
        ON_DATA,
        "numbers",
        forward(0, "input", "data"),
    ),
    Mutant(
        "every device of a tensor group has masks of its own",
        "return cls(rate, RandomBits.from_seed(seed).fold(step).fold(sample_B))",
        'return cls(rate, RandomBits.from_seed(seed).fold(jax.lax.axis_index("tensor")).fold(step).fold(sample_B))',
        ON_TENSOR,
        "types",
    ),
    Mutant(
        "dropout knows the token's place on the device only",
        "return drop(x_BTD, self.bits_B[:, None].fold(token_T[None, :]))",
        "return drop(x_BTD, self.bits_B[:, None].fold(jnp.arange(x_BTD.shape[1])[None, :]))",
        ON_SEQUENCE,
        "numbers",
        forward(0, "input", "tensor"),
    ),
    Mutant(
        "a layer's dropout numbers tokens from each device's first one",
        "dropout, token_T = context.dropout, self.boundary.token_index(x_BTD)",
        "dropout, token_T = context.dropout, jax.numpy.arange(x_BTD.shape[1])",
        ON_SEQUENCE,
        "numbers",
        forward(0, "attention_dropout", "tensor"),
    ),
    Mutant(
        "attention's dropout knows the head's number on the device only",
        "head_H = axis_index(TENSOR) * num_heads + jnp.arange(num_heads, dtype=jnp.int32)",
        "head_H = axis_index(TENSOR) * 0 + jnp.arange(num_heads, dtype=jnp.int32)",
        ON_TENSOR,
        "numbers",
        forward(0, "attention_heads", "tensor"),
    ),
    Mutant(
        "heads are numbered as if every device had one",
        "head_H = axis_index(TENSOR) * num_heads + jnp.arange(num_heads, dtype=jnp.int32)",
        "head_H = axis_index(TENSOR) + jnp.arange(num_heads, dtype=jnp.int32)",
        ON_TENSOR,
        "numbers",
        forward(0, "attention_heads", "tensor"),
    ),
]

VOCABULARY = [
    Mutant(
        "ids are not made local",
        "ids_BT = ids_BT - axis_index(axes) * local_size",
        "ids_BT = ids_BT - axis_index(axes) * 0",
        ON_TENSOR,
        "numbers",
        forward(0, "input", "tensor"),
    ),
    Mutant(
        "ids are made local by the place on tensor alone",
        "ids_BT = ids_BT - axis_index(axes) * local_size",
        "ids_BT = ids_BT - axis_index(TENSOR) * local_size",
        ON_SHARED_VOCABULARY,
        "numbers",
        forward(0, "input", "pipe"),
    ),
    Mutant(
        "a device has one row of the vocabulary too many",
        "inside_BT = (ids_BT >= 0) & (ids_BT < local_size)",
        "inside_BT = (ids_BT >= 0) & (ids_BT <= local_size)",
        ON_TENSOR,
        "numbers",
        forward(0, "input", "tensor"),
    ),
    Mutant(
        "rows of tokens that a device does not have are added",
        ROWS,
        "return boundary.leave(rows_BTD, boundary.vocabulary)",
        ON_TENSOR,
        "numbers",
        forward(0, "input", "tensor"),
    ),
    Mutant(
        "padded columns are looked for in each device's first ones",
        "column_V = axis_index(boundary.vocabulary) * local_size + jnp.arange(local_size, dtype=jnp.int32)",
        "column_V = axis_index(boundary.vocabulary) * 0 + jnp.arange(local_size, dtype=jnp.int32)",
        ON_TENSOR,
        "numbers",
        forward(-1, "logits", "tensor"),
    ),
    Mutant(
        "the exponentials lie below each device's own maximum",
        "sum_BT = jnp.sum(jnp.exp(logits_BTV.astype(dtype) - max_BT[..., None]), axis=-1)",
        "own_BT = jnp.max(logits_BTV, axis=-1).astype(dtype)\n"
        "    sum_BT = jnp.sum(jnp.exp(logits_BTV.astype(dtype) - own_BT[..., None]), axis=-1)",
        ON_TENSOR,
        "numbers",
        forward(-1, "losses", "tensor"),
    ),
    Mutant(
        "the logit of a target that a device does not have counts",
        "picked_BT = jnp.where(inside_BT, picked_BT, jnp.zeros((), dtype))",
        "picked_BT = jnp.where(ids_BT >= 0, picked_BT, jnp.zeros((), dtype))",
        ON_TENSOR,
        "numbers",
        forward(-1, "losses", "tensor"),
    ),
    Mutant(
        "the target's logit is not summed",
        "sum_BT, picked_BT = g((sum_BT, picked_BT), axes)",
        "sum_BT = g(sum_BT, axes)",
        ON_TENSOR,
        "types",
    ),
    Mutant(
        "the target's logit is the largest part of it",
        "sum_BT, picked_BT = g((sum_BT, picked_BT), axes)",
        "sum_BT, picked_BT = g(sum_BT, axes), max_over(picked_BT, axes)",
        ON_TENSOR,
        "numbers",
        forward(-1, "losses", "tensor"),
    ),
    Mutant(
        "losses sum the exponentials over tensor alone",
        "sum_BT, picked_BT = g((sum_BT, picked_BT), axes)",
        "sum_BT, picked_BT = g((sum_BT, picked_BT), TENSOR)",
        ON_VOCABULARY,
        "types",
    ),
    Mutant(
        "the gradient of the logits has a hit on every device",
        "== ids_BT[..., None]) & inside_BT[\n        ..., None\n    ]",
        "== ids_BT[..., None])",
        ON_TENSOR,
        "numbers",
        backward(-1, "logits", "tensor"),
    ),
    Mutant(
        "the gradient's probabilities are of a device's columns",
        "probability_BTV = jnp.exp((logits_BTV.astype(max_BT.dtype) - max_BT[..., None]) - log_sum_BT[..., None])",
        "probability_BTV = jax.nn.softmax(logits_BTV.astype(max_BT.dtype), axis=-1)",
        ON_TENSOR,
        "numbers",
        backward(-1, "logits", "tensor"),
    ),
    Mutant(
        "learned positions are those of the first tokens",
        'x_BTD += self.boundary.own_tokens(self.positions[...][: batch["tokens"].shape[1]], 0)[None]',
        "x_BTD += self.positions[...][: x_BTD.shape[1]][None]",
        ON_SEQUENCE,
        "numbers",
        forward(0, "input", "tensor"),
    ),
    Mutant(
        "the order of segments is scored by every device's first token",
        'order, found = self.boundary.of_first_token(sums(*classified(self._order(x_BTD), batch["order"])))',
        'order, found = sums(*classified(self._order(x_BTD), batch["order"]))',
        ON_SEQUENCE,
        "types",
        more=OF_BERT,
    ),
]
