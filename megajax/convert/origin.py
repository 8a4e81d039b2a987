"""What a run directory stores about the model in the Hugging Face format that its weights come from (`imported.json`),
so that an export can restore it."""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megajax.convert.settings import Fields
from megajax.convert.tensor_files import DTYPES
from megajax.core.errors import Damaged, UserError
from megajax.core.models.config import ModelConfig
from megajax.host import reading
from megajax.host.files import write_atomically
from megajax.runs.ownership import IMPORTED

_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
_GENERATION = "generation_config.json"


@dataclass(frozen=True)
class Origin:
    """Describes the original model; the defaults are for a run that was not imported."""

    architecture: str = ""  # the transformers class
    dtype: str = "fp32"  # of most weights, as in `DTYPES`
    length: int = 0  # number of positions in config.json; a run may use fewer
    tokens: dict[str, Any] = field(default_factory=dict)  # fields of config.json with ids of special tokens
    generation: dict[str, Any] = field(default_factory=dict)  # fields of generation_config.json; empty without it
    dtypes: dict[str, str] = field(default_factory=dict)  # those of tensors that have another

    @classmethod
    def of(cls, fields: Fields, architecture: str, dtype: str, length: int, dtypes: Mapping[str, str]) -> "Origin":
        """The origin for a model's folder."""
        file = fields.file.with_name(_GENERATION)
        generation = reading.read_object(file, "a file written by save_pretrained") if reading.is_file(file) else {}
        tokens = {name: fields[name] for name in _TOKENS if name in fields}
        for owner, ids in (fields.file, tokens), (file, generation):
            for name in _TOKENS:
                if not _are_ids(ids.get(name)):
                    raise UserError(f"{owner}: {name} is {json.dumps(ids[name])[:200]}; valid: null, an id, or several")
        return cls(architecture, dtype, length, tokens, generation, dict(dtypes))

    @classmethod
    def read(cls, run_dir: Path) -> "Origin":
        """The origin stored in a run."""
        file = run_dir / IMPORTED
        if not reading.kind(file):
            return cls()
        content = reading.read_json(file, 4 * reading.SMALL_BYTES)
        content = {"dtypes": {}} | content if isinstance(content, dict) else content  # runs of 0.1.0 had none
        kinds = {name: type(value) for name, value in dataclasses.asdict(cls()).items()}
        good = isinstance(content, dict) and {name: type(value) for name, value in content.items()} == kinds
        good = good and {content["dtype"], *map(str, content["dtypes"].values())} <= DTYPES.keys()
        good = good and content["tokens"].keys() <= {*_TOKENS}
        if not good or not all(map(_are_ids, content["tokens"].values())):
            raise Damaged(file, "damaged", "the file that import-hf wrote, or none")
        return cls(**content)

    def write(self, run_dir: Path) -> None:
        """Store it in a new run."""
        write_atomically(run_dir / IMPORTED, json.dumps(dataclasses.asdict(self), indent=2) + "\n")

    def put_into(self, settings: dict[str, dict[str, Any]], model: ModelConfig) -> None:
        """Let what the model came with replace values in the JSON files to export."""
        settings["config.json"] |= self.tokens
        if model.positions != "learned":  # no weight depends on the number of positions
            settings["config.json"]["max_position_embeddings"] = max(model.sequence_length, self.length)
        if self.generation:
            settings[_GENERATION] = self.generation


def _are_ids(value: object) -> bool:
    return all(type(one) is int for one in value) if isinstance(value, list) else value is None or type(value) is int
