"""What a run's first start on a GPU finds wrong is kept in its directory. Two answers stand for what a GPU finds."""

import dataclasses
import json
from types import SimpleNamespace

import pytest
from tiny import tiny_config, tiny_program

from megajax.core.backend import CPU, HOPPER
from megajax.runs import forms
from megajax.runs.ownership import FORMS
from megajax.start.form_comparison import FormComparison

WITHOUT = {"cudnn": {"attention": ("kernel", "blocks")}, "kernel": {"attention": ("cudnn", "blocks")}}
WITHOUT["experts"] = {"expert_kernel": False}


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Starts a run, of whose forms some have problems; returns the backend, what was compared, and what was said."""

    def start(problems=(), what="2 x 64 tokens"):
        tried = []

        def problem(self, form):
            tried.append("experts" if self.name == "experts" else form)
            found = dict(problems).get(tried[-1], "")
            if found is KeyboardInterrupt:
                raise KeyboardInterrupt
            return found

        def comparison(name, *names):
            return FormComparison(name, what, (), dict.fromkeys(names, HOPPER), HOPPER, lambda backend: None, list)

        monkeypatch.setattr(FormComparison, "problem", problem)
        compared = [comparison("attention", "cudnn", "kernel"), comparison("experts", "kernel")]
        monkeypatch.setattr(forms, "comparisons", lambda program: compared)
        program = SimpleNamespace(backend=HOPPER)
        return forms.backend_without_wrong_forms(program, tmp_path), tried, capsys.readouterr().out

    return start


@pytest.mark.parametrize("form", WITHOUT)
def test_a_wrong_form_is_left_out_and_named_at_every_start(run, tmp_path, form):
    backend, tried, said = run({form: "wrong here: a row"})
    assert backend == dataclasses.replace(HOPPER, **WITHOUT[form]) and tried == [*WITHOUT]
    name = "experts: kernel" if form == "experts" else f"attention: {form}"
    line = f"{name} is left out: wrong here: a row ({tmp_path / FORMS})\n"
    assert line in said and said.count(" is right, 2 x 64 tokens\n") == 2
    assert run() == (backend, [], line)
    assert run(what="2 x 32 tokens")[:2] == (HOPPER, tried)


def test_a_form_that_ended_a_start_is_left_out(run):
    """A kernel may take the process with it: the next start names it, and goes on with the others."""
    with pytest.raises(KeyboardInterrupt):
        run({"kernel": KeyboardInterrupt})
    backend, tried, said = run()
    assert backend.attention == ("cudnn", "blocks") and tried == ["experts"]
    assert "attention: kernel is left out: an earlier start ended while it was tried" in said


OLDER = {"attention": {"of": {"device": "cpu", "what": "2 x 64 tokens", "forms": ["cudnn"]}, "taken": "cudnn"}}


@pytest.mark.parametrize("content", ["", "[]", '{"attention": 3}', json.dumps(OLDER)])
def test_what_is_kept_may_be_broken_or_older(run, tmp_path, content):
    """All is compared then, as if there were nothing."""
    (tmp_path / FORMS).write_text(content)
    assert run()[1] == [*WITHOUT] and run()[1] == []


def test_nothing_is_compared_on_cpus(tmp_path):
    assert forms.backend_without_wrong_forms(tiny_program(tiny_config()), tmp_path) == CPU
    assert not (tmp_path / FORMS).exists()
