"""Layers in every holding."""

import pytest

from tests.layers.holdings import held
from tests.models import FORMATS


@pytest.fixture(params=FORMATS)
def format(request):
    return request.param


@pytest.fixture(params=["resident", "streamed"])
def vb(request, format, tmp_path):
    """A wrapped mlp with biases, not materialized yet, in every holding."""
    yield from held(format, request.param, tmp_path)


@pytest.fixture(params=[("dense", "resident"), ("nvfp4", "resident"), ("exact", "streamed")], ids="-".join)
def some_vb(request, tmp_path):
    """As `vb`, in three holdings out of six."""
    yield from held(*request.param, tmp_path)
