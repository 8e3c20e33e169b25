"""The policy of routed experts: its rule against a plain reference, scans, and room beside other layers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vbrt.residency.expert_pages import ExpertsPolicy
from vbrt.residency.expert_pool import HALF, ONE, WINDOW_PART, ExpertPage, Pool
from vbrt.residency.expert_room import ExpertRoom, largest_pages, split_key
from vbrt.residency.simulate import PASS, Announce, make_policy, simulate


class SlotRule:
    """The rule of `expert_pool` for one pool of equal pages, word for word, in slots."""

    def __init__(self, slots: int, layers: int = 1) -> None:
        self.slots, self.half, self.now = slots, HALF * layers, 0
        self.score: dict[tuple, int] = {}
        self.last: dict[tuple, int] = {}
        self.window: list[tuple] = []
        self.main: set[tuple] = set()

    def value(self, page: tuple) -> int:
        halvings = self.now // self.half - self.last.get(page, 0) // self.half
        return self.score.get(page, 0) >> halvings

    def lease(self, pages: list[tuple]) -> list[bool]:
        """Take pages (layer, expert); return which of them were there."""
        self.now += 1
        hits = []
        for page in sorted(pages):
            hits.append(page in self.window or page in self.main)
            if not hits[-1]:
                self.load(page, pages)
            self.score[page], self.last[page] = self.value(page) + ONE, self.now
        return hits

    def load(self, page: tuple, busy: list[tuple]) -> None:
        if len(self.window) + len(self.main) == self.slots:
            oldest = next((p for p in self.window if p not in busy), None)
            free = [p for p in self.main if p not in busy]
            least = min(free, key=lambda p: (self.value(p), self.last.get(p, 0), p), default=None)
            if least and oldest and self.age(least) >= self.age(oldest):
                least = None
            if least:
                self.main.remove(least)
            else:
                self.window.remove(oldest)
        self.window.append(page)
        while len(self.window) > max(1, self.slots // WINDOW_PART):
            self.main.add(self.window.pop(0))

    def age(self, page: tuple) -> tuple:
        return self.value(page), self.last.get(page, 0)


def key_of(page: tuple[int, int]) -> str:
    return f"layer{page[0]}.experts#coarse.{page[1]}"


@st.composite
def routings(draw: st.DrawFn) -> tuple[int, list[list[tuple]]]:
    """Layers, and leases of their experts in the order of the model; some experts are favourites."""
    layers, experts = draw(st.integers(1, 3)), draw(st.integers(2, 20))
    ids = st.lists(st.one_of(st.integers(0, 2), st.integers(0, experts)), min_size=1, max_size=4, unique=True)
    tokens = draw(st.lists(st.tuples(*[ids] * layers), min_size=1, max_size=40))
    return layers, [[(layer, e) for e in sorted(found)] for token in tokens for layer, found in enumerate(token)]


@given(routings(), st.integers(4, 24), st.integers(0, 4095))
def test_a_pool_of_equal_pages_follows_the_rule_slot_by_slot(routing, slots, rest):
    layers, leases = routing
    told = {f"layer{i}.experts#coarse": 4096 for i in range(layers)}
    policy = ExpertsPolicy(slots * 4096 + rest, scope="model", layers=told)
    rule = SlotRule(slots, layers)
    for lease in leases:
        keys = [key_of(page) for page in lease]
        assert [policy.access(key, 4096, keys).hit for key in keys] == rule.lease(lease)
        policy.ahead(keys)
        assert set(policy.resident()) == {key_of(page) for page in (*rule.window, *rule.main)}


@given(routings(), st.integers(4, 9), st.integers(0, 2))
def test_each_layer_has_a_pool_of_its_own(routing, slots, more):
    layers, leases = routing
    more = min(more, layers)
    told = {f"layer{i}.experts#coarse": 4096 for i in range(layers)}
    policy = ExpertsPolicy((slots * layers + more) * 4096, layers=told)
    rules = [SlotRule(slots + (layer < more)) for layer in range(layers)]
    for lease in leases:
        keys = [key_of(page) for page in lease]
        assert [policy.access(key, 4096, keys).hit for key in keys] == rules[lease[0][0]].lease(lease)
        policy.ahead(keys)


def tokens(*ids: list[int]) -> list:
    return [item for found in ids for item in (PASS, tuple(key_of((0, e)) for e in found))]


def test_what_is_used_often_outlives_what_was_used_last():
    often = tokens(*[[0, 1]] * 6)
    many = tokens(*[[e, e + 1] for e in range(2, 14, 2)])
    assert simulate("experts", [*often, *many, *tokens([0, 1])], 8).hits[key_of((0, 0))] == 6
    assert simulate("lru", [*often, *many, *tokens([0, 1])], 8).hits[key_of((0, 0))] == 5


def test_what_was_used_often_long_ago_goes():
    """A working set that just fits is resident once the favourites of before have lost their scores."""
    old = tokens(*[[0, 1]] * 20)
    new = [tokens(*[[2 + t % 5, 7] for t in range(turns * 5)]) for turns in (8 * HALF, 8 * HALF + 10)]
    before, after = (simulate("experts", [*old, *leases], 6).misses.total() for leases in new)
    assert after == before > 8


def scan(experts: int, layer: int = 0) -> list:
    keys = [key_of((layer, e)) for e in range(experts)]
    return [Announce(tuple(keys)), *((key,) for key in keys)]


@pytest.mark.parametrize("scope", ["layer", "model"])
@pytest.mark.parametrize("room", [12, 16, 31])
def test_a_scan_leaves_what_decoding_gathered(scope, room):
    decode = tokens(*[[t % 4, 4 + t % 3] for t in range(40)])
    after = tokens(*[[e] for e in range(7)])
    trace = [*decode, PASS, *scan(32), *after]
    warm = simulate("experts", [*decode, PASS, *scan(32)], room, scope=scope)
    assert (simulate("experts", trace, room, scope=scope).misses - warm.misses).total() == 0
    assert (simulate("lru", trace, room).misses - simulate("lru", [*decode, *scan(32)], room).misses).total() >= 6


@pytest.mark.parametrize("prefetch", [1, 2, 4])
def test_the_pages_of_a_scan_are_staged_ahead_of_their_leases(prefetch):
    counts = simulate("experts", [PASS, *scan(32)], 8, prefetch=prefetch)
    assert counts.prefetched.total() == 32 and counts.hits.total() == 0


def test_repeated_scans_hit_all_but_the_pages_on_their_way():
    once, often = [PASS, *scan(32)], 10
    counts = simulate("experts", once * often, 16, prefetch=2)
    assert counts.hits.total() >= (often - 1) * (16 - 3)
    assert simulate("lru", once * often, 16).hits.total() == 0


def test_a_lease_of_a_scan_takes_a_sixth_of_the_room_at_most():
    policy = ExpertsPolicy(60, prefetch=2, scan=32, layers={"layer0.experts#coarse": 2})
    assert (policy.scan_pages, policy.prefetch) == (5, 32)
    policy.announce({key_of((0, e)): 2 for e in range(32)})
    assert len(policy.ahead()) == 5
    assert ExpertsPolicy(6000, prefetch=2, scan=32, layers={"layer0.experts#coarse": 2}).scan_pages == 32
    assert ExpertsPolicy(4, prefetch=0, layers={"layer0.experts#coarse": 2}).scan_pages == 1


def test_a_scan_moves_no_clock():
    """After it the page that was used three times is still worth more than those that were used once later."""
    decode = tokens(*[[0]] * 3, *[[e] for e in range(1, 8)])
    passing = [key_of((0, e)) for e in range(20, 120)]
    trace = [*decode, Announce(tuple(passing)), *((key,) for key in passing), *tokens([10], [11], [12])]
    policy = ExpertsPolicy(8)
    simulate(policy, trace, 8)
    assert key_of((0, 0)) in policy.resident()


def test_a_page_that_waits_for_its_scan_is_not_evicted_for_another():
    policy = ExpertsPolicy(12, prefetch=2, scope="model")
    simulate(policy, tokens(*[[e] for e in range(12)]), 12)
    policy.announce({key_of((1, 0)): 1, key_of((1, 1)): 1})
    staged = [decision.key for decision in policy.ahead()]
    assert len(staged) == 2
    assert not {*policy.access(key_of((0, 20)), 1).evict} & {*staged}


def test_a_scan_that_evicts_from_the_main_part_promotes_the_oldest_newcomer_not_its_own_page():
    pool = Pool()
    pool.share = 4
    old, new, scanned = (ExpertPage(name, pool, (0, n), 1) for n, name in enumerate(("old", "new", "scanned")))
    for page in (old, new):
        pool.insert(page, scanned=False)
    pool.evict(old)
    pool.insert(scanned, scanned=True)
    assert list(pool.window) == ["scanned"] and new.place == "main"


def test_shares_are_whole_slots_and_the_first_layers_have_the_rest():
    room = ExpertRoom(by_layer=True, layers={"a#c": 2, "a#f": 3, "b#c": 2, "b#f": 3})
    pages = [room.page(f"{layer}.0", size) for layer, size in (("a#c", 2), ("a#f", 3), ("b#c", 2), ("b#f", 3))]
    room.resize(27)
    assert [page.pool.share for page in pages] == [6, 9, 6, 6]
    room.resize(-3)
    assert [page.pool.share for page in pages] == [0, 0, 0, 0]


def test_an_announcement_ends_with_the_pass_and_with_the_next_one():
    policy = ExpertsPolicy(12, prefetch=2)
    pages = {key_of((0, e)): 1 for e in range(6)}
    policy.announce(pages)
    assert [d.key for d in policy.ahead()] == list(pages)[:2]
    policy.announce({key_of((1, 3)): 1})
    assert [d.key for d in policy.ahead()] == [key_of((1, 3))] and policy.ahead() == []
    policy.announce(pages)
    policy.begin_pass()
    assert policy.ahead() == []
    assert policy.access(key_of((0, 1)), 1) == (key_of((0, 1)), False, (), True, 0)


def test_a_page_that_is_gone_is_not_staged_and_its_layer_leaves_its_share_to_the_others():
    policy = ExpertsPolicy(12, prefetch=2)
    for layer in range(2):
        policy.access(key_of((layer, 0)), 1)
    policy.announce({key_of((0, e)): 1 for e in range(4)})
    policy.remove(key_of((0, 1)))
    assert [d.key for d in policy.ahead()] == [key_of((0, 2)), key_of((0, 3))]
    for e in range(4):
        policy.remove(key_of((0, e)))
    for e in range(1, 12):
        assert not policy.access(key_of((1, e)), 1).evict
    assert len(policy.resident()) == 12


@pytest.mark.parametrize("room", [3, 6, 9, 12])
def test_a_model_without_experts_is_served_as_by_the_scheduled_policy(room):
    passes = [PASS, *(f"page{i}" for i in range(11))] * 6
    served, usual = (simulate(kind, passes, room) for kind in ("experts", "scheduled"))
    assert served.hits == usual.hits and served.prefetched == usual.prefetched


def test_other_layers_stay_where_they_fit_beside_a_lease_of_experts():
    leases = [PASS, ("attention#coarse",), ("mlp#coarse",), (key_of((0, 0)), key_of((0, 1))), ("head#coarse",)]
    counts = simulate("experts", leases * 10, 5)
    assert counts.misses == dict.fromkeys(counts.misses, 1)
    other = [PASS, ("attention#coarse",), ("mlp#coarse",), (key_of((0, 2)), key_of((0, 3))), ("head#coarse",)]
    counts = simulate("experts", (leases + other) * 10, 5)
    assert counts.misses["attention#coarse"] == 1 and counts.misses[key_of((0, 3))] == 10
    assert simulate("experts", leases * 10, 2).misses.total() >= 40  # what one lease takes is enough


def test_busy_pages_of_other_layers_are_not_evicted_for_experts():
    policy = ExpertsPolicy(3)
    for key in ("a", "b", "c"):
        policy.access(key, 1)
    assert policy.access(key_of((0, 0)), 2, busy=("a", "b", key_of((0, 0)))) is None
    assert set(policy.resident()) == {"a", "b", "c"} and policy.resident_bytes == 3
    assert policy.access(key_of((0, 0)), 2, busy=("b", key_of((0, 0)))).evict == ("a", "c")


def test_leases_that_are_wider_than_a_share_borrow_and_give_back():
    told = {f"layer{i}.experts#coarse": 1 for i in range(4)}
    policy = ExpertsPolicy(16, layers=told)
    for layer in range(4):
        for e in range(4):
            policy.access(key_of((layer, e)), 1)
    wide = [key_of((0, e)) for e in range(10)]
    policy.ahead()
    assert all(policy.access(key, 1, wide) for key in wide)
    held = [sum(key.startswith(f"layer{i}") for key in policy.resident()) for i in range(4)]
    assert held == [10, 2, 2, 2]
    policy.ahead()
    policy.access(key_of((0, 10)), 1)
    assert sum(key.startswith("layer0") for key in policy.resident()) == 4


def test_keys_of_experts():
    assert split_key("model.layers.3.mlp.experts#coarse.17") == ("model.layers.3.mlp.experts#coarse", 17)
    assert split_key("model.layers.3#coarse") is None and split_key("3") is None and split_key("a.7") is None
    assert largest_pages({"a#c.0": 2, "a#c.1": 3, "b#c": 9}) == {"a#c": 3}
    with pytest.raises(ValueError, match=r"policy\.scope = 'page'; expected 'layer' or 'model'"):
        make_policy("experts", 4, scope="page")
