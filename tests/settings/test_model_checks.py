"""Options of a model that do not fit each other or the mesh are refused by one line that says which would."""

from typing import Any

import pytest
from tiny import MIXTURE, tiny_config, user_error

from megajax.core.errors import UserError
from megajax.settings.presets import load_preset, resolve
from megajax.settings.validation import validate, validate_mesh

REFUSED = {  # preset and table of options -> values, and a part of the line
    ("llama-demo", "model"): [
        ({"num_kv_heads": 3}, "--model.num-kv-heads 3 with --model.num-heads 8; valid: 1, 2, 4, 8"),
        (
            {"head_size": 15},
            "--model.head-size 15 with --model.positions rotary, which rotates pairs of features; valid: ",
        ),
        ({"num_heads": 6, "num_kv_heads": 2}, "valid: a multiple of 6, such as 60 or 66, or a --model.head-size"),
        (
            {"rope_factor": 2.0},
            "--model.rope-factor 2 with --model.rope-scaling none; valid: --model.rope-scaling linear or llama3 or ",
        ),
        (
            {"rope_scaling": "llama3", "rope_low_frequency": 4.0},
            "--model.rope-low-frequency 4 is not below --model.rope-high-frequency 4; valid: less",
        ),
        (
            {"positions": "learned", "rope_theta": 5e5},
            "--model.rope-theta 500000 with --model.positions learned; valid: --model.positions rotary, or "
            "--model.rope-theta 10000",
        ),
        (
            {"query_key_norm_over": "width"},
            "--model.query-key-norm-over width with --no-model.query-key-norm; valid: --model.query-key-norm, or "
            "--model.query-key-norm-over head",
        ),
        (
            {"prediction_modules": 8, "sequence_length": 8},
            "--model.prediction-modules 8 with --model.sequence-length 8; valid: less",
        ),
        ({"layer_order": "post"}, "--model.layer-order post with --model.family decoder; valid: pre"),
        (
            {"rotary_size": 7},
            "--model.rotary-size 7 with --model.latent-size 0; valid: 0, or an even size from 2 to le",
        ),
        (
            {"rope_scaling": "yarn", "rope_beta_slow": 33.0},
            "--model.rope-beta-slow 33 is above --model.rope-beta-fast 32; valid: no more",
        ),
        (
            {"rope_scaling": "yarn", "rope_theta": 1.0},
            "--model.rope-theta 1 with --model.rope-scaling yarn; valid: more than 1",
        ),
    ],
    ("moonlight-16b-a3b", "model"): [
        (
            {"rotary_size": 0},
            "--model.rotary-size 0 with --model.latent-size 512; valid: an even size from 2 to less than "
            "--model.head-size, 192",
        ),
        (
            {"query_key_norm": True},
            "--model.query-key-norm with --model.latent-size 512; valid: --no-model.query-key-norm",
        ),
        ({"num_kv_heads": 8}, "--model.num-kv-heads 8 with --model.latent-size 512; valid: --model.num-kv-heads 16"),
        (
            {"attention_sinks": True},
            "--model.attention-sinks with --model.latent-size 512; valid: --no-model.attention-sinks",
        ),
        ({"bias": "all"}, "--model.bias all with --model.latent-size 512; valid: --model.bias none"),
        ({"latent_size": 0}, "--model.value-size 128 with --model.latent-size 0; valid: "),
        ({"expert_groups": 3}, "--model.expert-groups 3 with --model.num-experts 64; valid: a divisor of it"),
        (
            {"expert_groups": 32, "chosen_groups": 2},
            "--model.chosen-groups 2 with --model.expert-groups 32 of 2 experts, 6 for each token; valid: 3 to 32",
        ),
    ],
    ("bert-demo", "model"): [
        ({"norm": "rmsnorm"}, "--model.norm rmsnorm with --model.family bert; valid: --model.norm layernorm"),
        ({"query_key_norm": True}, "--model.query-key-norm with --model.family bert; valid: --no-model.query-key-norm"),
        (
            {"norm_epsilon": 1e-5},
            "--model.norm-epsilon 1e-05 with --model.family bert; valid: --model.norm-epsilon 1e-12",
        ),
        ({"mlp_size": 100}, "--model.mlp-size 100 with --model.family bert; valid: 512"),
        ({"num_kv_heads": 2}, "--model.num-kv-heads 2 with --model.num-heads 8; valid: 8"),
    ],
    ("demo", "model"): [
        (
            {"linear_heads": 4, "linear_key_heads": 3},
            "--model.linear-key-heads 3 with --model.linear-heads 4; valid: a divisor of them",
        ),
        ({"linear_heads": 4, "sliding_window": 9}, "--model.linear-heads 4; valid: --model.sliding-window 0"),
        ({"linear_write": 2.0}, "--model.linear-write 2 with --model.linear-heads 0; valid: --model.linear-heads of 1"),
        ({"linear_heads": 4, "linear_chunk": 48}, "--model.linear-chunk 48; valid: a power of two, up to 4096"),
    ],
    ("demo", "lora"): [
        ({"rank": 65}, "--lora.rank 65 is more than the product query has, of 64 x 64; valid: at most 64"),
        ({"targets": ["atention"]}, "did you mean attention?"),
        ({"targets": ["q_proj"]}, "--lora.targets 'q_proj'; valid: attention, mlp, experts, query, key, value, "),
        ({"targets": ["attention,experts"]}, "down (separated by spaces: attention experts)"),
        ({"rank": 4, "targets": []}, "--lora.targets is empty; valid: attention, "),
        (
            {"rank": 4, "targets": ["gate"]},
            "--lora.targets gate with --model.activation gelu-tanh, which has no gate; valid: without gate, or",
        ),
    ],
    ("bert-demo", "lora"): [
        ({"rank": 4}, "--lora.rank 4 with --model.family bert; valid: --lora.rank 0, or --model.family d"),
    ],
}


