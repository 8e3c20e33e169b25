"""The fused kernel of routed experts for Hopper and many tokens: persistent, grouped by expert, no decoded weight.

It is `e2m1/persistent_gluon` with one dimension more. Pairs (token, expert) are sorted by expert, and the rows of the
input copied in that order (`gather_kernel`), columns in the order of the weights' tiles. An item of work is 128 rows of
one expert's matrix by up to TOKENS pairs of that expert. Items of one expert lie side by side, those of the same
weights first, so that the second-level cache gives weights and activations to all programs that need them; the
programs take turns at them. Two warpgroups multiply 64 rows each, and one more warp has the copy engine fetch
activations.

The gate is applied to the sums before they are stored. A warpgroup has the rows of gates and the rows of values that
meet: where a matrix has all gates first, its warps take two tiles of rows from either half. Sums leave through shared
memory, for each pair to its own row of the result, in the order of the pairs before they were sorted.

The addresses of pages come from a table, and how many items there are is known on the device alone.

Legend: P pairs, E experts, N rows of a matrix, B blocks of up to TOKENS pairs of one expert.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from vbrt.kernels.cuda.e2m1.narrow_gluon import (
    RESCALE,
    activate,
    advanced,
    allow_launch_after,
    read_tiles,
    tile_pointers,
    wait_for_launch_before,
)
from vbrt.kernels.cuda.e2m1.wide_gluon import operands
from vbrt.kernels.cuda.private_api import renamed

__all__ = ["gather_kernel", "grouped_kernel", "sum_kernel"]

#: rows of a matrix in an item; pairs whose sums a warpgroup stores at a time
ROWS, CHUNK = gl.constexpr(128), gl.constexpr(32)
#: of a warpgroup
WARPS = gl.constexpr(4)
#: columns of activations that are a row of 128 bytes in shared memory
COLUMNS = gl.constexpr(64)

tma_load = renamed(tma, "async_load", "async_copy_global_to_shared")


@gluon.jit(do_not_specialize=["P", "M", "columns", "n_out"])
def gather_kernel(
    x_ptr,
    order_ptr,
    offset_ptr,
    o_ptr,
    y_ptr,
    P,
    M,
    K,
    k,
    E,
    columns,
    n_out,
    x_stride,
    k_stride,
    SUMMANDS: gl.constexpr,
    CLEARS: gl.constexpr,
    WARPS: gl.constexpr,
):
    """o [SUMMANDS * P, 128 * columns] bf16: the rows of x [M, K] of the sorted pairs, each pair's being pair // k.

    As summands, columns in the order of the tiles, zeros behind K. Rows of sentinels stay as they are, and with CLEARS
    theirs of y [P, n_out] become zeros. Grid (P, ceil(columns / (8 * WARPS))). See `wide_gluon.order_kernel`.
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
    """The place behind one of the ring, and the parity of its barriers' phase."""
    last = stage == STAGES - 1
    return gl.where(last, 0, stage + 1), gl.where(last, phase ^ 1, phase)


@gluon.jit
def expert_of(i, expert_ptr, row_blocks, blocks):
    """(item i's block, its expert; -1 if there is no such block)."""
    block = i // row_blocks
    return block, gl.load(expert_ptr + block, mask=block < blocks, other=-1)


@gluon.jit
def item_at(i, block, expert, first_ptr, offset_ptr, row_blocks, TOKENS: gl.constexpr):
    """(block of rows, first place of its pairs in their order, the place behind those of its expert)."""
    begin = gl.load(offset_ptr + expert)
    end = gl.load(offset_ptr + expert + 1)
    first_block = block - (gl.load(first_ptr + block) - begin) // TOKENS
    count = (end - begin + TOKENS - 1) // TOKENS
    own = i - first_block * row_blocks
    return own // count, begin + own % count * TOKENS, end


