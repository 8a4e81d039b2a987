"""`megajax plan --search`: what it prints, draws and refuses."""

import json
from pathlib import Path

import pytest

from megajax.cli import main
from megajax.commands import plan_search as command
from megajax.errors import UserError

SMALL = ["--model.num-layers", "4", "--model.hidden-size", "256", "--model.num-heads", "4", "--model.vocab-size", "500"]
SMALL += ["--model.sequence-length", "64", "--train.global-batch", "8", "--optimizer.zero", "1"]
SMALL += ["--precision", "fp32", "--model.dropout", "0"]


@pytest.fixture(autouse=True)
def _devices_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests have eight simulated devices already."""
    monkeypatch.setattr(command, "imagine_devices", lambda *_: None)


def found(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    main(["plan", "gpt2-355m", *SMALL, "--search", *arguments])
    return capsys.readouterr().out


def test_figures_and_a_picture(capsys, tmp_path: Path):
    picture = tmp_path / "search.png"
    out = found(capsys, "--devices", "2", "--best", "3", "--no-compile", "--json", "--plot", str(picture))
    figures = json.loads(out)
    assert figures["devices"] == 2 and len(figures["best"]) == 3 and picture.read_bytes()[1:4] == b"PNG"
    assert {each["flags"]["optimizer.zero"] for each in figures["best"]} == {1}
    assert all("--train.global-batch 8" in each["command"] for each in figures["best"])
    found(capsys, "--devices", "2", "--no-compile", "--plot", str(picture))  # replaces its own


@pytest.mark.full
def test_the_best_two_are_compiled(capsys):
    lines = found(capsys, "--devices", "2", "--best", "2").splitlines()
    compiled = [line for line in lines if "simulated CPU devices" in line]
    assert [line.split(" by ")[0] for line in compiled] == ["number 1", "number 2"]
    assert lines[-1].startswith("megajax train gpt2-355m ")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--devices", "2"], "--devices without --search; valid: --search, or without --devices"),
        (["--search", "--devices", "0"], "--devices 0"),
        (["--search", "--devices", "2", "--plot", "a.pdf"], "unknown kind of picture; valid: a name that ends in .png"),
        (["--search", "--devices", "2", "--plot", __file__], "unknown kind of picture"),
        (["--search", "--devices", "2", "--gpu", "h1"], "--gpu 'h1'; valid: h100, h200, a100, v100, b200"),
        (["--search", "--devices", "1009"], "--devices 1009: no mesh of so many"),
        (["--search", "--devices", "2", "--gpu", "v100", "--precision", "bf16"], "which has no such products"),
    ],
)
def test_bad_input_is_one_line(arguments, said):
    with pytest.raises(UserError) as error:
        main(["plan", "gpt2-355m", *arguments])
    assert said in str(error.value) and "\n" not in str(error.value)


def test_another_picture_is_not_replaced(tmp_path: Path):
    other = tmp_path / "other.png"
    other.write_bytes(b"\x89PNG")
    with pytest.raises(UserError, match=r"is there already and is no picture of megajax plan; valid: another name"):
        main(["plan", "gpt2-355m", *SMALL, "--search", "--devices", "2", "--no-compile", "--plot", str(other)])
    assert other.read_bytes() == b"\x89PNG"
