"""Any tier that keeps the protocol may stand below the first: here one that keeps pages compressed in host memory."""

import zlib
from collections.abc import Collection
from dataclasses import dataclass

import pytest
import torch

from tests.tiers.stacks import UNIT, WatchedTier, add, add_all, assert_at_rest, hammer, retire, run, use
from vbrt.errors import TierError
from vbrt.residency.lru import LRUPolicy
from vbrt.residency.simulate import PASS, make_policy
from vbrt.tiers import Level, MemoryTier, Owner, SsdTier, Tier, TierStack
from vbrt.tiers.protocols.tier import Holder, Store
from vbrt.tiers.stack.row_lookup import page_rows
from vbrt.tiers.stack.slots import State

pytestmark = pytest.mark.usefixtures("no_fsync")


@dataclass(eq=False)
class Packed:
    """Room for a page: what was reserved, and what its bytes take once they are there."""

    nbytes: int
    data: bytes = b""


class CompressedTier:
    """A store in host memory; the whole of a neighbour's memory, or a drive, would look the same."""

    name, device, memory, overhead_bytes, reads_ahead = "packed", torch.device("cpu"), False, 0, False

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes, self.held_bytes, self.peak_bytes, self.stuck_bytes = capacity_bytes, 0, 0, 0
        self.fallbacks: list[str] = []
        self.closed = False

    @property
    def used_bytes(self) -> int:
        return self.held_bytes

    def reserve(self, nbytes: int, holder: Holder, *, reserved_bytes: int = 0) -> bool:
        if self.held_bytes + reserved_bytes + nbytes > self.capacity_bytes:
            return False
        room = Packed(nbytes)
        self.peak_bytes = max(self.peak_bytes, self.held_bytes + nbytes)
        holder.room = room
        self.held_bytes += nbytes
        return True

    def put(self, room: Packed, page: torch.Tensor, *, key: str, layout: dict | None = None) -> None:
        room.data = zlib.compress(bytes(page.tolist()), 1)
        if len(room.data) < room.nbytes:
            self.held_bytes += len(room.data) - room.nbytes
            room.nbytes = len(room.data)

    def get(self, room: Packed, out: torch.Tensor, *, key: str) -> None:
        data = zlib.decompress(room.data)
        if len(data) != out.numel():
            raise TierError(f"{key}: {len(data)} bytes, the buffer {out.numel()}")
        out.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))

    def read_items(self, room: Packed, offsets: torch.Tensor, nbytes: int, *, key: str) -> torch.Tensor:
        page = torch.frombuffer(bytearray(zlib.decompress(room.data)), dtype=torch.uint8)
        return page.unfold(0, nbytes, 1).index_select(0, offsets)

    def is_cached(self, room: Packed) -> bool:
        raise AssertionError("nobody reads it ahead")

    def read_ahead(self, room: Packed) -> None:
        raise AssertionError("it says that it cannot")

    def free(self, room: Packed, *, reuse: bool) -> None:
        self.held_bytes -= room.nbytes
        room.nbytes, room.data = 0, b""

    def trim(self, held_bytes: int = 0) -> None:
        pass

    def after_fork(self, rooms: Collection[Packed]) -> None:
        self.held_bytes = sum(room.nbytes for room in rooms)

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize(("kind", "protocol"), [(MemoryTier, Tier), (SsdTier, Store), (CompressedTier, Store)])
def test_tiers_have_all_that_the_stack_asks_of_them(kind, protocol, tmp_path):
    made = {MemoryTier: lambda: WatchedTier("cpu", 1), SsdTier: lambda: SsdTier(tmp_path, 1 << 20)}
    tier = made.get(kind, lambda: kind(UNIT))()
    assert tier.memory is (protocol is Tier)
    members = {name for base in {protocol, Tier} for name in {*vars(base), *vars(base).get("__annotations__", ())}}
    declared = {name for name in members if not name.startswith("_")}
    assert {"reserve", "capacity_bytes", "close"} <= declared
    assert [name for name in declared if not hasattr(tier, name)] == []
    tier.close()


SIZES = {f"page{i}": 1 + i % 3 for i in range(9)}
ONE_PASS = [PASS, *((key,) for key in SIZES)]
HOMES = {key: ("cpu", "packed", "ssd")[i % 3] for i, key in enumerate(SIZES)}


def stack_of(root, *, policy=None, packed_units: int = 40) -> TierStack:
    tier = CompressedTier(packed_units * UNIT)
    top = Level(WatchedTier("cpu", 9), make_policy("scheduled", 6 * UNIT))
    return TierStack([top, tier if policy is None else Level(tier, policy), SsdTier(root, 1 << 30)])


