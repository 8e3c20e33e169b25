"""Pages that are rewritten where they live: nobody reads old bytes, and no policy notices."""

import os
import threading
from functools import partial
from itertools import cycle

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.tiers.stacks import UNIT, GatedSsd, WatchedTier, add, assert_counts, content, layout, within
from vbrt.errors import TierError
from vbrt.residency.scheduled import ScheduledPolicy
from vbrt.residency.simulate import Pass, simulate
from vbrt.tiers import Level, Owner, SsdTier, TierStack

pytestmark = pytest.mark.usefixtures("no_fsync")
KEYS = [f"p{i}" for i in range(8)]
STEPS = 6


def stack_of(root, top: int, middle: int | None, homes: str) -> TierStack:
    """Pages of a unit at `homes`, in turn, below a tier with room for `top` of them."""
    levels = [Level(WatchedTier("gpu" if middle else "cpu", top), ScheduledPolicy(top * UNIT, prefetch=2))]
    levels += [Level(WatchedTier("cpu", middle), ScheduledPolicy(UNIT, prefetch=2))] if middle else []
    stack = TierStack([*levels, SsdTier(root, 1 << 30)])
    stack.rewriter.prepare()
    for key, home in zip(KEYS, cycle(homes.split())):
        stack.add(key, layout(1), home, lambda out: out.zero_(), _owner(stack))
    for level in levels[1:]:
        level.resize(level.tier.capacity_bytes)
    return stack


owners: list[Owner] = []


def _owner(stack: TierStack) -> Owner:
    owners.append(Owner(stack))
    return owners[-1]


def rewrite_all(stack: TierStack, keys=KEYS) -> None:
    for key in keys:
        with stack.rewriter.rewriting(key) as page:
            page += 1
        stack.rewriter.forgo((key,), stack)


def exchange_all(stack: TierStack, keys=KEYS) -> None:
    """As `rewrite_all`, but the new bytes are written to a spare page, whose memory the page takes."""
    told = []
    for key in keys:
        with stack.rewriter.in_memory((f"{key}.spare",)) as (spare,):
            torch.add(stack.rewriter.fields(key)["weight"], 1, out=spare["weight"])
        before = stack.rewriter.peek(f"{key}.spare").data_ptr()
        assert stack.rewriter.exchange(key, f"{key}.spare", partial(told.append, key)) and told[-1] == key
        assert stack.rewriter.peek(key).data_ptr() == before == stack.rewriter.fields(key)["weight"].data_ptr()
        stack.rewriter.forgo((key,), stack)


def train(stack: TierStack, steps: int, rewrite_all=rewrite_all) -> None:
    """Forward and backward of each step; the step's rewrites run while the next forward does."""
    threads = []
    for step in range(steps):
        for phase, keys in (("forward", KEYS), ("backward", KEYS[::-1])):
            stack.begin_pass(phase)
            for key in keys:
                with stack.lease((key,)) as (fields,):
                    assert (fields["weight"] == step).all(), f"{key} in the {phase} of step {step}"
        stack.rewriter.expect(KEYS, stack)
        threads.append(threading.Thread(target=rewrite_all, args=(stack,)))
        threads[-1].start()
    for thread in threads:
        thread.join()


@pytest.mark.parametrize(
    ("top", "middle", "homes"),
    [(3, None, "ssd"), (6, None, "ssd"), (12, None, "ssd cpu"), (3, 12, "cpu"), (4, 6, "ssd")],
)
def test_no_lease_reads_what_was_there_before(tmp_path, top, middle, homes):
    stack = stack_of(tmp_path, top, middle, homes)
    within(30, lambda: train(stack, STEPS))
    assert not any(page.due or page.writer or page.readers for page in stack.pages.values())
    assert not any(level.tier.violations for level in stack.levels[:-1])
    stack.close()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("top", [3, 6])
def test_no_lease_reads_what_was_there_before_a_page_took_anothers_memory(tmp_path, top):
    stack = stack_of(tmp_path, top, 20, "cpu")
    for key in KEYS:
        stack.add(f"{key}.spare", layout(1), "cpu", lambda out: out.zero_(), _owner(stack)).passes = False
    within(30, lambda: train(stack, STEPS, exchange_all))
    assert stack.rewriter.refreshed_bytes > 0
    assert not any(page.due or page.writer or page.readers for page in stack.pages.values())
    assert not any(level.tier.violations for level in stack.levels[:-1])
    assert all((stack.rewriter.peek(key) == STEPS).all() for key in KEYS)
    stack.close()


