"""The presets of the paper and of today's decoders, what is derived from a configuration, and every mistake in it."""

from typing import Any

import jax
import pytest
from tiny import user_error

from megajax.core.errors import UserError
from megajax.core.models.config import ModelConfig
from megajax.core.models.staged import count_active_parameters, count_parameters
from megajax.core.options import options
from megajax.settings.config import Config
from megajax.settings.presets import load_preset, resolve
from megajax.settings.validation import validate, validate_imagined, validate_mesh, with_data


def demo(**overrides: Any) -> Config:
    """The demo; `mesh__data=2` overrides `mesh.data`."""
    return resolve(load_preset("demo"), {key.replace("__", "."): value for key, value in overrides.items()})


@pytest.mark.parametrize("mesh", [(d, p, t) for d in (1, 2, 4, 8) for p in (1, 2, 4, 8) for t in (1, 2, 4, 8)])
def test_demo_runs_on_every_mesh_of_up_to_eight_devices(mesh: tuple[int, int, int]) -> None:
    config = demo(mesh__data=mesh[0], mesh__pipe=mesh[1], mesh__tensor=mesh[2])
    assert config.mesh.num_devices == mesh[0] * mesh[1] * mesh[2]
    assert config.model.num_layers % 8 == 0
    validate(config, config.mesh.num_devices)
    validate_mesh(resolve(load_preset("llama-demo"), {"mesh.tensor": mesh[2]}), mesh[2])


# name: layers, hidden, heads, parameters with the vocabulary padded to 51,200
PAPER = {
    "gpt2-355m": (24, 1024, 16, 355_788_800),
    "gpt2-1.2b": (40, 1536, 16, 1_213_479_936),
    "gpt2-2.5b": (54, 1920, 20, 2_490_408_960),
    "gpt2-4.2b": (64, 2304, 24, 4_199_109_120),
    "gpt2-8.3b": (72, 3072, 32, 8_317_040_640),
    "gpt2-8.3b-24heads": (72, 3072, 24, 8_317_040_640),
}


@pytest.mark.parametrize("name", PAPER)
def test_the_paper_s_models_and_recipe(name: str) -> None:
    config = resolve(load_preset(name))
    validate(config, 1)
    model, train, optimizer = config.model, config.train, config.optimizer
    layers, hidden = model.num_layers, model.hidden_size
    arrays = len(jax.live_arrays())
    assert (layers, hidden, model.num_heads, count_parameters(model)) == PAPER[name]
    assert len(jax.live_arrays()) == arrays  # none is made
    assert (model.vocab_size, model.padded_vocab_size, model.sequence_length) == (50257, 51200, 1024)
    assert (model.dropout, model.init_std, model.mlp_size) == (0.1, 0.02, 4 * hidden)
    assert (train.steps, train.global_batch, train.remat, config.precision) == (300_000, 512, "layer", "bf16")
    assert (optimizer.learning_rate, optimizer.min_learning_rate) == (1.5e-4, 1e-5)
    assert (optimizer.warmup, optimizer.decay_steps) == (3000, 300_000)
    assert (optimizer.weight_decay, optimizer.clip_norm) == (0.01, 1.0)
    assert config.run_dir == f"runs/{name}"


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
    "gemma3-1b": ((26, 1152, 4, 1, 256, 6912, 262144, 1e6, 1e-6, 512), 999_885_952),
    "olmo3-7b": ((32, 4096, 32, 32, 128, 11008, 100278, 5e5, 1e-6, 4096), 7_298_011_136),
}


MIXTURES = {  # weights, all and those that a token passes; experts, of a token, their width; qwen3's MLP is in no layer
    "mixtral-8x7b": ((46_702_792_704, 12_879_925_248), (8, 2, 14336)),
    "qwen3-30b-a3b": ((30_532_122_624, 3_353_032_704), (128, 8, 768)),
    "qwen3-next-80b-a3b": ((79_674_391_296, 3_874_929_408), (512, 10, 512)),
    "olmoe-1b-7b": ((6_919_161_856, 1_282_017_280), (64, 8, 1024)),
    "gpt-oss-20b": ((20_914_757_184, 4_187_440_704), (32, 4, 2880)),
    "moonlight-16b-a3b": ((15_960_110_208, 2_914_776_192), (64, 6, 1408)),
    "deepseek-v3": ((671_026_419_200, 37_552_297_472), (256, 8, 2048)),
}


@pytest.mark.parametrize("name", MIXTURES)
def test_a_mixture_has_the_published_numbers_of_weights(name: str) -> None:
    config = resolve(load_preset(name))
    validate(config, 1)
    model = config.model
    counts = count_parameters(model), count_active_parameters(model)
    assert (counts, (model.num_experts, model.experts_per_token, model.expert_size)) == MIXTURES[name]
    assert model.renormalize_shares == (name != "olmoe-1b-7b") and model.padded_vocab_size == model.vocab_size
    dense = resolve(load_preset("llama3-8b")).model
    assert count_active_parameters(dense) == count_parameters(dense)


