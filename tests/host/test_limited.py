"""The process with limits of memory and time: what it answers, and how it ends."""

import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from megajax.host import limited
from megajax.host.limited import ExceededError, call

CALLER = """
import os, signal
from megajax.host.limited import call
print(call("os:getpid", what="it"), flush=True)
{end}
"""


def test_one_process_answers_many_calls():
    first = call("os:getpid", what="it")
    assert first != os.getpid()
    assert call("json:loads", '["\\ud800", 1.5, null]', what="it") == ["\ud800", 1.5, None]
    with pytest.raises(RuntimeError, match=r"^Traceback (.|\n)*JSONDecodeError"):
        call("json:loads", "[", what="it")
    assert call("os:getpid", what="it") == first


@pytest.mark.parametrize(
    ("function", "arguments", "problem"),
    [
        ("operator:mul", ["a", 10**10], "takes more than 256 MiB of memory"),
        ("math:factorial", [10**7], "takes more than 0.2 seconds"),
        ("os:abort", [], "takes more than 256 MiB of memory"),
        ("os:_exit", [3], r"ends its process \(exit code 3\)"),
        ("os:_exit", [0], r"ends its process \(exit code 0\)"),
        ("signal:raise_signal", [signal.SIGSEGV], r"ends its process \(SIGSEGV\)"),
    ],
)
def test_a_call_that_exceeds_a_limit(monkeypatch, function, arguments, problem):
    """The next call has a new process, whose limits are the same again."""
    match = f"^x: the template {problem}; valid: one that does not$"
    with monkeypatch.context() as shorter, pytest.raises(ExceededError, match=match):
        if "seconds" in problem:  # what meets another limit has all the time that a slow machine takes
            shorter.setattr(limited, "SECONDS", 0.2)
        call(function, *arguments, what="x: the template")
    assert call("operator:mul", "a", 3, what="it") == "aaa"


def test_every_call_has_the_whole_time(monkeypatch):
    monkeypatch.setattr(limited, "SECONDS", 0.2)
    first = call("os:getpid", what="it")
    while call("time:process_time", what="it") < 0.5:
        call("operator:countOf", list(range(10_000)), -1, what="it")
    assert call("os:getpid", what="it") == first


def test_an_interrupted_call_does_not_answer_the_next_one(monkeypatch):
    def interrupted(_):
        raise KeyboardInterrupt

    call("os:getpid", what="it")
    with monkeypatch.context() as patched:
        patched.setattr(limited, "_receive", interrupted)
        with pytest.raises(KeyboardInterrupt):
            call("operator:add", 1, 2, what="it")
    assert call("operator:add", 3, 4, what="it") == 7


def test_a_child_that_has_waited_too_long_is_replaced():
    first = call("os:getpid", what="it")
    limited._child._channel.shutdown(socket.SHUT_WR)  # it ends as if it had waited
    assert call("os:getpid", what="it") != first


@pytest.mark.parametrize("end", ["os.kill(os.getpid(), signal.SIGKILL)", "os.fork()"])
def test_it_ends_with_its_parent(end):
    """Which may have no standard input and standard error."""
    command = [sys.executable, "-W", "error", "-c", CALLER.format(end=end)]
    if "kill" in end:
        command = ["bash", "-c", 'exec "$@" 0<&- 2>&-', "bash", *command]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stderr == ""
    for _ in range(500):
        if not os.path.exists(f"/proc/{int(done.stdout)}"):
            return
        time.sleep(0.02)
    pytest.fail("the child is still there")
