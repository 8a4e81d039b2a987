"""docs/own-model.md: its layer on every mesh beside plain JAX and optax, with a cache, and what a family may not do."""

import dataclasses
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from blocks import ROOT, files
from flax import nnx

import megajax
from megajax.core.errors import UserError
from megajax.settings.config import Config
from megajax.settings.presets import load_preset, resolve
from megajax.verify.beside import beside_training
from megajax.verify.exact import compare_exactly
from megajax.verify.fields import run_step
from megajax.verify.forms import in_blocks, plain

SMALL = {
    **{"model.num_layers": 2, "model.hidden_size": 16, "model.sequence_length": 8, "model.vocab_size": 21},
    **{"model.vocab_multiple": 8, "train.global_batch": 4, "train.microbatch": 1, "optimizer.warmup_steps": 0},
}
MESH = {"mesh.data": 2, "mesh.pipe": 2, "mesh.tensor": 2}


@pytest.fixture(autouse=True)
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_names_stay: None) -> Iterator[None]:
    """The page's files, in the working directory."""
    text = (ROOT / "docs" / "own-model.md").read_text()
    (code,) = re.findall(r"```python\n(# parallel\.py\n.*?)```", text, re.DOTALL)
    (tmp_path / "parallel.py").write_text(code)
    (tmp_path / "parallel.toml").write_text(files()["parallel.toml"])
    (tmp_path / "README.md").write_text((ROOT / "README.md").read_text())
    monkeypatch.chdir(tmp_path)
    sys.modules.pop("megajax_plugin_parallel", None)
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):  # as users have it
        yield


def config(**overrides: object) -> Config:
    values = {key.replace("__", "."): value for key, value in overrides.items()}
    return resolve(load_preset("parallel.toml"), {"plugins": ["parallel.py"]} | SMALL | values)


def equal(config: Config) -> bool:
    """Whether a step on the mesh is that of one device, exactly."""
    return all(each.passed for each in compare_exactly(run_step(plain(config)), run_step(config, in_blocks(config))))


def test_its_layer_is_the_same_on_every_mesh() -> None:
    """With documents, deferred weight gradients and ZeRO-3; and not if a device takes the slopes of the first heads."""
    options = {"data.reset_attention": True, "pipeline.weight_gradients": "deferred", "optimizer.zero": 3}
    assert equal(config(**MESH | options))
    right, wrong = "tokens.own(jnp.asarray(self.slopes, wide))", "jnp.asarray(self.slopes, wide)[: q_BTHK.shape[2]]"
    code = Path("parallel.py").read_text()
    assert code.count(right) == 1
    Path("parallel.py").write_text(code.replace(right, wrong))
    sys.modules.pop("megajax_plugin_parallel")
    assert not equal(config(**MESH))


class Attending(nnx.Module):
    """What a cache can continue, with modules of nnx."""

    def __init__(self, config, weights):
        heads = (config.num_heads, config.head_size)
        self.into = weights.columns("into", config.hidden_size, bias=True, q=heads, k=heads, v=heads)
        self.out = weights.rows("out", heads, config.hidden_size, bias=True)
        self.mlp = nnx.Linear(config.hidden_size, config.hidden_size, rngs=weights.rngs("mlp"))

    def __call__(self, x_BTD, tokens):
        q, k, v = self.into(x_BTD, tokens)
        y_BTD = self.out(tokens.attend(tokens.rotated(q), tokens.rotated(k), v), tokens)
        return x_BTD + tokens.dropout("attention", y_BTD) + self.mlp(x_BTD)


class Scaled(nnx.Module):
    """An embedding, and a head."""

    def __init__(self, config, weights):
        self.linear = nnx.Linear(config.hidden_size, config.hidden_size, use_bias=False, rngs=weights.rngs("linear"))

    def __call__(self, x_BTD, *tokens):
        return x_BTD + self.linear(x_BTD)


def test_ends_dropout_and_generation() -> None:
    megajax.register("family", "attending", megajax.Family(Attending, Scaled, Scaled, generates=True))
    options = {"model.positions": "rotary", "model.dropout": 0.1, "pipeline.vocabulary": "split"}
    attending = config(**{"model.family": "attending"} | options | MESH)
    assert equal(attending)
    findings = {finding.name: finding.passed for finding in beside_training(attending)}
    assert findings.pop("exact generation with a cache") and all(findings.values())

    class Placed(Scaled):
        def __call__(self, x_BTD, tokens):
            return x_BTD + tokens.position_BT[:, :, None].astype(x_BTD.dtype)

    megajax.register("family", "attending", megajax.Family(Attending, Placed, generates=True))
    placed = config(**{"model.family": "attending", "model.positions": "rotary"})
    told = next(finding.where for finding in beside_training(placed) if "generation" in finding.name)
    assert "what generates depends on other tokens and positions by tokens.attend and rotated alone" in told


