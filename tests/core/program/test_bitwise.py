"""Training has the same bits on every mesh with `--bitwise` (docs/bitwise.md)."""

import contextlib
import dataclasses
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import GEMMA, GPT_OSS, LATENT, LLAMA, MIXTURE, OLMO2, QWEN3, full, tiny_config, user_error

from megajax.core.batch import IGNORED
from megajax.core.errors import UserError
from megajax.core.models.lora_config import LoraConfig
from megajax.core.models.own_loss import Logits, Loss
from megajax.core.parallel import integer_sums
from megajax.core.parallel.integer_sums import digit_bits, floats, integers
from megajax.core.pipeline.sums import Integers
from megajax.core.program.program import Program
from megajax.core.program.train_step import train_step
from megajax.generation.choice import Sampling
from megajax.generation.decoder import Decoder
from megajax.library.own import with_own
from megajax.settings.config import Config
from megajax.settings.validation import validate
from megajax.verify.bits import compared, numbers, same_bits
from megajax.verify.run import drawn_state
from megajax.verify.verdict import Finding

DECODER = {"vocab_multiple": 8, "head_size": 4}
ALL = {"schedule": "interleaved", "chunks": 2, "num_layers": 4, "zero": 3, "weight_gradients": "deferred"}
_PATIENCE = "--xla_cpu_collective_call_terminate_timeout_seconds=3600"
_CHILD = """
import pickle, sys
from megajax.start.launch import avoid_known_faults
avoid_known_faults()
import jax
jax.config.update("jax_num_cpu_devices", 16)
function, arguments = pickle.load(sys.stdin.buffer)
sys.stdout.buffer.write(pickle.dumps(function(*arguments)))
"""
PLAIN_ROPE = {"rope_scaling": "none", "rope_factor": 1.0, "rope_score_scale": 0.0}
EXPERTS = MIXTURE | PLAIN_ROPE | {"balance": "both", "shared_expert_gate": True}
DEEPSEEK = MIXTURE | LATENT | PLAIN_ROPE | {"router_scores": "sigmoid", "dense_layers": 1, "balance": "bias"}
DEEPSEEK |= {"expert_groups": 4, "chosen_groups": 2, "share_scale": 1.5}
HYBRID = QWEN3 | {"linear_heads": 4, "linear_key_size": 6, "linear_value_size": 4, "layer_order": "pre-reordered"}
ALL_LINEAR = {"linear_layers": "all", "query_key_norm": False, "sliding_window": 0}
MUON = {"optimizer": {"name": "muon", "zero_ranks": 2}}
BERT = {"family": "bert", "activation": "gelu", "layer_order": "post"}


def alone(function: Callable[..., Any], *arguments: Any) -> Any:
    """The result of a function of this file in a process with the compiler's own flags: those of tests have other
    emitters."""
    environment = os.environ | {"XLA_FLAGS": _PATIENCE, "PYTHONPATH": os.pathsep.join(sys.path)}
    child, given = [sys.executable, "-c", _CHILD], pickle.dumps((function, arguments))
    return pickle.loads(subprocess.run(child, input=given, env=environment, stdout=subprocess.PIPE, check=True).stdout)


def own_loss(logits: Logits, batch: Any) -> dict[str, jax.Array]:
    """What is computed from columns, and from whole logits."""
    targets = jnp.maximum(batch["targets"], 0)
    squares = jnp.square(jnp.take_along_axis(logits.whole(), targets[..., None], -1)[..., 0])
    log_sum = logits.logsumexp()
    return {"loss": logits.cross_entropy(batch["targets"]) + 1e-3 * (squares + log_sum), "entropy": logits.entropy()}


