"""Grouped persistent MoE kernel for Hopper and many tokens, without decoded weights in memory.

`e2m1/persistent_gluon` with a group dimension. Pairs (token, expert) are sorted by expert, and the input rows gathered
in that order (`gather_kernel`), with columns in tile order. A work item is 128 rows of one expert's matrix by up to
TOKENS pairs of that expert. Items of one expert are consecutive, those of the same weights first, so that weights and
activations are shared in L2; programs take them round-robin. Two consumer warpgroups compute 64 rows each, and a
producer warp fetches activations by TMA.

The gate is an epilogue on the accumulators. A warpgroup has matching rows of gates and values: if a matrix has all
gates first, its warps take two tiles of rows from either half. Results are stored through shared memory, each pair to
its own row, in the order before sorting.

Page addresses come from a table, and the number of items is known to the device only.

Legend: P pairs, E experts, N rows of a matrix, B blocks of up to TOKENS pairs of one expert.
"""

# ruff: noqa: RUF005  # the kernel language has no starred expressions

from collections import namedtuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from vbrt.kernels.cuda.e2m1.narrow_gluon import RESCALE, allow_launch_after, wait_for_launch_before
from vbrt.kernels.cuda.e2m1.wide_gluon import operands
from vbrt.kernels.cuda.experts.few_tokens_gluon import gate_function, gated_product
from vbrt.libraries.triton_api import renamed

__all__ = ["gather_kernel", "grouped_kernel"]

#: rows of a matrix per item
ROWS = gl.constexpr(128)
#: per warpgroup
WARPS = gl.constexpr(4)
#: columns of activations in a 128-byte row of shared memory
COLUMNS = gl.constexpr(64)

#: shared memory: activations, barriers of their stages, and one that delays a warpgroup
Ring = namedtuple("Ring", "stages ready free go")
#: arguments of `grouped_kernel`, by use
Table = namedtuple("Table", "table_ptr row_blocks blocks")
Matrix = namedtuple("Matrix", "bias_ptr tile_offset scale_offset N columns")
Result = namedtuple("Result", "pair_ptr y_ptr n_out")
#: its constants
Constants = namedtuple(
    "Constants", "TOKENS STAGES AHEAD E8M0_SCALES HAS_BIAS GATED INTERLEAVED FUNCTION ALPHA LIMIT SHIFT"
)
#: a warpgroup's tiles of an item and of the next one: addresses and row tiles left, then where a thread's words are
Tiles = namedtuple("Tiles", "pairs columns address room next_address next_room tile word_at scale_at")

tma_load = renamed(tma, "async_load", "async_copy_global_to_shared")


@gluon.jit
def describe_block(block, expert_ptr, first_ptr, offset_ptr, address_ptr, table_ptr, E, TOKENS: gl.constexpr):
    """Table entry of a block, int64 [4], prefetched by programs.

    Address of its expert's page; begin and, in the upper half, end of that expert's pairs; its expert's first block
    and, in the upper half, their number; its expert, or -1 if there is none.
    """
    expert = gl.load(expert_ptr + block)
    entry = table_ptr + 4 * block
    if (expert >= 0) & (expert < E):
        begin = gl.load(offset_ptr + expert)
        end = gl.load(offset_ptr + expert + 1)
        first_block = block - (gl.load(first_ptr + block) - begin) // TOKENS
        count = (end - begin + TOKENS - 1) // TOKENS
        gl.store(entry, gl.load(address_ptr + expert))
        gl.store(entry + 1, begin.to(gl.int64) | (end.to(gl.int64) << 32))
        gl.store(entry + 2, first_block.to(gl.int64) | (count.to(gl.int64) << 32))
        gl.store(entry + 3, expert.to(gl.int64))
    else:
        gl.store(entry + 3, gl.full([], -1, gl.int64))


