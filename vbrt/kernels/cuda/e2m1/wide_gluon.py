"""Wide kernel for Hopper and many tokens: `warpgroup_mma` with decoded weights as the register operand.

A program computes 16 * WARPS rows of the result for TOKENS tokens over one of SPLITS ranges of K. Per 128 columns each
warp decodes one tile of `tiles` into two [16, 64] operands; activations are in shared memory, permuted into the tiles'
column order beforehand, with the instruction's 128-byte swizzle. Tiles come through a shared-memory ring filled by
asynchronous copies, each lane reading back what it copied. With SPLITS > 1, fp32 partial sums go to a workspace. Few
are reduced by the last program to finish on a block of the result, many by `reduce_kernel`, with the whole GPU; both in
a fixed order.

All are dependent launches (see `narrow_gluon`): weights are prefetched while the activations are permuted. Omitting
`order_kernel`, which takes 1 to 3 us, was slower on an H200 with every way of permuting while copying into shared
memory: with copies of 4 bytes 1.1x at 16 and 1.3x at 64 tokens, through registers with 16-byte loads and `stmatrix`
1.3x at 64 and 1.4x at 256 tokens.
"""

# ruff: noqa: RUF005  # the kernel language has no starred expressions

from collections import namedtuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from vbrt.kernels.cuda.e2m1.narrow_gluon import (
    DECODE_E4M3_HIGH,
    DECODE_E4M3_LOW,
    DECODE_E8M0,
    DECODE_REGISTERS,
    RESCALE,
    SCALE_REGISTERS,
    _decode_assembly,
    activate,
    allow_launch_after,
    copy_async,
    wait_for_launch_before,
)
from vbrt.libraries.triton_api import renamed

__all__ = ["reduce_kernel", "wgmma_kernel"]

#: stages in shared memory: first and second words of tiles, their scales
Ring = namedtuple("Ring", "firsts seconds scales")
#: where a thread's row of tiles is, of how many
Tiles = namedtuple("Tiles", "tile_ptr row_tile row_tiles columns")

barrier = renamed(gl, "barrier", "thread_barrier")

# output register 2 q + h of bf16 tensor q = 2 * word + c
_PAIRS = tuple((2 * c + h, j) for j in range(4) for c in range(2) for h in range(2))
DECODE_PAIRS = gl.constexpr(_decode_assembly(_PAIRS))


