"""`megajax plan`, and with `--search`: what it prints and draws."""

import json
import signal
from pathlib import Path

import pytest
from processes import Commands

from megajax.__main__ import main
from megajax.commands import plan
from megajax.core.errors import UserError
from megajax.host.signals import Stopped, stop_signals
from megajax.plan import compiled, search
from megajax.plan.costs import StepCost
from megajax.plan.page import is_page
from megajax.plan.traced import step_cost

pytestmark = pytest.mark.slow

SMALL = "gpt2-355m --model.num-layers 4 --model.num-heads 4 --model.vocab-size 500 --model.sequence-length 64"
SMALL += " --precision fp32 --model.dropout 0"  # what compiles soonest
STEP = f"{SMALL} --model.hidden-size 64 --train.global-batch 16 --train.microbatch 2 --train.remat none"
SEARCH = f"{SMALL} --model.hidden-size 256 --train.global-batch 8 --train.remat none --optimizer.zero 1 --mesh.tensor 1"
SEARCH += " --search --devices 2"


@pytest.fixture(autouse=True)
def _devices_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests have eight simulated devices already."""
    monkeypatch.setattr(plan, "imagine_devices", lambda config, count=None: None)


def planned(capsys: pytest.CaptureFixture[str], line: str) -> str:
    main(["plan", *line.split()])
    return capsys.readouterr().out


def test_json(capsys) -> None:
    """The last line is one object; what was compiled is what was predicted."""
    line = f"{STEP} --model.num-layers 2 --mesh.tensor 2 --train.ema 0.9 --gpu a100 --json"
    found = json.loads(planned(capsys, line).splitlines()[-1])
    assert found["gpu"] == "a100" and found["devices"] == 2 and found["fits"]
    memory, compiled = found["memory"], found["compiled"]
    parts = set(memory) - {"total", "usable", "of_gpu"}
    assert memory["total"] == sum(memory[part] for part in parts) and len(parts) == 14
    assert compiled["communication_as_predicted"] is True and "simulated CPU devices" in compiled["compiler"]
    state = sum(memory[part] for part in ("weights", "main_weights", "moments", "average", "batch"))
    assert 0 <= compiled["state"] - state < 1024
    assert {tuple(each["axes"]) for each in found["communication"]} == {("tensor",)}
    assert all(found[name] > 0 for name in ("step_seconds", "tokens_per_second", "mfu", "flops", "peak_bytes"))


def test_a_pipe(capsys) -> None:
    found = json.loads(planned(capsys, f"{STEP} --mesh.pipe 4 --mesh.data 2 --no-compile --json").splitlines()[-1])
    assert found["compiled"] is None and 0 < found["bubble"] < 1 and found["memory"]["p2p_transfers"] > 0
    assert {each["kind"] for each in found["communication"]} >= {"all-reduce", "permute", "reduce-scatter"}


@pytest.mark.full
@pytest.mark.parametrize("mesh", [(64, 1, 8), (8, 8, 8)])
def test_the_largest_of_the_paper_on_512_devices(commands: Commands, mesh: tuple[int, int, int]) -> None:
    """A process of its own, as a user starts it."""
    flags = [f"--mesh.{axis}={size}" for axis, size in zip(("data", "pipe", "tensor"), mesh, strict=True)]
    found = json.loads(commands.run_process("-m", "megajax", "plan", "gpt2-8.3b", *flags, "--json").ok())
    assert found["devices"] == 512 and found["compiled"]["communication_as_predicted"]
    assert found["peak_bytes"] < 2 * 2**30
    assert found["compiled"]["predicted_temporaries"] == pytest.approx(found["compiled"]["temporaries"], rel=0.15)


def test_figures_and_a_picture_of_a_search(capsys, tmp_path: Path) -> None:
    picture = tmp_path / "search.png"
    page = tmp_path / "search.html"
    asked = f"--best 3 --all --no-compile --json --plot {picture} --html {page} --tokens 2B --price 3"
    figures = json.loads(planned(capsys, f"{SEARCH} {asked}"))
    assert figures["best"][0]["cost"] == 3 * figures["best"][0]["gpu_hours"] and is_page(page)
    assert figures["devices"] == 2 and len(figures["best"]) == 3 and picture.read_bytes()[1:4] == b"PNG"
    assert {each["flags"]["optimizer.zero"] for each in figures["best"]} == {1}
    assert all("--train.global-batch 8" in each["command"] for each in figures["best"])
    planned(capsys, f"{SEARCH} --no-compile --plot {picture}")  # replaces its own


def test_a_search_for_several_gpus(capsys, tmp_path: Path) -> None:
    """Each as alone, one after the other, on one page."""
    page, several = tmp_path / "search.html", f"{SEARCH} --no-compile --gpu h100,h200"
    alone = [planned(capsys, f"{SEARCH} --no-compile --gpu {gpu}").strip() for gpu in ("h100", "h200")]
    assert planned(capsys, f"{several} --html {page}").strip() == "\n\n".join(alone)
    figures = json.loads(planned(capsys, f"{several} --json"))
    assert list(figures) == ["h100", "h200"] and figures["h200"]["gpu"] == "h200"
    assert "2 H100s or H200s: " in page.read_text(encoding="utf-8")
    main(["plan", *f"{several} --margin 70.39".split()])
    out, told = capsys.readouterr()
    assert "on 2 H200s, of which" in out and "H100" not in out
    assert "warning: --devices 2 --gpu h100: no configuration fits in memory" in told


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--price 2", "--price without --tokens; valid: both, such as --tokens 15T --price 2"),
        ("--tokens 3X", "--tokens"),
        ("--margin 1000", "--margin 1000: leaves no memory; valid: less than 70.4 GiB"),
        ("--gpu h100,h200", "--gpu h100,h200 without --search; valid: one GPU, or --devices N"),
        ("--gpu h100,h200 --search --plot a.png", "--gpu h100,h200 with --plot; valid: one GPU"),
        ("--html a.html", "--html without --search; valid: --search, or without --html"),
        ("--all", "--all without --search; valid: --search, or without --all"),
        ("--search --html a.png", "--html a.png: not the name of a page; valid: a name that ends in .html"),
        ("--search --html {notes}", "already exists and is not a page of megajax plan; valid: another name"),
    ],
)
def test_mistakes(flags: str, said: str, tmp_path: Path) -> None:
    notes = tmp_path / "notes.html"
    notes.write_text("mine")
    with pytest.raises(UserError) as caught:
        main(["plan", "gpt2-355m", *flags.format(notes=notes).split()])
    assert said in str(caught.value) and notes.read_text() == "mine"


def test_an_interrupted_search_ranks_what_it_has_tried(capsys, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It compiles nothing and draws nothing, and ends with the signal's code."""
    monkeypatch.setattr(stop_signals, "number", 0)

    def interrupted(*of: object, **how: object) -> StepCost:
        stop_signals.number = signal.SIGINT
        return step_cost(*of, **how)

    monkeypatch.setattr(search, "step_cost", interrupted)
    with pytest.raises(Stopped, match="stopped by SIGINT"):
        planned(capsys, f"{SEARCH} --plot {tmp_path / 'a.png'}")
    first, *_, last = capsys.readouterr().out.splitlines()
    assert first.startswith("partial result, interrupted after ") and 0 < int(first.split()[4]) < 10
    assert last.startswith("megajax train gpt2-355m ") and not (tmp_path / "a.png").exists()


def test_an_interrupted_compilation_leaves_the_estimate(capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise Stopped(signal.SIGTERM)

    monkeypatch.setattr(compiled.Compilation, "__init__", interrupted)
    with pytest.raises(Stopped, match="stopped by SIGTERM"):
        planned(capsys, STEP)
    assert "not compiled; analytical estimate" in capsys.readouterr().out


@pytest.mark.full
def test_the_best_of_a_search_is_compiled(capsys) -> None:
    lines = planned(capsys, f"{SEARCH} --best 2").splitlines()
    compiled = [line for line in lines if "simulated CPU devices" in line]
    assert compiled[0].startswith("check of number 1, ") and all(" (fits in 66.9); " in line for line in compiled)
    assert lines[-1].startswith("megajax train gpt2-355m ")