def shape(model: ModelConfig) -> tuple[float, ...]:
    heads = model.num_heads, model.num_kv_heads, model.head_size
    rotary = model.rope_theta, model.norm_epsilon, model.sliding_window
    return model.num_layers, model.hidden_size, *heads, model.mlp_size, model.vocab_size, *rotary


@pytest.mark.parametrize("name", PUBLISHED)
def test_its_shape_is_the_published_one(name: str) -> None:
    model = resolve(load_preset(name)).model
    padding = (model.padded_vocab_size - model.vocab_size) * model.hidden_size * (1 if model.tied_embedding else 2)
    assert (shape(model), count_parameters(model) - padding) == PUBLISHED[name]
    words = ("rmsnorm-1p", "geglu-tanh", "5,1") if name == "gemma3-1b" else ("rmsnorm", "swiglu")
    assert (model.norm, model.activation, model.window_layers)[: len(words)] == words
    assert (model.positions, model.bias, padding > 0) == ("rotary", "none", name == "olmo3-7b")
    assert model.query_key_norm == name.startswith(("qwen3", "gemma3", "olmo3"))
    assert model.tied_embedding == (name in ("llama3.2-1b", "qwen3-0.6b", "smollm2-135m", "gemma3-1b"))
    scaled = model.rope_scaling, model.rope_factor, model.rope_low_frequency, model.rope_high_frequency
    assert scaled == (("llama3", 32, 1, 4) if name == "llama3.2-1b" else ("none", 1, 1, 4))


def test_the_demo_has_the_layers_of_gpt2_s() -> None:
    llama, gpt2 = (resolve(load_preset(name)).model for name in ("llama-demo", "demo"))
    difference = count_parameters(gpt2) - count_parameters(llama)
    biases_and_norms, hidden = gpt2.num_layers * 11 * gpt2.hidden_size, gpt2.hidden_size
    assert difference == biases_and_norms + gpt2.sequence_length * hidden + hidden  # learned positions, a norm's bias
    assert load_preset("llama-demo")["train.steps"] == load_preset("demo")["train.steps"]


def test_the_head_size_and_the_padding_of_the_vocabulary() -> None:
    model = demo(model__vocab_size=1025, model__hidden_size=96).model
    assert (model.head_size, model.mlp_size, model.padded_vocab_size) == (12, 384, 2048)
    assert demo(model__vocab_size=1025, model__vocab_multiple=1).model.padded_vocab_size == 1025


WSD = {"optimizer.schedule": "wsd"}
RAMP = {"train.ramp_start": 2, "train.ramp_increment": 2, "train.ramp_samples": 100}
CLUSTER = {"distributed.coordinator": "host:1234", "distributed.num_processes": 2, "distributed.process_id": 1}
INTERLEAVED = {"pipeline.schedule": "interleaved"}


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"mesh.tensro": 2}, "--mesh.tensro: unknown key; did you mean mesh.tensor?"),
        ({"sample.prompt": "\udcff"}, "valid: text in UTF-8"),
        ({"data.validation_fraction": 0}, "--data.validation-fraction 0 with --train.eval-every 25; valid: more than"),
        ({"train.eval_every": 0, "checkpoint.keep_best": 1}, "keep-best with --train.eval-every 0; valid"),
        ({"model.hidden_size": 190}, "--model.hidden-size 190 is not divisible by --model.num-heads 8; valid:"),
        ({"optimizer.warmup_steps": 101}, "which includes the warm-up; valid: at most 100"),
        ({"optimizer.min_learning_rate": 1}, "--optimizer.min-learning-rate 1.0 is above --optimizer.learning-rate"),
        ({"optimizer.cooldown_steps": 9}, "9 with --optimizer.schedule cosine; valid: --optimizer.schedule wsd, or 0"),
        (WSD, "--optimizer.cooldown-steps 0 with --optimizer.schedule wsd, which ends at --optimizer.decay-steps 100"),
        (WSD | {"optimizer.cooldown_steps": 61}, "after 40 steps of warm-up; valid: 1 to 60"),
        ({"optimizer.muon_steps": 6}, "valid: --optimizer.name muon, or --optimizer.muon-steps 5"),
        ({"train.ramp_start": 2}, "and --train.ramp-samples missing; valid: all of --train.ramp-start,"),
        (RAMP | {"train.ramp_start": 8}, "8 with --train.global-batch 8, to which it grows; valid: 1"),
        (RAMP | {"train.ramp_increment": 4}, "not lead from --train.ramp-start 2 to --train.global-batch 8; valid"),
        *(
            ({"pipeline.layers": text}, f"--pipeline.layers {said}; valid: even, auto, or numbers of layers separated")
            for text, said in {"4,-1": "4,-1", "4,,4": "4,,4", "": "is empty"}.items()
        ),
        ({"optimizer.zero": 0, "optimizer.zero_ranks": 2}, "--optimizer.zero-ranks 2 with --optimizer.zero 0; valid"),
        ({"optimizer.skip_above": 0.5}, "--optimizer.skip-above 0.5; valid: more than 1 and at most 1000000000, or 0"),
        ({"optimizer.gradient_dtype": "bf16"}, "--optimizer.gradient-dtype bf16 with --precision fp32; valid: fp32"),
        ({"loss_scale.initial": 0.5}, "--loss-scale.initial 0.5; valid: 1 to 2^64"),
        ({"distributed.num_processes": 2}, "--distributed.coordinator and --distributed.process-id missing"),
        (CLUSTER | {"distributed.process_id": 2}, "2 with --distributed.num-processes 2; valid: 0 to 1"),
        (CLUSTER | {"distributed.coordinator": "host"}, "--distributed.coordinator 'host'; valid: HOST:PORT"),
        (CLUSTER | {"distributed.coordinator": ":80"}, "HOST:PORT"),
    ],
)
def test_values_that_are_wrong_by_themselves_name_the_flag_and_what_is_valid(
    overrides: dict[str, Any], words: str
) -> None:
    short = {"train.steps": 100, "train.eval_every": 25, "optimizer.warmup_steps": 40, "optimizer.decay_steps": 100}
    assert words in user_error(resolve, load_preset("demo") | short, overrides)


