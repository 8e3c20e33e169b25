"""Room for blocks: pages that stay, two regions for the others, and the order in which they are loaded."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from vbrt.residency.block_regions import REGIONS, RegionOrder, divide_room

LLAMA = {"q": 9, "k": 2, "v": 2, "o": 9, "gate": 33, "up": 33, "down": 33}  # MB of a block of 8 B parameters in 4 bits


def named(blocks):
    return [{f"{at}.{name}": size for name, size in block.items()} for at, block in enumerate(blocks)]


@given(blocks=st.lists(st.lists(st.integers(1, 40), max_size=5), min_size=1, max_size=9), room=st.integers(0, 900))
def test_pages_do_not_overlap_and_keep_to_the_room(blocks, room):
    blocks = named([dict(enumerate(sizes)) for sizes in blocks])
    sizes = {key: size for block in blocks for key, size in block.items()}
    places = divide_room(blocks, room)
    if places is None:
        largest_page = max(sizes.values(), default=0)
        assert room < REGIONS * max(sum(block.values()) for block in blocks)
        assert room < sum(sizes.values()) and largest_page
        return
    assert places.nbytes <= room
    for number, (block, streamed) in enumerate(zip(blocks, places.streamed, strict=True)):
        assert set(streamed) == set(block) - set(places.staying)
        at = places.regions[number % REGIONS]
        spans = [(offset, sizes[key]) for key, offset in places.staying.items()]
        spans += sorted((at + offset, sizes[key]) for key, offset in streamed.items())
        other = places.regions[(number + 1) % REGIONS]
        spans.append((other, max((sum(sizes[key] for key in each) for each in places.streamed), default=0)))
        spans.sort()
        assert all(start + size <= after for (start, size), (after, _) in pairwise(spans))
        assert sum(spans[-1]) <= places.nbytes


def test_all_pages_stay_where_there_is_room():
    places = divide_room(named([LLAMA] * 4), 4 * sum(LLAMA.values()))
    assert len(places.staying) == 4 * len(LLAMA) and not any(places.streamed)


def test_blocks_stream_evenly_and_no_room_is_left_for_a_page():
    blocks = named([LLAMA] * 32)
    places = divide_room(blocks, 942)
    streamed = [sum(block[key] for key in each) for block, each in zip(blocks, places.streamed, strict=True)]
    assert sorted(streamed)[1:] == [99] * 31  # of 121 MB; one has another page in the room that is left
    assert 942 - places.nbytes < LLAMA["gate"]


def test_more_room_streams_fewer_bytes():
    before = None
    for room in range(2 * sum(LLAMA.values()), 33 * sum(LLAMA.values()), 50):
        blocks = named([LLAMA] * 32)
        streamed = sum(
            len(each) and sum(b[k] for k in each)
            for b, each in zip(blocks, divide_room(blocks, room).streamed, strict=True)
        )
        assert before is None or streamed <= before + 33
        before = streamed


def step(order, blocks):
    """Loads of a training step: what each visit waits for, and what it prefetches."""
    waited, ahead = [], []
    for kind, numbers in (("forward", range(blocks)), ("backward", reversed(range(blocks)))):
        for block in numbers:
            loads = order.visit(block, kind)
            assert order.holds(block) == (block not in loads)
            for load in loads:
                assert load == block or load % REGIONS != block % REGIONS  # never what is in use
                order.empty(load)
                order.fill(load, ahead=load != block)
            waited += [block] if block in loads else []
            ahead += [load for load in loads if load != block]
            assert order.holds(block)
    return waited, ahead


def test_a_step_is_prefetched_once_it_has_been_seen():
    order = RegionOrder()
    assert step(order, 5) == ([0, 1, 2, 3, 4, 2, 1, 0], [])
    assert step(order, 5) == ([], [2, 3, 4, 2, 1, 0])


def test_two_blocks_are_loaded_once():
    order = RegionOrder()
    assert step(order, 2) == ([0, 1], [])
    assert step(order, 2) == ([], [])


@given(visits=st.lists(st.tuples(st.integers(0, 6), st.sampled_from(["forward", "backward"])), max_size=60))
def test_any_order_has_its_pages(visits):
    order, held = RegionOrder(), {}
    for block, kind in visits:
        for load in order.visit(block, kind):
            assert load == block or load % REGIONS != block % REGIONS
            order.empty(load)
            held[load % REGIONS] = load
            order.fill(load, ahead=load != block)
        assert held[block % REGIONS] == block


def test_a_load_that_was_interrupted_is_repeated():
    order = RegionOrder()
    assert order.visit(0, "forward") == [0]
    order.empty(0)
    assert order.visit(0, "forward") == [0]
