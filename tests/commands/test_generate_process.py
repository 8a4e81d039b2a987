"""`megajax generate` as a process: text on standard output, notes and mistakes on standard error, exit codes."""

import pytest
from processes import Commands, Run, contents


@pytest.mark.full
def test_the_text_alone_is_standard_output(commands: Commands, straight: Run) -> None:
    """What was sampled at the end of training; the run is only read."""
    before = contents(straight.folder)
    line = ("-m", "megajax", "generate", "--checkpoint", straight.folder, "--prompt", "the end", "--max-tokens", 8)
    done = commands.run_process(*line)
    assert done.code == 0, (done.out, done.err)
    sampled = straight.finished.out.partition("a sample:\n")[2]
    assert sampled.startswith(done.out) and done.out.startswith("the end")
    assert len(done.err.splitlines()) == 1 and "tokens/s" in done.err
    assert contents(straight.folder) == before


@pytest.mark.full
def test_a_mistake_ends_with_two(commands: Commands, straight: Run) -> None:
    done = commands.run_process("-m", "megajax", "generate", "--checkpoint", straight.folder, "--prompt", "a" * 1000)
    assert done.code == 2 and done.out == ""
    assert len(done.err.splitlines()) == 1 and "valid: at most 32" in done.err
