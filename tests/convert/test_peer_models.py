"""Models as `transformers` computes them: after an import the logits, the loss and every gradient, after an export the
same logits and continuations there."""

import dataclasses
import json
import math
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from canonical_weights import exported, from_tensors, weights_of
from hugging_face import (
    BIASES,
    PEER_LLAMA3,
    PEER_SIZES,
    PEER_YARN,
    TIED,
    peer_model,
    random_tensors,
    tensors_in,
    write_model,
)
from tiny import drawn_params, full, tiny_config, tiny_program

from megajax.convert.exporting import export_config, export_hf
from megajax.convert.importing import import_hf, open_source
from megajax.core.batch import IGNORED
from megajax.core.config import MeshConfig
from megajax.core.pipeline.config import PipelineConfig
from megajax.core.program.scoring import logits
from megajax.core.program.synthetic import random_batch
from megajax.core.program.train_step import loss_and_gradients
from megajax.data.text.tokenizers import train_tokenizer
from megajax.generation.choice import Sampling
from megajax.generation.window import continue_in_windows
from megajax.runs.trained import restore_params
from megajax.settings.config import Config
from megajax.verify import named_leaves
from megajax.verify.run import drawn_state

pytestmark = pytest.mark.peer
torch = pytest.importorskip("torch", reason="the extra `peer` is not installed")
transformers = pytest.importorskip("transformers", reason="the extra `peer` is not installed")