@gluon.jit(do_not_specialize=["P", "M", "blocks", "columns", "n_out"])
def gather_kernel(
    x_ptr,
    order_ptr,
    offset_ptr,
    expert_ptr,
    first_ptr,
    address_ptr,
    table_ptr,
    o_ptr,
    y_ptr,
    P,
    M,
    K,
    k,
    E,
    blocks,
    columns,
    n_out,
    x_stride,
    k_stride,
    SUMMANDS: gl.constexpr,
    CLEARS: gl.constexpr,
    TOKENS: gl.constexpr,
    WARPS: gl.constexpr,
):
    """o [SUMMANDS * P, 128 * columns] bf16: rows of x [M, K] of the sorted pairs, row pair // k for each.

    As summands, columns in tile order, zeros beyond K. Rows of sentinels are not written, and with CLEARS theirs of
    y [P, n_out] are zeroed. Grid (P, ceil(columns / (8 * WARPS))). See `wide_gluon.order_kernel`. Also writes table
    [blocks, 4], see `describe_block`.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4, 8], [32, 1, 1], [WARPS, 1, 1], [2, 1, 0])
    OUT: gl.constexpr = gl.BlockedLayout([8], [32], [WARPS], [0])
    place = gl.program_id(0)
    first = gl.program_id(1) * (32 * WARPS)
    line = first + gl.arange(0, 32 * WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))[:, None][:, :, None]
    t = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))[None, :][:, :, None]
    eight = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))[None, :][:, None, :]
    c = gl.multiple_of((line // 4) * 128 + t * 32 + (((line % 4) ^ (t // 2)) * 8), (1, 1, 8)) + eight
    at = first * 32 + gl.arange(0, 1024 * WARPS, layout=OUT)
    allow_launch_after()
    wait_for_launch_before()
    if (place < blocks) & (first == 0):
        describe_block(place, expert_ptr, first_ptr, offset_ptr, address_ptr, table_ptr, E, TOKENS)
    pair = gl.load(order_ptr + place)
    if place < gl.load(offset_ptr + E):
        m = (pair // k).to(gl.int64)
        rest = gl.load(x_ptr + m * x_stride + c.to(gl.int64) * k_stride, mask=c < K, other=0.0).to(gl.float32)
        for s in gl.static_range(SUMMANDS):
            summand = rest.to(gl.bfloat16)
            v = gl.permute(gl.reshape(summand, (32 * WARPS, 4, 4, 2)), (0, 2, 1, 3))
            v = gl.convert_layout(gl.reshape(v, (1024 * WARPS,)), OUT)
            row = (place + s * P).to(gl.int64) * (columns * 128)
            gl.store(o_ptr + row + at, v, mask=at < columns * 128)
            rest = rest - summand.to(gl.float32)
    elif CLEARS:
        zeros = gl.zeros([1024 * WARPS], y_ptr.dtype.element_ty, layout=OUT)
        clear = y_ptr + pair.to(gl.int64) * n_out
        for begin in range(first * 32, n_out, 1024 * WARPS * gl.num_programs(1)):
            n = begin + gl.arange(0, 1024 * WARPS, layout=OUT)
            gl.store(clear + n, zeros, mask=n < n_out)


@gluon.jit
def next_stage(stage, phase, STAGES: gl.constexpr):
    """The next stage of the ring, and the parity of its barriers' phase."""
    last = stage == STAGES - 1
    return gl.where(last, 0, stage + 1), gl.where(last, phase ^ 1, phase)


@gluon.jit
def entry_of(i, table):
    """Entry of item i's block; its last number is -1 if there is no such item."""
    block = i // table.row_blocks
    inside = block < table.blocks
    entry = table.table_ptr + 4 * block
    address = gl.load(entry, mask=inside, other=0)
    pairs = gl.load(entry + 1, mask=inside, other=0)
    place = gl.load(entry + 2, mask=inside, other=0)
    return address, pairs, place, gl.load(entry + 3, mask=inside, other=-1).to(gl.int32)


@gluon.jit
def item_of(i, pairs, place, table, TOKENS: gl.constexpr):
    """(row block, begin of its pairs in sorted order, end of its expert's)."""
    count = gl.maximum((place >> 32).to(gl.int32), 1)
    own = i - place.to(gl.int32) * table.row_blocks
    return own // count, pairs.to(gl.int32) + own % count * TOKENS, (pairs >> 32).to(gl.int32)