@pytest.mark.parametrize("policy", [None, "lru", "scheduled"])
def test_another_tier_between_two_holds_right_bits_within_its_budget(tmp_path, policy):
    made = None if policy is None else make_policy(policy, 8 * UNIT)
    stack = add_all(stack_of(tmp_path, policy=made), SIZES, HOMES)
    run(stack, ONE_PASS * 4)
    assert_at_rest(stack)
    links = {link for page in stack.pages.values() for link, nbytes in page.bytes_moved.items() if nbytes}
    assert links == ({"packed>cpu", "ssd>cpu"} if policy is None else {"packed>cpu", "ssd>packed"})
    for level in stack.levels:
        assert level.tier.peak_bytes <= level.tier.capacity_bytes
    stack.close()
    assert stack.levels[1].tier.closed and [level.tier.held_bytes for level in stack.levels] == [0, 0, 0]


def test_pages_are_rehomed_into_it_and_out_of_it(tmp_path):
    sizes = dict.fromkeys(SIZES, 1)
    stack = add_all(stack_of(tmp_path), sizes, dict.fromkeys(sizes, "cpu"))
    for name, units, homes in [
        ("cpu", 6, {"cpu", "packed"}),
        ("packed", 0, {"cpu", "ssd"}),
        ("packed", 40, {"cpu", "ssd"}),
        ("cpu", 9, {"cpu"}),
    ]:
        stack.set_budget(name, units * UNIT)
        run(stack, ONE_PASS * 2)
        assert {stack.names[page.home] for page in stack.pages.values()} == homes
        assert_at_rest(stack)
    assert [level.tier.held_bytes for level in stack.levels[1:]] == [0, 0]
    stack.close()


def test_what_a_page_really_takes_counts(tmp_path):
    stack = stack_of(tmp_path, packed_units=5)
    owner = Owner(stack)
    layout = add(stack, "noise", 2, "packed").layout
    for i in range(20):  # of zeros
        stack.add(f"zeros{i}", layout, "packed", lambda out: out.zero_(), owner)
    assert stack.levels[1].home_bytes == stack.levels[1].tier.held_bytes < 3 * UNIT
    with pytest.raises(TierError, match=r"more: 12288 bytes do not fit into tiers\.packed\.budget = 20480 \(\d+ live"):
        add(stack, "more", 3, "packed")
    retire(stack, "noise")
    add(stack, "more", 3, "packed")
    use(stack, "more")
    stack.close()


def test_a_page_that_it_cannot_give_back_is_an_error_of_that_page(tmp_path):
    stack = add_all(stack_of(tmp_path), SIZES, HOMES)
    room = stack.levels[1].slots["page1"].room
    good, room.data = room.data, zlib.compress(b"short")
    with pytest.raises(TierError, match="page1: 5 bytes"):
        use(stack, "page1")
    assert_at_rest(stack)
    room.data = good
    use(stack, "page1")
    stack.close()


def test_rows_are_read_out_of_it(tmp_path):
    stack = add_all(stack_of(tmp_path), SIZES, HOMES)
    index = torch.tensor([5, 4095, 0])
    assert torch.equal(page_rows(stack, "page1").take("weight", index), page_rows(stack, "page1").take("weight", index))
    with stack.lease(("page1",)) as (fields,):
        assert torch.equal(page_rows(stack, "page1").take("weight", index), fields["weight"][index])
    stack.close()


def test_threads_through_it(tmp_path):
    stack = add_all(stack_of(tmp_path, policy=LRUPolicy(6 * UNIT)), SIZES, HOMES)
    hammer(stack, SIZES, 3, threads=3, turns=40)
    assert_at_rest(stack)
    stack.close()


def test_copies_that_nobody_has_begun_to_make_do_not_keep_the_old_home_of_a_page(tmp_path):
    sizes = dict.fromkeys(SIZES, 1)
    ssd, packed = SsdTier(tmp_path, 1 << 30, io="buffered"), CompressedTier(40 * UNIT)
    levels = [Level(WatchedTier("cpu", 5), make_policy("scheduled", 5 * UNIT)), ssd, packed]
    stack = add_all(TierStack(levels, share_cores=True), sizes)
    run(stack, ONE_PASS * 3)
    assert any(slot.state is State.QUEUED for slot in stack.levels[0].slots.values())  # staged ahead
    stack.set_budget("ssd", 0)
    assert ssd.held_bytes == 0 and {page.home for page in stack.pages.values()} == {2}
    run(stack, ONE_PASS * 2)
    assert_at_rest(stack)
    stack.close()
