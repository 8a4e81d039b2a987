"""What is imported computes what `transformers` computes, and what is exported generates there what it does here."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from drawn import drawn_state
from hugging_face import peer_model
from tiny import tiny_config, tiny_program

from megajax.batch import IGNORED
from megajax.config import MeshConfig, to_toml
from megajax.convert.exporting import export_config, export_hf
from megajax.convert.importing import import_hf, open_source
from megajax.data.tokenizers import load_tokenizer, train_tokenizer
from megajax.generation.choice import Sampling
from megajax.generation.window import continue_in_windows
from megajax.models.config import ModelConfig
from megajax.program.scoring import next_logits
from megajax.runs.checkpoint import Checkpoints
from megajax.runs.trained import restore_params

pytestmark = pytest.mark.peer
torch = pytest.importorskip("torch", reason="the extra `peer` is not installed")
transformers = pytest.importorskip("transformers", reason="the extra `peer` is not installed")

SMALL = ModelConfig(num_layers=3, hidden_size=48, num_heads=4, sequence_length=24, vocab_size=101)
GPT2 = ModelConfig(num_layers=2, hidden_size=32, num_heads=2, sequence_length=20, vocab_size=50257)
DEEP = ModelConfig(num_layers=5, hidden_size=40, num_heads=8, sequence_length=37, vocab_size=1000)
CASES = [(SMALL, (1, 2, 2)), (GPT2, (1, 2, 2)), (DEEP, (1, 1, 1))]  # a mesh changes nothing, see test_parity.py
REST = [
    (SMALL, (1, 1, 1)),
    (SMALL, (1, 1, 2)),
    (GPT2, (1, 1, 1)),
    (GPT2, (1, 1, 2)),
    (DEEP, (1, 1, 2)),
    (DEEP, (1, 2, 2)),
]


@pytest.mark.parametrize(("model", "mesh"), CASES + [pytest.param(*case, marks=pytest.mark.full) for case in REST])
def test_logits_after_import(model: ModelConfig, mesh: tuple[int, int, int], tmp_path: Path) -> None:
    """In fp32, within 1e-5 of the largest logit, at the first, a middle and the last position."""
    peer = peer_model(model)
    peer.save_pretrained(tmp_path / "hf")
    source = open_source(tmp_path / "hf")
    import_hf(source, tmp_path / "run")
    rows = dataclasses.replace(source.config.train, global_batch=4, microbatch=2)
    sizes = MeshConfig(data=mesh[0], pipe=mesh[1], tensor=mesh[2])
    program = tiny_program(dataclasses.replace(source.config, mesh=sizes, train=rows))
    params, step = restore_params(program, tmp_path / "run", "latest")
    assert step == 0
    tokens = np.random.default_rng(0).integers(0, model.vocab_size, (4, model.sequence_length), np.int32)
    expected = peer(torch.tensor(tokens, dtype=torch.long)).logits.detach().numpy()
    batch = program.put_batch({"tokens": tokens, "targets": np.full_like(tokens, IGNORED)}, program.local_rows)
    for position in (0, 11, model.sequence_length - 1):
        ours = np.asarray(next_logits(program)(params, batch, np.int32(position)))[:, : model.vocab_size]
        np.testing.assert_allclose(ours, expected[:, position], rtol=0, atol=1e-5 * np.abs(expected).max())


def test_a_gpt2_of_other_settings(tmp_path: Path) -> None:
    """Another width of the MLP, activation and epsilon, and a head of its own: the same logits, and back again."""
    settings = {"n_inner": 50, "activation_function": "gelu", "layer_norm_epsilon": 0.1, "tie_word_embeddings": False}
    peer = peer_model(SMALL, **settings)
    peer.save_pretrained(tmp_path / "hf")
    source = open_source(tmp_path / "hf")
    import_hf(source, tmp_path / "run")
    rows = dataclasses.replace(source.config.train, global_batch=4, microbatch=2)
    program = tiny_program(dataclasses.replace(source.config, train=rows))
    params, _ = restore_params(program, tmp_path / "run", "latest")
    tokens = np.random.default_rng(0).integers(0, SMALL.vocab_size, (4, SMALL.sequence_length), np.int32)
    expected = peer(torch.tensor(tokens, dtype=torch.long)).logits.detach().numpy()
    batch = program.put_batch({"tokens": tokens, "targets": np.full_like(tokens, IGNORED)}, program.local_rows)
    ours = np.asarray(next_logits(program)(params, batch, np.int32(SMALL.sequence_length - 1)))[:, : SMALL.vocab_size]
    np.testing.assert_allclose(ours, expected[:, -1], rtol=0, atol=1e-5 * np.abs(expected).max())
    export_hf(tmp_path / "run", export_config(tmp_path / "run"), tmp_path / "back")
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back", attn_implementation="eager")
    assert torch.equal(back(torch.tensor(tokens, dtype=torch.long)).logits, torch.tensor(expected))


def test_the_same_greedy_continuation_after_export(tmp_path: Path) -> None:
    """64 tokens from a checkpoint of a mesh of four devices, and the tokenizer finds the same ids."""
    config = tiny_config(
        (1, 2, 2), global_batch=1, sequence_length=72, hidden_size=48, vocab_size=300, init_std=0.2, dropout=0.0
    )
    program = tiny_program(config)
    state = program.layout.from_canonical(drawn_state(program))
    run = tmp_path / "run"
    checkpoints = Checkpoints(run, program.layout, keep=1)
    checkpoints.save(7, state)
    checkpoints.close()
    (run / "config.toml").write_text(to_toml(config))
    text = "A naïve text, with a few words of it twice: a text, with words.\n\n" * 3
    tokenizer = train_tokenizer([text], 300)
    tokenizer.save(run / "data" / "tokenizer")
    step, _ = export_hf(run, export_config(run), tmp_path / "hf")
    assert step == 7

    peer = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    for kind in (transformers.AutoTokenizer, transformers.GPT2TokenizerFast):
        theirs = kind.from_pretrained(tmp_path / "hf")
        assert theirs(text + "<|endoftext|>").input_ids == [*tokenizer.encode(text), tokenizer.end_of_text]
        assert theirs.eos_token_id == tokenizer.end_of_text
    prompt = tokenizer.encode("a text")
    generated = peer.generate(
        torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), do_sample=False, max_new_tokens=64
    )
    new = continue_in_windows(program, state.params, prompt, num_tokens=64, sampling=Sampling(0.0), ends=tokenizer.ends)
    ours = list(new)
    continuation = generated[0, len(prompt) :].tolist()
    assert len(ours) == 64 and len(set(ours)) > 4
    assert continuation == ours


def test_a_tokenizer_of_one_file(tmp_path: Path) -> None:
    """`transformers` writes tokenizer.json alone: the same ids here."""
    text = "Some text — with some words, and some words again.\n\n\tEnd." * 3
    tokenizer = train_tokenizer([text], 280)
    tokenizer.save(tmp_path / "ours")
    theirs = transformers.GPT2TokenizerFast.from_pretrained(tmp_path / "ours")
    model = dataclasses.replace(SMALL, vocab_size=300)
    peer_model(model).save_pretrained(tmp_path / "hf")
    theirs.save_pretrained(tmp_path / "hf")
    assert not (tmp_path / "hf" / "vocab.json").exists()
    source = open_source(tmp_path / "hf")
    assert source.tokenizer == tokenizer and source.added_tokens == []
    assert source.tokenizer.encode(text) == theirs(text).input_ids
    import_hf(source, tmp_path / "run")
    assert load_tokenizer(tmp_path / "run" / "data" / "tokenizer") == tokenizer
    theirs.add_special_tokens({"pad_token": "[PAD]"})
    theirs.save_pretrained(tmp_path / "hf")
    again = open_source(tmp_path / "hf")
    assert again.tokenizer is not None and again.added_tokens == []  # the model has an id for it
    assert again.tokenizer.encode(text + "[PAD]") == theirs(text + "[PAD]").input_ids
