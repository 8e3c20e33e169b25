"""The ring of a prompt's experts: which pages it brings, when, and where."""

import pytest
import torch

from vbrt.layers.experts.prompt_ring import PromptRing, ring_pages

PAGE = 64


def page(layer, expert):
    return torch.full((PAGE,), 10 * layer + expert, dtype=torch.uint8)


class Asked:
    """Pages by layer and expert, and the order in which they were asked for."""

    def __init__(self):
        self.order = []

    def __call__(self, layer, expert):
        self.order.append((layer, expert))
        return page(layer, expert)


def passed(ring, memory, layer, experts, following=()):
    """Experts of each part; their bytes lie where the part says, until the next part."""
    parts, passage = ring.schedule(layer, experts, following)
    for part, places in zip(parts, passage, strict=True):
        assert set(part) <= places.keys()
        for expert, address in places.items():
            slot = memory.view(-1)[address - memory.data_ptr() :][:PAGE]
            assert torch.equal(slot, page(layer, expert)), (layer, expert)
    return parts


def made(slots=4):
    memory, asked = torch.zeros(slots, PAGE + 8, dtype=torch.uint8), Asked()
    return PromptRing(memory, asked), memory, asked.order


def test_parts_alternate_and_each_page_comes_once():
    ring, memory, order = made()
    assert passed(ring, memory, 0, [0, 1, 2, 5, 7]) == [[0, 1], [2, 5], [7]]
    assert order == [(0, 0), (0, 1), (0, 2), (0, 5), (0, 7)]
    assert passed(ring, memory, 1, []) == []


def test_first_copies_begin_before_the_first_part_is_asked_for_and_the_next_ones_meanwhile():
    ring, _memory, order = made()
    _, parts = ring.schedule(0, [0, 1, 2, 3, 4, 5])
    assert len(order) == 4
    next(parts)
    assert len(order) == 4  # kernels may still read the first half
    next(parts)
    assert len(order) == 6


def test_the_next_layers_first_pages_are_brought_ahead_and_not_again():
    ring, memory, order = made()
    assert passed(ring, memory, 0, [1, 2, 3], following=[0, 4, 6, 7, 9]) == [[1, 2], [3]]
    assert order[3:] == [(1, 0), (1, 4), (1, 6), (1, 7)]  # two parts
    assert passed(ring, memory, 1, [2, 4, 6, 8], following=[5]) == [[4], [6], [2, 8]]  # nobody is routed to 0 and 7
    assert order[7:] == [(1, 2), (1, 8), (2, 5)]
    assert passed(ring, memory, 2, [1], following=[0, 4, 6, 7]) == [[1]]
    assert passed(ring, memory, 3, [4, 8]) == [[4], [8]]  # the second part that came is not needed
    order[10:] = []
    assert passed(ring, memory, 5, [5, 6]) == [[5, 6]]  # another layer than the next one
    assert order[10:] == [(5, 5), (5, 6)]


def test_a_layer_without_parts_begins_the_next_ones():
    ring, memory, order = made()
    assert passed(ring, memory, 0, [], following=[3]) == [] and order == [(1, 3)]
    assert passed(ring, memory, 1, [3]) == [[3]] and len(order) == 1


def test_a_prompt_that_is_broken_off_leaves_nothing_behind():
    ring, memory, _order = made()
    _, parts = ring.schedule(0, [0, 1, 2, 3, 4, 5], [7])
    next(parts)
    parts.close()
    assert passed(ring, memory, 1, [7, 8, 9]) == [[7, 8], [9]]


@pytest.mark.parametrize(
    ("experts", "page_bytes", "room", "pages"),
    [
        (128, 2_700_000, 760 << 20, 18),  # an eighth of the room
        (128, 13_000_000, 3 << 30, 8),  # parts of 96 MiB
        (8, 100_000_000, 8 << 30, 2),
        (128, 4096, 1 << 30, 32),  # four parts of a layer
        (128, 2_700_000, 100 << 20, 2),  # an eighth of the room
        (8, 100_000_000, 1 << 30, 0),
    ],
)
def test_halves_keep_the_link_busy_within_a_share_of_the_room(experts, page_bytes, room, pages):
    assert ring_pages(experts, page_bytes, room) == pages
