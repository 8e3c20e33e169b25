"""scripts/training_host.py on a CPU: each variant is what its name says."""

import argparse

import pytest
import torch

from scripts import training_host as host
from scripts.typed_training import batch_of, in_tiers

OPTIONS = argparse.Namespace(family="full", tokens=32, threads=[1], steps=1, rounds=1)


def test_variants_change_what_they_name_and_change_it_back():
    pytest.importorskip("transformers")
    vb, optimizer = in_tiers(OPTIONS, "recompute")
    with vb:
        loop = host.Loop(vb, optimizer, batch_of("full", 32))
        known = host.variants(loop, [1, 3])
        loop.step()
        helpers, steps = optimizer._vb_updater.helpers, vb.stats().updates.steps
        with known["3 threads"]():
            row = loop.step()
            assert optimizer._vb_updater.helpers.threads == 3
        assert optimizer._vb_updater.helpers is helpers
        assert row["step"] >= row["forward"] + row["backward"] + row["update"]
        with known["no updates"]():
            loop.step()
        assert vb.stats().updates.steps == steps + 1
        loop.step()
        assert vb.stats().updates.steps == steps + 2
        weight = vb.model.layers[0].mlp.up_proj
        before = weight.weight_now()
        with known["as it is"](), host.computing_nothing(loop):
            loop.step()
        assert torch.equal(weight.weight_now(), before)
        loop.step()
        vb.settle()
        assert not torch.equal(weight.weight_now(), before)


def test_a_row_for_each_variant():
    pytest.importorskip("transformers")
    lines = host.table(host.measured(OPTIONS))
    rows = [line.split(" | ")[0].strip("| ") for line in lines[2:]]
    varied = ["1 threads", "GIL after 0.1 ms", "updates at the step", "no updates", "updates compute nothing"]
    assert rows == ["resident", "as it is", *varied]
