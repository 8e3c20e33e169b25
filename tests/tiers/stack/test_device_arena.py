"""Arenas: room that kernels divide themselves, and pages that they read where they lie."""

import ctypes
import gc
import sys

import pytest
import torch

from tests.tiers.stacks import CPU, UNIT, WatchedTier, add, add_all, assert_at_rest, content, retire, use, within
from tests.torture.interrupting import interrupted
from vbrt.errors import TierError
from vbrt.residency.lru import LRUPolicy
from vbrt.tiers import Level, MemoryTier, SsdTier, TierStack
from vbrt.tiers.stack.device_arena import Arena, refusal
from vbrt.tiers.storage.memory_tiers import Buffer

pytestmark = pytest.mark.usefixtures("no_fsync")

SOURCES = tuple(f"experts#coarse.{expert}" for expert in range(4))


@pytest.fixture(autouse=True)
def pinned(monkeypatch):
    """As if host memory were page-locked."""
    monkeypatch.setattr(Buffer, "pinned", True)


@pytest.fixture
def stack(tmp_path):
    """Four experts in host memory, two other pages on top, two on an ssd."""
    near, far = Level(WatchedTier("gpu", 12), LRUPolicy(12 * UNIT)), Level(WatchedTier("cpu", 20), LRUPolicy(20 * UNIT))
    stack = TierStack([near, far, SsdTier(tmp_path, 1 << 40)])
    add_all(stack, dict.fromkeys(SOURCES, 1), dict.fromkeys(SOURCES, "cpu"))
    add_all(stack, {"a": 1, "b": 2}, {"a": "gpu", "b": "gpu"})
    yield stack
    stack.close()


def held(stack):
    return [level.tier.used_bytes for level in stack.levels]


def read(address):
    """What a kernel reads in a page of one unit."""
    return torch.frombuffer(bytearray(ctypes.string_at(address, UNIT)), dtype=torch.uint8)


def test_an_arena_takes_its_bytes_from_the_budget_and_gives_them_back(stack):
    before = held(stack)
    add(stack, "c", 4, "ssd")
    use(stack, "c")  # a copy, in the way of the arena
    arena = Arena(stack, "arena", SOURCES, 9 * UNIT)
    assert arena.memory.shape == (9 * UNIT,) and not arena.memory.any()
    assert held(stack)[0] == stack.levels[0].tier.held_bytes == 12 * UNIT
    with pytest.raises(TierError, match=r"c: 16384 bytes do not fit into tiers\.gpu\.budget"):
        use(stack, "c")
    arena.close()
    arena.close()
    del arena
    retire(stack, "c")
    assert_at_rest(stack)
    assert held(stack)[:2] == before[:2]


def test_sources_have_addresses_and_stay_where_they_lie(stack):
    arena = Arena(stack, "arena", SOURCES, UNIT)
    for key in SOURCES:
        retire(stack, key)  # their layer is gone
    stack.retire_unowned()
    use(stack, SOURCES[0])  # on the host's own way
    for key, address in zip(SOURCES, arena.addresses, strict=True):
        assert torch.equal(read(address), content(key, 1))
    with pytest.raises(
        TierError, match=r"experts#coarse\.1: kernels of a device cache or of an embedding read it where it lies"
    ):
        stack.rehome({SOURCES[1]: "gpu"})
    with pytest.raises(TierError, match=r"arena: kernels of a device cache"):
        stack.rehome({"arena": "cpu"})
    stack.rehome({"a": "cpu", SOURCES[1]: "cpu"})  # it is there
    arena.close()
    assert set(stack.pages) == {"a", "b"}


