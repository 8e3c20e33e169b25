"""Rows of pages where they live: in memory or in a file, without moving the page, and verified."""

import os

import pytest
import torch

from vbrt.errors import TierError
from vbrt.formats.page import build_layout, pack
from vbrt.residency.lru import LRUPolicy
from vbrt.tiers import Level, MemoryTier, Owner, SsdTier, TierStack
from vbrt.tiers.stack.row_lookup import page_rows

TABLE = torch.arange(3000 * 70, dtype=torch.int32).view(3000, 70)  # rows of 280 bytes: some lie across blocks
LIST = torch.arange(5000, dtype=torch.int16)
LAYOUT = build_layout("test", "coarse", [("table", "int32", (3000, 70)), ("list", "int16", (5000,))])
INDEX = torch.tensor([2999, 0, 14, 15, 14, 1500])


@pytest.fixture(params=["cpu", "ssd", "direct"])
def stack(request, tmp_path):
    home = "cpu" if request.param == "cpu" else "ssd"
    ssd = SsdTier(tmp_path, 1 << 30, io="direct" if request.param == "direct" else "buffered")
    room = 1 << 20 if home == "cpu" else 8192  # less than the page
    level = Level(MemoryTier("cpu", torch.device("cpu"), room), LRUPolicy(room))
    made = TierStack([level, ssd])
    made.owner = Owner(made)
    made.add("t", LAYOUT, home, lambda out: pack({"table": TABLE, "list": LIST}, LAYOUT, out), made.owner)
    yield made
    made.close()


def test_rows_and_entries_of_a_page_are_read_where_it_lives(stack):
    rows = page_rows(stack, "t")
    assert torch.equal(rows.take("table", INDEX), TABLE[INDEX])
    assert torch.equal(rows.take("list", torch.tensor([4999, 7])), LIST[[4999, 7]])
    assert rows.take("table", INDEX[:0]).shape == (0, 70)
    page, on_file = stack.pages["t"], stack.pages["t"].home == 1
    assert (page.hits, page.misses) == (not on_file, on_file) and stack.levels[0].tier.held_bytes <= page.nbytes
    assert page.bytes_moved == ({"ssd>cpu": 6 * 280 + 2 * 2} if on_file else {})


@pytest.mark.parametrize("index", [-1, 3000])
def test_an_index_that_a_table_does_not_have_is_refused_in_torchs_words(stack, index):
    with pytest.raises(IndexError, match="index out of range in self"):
        page_rows(stack, "t").take("table", torch.tensor([0, index]))


def test_a_page_that_is_retired_is_named(stack):
    stack.owner = None
    stack.retire_unowned()
    with pytest.raises(TierError, match="t: its page was retired"):
        page_rows(stack, "t")


@pytest.mark.parametrize("stack", ["ssd", "direct"], indirect=True)
@pytest.mark.parametrize("when", ["before", "after"])
def test_bytes_that_changed_in_the_file_are_refused_in_the_rows_that_have_them(stack, when):
    if when == "after":  # the blocks are known by now
        page_rows(stack, "t").take("table", torch.tensor([0]))
    (path,) = stack.levels[-1].tier.directory.glob("*.page")
    with open(path, "r+b") as file:
        file.seek(4096 + 280 * 2000)
        file.write(b"\1")
        os.fsync(file.fileno())
    with pytest.raises(TierError, match=f"{path.name} does not hold the bytes that were written"):
        page_rows(stack, "t").take("table", torch.tensor([0, 2000]))
    if when == "after":
        assert torch.equal(page_rows(stack, "t").take("table", torch.tensor([0])), TABLE[:1])


@pytest.mark.parametrize("stack", ["ssd"], indirect=True)
def test_rows_of_a_page_that_finds_another_home_meanwhile_are_read_there(stack):
    rows = page_rows(stack, "t")
    stack.set_budget("cpu", 1 << 20)
    assert stack.pages["t"].home == 0 and torch.equal(rows.take("table", INDEX), TABLE[INDEX])
