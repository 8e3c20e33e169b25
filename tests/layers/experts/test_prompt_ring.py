"""The ring of a prompt's experts: which pages it brings, when, and where."""

import random

import pytest
import torch

from vbrt.layers.experts.prompt_ring import PromptRing, ring_room

PAGE = 64


def page(layer, expert):
    return torch.full((PAGE,), 10 * layer + expert, dtype=torch.uint8)


class Asked:
    """Pages by layer and expert, and the order in which they were asked for."""

    def __init__(self):
        self.order = []

    def __call__(self, layer, expert):
        self.order.append((layer, expert))
        return page(layer, expert).split(PAGE - 24)  # two planes of one expert


def passed(ring, memory, layer, experts, following=()):
    """Experts of each part; their bytes lie where the passage says, until the next part."""
    passage = ring.schedule(layer, experts, following)
    for number, part in enumerate(passage.parts):
        with passage.read(number):
            for expert in part:
                slot = memory.view(-1)[passage.places[expert] - memory.data_ptr() :][:PAGE]
                assert torch.equal(slot, page(layer, expert)), (layer, expert)
    return passage.parts


def made(segments=2):
    memory, asked = torch.zeros(segments, 2, PAGE + 8, dtype=torch.uint8), Asked()
    return PromptRing([list(slots) for slots in memory], asked), memory, asked.order


def test_parts_alternate_and_each_page_comes_once():
    ring, memory, order = made()
    assert passed(ring, memory, 0, [0, 1, 2, 5, 7]) == [[0, 1], [2, 5], [7]]
    assert order == [(0, 0), (0, 1), (0, 2), (0, 5), (0, 7)]
    assert passed(ring, memory, 1, []) == []


@pytest.mark.parametrize("segments", [2, 3])
def test_first_copies_begin_before_the_first_part_is_read_and_others_when_one_has_been(segments):
    ring, _memory, order = made(segments)
    passage = ring.schedule(0, list(range(9)))
    assert len(order) == 2 * segments
    with passage.read(0):
        assert len(order) == 2 * segments  # kernels may still read the first segment
    assert len(order) == min(9, 2 * segments + 2)
    assert passage.ahead == 0


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
    with ring.schedule(0, [0, 1, 2, 3, 4, 5], [7]).read(0):
        pass
    assert passed(ring, memory, 1, [7, 8, 9]) == [[7, 8], [9]]


@pytest.mark.parametrize("segments", [2, 3])
def test_any_routing_passes_any_ring(segments):
    """What is ahead and not needed frees its segment, whichever it is."""
    choose = random.Random(0)
    ring, memory, _order = made(segments)
    following = []
    for layer in range(24):
        experts = sorted(choose.sample(range(10), choose.randrange(10)))
        if layer % 7 == 6:
            following = []
        ahead, following = following, sorted(choose.sample(range(10), choose.randrange(10)))
        parts = passed(ring, memory, layer, experts, following)
        assert sorted(expert for part in parts for expert in part) == experts
        assert len(parts) <= -(-len(experts) // 2) + len(ahead)


@pytest.mark.parametrize(
    ("experts", "page_bytes", "room", "ring"),
    [
        (128, 2_700_000, 8 << 30, (3, 64)),  # a layer and a part more
        (128, 2_700_000, 380 << 20, (3, 24)),  # half of the room
        (128, 13_000_000, 8 << 30, (9, 16)),  # parts of 192 MiB
        (8, 100_000_000, 8 << 30, (4, 3)),
        (8, 100_000_000, 1 << 30, (5, 1)),
        (8, 100_000_000, 512 << 20, (2, 1)),
        (8, 100_000_000, 256 << 20, (0, 0)),
        (0, 100_000_000, 8 << 30, (0, 0)),
    ],
)
def test_segments_keep_the_link_busy_within_a_share_of_the_room(experts, page_bytes, room, ring):
    assert ring_room(experts, page_bytes, room) == ring
