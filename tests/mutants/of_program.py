"""Mutants of the step and the optimizer: `program/`, `optim/`."""

from mutant import ON_DATA, ON_PIPE, ON_SEQUENCE, ON_TENSOR, Mutant, backward, forward, gradient, update

ZERO3 = ON_DATA | {"zero": 3}
ROWS = "row_B = axis_index(ROW_AXES) * num_rows + jnp.arange(num_rows, dtype=jnp.int32)"
COUNTS = "return complete(counts, dict.fromkeys(counts, PartitionSpec()))"
DROPOUT = "Dropout.at(dropout, config.seed, step, microbatch[_ROW])"
COMPLETE = "grads = complete(layout.per_step.scatter(grads, program.gradient_dtype), layout.owned_specs)"
BIND = [
    Mutant(
        "losses are divided by the targets of a device's rows",
        COUNTS,
        "return program.form.counts(batch)",
        ON_DATA,
        "numbers",
        backward(-1, "losses", "data", "loss"),
    ),
    Mutant(
        "losses are divided by the mean of the devices' targets",
        COUNTS,
        COUNTS.replace("return", "counts =")
        + "\n    return jax.tree.map(lambda count: count // jax.lax.axis_size('data'), counts)",
        ON_DATA,
        "numbers",
        backward(-1, "losses", "data", "loss"),
    ),
    Mutant(
        "targets are counted on every stage",
        COUNTS,
        COUNTS.replace("return", "counts =") + "\n    return jax.lax.psum(counts, PIPE)",
        ON_PIPE,
        "numbers",
        backward(-1, "losses", "pipe", "loss"),
    ),
    Mutant(
        "rows are numbered from each device's first one",
        ROWS,
        "row_B = axis_index('data') * 0 + jnp.arange(num_rows, dtype=jnp.int32)",
        ON_DATA,
        "numbers",
        forward(0, "input", "data"),
    ),
    Mutant(
        "rows are numbered in turn over the devices",
        ROWS,
        "row_B = axis_index('data') + 2 * jnp.arange(num_rows, dtype=jnp.int32)",
        ON_DATA,
        "numbers",
        forward(0, "input", "data"),
    ),
    Mutant(
        "rows are numbered from each microbatch's first one",
        DROPOUT,
        "Dropout.at(dropout, config.seed, step, microbatch[_ROW] % program.config.train.microbatch)",
        ON_DATA,
        "numbers",
        forward(0, "input", "data"),
    ),
    Mutant(
        "every stage has dropout of its own",
        DROPOUT,
        "Dropout.at(dropout, config.seed, step + axis_index(PIPE), microbatch[_ROW])",
        ON_PIPE,
        "numbers",
        forward(1, "attention_heads", "pipe"),
    ),
    Mutant(
        "dropout's seed is the device's",
        DROPOUT,
        "Dropout.at(dropout, config.seed + axis_index(TENSOR), step, microbatch[_ROW])",
        ON_TENSOR,
        "types",
    ),
    Mutant(
        "every stage has the first one's numbers of layers",
        "jnp.asarray(layout.placement.layer_index)[:, axis_index(PIPE)],",
        "jnp.asarray(layout.placement.layer_index)[:, 0],",
        ON_PIPE,
        "numbers",
        forward(1, "attention_heads", "pipe", "input"),
    ),
    Mutant(
        "what is between split tokens is summed in every layer",
        "axes = (*BATCH_AXES, *SEQUENCE_AXES) if model.boundary.sequence_parallel else BATCH_AXES",
        "axes = BATCH_AXES",
        ON_SEQUENCE,
        "communication",
        gradient("communication", "tensor"),
    ),
    Mutant(
        "the shared weights are the same on all stages",
        'vary(params["shared"], axes if config.splits_vocabulary else (*axes, PIPE))',
        'vary(params["shared"], axes)',
        ON_PIPE,
        "types",
    ),
    Mutant(
        "losses grow with the data groups",
        "total / jnp.maximum(counts[name], 1).astype(total.dtype)",
        "total * jax.lax.axis_size('data') / jnp.maximum(counts[name], 1).astype(total.dtype)",
        ON_DATA,
        "numbers",
        backward(-1, "losses", "data", "loss"),
    ),
    Mutant(
        "losses grow with the microbatches",
        "total / jnp.maximum(counts[name], 1).astype(total.dtype)",
        "total * program.num_microbatches / jnp.maximum(counts[name], 1).astype(total.dtype)",
        ON_PIPE,
        "numbers",
        backward(-1, "losses", "pipe", "loss"),
    ),
]

