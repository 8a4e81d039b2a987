"""The folder of a model: a local one, or one downloaded from the Hugging Face hub."""

from pathlib import Path

from megajax.errors import UserError
from megajax.host import hub

_WEIGHTS = ["*.safetensors", "*.safetensors.index.json"]
_FILES = ["config.json", *_WEIGHTS, "vocab.json", "merges.txt", "vocab.txt", "tokenizer*.json"]
_FILES += ["special_tokens_map.json", "generation_config.json", "chat_template.jinja"]


def local_folder(path: str) -> Path:
    """The folder of a model: `path` itself, or, if that is the name of a model on the hub, a download of it."""
    folder = Path(path)
    if folder.is_dir():
        return folder
    if folder.exists():
        raise UserError(f"PATH {path} is a file; valid: the folder of a model, with config.json and model.safetensors")
    missing = f"PATH {path}: no such folder"
    if not hub.is_name(path):
        raise UserError(f"{missing}; valid: a folder, or a model of the Hugging Face hub, as in openai-community/gpt2")
    return hub.download(path, _FILES, missing, "valid: a folder")
