"""The mesh never changes the numbers, exactly: a step over finite fields on any mesh, by any schedule and with any
option is that of one device. What only a compiler can show is in `test_parity.py` and beside it."""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest
from counting import assert_sent_for_attention
from field import assert_exact, loss_and_exact_gradients
from parity_grid import CONTEXTS, EXPERTS, TABLE, meeting, on_context, options, with_experts
from tiny import full, tiny_config

from megajax.core.backend import CPU, HOPPER
from megajax.core.models.router import LOAD
from megajax.core.pipeline.schedule import SCHEDULES, ScheduleKind, Ticks
from megajax.core.program.program import Program
from megajax.core.program.scoring import scores
from megajax.core.program.train_step import whole_weights
from megajax.data.synthetic import random_batch
from megajax.plan.sizes import Sizes
from megajax.settings.config import Config
from megajax.verify import fields
from megajax.verify.fields import Drawn, ExactStep, recorded_step, run_step, unequal
from megajax.verify.forms import in_blocks, plain
from megajax.verify.recording import SitePlace


@pytest.mark.parametrize("name", [name if "default" in row.how else full(name) for name, row in TABLE.items()], ids=str)
def test_a_step_is_that_of_one_device(name: str) -> None:
    row = TABLE[name]
    forms = {"expert_bytes": 2**12} if row.group == "precisions" else {}
    step = assert_exact(row.config, "branches" in row.how, "unplanned" not in row.how, **forms)
    ALSO.get(row.group, lambda config, step: None)(row.config, step)


def sent_for_attention(config: Config, step: ExactStep) -> None:
    assert_sent_for_attention(config, step.collectives)


def further_losses(config: Config, step: ExactStep) -> None:
    """Of modules that have tokens so far ahead; these choose experts, too."""
    assert ("prediction/loss_2" in step.taken.metrics) == (config.model.prediction_coefficient > 0)
    if config.model.num_experts:
        assert step.taken.metrics[LOAD][0, 0].sum(axis=1).tolist() == [60] * config.model.num_blocks + [52, 44]


def padded(config: Config, step: ExactStep) -> None:
    """Padded, and where that suffices with two dims joined, and as exact: norms, clipped gradients, moments and
    averages among it."""
    weights = jax.tree.leaves(Program.abstract(config, CPU).layout.weights)
    assert any(weight.zero.padding for weight in weights) and step.taken.metrics
    dense = config.model.activation == "swiglu" and not config.model.num_experts
    assert any(weight.zero.joined and weight.matrices for weight in weights) != dense


def summed_over_replicas(config: Config, step: ExactStep) -> None:
    """State is sharded over some ranks of data. The others are replicas: a device's shards of gradients are summed over
    them once a step."""
    assert config.mesh.replica * config.optimizer.zero_ranks == config.mesh.data
    if config.mesh.pipe == config.mesh.tensor == config.mesh.expert == 1 and config.mesh.zero_shards > 1:
        sums = [each for each in step.collectives if {*each.axes} - {"pipe", "tensor"} == {"replica"}]
        layout = Program.abstract(config, CPU).layout
        weights = jax.tree.leaves(layout.trained(layout.weights))
        shards = sum(each.size(each.owned) for each in weights if each.zero.axes)
        assert 0 < 4 * shards == sum(each.count * each.num_bytes for each in sums)


def as_asked_for(config: Config, step: ExactStep) -> None:
    """What is communicated beside the passes; weights of a step that copies them are gathered at its end."""
    sizes, asked = Sizes(config), config.optimizer
    at_the_end = config.lora.rank or config.precision == "fp8" or asked.zero == 0
    assert sizes.overlaps_reductions == (asked.overlap_reductions == "true")
    assert sizes.gathers_late == (asked.overlap_gathers == "true" and not at_the_end)


def dropped(config: Config, step: ExactStep) -> None:
    assert "experts/dropped" in step.taken.metrics


ALSO = {
    "context": sent_for_attention,
    "experts": dropped,
    "modules for further tokens": further_losses,
    "padded state": padded,
    "replicas": summed_over_replicas,
    "beside the passes": as_asked_for,
}


