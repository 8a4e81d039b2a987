"""The readers that are fuzzed: a line of `READERS` each, or of `TASK_READERS` where they read files of tasks.

A reader has a function that writes valid files, one that reads them as the program does, and the files to change.
"""

import functools
import json
import tempfile
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from hostile import HOSTILE
from hugging_face import random_tensors, write_model
from mutations import GZ, ZST, Reader, of_one_file
from saved_tokenizers import write_pair, write_saved, write_vocabulary
from task_readers import TASK_READERS
from tiny import tiny_config, tiny_program

from megajax.convert.importing import open_source
from megajax.convert.origin import Origin
from megajax.core.errors import RunError, UserError
from megajax.core.models.router import LOAD
from megajax.data.samples.making import make_corpus
from megajax.data.samples.masking import WordPieces
from megajax.data.samples.pairs import train_and_validation
from megajax.data.text.chat import Chat, ChatTemplate
from megajax.data.text.corpus import corpus_tokenizer, evaluation_tokens, open_corpus
from megajax.data.text.digests import digests_of
from megajax.data.text.encoding import encode_documents
from megajax.data.text.indexed import IndexedDataset, IndexedWriter, dataset_files
from megajax.data.text.records import TextDocuments
from megajax.data.text.tokenizer import Tokenizer
from megajax.data.text.tokenizers import load_tokenizer, train_tokenizer
from megajax.generation.text import read_prompts
from megajax.preparation.contamination import TestSets
from megajax.preparation.shards import WorkFolder
from megajax.runs.directory import stored_config
from megajax.runs.forms import kept_forms
from megajax.runs.lock import Holder
from megajax.runs.metrics import read_metrics
from megajax.runs.ownership import FORMS, mark, marked_format
from megajax.settings.config import to_toml
from megajax.settings.presets import load_preset, resolve
from megajax.training.watchdog import Status, read_status

REFUSALS = UserError, RunError

TEXTS = [f"Document {n}: " + " ".join(str(n * m) for m in range(12)) + "\n" for n in range(12)]


@functools.cache
def _tokenizer(kind: str) -> Tokenizer:
    return train_tokenizer(TEXTS, 280 if kind == "bpe" else 120, kind)  # type: ignore[arg-type]


_write_vocabulary = functools.partial(write_vocabulary, tokenizer=_tokenizer("wordpiece"))
_write_pair = functools.partial(write_pair, tokenizer=_tokenizer("bpe"))


def _write_tokens(folder: Path) -> np.ndarray:
    tokenizer = _tokenizer("bpe")
    with IndexedWriter(folder / "m", tokenizer.size) as writer:
        for text in TEXTS:
            writer.add_document([*tokenizer.encode(text), tokenizer.end_of_text])
    return writer.digests


def _read_tokens(folder: Path) -> None:
    tokens = IndexedDataset(folder / "m")
    tokens.check_vocabulary(280)
    for number in range(min(tokens.num_documents, 100)):
        tokens.document(number).sum()


def _write_sentences(folder: Path) -> None:
    tokenizer = _tokenizer("wordpiece")
    with IndexedWriter(folder / "m", tokenizer.size) as writer:
        for sequences in encode_documents([text.replace(" 1", ". 1") for text in TEXTS], tokenizer, sentences=True):
            writer.add_document(*sequences)


def _read_sentences(folder: Path) -> None:
    tokens = IndexedDataset(folder / "m")
    tokens.check_vocabulary(120)
    form = {"sequence_length": 24, "vocabulary": WordPieces.of(_tokenizer("wordpiece"))}
    train, validation = train_and_validation(tokens, validation_fraction=0.2, seed=1, **form)
    for number in range(5):
        train[number]["tokens"].sum() + validation[number % len(validation)]["targets"].sum()


def _write_parquet(folder: Path) -> None:
    pq.write_table(pa.table({"id": range(len(TEXTS)), "text": TEXTS}), folder / "a.parquet")


def _read_texts(file: Path, cut: bool = True) -> None:
    sum(len(text) for text in TextDocuments(file, cut=cut))


def _write_preset(folder: Path) -> None:
    demo = (Path(__file__).parents[2] / "configs" / "demo.toml").read_text()
    sources = "sources = [{ path = 'corpora/web', weight = 0.7 }, { path = 'b', weight = 0.3 }]\n"
    (folder / "b.toml").write_text(demo.replace('path = "python-stdlib"\n', sources))
    (folder / "a.toml").write_text('base = "b.toml"\nseed = 3\n[train]\nsteps = 50\n')


def _use_tokenizer(folder: Path) -> None:
    _use(load_tokenizer(folder))


