"""A run's tokenizer, kept beside its data folder, which may be deleted: the weights need exactly its ids, and an
imported one cannot be made again."""

import json
from pathlib import Path

from megajax.core.errors import UserError
from megajax.data.text.digests import are_digests, check_tokenizer, tokenizer_digests
from megajax.data.text.tokenizers import is_tokenizer_folder, load_tokenizer
from megajax.host import reading
from megajax.host.files import folder_atomically, write_atomically

TOKENIZER, _DIGESTS = "tokenizer", "digests.json"


def keep_copy(run_dir: Path, *, again: bool) -> None:
    """Copy the tokenizer of a run's data, if it has one, unless that was done before; `again` even then."""
    source, kept = run_dir / "data" / TOKENIZER, run_dir / TOKENIZER
    if is_tokenizer_folder(source) and (again or not reading.kind(kept / _DIGESTS)):
        with folder_atomically(kept, ours=lambda there: bool(reading.kind(there / _DIGESTS))) as new:
            load_tokenizer(source).save(new)
            write_atomically(new / _DIGESTS, json.dumps(tokenizer_digests(new), indent=1) + "\n")


def put_back_copy(run_dir: Path, folder: Path) -> None:
    """Save the copy, if there is one, in a data folder without a tokenizer."""
    kept = run_dir / TOKENIZER
    if not reading.kind(kept / _DIGESTS) or reading.kind(folder / TOKENIZER):
        return
    valid = f"valid: the file as it was, or no {kept} and --tokenizer.path with the run's tokenizer"
    if not are_digests(digests := reading.read_json(kept / _DIGESTS)):
        raise UserError(f"{kept / _DIGESTS}: no digests; {valid}")
    check_tokenizer(kept, digests, valid)
    load_tokenizer(kept).save(folder / TOKENIZER)
