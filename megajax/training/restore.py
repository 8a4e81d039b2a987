"""The state that a start of a run goes on with."""

from pathlib import Path

from megajax.phases import phase
from megajax.processes import say
from megajax.program.program import Program
from megajax.program.state import TrainState
from megajax.runs.checkpoint import Checkpoints
from megajax.runs.init import first_state


def restored(checkpoints: Checkpoints, program: Program, run_dir: Path) -> TrainState:
    """The newest state of a run that can be read, or the first one; says which it is."""
    with phase("preparing the state"):
        state, step, damaged = checkpoints.restore_newest()
        for message in damaged:
            say(f"damaged checkpoint, the one before it is used: {message}")
        if state is None:
            state, told = first_state(program)
            if program.config.init or not program.config.pretrains:
                say(told)
            return state
        checkpoints.set_aside(after=step)
        say(f"resumed from step {step} of {run_dir}")
        return state
