"""A process that answers when it is asked: to its user alone, for as long as it lives."""

import os
import signal
import socket
import stat
import time

import pytest

from tests.patience import LONG_S, eventually
from vbrt.host import stats_endpoint
from vbrt.host.stats_endpoint import Offer, ask, directories, pids


@pytest.fixture(autouse=True)
def own_directories(tmp_path, monkeypatch):
    """Long ones, as the system's limit of a socket's path is 107 bytes."""
    runtime, temporary = tmp_path / ("r" * 120), tmp_path / "tmp"
    runtime.mkdir()
    temporary.mkdir()
    monkeypatch.setattr(stats_endpoint, "directories", lambda: [runtime / "vbrt", temporary / f"vbrt-{os.getuid()}"])
    return runtime / "vbrt", temporary / f"vbrt-{os.getuid()}"


def forked(run):
    """Run a function in a real second process; return its number and what ends it."""
    ready, go = os.pipe()
    pid = os.fork()
    if not pid:
        code = 1
        try:
            run(lambda: os.write(go, b"."))
            code = 0
        finally:
            os._exit(code)
    os.read(ready, 1)
    os.close(ready), os.close(go)
    return pid


def test_another_process_is_asked_and_is_gone_when_it_is_killed(own_directories):
    def serve(ready):
        mine = Offer(lambda: b"answer of " + str(os.getpid()).encode())
        ready()
        time.sleep(30)
        mine.stop()

    pid = forked(serve)
    try:
        socket_file = own_directories[0] / f"{pid}.top"
        assert stat.S_IMODE(socket_file.stat().st_mode) == 0o600
        assert stat.S_IMODE(own_directories[0].stat().st_mode) == 0o700
        assert pids() == [pid] and ask(pid) == f"answer of {pid}".encode() == ask(pid)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    assert pids() == [pid]  # it could not remove its socket
    with pytest.raises(ProcessLookupError):
        ask(pid)
    assert pids() == [] and not socket_file.exists()


def test_an_offer_ends_with_stop_and_with_its_object_and_a_new_one_takes_its_place():
    threads = len(os.listdir("/proc/self/task"))
    first = Offer(lambda: b"1")
    second = Offer(lambda: b"2")
    assert ask(os.getpid()) == b"2"
    first.stop()
    second.stop()
    second.stop()
    with pytest.raises(ProcessLookupError):
        ask(os.getpid())
    third = Offer(lambda: b"3")
    path = third.path
    del third
    assert not path.exists()
    eventually(lambda: len(os.listdir("/proc/self/task")) <= threads, "the end of its thread")


def test_a_forked_child_neither_answers_for_its_parent_nor_removes_its_socket():
    mine = Offer(lambda: b"parent")

    def child(ready):
        mine.stop()
        assert not stats_endpoint._offers
        ready()

    pid = forked(child)
    assert os.waitpid(pid, 0)[1] == 0 and mine.path.exists() and ask(os.getpid()) == b"parent"
    mine.stop()


def test_who_does_not_read_stops_nobody(monkeypatch):
    """The first connection runs into its limit whatever the machine does; the second has none that counts."""
    monkeypatch.setattr(stats_endpoint, "_SEND_S", 0.01)
    monkeypatch.setattr(stats_endpoint, "_TIMEOUT_S", LONG_S)
    with socket.socket(socket.AF_UNIX) as silent:
        answer = b"x" * (4 * silent.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) + (1 << 20))  # no buffer holds it

        def answered():
            monkeypatch.setattr(stats_endpoint, "_SEND_S", LONG_S)  # of the next connection: this one has its limit
            return answer

        large = Offer(answered)
        directory = os.open(large.path.parent, os.O_RDONLY)
        silent.connect(f"/proc/self/fd/{directory}/{large.path.name}")
        assert ask(os.getpid()) == answer
        cut = bytearray()
        while more := silent.recv(1 << 20):
            cut += more
        assert len(cut) < len(answer)
    os.close(directory)
    large.stop()


def test_a_process_that_ends_while_it_answers_is_no_answer():
    def serve(ready):
        mine = Offer(lambda: os._exit(0))
        ready()
        time.sleep(30)
        mine.stop()

    pid = forked(serve)
    with pytest.raises(ConnectionResetError):
        ask(pid)
    os.waitpid(pid, 0)


def test_a_stopped_process_is_a_timeout(monkeypatch):
    def serve(ready):
        mine = Offer(lambda: b"")
        ready()
        time.sleep(30)
        mine.stop()

    pid = forked(serve)
    os.kill(pid, signal.SIGSTOP)
    os.waitpid(pid, os.WUNTRACED)  # it has stopped
    monkeypatch.setattr(stats_endpoint, "_TIMEOUT_S", 0.05)
    try:
        with pytest.raises(TimeoutError):
            ask(pid)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_a_directory_of_others_is_passed_over_and_without_any_there_is_an_error(own_directories):
    first, second = own_directories
    first.mkdir(mode=0o700)
    first.chmod(0o777)
    mine = Offer(lambda: b"here")
    assert mine.path.parent == second and ask(os.getpid()) == b"here"
    mine.stop()
    second.rmdir()
    second.symlink_to(first)
    with pytest.raises(OSError, match="not a directory of this user alone"):
        Offer(lambda: b"")


def test_the_places_are_the_users(monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/mine")
    assert str(directories()[0]) == "/run/mine/vbrt" and str(directories()[-1]).endswith(f"vbrt-{os.getuid()}")
    monkeypatch.setenv("XDG_RUNTIME_DIR", "relative")
    assert all(path.is_absolute() for path in directories())
