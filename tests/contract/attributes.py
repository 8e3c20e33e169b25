"""What is done through the wrapper."""

import inspect

import torch
from torch import nn

from tests.contract.holdings import Subject
from tests.contract.operation import FROZEN, Refused, operation
from vbrt.errors import TierError

WRAPPER = "The wrapper"


@operation(WRAPPER, "`vb.attribute`, `hasattr(vb, name)`")
def read_attributes(s: Subject):
    s.model.note = "here"
    return s.whole.note, hasattr(s.whole, "note"), hasattr(s.whole, "absent"), s.whole.b is s.model.b


@operation(WRAPPER, "`vb.attribute = value` reaches the model")
def assign_attributes(s: Subject):
    s.whole.note = "there"
    s.whole.scale = nn.Parameter(torch.ones(2))
    return s.model.note, "scale" in dict(s.model.named_parameters()), s.whole.note


@operation(WRAPPER, "`vb.layer = nn.Linear(...)` replaces the model's")
def assign_a_module(s: Subject):
    s.whole.b = nn.Identity()
    s.whole.a = nn.Linear(64, 64, dtype=s.x.dtype, device=s.x.device)
    nn.init.constant_(s.whole.a.weight, 0.5)
    nn.init.zeros_(s.whole.a.bias)
    return s.whole(s.x), type(s.model.b).__name__


@operation(WRAPPER, "`del vb.attribute`")
def delete_attributes(s: Subject):
    s.model.note = "here"
    del s.whole.note
    return hasattr(s.model, "note")


@operation(WRAPPER, "`inspect.signature(vb.forward)`")
def signature(s: Subject):
    return list(inspect.signature(s.whole.forward).parameters)


@operation(WRAPPER, "`vb.train()`, `vb.training`, `vb.eval()`")
def training_flag(s: Subject):
    s.whole.train()
    seen = [s.whole.training, s.model.training, s.layer.training]
    s.whole.eval()
    return [*seen, s.whole.training, s.model.training, s.layer.training]


@operation(WRAPPER, '`vb.get_submodule("b")`, `vb.get_parameter("b.bias")`')
def look_up_modules(s: Subject):
    return s.whole.get_submodule("b") is s.layer, s.whole.get_parameter("b.bias") is s.layer.bias


@operation(WRAPPER, "`vb.register_buffer`, `vb.add_module`, `vb.register_parameter`: in the state dict")
def register_through_the_wrapper(s: Subject):
    s.whole.register_buffer("table", torch.ones(3))
    s.whole.register_parameter("gain", nn.Parameter(torch.ones(2)))
    return "table" in s.whole.state_dict(), "gain" in s.whole.state_dict(), hasattr(s.model, "table")


@operation(WRAPPER, "`str(vb)`, `repr(layer)`: nn.Module's, with the format")
def represent(s: Subject):
    return "96" in repr(s.layer), "64" in str(s.whole)


@operation(WRAPPER, "a call after `close()`", Refused(FROZEN, "closed", TierError), calls_after=False)
def call_after_close(s: Subject):
    s.close()
    return s.whole(s.x)
