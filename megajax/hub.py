"""The Hugging Face hub: some files of a model there, downloaded, or as they were downloaded before."""

import re
from collections.abc import Sequence
from pathlib import Path

from megajax.errors import UserError

_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")


def is_name(text: str) -> bool:
    """Whether a text can be the name of a model on the hub, as `openai-community/gpt2`."""
    return _NAME.fullmatch(text) is not None


def download(name: str, patterns: Sequence[str], given: str, valid: str) -> Path:
    """A local folder with those files of a model whose names fit one of the patterns.

    Args:
        name: of the model.
        patterns: as of a shell.
        given: what asked for it, and why it is looked for there, for error messages.
        valid: what they end with.
    """
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise UserError(f"{given}, and huggingface_hub is not installed; {valid}") from None
    try:
        return Path(snapshot_download(name, allow_patterns=list(patterns)))
    except Exception as error:  # of many kinds
        raise UserError(f"{given}, and the Hugging Face hub does not give it: {reason(error)}; {valid}") from None


def reason(error: Exception) -> str:
    """What an exception says, in one line of a bounded length; its kind where it says nothing."""
    text = " ".join(str(error).split())
    return (f"{text[:300]}…" if len(text) > 300 else text.rstrip(".")) or type(error).__name__
