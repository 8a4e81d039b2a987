"""`config.json` of a model in Hugging Face's format, read field by field; what trains it further."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megajax import reading
from megajax.config import Config
from megajax.errors import UserError
from megajax.options import options

RECIPE = {  # for training further: a low learning rate does not undo what the model has learned
    "train.steps": 1000,
    "train.global_batch": 8,
    "train.microbatch": 1,
    "train.eval_batches": 20,
    "train.remat": "selective",
    "optimizer.learning_rate": 5e-5,
    "optimizer.warmup_steps": 100,
    "optimizer.decay_steps": 1000,
    "checkpoint.every": 100,
}


class Fields:
    """The fields of `folder/config.json`.

    Attributes:
        file: its path.

    Raises:
        UserError: there is none, or it is no JSON object.
    """

    def __init__(self, folder: Path):
        self.file = folder / "config.json"
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

    def check(self, name: str, *valid: object, missing: object = ...) -> None:
        """Check that a field has one of the values that are valid; one that is missing has the first, or `missing`.

        Raises:
            UserError: it has another.
        """
        value = self.get(name, valid[0] if missing is ... else missing)
        if value not in valid:
            raise self.refusal(name, value, ", ".join(map(json.dumps, valid)))

    def check_all(self, valid: Mapping[str, object]) -> None:
        """Check several fields, each against its only valid value, which it also has where it is missing.

        Raises:
            UserError: one has another.
        """
        for name, value in valid.items():
            self.check(name, value)

    def sizes(self, names: Mapping[str, str]) -> dict[str, int]:
        """Numbers by our keys.

        Args:
            names: theirs -> ours.

        Raises:
            UserError: one is missing, or none that is valid.
        """
        found = {}
        for name, key in names.items():
            found[key] = size = self.get(name)
            option = options(Config)[key]
            if type(size) is not int or option.problem(size):
                raise self.refusal(name, size, option.valid)
        return found

    def labels(self) -> tuple[str, ...]:
        """Names of the classes in the order of their numbers; those of transformers where only their number is given,
        of two where not even that.

        Raises:
            UserError: they have no such numbers, or are fewer than two.
        """
        given = self.get("id2label")
        if given is None:
            sizes = {"num_labels": "model.num_classes"}
            number = 2 if self.get("num_labels") is None else self.sizes(sizes)["model.num_classes"]
            return tuple(f"LABEL_{n}" for n in range(number))
        numbers = [str(n) for n in range(len(given))] if isinstance(given, dict) and len(given) > 1 else []
        if not numbers or given.keys() != {*numbers} or not all(isinstance(name, str) for name in given.values()):
            raise self.refusal("id2label", given, "a name for each of two classes or more, by their numbers from 0 on")
        return tuple(given[number] for number in numbers)

    def check_widths(self, hidden: str, heads: str, inner: str, *, null: bool) -> None:
        """Check the widths in the fields of these names: the heads divide the first, the MLP's is four times it.

        Args:
            hidden: name of the width, which has been read by `sizes`, as has `heads`.
            heads: name of the number of heads.
            inner: name of the MLP's width.
            null: whether the MLP's width may be missing.

        Raises:
            UserError: they do not fit.
        """
        size, number, width = self.get(hidden), self.get(heads), self.get(inner)
        if size % number:
            raise UserError(
                f"{self.file}: {hidden} {size} is not divisible by {heads} {number}; valid: a multiple of it"
            )
        if width not in ((None, 4 * size) if null else (4 * size,)):
            raise self.refusal(inner, width, f"{'null, or ' if null else ''}{4 * size} (4 x {hidden})")

    def dropout(self, names: Sequence[str], given: Mapping[str, Any]) -> dict[str, float]:
        """Our one rate of dropout by key, from theirs; nothing if the user has given it.

        Raises:
            UserError: they differ, or one is not valid.
        """
        if "model.dropout" in given:
            return {}
        rates = [self.get(name, 0.1) for name in names]
        for name, rate in zip(names, rates, strict=True):
            if type(rate) not in (int, float) or not 0 <= rate < 1:
                raise self.refusal(name, rate, "0 or more and less than 1")
        if len(set(rates)) > 1:
            told = ", ".join(f"{name} {rate}" for name, rate in zip(names, rates, strict=True))
            raise UserError(f"{self.file}: {told}; valid: all the same, or --model.dropout X")
        return {"model.dropout": rates[0]}

    def init_std(self) -> dict[str, float]:
        """Ours by key, if theirs can be: weights that exist do not need it."""
        std = self.get("initializer_range", 0.02)
        option = options(Config)["model.init_std"]
        return {"model.init_std": std} if type(std) is float and not option.problem(std) else {}

    def refusal(self, name: str, value: object, valid: str) -> UserError:
        """That a field's value is not valid."""
        return UserError(f"{self.file}: {name} is {json.dumps(value)[:200]}; valid: {valid}")
