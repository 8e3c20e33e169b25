"""Books that a block was to write and left early are reset by the next one."""

import pytest

from tests.tiers.stacks import assert_at_rest, scripted, slots, use
from vbrt.tiers.stack.slots import State


@pytest.mark.parametrize("block", ["writing", "deciding"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_a_block_that_is_left_early_has_the_next_one_evict_all_copies(block, error, tmp_path):
    stack, policy, _ = scripted(tmp_path, 3, {"a": 1, "b": 1})
    use(stack, "a")
    assert "a" in stack.levels[0].slots and policy.resident()
    with pytest.raises(error), stack.guard.lock, getattr(stack.ledger, block):
        raise error
    assert stack.ledger.torn and "a" in stack.levels[0].slots
    use(stack, "b")
    assert not stack.ledger.torn and list(stack.levels[0].slots) == ["b"]
    use(stack, "a")
    assert_at_rest(stack)
    stack.close()


def test_a_block_that_ends_well_leaves_the_books_whole_and_copies_where_they_are(tmp_path):
    stack, *_ = scripted(tmp_path, 3, {"a": 1, "b": 1})
    use(stack, "a")
    for block in (stack.ledger.writing, stack.ledger.deciding):
        with stack.guard.lock, block:
            assert stack.ledger.torn
        assert not stack.ledger.torn
    use(stack, "b")
    assert {slot.page.key for slot in slots(stack) if slot.state is State.READY} >= {"a", "b"}
    stack.close()
