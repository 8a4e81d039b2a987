"""BERT as `transformers` computes it: after an import both heads' logits and every gradient, after an export the same
logits there, and the same ids of the tokenizer."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from canonical_weights import from_tensors, places_of
from drawn import drawn_state
from hugging_face_bert import CLASSES, both_logits, peer_bert
from saved_tokenizers import write_vocabulary
from tiny import tiny_config, tiny_program

from megajax.batch import IGNORED
from megajax.config import Config, MeshConfig, to_toml
from megajax.convert.exporting import export_config, export_hf
from megajax.convert.importing import import_hf, open_source
from megajax.data.tokenizers import load_tokenizer, train_tokenizer, wordpiece
from megajax.models.config import ModelConfig
from megajax.pipeline.config import PipelineConfig
from megajax.program.synthetic import random_batch
from megajax.program.train_step import loss_and_gradients
from megajax.runs.checkpoint import Checkpoints
from megajax.runs.trained import restore_params
from megajax.verify import named_leaves

pytestmark = pytest.mark.peer
torch = pytest.importorskip("torch", reason="the extra `peer` is not installed")
transformers = pytest.importorskip("transformers", reason="the extra `peer` is not installed")

MODEL = ModelConfig(
    family="bert", num_layers=3, hidden_size=40, num_heads=4, sequence_length=23, vocab_size=101, dropout=0.0
)
MESHES = [((1, 1, 1), "replicated"), ((1, 1, 2), "replicated"), ((1, 2, 2), "replicated"), ((1, 2, 2), "split")]
# By default each order of the layers once: that a mesh changes nothing is tested elsewhere (test_parity.py).
FEW = {("pre", *MESHES[3]), ("post", *MESHES[1])}
ROWS = [
    pytest.param(order, *place, marks=[] if (order, *place) in FEW else pytest.mark.full)
    for place in MESHES
    for order in ("pre", "post")
]


def padded_batch(config: Config) -> dict[str, np.ndarray]:
    """A random batch in which no token has the id 0, whose row gets no gradient of the embedding in transformers."""
    batch = random_batch(config, 0)
    there = np.arange(config.model.sequence_length) < batch["length"][:, None]
    assert not there.all() and (batch["order"] == IGNORED).any() and (batch["token_types"] == 1).any()
    return batch | {"tokens": np.where(there & (batch["tokens"] == 0), np.int32(7), batch["tokens"])}


def peer_logits(peer: Any, batch: dict[str, np.ndarray]) -> tuple[Any, Any]:
    there = np.arange(batch["tokens"].shape[1]) < batch["length"][:, None]
    found = peer(
        input_ids=torch.tensor(batch["tokens"], dtype=torch.long),
        token_type_ids=torch.tensor(batch["token_types"], dtype=torch.long),
        attention_mask=torch.tensor(there, dtype=torch.long),
    )
    return found.prediction_logits, found.seq_relationship_logits


def peer_gradients(peer: Any, batch: dict[str, np.ndarray]) -> tuple[float, dict[str, np.ndarray]]:
    """Loss and gradients by name: the mean over the masked tokens plus the mean over the rows of two segments."""
    total = 0.0
    masked_BTV, order_BC = peer_logits(peer, batch)
    masked_BMV = masked_BTV[torch.arange(len(masked_BTV))[:, None], torch.tensor(batch["places"], dtype=torch.long)]
    for logits, name in ((masked_BMV, "targets"), (order_BC, "order")):
        targets = torch.tensor(batch[name].ravel(), dtype=torch.long)
        rows = logits.reshape(-1, logits.shape[-1])
        total = total + torch.nn.functional.cross_entropy(rows, targets, ignore_index=IGNORED)
    total.backward()
    return total.item(), {name: parameter.grad.numpy() for name, parameter in peer.named_parameters()}


@pytest.mark.parametrize(("order", "mesh", "vocabulary"), ROWS)
def test_logits_loss_and_gradients(order: str, mesh: tuple[int, int, int], vocabulary: str, tmp_path: Path) -> None:
    """Imported: the logits of both heads within 1e-5 of the largest, the loss, and every gradient."""
    model = dataclasses.replace(MODEL, layer_order=order)
    peer = peer_bert(model)
    peer.save_pretrained(tmp_path / "hf")
    source = open_source(tmp_path / "hf")
    assert source.config.model == dataclasses.replace(model, init_std=0.2) and not source.weights.fresh
    import_hf(source, tmp_path / "run")
    config = dataclasses.replace(
        source.config,
        mesh=MeshConfig(data=mesh[0], pipe=mesh[1], tensor=mesh[2]),
        pipeline=PipelineConfig(vocabulary=vocabulary),
        train=dataclasses.replace(source.config.train, global_batch=8, microbatch=2),
    )
    program = tiny_program(config)
    params, step = restore_params(program, tmp_path / "run", "latest")
    assert step == 0
    batch = padded_batch(config)
    placed = program.put_batch(batch, program.local_rows)

    there = np.arange(model.sequence_length) < batch["length"][:, None]
    masked, pair = (logits.detach().numpy() for logits in peer_logits(peer, batch))
    ours_masked, ours_pair = (np.asarray(logits) for logits in both_logits(program)(params, placed))
    for ours, theirs in (ours_masked[..., : model.vocab_size][there], masked[there]), (ours_pair, pair):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5 * np.abs(theirs).max())

    theirs_loss, theirs_gradients = peer_gradients(peer.double(), batch)
    loss, gradients = loss_and_gradients(program)(params, placed, np.int32(0))
    assert float(loss) == pytest.approx(theirs_loss, rel=1e-6)
    expected = named_leaves(from_tensors(places_of(model), theirs_gradients.__getitem__, model))
    actual = named_leaves(program.layout.canonical_weights(jax.device_get(gradients)))
    assert expected.keys() == actual.keys()
    norms = {name: np.linalg.norm(leaf) for name, leaf in expected.items()}
    of_all = np.linalg.norm(list(norms.values()))
    # Attention is the same whatever the key's bias is, so that its gradient is rounding alone.
    norms["blocks/attention/key/bias"] = norms["blocks/attention/key/weight"]
    for name, leaf in expected.items():
        error = np.linalg.norm(actual[name] - leaf) / max(norms[name], 1e-3 * of_all)
        assert error <= 1e-5, (name, error)


@pytest.mark.parametrize("order", ["pre", "post"])
def test_an_export_computes_the_same_there(order: str, tmp_path: Path) -> None:
    """From a checkpoint of a mesh of four devices with a padded vocabulary; the tokenizer finds the same ids."""
    config = tiny_config((1, 2, 2), family="bert", layer_order=order, vocab_size=150, init_std=0.2, dropout=0.0)
    program, run = tiny_program(config), tmp_path / "run"
    state = program.layout.from_canonical(drawn_state(program))
    checkpoints = Checkpoints(run, program.layout, keep=1)
    checkpoints.save(7, state)
    checkpoints.close()
    (run / "config.toml").write_text(to_toml(config))
    text = "A naïve text, with a few words of it twice: a text, with words.\n\n" * 3
    tokenizer = train_tokenizer([text], 150, "wordpiece")
    tokenizer.save(run / "data" / "tokenizer")
    assert export_hf(run, export_config(run), tmp_path / "hf")[0] == 7

    peer, told = getattr(transformers, CLASSES[order]).from_pretrained(
        tmp_path / "hf", attn_implementation="eager", output_loading_info=True
    )
    assert not any(told[part] for part in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert type(transformers.AutoModelForPreTraining.from_pretrained(tmp_path / "hf")) is type(peer)
    assert transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "hf").config.vocab_size == 150
    batch = padded_batch(config)
    there = np.arange(config.model.sequence_length) < batch["length"][:, None]
    with torch.no_grad():
        masked, pair = (logits.numpy() for logits in peer_logits(peer, batch))
    placed = program.put_batch(batch, program.local_rows)
    ours_masked, ours_pair = (np.asarray(logits) for logits in both_logits(program)(state.params, placed))
    for ours, theirs in (ours_masked[..., : config.model.vocab_size][there], masked[there]), (ours_pair, pair):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5 * np.abs(theirs).max())

    special = {token: tokenizer.encode(token) for token in ("[CLS]", "[SEP]", "[PAD]", "[MASK]")}
    for kind in (transformers.AutoTokenizer, transformers.BertTokenizer):
        theirs = kind.from_pretrained(tmp_path / "hf")
        first, second = tokenizer.encode(text), tokenizer.encode("Other words.")
        both = theirs(text, "Other words.")
        expected = [*special["[CLS]"], *first, *special["[SEP]"], *second, *special["[SEP]"]]
        assert both.input_ids == expected
        assert both.token_type_ids == [0] * (len(first) + 2) + [1] * (len(second) + 1)
        assert [theirs.pad_token_id, theirs.mask_token_id] == special["[PAD]"] + special["[MASK]"]


@pytest.mark.parametrize(("order", "kind"), [("pre", "MegatronBertForMaskedLM"), ("post", "BertForMaskedLM")])
def test_a_model_without_the_order_head(order: str, kind: str, tmp_path: Path) -> None:
    """What is there is imported, pooler and order head are drawn anew."""
    peer = peer_bert(dataclasses.replace(MODEL, layer_order=order), kind)
    peer.save_pretrained(tmp_path / "hf")
    source = open_source(tmp_path / "hf")
    assert list(source.weights.fresh) == ["the pooler", "the order head"]
    import_hf(source, tmp_path / "run")
    export_hf(tmp_path / "run", export_config(tmp_path / "run"), tmp_path / "back")
    back = getattr(transformers, kind).from_pretrained(tmp_path / "back")
    for name, weight in peer.state_dict().items():
        assert torch.equal(back.state_dict()[name], weight), name


@pytest.mark.parametrize("cased", [False, True])
def test_a_tokenizer_of_one_file(cased: bool, tmp_path: Path) -> None:
    """`transformers` writes tokenizer.json alone: the same ids here, cased and not."""
    text = "Some TEXT — with some Words, ünd some words again.\n\n\tEnd." * 3
    tokenizer = train_tokenizer([text], 100, "wordpiece")
    if cased:
        tokenizer = wordpiece(tokenizer.vocabulary | {"Some": tokenizer.size, "TEXT": tokenizer.size + 1})
    (tmp_path / "ours").mkdir()
    write_vocabulary(tmp_path / "ours", tokenizer)
    theirs = transformers.BertTokenizer.from_pretrained(tmp_path / "ours", do_lower_case=not cased)
    peer_bert(MODEL).save_pretrained(tmp_path / "hf")
    theirs.save_pretrained(tmp_path / "hf")
    assert not (tmp_path / "hf" / "vocab.txt").exists()
    source = open_source(tmp_path / "hf")
    assert source.tokenizer == tokenizer and source.added_tokens == []
    assert source.tokenizer.encode(text) == theirs(text, add_special_tokens=False).input_ids
    import_hf(source, tmp_path / "run")
    assert load_tokenizer(tmp_path / "run" / "data" / "tokenizer") == tokenizer
