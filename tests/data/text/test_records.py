"""The same documents from every kind of file, compressed or not, and of Python itself; damaged ones are named."""

import bz2
import csv
import gzip
import io
import json
import lzma
import tracemalloc
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from backports import zstd

from megajax.core.errors import UserError
from megajax.data.text.inputs import DOCSTRINGS, library_folder, prose
from megajax.data.text.records import NoText, Record, TextDocuments, TextFiles, text_of
from megajax.host import reading

TEXTS = [f"document {n}: Füße, 数 and a line\n" * (n % 7 + 1) for n in range(700)]


def records(file: Path, **options) -> list[tuple[Record, int]]:
    return list(TextFiles([file], "INPUT").records(**options))


def write(file: Path, key: str = "text") -> Path:
    """`TEXTS` in the format that the name asks for."""
    if file.suffix == ".parquet":
        table = pa.table({"id": list(range(len(TEXTS))), key: TEXTS})
        pq.write_table(table, file, row_group_size=100)
        return file
    lines = "".join(json.dumps({key: text}) + "\n" for text in TEXTS).encode()
    if file.suffix == ".zst":  # two frames, as `cat` of two files leaves them
        half = lines.index(b"\n", len(lines) // 2) + 1
        lines = b"".join(zstd.compress(part) for part in (lines[:half], lines[half:]))
    pack = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}.get(file.suffix, bytes)
    file.write_bytes(pack(lines))
    return file


@pytest.mark.parametrize(
    "name", [f"a.jsonl{end}" for end in ("", ".gz", ".zst", ".bz2", ".xz")] + ["a.parquet", "A.JSONL"]
)
def test_every_format_holds_the_same_documents(tmp_path, name):
    file = write(tmp_path / name)
    assert list(TextDocuments(file)) == TEXTS
    assert list(TextDocuments(tmp_path)) == TEXTS
    positions = [position for _, position in records(file)]
    assert positions == sorted(positions) and positions[-1] == file.stat().st_size


def test_other_names(tmp_path):
    """Compressed text is cut like other text; a JSON file that is named has lines, one of a folder may be anything."""
    text = "".join(f"paragraph {n}\n" + "word " * (n % 60) + "\n\n" for n in range(1000))
    (tmp_path / "a.txt").write_text(text)
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(text.encode()))
    (tmp_path / "c.gz").write_bytes(gzip.compress(b"one<|endoftext|>two"))
    assert list(TextDocuments(tmp_path / "b.txt.gz")) == list(TextDocuments(tmp_path / "a.txt"))
    assert list(TextDocuments(tmp_path / "c.gz")) == ["one", "two"]
    (tmp_path / "folder").mkdir()
    named = tmp_path / "folder" / "a.json"
    named.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS[:5]))
    assert list(TextDocuments(named)) == TEXTS[:5] and len(list(TextDocuments(named.parent))) == 1


@pytest.mark.parametrize("indent", [None, 1])
@pytest.mark.parametrize("size", [8, 50, 1 << 20])
def test_an_array_of_json(tmp_path, monkeypatch, size, indent):
    """However much of it is read at a time; its elements are as lines are."""
    monkeypatch.setattr("megajax.data.text.long_documents._BLOCK_BYTES", size)
    rows = [{"text": text, "more": [{"a": '"]}'}, 1.5, None]} for text in TEXTS[:60]]
    (tmp_path / "a.json").write_text("\ufeff " + json.dumps(rows, indent=indent, ensure_ascii=False) + "\n")
    assert list(TextDocuments(tmp_path / "a.json")) == TEXTS[:60]
    (tmp_path / "a.json").write_text((tmp_path / "a.json").read_text() * 2 + "\n" * 90)  # as joined files are
    assert list(TextDocuments(tmp_path / "a.json")) == TEXTS[:60] * 2
    (tmp_path / "b.json.gz").write_bytes(
        gzip.compress(json.dumps([{"text": "a"}, {"body": 1}, 7, {"text": "b"}]).encode())
    )
    with pytest.raises(UserError, match=r'b\.json\.gz:2: no text under the key "text"; there are "body"'):
        list(TextDocuments(tmp_path / "b.json.gz"))
    assert [record.kind for record, _ in records(tmp_path / "b.json.gz")] == ["json"] * 4


ARRAY = '[{"text": "a"}]'
BROKEN = ['[{"text": "a"}, {"text"', '[{"text": "a"} {"text": "b"}]', '[{"text": "a"}, ', "[}", ARRAY + '\n{"a": "b"}']


@pytest.mark.parametrize("text", [*BROKEN, f"{ARRAY}[", f"{ARRAY},", f"{ARRAY}]", ARRAY + " " * (1 << 20) + "x"])
def test_a_broken_array(tmp_path, text):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(UserError, match=r"INPUT: .*a\.json: truncated or damaged: .*array.*; valid: the complete file"):
        records(tmp_path / "a.json")


