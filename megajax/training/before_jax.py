"""What a run is refused for before JAX is imported, which takes seconds."""

import importlib.util
from pathlib import Path

from megajax.core.errors import UserError
from megajax.core.models.registry import FAMILIES
from megajax.core.optim.config import OWN
from megajax.data.tasks.registry import TASKS
from megajax.host.paths import apart, scheme
from megajax.settings.config import Config
from megajax.settings.validation import validate
from megajax.start.launch import known_devices

LIBRARIES = {"wandb": "Weights & Biases", "mlflow": "MLflow"}


def check_before_jax(config: Config) -> None:
    """Check what training needs besides its data, and its mesh where JAX's devices are known without it."""
    check_given(config)
    if not config.distributed.coordinator and (count := known_devices(config.simulate_devices)):
        validate(config, count)


def check_given(config: Config) -> None:
    """Check that training data and optimizer are given, and that the library of `--track` is installed."""
    check_there(config)
    if config.pretrains and config.model.head != "pretraining":
        raise UserError(f"--model.head {config.model.head} without a task; valid: --task.name {' or '.join(TASKS)}")
    if config.pretrains and not config.data.path and not config.data.sources and not config.data.set:
        raise UserError(
            "--data.path missing; valid: a text, JSONL or Parquet file, a folder, a prepared prefix, or python-stdlib; "
            "or --data.sources"
        )
    _check_evaluate(config)
    if config.track in LIBRARIES:
        check_installed(config.track)
    if not config.pretrains and not config.data.train:
        raise UserError(f"--data.train missing; valid: files of --task.name {config.task.name}")


def _check_evaluate(config: Config) -> None:
    """Check that the tasks of `--evaluate` are for this model, each with its file, once."""
    reads_text = config.model.head == "pretraining" and FAMILIES[config.model.family].continues_text
    names = [entry.partition("=")[0] for entry in config.evaluate]
    for entry, name in zip(config.evaluate, names, strict=True):
        path = entry.partition("=")[2]
        if not config.pretrains:
            fits, valid = entry == config.task.name, config.task.name
        else:
            fits = reads_text and name in ("lambada", "wikitext103") and path != ""
            valid = (
                "lambada=FILE, wikitext103=FILE"
                if reads_text
                else "without it, since validation already reports all losses"
            )
        if not fits or names.count(name) > 1:
            several = apart(entry, lambda word: word.partition("=")[0] in ("lambada", "wikitext103", *TASKS))
            raise UserError(f"--evaluate {entry}; valid: {valid}{', each once' * fits}{several}")
        if path and not scheme(path) and not Path(path).is_file():
            several = apart(entry, lambda word: "=" in word)
            raise UserError(f"--evaluate {entry}: no such file; valid: an existing one{several}")


def check_there(config: Config) -> None:
    """Check that a loss and an optimizer that Python code gave are there again."""
    for word, key, name, given in (
        ("loss", "train.loss", config.train.loss, config.own_loss),
        ("optimizer", "optimizer.name", config.optimizer.name, config.own_optimizer),
    ):
        if name == OWN and given is None:
            calls = f"{word}=… in megajax.init or restore"
            raise UserError(f"--{key} {OWN}: Python code gave this {word}; valid: the same code, with {calls}")


def check_installed(name: str) -> None:
    """Check that the library of `--track` is installed."""
    found = importlib.util.find_spec(name)
    if found is None or found.origin is None:  # a folder with that name is not the library
        raise UserError(f"--track {name}: {LIBRARIES[name]} is not installed; valid: pip install 'megajax[{name}]'")
