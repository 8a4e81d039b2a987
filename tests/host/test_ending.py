"""The end of a process: codes, the one last line, signals; and what a process hears of process 0's end."""

import os
import pty
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from subprocess import PIPE

import pytest

from megajax.host import signals
from megajax.host.relay import Relay

ROOT = Path(__file__).parents[2]
BEGIN = """\
import sys, time
from megajax.core.errors import UserError
from megajax.host import ending, phases, signals, streams
"""
SLEEP = "print('up', flush=True); end = time.monotonic() + 60\nwhile time.monotonic() < end: time.sleep(0.01)\n"


def start(main: str, *by: str, out: int = PIPE, err: int = PIPE, stdin: int | None = None) -> subprocess.Popen[str]:
    """A process that runs the body of a function as a command's; who runs the tests may ignore SIGHUP."""
    body = "".join(f"    {line}\n" for line in main.splitlines())
    hears = "" if "nohup" in by else "import signal; signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"
    code = f"{hears}{BEGIN}def main():\n{body}ending.run(main)\n"
    line = [*by, sys.executable, "-c", code]
    return subprocess.Popen(line, cwd=ROOT, stdin=stdin, stdout=out, stderr=err, text=True)


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    error = process.communicate(timeout=60)[1]
    return process.returncode, error


def test_signals_to_python_code_are_exceptions_and_its_own_handlers_stay(capfd: pytest.CaptureFixture[str]) -> None:
    got: list[int] = []
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # else ignored in a background process
    signal.signal(signal.SIGHUP, lambda number, _: got.append(number))
    try:
        for numbers, kind, said, second in (
            ((signal.SIGINT,), KeyboardInterrupt, "stopped by SIGINT here", "another Ctrl-C is a KeyboardInterrupt"),
            ((signal.SIGINT, signal.SIGINT), KeyboardInterrupt, "", ""),
            ((signal.SIGHUP, signal.SIGTERM), SystemExit, "143", "a second signal ends the run at once"),
        ):
            capfd.readouterr()
            with pytest.raises(kind) as ended, signals.stop_signals.handled(in_python=True):
                with signals.stop_signals.deferred("soon"):
                    for number in numbers:
                        signal.raise_signal(number)
                    began, told = time.monotonic(), ""
                    while not told and time.monotonic() < began + 20:
                        time.sleep(0.01)
                        told = capfd.readouterr().err
                    assert told == f"{numbers[-1].name}: soon; {second}\n"
                raise signals.Stopped(numbers[-1], " here").in_python()
            assert str(ended.value) == said
        assert got == [signal.SIGHUP] and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        for _ in range(50):  # the next block hears nothing of it
            stopped = signals.stop_signals.handled(in_python=True), signals.stop_signals.deferred("soon")
            with pytest.raises(KeyboardInterrupt), stopped[0], stopped[1]:
                signal.raise_signal(signal.SIGINT)
                signal.raise_signal(signal.SIGINT)
            with signals.stop_signals.handled(in_python=True):
                time.sleep(0.001)
                assert signals.stop_signals.number == 0
    finally:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_with_128_and_its_number(number: signal.Signals) -> None:
    process = start(SLEEP)
    assert process.stdout and process.stdout.readline() == "up\n"
    process.send_signal(number)
    assert finish(process) == (128 + number, f"stopped by {number.name}; interrupted\n")


def test_a_working_directory_that_was_removed() -> None:
    main = "import os, tempfile\nos.chdir(gone := tempfile.mkdtemp())\nos.rmdir(gone)\nos.path.abspath('run')"
    told = "error: the working directory was removed; valid: a directory that exists\n"
    assert finish(start(main)) == (2, told)


def test_a_signal_that_python_loses_comes_again() -> None:
    """What is raised in a callback of the garbage collector, as JAX has one, reaches nobody."""
    body = "".join(f"    {part}\n" for part in SLEEP.replace("60", "1").splitlines())
    lose = f"import weakref\ndef lost(_):\n{body}class X: pass\nx = X(); r = weakref.ref(x, lost); del x\n"
    process = start(lose + SLEEP.partition("; ")[2])
    assert process.stdout and process.stdout.readline() == "up\n"
    process.send_signal(signal.SIGINT)
    assert finish(process) == (130, "stopped by SIGINT; interrupted\n")


def test_a_signal_that_has_to_wait_says_for_what() -> None:
    """C does not hear of it, as XLA while it compiles; nobody says so of what ends within half a second."""
    kill = "import hashlib, os, threading; threading.Timer(0.1, lambda: os.kill(os.getpid(), 15)).start()\n"
    process = start(f"{kill}with phases.phase('compiling'): hashlib.pbkdf2_hmac('sha256', b'', b'', 5_000_000)")
    said = "SIGTERM: the command ends after the current phase, compiling; a second signal ends the run at once\n"
    assert finish(process) == (143, f"{said}stopped by SIGTERM; interrupted\n")


