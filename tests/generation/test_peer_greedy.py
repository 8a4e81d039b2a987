"""Greedy continuations by the cache are those of `transformers` in fp64: grouped heads, rotary positions, windows."""

import types
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from hugging_face import CLASSES, PEER_LLAMA3, PEER_SIZES, PEER_YARN, SETTINGS, peer_model
from tiny import full, tiny_program

from megajax.convert.importing import import_hf, open_source
from megajax.generation.choice import Sampling, choose, gumbel_noise, prompt_bits, seen_tokens
from megajax.generation.decoder import Decoder
from megajax.runs.trained import restore_params

pytestmark = pytest.mark.peer
torch = pytest.importorskip("torch", reason="the extra `peer` is not installed")
pytest.importorskip("transformers", reason="the extra `peer` is not installed")

TOKENS, VOCABULARY = 64, 211
SIZES = PEER_SIZES | {"vocab_size": VOCABULARY, "max_position_embeddings": 80}
SIZES_OF_ALL = dict(SIZES)
SIZES |= {"num_hidden_layers": 2, "num_key_value_heads": 2, "eos_token_id": None, "bos_token_id": None}
WINDOW = {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 0}
CASES: dict[str, dict[str, Any]] = {
    "llama": {"rope_parameters": PEER_LLAMA3},
    "qwen2": WINDOW,
    "qwen3": {"head_dim": 40, "rope_parameters": PEER_YARN},
    "mistral": {"sliding_window": 11},
    "gemma3_text": {"head_dim": 10, "sliding_window": 9, "sliding_window_pattern": 2, "tie_word_embeddings": False},
    "mixtral": {"num_local_experts": 6, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 10, "num_experts_per_tok": 3, "moe_intermediate_size": 26, "head_dim": 40},
    "olmoe": {"num_experts": 6, "num_experts_per_tok": 3},
    "gpt_oss": {"num_local_experts": 6, "num_experts_per_tok": 3, "head_dim": 10, "sliding_window": 9}
    | {"rope_parameters": PEER_YARN | {"truncate": False}, "swiglu_limit": 0.5},
    "qwen3_next": SETTINGS["qwen3_next"] | SIZES_OF_ALL,
    "deepseek_v3": SETTINGS["deepseek_v3"]
    | {"num_key_value_heads": 6, "rope_parameters": PEER_YARN | {"mscale": 1.0, "mscale_all_dim": 0.8}, **SIZES_OF_ALL},
}
PROMPTS = [[5], [7, 3, 200, 41, 5, 5, 9, 17, 1, 2, 77, 12], [3, 1, 4, 1]]
TIE = 1e-5


def beside(peer: Any, prompt: list[int], ours: list[int]) -> list[tuple[int, float]]:
    """Where ours is not the token of the highest logit there, after our own tokens, and how far below it."""
    ids = torch.tensor([prompt + ours])
    with torch.no_grad():
        logits_TV = peer(ids).logits[0, len(prompt) - 1 : -1].numpy()
    below_T = logits_TV.max(axis=-1) - logits_TV[np.arange(len(ours)), ours]
    return [(int(place), float(below_T[place])) for place in np.flatnonzero(below_T > 0)]


@pytest.mark.parametrize("top_k", [0, 20])
@pytest.mark.parametrize("top_p", [1.0, 0.8])
@pytest.mark.parametrize("min_p", [0.0, 0.05])
@pytest.mark.parametrize("penalty", [1.0, 1.3, 0.8])
@pytest.mark.parametrize("temperature", [0.6, 2.0])
def test_the_processors_of_transformers(
    top_k: int, top_p: float, min_p: float, penalty: float, temperature: float
) -> None:
    """In the order in which `generate` has them, without differences of what may be chosen or how probable it is: the
    choice is the highest of their scores plus our noise."""
    from transformers import GenerationConfig, GenerationMixin

    rows, position = 40, np.arange(40, dtype=np.int32)
    values = np.random.default_rng(3).normal(0, 3, (rows, VOCABULARY)).astype(np.float32)
    ids = np.random.default_rng(4).integers(0, VOCABULARY, (rows, 30))
    options = {"top_k": top_k, "top_p": top_p, "min_p": min_p or None, "repetition_penalty": penalty}
    config = GenerationConfig(do_sample=True, temperature=temperature, **options)
    model = object.__new__(GenerationMixin)
    model.config = types.SimpleNamespace(is_encoder_decoder=False)
    processors = model._get_logits_processor(config, input_ids_seq_length=30)
    scores = processors(torch.tensor(ids), torch.tensor(values)).numpy()
    sampling = Sampling(temperature, top_k, top_p, 1, min_p, penalty)
    bits = prompt_bits([[row] for row in range(rows)], 1)
    seen = seen_tokens(ids.astype(np.int32), np.full(rows, 30, np.int32), VOCABULARY)
    chosen = choose(values, bits, position, sampling, seen if sampling.penalizes else None)
    noise = gumbel_noise(bits.fold(position), VOCABULARY)
    assert np.array_equal(chosen, (scores + np.asarray(noise)).argmax(axis=1))


@pytest.mark.parametrize(
    ("kind", "tensor", "expert"),
    [("qwen3", 6, 1), ("gemma3_text", 2, 1), ("olmoe", 2, 2), ("deepseek_v3", 2, 1), ("gpt_oss", 2, 3)]
    + [full("qwen3_next", 2, 1)]
    + [full(kind, tensor, 1) for kind in ("llama", "qwen2", "mistral") for tensor in (1, 2)]
    + [full(kind, tensor, expert) for kind in ("mixtral", "qwen3_moe") for tensor, expert in ((1, 1), (1, 2), (2, 2))],
)
def test_64_greedy_tokens(kind: str, tensor: int, expert: int, tmp_path: Path) -> None:
    """Of prompts of several lengths at once; a tensor group of six holds each of the two heads of keys three times."""
    peer = peer_model(CLASSES[kind], **SIZES | CASES[kind])
    peer.save_pretrained(tmp_path / "hf")
    overrides = {"precision": "fp64", "model.vocab_multiple": 6, "mesh.tensor": tensor, "mesh.expert": expert}
    with jax.enable_x64(True):
        source = open_source(tmp_path / "hf", overrides)
        import_hf(source, tmp_path / "run")
        program = tiny_program(source.config)
        params, _ = restore_params(program, tmp_path / "run", "latest")
        found: dict[int, list[int]] = {number: [] for number in range(len(PROMPTS))}
        for piece in Decoder(program, params, Sampling(0.0), ()).stream(PROMPTS, max_tokens=TOKENS, batch=3):
            found[piece.number] += piece.ids
    assert len({token for ids in found.values() for token in ids}) > 10
    peer = peer.double()
    for prompt, ours in zip(PROMPTS, found.values(), strict=True):
        assert len(ours) == TOKENS
        differing = beside(peer, prompt, ours)
        assert all(below < TIE for _, below in differing), differing
