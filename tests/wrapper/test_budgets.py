"""set_budget: tiers that shrink and grow while a model runs."""

import re
from types import SimpleNamespace

import psutil
import pytest
import torch
from torch import nn

import vbrt
from tests.models import config, dtype_of, mlp, wrap
from vbrt.errors import ConfigError, TierError

# -- budgets -----------------------------------------------------------------------------------------------------------


def test_a_budget_may_shrink_and_grow_while_the_model_runs(format, tmp_path):
    model, original = mlp(dtype=dtype_of(format)), mlp(dtype=dtype_of(format))
    x = torch.linspace(-1, 1, 192, dtype=dtype_of(format)).reshape(3, 64)
    tiers = {"cpu": {"budget": "1GiB"}, "ssd": {"enabled": True, "path": str(tmp_path)}}
    vb = vbrt.wrap(model, config(format) | {"tiers": tiers})
    with torch.no_grad():
        want = vb(x)
        assert torch.equal(vb(x), want)
        largest, pages = max(swap.page_bytes for swap in vb.plan.swaps), vb.plan.page_bytes
        for budget in (largest, pages // 2, "1GiB", largest + 4096):
            nbytes = vb.set_budget("cpu", budget)
            assert nbytes == vb.plan.budgets["cpu"] == vb.stats().tiers["cpu"].budget_bytes
            for _ in range(3):
                assert torch.equal(vb(x), want)
                tier = vb.stats().tiers["cpu"]
                assert tier.held_bytes <= tier.peak_bytes <= nbytes
        assert vb.settings.tiers.cpu.budget == largest + 4096
        vb.set_budget("cpu", "1GiB")
        vb(x), vb(x)
        misses = vb.stats().misses
        assert torch.equal(vb(x), want) and vb.stats().misses == misses
    if format in ("dense", "exact"):
        assert torch.equal(original(x), want)
    vb.close()


def test_impossible_budgets_are_refused_and_the_model_runs_on(tmp_path):
    vb, x = wrap(mlp(), "dense"), torch.randn(2, 64)
    want = vb(x)
    for tier, budget, error, says in [
        ("cpu", 4096, ConfigError, "smaller than the largest layer's pages"),
        ("cpu", "lots", ConfigError, 'set_budget(\'cpu\'): budget = "lots"; expected "auto", bytes, "8GiB" or "40%"'),
        ("cpu", "900TiB", ConfigError, "this machine has"),
        (
            "ssd",
            "1GiB",
            TierError,
            "tiers.ssd: this model has the tiers cpu; name one of them, or wrap it again with ssd",
        ),
        ("ram", "1GiB", ConfigError, 'set_budget(): tier = "ram"; expected one that this model has: cpu'),
        ("cpu", vb.plan.page_bytes - 4096, TierError, "no tier below cpu has room"),
    ]:
        with pytest.raises(error, match=re.escape(says)):
            vb.set_budget(tier, budget)
        assert torch.equal(vb(x), want)
    vb.close()


def test_a_budget_of_a_model_of_which_nothing_is_swapped_may_be_set():
    with pytest.warns(UserWarning, match="nothing is swapped"):
        vb = wrap(nn.Sequential(nn.Conv2d(3, 4, 3)))
    assert vb.set_budget("cpu", "1MiB") == 1 << 20 == vb.stats().tiers["cpu"].budget_bytes


def test_a_budget_of_one_tier_does_not_ask_for_those_of_the_others_again(tmp_path, monkeypatch):
    free = psutil.disk_usage(str(tmp_path)).free
    tiers = {"cpu": {"budget": "1MiB"}, "ssd": {"enabled": True, "path": str(tmp_path), "budget": free}}
    monkeypatch.setattr(psutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    vb = vbrt.wrap(mlp(), config("dense") | {"tiers": {**config("dense")["tiers"], **tiers}})
    monkeypatch.setattr(psutil, "disk_usage", lambda path: SimpleNamespace(free=free - 4096))  # pages, or others
    assert vb.set_budget("cpu", "2MiB") == 2 << 20
    with pytest.raises(ConfigError, match=r"tiers\.ssd\.budget"):
        vb.set_budget("ssd", free)
    vb.close()


def test_the_source_of_the_settings_does_not_grow_with_each_budget():
    vb = wrap(mlp())
    for _ in range(3):
        vb.set_budget("cpu", "1GiB")
    assert vb.settings.source == "dict with overrides"


@pytest.mark.parametrize("prefetch", ["auto", 3])
def test_the_prefetch_depth_follows_from_the_pages_unless_it_is_given(tmp_path, prefetch):
    tiers = {"cpu": {"budget": "1MiB"}, "ssd": {"enabled": True, "path": str(tmp_path)}}
    vb = vbrt.wrap(mlp(), config("dense") | {"tiers": tiers, "policy": {"prefetch": prefetch}})
    assert vb.stack.levels[0].policy.prefetch == (2 if prefetch == "auto" else 3)
    vb.close()
