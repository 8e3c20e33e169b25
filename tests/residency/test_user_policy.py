"""Policies of the user: what the protocol asks for is checked at once, and what they decide, when they decide it."""

import pytest

from vbrt.config import PolicyConfig
from vbrt.errors import ConfigError, TierError
from vbrt.residency.lru import LRUPolicy
from vbrt.residency.policy import Decision, Policy
from vbrt.residency.scheduled import ScheduledPolicy
from vbrt.residency.simulate import simulate
from vbrt.residency.user_policy import CheckedPolicy, check_policy, policy_factory, take_policy


class Fifo:
    """The page that came first goes first: a whole policy, without a base class."""

    kind, prefetch = "fifo", 0

    def __init__(self, capacity_bytes=0):
        self.capacity_bytes, self.pages = capacity_bytes, {}

    def reset(self):
        self.pages.clear()

    def begin_pass(self, phase="forward"):
        pass

    def access(self, key, size, busy=()):
        if key in self.pages:
            return Decision(key, hit=True)
        evicted = self.evict_for(size, busy)
        self.pages[key] = size
        return Decision(key, hit=False, evict=evicted)

    def evict_for(self, size, busy=()):
        evicted = []
        for key in [key for key in self.pages if key not in busy]:
            if sum(self.pages.values()) + size > self.capacity_bytes:
                evicted.append(key)
                del self.pages[key]
        return tuple(evicted)

    def ahead(self, busy=()):
        return []

    def remove(self, key):
        self.pages.pop(key, None)

    def resize(self, capacity_bytes):
        self.capacity_bytes = capacity_bytes
        return self.evict_for(0)


@pytest.mark.parametrize("policy", [LRUPolicy(4), ScheduledPolicy(4), Fifo(4), CheckedPolicy(Fifo(), 4)])
def test_every_policy_here_keeps_to_the_protocol(policy):
    assert check_policy(policy) is policy and isinstance(policy, Policy)
    assert simulate(policy, list("abcabd"), 4).hits.total() == 2


@pytest.mark.parametrize("missing", ["access", "ahead", "begin_pass", "remove", "reset", "resize"])
def test_a_policy_without_a_method_is_refused_by_the_methods_name(missing):
    kind = type("Mine", (), {name: member for name, member in vars(Fifo).items() if name != missing})
    with pytest.raises(
        ConfigError, match=rf"^policy Mine: it has no method {missing}\(.*; a policy has reset\(\), begin_pass\("
    ):
        policy_factory(kind())
    with pytest.raises(ConfigError, match=f"no method {missing}"):
        policy_factory(kind)(4096)  # a class is a factory


def test_a_method_that_cannot_take_what_the_stack_passes_is_refused():
    class Mine(Fifo):
        def begin_pass(self):
            pass

    with pytest.raises(ConfigError, match=r"policy Mine: its begin_pass\(\) cannot take \(too many positional"):
        check_policy(Mine())


@pytest.mark.parametrize(("attribute", "value"), [("kind", None), ("prefetch", "auto"), ("capacity_bytes", None)])
def test_an_attribute_that_is_missing_or_wrong_is_refused(attribute, value):
    policy = Fifo()
    setattr(policy, attribute, value)
    with pytest.raises(ConfigError, match=rf"policy Fifo: its {attribute} is {value!r}"):
        check_policy(policy)


def test_a_policy_of_ones_own_may_listen_to_announcements_and_is_held_to_its_room():
    class Listening(Fifo):
        def announce(self, pages):
            self.coming = dict(pages)

        def ahead(self, busy=()):
            coming, self.coming = getattr(self, "coming", {}), {}
            return [self.access(key, size)._replace(prefetched=True) for key, size in coming.items()]

    assert CheckedPolicy(Fifo(), 4).announce is None
    policy = CheckedPolicy(Listening(), 4)
    policy.announce({"a": 2, "b": 2})
    assert [decision.key for decision in policy.ahead()] == ["a", "b"]
    assert CheckedPolicy(Listening(), 3).announce is not None
    greedy = CheckedPolicy(Listening(), 2)
    greedy.policy.evict_for = lambda size, busy=(): ()
    greedy.announce({"a": 2, "b": 2})
    with pytest.raises(TierError, match="resident pages take 4 bytes of its capacity_bytes = 2"):
        greedy.ahead()


def test_each_tier_gets_a_policy_of_its_own_with_its_own_room():
    given = Fifo()
    for factory in (policy_factory(given), policy_factory(Fifo), policy_factory(lambda room: Fifo(room))):
        near, far = factory(100), factory(200)
        assert (near.capacity_bytes, far.capacity_bytes) == (100, 200)
        near.access("a", 60)
        assert far.policy.pages == {} and given.pages == {} and given.capacity_bytes == 0


def test_what_the_config_takes_is_no_policy():
    for section in ({"kind": "lru"}, PolicyConfig(), "lru", 3, None):
        overrides = {"policy": section}
        assert take_policy(overrides, PolicyConfig) is None and overrides == {"policy": section}
    overrides = {"policy": Fifo}
    assert take_policy(overrides, PolicyConfig) is Fifo and overrides == {}


@pytest.mark.parametrize(
    ("decision", "words"),
    [
        (None, "gave None although 2 bytes fit"),
        (Decision("b", hit=True), "is a hit, and the page is not resident"),
        (Decision("c", hit=False), "decided on 'c'"),
        (Decision("b", hit=False, evict=("a",)), "evicts 'a', which is in use"),
        (Decision("b", hit=False, evict=("z",)), "evicts 'z', which is not resident"),
        (Decision("b", hit=False, charge=5), "take 7 bytes of its capacity_bytes = 6"),
    ],
)
def test_a_decision_that_would_break_the_books_is_refused(decision, words):
    class Mine(Fifo):
        def access(self, key, size, busy=()):
            return super().access(key, size, busy) if key == "a" else decision

    policy = CheckedPolicy(Mine(), 6)
    policy.access("a", 2)
    with pytest.raises(TierError, match=f"policy Mine: .*{words}"):
        policy.access("b", 2, ("a", "b"))


def test_a_resident_page_that_is_staged_and_a_room_that_is_not_kept_are_refused():
    class Mine(Fifo):
        def ahead(self, busy=()):
            return [Decision("a", hit=False, prefetched=True)]

        def resize(self, capacity_bytes):
            self.capacity_bytes = capacity_bytes
            return ()

    policy = CheckedPolicy(Mine(), 6)
    policy.access("a", 2)
    with pytest.raises(TierError, match="stages 'a', which is resident"):
        policy.ahead()
    with pytest.raises(TierError, match="resident pages take 2 bytes of its capacity_bytes = 1"):
        policy.resize(1)
