"""A fine-tuned BERT as `transformers` computes it: logits after an import and after an export, and the losses of three
optimizer steps."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from canonical_weights import back_to_tensors, exported, weights_of
from hugging_face import ORDERS, SETTINGS, TASKS, assert_same, class_of, peer_model, tensors_in
from tiny import tiny_config, tiny_program

from megajax.convert.importing import open_source
from megajax.core.batch import IGNORED
from megajax.core.optim.adam import NOT_DECAYED
from megajax.core.optim.config import OptimizerConfig
from megajax.core.program.program import Program
from megajax.core.program.scoring import task_logits
from megajax.core.program.state import TrainState
from megajax.core.program.train_step import train_step
from megajax.data.synthetic import random_batch
from megajax.data.tasks import registry
from megajax.data.tasks.registry import TaskConfig
from megajax.settings.config import Config
from megajax.verify.run import drawn_state

pytestmark = pytest.mark.peer
torch = pytest.importorskip("torch", reason="the extra `peer` is not installed")
transformers = pytest.importorskip("transformers", reason="the extra `peer` is not installed")

HEADS = {"classes": 3, "span": 2, "choice": 4}
SIZES = {"hidden_size": 40, "intermediate_size": 160, "max_position_embeddings": 23}
LABELS = ["entailment", "neutral", "contradiction"]
# By default every head once: what computes the layers does not know the head (test_peer_models.py has both orders).
FEW = {("classes", "megatron-bert"), ("span", "bert"), ("choice", "megatron-bert")}
KINDS = [
    pytest.param(head, kind, marks=[] if (head, kind) in FEW else pytest.mark.full) for head in HEADS for kind in ORDERS
]
OPTIMIZER = OptimizerConfig(
    learning_rate=1e-3, schedule="constant", warmup_steps=0, weight_decay=0.1, clip_norm=1.0, zero=0
)


def configuration(kind: str, head: str, mesh: tuple[int, int, int] = (1, 1, 1)) -> Config:
    sizes = {"num_layers": 2, "hidden_size": 40, "num_heads": 4, "sequence_length": 23, "dropout": 0.0, "init_std": 0.2}
    words = {"family": "bert", "layer_order": ORDERS[kind], "head": head, "num_classes": HEADS[head]}
    return dataclasses.replace(tiny_config(mesh, microbatch=2, **words, **sizes), optimizer=OPTIMIZER)


def full_batch(config: Config, step: int) -> dict[str, np.ndarray]:
    """A random batch with padding, of a choice with missing options, in which every row has its answer, and no token
    the id 0, whose row gets no gradient of the embedding in transformers."""
    batch, rng = random_batch(config, step), np.random.default_rng(step)
    length = batch["length"]
    there = np.arange(config.model.sequence_length) < length[..., None]
    assert (length[length > 0] < config.model.sequence_length).any() and (batch["token_types"] == 1).any()
    batch["tokens"] = np.where(there & (batch["tokens"] == 0), np.int32(7), batch["tokens"])
    if config.model.head == "choice":
        assert (length == 0).any()
        most = (length > 0).sum(axis=1)
    else:
        most = np.full(len(length), config.model.num_classes) if config.model.head == "classes" else length
    for name in {"label", "start", "end"} & batch.keys():
        batch[name] = np.where(batch[name] == IGNORED, rng.integers(0, most), batch[name]).astype(np.int32)
    return batch


def long(array: np.ndarray) -> Any:
    return torch.tensor(array, dtype=torch.long)


def peer_output(peer: Any, batch: dict[str, np.ndarray], **targets: Any) -> tuple[Any, Any]:
    """Logits as `FamilyModel.task_logits` has them, and the class's loss if it gets targets."""
    there = np.arange(batch["tokens"].shape[-1]) < batch["length"][..., None]
    tokens, types = long(batch["tokens"]), long(batch["token_types"])
    found = peer(input_ids=tokens, token_type_ids=types, attention_mask=long(there), **targets)
    if batch["length"].ndim == 2:  # the class knows nothing of options that are missing
        return found.logits.masked_fill(torch.tensor(batch["length"] == 0), torch.finfo(found.logits.dtype).min), None
    logits = found.logits if "logits" in found else torch.stack([found.start_logits, found.end_logits], -1)
    return logits, found.get("loss")


def peer_loss(peer: Any, batch: dict[str, np.ndarray]) -> Any:
    """The class's own, but of a choice, where options may be missing."""
    if batch["length"].ndim == 2:
        return torch.nn.functional.cross_entropy(peer_output(peer, batch)[0], long(batch["label"]))
    names = {"label": "labels", "start": "start_positions", "end": "end_positions"}
    return peer_output(peer, batch, **{names[ours]: long(batch[ours]) for ours in names if ours in batch})[1]


