"""A short cut of scripts/torture: Ctrl-C, kills and threads against wrapped models."""

import functools
import gc
import random
import sys
from pathlib import Path

import pytest
import torch

from tests import torture
from tests.interrupting import interrupted, interrupted_anywhere

pytestmark = [pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="needs Linux"),
              pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
              pytest.mark.filterwarnings("ignore::DeprecationWarning")]  # of forks beside threads
_FEW = 2


@pytest.fixture(autouse=True)
def one_thread(monkeypatch, request):
    """No thread but the library's own; what a `__del__` prints when Ctrl-C comes there is expected."""
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: None)
    request.addfinalizer(functools.partial(torch.set_num_threads, torch.get_num_threads()))
    request.addfinalizer(gc.unfreeze)
    torch.set_num_threads(1)
    gc.freeze()


@pytest.mark.parametrize("operation", torture.OPERATIONS)
def test_ctrl_c_in_an_operation_loses_nothing_and_the_next_call_works(operation):
    choose = random.Random(operation)
    preset = choose.choice(torture.PRESETS)
    for interrupts in (interrupted, interrupted_anywhere):
        for at in choose.sample(torture.places(operation, preset, interrupts), _FEW):
            assert torture.at_place(operation, preset, at, interrupts)


def test_ctrl_c_after_a_random_time_loses_nothing():
    choose = random.Random(0)
    for _ in range(6):
        torture.after_delay(choose.choice(list(torture.OPERATIONS)), "dense", choose.random() * 0.02)


def test_a_kill_leaves_a_whole_save_and_files_that_the_next_run_removes(tmp_path):
    for number in range(4):
        torture.kill("fp4", tmp_path, number * 0.02, number)


@pytest.mark.parametrize("preset", torture.PRESETS)
def test_threads_with_storms_of_budgets_figures_and_saves_get_the_right_bits(preset, tmp_path):
    assert torture.storm(preset, tmp_path, 0.7, 0) > 4
