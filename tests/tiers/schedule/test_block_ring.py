"""Rings of blocks: places of pages, their copies, and room that is given back."""

import gc
import mmap
import threading
import weakref

import pytest
import torch

from tests.tiers.stacks import CPU, UNIT, add, add_all, check, content, retire
from vbrt.errors import TierError
from vbrt.residency.lru import LRUPolicy
from vbrt.tiers import Level, MemoryTier, Recording, TierStack
from vbrt.tiers.schedule import graph_capture
from vbrt.tiers.schedule.block_ring import BlockRing

BLOCKS = [[f"{block}.{name}" for name in "ab"] for block in range(4)]
SIZES = {"a": 1, "b": 3}


@pytest.fixture
def stack(monkeypatch):
    """Four blocks of two pages in host memory, below room for twelve units; another page on top."""
    monkeypatch.setattr(graph_capture, "refusal", lambda *given: None)
    near = Level(MemoryTier("gpu", CPU, 12 * UNIT), LRUPolicy(12 * UNIT))
    stack = TierStack([near, MemoryTier("cpu", CPU, 1 << 30)])
    sizes = {key: SIZES[key[-1]] for block in BLOCKS for key in block}
    add_all(stack, sizes, dict.fromkeys(sizes, "cpu"))
    add(stack, "home", 1, "gpu")
    yield stack
    stack.close()


def leased(stack, ring, block, keys):
    """Tensors of a lease in the recording of a block."""
    recording = Recording(stack, "forward", (), places=ring.places(block))
    with recording, stack.lease(keys) as tensors:
        return tensors


def ring_of(stack, lease_units=1):
    return BlockRing(stack, BLOCKS, lease_bytes=lease_units * UNIT)


def test_a_block_reads_its_pages_at_their_places(stack):
    ring, ran = ring_of(stack), []
    views = [leased(stack, ring, block, keys) for block, keys in enumerate(BLOCKS)]
    for block in (0, 1, 2, 3, 3, 2, 1, 0, 2, 2, 0):
        assert ring.run(block, "forward", lambda block=block: ran.append(check(BLOCKS[block], views[block])))
    assert len(ran) == 11
    assert leased(stack, ring, 0, BLOCKS[0]) is views[0]  # with what kernels have prepared of them
    assert leased(stack, ring, 0, BLOCKS[0][:1])[0]["weight"].data_ptr() == views[0][0]["weight"].data_ptr()


def test_pages_on_top_and_of_others_are_leased_from_the_stack(stack):
    ring = BlockRing(stack, [[*BLOCKS[0], "home"], BLOCKS[1]], lease_bytes=0)
    with Recording(stack, "forward", (), places=ring.places(0)), stack.lease(["home"]) as (home,):
        assert home is stack.levels[0].slots["home"].tensors
    hits = stack.pages["3.a"].misses
    (tensors,) = leased(stack, ring, 0, ["3.a"])
    assert torch.equal(tensors["weight"], content("3.a", 1)) and stack.pages["3.a"].misses == hits + 1


def test_the_ring_is_within_the_budget_and_leaves_room_for_leases(stack):
    ring, top = ring_of(stack), stack.levels[0]
    assert top.home_bytes + 2 * UNIT <= top.tier.capacity_bytes
    with stack.lease(["2.a"]) as tensors:
        check(["2.a"], tensors)
    assert top.tier.held_bytes <= top.tier.capacity_bytes
    ring.give_back()
    ring.give_back()
    assert top.home_bytes == UNIT and not stack.ledger.loans


def test_memory_is_freed_with_the_ring(stack, monkeypatch):
    made = []

    def map_memory(nbytes, **options):
        mapping = mmap.mmap(-1, nbytes)
        made.append(weakref.ref(mapping))
        return torch.frombuffer(mapping, dtype=torch.uint8)

    monkeypatch.setattr("vbrt.tiers.storage.memory_tiers.map_memory", map_memory)
    ring = ring_of(stack)
    assert len(leased(stack, ring, 0, BLOCKS[0])) == 2
    recording = Recording(stack, "forward", (), places=ring.places(0))  # as recordings are kept
    ring.give_back()
    gc.collect()
    assert len(made) == 1 and made[0]() is None and recording


@pytest.mark.parametrize(
    "change",
    [
        lambda stack: stack.set_budget("gpu", 11 * UNIT),
        lambda stack: stack.rehome({"0.a": "gpu"}),
        lambda stack: add(stack, "more", 1, "cpu"),
        lambda stack: BlockRing(stack, BLOCKS[:2], lease_bytes=0),
        lambda stack: stack.close(),
    ],
)
def test_what_moves_pages_takes_the_room_back(stack, change):
    ring = ring_of(stack)
    assert ring.run(0, "forward", int)
    kept = change(stack)
    assert not ring.run(0, "forward", pytest.fail)
    assert (ring.ended or stack.closed) and (kept is None or kept is not ring)