def assert_same_logits(program: Program, state: TrainState, peer: Any, batch: dict[str, np.ndarray]) -> None:
    """Within 1e-5 of the largest, of tokens and of padding; options that are missing cannot be chosen."""
    with torch.no_grad():
        theirs = peer_output(peer, batch)[0].numpy()
    ours = np.asarray(task_logits(program)(state.params, program.put_batch(batch, program.local_rows)))
    there = np.ones(ours.shape, bool)
    if batch["length"].ndim == 2:
        there = batch["length"] > 0
        assert (ours[~there] == np.finfo(np.float32).min).all()
    assert ours.shape == theirs.shape and ours.dtype == np.float32
    np.testing.assert_allclose(ours[there], theirs[there], rtol=0, atol=1e-5 * np.abs(theirs[there]).max())


@pytest.mark.parametrize(("head", "kind"), KINDS)
def test_what_transformers_wrote(head: str, kind: str, tmp_path: Path) -> None:
    """Its logits; then three steps of AdamW with weight decay and clipping, whose losses are the same to 1e-5."""
    config = configuration(kind, head)
    names = {"id2label": dict(enumerate(LABELS)), "label2id": {name: n for n, name in enumerate(LABELS)}}
    peer = peer_model(class_of(kind, head), **SETTINGS[kind] | SIZES | (names if head == "classes" else {})).train()
    peer.save_pretrained(tmp_path / "hf")
    source = open_source(tmp_path / "hf", {"model.vocab_multiple": 64})
    assert source.config.model == dataclasses.replace(config.model, scan_layers="auto") and not source.weights.fresh
    canonical = weights_of(source)
    assert_same(back_to_tensors(canonical, config.model), tensors_in(tmp_path / "hf"))
    program = tiny_program(config)
    state = program.layout.from_canonical(program.layout.begin(canonical))
    assert_same_logits(program, state, peer, full_batch(config, 9))

    groups: dict[bool, list[Any]] = {True: [], False: []}
    for weight in peer.parameters():
        groups[weight.ndim > 1].append(weight)
    assert {"bias", "scale"} <= {*NOT_DECAYED}  # which have one dim there
    adam = torch.optim.AdamW(
        [{"params": groups[True], "weight_decay": 0.1}, {"params": groups[False], "weight_decay": 0.0}],
        lr=1e-3,
        betas=(OPTIMIZER.beta1, OPTIMIZER.beta2),
        eps=OPTIMIZER.epsilon,
    )
    step_function, ours, theirs = train_step(program), [], []
    for step in range(4):
        batch = full_batch(config, step % 2)
        state, metrics = step_function(state, program.put_batch(batch, program.local_rows))
        adam.zero_grad()
        loss = peer_loss(peer, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(peer.parameters(), OPTIMIZER.clip_norm)
        adam.step()
        ours.append(float(metrics["loss"]))
        theirs.append(loss.item())
    np.testing.assert_allclose(ours, theirs, rtol=1e-5)
    assert min(abs(ours[2] - ours[0]), abs(ours[3] - ours[1])) > 0.1  # of the same batch
    peer.save_pretrained(tmp_path / "after")  # with the type of problem that a loss was taken of
    assert open_source(tmp_path / "after").config.model.num_classes == HEADS[head]


@pytest.mark.parametrize(("task", "kind"), [("mnli", "megatron-bert"), ("squad1", "bert"), ("race", "bert")])
def test_an_export_answers_the_same_there(task: str, kind: str, tmp_path: Path) -> None:
    """From a checkpoint of a mesh of four devices with a padded vocabulary."""
    head, labels = registry.TASKS[task].head, registry.TASKS[task].labels
    config = dataclasses.replace(configuration(kind, head, (1, 2, 2)), task=TaskConfig(name=task))
    program = tiny_program(config)
    state = program.layout.from_canonical(drawn_state(program))
    there = exported(tmp_path, program, config, state)
    auto = getattr(transformers, f"AutoModelFor{TASKS[head]}")
    peer, told = auto.from_pretrained(there, attn_implementation="eager", output_loading_info=True)
    assert type(peer).__name__ == class_of(kind, head)
    assert not any(told[part] for part in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert peer.config.id2label == dict(enumerate(labels or ["LABEL_0", "LABEL_1"]))
    assert peer.config.num_labels == HEADS[head]
    assert_same_logits(program, state, peer, full_batch(config, 0))
