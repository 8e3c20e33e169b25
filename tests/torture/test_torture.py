"""A short cut of scripts/torture: Ctrl-C, kills and threads against wrapped models."""

import contextlib
import functools
import gc
import os
import random
import resource
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import vbrt
from tests.torture import lives, streams, torture
from tests.torture.interrupting import interrupted
from vbrt import wrapper
from vbrt.errors import VBError

pytestmark = [
    pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="needs Linux"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]  # of forks beside threads
_FEW = 2


@pytest.fixture(autouse=True)
def one_thread(monkeypatch, request):
    """No thread but the library's own; what a `__del__` prints when Ctrl-C comes there is expected."""
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: None)
    request.addfinalizer(functools.partial(torch.set_num_threads, torch.get_num_threads()))
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()


@pytest.mark.parametrize("operation", torture.OPERATIONS)
def test_ctrl_c_in_an_operation_loses_nothing_and_the_next_call_works(operation):
    choose = random.Random(operation)
    preset = choose.choice(torture.PRESETS)
    for at in choose.sample(torture.places(operation, preset), _FEW):
        assert _comes(operation, preset, at)


def _comes(operation, preset, at) -> bool:
    """Have Ctrl-C come at a place, or at the end of an operation that came through fewer places than when counted."""
    for _ in range(3):
        if torture.at_place(operation, preset, at):
            return True
        at = len(interrupted.places) - 8
    return False


def test_ctrl_c_after_a_random_time_loses_nothing():
    choose = random.Random(0)
    for _ in range(6):
        torture.after_delay(choose.choice(list(torture.OPERATIONS)), "dense", choose.random() * 0.02)


def test_a_kill_leaves_a_whole_save_and_files_that_the_next_run_removes(tmp_path):
    for number in range(4):
        lives.kill("fp4", tmp_path, number * 0.02, number)


@pytest.mark.sample(1)
@pytest.mark.parametrize("room", streams.ROOMS)
def test_timers_in_forwards_through_little_room_lose_no_byte_of_it(room):
    with torture.at_most(60):
        assert streams.timers(room, 0, 400).hits > 40


def test_a_killed_streamed_forward_leaves_files_that_the_next_run_removes(tmp_path):
    with torture.at_most(60):
        for number in range(2):
            streams.kill(2 + number, tmp_path, number * 0.02, number)


@pytest.mark.sample(1)
@pytest.mark.parametrize("preset", torture.PRESETS)
def test_threads_with_storms_of_budgets_figures_and_saves_get_the_right_bits(preset, tmp_path):
    assert lives.storm(preset, tmp_path, 0.7, 0) > 4


@pytest.mark.parametrize("cpu", ["1MiB", torture.small("dense")], ids=["resident", "streamed"])
def test_threads_lose_no_hit_and_no_forward(cpu, tmp_path):
    one = torture.Trial("dense", tmp_path)
    vb, turns, interval = one.wrap(cpu), 60, sys.getswitchinterval()
    workers = [threading.Thread(target=lambda: [one.run(vb) for _ in range(turns)]) for _ in range(4)]
    sys.setswitchinterval(1e-6)
    try:
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    finally:
        sys.setswitchinterval(interval)
    assert {layer.forwards for layer in vb.stats().layers.values()} == {4 * turns}
    assert {layer.hits + layer.misses for layer in vb.stats().layers.values()} == {4 * turns}
    one.end(vb)


def test_figures_can_be_had_while_pages_come_and_go(tmp_path):
    one = torture.Trial("dense", tmp_path)
    vb = one.wrap(torture.small("dense"))
    pages = vb.stack.pages
    key, page = pages.popitem()

    def trace(frame, event, _):  # at each line, as another thread might
        if frame.f_code.co_filename == wrapper.__file__ and event == "line" and pages.pop(key, None) is None:
            pages[key] = page
        return trace

    tracing = sys.gettrace()
    sys.settrace(trace)
    try:
        vb.stats()
    finally:
        sys.settrace(tracing)
        pages[key] = page
    one.end(vb)


@contextlib.contextmanager
def no_descriptors() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = [os.open(os.devnull, os.O_RDONLY)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 20, hard))
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        yield
    finally:
        for fd in taken:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_without_free_descriptors_calls_are_refused_by_name_and_close_removes_all_files(tmp_path):
    one = torture.Trial("dense", tmp_path)
    one.expected()
    vb, budget = one.wrap(torture.small("dense")), torture.small("dense")
    vb.save(tmp_path / "saved")
    one.check_save(tmp_path / "saved")
    str(vb.stats())  # Python has imported what it needs
    with no_descriptors():
        for call in (
            lambda: one.run(vb),
            lambda: vb.set_budget("cpu", "1MiB"),
            lambda: vb.save(tmp_path / "saved"),
            lambda: vbrt.wrap(torture.build("dense"), **torture.options("dense", tmp_path, budget)),
            lambda: vbrt.load(tmp_path / "saved", torture.build("dense", "meta")),
        ):
            with pytest.raises(VBError, match="Too many open files"):
                call()
        str(vb.stats())
    one.check(vb)
    with no_descriptors():
        one.vb.close()
    assert not list((tmp_path / "tier").iterdir())
