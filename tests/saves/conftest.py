"""Fixtures of the tests of saves."""

import pytest

import vbrt
from tests.models import mlp, wrap
from vbrt.layers import Weight
from vbrt.layers.weights.weight_encoding import Encoder


@pytest.fixture
def no_encoding(monkeypatch):
    """Encoding anything raises from now on, once the fixture is called."""

    def refuse(*args, **kwargs):
        raise AssertionError("a weight was encoded again")

    def start():
        monkeypatch.setattr(Weight, "split", refuse)
        for name in vbrt.formats.FORMATS:
            monkeypatch.setattr(type(vbrt.formats.get_format(name)), "encode", refuse)
        for name in ("_split", "_split_many"):
            monkeypatch.setattr(Encoder, name, refuse)

    return start


@pytest.fixture
def saved(tmp_path):
    wrap(mlp(), "nvfp4").save(tmp_path)
    return tmp_path
