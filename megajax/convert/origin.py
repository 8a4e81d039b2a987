"""What a run directory keeps of the model in Hugging Face's format that its weights came from, so that an export can be
the same: `imported.json`."""

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megajax.convert.settings import Fields
from megajax.convert.tensor_files import DTYPES
from megajax.data.files import write_atomically
from megajax.errors import UserError
from megajax.host import reading
from megajax.runs.ownership import IMPORTED

_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
_GENERATION = "generation_config.json"


@dataclass(frozen=True)
class Origin:
    """Of a run that was not imported, as it is by default.

    Attributes:
        architecture: the class of transformers.
        dtype: of the weights, as in `DTYPES`; fp32 where they had several.
        length: positions that config.json names; a run may use fewer.
        tokens: ids of special tokens in config.json, null, one or several, by their fields.
        generation: the fields of generation_config.json; none where there was none.
    """

    architecture: str = ""
    dtype: str = "fp32"
    length: int = 0
    tokens: dict[str, Any] = field(default_factory=dict)
    generation: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, fields: Fields, architecture: str, dtype: str, length: int) -> "Origin":
        """Of a model's folder."""
        file = fields.file.with_name(_GENERATION)
        generation = reading.read_json(file) if reading.is_file(file) else {}
        if not isinstance(generation, dict):
            raise UserError(f"{file}: not a JSON object; valid: what save_pretrained of transformers wrote")
        tokens = {name: fields.get(name) for name in _TOKENS if fields.has(name)}
        for owner, ids in (fields.file, tokens), (file, generation):
            for name in _TOKENS:
                if not _are_ids(ids.get(name)):
                    raise UserError(f"{owner}: {name} is {json.dumps(ids[name])[:200]}; valid: null, an id, or several")
        return cls(architecture, dtype, length, tokens, generation)

    @classmethod
    def read(cls, run_dir: Path) -> "Origin":
        """Of a run."""
        file = run_dir / IMPORTED
        if not reading.kind(file):
            return cls()
        content = reading.read_json(file, 2 * reading.SMALL_BYTES)
        kinds = {one.name: type(getattr(cls(), one.name)) for one in dataclasses.fields(cls)}
        good = isinstance(content, dict) and content.keys() == kinds.keys()
        good = good and all(type(content[name]) is kind for name, kind in kinds.items())
        good = good and content["dtype"] in DTYPES and content["tokens"].keys() <= {*_TOKENS}
        if not good or not all(map(_are_ids, content["tokens"].values())):
            raise UserError(f"{file}: damaged; valid: what import-hf wrote, or no such file")
        return cls(**content)

    def write(self, run_dir: Path) -> None:
        """Into a new run."""
        write_atomically(run_dir / IMPORTED, json.dumps(dataclasses.asdict(self), indent=2) + "\n")

    def put_into(self, settings: dict[str, dict[str, Any]], model_length: int, *, rotary: bool) -> None:
        """Replace what the JSON files to export say by what the model came with; `rotary`: no weight depends on the
        number of positions."""
        config = settings["config.json"]
        config |= self.tokens
        if rotary:
            config["max_position_embeddings"] = max(model_length, self.length)
        if self.generation:
            settings[_GENERATION] = self.generation


def _are_ids(value: object) -> bool:
    return all(type(one) is int for one in value) if isinstance(value, list) else value is None or type(value) is int
