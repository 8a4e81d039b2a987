"""`config.json` of a model in Hugging Face's format, read field by field; what trains it further."""

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megajax.config import Config
from megajax.errors import UserError
from megajax.host import reading
from megajax.options import options

RECIPE = {  # for training further: a low learning rate does not undo what the model has learned
    "train.steps": 1000,
    "train.global_batch": 8,
    "train.microbatch": 1,
    "train.eval_batches": 20,
    "train.remat": "selective",
    "optimizer.learning_rate": 5e-5,
    "optimizer.warmup_steps": 100,
    "checkpoint.every": 100,
}


class Fields:
    """The fields of `folder/config.json`, or of an object in it.

    Attributes:
        file: its path.

    Raises:
        UserError: there is none, or it is no JSON object.
    """

    def __init__(self, folder: Path):
        self.file, self._before = folder / "config.json", ""
        if not reading.is_file(self.file):
            raise UserError(
                f"{folder}: no config.json there; valid: a folder that save_pretrained of transformers wrote"
            )
        self._fields = reading.read_json(self.file)
        if not isinstance(self._fields, dict):
            raise UserError(f"{self.file}: not a JSON object; valid: the configuration of a model")

    def get(self, name: str, missing: Any = None) -> Any:
        """The value of a field, or `missing`."""
        return self._fields.get(name, missing)

    def has(self, name: str) -> bool:
        """Whether a field is there, null or not."""
        return name in self._fields

    def names(self) -> list[str]:
        """Names of the fields that are there."""
        return list(self._fields)

    def part(self, name: str) -> "Fields":
        """The fields of the object in a field, none if that is null or missing.

        Raises:
            UserError: something else is there.
        """
        inner = self.get(name)
        if not isinstance(inner, dict | None):
            raise self.refusal(name, inner, "null, or an object")
        part = copy.copy(self)
        part._fields, part._before = inner or {}, f"{self._before}{name}."
        return part

    def check(self, name: str, *valid: object, missing: object = ...) -> None:
        """Check that a field has one of the values that are valid; one that is missing has the first, or `missing`.

        Raises:
            UserError: it has another.
        """
        value = self.get(name, valid[0] if missing is ... else missing)
        if not any(value == known and isinstance(value, bool) == isinstance(known, bool) for known in valid):
            raise self.refusal(name, value, ", ".join(map(json.dumps, valid)))

    def check_all(self, valid: Mapping[str, object]) -> None:
        """Check several fields, each against its only valid value, which it also has where it is missing.

        Raises:
            UserError: one has another.
        """
        for name, value in valid.items():
            self.check(name, value)

    def value(self, name: str, key: str, missing: Any = None) -> Any:
        """What a field says of our option `key`; of one that is missing, `missing` does.

        Raises:
            UserError: it is no valid value of that.
        """
        given, option = self.get(name, missing), options(Config)[key]
        try:
            value = option.convert(given)
        except ValueError:
            raise self.refusal(name, given, option.valid) from None
        if option.problem(value):
            raise self.refusal(name, given, option.valid)
        if value == 0 and type(value) is not bool:  # where 0 is valid it means that another option decides
            raise self.refusal(name, given, "more than 0")
        return value

    def labels(self) -> tuple[str, ...]:
        """Names of the classes in the order of their numbers; those of transformers where only their number is given,
        of two where not even that.

        Raises:
            UserError: they have no such numbers, or are fewer than two.
        """
        given = self.get("id2label")
        if given is None:
            number = 2 if self.get("num_labels") is None else self.value("num_labels", "model.num_classes")
            return tuple(f"LABEL_{n}" for n in range(number))
        numbers = [str(n) for n in range(len(given))] if isinstance(given, dict) and len(given) > 1 else []
        if not numbers or given.keys() != {*numbers} or not all(isinstance(name, str) for name in given.values()):
            raise self.refusal("id2label", given, "a name for each of two classes or more, by their numbers from 0 on")
        return tuple(given[number] for number in numbers)

    def check_divides(self, number: str, width: str) -> None:
        """Check that the field `number` divides `width`, both of which have been read.

        Raises:
            UserError: it does not.
        """
        if self.get(width) % self.get(number):
            problem = f"{width} {self.get(width)} is not divisible by {number} {self.get(number)}"
            raise self.error(problem, "a multiple of it")

    def if_valid(self, name: str, key: str) -> dict[str, Any]:
        """What a field says of our option `key`, by that; nothing if it is missing or not valid."""
        option = options(Config)[key]
        try:
            value = option.convert(self.get(name))
        except ValueError:
            return {}
        return {} if option.problem(value) else {key: value}

    def refusal(self, name: str, value: object, valid: str) -> UserError:
        """That a field's value is not valid."""
        return self.error(f"{self._before}{name} is {json.dumps(value)[:200]}", valid)

    def error(self, problem: str, valid: str) -> UserError:
        """The error that says what is wrong with the file, and what would be valid."""
        return UserError(f"{self.file}: {problem}; valid: {valid}")
