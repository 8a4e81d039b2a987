"""The mesh never changes the numbers: losses and every gradient of some compiled steps equal those of one device,
dropout on. By default one row, in half precision: all that is algebra is compared in `test_field.py`."""

import functools
import math

import jax
import numpy as np
import pytest
from parity_grid import DEEP, DEFAULT, REST, ROWS, config_of, name, of
from parity_grid import row as row_of
from tiny import full, tiny_config, tiny_program

from megajax import verify
from megajax.core.pipeline import executor, stages
from megajax.core.pipeline.schedule import SCHEDULES, ScheduleKind, Ticks
from megajax.core.private import has_fusion_emitters
from megajax.core.program.state import TrainState
from megajax.verify import CompiledComparison, Trace, compare
from megajax.verify.run import drawn_state

# The first update is with a learning rate of 0, so the third step sees the first update, the fifth Adam's moments after
# three. ZeRO 3, which gathers the weights that it updated in parts, gets five.
FEW, STEPS = 3, 5

trace = functools.partial(verify.trace, quick_compile=True)  # the numbers count here, not the time


@functools.cache
def reference(num_layers: int, vocab_size: int, model: str = "gpt2") -> Trace:
    size = {"num_layers": num_layers, "vocab_size": vocab_size, **of(model)}
    config = tiny_config(microbatch=ROWS, global_batch=ROWS, **size)
    return trace(config, STEPS, canonical=initial(num_layers, vocab_size, model))


@functools.cache
def initial(num_layers: int, vocab_size: int, model: str = "gpt2") -> TrainState:
    """The state that all begin with: what a mesh draws by itself is compared elsewhere
    (tests/core/models/test_gpt.py)."""
    return drawn_state(tiny_program(tiny_config(num_layers=num_layers, vocab_size=vocab_size, **of(model))))


def first(steps: int, whole: Trace) -> Trace:
    return Trace(whole.losses[:steps], whole.gradients[:steps])


@functools.cache
def trace_of(row: tuple) -> Trace:
    config = config_of(row)
    return trace(config, STEPS if config.optimizer.zero == 3 else FEW, canonical=initial(*model_of(row)))


def model_of(row: tuple) -> tuple[int, int, str]:
    config = config_of(row)
    return config.model.num_layers, config.model.vocab_size, row[-1]


@pytest.mark.full
@pytest.mark.parametrize("row", [*DEFAULT, *REST], ids=name)
def test_grid(row):
    actual = trace_of(row)
    result = compare(first(len(actual.losses), reference(*model_of(row))), actual)
    assert result.within(), result


EXACT = [  # schedule, chunks, vocabulary, zero, model
    ("1f1b", 1, "replicated", 0, "gpt2"),
    ("gpipe", 1, "split", 1, "gpt2"),
    ("interleaved", 2, "split", 3, "gpt2"),
    ("interleaved", 2, "split", 3, "bert-pre"),
    ("1f1b", 1, "replicated", 1, "bert-post"),
    ("interleaved", 2, "split", 3, "llama"),
    ("1f1b", 1, "replicated", 1, "qwen3"),
]
EXACT_DEFERRED = [  # and where products gather or slice for themselves
    (*EXACT[0], (2, 2, 2), "none", "deferred"),
    (*EXACT[1], (2, 2, 2), "layer", "deferred"),
    (*EXACT[2], (2, 2, 2), "selective", "deferred"),
    (*EXACT[3], (2, 2, 2), "none", "deferred"),
    (*EXACT[4], (2, 2, 2), "stage", "deferred"),
    (*EXACT[5], (2, 2, 2), "layer", "deferred"),
    (*EXACT[6], (1, 2, 4), "stage", "deferred"),
]
EXACT_LAYERS = [  # attention to latents, windows of some layers, sinks, with the parts of every axis
    ("interleaved", 2, "split", 3, "latent", (2, 2, 2), "layer", "together"),
    ("1f1b", 1, "replicated", 1, "latent", (1, 2, 2, 2), "selective", "deferred"),
    ("interleaved", 2, "split", 3, "gemma3", (2, 2, 2), "layer", "deferred"),
    ("1f1b", 1, "replicated", 1, "gemma3", (1, 1, 4, 2), "selective", "together"),
    ("1f1b", 1, "split", 1, "deepseek", (1, 2, 2, 1), "layer", "together"),
    ("gpipe", 1, "replicated", 3, "deepseek", (1, 1, 4), "none", "together"),
    ("1f1b", 1, "split", 1, "gpt-oss", (1, 2, 2, 1), "layer", "together"),
    ("gpipe", 1, "replicated", 3, "gpt-oss", (1, 1, 4), "none", "together"),
]
EXACT_ROWS = [*((*row, (2, 2, 2), "layer", "together") for row in EXACT), *EXACT_DEFERRED, *EXACT_LAYERS]


