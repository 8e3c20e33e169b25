"""Device caches: the device decides as the policy in Python does, and brings the right bytes."""

import copy
import os
import pickle
import random
import subprocess
import sys
import textwrap
import threading

import pytest
import torch

from tests.layers.experts.cached import PAGE, Experts, counts, routing, simulated
from tests.tiers.stacks import within
from tests.torture.interrupting import interrupted
from vbrt.errors import TierError
from vbrt.layers.experts.device_cache import DeviceCache
from vbrt.residency.expert_pages import ExpertsPolicy
from vbrt.tiers.storage.memory_tiers import Buffer

CPU = torch.device("cpu")


@pytest.fixture
def pinned(monkeypatch):
    """As if host memory were page-locked."""
    monkeypatch.setattr(Buffer, "pinned", True)


def interpreted(code):
    """Run code in a process of its own: Triton decides at import whether it interprets."""
    pytest.importorskip("triton")
    head = """
        import torch
        from vbrt.tiers.storage.memory_tiers import Buffer
        from tests.layers.experts.cached import *
        Buffer.pinned = True
        torch.manual_seed(0)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(head) + textwrap.dedent(code)],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"TRITON_INTERPRET": "1"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.exhaustive
def test_hits_misses_residents_and_bytes_are_those_of_the_policy():
    evicted = interpreted("""
        print(compare(0, (13, 13), (1, 1), 5, "layer", 8))
        print(compare(1, (9, 14), (1, 2), 3, "layer", 5))   # other sizes; a token may name more than the slots
        print(compare(2, (11, 11), (1, 1), 6, "model", 26))
        print(compare(3, (5,), (5,), 9, "layer", 3))         # room for all, pages of more than a block
        print(compare(4, (13, 9), (1, 2), 4, "layer", 8, fine=(2, 0)))  # two planes, and one
        print(compare(5, (11, 11), (1, 1), 6, "model", 26, fine=(1, 1)))
        print(compare(6, (11, 9), (1, 2), 6, "model", 26, fine=(2, 1)))  # layers of other sizes in slots of the largest
    """)
    assert [int(n) > 10 for n in evicted] == [True, True, True, False, True, True, True], evicted


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(4))
def test_hits_misses_residents_and_bytes_are_those_of_the_policy_for_long(seed):
    evicted = interpreted(f"""
        print(compare({seed}, (64, 64, 64), (1, 1, 1), 17, "layer", 300, k=4))
        print(compare({seed}, (40, 40, 40), (1, 1, 1), 33, "model", 300, k=4))
        print(compare({seed}, (300,), (1,), 290, "layer", 60, k=8))
    """)
    assert int(evicted[0]) > 100 and int(evicted[1]) > 100


#: by name; each prints what its test is about to read
_INTERPRETED = {
    "shared": """
        print(compare(6, (11, 9), (1, 2), 4, "model", 12, fine=(2, 3)))
    """,
    "hosted": """
        print(compare_hosted(0, 13, 5, [0, 0, 1, 2], 10))
        print(compare_hosted(1, 9, 4, [0, 1, 2, 3], 10))  # all, but for every second time
    """,
    "drive": """
        import tempfile
        for seed, given in ((0, ((13, 13), (1, 1), 5, "layer", 24)), (1, ((9, 9), (1, 1), 4, "model", 12))):
            with tempfile.TemporaryDirectory() as folder:
                print(compare(seed, *given, drive=folder))
        with tempfile.TemporaryDirectory() as folder:
            print(compare(2, (9,), (2,), 4, "layer", 9, fine=(1,), drive=folder))
    """,
    "scan": """
        residency._PROGRAMS = 1
        experts = Experts(torch.device("cpu"), (12,), (1,))
        cache, ids = experts.cache(6), torch.tensor([[3, 5, 8]])
        for _ in range(4):
            with cache.lease(0, ids):
                pass
        parts = cache.scan(0, torch.arange(12).view(4, 3))
        named = [sorted(set(part.ids.flatten().tolist()) - {-1}) for part in parts]
        print(named == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]])
        for part in parts:
            with cache.lease_part(0, part) as addresses:
                check(experts, 0, part.ids, addresses)
        print(set(experts.keys(0, ids)) <= cache.resident())
    """,
    "passing": """
        residency._PROGRAMS = 1
        experts = Experts(torch.device("cpu"), (12, 12), (1, 1))
        cache = experts.cache(9)  # 3 of the slots of each layer are lent to prompts
        choose, seen, touched = random.Random(0), {}, 0
        def compute(passing):
            pairs, addresses = passing.pairs, passing.addresses
            assert {int(e) for e in ids.flatten()[pairs]} == set(passing.experts)
            part = torch.full_like(ids.flatten(), -1).index_copy_(0, pairs, ids.flatten()[pairs])
            check(experts, layer, part, addresses)
            for pair in pairs.tolist():
                seen[pair] = seen.get(pair, 0) + 1
        for turn in range(6):
            layer, ids = turn % 2, routing(choose, 12, 9, 3)
            seen.clear()
            touched += len(experts.keys(layer, ids))
            cache.pass_through(layer, ids, compute, choose.choice((1, 3, 12)))
            inside = ((ids >= 0) & (ids < 12)).flatten().nonzero().squeeze(1).tolist()
            assert seen == dict.fromkeys(inside, 1)
            if turn == 3:
                held = cache.resident()
        print(cache.has_ring, len(held), held == cache.resident())
        found = counts(cache).values()
        print(touched == sum(hits + misses for hits, misses in found), sum(hits for hits, _ in found) > 14)
        print(cache.resident() >= set(experts.keys(0, torch.tensor([0, 3, 6, 9]))))  # often named
        def fill():
            for layer, ids in ((0, torch.arange(9)), (1, torch.arange(3, 12))):
                with cache.lease(layer, ids.view(3, 3)) as addresses:
                    check(experts, layer, ids.view(3, 3), addresses)
            return len(cache.resident())
        print(fill())
        layer, ids = 0, torch.arange(12).view(4, 3)
        def broken(passing):
            raise KeyboardInterrupt
        try:
            cache.pass_through(layer, ids, broken, 12)
        except KeyboardInterrupt:
            print(len(cache.resident()))
        print(fill())
        cache._note_needed(0, torch.arange(9), scan=False)  # a graph has recorded a lease of all slots
        print(cache.has_ring, cache._lent())
        cache._note_needed(1, torch.arange(8), scan=False)
        print(cache.has_ring)
    """,
    "resized": """
        residency._PROGRAMS = 1
        experts = Experts(torch.device("cpu"), (12, 12), (1, 2))
        cache, choose = experts.cache(8), random.Random(3)
        tier, changes = experts.stack.levels[0].tier, experts.stack.ledger.changes
        def lease(most):
            for turn in range(12):
                layer, ids = turn % 2, routing(choose, 12, 1, min(3, most))
                with cache.lease(layer, ids) as addresses:
                    check(experts, layer, ids, addresses)
            return [int((cache._tables._slots[1, at : at + 8] != 0).sum()) for at in (0, 8)]
        print(max(lease(8)), cache.capacity_bytes // PAGE, tier.used_bytes // PAGE)
        for room in (13, 7, 2, 99):
            before, found = cache.resident(), counts(cache)
            cache.resize(room * PAGE)
            print(cache.slots(0), cache.capacity_bytes // PAGE, tier.used_bytes // PAGE)
            assert cache.resident() <= before and counts(cache) == found
            held = [(s.data_ptr(), s.data_ptr() + s.nbytes) for of in cache._segments for s in of.slots if s.nbytes]
            for addresses in cache._tables._addresses:  # of any expert: kernels may read them
                assert all(any(begin <= at < end for begin, end in held) for at in addresses.tolist())
            for part in cache.scan(0, torch.arange(12).view(4, 3)):
                with cache.lease_part(0, part) as addresses:
                    check(experts, 0, part.ids, addresses)
            print(max(lease(cache.slots(0))) <= max(1, cache.slots(0) // 4))
        cache._note_needed(1, torch.arange(5), scan=False)  # a graph has recorded a lease of five slots
        print(cache.least_bytes // PAGE)
        cache.resize(0)
        print(cache.slots(1), experts.stack.ledger.changes == changes)
    """,
    "interrupted": """
        experts = Experts(torch.device("cpu"), (6,), (1,))
        with torch.inference_mode():  # as a first pass may be
            cache = experts.cache(3)
        launch, ids = residency._launch, torch.tensor([[1, 2]])
        def interrupted(name):
            if name == "fetch":
                raise KeyboardInterrupt
            return launch(name)
        residency._launch = interrupted
        try:
            with cache.lease(0, ids):
                print("not reached")
        except KeyboardInterrupt:
            residency._launch = launch
        assert len(cache.resident()) == 2  # but their bytes have not come
        for _ in range(2):
            with cache.lease(0, ids) as addresses:
                check(experts, 0, ids, addresses)
        print(counts(cache)["layer0.experts#coarse.1"])
    """,
}


@pytest.fixture(scope="module")
def printed():
    """What each program of `_INTERPRETED` prints, all run by one process, whose imports take seconds."""
    marked = [f"print('#', {name!r})\n" + textwrap.dedent(code) for name, code in _INTERPRETED.items()]
    parts = " ".join(interpreted("\n".join(marked))).split("# ")[1:]
    return {part.split()[0]: part.split()[1:] for part in parts}


def test_misses_of_least_worth_are_left_to_the_host(printed):
    assert len(printed["hosted"]) == 2 and all(int(count) > 3 for count in printed["hosted"])


def test_what_is_on_a_drive_changes_no_decision_and_no_byte(printed):
    assert len(printed["drive"]) == 3 and all(int(count) > 5 for count in printed["drive"])


def test_layers_of_other_sizes_share_slots_of_the_largest(printed):
    assert int(printed["shared"][0]) > 5


def test_a_scan_leaves_the_pages_that_are_used_most(printed):
    assert printed["scan"] == ["True", "True"]


def test_a_prompt_passes_by_what_is_resident(printed):
    assert printed["passing"][:6] == ["True", "12", "True", "True", "True", "True"]


def test_slots_are_lent_to_a_prompt_and_none_that_a_graph_may_need(printed):
    assert printed["passing"][6:] == ["18", "12", "18", "True", "[0,", "4]", "False"]


def test_slots_give_way_and_come_back_with_the_right_bytes_and_none_that_a_graph_may_need(printed):
    found = printed["resized"]
    assert found[:3] == ["2", "24", "24"]
    assert found[3:19] == [*"4 12 12 True 2 6 6 True 1 3 3 True 8 24 24 True".split()]
    assert found[19:] == ["15", "5", "True"]


def test_an_interrupted_lease_empties_the_cache_and_no_wrong_byte_is_read(printed):
    assert printed["interrupted"] == ["(1,", "2)"]


@pytest.mark.usefixtures("pinned")
def test_room_is_divided_as_the_policy_divides_it():
    experts = Experts(CPU, (8, 8, 4), (1, 2, 1), gpu_bytes=40 * PAGE)
    cache = DeviceCache(experts.stack, experts.layers, 11 * PAGE)  # a share of 2 slots each, one layer has one more
    assert [pool.slots for pool in cache._tables.pools] == [3, 3, 2]
    assert cache.capacity_bytes == 11 * PAGE == experts.stack.levels[0].tier.used_bytes
    cache.close()
    cache = DeviceCache(experts.stack, experts.layers, 40 * PAGE)
    assert [pool.slots for pool in cache._tables.pools] == [8, 8, 4]  # no more than pages
    cache.close()
    cache.close()
    assert experts.stack.levels[0].tier.used_bytes == 0
    with pytest.raises(TierError, match="layer1: its device cache was closed"), cache.lease(1, torch.tensor([[1]])):
        pass


@pytest.mark.usefixtures("pinned")
def test_what_a_cache_cannot_do_is_refused_by_name():
    experts = Experts(CPU, (8, 8), (1, 2), gpu_bytes=20 * PAGE)
    stack, layers = experts.stack, experts.layers
    for words, room, options, given in (
        (r"layer0: pages of 2 sizes", 9, {}, {"layer0": [layers["layer0"][0], layers["layer1"][0]]}),
        (r"layer1: 0 bytes of a device cache have no room for a page of 8192 bytes", 1, {}, layers),
        (r"do not fit into tiers\.gpu\.budget = 81920", 999, {}, {"a": layers["layer0"] * 9}),
        (r"layer2: pages of 0 sizes", 9, {}, {"layer2": ["layer2.experts#coarse.0"]}),
    ):
        with pytest.raises(TierError, match=words):
            DeviceCache(stack, given, room * PAGE, **options)
    cache = experts.cache(2)
    with pytest.raises(TierError, match=r"layer1: 3 routed ids may name more experts than the 2 slots"):
        with cache.lease(1, torch.tensor([[1, 2, 3]])):
            pass
    with pytest.raises(TierError, match="another device cache has it"):
        experts.cache(2)
    assert cache.capacity_bytes == 6 * PAGE and stack.levels[0].tier.used_bytes == 6 * PAGE
    with pytest.raises(TierError, match="cannot be pickled"):
        pickle.dumps(cache)
    assert copy.deepcopy(cache) is cache
    stack.close()
    with pytest.raises(TierError, match="the model was closed"), cache.lease(0, torch.tensor([[1]])):
        pass


@pytest.mark.usefixtures("pinned")
def test_one_lease_at_a_time(monkeypatch):
    experts = Experts(CPU, (8,), (1,))
    cache, ids, events = experts.cache(4), torch.tensor([[1]]), []
    monkeypatch.setattr(cache._tables, "decide", lambda layer, ids, **how: events.append("leased"))
    monkeypatch.setattr(cache._tables, "fetch", lambda *of: None)

    def other():
        with cache.lease(0, ids):
            events.append("second")

    with cache.lease(0, ids):
        thread = threading.Thread(target=other)
        thread.start()
        with pytest.raises(TierError, match="layer0: this thread has a lease of its cache already"):
            with cache.lease(0, ids):
                pass
        thread.join(0.05)
        events.append("first")
    thread.join(10)
    assert events == ["leased", "first", "leased", "second"]


@pytest.mark.usefixtures("pinned")
def test_ctrl_c_anywhere_leaves_a_cache_that_leases(monkeypatch):
    cache, ids, events = Experts(CPU, (8,), (1,)).cache(4), torch.tensor([[1]]), []
    monkeypatch.setattr(cache._tables, "decide", lambda layer, ids, **how: events.append("begun"))
    monkeypatch.setattr(cache._tables, "fetch", lambda *of: events.append("done"))
    monkeypatch.setattr(cache._tables, "forget", lambda: events.append("forgot"))

    def work():
        with cache.lease(0, ids):
            pass

    at, hit, forgotten = 0, True, 0
    while hit:
        at, events[:] = at + 1, []
        hit = interrupted(at, work)
        begun, done = "begun" in events, "done" in events
        events.clear()
        within(10, work)  # in another thread: the lock is free
        work()
        if begun and not done:
            assert events[0] == "forgot"
        forgotten += "forgot" in events
        assert events.count("forgot") <= 1
    assert forgotten and at > 10


# -- on a GPU ---------------------------------------------------------------------------------------------------------


def bytes_at(cache, address, nbytes):
    """What lies in the slots."""
    memories = (segment.arena.memory for segment in cache._segments)
    memory = next(memory for memory in memories if 0 <= address - memory.data_ptr() < len(memory))
    start = address - memory.data_ptr()
    return memory[start : start + nbytes].cpu()


@pytest.mark.gpu
@pytest.mark.parametrize("fine", [0, 17])
@pytest.mark.parametrize("scope", ["layer", "model"])
def test_the_right_bytes_arrive_without_a_synchronization_and_counts_are_those_of_the_policy(scope, fine):
    choose, device = random.Random(0), torch.device("cuda", 0)
    experts = Experts(device, (60, 60), (11, 11), fine=(fine, fine))
    cache, trace = experts.cache(24, scope=scope), []
    largest = {f"{name}.experts#coarse": experts.sizes[keys[0]] for name, keys in experts.layers.items()}
    for turn in range(200):
        layer = turn % 2
        ids_cpu = routing(choose, 60, choose.choice((1, 3)), 6)
        ids = ids_cpu.to(device)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            with cache.lease(layer, ids) as addresses:
                found = addresses.clone()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        trace.append(experts.keys(layer, ids_cpu))
        for key in trace[-1]:
            at = int(found[int(key.rpartition(".")[2])])
            of_key = [experts.content[each] for each in (key, key.replace("coarse", "fine"))[: 1 + bool(fine)]]
            here = torch.cat(of_key)
            assert torch.equal(bytes_at(cache, at, len(here)), here), (turn, key)
    policy = ExpertsPolicy(cache.capacity_bytes, prefetch=0, scope=scope, layers=largest)
    want, resident = simulated(policy, trace, experts.sizes)
    assert (counts(cache), {key for key in cache.resident() if "coarse" in key}) == (want, resident)
    experts.stack.close()


@pytest.mark.gpu
def test_a_graph_replays_with_other_ids_and_counts():
    choose, device = random.Random(1), torch.device("cuda", 0)
    experts = Experts(device, (32, 32), (3, 3))
    cache, trace = experts.cache(12), []
    static = torch.zeros(2, 1, 4, dtype=torch.int64, device=device)
    found = torch.zeros(2, 32, dtype=torch.int64, device=device)

    def step():
        for layer in range(2):
            with cache.lease(layer, static[layer]) as addresses:
                found[layer].copy_(addresses)

    def run(replay):
        ids = torch.stack([routing(choose, 32, 1, 4) for _ in range(2)])
        static.copy_(ids)
        replay()
        for layer in range(2):
            trace.append(experts.keys(layer, ids[layer]))
            for key in trace[-1]:
                at = int(found[layer, int(key.rpartition(".")[2])])
                assert torch.equal(bytes_at(cache, at, 3 * PAGE), experts.content[key])

    run(step)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for _ in range(60):
        run(graph.replay)
    run(step)
    largest = {f"{name}.experts#coarse": 3 * PAGE for name in experts.layers}
    policy = ExpertsPolicy(cache.capacity_bytes, prefetch=0, layers=largest)
    assert (counts(cache), cache.resident()) == simulated(policy, [t for t in trace if t], experts.sizes)
    with pytest.raises(TierError, match="a CUDA graph has recorded where the slots of its cache lie"):
        cache.check_not_recorded()
    experts.stack.close()


@pytest.mark.gpu
@pytest.mark.parametrize("scope", ["layer", "model"])
def test_a_graph_goes_on_while_slots_give_way_and_come_back(scope):
    choose, device, pages = random.Random(2), torch.device("cuda", 0), 512
    experts = Experts(device, (32, 32), (pages, pages))
    cache = experts.cache(16, scope=scope)
    static = torch.zeros(2, 1, 4, dtype=torch.int64, device=device)
    found = torch.zeros(2, 32, dtype=torch.int64, device=device)

    def step():
        for layer in range(2):
            with cache.lease(layer, static[layer]) as addresses:
                found[layer].copy_(addresses)

    def run(replay):
        ids = torch.stack([routing(choose, 32, 1, 4) for _ in range(2)])
        static.copy_(ids)
        replay()
        for layer in range(scope == "model", 2):  # the last lease of a pool is valid
            for key in experts.keys(layer, ids[layer]):
                at = int(found[layer, int(key.rpartition(".")[2])])
                assert torch.equal(bytes_at(cache, at, pages * PAGE), experts.content[key])

    run(step)
    graph, slot = torch.cuda.CUDAGraph(), pages * PAGE
    with torch.cuda.graph(graph):
        step()
    for rows in (16, 9, 4, 12, 0, 16):
        before, had = torch.cuda.memory_allocated(), cache.capacity_bytes
        cache.resize(2 * rows * slot)
        assert cache.capacity_bytes == 2 * max(rows, 4 if scope == "layer" else 2) * slot
        assert abs(torch.cuda.memory_allocated() - before - cache.capacity_bytes + had) <= 1 << 16
        for _ in range(30):
            run(graph.replay)
    hits = [hits for hits, _ in counts(cache).values()]
    assert sum(hits) > 100
    experts.stack.close()


@pytest.mark.gpu
def test_a_lease_on_another_stream_waits_for_the_readers_of_the_one_before():
    device = torch.device("cuda", 0)
    experts = Experts(device, (16,), (64,))
    cache, side = experts.cache(1), torch.cuda.Stream()
    copies = []
    for turn in range(20):
        stream = side if turn % 2 else torch.cuda.current_stream()
        with torch.cuda.stream(stream), cache.lease(0, torch.tensor([[turn % 16]], device=device)):
            torch.cuda._sleep(2_000_000)
            copies.append(cache._segments[0].arena.memory.clone())
    torch.cuda.synchronize()
    for turn, copied in enumerate(copies):
        assert torch.equal(copied.cpu(), experts.content[f"layer0.experts#coarse.{turn % 16}"]), turn
    experts.stack.close()
