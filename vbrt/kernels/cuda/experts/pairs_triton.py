"""Triton kernels of `pairs`. Importing this needs Triton; plain operations only, so that its interpreter runs it too.

Legend: P pairs, E experts, G groups: E and that of the sentinels, B blocks.
"""

import triton
import triton.language as tl

__all__ = ["count_kernel", "group_kernel", "place_kernel"]


@triton.jit
def _wait_for_launch_before(DEPENDENT: tl.constexpr):
    if DEPENDENT:
        tl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
        tl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def _groups_of(id_ptr, at, P, E):
    """Group of each pair `at`: its expert, E for a sentinel, E + 1 out of bounds."""
    inside = at < P
    expert = tl.load(id_ptr + at, mask=inside, other=0).to(tl.int32)
    routed = (expert >= 0) & (expert < E)
    return tl.where(inside, tl.where(routed, expert, E), E + 1)


@triton.jit
def _store_table(counts, offset_ptr, expert_ptr, first_ptr, E, blocks, BLOCK: tl.constexpr, BINS: tl.constexpr):
    """Store each group's start, and the group and start of each block of up to BLOCK of its pairs."""
    group = tl.arange(0, BINS)
    counts = tl.where(group <= E, counts, 0)
    starts = tl.cumsum(counts, 0) - counts
    tl.store(offset_ptr + group, starts, mask=group <= E + 1)
    own = (counts + BLOCK - 1) // BLOCK
    block = tl.cumsum(own, 0) - own
    for j in range(tl.max(own, 0)):
        tl.store(expert_ptr + block + j, group, mask=j < own)
        tl.store(first_ptr + block + j, starts + j * BLOCK, mask=j < own)
    used = tl.sum(own, 0)
    for begin in range(0, blocks, BINS):
        at = begin + group
        tl.store(expert_ptr + at, -1, mask=(at >= used) & (at < blocks))


@triton.jit(do_not_specialize=["P", "E", "blocks"])
def group_kernel(
    id_ptr,
    order_ptr,
    offset_ptr,
    expert_ptr,
    first_ptr,
    P,
    E,
    blocks,
    BLOCK: tl.constexpr,
    BINS: tl.constexpr,
    RANKED: tl.constexpr,
    SPAN: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """All of `pairs.Groups` for few pairs, grid (1 + ceil(P / RANKED),).

    The first program counts. The others rank RANKED pairs each: the number of pairs that come before.
    """
    _wait_for_launch_before(DEPENDENT)
    if tl.program_id(0) == 0:
        counts = tl.zeros([BINS], tl.int32)
        for begin in range(0, P, SPAN):
            counts += tl.histogram(_groups_of(id_ptr, begin + tl.arange(0, SPAN), P, E), BINS)
        _store_table(counts, offset_ptr, expert_ptr, first_ptr, E, blocks, BLOCK, BINS)
    else:
        pair = (tl.program_id(0) - 1) * RANKED + tl.arange(0, RANKED)
        key = _groups_of(id_ptr, pair, P, E) * P + pair
        place = tl.zeros([RANKED], tl.int32)
        for begin in range(0, P, SPAN):
            other = begin + tl.arange(0, SPAN)
            keys = _groups_of(id_ptr, other, P, E) * P + other
            place += tl.sum((keys[None, :] < key[:, None]).to(tl.int32), 1)
        tl.store(order_ptr + place, pair, mask=pair < P)


@triton.jit(do_not_specialize=["P", "E"])
def count_kernel(id_ptr, count_ptr, P, E, BINS: tl.constexpr, SPAN: tl.constexpr, DEPENDENT: tl.constexpr):
    """count [spans, BINS]: histogram of groups for each SPAN pairs; grid (spans,)."""
    _wait_for_launch_before(DEPENDENT)
    span = tl.program_id(0)
    groups = _groups_of(id_ptr, span * SPAN + tl.arange(0, SPAN), P, E)
    tl.store(count_ptr + span * BINS + tl.arange(0, BINS), tl.histogram(groups, BINS))


@triton.jit(do_not_specialize=["P", "E", "blocks", "spans"])
def place_kernel(
    id_ptr,
    count_ptr,
    order_ptr,
    offset_ptr,
    expert_ptr,
    first_ptr,
    P,
    E,
    blocks,
    spans,
    BLOCK: tl.constexpr,
    BINS: tl.constexpr,
    SPAN: tl.constexpr,
    PART: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """All of `pairs.Groups` from the histograms of all spans; grid (spans,)."""
    _wait_for_launch_before(DEPENDENT)
    span = tl.program_id(0)
    group = tl.arange(0, BINS)
    counts = tl.zeros([BINS], tl.int32)
    before = tl.zeros([BINS], tl.int32)
    for begin in range(0, spans, PART):
        other = begin + tl.arange(0, PART)
        some = tl.load(count_ptr + other[:, None] * BINS + group[None, :], mask=(other < spans)[:, None], other=0)
        counts += tl.sum(some, 0)
        before += tl.sum(tl.where((other < span)[:, None], some, 0), 0)
    if span == 0:
        _store_table(counts, offset_ptr, expert_ptr, first_ptr, E, blocks, BLOCK, BINS)
    starts = tl.cumsum(counts, 0) - counts + before
    pair = span * SPAN + tl.arange(0, SPAN)
    groups = _groups_of(id_ptr, pair, P, E)
    place = tl.gather(starts, groups, 0)
    for begin in range(0, SPAN, PART):
        other = span * SPAN + begin + tl.arange(0, PART)
        same = _groups_of(id_ptr, other, P, E)[None, :] == groups[:, None]
        place += tl.sum((same & (other[None, :] < pair[:, None])).to(tl.int32), 1)
    tl.store(order_ptr + place, pair, mask=pair < P)