def test_data_parallel_replicas_for_the_devices_that_there_are() -> None:
    """As a flag and in a preset; with fewer devices the batch is the same, or the nearest numbers are named."""
    config = resolve(load_preset("demo") | {"mesh.data": "auto"}, {"mesh.tensor": 2, "optimizer.zero_ranks": 2})
    assert [with_data(config, devices).mesh.data for devices in (4, 8)] == [2, 4]
    assert with_data(config, 8).mesh.replica == 2
    assert with_data(demo(mesh__data=2), 1).mesh.data == 2
    found = user_error(with_data, config, 6)
    assert "--mesh.data auto is 3 on 6 devices, which cannot share the rows of --train.global-batch 8; " in found
    assert "valid: 4 (--mesh.data 2) or 8 (--mesh.data 4) devices" in found
    assert "with --mesh.tensor 2 on 3 devices; valid: a multiple of 2" in user_error(with_data, config, 3)
    assert with_data(config, 6, trains=False).mesh.data == 3
    assert "--mesh.data auto without the devices; valid: a number" in user_error(validate_imagined, config)


def test_the_mesh_must_have_the_size_of_the_devices() -> None:
    found = user_error(validate, demo(mesh__data=2, mesh__pipe=2, mesh__tensor=2), 1)
    assert "--mesh.data 2 x --mesh.pipe 2 x --mesh.tensor 2 needs 8 devices, but there is 1" in found
    assert "--simulate-devices 8" in found
    config = resolve(load_preset("demo"), CLUSTER | {"mesh.data": 8})
    assert "--simulate-devices 4" in user_error(validate, config, 2)
    validate(config, 8)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"mesh.tensor": 3}, "--mesh.tensor 3 does not divide --model.num-heads 8; valid: 1, 2, 4, 8"),
        ({"mesh.data": 8, "optimizer.zero_ranks": 3}, "zero-ranks 3 does not divide --mesh.data 8; valid: 1, 2, 4, 8"),
        (
            {"mesh.tensor": 8, "model.vocab_size": 4094, "model.vocab_multiple": 1},
            "--mesh.tensor 8 does not divide the padded vocabulary of 4094 (see --model.vocab-multiple); valid: 1, 2",
        ),
        ({"mesh.tensor": 3, "model.num_heads": 6, "model.hidden_size": 192}, "new run --model.vocab-multiple 3072"),
        ({"mesh.data": 3}, "--train.global-batch 8 is not divisible by --mesh.data 3 x --train.microbatch 1; valid:"),
        ({"sequence_parallel": True, "mesh.tensor": 8, "model.sequence_length": 252}, "--sequence-parallel: "),
        ({"train.microbatch": 3}, "--train.microbatch 3; valid: a multiple of 3, or --train.microbatch 2"),
        ({"train.recheck": 10}, "--train.recheck 10 with --mesh.data 1, where no device has a second copy of what"),
        (RAMP | {"mesh.data": 2, "train.microbatch": 2}, "2 x --train.microbatch 2; valid: multiples of 4"),
        (RAMP | {"mesh.data": 4, "train.ramp_start": 4}, "has steps of 6 sequences, not divisible by --mesh.data 4"),
        (INTERLEAVED, "--pipeline.schedule interleaved with --mesh.pipe 1; valid: --mesh.pipe 2 or more, or"),
        (INTERLEAVED | {"mesh.pipe": 2}, "--pipeline.chunks 1 with --pipeline.schedule interleaved; valid: 2 to 4"),
        (INTERLEAVED | {"mesh.pipe": 2, "pipeline.chunks": 5}, "which leaves a stage without a layer; valid: 2"),
        (INTERLEAVED | {"mesh.pipe": 8, "pipeline.chunks": 2}, "8 are too few for 2 chunks on each of"),
        ({"mesh.pipe": 9}, "9 with --model.num-layers 8, which leaves a stage without a layer; valid: 1 to 8"),
        ({"pipeline.chunks": 2}, "--pipeline.chunks 2 with --pipeline.schedule 1f1b; valid: 1, or --pipeline.schedule"),
        ({"mesh.pipe": 2, "pipeline.schedule": "gpipe", "pipeline.chunks": 3}, "--pipeline.chunks 3 with --pipeline"),
        ({"mesh.pipe": 2, "pipeline.layers": "4,3,1"}, "4,3,1: 3 numbers with the sum 8, with --mesh.pipe 2 and"),
        (INTERLEAVED | {"mesh.pipe": 2, "pipeline.chunks": 2, "pipeline.layers": "2,2,2,3"}, "or 4 with the sum 8"),
        ({"mesh.pipe": 9, "pipeline.layers": "auto"}, "which leaves a stage without a layer; valid: 1 to 8"),
        ({"mesh.pipe": 3, "pipeline.vocabulary": "split"}, "--mesh.tensor 1 does not divide the padded vocabulary of"),
    ],
)
def test_what_the_mesh_or_the_model_cannot_have(overrides: dict[str, Any], words: str) -> None:
    config = resolve(load_preset("demo"), overrides)
    assert words in user_error(validate, config, config.mesh.num_devices)


