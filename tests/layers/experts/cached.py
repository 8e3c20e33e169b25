"""Routed experts in a device cache on random routing, beside the policy in Python and the bytes that should come."""

import ctypes
import random

import torch

from tests.layers.experts import tables
from vbrt.formats.page import build_layout
from vbrt.kernels.cuda.experts import drive_mail, residency
from vbrt.kernels.cuda.experts.residency import Shares
from vbrt.layers.experts import device_cache
from vbrt.layers.experts.device_cache import DeviceCache
from vbrt.residency.access_counts import RoutingCounts
from vbrt.residency.expert_pages import ExpertsPolicy
from vbrt.residency.lru import LRUPolicy
from vbrt.residency.simulate import Announce, simulate
from vbrt.tiers import Level, MemoryTier, Owner, SsdTier, TierStack

PAGE = 4096


class Experts:
    """Experts of some layers in a stack, with random bytes, as many as `counts` says, of `pages` * 4 KiB; where `fine`
    says so, with fine pages of that many or one more. With `drive`, a folder, every second page lives on a drive, and
    host memory has room for eight of those. `sizes`: of an expert's place in a cache, by coarse key."""

    def __init__(self, device, counts, pages, *, fine=None, gpu_bytes=1 << 30, drive=None):
        self.counts, self.owners = counts, []
        near, far = MemoryTier("gpu", device, gpu_bytes), MemoryTier("cpu", torch.device("cpu"), 1 << 40, pinned=True)
        self.stack = TierStack([Level(near, LRUPolicy(gpu_bytes)), far if drive is None else Level(far, LRUPolicy(0))])
        if drive is not None:
            self.stack.attach(SsdTier(drive, 1 << 40))
        self.layers = {f"layer{i}": [f"layer{i}.experts#coarse.{e}" for e in range(n)] for i, n in enumerate(counts)}
        self.sizes = {key: PAGE * n for keys, n in zip(self.layers.values(), pages, strict=True) for key in keys}
        self.content, more = {}, dict(zip(self.layers, fine or [0] * len(counts), strict=True))
        self.fine = {
            name: [key.replace("coarse", "fine") for key in keys] for name, keys in self.layers.items() if more[name]
        }
        stored = dict(self.sizes)
        for name, keys in self.fine.items():
            stored |= {key: PAGE * (more[name] + e % 2) for e, key in enumerate(keys)}
            self.sizes |= {key: self.sizes[key] + PAGE * (more[name] + 1) for key in self.layers[name]}
        for number, (key, nbytes) in enumerate(stored.items()):
            home = "cpu" if drive is None or number % 2 else "ssd"
            self.owners.append(Owner(self.stack))
            self.content[key] = torch.randint(0, 256, (nbytes,), dtype=torch.uint8)
            layout = build_layout("dense", "coarse", [("weight", "uint8", (nbytes,))])
            self.stack.add(key, layout, home, lambda out, key=key: out.copy_(self.content[key]), self.owners[-1])

    def cache(self, slots, *, scope="layer"):
        """A cache with so many slots a layer, all layers alike."""
        if "ssd" in self.stack.names:
            far = self.stack.levels[1]
            far.resize(far.home_bytes + 8 * max(page.numel() for page in self.content.values()))
        one_of_each = sum(max(self.sizes[key] for key in keys) for keys in self.layers.values())
        return DeviceCache(self.stack, self.layers, slots * one_of_each, scope=scope, fine=self.fine)

    def keys(self, layer, ids):
        """The pages that ids name, ascending, once each."""
        keys = self.layers[f"layer{layer}"]
        return tuple(keys[e] for e in sorted({e for e in ids.flatten().tolist() if 0 <= e < len(keys)}))


def routing(random, experts, tokens, k, dtype=torch.int64):
    """Ids [tokens, k]: some experts often, all at times, now and then a sentinel."""
    hot = range(0, experts, 3)

    def one():
        if random.random() < 0.05:
            return random.choice((-1, experts, experts + 7))
        return random.choice(hot) if random.random() < 0.6 else random.randrange(experts)

    return torch.tensor([[one() for _ in range(k)] for _ in range(tokens)], dtype=dtype)


def counts(cache):
    """(hits, misses) of each page that has any, by key."""
    found = {}
    for name, of_layer in cache.counts().items():
        rows = zip(cache.keys[name], of_layer.hits.tolist(), of_layer.misses.tolist(), strict=True)
        found |= {key: (hits, misses) for key, hits, misses in rows if hits or misses}
    return found


def simulated(policy, trace, sizes):
    """The same, and what is resident at the end, of the policy in Python."""
    done = simulate(policy, trace, policy.capacity_bytes, sizes=sizes)
    pages = {key: (done.hits[key], done.misses[key]) for key in done.hits | done.misses}
    return {key: pair for key, pair in pages.items() if any(pair)}, frozenset(policy.resident())


