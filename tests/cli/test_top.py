"""`vbrt top` on real second processes, in a pipe and on a pseudo-terminal."""

import contextlib
import json
import os
import pty
import select
import signal
import sys
import termios
import time

import pytest
import torch

from tests.cli.cases import errors
from tests.models import mlp, wrap
from tests.patience import LONG_S
from vbrt.cli import main as cli
from vbrt.cli import top
from vbrt.host import stats_endpoint
from vbrt.model import live_sampling


@pytest.fixture(autouse=True)
def own_directory(tmp_path, monkeypatch):
    monkeypatch.setattr(stats_endpoint, "directories", lambda: [tmp_path / "offers"])
    monkeypatch.setattr(top, "_LINE_S", 0.02)
    monkeypatch.setattr(stats_endpoint, "_SEND_S", LONG_S)
    monkeypatch.setattr(stats_endpoint, "_TIMEOUT_S", LONG_S)


def work(ready):
    """Run a small model until the process is killed."""
    torch.set_num_threads(1)
    sys.argv = ["serve.py", "--port", "8000"]
    vb, x = wrap(mlp(depth=2)).materialize(), torch.randn(1, 64)
    with vb.live(offer=True), torch.no_grad():
        vb(x)
        ready()
        while True:
            vb(x)
            time.sleep(0.001)


@contextlib.contextmanager
def running(run=work):
    """Run a function in a second process."""
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            live_sampling._known.clear()  # the parent's runtimes
            run(lambda: os.write(writing, b"."))
        finally:
            os._exit(1)
    os.close(writing)
    assert os.read(reading, 1) == b"."
    try:
        yield pid
    finally:
        os.close(reading)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def test_a_pipe_gets_a_line_at_a_time_until_the_process_has_ended(capsys, monkeypatch):
    with running() as pid:
        sleep, looks = time.sleep, []

        def count(seconds):
            looks.append(seconds)
            if len(looks) == 4:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            sleep(seconds)

        monkeypatch.setattr(top.time, "sleep", count)
        assert cli.main(["top", "--every", "0.1"]) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert len(lines) == 4 and all(line.startswith(f"process {pid} · Sequential · ") for line in lines)
    assert "passes/s" in lines[-1] and "cpu 32.0 KiB of" in lines[-1] and "\x1b" not in out
    assert err == f"vbrt: note: process {pid} (serve.py --port 8000) has ended, or no longer answers\n"


def test_one_look_as_text_and_as_json_by_number_command_and_model(capsys):
    with running() as pid:
        for name in ([], [str(pid)], ["serve"], ["SEQUENT"]):
            assert cli.main(["top", *name, "--once", "--every", "0.1"]) == 0
            assert f"process {pid} · Sequential" in capsys.readouterr().out
        assert cli.main(["top", "--json"]) == 0
        data = json.loads(capsys.readouterr().out)
        assert data["pid"] == pid and data["runtimes"][0]["models"]["Sequential"] >= 1
        assert cli.main(["top", "other"]) == 2
        assert f"matches 'other'; there is {pid} Sequential (serve.py --port 8000)" in errors(capsys)


def on_a_terminal(pid, stop):
    """Run `vbrt top` in a pseudo-terminal; return what it wrote, its exit status and the terminal's modes around it."""
    terminal, its_end = pty.openpty()
    before = termios.tcgetattr(terminal)  # not once it runs: it may have changed them by then
    top_pid = os.fork()
    if not top_pid:
        code = 1
        try:
            os.close(terminal)
            os.login_tty(its_end)
            os.environ.update(TERM="xterm", COLUMNS="80", LINES="24")
            signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job has it ignored
            sys.stdin = open(0, closefd=False)
            sys.__stdout__ = sys.stdout = open(1, "w", closefd=False)
            sys.__stderr__ = sys.stderr = open(2, "w", closefd=False)
            code = cli.main(["top", str(pid), "--every", "0.1"])
            sys.stdout.flush()
        finally:
            os._exit(code)
    os.close(its_end)
    seen, stopped = b"", False
    deadline = time.monotonic() + LONG_S
    while time.monotonic() < deadline:
        if select.select([terminal], [], [], 0.05)[0]:
            try:
                seen += os.read(terminal, 1 << 16)
            except OSError:  # its other end is closed
                break
        if not stopped and seen.count(b"passes/s") >= 2:
            stopped = True
            stop(terminal, top_pid)
    else:
        os.kill(top_pid, signal.SIGKILL)
    status, after = os.waitpid(top_pid, 0)[1], termios.tcgetattr(terminal)
    os.close(terminal)
    return seen.decode(), os.waitstatus_to_exitcode(status), before == after