@gluon.jit
def copy_activations(x_desc, ring, table, columns, TOKENS: gl.constexpr, BOX: gl.constexpr, STAGES: gl.constexpr):
    """Producer warp that keeps the ring full, for an even number of columns; columns outside x are zeros.

    Boxes without a pair of the item are skipped.
    """
    wait_for_launch_before()
    allow_launch_after()
    stage = 0
    phase = 0
    i = gl.program_id(0)
    _, pairs, place, expert = entry_of(i, table)
    while expert >= 0:
        _, first, end = item_of(i, pairs, place, table, TOKENS)
        boxes = gl.minimum((end - first + BOX - 1) // BOX, TOKENS // BOX)
        i += gl.num_programs(0)
        _, pairs, place, expert = entry_of(i, table)
        for column in range((columns + 1) // 2 * 2):
            mbarrier.wait(ring.free.index(stage), phase ^ 1)
            bar = ring.ready.index(stage)
            for count in gl.static_range(1, TOKENS // BOX + 1):
                mbarrier.expect(bar, count * (2 * BOX * COLUMNS * 2), pred=boxes == count)
            for half in gl.static_range(2):
                slot = ring.stages.index(2 * stage + half)
                for box in gl.static_range(TOKENS // BOX):
                    at = [first + box * BOX, (2 * column + half) * COLUMNS]
                    tma_load(x_desc, at, bar, slot.slice(box * BOX, BOX, dim=0), pred=box < boxes)
            stage, phase = next_stage(stage, phase, STAGES)


@gluon.jit
def read_tile(address, word_at, scale_at, wanted, E8M0_SCALES: gl.constexpr):
    """(first words, second words, scale bytes) of a warp's tile in a tile column; zeros out of bounds."""
    tile_ptr = gl.multiple_of(address.to(gl.pointer_type(gl.int32)), 16)
    words = tile_ptr + word_at
    # .cg: weights are read once
    first = gl.load(words, mask=wanted[:, None], other=0, cache_modifier=".cg")
    second = gl.load(words + 128, mask=wanted[:, None], other=0, cache_modifier=".cg")
    if E8M0_SCALES:  # two lanes per word
        scale_ptr = (address + 1024).to(gl.pointer_type(gl.int16)) + scale_at
    else:
        scale_ptr = tile_ptr + (256 + scale_at)
    return first, second, gl.load(scale_ptr, mask=wanted, other=0).to(gl.int32)


@gluon.jit
def read_pair(q, tiles, PART: gl.constexpr, E8M0_SCALES: gl.constexpr):
    """A tile column, PART of column pair q of an item or, past its last one, of the next item."""
    BYTES: gl.constexpr = 4 * (272 if E8M0_SCALES else 288)
    here = q < tiles.pairs
    own = gl.where(here, q, q - tiles.pairs)
    at = gl.where(here, tiles.address, tiles.next_address) + (2 * own + PART).to(gl.int64) * BYTES
    wanted = tiles.tile < gl.where(here, tiles.room, tiles.next_room)
    if PART == 1:
        wanted = wanted & (2 * own + 1 < tiles.columns)
    return read_tile(at, tiles.word_at, tiles.scale_at, wanted, E8M0_SCALES)


@gluon.jit
def multiply(total, a, ring, stage, PART: gl.constexpr):
    """Issue four instructions on half a tile column and a stage of the ring."""
    for j in gl.static_range(4):
        b = ring.index(2 * stage + PART).slice(16 * j, 16, dim=1).permute((1, 0))
        total = hopper.warpgroup_mma(a[j], b, total, is_async=True)
    return total


@gluon.jit
def halves(v):
    """Split [rows, pairs] into first and last pairs, in place in registers."""
    return gl.permute(gl.reshape(v, (v.shape[0], 2, v.shape[1] // 2)), (0, 2, 1)).split()


@gluon.constexpr_function
def chunk_of(TOKENS):
    """Pairs that a warpgroup stores at a time."""
    return min(64, TOKENS)


@gluon.constexpr_function
def staged_layout(GATED, INTERLEAVED):
    """[pairs, 64 rows] as read from shared memory: a lane has values to store, with their gates."""
    if not GATED:
        return gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    return gl.BlockedLayout([1, 16 if INTERLEAVED else 8], [8, 4], [4, 1], [1, 0])


@gluon.constexpr_function
def stored_layout(GATED):
    """[pairs, 64 or 32 rows]: 16 bytes per lane."""
    return gl.BlockedLayout([1, 8], [8, 4] if GATED else [4, 8], [4, 1], [1, 0])


@gluon.jit
def read_pair_numbers(pair_ptr, first, end, TOKENS: gl.constexpr, GATED: gl.constexpr):
    """Pair numbers of an item, per chunk; -1 for none."""
    CHUNK: gl.constexpr = chunk_of(TOKENS)
    out = ()
    for c in gl.static_range(TOKENS // CHUNK):
        place = first + c * CHUNK + gl.arange(0, CHUNK, layout=gl.SliceLayout(1, stored_layout(GATED)))
        out = out + (gl.load(pair_ptr + place, mask=place < end, other=-1),)
    return out


@gluon.jit
def store_chunk(v, staging, pair, result, out, C: gl.constexpr):
    """Store a chunk's pairs to rows of y, columns from `out` on: the gate of v [64 rows, pairs]."""
    DTYPE: gl.constexpr = result.y_ptr.dtype.element_ty
    STORED: gl.constexpr = stored_layout(C.GATED)
    if C.GATED:
        staging.permute((1, 0)).store(v)
        w = staging.load(staged_layout(C.GATED, C.INTERLEAVED))
        if C.INTERLEAVED:
            g, u = gl.reshape(w, (w.shape[0], 32, 2)).split()
        else:
            g, u = gl.permute(gl.reshape(w, (w.shape[0], 2, 32)), (0, 2, 1)).split()
        o = gated_product(g, u, C.FUNCTION, C.ALPHA, C.LIMIT, C.SHIFT, DTYPE)
        o = gl.convert_layout(o.to(DTYPE), STORED, assert_trivial=True)
    else:
        staging.permute((1, 0)).store(gate_function(v, C.FUNCTION, 1.0, DTYPE).to(DTYPE))
        o = staging.load(STORED)
    n = out + gl.arange(0, o.shape[1], layout=gl.SliceLayout(0, STORED))
    at = pair.to(gl.int64)[:, None] * result.n_out + n[None, :]
    gl.store(result.y_ptr + at, o, mask=(pair >= 0)[:, None] & (n < result.n_out)[None, :])


@gluon.jit
def store_item(v, staging, pairs, result, first, end, out, C: gl.constexpr):
    """`store_chunk` for v [64 rows, pairs], for chunks that have pairs."""
    if v.shape[1] <= 64:
        store_chunk(v, staging, pairs[0], result, out, C)
    else:
        here, last = halves(v)
        store_chunk(here, staging, pairs[0], result, out, C)
        if first + 64 < end:
            store_chunk(last, staging, pairs[1], result, out, C)


@gluon.jit
def tiles_of(page, row_block, row_tiles, w, HALF: gl.constexpr, STEP: gl.constexpr, E8M0_SCALES: gl.constexpr):
    """(Address of a warpgroup's first tile of an item, remaining row tiles), with STEP tiles per warpgroup."""
    row_bytes = w.columns * (4 * (272 if E8M0_SCALES else 288))
    tile = (row_block * 2 + HALF) * STEP
    return page + w.tile_offset + (tile * row_bytes).to(gl.int64), row_tiles - tile


@gluon.jit
def multiply_items(ring, staging, table, w, result, HALF: gl.constexpr, C: gl.constexpr):
    """Consumer warpgroup, for the lower or the upper HALF of each item's rows.

    The second one starts a column after the first, so that one stores its results while the other multiplies. Tile
    columns are processed in pairs, and prefetched by AHEAD pairs, across the ends of items.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [WARPS, 1], [1, 0])
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, C.TOKENS, 16])
    A: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    WORDS: gl.constexpr = 272 if C.E8M0_SCALES else 288
    APART: gl.constexpr = C.GATED and not C.INTERLEAVED  # gates in one half of the matrix, values in the other
    OUTPUTS: gl.constexpr = 32 if C.GATED else 64
    STEP: gl.constexpr = 2 if APART else 4
    thread = gl.arange(0, 32 * WARPS, layout=gl.SliceLayout(1, LAYOUT))
    lane = thread % 32
    row_tiles = (w.N + 15) // 16
    if APART:
        row_tiles = row_tiles // 2
        tile = thread // 32 % 2
        from_first = tile + thread // 64 * row_tiles
    else:
        tile = thread // 32
        from_first = tile
    four = gl.arange(0, 4, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    line = from_first * w.columns * WORDS
    word_at = gl.multiple_of((line + lane * 4)[:, None], (4, 4)) + four
    scale_at = (2 * line if C.E8M0_SCALES else line) + lane  # scales of mxfp4 are read as 16 bits
    pairs = (w.columns + 1) // 2
    stage = 0
    phase = 0
    wait_for_launch_before()
    i = gl.program_id(0)
    page, span, place, expert = entry_of(i, table)
    next_page, next_span, next_place, next_expert = entry_of(i + gl.num_programs(0), table)
    row_block, first, end = item_of(i, span, place, table, C.TOKENS)
    next_block, next_first, next_end = item_of(i + gl.num_programs(0), next_span, next_place, table, C.TOKENS)
    address, room = tiles_of(page, row_block, row_tiles, w, HALF, STEP, C.E8M0_SCALES)
    room = gl.where(expert >= 0, room, 0)
    next_address, next_room = tiles_of(next_page, next_block, row_tiles, w, HALF, STEP, C.E8M0_SCALES)
    next_room = gl.where(next_expert >= 0, next_room, 0)
    tiles = Tiles(pairs, w.columns, address, room, next_address, next_room, tile, word_at, scale_at)
    c0 = read_pair(0, tiles, 0, C.E8M0_SCALES)
    c1 = read_pair(0, tiles, 1, C.E8M0_SCALES)
    if C.AHEAD == 2:
        n0 = read_pair(1, tiles, 0, C.E8M0_SCALES)
        n1 = read_pair(1, tiles, 1, C.E8M0_SCALES)
    if HALF == 1:
        mbarrier.wait(ring.go, 0, pred=expert >= 0)
    while expert >= 0:
        # the entry is used when this item is done, so its latency is hidden
        later_page, later_span, later_place, later_expert = entry_of(i + 2 * gl.num_programs(0), table)
        scale = gl.load((page + w.scale_offset).to(gl.pointer_type(gl.float32)))
        numbers = read_pair_numbers(result.pair_ptr, first, end, C.TOKENS, C.GATED)
        total = gl.zeros((ROWS // 2, C.TOKENS), gl.float32, layout=ACC)
        a = operands(c0[0], c0[2], 0, C.E8M0_SCALES, WARPS, A)
        own_tiles = Tiles(pairs, w.columns, address, room, next_address, next_room, tile, word_at, scale_at)
        for q in range(pairs):
            mbarrier.wait(ring.ready.index(stage), phase)
            total = multiply(total, a, ring.stages, stage, 0)
            b = operands(c0[1], c0[2], 1, C.E8M0_SCALES, WARPS, A)
            total = multiply(total, b, ring.stages, stage, 1)
            m0 = read_pair(q + C.AHEAD, own_tiles, 0, C.E8M0_SCALES)
            c0 = n0 if C.AHEAD == 2 else m0
            total = hopper.warpgroup_mma_wait(4, deps=(total,))
            a = operands(c1[0], c1[2], 0, C.E8M0_SCALES, WARPS, A)
            done = stage
            stage, phase = next_stage(stage, phase, C.STAGES)
            mbarrier.wait(ring.ready.index(stage), phase)
            total = multiply(total, a, ring.stages, stage, 0)
            total = hopper.warpgroup_mma_wait(4, deps=(total,))
            mbarrier.arrive(ring.free.index(done), count=1)
            if HALF == 0:
                mbarrier.arrive(ring.go, count=1, pred=(i == gl.program_id(0)) & (q == 0))
            b = operands(c1[1], c1[2], 1, C.E8M0_SCALES, WARPS, A)
            total = multiply(total, b, ring.stages, stage, 1)
            m1 = read_pair(q + C.AHEAD, own_tiles, 1, C.E8M0_SCALES)
            c1 = n1 if C.AHEAD == 2 else m1
            if C.AHEAD == 2:
                n0 = m0
                n1 = m1
            total = hopper.warpgroup_mma_wait(4, deps=(total,))
            a = operands(c0[0], c0[2], 0, C.E8M0_SCALES, WARPS, A)
            total = hopper.warpgroup_mma_wait(0, deps=(total,))
            mbarrier.arrive(ring.free.index(stage), count=1)
            stage, phase = next_stage(stage, phase, C.STAGES)
        v = total * (RESCALE * scale)
        out = (row_block * 2 + HALF) * OUTPUTS
        if C.HAS_BIAS:
            r = gl.arange(0, ROWS // 2, layout=gl.SliceLayout(1, ACC))
            row = out + r
            if APART:
                row = out + r % 32 + (r // 32) * (w.N // 2)
            elif C.GATED:
                row = 2 * out + r
            v = v + gl.load(w.bias_ptr + expert * w.N + row, mask=row < w.N, other=0.0).to(gl.float32)[:, None]
        store_item(v, staging, numbers, result, first, end, out, C)
        i += gl.num_programs(0)
        page = next_page
        expert = next_expert
        row_block = next_block
        first = next_first
        end = next_end
        address = next_address
        room = next_room
        next_page = later_page
        next_expert = later_expert
        next_block, next_first, next_end = item_of(i + gl.num_programs(0), later_span, later_place, table, C.TOKENS)
        next_address, next_room = tiles_of(next_page, next_block, row_tiles, w, HALF, STEP, C.E8M0_SCALES)
        next_room = gl.where(next_expert >= 0, next_room, 0)


@gluon.jit(do_not_specialize=["N", "blocks", "row_blocks", "columns", "n_out"])
def grouped_kernel(
    table_ptr,
    pair_ptr,
    bias_ptr,
    y_ptr,
    x_desc,
    tile_offset,
    scale_offset,
    N,
    blocks,
    row_blocks,
    columns,
    n_out,
    TOKENS: gl.constexpr,
    BOX: gl.constexpr,
    STAGES: gl.constexpr,
    AHEAD: gl.constexpr,
    E8M0_SCALES: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    FUNCTION: gl.constexpr,
    GATED: gl.constexpr,
    INTERLEAVED: gl.constexpr,
    ALPHA: gl.constexpr,
    LIMIT: gl.constexpr,
    SHIFT: gl.constexpr,
):
    """y [P, n_out]: for each pair the gate of its expert's W x + bias [E, N], by programs of WARPS warps.

    x_desc: output of `gather_kernel`, in boxes [BOX, COLUMNS], 128-byte swizzle. table: its table, of blocks of up to
    TOKENS pairs. pair: `pairs.Groups.order`. Matrices start tile_offset bytes after an address, their scales
    scale_offset. AHEAD: 2 only if there are more than two tile columns.
    """
    CHUNK: gl.constexpr = chunk_of(TOKENS)
    C: gl.constexpr = Constants(
        TOKENS, STAGES, AHEAD, E8M0_SCALES, HAS_BIAS, GATED, INTERLEAVED, FUNCTION, ALPHA, LIMIT, SHIFT
    )
    STAGED: gl.constexpr = gl.float32 if GATED else y_ptr.dtype.element_ty
    WIDE: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 8, [1, 0])
    SWIZZLE: gl.constexpr = WIDE if STAGED == gl.float32 else x_desc.layout
    stages = gl.allocate_shared_memory(gl.bfloat16, [2 * STAGES, TOKENS, COLUMNS], x_desc.layout)
    lower = gl.allocate_shared_memory(STAGED, [CHUNK, ROWS // 2], SWIZZLE)
    upper = gl.allocate_shared_memory(STAGED, [CHUNK, ROWS // 2], SWIZZLE)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    go = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(ready.index(s), count=1)
        mbarrier.init(free.index(s), count=2)
    mbarrier.init(go, count=1)
    hopper.fence_async_shared()
    ring = Ring(stages, ready, free, go)
    table = Table(table_ptr, row_blocks, blocks)
    w = Matrix(bias_ptr, tile_offset, scale_offset, N, columns)
    result = Result(pair_ptr, y_ptr, n_out)
    gl.warp_specialize(
        [
            (multiply_items, (ring, lower, table, w, result, 0, C)),
            (multiply_items, (ring, upper, table, w, result, 1, C)),
            (copy_activations, (x_desc, ring, table, columns, TOKENS, BOX, STAGES)),
        ],
        [WARPS, 1],
        [240, 24],
    )