def compare(seed, counts_of_layers, pages, slots, scope, leases, k=3, fine=None, drive=None):
    """Lease at random in the interpreter; hits, misses, residents and bytes are those of the policy after each."""
    residency._PROGRAMS, device_cache._CHOOSE_EVERY = 1, 3
    drive_mail._launch = tables.drive_launch
    choose = random.Random(seed)
    experts = Experts(torch.device("cpu"), counts_of_layers, pages, fine=fine, drive=drive)
    cache, trace = experts.cache(slots, scope=scope), []
    of_layers = [RoutingCounts(count) for count in counts_of_layers]
    largest = {f"{name}.experts#coarse": experts.sizes[keys[0]] for name, keys in experts.layers.items()}
    for _ in range(leases):
        layer = choose.randrange(len(counts_of_layers))
        dtype, tokens = choose.choice((torch.int32, torch.int64)), choose.choice((1, 1, 2, 5))
        ids = routing(choose, counts_of_layers[layer], tokens, k, dtype)
        if cache.fits(layer, ids) and choose.random() < 0.85:
            trace.append(experts.keys(layer, ids))
            named = ids[(ids >= 0) & (ids < counts_of_layers[layer])]
            of_layers[layer].decode(named.unique().tolist(), len(named))
            with cache.lease(layer, ids) as addresses:
                check(experts, layer, ids, addresses)
        else:
            of_layers[layer].scan_unseen()
            for part in parts_of(choose, cache, layer, ids):
                trace += [Announce(experts.keys(layer, part.ids)), experts.keys(layer, part.ids)]
                with cache.lease_part(layer, part) as addresses:
                    check(experts, layer, part.ids, addresses)
    sizes = experts.sizes
    if scope == "model":  # slots of the largest
        largest, sizes = (dict.fromkeys(of, max(sizes.values())) for of in (largest, sizes))
    policy = ExpertsPolicy(cache.capacity_bytes, prefetch=0, scope=scope, layers=largest)
    want, resident = simulated(policy, [item for item in trace if item], sizes)
    assert counts(cache) == want, (seed, counts(cache), want)
    resident |= {key.replace("coarse", "fine") for key in resident if key.partition(".")[0] in experts.fine}
    assert cache.resident() == resident, (seed, cache.resident() ^ resident)
    moved = sum(want.get(key.replace("fine", "coarse"), (0, 0))[1] * len(page) for key, page in experts.content.items())
    assert sum(of_layer.bytes_in for of_layer in cache.counts().values()) == moved, seed
    for total, c in zip(cache.totals().values(), of_layers, strict=True):
        assert total[5:] == (c.cached, c.tokens, c.touched, c.compared, c.reused), (seed, total, c.compared, c.reused)
    evictions = sum(misses for _, misses in want.values()) - sum("coarse" in key for key in resident)
    if drive is not None:
        cache.check()
        found = cache.drive.counts, sum(at >= 0 for at in cache._tables._sources[0, ::2].tolist())
        assert found[0].posts > 3 and found[1], found
    cache.close()
    experts.stack.close()
    return evictions


def parts_of(choose, cache, layer, ids):
    """The parts of a scan whose experts the device knows, or the host, too."""
    if choose.random() < 0.5:
        return cache.scan(layer, ids)
    count = len(cache.keys[f"layer{layer}"])
    touched = sorted({e for e in ids.flatten().tolist() if 0 <= e < count})
    parts = cache.scan_touched(layer, ids, touched, choose.choice((1, 2, count)))
    assert [e for experts, _ in parts for e in experts] == touched
    for experts, part in parts:
        assert {e for e in part.ids.flatten().tolist() if 0 <= e < count} == set(experts)
    return [part for _, part in parts]


def check(experts, layer, ids, addresses):
    """Each leased page's bytes lie where the addresses say."""
    for key in experts.keys(layer, ids):
        at = int(addresses[int(key.rpartition(".")[2])])
        fine = experts.content.get(key.replace("coarse", "fine")) if experts.fine else None
        here = bytes(experts.content[key].numpy()) + (b"" if fine is None else bytes(fine.numpy()))
        assert ctypes.string_at(at, len(here)) == here, key


def compare_hosted(seed, count, slots, shares, leases, k=3):
    """Lease at random in the interpreter while the host computes `shares` of the misses; after each lease the ids that
    are kept are those of the rule in Python, and in the end counts and residents."""
    residency._PROGRAMS = 1
    choose, experts = random.Random(seed), Experts(torch.device("cpu"), (count,), (1,))
    cache, (keys,) = experts.cache(slots), experts.layers.values()
    policy = ExpertsPolicy(cache.capacity_bytes, prefetch=0, layers={"layer0.experts#coarse": PAGE})
    table, lone, computed, posts = torch.tensor(shares), 0, 0, []
    for turn in range(leases):
        ids = routing(choose, count, 1, k, choose.choice((torch.int32, torch.int64)))
        touched, resident = experts.keys(0, ids), set(policy.resident())
        pages = {key: policy._experts.page(key, PAGE) for key in touched}
        for page in pages.values():
            page.pool.tick(policy._lease)
        missed = sorted(set(touched) - resident, key=lambda key: (pages[key].pool.value(pages[key]), keys.index(key)))
        share = shares[len(missed)]
        if missed and share == len(missed):
            lone += 1
            share -= lone % 2 == 0
        for key in missed[:share]:
            policy.passed.note(key, PAGE)
        policy.passed._pages.clear()  # without another copy they are not admitted
        for key in touched:
            if key not in missed[:share]:
                policy.access(key, PAGE, set(touched) - set(missed[:share]))
        policy.ahead()
        kept = Shares(table, torch.empty_like(ids))
        with cache.lease_beside(0, ids, kept, lambda turn=turn: posts.append(turn)) as addresses:
            want = [-1 if 0 <= e < count and keys[e] in missed[:share] else e for e in ids.flatten().tolist()]
            assert kept.kept.flatten().tolist() == want, (seed, turn)
            check(experts, 0, kept.kept, addresses)
        computed += share
        assert cache.resident() == frozenset(policy.resident()), (seed, turn)
    (counted,) = cache.counts().values()
    assert int(counted.computed.sum()) == computed and posts == list(range(leases))
    assert counted.bytes_in == PAGE * (int(counted.misses.sum()) - computed)
    cache.close()
    experts.stack.close()
    return computed