@pytest.mark.parametrize(
    "overrides",
    [
        INTERLEAVED | {"mesh.pipe": 2, "pipeline.chunks": 4},
        INTERLEAVED | {"mesh.pipe": 2, "pipeline.chunks": 3},  # 8 layers on 6 virtual stages
        {"mesh.pipe": 3},  # layers need not be divisible
        {"mesh.pipe": 8, "pipeline.vocabulary": "split"},
        {"mesh.pipe": 9, "pipeline.layers": "0,1,1,1,1,1,1,2,0"},
        INTERLEAVED | {"mesh.pipe": 2, "pipeline.chunks": 5, "pipeline.layers": "1,1,1,1,1,1,1,1,0,0"},
        {"pipeline.layers": "8"},
        {"pipeline.vocabulary": "split", "model.vocab_multiple": 1, "model.vocab_size": 2047},  # one stage: not split
    ],
)
def test_schedules_that_are_valid(overrides: dict[str, Any]) -> None:
    config = resolve(load_preset("demo"), overrides)
    validate(config, config.mesh.num_devices)
    validate_mesh(demo(mesh__data=3), 3)  # without the batch


@pytest.mark.parametrize(
    ("preset", "mesh", "nearest"),
    [
        ("gpt2-8.3b", (8, 1, 7), "--mesh.data 8 --mesh.pipe 1 --mesh.tensor 8"),
        ("gpt2-8.3b", (3, 1, 8), "--mesh.data 4 --mesh.pipe 1 --mesh.tensor 8"),  # of the batch: 512 / 8
        ("gpt2-8.3b-24heads", (8, 3, 9), "--mesh.data 8 --mesh.pipe 3 --mesh.tensor 8"),
        ("bert-336m", (6, 1, 3), "--mesh.data 8 --mesh.pipe 1 --mesh.tensor 4"),
        ("llama3-8b", (1, 1, 64), "--mesh.data 1 --mesh.pipe 1 --mesh.tensor 32"),
    ],
)
def test_the_nearest_mesh_is_named(preset: str, mesh: tuple[int, int, int], nearest: str) -> None:
    config = resolve(load_preset(preset), dict(zip(("mesh.data", "mesh.pipe", "mesh.tensor"), mesh, strict=True)))
    with pytest.raises(UserError, match=f"; valid: .*; the nearest valid mesh: {nearest}$"):
        validate_imagined(config)


def test_a_batch_that_no_mesh_can_have() -> None:
    with pytest.raises(UserError, match=r"is not divisible by .*; the nearest valid mesh: none$"):
        validate_imagined(demo(train__global_batch=7, train__microbatch=2))
    validate_imagined(demo(mesh__data=2))


def test_every_field_has_a_help_text() -> None:
    assert {"seed", "model.num_layers", "distributed.process_id"} <= set(options(Config))
    assert all(option.help and not option.help.endswith(".") for option in options(Config).values())