STEP = [
    Mutant(
        "gradients are clipped before they are reduced",
        COMPLETE,
        "grads = jax.tree.map(lambda grad: grad / jnp.sqrt(1 + jnp.sum(jnp.square(grad))), grads)\n        " + COMPLETE,
        ON_DATA,
        "numbers",
        gradient("", "data"),
    ),
    Mutant(
        "gradients are not reduced over stages",
        COMPLETE,
        "grads = layout.per_step.scatter(grads, program.gradient_dtype)",
        ON_PIPE,
        "types",
    ),
    Mutant(
        "ZeRO's gradients are scattered twice",
        COMPLETE,
        COMPLETE.replace(
            "grads = complete(",
            "grads = layout.per_step.scatter(grads, program.gradient_dtype)\n        grads = complete(",
        ),
        ON_DATA,
        "types",
    ),
    Mutant(
        "losses are not summed",
        "return complete(losses, dict.fromkeys(losses, SCALAR)), grads",
        "return losses, grads",
        ON_DATA,
        "types",
    ),
    Mutant(
        "new weights are not gathered",
        "params = layout.per_step.gather(layout.computed(main), invariant=True)",
        "params = layout.computed(main)",
        ON_DATA,
        "types",
    ),
    Mutant(
        "the loss scale stays in what the devices of a pipe sum",
        "grad.astype(dtype) / loss_scale.astype(dtype)",
        "grad.astype(dtype) / loss_scale.astype(dtype) * jax.lax.axis_size('pipe')",
        ON_PIPE,
        "numbers",
        gradient("", "pipe"),
    ),
    Mutant(
        "a device skips a step for its own gradients",
        "finite = jnp.isfinite(norm) & jnp.isfinite(loss)",
        "finite = jnp.stack([jnp.isfinite(grad).all() for grad in jax.tree.leaves(grads)]).all()",
        ON_DATA,
        "types",
    ),
    Mutant(
        "the norm is that of a device's gradients",
        "sum(sum_over(square, sorted(axes)) for axes, square in sums.items())",
        "sum(square for axes, square in sums.items())",
        ON_TENSOR,
        "types",
    ),
    Mutant(
        "the norm is the largest of the devices'",
        "return jnp.sqrt(sum(sum_over(square, sorted(axes)) for axes, square in sums.items()))",
        "from megajax.parallel.collectives import max_over\n\n"
        "    return jnp.sqrt(sum(max_over(square, tuple(sorted(axes))) if axes else square "
        "for axes, square in sums.items()))",
        ON_TENSOR,
        "numbers",
        update("tensor"),
    ),
    Mutant(
        "the norm counts what devices share several times",
        "axes = varying_axes(grad)\n",
        'axes = varying_axes(grad) | {"tensor"}\n',
        ON_TENSOR,
        "numbers",
        update("tensor"),
    ),
    Mutant(
        "the norm counts the tied embedding on every stage",
        "axes = varying_axes(grad)\n",
        'axes = varying_axes(grad) | {"pipe"}\n',
        ON_PIPE,
        "numbers",
        update("pipe"),
    ),
    Mutant(
        "the norm leaves ZeRO's shards apart",
        "axes = varying_axes(grad)\n",
        'axes = varying_axes(grad) - {"data"}\n',
        ZERO3,
        "types",
    ),
    Mutant(
        "all devices get the first rows",
        "return local[[place[row] for row in range(*index[0].indices(shape[0]))]]",
        "return local[[place[row] for row in range(len(range(*index[0].indices(shape[0]))))]]",
        ON_DATA,
        "numbers",
        forward(0, "input", "data"),
    ),
    Mutant(
        "the gradient of a split vocabulary lies on other devices than the table",
        "self.owned_specs = _stacked(owned, *pipelined)",
        "self.owned_specs = _stacked(unsharded, *pipelined)",
        ON_DATA,
        "types",
    ),
]
