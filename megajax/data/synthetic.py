"""Random batches for measuring and comparing programs."""

import numpy as np
import numpy.typing as npt

from megajax.core.batch import IGNORED, document_positions
from megajax.core.config import StepConfig
from megajax.core.program.loss import loss_of
from megajax.core.program.program import Batch as PlacedBatch
from megajax.core.program.program import Program, batch_form

Batch = dict[str, npt.NDArray[np.int32]]


def random_batch(config: StepConfig, step: int) -> Batch:
    """A global batch that depends only on the configuration's form and seed, and on the step."""
    rng = np.random.default_rng((config.seed, step))
    entries = batch_form(config).entries
    makers = {"order": _pairs, "start": _spans, "label": _labelled}  # keyed by an array that only these forms have
    batch = next((make for name, make in makers.items() if name in entries), _text)(config, rng)
    shapes = batch_form(config).shapes(config.train.global_batch, tokens=config.model.sequence_length)
    for name in entries.keys() - batch.keys() if loss_of(config) else ():
        whole = entries[name].dtype == "int32"
        batch[name] = (rng.integers(-1, 2, shapes[name]) if whole else rng.uniform(size=shapes[name])).astype(
            entries[name].dtype
        )
    assert batch.keys() == entries.keys(), "not a form that is known here"
    return batch


def placed_batch(program: Program, step: int) -> PlacedBatch:
    """A step's random batch, on the devices."""
    rows = program.local_rows
    return program.put_batch({name: array[rows] for name, array in random_batch(program.config, step).items()}, rows)


def _text(config: StepConfig, rng: np.random.Generator) -> Batch:
    """A tenth of the targets is ignored, unevenly over rows. If attention is reset, one token in seven, at random,
    begins a new document. The last row ends in padding."""
    shape = (config.train.global_batch, config.model.sequence_length + 1)
    tokens = rng.integers(0, config.model.vocab_size, shape, np.int32)
    ignored = rng.random((shape[0], shape[1] - 1)) < np.linspace(0.0, 0.2, shape[0])[:, None]
    padding = slice(-(shape[1] // 4), None)
    ignored[-1, padding] = True
    batch = {"tokens": tokens[:, :-1], "targets": np.where(ignored, np.int32(IGNORED), tokens[:, 1:])}
    if config.data.reset_attention:
        begins = rng.random(ignored.shape) < 1 / 7
        begins[-1, padding] = True
        batch["positions"] = np.stack([document_positions(np.flatnonzero(row), len(row)) for row in begins])
    return batch


def _pairs(config: StepConfig, rng: np.random.Generator) -> Batch:
    """Rows fill at least half the sequence; a quarter of them have one segment. Up to three tenths of the tokens are
    masked, unevenly over rows, as far as a row has places for them."""
    rows, length = config.train.global_batch, config.model.sequence_length
    inputs = _inputs(config, rng, (rows,))
    ids, length_B = inputs["tokens"].copy(), inputs["length"]
    order = np.where(inputs["token_types"].any(axis=1), rng.integers(0, 2, rows), IGNORED)
    batch = batch_form(config).padding(rows, tokens=length) | inputs | {"order": order.astype(np.int32)}
    for row, share in enumerate(np.linspace(0.0, 0.3, rows)):
        count = min(int(rng.binomial(length_B[row], share)), batch["places"].shape[1])
        places = np.sort(rng.choice(int(length_B[row]), count, replace=False))
        batch["places"][row, :count], batch["targets"][row, :count] = places, ids[row, places]
        batch["tokens"][row, places] = rng.integers(0, config.model.vocab_size, count, np.int32)
    return batch


def _labelled(config: StepConfig, rng: np.random.Generator) -> Batch:
    """Every row has a class, or the right one of several texts; a quarter of the labels are unknown, and choices of
    more than two may lack the last texts."""
    rows = config.train.global_batch
    shape = batch_form(config).shapes(rows, tokens=config.model.sequence_length)["length"]
    inputs, classes_B = _inputs(config, rng, shape), np.full(rows, config.model.num_classes)
    if len(shape) == 2:
        classes_B = rng.integers(2, shape[1] + 1, rows)
        there_BC = np.arange(shape[1]) < classes_B[:, None]
        inputs = {name: np.where(there_BC.reshape(*shape, *[1] * (x.ndim - 2)), x, 0) for name, x in inputs.items()}
    label_B = np.where(rng.random(rows) < 1 / 4, IGNORED, rng.integers(0, classes_B))
    return {name: array.astype(np.int32) for name, array in inputs.items()} | {"label": label_B.astype(np.int32)}


def _spans(config: StepConfig, rng: np.random.Generator) -> Batch:
    """Every row has the first and last token of a span; in a quarter of the rows both are token 0, and in a quarter
    they are unknown."""
    rows = config.train.global_batch
    inputs, kind_B = _inputs(config, rng, (rows,)), rng.integers(0, 4, rows)
    ends_B2 = np.sort(rng.integers(0, inputs["length"][:, None], (rows, 2)), axis=1)
    ends_B2 = np.where(kind_B[:, None] == 0, 0, np.where(kind_B[:, None] == 1, IGNORED, ends_B2))
    start_B, end_B = ends_B2.T.astype(np.int32)
    return inputs | {"start": start_B, "end": end_B}


def _inputs(config: StepConfig, rng: np.random.Generator, shape: tuple[int, ...]) -> Batch:
    """Inputs `tokens`, `token_types` and `length`; they fill at least half the sequence, a quarter has one segment."""
    length = config.model.sequence_length
    ids = rng.integers(0, config.model.vocab_size, (*shape, length), np.int32)
    length_B = rng.integers(-(-length // 2), length + 1, shape, np.int32)
    first_B = np.where(rng.random(shape) < 1 / 4, length_B, rng.integers(1, length_B + 1, dtype=np.int32))
    place_T = np.arange(length)
    there_BT = place_T < length_B[..., None]
    return {
        "tokens": np.where(there_BT, ids, np.int32(0)),
        "token_types": (there_BT & (place_T >= first_B[..., None])).astype(np.int32),
        "length": length_B,
    }
