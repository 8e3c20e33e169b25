"""What recordings depend on in Python: each change of it is seen, and what would see each step is named."""

import functools
import sys
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from vbrt.generation.capture import code_fingerprint
from vbrt.generation.capture.model_fingerprint import attributes, changed, fingerprint, why_eager


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))
        self.tensor, self.held, self.function = torch.ones(1), {"a": torch.ones(1)}, torch.neg
        self.nested, self.long, self.bound = {"x": {"y": 1.0}}, [1.0] * 100, torch.ones(1).mul
        self.config = type("Config", (), {})()
        self.config.inner = {"x": {"y": 1.0}}

    def forward(self, x):
        return x


CHANGES = {
    "tensor": lambda m: setattr(m[0], "tensor", torch.ones(1)),
    "data": lambda m: setattr(m[0].tensor, "data", torch.ones(1)),
    "tensor in a dict": lambda m: m[0].held.update(a=torch.ones(1)),
    "function": lambda m: setattr(m[0], "function", torch.abs),
    "partial": lambda m: setattr(m[0], "function", functools.partial(torch.add, 1)),
    "method": lambda m: setattr(m[0], "bound", torch.ones(1).add),
    "nested dict": lambda m: m[0].nested["x"].update(y=2.0),
    "long list": lambda m: m[0].long.append(2.0),
    "config of a module": lambda m: m[0].config.inner["x"].update(y=2.0),
    "transposed in place": lambda m: setattr(m[0].weight, "data", m[0].weight.data.t()),
    "another class": lambda m: setattr(m[0], "__class__", type("Other", (Scaled,), {})),
}


@pytest.mark.parametrize("change", CHANGES)
def test_another_attribute_is_another_model(change):
    model = nn.Sequential(Scaled())
    before = fingerprint(model)
    assert fingerprint(model) == before
    CHANGES[change](model)
    assert fingerprint(model) != before


def test_functions_of_a_class_and_of_transformers_tables_belong_to_it(monkeypatch):
    utils = pytest.importorskip("transformers.modeling_utils")
    model = nn.Sequential(Scaled())
    found = [fingerprint(model)]
    with monkeypatch.context() as patched:
        patched.setattr(Scaled, "forward", lambda self, x: 2 * x)
        found.append(fingerprint(model))
    with monkeypatch.context() as patched:
        patched.setitem(utils.ALL_ATTENTION_FUNCTIONS, "sdpa", lambda *args, **kwargs: None)
        found.append(fingerprint(model))
    assert found[0] not in found[1:]


FACTOR = 2.0


def innermost(x):
    return FACTOR * x


def inner(x):
    return [innermost(part) for part in x]


def tokens(value=1, *, other=2):
    return value + other


def wrapping(forward):
    @functools.wraps(forward)
    def wrapper(self, *args):
        return forward(self, *args)

    return wrapper


class Looking(nn.Module):
    @torch.no_grad()
    @wrapping
    def forward(self, x):
        return self.method(x)

    def method(self, x):
        return torch.relu(inner(tokens() or x)[0])

    def unnamed(self, x):
        return x


HERE = sys.modules[__name__]


@pytest.mark.parametrize(
    ("of", "name", "value", "matters"),
    [
        (HERE, "inner", lambda x: innermost(x), True),
        (HERE, "innermost", lambda x: x, True),
        (HERE, "FACTOR", 3.0, True),
        (Looking, "method", lambda self, x: x, True),
        (inner, "__code__", innermost.__code__, True),
        (tokens, "__defaults__", (3,), True),
        (tokens, "__kwdefaults__", {"other": 3}, True),
        (torch, "relu", torch.abs, True),
        (torch, "erf", torch.abs, True),
        (Looking, "unnamed", lambda self, x: 2 * x, False),
        (HERE, "hooked", None, False),
    ],
    ids=[
        "global",
        "further",
        "constant",
        "method",
        "code",
        "defaults",
        "named",
        "torch",
        "unnamed in torch",
        "unnamed",
        "other",
    ],
)
def test_functions_and_constants_that_forwards_look_up_belong_to_the_model(of, name, value, matters, monkeypatch):
    model = nn.Sequential(Looking())
    before = fingerprint(model)
    assert fingerprint(model) == before
    monkeypatch.setattr(of, name, value)
    assert (fingerprint(model) != before) is matters
    monkeypatch.undo()
    assert fingerprint(model) == before


class Counting(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@contextmanager
def hooked(register):
    handle = register(lambda *args: None)
    try:
        yield
    finally:
        handle.remove()


@pytest.mark.parametrize(
    ("around", "why"),
    {
        lambda: hooked(register_module_forward_hook): "all modules have a hook",
        lambda: hooked(register_module_forward_pre_hook): "all modules have a hook",
        Counting: r"a torch mode is active \(Counting\)",
        TorchDispatchMode: r"a torch mode is active \(TorchDispatchMode\)",
    }.items(),
)
def test_what_would_see_each_step_is_named(around, why):
    model = nn.Sequential(Scaled()).eval()
    with torch.device("cpu"):
        assert why_eager(model, [model]) == ""
    with around(), pytest.raises(AssertionError, match=why):
        assert why_eager(model, [model]) == ""


def test_what_long_code_names_is_found_as_in_short_code():
    body = "from somewhere import some; return module.part.function"
    names = []
    for many in (0, 300):
        lines = [*(f"n{at}.a{at}" for at in range(many)), *body.split("; ")]
        made = {}
        exec("def code():\n    " + "\n    ".join(lines), made)
        names.append(code_fingerprint._names(made["code"].__code__))
    short, long = names
    assert short.paths == (("module", "part", "function"),) and short.imports
    assert long.paths[-1:] == short.paths and long.imports == short.imports and len(long.paths) == 301


def test_the_attribute_that_a_step_changes_is_named():
    model = nn.Sequential(Scaled())
    before = attributes(model)
    assert changed(before, attributes(model)) == ""
    model[0].calls = 1
    assert changed(before, attributes(model)) == "0.calls"
