"""One sequence over several devices: losses, gradients and collectives equal one device's, whatever else is split."""

import dataclasses
import functools
import itertools
import math
from typing import Any

import jax
import numpy as np
import pytest
from field import loss_and_exact_gradients
from parity_grid import cover, name, of
from tiny import LATENT, LLAMA, drawn_params, full, tiny_config, tiny_program

from megajax.core.backend import CPU
from megajax.core.errors import UserError
from megajax.core.models.context_attention import context_way, elements_sent
from megajax.core.models.lora_config import LoraConfig
from megajax.core.program.communication import Collective, collectives_of, equations
from megajax.core.program.program import Program, training_way
from megajax.core.program.scoring import scores
from megajax.core.program.train_step import train_step_with_gradients
from megajax.data.synthetic import placed_batch, random_batch
from megajax.plan.compiled import traced_step
from megajax.plan.sizes import Sizes
from megajax.settings.config import Config
from megajax.settings.validation import validate
from megajax.verify import CompiledComparison, compare
from megajax.verify.forms import in_blocks
from megajax.verify.run import MeshRun, run

ROWS, TOKENS, LAYERS = 4, 48, 4
MESHES = [  # data, pipe, context, tensor
    *((1, 1, 2, 1), (1, 1, 3, 1), (1, 1, 4, 1), (1, 1, 8, 1), (2, 1, 2, 1), (1, 2, 2, 1), (1, 1, 2, 2)),
    *((2, 2, 2, 1), (2, 1, 2, 2), (1, 2, 2, 2), (1, 1, 2, 4), (1, 2, 4, 1)),
]
GRID: dict[str, list] = {
    "mesh": MESHES,
    "way": ["heads", "gather"],
    "model": ["gpt2", "bert-pre", "bert-post-classes", "bert-pre-span", "llama", "few keys", "lora"],
    "documents": [False, True],
    "window": [0, 5, 20],
    "remat": ["none", "selective", "layer", "stage"],
    "schedule": ["1f1b-1", "gpipe-1", "interleaved-2"],
    "vocabulary": ["replicated", "split"],
    "weight_gradients": ["together", "deferred"],
    "zero": [0, 1, 3],
    "sequence_parallel": [False, True],
}
MODELS = {"llama": LLAMA, "few keys": LLAMA | {"num_kv_heads": 2, "attention_sinks": True}}
SCORED = ["few keys", "bert-pre", "bert-post-classes", "bert-pre-span"]
MODELS["lora"] = LLAMA | {"lora": LoraConfig(rank=2)}


def exists(row: tuple) -> bool:
    (_, pipe, context, tensor), way, model, documents, window, _, *of_pipe, _, sequence_parallel = row
    piped = pipe > 1 or of_pipe == ["1f1b-1", "replicated", "together"]
    fits = way == "gather" or 8 // tensor % context == 0
    decodes = not model.startswith("bert") or not (documents or window)
    return (
        piped
        and fits
        and decodes
        and (tensor > 1 or not sequence_parallel)
        and (model != "lora" or "deferred" not in of_pipe)
    )


DEFAULT = [
    ((1, 2, 2, 2), "heads", "few keys", True, 20, "selective", "interleaved-2", "split", "deferred", 1, True),
    ((1, 1, 4, 1), "gather", "gpt2", True, 5, "none", "1f1b-1", "replicated", "together", 1, False),
    ((2, 1, 2, 2), "gather", "few keys", True, 0, "layer", "1f1b-1", "replicated", "together", 3, True),
    ((1, 2, 2, 2), "gather", "bert-pre", False, 0, "none", "gpipe-1", "split", "deferred", 1, True),
    ((1, 1, 3, 1), "gather", "llama", False, 20, "layer", "1f1b-1", "replicated", "together", 0, False),
    ((1, 2, 4, 1), "gather", "llama", True, 5, "selective", "1f1b-1", "replicated", "deferred", 1, False),
    ((1, 1, 2, 1), "heads", "bert-pre-span", False, 0, "none", "1f1b-1", "replicated", "together", 0, False),
]


@functools.cache
def rows() -> list[tuple]:
    """Some, drawn of all."""
    every = [row for row in itertools.product(*GRID.values()) if exists(row)]
    return [every[number] for number in np.random.default_rng(0).choice(len(every), 5000, replace=False)]


def pairwise(rows: list[tuple]) -> list[tuple]:
    """Some in which every two values meet."""
    return [rows[number] for number in cover(rows, [*itertools.combinations(range(len(GRID)), 2)])]


def reference_of(row: tuple) -> tuple:
    """What the computation of one device depends on."""
    return row[2:5]


