"""The fused kernel for Hopper and many tokens: `warpgroup_mma` with decoded weights as the register operand.

A program computes 16 * WARPS rows of the result for TOKENS tokens over one of SPLITS ranges of K. Per 128 columns each
warp decodes one tile of `fp4_tiles` into two [16, 64] operands; activations lie in shared memory, permuted on the way
there into the order of the tiles' columns, with the 128-byte swizzle that the instruction reads. Tiles come through
a ring in shared memory filled by asynchronous copies, each lane reading back what it copied. With SPLITS > 1 fp32
partial results go to a workspace that `reduce_kernel` adds up in a fixed order.
"""

# ruff: noqa: RUF005  # the kernel language has no starred expressions

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from vbrt.kernels.fp4_gluon import (
    DECODE_REGISTERS,
    E4M3_HIGH,
    E4M3_LOW,
    E8M0,
    RESCALE,
    SCALE_REGISTERS,
    _decode_assembly,
    activate,
)

__all__ = ["reduce_kernel", "wgmma_kernel"]

# names that changed between Triton 3.6 and 3.9
copy_async = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
REINTERPRET = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))

# output register 2 q + h of bf16 tensor q = 2 * word + c
DECODE_PAIRS = gl.constexpr(_decode_assembly(tuple((2 * c + h, j) for j in range(4) for c in range(2) for h in range(2))))


@gluon.constexpr_function
def shared_tokens(TOKENS):
    """Where activations [TOKENS, t1 t0 p1 p0, jj c], a word each, go in [2 * TOKENS, 64] bf16, swizzled by 128 bytes.

    Half p1, and there p0, jj, c, t1, t0 from the top: the order of a tile's columns, see fp4_tiles for the names.
    """
    bits = TOKENS.bit_length() - 1
    bases = [[0, 4, 0], [0, 8, 0], [0, 0, 1], [0, 0, 2], [0, 1, 0], [1, 0, 1], [2, 0, 2], [4, 1, 0]]
    return gl.SharedLinearLayout(bases + [[1 << i, 0, 0] for i in range(3, bits)] + [[0, 2, 0]])


@gluon.constexpr_function
def token_lanes(TOKENS, WARPS):
    """A word a lane and copy: whole 32-byte sectors of the activations, 32 different banks of shared memory."""
    bits, warp_bits = TOKENS.bit_length() - 1, WARPS.bit_length() - 1
    rest = [[0, 2, 0]] + [[1 << i, 0, 0] for i in range(bits)]
    return gl.DistributedLinearLayout(
        reg_bases=rest[: len(rest) - warp_bits],
        lane_bases=[[0, 0, 1], [0, 0, 2], [0, 1, 0], [0, 4, 0], [0, 8, 0]],
        warp_bases=rest[len(rest) - warp_bits :],
        block_bases=[],
        shape=[TOKENS, 16, 4],
    )


