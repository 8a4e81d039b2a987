"""A class in the Hugging Face format, described by tables: its settings, and the place of every weight.

To add one, write such an `Exchange` and list it in `families.py`. If a field means the same as one of our options, its
name is declared on the option (`HuggingFaceName` in `core/models/config.py`).
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from megajax.convert.parts import Lacks, OptionGroup
from megajax.convert.settings import Fields
from megajax.convert.tokenizer_files import check_wordpiece
from megajax.convert.weights import Spelling, TensorPlace, TensorPlaces, named, weight_paths
from megajax.core.errors import UserError
from megajax.core.models.config import ModelConfig
from megajax.core.models.freeze import PREDICTION
from megajax.core.models.registry import FAMILIES
from megajax.core.options import Option, options
from megajax.core.traits import COMPUTATION, NOTHING, WEIGHTS, Changes, HuggingFaceName, OnlyWith, Through
from megajax.data.text.tokenizer import END_OF_TEXT, Tokenizer


@dataclass(frozen=True)
class Head:
    """What a model predicts (`model.head`) in the Hugging Face format."""

    classes: tuple[str, ...]  # transformers classes that have it; the first is written
    kind: str  # what messages call a model with all of its weights, such as "a GPT-2"
    shared: Mapping[str, TensorPlace] = field(default_factory=dict)  # places of its own weights
    # config.json -> values by option of the model; raises `UserError` if we do not have such a head.
    read: Callable[[Fields], dict[str, Any]] = lambda _: {}
    write: Callable[[ModelConfig], dict[str, Any]] = lambda _: {}  # model -> fields of config.json
    copies: Mapping[str, str] = field(default_factory=dict)  # as in `TensorPlaces`, like the next two
    unused: tuple[str, ...] = ()
    fresh: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Exchange:
    """Settings and weights of a transformers class, or of several that differ in their heads."""

    family: str  # `model.family` of its models
    model_type: str  # its value in config.json
    dialect: str  # selects the names of options in config.json (`HuggingFaceName`)
    heads: Mapping[str, Head]  # by `model.head`
    shared: Mapping[str, TensorPlace]  # places of the weights of the ends, except those in a head's own table
    blocks: Mapping[str, TensorPlace]  # places of the weights of a layer, other than the next two
    # Options that have only one value in this class, in addition to those of our family. Options that are mentioned
    # nowhere here must have their defaults.
    options: Mapping[str, Any] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)  # fields that have one value, also if they are missing
    aliases: Mapping[str, str] = field(default_factory=dict)  # other names that transformers accepts for fields
    # Values of named options if the field is missing; None: it may be null.
    defaults: Mapping[str, Any] = field(default_factory=dict)
    parts: tuple[OptionGroup, ...] = ()  # options that do not map to fields one to one
    linear: Mapping[str, TensorPlace] = field(default_factory=dict)  # of a layer with linear attention
    dense: Mapping[str, TensorPlace] = field(default_factory=dict)  # of the first layers of a mixture, which are dense
    # Places of the weights of prediction modules, except those of their layers, which are as the others'; and a
    # module's tensors that are copies of others.
    prediction: Mapping[str, TensorPlace] = field(default_factory=dict)
    prediction_copies: Mapping[str, str] = field(default_factory=dict)
    renamed: Callable[[ModelConfig], Mapping[str, str]] = lambda _: {}  # tensors that have other names in a model
    # As in `TensorPlaces`, unless they are weights of the model.
    copies: Mapping[str, str] = field(default_factory=dict)
    unused: tuple[str, ...] = ()  # as in `TensorPlaces`
    quantized: str = ""  # the `quant_method` that is read, widened
    # Ends of the names of tensors that transformers keeps in fp32 in a model of a dtype.
    kept: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    spelling: Spelling = lambda _: str  # as in `TensorPlaces`, like the next
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    # Tensor of a layer in memory -> those on disk, one after the other: transformers writes equal parts, and reads any.
    joined: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def architecture(self, model: ModelConfig) -> str:
        """The class that loads a model."""
        return self.heads[model.head].classes[0]

    def read_settings(self, fields: Fields, overrides: Mapping[str, Any]) -> dict[str, Any]:
        """Values by key for a run's preset; `overrides` are those given by the user.

        Raises:
            UserError: we do not support this model.
        """
        known = {name: head for head in self.heads.values() for name in head.classes}
        classes = fields.get("architectures")
        if classes is not None:
            fields.check("architectures", *([name] for name in known))
        head = known[classes[0]] if classes else self.heads["pretraining"]
        for name, value in self.fixed.items():
            fields.check(name, value)
        for alias, name in self.aliases.items():
            if alias in fields and fields.setdefault(name, fields[alias]) != fields[alias]:
                raise fields.refusal(alias, fields[alias], f"as {name}, {fields[name]}")
        values = {"family": self.family, **self.options}
        for name, (theirs, option) in self.named_options().items():
            missing = self.defaults.get(name, ...)
            if option.trait(Changes) is NOTHING:  # existing weights do not need it
                with contextlib.suppress(UserError):
                    values[name] = fields.value(theirs, name)
            elif missing is not None or fields.get(theirs) is not None:
                values[name] = fields.value(theirs, name, None if missing is ... else missing)
        for group in self.parts:
            if group.options != ("dropout",) or "model.dropout" not in overrides:
                values |= group.read(fields)
        return {f"model.{name}": value for name, value in (values | head.read(fields)).items()}

    def settings(
        self, model: ModelConfig, labels: Sequence[str], tokenizer: Tokenizer | None
    ) -> dict[str, dict[str, Any]]:
        """Contents of the JSON files by name, config.json among them, for a model whose classes have these labels, if
        any.

        Raises:
            UserError: the tokenizer is of a different kind than the class needs.
        """
        head = self.heads[model.head]
        config: dict[str, Any] = {"architectures": [self.architecture(model)], "model_type": self.model_type}
        config |= self.fixed
        config |= {theirs: getattr(model, name) for name, (theirs, _) in self.named_options().items()}
        for part in self.parts:
            config |= part.write(model)
        if model.head != "pretraining":
            names = labels or [f"LABEL_{number}" for number in range(model.num_classes)]  # transformers' default names
            config["id2label"] = {str(number): name for number, name in enumerate(names)}
            config["label2id"] = {name: number for number, name in enumerate(names)}
        config |= head.write(model)
        if FAMILIES[self.family].tokenizer == "wordpiece":
            if tokenizer:
                check_wordpiece(tokenizer, "the run's tokenizer")
            return {"config.json": config | {"pad_token_id": tokenizer.vocabulary["[PAD]"] if tokenizer else None}}
        special = _special_ids(tokenizer)
        return {"config.json": config | special, "generation_config.json": {"_from_model_config": True, **special}}

    def dtype(self, name: str, dtype: str) -> str:
        """The dtype of a tensor in a model of some dtype, both as in `DTYPES`."""
        return "fp32" if name.endswith(self.kept.get(dtype, ())) else dtype

    def lacks(self, model: ModelConfig) -> Lacks:
        """Those options of a model that the class cannot represent."""
        named, fixed = self.named_options(), {**FAMILIES[self.family].fixed, **self.options, "family": self.family}
        covered = named.keys() | {name for group in self.parts for name in group.options}
        covered |= {"prediction_modules"}  # left out by a class that has none
        lacking: Lacks = {}
        for name, option in options(ModelConfig).items():
            reader, valid = option.trait(OnlyWith), fixed.get(name, option.default)
            matters = option.trait(Changes) in (WEIGHTS, COMPUTATION) and not option.trait(Through)
            matters = matters and not (reader and (reader.name in lacking or not reader.is_read(model)))
            if matters and name not in covered and getattr(model, name) != valid:
                lacking[name] = valid
        for group in self.parts:
            lacking |= group.lacks(model)
        return lacking

    def places(self, model: ModelConfig) -> TensorPlaces:
        """The places of a model's weights."""
        head = self.heads[model.head]
        weights, renamed = {named(path) for path in weight_paths(model)}, self.renamed(model)

        def of(owner: str, places: Mapping[str, TensorPlace]) -> dict[str, TensorPlace]:
            return {
                f"{owner}/{name}".lstrip("/"): replace(place, name=renamed.get(place.name, place.name), of=owner)
                for name, place in places.items()
            }

        of_layers: dict[str, TensorPlace] = {}
        for kind in model.kinds:
            of_layers |= of(kind, self.linear if model.is_linear(kind) else self.blocks)
        of_ends = {**self.shared, **head.shared, **of("dense_blocks", self.dense)}
        if self.prediction:
            of_module = {f"block/{name}": place for name, place in self.blocks.items()}
            of_ends |= of(PREDICTION, {**of_module, **self.prediction})
        shared = {name: place for name, place in of_ends.items() if ("shared", name) in weights}
        names = {place.name for place in shared.values()}
        modules = range(model.num_layers, model.num_layers + model.prediction_modules)
        written = {
            copy.format(layer=layer): name if name in names else self.copies[name]
            for layer in modules
            for copy, name in self.prediction_copies.items()
        }
        copies = {copy: name for copy, name in {**self.copies, **head.copies}.items() if copy not in names}
        return TensorPlaces(
            shared=shared,
            blocks={name: place for name, place in of_layers.items() if ("blocks", name) in weights},
            copies=copies | written,
            written_copies=written,
            unused=(*self.unused, *head.unused),
            fresh=head.fresh,
            spelling=self.spelling,
            fused=self.fused,
        )

    def named_options(self) -> dict[str, tuple[str, Option]]:
        """Options that map to a field one to one: the field's name, and the option."""
        covered = {name for group in self.parts for name in group.options}
        mapped = {}
        for name, option in options(ModelConfig).items():
            theirs = option.trait(HuggingFaceName)
            if theirs and name not in covered and name not in self.options and (field := theirs.name_in(self.dialect)):
                mapped[name] = (field, option)
        return mapped


def _special_ids(tokenizer: Tokenizer | None) -> dict[str, Any]:
    """Special ids of a tokenizer for language models; GPT-2's end of text also begins one."""
    if not tokenizer:
        return {"bos_token_id": None, "eos_token_id": None}
    end = tokenizer.end_of_text
    begin = [*tokenizer.begin, *([end] if tokenizer.token(end) == END_OF_TEXT else [])]
    return {
        "bos_token_id": begin[0] if begin else None,
        "eos_token_id": tokenizer.ends if tokenizer.ends[1:] else end,
    }