SIZES = PEER_SIZES | {"vocab_size": 1013, "max_position_embeddings": 29, "num_hidden_layers": 3}
BERT = SIZES | {"num_attention_heads": 4, "intermediate_size": 192, "vocab_size": 101}
GPT2 = {"vocab_size": 101, "n_positions": 24, "n_embd": 48, "n_layer": 3, "n_head": 4}
OTHER = {"n_inner": 50, "activation_function": "gelu", "layer_norm_epsilon": 0.1, "tie_word_embeddings": False}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.5}
WINDOW = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 0}
GEMMA = {"num_key_value_heads": 2, "head_dim": 10, "sliding_window": 7, "query_pre_attn_scalar": 13}
GEMMA |= {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
BY_LAYER = {"full_attention": LINEAR, "sliding_attention": {"rope_type": "default", "rope_theta": 500.0}}
OLMO = {"num_key_value_heads": 2, "sliding_window": 7, "eos_token_id": None}
OLMO |= {"rope_parameters": {"full_attention": PEER_YARN, "sliding_attention": BY_LAYER["sliding_attention"]}}
LLAMA, QWEN2, QWEN3 = "LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"
CHOSEN = {"num_experts_per_tok": 3}
MODULES = {"num_nextn_predict_layers": 2}
MIXTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("MixtralForCausalLM", SIZES | CHOSEN | {"num_key_value_heads": 2, "num_local_experts": 6}),
    "mixtral, window": (
        "MixtralForCausalLM",
        SIZES | CHOSEN | {"num_key_value_heads": 3, "num_local_experts": 10, "sliding_window": 9, "head_dim": 10},
    ),
    "qwen3-moe": (
        "Qwen3MoeForCausalLM",
        SIZES
        | CHOSEN
        | {"num_key_value_heads": 2, "head_dim": 10, "num_experts": 14, "moe_intermediate_size": 30}
        | {"norm_topk_prob": True},
    ),
    "qwen3-moe, plain shares": (
        "Qwen3MoeForCausalLM",
        SIZES
        | CHOSEN
        | {"num_key_value_heads": 3, "head_dim": 8, "num_experts": 6, "moe_intermediate_size": 18, **TIED},
    ),
    "olmoe": ("OlmoeForCausalLM", SIZES | CHOSEN | {"num_key_value_heads": 3, "num_experts": 10, "eos_token_id": None}),
    "olmoe, sums of shares": (
        "OlmoeForCausalLM",
        SIZES | CHOSEN | {"num_key_value_heads": 1, "num_experts": 6, "norm_topk_prob": True, "eos_token_id": None},
    ),
}
DEEPSEEK = SIZES | CHOSEN | {"num_key_value_heads": 6, "n_routed_experts": 6, "moe_intermediate_size": 18}
DEEPSEEK |= {"qk_nope_head_dim": 7, "qk_rope_head_dim": 6, "v_head_dim": 9, "kv_lora_rank": 10, "n_shared_experts": 2}
SCALED = {"rope_type": "yarn", "rope_theta": 30.0, "factor": 3.0, "original_max_position_embeddings": 8}
MIXTURES |= {
    "deepseek-v3": (
        "DeepseekV3ForCausalLM",
        DEEPSEEK
        | {"q_lora_rank": 11, "n_group": 3, "topk_group": 2, "first_k_dense_replace": 1, "num_nextn_predict_layers": 0}
        | {"rope_parameters": SCALED | {"mscale": 0.7, "mscale_all_dim": 1.3}},
    ),
    "deepseek-v3, plain queries": (
        "DeepseekV3ForCausalLM",
        DEEPSEEK
        | {"q_lora_rank": None, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 0, "v_head_dim": 17}
        | {"norm_topk_prob": False, "rms_norm_eps": 1e-3, **TIED},
    ),
    "deepseek-v2": (
        "DeepseekV2ForCausalLM",
        DEEPSEEK
        | {"q_lora_rank": None, "topk_method": "group_limited_greedy", "n_group": 2, "topk_group": 1}
        | {"first_k_dense_replace": 2, "routed_scaling_factor": 1.7, "qk_nope_head_dim": 8},
    ),
}
MIXTURES |= {
    "gpt-oss": (
        "GptOssForCausalLM",
        SIZES
        | CHOSEN
        | {"num_key_value_heads": 3, "head_dim": 10, "num_local_experts": 6, "sliding_window": 7}
        | {"rope_parameters": PEER_YARN | {"truncate": False}, "swiglu_limit": 0.3, "eos_token_id": None},
    ),
    "gpt-oss, other clamps": (
        "GptOssForCausalLM",
        SIZES
        | CHOSEN
        | {"num_key_value_heads": 6, "head_dim": 8, "num_local_experts": 10, "swiglu_alpha": 0.9, **TIED}
        | {"layer_types": ["full_attention"] * 3, "rope_parameters": LINEAR, "eos_token_id": None},
    ),
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", GPT2),
    "gpt2, other settings": ("GPT2LMHeadModel", GPT2 | OTHER),
    "gpt2, its vocabulary": ("GPT2LMHeadModel", GPT2 | {"vocab_size": 50257, "n_embd": 32, "n_layer": 2, "n_head": 2}),
    "gpt2, five layers": ("GPT2LMHeadModel", GPT2 | {"n_embd": 40, "n_layer": 5, "n_head": 8, "n_positions": 37}),
    "llama": (LLAMA, SIZES | {"num_key_value_heads": 3, "rope_parameters": PEER_LLAMA3, "rms_norm_eps": 1e-3}),
    "llama, all biases": (LLAMA, SIZES | {"rope_parameters": LINEAR, **TIED, **BIASES}),
    "qwen2": (QWEN2, SIZES | {"num_key_value_heads": 2, **WINDOW}),
    "qwen2, tied": (QWEN2, SIZES | {"num_key_value_heads": 3, **TIED}),
    "qwen3, yarn": (
        QWEN3,
        SIZES | {"num_key_value_heads": 3, "hidden_size": 96, "head_dim": 40, "rope_parameters": PEER_YARN, **TIED},
    ),
    "qwen3, window": (QWEN3, SIZES | {"num_key_value_heads": 2, "head_dim": 8, **WINDOW}),
    "mistral": ("MistralForCausalLM", SIZES | {"num_key_value_heads": 2, "sliding_window": 9, "head_dim": 10}),
    "mistral, no window": (
        "MistralForCausalLM",
        SIZES | {"num_key_value_heads": 3, "sliding_window": None, "rope_parameters": PEER_LLAMA3},
    ),
    "qwen3, window by layer": (QWEN3, SIZES | {"num_key_value_heads": 2, **WINDOW, "max_window_layers": 2}),
    "gemma3": ("Gemma3ForCausalLM", SIZES | GEMMA),
    "gemma3, scaled": ("Gemma3ForCausalLM", SIZES | GEMMA | {"num_key_value_heads": 3, "rope_parameters": BY_LAYER}),
    "olmo3": ("Olmo3ForCausalLM", SIZES | OLMO | {"num_key_value_heads": 3}),
    "olmo3, four layers": ("Olmo3ForCausalLM", SIZES | OLMO | {"num_hidden_layers": 4}),
    "bert, pre": ("MegatronBertForPreTraining", BERT),
    "bert, post": ("BertForPreTraining", BERT),
    "bert, pre, no order": ("MegatronBertForMaskedLM", BERT),
    "bert, post, no order": ("BertForMaskedLM", BERT),
    **MIXTURES,
}
Size = tuple[int, ...]  # of a mesh: data, pipe, tensor, and maybe expert
# By default each once or twice: that a mesh changes nothing is tested elsewhere (test_parity.py).
FEW: list[tuple[str, Size]] = [
    ("gpt2", (1, 2, 2)),
    ("gpt2, other settings", (1, 1, 1)),
    ("gpt2, its vocabulary", (1, 2, 2)),
    ("gpt2, five layers", (1, 1, 1)),
    ("llama", (1, 1, 1)),
    ("llama", (1, 1, 6)),  # each of three heads of keys and values on two devices
    ("llama, all biases", (1, 2, 2)),
    ("qwen2", (1, 1, 2)),
    ("qwen3, yarn", (1, 1, 3)),
    ("qwen3, window by layer", (1, 1, 1)),
    ("gemma3", (1, 2, 2)),
    ("gemma3, scaled", (1, 1, 1)),
    ("olmo3, four layers", (1, 2, 2)),
    ("bert, pre", (1, 2, 2)),
    ("bert, post", (1, 1, 2)),
    ("mixtral", (1, 1, 1)),
    ("qwen3-moe", (1, 1, 1, 2)),
    ("olmoe, sums of shares", (1, 1, 2, 2)),
    ("gpt-oss", (1, 1, 3, 2)),
    ("deepseek-v3", (1, 1, 2, 2)),
    ("deepseek-v2", (1, 1, 1)),
]
MESHES: list[Size] = [(1, 1, 1), (1, 1, 2), (1, 1, 3), (1, 1, 6), (1, 2, 2)]
OF_MIXTURES: list[Size] = [(1, 1, 1), (1, 1, 1, 2), (1, 1, 2, 2), (1, 1, 6)]


