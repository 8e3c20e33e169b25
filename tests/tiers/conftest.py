"""For tests of tiers."""

import gc
import sys

import pytest

from tests.tiers.pages import NamedSsd


@pytest.fixture
def quick_to_look(monkeypatch):
    """What a `__del__` prints is expected, and what is there already need not be collected each time."""
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: None)
    gc.collect()
    gc.freeze()


@pytest.fixture
def tier(tmp_path):
    tier = NamedSsd(tmp_path, 1 << 30)
    yield tier
    tier.close()


@pytest.fixture
def helped(tmp_path):
    tier = NamedSsd(tmp_path, 1 << 30, io="buffered", helpers=3)
    yield tier
    tier.close()
