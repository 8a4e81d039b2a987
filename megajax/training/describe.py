"""What a run prints before it starts (model, mesh, pipeline, state, optimizer, data) and at its end."""

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
from flax.traverse_util import flatten_dict

from megajax.batch import BatchSpec
from megajax.config import Config
from megajax.data.tokenizer import Tokenizer
from megajax.evaluation.scoring import Perplexity
from megajax.generation.choice import Sampling
from megajax.generation.text import continuation_text
from megajax.generation.window import continue_in_windows, one_row
from megajax.models.context_attention import elements_sent
from megajax.models.family import count_parameters
from megajax.models.lora import LORA
from megajax.models.registry import FAMILIES
from megajax.optim.adam import parameter_groups
from megajax.optim.config import OptimizerConfig
from megajax.pipeline.timing import StageTimes, pending_weights, step_time
from megajax.plan.memory import memory
from megajax.plan.sizes import ITEM_SIZE
from megajax.program.memory import factor_bytes, state_bytes
from megajax.program.program import Program
from megajax.runs.data import RunData
from megajax.runs.task_data import TaskData
from megajax.settings.launch import gpu_flags

_WRITTEN = {
    "config.toml": "the run's configuration, itself a preset",
    "metrics.jsonl": "every step's figures",
    "log.txt": "what was said, of every start",
    "loss.png": "loss curves",
    "experts.png": "loads of the experts",
    "tensorboard": "events for TensorBoard",
    "profile": "traces of steps, for XProf, TensorBoard and Perfetto",
    "wandb": "what Weights & Biases keeps here",
    "mlflow": "MLflow's database and texts",
    "checkpoints": "state, mesh-independent",
    "data": "tokens and tokenizer",
}
_OF_RATE = "learning_rate min_learning_rate warmup schedule decay_steps cooldown_steps cooldown_shape"


def describe(program: Program, data: RunData | TaskData, earlier: OptimizerConfig | None = None) -> str:
    """A run in a few lines of text; `earlier` is the optimizer of its last start, None of a new run."""
    config, state = program.config, state_bytes(program)
    platform, sequence = jax.devices()[0].platform, ", sequence split over tensor" if config.sequence_parallel else ""
    lines = [
        f"model: {count_parameters(config.model):,} parameters, {config.model.num_layers} layers of "
        f"{config.model.hidden_size}, {config.precision}",
        *_adapters(program),
        f"mesh: {config.mesh} on {jax.device_count()} {platform} devices, {jax.process_count()} processes{sequence}",
        *pipeline_lines(program),
        _context_line(program),
        f"state: {sum(state.values()) / 2**20:,.1f} MiB a device ({_mebibytes(state)}), --optimizer.zero "
        f"{config.optimizer.zero}",
        _step_memory(program),
        _optimizer(program),
        f"learning rate: {rate_line(config.optimizer)}",
        changed_rate(earlier, config.optimizer) if earlier else "",
        _batch(config),
        _average(config),
        *_ramp(config),
        *data.lines(config),
    ]
    if platform == "gpu":
        lines.append(f"XLA: {' '.join(gpu_flags())}")
    return "\n".join(filter(None, [*lines, rate_warning(config)]))


def _context_line(program: Program) -> str:
    """How attention reaches the tokens of the other devices of a context group."""
    config, way = program.config, program.model.boundary.context
    if way == "none":
        return ""
    sent = {
        name: f"{name} {numbers * ITEM_SIZE[config.precision] / 2**20:,.1f} MiB"
        for name, numbers in elements_sent(config.model, config.mesh.sizes, config.train.remat).items()
    }
    return (
        f"context: {config.model.sequence_length // config.mesh.context} tokens a device; attention by {way}, sent for "
        f"a layer and a sequence: {', '.join(sent.values())}"
    )


def pipeline_lines(program: Program) -> list[str]:
    """The schedule, and what deferring the weight gradients saves and costs."""
    pipeline, pipe, table = program.config.pipeline, program.config.mesh.pipe, program.schedule
    deferring = pipeline.deferring()
    if pipe == 1:
        nothing = "pipeline: of one stage, --pipeline.weight-gradients deferred does nothing"
        return [] if deferring is None else [nothing]
    without = dataclasses.replace(table, deferral=None)
    together = step_time(without, StageTimes.equal(without))
    bubble = f"{step_time(table).bubble:.4f}" + ("" if deferring is None else f" instead of {together.bubble:.4f}")
    lines = [
        f"pipeline: {pipeline.schedule}, {table.size}; bubble over "
        f"ideal {bubble} where forward, input gradient and weight gradient take the same time"
    ]
    if deferring is None:
        return lines
    saved = deferring.times.weight_gradient / table.num_chunks / together.wall
    factors = factor_bytes(program) / 2**20
    lines.append(
        f"weight gradients: deferred, up to {max(pending_weights(table))} chunks of a stage wait "
        f"(--pipeline.max-deferred); each saves up to {saved:.2%} of the step and costs {factors:,.1f} MiB, their "
        f"buffer {table.num_factor_slots * factors:,.1f} MiB"
    )
    return lines


