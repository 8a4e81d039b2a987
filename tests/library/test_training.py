"""`Model.train`: the loop of `megajax train` with a loss, an optimizer, data and callbacks of the caller's."""

import dataclasses
import itertools
import json
import math
import os
import signal
import sys
import threading
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
from flax.traverse_util import flatten_dict
from safetensors.numpy import load_file
from tiny import full, tiny_config, user_error

import megajax
from megajax.core.models.own_loss import _TAKEN
from megajax.core.optim.adam import learning_rate
from megajax.core.program.program import Program
from megajax.core.program.state import TrainState
from megajax.library.own import with_own
from megajax.runs.writing import new_state
from megajax.settings.config import Config
from megajax.training.own_data import DataSet, OrderedBatches, TaughtBatches, of_run, own_data

SMALL = {"num_layers": 1, "hidden_size": 16, "dropout": 0.0}


def confident(logits, batch):
    return logits.cross_entropy(batch["targets"]) + 0.1 * logits.entropy()


class Counting:
    """Its entries are pure functions of their numbers, some of them short."""

    def __init__(self, size: int = 40):
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, i: int) -> np.ndarray:
        return (i + np.arange(17 - i % 3)) % 101


class Failing(Counting):
    """The entries of a few steps can be read."""

    left, error = 32, LookupError

    def __getitem__(self, i: int) -> np.ndarray:
        self.left -= 1
        if self.left < 0:
            raise self.error("no more of them")
        return super().__getitem__(i)


def config_of(mesh: tuple[int, ...] = (1, 1, 1)) -> Config:
    config = tiny_config(mesh, optimizer={"warmup_steps": 0}, **SMALL)
    return dataclasses.replace(config, checkpoint=dataclasses.replace(config.checkpoint, every=2))


def uncertain(logits, batch):
    """The same, which reports its entropy."""
    return {"loss": confident(logits, batch), "entropy": logits.entropy()}


def trained(config: Config, run_dir: Path, steps: int) -> tuple[megajax.Model, dict[int, float], dict[int, float]]:
    loss = megajax.Loss(uncertain, measures=("entropy",), title="confident")
    model = megajax.init(config, loss=loss, optimizer=optax.lion)
    losses, validated = {}, {}
    model.train(
        steps,
        run_dir,
        data=Counting(),
        validation=Counting(3),
        on_step=lambda step, figures: losses.update({step: figures["loss"]}),
        on_validation=lambda step, loss: validated.update({step: loss}),
    )
    return model, losses, validated