def test_csv(tmp_path):
    """Quoted texts with commas, quotes and lines in them; a row of another length is what is wrong with it."""
    content = io.StringIO(newline="")
    rows = csv.writer(content)
    rows.writerows([["id", "text"], *([n, f'{text}, "quoted"'] for n, text in enumerate(TEXTS))])
    for name, pack in ("a.csv", bytes), ("b.csv.xz", lzma.compress):
        (tmp_path / name).write_bytes(pack(f"\ufeff{content.getvalue()}".encode()))
        assert list(TextDocuments(tmp_path / name)) == [f'{text}, "quoted"' for text in TEXTS]
    assert [record.kind for record, _ in TextFiles([tmp_path], "INPUT").records()][:1] == ["file"]
    with pytest.raises(UserError, match=r'INPUT: .*a\.csv has no column "body"; valid: one of "id", "text"'):
        records(tmp_path / "a.csv", key="body")
    (tmp_path / "c.csv").write_text("id,text\n1,a\n\n2\n3,b\n")
    found = records(tmp_path / "c.csv")
    assert [(record.kind, record.content) for record, _ in found] == [
        ("text", "a"),
        ("text", ""),
        ("broken", "1 columns; valid: 2, as in the first row"),
        ("text", "b"),
    ]
    for broken in b'id,text\n1,"a', b"id,text\n1,\xff\n":
        (tmp_path / "d.csv").write_bytes(broken)
        with pytest.raises(UserError, match=r"d\.csv: truncated or damaged: (not CSV|line 2 is not UTF-8)"):
            records(tmp_path / "d.csv")


@pytest.mark.parametrize("size", [1, 3, 1 << 20])
def test_byte_order_marks_of_joined_files(tmp_path, monkeypatch, size):
    """Archives joined by `cat` keep that of each member."""
    monkeypatch.setattr("megajax.data.text.streams._BLOCK_BYTES", size)
    members = [b'\xef\xbb\xbf{"text": "%d \\ufeff"}\n' % n for n in range(3)]
    for end, pack in (
        (".gz", gzip.compress),
        (".bz2", bz2.compress),
        (".xz", lzma.compress),
        (".zst", zstd.compress),
        ("", bytes),
    ):
        (tmp_path / f"a.jsonl{end}").write_bytes(b"".join(map(pack, members)))
        assert list(TextDocuments(tmp_path / f"a.jsonl{end}")) == ["0 \ufeff", "1 \ufeff", "2 \ufeff"]
    (tmp_path / "folder").mkdir()
    for name in "b.txt.gz", "folder/b.txt.gz":
        (tmp_path / name).write_bytes(b"".join(gzip.compress(b"\xef\xbb\xbf" + line) for line in (b"one\n", b"two\n")))
    assert list(TextDocuments(tmp_path / "b.txt.gz", cut=False)) == ["one\ntwo\n"]
    assert list(TextDocuments(tmp_path / "folder")) == ["one\ntwo\n"]


@pytest.mark.slow
def test_the_memory_that_an_archive_wants(tmp_path):
    (tmp_path / "a.txt.xz").write_bytes(
        lzma.compress(b"text", filters=[{"id": lzma.FILTER_LZMA2, "dict_size": 1 << 30}])
    )
    with pytest.raises(UserError, match=r"a\.txt\.xz: truncated or damaged: Memory usage limit.*: xz -9 packs"):
        records(tmp_path / "a.txt.xz")


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst", "a.jsonl.bz2", "a.jsonl.xz", "a.parquet"])
@pytest.mark.parametrize("damage", ["cut", "other", "flipped"])
def test_damaged_files_are_named(tmp_path, name, damage):
    file = write(tmp_path / name)
    whole = bytearray(file.read_bytes())
    middle = len(whole) // 2
    whole[middle : middle + 40] = bytes(255 - byte for byte in whole[middle : middle + 40])
    file.write_bytes({"cut": file.read_bytes()[:-20], "other": b"no archive\n" * 20, "flipped": bytes(whole)}[damage])
    with pytest.raises(UserError, match=rf"INPUT: .*{name}: truncated or damaged") as caught:
        records(file)
    assert "\n" not in str(caught.value)


def test_another_key(tmp_path):
    for name in "a.jsonl", "b.parquet":
        found = records(write(tmp_path / name, key="body"), key="body")
        assert [text_of(record, "body") for record, _ in found] == TEXTS
    with pytest.raises(UserError, match=r'b\.parquet has no column "text"; valid: one of "id", "body"'):
        records(tmp_path / "b.parquet")
    with pytest.raises(UserError, match='column "id" has the type int64; valid: text'):
        records(tmp_path / "b.parquet", key="id")
    with pytest.raises(NoText, match='no text under the key "text"; there are "body"'):
        text_of(Record(0, 1, "json", (tmp_path / "a.jsonl").read_bytes().splitlines()[0]))