@pytest.mark.parametrize(
    ("parts", "mesh", "others"),
    [
        pytest.param(4, (2, 1, 2), DECODER | EXPERTS | MUON | {"zero": 3, "num_layers": 1}, marks=pytest.mark.slow),
        full(4, (2, 2, 2), DECODER | {"zero": 3, "weight_gradients": "deferred", "dropout": 0.1}),
        full(1, (8, 1, 1), DECODER | {"dropout": 0.1}),
        full(1, (2, 2, 1), DECODER | ALL | {"precision": "bf16"}),
        full(4, (1, 1, 4), DECODER | {"remat": "layer", "dropout": 0.1}),
        full(4, (2, 1, 4), DECODER | LLAMA | {"rope_scaling": "none", "rope_factor": 1.0, "num_kv_heads": 1}),
        full(4, (1, 2, 2), DECODER | QWEN3 | {"reset_attention": True}),
        full(4, (2, 2, 2), DECODER | OLMO2 | ALL),
        full(4, (1, 1, 4), DECODER | GEMMA | {"precision": "bf16", "freeze": ("embedding", "layers.0")}),
        full(2, (2, 2, 2), DECODER | {"attention_sinks": True, "attention_gate": "sigmoid", "precision": "fp16"}),
        full(2, (2, 2, 2), BERT),
        full(4, (2, 2, 2), DECODER | ALL | {"sequence_parallel": True, "dropout": 0.1}),
        full(4, (1, 1, 4), DECODER | GEMMA | {"sequence_parallel": True, "precision": "bf16"}),
        full(2, (4, 1, 2), DECODER | MUON | {"zero": 3, "num_layers": 1}),
        full(4, (1, 2, 4), DECODER | {"lora": LoraConfig(rank=3), "weight_gradients": "deferred"}),
        full(4, (2, 1, 2), DECODER | {"loss": Loss(own_loss, measures=("entropy",)), "num_layers": 1}),
        full(4, (2, 2, 2), DECODER | EXPERTS | ALL | {"expert_capacity": 1.0}),
        full(2, (2, 2, 2), DECODER | DEEPSEEK | {"num_layers": 5, "precision": "bf16"}),
        full(4, (1, 2, 2), DECODER | DEEPSEEK | {"num_layers": 3, "weight_gradients": "deferred"}),
        full(4, (1, 1, 4), DECODER | EXPERTS | GPT_OSS | {"precision": "bf16"}),
        full(4, (2, 2, 2), DECODER | HYBRID | ALL | {"linear_layers": "1,1", "num_layers": 8}),
        full(2, (2, 1, 2), DECODER | HYBRID | ALL_LINEAR | {"linear_decay": "channel", "precision": "bf16"}),
    ],
)
def test_every_mesh_has_the_bits_of_one_device(parts: int, mesh: tuple[int, ...], others: dict[str, Any]):
    loss = others.pop("loss", None)
    config = with_own(dataclasses.replace(tiny_config(mesh, **others), bitwise=parts), loss, None)
    validate(config, config.mesh.num_devices)
    found = alone(bits_of_steps, config)
    assert found.passed, found


def bits_of_steps(config: Config) -> Finding:
    return same_bits(config, jax.devices(), steps=3)


@pytest.mark.full
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("words", [{}, LLAMA | {"rope_scaling": "none", "rope_factor": 1.0}, GEMMA, BERT])
def test_random_meshes_have_the_bits_of_one_device(words: dict[str, Any], precision: str):
    """Eight of up to 16 devices, 100 steps each, with whatever else may change in a run."""
    rng, configs = np.random.default_rng(len(words)), list[Config]()
    same = {"precision": precision, "num_layers": 4}
    while len(configs) < 9:
        mesh = tuple(int(rng.choice([1, 2, 4, 8])) for _ in range(3)) if configs else (1, 1, 1)
        choices = {"schedule": ["gpipe", "1f1b", "interleaved"], "weight_gradients": ["together", "deferred"]}
        choices |= {"zero": [0, 1, 3], "sequence_parallel": [False, True]}
        choices |= {"remat": ["none", "layer", "selective"]}
        chosen = {name: rng.choice(np.array(each, object)) for name, each in choices.items()}
        chosen |= {"chunks": 2 if chosen["schedule"] == "interleaved" else 1}
        others = (DECODER if words != BERT else {}) | words | same | (chosen if configs else {})
        config = dataclasses.replace(tiny_config(mesh, **others), bitwise=8 if words == {} else 4)
        with contextlib.suppress(*[UserError] * bool(configs)):
            validate(config, config.mesh.num_devices)
            configs += [config] * (config.mesh.num_devices <= 16)
    wrong = alone(bits_of_meshes, configs)
    assert not wrong, wrong


def bits_of_meshes(configs: list[Config]) -> list[Any]:
    expected, *others = (numbers(config, jax.devices(), 100) for config in configs)
    first = list(expected)
    found = [(config, compared("bits", first, each)) for config, each in zip(configs[1:], others, strict=True)]
    return [(config, finding) for config, finding in found if not finding.passed]


