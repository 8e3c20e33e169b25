"""The parts that ranks keep of a page; tests/distributed has them gather."""

from types import SimpleNamespace

import pytest
import torch

from tests.tiers.pages import reserved
from tests.tiers.stacks import UNIT
from vbrt.errors import TierError
from vbrt.tiers.storage.rank_shared_memory import SharedTier


def tiers_of(ranks: int, capacity_bytes: int) -> list[SharedTier]:
    return [SharedTier(SimpleNamespace(rank=rank, size=ranks), capacity_bytes) for rank in range(ranks)]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
def test_parts_of_all_ranks_are_the_page_and_what_is_left_over_is_on_each(ranks):
    page = torch.randint(0, 256, (5 * UNIT,), dtype=torch.uint8)
    tiers = tiers_of(ranks, 8 * UNIT)
    rooms = [reserved(tier, len(page)) for tier in tiers]
    for tier, room in zip(tiers, rooms, strict=True):
        tier.put(room, page, key="page", layout={})
    assert torch.equal(torch.cat([*(room.part for room in rooms), rooms[0].rest]), page)
    assert len({bytes(room.rest.tolist()) for room in rooms}) == 1 and len(rooms[0].rest) < 16 * ranks
    assert all(tier.own_bytes < len(page) / ranks + 16 * ranks and tier.held_bytes == len(page) for tier in tiers)
    assert not tiers[0].damaged()
    rooms[-1].room.tensor[7] ^= 1
    assert tiers[-1].damaged() == ["page"]
    assert reserved(tiers[0], 4 * UNIT) is None
    for tier, room in zip(tiers, rooms, strict=True):
        tier.free(room, reuse=True)
    assert [tier.held_bytes + tier.own_bytes for tier in tiers] == [0] * ranks and not tiers[-1].damaged()


def test_rows_are_refused_by_the_name_of_the_page():
    tier = tiers_of(2, UNIT)[0]
    with pytest.raises(TierError, match=r"embed#dense: rows of a page that ranks share .* weights\.embeddings = false"):
        tier.read_items(reserved(tier, UNIT), torch.zeros(1, dtype=torch.int64), 4, key="embed#dense")
