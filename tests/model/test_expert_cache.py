"""What a device has counted reaches pages and the tallies of their layers, once."""

from itertools import count
from types import SimpleNamespace

import pytest
import torch

from vbrt.layers.experts.device_cache import DeviceCache
from vbrt.layers.experts.residency_owner import Deciding
from vbrt.model.expert_cache import ExpertCache
from vbrt.residency.access_counts import RoutingCounts
from vbrt.tiers import Tally

SIZES = {"layers.0": 5, "layers.1": 3}


class Tables:
    """The tables of a device, by hand: 40 bytes a page."""

    def __init__(self) -> None:
        pages = sum(SIZES.values())
        self.hits, self.misses, self.computed = torch.zeros(3, pages, dtype=torch.int64)
        self.slots = torch.full((pages,), -1, dtype=torch.int64)
        self.of_layers = torch.zeros(len(SIZES), 5, dtype=torch.int64)

    def routed(self):
        return self.of_layers.clone()

    def counts(self):
        return torch.stack((self.hits, self.misses, self.computed))

    def resident(self):
        return self.slots.clone()


@pytest.fixture
def cached():
    """An ExpertCache whose device cache has `Tables`, and the handles of its layers."""
    device = DeviceCache.__new__(DeviceCache)  # no arena: nothing is leased
    device._tables, device.fine = Tables(), {}
    device.keys = {name: tuple(f"{name}#coarse.{e}" for e in range(n)) for name, n in SIZES.items()}
    stored = {key: SimpleNamespace(nbytes=40) for keys in device.keys.values() for key in keys}
    device._stack, device.drive = SimpleNamespace(pages=stored), None
    cache = ExpertCache(SimpleNamespace(names=["gpu", "cpu"]), list)
    for name, experts in SIZES.items():
        tally = Tally()
        pages = [SimpleNamespace(nbytes=40, tally=tally, hits=0, misses=0, bytes_moved={}) for _ in range(experts)]
        deciding, spec = Deciding(), SimpleNamespace(top_k=2)
        routing = RoutingCounts(experts)
        cache._handles[name] = SimpleNamespace(pages=pages, planes=1, deciding=deciding, spec=spec, routing=routing)
    cache._cache, cache._told, cache._told_pages = device, device.totals(), device.counts()
    return cache, device._tables


def lease(tables, page, *, hit):
    (tables.hits if hit else tables.misses)[page] += 1
    tables.slots[page] = 0


def test_tallies_are_told_what_is_new_and_pages_when_somebody_asks(cached):
    cache, tables = cached
    for page, turn in zip((0, 0, 4, 5, 7, 7), count(), strict=False):
        lease(tables, page, hit=turn in (1, 5))
    first, second = cache._handles.values()
    for _ in range(2):  # the second time there is nothing new
        cache.settle()
        assert [(h.pages[0].tally.hits, h.pages[0].tally.misses) for h in (first, second)] == [(1, 2), (1, 2)]
        assert first.pages[0].tally.bytes_moved == {"cpu>gpu": 80} and (
            first.deciding.resident,
            second.deciding.resident,
        ) == (2, 2)
    assert [page.misses for page in first.pages] == [0] * 5
    lease(tables, 1, hit=False)
    cache.settle(each=True)
    assert [(page.hits, page.misses) for page in first.pages] == [(1, 1), (0, 1), (0, 0), (0, 0), (0, 1)]
    assert [page.misses for page in second.pages] == [1, 0, 1] and first.pages[1].bytes_moved == {"cpu>gpu": 40}
    for handle in (first, second):
        tally = handle.pages[0].tally
        assert (tally.hits, tally.misses) == tuple(sum(getattr(p, n) for p in handle.pages) for n in ("hits", "misses"))


def test_touched_and_reused_experts_are_told_once(cached):
    cache, tables = cached
    tables.of_layers[1] = torch.tensor([3, 8, 5, 4, 1])  # leases, ids, experts touched, right after a lease, again
    for _ in range(2):
        cache.settle()
    of = cache._handles["layers.1"].routing
    assert (of.cached, of.tokens, of.touched, of.compared, of.reused) == (3, 4, 5, 4, 1)
    assert cache._handles["layers.0"].routing.cached == 0


def test_without_a_device_cache_there_is_nothing_to_tell():
    ExpertCache(SimpleNamespace(names=["gpu", "cpu"]), list).settle(each=True)