def test_pages_in_memory_are_changed_and_exchanged_without_a_call_of_torchs(tmp_path):
    stack = stack_of(tmp_path, 3, 20, "cpu ssd")
    stack.add("spare", layout(1), "cpu", lambda out: out.fill_(7), _owner(stack)).passes = False
    with _Calls() as calls:
        with stack.rewriter.in_memory(("spare", "p0", "p1")) as (spare, page, filed):
            assert filed is None and all(stack.pages[key].due for key in ("spare", "p0", "p1"))
        assert stack.rewriter.exchange("p0", "spare", int)
    assert calls.names == []
    assert (stack.rewriter.fields("p0")["weight"] == 7).all() and stack.rewriter.fields("p0") is spare
    assert stack.rewriter.fields("spare") is page and stack.rewriter.fields("p1") is None
    assert not any(page.due or page.writer for page in stack.pages.values())
    stack.close()


class _Calls(TorchDispatchMode):
    """Names of the operations that torch dispatches."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_pages_in_files_exchange_no_memory(tmp_path):
    stack, told = stack_of(tmp_path, 3, 20, "ssd cpu"), []
    assert stack.rewriter.peek("p0") is None
    assert not stack.rewriter.exchange("p0", "p1", lambda: told.append(1)) and not told
    assert not any(page.due or page.writer for page in stack.pages.values())
    stack.close()


def test_live_counts_are_those_of_a_model_that_is_not_rewritten(tmp_path):
    stack = stack_of(tmp_path, 4, None, "ssd")
    within(30, lambda: train(stack, STEPS))
    trace = [item for _ in range(STEPS) for item in (Pass("forward"), *KEYS, Pass("backward"), *KEYS[::-1])]
    assert_counts(stack, simulate(ScheduledPolicy(4, prefetch=2), trace, 4, sizes=dict.fromkeys(KEYS, 1)))
    stack.close()


def test_a_page_is_not_rewritten_while_it_is_leased_nor_leased_while_it_is_due(tmp_path):
    stack = stack_of(tmp_path, 4, None, "ssd")
    seen = []

    def late() -> None:
        rewrite_all(stack, ["p0"])
        seen.append("rewritten")

    with stack.lease(("p0",)) as (fields,):
        thread = threading.Thread(target=late)
        thread.start()
        thread.join(0.1)
        assert not seen and not fields["weight"].any()
    with stack.lease(("p0",)) as (fields,):
        assert (fields["weight"] == 1).all()
    thread.join()
    stack.close()


def test_a_rewrite_that_fails_leaves_the_page_of_a_file(tmp_path, monkeypatch):
    stack = stack_of(tmp_path, 4, None, "ssd")
    before = os.listdir(stack.levels[-1].tier.directory)

    def full(*args, **options):
        raise TierError("no space left")

    with monkeypatch.context() as patch, pytest.raises(TierError, match="no space"):
        patch.setattr(SsdTier, "put", full)
        with stack.rewriter.rewriting("p0") as page:
            page += 7
    with pytest.raises(ZeroDivisionError), stack.rewriter.rewriting("p0") as page:
        page += 7 // 0
    with stack.lease(("p0",)) as (fields,):
        assert not fields["weight"].any()
    assert os.listdir(stack.levels[-1].tier.directory) == before
    stack.close()


def test_a_copy_that_is_under_way_is_finished_first(tmp_path):
    ssd = GatedSsd(tmp_path)
    stack = TierStack([Level(WatchedTier("cpu", 4), ScheduledPolicy(4 * UNIT, prefetch=2)), ssd])
    add(stack, "a", 1)
    ssd.close_gate("a")

    def read() -> None:
        with stack.lease(("a",)):
            pass

    reads = threading.Thread(target=read)
    reads.start()
    assert ssd.began["a"].wait(10)
    gate = ssd.gates.pop("a")
    done = []
    rewrites = threading.Thread(target=lambda: (rewrite_all(stack, ["a"]), done.append(True)))
    rewrites.start()
    rewrites.join(0.1)
    assert not done
    gate.set()
    reads.join(10)
    rewrites.join(10)
    assert done
    with stack.lease(("a",)) as (fields,):
        assert torch.equal(fields["weight"], content("a", 1) + 1)
    stack.close()
