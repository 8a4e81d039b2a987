"""The data of a run: one corpus or several blended ones, and validation sets."""

import contextlib
import itertools
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

from megajax.core.errors import UserError
from megajax.core.models.registry import FAMILIES
from megajax.core.options import counted
from megajax.data.samples import gpt, pairs
from megajax.data.samples.base import CorpusSamples, EpochSamples
from megajax.data.samples.blend import BlendedSamples, JoinedSamples
from megajax.data.samples.making import is_made_from, make_corpus
from megajax.data.samples.masking import WordPieces
from megajax.data.text.corpus import Corpus, evaluation_tokens, has_corpus, has_only_tokenizer, open_corpus
from megajax.data.text.indexed import prepared_prefix, tokenizer_folder
from megajax.data.text.inputs import absolute
from megajax.data.text.tokenizer import Tokenizer
from megajax.data.text.tokenizers import is_tokenizer_folder, load_tokenizer, named_tokenizer
from megajax.data.text.tokens import TokenDocuments
from megajax.host import reading
from megajax.runs.order import default_corpora, read_order
from megajax.settings.config import Config

_SOURCES = "--data.sources"
_VALIDATION = "validation-"  # prefix of the folders of named validation sets


@dataclass(frozen=True)
class RunData:
    """Samples and their corpora."""

    corpora: list[Corpus]  # one, or one for each source
    tokenizer: Tokenizer | None  # None if all data was given tokenized and without a tokenizer
    train: EpochSamples | BlendedSamples  # an endless sequence
    validation: CorpusSamples | None  # held-out samples of all corpora; None if nothing is held out
    validation_sets: dict[str, CorpusSamples]  # by name

    def lines(self, config: Config) -> Iterator[str]:
        """A line for every corpus, of which an epoch sees every sample once; then what is held out."""
        train = self.train
        blended = isinstance(train, BlendedSamples)
        parts = train.sources if isinstance(train, BlendedSamples) else [train]
        shares = train.blend.shares if isinstance(train, BlendedSamples) else [1.0]
        for corpus, samples, share in zip(self.corpora, parts, shares, strict=True):
            report = corpus.report
            skipped = (
                f", {counted(report.skipped_files, 'file')} skipped for not being UTF-8" if report.skipped_files else ""
            )
            files = f" ({report.dominated})" if report.dominated else ""
            alone = f", {report.single_sentence_documents:,} of them of one sentence" if report.sentences else ""
            sentences = f"{counted(report.sentences, 'sentence')} of " if report.sentences else ""
            full = " of the full batch" if config.train.ramp_start else ""
            epoch = counted(samples.epoch_size / share / config.train.global_batch, "step", ",.4g")
            yield (
                f"data{f' ({share:.4g} of the samples)' if blended else ''}: {report.tokens:,} tokens in {sentences}"
                f"{counted(report.documents, 'document')}{alone} of {report.source}{files}{skipped}; "
                f"an epoch is {epoch}{full}"
            )
        if self.validation is not None:
            held, total = self.validation.num_tokens, sum(corpus.report.tokens for corpus in self.corpora)
            asked = config.data.validation_fraction
            yield f"split: {total - held:,} tokens for training, {held:,} for validation ({held / total:.2%})"
            if held > gpt.MOST_HELD_OUT * asked * total:
                yield f"warning: that is more than --data.validation-fraction {asked:g}, for sentences are not cut"


