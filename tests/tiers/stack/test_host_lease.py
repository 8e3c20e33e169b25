"""Pages that the host uses where they lie: held, counted, read from a drive, and given back."""

import pytest
import torch

from tests.tiers.stacks import CPU, UNIT, add_all, assert_at_rest, content, use
from vbrt.errors import TierError
from vbrt.residency.expert_pages import ExpertsPolicy
from vbrt.tiers import Level, MemoryTier, SsdTier, TierStack
from vbrt.tiers.stack.host_lease import LowerLease, has_host_below, missing_worth

KEYS = [f"mlp.experts#coarse.{expert}" for expert in range(6)]


def _stack(root, homes, *, near=2, far=3):
    """Two memories above a drive, with room for so many pages."""
    levels = [
        Level(
            MemoryTier(name, CPU, (units + 8 * (name == "cpu" and "cpu" in homes)) * UNIT), ExpertsPolicy(units * UNIT)
        )
        for name, units in (("gpu", near), ("cpu", far))
    ]
    stack = TierStack([*levels, SsdTier(root, 1 << 30)])
    return add_all(stack, dict.fromkeys(KEYS, 1), dict(zip(KEYS, homes * 6, strict=False)))


def _content(views):
    return all(torch.equal(view, content(key, 1)) for key, view in views.items())


def test_pages_are_held_where_they_live_and_missed_without_moving(tmp_path):
    stack = _stack(tmp_path, ["cpu"])
    use(stack, KEYS[0])
    assert has_host_below(stack) and missing_worth(stack, KEYS[:3]) == {KEYS[1]: 0, KEYS[2]: 0}
    lower = LowerLease(stack, KEYS[1:3])
    assert lower.begin() == KEYS[1:3] and _content(lower.wait())
    page = stack.pages[KEYS[1]]
    assert (page.hits, page.misses, page.bytes_moved["cpu>gpu"]) == (0, 1, 0)
    assert missing_worth(stack, [KEYS[1]])[KEYS[1]] > 0
    lower.end()
    lower.end()
    assert_at_rest(stack)
    stack.close()


def test_whoever_only_looks_tells_nobody(tmp_path):
    stack = _stack(tmp_path, ["cpu", "ssd"])
    lower = LowerLease(stack, KEYS[:2], looks=True)
    assert lower.begin() == KEYS[:1] and _content(lower.wait())
    lower.end()
    assert not any(page.hits + page.misses for page in stack.pages.values())
    assert missing_worth(stack, KEYS[:1]) == {KEYS[0]: 0}
    stack.close()


def test_pages_on_a_drive_are_held_in_host_memory_as_far_as_they_fit(tmp_path):
    stack = _stack(tmp_path, ["ssd"])
    lower = LowerLease(stack, KEYS)
    assert lower.begin() == KEYS[:3] and _content(lower.wait())
    assert LowerLease(stack, KEYS[3:5]).begin() == []  # nothing waits for room
    lower.end()
    use(stack, KEYS[5])
    assert_at_rest(stack)
    stack.close()


def test_what_is_lost_is_released_and_a_closed_stack_says_so(tmp_path):
    stack = _stack(tmp_path, ["ssd"])
    lower = LowerLease(stack, KEYS[:3])
    lower.begin()
    del lower
    other = LowerLease(stack, KEYS[3:])
    assert other.begin() == KEYS[3:] and _content(other.wait())
    other.end()
    assert_at_rest(stack)
    stack.close()
    with pytest.raises(TierError, match="the model was closed"):
        LowerLease(stack, KEYS[:1]).begin()
