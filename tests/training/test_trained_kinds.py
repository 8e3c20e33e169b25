"""A kind of layer trains by its record alone."""

import pickle
import sys
import types

import pytest
import torch
from torch import nn

import vbrt
from tests.models import config
from vbrt.layers import KINDS, Kind, VBLinear
from vbrt.layers.modules import layer_kinds
from vbrt.training import trained_class, trained_kinds


class ToyLinear(nn.Linear):
    """Rounds before it adds its bias, and calls its input `tokens`."""

    def forward(self, tokens):
        return nn.functional.linear(tokens, self.weight) + self.bias


class VBToyLinear(VBLinear, ToyLinear):
    pass


@pytest.fixture
def toy(monkeypatch):
    record = Kind("ToyLinear", __name__, "a_file_of_vbrt", rounds_before_bias=True)
    monkeypatch.setitem(sys.modules, "a_file_of_vbrt", types.SimpleNamespace(VBToyLinear=VBToyLinear))
    monkeypatch.setitem(KINDS, "ToyLinear", record)
    monkeypatch.setitem(layer_kinds._BY_CLASS, (__name__, "ToyLinear"), record)
    yield record
    trained_kinds.trained_class.cache_clear()


def test_a_kinds_record_is_all_that_its_class_in_training_needs(toy):
    layer = ToyLinear(64, 32)
    vb = vbrt.wrap(nn.Sequential(layer), config("nvfp4") | {"mode": "train"})
    assert type(layer) is trained_class(toy) and isinstance(layer, ToyLinear) and toy.name in type(layer).__doc__
    x = torch.randn(2, 64)
    y = layer(tokens=x)
    rounded = layer.handle.rounded_as_before(layer.weight, torch.float32)
    assert torch.equal(y, x @ rounded.T + layer.bias) and torch.equal(layer(x), y)
    with pytest.raises(TypeError, match="tokens"):
        layer(input=x)
    assert torch.equal(pickle.loads(pickle.dumps(layer))(x), y)
    vb.unwrap()
    assert type(layer) is ToyLinear


def test_a_name_that_is_no_kind_is_no_class():
    with pytest.raises(AttributeError, match="TrainedNothing"):
        _ = trained_kinds.TrainedNothing