def test_a_lost_terminal() -> None:
    """SIGHUP comes from the shell and from the kernel, and what is printed goes nowhere."""
    prints = SLEEP.replace("60", "1").replace("time.sleep", "print('.', flush=True); time.sleep")
    body = "".join(f"    {part}\n" for part in prints.splitlines())
    body = f"streams.output.is_optional()\nwith signals.stop_signals.deferred('soon'):\n{body}"
    master, slave = pty.openpty()
    process = start(f"{body}raise signals.Stopped(signals.stop_signals.number)", out=slave, err=slave)
    os.close(slave)
    assert os.read(master, 2) == b"up"
    os.close(master)
    for _ in range(3):
        process.send_signal(signal.SIGHUP)
        time.sleep(0.1)
    assert process.wait(60) == 129


def test_nohup() -> None:
    process = start(SLEEP, "nohup", stdin=subprocess.DEVNULL)
    assert process.stdout and process.stdout.readline() == "up\n"
    process.send_signal(signal.SIGHUP)
    time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    assert finish(process) == (143, "stopped by SIGTERM; interrupted\n")


def test_a_signal_while_a_module_is_imported_raises_nothing_there(tmp_path: Path) -> None:
    """Of the module that is loaded it could be C++."""
    kill = "    os.kill(os.getpid(), signal.SIGTERM)\n    time.sleep(60)\nexcept BaseException:\n    os._exit(77)\n"
    (tmp_path / "slow.py").write_text(f"import os, signal, time\ntry:\n{kill}")
    process = start(f"sys.path.insert(0, {str(tmp_path)!r})\nimport slow")
    assert finish(process) == (143, "stopped by SIGTERM; interrupted\n")


@pytest.mark.parametrize("command", ["train.py", "eval.py", "-mmegajax"])
def test_ctrl_c_before_anything_is_imported(command: str, tmp_path: Path) -> None:
    """The first module that a command imports is as good as any other."""
    (tmp_path / "tempfile.py").write_text("import os, signal, time\nos.kill(os.getpid(), 2)\ntime.sleep(60)\n")
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    done = subprocess.run([sys.executable, command], cwd=ROOT, env=environment, stderr=PIPE, timeout=60)
    assert (done.returncode, done.stderr) == (-signal.SIGINT, b"")  # 130 in a shell


def test_workers_say_nothing_of_a_signal_to_all() -> None:
    """Ctrl-C, while they start: their imports would end with traces."""
    work = "with processes(2) as workers: list(workers.run('', time.sleep, ((0.1,) for _ in range(200))))"
    process = start(f"from megajax.preparation.workers import processes\nprint('up', flush=True)\n{work}", "setsid")
    assert process.stdout and process.stdout.readline() == "up\n"
    time.sleep(0.3)
    os.killpg(process.pid, signal.SIGINT)
    assert finish(process) == (130, "stopped by SIGINT; interrupted\n")


def test_a_deferred_signal_waits_and_a_second_does_not() -> None:
    body = "".join(f"    {part}\n" for part in SLEEP.splitlines())
    inner = "    with signals.stop_signals.deferred('inner'): pass"
    process = start(f"with signals.stop_signals.deferred('first this'):\n{inner}\n{body}")
    assert process.stdout and process.stdout.readline() == "up\n"
    process.send_signal(signal.SIGTERM)
    assert process.stderr and process.stderr.readline() == "SIGTERM: first this; a second signal ends the run at once\n"
    time.sleep(0.3)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert finish(process) == (130, "ended at once by a second signal, SIGINT\n")


@pytest.mark.parametrize(
    ("main", "code", "line"),
    [
        ("pass", 0, ""),
        ("raise UserError('--x 3; valid: 4')", 2, "error: --x 3; valid: 4"),
        ("raise OSError(28, 'No space left', '/a/b')", 1, "error: /a/b: No space left; the traceback is in"),
        ("raise OSError(2, 'None', '/a/' + 'b' * 70000)", 1, "error: /a/bbbbb"),
        ("raise UserError('--x ' + 'b' * 70000 + '; valid: 4')", 2, "error: --x bbbbb"),
        ("[[0] * 10**14]", 1, "error: out of memory; the traceback is in"),
        (
            "raise RuntimeError('UNKNOWN: Gloo all-reduce failed: [pair.cc] Connection closed by peer [::1]:3')",
            1,
            "error: lost another process, which was killed or ended first; rerun the command\n",
        ),
        (
            "import tempfile; tempfile.gettempdir = lambda: open('/no/folder'); {}['a']",
            1,
            "error: the run ended: KeyError: 'a'; raised at <string>:7; its traceback could not be written\n",
        ),
        ("sys.exit(3)", 3, ""),
    ],
)
def test_one_line(main: str, code: int, line: str) -> None:
    """Whatever was thrown, also by a thread beside; the trace of what nobody expected is in a file."""
    beside = "import threading; t = threading.Thread(target=lambda: 1 / 0); t.start(); t.join()\n"
    found, error = finish(start(beside + main))
    assert found == code
    assert len(error.splitlines()) == bool(line) and error.startswith(line) and len(error) < 2100
    assert "valid: 4" in error or "valid: 4" not in main
    if named := re.search(r"the traceback is in (\S+)", error):
        trace = Path(named[1])
        assert "Traceback" in trace.read_text() and "ZeroDivisionError" in trace.read_text()
        trace.unlink()


