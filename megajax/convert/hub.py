"""The folder of a model: a local one, or one downloaded from the Hugging Face hub."""

import re
from pathlib import Path

from megajax.errors import UserError

_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
_WEIGHTS = ["*.safetensors", "*.safetensors.index.json"]
_FILES = ["config.json", *_WEIGHTS, "vocab.json", "merges.txt", "vocab.txt", "tokenizer*.json"]
_FILES += ["special_tokens_map.json", "generation_config.json", "chat_template.jinja"]


def local_folder(path: str) -> Path:
    """The folder of a model: `path` itself, or, if that is the name of a model on the hub, a download of it.

    Raises:
        UserError: there is no such folder, and the model cannot be downloaded.
    """
    folder = Path(path)
    if folder.is_dir():
        return folder
    if folder.exists():
        raise UserError(f"PATH {path} is a file; valid: the folder of a model, with config.json and model.safetensors")
    missing = f"PATH {path}: no such folder"
    if not _NAME.fullmatch(path):
        raise UserError(f"{missing}; valid: a folder, or a model of the Hugging Face hub, as in openai-community/gpt2")
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise UserError(f"{missing}, and huggingface_hub is not installed; valid: a folder") from None
    try:
        return Path(snapshot_download(path, allow_patterns=_FILES))
    except Exception as error:  # of many kinds: no network, no such model, no permission, no space
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(f"{missing}, and the Hugging Face hub does not give it: {reason}; valid: a folder") from None
