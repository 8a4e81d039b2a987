"""Adapters of `peft`, merged by an import: the logits that `peft` computes, for every option that changes them."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hugging_face import CLASSES, SETTINGS, class_of, peer_model
from safetensors.numpy import save_file
from tiny import user_error

from megajax.convert.adapter_options import READ, WITHOUT_EFFECT
from megajax.convert.importing import ImportedModel, open_source

pytestmark = [pytest.mark.peer, pytest.mark.filterwarnings("ignore")]  # peft has many to give
torch = pytest.importorskip("torch", reason="the extra `peer` is not installed")
transformers = pytest.importorskip("transformers", reason="the extra `peer` is not installed")
peft = pytest.importorskip("peft", reason="the extra `peer` is not installed")

QV = {"target_modules": ["q_proj", "v_proj"]}
EAGER = {"attn_implementation": "eager", "experts_implementation": "eager"}
TIED = {"tie_word_embeddings": True}
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
ROUTER = {"use_rslora": True, "rank_pattern": {"mlp.gate.weight": 3}}
USUAL = {"target_modules": ["gate_proj", "up_proj", "down_proj", "q_proj"], "rank_pattern": {"q_proj": 3}}
COOKBOOK = {"target_modules": "all-linear", "target_parameters": [f"1.{name}" for name in EXPERTS]}
Case = tuple[str, dict[str, Any], dict[str, Any]]  # the model, fields of its config.json, options of peft
CASES: dict[str, Case] = {
    "rank and alpha": ("llama", {}, QV | {"r": 3, "lora_alpha": 5}),
    "rslora": ("llama", {}, QV | {"use_rslora": True, "r": 4}),
    "patterns": (
        "llama",
        {},
        QV
        | {"rank_pattern": {"q_proj": 5, r".*\.1\.self_attn\.v_proj": 2}, "alpha_pattern": {"layers.0.*v_proj": 40}}
        | {"use_rslora": True},
    ),
    "dora": ("qwen2", {}, QV | {"use_dora": True, "bias": "lora_only"}),
    "a regular expression": ("qwen3", {}, {"target_modules": r".*\.1\..*(up|down)_proj"}),
    "all linear": ("mistral", {"sliding_window": 5}, {"target_modules": "all-linear", "exclude_modules": ["k_proj"]}),
    "some layers": ("llama", {}, QV | {"layers_to_transform": [1], "layers_pattern": "layers"}),
    "conv": ("gpt2", {}, {"target_modules": ["c_attn", "c_proj", "c_fc"], "lora_bias": True, "bias": "all"}),
    "conv, dora": ("gpt2", {}, {"target_modules": ["attn.c_proj", "c_attn"], "use_dora": True, "fan_in_fan_out": True}),
    "conv, without the head": ("gpt2", {"architectures": ["GPT2Model"]}, {"target_modules": ["c_attn"]}),
    "embeddings": ("llama", {}, {"target_modules": ["embed_tokens", "lm_head"], "use_dora": True}),
    "embedding, tied": ("llama", TIED, {"target_modules": ["embed_tokens", "q_proj"]}),
    "embeddings, tied again": ("llama", TIED, {"target_modules": ["embed_tokens"], "ensure_weight_tying": True}),
    "saved": ("llama", {}, QV | {"modules_to_save": ["lm_head", "input_layernorm"]}),
    "saved, tied": ("gpt2", {}, {"target_modules": ["c_fc"], "modules_to_save": ["lm_head"]}),
    "saved, tied again": ("llama", TIED, QV | {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}),
    "tokens": ("llama", {}, QV | {"trainable_token_indices": {"embed_tokens": [7, 3], "lm_head": [9]}}),
    "tokens, tied": ("qwen3", TIED, QV | {"trainable_token_indices": [4, 100]}),
    "fused experts": ("qwen3_moe", {}, {"target_modules": ["o_proj"], "target_parameters": EXPERTS}),
    "some experts, router": ("mixtral", {}, ROUTER | {"target_parameters": [EXPERTS[1], "mlp.gate.weight"]}),
    "usual targets": ("mixtral", {}, {"target_modules": ["q_proj", "gate", "w1", "w2", "w3"]}),  # peft writes others
    **{f"usual targets, {kind}": (kind, {}, USUAL) for kind in ("qwen3_moe", "olmoe", "deepseek_v3")},
    "all linear, with experts": ("deepseek_v3", {}, {"target_modules": "all-linear"}),
    "as in OpenAI's cookbook": ("gpt_oss", {}, COOKBOOK),
    "classes": ("bert", {}, {"target_modules": ["query", "dense"], "task_type": "SEQ_CLS", "bias": "all"}),
    **{f"init {name}": ("llama", {}, QV | {"init_lora_weights": name}) for name in ("orthogonal", "mica", "gaussian")},
}


def adapted(folder: Path, case: Case) -> Any:
    """Write a model, and an adapter with random tensors to `folder / "adapter"`; the model with it, as loaded there."""
    kind, fields, options = case
    fields = SETTINGS[kind] | fields
    name = class_of(kind, "classes") if options.get("task_type") else CLASSES[kind]
    peer = peer_model(name, **{k: value for k, value in fields.items() if k != "architectures"})
    stored = peer.transformer if "architectures" in fields else peer
    stored.save_pretrained(folder / "hf")
    torch.manual_seed(1)
    tuned = peft.get_peft_model(peer, peft.LoraConfig(**{"r": 2} | options))
    with torch.no_grad():
        for parameter in tuned.parameters():
            if parameter.requires_grad:
                parameter.add_(0.2 * torch.randn_like(parameter))
    tuned.save_pretrained(folder / "adapter")
    again = type(peer).from_pretrained(folder / "hf", **EAGER)
    return peft.PeftModel.from_pretrained(again, folder / "adapter").eval()


def loaded(source: ImportedModel, folder: Path) -> Any:
    """What was imported, as a model of transformers."""
    model = source.config.model
    folder.mkdir()
    config = source.exchange.settings(model, (), None)["config.json"]
    (folder / "config.json").write_text(json.dumps(config))
    shapes = source.exchange.places(model).shapes(model)
    save_file({name: np.ascontiguousarray(source.weights.read(name)) for name in shapes}, folder / "model.safetensors")
    return getattr(transformers, config["architectures"][0]).from_pretrained(folder, **EAGER).eval()


@pytest.mark.parametrize("name", CASES)
def test_the_logits_of_peft(name: str, tmp_path: Path) -> None:
    """Beside the model and from its own folder."""
    theirs = adapted(tmp_path, CASES[name])
    source = open_source(tmp_path / "hf", None, tmp_path / "adapter")
    tokens = torch.arange(1, 21)[None]
    with torch.no_grad():
        expected = theirs(tokens).logits
        found = loaded(source, tmp_path / "merged")(tokens).logits
        with theirs.disable_adapter():
            assert not torch.allclose(theirs(tokens).logits, expected, atol=0.01)
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-5 * float(expected.abs().max()))


def test_options_that_the_tensors_exceed(tmp_path: Path) -> None:
    """Tensors of modules that the options do not select, which peft leaves alone, are refused."""
    adapted(tmp_path, CASES["rank and alpha"])
    file, module = tmp_path / "adapter" / "adapter_config.json", "base_model.model.model.layers.0.self_attn.q_proj"
    content = json.loads(file.read_text())
    for change in {"layers_to_transform": 1}, {"target_modules": ["v_proj"]}, {"exclude_modules": r".*\.0\..*q_proj"}:
        file.write_text(json.dumps(content | change))
        base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", **EAGER)
        assert not hasattr(peft.PeftModel.from_pretrained(base, file.parent).get_submodule(module), "lora_A")
        line = user_error(open_source, tmp_path / "hf", None, file.parent)
        assert f"holds {module}.lora_A.weight; valid: only what adapter_config.json selects" in line


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe", "olmoe"])
def test_experts_as_they_are_in_memory(kind: str, tmp_path: Path) -> None:
    peer = peer_model(CLASSES[kind], **SETTINGS[kind])
    peer.save_pretrained(tmp_path / "disk")
    peer.save_pretrained(tmp_path / "memory", save_original_format=False)
    disk, memory = (open_source(tmp_path / name) for name in ("disk", "memory"))
    model = disk.config.model
    for name in disk.exchange.places(model).shapes(model):
        assert np.array_equal(disk.weights.read(name), memory.weights.read(name)), name


def test_every_option_is_known(tmp_path: Path) -> None:
    """Read, without effect, or refused by name."""
    fields = {each.name for each in dataclasses.fields(peft.LoraConfig)}
    assert fields >= READ | WITHOUT_EFFECT
    adapted(tmp_path, CASES["rank and alpha"])
    file = tmp_path / "adapter" / "adapter_config.json"
    content = json.loads(file.read_text())
    refused = content.keys() - READ - WITHOUT_EFFECT
    assert refused == {
        *("use_qalora", "layer_replication", "alora_invocation_tokens", "use_bdlora", "arrow_config"),
        *("kasa_config", "monteclora_config"),
    }
    for name in refused:
        file.write_text(json.dumps(content | {name: [1]}))
        assert f"adapter_config.json: {name} is [1]; valid: null" in user_error(
            open_source, tmp_path / "hf", None, tmp_path / "adapter"
        )