def holds(case: str, mesh: Size) -> bool:
    """Whether a tensor group of the mesh can have the heads: it divides the queries', and one of the two numbers of
    keys' heads and devices divides the other."""
    settings, tensor = CASES[case][1], mesh[2]
    heads = settings.get("n_head") or settings["num_attention_heads"]
    kv_heads = settings.get("num_key_value_heads", heads)
    return heads % tensor == 0 and (kv_heads % tensor == 0 or tensor % kv_heads == 0)


REST = [
    (case, mesh)
    for case in CASES
    for mesh in (OF_MIXTURES if case in MIXTURES else MESHES)
    if (case, mesh) not in FEW and holds(case, mesh) and "no order" not in case
]


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
    mixtral = "Mixtral" in kind
    gate, up, down = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    stored = name.replace(".mlp.", ".block_sparse_moe.") if mixtral else name
    if ".experts." not in name or "GptOss" in kind:
        return {stored: tensor}
    parts = {down: tensor} if "down" in name else dict(zip((gate, up), np.split(tensor, 2, axis=1), strict=True))
    start = stored.rpartition(".")[0]
    return {f"{start}.{n}.{own}.weight": part[n] for own, part in parts.items() for n in range(len(part))}


@pytest.mark.parametrize(("case", "mesh"), FEW + [full(*row) for row in REST])
def test_logits_loss_and_gradients(case: str, mesh: Size, tmp_path: Path) -> None:
    """Imported: the logits within 1e-5 of the largest, the loss, and every gradient."""
    name, settings = CASES[case]
    peer = peer_model(name, **settings)
    peer.save_pretrained(tmp_path / "hf")
    source = open_source(tmp_path / "hf", {"model.vocab_multiple": 48, "model.scan_layers": "true"})
    assert not source.weights.fresh
    import_hf(source, tmp_path / "run")
    config = dataclasses.replace(
        source.config,
        mesh=MeshConfig(data=mesh[0], pipe=mesh[1], tensor=mesh[2], expert=math.prod(mesh[3:])),
        pipeline=PipelineConfig(vocabulary="split" if "bert" in case and mesh[1] > 1 else "replicated"),
        train=dataclasses.replace(source.config.train, global_batch=8, microbatch=2),
    )
    program, model = tiny_program(config), config.model
    params, step = restore_params(program, tmp_path / "run", "latest")
    assert step == 0
    batch = made_batch(config)
    placed = program.put_batch(batch, program.local_rows)
    with torch.no_grad():
        theirs = peer_logits(peer, batch)[0].numpy()
    ours = np.asarray(logits(program)(params, placed))[..., : model.vocab_size]
    there = np.arange(model.sequence_length) < batch.get("length", np.full(8, model.sequence_length))[:, None]
    np.testing.assert_allclose(ours[there], theirs[there], rtol=0, atol=1e-5 * np.abs(theirs).max())

    their_loss, their_gradients = peer_gradients(peer.double(), batch)
    loss, gradients = loss_and_gradients(program)(params, placed, np.int32(0))
    assert float(loss) == pytest.approx(their_loss, rel=1e-6)
    expected = named_leaves(from_tensors(their_gradients, model))
    actual = named_leaves(program.layout.canonical_weights(jax.device_get(gradients)))
    assert expected.keys() == actual.keys()
    norms = {name: np.linalg.norm(leaf) for name, leaf in expected.items()}
    of_all = np.linalg.norm(list(norms.values()))
    if not model.rotary:  # attention is the same whatever the key's bias is, so that its gradient is rounding alone
        norms["blocks/attention/key/bias"] = norms["blocks/attention/key/weight"]
    for name, leaf in expected.items():
        error = np.linalg.norm(actual[name] - leaf) / max(norms[name], 1e-3 * of_all)
        assert error <= 1e-5, (name, error)


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


