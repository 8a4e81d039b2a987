"""The options of an adapter of `peft`: each has the effect that it has there, has none, or is refused by name."""

import math
import re
from pathlib import Path
from typing import Any

from megajax.convert.settings import Fields
from megajax.host import limited, reading

SETTINGS, TENSORS = "adapter_config.json", "adapter_model.safetensors"  # an adapter's files

READ = {"peft_type", "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "use_dora", "init_lora_weights"}
READ |= {"target_modules", "exclude_modules", "target_parameters", "layers_to_transform", "layers_pattern"}
READ |= {"modules_to_save", "trainable_token_indices", "ensure_weight_tying", "lora_bias"}
WITHOUT_EFFECT = {  # on an adapter that is trained; or tensors and modules tell, too
    *("task_type", "base_model_name_or_path", "revision", "inference_mode", "auto_mapping", "peft_version"),
    *("lora_dropout", "loftq_config", "eva_config", "corda_config", "lora_ga_config", "velora_config"),
    *("fan_in_fan_out", "bias", "megatron_core", "megatron_config", "qalora_group_size"),
}
_INITIAL = True, False, "gaussian", "eva", "orthogonal", "mica", "lora_ga"  # others also change the base model


class AdapterOptions(Fields):
    """The fields of an adapter_config.json."""

    @classmethod
    def read(cls, folder: Path) -> "AdapterOptions":
        """The options in a folder; raises `UserError` for those that cannot be merged into weights."""
        file = folder / SETTINGS
        options = cls(file, reading.read_object(file, "the configuration of an adapter"))
        options.check("peft_type", "LORA", missing=None)
        options.check("init_lora_weights", *_INITIAL)
        for name in "use_rslora", "use_dora", "lora_bias", "ensure_weight_tying":
            options.check(name, False, True)
        if options.get("use_dora"):
            options.check("lora_bias", False)
        for name, value in options.items():
            if name not in READ | WITHOUT_EFFECT and value:
                raise options.refusal(name, value, "null or false: its effect cannot be merged into weights")
        options._check_kinds()
        return options

    def _check_kinds(self) -> None:
        for name, pattern in ("r", "rank_pattern"), ("lora_alpha", "alpha_pattern"):
            section = self.section(pattern)
            for owner, key in (self, name), *((section, each) for each in section):
                value = owner.get(key, 8)
                whole = type(value) is int and 0 < value < 1 << 31
                if not whole and (name == "r" or type(value) is not float or not math.isfinite(value)):
                    raise owner.refusal(key, value, "a whole number above 0" if name == "r" else "a finite number")
        for name in "target_modules", "exclude_modules", "layers_pattern", "modules_to_save", "target_parameters":
            value = self.get(name)
            texts = [value] if isinstance(value, str) and name[-1] != "e" else [] if value is None else value
            if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
                raise self.refusal(name, value, "null, or names of modules")
        layers = self.get("layers_to_transform")
        if not all(type(layer) is int for layer in (layers if isinstance(layers, list) else [layers or 0])):
            raise self.refusal("layers_to_transform", layers, "null, or numbers of layers")

    @property
    def rank(self) -> int:
        """The rank of modules that `rank_pattern` does not name."""
        rank: int = self.get("r", 8)
        return rank

    def targets(self, modules: list[str], parameters: list[str]) -> dict[str, tuple[float, int]]:
        """Those of these modules and parameters that are adapted, by the rules of `peft`, with the scale and the rank
        of each. The options' regular expressions have limits of time and memory."""
        place, what = f"{__name__}:targets", f"{self.file}: matching names with its regular expressions"
        found = limited.call(place, str(self.file), self, modules, parameters, what=what)
        return {name: (scale, rank) for name, (scale, rank) in found.items()}

    def scale(self, name: str) -> tuple[float, int]:
        """The scale and the rank of the adapter of a module or parameter."""
        rank = self._matching("rank_pattern", name, self.rank)
        alpha = self._matching("alpha_pattern", name, self.get("lora_alpha", 8))
        return alpha / (math.sqrt(rank) if self.get("use_rslora") else rank), rank

    def _matching(self, name: str, module: str, default: Any) -> Any:
        values = (value for key, value in self.section(name).items() if self._match(name, r"(?:.*\.)?", key, module))
        return next(values, default)

    def tokens(self, module: str, vocab_size: int) -> list[int]:
        """The tokens whose embeddings in a module are replaced."""
        value = self.get("trainable_token_indices")
        if isinstance(value, dict):
            value = next((ids for name, ids in value.items() if f".{module}".endswith(f".{name}")), None)
        if not isinstance(value, list) or not all(type(token) is int and 0 <= token < vocab_size for token in value):
            raise self.refusal("trainable_token_indices", value, f"the ids of the tokens that {module} replaces")
        return value

    def selects_parameter(self, parameter: str) -> bool:
        """Whether a parameter is adapted itself, whatever is said of its module."""
        return self._is_named("target_parameters", self.get("target_parameters") or [], parameter)

    def selects(self, module: str) -> bool:
        """Whether a module is adapted."""
        excluded, wanted = self.get("exclude_modules") or [], self.get("target_modules")
        saved = self.get("modules_to_save") or []
        if self._is_named("exclude_modules", excluded, module):
            return False
        if any(self._match("modules_to_save", r"(?:.*\.)?", name, module, r"(?:\..*)?") for name in saved):
            return False
        if wanted is None:
            return not self.get("target_parameters")
        if isinstance(wanted, str) and wanted.lower() == "all-linear":
            return True
        layers = self.get("layers_to_transform")
        is_free = isinstance(wanted, str) or module in wanted or layers is None or layers == []
        layers = layers if isinstance(layers, list) else [layers]
        return self._is_named("target_modules", wanted, module) and (is_free or self._layer(module) in layers)

    def _layer(self, module: str) -> int | None:
        """The number of a module's layer; None if its name has none."""
        given = self.get("layers_pattern") or []
        patterns = [(r"(?:.*?\.)?", name) for name in ([given] if isinstance(given, str) else given)]
        after = r"\.(?P<number>[0-9]+)\..*"
        found = (self._match("layers_pattern", *each, module, after) for each in patterns or [("", r".*?\.[^.]*")])
        return next((int(match["number"]) for match in found if match), None)

    def _is_named(self, option: str, names: str | list[str], module: str) -> bool:
        """Whether an option names a module: by the end of its name, or all of it by a regular expression."""
        if isinstance(names, str):
            return bool(self._match(option, "", names, module))
        return any(f".{module}".endswith(f".{name}") for name in names)

    def _match(self, option: str, before: str, pattern: str, name: str, after: str = "") -> re.Match[str] | None:
        """The match of a name with an option's regular expression, and with what may come before and after it."""
        try:
            re.compile(pattern)  # by itself, too: a "[" would go on after it
            return re.fullmatch(f"{before}(?:{pattern}){after}" if before or after else pattern, name)
        except (re.error, RecursionError, OverflowError) as error:
            raise self.refusal(option, self.get(option), f"regular expressions ({error})") from None


def targets(file: str, content: dict[str, Any], modules: list[str], parameters: list[str]) -> dict[str, Any]:
    """See `AdapterOptions.targets`, which calls it in a process with limits."""
    options = AdapterOptions(Path(file), content)
    selected = {*filter(options.selects, modules)} | {*filter(options.selects_parameter, parameters)}
    return {name: options.scale(name) for name in selected}