@gluon.constexpr_function
def rows_first(WARPS):
    """[16 * WARPS, tokens] with eight consecutive rows of the result per lane, and as many lanes along rows as fit."""
    lanes = min(32, 2 * WARPS)
    return gl.BlockedLayout([8, 1], [lanes, 32 // lanes], [1, WARPS], [0, 1])


@gluon.jit
def copy_tiles(ring, place, tiles, column, last, lane, E8M0_SCALES: gl.constexpr):
    """Start copying one tile per warp into a stage of the ring; zeros out of bounds."""
    WORDS: gl.constexpr = 272 if E8M0_SCALES else 288
    LAYOUT: gl.constexpr = lane.type.layout.parent
    four = gl.arange(0, 4, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    wanted = (tiles.row_tile < tiles.row_tiles) & (column < last)
    here = tiles.tile_ptr + column * WORDS  # only a scalar changes from stage to stage
    row = tiles.row_tile * tiles.columns * WORDS
    pointer = here + (gl.multiple_of((row + lane * 4)[:, None], (4, 4)) + four)
    copy_async(ring.firsts.index(place), pointer, mask=wanted[:, None])
    copy_async(ring.seconds.index(place), pointer + 128, mask=wanted[:, None])
    if E8M0_SCALES:  # two lanes' scales per word
        copy_async(ring.scales.index(place), here + (row + 256 + lane // 2), mask=wanted)
    else:
        copy_async(ring.scales.index(place), here + (row + 256 + lane), mask=wanted)


@gluon.jit
def read_tile(ring, place, lane, LAYOUT: gl.constexpr, E8M0_SCALES: gl.constexpr):
    scale = ring.scales.index(place).load(gl.SliceLayout(1, LAYOUT))
    if E8M0_SCALES:
        scale = scale >> (16 * (lane % 2))
    return ring.firsts.index(place).load(LAYOUT), ring.seconds.index(place).load(LAYOUT), scale


@gluon.jit
def register_operands(o, WARPS: gl.constexpr, A: gl.constexpr):
    """Four [16 * WARPS, 16] operands from two tensors [threads, 4], a lane's pairs for rows g and g + 8, in place."""
    out = ()
    for j in gl.static_range(4):
        w = gl.reshape(gl.join(o[2 * j], o[2 * j + 1]), (WARPS, 8, 4, 2, 2, 2))  # warp g t h e c
        w = gl.reshape(gl.permute(w, (0, 3, 1, 5, 2, 4)), (16 * WARPS, 16))
        out = out + (gl.convert_layout(w, A, assert_trivial=True),)
    return out


@gluon.jit
def operands(words, scale, PART: gl.constexpr, E8M0_SCALES: gl.constexpr, WARPS: gl.constexpr, A: gl.constexpr):
    """Four [16 * WARPS, 16] weights times 2^-14 / tensor scale, in warpgroup_mma's register layout."""
    scale_g, scale_h = gl.inline_asm_elementwise(
        DECODE_E8M0 if E8M0_SCALES else (DECODE_E4M3_LOW if PART == 0 else DECODE_E4M3_HIGH),
        SCALE_REGISTERS,
        [scale],
        dtype=(gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )
    o = gl.inline_asm_elementwise(
        DECODE_PAIRS,
        DECODE_REGISTERS,
        [words, scale_g[:, None], scale_h[:, None]],
        dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16),
        is_pure=True,
        pack=4,
    )
    return register_operands(o, WARPS, A)


@gluon.jit
def copy_tokens(place, x_ptr, first_token, column, last, columns, TOKENS: gl.constexpr, WARPS: gl.constexpr):
    """Start copying 128 ordered columns of the activations into a stage of the ring."""
    X: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    row = gl.arange(0, 2 * TOKENS, layout=gl.SliceLayout(1, X))
    at = gl.arange(0, 64, layout=gl.SliceLayout(0, X))
    token = first_token + row % TOKENS
    pointer = (x_ptr + column * 128) + ((token * (columns * 128) + row // TOKENS * 64)[:, None] + at[None, :])
    copy_async(place, pointer, mask=(row >= 0)[:, None] & (column < last))


@gluon.jit(do_not_specialize=["M", "columns"])
def order_kernel(
    x_ptr,
    o_ptr,
    counter_ptr,
    M,
    K,
    columns,
    x_stride,
    k_stride,
    SUMMANDS: gl.constexpr,
    COUNTERS: gl.constexpr,
    WARPS: gl.constexpr,
):
    """o [SUMMANDS * M, 128 * columns] bf16: x [M, K] as summands, columns in tile order, zeros beyond K.

    Also clears COUNTERS numbers, a power of two, with which `wgmma_kernel` counts its programs.
    Grid (M, ceil(columns / (8 * WARPS))). The 128 columns p1 p0 jj c t1 t0 e of a tile come from t1 t0 q1 q0 jj c e
    with q = p ^ t1; see tiles for the names. A thread reads four times eight columns and transposes t and jj c.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4, 8], [32, 1, 1], [WARPS, 1, 1], [2, 1, 0])
    OUT: gl.constexpr = gl.BlockedLayout([8], [32], [WARPS], [0])
    m = gl.program_id(0)
    first = gl.program_id(1) * (32 * WARPS)
    line = first + gl.arange(0, 32 * WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))[:, None][:, :, None]
    t = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))[None, :][:, :, None]
    eight = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))[None, :][:, None, :]
    k = gl.multiple_of((line // 4) * 128 + t * 32 + (((line % 4) ^ (t // 2)) * 8), (1, 1, 8)) + eight
    at = first * 32 + gl.arange(0, 1024 * WARPS, layout=OUT)
    allow_launch_after()
    wait_for_launch_before()
    if COUNTERS > 0:
        if m + first == 0:
            count = gl.arange(0, COUNTERS, layout=gl.BlockedLayout([1], [32], [WARPS], [0]))
            gl.store(counter_ptr + count, count * 0)
    rest = gl.load(x_ptr + m.to(gl.int64) * x_stride + k.to(gl.int64) * k_stride, mask=k < K, other=0.0).to(gl.float32)
    for s in gl.static_range(SUMMANDS):
        summand = rest.to(gl.bfloat16)
        v = gl.permute(gl.reshape(summand, (32 * WARPS, 4, 4, 2)), (0, 2, 1, 3))
        v = gl.convert_layout(gl.reshape(v, (1024 * WARPS,)), OUT)
        row = (m + s * M).to(gl.int64) * (columns * 128)
        gl.store(o_ptr + row + at, v, mask=at < columns * 128)
        rest = rest - summand.to(gl.float32)


@gluon.jit
def place_of_sums(part_ptr, index, ACC: gl.constexpr):
    """Pointers to wgmma sums [16 * warps, tokens], contiguous per warp."""
    ROWS: gl.constexpr = 16 * ACC.warps_per_cta[0]
    TOKENS: gl.constexpr = ACC.instr_shape[1]
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, ACC))[:, None]
    m = gl.arange(0, TOKENS, layout=gl.SliceLayout(0, ACC))[None, :]
    return part_ptr + index.to(gl.int64) * (ROWS * TOKENS) + (m // 8 * (ROWS * 8) + row * 8 + m % 8)


@gluon.jit
def partial_sums_of(part_ptr, own, first, split, s, ACC: gl.constexpr):
    """Sums of split s, with parts starting at `first`: another program's from memory, or `own`."""
    mask = gl.full(own.shape, split != s, gl.int1, layout=ACC)
    return gl.load(place_of_sums(part_ptr, first + s, ACC), mask=mask, other=own, cache_modifier=".cg")


@gluon.jit
def multiply(total, a, tokens, PART: gl.constexpr, TOKENS: gl.constexpr):
    """Issue four instructions on half a column; some stay in flight while the next operands are decoded."""
    for j in gl.static_range(4):
        b = tokens.slice(PART * TOKENS, TOKENS, dim=0).slice(16 * j, 16, dim=1).permute((1, 0))
        total = hopper.warpgroup_mma(a[j], b, total, is_async=True)
        # many tokens leave fewer registers for operands in flight
        if TOKENS > 64:
            total = hopper.warpgroup_mma_wait(3, deps=(total,))
        elif j == 3:
            total = hopper.warpgroup_mma_wait(4, deps=(total,))
    return total


@gluon.jit(do_not_specialize=["M", "columns", "per_split"])
def wgmma_kernel(
    x_ptr,
    tile_ptr,
    scale_ptr,
    bias_ptr,
    part_ptr,
    counter_ptr,
    y_ptr,
    M,
    N,
    columns,
    per_split,
    y_stride,
    TOKENS: gl.constexpr,
    WARPS: gl.constexpr,
    SPLITS: gl.constexpr,
    RING: gl.constexpr,
    PARTIAL: gl.constexpr,
    E8M0_SCALES: gl.constexpr,
    ACTIVATION: gl.constexpr,
    HAS_BIAS: gl.constexpr,
):
    """y [M, N] = activation(x [M, K] @ w.T * scale + bias), or PARTIAL: y [SPLITS, M, N] fp32, summands of the product.

    x comes from `order_kernel`, with rows for whole blocks of TOKENS; grid (token blocks * splits * row blocks,). Split
    s takes the columns of tiles from s * per_split. The last program to finish on a block of y reduces the parts of
    all, part [programs, 16 * WARPS * TOKENS] fp32; count [blocks], initially zero, identifies it. The loop is unrolled
    over the ring, which makes every shared-memory address a constant; columns beyond the last are zeros.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [WARPS, 1], [1, 0])
    THREADS: gl.constexpr = 32 * WARPS
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, TOKENS, 16])
    A: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    LINES: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])

    token_blocks = (M + TOKENS - 1) // TOKENS
    program = gl.program_id(0)
    first_token = (program % token_blocks) * TOKENS  # neighbouring programs share weights in L2
    split = (program // token_blocks) % SPLITS
    row_block = program // (token_blocks * SPLITS)
    thread = gl.arange(0, THREADS, layout=gl.SliceLayout(1, LAYOUT))
    lane = thread % 32
    tiles = Tiles(tile_ptr, row_block * WARPS + thread // 32, (N + 15) // 16, columns)
    column = split * per_split
    last = gl.minimum(column + per_split, columns)

    firsts = gl.allocate_shared_memory(gl.int32, [RING, THREADS, 4], LINES)
    seconds = gl.allocate_shared_memory(gl.int32, [RING, THREADS, 4], LINES)
    scales = gl.allocate_shared_memory(gl.int32, [RING, THREADS], LINE)
    tokens = gl.allocate_shared_memory(gl.bfloat16, [RING, 2 * TOKENS, 64], gl.NVMMASharedLayout(128, 16, 2))
    ring = Ring(firsts, seconds, scales)
    for i in gl.static_range(RING - 1):
        copy_tiles(ring, i, tiles, column + i, last, lane, E8M0_SCALES)
    wait_for_launch_before()  # x is `order_kernel`'s
    allow_launch_after()
    for i in gl.static_range(RING - 1):
        copy_tokens(tokens.index(i), x_ptr, first_token, column + i, last, columns, TOKENS, WARPS)
        async_copy.commit_group()

    total = gl.zeros((16 * WARPS, TOKENS), gl.float32, layout=ACC)
    tensor_scale = gl.load(scale_ptr)
    async_copy.wait_group(RING - 2)
    first, second, scale = read_tile(ring, 0, lane, LAYOUT, E8M0_SCALES)
    for _ in range((last - column + RING - 1) // RING):
        for i in gl.static_range(RING):
            async_copy.wait_group(RING - 3)  # this column and, for the prefetched tile, the next
            total = multiply(total, operands(first, scale, 0, E8M0_SCALES, WARPS, A), tokens.index(i), 0, TOKENS)
            a = operands(second, scale, 1, E8M0_SCALES, WARPS, A)
            first, second, scale = read_tile(ring, (i + 1) % RING, lane, LAYOUT, E8M0_SCALES)
            total = multiply(total, a, tokens.index(i), 1, TOKENS)
            free = (i + RING - 1) % RING
            copy_tiles(ring, free, tiles, column + RING - 1, last, lane, E8M0_SCALES)
            copy_tokens(tokens.index(free), x_ptr, first_token, column + RING - 1, last, columns, TOKENS, WARPS)
            async_copy.commit_group()
            column = column + 1
    v = hopper.warpgroup_mma_wait(0, deps=(total,)) * (RESCALE * tensor_scale)
    async_copy.wait_group(0)

    if SPLITS > 1 and not PARTIAL:
        block = row_block * token_blocks + program % token_blocks
        gl.store(place_of_sums(part_ptr, block * SPLITS + split, ACC), v)
        barrier()
        if gl.atomic_add(counter_ptr + block, 1, sem="acq_rel", scope="gpu") != SPLITS - 1:
            return
        barrier()
        own, v = v, partial_sums_of(part_ptr, v, block * SPLITS, split, 0, ACC)
        for s in gl.static_range(1, SPLITS):
            v = v + partial_sums_of(part_ptr, own, block * SPLITS, split, s, ACC)
    first_row = row_block * (16 * WARPS)
    if PARTIAL:
        row = first_row + gl.arange(0, 16 * WARPS, layout=gl.SliceLayout(1, ACC))
        m = first_token + gl.arange(0, TOKENS, layout=gl.SliceLayout(0, ACC))
        at = (split * M + m).to(gl.int64)[None, :] * y_stride + row[:, None]
        gl.store(y_ptr + at, v, mask=(row < N)[:, None] & (m < M)[None, :])
    else:
        STORE: gl.constexpr = rows_first(WARPS)
        row = first_row + gl.arange(0, 16 * WARPS, layout=gl.SliceLayout(1, ACC))
        if HAS_BIAS:
            v = v + gl.load(bias_ptr + row, mask=row < N, other=0.0).to(gl.float32)[:, None]
        v = gl.convert_layout(activate(v, ACTIVATION, y_ptr.dtype.element_ty).to(y_ptr.dtype.element_ty), STORE)
        row = first_row + gl.arange(0, 16 * WARPS, layout=gl.SliceLayout(1, STORE))
        m = first_token + gl.arange(0, TOKENS, layout=gl.SliceLayout(0, STORE))
        at = m.to(gl.int64)[None, :] * y_stride + row[:, None]
        gl.store(y_ptr + at, v, mask=(row < N)[:, None] & (m < M)[None, :])


@gluon.jit(do_not_specialize=["M"])
def reduce_kernel(
    part_ptr,
    bias_ptr,
    y_ptr,
    M,
    N,
    PARTS: gl.constexpr,
    ACTIVATION: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    WARPS: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    """y [M, N] = activation(sum of part [PARTS, M, N] + bias), grid (column blocks, M)."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([4], [32], [WARPS], [0])
    n = gl.program_id(0) * (128 * WARPS) + gl.arange(0, 128 * WARPS, layout=LAYOUT)
    m = gl.program_id(1).to(gl.int64)
    inside = n < N
    if DEPENDENT:
        wait_for_launch_before()
        allow_launch_after()
    v = gl.load(part_ptr + m * N + n, mask=inside, other=0.0)
    for s in gl.static_range(1, PARTS):
        v = v + gl.load(part_ptr + (m + s * M) * N + n, mask=inside, other=0.0)
    if HAS_BIAS:
        v = v + gl.load(bias_ptr + n, mask=inside, other=0.0).to(gl.float32)
    gl.store(y_ptr + m * N + n, activate(v, ACTIVATION, y_ptr.dtype.element_ty).to(y_ptr.dtype.element_ty), mask=inside)
