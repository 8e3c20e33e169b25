"""A thread that does something now and then, until it is stopped or its object is gone."""

import os
import queue
import sys
import threading

import pytest

from tests.patience import LONG_S
from vbrt.host import ticker
from vbrt.host.ticker import Ticker


class Owner:
    pass


def test_it_ticks_until_stop_which_waits_for_the_thread():
    owner, ticks = Owner(), queue.Queue()
    one = Ticker(owner, lambda of: (ticks.put(of is owner), 0.001)[1])
    one.stop()  # before it has begun
    one = Ticker(owner, lambda of: (ticks.put(of is owner), 0.001)[1])
    threads = len(os.listdir("/proc/self/task"))
    one.start(0.0)
    assert [ticks.get(timeout=LONG_S) for _ in range(3)] == [True] * 3 and one.running
    one.stop()
    one.stop()
    assert not one.running and len(os.listdir("/proc/self/task")) <= threads + 1


def test_it_ends_by_itself_with_none_and_when_its_object_is_gone():
    gone = queue.Queue()
    owner, ended = Owner(), queue.Queue()
    once = Ticker(owner, ended.put, gone=lambda: gone.put("once"))
    once.start(0.0)
    assert ended.get(timeout=LONG_S) is owner
    once.stop()
    late = Ticker(owner, lambda of: 60.0, gone=lambda: gone.put("late"))
    late.start(60.0)
    del owner
    assert gone.get(timeout=LONG_S) == "late"
    late.stop()
    assert gone.empty()


@pytest.mark.parametrize("begins", [False, True], ids=["at once", "in a tick"])
def test_a_thread_that_died_without_memory_is_not_waited_for(begins, monkeypatch):
    start, died = ticker.start_new_thread, queue.Queue()

    def die(*args):
        raise MemoryError

    monkeypatch.setattr(sys, "unraisablehook", died.put)  # keeps the frames, as pytest's does
    if not begins:  # as without memory for its first frame, which nobody can keep
        monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: died.put(unraisable.exc_type))
        monkeypatch.setattr(ticker, "start_new_thread", lambda run, args: start(die, args))
    owner = Owner()
    one = Ticker(owner, die)
    one.start(0.0)
    assert died.get(timeout=5)
    stopped = threading.Thread(target=one.stop, daemon=True)
    stopped.start()
    stopped.join(10)
    assert not stopped.is_alive() and not one.running


def test_without_more_threads_nothing_is_left_behind(monkeypatch):
    def refuse(*_):
        raise RuntimeError("can't start new thread")

    owner = Owner()
    one = Ticker(owner, lambda of: None)
    monkeypatch.setattr(ticker, "start_new_thread", refuse)
    with pytest.raises(RuntimeError, match="new thread"):
        one.start(0.0)
    assert not one.running
    one.stop()