def _step_memory(program: Program) -> str:
    plan = memory(program.config, program.backend)
    parts = {
        "kept activations": plan.kept,
        "factors": plan.factors,
        "hand-overs": plan.hand_overs,
        "temporaries about": plan.temporaries,
    }
    return f"memory: {plan.total / 2**20:,.1f} MiB a device planned, state and batch included ({_mebibytes(parts)})"


def _mebibytes(parts: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {size / 2**20:,.1f}" for name, size in parts.items() if size)


def _batch(config: Config) -> str:
    train, ranks = config.train, config.mesh.data
    count = train.global_batch // (ranks * train.microbatch)
    parts = f"{count} microbatches of {train.microbatch}, gradient accumulation over them"
    alone = f"one microbatch of {train.microbatch}, no gradient accumulation"
    each = f"on each of {ranks} data ranks " if ranks > 1 else ""
    return f"batch: {train.global_batch} sequences a step; {each}{parts if count > 1 else alone}"


def _ramp(config: Config) -> list[str]:
    train = config.train
    stages = train.batch_sizes.stages
    if len(stages) == 1:
        return []
    return [
        f"global batch: {stages[0].size} sequences, growing by {train.ramp_increment} to {train.global_batch}, which "
        f"step {stages[-1].first_step + 1:,} has first; {len(stages)} sizes, each compiled when it is reached"
    ]


def _optimizer(program: Program) -> str:
    config = program.config.optimizer
    weights = program.layout.canonical_shapes.params
    trained = weights.get(LORA, weights)
    decayed, others = parameter_groups(trained)
    name, flat = "AdamW", flatten_dict(trained)
    if config.name == "muon":
        matrices = sum(flat[path].size for path in program.layout.matrices)
        rate = f" at {config.adamw_learning_rate:g}" if config.adamw_learning_rate else ""
        name = f"Muon ({config.muon_scale}) on {matrices:,} parameters, AdamW{rate} on {decayed + others - matrices:,}"
    return (
        f"optimizer: {name}, weight decay {config.weight_decay:g} on {decayed:,} parameters, none on {others:,} "
        "(biases, LayerNorm)"
    )


def rate_line(config: OptimizerConfig) -> str:
    """The schedule of the learning rate in words."""
    peak, floor, end = f"{config.learning_rate:g}", f"{config.min_learning_rate:g}", f"{config.decay_steps:,}"
    rising = f"{peak} after {config.warmup:,} steps of warm-up" if config.warmup else peak
    if config.schedule == "constant":
        return f"{rising}, constant"
    if config.schedule == "inverse-square-root":
        return f"{rising}, then falling as 1 / sqrt(step), never below {floor}"
    if config.schedule == "wsd":
        begin = config.decay_steps - config.cooldown_steps
        return f"{rising}, from step {begin:,} down to {floor} at step {end} ({config.cooldown_shape})"
    return f"{rising}, down to {floor} at step {end} ({config.schedule})"


def changed_rate(earlier: OptimizerConfig, now: OptimizerConfig) -> str:
    """What a start changes of the learning rate that the run had, empty if nothing."""
    changes = [
        f"{name} {before} -> {after}"
        for name in _OF_RATE.split()
        if (before := getattr(earlier, name)) != (after := getattr(now, name))
    ]
    return f"learning rate changed: {', '.join(changes)}" if changes else ""


def _average(config: Config) -> str:
    """A line about the average of the weights, if there is one."""
    what = "what is validated, evaluated, generated with and exported"
    return f"average of the weights: --train.ema {config.train.ema:g}, {what}" if config.train.ema else ""


def _adapters(program: Program) -> list[str]:
    """A line about LoRA, if it is used."""
    lora, model = program.config.lora, program.config.model
    if not lora.rank:
        return []
    trained, frozen = sum(parameter_groups(program.layout.canonical_shapes.params[LORA])), count_parameters(model)
    return [
        f"LoRA: {trained:,} parameters are trained, {trained / frozen:.2%} of the model's, which are frozen; rank "
        f"{lora.rank}, alpha {lora.alpha:g}, of {', '.join(lora.products(model))}"
    ]


def rate_warning(config: Config) -> str:
    """A warning if training ends in the warm-up or before the end of the decay, or goes on after it; else empty."""
    optimizer, steps = config.optimizer, config.train.steps
    if steps <= optimizer.warmup:
        reached = f"{(steps - 1) / optimizer.warmup:.0%} of --optimizer.learning-rate {optimizer.learning_rate:g}"
        return f"warning: --train.steps {steps} ends in the warm-up of {optimizer.warmup} steps, at {reached}"
    if not optimizer.ends_decay or steps == optimizer.decay_steps:
        return ""
    if steps < optimizer.decay_steps:
        return (
            f"warning: --train.steps {steps} ends before --optimizer.decay-steps {optimizer.decay_steps}, at which the "
            f"learning rate has its floor, --optimizer.min-learning-rate {optimizer.min_learning_rate:g}"
        )
    nothing = ", and nothing is learned" if optimizer.min_learning_rate == 0 else ""
    return (
        f"warning: --train.steps {steps} is past --optimizer.decay-steps {optimizer.decay_steps}: from there on the "
        f"learning rate stays at its floor, --optimizer.min-learning-rate {optimizer.min_learning_rate:g}{nothing}"
    )


def sample(program: Program, params: Any, tokenizer: Tokenizer | None) -> str:
    """The continuation that the configuration asks for; empty without a tokenizer or where the model continues none."""
    config = program.config.sample
    if tokenizer is None or config.tokens == 0 or not FAMILIES[program.config.model.family].continues_text:
        return ""
    prompt = tokenizer.encode_prompt(config.prompt)
    new = continue_in_windows(
        one_row(program),
        params,
        prompt,
        num_tokens=config.tokens,
        sampling=Sampling(config.temperature, seed=program.config.seed),
        ends=tokenizer.ends,
    )
    return config.prompt + continuation_text(tokenizer, prompt, list(new))


def validation_text(parts: Mapping[str, Perplexity]) -> str:
    """A line about the last validation, from its losses by name; there are none without validation."""
    if not parts:
        return "not validated (--train.eval-every 0)"
    if "next_token" in parts:
        only = parts["next_token"]
        return f"validation perplexity {only.perplexity:.2f} (loss {only.loss:.4f})"
    texts = (
        f"{name} perplexity {part.perplexity:.2f} (loss {part.loss:.4f}, {part.accuracy:.1%} right)"
        for name, part in parts.items()
    )
    return f"validation: {', '.join(texts)}"


def end_lines(
    config: Config, first: int, validation: Mapping[str, Perplexity], dev: Mapping[str, float], waited: float | None
) -> Iterator[str]:
    """The lines that a run prints after its steps: how far it is, its last `validation`, a task's figures on `dev`, and
    the share of the steps' time that it `waited` for data, None without any. `first` steps were taken before."""
    steps = config.train.steps
    if first >= steps:
        yield (
            f"nothing to train: {Path(config.run_dir)} has {first} steps already and --train.steps is {steps}; "
            "to go on pass more, for a new run another --run-dir"
        )
    yield f"{validation_text(validation)} after {max(first, steps)} steps{_part_of_the_split(config, validation)}"
    if dev:
        figures = (f"{name} {value:{'.2f' if isinstance(value, float) else ','}}" for name, value in dev.items())
        yield f"dev of {config.task.name}: {', '.join(figures)}"
    if waited is not None:
        yield f"waited for data: {waited:.2%} of the steps' time"


def _part_of_the_split(config: Config, validation: Mapping[str, Perplexity]) -> str:
    """What the last validation took, where it need not be the whole split."""
    if not config.train.eval_batches or "next_token" not in validation:
        return ""
    tokens = validation["next_token"].tokens
    return f", on {tokens:,} tokens (--train.eval-batches {config.train.eval_batches})"


def parts_of(validation: Mapping[str, Perplexity], form: BatchSpec) -> dict[str, float]:
    """The figures of a validation by their names in metrics.jsonl; none if there is just one loss."""
    if len(validation) == 1 and not form.measures:
        return {}
    figures = {f"validation_{name}_loss": part.loss for name, part in validation.items()}
    return figures | {f"validation_{name}_accuracy": part.accuracy for name, part in validation.items()}


def written(run_dir: Path) -> Iterator[str]:
    """A line for everything that a run has written."""
    yield f"written to {run_dir}:"
    for name, what in _WRITTEN.items():
        if (run_dir / name).exists():
            yield f"  {run_dir / name}  {what}"