@gluon.jit
def copy_activations(
    x_desc,
    ring,
    ready,
    free,
    expert_ptr,
    first_ptr,
    offset_ptr,
    E,
    blocks,
    row_blocks,
    columns,
    TOKENS: gl.constexpr,
    BOX: gl.constexpr,
    STAGES: gl.constexpr,
):
    """The warp that keeps the ring full, for an even number of columns; columns outside x are zeros.

    Boxes without a pair of the item are left out.
    """
    wait_for_launch_before()
    allow_launch_after()
    stage = 0
    phase = 0
    i = gl.program_id(0)
    block, expert = expert_of(i, expert_ptr, row_blocks, blocks)
    while (expert >= 0) & (expert < E):
        _, first, end = item_at(i, block, expert, first_ptr, offset_ptr, row_blocks, TOKENS)
        boxes = gl.minimum((end - first + BOX - 1) // BOX, TOKENS // BOX)
        for column in range((columns + 1) // 2 * 2):
            mbarrier.wait(free.index(stage), phase ^ 1)
            bar = ready.index(stage)
            for count in gl.static_range(1, TOKENS // BOX + 1):
                mbarrier.expect(bar, count * (2 * BOX * COLUMNS * 2), pred=boxes == count)
            for half in gl.static_range(2):
                place = ring.index(2 * stage + half)
                for box in gl.static_range(TOKENS // BOX):
                    at = [first + box * BOX, (2 * column + half) * COLUMNS]
                    tma_load(x_desc, at, bar, place.slice(box * BOX, BOX, dim=0), pred=box < boxes)
            stage, phase = next_stage(stage, phase, STAGES)
        i += gl.num_programs(0)
        block, expert = expert_of(i, expert_ptr, row_blocks, blocks)


@gluon.jit
def multiply(total, a, ring, stage, PART: gl.constexpr):
    """Starts four instructions on half a column of tiles and a place of the ring."""
    for j in gl.static_range(4):
        b = ring.index(2 * stage + PART).slice(16 * j, 16, dim=1).permute((1, 0))
        total = hopper.warpgroup_mma(a[j], b, total, is_async=True)
    return total


@gluon.jit
def halves(v):
    """[rows, pairs] to its first and last pairs, without moving them."""
    return gl.permute(gl.reshape(v, (v.shape[0], 2, v.shape[1] // 2)), (0, 2, 1)).split()


@gluon.jit
def gated(v, FUNCTION: gl.constexpr, ALPHA: gl.constexpr, DTYPE: gl.constexpr):
    """The function of a gate, see `kernels.experts.GATES`."""
    if FUNCTION == "relu2":
        v = activate(v, "relu", DTYPE)
        v = v * v
    elif ALPHA != 1.0:  # v sigmoid(alpha v)
        v = activate(v * ALPHA, "silu", DTYPE) * (1.0 / ALPHA)
    else:
        v = activate(v, FUNCTION, DTYPE)
    return v


@gluon.constexpr_function
def rows_of_chunk(GATED, INTERLEAVED):
    """[CHUNK pairs, 64 rows]: a lane has the values that it stores side by side and the gates that they meet."""
    if not GATED:
        return gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    return gl.BlockedLayout([1, 16 if INTERLEAVED else 8], [8, 4], [4, 1], [1, 0])


@gluon.jit
def store_chunk(
    v,
    staging,
    pair_ptr,
    y_ptr,
    first,
    end,
    out,
    n_out,
    FUNCTION: gl.constexpr,
    GATED: gl.constexpr,
    INTERLEAVED: gl.constexpr,
    ALPHA: gl.constexpr,
    LIMIT: gl.constexpr,
    SHIFT: gl.constexpr,
):
    """Rows of y of the pairs at places first .. : the gate of v [64 rows, CHUNK pairs]; from column `out` on."""
    LAYOUT: gl.constexpr = rows_of_chunk(GATED, INTERLEAVED)
    DTYPE: gl.constexpr = y_ptr.dtype.element_ty
    staging.permute((1, 0)).store(v)
    w = staging.load(LAYOUT)
    if GATED:
        if INTERLEAVED:
            g, u = gl.reshape(w, (CHUNK, 32, 2)).split()
        else:
            g, u = gl.permute(gl.reshape(w, (CHUNK, 2, 32)), (0, 2, 1)).split()
        if LIMIT is not None:
            g = gl.minimum(g, LIMIT)
            u = gl.minimum(gl.maximum(u, -LIMIT), LIMIT)
        o = gated(g, FUNCTION, ALPHA, DTYPE) * (u + SHIFT)
    else:
        o = gated(w, FUNCTION, 1.0, DTYPE)
    STORE: gl.constexpr = o.type.layout
    n = out + gl.arange(0, o.shape[1], layout=gl.SliceLayout(0, STORE))
    place = first + gl.arange(0, CHUNK, layout=gl.SliceLayout(1, STORE))
    inside = place < end
    pair = gl.load(pair_ptr + place, mask=inside, other=0).to(gl.int64)
    gl.store(y_ptr + (pair[:, None] * n_out + n[None, :]), o.to(DTYPE), mask=inside[:, None] & (n < n_out)[None, :])


@gluon.jit
def store_item(
    v,
    staging,
    pair_ptr,
    y_ptr,
    first,
    end,
    out,
    n_out,
    FUNCTION: gl.constexpr,
    GATED: gl.constexpr,
    INTERLEAVED: gl.constexpr,
    ALPHA: gl.constexpr,
    LIMIT: gl.constexpr,
    SHIFT: gl.constexpr,
):
    """`store_chunk` for v [64 rows, pairs], those pairs that there are."""
    if v.shape[1] == CHUNK:
        if first < end:
            store_chunk(
                v, staging, pair_ptr, y_ptr, first, end, out, n_out, FUNCTION, GATED, INTERLEAVED, ALPHA, LIMIT, SHIFT
            )
    else:
        parts = halves(v)
        HALF: gl.constexpr = v.shape[1] // 2
        for p in gl.static_range(2):
            store_item(
                parts[p],
                staging,
                pair_ptr,
                y_ptr,
                first + p * HALF,
                end,
                out,
                n_out,
                FUNCTION,
                GATED,
                INTERLEAVED,
                ALPHA,
                LIMIT,
                SHIFT,
            )


@gluon.jit
def multiply_items(
    ring,
    ready,
    free,
    go,
    staging,
    address_ptr,
    expert_ptr,
    first_ptr,
    offset_ptr,
    pair_ptr,
    bias_ptr,
    y_ptr,
    tile_offset,
    scale_offset,
    E,
    N,
    blocks,
    row_blocks,
    columns,
    n_out,
    HALF: gl.constexpr,
    TOKENS: gl.constexpr,
    STAGES: gl.constexpr,
    E8M0_SCALES: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    FUNCTION: gl.constexpr,
    GATED: gl.constexpr,
    INTERLEAVED: gl.constexpr,
    ALPHA: gl.constexpr,
    LIMIT: gl.constexpr,
    SHIFT: gl.constexpr,
):
    """A warpgroup, for the lower or the upper HALF of each item's rows.

    The second one starts a column after the first, so that one stores its results while the other multiplies.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [WARPS, 1], [1, 0])
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, TOKENS, 16])
    A: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    STEP: gl.constexpr = 272 if E8M0_SCALES else 288
    SCALE_STEP: gl.constexpr = 2 * STEP if E8M0_SCALES else STEP  # scales of mxfp4 are read as 16 bits
    APART: gl.constexpr = GATED and not INTERLEAVED  # gates in the matrix's upper half, values in the lower one
    OUTPUTS: gl.constexpr = 32 if GATED else 64
    thread = gl.arange(0, 32 * WARPS, layout=gl.SliceLayout(1, LAYOUT))
    lane = thread % 32
    warp = thread // 32
    always = thread >= 0
    row_tiles = (N + 15) // 16
    stage = 0
    phase = 0
    wait_for_launch_before()
    i = gl.program_id(0)
    block, expert = expert_of(i, expert_ptr, row_blocks, blocks)
    if HALF == 1:
        mbarrier.wait(go, 0, pred=(expert >= 0) & (expert < E))
    while (expert >= 0) & (expert < E):
        row_block, first, end = item_at(i, block, expert, first_ptr, offset_ptr, row_blocks, TOKENS)
        address = gl.load(address_ptr + expert)
        tile_ptr = gl.multiple_of((address + tile_offset).to(gl.pointer_type(gl.int32)), 16)
        scale = gl.load((address + scale_offset).to(gl.pointer_type(gl.float32)))
        out = (row_block * 2 + HALF) * OUTPUTS
        if APART:
            row_tile = out // 16 + warp % 2 + (warp // 2) * (row_tiles // 2)
        else:
            row_tile = (row_block * 2 + HALF) * 4 + warp
        weights = tile_pointers(tile_ptr, row_tile, row_tiles, 0, columns, lane, LAYOUT, 1, E8M0_SCALES)
        words, others, scales = read_tiles(weights, always, 1, 0)
        weights = advanced(weights, STEP, SCALE_STEP, 2)
        next_words, next_others, next_scales = read_tiles(weights, always & (1 < columns), 1, 0)
        total = gl.zeros((ROWS // 2, TOKENS), gl.float32, layout=ACC)
        a = operands(words, scales, 0, E8M0_SCALES, WARPS, A)
        for column in range(0, columns, 2):
            mbarrier.wait(ready.index(stage), phase)
            total = multiply(total, a, ring, stage, 0)
            b = operands(others, scales, 1, E8M0_SCALES, WARPS, A)
            total = multiply(total, b, ring, stage, 1)
            weights = advanced(weights, STEP, SCALE_STEP, 2)
            words, others, scales = read_tiles(weights, always & (column + 2 < columns), 1, 0)
            total = hopper.warpgroup_mma_wait(4, deps=(total,))
            a = operands(next_words, next_scales, 0, E8M0_SCALES, WARPS, A)
            done = stage
            stage, phase = next_stage(stage, phase, STAGES)
            mbarrier.wait(ready.index(stage), phase)
            total = multiply(total, a, ring, stage, 0)
            total = hopper.warpgroup_mma_wait(4, deps=(total,))
            mbarrier.arrive(free.index(done), count=1)
            if HALF == 0:
                mbarrier.arrive(go, count=1, pred=(i == gl.program_id(0)) & (column == 0))
            b = operands(next_others, next_scales, 1, E8M0_SCALES, WARPS, A)
            total = multiply(total, b, ring, stage, 1)
            weights = advanced(weights, STEP, SCALE_STEP, 2)
            next_words, next_others, next_scales = read_tiles(weights, always & (column + 3 < columns), 1, 0)
            total = hopper.warpgroup_mma_wait(4, deps=(total,))
            a = operands(words, scales, 0, E8M0_SCALES, WARPS, A)
            total = hopper.warpgroup_mma_wait(0, deps=(total,))
            mbarrier.arrive(free.index(stage), count=1)
            stage, phase = next_stage(stage, phase, STAGES)
        v = total * (RESCALE * scale)
        if HAS_BIAS:
            r = gl.arange(0, ROWS // 2, layout=gl.SliceLayout(1, ACC))
            row = out + r
            if APART:
                row = out + r % 32 + (r // 32) * (N // 2)
            elif INTERLEAVED:
                row = 2 * out + r
            v = v + gl.load(bias_ptr + expert * N + row, mask=row < N, other=0.0).to(gl.float32)[:, None]
        store_item(
            v, staging, pair_ptr, y_ptr, first, end, out, n_out, FUNCTION, GATED, INTERLEAVED, ALPHA, LIMIT, SHIFT
        )
        i += gl.num_programs(0)
        block, expert = expert_of(i, expert_ptr, row_blocks, blocks)


@gluon.jit(do_not_specialize=["E", "N", "blocks", "row_blocks", "columns", "n_out"])
def grouped_kernel(
    address_ptr,
    expert_ptr,
    first_ptr,
    offset_ptr,
    pair_ptr,
    bias_ptr,
    y_ptr,
    x_desc,
    tile_offset,
    scale_offset,
    E,
    N,
    blocks,
    row_blocks,
    columns,
    n_out,
    TOKENS: gl.constexpr,
    BOX: gl.constexpr,
    STAGES: gl.constexpr,
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

    x_desc: what `gather_kernel` gives, in boxes [BOX, COLUMNS], 128-byte swizzle. pair, offset, expert, first: see
    `pairs.Groups`, of blocks of TOKENS. Matrices begin tile_offset bytes behind an address, their scales scale_offset.
    """
    SWIZZLED: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 8, [1, 0])
    ring = gl.allocate_shared_memory(gl.bfloat16, [2 * STAGES, TOKENS, COLUMNS], x_desc.layout)
    lower = gl.allocate_shared_memory(gl.float32, [CHUNK, ROWS // 2], SWIZZLED)
    upper = gl.allocate_shared_memory(gl.float32, [CHUNK, ROWS // 2], SWIZZLED)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    go = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(ready.index(s), count=1)
        mbarrier.init(free.index(s), count=2)
    mbarrier.init(go, count=1)
    hopper.fence_async_shared()
    gl.warp_specialize(
        [
            (
                multiply_items,
                (
                    ring,
                    ready,
                    free,
                    go,
                    lower,
                    address_ptr,
                    expert_ptr,
                    first_ptr,
                    offset_ptr,
                    pair_ptr,
                    bias_ptr,
                    y_ptr,
                    tile_offset,
                    scale_offset,
                    E,
                    N,
                    blocks,
                    row_blocks,
                    columns,
                    n_out,
                    0,
                    TOKENS,
                    STAGES,
                    E8M0_SCALES,
                    HAS_BIAS,
                    FUNCTION,
                    GATED,
                    INTERLEAVED,
                    ALPHA,
                    LIMIT,
                    SHIFT,
                ),
            ),
            (
                multiply_items,
                (
                    ring,
                    ready,
                    free,
                    go,
                    upper,
                    address_ptr,
                    expert_ptr,
                    first_ptr,
                    offset_ptr,
                    pair_ptr,
                    bias_ptr,
                    y_ptr,
                    tile_offset,
                    scale_offset,
                    E,
                    N,
                    blocks,
                    row_blocks,
                    columns,
                    n_out,
                    1,
                    TOKENS,
                    STAGES,
                    E8M0_SCALES,
                    HAS_BIAS,
                    FUNCTION,
                    GATED,
                    INTERLEAVED,
                    ALPHA,
                    LIMIT,
                    SHIFT,
                ),
            ),
            (
                copy_activations,
                (
                    x_desc,
                    ring,
                    ready,
                    free,
                    expert_ptr,
                    first_ptr,
                    offset_ptr,
                    E,
                    blocks,
                    row_blocks,
                    columns,
                    TOKENS,
                    BOX,
                    STAGES,
                ),
            ),
        ],
        [WARPS, 1],
        [240, 24],
    )


@gluon.jit(do_not_specialize=["E", "n"])
def sum_kernel(
    rows_ptr, id_ptr, weight_ptr, y_ptr, E, n, K_EXPERTS: gl.constexpr, COUNT: gl.constexpr, WARPS: gl.constexpr
):
    """y [T, n]: the sum in fp32 of each token's K_EXPERTS rows [P, n] times weight [P], in their order.

    Sentinels add nothing, whatever their rows hold. Grid (T, ceil(n / COUNT)).
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([8], [32], [WARPS], [0])
    t = gl.program_id(0)
    at = gl.program_id(1) * COUNT + gl.arange(0, COUNT, layout=LAYOUT)
    allow_launch_after()
    wait_for_launch_before()
    total = gl.zeros([COUNT], gl.float32, layout=LAYOUT)
    for j in gl.static_range(K_EXPERTS):
        pair = t * K_EXPERTS + j
        expert = gl.load(id_ptr + pair)
        routed = (expert >= 0) & (expert < E)
        weight = gl.load(weight_ptr + pair, mask=routed, other=0.0).to(gl.float32)
        row = gl.load(rows_ptr + pair.to(gl.int64) * n + at, mask=(at < n) & routed, other=0.0)
        total = total + row.to(gl.float32) * weight
    gl.store(y_ptr + t.to(gl.int64) * n + at, total.to(y_ptr.dtype.element_ty), mask=at < n)
