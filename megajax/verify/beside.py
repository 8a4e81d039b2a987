"""The programs beside training on a mesh, compared with one device exactly: scoring, generation from a cache, and the
transfer of checkpoints."""

import dataclasses
import math
from collections.abc import Iterator
from functools import cache, partial

import jax
import numpy as np

from jaxequal.interpreter import UnknownPrimitive
from jaxequal.numbers import Value, elements, ordered
from megajax.core.axes import PIPE
from megajax.core.backend import CPU
from megajax.core.errors import RunError, UserError
from megajax.core.models.registry import FAMILIES
from megajax.core.program.scoring import logits, scores, task_logits
from megajax.core.program.transfer import Transfer
from megajax.generation.choice import Sampling, prompt_bits
from megajax.generation.programs import ROWS, TOKENS_AT_ONCE, DecodingPrograms
from megajax.settings.config import Config
from megajax.verify.fields import Drawn, Values, unequal
from megajax.verify.forms import in_blocks, plain, with_axes
from megajax.verify.run import TracingError, in_precision, traced
from megajax.verify.verdict import EXACT, Finding, some

Wrong = tuple[int, str]  # how many things, and which, or what was compared


def beside_training(config: Config, seed: int = 0) -> Iterator[Finding]:
    """Compare scores, the tokens that are generated, and states that are transferred: or why one cannot be compared."""
    mesh = cache(lambda: Drawn(config, in_blocks(config), seed))
    checks = {"scores": lambda: _scores(Drawn(plain(config), CPU, seed), mesh())}
    family = FAMILIES[config.model.family]
    if config.model.head == "pretraining" and family.continues_text and family.generates:
        checks["generation with a cache"] = lambda: _generation(config, seed)
    checks["transfer of checkpoints"] = lambda: _transfer(mesh())
    for name, check in checks.items():
        try:
            with in_precision(config), traced():
                count, where = check()
        except UnknownPrimitive:
            raise
        except (TracingError, UserError, RunError) as error:
            count, where = 1, str(error)
        yield Finding(f"{EXACT} {name}", count, 0, where)


def _scores(one: Drawn, mesh: Drawn) -> Wrong:
    """Which scores differ."""
    expected, actual = _scored(one), _scored(mesh)
    wrong = [name for name, x in expected.items() if unequal(x, actual[name])]
    return len(wrong), some(wrong)


def _scored(drawn: Drawn) -> Values:
    """Scores of every target, of texts of another length, too, and the logits of a task."""
    program, params, batch = drawn.program, drawn.weights, drawn.batch
    types, entries = program.batch_types, program.form.entries.values()
    functions = [scores, *([task_logits] if program.config.model.head != "pretraining" else [])]
    outputs = [drawn.run(function(program), params, (types, batch)) for function in functions]
    if all(entry.dims == ("tokens",) for entry in entries):
        length = program.config.model.sequence_length // 2 + 1
        shorter = {name: x.update(shape=(*x.shape[:-1], length)) for name, x in types.items()}
        values = {name: x[..., :length] for name, x in batch.items()}
        outputs.append(drawn.run(scores(program), params, (shorter, values)))
    return {jax.tree_util.keystr(path): x for path, x in jax.tree_util.tree_leaves_with_path(outputs)}


def _generation(config: Config, seed: int) -> Wrong:
    """Whether tokens chosen with a cache are the most probable ones without."""
    zero = min(config.optimizer.zero, 1)
    config = dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, zero=zero))
    config = with_axes(config, [axis for axis in config.mesh.sizes if axis != PIPE])
    rows, length = config.mesh.batch_shards, config.model.sequence_length
    rng = np.random.default_rng(seed)
    num_new = min(1 + TOKENS_AT_ONCE, length // 2)
    length_B = rng.integers(1, length - num_new + 1, rows, dtype=np.int32)
    tokens_BT = rng.integers(0, config.model.vocab_size, (rows, length), dtype=np.int32)
    chosen_BN = _continued(Drawn(config, CPU, seed, math.nan), tokens_BT[:, : length - num_new], length_B, num_new)
    place_BN = length_B[:, None] + np.arange(num_new)
    np.put_along_axis(tokens_BT, place_BN, chosen_BN, 1)
    train = dataclasses.replace(config.train, global_batch=rows, microbatch=rows)
    one = Drawn(plain(dataclasses.replace(config, train=train)), CPU, seed, math.nan)
    program, tokens = one.program, {"tokens": one.program.batch_types["tokens"]}
    outputs = one.run(logits(program), one.weights, (tokens, {"tokens": tokens_BT[None, None]}))
    probable_BT = np.argmax(ordered(outputs)[0, 0, ..., : config.model.vocab_size], -1)
    wrong = np.take_along_axis(probable_BT, place_BN - 1, 1) != chosen_BN
    where = f"row {np.flatnonzero(wrong.any(1))[0]}" if wrong.any() else f"{chosen_BN.size} tokens of {rows} rows"
    return int(wrong.sum()), where


def _continued(drawn: Drawn, tokens_BT: np.ndarray, length_B: np.ndarray, num_new: int) -> np.ndarray:
    """Tokens that follow prompts, [B, num_new]."""
    programs = DecodingPrograms(drawn.program, Sampling(temperature=0.0), ())
    params, rows = drawn.weights, len(tokens_BT)
    weights = drawn.typed(programs.unstacked, params)
    bits = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), jax.eval_shape(lambda: prompt_bits([[0]] * rows, 0)))
    limit_B = np.full(rows, num_new, np.int32)
    inputs = {"tokens": tokens_BT, "length": length_B, "limit": limit_B, "bits": bits}
    types = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), inputs)
    prefill = programs.region(partial(programs.prefill, tokens_BT.shape[1] + TOKENS_AT_ONCE), ROWS)
    decode = programs.region(programs.decode, programs.state_specs)
    values = jax.tree.map(lambda x: x[None, None], inputs)
    (state_types, _), (state, first) = drawn.typed(prefill, weights, (types, values))
    _, others = drawn.run(decode, weights, (state_types, state))
    return np.concatenate([first, others], -1)[0, 0, :, :num_new]


def _transfer(drawn: Drawn) -> Wrong:
    """Whether leaves of a state, moments and averages among them, arrive on their stages, and in canonical form again,
    with their layers in order. Those that go stage by stage are put into order by the host."""
    layout, wrong = drawn.program.layout, []
    transfer = Transfer(layout)
    on_stages = map(layout.with_main, (layout.shapes, layout.specs, drawn.state))
    states = (dataclasses.replace(state, loss_scale=None) for state in (transfer.targets, *on_stages, drawn.canonical))
    parts = zip(*map(jax.tree_util.tree_leaves_with_path, states), strict=True)
    for (path, target), (_, type_), (_, spec), (_, pipelined), (_, canonical) in parts:
        target_spec = target.sharding.spec
        if transfer.goes_by_stages(layout.is_stacked(path), target_spec):
            continue
        to_stages = transfer.from_canonical(path, target_spec, spec, type_.dtype)
        back = transfer.to_canonical(path, spec, target_spec, target.dtype)
        plain_type = jax.ShapeDtypeStruct(target.shape, target.dtype)
        if not (_same(drawn.run(to_stages, (plain_type, canonical)), pipelined)
                and _same(drawn.run(back, (type_, pipelined)), canonical)):  # fmt: skip
            wrong.append(jax.tree_util.keystr(path, simple=True, separator="/"))
    return len(wrong), some(wrong)


def _same(x: Value, y: Value) -> bool:
    return x.shape[2:] == y.shape[2:] and not (elements(x) != elements(y)).any()
