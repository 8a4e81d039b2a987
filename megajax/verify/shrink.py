"""Shrink a user's configuration enough for a laptop while preserving everything that a mesh can get wrong: the model's
options, what divides what, what is uneven, and how the step is computed.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from megajax.core.axes import BATCH_AXES, REPLICA
from megajax.core.config import MeshConfig
from megajax.core.errors import UserError
from megajax.core.models.attention_mask import AttentionMask
from megajax.core.models.config import ModelConfig
from megajax.core.models.context_attention import copies
from megajax.core.models.freeze import fewer_layers
from megajax.core.options import options
from megajax.core.pipeline.config import PipelineConfig
from megajax.core.pipeline.schedule import make_schedule
from megajax.core.program.program import training_way
from megajax.core.traits import OnlyWith, ShrinkRule, Size
from megajax.settings.config import Config, DistributedConfig
from megajax.verify.forms import with_our_optimizer

MOST_VIRTUAL_STAGES = 64
_TOKENS, _WIDTH, _VOCABULARY = 18, 16, 96  # approximately


@dataclass(frozen=True)
class Shrunk:
    """A small configuration that stands in for a large one."""

    config: Config
    notes: tuple[str, ...] = ()  # possibly relevant differences from the large one, a sentence each


def shrink(config: Config, most_devices: int) -> Shrunk:
    """A small version of `config`, which must be valid on its mesh, for at most `most_devices` devices.

    Raises:
        UserError: it cannot be shrunk.
    """
    mesh = fold(config.mesh, most_devices)
    stages = mesh.pipe * config.pipeline.chunks
    if stages > MOST_VIRTUAL_STAGES:
        raise UserError(
            f"--pipeline.chunks {config.pipeline.chunks} x {mesh.pipe} stages is too large to scale "
            f"down; valid: at most {MOST_VIRTUAL_STAGES // mesh.pipe} chunks"
        )
    theirs, ours = (dataclasses.replace(each, tensor=max(each.tensor, config.bitwise)) for each in (config.mesh, mesh))
    sizes = _Sizes(dataclasses.replace(config, mesh=theirs), ours)
    width, notes = sizes.width()
    counts, period = sizes.layers_of_stages(), sizes.period()
    layers = (sum(counts) or sizes.num_blocks()) * (sum(period) or 1)
    layers += min(2, config.model.dense_layers) if not period else 0
    layers -= len({*config.model.layers_of_periods}) > 1 and not counts  # the last period is short
    ruled = {"num_layers": layers, **width, **sizes.tokens(), **sizes.vocabulary(), **sizes.experts()}
    ruled |= sizes.high_precision_ends(layers) | sizes.window_layers()
    ruled |= sizes.linear_heads() | ({"linear_layers": ",".join(map(str, period))} if period else {})
    model = dataclasses.replace(config.model, **sizes.others(ruled), **ruled)
    microbatch = min(config.train.microbatch, 2)
    counts = [count * (sum(period) or 1) for count in counts]
    if counts and period:  # dense layers are of the first period
        counts[next(place for place, count in enumerate(counts) if count)] -= min(2, config.model.dense_layers)
    placed = ",".join(map(str, counts)) or "even"
    pipeline = dataclasses.replace(config.pipeline, layers=placed)
    rows = mesh.row_shards * microbatch * sizes.num_microbatches(pipeline)
    frozen = fewer_layers(config.train.freeze, config.model.num_layers, layers)
    train = dataclasses.replace(config.train, microbatch=microbatch, global_batch=rows, freeze=frozen)
    first = mesh.row_shards * microbatch  # a batch that grows begins with one microbatch, and is whole in the next step
    grows = config.train.ramp_start and first < rows
    start, increment, samples = (first, rows - first, first) if grows else (0, 0, 0)
    train = dataclasses.replace(train, ramp_start=start, ramp_increment=increment, ramp_samples=samples)
    cooldown, ranks = 8 if config.optimizer.schedule == "wsd" else 0, mesh.on_devices["data"]
    optimizer = dataclasses.replace(
        config.optimizer, cooldown_steps=cooldown, zero_ranks=ranks if mesh.replica > 1 else 0
    )
    alone = dataclasses.replace(config, distributed=DistributedConfig(), mesh=mesh)
    small = dataclasses.replace(alone, model=model, train=train, pipeline=pipeline, optimizer=optimizer)
    small = dataclasses.replace(small, loss_scale=dataclasses.replace(config.loss_scale, growth_every=2))
    if with_our_optimizer(config) is not config:
        notes.append(f"compiled checks use AdamW in place of --optimizer.name {config.optimizer.name} (docs/own.md)")
    return Shrunk(_by_traits(small), tuple(notes))


def fold(mesh: MeshConfig, most: int) -> MeshConfig:
    """The mesh itself if it has at most `most` devices, else a smaller one with the same axes. Its smallest axis is as
    large as possible (on an axis of two, left and right are the same); its sizes divide the originals if possible.

    Raises:
        UserError: no such mesh has so few devices.
    """
    if mesh.num_devices <= most:
        return mesh
    sizes = tuple(mesh.on_devices.values())
    least = 2 ** sum(size > 1 for size in sizes)
    if least > most:
        raise UserError(f"--devices {most} for a mesh of {shown(mesh)}; valid: {least} or more (2 per axis)")
    fitting: list[tuple[int, ...]] = [()]
    for size in sizes:
        possible = range(2, size + 1) if size > 1 else (1,)
        fitting = [(*shape, smaller) for shape in fitting for smaller in possible if math.prod(shape) * smaller <= most]

    def worth(shape: tuple[int, ...]) -> tuple[int, int, int, tuple[int, ...]]:
        divides = sum(size % smaller == 0 for size, smaller in zip(sizes, shape, strict=True))
        smallest = min((smaller for smaller, size in zip(shape, sizes, strict=True) if size > 1), default=1)
        return divides, smallest, math.prod(shape), shape[1:]

    best = max(fitting, key=worth)
    folded = dict(zip(mesh.on_devices, best, strict=True))
    return MeshConfig(**folded | {"data": folded.get(REPLICA, 1) * folded["data"]})


def shown(mesh: MeshConfig) -> str:
    """A mesh as shown in messages."""
    return " x ".join(map(str, shown_sizes(mesh)))


def shown_sizes(mesh: MeshConfig) -> tuple[int, ...]:
    """The sizes of the axes worth mentioning."""
    return tuple(mesh.sizes[axis] for axis in mesh.shown)


def _by_traits(config: Config) -> Config:
    """Apply the `ShrinkRule` trait of every option that has one."""
    values: dict[str, dict[str, Any]] = {}
    for key, option in options(Config).items():
        small, value, reader = option.trait(ShrinkRule), attrgetter(key)(config), option.trait(OnlyWith)
        section, _, name = key.rpartition(".")
        if reader and not reader.is_read(attrgetter(section)(config)):
            continue
        if small and small.most is not None:
            values.setdefault(section, {})[name] = min(value, option.convert(small.most))
        elif small and small.fixed is not None:
            values.setdefault(section, {})[name] = small.fixed
    own = values.pop("")
    return dataclasses.replace(
        config, **own, **{name: dataclasses.replace(getattr(config, name), **found) for name, found in values.items()}
    )


class _Sizes:
    """Sizes that relate to the small mesh as a configuration's sizes relate to its own mesh."""

    def __init__(self, config: Config, mesh: MeshConfig):
        self._config, self._model = config, config.model
        self._theirs, self._ours = config.mesh, mesh
        self._way = training_way(config)

    def width(self) -> tuple[dict[str, Any], list[str]]:
        """Heads, head size, hidden size and MLP size, and notes on what could not be preserved."""
        model, theirs, ours = self._model, self._theirs, self._ours
        heads, kv_heads = self._heads()
        divides = model.hidden_size % theirs.zero_shards == 0
        whole = model.head_size * model.num_heads == model.hidden_size
        smallest = max(6 if model.rotary_size else 4, -(-_WIDTH // heads) // 2 * 2) + model.head_size % 2
        head_sizes = [
            size
            for size in range(smallest, smallest + 4 * ours.zero_shards + 3, 2)
            if size != heads or model.head_size == model.num_heads
        ]
        hidden_of: Callable[[int], Iterable[int]] = (
            (lambda size: [heads * size]) if whole else (lambda size: range(heads * size + 4, heads * size + 40, 4))
        )
        pairs = [(size, hidden) for size in head_sizes for hidden in hidden_of(size)]
        if model.mlp_size == 4 * model.hidden_size:
            pairs = [pair for pair in pairs if 4 * pair[1] % ours.tensor == 0] or pairs
        kept = [pair for pair in pairs if (pair[1] % ours.zero_shards == 0) == divides]

        def note(divides: bool, what: str) -> str:
            does = "divides" if divides else "does not divide"
            return f"{theirs.flags(BATCH_AXES)} {does} {what}, but not in the scaled-down model"

        notes = [] if kept else [note(divides, f"--model.hidden-size {model.hidden_size}")]
        head_size, hidden = (kept or pairs)[0]
        mlp_size = self._mlp_size(hidden)
        divides = model.mlp_size // theirs.tensor % theirs.zero_shards == 0
        if (mlp_size // ours.tensor % ours.zero_shards == 0) != divides:
            notes.append(note(divides, f"a device's part of --model.mlp-size {model.mlp_size}"))
        sizes = {"num_heads": heads, "num_kv_heads": kv_heads, "head_size": head_size, "hidden_size": hidden}
        return sizes | {"mlp_size": mlp_size} | self._parts_of_heads(head_size), notes

    def _parts_of_heads(self, head_size: int) -> dict[str, int]:
        """Rotary features; in latent attention also values, and latents. What is smaller or larger in the original is
        so here, if that can be."""
        model = self._model
        if not model.latent_size:
            return {"rotary_size": min(4, model.rotary_size)}

        def order(head: int, rotary: int, value: int, latent: int, of_queries: int) -> list[int]:
            sizes = head, rotary, value or head, latent, of_queries, latent + rotary, head - rotary
            return [(a > b) - (a < b) for a, b in itertools.combinations(sizes, 2)]

        names = "rotary_size", "value_size", "latent_size", "query_latent_size"
        theirs = order(model.head_size, *(getattr(model, name) for name in names))
        other = model.value_head_size - model.head_size
        value = head_size + (other > 0) - (other < 0) if model.value_size else 0
        several = range(2, 2 * head_size)
        possible = itertools.product(
            range(2, head_size + 1, 2), (value,), several, several if model.query_latent_size else (0,)
        )

        def lost(ours: Iterable[int]) -> int:
            return sum(a != b for a, b in zip(order(head_size, *ours), theirs, strict=True) if b)

        return dict(zip(names, min(possible, key=lost), strict=True))

    def _heads(self) -> tuple[int, int]:
        """Query heads and key heads: as many of each per device (up to 2), or replicated as often. If a context group
        divides a device's heads, they are multiples that the small one divides too."""
        heads, kv_heads = self._heads_of_tensor(self._model.num_heads, self._model.num_kv_heads)
        if self._way != "heads":
            return heads, kv_heads
        more = copies(heads // self._ours.tensor, self._ours.context)
        fewer = self._model.num_kv_heads < self._theirs.tensor * self._theirs.context
        return heads * more, kv_heads if fewer and heads != kv_heads else kv_heads * more

    def _heads_of_tensor(self, heads: int, kv_heads: int) -> tuple[int, int]:
        theirs, ours = self._theirs.tensor, self._ours.tensor
        here = _few(heads // theirs)
        if heads == kv_heads:
            return ours * here, ours * here
        if kv_heads % theirs == 0:
            few = ours * min(2, kv_heads // theirs)
            return few * _few(heads // kv_heads), few
        held = theirs // kv_heads
        return ours * here, ours // held if ours % held == 0 else 1

    def _mlp_size(self, hidden: int) -> int:
        """A multiple of `tensor`; ZeRO's shards divide a device's share, or it is 4 times the hidden size, if that
        holds for the original (and can hold)."""
        model, theirs, ours = self._model, self._theirs, self._ours
        if model.mlp_size == 4 * model.hidden_size and 4 * hidden % ours.tensor == 0:
            return 4 * hidden
        divides = model.mlp_size // theirs.tensor % theirs.zero_shards == 0
        first = 5 * hidden // 2 // ours.tensor + 1
        sizes = (ours.tensor * size for size in range(first, first + 2 * ours.zero_shards + 2))
        fitting = (s for s in sizes if s != 4 * hidden and (s // ours.tensor % ours.zero_shards == 0) == divides)
        return next(fitting, ours.tensor * first)

    def tokens(self) -> dict[str, Any]:
        """Sequence length, and other sizes counted in tokens, scaled with it."""
        model, here = self._model, self._ours
        multiple = here.tensor
        if here.context > 1:  # two pieces, of at least two tiles each
            multiple = 2 * here.context * math.lcm(here.tensor, 2)
        length = -(-_TOKENS // multiple) * multiple

        def scaled(tokens: int) -> int:
            near = round(length * tokens / model.sequence_length)
            return min(length - 1, max(2, near)) if tokens < model.sequence_length else max(length, near)

        sizes = {"sequence_length": length}
        for name, option in options(ModelConfig).items():
            small, reader, tokens = option.trait(ShrinkRule), option.trait(OnlyWith), getattr(model, name)
            if small and small.tokens and tokens and (reader is None or reader.is_read(model)):
                sizes[name] = scaled(tokens)
        if self._way == "none":
            return sizes
        before = length // here.context  # a window reaches beyond this exactly if the original's does
        reach = AttentionMask.of_model(model, model.sequence_length).before
        if reach is not None:
            window, reaches = sizes["sliding_window"], reach > model.sequence_length // self._theirs.context
            sizes["sliding_window"] = max(window, before + 2) if reaches else min(window, before + 1)
        return sizes | {"context_attention": "heads" if self._way == "heads" else "gather"}

    def vocabulary(self) -> dict[str, Any]:
        """Padded and sharded like the original; ZeRO's shards divide a shard if they divide the original's."""
        model = self._model
        theirs, ours = (
            mesh.tensor * (mesh.pipe if self._config.splits_vocabulary else 1) for mesh in (self._theirs, self._ours)
        )
        divides = model.padded_vocab_size // theirs % self._theirs.zero_shards == 0
        first = -(-_VOCABULARY // ours)
        parts = range(first, first + 2 * self._ours.zero_shards)
        part = next((part for part in parts if (part % self._ours.zero_shards == 0) == divides), first)
        padded, added = part * ours, model.padded_vocab_size - model.vocab_size
        left = max(1, padded * added // model.padded_vocab_size) if added else 0
        return {"vocab_size": padded - left, "vocab_multiple": padded}

    def others(self, ruled: Collection[str]) -> dict[str, Any]:
        """Sizes without a rule of their own: a few, or a few per device if they are sharded."""
        sizes: dict[str, int] = {}
        for name, option in options(ModelConfig).items():
            size, value = option.trait(Size), getattr(self._model, name)
            if size and value and name not in ruled:
                here = self._ours.tensor if size.split else 1
                small = here * _few(max(1, value // (self._theirs.tensor if size.split else 1)))
                unequal = {sizes[other] for other in sizes if getattr(self._model, other) != value}
                sizes[name] = next(size for size in itertools.count(small, here) if size not in unequal)
        return sizes

    def experts(self) -> dict[str, Any]:
        """As many experts per device, up to 3, and a few per token, several if the original has several, but not all if
        the original does not use all; so are groups and those chosen. Then a device may have more experts."""
        model = self._model
        if not model.num_experts:
            return {}
        some = model.experts_per_token < model.num_experts
        num_experts = self._ours.expert * _few(model.num_experts // self._theirs.expert)
        if some and model.experts_per_token > 1:
            num_experts = max(num_experts, -(-3 // self._ours.expert) * self._ours.expert)
        chosen, groups = min(2, model.chosen_groups), model.expert_groups
        groups = min(groups, 2 * chosen) if model.chosen_groups < groups else chosen
        if groups > 1:  # of two experts at least
            multiple = math.lcm(groups, self._ours.expert)
            num_experts = -(-max(num_experts, 2 * groups) // multiple) * multiple
        most = num_experts * chosen // groups
        few = min(_few(model.experts_per_token), max(1, most - 1)) if some else most
        sizes = {"num_experts": num_experts, "experts_per_token": few}
        return sizes | {"expert_groups": groups, "chosen_groups": chosen}

    def high_precision_ends(self, layers: int) -> dict[str, str]:
        """A layer at each end that computes as with bf16, where the original has one and others are left here."""
        first, last = (min(1, int(number)) for number in self._model.bf16_layers.split(","))
        last = min(last, max(0, layers - 1 - first))
        return {"bf16_layers": f"{min(first, layers - 1)},{last}"}

    def window_layers(self) -> dict[str, str]:
        """Every other layer has the window, where only some of the original's have."""
        return {} if len({*self._model.windowed}) == 1 else {"window_layers": "1,1"}

    def linear_heads(self) -> dict[str, int]:
        """Heads of linear attention, like the others."""
        names, model = ("linear_heads", "linear_key_heads"), self._model
        numbers = self._heads_of_tensor(model.linear_heads, model.linear_key_heads) if model.linear_heads else ()
        return dict(zip(names, numbers, strict=False))

    def period(self) -> list[int]:
        """How many layers of each of two kinds a period has, at most 2, so that not all runs have one; empty if all are
        of one kind."""
        periods = self._model.periods
        return [] if "" in periods else [min(2, max(runs)) for runs in periods.values()]

    def num_blocks(self) -> int:
        """One or two layers, or periods, per virtual stage; as uneven over stages and virtual stages as in the
        original."""
        layers, chunks = len(self._model.layers_of_periods), self._config.pipeline.chunks
        theirs, ours = self._theirs.pipe * chunks, self._ours.pipe * chunks
        each, left = divmod(layers, theirs)
        if not left or ours == 1:
            return ours * min(each, 2)
        wanted = max(1, round(ours * left / theirs))
        uneven = layers % self._theirs.pipe != 0
        some = [n for n in range(1, ours) if (n % self._ours.pipe != 0) == uneven] or list(range(1, ours))
        return ours + min(some, key=lambda n: abs(n - wanted))

    def layers_of_stages(self) -> list[int]:
        """Numbers of layers for the virtual stages if the original has them: 2 on the fullest, 1 on others, and none
        where the original has none. Unless all are equal, some differ. With `auto` the last has one fewer."""
        pipeline, pipe = self._config.pipeline, self._ours.pipe
        num_stages, counts = pipe * pipeline.chunks, pipeline.counts
        if pipeline.layers == "auto" and num_stages > 1:
            return [2] * (num_stages - 1) + [1]
        layers = []
        for k in range(num_stages if counts else 0):
            chunk, stage = divmod(k, pipe)
            first, end = (chunk * self._theirs.pipe + s * self._theirs.pipe // pipe for s in (stage, stage + 1))
            most = max(counts[first:end])
            layers.append(min(most, 2 if most == max(counts) else 1))
        if len({*layers}) < 2 <= len({*counts}):
            layers[-1] -= 1
        return layers

    def num_microbatches(self, pipeline: PipelineConfig) -> int:
        """Fewer than stages, as many, a multiple, or more without being a multiple, as in the original; if weight
        gradients are deferred, so many that the last ones are not in the first slot."""
        train, theirs, ours = self._config.train, self._theirs.pipe, self._ours.pipe
        count = train.global_batch // (self._theirs.row_shards * train.microbatch)
        if ours == 1:
            return min(count, 3)
        if count < theirs:
            return max(1, min(count, ours - 1))
        left = max(1, min(ours - 1, count % theirs)) if count % theirs else 0
        wanted = ours + left if left else ours * min(count // theirs, 2)

        def last_slot(count: int) -> int:
            table = make_schedule(pipeline.schedule, ours, count, pipeline.chunks, pipeline.deferring()).deferral
            return (count * pipeline.chunks - 1) % table.num_slots if table else 1

        return next((count for count in range(wanted, wanted + 3 * ours, ours) if last_slot(count)), wanted)


def _few(number: int) -> int:
    """`number` if it is at most 3; otherwise 3 if it is odd, 2 if it is even."""
    return number if number <= 3 else 2 + number % 2
