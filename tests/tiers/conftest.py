"""For tests of tiers."""

import os

import pytest

from tests.tiers.pages import NamedSsd


@pytest.fixture
def no_fsync(monkeypatch):
    """What a disk needs to be sure is not what is tested here."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)


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
