"""A model with its weights, on a mesh.

Letters: B sequences, T tokens, V vocabulary, C classes.
"""

import contextlib
import dataclasses
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal, overload

import jax
import numpy as np
from jax import Array

from megajax.convert.exporting import export_config, export_hf
from megajax.convert.importing import write_run
from megajax.core.errors import UserError, brief, told
from megajax.core.models.own_loss import Loss
from megajax.core.models.registry import FAMILIES
from megajax.core.models.staged import count_parameters
from megajax.core.options import counted
from megajax.core.program.program import Program
from megajax.core.program.scoring import logits, scores, task_logits
from megajax.core.program.state import TrainState
from megajax.core.program.train_step import computed_weights, evaluated_weights, train_step
from megajax.data.samples.base import EndlessSamples
from megajax.data.samples.loader import train_batches
from megajax.data.text.indexed import prepared_prefix
from megajax.data.text.tokenizer import Tokenizer
from megajax.evaluation.pretrained import perplexity_figures
from megajax.evaluation.scoring import Perplexity, SampleScores, total_loss
from megajax.generation.choice import Sampling
from megajax.generation.decoder import Decoder
from megajax.generation.generate_options import GenerateOptions
from megajax.generation.text import Stops, continuation_text
from megajax.host.ending import notes_of
from megajax.host.reading import is_unicode
from megajax.host.signals import Stopped, stop_signals
from megajax.host.transcript import transcript
from megajax.library.own import as_weights, with_own
from megajax.library.progress import progress
from megajax.runs.data import given_samples, make_run_data, open_run_data
from megajax.runs.init import keep_init_tokenizer, keep_tokenizer
from megajax.runs.order import Order, OrderSegment
from megajax.runs.step_folders import named
from megajax.settings.checks import check_given
from megajax.settings.config import Config
from megajax.settings.option_errors import check
from megajax.settings.validation import validate
from megajax.training.batches import Given, batch_of, inputs_of, padded, prompt_ids, shape_of_ids
from megajax.training.begin import train_here
from megajax.training.given import OnStep, OnValidation, Supplied
from megajax.training.loop import Trainer
from megajax.training.own_data import Batches, OrderedBatches, of_run, own_data, registered_data, whole_batch


