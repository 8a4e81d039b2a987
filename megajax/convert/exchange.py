"""What a family says of its models in Hugging Face's format. To add one, write a module with such an `Exchange`, and
enter it in `families.py`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megajax.convert.settings import Fields
from megajax.convert.weights import Places
from megajax.data.tokenizer import Tokenizer
from megajax.models.config import ModelConfig

Lacks = dict[str, Any]  # options of the model, fields of `ModelConfig`, and a value that would be valid


def _nothing(_: ModelConfig) -> Lacks:
    return {}


@dataclass(frozen=True)
class Exchange:
    """Settings, weights and tokenizer of some classes of transformers.

    Attributes:
        family: whose models they are, `model.family`.
        model_types: its values of `model_type` in config.json.
        kind: model -> what it is in messages, as in "a GPT-2".
        special_tokens: that its tokenizer knows, in messages.
        layers: what config.json calls the number of layers.
        read_settings: (config.json, values by key that the user gave) -> values by key of a run's preset; raises
            `UserError` where the model is not ours.
        settings: (model, names of the classes that it tells apart, none if they have none, tokenizer) -> contents of
            the JSON files by name, config.json among them.
        architecture: model -> the class of transformers that loads it.
        lacks: model of the family -> those of its options that the class cannot hold.
        places: model -> where its weights are.
        read_tokenizer: folder -> its tokenizer, and its added tokens that ours leaves out; None and no tokens where
            there is none; raises `UserError` where it is damaged or of another kind.
        write_tokenizer: (tokenizer, tokens in a sequence, folder): all files by which transformers finds it.
    """

    family: str
    model_types: tuple[str, ...]
    kind: Callable[[ModelConfig], str]
    special_tokens: str
    layers: str
    read_settings: Callable[[Fields, Mapping[str, Any]], dict[str, Any]]
    settings: Callable[[ModelConfig, Sequence[str], Tokenizer | None], dict[str, dict[str, Any]]]
    architecture: Callable[[ModelConfig], str]
    places: Callable[[ModelConfig], Places]
    read_tokenizer: Callable[[Path], tuple[Tokenizer | None, list[str]]]
    write_tokenizer: Callable[[Tokenizer, int, Path], None]
    lacks: Callable[[ModelConfig], Lacks] = _nothing