def make_run_data(config: Config, folder: Path, known: Mapping[str, str] | None = None) -> list[str]:
    """Make the corpora of a run unless they exist, and return their folders in `folder`: a single one in `folder`
    itself, several each in a folder of their own next to `tokenizer`, which they share. A run that has trained may name
    other sources than before; these get folders of their own too. Its `known` corpora (`known_corpora`) get the same
    folders again where the data were deleted. One process calls this, then all may call
    `open_run_data`."""
    vocab_size = config.model.vocab_size
    if _reads_pairs(config):
        pairs.check_length(config.model.sequence_length)
    make = partial(make_corpus, sentences=_reads_pairs(config), kind=FAMILIES[config.model.family].tokenizer)
    split = partial(_split, config)
    corpora = _sources(config, folder, known or {})
    parts = corpora | _validation_parts(config)
    if whole := parts.pop(".", None):
        make(whole[0], config.tokenizer.path, vocab_size, folder, check=split, flag=whole[1])
    made = all(has_corpus(folder / name) for name in parts)
    tokenizer = None if made else _shared_tokenizer(config, folder, [*parts.values()])
    for name, (path, flag) in parts.items():
        check = split if name in corpora else lambda corpus: _all(config, corpus.tokens, corpus.tokenizer)
        with _with_tokenizer(tokenizer, folder / name):
            make(path, "", vocab_size, folder / name, check=check, flag=flag)
    if tokenizer and not is_tokenizer_folder(folder / "tokenizer"):
        tokenizer.save(folder / "tokenizer")
    return list(corpora)


@contextlib.contextmanager
def _with_tokenizer(tokenizer: Tokenizer | None, folder: Path) -> Iterator[None]:
    """In the block, in which a corpus is made in a folder, its tokenizer is there; if the block fails, a new folder is
    removed."""
    new = not folder.exists()
    if tokenizer and not has_corpus(folder):
        tokenizer.save(folder / "tokenizer")
    try:
        yield
    except BaseException:
        if new and has_only_tokenizer(folder):
            shutil.rmtree(folder)
        raise


def open_run_data(config: Config, folder: Path, overlap: int = 0, corpora: Sequence[str] = ()) -> RunData:
    """Open the data made by `make_run_data`, on any process, with the `corpora` that it returned, or those of the run's
    last start; for `overlap` see `EvaluationSamples`."""
    data, vocab_size = config.data, config.model.vocab_size
    names = corpora or read_order(config, folder.parent).parts[-1].folders
    opened = [open_corpus(folder / name, vocab_size) for name in names]
    splits = [_split(config, corpus, overlap) for corpus in opened]
    train: EpochSamples | BlendedSamples = splits[0][0]
    held_out = [samples for _, samples in splits if samples]
    validation: CorpusSamples | None = held_out[0] if held_out else None
    if data.sources:
        train = BlendedSamples([samples for samples, _ in splits], [source.weight for source in data.sources])
        validation = JoinedSamples(held_out) if held_out else None
    validation_sets = {}
    for entry in data.validation:
        corpus = open_corpus(folder / f"{_VALIDATION}{entry.name}", vocab_size)
        validation_sets[entry.name] = _all(config, corpus.tokens, corpus.tokenizer)
    return RunData(opened, opened[0].tokenizer, train, validation, validation_sets)


