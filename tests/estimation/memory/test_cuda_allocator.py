"""Blocks of torch's CUDA allocator: sizes that an H200 was seen to give away."""

from vbrt.estimation.memory.cuda_allocator import Blocks, allocated_bytes

MiB = 1 << 20


def test_a_tensor_by_itself_gets_whole_granules_and_a_rest_that_is_not_split_off():
    assert [allocated_bytes(n) for n in (1, 512, 513, 3 * MiB)] == [512, 512, 1024, 3 * MiB]
    assert allocated_bytes(15 * MiB) == 16 * MiB  # its segment
    assert allocated_bytes(14 * MiB + 512) == 14 * MiB + 512  # of 16 MiB, more than 1 of which is left


def test_the_last_tensor_of_a_segment_gets_its_rest():
    blocks = Blocks()
    assert [blocks.take(n * MiB) for n in (9, 9, 2)] == [9 * MiB, 9 * MiB, 2 * MiB]
    assert [blocks.take(n * MiB) for n in (7, 7, 5)] == [7 * MiB, 7 * MiB, 6 * MiB]


def test_a_tensor_gets_the_smallest_block_that_holds_it_and_small_ones_have_their_own():
    blocks = Blocks()
    blocks.take(9 * MiB)  # 11 are left
    blocks.take(17 * MiB)  # a segment of 18
    blocks.take(12 * MiB)  # a segment of its own
    assert blocks.take(MiB // 2) == MiB // 2
    assert blocks.take(10 * MiB) == 11 * MiB
    assert blocks.take(2 * MiB) == 2 * MiB
