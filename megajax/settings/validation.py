"""Check a configuration on its mesh, and against the devices."""

import contextlib
import dataclasses
import math
from itertools import product

from megajax.core.axes import CONTEXT, EXPERT, PIPE, ROW_AXES, TENSOR
from megajax.core.config import AUTO, MeshConfig
from megajax.core.errors import UserError
from megajax.core.models.config import ModelConfig
from megajax.core.options import counted, options
from megajax.core.traits import Size, Through
from megajax.data.samples.loader import BatchSizes
from megajax.settings.checks import check_values
from megajax.settings.config import Config
from megajax.settings.pipeline_checks import check_schedule, check_table


def validate(config: Config, num_devices: int) -> None:
    """Check a training configuration: values alone, against each other, and against the devices of all processes."""
    check_values(config)
    _check_training_on_mesh(config, num_devices)


def with_data(config: Config, num_devices: int, *, trains: bool = True) -> Config:
    """The configuration with a number for `--mesh.data auto`: as many as there are devices for the other axes. One that
    trains must be able to share the rows of its batches."""
    if config.mesh.data != AUTO:
        return config
    alone = dataclasses.replace(config.mesh, data=1)
    data, rest = divmod(num_devices, alone.num_devices)
    if rest or not data:
        others = alone.flags([axis for axis, size in alone.sizes.items() if size > 1])
        there = f"--mesh.data auto with {others} on {counted(num_devices, 'device', '')}"
        raise UserError(f"{there}; valid: a multiple of {alone.num_devices} devices")
    batch, each = config.train.batch_sizes.divisor, alone.row_shards * config.train.microbatch
    if trains and batch % (each * data) and batch % each == 0:
        sizes = _divisors(batch // each)
        near = [size for size in sizes if size < data][-1:] + [size for size in sizes if size > data][:1]
        devices = " or ".join(f"{size * alone.num_devices} (--mesh.data {size})" for size in near)
        raise UserError(
            f"--mesh.data auto is {data} on {num_devices} devices, which cannot share the rows of "
            f"--train.global-batch {batch}; valid: {devices} devices"
        )
    return dataclasses.replace(config, mesh=dataclasses.replace(config.mesh, data=data))


def validate_imagined(config: Config) -> None:
    """`validate` as if there were as many devices as the mesh has; errors name the nearest valid mesh."""
    check_no_auto(config)
    check_values(config)
    try:
        _check_training_on_mesh(config, config.mesh.num_devices)
    except UserError as error:
        mesh = nearest_mesh(config)
        raise UserError(f"{error}; the nearest valid mesh: {mesh.flags(between=' ') if mesh else 'none'}") from None


def check_no_auto(config: Config) -> None:
    """Refuse `--mesh.data auto` where the devices are only imagined."""
    if config.mesh.data == AUTO:
        raise UserError("--mesh.data auto without the devices; valid: a number")


def nearest_mesh(config: Config) -> MeshConfig | None:
    """The mesh that can train this configuration and differs from its own by the smallest factors; in a tie, the one
    with the fewest devices. None if batch or schedule rule out every mesh."""
    current, train = config.mesh, config.train
    possible = {axis: [size] for axis, size in current.sizes.items()}
    possible |= {axis: _divisors(train.global_batch) for axis in possible if axis in ROW_AXES}
    possible |= {
        EXPERT: [size for size in possible[EXPERT] if config.model.num_experts % size == 0]
        if current.expert > 1
        else [1],
        PIPE: [*range(1, min(2 * current.pipe, len(config.model.layers_of_periods)) + 1)],
        TENSOR: _divisors(config.model.num_heads),
    }
    if current.context > 1:
        possible[CONTEXT] = [size for size in _divisors(config.model.sequence_length) if size <= 2 * current.context]
    meshes = [MeshConfig(**dict(zip(possible, sizes, strict=True))) for sizes in product(*possible.values())]
    meshes = [mesh for mesh in meshes if train.global_batch % (mesh.row_shards * train.microbatch) == 0]

    def distance(mesh: MeshConfig) -> tuple[float, int]:
        pairs = zip(mesh.sizes.values(), current.sizes.values(), strict=True)
        return sum(abs(math.log(size / old)) for size, old in pairs), mesh.num_devices

    for mesh in sorted(meshes, key=distance):
        with contextlib.suppress(UserError):
            _check_training_on_mesh(dataclasses.replace(config, mesh=mesh), mesh.num_devices)
            return mesh
    return None


def _check_zero_ranks(config: Config) -> None:
    """Check that data-parallel ranks can be divided in groups that have all of ZeRO's shards."""
    ranks, data = config.optimizer.zero_ranks, config.mesh.data
    if ranks and data % ranks:
        valid = f"{', '.join(map(str, _divisors(data)))}, or 0: all of them"
        raise UserError(f"--optimizer.zero-ranks {ranks} does not divide --mesh.data {data}; valid: {valid}")


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def _check_training_on_mesh(config: Config, num_devices: int) -> None:
    validate_mesh(config, num_devices)
    _check_zero_ranks(config)
    if config.train.recheck and config.mesh.data == 1:
        alone = f"--train.recheck {config.train.recheck} with --mesh.data 1, where no device has a second copy of what"
        raise UserError(f"{alone} another computes with; valid: --mesh.data 2 or more, or --train.recheck 0")
    rows, flags = config.mesh.row_shards * config.train.microbatch, config.mesh.flags(ROW_AXES)
    if config.train.global_batch % rows:
        on_each, remainder = divmod(config.train.global_batch, config.mesh.row_shards)
        smaller = [size for size in _divisors(on_each) if size < config.train.microbatch and not remainder]
        raise UserError(
            f"--train.global-batch {config.train.global_batch} is not divisible by {flags} x "
            f"--train.microbatch {config.train.microbatch}; valid: a multiple of {rows}"
            + (f", or --train.microbatch {smaller[-1]}" if smaller else "")
        )
    check_ramp(config, config.train.batch_sizes)
    divisors = " x ".join([*(f"--mesh.{axis}" for axis in config.mesh.shown if axis in ROW_AXES), "--train.microbatch"])
    name = f"--train.global-batch / ({divisors})"
    check_table(config.pipeline, config.mesh.pipe, config.train.global_batch // rows, name)
    check_context(config)
    length, ranks = config.model.sequence_length, config.bitwise or config.mesh.tensor
    if config.sequence_parallel and length % ranks:
        flag = "--bitwise" if config.bitwise else "--mesh.tensor"
        raise UserError(
            f"--sequence-parallel: {flag} {ranks} does not divide --model.sequence-length {length}; "
            f"valid: --no-sequence-parallel, or a {flag} that does, such as {math.gcd(length, ranks)}"
        )


def check_ramp(config: Config, sizes: BatchSizes, start: int = 0) -> None:
    """Check that the mesh can share the batches of all steps from `start` on."""
    rows, flags = config.mesh.row_shards * config.train.microbatch, config.mesh.flags(ROW_AXES)
    for stage in sizes.stages:
        if stage.size % rows and stage.first_step >= start:
            raise UserError(
                f"--train.ramp-start {config.train.ramp_start} with --train.ramp-increment "
                f"{config.train.ramp_increment} has steps of {stage.size} sequences, not divisible by {flags} x "
                f"--train.microbatch {config.train.microbatch}; valid: multiples of {rows}"
            )


def check_context(config: Config) -> None:
    """Check that the devices of a context group can share a sequence, with two pieces each."""
    context, tensor, length = config.mesh.context, config.mesh.tensor, config.model.sequence_length
    pieces = 2 * context * (tensor if config.sequence_parallel else 1)
    before = config.model.linear_convolution - 1 if config.model.linear_heads and context > 1 else 0
    if 2 * context * before > length:
        raise UserError(
            f"--mesh.context {context} with --model.sequence-length {length}, whose pieces are shorter than "
            f"--model.linear-convolution {before + 1} sees; valid: at most {max(1, length // (2 * before))}"
        )
    if context == 1 or length % pieces == 0:
        return
    split = f" x --mesh.tensor {tensor} (--sequence-parallel)" if config.sequence_parallel else ""
    nearest = max(1, round(length / pieces)) * pieces
    raise UserError(
        f"2 x --mesh.context {context}{split} does not divide --model.sequence-length {length}; valid: a multiple of "
        f"{pieces}, the nearest is {nearest}"
    )


def _check_experts(config: Config) -> None:
    """Check that the devices of an expert group can share the experts."""
    model, expert = config.model, config.mesh.expert
    if expert > 1 and not model.num_experts:
        raise UserError(
            f"--mesh.expert {expert} with a model without experts; valid: 1, or a model with --model.num-experts"
        )
    if model.num_experts % expert:
        raise UserError(
            f"--mesh.expert {expert} does not divide --model.num-experts {model.num_experts}; valid: "
            f"{', '.join(map(str, _divisors(model.num_experts)))}"
        )
    if model.num_experts and config.train.remat == "stage":
        raise UserError(
            "--train.remat stage with experts, which would route tokens twice; valid: none, selective or layer"
        )


def check_devices(mesh: MeshConfig, num_devices: int, num_processes: int = 1) -> None:
    """Check that a mesh has as many devices as there are."""
    if mesh.num_devices != num_devices:
        devices = -(-mesh.num_devices // max(1, num_processes))  # per process
        simulated = "" if options(Config)["simulate_devices"].problem(devices) else f", or --simulate-devices {devices}"
        be = "is" if num_devices == 1 else "are"
        raise UserError(
            f"{mesh.flags()} needs {counted(mesh.num_devices, 'device', '')}, but there {be} {num_devices}; valid: "
            f"sizes whose product is {num_devices}{simulated}"
        )


def validate_mesh(config: Config, num_devices: int) -> None:
    """Check what any use of the model needs, not only training: the mesh against devices and the model's sizes."""
    model, mesh = config.model, config.mesh
    check_schedule(config.pipeline, mesh.pipe, model)
    check_devices(mesh, num_devices, config.distributed.num_processes)
    heads, by_heads = model.num_heads // mesh.tensor, model.context_attention == "heads"
    if by_heads and mesh.context > 1 and heads % mesh.context and model.num_heads % mesh.tensor == 0:
        raise UserError(
            f"--model.context-attention heads: --mesh.context {mesh.context} does not divide the {heads} heads of a "
            f"device (--model.num-heads {model.num_heads}, --mesh.tensor {mesh.tensor}); valid: gather or auto, or "
            f"--mesh.context {' or '.join(map(str, _divisors(heads)))}"
        )
    _check_experts(config)
    split = _split_sizes(model)
    vocabulary = next(words for size, _, words in split if size.dim == "vocabulary")
    if config.splits_vocabulary and model.padded_vocab_size % (mesh.pipe * mesh.tensor):
        multiple = math.lcm(model.vocab_multiple, mesh.pipe * mesh.tensor)
        raise UserError(
            f"--pipeline.vocabulary split: --mesh.pipe {mesh.pipe} x --mesh.tensor {mesh.tensor} does not divide "
            f"{vocabulary}; valid: --pipeline.vocabulary replicated, or in a new run --model.vocab-multiple {multiple}"
        )
    divisors = _divisors(math.gcd(*(value for size, value, _ in split if not size.repeated)))
    if config.bitwise and config.bitwise % mesh.tensor:
        valid = ", ".join(map(str, _divisors(config.bitwise)))
        raise UserError(f"--mesh.tensor {mesh.tensor} does not divide --bitwise {config.bitwise}; valid: {valid}")
    for size, value, words in split:
        parts = max(config.bitwise, 1)  # tensor divides it
        if value % parts and not (size.repeated and parts % value == 0):
            raise UserError(f"--bitwise {parts} does not divide {words}; valid: {math.gcd(value, parts)} or less")
        if value % mesh.tensor == 0 or (size.repeated and mesh.tensor % value == 0):
            continue
        others = [other for kind, other, _ in split if kind is not size and not kind.repeated]
        valid = ", ".join(str(divisor) for divisor in divisors if value % divisor == 0 or divisor % value == 0)
        if size.dim == "vocabulary" and all(other % mesh.tensor == 0 for other in others):
            valid += f"; or in a new run --model.vocab-multiple {math.lcm(model.vocab_multiple, mesh.tensor)}"
        if size.repeated:
            raise UserError(
                f"--mesh.tensor {mesh.tensor} does not divide {words}, nor is it a multiple of it; valid: {valid}"
            )
        raise UserError(f"--mesh.tensor {mesh.tensor} does not divide {words}; valid: {valid}")


def _split_sizes(model: ModelConfig) -> list[tuple[Size, int, str]]:
    """The sizes of a model that are sharded over `tensor`: as declared, as numbers, and as messages name them."""
    sizes = []
    for name, option in options(ModelConfig).items():
        size, through = option.trait(Size), option.trait(Through)
        if size and size.split:
            value, flag = getattr(model, through.name if through else name), f"--model.{name.replace('_', '-')}"
            words = f"{through.words} of {value} (see {flag})" if through else f"{flag} {value}"
            sizes.append((size, value, words))
    return sizes
