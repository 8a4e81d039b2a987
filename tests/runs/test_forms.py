"""What a run's start on a GPU measures is kept in its directory. On CPUs two forms of blocks stand for it."""

import dataclasses
import json

import pytest
from tiny import tiny_config, tiny_program

from megajax.core.backend import BLOCKS, CPU, HOPPER, candidates_of
from megajax.core.program import measured
from megajax.core.program.program import Program
from megajax.core.program.synthetic import random_batch
from megajax.runs.forms import measured_backend
from megajax.runs.ownership import FORMS

SIZES = {"attention": {f"blocks of {size}": {"attention": BLOCKS, "query_block": size} for size in (16, 32)}}


class Samples:
    """The rows of a random batch."""

    def __init__(self, config):
        self.batch = random_batch(config, 0)

    def __getitem__(self, number):
        return {name: array[number] for name, array in self.batch.items()}


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Starts a run with what its `answer` finds; returns the backend and what was said."""

    def start(taken="blocks of 32", sizes=SIZES, backend=CPU, **options):
        def answered(question, seconds):
            if taken is KeyboardInterrupt:
                raise KeyboardInterrupt
            return measured.FormAnswer(taken, {"blocks of 16": 2.0, "blocks of 32": 1.0}, {})

        monkeypatch.setattr("megajax.runs.forms.answer", answered)
        config = dataclasses.replace(tiny_config(sequence_length=64, dropout=0.1, num_layers=1), **options)
        program = Program(config, tiny_program(config).mesh, backend)
        backend = measured_backend(program, Samples(config), tmp_path, sizes)
        return backend, capsys.readouterr().out

    start.file = tmp_path / FORMS
    return start


def test_a_choice_is_kept_and_not_repeated(run):
    """Nor where another start would find another form; but with other forms to compare it is measured anew."""
    backend, said = run()
    assert backend == dataclasses.replace(CPU, query_block=32)
    assert said == (
        "attention: blocks of 32 is taken; compared, 1 x 64 tokens, 8 heads of 3, forward and backward: blocks of 16 "
        "2.000 ms, blocks of 32 1.000 ms\n"
    )
    again, said = run(taken="blocks of 16")
    assert again == backend and said.startswith("attention: blocks of 32 is taken, as measured before")
    three = {"attention": SIZES["attention"] | {"blocks of 8": {"attention": BLOCKS, "query_block": 8}}}
    assert run("blocks of 16", three)[0].query_block == 16


def test_what_is_kept_may_be_broken(run):
    """It is measured again then, as if there were nothing."""
    for content in ("", "[]", '{"attention": 3}', json.dumps({"attention": {"taken": "blocks of 32"}})):
        run.file.write_text(content)
        assert run(taken="blocks of 16")[0].query_block == 16


def test_a_start_that_ended_while_it_measured_is_no_trap(run):
    """A kernel may take the process with it: the next start takes the default, and says why."""
    with pytest.raises(KeyboardInterrupt):
        run(taken=KeyboardInterrupt)
    backend, said = run()
    assert backend == CPU and "the default is taken, because an earlier start died while measuring" in said


def test_our_kernel_is_not_taken_untried(run):
    """Where nothing is found to be right, on GPUs that have it."""
    assert run(taken="", backend=HOPPER)[0].attention == ("cudnn", "blocks")


def test_where_nothing_is_measured(run):
    """On CPUs, where there are no candidates, not a file is written; nor with --deterministic, which says so."""
    assert candidates_of(tiny_program(tiny_config()).mesh) == {}
    assert run(sizes={}) == (CPU, "") and not run.file.exists()
    backend, said = run(deterministic=True)
    assert backend == CPU and "not measured, for --deterministic" in said and not run.file.exists()