@brief
class Model:
    """A model on the mesh of a configuration, made by `init` or `restore`. With `train.ema` all but `train_step` and
    `train`, whose loss is that of the weights in training, use the average of its weights.

    Attributes:
        config: its configuration.
        program: the configuration on its mesh, `program.mesh`.
        step: the number of steps that its weights were trained for.
        tokenizer: for its texts; None if there is none yet.
    """

    def __init__(
        self,
        config: Config,
        program: Program,
        weights: Any,
        step: int,
        tokenizer: Tokenizer | None,
        saved: Config | None = None,
        run_dir: Path | None = None,
    ):
        """`weights` are a `TrainState`, or only its `params`, which cannot be trained; `saved` is the configuration
        before its schedule was put in steps, which `save` stores; `run_dir` has the step's checkpoint."""
        self.config, self.program, self.step, self.tokenizer = config, program, step, tokenizer
        self._state: TrainState | None = weights if isinstance(weights, TrainState) else None
        self._weights, self._saved = weights, saved or config
        # By run directory the step whose checkpoint it is; None: no longer one.
        self._kept: dict[Path, int | None] = {run_dir.resolve(): step} if run_dir else {}
        self._forward: dict[int, Program] = {}  # by number of rows in a batch
        self._of_loss: dict[Any, Program] = {}
        self._called: set[tuple[str, int]] = set()  # functions and numbers of rows that are compiled
        self._decoders: dict[tuple[Sampling, frozenset[int], bool], Decoder] = {}  # only the last one

    def __repr__(self) -> str:
        config, model = self.config, self.config.model
        size = f"{count_parameters(model):,} parameters, {counted(model.num_layers, 'layer')} of {model.hidden_size}"
        own = f", loss {config.own_loss.name}" if config.own_loss else ""
        trained = f", optimizer {config.optimizer.name}{own}" if self._state is not None else ""
        return f"Model({model.family}, {size}, {config.precision}; mesh {config.mesh}; step {self.step}{trained})"

    @property
    def _params(self) -> Any:
        self._check_there()
        return self._weights if self._state is None else evaluated_weights(self.program, self._state)

    def _trained(self, what: str) -> TrainState:
        self._check_there()
        if self._state is None:
            raise UserError(f"{what}: the optimizer state was not restored; valid: restore(…, training=True)")
        return self._state

    def _check_there(self) -> None:
        if self._weights is None:
            raise UserError("the model is being trained; valid: after train returns, or with what callbacks are told")

    def logits(self, batch: Given) -> Array:
        """Logits, without dropout: [B, T, V] for the next token (language models) or every token (BERT); for a model
        with a task's head, the logits that answer the task, such as [B, C].

        Args:
            batch: token ids [B, T], for any B; for BERT a batch by name.
        """
        arrays = inputs_of(self.config, self.program.form, batch)
        pretrains = self.config.model.head == "pretraining"
        found = self._run(logits if pretrains else task_logits, arrays)[: len(arrays["tokens"])]
        return found[..., : self.config.model.vocab_size] if pretrains else found

    def loss(self, batch: Given) -> float:
        """What training minimizes, without dropout: the mean cross-entropy over the targets, in nats.

        Args:
            batch: token ids [B, T + 1], each of which is predicted from those before it; or a batch by name.
        """
        found = self._run(scores, batch_of(self.config, self.program.form, batch))
        targets = self.program.form.targets
        return total_loss({name: Perplexity.of([SampleScores.of(*map(np.asarray, found[name]))]) for name in targets})

    def train_step(self, batch: Given, loss: Loss | Callable[..., Any] | None = None) -> dict[str, float]:
        """One optimizer step, as in a run.

        Args:
            batch: token ids [B, T + 1], or a batch by name, such as one of `batches`; B is `train.global_batch` and T
                `model.sequence_length`.
            loss: what to minimize in this step, as in `megajax.init`; by default what the model was made with.

        Returns:
            Figures by name: `loss` before the step, `grad_norm`, `learning_rate`, `skipped` (1.0: the gradients were
            not finite, and nothing changed), …
        """
        state = self._trained("train_step")
        if not self.config.pretrains:
            raise UserError(
                f"train_step: a model of {self.config.task.name}; valid: megajax train, or one without task"
            )
        if self.config.optimizer.ends_decay and not self.config.optimizer.decay_steps:
            raise UserError(
                "train_step: train.epochs does not say at which step the learning rate reaches its floor; valid: "
                "train.steps, or optimizer.decay_steps"
            )
        rows, length = self.config.train.global_batch, self.config.model.sequence_length
        shape = shape_of_ids(batch)
        if shape not in (None, (rows, length + 1)):
            valid = f"{[rows, length + 1]}, train.global_batch times model.sequence_length + 1"
            raise UserError(f"train_step: ids of shape {list(shape)}; valid: {valid}")
        program = self._with_loss(loss)
        arrays = whole_batch(self.config, program, batch, "train_step")
        placed = program.put_batch(arrays, program.local_rows)
        with self._compiling("the step" if loss is None else f"the step of {program.config.own_loss.name}", rows):
            self._state, metrics = train_step(program)(state, placed)
        self.step, self._kept = self.step + 1, dict.fromkeys(self._kept)
        return {name: float(value) for name, value in metrics.items() if value.ndim == 0}

    def _with_loss(self, loss: Loss | Callable[..., Any] | None) -> Program:
        """The program with another loss; cached."""
        if loss is None:
            return self.program
        if loss not in self._of_loss:
            self._of_loss[loss] = Program(with_own(self.config, loss, None), self.program.mesh, self.program.backend)
        return self._of_loss[loss]

    def train(
        self,
        steps: int | None = None,
        run_dir: str | Path | None = None,
        *,
        batches: Batches | None = None,
        data: Any = None,
        validation: Any = None,
        on_step: OnStep = lambda step, figures: None,
        on_validation: OnValidation = lambda step, loss: None,
    ) -> None:
        """Train in a run directory with the loop of `megajax train`: its checkpoints, log, trackers and signals. Called
        again, also in another process, it goes on from the newest checkpoint there; the model then has its weights. A
        model of that run directory which is not that checkpoint, as after `set_weights`, is refused.

        Args:
            steps: the step at which training ends, counted from the model's first; by default `train.steps`, which
                remains the end of the schedule of the learning rate.
            run_dir: by default the configuration's.
            batches: batches as for `train_step`: an iterator from the model's next step on, or a function of the
                number of steps before. By default those of the configuration's data. On resume an iterator is
                advanced past the batches already used.
            data, validation: data sets instead: objects with `len` and `[i]`, of which an entry is ids [T + 1] or a
                dict of a row's arrays. Training draws all entries once in every epoch, in a new order.
            on_step: called with a step's number and its figures, in order, when they are known.
            on_validation: called with the number of steps before a validation and its loss.

        Raises:
            RunError: as `megajax train`: too many steps in a row were skipped.
            KeyboardInterrupt, SystemExit: after Ctrl-C, or after SIGTERM or SIGHUP with the exit code 143 or 129, once
                the current step is saved. Signals that the program handles itself are left to it.

        Other exceptions, of data or callbacks, pass through once the last finished step is saved; with several
        processes it is not.
        """
        state = self._trained("train")
        data_set = own_data(self.config, self.program, self.tokenizer, batches, data, validation, self.step)
        config = of_run(self._saved, steps, run_dir, data_set)
        validate(config, config.mesh.num_devices)
        if data_set is None:
            check_given(config)
        path = Path(config.run_dir).resolve()
        newest = max(named(path / "checkpoints"), default=None)
        if newest is not None and self._kept.get(path, newest) != newest:
            problem = f"goes on from its checkpoint of step {newest}, which this model of step {self.step} is not"
            valid = "another run_dir, or first megajax.restore(…, training=True)"
            raise UserError(f"train: {config.run_dir} {problem}, or no longer; valid: {valid}")
        self._weights = self._state = None  # the loop overwrites it
        runs: list[Trainer] = []
        supplied = Supplied(
            program=self.program,
            state=state,
            tokenizer=self.tokenizer,
            step=self.step,
            horizon=self.config.optimizer.horizon,
            epochs=0.0 if batches is not None else self._saved.train.epochs,
            data=data_set,
            on_begin=runs.append,
            on_step=on_step,
            on_validation=on_validation,
        )
        try:
            with stop_signals.handled(in_python=True):
                train_here(config, given=supplied)
        except Stopped as stop:
            transcript.add(str(stop))
            raise stop.in_python() from None
        except BaseException as error:
            transcript.add(f"{type(error).__name__}: {error}{notes_of(error)}")
            raise
        finally:
            transcript.end()
            self._state = runs[0].state if runs else state
            self._weights, self.step = self._state, runs[0].dispatched if runs else self.step
            self._kept = dict.fromkeys(self._kept) | {path: runs[0].checkpoints.saved} if runs else self._kept
            if runs and runs[0].config.optimizer.horizon != self.config.optimizer.horizon:
                self.config = dataclasses.replace(self.config, optimizer=runs[0].config.optimizer)
                self.program, self._of_loss = Program(self.config, self.program.mesh, self.program.backend), {}
            self.tokenizer = self.tokenizer or (runs[0].data.tokenizer if runs else None)

    def batches(self, folder: str | Path) -> Iterator[Mapping[str, np.ndarray]]:
        """An iterator of the batches of a run with this configuration, from the model's step on, without end. `train`
        moves it to where its run is.

        `data.path` or `data.sources` is tokenized into files in `folder`, where later calls find them. If the model has
        a tokenizer, the data is tokenized with it. Otherwise the model gets the data's tokenizer, which is trained if
        none is given.
        """
        check_given(self.config)
        if not self.config.pretrains:
            raise UserError(f"batches: a model of {self.config.task.name}; valid: megajax train")
        if self.config.data.set:
            return self._ordered(registered_data(self.config, self.program).train)
        if self.tokenizer is not None:  # the weights need exactly its ids
            keep_tokenizer(
                self.tokenizer, self.config, Path(folder), "batches: the tokenizer of the model", "another folder"
            )
        elif self.config.init:
            keep_init_tokenizer(self.config, Path(folder))
        with progress():
            corpora = make_run_data(self.config, Path(folder))
        data = open_run_data(self.config, Path(folder), corpora=corpora)
        self.tokenizer = self.tokenizer or data.tokenizer
        return self._ordered(Order([OrderSegment.of(self.config, corpora)]).samples(data.train))

    def _ordered(self, samples: EndlessSamples) -> OrderedBatches:
        rows, size = self.program.local_rows, self.config.train.global_batch
        begin = lambda step: train_batches(samples, rows=rows, global_batch=size, start_step=step)  # noqa: E731
        return OrderedBatches(begin, self.step)

    @overload
    def generate(self, prompts: Any, *, logprobs: Literal[True], **options: Any) -> tuple[Any, list]: ...
    @overload
    def generate(self, prompts: str, **options: Any) -> str: ...
    @overload
    def generate(self, prompts: Sequence[str], **options: Any) -> list[str]: ...
    @overload
    def generate(self, prompts: Sequence[Sequence[int]], **options: Any) -> list[list[int]]: ...
    def generate(self, prompts: Any, *, transform: Callable[..., Any] | None = None, **options: Any) -> Any:
        """Continuations, without their prompts.

        Args:
            prompts: one text, several texts, or several lists of token ids.
            transform: as in `weights`.
            options: `max_tokens` (64), `temperature` (0.8; 0: always the most probable token), `top_k`, `top_p`,
                `min_p`, `repetition_penalty`, `stop` (texts before which a continuation ends; its ids include those of
                the text that it stops at), `seed`, `batch` (prompts processed together, 8), like the flags of `megajax
                generate`; `logprobs`.

        Returns:
            One text, or one per prompt; for token ids the new ids. With `logprobs`, a pair of that and the
            log-probabilities of the new ids, in nats, as scoring the whole texts gives them: a list, or one per prompt.
        """
        known = {field.name for field in dataclasses.fields(GenerateOptions)}
        if unknown := set(options) - known:
            raise UserError(f"generate: no option {min(unknown)!r}; valid: {', '.join(sorted(known))}")
        if isinstance(options.get("stop", ()), str | list):
            stop = options["stop"]
            options |= {"stop": (stop,) if isinstance(stop, str) else tuple(stop)}
        chosen = GenerateOptions(**options)
        check(chosen)
        if isinstance(prompts, str):
            both = self.generate([prompts], transform=transform, **options)
            return tuple(each[0] for each in both) if chosen.logprobs else both[0]
        if not isinstance(prompts, Iterable):
            raise UserError(f"generate: prompts {prompts!r}; valid: a text, a list of texts, or of lists of token ids")
        prompts = list(prompts)
        if not prompts:
            return ([], []) if chosen.logprobs else []
        of_text = any(isinstance(prompt, str) for prompt in prompts)
        if of_text:
            tokenizer = self._check_tokenizer()
            if not all(isinstance(prompt, str) for prompt in prompts):
                raise UserError("generate: prompts mix texts and token ids; valid: only texts, or only token ids")
            if not all(map(is_unicode, prompts)):
                raise UserError("generate: a prompt contains half a character (\\ud800 to \\udfff); valid: text")
            prompts = [tokenizer.encode_prompt(prompt) for prompt in prompts]
        ids = [prompt_ids(self.config, prompt, number) for number, prompt in enumerate(prompts, start=1)]
        new, logprobs = ([list[Any]() for _ in ids] for _ in range(2))
        with progress():
            stops = Stops(self._check_tokenizer(), ids, chosen.stop) if chosen.stop else None
            for piece in self._decoder(chosen, self._used(transform)).stream(
                ids, max_tokens=chosen.max_tokens, batch=chosen.batch, stops=stops
            ):
                new[piece.number] += piece.ids
                logprobs[piece.number] += piece.logprobs
        found: list[Any] = new
        if of_text:
            pairs = zip(ids, new, strict=True)
            found = [continuation_text(tokenizer, prompt, more, chosen.stop) for prompt, more in pairs]
        return (found, logprobs) if chosen.logprobs else found

    def evaluate(self, data: str | Path, *, transform: Callable[..., Any] | None = None) -> dict[str, Any]:
        """Loss per token in nats, perplexity, number of tokens and bits per byte on a text, as in `megajax eval
        perplexity --data`; for BERT, figures for each of its losses. `data` can be anything that `--data.path` can,
        and `transform` is as in `weights`."""
        if self.config.model.head != "pretraining":
            raise UserError(f"evaluate: a model of {self.config.task.name}; valid: save it, and megajax.evaluate")
        tokenized = prepared_prefix(str(data), flag="data") is not None
        if not tokenized or not FAMILIES[self.config.model.family].continues_text:
            self._check_tokenizer()
        with progress("evaluating"):
            samples = given_samples(
                self.config, str(data), self.tokenizer, overlap=self.config.model.sequence_length, flag="data"
            )
            mesh = self.config.mesh
            program = self._program(mesh.row_shards * mesh.pipe * self.config.train.microbatch)
            return perplexity_figures(program, self._used(transform), samples, None if tokenized else self.tokenizer)

    def weights(self, transform: Callable[..., Any] | None = None) -> dict[str, Any]:
        """All weights on one device, without a mesh, for `PlainModel`: nested dicts, `shared` and `blocks`; weights of
        layers are stacked, [L, …]. With `train.ema` they are the average.

        Args:
            transform: a function of `optimizer_state` and of the trained weights (with LoRA the adapters) that returns
                those to use instead, as `optax.contrib.schedule_free_eval_params`.
        """
        adapters, found = self.program.layout.adapters, self._canonical(transform)
        return found if adapters is None else jax.jit(adapters.merged)(found)

    def optimizer_state(self) -> Any:
        """The state of the optimizer on one device, in the structure that optax gives it; layers are stacked."""
        state = self.program.layout.optimizer_state(self._trained("optimizer_state"))
        return jax.device_put(state, self.program.mesh.devices.flat[0])

    def _canonical(self, transform: Callable[..., Any] | None) -> Any:
        """The main weights and adapters on one device, or their average; to transform are those in training."""
        layout, held, state = self.program.layout, self._params, self._state
        if transform is not None:
            state = self._trained("transform")
            held = computed_weights(self.program, state)
        main = state and (state.main if transform or state.average is None else state.average)
        if main is not None:
            held = layout.with_trained(held, main)
        device = self.program.mesh.devices.flat[0]
        held = jax.device_put(jax.jit(layout.canonical_weights)(held), device)
        if transform is None:
            return held
        state, trained = self.optimizer_state(), layout.trained(held)
        with told("transform", "a function of the optimizer's state and of weights"):
            made = transform(state, trained)
        return layout.with_trained(held, jax.device_put(as_weights(made, trained, "transform"), device))

    def _used(self, transform: Callable[..., Any] | None) -> Any:
        """The weights that forward-only programs are given."""
        if transform is None:
            return self._params
        return self.program.layout.computed_from_canonical(jax.device_get(self._canonical(transform)))

    def set_weights(self, weights: Mapping[str, Any]) -> None:
        """Replace all weights, and copies of weights in the optimizer's state; moments, step and learning rate stay.

        Args:
            weights: nested dicts as from `weights`, of arrays of any kind and any float dtype.
        """
        layout = self.program.layout
        self._check_there()
        if layout.adapters is not None:
            raise UserError("set_weights: the weights have LoRA's adapters; valid: a model without lora.rank")
        canonical = as_weights(weights, layout.canonical_shapes.params)
        with progress("placing the weights"):
            if self._state is None:
                self._weights = layout.computed_from_canonical(canonical)
            else:
                self._weights = self._state = layout.with_weights(self._state, canonical)
        self._kept = dict.fromkeys(self._kept)

    def export(
        self, folder: str | Path, *, dtype: str | None = None, transform: Callable[..., Any] | None = None
    ) -> None:
        """Write a folder that transformers loads, as `megajax convert export-hf`, with `transform` as in `weights`."""
        with tempfile.TemporaryDirectory() as place:
            run = Path(place) / "run"
            self.save(run, transform)
            export_hf(run, export_config(run), Path(folder), dtype=dtype)

    def save(self, run_dir: str | Path, transform: Callable[..., Any] | None = None) -> None:
        """Write a run directory at the model's step, for use with `restore` and all commands; with `transform` as in
        `weights`, its weights are those.

        Raises:
            RunError: the checkpoint cannot be written.
        """
        layout, step, state = self.program.layout, self.step, self._trained("save")
        if transform is not None:
            state = layout.with_weights(state, jax.device_get(self._canonical(transform)))
        horizon = self.config.optimizer.horizon
        write_run(
            Path(run_dir), "save", self._saved, layout, self.tokenizer, lambda to: to.save(step, state), horizon=horizon
        )
        self._kept[Path(run_dir).resolve()] = step

    def _run(self, function: Any, arrays: Mapping[str, np.ndarray]) -> Any:
        """Call a function in `core/program/scoring.py` on the model's weights and a batch of any size."""
        program = self._program(len(arrays["tokens"]))
        whole = padded(program.form, arrays, program.config.train.global_batch)
        with self._compiling(function.__name__, program.config.train.global_batch):
            return function(program)(self._params, program.put_batch(whole, program.local_rows))

    def _compiling(self, what: str, rows: int) -> AbstractContextManager[None]:
        """A context that announces compiling the first time that `what` is computed for this many rows."""
        if (what, rows) in self._called:
            return contextlib.nullcontext()
        self._called.add((what, rows))
        return progress(f"compiling {what}")

    def _program(self, rows: int) -> Program:
        """The program for batches of at least `rows` rows; cached."""
        train, shards = self.config.train, self.config.mesh.row_shards
        microbatch = min(train.microbatch, -(-rows // shards))
        size = -(-rows // (shards * microbatch)) * shards * microbatch
        if size not in self._forward:
            train = dataclasses.replace(train, global_batch=size, microbatch=microbatch)
            self._forward[size] = Program(dataclasses.replace(self.config, train=train), self.program.mesh)
        return self._forward[size]

    def _decoder(self, options: GenerateOptions, params: Any) -> Decoder:
        sampling = Sampling.of(options)
        if not FAMILIES[self.config.model.family].continues_text or self.config.model.head != "pretraining":
            raise UserError(f"generate: {self.config.model.family} does not predict the next token; valid: a decoder")
        if self.config.mesh.pipe > 1 or self.config.optimizer.zero == 3:
            raise UserError(
                "generate: the mesh has a pipeline, or the weights are sharded by ZeRO-3; valid: "
                "mesh.pipe 1, optimizer.zero 0 or 1"
            )
        ends = frozenset(self.tokenizer.ends if self.tokenizer else [])  # `batches` may have set the tokenizer since
        key = sampling, ends, options.logprobs
        if key in self._decoders:
            self._decoders[key].renew(params)
        else:
            self._decoders = {key: Decoder(self.program, params, sampling, ends, logprobs=options.logprobs)}
        return self._decoders[key]

    def _check_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise UserError("the model has no tokenizer; valid: tokenizer.path, batches(…), or token ids")
        return self.tokenizer