def test_several_paths_in_their_order(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "x.txt").write_text("a whole file\n\n" * 1000)
    (tmp_path / "y.txt").write_text("in pieces\n\n" * 1000)
    found = list(TextFiles([tmp_path / "y.txt", tmp_path / "folder"], "INPUT").records())
    assert [record.number for record, _ in found if record.file == 0] == list(range(1, len(found)))
    assert [record.kind for record, _ in found if record.file == 1] == ["file"]


@pytest.mark.parametrize(
    ("text", "jsonl", "said"),
    [
        (9000, 20, "x.txt is 86% of the bytes, as one document"),
        (2 << 20, 20, "x.txt is 100% of the bytes"),  # a document so long is cut
        (20, 9000, "y.jsonl is 86% of the bytes"),
        (20, 20, ""),
    ],
)
def test_a_file_that_dominates_its_folder_is_told(tmp_path, text, jsonl, said):
    for name in map(str, range(20)):
        (tmp_path / f"{name}.py").write_text("print(1)\n" * 8)
    (tmp_path / "x.txt").write_text("a" * text)
    (tmp_path / "y.jsonl").write_text(json.dumps({"text": "a" * jsonl}))
    expected = said and f"20 .py, 1 .txt, 1 .jsonl; {tmp_path / said}"
    assert TextDocuments(tmp_path).dominated == expected
    assert not TextDocuments(tmp_path / "x.txt").dominated


def test_what_compresses_very_well_is_read_in_a_steady_memory(tmp_path):
    """A block of a file may hold thousands of times as much."""
    file = tmp_path / "a.jsonl.zst"
    file.write_bytes(zstd.compress(b'{"text": "%s"}\n' % (b"over and " * 200) * 30_000, level=3))
    tracemalloc.start()
    try:
        assert sum(1 for _ in TextFiles([file], "INPUT").records()) == 30_000
        assert tracemalloc.get_traced_memory()[1] < 16e6, "of 54 MB"
    finally:
        tracemalloc.stop()


def test_parquet_texts_that_are_not_utf8(tmp_path):
    column = pa.Array.from_buffers(pa.string(), 1, [None, pa.py_buffer(b"\0\0\0\0\2\0\0\0"), pa.py_buffer(b"\xff\xfe")])
    pq.write_table(pa.table({"text": column}), tmp_path / "a.parquet")
    with pytest.raises(UserError, match=r"a\.parquet: truncated or damaged: a text .* is not UTF-8"):
        list(TextDocuments(tmp_path / "a.parquet"))


@pytest.mark.parametrize("most", [1, pytest.param(256, marks=pytest.mark.full)])
def test_a_line_that_is_too_long(tmp_path, monkeypatch, most):
    """Of an archive that is a thousand times smaller; no more of it is unpacked than may be read."""
    assert reading.LINE_BYTES == 256 << 20
    monkeypatch.setattr("megajax.host.reading.LINE_BYTES", most << 20)
    line = b'{"text": "' + b"a" * (most + 1 << 20) + b'"}\n'
    (tmp_path / "a.jsonl.zst").write_bytes(zstd.compress(b'{"text": "b"}\n' + line, level=1))
    with pytest.raises(UserError, match=rf"a\.jsonl\.zst:2: more than {most} MiB as one text; valid: at most that$"):
        list(TextDocuments(tmp_path / "a.jsonl.zst"))
    assert [record.kind for record, _ in records(tmp_path / "a.jsonl.zst")] == ["json", "broken"]


@pytest.mark.parametrize("folder", [False, True])
def test_a_document_that_is_too_long(tmp_path, monkeypatch, folder):
    monkeypatch.setattr("megajax.host.reading.LINE_BYTES", 1 << 20)
    (tmp_path / "a.txt").write_text("short<|endoftext|>" + "a word " * (1 << 19) + "<|endoftext|>short")
    with pytest.raises(UserError, match=r"a\.txt:[12]: more than .* MiB as one text"):
        list(TextDocuments(tmp_path if folder else tmp_path / "a.txt", cut=not folder))


@pytest.mark.parametrize("size", [13, 14, 17, 1000])
def test_separators_that_lie_across_blocks(tmp_path, monkeypatch, size):
    monkeypatch.setattr("megajax.data.text.streams._BLOCK_BYTES", size)
    texts = ["one", "", "two <|end", "three<|endoftext|", "|>", "four" * 9]
    (tmp_path / "a.txt").write_text("<|endoftext|>".join(texts))
    assert [record.content for record, _ in records(tmp_path / "a.txt")] == texts