@pytest.mark.full
def test_generated_ids_have_the_bits_of_scoring_and_of_the_step():
    """With a cache, any batch and any mesh; of a step, the loss of one id alone is what is compared."""
    found = alone(generated)
    assert len(found) == 5 and all(each == found[0] for each in found), found


def generated() -> list[Any]:
    sizes, found = DECODER | QWEN3 | {"num_kv_heads": 4, "sliding_window": 0, "sequence_length": 32, "dropout": 0.0}, []
    prompts = [np.random.default_rng(size).integers(0, 101, size).tolist() for size in (3, 7, 1)]
    for mesh, batch in (((1, 1, 1), 3), ((1, 1, 1), 1), ((2, 1, 2), 2), ((1, 1, 4), 3)):
        config = dataclasses.replace(tiny_config(mesh, precision="bf16", **sizes), bitwise=4)
        program = Program.on(config, jax.devices()[: config.mesh.num_devices])
        state = program.layout.from_canonical(drawn_state(program))
        decoder = Decoder(program, state.params, Sampling(0.8, seed=1), (), logprobs=True)
        pieces = decoder.stream(prompts, max_tokens=9, batch=batch)
        found.append({piece.number: (piece.ids, piece.logprobs) for piece in pieces})
    # As training sees them: in a batch of one text, each id in turn is the only target.
    seen: dict[int, Any] = {}
    for number, prompt in enumerate(prompts):
        ids, losses = found[0][number][0], []
        text = np.zeros((program.config.train.global_batch, 33), np.int32)
        text[:, : len(prompt) + len(ids)] = [*prompt, *ids]
        for place in range(len(prompt), len(prompt) + len(ids)):
            targets = np.full_like(text[:, 1:], IGNORED)
            targets[0, place - 1] = text[0, place]
            batch = program.put_batch({"tokens": text[:, :-1], "targets": targets}, program.local_rows)
            copy = jax.tree.map(jnp.copy, state)
            losses.append(0.0 - float(train_step(program)(copy, batch)[1]["loss"]))
        seen[number] = ids, losses
    return [*found, seen]


@pytest.mark.full
def test_planted_faults_are_found():
    """On two devices; the one without a fault passes, and every other is found in its step."""
    found = alone(faulty)
    assert found.pop("none").passed
    assert {name: finding.where.split(",")[0] for name, finding in found.items()} == {
        "a bit lost at step 10": "step 10",
        "an overflowed norm": "step 1",
        "a NaN on one device": "step 1",
        "a wrong bound": "step 1",
        "a microbatch left out": "step 1",
    }