@pytest.mark.parametrize(
    ("preset", "table", "values", "line"), [(*where, *row) for where, rows in REFUSED.items() for row in rows]
)
def test_what_does_not_fit(preset: str, table: str, values: dict[str, Any], line: str) -> None:
    said = user_error(resolve, load_preset(preset), {f"{table}.{name}": value for name, value in values.items()})
    assert line in said and "valid" in said


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ({"precision": "fp8"}, "--precision fp8 with --model.linear-heads 4; valid: bf16"),
        (
            {"bitwise": 2, "mesh.tensor": 2, "sequence_parallel": True, "model.linear_decay": "channel"},
            "--sequence-parallel with --bitwise 2 and --model.linear-decay channel; valid: --no-sequence-parallel, or "
            "--bitwise 0",
        ),
        (
            {"mesh.context": 32, "model.sequence_length": 128},
            "--mesh.context 32 with --model.sequence-length 128, whose pieces are shorter than "
            "--model.linear-convolution 4 sees; valid: at most 21",
        ),
        (
            {"model.linear_layers": "3,1", "model.num_layers": 12, "mesh.pipe": 4},
            "--mesh.pipe 4 with --model.num-layers 12 in 3 periods of --model.linear-layers 3,1, which leaves a stage "
            "without a period; valid: 1 to 3",
        ),
        (
            {"model.linear_layers": "3,1", "model.num_layers": 14, "pipeline.layers": "7,7"},
            "--pipeline.layers 7,7 with --model.num-layers 14 in 4 periods of --model.linear-layers 3,1, which it "
            "divides; valid: even, or 8,6",
        ),
        (
            {"model.linear_layers": "5,1", "model.sliding_window": 9, "model.num_layers": 5},
            "--model.sliding-window 9 with --model.linear-heads 4; valid: --model.sliding-window 0",
        ),
        ({"model.linear_layers": "0,9"}, "which gives none of --model.num-layers 8 linear attention"),
    ],
)
def test_what_linear_attention_does_not_fit(words: dict[str, Any], line: str) -> None:
    def check() -> None:
        validate(resolve(load_preset("demo"), {"model.linear_heads": 4, "mesh.pipe": 2} | words), 64)

    assert line in user_error(check)


