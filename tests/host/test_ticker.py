"""A thread that does something now and then, until it is stopped or its object is gone."""

import os
import queue

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