def faulty() -> dict[str, Finding]:
    from megajax.core.program import bind, train_step

    def on_second(function: Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array], jax.Array]:
        return lambda x: jnp.where(jax.lax.axis_index("data") == 1, function(x), x)

    def with_gradients(change: Callable[[jax.Array, jax.Array], jax.Array]) -> Callable[..., Any]:
        def changed(program: Program, params: Any, batch: Any, step: jax.Array, *others: Any) -> Any:
            losses, grads, *rest = right(program, params, batch, step, *others)
            return losses, jax.tree.map(on_second(lambda x: change(x, step)), grads), *rest

        return changed

    def without_last_row(program: Program, params: Any, batch: Any, *others: Any) -> Any:
        ignored = on_second(lambda x: x.at[-1].set(IGNORED))(batch["targets"])
        return right(program, params, batch | {"targets": ignored}, *others)

    def flipped(x: jax.Array, step: jax.Array) -> jax.Array:
        bits = jax.lax.bitcast_convert_type(x, jnp.int32)
        return jnp.where(step == 9, jax.lax.bitcast_convert_type(bits ^ 1, jnp.float32), x)

    right, bound = train_step._losses_and_gradients, bind.bound_exponent
    sums, terms = train_step.integer_sums.norm, Integers.terms
    faults: dict[str, tuple[Any, str, Any]] = {
        "none": (train_step, "_losses_and_gradients", right),
        "a bit lost at step 10": (train_step, "_losses_and_gradients", with_gradients(flipped)),
        "an overflowed norm": (train_step.integer_sums, "norm", lambda arrays: sums(arrays) * 1e30 * 1e30),
        "a NaN on one device": (
            Integers,
            "terms",
            lambda self, grads: terms(self, jax.tree.map(on_second(_nan), grads)),
        ),
        "a wrong bound": (bind, "bound_exponent", lambda norms, scale, rows: bound(norms, scale, rows // 2) - 9),
        "a microbatch left out": (train_step, "_losses_and_gradients", without_last_row),
    }
    one, two = (dataclasses.replace(tiny_config((n, 1, 1), num_layers=1), bitwise=1) for n in (1, 2))
    expected, found = list(numbers(one, jax.devices(), 12)), {}
    for name, (module, attribute, fault) in faults.items():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, attribute, fault)
            found[name] = compared("bits", expected, numbers(two, jax.devices(), 12))
    return found


def _nan(x: jax.Array) -> jax.Array:
    return x.at[0].set(jnp.nan)


def test_sums_of_integers_do_not_depend_on_their_order():
    terms, bits = np.random.default_rng(0).normal(0, 1, (64, 5)).astype(np.float32), digit_bits(64)
    terms[0, 0] = 2.0**-20
    digits = np.asarray(jax.vmap(lambda x: integers(x, 4, bits))(terms))
    forward, shuffled = (digits[order].sum(0) for order in (np.arange(64), np.random.default_rng(1).permutation(64)))
    assert (forward == shuffled).all() and digits.dtype == np.int32
    np.testing.assert_allclose(floats(jnp.asarray(forward), 4, bits), terms.astype(float).sum(0), rtol=1e-6)


def test_what_integers_cannot_hold_is_counted():
    numbers = jnp.array([1.0, -17.0, jnp.nan, jnp.inf, 16.0])
    assert integer_sums.not_summed(numbers, 4).tolist() == [2, 2]
    norms = jnp.zeros(4).at[0].set(3.0)
    raised = integer_sums.raised(norms, jnp.int32(1))
    before, after = (int(integer_sums.bound_exponent(each, jnp.float32(1), 1)) for each in (norms, raised))
    assert after >= before + 6
    # A loss scale of 2^16 makes gradients as much larger, 256 rows make those of one smaller by their root.
    assert integer_sums.bound_exponent(norms, jnp.float32(2.0**16), 256) == 2 + 6 + 16 - 4


@pytest.mark.parametrize("large", [1e-20, 1.0, 1e15])
def test_the_norm_is_that_of_all_numbers(large: float):
    one = jax.sharding.Mesh(jax.devices()[:1], ("data",))
    arrays = [np.random.default_rng(n).normal(0, large, 2**21 + n).astype(np.float32) for n in range(2)]
    of = jax.jit(jax.shard_map(lambda *x: integer_sums.norm(x), mesh=one, in_specs=jax.P(), out_specs=jax.P()))
    expected = np.sqrt(sum((x.astype(float) ** 2).sum() for x in arrays))
    np.testing.assert_allclose(of(*arrays), expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("parts", "change", "expected"),
    [
        (4, {"mesh": (1, 1, 8)}, "--mesh.tensor 8 does not divide --bitwise 4; valid: 1, 2, 4"),
        (
            2,
            BERT | {"sequence_parallel": True},
            "--sequence-parallel with --bitwise 2 and --model.family bert; valid: --no-sequence-parallel, or "
            "--bitwise 0",
        ),
        (1, {"ema": 0.5}, "--train.ema 0.5 with --bitwise 1; valid: --train.ema 0, or --bitwise 0"),
        (
            1,
            {"precision": "fp64"},
            "--precision fp64 with --bitwise 1; valid: --precision fp32, --precision bf16, --precision fp16, or "
            "--bitwise 0",
        ),
        (16, {}, "--bitwise 16 does not divide --model.num-heads 8; valid: 8 or less"),
        (1, {"global_batch": 2**17}, "--train.global-batch 131072 with --bitwise 1; valid: at most 65,536 sequences"),
    ],
)
def test_what_is_not_tested_is_refused(parts: int, change: dict[str, Any], expected: str):
    config = dataclasses.replace(tiny_config(**{"mesh": (1, 1, 1)} | change), bitwise=parts)
    assert user_error(validate, config, config.mesh.num_devices) == expected