def test_what_is_left_to_others() -> None:
    model = resolve(load_preset("demo")).model
    assert (model.num_kv_heads, model.head_size, model.mlp_size) == (8, 8, 256)
    assert (model.family, model.norm_epsilon, model.activation) == ("decoder", 1e-5, "gelu-tanh")
    assert resolve(load_preset("demo"), {"model.family": "gpt2"}).model == model
    bert = resolve(load_preset("bert-demo")).model
    assert (bert.norm_epsilon, bert.activation) == (1e-12, "gelu")


def on(tensor: int, **words: Any) -> None:
    """Check a model on a tensor group."""
    sizes = {"head_size": 16, "vocab_multiple": 48, "mlp_size": 48} | words
    overrides = {"mesh.tensor": tensor} | {f"model.{name}": value for name, value in sizes.items()}
    validate_mesh(resolve(load_preset("llama-demo"), overrides), tensor)


@pytest.mark.parametrize(("heads", "kv_heads", "tensor"), [(6, 3, 3), (6, 3, 6), (8, 2, 4), (8, 1, 8), (8, 8, 8)])
def test_heads_of_keys_are_split_or_held_several_times(heads: int, kv_heads: int, tensor: int) -> None:
    on(tensor, num_heads=heads, num_kv_heads=kv_heads)


def test_a_tensor_group_that_neither_divides_heads_of_keys_nor_is_a_multiple() -> None:
    line = "--mesh.tensor 6 does not divide --model.num-kv-heads 4, nor is it a multiple of it; valid: 1, 2, 4, 12"
    with pytest.raises(UserError, match=line):
        on(6, num_heads=12, num_kv_heads=4)


EXPERTS = {**MIXTURE, "shared_expert_size": 0, "expert_size": 0}
ON_MESHES: list[tuple[dict[str, Any], str]] = [
    (
        {"mesh": (1, 1, 3, 1)},
        "2 x --mesh.context 3 does not divide --model.sequence-length 16; valid: a multiple of 6, ",
    ),
    (
        {"mesh": (1, 1, 2, 8), "sequence_parallel": True, "sequence_length": 48},
        "2 x --mesh.context 2 x --mesh.tensor 8 (--sequence-parallel) does not divide ",
    ),
    (
        {"mesh": (1, 1, 4, 4), "context_attention": "heads"},
        "--model.context-attention heads: --mesh.context 4 does not divide the 2 heads of a device ",
    ),
    (
        EXPERTS | {"expert": 3, "global_batch": 6},
        "--mesh.expert 3 does not divide --model.num-experts 8; valid: 1, 2, 4, 8",
    ),
    (EXPERTS | {"experts_per_token": 9}, "--model.experts-per-token 9 with --model.num-experts 8; valid: 1 to 8"),
    (
        EXPERTS | {"expert": 2, "num_experts": 0, "experts_per_token": 0},
        "--mesh.expert 2 with a model without experts; ",
    ),
    (EXPERTS | {"expert_capacity": -1.0}, "--model.expert-capacity -1.0; valid: 0 to 10000"),
    (EXPERTS | {"expert": 8, "global_batch": 4}, "--train.global-batch 4 is not divisible by --mesh.data 1 x "),
    (EXPERTS | {"remat": "stage"}, "--train.remat stage with experts"),
    (EXPERTS | {"dense_layers": 4}, "--model.dense-layers 4 with --model.num-layers 4, which leaves no layer"),
    (
        EXPERTS | {"dense_layers": 2, "mesh": (1, 4, 1)},
        "--mesh.pipe 4 with --model.num-layers 4 less --model.dense-layers 2",
    ),
]


@pytest.mark.parametrize(("options", "words"), ON_MESHES)
def test_what_does_not_fit_the_mesh(options: dict[str, Any], words: str) -> None:
    config = tiny_config(**options)
    assert user_error(validate, config, config.mesh.num_devices).startswith(words)
