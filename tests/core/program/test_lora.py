"""LoRA: what is trained, against a plain computation, on any mesh."""

import dataclasses
import math
from typing import Any

import jax
import numpy as np
import pytest
from tiny import LLAMA, MIXTURE, QWEN3, drawn_params, full, tiny_config, tiny_program

from megajax.core.models.lora_config import LORA_TARGETS, LoraConfig
from megajax.core.program.communication import collectives_of
from megajax.core.program.program import Program
from megajax.core.program.state import TrainState
from megajax.core.program.train_step import loss_and_gradients, train_step_with_gradients
from megajax.data.synthetic import random_batch
from megajax.plan.communication import communication, totals
from megajax.plan.compiled import traced_step
from megajax.settings.config import Config
from megajax.verify import named_leaves
from megajax.verify.run import drawn_state

RANK, ALPHA, RATE, DECAY = 3, 5.0, 1e-3, 0.1
EPSILON = 1e-4  # with less, Adam makes full updates of gradients that are nothing but rounding


def config_of(mesh: tuple[int, int, int] = (1, 1, 1), **options: Any) -> Config:
    """Of a Llama of two layers, whose first update is of full size."""
    size = {"num_layers": 2, "dropout": 0.0, "lora": LoraConfig(rank=RANK, alpha=ALPHA)}
    config = tiny_config(mesh, **size | LLAMA | options)
    rates = {"learning_rate": RATE, "warmup_steps": 0, "weight_decay": DECAY, "epsilon": EPSILON}
    return dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, **rates))


def step(config: Config, canonical: TrainState) -> tuple[Program, TrainState, dict[str, float], dict[str, np.ndarray]]:
    """One step on a random batch: the program, the state after it, its figures, and the gradients in canonical form."""
    program = tiny_program(config)
    state = program.layout.from_canonical(canonical)
    batch = program.put_batch(random_batch(config, 0), program.local_rows)
    state, metrics, grads = train_step_with_gradients(program)(state, batch)
    figures = {name: float(value) for name, value in metrics.items() if value.ndim == 0}
    return program, state, figures, named_leaves(program.layout.canonical_weights(jax.device_get(grads)))