@pytest.mark.full
@pytest.mark.parametrize(
    ("schedule", "chunks", "vocabulary", "zero", "model", "mesh", "remat", "weight_gradients"),
    EXACT_ROWS,
    ids=map(name, EXACT_ROWS),
)
def test_what_is_left_is_rounding(schedule, chunks, vocabulary, zero, model, mesh, remat, weight_gradients):
    """The hardest meshes in fp64, with more than one block of queries and layers the pipe does not divide; devices that
    a mesh leaves of the eight divide experts."""
    common = {"precision": "fp64", "num_layers": 5, "sequence_length": 136, "global_batch": 12, **of(model)}
    with jax.enable_x64(True):
        expected = trace(tiny_config(microbatch=12, **common), 2)
        pipeline = {
            "schedule": schedule,
            "chunks": chunks,
            "vocabulary": vocabulary,
            "weight_gradients": weight_gradients,
        }
        tensor_parallel = {"sequence_parallel": zero > 0 and mesh[-1] > 1}
        split = {"zero": zero, "expert": 8 // math.prod(mesh), **tensor_parallel}
        actual = trace(tiny_config(mesh, microbatch=2, remat=remat, **split, **pipeline, **common), 2)
    result = compare(expected, actual)
    assert result.loss_error < 1e-12 and result.gradient_error < 1e-12, result


OVERLAPPED = {"overlap_reductions": "true", "overlap_gathers": "true"}
OF_GPUS = {  # the second pairs 4 microbatches of 6, the third 5 ticks
    "reductions": {"mesh": (2, 1, 2), "zero": 0, "sequence_parallel": True},
    "pairs": {"mesh": (2, 1, 2), "sequence_parallel": True, "microbatch": 1},
    "stages, pairs": {"mesh": (2, 2, 1), "weight_gradients": "deferred", "microbatch": 2, "optimizer": {}},
    "replicas": {"mesh": (4, 1, 2), "zero": 3, "microbatch": 1, "optimizer": OVERLAPPED | {"zero_ranks": 2}},
    "chunks, reductions": {"mesh": (2, 2, 1), "schedule": "interleaved", "chunks": 2, "weight_gradients": "deferred"},
}


@pytest.mark.full
@pytest.mark.parametrize("name", OF_GPUS)
def test_forms_of_gpus_round_nothing_more(name):
    """In fp64, layers one by one: communication beside the first and last passes, pairs."""
    common = {"precision": "fp64", "num_layers": 5, "global_batch": 12}
    with jax.enable_x64(True):
        expected = trace(tiny_config(microbatch=12, **common), 2)
        forms = {"microbatch": 3, "optimizer": OVERLAPPED, "paired_microbatches": "pairs" in name}
        scan = {"scan_layers": "true" if "chunks" in name else "false"}
        actual = trace(tiny_config(**common | forms | scan | OF_GPUS[name]), 2)
    result = compare(expected, actual)
    assert result.loss_error < 1e-12 and result.gradient_error < 1e-12, result


RESET_MODEL = {"num_layers": 5, "global_batch": ROWS, "reset_attention": True}
RESET = [
    {"schedule": "interleaved", "chunks": 2, "vocabulary": "split", "zero": 3, "microbatch": 4},
    {"schedule": "gpipe", "remat": "stage", "microbatch": 3},
    {"remat": "selective", "microbatch": 4, "scan_layers": "false"},
    {"remat": "layer", "vocabulary": "split", "microbatch": 2},
    {"remat": "none", "microbatch": 3, "weight_gradients": "deferred"},
]


@pytest.mark.full
@pytest.mark.parametrize("options", RESET, ids=lambda options: "-".join(map(str, options.values())))
def test_with_attention_reset_at_documents(options):
    """The hardest mesh with a split sequence; what the numbers mean is tested elsewhere."""
    config = tiny_config((2, 2, 2), sequence_parallel=True, **RESET_MODEL, **options)
    result = compare(reset_reference(), trace(config, 2, canonical=initial(5, 101)))
    assert result.within(), result


DEFERRING = ("together", "deferred")


@functools.cache
def reset_reference() -> Trace:
    return trace(tiny_config(microbatch=ROWS, **RESET_MODEL), 2, canonical=initial(5, 101))


@pytest.mark.full
@pytest.mark.parametrize(
    "options",
    [{"zero": 1}, *(RESET[0] | {"remat": "layer"} | {"weight_gradients": word} for word in DEFERRING)],
    ids=["1f1b", *DEFERRING],
)
def test_as_users_compile(options, monkeypatch):
    """The tests take the machine code that is soonest there (conftest.py): here, once, with XLA's defaults."""
    expected, flags = first(2, reference(5, 101)), {"xla_backend_optimization_level": 3}
    flags |= {"xla_cpu_use_fusion_emitters": True} if has_fusion_emitters() else {}
    compiled = jax.stages.Lowered.compile
    monkeypatch.setattr(jax.stages.Lowered, "compile", lambda lowered, _: compiled(lowered, flags))
    size = {"num_layers": 5, "global_batch": ROWS, "microbatch": 4}
    config = tiny_config((2, 2, 2), sequence_parallel=True, **size | options)
    actual = trace(config, 2, canonical=initial(5, 101))
    monkeypatch.undo()
    result = compare(expected, actual)
    assert result.within(), result


DEEPER = {"num_layers": 5, "mesh": (2, 2, 2)}
HALF = {  # the stages of "deferred" have one without a layer
    "small": {"num_layers": 2, "mesh": (2, 1, 2)},
    "together": DEEPER,
    "deferred": DEEPER | {"schedule": "interleaved", "chunks": 2, "layers": "2,0,1,2", "weight_gradients": "deferred"},
}


@pytest.mark.parametrize(
    ("precision", "summed_in", "loss", "gradient", "form"),
    [
        ("fp16", "fp16", 2e-5, 5e-3, "small"),  # the one with a loss scale; the one that is compiled by default
        full("fp16", "fp32", 2e-5, 5e-3, "together"),
        full("fp16", "fp16", 2e-5, 5e-3, "together"),
        full("bf16", "bf16", 2e-4, 4e-2, "together"),
        full("bf16", "fp32", 2e-4, 4e-2, "together"),
        full("fp16", "fp16", 2e-5, 5e-3, "deferred"),
        full("bf16", "bf16", 2e-4, 4e-2, "deferred"),
        full("bf16", "fp32", 2e-4, 4e-2, "deferred"),
    ],
)
def test_half_precision_is_near_fp32(precision, summed_in, loss, gradient, form):
    """Losses and gradients, without fp16's scale, with ZeRO and a split sequence; fp16 has 3 bits more."""
    options = {"precision": precision, "sequence_parallel": True, "optimizer": {"gradient_dtype": summed_in}}
    config = tiny_config(global_batch=ROWS, microbatch=4, **options, **HALF[form])
    actual = trace(config, STEPS, canonical=initial(config.model.num_layers, 101))
    result = compare(reference(config.model.num_layers, 101), actual)
    assert result.loss_error < loss and result.gradient_error < gradient, result


@pytest.mark.full
@pytest.mark.parametrize("weight_gradients", ["together", "deferred"])
@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", 1), ("interleaved", 2)])
def test_unrolled_layers_equal_scanned_ones(schedule, chunks, weight_gradients):
    common = {"num_layers": 5, "schedule": schedule, "chunks": chunks, "weight_gradients": weight_gradients}
    scanned = trace(tiny_config((1, 2, 2), **common), 3)
    unrolled = trace(tiny_config((1, 2, 2), remat="selective", scan_layers="false", **common), 3)
    assert compare(scanned, unrolled).within()


@pytest.mark.full
@pytest.mark.parametrize("weight_gradients", ["together", "deferred"])
def test_a_new_schedule_is_one_function(weight_gradients, monkeypatch):
    """Any ticks in which the input is there run: here everything waits, every other microbatch a tick longer."""

    def dawdling(num_stages: int, num_microbatches: int, num_chunks: int) -> Ticks:
        ticks = SCHEDULES["interleaved"].ticks(num_stages, num_microbatches, num_chunks)
        wait = np.arange(num_microbatches)[:, None, None] % 2
        return Ticks(2 * ticks.forward + wait, 2 * ticks.backward + wait + 3)

    monkeypatch.setitem(SCHEDULES, "dawdling", ScheduleKind(dawdling, chunked=True))
    options = {"schedule": "dawdling", "chunks": 2, "remat": "layer", "weight_gradients": weight_gradients}
    config = tiny_config((1, 2, 1), num_layers=5, microbatch=4, global_batch=ROWS, vocabulary="split", **options)
    assert compare(first(2, reference(5, 101)), trace(config, 2, canonical=initial(5, 101))).within()


FOUR = {"mesh": (1, 4, 1)}
IDLE = [
    row_of(**FOUR),
    row_of(schedule="gpipe-1", remat="stage", **FOUR),
    row_of(schedule="interleaved-2", remat="layer", **FOUR),
    row_of(schedule="interleaved-2", vocabulary="split", **FOUR),
    row_of(remat="selective", weight_gradients="deferred", **FOUR),
    row_of(schedule="gpipe-1", vocabulary="split", remat="stage", weight_gradients="deferred", **FOUR),
    row_of(schedule="interleaved-2", remat="layer", weight_gradients="deferred", **FOUR),
]


@pytest.mark.full
@pytest.mark.parametrize("row", [DEEP, *IDLE], ids=name)
def test_what_stands_in_idle_ticks_is_never_used(row, monkeypatch):
    """NaN in place of zero, in every buffer, inbox and wire, in what padded layers keep and in slots for factors,
    changes not a bit. There are groups of microbatches that are stretched, and a real inbox."""
    expected, filled = trace_of(row), []

    def nan(type_, leading=()):
        is_float = jax.numpy.issubdtype(type_.dtype, jax.numpy.floating)
        zeros = real(type_, leading)
        filled.append(is_float)
        return zeros + jax.numpy.asarray(math.nan, zeros.dtype) if is_float else zeros

    real = stages.idle
    monkeypatch.setattr(executor, "idle", nan)
    monkeypatch.setattr(stages, "idle", nan)
    actual = trace(config_of(row), FEW, canonical=initial(*model_of(row)))
    assert sum(filled) >= 5
    assert actual.losses == expected.losses and compare(expected, actual).gradient_error == 0.0


def test_the_comparison_can_fail():
    """Another step's numbers, a doubled gradient and a NaN are all noticed."""
    expected = first(2, reference(2, 101))
    assert compare(expected, expected) == CompiledComparison(0.0, 0.0, next(iter(expected.gradients[0])))
    assert not compare(expected, Trace(expected.losses[::-1], expected.gradients[::-1])).within()
    for leaf in expected.gradients[0]:
        doubled = [gradients | {leaf: 1.001 * gradients[leaf]} for gradients in expected.gradients]
        wrong = compare(expected, Trace(expected.losses, doubled))
        assert wrong.worst_leaf == leaf and wrong.gradient_error > 0
    missing = [gradients | {leaf: math.nan * gradients[leaf]} for gradients in expected.gradients]
    assert not compare(expected, Trace(expected.losses, missing)).within()
    assert not compare(expected, Trace([math.nan, *expected.losses[1:]], expected.gradients)).within()
