"""Fixtures of the tests of saves."""

import pytest

import vbrt
from tests.models import mlp, wrap
from vbrt.layers import WeightHandle


@pytest.fixture
def no_encoding(monkeypatch):
    """Encoding anything raises from now on, once the fixture is called."""

    def refuse(*args, **kwargs):
        raise AssertionError("a weight was encoded again")

    def start():
        monkeypatch.setattr(WeightHandle, "split", refuse)
        for name in vbrt.formats.FORMATS:
            monkeypatch.setattr(type(vbrt.formats.get_format(name)), "encode", refuse)
        monkeypatch.setattr("vbrt.layers.encoding.split_fine", refuse)

    return start


@pytest.fixture
def saved(tmp_path):
    wrap(mlp(), "nvfp4").save(tmp_path)
    return tmp_path