@pytest.mark.slow
def test_a_run_goes_on_as_if_it_had_not_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its figures are those of metrics.jsonl, its weights the model's."""
    monkeypatch.chdir(tmp_path)
    config = config_of()
    schedule = dataclasses.replace(config.optimizer, schedule="linear", decay_steps=0)
    config = dataclasses.replace(config, optimizer=schedule, train=dataclasses.replace(config.train, steps=40))
    model, losses, rates = megajax.init(config, loss=confident, optimizer=optax.lion), {}, {}

    def note(step: int, figures: dict[str, float]) -> None:
        losses[step], rates[step] = figures["loss"], figures["learning_rate"]
        monkeypatch.chdir(tmp_path.parent)  # which moves no run
        assert "the model is being trained; valid: after train" in user_error(model.weights)

    def train(steps: int) -> None:
        model.train(steps, "run", data=Counting(), on_step=note)
        monkeypatch.chdir(tmp_path)

    again = {"training": True, "loss": confident, "optimizer": optax.lion}
    train(2)
    assert (model.config.optimizer.decay_steps, rates[2]) == (40, pytest.approx(1e-3 * (1 - 1 / 40)))
    restored = megajax.restore("run", **again)
    for each in restored, model:  # all go on to the end of the schedule
        assert learning_rate(2, each.program.config.optimizer) == pytest.approx(1e-3 * (1 - 2 / 40))
    there = model.weights()
    model.set_weights(jax.tree.map(np.zeros_like, there))
    assert not any(np.any(weight) for weight in jax.tree.leaves(model.weights()))
    model.save("elsewhere")
    assert "run goes on from its checkpoint of step 2, which this model of step 2 is not" in user_error(train, 4)
    model = megajax.restore("run", **again)
    train(4)  # from the checkpoint of step 2
    assert "of step 4, which" in user_error(megajax.restore("run", step=2, **again).train, 6, "run", data=Counting())
    lines = figures_of("run")
    assert ([*losses], model.step) == ([1, 2, 3, 4], 4)
    assert [each["loss"] for each in lines if "loss" in each] == [*losses.values()]
    assert {name for each in lines for name in each} <= {*_TAKEN.split()}
    assert losses[3] < losses[1] and "optimizer own, loss confident" in repr(model)
    for given, word in ({"optimizer": optax.lion}, "loss"), ({"loss": confident}, "optimizer"):
        assert f"own: Python code gave this {word}; valid: the same" in user_error(
            megajax.restore, "run", training=True, **given
        )

    interrupt = lambda step, figures: step == before + 1 and os.kill(os.getpid(), signal.SIGINT)  # noqa: E731
    for given, kind, said in (
        ({"data": Failing(), "on_step": note}, LookupError, "raised by entry"),
        ({"data": type("", (Failing,), {"error": KeyboardInterrupt})()}, KeyboardInterrupt, "training ended after"),
        ({"data": Counting(), "on_step": lambda step, figures: sys.exit()}, SystemExit, "training ended after step"),
        ({"data": Counting(), "on_step": interrupt}, KeyboardInterrupt, "by SIGINT after step"),
    ):
        before = model.step
        with pytest.raises(kind) as ended:
            model.train(99, "run", **given)
        monkeypatch.chdir(tmp_path)
        assert said in "".join([str(ended.value), *getattr(ended.value, "__notes__", ())])
        assert said in Path("run/log.txt").read_text()
        assert kind is not LookupError or model.step in losses  # callbacks are told of the step before an error
        assert model.step > before and max(map(int, os.listdir("run/checkpoints"))) == model.step
    for watchdog in (thread for thread in threading.enumerate() if thread.name == "watchdog"):
        watchdog.join(5)
        assert not watchdog.is_alive()  # otherwise it would end a notebook ten minutes later
    assert [each["step"] for each in figures_of("run")] == [*range(1, model.step + 1)]
    wrong = lambda logits, batch: logits.entropy().sum()  # noqa: E731
    assert "has the shape []" in user_error(megajax.init, config_of(), loss=wrong)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [(1, 1, 1), full((2, 1, 2))])
def test_an_optimizer_begins_with_the_weights_that_are_loaded(mesh, tmp_path: Path) -> None:
    """Its copies of them, its moments and keys are kept, also on another mesh, and give the weights to use."""
    donor = megajax.init(config_of())
    donor.save(tmp_path / "donor")
    own = optax.chain(optax.add_noise(0.1, 0.5, 0), optax.contrib.schedule_free_adamw(1e-2))
    used = lambda state, weights: optax.contrib.schedule_free_eval_params(state[1], weights)  # noqa: E731
    config = dataclasses.replace(config_of(mesh), **{"init": str(tmp_path / "donor")})
    model = megajax.init(config, optimizer=own, elementwise=False)
    same = lambda x, y: np.testing.assert_allclose(x, y, atol=1e-7)  # noqa: E731
    jax.tree.map(same, model.weights(used), donor.weights())
    layout, donors = model.program.layout, flatten_dict(donor.weights())
    begun = new_state(layout, lambda path, shape: donors[tuple(key.key for key in path)]).optimizer
    jax.tree.map(lambda lazy, x: same(lazy.make(), x), begun[0][1].z, donor.weights())
    other = jax.tree.map(lambda x: 2 * x, donor.weights())
    model.set_weights(other)
    jax.tree.map(same, model.weights(used), other)

    batch = next(whole_batches(config))
    model.train_step(batch)
    model.save(tmp_path / "own")
    again = megajax.restore(tmp_path / "own", training=True, optimizer=own, elementwise=False)
    kept, there = model.optimizer_state(), again.optimizer_state()
    assert jax.random.key_data(there[0].rng_key).tolist() == jax.random.key_data(kept[0].rng_key).tolist()
    assert again.train_step(batch)["loss"] == pytest.approx(model.train_step(batch)["loss"], rel=1e-6)
    again.save(tmp_path / "used", used)
    best = megajax.restore(tmp_path / "used")
    greedy = {"max_tokens": 5, "temperature": 0.0}
    assert again.generate([[1, 2]], transform=used, **greedy) == best.generate([[1, 2]], **greedy)
    again.export(tmp_path / "exported", transform=used)
    table = load_file(tmp_path / "exported" / "model.safetensors")["transformer.wte.weight"]
    np.testing.assert_allclose(table, again.weights(used)["shared"]["table"][: len(table)], atol=1e-6)
    assert "transform: a int; valid: nested dicts" in user_error(again.weights, lambda state, weights: 3)
    assert "transform: AttributeError" in user_error(again.weights, lambda state, weights: state.z)


