"""A config.json of what is none of our models is refused in one line that names file, field and what would be valid."""

import re
from pathlib import Path
from typing import Any

import pytest
from hugging_face import LLAMA3, YARN, refusal, write_model

TYPES = '"gpt2", "llama", "mistral", "qwen2", "qwen3", "gemma3_text", "olmo3", "olmo_hybrid", "qwen3_5_text", '
TYPES += '"mixtral", "qwen3_moe", "qwen3_next", "qwen3_5_moe_text", "olmoe", "gpt_oss", "deepseek_v3", "deepseek_v2", '
TYPES += '"kimi_linear", "megatron-bert", "bert"'
COMMON_RATE = r"all the same, or --model\.dropout"

# The model, and its head after a blank; a field of its config.json, its value, what would be valid.
FIELDS: list[tuple[str, str, Any, str]] = [
    *(("gpt2", "model_type", kind, TYPES)
      for kind in ("gemma", "phi3", "qwen2_moe", "glm4", "glm4_moe", "llama4", "mistral3", "qwen3_5")),
    ("gpt2", "quantization_config", {"quant_method": "gptq"}, "null, with weights in F32, F16 or BF16"),
    ("gpt2", "activation_function", "relu", '"gelu_new", "gelu_pytorch_tanh", "gelu"'),
    ("gpt2", "layer_norm_epsilon", 0, "more than 0"),
    ("gpt2", "scale_attn_by_inverse_layer_idx", True, "false"),
    ("gpt2", "scale_attn_weights", False, "true"),
    ("gpt2", "is_causal", False, "true"),
    ("gpt2", "hidden_size", 48, "as n_embd, 24"),
    ("gpt2", "reorder_and_upcast_attn", True, "false"),
    ("gpt2", "tie_word_embeddings", 1, "true or false"),
    ("gpt2", "n_layer", 99_999_999, ".*1 to 10000"),
    ("gpt2", "n_layer", 9999, "the number of layers"),
    ("gpt2", "n_head", 5, "a multiple"),
    ("gpt2", "attn_pdrop", 0.1, COMMON_RATE),
    ("gpt2", "resid_pdrop", 1.0, ".*less than 1"),
    ("llama", "architectures", ["LlamaForSequenceClassification"], r'\["LlamaForCausalLM"\]'),
    ("qwen2", "architectures", ["LlamaForCausalLM"], r'\["Qwen2ForCausalLM"\]'),
    ("llama", "per_layer_config", {"0": {"rms_norm_eps": 0.1}}, "null"),
    ("llama", "num_key_value_heads", 4, "a divisor of num_attention_heads, 6"),
    ("llama", "hidden_size", 26, "a multiple"),
    ("qwen3", "head_dim", 7, "an even number"),
    ("llama", "hidden_act", "gelu", '"silu"'),
    ("llama", "mlp_bias", True, "as attention_bias, false"),
    ("llama", "attention_dropout", 0.1, r"0, or --model\.dropout"),
    ("llama", "sliding_window", 5, "null"),
    ("mistral", "sliding_window", 0, "null, or a whole number above 0"),
    ("mistral", "layer_types", ["full_attention"] * 2, "sliding_attention 2 times"),
    ("qwen2", "layer_types", ["sliding_attention"] * 2, "full_attention 2 times"),
    ("llama", "rope_scaling", "linear", "null, or an object"),
    ("llama", "rope_theta", "1e4", "a finite number"),
    ("llama", "partial_rotary_factor", 0.5, "1"),
    ("llama", "eos_token_id", "2", "null, an id, or several"),
    ("mixtral", "num_experts_per_tok", 6, "1 to 5, num_local_experts"),
    ("mixtral", "router_jitter_noise", 0.1, "0.0"),
    ("qwen3_moe", "decoder_sparse_step", 2, "1"),
    ("qwen3_moe", "mlp_only_layers", [0], r"\[\], null"),
    ("qwen3_moe", "moe_intermediate_size", None, "a whole number"),
    ("qwen3_next", "mlp_only_layers", [0], r"\[\], null"),
    ("qwen3_next", "partial_rotary_factor", 0.4, "more than 0, up to 1, for an even number of the 8 of head_dim"),
    ("qwen3_5_text", "attention_bias", True, "false"),
    ("qwen3_5_moe_text", "shared_expert_intermediate_size", 0, "more than 0"),
    ("olmoe", "clip_qkv", 8.0, "null"),
    ("gpt_oss", "attention_bias", False, "true"),
    ("mixtral", "quantization_config", {"quant_method": "mxfp4"}, "null, with weights in F32, F16 or BF16"),
    ("gpt_oss", "swiglu_limit", 0, "a finite number, more than 0"),
    ("olmoe", "head_dim", 8, "null, 4"),
    ("olmo_hybrid", "linear_allow_neg_eigval", 1, "true, false"),
    ("olmo_hybrid", "linear_key_head_dim", 0, "more than 0"),
    ("olmo_hybrid", "layer_types", ["linear_attention"] * 2, "full_attention or linear_attention .* both of them"),
    ("olmo_hybrid", "linear_num_value_heads", 5, "a multiple of it"),
    ("kimi_linear", "mlp_layer_types", ["sparse", "dense"], "dense, then sparse"),
    ("kimi_linear", "first_k_dense_replace", 2, "0 to 1, of num_hidden_layers"),
    ("kimi_linear", "layer_types", ["full_attention", "linear_attention"], "linear_attention in 1 dense layers"),
    ("kimi_linear", "tie_word_embeddings", True, "false"),
    ("kimi_linear", "q_lora_rank", 8, "null"),
    ("kimi_linear", "norm_topk_prob", "false", "true, false, null"),
    ("bert", "model_type", "roberta", TYPES),
    ("bert", "architectures", ["BertModel"], r'\["BertForPreTraining"\], \["BertForMaskedLM"\]'),
    ("bert", "hidden_act", "gelu_new", '"gelu"'),
    ("bert", "position_embedding_type", "relative_key", '"absolute"'),
    ("bert", "is_decoder", True, "false"),
    ("bert", "classifier_dropout", 0.1, COMMON_RATE),
    ("bert", "add_cross_attention", True, "false"),
    ("bert", "type_vocab_size", 1, "2"),
    ("bert", "tie_word_embeddings", False, "true"),
    ("bert", "layer_norm_eps", 1e-5, "1e-12"),
    ("bert", "intermediate_size", 100, "96"),
    ("bert", "intermediate_size", None, "96"),
    ("bert", "num_hidden_layers", 9999, "the number of layers"),
    # What does not tell two classes or more apart, or has a task's classes under other numbers.
    ("bert classes", "problem_type", "regression", 'null, "single_label_classification"'),
    ("bert classes", "num_labels", 1, ".*2 to 10000"),
    ("bert classes", "id2label", {"0": "one"}, ".*two classes or more"),
    ("bert classes", "id2label", {"1": "a", "2": "b"}, ".*numbers from 0 on"),
    ("bert classes", "id2label", {"0": "a", "1": 1}, "a name for each"),
    ("bert classes", "id2label", ["a", "b"], "a name for each"),
    ("bert classes", "id2label", {"0": "1", "1": "0"}, "in the order of qqp, 0, 1"),
    ("bert classes", "id2label", {"0": "CONTRADICTION", "1": "NEUTRAL", "2": "ENTAILMENT"},
     "in the order of mnli, entailment, neutral, contradiction"),
    ("bert span", "id2label", {"0": "a", "1": "b", "2": "c"}, "two labels, a span's start and its end"),
    ("bert span", "num_labels", 3, "two labels, a span's start and its end"),
]  # fmt: skip
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    *((kind, {field: value}, rf"config\.json: .*{field} .*; valid: {valid}") for kind, field, value, valid in FIELDS),
    ("llama", {"hidden_size": 26}, "hidden_size 26 is not divisible by num_attention_heads 6"),
    ("llama", {"hidden_size": 18, "head_dim": None}, "head_dim is 3; valid: an even number"),
    ("olmo_hybrid", {"hidden_size": 18, "head_dim": None}, "head_dim is 3; valid: an even number"),
    ("llama", {"attention_bias": True}, "mlp_bias is false; valid: as attention_bias, true"),
    (
        "gemma3_text",
        {"rope_parameters": {"sliding_attention": {"type": "linear", "factor": 2}}},
        'rope_parameters.sliding_attention.rope_type is "linear"; valid: default, or all as full_attention',
    ),
    ("olmo3", {"rope_parameters": {"full_attention": YARN | {"truncate": False}}}, "truncate is false; valid: true"),
    ("gemma3_text", {"sliding_window_pattern": 0}, "sliding_window_pattern is 0; valid: 1 or more"),
    ("gemma3_text", {"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0; valid: null"),
    ("qwen2", {"use_sliding_window": True, "max_window_layers": -1}, "max_window_layers is -1; valid: 0 or more"),
    (
        "qwen3",
        {"use_sliding_window": True, "layer_types": ["full_attention", "chunked_attention"]},
        "layer_types is .*valid: sliding_attention or full_attention for each of 2 layers",
    ),
    ("llama", {"rope_scaling": {"type": "dynamic"}}, r'type is "dynamic"; valid: "default", "linear", "llama3",'),
    ("llama", {"rope_parameters": {"short_factor": [1.0], "rope_type": "longrope"}}, r'rope_type is "longrope"; valid'),
    ("llama", {"rope_scaling": {"rope_type": "linear"}}, r"rope_scaling\.factor is null; valid: a finite number"),
    ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 0.5}}, r"factor is 0\.5; valid: .*1 to"),
    ("llama", {"rope_scaling": {"rope_type": "llama3", **LLAMA3, "low_freq_factor": 4}}, "valid: more than low_freq"),
    ("llama", {"rope_scaling": YARN | {"beta_slow": 33}}, r"rope_scaling\.beta_fast is 32; valid: beta_slow, 33, or"),
    ("llama", {"rope_scaling": YARN | {"attention_factor": 0}}, r"attention_factor is 0; valid: more than 0"),
    ("llama", {"rope_scaling": YARN | {"truncate": None}}, r"rope_scaling\.truncate is null; valid: true or false"),
    ("llama", {"rope_scaling": YARN | {"mscale": "1", "mscale_all_dim": 1}}, r'mscale is "1"; valid: a finite number'),
    ("llama", {"rope_parameters": {"full_attention": {}}}, r"rope_parameters\.full_attention is .*valid: without it"),
    ("qwen3_next", {"layer_types": None, "full_attention_interval": 0}, "full_attention_interval is 0; valid: 1 or mo"),
    ("mixtral", {"num_local_experts": 9999}, "is 2 of 9999 experts, but there are 47 tensors in all; valid"),
    ("mixtral", {"num_local_experts": 6}, r"experts\.5\.w1\.weight.* missing .*; valid"),
    ("llama", {"num_hidden_layers": 3}, r"model\.layers\.2\..* missing .*all of a Llama"),
    (
        "kimi_linear",
        {"layer_types": None, "linear_attn_config": {"full_attn_layers": [2], "kda_layers": [2]}},
        r"linear_attn_config\.kda_layers is \[2\]; valid: with full_attn_layers each of 2 layers, from 1 on",
    ),
    ("llama", {"tie_word_embeddings": True}, "lm_head.weight differs from model.embed_tokens.weight"),
]