OPTIONAL = "streams.output.is_optional(); print('one', flush=True); print('two', flush=True)"


@pytest.mark.parametrize(
    ("where", "main", "code", "error"),
    [
        (">/dev/full", "print('one')", 1, "error: standard output: No space left on device\n"),
        (">/dev/full", "print('one', flush=True)", 1, "error: standard output: No space left on device\n"),
        (">&-", "open('/dev/null'); print('one')", 1, "error: standard output: Bad file descriptor\n"),
        (">&- 2>&- <&-", "print('one')", 1, ""),
        (">/dev/full", OPTIONAL, 0, "standard output: No space left on device; the run continues without it\n"),
        ("2>&-", "print('one', file=sys.stderr); raise UserError('two')", 2, ""),
        ("2>/dev/full", "print('one', file=sys.stderr); raise UserError('two')", 2, ""),
        (">/dev/full", "print('one'); raise UserError('two')", 2, "error: two\n"),
    ],
)
def test_streams_that_are_closed_or_full(where: str, main: str, code: int, error: str) -> None:
    """The text of a command that cannot be written is an error, unless the command goes on without it."""
    assert finish(start(main, "sh", "-c", f'"$@" {where}', "sh")) == (code, error)


def made_locale(folder: Path) -> Path:
    """A locale whose encoding is ISO-8859-1, named `x` in the folder."""
    if not (localedef := shutil.which("localedef")):
        pytest.skip("needs localedef")
    subprocess.run([localedef, "-i", "POSIX", "-f", "ISO-8859-1", folder / "x"], capture_output=True)
    if not (folder / "x").exists():
        pytest.skip("needs the sources of locales (on Debian in the package locales)")
    return folder


PRINTS = """\
import rich.console
text = 'a\\xe9\\u540d'
print(text, flush=True)
rich.console.Console(force_terminal=True, color_system=None).print(text)
streams.warn(text)
raise UserError(text)
"""


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ("PYTHONIOENCODING=latin-1", b"a\xe9\\u540d"),
        ("LC_ALL=x LOCPATH={}", b"a\xe9\\u540d"),
        ("LC_ALL=C PYTHONCOERCECLOCALE=0 PYTHONUTF8=0", b"a\\xe9\\u540d"),
    ],
)
def test_characters_that_the_encoding_lacks_are_escaped(settings: str, text: bytes, tmp_path: Path) -> None:
    """Also where rich prints, and in the last line, which is written without a stream."""
    if "{}" in settings:
        settings = settings.format(made_locale(tmp_path))
    out, err = tmp_path / "out", tmp_path / "err"
    with out.open("wb") as to, err.open("wb") as errors:
        process = start(PRINTS, "env", *settings.split(), out=to.fileno(), err=errors.fileno())
    assert process.wait(60) == 2
    assert out.read_bytes() == 2 * (text + b"\n")
    assert err.read_bytes() == text + b"\nerror: " + text + b"\n"


def test_a_reader_that_is_gone_is_no_error() -> None:
    """As `head` is when it has its lines."""
    process = start("print('one', flush=True); sys.stdin.read(); print('two', flush=True)", stdin=PIPE)
    assert process.stdout and process.stdin
    assert process.stdout.readline() == "one\n"
    process.stdout.close()
    process.stdin.close()
    assert process.wait(60) == 128 + signal.SIGPIPE
    assert process.stderr and process.stderr.read() == ""
    process.stderr.close()


@pytest.fixture
def lost() -> threading.Event:
    return threading.Event()


@pytest.fixture
def ends(lost: threading.Event) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Both ends of a connection through a relay."""
    with socket.create_server(("127.0.0.1", 0)) as service:
        host, _, port = Relay(*service.getsockname(), lost.set).address.rpartition(":")
        with socket.create_connection((host, int(port)), timeout=10) as ours, service.accept()[0] as theirs:
            theirs.settimeout(10)
            yield ours, theirs


def test_what_is_sent_arrives(ends: tuple[socket.socket, socket.socket], lost: threading.Event) -> None:
    for source, target in (ends, ends[::-1]):
        sent = bytes(range(256)) * 1024
        threading.Thread(target=source.sendall, args=(sent,)).start()
        received = b""
        while len(received) < len(sent):
            received += target.recv(2**16)
        assert received == sent
    ours, theirs = ends
    ours.close()
    assert theirs.recv(1) == b"" and not lost.is_set()


def test_its_end_is_told_and_not_passed_on(ends: tuple[socket.socket, socket.socket], lost: threading.Event) -> None:
    ours, theirs = ends
    theirs.close()
    assert lost.wait(10)
    ours.settimeout(0.2)
    with pytest.raises(TimeoutError):  # silent, not closed
        ours.recv(1)


def test_where_nobody_listens_yet_the_connection_is_closed(lost: threading.Event) -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        address = gone.getsockname()
    host, _, port = Relay(*address, lost.set).address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=10) as ours:
        assert ours.recv(1) == b"" and not lost.is_set()