def test_a_retired_page_ends_runs(stack):
    ring = ring_of(stack)
    retire(stack, "1.b")
    stack.retire_unowned()
    assert not ring.run(1, "forward", pytest.fail) and not ring.run(0, "forward", pytest.fail)


def test_a_ring_that_is_collected_frees_its_room(stack):
    ring_of(stack)
    gc.collect()
    stack.retire_unowned()
    assert stack.levels[0].home_bytes == UNIT and not stack.ledger.loans


def test_a_launch_that_raises_leaves_the_pages(stack):
    ring = ring_of(stack)
    views = leased(stack, ring, 1, BLOCKS[1])
    with pytest.raises(ZeroDivisionError):
        ring.run(1, "forward", lambda: 1 / 0)
    assert ring.run(1, "forward", lambda: check(BLOCKS[1], views))


def test_an_interrupted_copy_is_repeated(stack, monkeypatch):
    ring = ring_of(stack)
    views = leased(stack, ring, 1, BLOCKS[1])
    bring = ring._bring

    def interrupted(slot, page, block):
        if page.key == BLOCKS[1][-1]:
            raise KeyboardInterrupt
        bring(slot, page, block)

    monkeypatch.setattr(ring, "_bring", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ring.run(1, "forward", pytest.fail)
    monkeypatch.setattr(ring, "_bring", bring)
    assert ring.run(1, "forward", lambda: check(BLOCKS[1], views))


# -- pages that are rewritten -----------------------------------------------------------------------------------------


def rewrite(stack, key):
    with stack.rewriter.rewriting(key) as page:
        page.add_(1)


def values(views):
    return [view["weight"].clone() for view in views]


@pytest.fixture
def trained(stack):
    stack.rewriter.prepare()
    return stack


def test_a_rewritten_page_is_brought_anew(trained):
    ring = ring_of(trained)
    assert not ring._places.staying
    views = [leased(trained, ring, block, keys) for block, keys in enumerate(BLOCKS)]
    for kind, blocks in [("forward", range(4)), ("backward", range(3, -1, -1))] * 2:
        for block in blocks:
            assert ring.run(block, kind, list)
    before, moved = values(views[0]), trained.pages["0.a"].bytes_moved["cpu>gpu"]
    rewrite(trained, "0.b")
    assert ring.run(0, "forward", lambda: None)
    after = values(views[0])
    assert torch.equal(after[0], before[0]) and torch.equal(after[1], before[1] + 1)
    assert ring.run(0, "forward", lambda: None)
    assert trained.pages["0.a"].bytes_moved["cpu>gpu"] == moved + UNIT  # once


def test_pages_that_exchange_their_memory_are_brought_from_where_they_are(trained):
    other = add(trained, "other", SIZES["b"], "cpu")
    assert other is not None
    ring = ring_of(trained)
    views = leased(trained, ring, 0, BLOCKS[0])
    seen = []
    for _ in range(3):
        assert trained.rewriter.exchange("0.b", "other", list)
        assert ring.run(0, "forward", lambda: seen.append(values(views)[1]))
    assert torch.equal(seen[0], seen[2]) and not torch.equal(seen[0], seen[1])


def test_a_run_waits_for_a_rewrite_that_is_due_and_a_prefetch_leaves_it_out(trained):
    ring, step = ring_of(trained), object()
    for _ in range(2):
        for block in range(4):
            assert ring.run(block, "forward", list)
    trained.rewriter.expect(["1.a"], step)
    assert ring.run(0, "forward", list) and not ring._order.holds(1)
    rewrites = threading.Timer(0.2, lambda: (rewrite(trained, "1.a"), trained.rewriter.forgo(["1.a"], step)))
    views, seen = leased(trained, ring, 1, BLOCKS[1]), []
    rewrites.start()
    assert ring.run(1, "forward", lambda: seen.append(values(views)[0]))
    rewrites.join()
    assert torch.equal(seen[0].view(torch.uint8), trained.rewriter.peek("1.a").view(seen[0].shape))


def test_a_page_that_is_rewritten_where_kernels_read_it_is_refused(trained):
    with pytest.raises(TierError, match="home: rewritten where kernels read it"):
        BlockRing(trained, [[*BLOCKS[0], "home"], BLOCKS[1]], lease_bytes=0)


def test_a_budget_without_room_for_two_blocks_is_refused_by_name(stack):
    before = stack.levels[0].home_bytes
    with pytest.raises(TierError, match=r"tiers\.gpu\.budget has 4096 bytes left .* two at a time take 32768"):
        ring_of(stack, lease_units=5)
    assert stack.levels[0].home_bytes == before and not stack.ledger.loans