@pytest.mark.parametrize(("kind", "settings", "words"), REFUSED)
def test_refused(kind: str, settings: dict[str, Any], words: str, tmp_path: Path) -> None:
    name, _, head = kind.partition(" ")
    line = refusal(write_model(tmp_path, name, head=head or "pretraining", **settings))
    assert re.search(words, line) and str(tmp_path) in line, line


@pytest.mark.parametrize(
    ("kind", "field"), [("gpt2", "n_positions"), ("gpt2", "model_type"), ("megatron-bert", "vocab_size")]
)
def test_what_may_not_be_left_out(kind: str, field: str, tmp_path: Path) -> None:
    assert f"{field} is null" in refusal(write_model(tmp_path, kind, without=[field]))


def test_what_is_no_config_json(tmp_path: Path) -> None:
    write_model(tmp_path, "gpt2")
    for text, words in (("{", "config.json: not JSON"), ("[]", "config.json: not a JSON object")):
        (tmp_path / "config.json").write_text(text)
        assert words in refusal(tmp_path)
    (tmp_path / "config.json").unlink()
    assert "no config.json" in refusal(tmp_path)


def test_lengths(tmp_path: Path) -> None:
    """Rotary positions may be fewer than there, not more; learned ones are as they are."""
    for kind, valid in (("llama", f"{tmp_path}; valid: 24 or less"), ("gpt2", "learned; valid: without it")):
        line = refusal(write_model(tmp_path, kind), **{"model.sequence_length": 25})
        assert "--model.sequence-length 25 with" in line and valid in line
