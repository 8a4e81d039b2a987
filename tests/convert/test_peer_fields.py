"""Every field of transformers' configurations is read here, or is known to change nothing there."""

import dataclasses
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
from hugging_face import CLASSES, ORDERS, SETTINGS

from megajax.convert.families import EXCHANGES, exchange_of
from megajax.convert.origin import Origin
from megajax.convert.settings import Fields
from megajax.settings.presets import load_preset, resolve

pytestmark = pytest.mark.peer
torch = pytest.importorskip("torch", reason="the extra `peer` is not installed")
transformers = pytest.importorskip("transformers", reason="the extra `peer` is not installed")

# Gemma 3's and Qwen3.5's, in the same file.
MULTIMODAL = {"image_token_id", "video_token_id", "mm_tokens_per_image", "text_config", "vision_config", "num_heads"}
MULTIMODAL |= {"depth", "in_channels", "num_position_embeddings", "out_hidden_size", "patch_size"}
MULTIMODAL |= {"spatial_merge_size", "temporal_patch_size"}
HARMLESS: dict[str, Any] = {  # fields that change no logits, each with another value than usual
    "_name_or_path": "a/model",
    "transformers_version": "4.1.0",
    "dtype": "bfloat16",  # of the computation
    "use_cache": False,
    "output_attentions": True,
    "output_hidden_states": True,
    "return_dict": True,
    "chunk_size_feed_forward": 5,
    "is_encoder_decoder": True,
    "pretraining_tp": 2,
    "label2id": {"A": 0, "B": 1},
    "output_router_logits": True,  # adds to the loss, as `router_aux_loss_coef` says
    "attention_chunk_size": 2,
    **{"linear_a_log_min": 1.0, "linear_a_log_max": 9.0, "linear_dt_min": 0.01},  # of fresh weights
    **{"linear_dt_max": 0.2, "linear_dt_init_floor": 1e-3},
    **dict.fromkeys(("num_nextn_predict_layers", "num_mtp_layers"), 1),  # of modules for further tokens
    **dict.fromkeys(("summary_first_dropout", "summary_last_dropout"), 0.5),  # of other heads
    **dict.fromkeys(("summary_use_proj", "summary_proj_to_labels"), False),
    **{"summary_type": "mean", "summary_activation": "tanh"},
    **{"hidden_dropout": 0.5, "num_labels": 2, "problem_type": "regression", "id2label": {0: "A", 1: "B"}},
}
LEARNED = {  # further ones of classes without rotary positions
    "head_dim": 3,
    "sliding_window": 3,
    "layer_types": ["sliding_attention"] * 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 7.0},
    "classifier_dropout": 0.5,
}
# What the sources name besides fields: methods, and what transformers sets itself.
OTHER = {"get_text_config", "json", "standardize_rope_params", "validate_rope", "default_theta", "_attn_implementation"}
OTHER |= {"_sliding_window_pattern"}  # read as `sliding_window_pattern`
BY_LAYER = {"rope_parameters": {"full_attention": {}, "sliding_attention": {}}, "sliding_window_pattern": 2}
WINDOW = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0}


# As in the published config.json; those of the class by default are others.
KIMI_LAYERS = {"full_attn_layers": [*range(4, 25, 4), 27], "kda_layers": [n for n in range(1, 27) if n % 4]}


class Recorder(Fields):
    """A config.json that remembers which of its fields were looked up."""

    looked_up: set[str]

    def get(self, name: str, default: Any = None) -> Any:
        self.looked_up.add(name)
        return super().get(name, default)

    def __getitem__(self, name: str) -> Any:
        self.looked_up.add(name)
        return super().__getitem__(name)

    def __contains__(self, name: object) -> bool:
        self.looked_up.add(str(name))
        return super().__contains__(name)


def fields_of(kind: str) -> set[str]:
    """The fields that a configuration has, and those that the sources of its class read from it."""
    peer = getattr(transformers, CLASSES[kind])
    found = {*peer.config_class().to_dict(), *peer.config_class.attribute_map, "per_layer_config"}
    for module in inspect.getmodule(peer), transformers.masking_utils, transformers.modeling_rope_utils:
        source = inspect.getsource(module)
        found |= {*re.findall(r"\bconfig\.(\w+)", source), *re.findall(r'getattr\([\w.]*config, "(\w+)"', source)}
    return found - OTHER - MULTIMODAL


def harmless_of(kind: str) -> dict[str, Any]:
    found = HARMLESS | (LEARNED if kind in ("gpt2", *ORDERS) else {})
    found |= {name: LEARNED[name] for name in ("head_dim", "rope_parameters") if kind == "kimi_linear"}
    return {name: value for name, value in found.items() if name in fields_of(kind)}


@pytest.mark.parametrize("kind", CLASSES)
def test_every_field_is_read_or_known_to_be_harmless(kind: str, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    content = {"model_type": kind, "architectures": [CLASSES[kind]]} | SETTINGS[kind]
    fields = Recorder(
        file, content | (WINDOW if kind in ("qwen2", "qwen3") else BY_LAYER if kind in ("gemma3_text", "olmo3") else {})
    )
    fields.looked_up = set()
    exchange_of(fields).read_settings(fields, {})
    Origin.of(fields, "", "fp32", 0, {})
    unknown = fields_of(kind) - fields.looked_up - harmless_of(kind).keys()
    assert not unknown, sorted(unknown)


@pytest.mark.parametrize(
    ("preset", "kind", "settings"),
    [
        ("olmo-hybrid-7b", "olmo_hybrid", {"rope_parameters": {"rope_theta": None}}),
        ("kimi-linear-48b-a3b", "kimi_linear", {"layer_types": None, "linear_attn_config": KIMI_LAYERS}),
    ],
)
def test_a_preset_is_what_the_class_is_by_default(preset: str, kind: str, settings: dict, tmp_path: Path) -> None:
    """Except for the `settings` of the published model, and a shorter sequence."""
    by_default = getattr(transformers, CLASSES[kind]).config_class().to_dict()
    fields = Fields(tmp_path / "config.json", by_default | settings)
    model, found = resolve(load_preset(preset)).model, exchange_of(fields).read_settings(fields, {})
    assert model.sequence_length < found.pop("model.sequence_length")
    assert dataclasses.replace(model, **{name.removeprefix("model."): found[name] for name in found}) == model


def test_the_table_names_nothing_else() -> None:
    assert HARMLESS.keys() | LEARNED.keys() <= set().union(*map(fields_of, CLASSES))
    assert CLASSES.keys() == {exchange.model_type for exchange in EXCHANGES}


@pytest.mark.parametrize("kind", CLASSES)
def test_what_is_harmless_changes_no_logits(kind: str) -> None:
    """All of these fields that the class has together."""
    peer = getattr(transformers, CLASSES[kind])
    loops = {"attn_implementation": "eager", "experts_implementation": "eager"}
    plain = peer(peer.config_class(**SETTINGS[kind], **loops)).eval()
    other = peer(peer.config_class(**SETTINGS[kind] | harmless_of(kind) | {"dtype": None}, **loops)).eval()
    other.load_state_dict(plain.state_dict())
    tokens = torch.arange(1, 21)[None]
    with torch.no_grad():
        found, expected = (model(tokens) for model in (other, plain))
    logits = "prediction_logits" if "prediction_logits" in expected else "logits"
    torch.testing.assert_close(found[logits], expected[logits], rtol=0, atol=1e-6)