def flat(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[S, I, R] and [S, R, O], S layers or experts of layers, dims of heads joined."""
    stacked = math.prod(a.shape[:2]) if a.shape[1] == EXPERTS else len(a)
    return a.reshape(stacked, -1, RANK).astype(float), b.reshape(stacked, RANK, -1).astype(float)


EXPERTS = 10  # no other dim has this size
OF_EXPERTS = {"lora": LoraConfig(rank=RANK, alpha=ALPHA, targets=("attention", "experts")), "num_kv_heads": 2}
MIXED = MIXTURE | OF_EXPERTS | {"num_experts": EXPERTS, "shared_expert_size": 0}


@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ((1, 1, 1), {"num_kv_heads": 2}),  # any mesh is one device exactly (`test_field.py`)
        full((1, 1, 1), MIXED),
        full((1, 1, 4), MIXED | {"expert": 2}),
        full((2, 1, 4), {"num_kv_heads": 2}),
    ],
)
@pytest.mark.slow
def test_gradients_and_update_are_those_of_a_plain_computation(mesh: tuple, options: dict) -> None:
    """On a mesh whose devices share heads of keys. Merged weights trained whole on one device give the loss and every
    weight's gradient, numpy the rest: of A and B by the chain rule, their norm, the clipping, AdamW with decay; frozen
    weights stay as they are."""
    config = config_of(mesh, microbatch=2, **options)
    canonical = drawn_state(tiny_program(config))
    weights = named_leaves(canonical.params)
    adapters = {name.removeprefix("lora/"): leaf for name, leaf in weights.items() if name.startswith("lora/")}
    products = sorted({name.rpartition("/")[0] for name in adapters})
    assert len(products) == 7  # attention's four and three of the gated MLP or of experts
    merged = dict(weights)
    for name in products:
        a, b = flat(adapters[f"{name}/a"], adapters[f"{name}/b"])
        weight = weights[f"{name}/weight"]
        merged[f"{name}/weight"] = weight + (ALPHA / RANK * a @ b).reshape(weight.shape)
    plain = dataclasses.replace(config_of(**options | {"expert": 1}), lora=LoraConfig())
    whole = tiny_program(plain)
    params = jax.tree_util.tree_map_with_path(
        lambda path, leaf: merged["/".join(key.key for key in path)].astype(leaf.dtype),
        whole.layout.canonical_shapes.params,
    )
    loss, grads = loss_and_gradients(whole)(drawn_params(whole, params), random_batch(plain, 0), np.int32(0))
    of_weights = named_leaves(whole.layout.canonical_weights(jax.device_get(grads)))
    program, state, ours, gradients = step(config, canonical)
    assert ours["loss"] == pytest.approx(float(loss), rel=1e-6)
    expected = {}
    for name in products:
        a, b = flat(adapters[f"{name}/a"], adapters[f"{name}/b"])
        grad = of_weights[f"{name}/weight"].astype(float).reshape(len(a), a.shape[1], b.shape[2])
        expected[f"{name}/a"] = ALPHA / RANK * np.einsum("lio,lro->lir", grad, b)
        expected[f"{name}/b"] = ALPHA / RANK * np.einsum("lir,lio->lro", a, grad)
    assert gradients.keys() == expected.keys()
    norm = np.sqrt(sum(np.sum(leaf**2) for leaf in expected.values()))
    assert ours["grad_norm"] == pytest.approx(norm, rel=1e-5)
    after = named_leaves(jax.device_get(program.layout.to_canonical(state)).params)
    for name, leaf in expected.items():
        actual = gradients[name].reshape(leaf.shape)
        assert np.linalg.norm(actual - leaf) <= 1e-5 * np.linalg.norm(leaf), name
        clipped = actual * min(1.0, config.optimizer.clip_norm / norm)
        begun = adapters[name].reshape(leaf.shape)
        new = begun - RATE * (clipped / (np.abs(clipped) + EPSILON) + DECAY * begun)
        np.testing.assert_allclose(after[f"lora/{name}"].reshape(leaf.shape), new, rtol=0, atol=1e-6, err_msg=name)
    for name, leaf in weights.items():
        assert name.startswith("lora/") or after[name].tobytes() == leaf.tobytes(), name
    assert program.layout.adapters is not None
    held = program.layout.canonical_weights(jax.device_get(state.params))
    merged = named_leaves(program.layout.adapters.merged(held))
    assert merged.keys() == {name for name in weights if not name.startswith("lora/")}
    for name in products:
        a, b = flat(after[f"lora/{name}/a"], after[f"lora/{name}/b"])
        new = weights[f"{name}/weight"] + (ALPHA / RANK * a @ b).reshape(weights[f"{name}/weight"].shape)
        np.testing.assert_allclose(merged[f"{name}/weight"], new, rtol=0, atol=1e-6, err_msg=name)


def test_a_fresh_adapter_is_as_peft_draws_it() -> None:
    """A uniform up to 1 / sqrt(I), in every layer another; B zero."""
    layout = tiny_program(config_of(hidden_size=64, **QWEN3)).layout
    assert layout.adapters is not None
    for name, leaf in named_leaves(layout.adapters.init(0)).items():
        if name.endswith("/b"):
            assert not leaf.any(), name
            continue
        bound = 1 / np.sqrt(np.prod(leaf.shape[1:-1]))
        assert bound * 0.9 < np.abs(leaf).max() <= bound and abs(leaf.mean()) < bound / 5, name
        assert not np.array_equal(leaf[0], leaf[1]), name


def test_words_of_targets() -> None:
    gpt2, llama = (tiny_config(**words).model for words in ({}, LLAMA))
    assert LoraConfig(rank=1).products(gpt2) == ("query", "key", "value", "output", "up", "down")
    assert LoraConfig(rank=1).products(llama) == ("query", "key", "value", "output", *LORA_TARGETS["mlp"])
    assert LoraConfig(rank=1, targets=("down", "query")).products(llama) == ("query", "down")


@pytest.mark.parametrize(
    ("capacity", "mesh", "options"),
    [
        full(1.25, (1, 2, 2), {"expert": 2, "zero": 3, "remat": "selective", "num_layers": 2}),
        full(0.0, (1, 2, 2), {"expert": 2, "zero": 1, "remat": "layer", "num_layers": 2}),
        full(1.0, (2, 1, 2), {"expert": 2, "zero": 1, "sequence_parallel": True}),
        full(0.0, (1, 1, 2, 1), {"expert": 4, "zero": 3}),
    ],
)
def test_adapters_of_experts(capacity, mesh, options) -> None:
    """Their gradients on a mesh are those of one device, which follow from those of merged weights by the chain
    rule; what is sent is planned."""
    chosen = MIXTURE | {"expert_capacity": capacity, "lora": LoraConfig(rank=RANK, alpha=ALPHA, targets=("experts",))}
    config, one = config_of(mesh, **chosen | options), config_of(microbatch=8, **chosen)
    canonical = drawn_state(tiny_program(one))
    _, _, figures, gradients = step(config, canonical)
    layout = tiny_program(one).layout
    assert layout.adapters is not None
    merged, plain = layout.adapters.merged(canonical.params), dataclasses.replace(one, lora=LoraConfig())
    _, _, expected, whole = step(plain, tiny_program(plain).layout.begin(merged))
    assert figures["loss"] == pytest.approx(expected["loss"], rel=1e-6)
    weights = named_leaves(canonical.params)
    assert len(gradients) == 6
    for name in ("gate", "up", "down"):
        gradient = ALPHA / RANK * whole[f"blocks/mlp/{name}/weight"]
        a, b = (weights[f"lora/blocks/mlp/{name}/{matrix}"] for matrix in "ab")
        wanted = {"a": np.einsum("leio,lero->leir", gradient, b), "b": np.einsum("leir,leio->lero", a, gradient)}
        for matrix, value in wanted.items():
            found = gradients[f"blocks/mlp/{name}/{matrix}"]
            np.testing.assert_allclose(found, value, rtol=0, atol=1e-5 * np.abs(value).max(), err_msg=name)
    traced = traced_step(config, jax.devices()[: config.mesh.num_devices])
    assert totals(communication(config)) == totals(collectives_of(traced.jaxpr))
