"""Models as `transformers` computes them: after an import the logits, the loss and every gradient, after an export the
same logits and continuations there."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from canonical_weights import exported, from_tensors, weights_of
from hugging_face import (
    CLASSES,
    HYBRIDS,
    PEER_LLAMA3,
    PEER_SIZES,
    SETTINGS,
    peer_model,
    random_tensors,
    tensors_in,
    write_model,
)
from odd_models import ODD_KINDS, odd_model
from safetensors.numpy import save_file
from tiny import drawn_params, full, tiny_config, tiny_program

import megajax
from megajax.convert.exporting import export_config, export_hf
from megajax.convert.importing import import_hf, open_source
from megajax.core.batch import IGNORED
from megajax.core.config import MeshConfig
from megajax.core.pipeline.config import PipelineConfig
from megajax.core.program.scoring import logits
from megajax.core.program.train_step import loss_and_gradients
from megajax.data.synthetic import random_batch
from megajax.data.text.tokenizers import train_tokenizer
from megajax.generation.choice import Sampling
from megajax.generation.window import continue_in_windows
from megajax.runs.trained import restore_params
from megajax.settings.config import Config
from megajax.settings.validation import validate_imagined
from megajax.verify import named_leaves
from megajax.verify.run import drawn_state

pytestmark = pytest.mark.peer
torch = pytest.importorskip("torch", reason="the extra `peer` is not installed")
transformers = pytest.importorskip("transformers", reason="the extra `peer` is not installed")

SIZES = PEER_SIZES | {"max_position_embeddings": 29, "num_hidden_layers": 3}
BERT = SIZES | {"num_attention_heads": 4, "intermediate_size": 192, "vocab_size": 101}
GPT2 = {"vocab_size": 50257, "n_positions": 24, "n_embd": 32, "n_layer": 2, "n_head": 2}
LLAMA = SIZES | {"vocab_size": 1013, "num_key_value_heads": 3, "rope_parameters": PEER_LLAMA3, "rms_norm_eps": 1e-3}
MODULES = {"num_nextn_predict_layers": 2}
PIPED = {"pipe": 2, "tensor": 2}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, int]]] = {  # a class, its settings, a mesh
    "gpt2, its vocabulary": ("GPT2LMHeadModel", GPT2, PIPED),
    "llama, each of three heads of keys on two devices": ("LlamaForCausalLM", LLAMA, {"tensor": 6}),
    "bert, pre": ("MegatronBertForPreTraining", BERT, PIPED),
    "bert, post": ("BertForPreTraining", BERT, {"tensor": 2}),
    "bert, pre, no order": ("MegatronBertForMaskedLM", BERT, {}),
    "bert, post, no order": ("BertForMaskedLM", BERT, {}),
}
# Numbers of those that are drawn for the default selection: windows of some layers, groups of experts, meshes.
USUAL = {"gpt2": 4, "llama": 4, "qwen2": 2, "qwen3": 7, "mistral": 2, "gemma3_text": 3, "olmo3": 5, "mixtral": 2}
USUAL |= {"qwen3_moe": 7, "olmoe": 1, "gpt_oss": 3, "deepseek_v3": 3, "deepseek_v2": 4, "olmo_hybrid": 0}
USUAL |= {"kimi_linear": 2, "qwen3_next": 3, "qwen3_5_text": 0, "qwen3_5_moe_text": 5}
assert (*USUAL,) == ODD_KINDS
ODD = [f"{kind} {number}" for kind, number in USUAL.items()]
MORE = [f"{kind} {number}" for number in range(8) for kind in ODD_KINDS if number != USUAL[kind]]


def model_of(case: str) -> tuple[Any, str, MeshConfig]:
    """A model of transformers, its class and a mesh; which is told where a test fails."""
    if case in CASES:
        name, settings, mesh = CASES[case]
    else:
        kind, number = case.split()
        name, (settings, mesh) = CLASSES[kind], odd_model(kind, int(number))
        print(f"{name}(**{settings}) on {mesh}")
    return peer_model(name, **settings), name, MeshConfig(**mesh)


def long(array: np.ndarray) -> Any:
    return torch.tensor(array, dtype=torch.long)


def made_batch(config: Config) -> dict[str, np.ndarray]:
    """A random batch; of pairs one in which no token has the id 0, whose row gets no gradient of the embedding in
    transformers."""
    batch = random_batch(config, 0)
    if "length" in batch:
        there = np.arange(config.model.sequence_length) < batch["length"][:, None]
        assert not there.all() and (batch["order"] == IGNORED).any() and (batch["token_types"] == 1).any()
        batch["tokens"] = np.where(there & (batch["tokens"] == 0), np.int32(7), batch["tokens"])
    return batch


def peer_logits(peer: Any, batch: dict[str, np.ndarray]) -> tuple[Any, Any]:
    """Of every token, and of the order if the model has it."""
    if "length" not in batch:
        return peer(long(batch["tokens"])).logits, None
    there = np.arange(batch["tokens"].shape[1]) < batch["length"][:, None]
    found = peer(input_ids=long(batch["tokens"]), token_type_ids=long(batch["token_types"]), attention_mask=long(there))
    return found.prediction_logits, found.seq_relationship_logits


def peer_gradients(peer: Any, batch: dict[str, np.ndarray]) -> tuple[float, dict[str, np.ndarray]]:
    """Loss and gradients by name: the mean over the targets, of pairs plus the mean over the rows of two segments."""
    tokens_BTV, order_BC = peer_logits(peer, batch)
    pairs = [(tokens_BTV, batch["targets"])]
    if order_BC is not None:
        rows = torch.arange(len(tokens_BTV))[:, None]
        pairs = [(tokens_BTV[rows, long(batch["places"])], batch["targets"]), (order_BC, batch["order"])]
    total = sum(
        torch.nn.functional.cross_entropy(own.reshape(-1, own.shape[-1]), long(targets.ravel()), ignore_index=IGNORED)
        for own, targets in pairs
    )
    total.backward()
    gradients = {}
    for name, parameter in peer.named_parameters():
        gradients |= as_stored(name, parameter.grad.numpy(), type(peer).__name__)
    biases = ((name, tensor) for name, tensor in peer.named_buffers() if name.endswith("e_score_correction_bias"))
    gradients |= {name: np.zeros(tensor.shape) for name, tensor in biases}  # that are not trained by gradients
    return total.item(), gradients


def as_stored(name: str, tensor: np.ndarray, kind: str) -> dict[str, np.ndarray]:
    """A tensor of a model in memory, where experts are stacked, under its names on disk, where they are not, except in
    GPT-OSS."""
    mixtral = "Mixtral" in kind or "Kimi" in kind
    gate, up, down = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    stored = name.replace(".mlp.", ".block_sparse_moe.") if mixtral else name
    if ".experts." not in name or "GptOss" in kind:
        return {stored: tensor}
    parts = {down: tensor} if "down" in name else dict(zip((gate, up), np.split(tensor, 2, axis=1), strict=True))
    start = stored.rpartition(".")[0]
    return {f"{start}.{n}.{own}.weight": part[n] for own, part in parts.items() for n in range(len(part))}


@pytest.mark.parametrize("case", [*(name for name in CASES if "no order" not in name), *ODD, *map(full, MORE)])
def test_logits_loss_and_gradients(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Imported: the logits within 1e-5 of the largest of theirs in fp64; the loss, and every gradient within 1e-5. Some
    drawn models are badly conditioned: their logits may be 5 times as far from fp64 as theirs in fp32, and gradients,
    small sums of large numbers, within 5e-5: of three that differed by more than 1e-5, ours in fp64 were as far from
    either. Linear attention normalizes outputs that may be nearly 0: gradients of hybrids may be 5 times as far, too;
    where they differed by 7e-4, those of both in fp64 did by 9e-6."""
    peer, _, mesh = model_of(case)
    peer.save_pretrained(tmp_path / "hf")
    padded = {"model.vocab_multiple": 48, "model.scan_layers": "true"}
    source = open_source(tmp_path / "hf", padded)
    assert not source.weights.fresh
    import_hf(source, tmp_path / "run")
    config = dataclasses.replace(
        source.config,
        mesh=mesh,
        pipeline=PipelineConfig(vocabulary="split" if "bert" in case and mesh.pipe > 1 else "replicated"),
        train=dataclasses.replace(source.config.train, global_batch=8, microbatch=2),
    )
    validate_imagined(config)
    program, model = tiny_program(config), config.model
    params, step = restore_params(program, tmp_path / "run", "latest")
    assert step == 0
    batch = made_batch(config)
    placed = program.put_batch(batch, program.local_rows)
    hybrid = case.startswith(HYBRIDS)
    rounded_gradients = peer_gradients(peer, batch)[1] if hybrid else {}
    peer.zero_grad()
    with torch.no_grad():
        rounded = peer_logits(peer, batch)[0].numpy()
        for owner, name in (torch, "float32"), (torch, "float"), (torch.Tensor, "float"):  # which its layers ask for
            monkeypatch.setattr(owner, name, owner.double)
        theirs = peer_logits(peer.double(), batch)[0].numpy()
    ours = np.asarray(logits(program)(params, placed))[..., : model.vocab_size]
    there = np.arange(model.sequence_length) < batch.get("length", np.full(8, model.sequence_length))[:, None]
    of_drawn = 0 if case in CASES else 5 * np.abs(rounded - theirs)[there].max()
    limit = max(1e-5 * np.abs(theirs).max(), of_drawn)
    np.testing.assert_allclose(ours[there], theirs[there], rtol=0, atol=limit)

    their_loss, their_gradients = peer_gradients(peer, batch)
    loss, gradients = loss_and_gradients(program)(params, placed, np.int32(0))
    assert float(loss) == pytest.approx(their_loss, rel=1e-6)

    def leaves(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        if not hybrid:
            return named_leaves(from_tensors(tensors, model))
        # In memory they have other names and lengths, which an import understands.
        save_file({n: each.astype(np.float32) for n, each in tensors.items()}, tmp_path / "hf" / "model.safetensors")
        return named_leaves(weights_of(open_source(tmp_path / "hf", padded)))

    expected, of_rounded = leaves(their_gradients), leaves(rounded_gradients) if hybrid else {}
    actual = named_leaves(program.layout.canonical_weights(jax.device_get(gradients)))
    assert expected.keys() == actual.keys()
    norms = {name: np.linalg.norm(leaf) for name, leaf in expected.items()}
    of_all = np.linalg.norm(list(norms.values()))
    # Attention is the same whatever the key's bias is, so that its gradient is rounding alone.
    if model.positions == "learned":
        norms["blocks/attention/key/bias"] = norms["blocks/attention/key/weight"]
    for name, leaf in expected.items():
        error, rounding = (np.linalg.norm(other[name] - leaf) for other in (actual, of_rounded or expected))
        least = (1e-5 if case in CASES else 5e-5) * max(norms[name], 1e-3 * of_all)
        assert error <= max(least, 5 * rounding), (name, error / least, rounding / least)


@pytest.mark.parametrize("kind", HYBRIDS)
def test_packed_documents_of_hybrids(kind: str, tmp_path: Path) -> None:
    """Theirs one by one, which refuses packed ones; half of the tokens are the same."""
    peer = peer_model(CLASSES[kind], **SETTINGS[kind])
    peer.save_pretrained(tmp_path)
    source = open_source(tmp_path, {"data.reset_attention": True, "train.global_batch": 2, "train.microbatch": 2})
    program = tiny_program(source.config)
    batch = random_batch(source.config, 0)
    batch["tokens"][:, ::2] = 7
    state = program.layout.from_canonical(program.layout.begin(weights_of(source)))
    ours = np.asarray(logits(program)(state.params, program.put_batch(batch, program.local_rows)))
    documents = 0
    for row, positions_T in enumerate(batch["positions"]):
        for document in np.split(np.arange(len(positions_T)), np.flatnonzero(positions_T == 0)[1:]):
            with torch.no_grad():
                theirs = peer(long(batch["tokens"][row, document])[None]).logits[0].numpy()
            found = ours[row, document, : theirs.shape[-1]]
            np.testing.assert_allclose(found, theirs, rtol=0, atol=1e-5 * np.abs(theirs).max())
            documents += len(document) > 1
    assert documents > 3


def test_prediction_modules(tmp_path: Path) -> None:
    """DeepSeek-V3's, which transformers runs to draft tokens: every gradient of the losses of a chain of two."""
    from transformers.modeling_layers import MtpModel

    write_model(tmp_path, "deepseek_v3", random_tensors("deepseek_v3", **MODULES), **MODULES)
    source = open_source(tmp_path, {"model.vocab_multiple": 8, "train.global_batch": 4, "train.microbatch": 2})
    program = tiny_program(source.config)
    batch, params = made_batch(source.config), drawn_params(program, weights_of(source))
    _, gradients = loss_and_gradients(program)(params, program.put_batch(batch, program.local_rows), np.int32(0))

    loops = {"attn_implementation": "eager", "experts_implementation": "eager"}
    peer = transformers.DeepseekV3ForCausalLM.from_pretrained(tmp_path, **loops)
    peer._keys_to_ignore_on_load_unexpected = [r"model\.layers\.[23]\..*"]
    modules = MtpModel.from_pretrained(peer)
    tokens_BT, targets_BT, place_1T = long(batch["tokens"]), long(batch["targets"]), torch.arange(24)[None]
    x_BTD, losses = peer.model(tokens_BT).last_hidden_state, []
    for number in range(3):
        if number:
            given = x_BTD[:, :-1], place_1T[:, number:], None, tokens_BT[:, number:]
            x_BTD = modules.forward_layer(number - 1, *given)
        logits_NV, targets_N = peer.lm_head(x_BTD).flatten(0, 1), targets_BT[:, number:].flatten()
        losses.append(torch.nn.functional.cross_entropy(logits_NV, targets_N, ignore_index=IGNORED))
    (losses[0] + 0.3 * sum(losses[1:]) / 2).backward()
    theirs = dict[str, np.ndarray]()
    for name, tensor in [*peer.named_parameters(), *modules.layers.named_parameters()]:
        theirs |= as_stored(of_module(name), tensor.grad.numpy(), "DeepseekV3")
    for name, tensor in [*peer.named_buffers(), *modules.layers.named_buffers()]:
        theirs[of_module(name)] = np.zeros(tensor.shape)  # what chooses experts is not trained by gradients
    expected = named_leaves(from_tensors(theirs, source.config.model))
    actual = named_leaves(program.layout.canonical_weights(jax.device_get(gradients)))
    of_all = np.linalg.norm([np.linalg.norm(leaf) for leaf in expected.values()])
    for name, leaf in expected.items():
        assert np.linalg.norm(actual[name] - leaf) <= 1e-5 * max(np.linalg.norm(leaf), 1e-3 * of_all), name


def of_module(name: str) -> str:
    """The name on disk of a tensor of transformers' modules."""
    found = re.match(r"(\d)\.(?:mtp_block\.)?(.*)", name)
    return f"model.layers.{2 + int(found[1])}.{found[2]}".replace("post_norm", "shared_head.norm") if found else name


EXPORTED = ["bert, pre", "bert, post", "bert, post, no order", *ODD]


@pytest.mark.parametrize("case", [*EXPORTED, *map(full, ["bert, pre, no order", *MORE[: len(ODD)]])])
def test_an_export_is_the_same_there(case: str, tmp_path: Path) -> None:
    """Loaded without a word as the class that it came as: the same logits, and of every tensor the same bytes. Of a
    BERT without the order head, that and the pooler are drawn anew."""
    peer, name, _ = model_of(case)
    peer.bfloat16().save_pretrained(tmp_path / "hf")
    mixture = hasattr(peer.config, "num_experts_per_tok")
    loops = {"attn_implementation": "eager"} | ({"experts_implementation": "eager"} if mixture else {})
    peer = getattr(transformers, name).from_pretrained(tmp_path / "hf", **loops)
    source = open_source(tmp_path / "hf")
    fresh = ["the pooler", "the order head"] if "no order" in case else []
    assert list(source.weights.fresh) == fresh
    import_hf(source, tmp_path / "run")
    back = tmp_path / "back"
    export_hf(tmp_path / "run", export_config(tmp_path / "run"), back, shard_bytes=2_000)
    assert len(list(back.glob("*.safetensors"))) > 1
    architecture = type(peer).__name__.replace("MaskedLM", "PreTraining")
    assert json.loads((back / "config.json").read_text())["architectures"] == [architecture]
    found, told = type(peer).from_pretrained(back, **loops, output_loading_info=True)
    assert found.dtype == torch.bfloat16 and not told["missing_keys"] and not told["mismatched_keys"]
    assert fresh or not told["unexpected_keys"]
    shape = 2, min(20, peer.config.max_position_embeddings)
    tokens = torch.tensor(np.random.default_rng(0).integers(1, peer.config.vocab_size, shape))
    with torch.no_grad():
        for ours, theirs in zip(found(tokens).to_tuple(), peer(tokens).to_tuple(), strict=True):
            assert not torch.is_tensor(ours) or torch.equal(ours, theirs)
    there = {name: tensor.view(torch.int16).numpy() for name, tensor in found.state_dict().items()}
    there |= tensors_in(back) if mixture else {}
    if name in map(CLASSES.get, HYBRIDS):  # whose tensors have other names and lengths on disk
        found.save_pretrained(tmp_path / "again")
        there = tensors_in(tmp_path / "again")
    peer.save_pretrained(tmp_path / "theirs")  # with what the class keeps in fp32
    for name, tensor in tensors_in(tmp_path / "theirs").items():
        assert there[name].tobytes() == tensor.tobytes(), name


@pytest.mark.parametrize("kind", CLASSES)
def test_what_the_class_keeps_in_fp32(kind: str, tmp_path: Path) -> None:
    exchange = open_source(write_model(tmp_path, kind)).exchange
    for dtype, theirs in ("bf16", torch.bfloat16), ("fp16", torch.float16):
        getattr(transformers, CLASSES[kind]).from_pretrained(tmp_path, dtype=theirs).save_pretrained(tmp_path / dtype)
        for name, tensor in tensors_in(tmp_path / dtype).items():
            assert exchange.dtype(name, dtype) == ("fp32" if tensor.dtype == np.float32 else dtype), name


def test_the_same_greedy_continuation_after_export(tmp_path: Path) -> None:
    """64 tokens from a checkpoint of a mesh of four devices, and the tokenizer finds the same ids."""
    config = tiny_config(
        (1, 2, 2), global_batch=1, sequence_length=72, hidden_size=48, vocab_size=300, init_std=0.2, dropout=0.0
    )
    program = tiny_program(config)
    state = program.layout.from_canonical(drawn_state(program))
    text = "A naïve text, with a few words of it twice: a text, with words.\n\n" * 3
    tokenizer = train_tokenizer([text], 300)
    there = exported(tmp_path, program, config, state, tokenizer)
    for kind in (transformers.AutoTokenizer, transformers.GPT2TokenizerFast):
        theirs = kind.from_pretrained(there)
        assert theirs(text + "<|endoftext|>").input_ids == [*tokenizer.encode(text), tokenizer.end_of_text]
        assert theirs.eos_token_id == tokenizer.end_of_text
    prompt = tokenizer.encode("a text")
    peer = transformers.AutoModelForCausalLM.from_pretrained(there)
    generated = peer.generate(
        torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), do_sample=False, max_new_tokens=64
    )
    new = continue_in_windows(program, state.params, prompt, num_tokens=64, sampling=Sampling(0.0), ends=tokenizer.ends)
    ours = list(new)
    assert len(ours) == 64 and len(set(ours)) > 4
    assert generated[0, len(prompt) :].tolist() == ours


