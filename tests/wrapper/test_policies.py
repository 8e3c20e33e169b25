"""A policy of the user's own in wrap and load: "where do I add a policy"."""

import pytest
import torch
from torch import nn

import vbrt
from vbrt.config import load_config
from vbrt.errors import ConfigError
from vbrt.model.planner import make_plan
from vbrt.residency.lru import LRUPolicy
from vbrt.residency.simulate import Pass, simulate


class MostRecent(LRUPolicy):
    """Evict the page that was used last: on a cyclic scan it keeps the first pages of the pass. A whole policy."""

    kind = "mru"

    def __init__(self, capacity_bytes=0):
        super().__init__(capacity_bytes)
        self.phases = []

    def begin_pass(self, phase="forward"):
        self.phases.append(phase)

    def _candidates(self):
        return reversed(self._pages.items())


def layers() -> nn.Sequential:
    return nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(6)]).eval()


def tiers(tmp_path) -> dict:
    page = make_plan(layers(), load_config("dense")).swaps[0].pages[0].nbytes
    return {"cpu": {"budget": 4 * page}, "ssd": {"enabled": True, "path": str(tmp_path / "pages")}}


@torch.no_grad()
@pytest.mark.parametrize("policy", [MostRecent(), MostRecent], ids=["object", "class"])
def test_a_policy_of_the_users_decides_in_wrap_and_load(tmp_path, policy):
    model, x = layers(), torch.randn(3, 64)
    expected = model(x)
    vb = vbrt.wrap(model, "dense", policy=policy, tiers=tiers(tmp_path)).materialize()
    vb.save(tmp_path / "saved")
    before = vb.stats()
    loaded = vbrt.load(tmp_path / "saved", layers(), policy=policy, tiers=tiers(tmp_path))
    for wrapped in (vb, loaded):
        hits = wrapped.stats().hits
        for _ in range(5):
            assert torch.equal(wrapped(x), expected)
        stats = wrapped.stats()
        assert stats.policy == "mru" and "vbrt, mru policy" in str(stats)
        assert stats.hits - hits >= 4 * 3  # LRU has none
        assert wrapped.stack.levels[0].policy.policy.phases == ["prompt"] * 5
    order = [f"{swap.name}#dense" for swap in loaded.plan.swaps]
    counts = simulate(MostRecent(4), [Pass("prompt"), *order] * 5, 4)
    assert loaded.stats().hits == counts.hits.total() > before.hits
    vb.close()
    loaded.close()


def test_a_policy_that_lacks_a_method_is_refused_before_the_model_is_changed(tmp_path):
    model = layers()

    class Mine(MostRecent):
        remove = None

    with pytest.raises(ConfigError, match=r"policy Mine: it has no method remove\(key\)"):
        vbrt.wrap(model, "dense", policy=Mine())
    with pytest.raises(ConfigError, match=r"policy Mine: it has no method remove\(key\)"):
        vbrt.wrap(model, "dense", policy=Mine)
    assert all(type(layer) is nn.Linear for layer in model)
    vbrt.wrap(model, "dense").close()


def test_models_on_one_runtime_share_its_policy():
    with vbrt.wrap(layers(), "dense", policy=MostRecent) as vb:
        with pytest.raises(ConfigError, match="share its policy"):
            vbrt.wrap(layers(), "dense", runtime=vb.runtime, policy=MostRecent)
        assert vbrt.wrap(layers(), "dense", runtime=vb.runtime).stats().policy == "mru"