def test_a_value_of_parquet_that_stands_in_many_rows(tmp_path, monkeypatch):
    """It is stored once: a small file could fill any memory."""
    monkeypatch.setattr("megajax.data.text.parquet._ROWS_BYTES", 1 << 24)
    column = pa.DictionaryArray.from_arrays(pa.array([0] * 250, pa.int32()), pa.array(["a" * (1 << 20)]))
    pq.write_table(pa.table({"text": column}), tmp_path / "a.parquet", compression="gzip", store_schema=False)
    assert (tmp_path / "a.parquet").stat().st_size < 1 << 16
    before = pa.total_allocated_bytes()
    peak = 0
    for record, _ in TextFiles([tmp_path / "a.parquet"], "INPUT").records():
        assert len(record.content) == 1 << 20
        peak = max(peak, pa.total_allocated_bytes() - before)
    assert 1 << 20 < peak < 1 << 26
    monkeypatch.setattr("megajax.data.text.parquet._EXPANSION", (100 << 20, 1000))
    with pytest.raises(UserError, match=r"a\.parquet: 250 rows that repeat only a few texts; valid: at most 101 MiB"):
        records(tmp_path / "a.parquet")


SOURCE = '''"""Of the module.

It has words."""
class A:
    """Of the class."""
    def f(self):
        r"""Of a function \\d.

        >>> f()
        1

        After the example."""
        def g(): "Inner."
    async def h(self): "Of the class."
def k(): b"No text."
x = """No docstring."""
'''


def test_prose_of_a_file():
    """Docstrings in their order, without examples and repetitions; topics are documents; some files have none."""
    assert prose(Path("a.py"), SOURCE.encode()) == [
        "Of the module.\n\nIt has words.\n\nOf the class.\n\nOf a function \\d.\n\nAfter the example.\n\nInner."
    ]
    source = b'topics = {"a": "First one.\\n", "b": "\\n>>> x\\n", "c": "Another.", "d": 4}'
    assert prose(Path("pydoc_data", "topics.py"), source) == ["First one.", "Another."]
    for source in b"", b"x = 1", b"def f(:", b"\xff\xfe", b"x = 1\0", b"(" * 9999, b"# coding: nothing\nx":
        assert prose(Path("a.py"), source) == []


@pytest.mark.parametrize("folder", ["asyncio", "pydoc_data", pytest.param("", marks=pytest.mark.full)])
def test_the_corpus_of_this_python(folder, monkeypatch):
    monkeypatch.setattr("megajax.data.text.inputs.library_folder", lambda: library_folder() / folder)
    documents = TextDocuments(DOCSTRINGS)
    texts = list(documents)
    assert len(texts) > (20 if folder else 400) and sum(map(len, texts)) > (40_000 if folder else 1_000_000)
    assert documents.num_documents == len(texts)


def test_long_documents_are_cut_in_the_same_way_in_every_format(tmp_path, monkeypatch):
    """A long line of JSON is read in blocks, by another parser than the others."""
    monkeypatch.setattr("megajax.data.text.long_documents.LONG", 1000)
    monkeypatch.setattr("megajax.data.text.long_documents._PIECE", 250)
    text = "".join(f'paragraph {n}: "Füße", 数 \U0001f600 \\ {{[,\n' + "word " * (n % 60) + "\n\n" for n in range(50))
    text += "end"
    for escaped in True, False:
        line = (
            '{"text": "first", '
            + json.dumps({"meta": [{"]}": '"'}, 1], "text ": 1, "text": text}, ensure_ascii=escaped)[1:]
        )
        lines = [
            "\ufeff" + line,
            line[:-1],
            line + "}",
            line[:900] + "\\q" + line[900:],
            line.replace('"text"', '"body"'),
        ]
        (tmp_path / f"{escaped}.jsonl").write_text(
            "\n".join([*lines, line.replace("数", "\\ud800").replace("\\u6570", "\\ud800")])
        )
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "c.md").write_text(text)
    pq.write_table(pa.table({"text": [text]}), tmp_path / "d.parquet")
    (tmp_path / "e.txt").write_text(f"\n{text}<|endoftext|>\n")
    expected = [record.content for record, _ in records(tmp_path / "b")]
    assert "".join(expected) == text and len(expected) > 5 and max(map(len, expected)) <= 1000
    assert [record.content for record, _ in records(tmp_path / "d.parquet")] == expected
    assert [record.content for record, _ in records(tmp_path / "e.txt")][:-1] == expected
    for escaped in True, False:
        found = [record for record, _ in records(tmp_path / f"{escaped}.jsonl")]
        assert [record.content for record in found if record.kind == "text"] == expected
        assert [(record.kind, record.number) for record in found[len(expected) :]] == [
            ("broken", n) for n in range(2, 7)
        ]
        assert [
            text for _, text in zip(expected, TextDocuments(tmp_path / f"{escaped}.jsonl"), strict=False)
        ] == expected
