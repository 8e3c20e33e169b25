"""When the budget "auto" looks at the GPU's free memory."""

from types import SimpleNamespace

from vbrt.host import accelerator
from vbrt.model import auto_budget


def test_a_long_look_is_followed_by_a_longer_wait(monkeypatch):
    clock = SimpleNamespace(now=5.0)
    monkeypatch.setattr(auto_budget, "time", SimpleNamespace(monotonic=lambda: clock.now))
    monkeypatch.setattr(accelerator, "memory_stats_as_nested_dict", lambda: {"num_ooms": 0})
    of = auto_budget.GpuBalance(1 << 30)
    assert of.due()
    for seconds, wait in ((0.0, 0.1), (0.001, 0.5), (1.0, 2.0)):
        of.looked(seconds)
        clock.now += wait - 0.01
        assert not of.due()
        clock.now += 0.02
        assert of.due()