def config_of(row: tuple, **others: Any):
    mesh, way, _, _, _, remat, schedule, vocabulary, weight_gradients, zero, split = row
    kind, _, chunks = schedule.rpartition("-")
    options = {"remat": remat, "schedule": kind, "chunks": int(chunks), "vocabulary": vocabulary, "zero": zero}
    options |= {"weight_gradients": weight_gradients, "sequence_parallel": split, "context_attention": way}
    return tiny_config(mesh, **options | model_of(row) | {"microbatch": ROWS // mesh[0] // 2 or 1} | others)


def model_of(row: tuple) -> dict[str, Any]:
    _, _, model, documents, window, *_ = row
    size = {"num_layers": LAYERS, "sequence_length": TOKENS, "global_batch": ROWS}
    return size | (MODELS.get(model) or of(model)) | {"reset_attention": documents, "sliding_window": window}


@functools.cache
def reference(model: str, documents: bool, window: int, precision: str) -> MeshRun:
    whole = tiny_config(microbatch=ROWS, precision=precision, **model_of((0, 0, model, documents, window)))
    return run(whole, jax.devices(), 2)


def check_what_is_sent(config: Config, found: list[Collective]) -> None:
    """For attention, in all."""
    sizes, count = Sizes(config), config.mesh.context
    attention = [each for each in found if each.axes == ("context",) and each.kind != "all-reduce"]
    sent = sum(each.count * each.bytes_sent(count) for each in attention)
    numbers = elements_sent(config.model, config.mesh.sizes, config.train.remat, config.precision)[sizes.way]
    assert sent == pytest.approx(numbers * sizes.rows * sizes.item * sizes.backward_runs.count)


def check(row: tuple, precision: str = "fp32") -> CompiledComparison:
    """Loss and gradients."""
    config = config_of(row, precision=precision)
    actual = run(config, jax.devices(), 2, backend=in_blocks(config))
    return compare(reference(*row[2:5], precision).trace, actual.trace)


@pytest.mark.full
@pytest.mark.parametrize("row", DEFAULT, ids=name)
def test_grid(row):
    result = check(row)
    assert result.within(), result


@pytest.mark.full
def test_pairs_of_the_grid():
    """Some of them, in fp64; `test_field.py` has all."""
    for row in pairwise(rows())[::6]:
        result = check(row, "fp64")
        assert result.loss_error < 1e-12 and result.gradient_error < 1e-12, (row, result)


@pytest.mark.full
@pytest.mark.parametrize("context", [2, 4, 8])
def test_causal_work_is_even(context):
    """With gathered keys a program has no branches, so that all devices compute as much, and together not more than one
    device: queries times keys of all products."""
    size = {"context_attention": "gather", "sequence_length": 1024, "num_layers": 1, "global_batch": 1}
    alone, shared = (attention_work(tiny_config((1, 1, count, 1), **size)) for count in (1, context))
    assert shared * context == alone


def attention_work(config) -> int:
    """Multiplications of attention's products in a step, on one device."""
    program = Program.abstract(config, dataclasses.replace(CPU, query_block=64))
    step = train_step_with_gradients(program).trace(program.layout.shapes, program.batch_types)
    found = 0
    for eqn, count in equations(step.jaxpr.jaxpr):
        assert eqn.primitive.name not in ("cond", "while")
        if eqn.primitive.name == "dot_general" and eqn.params["dimension_numbers"][1][0]:
            inner = [eqn.invars[0].aval.shape[dim] for dim in eqn.params["dimension_numbers"][0][0]]
            found += count * math.prod(eqn.outvars[0].aval.shape) * math.prod(inner)
    return found


@pytest.mark.parametrize(
    ("model", "tokens", "window"),
    [
        *((model, TOKENS, 0) if model == "few keys" else full(model, TOKENS, 0) for model in SCORED),
        *(full(model, TOKENS - 2, 0) for model in SCORED),
        *(full("few keys", tokens, 10) for tokens in (12, 8)),
    ],
)
def test_scores(model, tokens, window):
    """Of sequences that a context group shares; of a length that it cannot share; and of lengths whose windows reach
    further than those that are trained on, or are none."""
    found = []
    for mesh in ((1, 1, 1), (1, 2, 2, 2)):
        config = tiny_config(mesh, microbatch=1, **model_of((0, 0, model, False, window)))
        program = tiny_program(config)
        batch = {name: np.asarray(array) for name, array in placed_batch(program, 0).items()}
        batch = {
            name: x[..., :tokens] if x.shape[-1:] == (TOKENS,) else np.minimum(x, tokens) for name, x in batch.items()
        }
        rows = program.local_rows
        found.append(scores(program)(drawn_params(program), program.put_batch(batch, rows)))
    for name_, (loss, hit) in found[0].items():
        np.testing.assert_allclose(found[1][name_][0], loss, rtol=2e-5, atol=1e-6)
        np.testing.assert_array_equal(found[1][name_][1], hit)


ENDS = [("gpt2", "gather"), ("bert-pre", "heads"), full("gpt2", "heads"), full("bert-pre", "gather")]


@pytest.mark.parametrize(("model", "way"), ENDS)
def test_documents_at_the_ends_of_pieces_and_padding_alone(model, way):
    """Documents that end before, at and after the end of a device's piece; and a device that has padding only."""
    found = []
    for mesh in ((1, 1, 1), (1, 1, 4, 1)):
        options = model_of((0, 0, model, model == "gpt2", 0)) | {"context_attention": way, "num_layers": 1}
        options |= {"hidden_size": 16, "num_heads": 4}
        config = tiny_config(mesh, microbatch=ROWS, **options)
        batch = random_batch(config, 0)
        (documents if model == "gpt2" else short_texts)(batch)
        found.append(loss_and_exact_gradients(config, batch))
    expected, actual = found
    assert all(np.array_equal(actual[name], leaf) for name, leaf in expected.items()) and len(expected) > 15


def documents(batch) -> None:
    piece = TOKENS // 8
    for row, end in enumerate((piece - 1, piece, piece + 1, 4 * piece)):
        batch["positions"][row] = np.concatenate([np.arange(end), np.arange(TOKENS - end)])


def short_texts(batch) -> None:
    batch["length"][:] = [TOKENS // 8, 1, TOKENS // 4, TOKENS // 8 + 1]
    batch["places"][:] = np.minimum(batch["places"], 0)


@pytest.mark.parametrize("precision", [full("bf16"), "fp8"])
def test_latents_are_gathered_but_in_8_bits(precision):
    """Then keys and values are: of a traced step, of which nothing is compiled."""
    options = LATENT | {"context_attention": "gather", "remat": "layer", "precision": precision}
    config = tiny_config((1, 1, 2, 2), microbatch=2, **options)
    check_what_is_sent(config, collectives_of(traced_step(config, jax.devices()[:4])))


def test_the_way_that_sends_less_is_taken():
    """Few heads of keys are gathered, of a window only what it sees; what each would send; and what GPUs can fuse."""
    few, many = tiny_config((1, 1, 4, 1), **LLAMA | {"num_kv_heads": 1}).model, tiny_config((1, 1, 4, 1)).model
    sizes = {"data": 1, "pipe": 1, "context": 4, "tensor": 1}
    assert context_way(few, sizes) == "gather" and context_way(many, sizes) == "heads"
    assert context_way(dataclasses.replace(many, sliding_window=4), sizes) == "window"
    assert context_way(many, sizes | {"tensor": 4}) == "gather"  # two heads are not divided by four devices
    assert context_way(many, sizes | {"context": 1}) == "none"
    sent = elements_sent(few, sizes)
    assert sent["gather"] == 6 * 1 * 4 * 16 * 3 / 4 and sent["heads"] == 4 * (8 + 4) * 4 * 16 * 3 / 16
    # Of attention that cuDNN has, heads are taken wherever they can be.
    assert context_way(few, sizes, fusible=True) == "heads" and context_way(many, sizes | {"tensor": 4}) == "gather"
    for precision, dropout, way in (("bf16", 0, "heads"), ("bf16", 0.1, "gather"), ("fp32", 0, "gather")):
        options = LLAMA | {"num_kv_heads": 1, "head_size": 8, "dropout": dropout, "precision": precision}
        assert training_way(tiny_config((1, 1, 4, 1), **options)) == way
    # Latents are gathered; but keys and values in 8 bits.
    for precision, way in (("bf16", "gather"), ("fp8", "heads")):
        assert training_way(tiny_config((1, 1, 4, 1), **LATENT, dropout=0.1, precision=precision)) == way


@pytest.mark.parametrize(
    ("mesh", "options", "words"),
    [
        (
            (1, 1, 3, 1),
            {},
            "2 x --mesh.context 3 does not divide --model.sequence-length 16; valid: a multiple of 6, .* is 18",
        ),
        (
            (1, 1, 2, 8),
            {"sequence_parallel": True, "sequence_length": 48},
            r"2 x --mesh.context 2 x --mesh.tensor 8 \(--sequence-parallel\) does not divide .* the nearest is 64",
        ),
        (
            (1, 1, 4, 4),
            {"context_attention": "heads"},
            "--mesh.context 4 does not divide the 2 heads of a device .* valid: gather or auto",
        ),
    ],
)
def test_bad_input(mesh, options, words):
    config = tiny_config(mesh, **options)
    with pytest.raises(UserError, match=words):
        validate(config, config.mesh.num_devices)
