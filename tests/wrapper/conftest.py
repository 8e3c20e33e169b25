"""Wrapped models in every holding."""

import pytest
import torch

from tests.models import FORMATS, dtype_of, mlp, wrap, wrap_streamed


@pytest.fixture(params=FORMATS)
def format(request):
    return request.param


@pytest.fixture(params=["resident", "streamed"])
def wrapped(request, format, tmp_path):
    """(wrapper, its model before wrapping, an input), in every holding."""
    model, original = mlp(dtype=dtype_of(format)), mlp(dtype=dtype_of(format))
    vb = wrap(model, format) if request.param == "resident" else wrap_streamed(model, format, tmp_path)
    yield vb, original, torch.linspace(-1, 1, 192, dtype=dtype_of(format)).reshape(3, 64)
    vb.close()
