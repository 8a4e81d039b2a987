"""Read the `config.json` of a model in the Hugging Face format, field by field."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megajax.core.errors import UserError
from megajax.core.models.config import ModelConfig
from megajax.core.options import options
from megajax.host import reading


class Fields(dict[str, Any]):
    """The fields of a config.json, or of an object in it, whose name is then `before` theirs in messages. Anything
    invalid raises `UserError`."""

    def __init__(self, file: Path, content: Mapping[str, Any], before: str = ""):
        super().__init__(content)
        self.file, self._before = file, before

    @classmethod
    def read(cls, folder: Path) -> "Fields":
        """The fields of `folder/config.json`."""
        file = folder / "config.json"
        if not reading.is_file(file):
            raise UserError(f"{folder}: no config.json found; valid: a folder written by save_pretrained")
        return cls(file, reading.read_object(file, "the configuration of a model"))

    def section(self, name: str) -> "Fields":
        """The fields of the object in a field; empty if that is null or missing."""
        inner = self.get(name)
        if not isinstance(inner, dict | None):
            raise self.refusal(name, inner, "null, or an object")
        return Fields(self.file, inner or {}, f"{self._before}{name}.")

    def check(self, name: str, *valid: object, missing: object = ...) -> None:
        """Check that a field has one of the valid values; if it is missing it counts as the first, or as `missing`."""
        value = self.get(name, valid[0] if missing is ... else missing)
        if not any(value == known and isinstance(value, bool) == isinstance(known, bool) for known in valid):
            raise self.refusal(name, value, ", ".join(map(json.dumps, valid)))

    def value(self, name: str, ours: str, missing: Any = None) -> Any:
        """The value of a field as that of `ours`, an option of the model; `missing` if the field is missing."""
        raw, option = self.get(name, missing), options(ModelConfig)[ours]
        try:
            value = option.convert(raw)
        except ValueError:
            raise self.refusal(name, raw, option.valid) from None
        if option.problem(value):
            raise self.refusal(name, raw, option.valid)
        if value == 0 and type(value) is not bool:  # if 0 is valid, it means that another option decides
            raise self.refusal(name, raw, "more than 0")
        return value

    def optional(self, name: str, ours: str, missing: Any = None) -> Any:
        """Like `value`; None if the field is null, or is missing and `missing` is None."""
        return None if self.get(name, missing) is None else self.value(name, ours, missing)

    def whole(self, name: str, missing: int | None, valid: str, least: int = 0, most: float = math.inf) -> int:
        """The whole number in a field, from `least` to `most`, in words `valid`; if the field is missing, `missing`."""
        number = self.get(name, missing)
        if type(number) is not int or not least <= number <= most:
            raise self.refusal(name, number, valid)
        return number

    def labels(self) -> tuple[str, ...]:
        """Names of the classes, in the order of their numbers; transformers' default names if only their number is
        given, and two of these if not even that."""
        names = self.get("id2label")
        if names is None:
            count = 2 if self.get("num_labels") is None else self.value("num_labels", "num_classes")
            return tuple(f"LABEL_{n}" for n in range(count))
        numbers = [str(n) for n in range(len(names))] if isinstance(names, dict) and len(names) > 1 else []
        if not numbers or names.keys() != {*numbers} or not all(isinstance(name, str) for name in names.values()):
            raise self.refusal("id2label", names, "a name for each of two classes or more, by their numbers from 0 on")
        return tuple(names[number] for number in numbers)

    def check_divides(self, divisor: str, width: str) -> None:
        """Check that the field `divisor` divides the field `width`; both have been read."""
        if self[width] % self[divisor]:
            raise self.error(f"{width} {self[width]} is not divisible by {divisor} {self[divisor]}", "a multiple of it")

    def refusal(self, name: str, value: object, valid: str) -> UserError:
        """The error for an invalid value of a field."""
        return self.error(f"{self._before}{name} is {json.dumps(value)[:200]}", valid)

    def error(self, problem: str, valid: str) -> UserError:
        """The error that says what is wrong with the file, and what would be valid."""
        return UserError(f"{self.file}: {problem}; valid: {valid}")
