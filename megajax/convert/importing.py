"""Import a model in the Hugging Face format as a run directory at step 0."""

import dataclasses
import glob
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from megajax.convert.adapter_options import SETTINGS, TENSORS
from megajax.convert.exchange import Exchange
from megajax.convert.families import exchange_of
from megajax.convert.merging import Adapter
from megajax.convert.origin import Origin
from megajax.convert.settings import Fields
from megajax.convert.tensor_files import DTYPES, INDEX, TORCH_DTYPES, WEIGHTS, TensorFiles, shards
from megajax.convert.tokenizer_files import read_tokenizer
from megajax.convert.weights import Tensor, named, weight_of, whole_layout, whole_model
from megajax.core.errors import RunError, UserError
from megajax.core.models.config import ModelConfig
from megajax.core.models.registry import FAMILIES
from megajax.core.optim.config import Horizon
from megajax.core.program.state import StateLayout
from megajax.data.tasks.registry import TASKS
from megajax.data.text.tokenizer import Tokenizer
from megajax.data.text.tokenizers import TOKENIZER_FILES
from megajax.host import reading, remote
from megajax.host.files import folder_atomically, write_atomically
from megajax.host.paths import check_place
from megajax.runs.checkpoint import Checkpoints
from megajax.runs.ownership import mark
from megajax.settings.config import Config, to_toml
from megajax.settings.plugins import remember
from megajax.settings.presets import resolve

_RECIPE = {  # for continued training: the learning rate is low, so that it does not undo what the model has learned
    "train.steps": 1000,
    "train.global_batch": 8,
    "train.microbatch": 1,
    "train.eval_batches": 20,
    "train.remat": "selective",
    "optimizer.learning_rate": 5e-5,
    "optimizer.warmup_fraction": 0.1,
    "checkpoint.every": 100,
}
_FILES = ["config.json", WEIGHTS, INDEX, SETTINGS, TENSORS, *TOKENIZER_FILES]
_LAYERS = 1000  # up to this many, looking for each layer's tensors is fast


def local_folder(path: str, flag: str = "PATH") -> Path:
    """The folder of a model or adapter: `path`, the value of `flag`, itself, or a download if it is the name of one on
    the hub."""
    folder = Path(path)
    if folder.is_dir():
        return folder
    if folder.exists():
        raise UserError(f"{flag} {path} is a file; valid: a folder with config.json and model.safetensors")
    missing = f"{flag} {path}: no such folder"
    if not remote.is_hub_name(path):
        raise UserError(f"{missing}; valid: a folder, or a model of the Hugging Face hub, as in openai-community/gpt2")
    folder = remote.download(path, _FILES, missing, "valid: a folder")
    if reading.is_file(folder / INDEX) and not reading.is_file(folder / WEIGHTS):
        names = [glob.escape(file.name) for file in shards(folder / INDEX)]
        remote.download(path, names, missing, "valid: a folder")
    return folder


