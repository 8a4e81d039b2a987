"""Llama, Qwen and Mistral as `transformers` computes them: after an import the logits and every gradient, after an
export the same logits there."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from canonical_weights import from_tensors
from hugging_face_decoders import peer_decoder
from safetensors.numpy import load_file
from tiny import tiny_program

from megajax.batch import IGNORED
from megajax.config import MeshConfig
from megajax.convert.exporting import export_config, export_hf
from megajax.convert.importing import import_hf, open_source
from megajax.program.scoring import next_logits
from megajax.program.train_step import loss_and_gradients
from megajax.runs.trained import restore_params
from megajax.verify import named_leaves

pytestmark = pytest.mark.peer
torch = pytest.importorskip("torch", reason="the extra `peer` is not installed")
transformers = pytest.importorskip("transformers", reason="the extra `peer` is not installed")

LENGTH, VOCABULARY = 29, 1013
SIZES = {
    "vocab_size": VOCABULARY,
    "max_position_embeddings": LENGTH,
    "hidden_size": 48,
    "intermediate_size": 84,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.5}
BIASES = {"attention_bias": True, "mlp_bias": True}
WINDOW = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 0}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"num_key_value_heads": 3, "rope_parameters": LLAMA3, "rms_norm_eps": 1e-3}),
    "llama, all biases": ("llama", {"rope_parameters": LINEAR, "tie_word_embeddings": True, **BIASES}),
    "qwen2": ("qwen2", {"num_key_value_heads": 2, **WINDOW}),
    "qwen2, tied": ("qwen2", {"num_key_value_heads": 3, "tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"num_key_value_heads": 3, "hidden_size": 96, "head_dim": 40, "tie_word_embeddings": True}),
    "qwen3, window": ("qwen3", {"num_key_value_heads": 2, "head_dim": 8, **WINDOW}),
    "mistral": ("mistral", {"num_key_value_heads": 2, "sliding_window": 9, "head_dim": 10}),
    "mistral, no window": ("mistral", {"num_key_value_heads": 3, "sliding_window": None, "rope_parameters": LLAMA3}),
}
FEW = [
    ("llama", (1, 1, 1)),
    ("llama", (1, 1, 6)),  # each of three heads of keys and values on two devices
    ("llama, all biases", (1, 2, 2)),
    ("qwen2", (1, 1, 2)),
    ("qwen3", (1, 1, 3)),
]
MESHES = [(1, 1, 1), (1, 1, 2), (1, 1, 3), (1, 1, 6), (1, 2, 2)]


def holds(case: str, mesh: tuple[int, int, int]) -> bool:
    """Whether a tensor group of the mesh can have the heads: one of the two numbers divides the other."""
    kv_heads, tensor = CASES[case][1].get("num_key_value_heads", 6), mesh[2]
    return kv_heads % tensor == 0 or tensor % kv_heads == 0


REST = [(case, mesh) for case in CASES for mesh in MESHES if (case, mesh) not in FEW and holds(case, mesh)]


def peer_of(case: str) -> Any:
    kind, settings = CASES[case]
    return peer_decoder(kind, **SIZES | settings)


def peer_gradients(peer: Any, batch: dict[str, np.ndarray]) -> tuple[float, dict[str, np.ndarray]]:
    """Loss and gradients by name, in fp64."""
    peer = peer.double()
    logits = peer(torch.tensor(batch["tokens"], dtype=torch.long)).logits
    targets = torch.tensor(batch["targets"].ravel(), dtype=torch.long)
    loss = torch.nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), targets, ignore_index=IGNORED)
    loss.backward()
    return loss.item(), {name: parameter.grad.numpy() for name, parameter in peer.named_parameters()}


@pytest.mark.parametrize(("case", "mesh"), FEW + [pytest.param(*row, marks=pytest.mark.full) for row in REST])
def test_logits_loss_and_gradients(case: str, mesh: tuple[int, int, int], tmp_path: Path) -> None:
    """Imported: the logits within 1e-5 of the largest, the loss, and every gradient."""
    peer = peer_of(case)
    peer.save_pretrained(tmp_path / "hf")
    source = open_source(tmp_path / "hf", {"model.vocab_multiple": 48, "model.scan_layers": "true"})
    import_hf(source, tmp_path / "run")
    config = dataclasses.replace(
        source.config,
        mesh=MeshConfig(data=mesh[0], pipe=mesh[1], tensor=mesh[2]),
        train=dataclasses.replace(source.config.train, global_batch=4, microbatch=2),
    )
    program = tiny_program(config)
    params, _ = restore_params(program, tmp_path / "run", "latest")
    rng = np.random.default_rng(0)
    tokens, targets = (rng.integers(0, VOCABULARY, (4, LENGTH), np.int32) for _ in range(2))
    batch = {"tokens": tokens, "targets": np.where(targets < 100, np.int32(IGNORED), targets)}
    placed = program.put_batch(batch, program.local_rows)
    with torch.no_grad():
        logits = peer(torch.tensor(tokens, dtype=torch.long)).logits.numpy()
    for position in (0, 13, LENGTH - 1):
        ours = np.asarray(next_logits(program)(params, placed, np.int32(position)))[:, :VOCABULARY]
        np.testing.assert_allclose(ours, logits[:, position], rtol=0, atol=1e-5 * np.abs(logits).max())

    theirs_loss, theirs = peer_gradients(peer, batch)
    loss, gradients = loss_and_gradients(program)(params, placed, np.int32(0))
    assert float(loss) == pytest.approx(theirs_loss, rel=1e-6)
    expected = named_leaves(from_tensors(source.exchange.places(config.model), theirs.__getitem__, config.model))
    actual = named_leaves(program.layout.canonical_weights(jax.device_get(gradients)))
    assert expected.keys() == actual.keys()
    norms = {name: np.linalg.norm(leaf) for name, leaf in expected.items()}
    of_all = np.linalg.norm(list(norms.values()))
    for name, leaf in expected.items():
        error = np.linalg.norm(actual[name] - leaf) / max(norms[name], 1e-3 * of_all)
        assert error <= 1e-5, (name, error)


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=[pytest.mark.full] if "," in c or c == "llama" else []) for c in CASES]
)
def test_an_export_is_the_same_there(case: str, tmp_path: Path) -> None:
    """Loaded without a word as the class that it came as: the same logits, and of every tensor the same bytes."""
    peer_of(case).bfloat16().save_pretrained(tmp_path / "hf")
    peer = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", attn_implementation="eager")
    import_hf(open_source(tmp_path / "hf"), tmp_path / "run")
    export_hf(tmp_path / "run", export_config(tmp_path / "run"), tmp_path / "back", shard_bytes=100_000)
    assert len(list((tmp_path / "back").glob("*.safetensors"))) > 1
    found, told = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "back", attn_implementation="eager", output_loading_info=True
    )
    assert type(found) is type(peer) and found.dtype == torch.bfloat16
    assert not any(told[part] for part in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    tokens = torch.tensor(np.random.default_rng(0).integers(0, VOCABULARY, (2, LENGTH)))
    with torch.no_grad():
        assert torch.equal(found(tokens).logits, peer(tokens).logits)
    saved = load_file(tmp_path / "hf" / "model.safetensors")
    for name, tensor in saved.items():
        assert found.state_dict()[name].view(torch.int16).numpy().tobytes() == tensor.tobytes(), name