def _use(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode_prompt(TEXTS[3] + " other words é")
    if tokenizer.size > 1 << 20:  # more than a model has
        return
    tokenizer.num_bytes(np.array(ids))
    tokenizer.decode(ids)
    with tempfile.TemporaryDirectory() as own:
        tokenizer.save(own)
        assert load_tokenizer(own) == tokenizer
    if tokenizer.chat_template is not None:
        template = ChatTemplate(tokenizer.chat_template, tokenizer.named_tokens, "it")
        messages = [{"role": role, "content": "a b"} for role in ("user", "assistant")]
        list(template.rendered([Chat(messages, "f:1")], [[1]]))


def _read_metrics(file: Path) -> None:
    for record in read_metrics(file.parent):
        np.array(record.pop(LOAD, [[0]]), np.int32).sum(axis=1)
        sum(float(value) for value in record.values() if value is not None)


def _write_corpus(folder: Path) -> None:
    (folder / "corpus.txt").write_text("".join(TEXTS))
    _tokenizer("bpe").save(folder / "data" / "tokenizer")
    make_corpus(str(folder / "corpus.txt"), "", 280, folder / "data")


def _read_corpus(folder: Path) -> None:
    corpus = open_corpus(folder / "data", 280)
    corpus_tokenizer(folder / "data")
    for number in range(corpus.tokens.num_documents):
        corpus.tokens.document(number).sum()


def _write_prepared(folder: Path) -> None:
    _tokenizer("bpe").save(folder / "m.tokenizer")
    digests = digests_of(dataset_files(folder / "m")[0], _write_tokens(folder), folder / "m.tokenizer")
    (folder / "m.report.json").write_text(json.dumps({"plan": {"format": [1]}, "documents": 12, "digests": digests}))


def _read_lock(file: Path) -> bool:
    holder = Holder.read(file)
    assert len(str(holder).splitlines()) == 1
    return holder is not None and bool(holder.is_alive)


_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 5e5}
_ENDS = {"bos_token_id": 1, "eos_token_id": [2, 7]}


def _write_decoder(folder: Path) -> None:
    window = {"use_sliding_window": True, "sliding_window": 5, "layer_types": ["sliding_attention"] * 2}
    write_model(folder, "qwen3", rope_parameters=_LLAMA3, **window, **_ENDS)
    (folder / "generation_config.json").write_text(json.dumps(_ENDS | {"temperature": 0.6}))


def _write_hugging_face(folder: Path) -> None:
    write_model(folder, "gpt2", random_tensors("gpt2", vocab_size=300), vocab_size=300)
    _tokenizer("bpe").save(folder)
    (folder / "tokenizer_config.json").write_text('{"add_prefix_space": false, "model_max_length": 24}')