DEFAULT = {"gpt2, other settings", "qwen2", "qwen3, yarn", "mistral", "bert, pre", "bert, post", "bert, post, no order"}
DEFAULT |= {"mixtral", "olmoe", "gemma3", "olmo3", "deepseek-v3"}


@pytest.mark.parametrize("case", [pytest.param(c, marks=[] if c in DEFAULT else [pytest.mark.full]) for c in CASES])
def test_an_export_is_the_same_there(case: str, tmp_path: Path) -> None:
    """Loaded without a word as the class that it came as: the same logits, and of every tensor the same bytes. Of a
    BERT without the order head, that and the pooler are drawn anew."""
    peer_model(CASES[case][0], **CASES[case][1]).bfloat16().save_pretrained(tmp_path / "hf")
    loops = {"attn_implementation": "eager"} | ({"experts_implementation": "eager"} if case in MIXTURES else {})
    peer = getattr(transformers, CASES[case][0]).from_pretrained(tmp_path / "hf", **loops)
    source = open_source(tmp_path / "hf")
    fresh = ["the pooler", "the order head"] if "no order" in case else []
    assert list(source.weights.fresh) == fresh
    import_hf(source, tmp_path / "run")
    back = tmp_path / "back"
    export_hf(tmp_path / "run", export_config(tmp_path / "run"), back, shard_bytes=100_000)
    assert len(list(back.glob("*.safetensors"))) > 1
    architecture = type(peer).__name__.replace("MaskedLM", "PreTraining")
    assert json.loads((back / "config.json").read_text())["architectures"] == [architecture]
    found, told = type(peer).from_pretrained(back, **loops, output_loading_info=True)
    assert found.dtype == torch.bfloat16 and not told["missing_keys"] and not told["mismatched_keys"]
    assert fresh or not told["unexpected_keys"]
    tokens = torch.tensor(np.random.default_rng(0).integers(1, peer.config.vocab_size, (2, 20)))
    with torch.no_grad():
        for ours, theirs in zip(found(tokens).to_tuple(), peer(tokens).to_tuple(), strict=True):
            assert not torch.is_tensor(ours) or torch.equal(ours, theirs)
    there = {name: tensor.view(torch.int16).numpy() for name, tensor in found.state_dict().items()}
    there |= tensors_in(back) if case in MIXTURES else {}
    for name, tensor in tensors_in(tmp_path / "hf").items():
        assert there[name].tobytes() == tensor.tobytes(), name


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
