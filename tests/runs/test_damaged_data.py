"""Every file of a run's data: truncated, emptied, zeroed, flipped, deleted, grown, replaced. Found, or harmless."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
from damages import DAMAGES
from saved_tokenizers import write_pair
from tiny import tiny_config, user_error

from megajax.core.errors import UserError
from megajax.data.config import DataConfig, Source, TokenizerConfig
from megajax.data.samples.making import make_corpus
from megajax.data.text.corpus import corpus_tokenizer, open_corpus
from megajax.data.text.digests import BLOCK_BYTES, digests_of
from megajax.data.text.indexed import IndexedWriter
from megajax.data.text.tokenizers import load_tokenizer, train_tokenizer
from megajax.runs.data import make_run_data, open_run_data

TEXTS = [f"Document {n}: " + " ".join(str(n * m) for m in range(50)) for n in range(40)]


BPE = ("tokens.bin", "tokens.idx", "tokens.digests", "tokenizer/tokenizer.json", "report.json")
HARMLESS = {("report.json", "grown"), ("report.json", "truncated")}  # white space at the end of JSON


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The data of two runs, with tokenizers of both kinds."""
    folder = tmp_path_factory.mktemp("whole")
    (folder / "corpus.txt").write_text("\n\n".join(TEXTS))
    for kind in "bpe", "wordpiece":
        train_tokenizer(TEXTS, 300, kind).save(folder / "given" / kind)  # type: ignore[arg-type]
        make_corpus(str(folder / "corpus.txt"), str(folder / "given" / kind), 300, folder / kind)
    return folder


def read(data: Path) -> None:
    """As training and generation do."""
    corpus = open_corpus(data, 300)
    for number in range(corpus.tokens.num_documents):
        corpus.tokens.document(number)
    corpus_tokenizer(data)


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", BPE)
def test_damage(whole: Path, name: str, damage: str, tmp_path: Path) -> None:
    """One line that names the file and says what to do."""
    if (name, damage) == ("report.json", "middle byte"):
        pytest.skip("test_every_bit_of_the_report")
    data = shutil.copytree(whole / "bpe", tmp_path / "data")
    read(data)
    DAMAGES[damage](data / name)
    if (name, damage) in HARMLESS:
        read(data)
        return
    said = user_error(read, data)
    assert str(data / name) in said and ("valid" in said or "delete" in said)


@pytest.mark.full
def test_every_bit_of_the_report(whole: Path, tmp_path: Path) -> None:
    """Found, or the corpus is the same: only what is shown of it is another."""
    data = shutil.copytree(whole / "bpe", tmp_path / "data")
    expected = open_corpus(data, 300)
    content = (data / "report.json").read_bytes()
    for bit in range(8 * len(content)):
        changed = bytearray(content)
        changed[bit // 8] ^= 1 << bit % 8
        (data / "report.json").write_bytes(changed)
        try:
            found = open_corpus(data, 300)
        except UserError as error:
            assert len(str(error).splitlines()) == 1
        else:
            assert (found.tokens.tokens == expected.tokens.tokens).all() and found.tokenizer == expected.tokenizer


def test_a_corpus_of_before(whole: Path, tmp_path: Path) -> None:
    """Without digests it opens, and its ids are checked."""
    data = shutil.copytree(whole / "bpe", tmp_path / "data")
    report = json.loads((data / "report.json").read_text())
    del report["digests"]
    (data / "report.json").write_text(json.dumps(report))
    (data / "tokens.digests").unlink()
    read(data)
    tokens = (data / "tokens.bin").read_bytes()
    (data / "tokens.bin").write_bytes(b"\xff" * 2 + tokens[2:])
    with pytest.raises(UserError, match=r"tokens\.bin: token id 65535 at position 0 is beyond the vocabulary"):
        read(data)
    (data / "tokens.bin").write_bytes(tokens)
    shutil.rmtree(data / "tokenizer")
    with pytest.raises(UserError, match="tokenizer is not a folder"):
        read(data)


def test_another_file_beside_the_tokenizer(whole: Path, tmp_path: Path) -> None:
    """A vocabulary of the other kind would be read in the place of the run's own."""
    data = shutil.copytree(whole / "wordpiece", tmp_path / "data")
    write_pair(data / "tokenizer", load_tokenizer(whole / "given" / "bpe"))
    with pytest.raises(UserError, match=r"merges\.txt: did not exist when the tokenizer was written"):
        read(data)


@pytest.mark.parametrize("kind", ["bpe", "wordpiece"])
def test_the_tokenizer_of_several_corpora(whole: Path, kind: str, tmp_path: Path) -> None:
    """It lies beside them, and their digests are its own."""
    sources = tuple(Source(path=str(whole / "corpus.txt"), weight=weight) for weight in (1.0, 2.0))
    config = dataclasses.replace(
        tiny_config(vocab_size=300),
        data=DataConfig(sources=sources),
        tokenizer=TokenizerConfig(path=str(whole / "given" / kind)),
    )
    make_run_data(config, tmp_path / "data")
    assert corpus_tokenizer(tmp_path / "data") == open_run_data(config, tmp_path / "data").tokenizer
    DAMAGES["middle byte"](tmp_path / "data" / "tokenizer" / "tokenizer.json")
    with pytest.raises(UserError, match="changed since it was written"):
        corpus_tokenizer(tmp_path / "data")


def _prepared(folder: Path) -> Path:
    """A dataset as `megajax prepare` leaves it, of three blocks."""
    folder.mkdir()
    tokenizer = train_tokenizer(TEXTS, 300)
    tokenizer.save(folder / "m.tokenizer")
    with IndexedWriter(folder / "m", tokenizer.size) as writer:
        for _ in range(1 + 2 * BLOCK_BYTES // 2000):
            writer.add_document([*range(256)] * 4)
    digests = digests_of(folder / "m.idx", writer.digests, folder / "m.tokenizer")
    (folder / "m.report.json").write_text(json.dumps({"plan": {}, "digests": digests}))
    return folder


@pytest.mark.parametrize("damage", ["zeroed", "middle byte"])
@pytest.mark.parametrize("name", ["m.bin", "m.idx", "m.tokenizer/tokenizer.json", "m.report.json"])
def test_prepared_datasets(name: str, damage: str, tmp_path: Path) -> None:
    """A damaged one begins no run; one that is damaged later is found, too, except its report and tokenizer, of which
    the run has copies. Without the report it is taken as it is, as Megatron-LM's are."""
    prefix = _prepared(tmp_path / "prepared") / "m"
    make_corpus(str(prefix), "", 300, tmp_path / "data")
    read(tmp_path / "data")
    DAMAGES[damage](prefix.parent / name)
    with pytest.raises(UserError, match="valid"):
        make_corpus(str(prefix), "", 300, tmp_path / "new")
    assert not (tmp_path / "new").exists()
    if name in ("m.bin", "m.idx"):
        with pytest.raises(UserError, match="valid"):
            read(tmp_path / "data")
    else:
        read(tmp_path / "data")
    if name == "m.bin":
        (prefix.parent / "m.report.json").unlink()
        read_again = make_corpus(str(prefix), "", 300, tmp_path / "new")
        assert read_again.report.digests.keys() == {"tokenizer/tokenizer.json"}
