"""For tests of tiers."""

import os

import pytest


@pytest.fixture
def no_fsync(monkeypatch):
    """What a disk needs to be sure is not what is tested here."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)
