"""Every field of config.json that changes the numbers, and the class that a model is exported as. Where weights
are: `test_peer_models.py`."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from canonical_weights import back_to_tensors
from hugging_face import (
    BIASES,
    CLASSES,
    LLAMA3,
    ROTARY,
    SETTINGS,
    SMALL,
    TIED,
    YARN,
    assert_same,
    random_tensors,
    refusal,
    write_model,
)
from tiny import GPT_OSS, tiny_config, tiny_program, user_error

from megajax.convert.families import exchange_for
from megajax.convert.importing import import_hf, open_source
from megajax.convert.weights import TensorPlace, whole_model
from megajax.core.models.config import ModelConfig
from megajax.data.tasks.registry import TASKS, TaskConfig
from megajax.runs.init import first_state
from megajax.settings.presets import load_preset, resolve

WINDOW = {"sliding_window": 5, "use_sliding_window": True}
BY_LAYER = {"full_attention": {"rope_type": "llama3", **LLAMA3}, "sliding_attention": {"type": "default"}}
OLDER = {"rope_local_base_freq": 9, "original_max_position_embeddings": 7, "rope_parameters": BY_LAYER}

READ: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("gpt2", {"n_inner": 96}, {"mlp_size": 96, "norm_epsilon": 1e-5, "tied_embedding": True}),
    ("llama", {}, {"bias": "none", "norm_epsilon": 1e-6, "rope_theta": 1e4, "sliding_window": 0, "dropout": 0.0}),
    ("llama", {"rms_norm_eps": 1e-5, **TIED}, {"norm_epsilon": 1e-5, "tied_embedding": True}),
    ("llama", BIASES, {"bias": "all"}),
    ("llama", {"head_dim": 4}, {"head_size": 4}),
    ("llama", {"head_dim": None, "num_key_value_heads": None}, {"head_size": 4, "num_kv_heads": 6}),
    ("llama", {"rope_theta": 5e5}, {"rope_theta": 5e5, "rope_scaling": "none"}),
    ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 7}, "rope_theta": 8}, {"rope_theta": 7.0}),
    ("llama", {"rope_scaling": {"type": "linear", "factor": 2}}, {"rope_scaling": "linear", "rope_factor": 2.0}),
    (
        "mistral",
        {"rope_parameters": {"rope_type": "llama3", **LLAMA3, "original_max_position_embeddings": 9}},
        {"rope_scaling": "llama3", "rope_factor": 8.0, "rope_high_frequency": 4.0, "rope_original_length": 9},
    ),
    ("llama", {"rope_scaling": {"rope_type": "llama3", **LLAMA3}}, {"rope_original_length": 24}),
    (
        "qwen2",
        {"rope_scaling": {"type": "yarn", "factor": 4, "finetuned": True, "attention_factor": None}},
        {"rope_scaling": "yarn", "rope_factor": 4.0, "rope_original_length": 24, "rope_attention_factor": 0.0}
        | {"rope_beta_slow": 1.0, "rope_beta_fast": 32.0, "rope_truncate": True},
    ),
    (
        "llama",
        {"rope_parameters": YARN | {"rope_theta": 15e4, "beta_fast": 1, "mscale": 1, "mscale_all_dim": 0.5}},
        {"rope_beta_fast": 1.0, "rope_original_length": 8, "rope_theta": 15e4}
        | {"rope_attention_factor": (1 + math.log(3) / 10) / (1 + math.log(3) / 20)},
    ),
    (
        "qwen3",
        {"rope_scaling": YARN | {"beta_slow": 0.5, "truncate": False, "attention_factor": 1.3, "mscale": 2}},
        {"rope_beta_slow": 0.5, "rope_truncate": False, "rope_attention_factor": 1.3},
    ),
    ("mistral", {}, {"sliding_window": 4096, "bias": "none"}),
    ("mistral", {"sliding_window": None}, {"sliding_window": 0}),
    ("mistral", {"sliding_window": 5, "layer_types": ["sliding_attention"] * 2}, {"sliding_window": 5}),
    ("qwen2", {"sliding_window": 5}, {"sliding_window": 0, "bias": "query-key-value", "query_key_norm": False}),
    ("qwen2", WINDOW | {"max_window_layers": 0}, {"sliding_window": 5}),
    ("qwen2", WINDOW, {"sliding_window": 0}),  # from layer 28 on
    ("qwen2", WINDOW | {"max_window_layers": 1}, {"sliding_window": 5, "window_layers": "0,1,1"}),
    ("qwen3", WINDOW | {"max_window_layers": 2}, {"sliding_window": 0}),
    (
        "gemma3_text",
        {"num_hidden_layers": 8},
        {"sliding_window": 4096, "window_layers": "5,1", "window_rope_theta": 1e4, "rope_theta": 1e6}
        | {"query_scalar": 256, "tied_embedding": True, "norm": "rmsnorm-1p", "layer_order": "sandwich"},
    ),
    (
        "gemma3_text",
        {"sliding_window_pattern": 2, "rope_scaling": {"rope_type": "linear", "factor": 8}, "rope_local_base_freq": 7},
        {"window_layers": "1,1", "window_rope_theta": 7.0, "rope_scaling": "linear", "rope_factor": 8.0},
    ),
    (
        "olmo3",
        {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_hidden_layers": 4},
        {"window_layers": "1,1", "window_rope_theta": 0.0, "rope_theta": 5e5, "layer_order": "reordered"},
    ),
    ("olmo3", {"sliding_window": None}, {"sliding_window": 0, "window_layers": "all", "window_rope_theta": 0.0}),
    (
        "olmo3",
        {"rope_parameters": dict.fromkeys(("full_attention", "sliding_attention"), YARN)},
        {"window_layers": "all", "window_rope_theta": 0.0, "rope_scaling": "yarn", "rope_theta": 5e5},
    ),
    (
        "olmo_hybrid",
        {"num_hidden_layers": 6, "layer_types": None, "linear_allow_neg_eigval": False, "rope_theta": None},
        {"linear_layers": "3,1", "positions": "none", "layer_order": "pre-reordered", "linear_write": 1.0}
        | {"linear_norm_epsilon": 1e-5, "norm_epsilon": 1e-6, "linear_heads": 4, "linear_key_heads": 2},
    ),
    (
        "qwen3_next",
        {"num_hidden_layers": 3, "layer_types": None, "full_attention_interval": 3, "partial_rotary_factor": 1.0},
        {"linear_layers": "2,1", "linear_heads": 4, "linear_key_heads": 2, "linear_key_size": 6, "linear_value_size": 5}
        | {"linear_convolution": 3, "rotary_size": 0, "norm": "rmsnorm-1p", "attention_gate": "sigmoid"}
        | {"renormalize_shares": True, "expert_size": 14, "shared_expert_size": 10, "shared_expert_gate": True},
    ),
    (
        "qwen3_5_moe_text",
        {"rope_parameters": {"partial_rotary_factor": 0.25, "mrope_section": [1, 0, 0]}},
        {"rotary_size": 2, "renormalize_shares": True, "linear_norm_epsilon": 1e-6, "linear_layers": "1,1"},
    ),
    ("qwen3_5_text", {"head_dim": 58, "partial_rotary_factor": 0.932}, {"rotary_size": 54, "num_experts": 0}),
    ("gemma3_text", OLDER, {"window_rope_theta": 9.0, "rope_original_length": 24}),
    ("olmo3", OLDER, {"window_rope_theta": 5e5, "rope_original_length": 24}),
    ("olmo3", {"sliding_window_pattern": 2, "num_hidden_layers": 4}, {"window_layers": "3,1"}),
    ("gpt_oss", {"rope_parameters": {}, "sliding_window_pattern": 3}, {"rope_scaling": "none", "window_layers": "1,1"}),
    (
        "qwen3",
        WINDOW | {"layer_types": ["sliding_attention"] * 2},
        {"sliding_window": 5, "query_key_norm": True, "bias": "none"},
    ),
    ("qwen3", {"layer_types": ["full_attention"] * 2, "pretraining_tp": 2}, {"sliding_window": 0}),
    (
        "mixtral",
        {"router_aux_loss_coef": 0.02, "output_router_logits": True},
        {"num_experts": 5, "experts_per_token": 2, "expert_size": 40, "renormalize_shares": True, "rope_theta": 1e6}
        | {"balance": "none", "balance_coefficient": 0.02, "sliding_window": 0, "norm_epsilon": 1e-5},
    ),
    ("mixtral", {"sliding_window": 5}, {"sliding_window": 5}),
    (
        "qwen3_moe",
        {"max_window_layers": 1, "sliding_window": 5, "mlp_only_layers": None, "decoder_sparse_step": 1},
        {"mlp_size": 40, "expert_size": 14, "renormalize_shares": False, "sliding_window": 0}
        | {"query_key_norm_over": "head", "rope_theta": 1e4, "norm_epsilon": 1e-6},
    ),
    ("qwen3_moe", WINDOW | {"norm_topk_prob": True}, {"sliding_window": 5, "renormalize_shares": True}),
    (
        "gpt_oss",
        {"num_hidden_layers": 4, "swiglu_limit": 5, "rope_scaling": YARN | {"truncate": False}, "rope_theta": 7e4},
        {"sliding_window": 128, "window_layers": "1,1", "bias": "all", "attention_sinks": True, "rope_theta": 7e4}
        | {"activation": "swiglu-clamped", "swiglu_limit": 5.0, "swiglu_alpha": 1.702, "rope_truncate": False}
        | {"expert_size": 40, "renormalize_shares": True, "rope_factor": 3.0, "rope_original_length": 8},
    ),
    (
        "gpt_oss",
        {"layer_types": ["full_attention"] * 2, "swiglu_alpha": 2, "sliding_window": None},
        {"rope_scaling": "yarn", "rope_factor": 32.0, "rope_original_length": 4096, "rope_theta": 15e4}
        | {"sliding_window": 0, "swiglu_alpha": 2.0, "rope_truncate": False},
    ),
    ("olmo_hybrid", {"hidden_size": 18, "head_dim": 3, "rope_parameters": {"rope_theta": None}}, {"positions": "none"}),
    (
        "kimi_linear",
        {"layer_types": None, "linear_attn_config": {"full_attn_layers": [2], "kda_layers": [1], "num_heads": 2}},
        {"linear_layers": "1,1", "linear_decay": "channel", "linear_gate": "sigmoid", "positions": "none"}
        | {"linear_heads": 2, "linear_norm_epsilon": 1e-5, "dense_layers": 1, "shared_expert_size": 28},
    ),
    ("olmoe", {"head_dim": None}, {"query_key_norm": True, "query_key_norm_over": "width", "head_size": 4}),
]


QWEN_HYBRID = {"norm": "rmsnorm-1p", "query_key_norm": True, "attention_gate": "sigmoid", "rotary_size": 2}
QWEN_HYBRID |= {"linear_heads": 4, "linear_layers": "1,1"}


@pytest.mark.parametrize(("kind", "settings", "expected"), READ)
def test_settings(kind: str, settings: dict[str, Any], expected: dict[str, Any], tmp_path: Path) -> None:
    """As transformers understands them, also where they are missing; what is written is read as the same."""
    sizes = {
        "num_key_value_heads": settings.get("num_key_value_heads", 2) or 6,
        "head_dim": settings.get("head_dim", SETTINGS[kind].get("head_dim", 8)) or 4,
    }
    tensors = random_tensors(kind, **settings | sizes)
    source = open_source(write_model(tmp_path, kind, tensors, **settings))
    model = source.config.model
    assert {name: getattr(model, name) for name in expected} == expected
    assert source.exchange.lacks(model) == {} and source.exchange.architecture(model) == CLASSES[kind]
    fields = source.exchange.settings(model, (), None)["config.json"]
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert open_source(tmp_path).config == source.config


def test_what_older_files_lack(tmp_path: Path) -> None:
    """Fields that were not known yet; the class of the model, which its tensors tell; one rate of dropout of several,
    with a flag for the one of ours."""
    tied = random_tensors("llama", **TIED)
    assert open_source(write_model(tmp_path, "llama", tied, without=["architectures"], **TIED)).tokenizer is None
    heads = {"num_key_value_heads": 6}
    write_model(tmp_path, "llama", random_tensors("llama", **heads), without=heads)
    assert open_source(tmp_path).config.model.num_kv_heads == 6
    write_model(tmp_path, "gpt2", without=["n_embd"], hidden_size=24)
    assert open_source(tmp_path).config.model.hidden_size == 24
    write_model(tmp_path, "qwen3", without=["head_dim"])
    assert "valid: [768, 24], by config.json" in refusal(tmp_path)  # 128, as Qwen3 has it
    sizes = {"linear_num_value_heads": 6, "linear_num_key_heads": 6, "linear_key_head_dim": 3}
    sizes |= {"linear_value_head_dim": 6, "linear_conv_kernel_dim": 4}
    write_model(tmp_path, "olmo_hybrid", random_tensors("olmo_hybrid", **sizes), without=sizes)
    assert open_source(tmp_path).config.model.linear_value_size == 6
    mixed = {"first_k_dense_replace": 0, "n_shared_experts": 2}
    write_model(tmp_path, "deepseek_v2", random_tensors("deepseek_v2", **mixed), without=mixed)
    model = open_source(tmp_path).config.model
    assert model.dense_layers == 0 and model.shared_expert_size == 2 * model.expert_size
    write_model(tmp_path, "qwen3_5_moe_text", without=["partial_rotary_factor", "intermediate_size"])
    assert open_source(tmp_path).config.model.rotary_size == 2
    write_model(tmp_path, "gpt2", attn_pdrop=0.1, without=["resid_pdrop"])
    assert open_source(tmp_path, {"model.dropout": 0.3}).config.model.dropout == 0.3
    write_model(tmp_path, "megatron-bert", architectures=None, attention_probs_dropout_prob=0.2)
    assert open_source(tmp_path, {"model.dropout": 0.3}).config.model.dropout == 0.3


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, "GPT2LMHeadModel"),
        ({"mlp_size": 10, "tied_embedding": False, "norm_epsilon": 1e-3}, "GPT2LMHeadModel"),
        ({"rope_theta": 5e5, "num_kv_heads": 2}, "LlamaForCausalLM"),
        ({"num_kv_heads": 2, "bias": "all"}, "LlamaForCausalLM"),
        ({"sliding_window": 7}, "MistralForCausalLM"),
        ({"hidden_size": 25, "head_size": 8}, "MistralForCausalLM"),
        ({"bias": "query-key-value", "sliding_window": 7}, "Qwen2ForCausalLM"),
        ({"query_key_norm": True}, "Qwen3ForCausalLM"),
        ({"num_experts": 4, "experts_per_token": 2, "sliding_window": 7}, "MixtralForCausalLM"),
        ({"num_experts": 4, "experts_per_token": 2, "query_key_norm": True}, "Qwen3MoeForCausalLM"),
        (
            {"num_experts": 4, "experts_per_token": 2, "query_key_norm": True, "query_key_norm_over": "width"},
            "OlmoeForCausalLM",
        ),
        ({"num_experts": 4, "experts_per_token": 2, **GPT_OSS}, "GptOssForCausalLM"),
        (QWEN_HYBRID, "Qwen3_5ForCausalLM"),
        (
            QWEN_HYBRID
            | {"num_experts": 4, "experts_per_token": 2, "shared_expert_size": 5, "shared_expert_gate": True},
            "Qwen3NextForCausalLM",
        ),
    ],
)
def test_the_class_of_a_model(options: dict[str, Any], expected: str) -> None:
    """By its options, unless it came from another that can hold it."""
    rotary = {} if expected.startswith("GPT") else ROTARY
    model = ModelConfig(**SMALL | rotary | options)
    assert exchange_for(model, "", "RUN x").architecture(model) == expected
    if expected == "LlamaForCausalLM":
        came_from = "LlamaForCausalLM" if model.bias == "all" else "MistralForCausalLM"
        assert exchange_for(model, "MistralForCausalLM", "RUN x").architecture(model) == came_from


def test_a_class_with_angles_by_layer_rounds_the_bounds_of_yarn() -> None:
    """Whatever `truncate` says there, so that a model that does not has no class."""
    words = {"query_key_norm": True, "query_key_norm_over": "width", "layer_order": "reordered"}
    yarn = {"rope_scaling": "yarn", "rope_factor": 2.0, "rope_original_length": 4}
    model = ModelConfig(**SMALL | ROTARY | words | yarn)
    assert exchange_for(model, "", "RUN x").architecture(model) == "Olmo3ForCausalLM"
    error = user_error(exchange_for, dataclasses.replace(model, rope_truncate=False), "", "RUN x")
    assert error.endswith("valid: a run with --model.rope-truncate (Olmo3ForCausalLM)"), error


@pytest.mark.parametrize(("pairs", "first"), [("in heads", [2, 4, 6, 3, 5, 7]), ("at the end", [*range(2, 8)])])
def test_where_rotary_features_are(pairs: Any, first: list[int]) -> None:
    """Three pairs of features, which are the last of two heads' eight, or of all: the first ones before the others."""
    place, model, theirs = (
        TensorPlace("", "", pairs=pairs),
        tiny_config(num_heads=2, rotary_size=6, positions="rotary").model,
        np.arange(16),
    )
    expected = np.array([0, 1, *first, 8, 9, 10, 12, 14, 11, 13, 15])
    np.testing.assert_array_equal(place.in_halves(theirs, model), expected)
    np.testing.assert_array_equal(place.in_pairs(expected, model), theirs)