def test_registered_scores_and_gates_are_the_same_on_every_mesh() -> None:
    """Of megajax's own layers, with a cache, and where tokens are shared; a gate has a matrix of its own."""

    def capped(scores, query, key, head):
        return 9.0 * jnp.tanh(scores / 9.0) - (query - key) / (1.0 + head)

    megajax.register("scores", "capped", capped)
    megajax.register("attention-gate", "open", lambda heads, gate: heads * (1.0 + gate))
    megajax.register("gated-activation", "squared", lambda gate, up: jnp.square(gate) * up)
    options = {"model.family": "decoder", "model.activation": "squared", "model.scores": "capped", "model.head_size": 4}
    options |= {"model.attention_gate": "open"}
    mesh = {"mesh.context": 2, "mesh.tensor": 2, "model.context_attention": "gather", "model.num_kv_heads": 2}
    registered = config(**options | mesh)
    assert registered.model.gated and equal(registered)
    assert all(finding.passed for finding in beside_training(registered))
    plain_scores = dataclasses.replace(registered, model=dataclasses.replace(registered.model, scores="plain"))
    one, other = (run_step(plain(each)).taken.metrics["loss"] for each in (registered, plain_scores))
    assert (one != other).any()


class Wrong(nnx.Module):
    def __init__(self, config, weights):
        self.weight, self.held = weights("weight", 4, 4), self.hold(weights)

    def hold(self, weights):
        return ()

    def __call__(self, x_BTD, tokens):
        return x_BTD


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hold": lambda self, weights: jnp.arange(4)}, "held of Wrong is no weight; valid: .* in a tuple"),
        ({"hold": lambda self, weights: nnx.BatchNorm(4, rngs=weights.rngs("a"))}, "held.mean of Wrong is no weight"),
        ({"hold": lambda self, weights: nnx.List([nnx.Linear(4, 4, rngs=weights.rngs("a"))])}, "held.0.* is in a list"),
        (
            {"hold": lambda self, weights: weights("weight", 2)},
            "two are called weight; valid: another name, or weights.i",
        ),
        ({"hold": lambda self: ()}, "TypeError: .*; valid: a class or function of a ModelConfig and megajax.Weights"),
        ({"__call__": lambda self, x, tokens: x[:, 1:]}, r"returned float32 \[.*7, 16\] for float32 \[.*8, 16\]; v"),
        ({"__call__": lambda self, x, tokens: x.astype("bfloat16")}, "returned bfloat16 .* valid: the same"),
        ({"__call__": lambda self, x: x}, r"TypeError: .*; valid: layer\(x_BTD, tokens\)"),
    ],
)
def test_mistakes_of_a_layer_are_told(change: dict, message: str) -> None:
    megajax.register("family", "wrong", type("Wrong", (Wrong,), change))
    with pytest.raises(UserError, match=message):
        megajax.init(config(model__family="wrong", precision="fp32"))


@pytest.mark.parametrize(
    "flag", ["mesh.context 2", "lora.rank 2", "model.num-experts 4", "model.sliding-window 4", "sequence-parallel"]
)
def test_what_it_lacks_is_refused(flag: str) -> None:
    key, *value = flag.replace("-", "_").split()
    with pytest.raises(UserError, match=f"--{flag} with --model.family parallel; valid: --"):
        config(**{key: int(value[0]) if value else True})


