"""The presets of today's decoders have the published shapes."""

import pytest

from megajax.config import Config
from megajax.models.config import ModelConfig
from megajax.models.family import count_parameters
from megajax.settings.presets import load_preset, resolve
from megajax.settings.validation import validate_mesh

# layers, width, heads, of keys and values, their size, the MLP's, vocabulary, theta, epsilon, window; as the models'
# config.json and litgpt 0.5.13's configurations have them; the numbers of parameters are those of the published weights
PUBLISHED = {
    "llama3-8b": ((32, 4096, 32, 8, 128, 14336, 128256, 5e5, 1e-5, 0), 8_030_261_248),
    "llama3.2-1b": ((16, 2048, 32, 8, 64, 8192, 128256, 5e5, 1e-5, 0), 1_235_814_400),
    "qwen3-0.6b": ((28, 1024, 16, 8, 128, 3072, 151936, 1e6, 1e-6, 0), 596_049_920),
    "qwen3-8b": ((36, 4096, 32, 8, 128, 12288, 151936, 1e6, 1e-6, 0), 8_190_735_360),
    "mistral-7b": ((32, 4096, 32, 8, 128, 14336, 32000, 1e4, 1e-5, 4096), 7_241_732_096),
    "mistral-7b-v0.3": ((32, 4096, 32, 8, 128, 14336, 32768, 1e6, 1e-5, 0), 7_248_023_552),
    "smollm2-135m": ((30, 576, 9, 3, 64, 1536, 49152, 1e5, 1e-5, 0), 134_515_008),
}


def preset(name: str, **flags: object) -> Config:
    return resolve(load_preset(name), {key.replace("__", "."): value for key, value in flags.items()})


def shape(model: ModelConfig) -> tuple[float, ...]:
    heads = model.num_heads, model.num_kv_heads, model.head_size
    rotary = model.rope_theta, model.norm_epsilon, model.sliding_window
    return model.num_layers, model.hidden_size, *heads, model.mlp_size, model.vocab_size, *rotary


@pytest.mark.parametrize("name", PUBLISHED)
def test_its_shape_is_the_published_one(name: str) -> None:
    model = preset(name).model
    assert (shape(model), count_parameters(model)) == PUBLISHED[name]
    assert (model.norm, model.positions, model.activation, model.bias) == ("rmsnorm", "rotary", "swiglu", "none")
    assert model.query_key_norm == name.startswith("qwen3") and model.padded_vocab_size == model.vocab_size
    assert model.tied_embedding == (name in ("llama3.2-1b", "qwen3-0.6b", "smollm2-135m"))
    scaled = model.rope_scaling, model.rope_factor, model.rope_low_frequency, model.rope_high_frequency
    assert scaled == (("llama3", 32, 1, 4) if name == "llama3.2-1b" else ("none", 1, 1, 4))


def test_the_demo_has_the_layers_of_gpt2_s() -> None:
    llama, gpt2 = (preset(name).model for name in ("llama-demo", "demo"))
    difference = count_parameters(gpt2) - count_parameters(llama)
    biases_and_norms, hidden = gpt2.num_layers * 11 * gpt2.hidden_size, gpt2.hidden_size
    assert difference == biases_and_norms + gpt2.sequence_length * hidden + hidden  # learned positions, a norm's bias
    assert load_preset("llama-demo")["train.steps"] == load_preset("demo")["train.steps"]


@pytest.mark.parametrize("tensor", [1, 2, 4, 8])
def test_the_demo_runs_on_every_tensor_group_of_the_other(tensor: int) -> None:
    validate_mesh(preset("llama-demo", mesh__tensor=tensor), tensor)