@gluon.jit
def copy_tiles(first, second, scales, tile_ptr, row_tile, row_tiles, column, last, columns, lane, E8: gl.constexpr):
    """Start copying one tile a warp into a place of the ring; zeros outside."""
    WORDS: gl.constexpr = 272 if E8 else 288
    LAYOUT: gl.constexpr = lane.type.layout.parent
    four = gl.arange(0, 4, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    wanted = (row_tile < row_tiles) & (column < last)
    base = (row_tile * columns + column) * WORDS
    pointer = tile_ptr + (gl.multiple_of((base + lane * 4)[:, None], (4, 4)) + four)
    copy_async(first, pointer, mask=wanted[:, None])
    copy_async(second, pointer + 128, mask=wanted[:, None])
    if E8:  # two lanes' scales a word
        copy_async(scales, tile_ptr + (base + 256 + lane // 2), mask=wanted)
    else:
        copy_async(scales, tile_ptr + (base + 256 + lane), mask=wanted)


@gluon.jit
def operand(words, scale, PART: gl.constexpr, E8: gl.constexpr, WARPS: gl.constexpr, A: gl.constexpr):
    """[16 * WARPS, 64] weights times 2^-14 / tensor scale, in the registers that warpgroup_mma wants them in."""
    scale_g, scale_h = gl.inline_asm_elementwise(
        E8M0 if E8 else (E4M3_LOW if PART == 0 else E4M3_HIGH),
        SCALE_REGISTERS, [scale], dtype=(gl.int32, gl.int32), is_pure=True, pack=1,
    )  # fmt: skip
    o0, o1, o2, o3, o4, o5, o6, o7 = gl.inline_asm_elementwise(
        DECODE_PAIRS, DECODE_REGISTERS, [words, scale_g[:, None], scale_h[:, None]],
        dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16),
        is_pure=True, pack=4,
    )  # fmt: skip
    w = gl.join(
        gl.join(gl.join(o0, o1), gl.join(o2, o3)),
        gl.join(gl.join(o4, o5), gl.join(o6, o7)),
    )  # [threads, h e, c, j0, j1]
    w = gl.reshape(w, (WARPS, 8, 4, 2, 2, 2, 2, 2))  # warp g t h e c j0 j1
    w = gl.reshape(gl.permute(w, (0, 3, 1, 7, 6, 5, 2, 4)), (16 * WARPS, 64))
    return gl.convert_layout(w, A, assert_trivial=True)


@gluon.jit
def copy_tokens(
    place, x_words, x_stride, first_token, column, last, M, K,
    TOKENS: gl.constexpr, WARPS: gl.constexpr, EVEN: gl.constexpr,
):  # fmt: skip
    """Start copying 128 columns of the activations into a place of the ring, in the tiles' order; zeros outside."""
    X: gl.constexpr = token_lanes(TOKENS, WARPS)
    SHARED_X: gl.constexpr = shared_tokens(TOKENS)
    token = first_token + gl.arange(0, TOKENS, layout=gl.SliceLayout(1, gl.SliceLayout(2, X)))[:, None][:, :, None]
    run = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, X)))[None, :][:, :, None]
    four = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, X)))[None, :][:, None, :]
    at = (run // 4) * 16 + ((run % 4) ^ (run // 8)) * 4 + four
    wanted = (token < M) & (column < last)
    if not EVEN:
        wanted = wanted & (column * 128 + at * 2 < K)
    pointer = x_words + column * 64 + (token * (x_stride // 2) + at)
    if REINTERPRET:
        copy_async(place.reinterpret(gl.int32, [TOKENS, 16, 4], SHARED_X), pointer, mask=wanted)
    else:
        copy_async(place._reinterpret(gl.int32, [TOKENS, 16, 4], SHARED_X), pointer, mask=wanted)


@gluon.jit(do_not_specialize=["M", "columns", "per_split"])
def wgmma_kernel(
    x_ptr, tile_ptr, scale_ptr, bias_ptr, y_ptr, M, N, K, columns, per_split, x_stride, y_stride,
    TOKENS: gl.constexpr, WARPS: gl.constexpr, SPLITS: gl.constexpr, RING: gl.constexpr,
    E8: gl.constexpr, EVEN: gl.constexpr, ACTIVATION: gl.constexpr, BIAS: gl.constexpr,
):  # fmt: skip
    """y [M, N] = activation(x [M, K] @ w.T * scale + bias), or y [SPLITS, M, N] fp32, the summands of x @ w.T * scale.

    x is bf16, its rows 16-byte aligned; grid (token blocks * splits * row blocks,).
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [WARPS, 1], [1, 0])
    THREADS: gl.constexpr = 32 * WARPS
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, TOKENS, 16])
    A: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    LINES: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])

    token_blocks = (M + TOKENS - 1) // TOKENS
    program = gl.program_id(0)
    first_token = (program % token_blocks) * TOKENS
    split = (program // token_blocks) % SPLITS
    row_block = program // (token_blocks * SPLITS)

    thread = gl.arange(0, THREADS, layout=gl.SliceLayout(1, LAYOUT))
    lane = thread % 32
    row_tile = row_block * WARPS + thread // 32
    row_tiles = (N + 15) // 16
    column = split * per_split
    last = gl.minimum(column + per_split, columns)
    x_words = x_ptr.to(gl.pointer_type(gl.int32))

    firsts = gl.allocate_shared_memory(gl.int32, [RING, THREADS, 4], LINES)
    seconds = gl.allocate_shared_memory(gl.int32, [RING, THREADS, 4], LINES)
    scales = gl.allocate_shared_memory(gl.int32, [RING, THREADS], LINE)
    tokens = gl.allocate_shared_memory(gl.bfloat16, [RING, 2 * TOKENS, 64], gl.NVMMASharedLayout(128, 16, 2))

    for i in gl.static_range(RING - 1):
        copy_tiles(firsts.index(i), seconds.index(i), scales.index(i), tile_ptr, row_tile, row_tiles, column + i, last,
                   columns, lane, E8)  # fmt: skip
        copy_tokens(tokens.index(i), x_words, x_stride, first_token, column + i, last, M, K, TOKENS, WARPS, EVEN)
        async_copy.commit_group()

    total = gl.zeros((16 * WARPS, TOKENS), gl.float32, layout=ACC)
    place = 0
    for _ in range(last - column):
        async_copy.wait_group(RING - 2)
        scale = scales.index(place).load(gl.SliceLayout(1, LAYOUT))
        if E8:
            scale = scale >> (16 * (lane % 2))
        words = firsts.index(place).load(LAYOUT)
        more = seconds.index(place).load(LAYOUT)
        b = tokens.index(place)
        a0 = operand(words, scale, 0, E8, WARPS, A)
        total = hopper.warpgroup_mma(a0, b.slice(0, TOKENS, dim=0).permute((1, 0)), total, is_async=True)
        total = hopper.warpgroup_mma_wait(1, deps=(total,))  # the second half of the column before
        a1 = operand(more, scale, 1, E8, WARPS, A)
        total = hopper.warpgroup_mma(a1, b.slice(TOKENS, TOKENS, dim=0).permute((1, 0)), total, is_async=True)
        free = place - 1
        if free < 0:
            free = RING - 1
        copy_tiles(firsts.index(free), seconds.index(free), scales.index(free), tile_ptr, row_tile, row_tiles,
                   column + RING - 1, last, columns, lane, E8)  # fmt: skip
        copy_tokens(tokens.index(free), x_words, x_stride, first_token, column + RING - 1, last, M, K, TOKENS, WARPS,
                    EVEN)  # fmt: skip
        async_copy.commit_group()
        total = hopper.warpgroup_mma_wait(1, deps=(total,))
        place = place + 1
        if place == RING:
            place = 0
        column = column + 1
    v = hopper.warpgroup_mma_wait(0, deps=(total,))
    async_copy.wait_group(0)

    v = v * RESCALE * gl.load(scale_ptr)
    row = row_block * (16 * WARPS) + gl.arange(0, 16 * WARPS, layout=gl.SliceLayout(1, ACC))
    if SPLITS > 1:
        m = first_token + gl.arange(0, TOKENS, layout=gl.SliceLayout(0, ACC))
        at = (split * M + m).to(gl.int64)[None, :] * y_stride + row[:, None]
        gl.store(y_ptr + at, v, mask=(row < N)[:, None] & (m < M)[None, :])
    else:
        if BIAS:
            v = v + gl.load(bias_ptr + row, mask=row < N, other=0.0).to(gl.float32)[:, None]
        v = activate(v, ACTIVATION).to(y_ptr.dtype.element_ty)
        STORE: gl.constexpr = gl.BlockedLayout([8, 1], [WARPS * 2 if WARPS < 16 else 32, 32 // (WARPS * 2) if WARPS < 16 else 1],
                                               [1, WARPS], [0, 1])  # fmt: skip
        v = gl.convert_layout(v, STORE)
        row = row_block * (16 * WARPS) + gl.arange(0, 16 * WARPS, layout=gl.SliceLayout(1, STORE))
        m = first_token + gl.arange(0, TOKENS, layout=gl.SliceLayout(0, STORE))
        at = m.to(gl.int64)[None, :] * y_stride + row[:, None]
        gl.store(y_ptr + at, v, mask=(row < N)[:, None] & (m < M)[None, :])


@gluon.jit(do_not_specialize=["M"])
def reduce_kernel(
    part_ptr, bias_ptr, y_ptr, M, N, y_stride,
    SPLITS: gl.constexpr, ACTIVATION: gl.constexpr, BIAS: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """y [M, N] = activation(sum of part [SPLITS, M, y_stride] + bias), grid (column blocks, M)."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([4], [32], [WARPS], [0])
    n = gl.program_id(0) * (128 * WARPS) + gl.arange(0, 128 * WARPS, layout=LAYOUT)
    m = gl.program_id(1).to(gl.int64)
    inside = n < N
    v = gl.load(part_ptr + m * y_stride + n, mask=inside, other=0.0)
    for s in gl.static_range(1, SPLITS):
        v = v + gl.load(part_ptr + (m + s * M) * y_stride + n, mask=inside, other=0.0)
    if BIAS:
        v = v + gl.load(bias_ptr + n, mask=inside, other=0.0).to(gl.float32)
    gl.store(y_ptr + m * N + n, activate(v, ACTIVATION).to(y_ptr.dtype.element_ty), mask=inside)