def plain_losses(weights: dict, batches: list[dict[str, np.ndarray]], heads: int) -> list[float]:
    """The page's model in plain JAX with optax, on one device."""
    length, slope_H = batches[0]["tokens"].shape[1], 2.0 ** (-8 * jnp.arange(1, heads + 1) / heads)
    ahead_TS = jnp.arange(length)[None, :] - jnp.arange(length)[:, None]

    def norm(x_BTD, scale_D):
        return x_BTD * jax.lax.rsqrt(jnp.mean(x_BTD**2, -1, keepdims=True) + 1e-5) * scale_D

    def loss(weights, batch):
        shared, x_BTD = weights["shared"], weights["shared"]["table"][batch["tokens"]]
        for number in range(weights["blocks"]["layer"]["scale"].shape[0]):
            layer = jax.tree.map(lambda stack, number=number: stack[number], weights["blocks"]["layer"])
            y_BTD, into = norm(x_BTD, layer["scale"]), layer["into"]
            q, k, v, up = (jnp.tensordot(y_BTD, into[name]["weight"], 1) for name in ("q", "k", "v", "up"))
            scores = jnp.einsum("bthk,bshk->bhts", q, k) / q.shape[-1] ** 0.5 + slope_H[:, None, None] * ahead_TS
            seen = jax.nn.softmax(jnp.where(ahead_TS <= 0, scores, -jnp.inf))
            attended = jnp.tensordot(jnp.einsum("bhts,bshk->bthk", seen, v), layer["out"]["weight"], 2)
            x_BTD = x_BTD + attended + jax.nn.gelu(up) @ layer["down"]["weight"]
        logits = norm(x_BTD, shared["final_norm"]["scale"]) @ shared["table"][:512].T
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()

    optimizer, losses = optax.adam(1e-3), []
    state = optimizer.init(weights)
    step = jax.jit(jax.value_and_grad(loss))
    for batch in batches:
        value, grads = step(weights, batch)
        updates, state = optimizer.update(grads, state)
        weights, _ = optax.apply_updates(weights, updates), losses.append(float(value))
    return losses


@pytest.mark.slow
def test_twenty_losses_are_those_of_plain_jax() -> None:
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 512, (20, 16, 33), np.int32)
    batches = [{"tokens": rows[:, :-1], "targets": rows[:, 1:]} for rows in tokens]
    values = {"plugins": ["parallel.py"], "model.sequence_length": 32, "model.hidden_size": 32, "model.num_layers": 8}
    values |= {"optimizer.clip_norm": 1e9}
    expected: list[float] = []
    for mesh in (
        {},
        {"mesh.data": 2, "mesh.pipe": 2, "pipeline.weight_gradients": "deferred"},
        {"mesh.pipe": 4, "pipeline.schedule": "interleaved", "pipeline.chunks": 2},
        MESH,
    ):
        model = megajax.init(megajax.load_preset("parallel.toml", values | mesh), optimizer=optax.adam(1e-3))
        expected = expected or plain_losses(jax.tree.map(jnp.asarray, model.weights()), batches, heads=4)
        losses = [float(model.train_step(batch)["loss"]) for batch in batches]
        np.testing.assert_allclose(losses, expected, rtol=1e-6)


@pytest.mark.slow
def test_its_commands_and_its_export() -> None:
    """Trained, ended by a signal, resumed on the same and another mesh, exported as it says; generation is refused."""
    text, argv = (ROOT / "docs" / "own-model.md").read_text(), [sys.executable, "-m", "megajax"]
    first, second = re.findall(r"^megajax (train .*)$", text, re.MULTILINE)
    log_file, deadline = Path("runs/parallel/log.txt"), time.monotonic() + 600
    begun = [*argv, *first.split(), "--train.steps", "10000", "--train.log-every", "1"]
    with subprocess.Popen(begun, env=as_users_do(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        while not (log_file.exists() and " 5/10000 " in log_file.read_text()) and process.poll() is None:
            assert time.monotonic() < deadline, process.kill()
            time.sleep(0.1)
        process.terminate()
        assert b"stopped" in process.communicate()[1] and process.returncode == 143
    for command in (first, second):
        subprocess.run([*argv, *command.split()], check=True, env=as_users_do(), capture_output=True)
    log = log_file.read_text()
    assert "pipe 2 x tensor 2" in log and "step 40/40" in log and log.count("tokenizing ") == 1
    refused = [*argv, "generate", "--checkpoint", "runs/parallel", "--prompt", "a"]
    done = subprocess.run(refused, env=as_users_do(), capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "its layers keep no cache" in done.stderr
    (export,) = re.findall(r"```python\n(import flax.*?)```", text, re.DOTALL)
    subprocess.run([sys.executable, "-c", export], check=True, env=as_users_do(), capture_output=True)
    assert Path("parallel.safetensors").stat().st_size > 1e6


def as_users_do() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"} | {"PYTHONPATH": str(ROOT)}
