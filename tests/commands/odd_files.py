"""Files that no command can do with."""

import shutil
from pathlib import Path

import numpy as np

from megajax.data.text.indexed import IndexedWriter


def dataset(folder: Path, length: int = 50, largest: int = 299) -> Path:
    """A prepared dataset of ten documents of some length and one with the largest id; its index."""
    folder.mkdir()
    with IndexedWriter(folder / "set", largest + 1) as writer:
        for _ in range(10):
            writer.add_document(np.arange(length))
        writer.add_document(np.array([largest, 0]))
    return folder / "set.idx"


def write_odd_files(folder: Path, tokenizer: Path) -> Path:
    """Every kind of them, in an empty folder; of datasets one stands beside a tokenizer."""
    texts = {"empty": b"", "short": b"Two words.\n\nFour more.\n", "few": b"some text"}
    for name, text in (texts | {"latin": "naïve text, ".encode("latin-1") * 500}).items():
        (folder / f"{name}.txt").write_bytes(text)
    (folder / "other.png").write_bytes(b"\x89PNG")
    (folder / "bad.jsonl").write_text('{"text": "a b"}\n{"words": "a b"}\n')
    (folder / "run" / "data").mkdir(parents=True)
    (folder / "run" / "notes.txt").write_text("mine")
    shutil.copy(folder / "latin.txt", folder / "run" / "data")
    (folder / "folder.txt").mkdir()
    (folder / "circle").symlink_to("circle")
    (folder / "nul.toml").write_text('run_dir = "a\\u0000b"\n')
    dataset(folder / "short", length=2)
    dataset(folder / "beside", largest=300)
    shutil.copytree(tokenizer, folder / "beside", dirs_exist_ok=True)
    index = dataset(folder / "cut")
    index.write_bytes(index.read_bytes()[:99])
    return folder
