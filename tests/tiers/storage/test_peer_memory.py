"""The neighbours' memory as a tier, with host memory in its place."""

import pytest
import torch

from tests.tiers.pages import reserved
from tests.tiers.stacks import UNIT, WatchedTier, add_all, assert_at_rest, run
from vbrt.errors import TierError
from vbrt.residency.plan import PageSpec, place, with_whole_pages
from vbrt.residency.simulate import PASS, make_policy
from vbrt.tiers import Level, PeerTier, TierStack

CPU = torch.device("cpu")
SIZES = {f"page{i}": 1 for i in range(9)}
ONE_PASS = [PASS, *((key,) for key in SIZES)]


def stack_of(peer_units: int) -> TierStack:
    top = Level(WatchedTier("gpu", 4), make_policy("scheduled", 4 * UNIT))
    return TierStack([top, PeerTier([CPU, CPU], peer_units * UNIT), Level(WatchedTier("cpu", 9))])


def test_pages_of_two_neighbours_come_up_past_the_tier_below_and_stay_within_each_share():
    stack = add_all(stack_of(6), SIZES, {key: "peer" if i % 3 else "cpu" for i, key in enumerate(SIZES)})
    run(stack, ONE_PASS * 5)
    peer = stack.levels[1].tier
    assert [part.held_bytes for part in peer.parts] == [3 * UNIT, 3 * UNIT] and peer.peak_bytes == 6 * UNIT
    moved = {link for page in stack.pages.values() for link, nbytes in page.bytes_moved.items() if nbytes}
    assert moved == {"peer>gpu", "cpu>gpu"}
    stack.set_budget("peer", 2 * UNIT)
    run(stack, ONE_PASS * 2)
    assert [part.held_bytes for part in peer.parts] == [UNIT, UNIT] and peer.peak_bytes == 2 * UNIT
    assert_at_rest(stack)
    stack.close()
    assert peer.held_bytes == 0


def test_what_is_left_of_one_share_is_not_room_for_a_page():
    tier = PeerTier([CPU, CPU, CPU], 9 * UNIT)
    level = Level(tier)
    assert level.free_bytes == 9 * UNIT
    reserved(tier, 2 * UNIT)
    assert level.free_bytes == 6 * UNIT  # one unit of each share is left in the end
    pages = [[PageSpec(f"layer{i}#c", "c", 2 * UNIT)] for i in range(6)]
    rooms = with_whole_pages({"gpu": 6 * UNIT, "peer": 10 * UNIT, "cpu": 99 * UNIT}, pages, len(tier.parts))
    homes = place(pages, rooms, source="x")
    assert list(homes.values()).count("peer") == 2 and "cpu" in homes.values()


def test_a_page_that_no_single_neighbour_has_room_for_is_an_error_and_not_a_wait():
    tier = PeerTier([CPU, CPU], 6 * UNIT)
    rooms = [reserved(tier, 2 * UNIT), reserved(tier, 2 * UNIT)]
    with pytest.raises(TierError, match="none has room for a page of 8192 bytes"):
        reserved(tier, 2 * UNIT)
    assert reserved(tier, 3 * UNIT) is None
    tier.free(rooms[0], reuse=False)
    assert reserved(tier, 2 * UNIT) is not None and tier.held_bytes == tier.used_bytes == 4 * UNIT