def _write_hugging_face_shards(folder: Path) -> None:
    write_model(folder, "gpt2")
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    names = dict.fromkeys(random_tensors("gpt2"), "a.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))


def _write_bert(folder: Path) -> None:
    write_model(folder, "bert", random_tensors("bert", vocab_size=120), vocab_size=120)
    _tokenizer("wordpiece").save(folder)
    (folder / "tokenizer_config.json").write_text('{"do_lower_case": true, "strip_accents": null}')


def _write_bert_vocabulary(folder: Path) -> None:
    _write_bert(folder)
    (folder / "tokenizer.json").unlink()
    _write_vocabulary(folder)


def _write_bert_classes(folder: Path) -> None:
    tensors, labels = random_tensors("bert", head="classes", classes=3), {"0": "no", "1": "yes", "2": "maybe"}
    problem = "single_label_classification"
    write_model(folder, "bert", tensors, head="classes", problem_type=problem, id2label=labels)


def _use_bert(folder: Path) -> None:
    source = open_source(folder)
    source.weights.read("cls.predictions.bias")
    if source.tokenizer:
        _use(source.tokenizer)


def _write_work(folder: Path) -> None:
    work = WorkFolder(folder, "x")
    starts = work.save_texts(0, TEXTS)
    work.save("clean", 0, {"starts": starts, "rule": np.ones(len(TEXTS), np.uint8), "problem": np.array("none")})
    work.save_bands(0, np.ones((3, len(TEXTS)), np.uint64))
    with work.writing(folder / "test-sets.npz") as file:
        TestSets.collect([["one two three four five six seven eight nine"]]).save(file)


def _read_work(folder: Path) -> None:
    work = WorkFolder(folder, "x")
    _, problem = work.load("clean", 0, "rule", "problem")
    str(problem)
    list(work.texts(0))
    work.band(0, 2, len(TEXTS))
    TestSets.load(folder / "test-sets.npz")


@functools.cache
def _checkpoints(folder: Path):
    from megajax.runs.checkpoint import Checkpoints

    program = tiny_program(tiny_config(num_layers=1, hidden_size=8, num_heads=2, vocab_size=11, vocab_multiple=1))
    return Checkpoints(folder, program.layout, keep=1), program.layout


def _write_checkpoint(folder: Path) -> None:
    checkpoints, layout = _checkpoints(folder)
    checkpoints.save(1, layout.init())
    checkpoints.wait()


def _read_checkpoint(folder: Path) -> None:
    _checkpoints(folder)[0].restore_params(1)


_DATA = tuple(f"data/{name}" for name in ("report.json", "tokens.digests", "tokens.idx", "tokens.bin"))
_DATA += ("data/tokenizer/tokenizer.json",)
_SETTINGS = ("tokenizer.json", "tokenizer_config.json")
_SAVED = {
    "llama3": (*_SETTINGS, "special_tokens_map.json", "generation_config.json"),
    "qwen": _SETTINGS,
    "mistral": (*_SETTINGS, "chat_template.jinja", "config.json"),
}
_LINES = "".join(json.dumps({"text": text, "meta": {"id": n, "x": [1, 2.5]}}) + "\n" for n, text in enumerate(TEXTS))
_STEPS = [{"step": n, "loss": 3.5 / n, "grad_norm": None, "tokens": 100, "seconds": 0.1} for n in range(1, 9)]
_METRICS = "".join(
    json.dumps(line) + "\n"
    for line in [*_STEPS, {"step": 8, LOAD: [[3, 4], [5, 6]]}, {"step": 8, "validation_loss": 2.5}]
)
_STATUS = json.dumps(asdict(Status("far", 7, 12, "computing", 3.5)))
_ORIGIN = Origin("LlamaForCausalLM", "bf16", 24, _ENDS, _ENDS | {"temperature": 0.6})
_PREPARED = ("m.report.json", "m.idx")
_SHARDS = ("model.safetensors.index.json", "a.safetensors")
_WORK = ("clean-000000.npz", "clean-000000.text", "tokens-000000.bands", "test-sets.npz")
_HUGGING_FACE = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
_BERT_VOCABULARY = ("vocab.txt", "tokenizer_config.json")
_CHECKPOINT = tuple(f"checkpoints/1/{name}" for name in ("checkpoint.json", "state/_METADATA"))

READERS = [
    Reader("Megatron index", _write_tokens, _read_tokens, ("m.idx", "m.bin")),
    Reader("sentences", _write_sentences, _read_sentences, ("m.idx", "m.bin")),
    of_one_file("records: JSONL", "a.jsonl", _LINES, _read_texts),
    of_one_file("records: JSONL.gz", "a.jsonl.gz", _LINES, _read_texts, GZ),
    of_one_file("records: JSONL.zst", "a.jsonl.zst", _LINES, _read_texts, ZST),
    Reader("records: Parquet", _write_parquet, lambda to: _read_texts(to / "a.parquet"), ("a.parquet",)),
    of_one_file("records: text", "a.txt", _LINES, _read_texts),
    of_one_file("records: text as one", "a.txt.gz", _LINES, lambda file: _read_texts(file, cut=False), GZ),
    Reader("preset", _write_preset, lambda folder: resolve(load_preset(folder / "a.toml")), ("a.toml", "b.toml")),
    of_one_file(
        "config.toml of a run", "config.toml", to_toml(tiny_config()), lambda file: stored_config(file.parent, {})
    ),
    Reader("tokenizer: BPE", _write_pair, _use_tokenizer, ("vocab.json", "merges.txt")),
    Reader("tokenizer: WordPiece", _write_vocabulary, _use_tokenizer, ("vocab.txt",)),
    *(
        Reader(f"tokenizer.json: {kind}", functools.partial(write_saved, kind=kind), _use_tokenizer, files)
        for kind, files in _SAVED.items()
    ),
    of_one_file("metrics.jsonl", "metrics.jsonl", _METRICS, _read_metrics),
    Reader("data of a run", _write_corpus, _read_corpus, _DATA),
    Reader("run.json", mark, marked_format, ("run.json",)),
    of_one_file("forms.json", FORMS, json.dumps({"attention": {"of": {}, "forms": {"cudnn": "right"}}}), kept_forms),
    of_one_file("run.lock", "run.lock", json.dumps(asdict(Holder.me())), _read_lock),
    of_one_file("processes/0.json", "0.json", _STATUS, read_status),
    Reader("prepared dataset", _write_prepared, lambda to: evaluation_tokens(str(to / "m"), None, 280), _PREPARED),
    Reader("work folder of prepare", _write_work, _read_work, _WORK),
    Reader("Hugging Face folder", _write_hugging_face, open_source, _HUGGING_FACE, short=10),
    Reader("Hugging Face shards", _write_hugging_face_shards, open_source, _SHARDS, short=10),
    Reader("Hugging Face decoder", _write_decoder, open_source, ("config.json", "generation_config.json"), short=10),
    Reader("imported.json", _ORIGIN.write, Origin.read, ("imported.json",)),
    Reader("Hugging Face BERT", _write_bert, _use_bert, _HUGGING_FACE, short=10),
    Reader("Hugging Face BERT: classes", _write_bert_classes, open_source, ("config.json",)),
    Reader("Hugging Face BERT: vocab.txt", _write_bert_vocabulary, _use_bert, _BERT_VOCABULARY, short=10),
    of_one_file("prompts", "p", "".join(TEXTS), lambda file: read_prompts([], str(file))),
    Reader("checkpoint metadata", _write_checkpoint, _read_checkpoint, _CHECKPOINT, most=500, short=0),
    *TASK_READERS,
    *HOSTILE,
]