def test_what_was_trained_on_a_mesh_is_the_same_there(tmp_path: Path) -> None:
    """Imported, trained on data 2 x tensor 2, exported: the logits and the loss of the trained model."""
    settings = SETTINGS["gemma3_text"] | {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5}
    peer_model(CLASSES["gemma3_text"], **settings).save_pretrained(tmp_path / "hf")
    import_hf(open_source(tmp_path / "hf"), tmp_path / "imported")
    ids = np.random.default_rng(0).integers(0, settings["vocab_size"], (8, settings["max_position_embeddings"] + 1))
    options = {"mesh.data": 2, "mesh.tensor": 2, "train.microbatch": 4}
    options |= {"optimizer.learning_rate": 0.01, "optimizer.warmup_fraction": 0.0}
    model = megajax.init(megajax.load_preset(tmp_path / "imported" / "config.toml", options))
    losses, before = dict[int, float](), model.loss(ids)
    model.train(4, tmp_path / "run", data=ids, on_step=lambda step, figures: losses.update({step: figures["loss"]}))
    trained = model.loss(ids)
    assert losses[1] == pytest.approx(before, rel=1e-5) and trained < before - 0.1
    export_hf(tmp_path / "run", export_config(tmp_path / "run"), tmp_path / "back")
    found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back", attn_implementation="eager")
    assert type(found).__name__ == CLASSES["gemma3_text"]
    with torch.no_grad():
        theirs = found(long(ids[:, :-1])).logits
    ours, atol = np.asarray(model.logits(ids[:, :-1])), 1e-5 * float(theirs.abs().max())
    np.testing.assert_allclose(ours, theirs.numpy(), rtol=0, atol=atol)
    expected = torch.nn.functional.cross_entropy(theirs.flatten(0, 1), long(ids[:, 1:].ravel()))
    assert trained == pytest.approx(expected.item(), rel=1e-6)