class StoredWeights:
    """All weights in the folder of a model with the configuration `config`, with an adapter merged if there is one;
    nothing is read yet.

    Attributes:
        model: the configuration, without prediction modules if the files have none of their tensors.
        dtype: of most of them, as in `DTYPES`.
        dtypes: those of tensors that have another, by the names in the family's `TensorPlaces`.
        fresh: description for messages -> names of our weights that are missing and are initialized randomly.

    Raises:
        UserError: files are missing, damaged or pickles; a tensor is missing, or has another shape or dtype; there are
            additional tensors, or a copy that differs.
    """

    def __init__(self, folder: Path, config: ModelConfig, exchange: Exchange, adapter: Adapter | None = None):
        self._tensors, self._adapter = TensorFiles(folder), adapter
        stored = self._tensors.shapes
        if config.prediction_modules and not stored.keys() & exchange.places(config).prediction_tensors(config):
            config = dataclasses.replace(config, prediction_modules=0)
        self.model = config
        joined = any(name.format(layer=config.num_layers - 1) in stored for name in exchange.fused)
        separate = not joined and any("{expert}" in place.name for place in exchange.blocks.values())
        experts = config.num_experts if separate else 0
        fewest = config.num_blocks * max(1, experts)  # a layer has several tensors, as has each expert
        if fewest > max(len(stored), _LAYERS):
            layers = exchange.named_options()["num_layers"][0]
            of_experts, and_experts = (f" of {experts} experts", " and experts") if experts else ("", "")
            raise UserError(
                f"{folder / 'config.json'}: {layers} is {config.num_layers}{of_experts}, but there are {len(stored)} "
                f"tensors in all; valid: the number of layers{and_experts} in the safetensors"
            )
        self._places = exchange.places(config)
        for name, parts in self._places.fused_tensors(config).items():
            if name in stored:
                self._tensors.split(name, parts)
        shapes = self._places.shapes(config)
        for whole, names in exchange.joined.items():
            for n in range(config.num_layers):
                rows = {part: shapes[part][0] for part in (name.format(layer=n) for name in names) if part in shapes}
                self._tensors.divide(whole.format(layer=n), rows)
        for name in shapes:
            if {f"{name}_blocks", f"{name}_scales"} <= stored.keys():
                self._tensors.widen(name)
        self._spelled = self._places.spelling(stored)
        self.fresh: dict[str, tuple[str, ...]] = {}
        missing: set[str] = set()
        for beginning, head in self._places.fresh.items():
            theirs = {ours: each.name for ours, each in self._places.shared.items() if ours.startswith(beginning)}
            if not stored.keys() & theirs.values():
                self.fresh[head] = tuple(theirs)
                missing.update(theirs.values())
        if adapter:
            adapter.fit(self._places, config)
            untied = self._places.shared.get("output")
            if untied and untied.name not in stored and exchange.copies.get(untied.name) in stored:
                self._tensors.share(untied.name, exchange.copies[untied.name])
        shapes = {name: shape for name, shape in shapes.items() if name not in missing}
        self._check(exchange, {self._spelled(name): shape for name, shape in shapes.items()})
        dtypes = {name: self._tensors.dtype(self._spelled(name)) for name in shapes}
        sizes = {dtype: sum(math.prod(shapes[n]) for n in shapes if dtypes[n] == dtype) for dtype in DTYPES}
        self.dtype = max(sizes, key=sizes.__getitem__)
        self.dtypes = {name: dtype for name, dtype in dtypes.items() if dtype != self.dtype}

    def _check(self, exchange: Exchange, shapes: Mapping[str, tuple[int, ...]]) -> None:
        places, tensors, spelled = self._places, self._tensors, self._spelled
        layers = range(self.model.num_layers + self.model.prediction_modules)
        unused = tuple(spelled(name.format(layer=layer)) for name in places.unused for layer in layers)
        tensors.check(shapes, exchange.heads[self.model.head].kind)
        known = shapes.keys() | {name for name in tensors.shapes if name.startswith(unused)} | places.copies.keys()
        tensors.check_no_others(known, exchange.architecture(self.model))
        for copy, name in places.copies.items():
            if copy in tensors.shapes and not np.array_equal(tensors.read(copy), tensors.read(spelled(name))):
                valid = "the same, the head is tied"
                raise UserError(f"{tensors.folder}: {copy} differs from {spelled(name)}; valid: {valid}")

    def read(self, name: str) -> Tensor:
        """The tensor with a name in the family's `TensorPlaces`, in fp32; raises `UserError` if it has NaNs or
        infinities."""
        tensor = self._tensors.read(self._spelled(name))
        return self._adapter.applied(name, tensor) if self._adapter else tensor

    def weights(self, seed: int) -> Callable[[Any, tuple[int, ...]], Tensor]:
        """A function from (path, shape) of one of our canonical weights (layers stacked `[L, …]`) to that weight. Fresh
        ones are what a run with this seed starts with. Raises `UserError` like `read`."""
        drawn = _drawn(self.model, seed, {name for names in self.fresh.values() for name in names})

        def weight(path: Any, shape: tuple[int, ...]) -> Tensor:
            part, name = named(path)
            if part == "shared" and name in drawn:
                return drawn[name]
            return weight_of(self._places, self.read, self.model, path, shape)

        return weight