def _sources(config: Config, folder: Path, known: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Path and flag of every training corpus, by its folder. If the run has trained, so that its corpora are `known`,
    that is the folder made from this path, or a new one."""
    flag = _SOURCES if config.data.sources else "--data.path"
    paths = [(source.path, flag) for source in config.data.sources] or [(config.data.path, flag)]
    names = sorted(name for name in reading.names(folder) if name.startswith("source-"))
    made = [name for name in (".", *sorted(names, key=len)) if has_corpus(folder / name)]
    if not known:
        return dict(zip(default_corpora(config), paths, strict=True))

    def is_same(name: str, path: str) -> bool:
        return is_made_from(folder / name, path) if name in made else absolute(known[name]) == absolute(path)

    corpora: dict[str, tuple[str, str]] = {}
    for path in paths:
        same = (name for name in {**dict.fromkeys(made), **known} if name not in corpora and is_same(name, path[0]))
        free = (name for index in itertools.count() if (name := f"source-{index}") not in (*made, *known, *corpora))
        corpora[next(same, None) or next(free)] = path
    return corpora


def _validation_parts(config: Config) -> dict[str, tuple[str, str]]:
    """Path and flag of every validation set, by its folder."""
    return {f"{_VALIDATION}{each.name}": (each.path, "--data.validation") for each in config.data.validation}


def has_run_data(config: Config, folder: Path) -> bool:
    """Whether `make_run_data` has begun in this folder."""
    return any(has_corpus(folder / name) for name in read_order(config, folder.parent).parts[-1].folders[:1])


def has_whole_run_data(config: Config, folder: Path, known: Mapping[str, str]) -> bool:
    """Whether `make_run_data` has nothing left to make in this folder."""
    names = [*_sources(config, folder, known), *_validation_parts(config)]
    return all(has_corpus(folder / name) for name in names)


def given_samples(
    config: Config, path: str, tokenizer: Tokenizer | None, overlap: int, flag: str = "--data"
) -> CorpusSamples:
    """Samples of `path`, any text or prepared dataset, on which to evaluate a run's model. `tokenizer` is the run's,
    None if none is needed; for `overlap` see `EvaluationSamples`; `flag` names the path in error messages."""
    vocab_size = config.model.vocab_size
    tokens = evaluation_tokens(path, tokenizer, vocab_size, sentences=_reads_pairs(config), flag=flag)
    return _all(config, tokens, tokenizer, overlap)


def _reads_pairs(config: Config) -> bool:
    """Whether samples are pairs of segments with masked tokens, instead of documents packed into sequences."""
    return FAMILIES[config.model.family].samples == "pairs"


def _split(config: Config, corpus: Corpus, overlap: int = 0) -> tuple[EpochSamples, CorpusSamples | None]:
    """Samples of the training split and of the validation split."""
    make: Callable[..., tuple[EpochSamples, CorpusSamples | None]]
    make = pairs.train_and_validation if _reads_pairs(config) else gpt.train_and_validation
    options = _options(config, corpus.tokens, corpus.tokenizer, overlap)
    return make(corpus.tokens, validation_fraction=config.data.validation_fraction, seed=config.seed, **options)


def _all(config: Config, tokens: TokenDocuments, tokenizer: Tokenizer | None, overlap: int = 0) -> CorpusSamples:
    """Evaluation samples of all documents; `tokenizer` belongs to `tokens`."""
    if _reads_pairs(config):
        pairs.check_sentences(tokens)
    make: Callable[..., CorpusSamples] = pairs.EvaluationPairs if _reads_pairs(config) else gpt.EvaluationSamples
    return make(tokens, **_options(config, tokens, tokenizer, overlap))


def _options(config: Config, tokens: TokenDocuments, tokenizer: Tokenizer | None, overlap: int) -> dict[str, Any]:
    options: dict[str, Any] = {"sequence_length": config.model.sequence_length}
    if _reads_pairs(config):
        vocabulary = WordPieces.of(tokenizer, f"--tokenizer.path: the tokenizer of {tokens.name}")
        return options | {"vocabulary": vocabulary}
    return options | {"overlap": overlap, "with_positions": config.data.reset_attention}


def _shared_tokenizer(config: Config, folder: Path, parts: list[tuple[str, str]]) -> Tokenizer | None:
    """The tokenizer of all corpora: the run's, else the given one, else that of the prepared datasets."""
    flags = dict(sorted(parts, key=itemgetter(1), reverse=True))  # a path given as both counts as a source
    prefixes = [prefix for path, flag in flags.items() if (prefix := prepared_prefix(path, flag=flag))]
    places = [folder / "tokenizer", *map(tokenizer_folder, prefixes)]
    tokenizers = {origin: load_tokenizer(origin) for origin in places if is_tokenizer_folder(origin)}
    if config.tokenizer.path:
        tokenizers[Path(config.tokenizer.path)] = named_tokenizer(config.tokenizer.path)
    for origin, tokenizer in tokenizers.items():
        first = next(iter(tokenizers))
        if tokenizer != tokenizers[first]:
            raise UserError(f"{origin} differs from the tokenizer in {first}; valid: corpora with the same tokenizer")
    for path, flag in flags.items():
        if not tokenizers and not prepared_prefix(path):
            raise UserError(
                f"{flag}: {path} is text, and all corpora must share one tokenizer; valid: "
                "--tokenizer.path with that tokenizer"
            )
    return next(iter(tokenizers.values()), None)