def test_a_class_without_modules_gets_none() -> None:
    """For tokens after the next one: an export leaves them out, as an evaluation does."""
    model = ModelConfig(**SMALL | ROTARY)
    both = model, dataclasses.replace(model, prediction_modules=2)
    zeros = (jax.tree.map(lambda leaf: np.zeros(leaf.shape), whole_model(each).shapes) for each in both)
    without, found = (back_to_tensors(*pair) for pair in zip(zeros, both, strict=True))
    assert_same(found, without)
    assert [exchange_for(each, "", "it").model_type for each in both] == ["llama"] * 2


def test_names_of_classes(tmp_path: Path) -> None:
    """As transformers writes them, in any order of the file; of two default ones it writes nothing."""
    three = {"id2label": {"2": "contradiction", "0": "Entailment", "1": "neutral"}}
    for classes, settings in ((3, three), (2, {"problem_type": "single_label_classification"})):
        tensors = random_tensors("bert", head="classes", classes=classes)
        source = open_source(write_model(tmp_path, "bert", tensors, head="classes", **settings))
        assert source.config.model.num_classes == classes


_OUTPUT = ["head.output.bias", "head.output.weight"]


@pytest.mark.full
@pytest.mark.parametrize(
    ("task", "fresh"),
    [("qqp", _OUTPUT), ("mnli", []), ("race", _OUTPUT), ("squad1", _OUTPUT)],
)
def test_a_run_begins_with_an_imported_one(task: str, fresh: list[str], tmp_path: Path) -> None:
    """It has all weights where the answers are the same ones; where they are not, those but the outputs."""
    tensors = random_tensors("bert", head="classes", classes=3)
    write_model(tmp_path / "hf", "bert", tensors, head="classes", num_labels=3)
    source = open_source(tmp_path / "hf", {"model.vocab_multiple": 64})
    import_hf(source, tmp_path / "run")
    preset = resolve(load_preset(tmp_path / "run" / "config.toml"))
    assert preset.model == source.config.model and preset.pretrains
    sizes = {"num_layers": 2, "num_heads": 4, "sequence_length": 24, "dropout": 0.0}
    head = {"head": TASKS[task].head, "num_classes": TASKS[task].classes}
    config = tiny_config(family="bert", layer_order="post", **sizes, **head)
    config = dataclasses.replace(config, task=TaskConfig(name=task), init=str(tmp_path / "run"))
    program = tiny_program(config)
    state, told = first_state(config, program)
    assert told == f"weights: from step 0 of {tmp_path / 'run'}; fresh: {', '.join(fresh) or 'none'}"
    expected = {name: tensor for name, tensor in tensors.items() if not fresh or not name.startswith("classifier")}
    if config.model.head == "span":
        expected = {name: tensor for name, tensor in expected.items() if not name.startswith("bert.pooler")}
    found = back_to_tensors(jax.device_get(program.layout.canonical_weights(state.params)), config.model)
    outputs = [found.pop(name) for name in list(found) if name not in expected]
    assert len(outputs) == len(fresh) and all(0 < np.abs(output).sum() < 5 for output in outputs if output.ndim == 2)
    assert_same(found, expected)
