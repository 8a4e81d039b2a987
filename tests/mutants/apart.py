"""Mutants that no comparison of meshes can catch: wrong alike on every mesh, or not wrong at all."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Apart:
    """A change of the parallel code, or beside it.

    Attributes:
        name: in words.
        old, new: as of a mutant.
        why: the test that catches it; of an equivalent one why nothing changes.
    """

    name: str
    old: str
    new: str
    why: str


ALIKE = [  # arguments of pytest
    Apart(
        "dropout does not depend on the step",
        ".fold(step).fold(sample_B)",
        ".fold(sample_B)",
        "tests/models/test_gpt_forward.py",
    ),
    Apart(
        "dropout does not know the sample",
        ".fold(step).fold(sample_B)",
        ".fold(step).fold(0 * sample_B)",
        "tests/models/test_gpt_forward.py",
    ),
    Apart(
        "dropout does not know the layer",
        "dropout=self.dropout.fold(layer)",
        "dropout=self.dropout.fold(0 * layer)",
        "tests/models/test_gpt_forward.py",
    ),
    Apart(
        "what dropout keeps is not scaled",
        "jnp.asarray(1 / (1 - self.rate), dtype)",
        "jnp.asarray(1, dtype)",
        "tests/parallel/test_random.py",
    ),
    Apart(
        "padded columns of the vocabulary have probability",
        "(column_V < vocab_size)[None, None, :]",
        "(column_V >= 0)[None, None, :]",
        "tests/parallel/test_vocabulary.py",
    ),
    Apart(
        "ignored targets have a loss",
        "loss_BT = jnp.where(targets_BT == IGNORED, jnp.zeros((), dtype), log_sum_BT - (picked_BT - max_BT))",
        "loss_BT = log_sum_BT - (picked_BT - max_BT)",
        "tests/parallel/test_vocabulary.py",
    ),
    Apart(
        "attention sees the next token",
        "key_S[None, :] <= query_T[:, None]",
        "key_S[None, :] <= query_T[:, None] + 1",
        "tests/models",
    ),
    Apart(
        "scores are not scaled",
        "return x_NTK * jnp.asarray(x_NTK.shape[-1] ** -0.5, x_NTK.dtype)",
        "return x_NTK * 1",
        "tests/models/test_attention.py",
    ),
    Apart(
        "gradients keep the loss scale",
        "grad.astype(dtype) / loss_scale.astype(dtype)",
        "grad.astype(dtype)",
        "tests/test_parity.py -k half",
    ),
    Apart(
        "a skipped step counts",
        "step=state.step + taken.astype(jnp.int32)",
        "step=state.step + 1",
        "tests/program",
    ),
    Apart(
        "the learning rate is a step ahead",
        "now = jnp.asarray(step, dtype=float)",
        "now = jnp.asarray(step + 1, dtype=float)",
        "tests/optim",
    ),
    Apart(
        "weights of norms decay",
        'NOT_DECAYED = ("bias", "scale")',
        'NOT_DECAYED = ("bias",)',
        "tests/optim",
    ),
    Apart(
        "the data order is off by one",
        "first + row]",
        "first + row + 1]",
        "tests/data",
    ),
    Apart(  # of several processes: one alone loads all rows
        "a process loads the first rows, not its own",
        "return _stack([samples[first + row] for row in wanted])",
        "return _stack([samples[first + row] for row in range(len(wanted))])",
        "tests/data",
    ),
]

OUTSIDE = [  # beside the train step, which alone is verified; arguments of pytest
    Apart(
        "an all-to-all joins along the dim that it divides",
        "split_axis=divided, concat_axis=joined",
        "split_axis=joined, concat_axis=divided",
        "tests/program/test_transfer.py",
    ),
    Apart(
        "the most probable id is a place on the device",
        "column_V = axis_index(axes) * local_size + jnp.arange(local_size, dtype=jnp.int32)",
        "column_V = axis_index(axes) * 0 + jnp.arange(local_size, dtype=jnp.int32)",
        "tests/parallel/test_vocabulary.py",
    ),
    Apart(
        "scores of all microbatches are put in the place of the first",
        "slots.at[microbatch].set(new), outputs, result)",
        "slots.at[0 * microbatch].set(new), outputs, result)",
        "tests/models tests/pipeline",
    ),
    Apart(
        "a leaf goes to its stages in shards of other devices",
        "x = exchange(x, _STAGES, dim, PIPE)",
        "x = jax.numpy.roll(exchange(x, _STAGES, dim, PIPE), 1, dim)",
        "tests/program/test_transfer.py",
    ),
]

PUT = "        entries[dim] = (*entry_axes(entries[dim]), *BATCH_AXES)"
EQUIVALENT = [
    Apart(
        "weight gradients of padded layers",
        "found = when(index < 0 if self.padded else False, none, gradients)",
        "found = gradients()",
        "the factors that padded layers leave are zeros; tests/test_parity.py -k idle puts NaN there",
    ),
    Apart(
        "the microbatch before is taken, before the first the last",
        "x, microbatch, keepdims=False), self.microbatches)",
        "x, microbatch - 1, keepdims=False), self.microbatches)",
        "every microbatch is still taken once, with its row numbers; only the order of the sum changes",
    ),
    Apart(
        "what is sent comes from the stage that receives, of two virtual stages",
        "sent = np.roll(by_virtual, -upstream, axis=1)",
        "sent = np.roll(by_virtual, upstream, axis=1)",
        "of two, one before and one after are the same; of three it is a mutant",
    ),
    Apart(
        "f declares nothing",
        'return lax.pcast(x, axes, to="varying")',
        "return x",
        "JAX declares x varying by itself where it meets a weight that does, which transposes to the same sum",
    ),
    Apart(
        "the exponentials lie below the smallest of the devices' maxima",
        "return lax.pmax(x, axes)",
        "return lax.pmin(x, axes)",
        "any number that all devices subtract gives the same log-sum-exp; the largest keeps it from overflowing",
    ),
    Apart(
        "microbatches are every so many rows",
        "x.reshape(num_microbatches, -1, *x.shape[1:])",
        "x.reshape(-1, num_microbatches, *x.shape[1:]).swapaxes(0, 1)",
        "every row has its number with it, and the sum over microbatches has every row once",
    ),
    Apart(
        "pipe is not the outermost axis of the devices' order",
        "DEVICE_ORDER = tuple(_ROLES)",
        "DEVICE_ORDER = tuple(sorted(_ROLES))",
        "which device has which coordinates changes times only; tests/test_mesh.py",
    ),
    Apart(
        "ZeRO shards the smallest dim",
        "dim = max(free or divisible, key=lambda dim: local[dim])\n" + PUT,
        "dim = min(free or divisible, key=lambda dim: local[dim])\n" + PUT,
        "every element still has one owner; it changes bytes only where a dim of few elements is not divisible",
    ),
    Apart(
        "a gathered sequence does not enter over the other axes",
        "return self._over_others(f, gather_shards(x_BTD, TOKENS, TENSOR), axes)",
        "return gather_shards(x_BTD, TOKENS, TENSOR)",
        "as f that declares nothing",
    ),
    Apart(
        "the backward pass has the forward's microbatch for its types",
        "context = self._context(row.backward.microbatch)",
        "context = self._context(row.forward.microbatch)",
        "but for remat stage (a mutant) only the context's types are used: its values are among the residuals",
    ),
    Apart(
        "gradients of the weights that wait are not zero",
        "jax.tree.map(jnp.zeros_like, weights), (x, grads)",
        "jax.tree.map(jnp.ones_like, weights), (x, grads)",
        "nobody reads them: only weights whose gradients do not wait are differentiated",
    ),
]