@pytest.mark.full
@pytest.mark.parametrize(("columns", "sized"), [(CONTEXTS, on_context), (EXPERTS, with_experts)])
def test_every_two_words_of_a_grid(columns: list[str], sized: Any) -> None:
    for words in meeting(columns):
        assert_exact(tiny_config(**sized(words)))


MIXED = "mixture sinks global_batch=4 undropped"


def test_dropless_experts_in_the_blocks_of_kernels() -> None:
    """On axes of experts and context, their products in a loop: the kernels' interpreter has one device. Keys of
    documents are gathered, as in no other default row."""
    blocks = {name: getattr(HOPPER, name) for name in ("expert_block", "expert_bytes", "expert_kernel")}
    config = tiny_config(**options(f"{MIXED} 1x1x2x1 expert=2 gather documents window=3 num_layers=1"))
    assert_exact(config, branches=False, planned=False, **blocks)


def test_a_new_schedule_is_one_function(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any ticks in which the input is there run: here everything waits, every other microbatch a tick longer."""

    def dawdling(num_stages: int, num_microbatches: int, num_chunks: int) -> Ticks:
        ticks = SCHEDULES["interleaved"].ticks(num_stages, num_microbatches, num_chunks)
        wait = np.arange(num_microbatches)[:, None, None] % 2
        return Ticks(2 * ticks.forward + wait, 2 * ticks.backward + wait + 3)

    monkeypatch.setitem(SCHEDULES, "dawdling", ScheduleKind(dawdling, chunked=True))
    slow = {"schedule": "dawdling", "chunks": 2, "num_layers": 3, "global_batch": 3, "dropout": 0.0}
    assert_exact(tiny_config(**options("1x2x1 deferred layer split") | slow), branches=False)


def test_an_evaluation_has_the_weights_that_the_next_step_gathers() -> None:
    drawn = Drawn(tiny_config(**options("3x2x1 gathered-late untied num_layers=3 global_batch=6")))
    layout, (_, expected) = drawn.program.layout, drawn.weights
    found = drawn.run(whole_weights(drawn.program), (layout.shapes.params, drawn.state.params))
    same = jax.tree.map(
        lambda x, y: x.shape[2:] == y.shape[2:] and np.array_equal(*np.broadcast_arrays(x, y)), found, expected
    )
    assert layout.gathers_late and all(jax.tree.leaves(same)), same


@pytest.mark.parametrize(
    ("words", "tokens"),
    [("few-keys", 24), *(full(*row) for row in (("bert-pre", 24), ("bert-post-classes", 24), ("bert-pre-span", 24)))]
    + [full(model, 22) for model in ("few-keys", "bert-pre", "bert-post-classes", "bert-pre-span")]
    + [full("few-keys window=10", tokens) for tokens in (12, 8)],
)
def test_scores(words: str, tokens: int) -> None:
    """Of sequences that a context group shares; of a length that it cannot share; and of lengths whose windows reach
    further than those that are trained on, or are none."""
    found = []
    for mesh in ("1x1x1x1", "1x2x2x2"):
        drawn = Drawn(tiny_config(**options(f"{words} {mesh} sequence_length=24 num_layers=2 global_batch=2")))
        batch = {
            name: x[..., :tokens] if x.shape[-1:] == (24,) else np.minimum(x, tokens) for name, x in drawn.batch.items()
        }
        types = {name: jax.ShapeDtypeStruct(x.shape[2:], x.dtype) for name, x in batch.items()}
        found.append(drawn.run(scores(drawn.program), drawn.weights, (types, batch)))
    assert not any(jax.tree.leaves(jax.tree.map(unequal, *found)))


@pytest.mark.parametrize(
    "words", ["gpt2 gather documents", "bert-pre heads", *map(full, ("gpt2 heads documents", "bert-pre gather"))]
)
def test_documents_at_the_ends_of_pieces_and_padding_alone(words: str) -> None:
    """Documents that end before, at and after the end of a device's piece; and a device that has padding only."""
    config = tiny_config(**options(f"1x1x4x1 {words} sequence_length=48 num_layers=1 global_batch=4"))
    batch, piece = random_batch(config, 0), 6
    if "positions" in batch:
        ends = (piece - 1, piece, piece + 1, 4 * piece)
        batch["positions"] = np.stack([np.r_[:end, : 48 - end] for end in ends]).astype(np.int32)
    else:
        batch["length"][:] = piece, 1, 2 * piece, piece + 1
        batch["places"][:] = np.minimum(batch["places"], 0)
    alone, shared = (loss_and_exact_gradients(each, batch) for each in (plain(config), config))
    assert all(np.array_equal(shared[name], leaf) for name, leaf in alone.items()) and len(alone) > 15


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        "1x1x1 balance=both prediction_modules=1 global_batch=2",
        *map(full, ("1x1x1 expert=2 balance=both prediction_modules=1", "1x1x2x1 balance=both gather")),
        full("1x2x1 expert=2 balance=loss expert_capacity=1.0 num_layers=2"),
    ],
)
def test_what_a_mesh_alone_shows(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under another loss scale gradients and weights are the same, and with more rows, which are padding."""
    config = tiny_config(**options(f"{MIXED} fp16 num_layers=1 router_z_loss=0.1 {words}"))
    real, drawn, more = random_batch(config, 0), fields._drawn, config.mesh.row_shards
    expected = run_step(config, in_blocks(config), branches=False)
    with monkeypatch.context() as patch:
        patch.setattr(fields, "_drawn", lambda name, leaf: drawn(name + "'" * ("loss_scale" in name), leaf))
        found = [run_step(config, in_blocks(config), branches=False)]
    fill = {name: np.full_like(x[:more], -1 if name == "targets" else 1) for name, x in real.items()}
    batch = {name: np.concatenate([x, fill[name]]) for name, x in real.items()}
    monkeypatch.setattr(fields, "random_batch", lambda *given: batch)
    rows = dataclasses.replace(config.train, global_batch=config.train.global_batch + more)
    config = dataclasses.replace(config, train=rows)
    found.append(run_step(config, in_blocks(config), branches=False))
    for step in found:
        for of in (lambda step: step.gradients, lambda step: step.taken.state["params"]):
            wrong = {leaf: unequal(x, of(step)[leaf]) for leaf, x in of(expected).items()}
            assert not any(wrong.values()), wrong


def test_every_layer_and_row_has_dropout_of_its_own() -> None:
    recording = recorded_step(tiny_config(**options("1x2x1 num_layers=3 dropout=0.5 global_batch=4")))
    dropped = [place for place in recording.places if place.site.endswith("dropout") and not place.backward]
    masks = [x.value == 0 for place in dropped for _, x in recording.activations(place)]
    assert {place.layer for place in dropped} == {0, 1, 2} and len(masks) == 2 * 3 * 4
    assert len({mask.tobytes() for mask in masks}) == len(masks)
    assert all(0.3 < mask.mean() < 0.7 for mask in masks)


@pytest.mark.parametrize("mesh", ["1x2x1", full("1x1x2x1")])
def test_the_layers_with_a_window_see_no_further(mesh: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first token changes what the first layer has for the three that see it, and then all of the second one's."""
    words = f"{mesh} llama gather undropped num_layers=2 window=3 window_layers=1,1 global_batch=4"
    config = tiny_config(**options(words))
    recordings, batch = [], random_batch(config, 0)
    for first_token in (1, 2):
        tokens = batch["tokens"].copy()
        tokens[:, 0] = first_token
        monkeypatch.setattr(fields, "random_batch", lambda *given, tokens=tokens: batch | {"tokens": tokens})
        recordings.append(recorded_step(config, in_blocks(config)))
    for layer, seen in ((0, 3), (1, 8)):
        place = SitePlace(layer, "attention_heads", False)
        (_, one), (_, other) = (next(recording.activations(place)) for recording in recordings)
        assert np.flatnonzero((one.value != other.value).any((0, 2, 3))).tolist() == list(range(seen))
