"""When a budget looks at the GPU's free memory, and what it makes of it."""

from types import SimpleNamespace

import pytest

from vbrt.config.budgets import CONTEXT_BYTES
from vbrt.host import accelerator
from vbrt.model import auto_budget
from vbrt.residency.plan import GpuRoom


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


@pytest.mark.parametrize(
    ("free", "reserved", "allocated", "budget", "ahead", "wanted"),
    [
        (9000, 2900, 2900, 2000, 0, 2000),  # of a share of 4000 bytes 1100 are free, 1000 are to stay so
        (9000, 2900, 2900, 2000, 800, 1300),
        (9000, 3900, 2900, 2000, 800, 1300),  # cached blocks are free
        (9000, 3700, 3700, 2000, 0, 1300),
        (700, 2900, 2900, 2000, 500, 1200),  # other processes take the rest
        (9000, 1000, 1000, 1200, 0, 2000),  # it comes back
        (9000, 1900, 1900, 1200, 0, 2000),
        (9000, 2600, 2600, 1200, 0, 1200),
    ],
)
def test_a_budget_within_a_share_of_the_gpu_follows_what_the_process_takes(
    free, reserved, allocated, budget, ahead, wanted, monkeypatch
):
    monkeypatch.setattr(accelerator, "memory_stats_as_nested_dict", lambda: {"num_ooms": 0})
    monkeypatch.setattr(accelerator, "mem_get_info", lambda: (free, 10000))
    monkeypatch.setattr(accelerator, "memory_reserved", lambda: reserved)
    monkeypatch.setattr(accelerator, "memory_allocated", lambda: allocated)
    of = auto_budget.GpuBalance(2000, GpuRoom(CONTEXT_BYTES + 4000, 1000, 2048))
    assert of.wanted_now(budget, 5000, ahead) == wanted