def _drawn(config: ModelConfig, seed: int, names: set[str]) -> dict[str, Tensor]:
    """Fresh weights of the ends, by our names."""
    if not names:
        return {}
    model = whole_model(config)

    def draw() -> dict[str, jax.Array]:  # other weights are not computed
        leaves = ((named(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(model.init(seed)))
        return {name: leaf for (part, name), leaf in leaves if part == "shared" and name in names}

    return {name: np.asarray(leaf) for name, leaf in jax.jit(draw)().items()}


@dataclass(frozen=True)
class ImportedModel:
    """A model in the Hugging Face format, checked, with weights not read yet."""

    config: Config  # of a run that continues training; its run directory is not set
    exchange: Exchange  # of its class
    origin: Origin  # what the run stores about it
    weights: StoredWeights
    tokenizer: Tokenizer | None
    added_tokens: list[str]  # tokens added to the tokenizer for which the model has no ids
    adapter: Path | None  # the folder of the adapter merged into the weights


def open_source(
    folder: Path, overrides: Mapping[str, Any] | None = None, adapter_folder: Path | None = None
) -> ImportedModel:
    """The model in `folder`, with its adapter or that of another folder; `overrides` by key replace what its
    `config.json` says.

    Raises:
        UserError: its class is not supported; its files are damaged, do not fit each other, or hold weights as a
            pickle.
    """
    adapter = Adapter.find(folder, adapter_folder)
    fields, overrides = Fields.read(folder), overrides or {}
    exchange = exchange_of(fields)
    settings = exchange.read_settings(fields, overrides)
    if adapter and adapter.unties(exchange, settings.get("model.head", "pretraining")):
        if "tied_embedding" not in exchange.named_options():
            raise UserError(f"{adapter.folder}: its adapter unties embedding and head; valid: one that leaves both")
        settings["model.tied_embedding"] = False
    named = fields.get("dtype", fields.get("torch_dtype"))  # of transformers 5, and of those before
    settings.update(("precision", ours) for ours, theirs in TORCH_DTYPES.items() if theirs == named)
    config = resolve(_RECIPE | settings, overrides, decay_follows=False)
    length = settings["model.sequence_length"]
    learned = config.model.positions == "learned"
    if config.model.sequence_length > (0 if learned else length) and "model.sequence_length" in overrides:
        valid = "without it" if learned else f"{length} or less, the positions in config.json"
        positions = ", whose positions are learned" if learned else ""
        flag = f"--model.sequence-length {config.model.sequence_length}"
        raise UserError(f"{flag} with {folder}{positions}; valid: {valid}")
    weights = StoredWeights(folder, config.model, exchange, adapter)
    if overrides.get("model.prediction_modules", 0) > weights.model.prediction_modules:
        flag = f"--model.prediction-modules {config.model.prediction_modules}"
        raise UserError(f"{flag} with {folder}, which has none; valid: without it")
    stored: Any = weights.dtype
    precision = config.precision if "precision" in {*settings, *overrides} else stored
    config = dataclasses.replace(config, model=weights.model, precision=precision)
    origin = Origin.of(fields, exchange.architecture(config.model), weights.dtype, length, weights.dtypes)
    tokenizer, added = read_tokenizer(folder, FAMILIES[exchange.family].tokenizer, config.model.vocab_size)
    return ImportedModel(config, exchange, origin, weights, tokenizer, added, adapter.folder if adapter else None)


def training_flags(model: ModelConfig, run_dir: str | Path) -> str:
    """Flags that continue training from an imported model's config.toml: in its own run, or from that run if it was
    fine-tuned on a task; empty if we have no such task."""
    if model.head == "pretraining":
        return "--data.path TEXT"
    tasks = [name for name, task in TASKS.items() if (task.head, task.classes) == (model.head, model.num_classes)]
    return f"--task.name {'|'.join(tasks)} --init {run_dir} --run-dir NEW --data.train FILE" if tasks else ""


def check_new(folder: Path, name: str) -> None:
    """Raises `UserError` unless `folder`, the argument `name`, is empty, or does not exist and can be created."""
    check_place(folder, name)
    if os.path.lexists(folder) and (folder.is_symlink() or not folder.is_dir() or any(folder.iterdir())):
        kind = "a link" if folder.is_symlink() else "not empty" if folder.is_dir() else "a file"
        raise UserError(f"{name} {folder} is {kind}; valid: an empty folder, or a path that does not exist")


def write_run(
    run_dir: Path,
    name: str,
    config: Config,
    layout: StateLayout,
    tokenizer: Tokenizer | None,
    save: Callable[[Checkpoints], object],
    origin: Origin | None = None,
    comment: str = "",
    horizon: Horizon | None = None,
) -> None:
    """Write a run directory, which appears complete or not at all: configuration (after a `comment`, with the run's
    `horizon`), tokenizer, and what `save` saves.

    Raises:
        UserError: `run_dir`, the argument `name`, is not empty or cannot be written.
        RunError: the checkpoint cannot be written.
    """
    check_new(run_dir, name)
    with folder_atomically(run_dir.absolute()) as new:
        mark(new)
        # `wait` raises if a write fails, since there is no training to continue.
        checkpoints = Checkpoints(new, layout, config.checkpoint.keep, max_failures=2)
        try:
            save(checkpoints)
            checkpoints.wait()
        finally:
            checkpoints.close()
        if tokenizer:
            tokenizer.save(new / "data" / "tokenizer")
        if origin:
            origin.write(new)
        stored = to_toml(dataclasses.replace(config, run_dir=str(run_dir)), horizon)
        write_atomically(new / "config.toml", comment + stored)
        remember(run_dir, config.plugins)


def import_hf(source: ImportedModel, run_dir: Path) -> None:
    """Write the run directory, with a checkpoint of step 0 and fresh optimizer state; raises like `write_run`, and
    `UserError` for a tensor."""
    weight = source.weights.weights(source.config.seed)
    refused: list[UserError] = []  # errors in tensors, which are read in another thread

    def checked(path: Any, shape: tuple[int, ...]) -> Tensor:
        try:
            return weight(path, shape)
        except UserError as error:
            refused.append(error)
            raise

    config, flags = source.config, training_flags(source.config.model, "RUN")
    comment = "# An imported model. The training settings below are a default recipe"
    comment += f"; continue training with {flags}.\n\n" if flags else ".\n\n"
    layout, tokenizer, save = whole_layout(config), source.tokenizer, lambda to: to.save_new(checked)
    try:
        write_run(run_dir, "RUN", config, layout, tokenizer, save, source.origin, comment)
    except RunError:
        if refused:
            raise refused[0] from None
        raise
