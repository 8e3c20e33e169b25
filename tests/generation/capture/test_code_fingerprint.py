"""Functions that forwards find in tables, objects, imports of their own and torch: each that is replaced is seen."""

import functools
import sys
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.generation import families
from vbrt.generation.capture.model_fingerprint import fingerprint


def inner(x):
    return x


def tabled(x):
    return inner(x)


class Registry:
    def __init__(self):
        self.functions, self.hidden = {"a": tabled}, object()

    def find(self, name):
        return self.functions[name]

    def unnamed(self):
        return None


class Doubling(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x


def spare(x):
    return -x


TABLE, LISTED, REGISTRY, PARTIAL = (
    {"a": tabled, 1: {}},
    [("a", {"b": spare})],
    Registry(),
    functools.partial(map, spare),
)


class Looking(nn.Module):
    IN_CLASS: ClassVar = {"a": spare}

    def __init__(self):
        super().__init__()
        self.own = lambda x: PARTIAL(x)

    def forward(self, x):
        import tests.generation.families as whole
        from tests.generation import families as module
        from tests.generation.families import generated

        found = TABLE["a"], LISTED[0], REGISTRY.find("a"), self.IN_CLASS["a"], whole.PROMPT, module.tiny
        return self.own(found), generated(Doubling.apply(x))


HERE, MODULE = sys.modules[__name__], sys.modules[families.__name__]
REPLACED = {
    "in a table": lambda patched: patched.setitem(TABLE, "a", spare),
    "of another name": lambda patched: patched.setitem(TABLE, "b", spare),
    "called by one in a table": lambda patched: patched.setattr(HERE, "inner", spare),
    "in a dict in a list": lambda patched: patched.setitem(LISTED[0][1], "b", inner),
    "in an object": lambda patched: patched.setitem(REGISTRY.functions, "a", spare),
    "method of an object": lambda patched: patched.setattr(Registry, "find", lambda self, name: spare),
    "another object": lambda patched: patched.setattr(HERE, "REGISTRY", None),
    "in a class": lambda patched: patched.setitem(Looking.IN_CLASS, "a", inner),
    "for autograd": lambda patched: patched.setattr(Doubling, "forward", staticmethod(lambda ctx, x: x)),
    "imported within": lambda patched: patched.setattr(MODULE, "generated", inner),
    "named in a module imported within": lambda patched: patched.setattr(MODULE, "tiny", inner),
    "constant of a module imported whole": lambda patched: patched.setattr(MODULE, "PROMPT", torch.ones(1)),
    "named by a function of an instance": lambda patched: patched.setattr(HERE, "PARTIAL", functools.partial(map)),
    "torch.nn.functional": lambda patched: patched.setattr(F, "linear", inner),
    "method of tensors": lambda patched: patched.setattr(torch.Tensor, "mean", inner),
    "call of modules": lambda patched: patched.setattr(nn.Module, "_call_impl", inner),
    "call of a class": lambda patched: patched.setattr(Looking, "__call__", inner),
}
SPARED = {
    "unnamed method": lambda patched: patched.setattr(Registry, "unnamed", spare),
    "unnamed function of a module imported within": lambda patched: patched.setattr(MODULE, "SIZES", None),
    "object without a function": lambda patched: patched.setattr(REGISTRY, "hidden", object()),
}


@pytest.mark.parametrize("change", [*REPLACED, *SPARED])
def test_functions_in_tables_objects_imports_and_torch_belong_to_the_model(change, monkeypatch):
    model = nn.Sequential(Looking())
    before = fingerprint(model)
    assert fingerprint(model) == before
    (REPLACED | SPARED)[change](monkeypatch)
    assert (fingerprint(model) != before) is (change in REPLACED)
    monkeypatch.undo()
    assert fingerprint(model) == before


def test_precisions_are_read_whichever_of_torchs_switches_set_them():
    """Once a newer switch was set, torch refuses to say what the older ones are."""
    model, of = nn.Sequential(Looking()), torch.backends.cuda.matmul
    before, was = fingerprint(model), of.fp32_precision
    try:
        of.fp32_precision = "ieee" if was == "tf32" else "tf32"
        assert fingerprint(model) != before
    finally:
        of.fp32_precision = was
    assert torch.get_float32_matmul_precision() and fingerprint(model) == before
