"""What functions cannot take is refused by an error of vbrt that names the argument, what came and what would do."""

import pytest
import torch
from torch import nn

import vbrt

NAN, INF = float("nan"), float("inf")
#: not the path of a file, and why
NO_PATHS = [None, 3, b"x", "", "x\0y", object(), ["x"]]
#: call of one argument -> what it is called in the error, and values that it cannot take
CALLS = {
    "make_plan(): model": (lambda x: vbrt.make_plan(x, "fp4"), [None, "gpt", nn.Linear]),
    "make_plan(): machine": (lambda x: vbrt.make_plan(linear(), "fp4", x), [0, "24GiB", {}]),
    "estimate(): model": (vbrt.estimate, [None, "gpt", nn.Linear]),
    "estimate(): machine": (lambda x: vbrt.estimate(linear(), machine=x), [0, "24GiB", {}]),
    "estimate(): ranks": (lambda x: vbrt.estimate(linear(), ranks=x), [None, 0, -1, 2.0, True, NAN]),
    "advise(): model": (vbrt.advise, [None, "gpt"]),
    "advise(): rates": (lambda x: vbrt.advise(linear(), rates=x), [0, "H100"]),
    "advise(): goal": (lambda x: vbrt.advise(linear(), x), [None, "", "cheapest", []]),
    "choose_precision(): model": (lambda x: vbrt.choose_precision(x, budget="6 bits"), [None, {}]),
    "watch_nonfinite(): model": (lambda x: vbrt.watch_nonfinite(x).__enter__(), [None, 3]),
    "quantize(): model": (vbrt.quantize, [None, torch.ones(2)]),
    "data_sheet(): name": (vbrt.data_sheet, [None, 3]),
    "fit_batch(): step": (lambda x: vbrt.fit_batch(x, room_bytes=9), [None, 3]),
    "fit_batch(): room_bytes": (lambda x: vbrt.fit_batch(print, room_bytes=x), [-1, NAN, "8GiB"]),
    "batch": (lambda x: vbrt.Task(batch=x), [None, 0, -1, 1.5, NAN, "1", 10**30]),
    "optimizer": (lambda x: vbrt.Task("train", optimizer=x), [None, 3, torch.optim.AdamW]),
    "step": (lambda x: vbrt.Task(step=x), [3, "x"]),
    "mixed": (lambda x: vbrt.Task(mixed=x), [None, 1, "yes"]),
    "generate_routing(): tokens": (lambda x: vbrt.generate_routing([], tokens=x), [None, 0, -1, NAN, 10**30, "8"]),
    "generate_routing(): layers": (lambda x: vbrt.generate_routing(x, tokens=1), [None, 3, {}]),
    "simulate(): trace": (lambda x: vbrt.simulate("lru", x, 9), [None, 3]),
    "simulate(): prefetch": (lambda x: vbrt.simulate("lru", ["a"], 9, prefetch=x), [None, -1, NAN]),
    "simulate(): scope": (lambda x: vbrt.simulate("lru", ["a"], 9, scope=x), [None, "expert"]),
    "policy.kind": (lambda x: vbrt.simulate(x, ["a"], 9), ["", "mru"]),
    "capacity_bytes": (lambda x: vbrt.simulate("lru", ["a"], x), [None, -1, INF, "8GiB"]),
    "simulate(): the trace has a page 'a'": (lambda x: vbrt.simulate("lru", ["a"], 9, sizes=x), [{}, {"b": 1}]),
    "policy": (lambda x: vbrt.simulate(x, ["a"], 9), [None, 3]),
    "Lion: lr": (lambda x: vbrt.Lion([nn.Parameter(torch.ones(1))], lr=x), [None, "1e-4"]),
    "Lion: betas": (lambda x: vbrt.Lion([nn.Parameter(torch.ones(1))], betas=x), [None, 0.9, "ab"]),
    "FlashAttention: d_model": (lambda x: vbrt.FlashAttention(x, 1), [None, 0, 2.5, "8", NAN]),
    "FlashAttention: dropout": (lambda x: vbrt.FlashAttention(8, 1, dropout=x), [None, -1, NAN, "0"]),
    "FlashAttention: x": (lambda x: vbrt.FlashAttention(8, 1)(x), [None, 3, [1.0]]),
    "attention: the mask": (lambda x: vbrt.FlashAttention(8, 1)(torch.ones(1, 2, 8), mask=x), [3, "causal"]),
    "FusedFP4Linear: in_features": (lambda x: vbrt.FusedFP4Linear(x, 8), [None, 0, -1, 2.5]),
    "FusedFP4Linear: activation": (lambda x: vbrt.FusedFP4Linear(8, 8, activation=x), [None, "swish", []]),
    "OptimizedTransformerBlock: d_ff": (lambda x: vbrt.OptimizedTransformerBlock(8, 1, x), [None, 0, NAN]),
    "gumbel_max_sample: logits": (vbrt.gumbel_max_sample, [None, 3, [0.5]]),
    "gumbel_max_sample: noise": (lambda x: vbrt.gumbel_max_sample(torch.ones(2, 3), noise=x), [3, "x"]),
    "compile_options(): mode": (vbrt.compile_options, [None, "", "fast"]),
    "VBLinear()": (lambda x: vbrt.VBLinear(x, 4), [4, None]),
    "stats(): group": (lambda x: vbrt.wrap(linear()).stats(group=x), [3, "x", True]),
    "set_budget(): tier": (lambda x: vbrt.wrap(linear()).set_budget(x, "1GiB"), [None, [], 3]),
    "table(): width": (lambda x: vbrt.make_plan(linear(), "fp4").table(width=x), [None, 0, -1, 2.5, INF]),
}
#: call of one argument that is a path
PATHS = {
    "load": lambda x: vbrt.load(x, linear()),
    "from_pretrained": lambda x: pytest.importorskip("transformers") and vbrt.from_pretrained(x),
    "VBConfig.from_toml": lambda x: vbrt.VBConfig.from_toml(x),
    "read_routing": lambda x: vbrt.read_routing(x),
    "read_checkpoint": lambda x: vbrt.read_checkpoint(x),
    "save": lambda x: vbrt.wrap(linear()).save(x),
    "timeline": lambda x: vbrt.wrap(linear()).timeline(x).__enter__(),
}


def linear() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64))


@pytest.mark.parametrize("name", CALLS)
def test_an_argument_that_a_function_cannot_take_is_named(name):
    call, values = CALLS[name]
    for value in values:
        with pytest.raises(vbrt.VBError) as refused:
            call(value)
        assert str(refused.value).startswith(name) and ("expected" in str(refused.value) or "has" in str(refused.value))


@pytest.mark.parametrize("name", PATHS)
def test_what_is_no_path_is_said(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for value in NO_PATHS:
        with pytest.raises(vbrt.VBError):
            PATHS[name](value)
    assert list(tmp_path.iterdir()) == []