@pytest.mark.parametrize("how", ["ctrl-c", "q", "sigterm", "it ends"])
def test_the_terminal_is_left_as_it_was(how):
    with running() as pid:

        def stop(terminal, top_pid):
            if how in ("ctrl-c", "q"):
                os.write(terminal, b"\x03" if how == "ctrl-c" else b"xq")
            else:
                os.kill(top_pid if how == "sigterm" else pid, signal.SIGTERM)
                if how == "it ends":
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)

        seen, code, same = on_a_terminal(pid, stop)
    assert code == 0 and same, seen
    assert seen.count("\x1b[?1049h") == seen.count("\x1b[?1049l") == 1  # a screen of its own, and back
    assert seen.rindex("\x1b[?25h") > seen.rindex("\x1b[?25l")  # the cursor
    assert ("has ended" in seen) == (how == "it ends") and "Traceback" not in seen
    assert "Sequential · " in seen and " policy" in seen and "░" in seen


def test_what_cannot_be_watched_is_said_with_what_would_do(capsys, monkeypatch):
    assert cli.main(["top"]) == 2
    assert "no process of this user answers vbrt top; start it with VBRT_TOP=1" in errors(capsys)
    assert cli.main(["top", str(os.getpid())]) == 2
    assert f"process {os.getpid()} does not answer vbrt top; start it with VBRT_TOP=1" in errors(capsys)
    assert cli.main(["top", "99999999"]) == 2
    assert "there is no process 99999999" in errors(capsys)
    monkeypatch.setattr(top.os, "getuid", lambda: 12345)
    assert cli.main(["top", str(os.getpid())]) == 2
    assert f"process {os.getpid()} belongs to another user" in errors(capsys)

    def refused(_pid):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(stats_endpoint, "ask", refused)
    assert cli.main(["top", "1"]) == 2
    assert "process 1 cannot be asked: Permission denied" in errors(capsys)
    for answer, said in (
        (b"<html>", "is not JSON"),
        (b'{"version": 1, "error": "KeyError: 1"}', "could not sample itself: KeyError: 1"),
        (b'{"version": 2}', "of version 2; this vbrt reads version 1"),
    ):
        monkeypatch.setattr(stats_endpoint, "ask", lambda _pid, answer=answer: answer)
        assert cli.main(["top", "1"]) == 2
        assert said in errors(capsys)


def test_of_several_processes_one_is_chosen(capsys, monkeypatch):
    with running() as first, running() as second:
        assert cli.main(["top"]) == 2
        err = capsys.readouterr().err
        assert f"{first}  Sequential  (serve.py --port 8000)" in err and str(second) in err
        assert f"2 processes answer; name one of them: vbrt top {first}" in err
        monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
        monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
        for typed, chosen in ((f"{second}\n", second), ("\n", first)):
            monkeypatch.setattr(sys.stdin, "readline", lambda typed=typed: typed)
            assert cli.main(["top", "--json"]) == 0
            assert json.loads(capsys.readouterr().out)["pid"] == chosen
        monkeypatch.setattr(sys.stdin, "readline", lambda: "7\n")
        assert cli.main(["top", "--json"]) == 2
        assert f"'7'; expected one of {first}, {second}" in capsys.readouterr().err


def test_a_dumb_terminal_and_one_that_knows_ascii_only_get_lines(monkeypatch):
    with running() as pid:
        environment = os.environ | {"TERM": "dumb", "PYTHONIOENCODING": "ascii", "NO_COLOR": "1"}
        seen = b""
        top_pid, terminal = pty.fork()
        if not top_pid:
            try:
                os.environ.update(environment)
                sys.stdout = open(1, "w", encoding="ascii", closefd=False)
                cli.main(["top", str(pid), "--every", "0.1"])
            finally:
                os._exit(1)
        while seen.count(b"passes/s") < 2:
            seen += os.read(terminal, 1 << 16)
        os.kill(top_pid, signal.SIGKILL)
        os.waitpid(top_pid, 0)
        os.close(terminal)
    assert b"\x1b" not in seen and seen.startswith(f"process {pid} ? Sequential ? ".encode())
