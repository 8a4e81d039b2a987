"""Tokenizers of Llama, Qwen, Mistral and others in Hugging Face's format, whole: what was read is written again."""

from pathlib import Path

from megajax import reading
from megajax.convert.byte_pair_files import write_byte_pair
from megajax.convert.tokenizer_files import SINGLE
from megajax.data.tokenizer import Tokenizer
from megajax.data.tokenizers import is_tokenizer_folder, load_tokenizer
from megajax.errors import UserError

_OTHERS = ("tokenizer.model", "tekken.json", "vocab.json", "merges.txt")


def read_saved_tokenizer(folder: Path) -> tuple[Tokenizer | None, list[str]]:
    """The tokenizer of a folder, of which nothing is left out; None where there is none.

    Raises:
        UserError: it is damaged, or not in `tokenizer.json`.
    """
    if is_tokenizer_folder(folder):
        return load_tokenizer(folder, "PATH"), []
    if other := next((name for name in _OTHERS if reading.is_file(folder / name)), ""):
        raise UserError(
            f"{folder}: {other} without {SINGLE}; valid: {SINGLE}, which save_pretrained of transformers writes, or no "
            "tokenizer"
        )
    return None, []


write_saved_tokenizer = write_byte_pair
"""(tokenizer, tokens in a sequence, folder): all files by which `transformers` finds it, as they were read."""
