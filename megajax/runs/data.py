"""The data of a run: what it trains on, one corpus or several blended, and what it is validated on."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from megajax.config import Config
from megajax.data.blend import BlendedSamples, JoinedSamples
from megajax.data.corpus import Corpus, has_corpus, make_corpus, open_corpus
from megajax.data.gpt import EvaluationSamples, TrainSamples, train_and_validation
from megajax.data.prepared import prepared_prefix, tokenizer_folder
from megajax.data.tokenizer import Tokenizer
from megajax.data.tokenizers import is_tokenizer_folder, load_tokenizer
from megajax.data.tokens import TokenDocuments
from megajax.errors import UserError

_VALIDATION = "validation-"  # starts the folders of named validation sets


@dataclass(frozen=True)
class RunData:
    """Samples and where they come from.

    Attributes:
        corpora: one, or one for each source.
        tokenizer: None if all was given tokenized and without one.
        train: an endless sequence.
        validation: of what is kept of all corpora for validation.
        validation_sets: of each named one.
    """

    corpora: list[Corpus]
    tokenizer: Tokenizer | None
    train: TrainSamples | BlendedSamples
    validation: EvaluationSamples | JoinedSamples
    validation_sets: dict[str, EvaluationSamples]


def make_run_data(config: Config, folder: Path) -> None:
    """Make the corpora of a run in its folder, or find them made. One process calls this, then all may `open_run_data`.

    Of one corpus the files lie in `folder` itself, of several each in a folder of its own; the tokenizer, which is the
    same for all, in `folder/tokenizer` in both cases.

    Raises:
        UserError: a source or the tokenizer cannot be used, or the folder holds other corpora.
    """
    data, vocab_size = config.data, config.model.vocab_size
    split = partial(_split, config)
    if data.path:
        make_corpus(data.path, config.tokenizer.path, vocab_size, folder, check=split)
    others = {f"{_VALIDATION}{entry.name}": entry.path for entry in data.validation}
    if not data.sources and not others:
        return
    sources = {f"source-{number}": source.path for number, source in enumerate(data.sources)}
    made = all(has_corpus(folder / name) for name in sources | others)
    tokenizer = None if made else _shared_tokenizer(config, folder, list(sources.values()), list(others.values()))
    for name, path in (sources | others).items():
        if tokenizer and not has_corpus(folder / name):
            tokenizer.save(folder / name / "tokenizer")
        check = split if name in sources else partial(EvaluationSamples, sequence_length=config.model.sequence_length)
        make_corpus(path, "", vocab_size, folder / name, check=check, flag=_flag(name in sources))
    if tokenizer and not is_tokenizer_folder(folder / "tokenizer"):
        tokenizer.save(folder / "tokenizer")


def open_run_data(config: Config, folder: Path, overlap: int = 0) -> RunData:
    """Open what `make_run_data` made; reads only, on any process. `overlap` is that of `EvaluationSamples`.

    Raises:
        UserError: a file is missing, damaged or was changed.
    """
    data, vocab_size = config.data, config.model.vocab_size
    names = [f"source-{number}" for number in range(len(data.sources))] if data.sources else ["."]
    corpora = [open_corpus(folder / name, vocab_size) for name in names]
    splits = [_split(config, corpus.tokens, overlap) for corpus in corpora]
    train: TrainSamples | BlendedSamples = splits[0][0]
    validation: EvaluationSamples | JoinedSamples = splits[0][1]
    if data.sources:
        train = BlendedSamples([samples for samples, _ in splits], [source.weight for source in data.sources])
        validation = JoinedSamples([samples for _, samples in splits])
    validation_sets: dict[str, EvaluationSamples] = {}
    for entry in data.validation:
        tokens = open_corpus(folder / f"{_VALIDATION}{entry.name}", vocab_size).tokens
        length, resets = config.model.sequence_length, data.reset_attention
        validation_sets[entry.name] = EvaluationSamples(tokens, sequence_length=length, with_positions=resets)
    return RunData(corpora, corpora[0].tokenizer, train, validation, validation_sets)


def has_run_data(config: Config, folder: Path) -> bool:
    """Whether `make_run_data` was here."""
    return has_corpus(folder / "source-0" if config.data.sources else folder)


def _split(config: Config, tokens: TokenDocuments, overlap: int = 0) -> tuple[TrainSamples, EvaluationSamples]:
    return train_and_validation(
        tokens,
        sequence_length=config.model.sequence_length,
        validation_fraction=config.data.validation_fraction,
        seed=config.seed,
        overlap=overlap,
        with_positions=config.data.reset_attention,
    )


def _flag(is_source: bool) -> str:
    return "--data.sources" if is_source else "--data.validation"


def _shared_tokenizer(config: Config, folder: Path, sources: list[str], others: list[str]) -> Tokenizer | None:
    """The one tokenizer of all corpora: that of the run, else the one given, else that of the prepared datasets.

    Raises:
        UserError: there is none for a text, or a dataset has another one.
    """
    flags = {path: _flag(False) for path in others} | {path: _flag(True) for path in sources}
    prefixes = [prefix for path, flag in flags.items() if (prefix := prepared_prefix(path, flag=flag))]
    places = [folder / "tokenizer", *map(tokenizer_folder, prefixes)]
    found = {place: load_tokenizer(place) for place in places if is_tokenizer_folder(place)}
    if config.tokenizer.path:
        found[Path(config.tokenizer.path)] = load_tokenizer(config.tokenizer.path)
    for place, tokenizer in found.items():
        first = next(iter(found))
        if tokenizer != found[first]:
            raise UserError(f"{place} is not the tokenizer in {first}; valid: corpora of one tokenizer")
    for path, flag in flags.items():
        if not found and not prepared_prefix(path):
            raise UserError(
                f"{flag}: {path} is text, for which all corpora need one tokenizer; valid: --tokenizer.path with it"
            )
    return next(iter(found.values()), None)