def test_budgets_leave_an_arena_and_its_sources_alone(stack):
    arena = Arena(stack, "arena", SOURCES, 4 * UNIT)
    where = stack.levels[0].slots["arena"].view.data_ptr()
    with pytest.raises(TierError, match=r"tiers\.gpu\.budget = 12288: kernels .* read 16384 bytes in place"):
        stack.set_budget("gpu", 3 * UNIT)
    with pytest.raises(TierError, match=r"tiers\.cpu\.budget = 8192: kernels .* read 16384 bytes in place"):
        stack.set_budget("cpu", 2 * UNIT)
    stack.set_budget("gpu", 6 * UNIT)  # the others pass through what is left
    assert [stack.pages[key].home for key in ("arena", "a", "b", *SOURCES)] == [0, 1, 1, 1, 1, 1, 1]
    use(stack, "b")
    stack.set_budget("gpu", 100 * UNIT)  # room for everything: what is put stays below
    assert [stack.pages[key].home for key in ("arena", "a", "b", *SOURCES)] == [0, 0, 0, 1, 1, 1, 1]
    assert stack.levels[0].slots["arena"].view.data_ptr() == where == arena.memory.data_ptr()
    arena.close()
    assert_at_rest(stack)


def test_sources_do_not_count_as_pages_that_move(stack):
    assert not stack.at_rest
    arena = Arena(stack, "arena", SOURCES, 4 * UNIT)
    assert stack.at_rest
    add(stack, "c", 1, "cpu")
    assert not stack.at_rest
    retire(stack, "c")
    stack.retire_unowned()
    assert stack.at_rest
    arena.close()
    assert not stack.at_rest


def test_an_arena_that_is_collected_is_closed(stack):
    arena = Arena(stack, "arena", SOURCES, 4 * UNIT)
    assert refusal(stack, SOURCES) == f"{SOURCES[0]}: another device cache has it"
    del arena
    gc.collect()
    stack.retire_unowned()
    assert "arena" not in stack.pages and refusal(stack, SOURCES) == ""
    stack.rehome({SOURCES[0]: "gpu"})


def test_what_kernels_cannot_read_is_refused_by_name(stack, monkeypatch):
    add(stack, "c", 1, "ssd")
    before = held(stack)
    for keys, words in (
        (("experts#coarse.0", "gone"), "gone: it is not stored"),
        (("a",), r"a: it lives in tiers\.gpu"),
        (("c",), r"c: it lives in tiers\.ssd"),
    ):
        with pytest.raises(TierError, match=words):
            Arena(stack, "arena", keys, UNIT)
    with pytest.raises(TierError, match=r"arena: 53248 bytes do not fit into tiers\.gpu\.budget = 49152"):
        Arena(stack, "arena", SOURCES, 13 * UNIT)
    monkeypatch.setattr(Buffer, "pinned", False)
    with pytest.raises(TierError, match=r"experts#coarse\.0: its memory is not page-locked; set tiers\.cpu\.pinned"):
        Arena(stack, "arena", SOURCES, UNIT)
    assert_at_rest(stack)
    assert held(stack) == before and not any(page.put for page in stack.pages.values())


def test_the_stack_may_be_closed_first(stack):
    arena = Arena(stack, "arena", SOURCES, UNIT)
    stack.close()
    with pytest.raises(TierError, match="arena: the model was closed"):
        arena.check_open()
    with pytest.raises(TierError, match="the model was closed"):
        Arena(stack, "other", SOURCES, UNIT)
    arena.close()
    assert stack.ledger.travellers == 0


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_ctrl_c_anywhere_leaves_no_arena_behind(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: None)

    def work():
        arena = Arena(stack, "arena", SOURCES, 4 * UNIT)
        assert stack.at_rest
        arena.close()

    at, hit = 10, True
    while hit:
        at += 61
        near, far = MemoryTier("gpu", CPU, 8 * UNIT), MemoryTier("cpu", CPU, 8 * UNIT)
        stack = TierStack([Level(near, LRUPolicy(8 * UNIT)), far])
        add_all(stack, dict.fromkeys(SOURCES, 1), dict.fromkeys(SOURCES, "cpu"))
        hit = interrupted(at, work)
        gc.collect()
        within(30, work)
        assert stack.ledger.travellers == len(SOURCES) and set(stack.pages) == set(SOURCES)
        assert_at_rest(stack)
        stack.close()
    assert at > 4 * 61
