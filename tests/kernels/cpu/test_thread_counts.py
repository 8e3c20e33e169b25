"""How many threads a kernel for CPUs takes."""

import threading

import pytest
import torch

from vbrt.kernels.cpu.thread_counts import leaving, team


@pytest.fixture
def _sixteen(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 16)


@pytest.mark.usefixtures("_sixteen")
def test_threads_are_left_to_others_by_the_thread_that_says_so_and_until_it_ends():
    with leaving(2):
        assert (team(100), team(3), team(0)) == (14, 3, 1)
        other = []
        thread = threading.Thread(target=lambda: other.append(team(100)))
        thread.start()
        thread.join()
        assert other == [16]
        with leaving(8):
            assert team(100) == 12  # at most a quarter
        assert team(100) == 14
    assert team(100) == 16


def test_few_threads_are_left_to_nobody(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    with leaving(2):
        assert team(100) == 3
