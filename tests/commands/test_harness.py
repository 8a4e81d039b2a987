"""A run in EleutherAI's `lm-eval` harness: its figures are those of `eval.py`."""

import json
from pathlib import Path

import pytest
from processes import ROOT, Commands, Run

pytestmark = pytest.mark.peer

TASK = """\
task: last_word
dataset_path: json
dataset_kwargs:
  data_files: {{test: {file}}}
test_split: test
output_type: loglikelihood
doc_to_text: "{{{{text.split(' ')[:-1] | join(' ')}}}}"
doc_to_target: "{{{{' ' + text.split(' ')[-1]}}}}"
metric_list:
  - {{metric: perplexity, aggregation: perplexity, higher_is_better: false}}
  - {{metric: acc, aggregation: mean, higher_is_better: true}}
"""

SCRIPT = """\
import json, sys
import lm_eval
from lm_eval.api.instance import Instance
from lm_eval.tasks import TaskManager
from lm_eval.api.registry import get_model
import megajax.evaluation.harness
from megajax.core.errors import UserError
from megajax.host.ending import run

def main():
    run_dir, tasks = sys.argv[1:]
    model_args = f"checkpoint={run_dir},step=20,simulate_devices=2,mesh.pipe=2"  # as simple_evaluate makes it by name
    model = get_model("megajax").create_from_arg_string(model_args, {"batch_size": 4, "device": None})
    found = lm_eval.simple_evaluate(
        model=model, tasks=["last_word"], bootstrap_iters=0,
        task_manager=TaskManager(include_path=tasks, include_defaults=False),
    )
    figures = found["results"]["last_word"]
    ask = lambda kind, *args: Instance(request_type=kind, doc={}, arguments=args, idx=0)
    text = "The end of it"
    written = model.generate_until([ask("generate_until", "the end", {"until": ["zzz"], "max_gen_toks": 20})])[0]
    stop = written[5:8]
    stopped = model.generate_until([ask("generate_until", "the end", {"until": [stop], "max_gen_toks": 20})])[0]
    other = get_model("megajax")(run_dir, step=20, **{"simulate_devices": 2, "mesh.tensor": 2})
    drawn = {"temperature": 0.9, "top_k": 40, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.2, "num_beams": 1}
    settings = ({"do_sample": False, "top_p": 0.5}, {"do_sample": True, **drawn})
    long = [ask("generate_until", "the end " * 100, {"max_gen_toks": 20, **each}) for each in settings]
    print(json.dumps({
        "long": [each.generate_until(long) for each in (model, other)],
        "perplexity": figures["perplexity,none"], "accuracy": figures["acc,none"],
        "rolling": model.loglikelihood_rolling([ask("loglikelihood_rolling", text)])[0],
        "after_nothing": model.loglikelihood([ask("loglikelihood", "", text)])[0][0],
        "merged": model.loglikelihood([ask("loglikelihood", *pair) for pair in (("th", "e"), ("t", "h"), ("in", "g"))]),
        "written": written, "stop": stop, "stopped": stopped,
        "tokens": len(model.tok_encode(written)),
        "greedy": model.loglikelihood([ask("loglikelihood", "the end", written)])[0][1],
    }))
    try:
        model.loglikelihood([ask("loglikelihood", "the end", "")])
    except UserError as error:
        print(error, file=sys.stderr)
    model.generate_until([ask("generate_until", "the end", {"num_beams": 3})])

run(main)
"""


def test_the_harness_sees_what_eval_sees(
    commands: Commands, straight: Run, corpus: Path, tmp_path: Path, monkeypatch
) -> None:
    """By name and flags, on a pipe of two; generation stops at a text and refuses what it cannot do."""
    pytest.importorskip("lm_eval", reason="the extra `eval` is not installed")
    words = corpus.read_text(encoding="utf-8").split()
    file = tmp_path / "passages.jsonl"
    passages = [" ".join(words[at : at + 13]) for at in range(0, 1000, 20)]
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in passages))
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "last_word.yaml").write_text(TASK.format(file=file))
    (tmp_path / "script.py").write_text(SCRIPT)
    offline = {"HF_DATASETS_OFFLINE": "1", "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    for name, value in offline.items():
        monkeypatch.setenv(name, value)
    done = commands.run_process(tmp_path / "script.py", straight.folder, tmp_path / "tasks")
    assert done.code == 2 and "num_beams; valid: until" in done.err.splitlines()[-1], (done.out, done.err)
    assert "loglikelihood: '' after 'the end' has no tokens to score; valid: continuations with a text\n" in done.err
    found = json.loads(done.out.splitlines()[-1])
    expected = commands.evaluate("lambada", straight.folder, "--data", file)
    assert found["perplexity"] == pytest.approx(expected["perplexity"], rel=1e-6)
    assert found["accuracy"] == expected["accuracy"]
    figures = commands.evaluate("harness", straight.folder, "--include-path", tmp_path / "tasks", "last_word")
    assert figures["last_word"]["acc,none"] == expected["accuracy"]
    assert found["rolling"] == pytest.approx(found["after_nothing"], rel=1e-6)
    assert found["rolling"] < 0
    assert all(score < 0 for score, _ in found["merged"]), "one token has both: the continuation alone"
    assert found["greedy"] or found["tokens"] != 20, "unless the text has another tokenization"
    on_a_pipe, without = found["long"]
    assert on_a_pipe == without and on_a_pipe[0] != on_a_pipe[1], "a prompt longer than the context"
    assert found["stopped"] == found["written"].split(found["stop"])[0]
