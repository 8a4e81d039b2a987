"""Rotary angles of random settings in config.json are those of `transformers`, and an export means the same there."""

import contextlib
import copy
import dataclasses
import importlib
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hugging_face import CLASSES, DECODERS, LLAMA3, MIXTURES, SETTINGS

from megajax.convert.families import exchange_of
from megajax.convert.settings import Fields
from megajax.core.errors import UserError
from megajax.core.models.config import ModelConfig
from megajax.core.models.rotary import rotations
from megajax.settings.model_checks import check_model

pytestmark = pytest.mark.peer
transformers = pytest.importorskip("transformers", reason="the extra `peer` is not installed")
llama = pytest.importorskip("transformers.models.llama.modeling_llama", reason="the extra `peer` is not installed")


def random_settings(seed: int) -> dict[str, Any]:
    """Fields of a Llama with YaRN, in either spelling; those that may be are sometimes missing or null."""
    rng = np.random.default_rng(seed)
    length = int(rng.integers(20, 120_000))
    part = {"factor": float(rng.uniform(1, 60)), "original_max_position_embeddings": length}
    optional = {"beta_slow": float(rng.uniform(0.1, 1)), "truncate": bool(rng.integers(2))}
    optional["beta_fast"] = 1.0 + float(rng.choice([0, rng.uniform(0, 60)]))
    optional |= {name: float(rng.uniform(0.1, 2)) for name in ("attention_factor", "mscale", "mscale_all_dim")}
    part |= {name: value for name, value in optional.items() if rng.random() < 0.5}
    part |= {name: None for name in ("attention_factor", "mscale") if name not in part and rng.random() < 0.5}
    if rng.random() < 0.3:
        del part["original_max_position_embeddings"]
    theta = {"rope_theta": float(10 ** rng.uniform(0.5, 7))}
    spelled: dict[str, Any] = {"rope_parameters": {"rope_type": "yarn"} | part | theta}
    if rng.random() < 0.5:
        spelled = {"rope_scaling": {str(rng.choice(["type", "rope_type"])): "yarn"} | part} | theta
    sizes = {"head_dim": 2 * int(rng.integers(1, 70)), "max_position_embeddings": length * int(rng.integers(1, 9))}
    return SETTINGS["llama"] | sizes | spelled


def read_model(folder: Path, kind: str, fields: dict[str, Any]) -> tuple[Any, ModelConfig]:
    exchange = exchange_of(Fields(folder, fields | {"model_type": kind}))
    read = exchange.read_settings(Fields(folder, copy.deepcopy(fields)), {})
    return exchange, ModelConfig(
        **{key.removeprefix("model."): value for key, value in read.items() if "model." in key}
    )


FULL, WINDOWED = "full_attention", "sliding_attention"
SCALED = {"rope_type": "llama3", **LLAMA3}
BY_LAYER = {FULL: SCALED, WINDOWED: {"rope_type": "default"}}
ODD: list[dict[str, Any]] = [
    {"original_max_position_embeddings": 7, "rope_scaling": SCALED, "sliding_window_pattern": 3},
    {"original_max_position_embeddings": 7, "rope_local_base_freq": 9.0, "rope_parameters": BY_LAYER},
    {"rope_local_base_freq": 9.0, "rope_scaling": {"type": "linear", "factor": 2.0}, "rope_theta": 7.0},
    {"rope_parameters": {}},
]


@pytest.mark.parametrize("kind", [*DECODERS, *MIXTURES])
def test_fields_that_other_classes_read(kind: str, tmp_path: Path) -> None:
    """Angles and windows of every layer are as there, which may ignore fields, unless they are refused."""
    peer = getattr(transformers, CLASSES[kind])
    found = vars(importlib.import_module(peer.__module__))
    (rotary,) = (found[name] for name in found if re.search("(?<!Vision)RotaryEmbedding$", name))
    for odd in ODD:
        fields = SETTINGS[kind] | {"num_hidden_layers": 6, "layer_types": None} | odd
        with contextlib.suppress(UserError):
            model = read_model(tmp_path, kind, fields)[1]
            config = peer.config_class(**copy.deepcopy(fields))
            angles, types = rotary(config), getattr(config, "layer_types", None) or [""] * 6
            for layer, windowed in zip(types, model.windowed_in_order, strict=True):
                assert windowed == (layer == WINDOWED) or not layer
                local = {"rope_theta": model.window_rope_theta, "rope_scaling": "none"}
                own = dataclasses.replace(model, **local) if windowed and model.window_rope_theta else model
                theirs = getattr(angles, f"{layer}_inv_freq", getattr(angles, "inv_freq", None))
                pairs = (model.rotary_size or model.head_size) // 2
                np.testing.assert_allclose(rotations(own, pairs)[0], theirs, rtol=3e-6, err_msg=str(odd))


@pytest.mark.parametrize("seed", range(40))
def test_random_yarn(seed: int, tmp_path: Path) -> None:
    fields = random_settings(seed)
    exchange, model = read_model(tmp_path, "llama", fields)
    check_model(model)
    rotation_P, factor = rotations(model, model.head_size // 2)
    exported = exchange.settings(model, (), None)["config.json"]
    older = {name: value for name, value in exported.items() if name != "rope_parameters"}
    for settings in fields, exported, older:
        theirs = llama.LlamaRotaryEmbedding(transformers.LlamaConfig(**copy.deepcopy(settings)))
        np.testing.assert_allclose(rotation_P, theirs.inv_freq.double().numpy(), rtol=3e-6)
        assert factor == pytest.approx(theirs.attention_scaling, rel=1e-12)
