"""Ctrl-C anywhere while tokens are added loses nothing: the layer has them or has not, and goes on."""

import gc
import sys

import pytest
import torch
from transformers.cache_utils import DynamicLayer

from tests.generation.kv.kv_stacks import PAGE, assert_empty, layers_of, stack_of, tokens
from tests.torture.interrupting import interrupted

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.mark.parametrize("step", [3001, pytest.param(53, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("options", [{"room": 42_000}, {"room": 42_000, "far": 0}], ids=["memory", "files"])
def test_tokens_are_there_or_not(options, step, tmp_path, monkeypatch, no_fsync):
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: None)
    far = options.get("far", 1 << 30)
    stack = stack_of(tmp_path, far=far)
    first, more = tokens(60), [tokens(1) for _ in range(PAGE + 1)]
    wanted = DynamicLayer()
    for new in (first, *more):
        result = wanted.update(*new)
    at, hit = step // 2, True
    while hit:
        at += step
        (layer,) = layers_of(stack, 1, room=options["room"])
        layer.append(*first)

        def add(layer=layer):
            while layer.length < 60 + len(more):
                layer.append(*more[layer.length - 60])

        hit = interrupted(at, add)
        assert layer.held.open + layer.held.sealed == layer.length
        if layer.length == 60 + len(more):
            layer.crop(1)
        add()
        found = layer.read()
        assert all(torch.equal(a, b) for a, b in zip(found, result, strict=True)), at
        del layer, add
        gc.collect()
        stack.retire_unowned()
        assert_empty(stack)
    assert at > step
    stack.close()