@pytest.mark.full
def test_a_run_is_that_of_steps_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And it can be evaluated and go on without the code that began it."""
    monkeypatch.chdir(tmp_path)
    model, losses, validated = trained(config_of(), tmp_path / "run", 4)
    batches = iter(whole_batches(config_of()))
    stepped = megajax.init(config_of(), loss=confident, optimizer=optax.lion)
    assert [stepped.train_step(next(batches))["loss"] for _ in range(4)] == pytest.approx([*losses.values()], rel=1e-6)
    for expected, weight in zip(jax.tree.leaves(stepped.weights()), jax.tree.leaves(model.weights()), strict=True):
        np.testing.assert_allclose(weight, expected, atol=1e-6)
    assert validated[4] == pytest.approx(stepped.loss(rows_of(Counting(3), config_of())), rel=1e-5)
    last = [each for each in figures_of(str(tmp_path / "run")) if "validation_loss" in each][-1]
    parts = math.log(last["validation_perplexity"]) + 0.1 * last["validation_entropy"]
    assert last["validation_loss"] == pytest.approx(parts, rel=1e-5)

    plain = megajax.restore("run")
    assert plain.config.optimizer.name == "own" and "own" not in repr(plain)
    again = megajax.restore("run", training=True, optimizer=optax.lion, loss=confident)
    assert again.step == 4 and again.loss(rows_of(Counting(3), config_of())) == pytest.approx(validated[4], rel=1e-6)
    other = user_error(megajax.restore, "run", training=True, optimizer=optax.adam(1e-3), loss=confident)
    assert "holds the state of another optimizer; valid: the one that it was trained with" in other

    fresh = megajax.init(config_of(), optimizer=optax.lion, loss=confident)
    fresh.set_weights(again.weights())
    for expected, weight in zip(jax.tree.leaves(again.weights()), jax.tree.leaves(fresh.weights()), strict=True):
        np.testing.assert_array_equal(weight, expected)
    with pytest.raises(megajax.UserError, match="there are no more batches; valid: one for each step"):
        fresh.train(3, "other", batches=iter([next(batches)]))
    assert fresh.step == 1


def figures_of(run_dir: str) -> list[dict[str, float]]:
    return [json.loads(line) for line in (Path(run_dir) / "metrics.jsonl").read_text().splitlines()]


def rows_of(entries: Counting, config: Config) -> dict[str, np.ndarray]:
    samples = DataSet(entries, Program.on(config, jax.devices()[: config.mesh.num_devices]), "data")
    return {name: np.stack([samples[i][name] for i in range(len(samples))]) for name in samples.form.entries}


def whole_batches(config: Config):
    program = Program.on(config, jax.devices()[: config.mesh.num_devices])
    samples = own_data(config, program, None, None, Counting(), None).train
    for step in range(100):
        rows = [samples[8 * step + row] for row in range(8)]
        yield {name: np.stack([row[name] for row in rows]) for name in rows[0]}


def test_batches_begin_where_the_model_is() -> None:
    """Of a model's own, and of a teacher's answers, none is drawn in vain."""
    program, drawn, taught = Program.on(config_of(), jax.devices()[:1]), list[int](), list[int]()
    begin = lambda step: (drawn.append(n) or np.full((8, 17), n) for n in itertools.count(step))  # noqa: E731

    def first(batches, model: int, run: int) -> int:
        drawn.clear(), taught.clear()
        batches = TaughtBatches(batches, lambda batch: taught.append(batch[0, 0]) or batch, None)
        return next(own_data(program.config, program, None, batches, None, None, model).batches(run))["tokens"][0, 0]

    ours, one = OrderedBatches(begin, 3), begin(3)
    cases = ((ours, 3, 3), (ours, 4, 4), (ours, 5, 9), (ours, 9, 2), (begin, 3, 9))
    for batches, model, run in (*cases, (one, 3, 3), (one, 4, 4), (one, 5, 7)):
        assert first(batches, model, run) == run and taught == [run]
        assert drawn == [*range(model if batches is one else run, run + 1)]
    assert "after step 2, but batches of an iterator begin after the model's step 8; " in user_error(first, one, 8, 2)


def test_what_train_cannot_do_says_what_is_valid(tmp_path: Path) -> None:
    config = config_of()
    program = Program.on(config, jax.devices()[:1])
    model = megajax.Model(config, program, TrainState({}, *[None] * 5), 0, None)  # type: ignore[arg-type]
    weights = {"shared": {}, "blocks": {}}
    further = {"model.prediction_modules": 1}
    best = dataclasses.replace(config, checkpoint=dataclasses.replace(config.checkpoint, keep_best=1))
    others = lambda step: []  # noqa: E731
    others.tokenizer = "ours"
    predicting, of_rows = megajax.load_preset("demo", further), megajax.Loss(confident, per="row")
    for call, problem in (
        (lambda: model.train(3, data=Counting()), "train: run_dir missing; valid: a folder"),
        (lambda: model.train(3, "run", data=Counting(), batches=[]), "batches and data; valid: one of them"),
        (lambda: model.train(3, "run", validation=Counting()), "validation without data; valid: data or batches"),
        (lambda: model.train(3, "run", data=7), r"data: a int; valid: an object with len\(\) and \[i\]"),
        (lambda: model.train(3, "run", data=Counting(0)), "data: it is empty; valid: at least one entry"),
        (lambda: model.train(3, tmp_path / "run"), "--data.path missing; valid"),
        (lambda: of_run(best, 3, "run", own_data(best, program, None, [], None, None)), "keep-best: this data has no"),
        (lambda: own_data(config, program, "theirs", others, None, None), "the teacher has another tokenizer; valid"),
        (
            lambda: own_data(with_own(config, megajax.distillation(), None), program, None, None, None, None),
            "a corpus lacks teacher_ids, teacher_log_p of loss distilled; valid: batches or data with them",
        ),
        (lambda: DataSet([[0, 101]], program, "data")[0], "data, entry 0: an id 101; valid: token ids"),
        (lambda: megajax.with_teacher([], model, choices=102), "with_teacher: choices 102; valid: 1 to 101"),
        (lambda: model.set_weights(3), "set_weights: a int; valid: nested dicts"),  # type: ignore[arg-type]
        (lambda: model.set_weights(weights), "set_weights: weights without blocks/attention/key/bias; valid"),
        (lambda: megajax.init("bert-336m", loss=confident), "loss with --model.family bert; valid: a decoder"),
        (lambda: megajax.init(predicting, loss=of_rows), "with --model.prediction-modules 1, whose losses are"),
        (lambda: megajax.load_preset("demo", further | {"train.loss": "preferences"}), "coefficient 0"),
        (lambda: megajax.init(config, optimizer=3), "optimizer 3; valid: an optax transformation"),
    ):
        with pytest.raises(megajax.UserError, match=problem):
            call()


def test_an_optimizer_of_whole_weights_tells_what_it_costs() -> None:
    with pytest.warns(UserWarning, match=r"on whole weights, for it has reduce_sum of .*: every device .* MiB more; "):
        model = megajax.init(config_of(), optimizer=optax.lamb(1e-3))
    assert model.program.layout.mixing
