"""The Hugging Face hub: files of a model, downloaded now or before."""

import re
from collections.abc import Sequence
from pathlib import Path

from megajax.errors import UserError

_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")


def is_name(text: str) -> bool:
    """Whether a text can be the name of a model on the hub, such as `openai-community/gpt2`."""
    return _NAME.fullmatch(text) is not None


def download(name: str, patterns: Sequence[str], given: str, valid: str) -> Path:
    """A local folder with the files of model `name` that match one of the shell `patterns`.

    Error messages begin with `given`, which says why the hub is asked, and end with `valid`.
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
    """The message of an exception, in one line of bounded length; its type if it has none."""
    text = " ".join(str(error).split())
    return (f"{text[:300]}…" if len(text) > 300 else text.rstrip(".")) or type(error).__name__
