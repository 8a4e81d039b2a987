"""A configuration, its program on a mesh, and a model with fresh or restored weights."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from megajax.core.errors import UserError, brief
from megajax.core.models.own_loss import Loss
from megajax.core.program.program import Program
from megajax.library.model import Model
from megajax.library.own import warn_of_cost, with_own
from megajax.library.progress import progress
from megajax.plan.machines import machine_of_device
from megajax.plan.placing import placed
from megajax.runs.directory import stored_config, stored_optimizer
from megajax.runs.init import check_first_weights, first_state, named_or_init_tokenizer
from megajax.runs.trained import check_run, restore_params, run_tokenizer
from megajax.settings import presets
from megajax.settings.checks import check_there
from megajax.settings.config import Config
from megajax.settings.option_errors import shown
from megajax.settings.validation import validate, with_data
from megajax.start.device_memory import check_memory
from megajax.start.launch import start
from megajax.training.begin import check_own, with_total_steps


@brief
def load_preset(name_or_file: str | Path, overrides: Mapping[str, Any] | None = None) -> Config:
    """The configuration of a preset.

    Args:
        name_or_file: a name such as `demo` or `finetune/mnli-336m`, or a TOML file such as a run's `config.toml`.
        overrides: values that replace those of the preset, by key: `{"train.steps": 20, "mesh.data": 2}`. Keys are
            those of preset files; `megajax train --help` lists them as flags.
    """
    if not isinstance(overrides or {}, Mapping):
        raise UserError(f'overrides {shown(overrides)}; valid: values by key, such as {{"train.steps": 20}}')
    return presets.resolve(presets.load_preset(name_or_file), overrides, decay_follows=False)


@brief
def make_program(config: Config, devices: Sequence[jax.Device] | None = None) -> Program:
    """A configuration on its mesh (`program.mesh`): how the state is sharded (`program.layout`), and what is compiled.

    JAX is set up as by the commands: its precision and, if JAX has not been used in this process yet, simulated devices
    (`simulate_devices`) and XLA's flags.

    Args:
        config: the configuration of the model and its mesh.
        devices: the mesh takes the first of these, by default of all JAX devices.
    """
    config, there = _on_devices(config, devices)
    return Program.on(_in_steps(config), there)


def _on_devices(config: Config, devices: Sequence[jax.Device] | None = None) -> tuple[Config, list[jax.Device]]:
    """A valid configuration, with numbers for `pipeline.layers` auto, and the devices of its mesh."""
    start(config)
    there = list(jax.devices() if devices is None else devices)
    config = with_data(config, len(there))
    there = there[: config.mesh.num_devices]
    validate(config, len(there))
    return placed(config, machine_of_device(there[0].device_kind, config.precision)), there


def _in_steps(config: Config) -> Config:
    """The configuration with its schedule in steps, unless it depends on data, which is not read here."""
    return with_total_steps(config, None) if config.pretrains and not config.train.epochs else config


@brief
def init(
    config: Config | str | Path,
    *,
    loss: Loss | Callable[..., Any] | None = None,
    optimizer: Any = None,
    elementwise: bool | None = None,
) -> Model:
    """A model with fresh weights on the mesh of its configuration, or, if that has `init`, with another run's weights.

    Args:
        config: a configuration, as from `load_preset`, or a preset's name or file.
        loss: a function of logits and batch to minimize instead of the mean cross-entropy (`Loss`).
        optimizer: an optax transformation, or a function such as `optax.lion` that makes one from the configuration's
            schedule of the learning rate. Gradients are clipped to `optimizer.clip_norm` before.
        elementwise: whether the optimizer updates every number by itself; by default it is traced to find out. If it
            does not, every device gathers all gradients and weights.
    """
    config = with_own(config if isinstance(config, Config) else load_preset(config), loss, optimizer, elementwise)
    config, _ = _on_devices(config)
    check_there(config)
    program = make_program(config)
    warn_of_cost(program)
    check_first_weights(config)
    tokenizer, most = named_or_init_tokenizer(config), config.model.vocab_size
    if tokenizer is not None and config.tokenizer.path and tokenizer.size > most:
        valid = f"at most model.vocab_size {most}"
        raise UserError(f"--tokenizer.path {config.tokenizer.path} has {tokenizer.size} ids; valid: {valid}")
    check_memory(program, training=True, rows=config.train.microbatch)
    check_own(config, program)
    with progress("preparing the state"):
        return Model(_in_steps(config), program, first_state(config, program)[0], 0, tokenizer, config)


@brief
def restore(
    run_dir: str | Path,
    overrides: Mapping[str, Any] | None = None,
    *,
    step: int | str = "latest",
    training: bool = False,
    loss: Loss | Callable[..., Any] | None = None,
    optimizer: Any = None,
    elementwise: bool | None = None,
) -> Model:
    """The model of a run, with its tokenizer.

    Args:
        run_dir: the run directory of a training, of `megajax convert import-hf`, or of `Model.save`.
        overrides: values that replace the run's, by key, such as `{"mesh.tensor": 2}`; the mesh is one device unless
            they change it.
        step: which checkpoint: a step, latest, or best (lowest validation loss).
        training: also restore the optimizer state, so that `train_step` can continue.
        loss, optimizer, elementwise: as in `init`.
    """
    folder = Path(run_dir)
    check_run(folder, "restore")
    config = with_own(stored_config(folder, overrides or {}), loss, optimizer, elementwise)
    if training:
        check_there(config)
    ours = _in_steps(config.with_decay(config.optimizer.kept_of(stored_optimizer(folder, config))))
    ours, _ = _on_devices(ours)
    program = make_program(ours)
    check_memory(program, training=training, rows=ours.train.microbatch)
    if training:
        check_own(ours, program)
    tokenizer = run_tokenizer(folder, ours) if (folder / "data" / "tokenizer").exists() else None
    with progress("reading the checkpoint"):
        found = restore_params(program, folder, str(step), optimizer=training)
    return Model(ours, program, *found, tokenizer, config, folder)
