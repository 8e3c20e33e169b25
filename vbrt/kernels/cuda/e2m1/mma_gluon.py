"""Kernel for tens to thousands of tokens with `mma.sync`, for GPUs without `warpgroup_mma`: sm_80 and newer.

A program computes 16 * ROW_TILES * WARPS rows of the result for TOKENS tokens over one of several ranges of K; partial
sums of several ranges are in fp32 and reduced by another launch. Per 128 columns each warp decodes ROW_TILES tiles of
`tiles` into operands in registers. Activations of all tokens are copied into shared memory in their own order, and read
in that of the tiles. Both come through a ring of RING stages filled by asynchronous copies.

Shared memory per stage: 256 bytes a token and 1152 (mxfp4: 1088) bytes a tile. Lane 4 g + t reads 16 bytes of token g;
as the 32-byte halves of each 64 bytes are swapped in odd rows, there are no bank conflicts.
"""

# ruff: noqa: RUF005  # the kernel language has no starred expressions

from collections import namedtuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from vbrt.kernels.cuda.e2m1.narrow_gluon import RESCALE, activate, copy_async
from vbrt.kernels.cuda.e2m1.wide_gluon import Ring, Tiles, copy_tiles, operands, read_tile, rows_first
from vbrt.libraries.triton_api import renamed

__all__ = ["mma_kernel"]

#: rows of x from the program's first token on, their distance in elements, their number and length
Activations = namedtuple("Activations", "ptr stride tokens K")
reinterpret = renamed(gl.shared_memory_descriptor, "reinterpret", "_reinterpret")


@gluon.constexpr_function
def stage_layout(TOKENS, FOR_TILES):
    """[TOKENS, 128] activations in shared memory, the 32-byte halves of each 64 bytes swapped in odd rows.

    Columns are in order or, FOR_TILES, 32 p + 8 t .. + 7 are those that lanes 4 g + t take for instructions 2 p and
    2 p + 1, which are the columns 32 t + 8 (p ^ (t // 2)) .. + 7.
    """
    bits = lambda v: v.bit_length() - 1  # noqa: E731  # must stay an expression inside a constexpr function
    columns = (
        [[0, 32], [0, 64], [0, 8], [0, 48], [1, 64]] if FOR_TILES else [[0, 8], [0, 16], [0, 32], [0, 64], [1, 16]]
    )
    rows = [[1 << i, 0] for i in range(1, bits(TOKENS))]
    return gl.SharedLinearLayout([[0, 1], [0, 2], [0, 4]] + columns + rows, [], 16)


@gluon.constexpr_function
def b_layout(TOKENS, WARPS):
    """[TOKENS, 32] activations as B operands: eight columns of a token per lane, the same in all warps."""
    bits = lambda v: v.bit_length() - 1  # noqa: E731  # as above
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4]] + [[8 << i, 0] for i in range(bits(TOKENS) - 3)],
        lane_bases=[[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[0, 0]] * bits(WARPS),
        block_bases=[],
        shape=[TOKENS, 32],
    )


@gluon.jit
def copy_tokens(place, x, column, last, TOKENS: gl.constexpr, WARPS: gl.constexpr, K_TAIL: gl.constexpr):
    """Start copying 128 columns of the activations into a stage of the ring [TOKENS, 128]; zeros out of bounds."""
    X: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [WARPS, 1], [1, 0])
    row = gl.arange(0, TOKENS, layout=gl.SliceLayout(1, X))
    k = gl.arange(0, 128, layout=gl.SliceLayout(0, X))
    offset = (row * (x.stride // 8) * 8)[:, None] + k[None, :]
    inside = (row < x.tokens)[:, None] & (k >= 0)[None, :] & (column < last)
    if K_TAIL:
        inside = inside & (column * 128 + k // 8 * 8 < x.K)[None, :]
    copy_async(place, x.ptr + column * 128 + offset, mask=inside)  # only a scalar changes from stage to stage


@gluon.jit
def token_operands(stage, p: gl.constexpr, FIRST: gl.constexpr, CHUNK: gl.constexpr,
                   WARPS: gl.constexpr, B: gl.constexpr):  # fmt: skip
    """The [16, CHUNK] operands of instructions 2 p and 2 p + 1, of the tokens from FIRST on."""
    v = stage.slice(FIRST, CHUNK, dim=0).slice(32 * p, 32, dim=1).load(b_layout(CHUNK, WARPS))
    v = gl.permute(gl.reshape(v, (CHUNK, 4, 2, 2, 2)), (3, 1, 4, 0, 2))  # m t jj c e -> c t e m jj
    low, high = gl.split(gl.reshape(v, (16, CHUNK, 2)))
    return gl.convert_layout(low, B, assert_trivial=True), gl.convert_layout(high, B, assert_trivial=True)


@gluon.jit
def multiply(
    sums, a, stage, p: gl.constexpr, FIRST: gl.constexpr, TOKENS: gl.constexpr, CHUNK: gl.constexpr,
    ROW_TILES: gl.constexpr, WARPS: gl.constexpr, B: gl.constexpr,
):  # fmt: skip
    """Instructions 2 p and 2 p + 1 on all sums [TOKENS / CHUNK][ROW_TILES]; `a` has four operands of each row tile."""
    out = ()
    for c in gl.static_range(TOKENS // CHUNK):
        b = token_operands(stage, p, c * CHUNK, CHUNK, WARPS, B)
        for r in gl.static_range(ROW_TILES):
            s = mma_v2(a[4 * r + FIRST], b[0], sums[c * ROW_TILES + r])
            out = out + (mma_v2(a[4 * r + FIRST + 1], b[1], s),)
    return out


@gluon.jit
def copy_stage(
    ring, stages, place, tiles, x, column, last, lane, TOKENS: gl.constexpr, WARPS: gl.constexpr,
    ROW_TILES: gl.constexpr, E8M0_SCALES: gl.constexpr, K_TAIL: gl.constexpr,
):  # fmt: skip
    """Start copying one column of tiles and activations into a stage of the ring."""
    for r in gl.static_range(ROW_TILES):
        of_row = Tiles(tiles.tile_ptr, tiles.row_tile + r * WARPS, tiles.row_tiles, tiles.columns)
        copy_tiles(ring, place * ROW_TILES + r, of_row, column, last, lane, E8M0_SCALES)
    copy_tokens(stages.index(place), x, column, last, TOKENS, WARPS, K_TAIL)
    async_copy.commit_group()


@gluon.jit(do_not_specialize=["M", "columns", "per_split", "splits"])
def mma_kernel(
    x_ptr,
    tile_ptr,
    scale_ptr,
    bias_ptr,
    y_ptr,
    M,
    N,
    K,
    columns,
    per_split,
    splits,
    x_stride,
    y_stride,
    TOKENS: gl.constexpr,
    WARPS: gl.constexpr,
    ROW_TILES: gl.constexpr,
    PARTIAL: gl.constexpr,
    RING: gl.constexpr,
    E8M0_SCALES: gl.constexpr,
    K_TAIL: gl.constexpr,
    ACTIVATION: gl.constexpr,
    HAS_BIAS: gl.constexpr,
):
    """y [M, N] = activation(x [M, K] @ w.T * scale + bias), or PARTIAL: y [splits, M, N] fp32, summands of the product.

    x has rows of whole 16 bytes. Grid (token blocks * splits * row blocks,). Split s takes the columns of tiles from
    s * per_split.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [WARPS, 1], [1, 0])
    THREADS: gl.constexpr = 32 * WARPS
    CHUNK: gl.constexpr = TOKENS if TOKENS < 32 else 32
    CHUNKS: gl.constexpr = TOKENS // CHUNK
    ACC: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1], [16, 8])
    A: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    B: gl.constexpr = gl.DotOperandLayout(1, ACC, 2)
    LINES: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])

    token_blocks = (M + TOKENS - 1) // TOKENS
    program = gl.program_id(0)
    first_token = (program % token_blocks) * TOKENS  # neighbouring programs share weights in L2
    split = (program // token_blocks) % splits
    row_block = program // (token_blocks * splits)
    thread = gl.arange(0, THREADS, layout=gl.SliceLayout(1, LAYOUT))
    lane = thread % 32
    tiles = Tiles(tile_ptr, row_block * (WARPS * ROW_TILES) + thread // 32, (N + 15) // 16, columns)
    x = Activations(x_ptr + first_token.to(gl.int64) * x_stride, x_stride, M - first_token, K)
    column = split * per_split
    last = gl.minimum(column + per_split, columns)

    firsts = gl.allocate_shared_memory(gl.int32, [RING * ROW_TILES, THREADS, 4], LINES)
    seconds = gl.allocate_shared_memory(gl.int32, [RING * ROW_TILES, THREADS, 4], LINES)
    scales = gl.allocate_shared_memory(gl.int32, [RING * ROW_TILES, THREADS], LINE)
    stages = gl.allocate_shared_memory(gl.bfloat16, [RING, TOKENS, 128], stage_layout(TOKENS, False))
    ring = Ring(firsts, seconds, scales)
    for i in gl.static_range(RING - 1):
        copy_stage(ring, stages, i, tiles, x, column + i, last, lane, TOKENS, WARPS, ROW_TILES, E8M0_SCALES, K_TAIL)
    sums = ()
    for _ in gl.static_range(ROW_TILES * CHUNKS):
        sums = sums + (gl.zeros((16 * WARPS, CHUNK), gl.float32, layout=ACC),)
    tensor_scale = gl.load(scale_ptr)
    for _ in range((last - column + RING - 1) // RING):
        for i in gl.static_range(RING):  # columns beyond the last are zeros
            async_copy.wait_group(RING - 2)
            stage = reinterpret(stages.index(i), gl.bfloat16, [TOKENS, 128], stage_layout(TOKENS, True))
            for part in gl.static_range(2):
                a = ()
                for r in gl.static_range(ROW_TILES):
                    first, second, scale = read_tile(ring, i * ROW_TILES + r, lane, LAYOUT, E8M0_SCALES)
                    a = a + operands(first if part == 0 else second, scale, part, E8M0_SCALES, WARPS, A)
                for q in gl.static_range(2):
                    sums = multiply(sums, a, stage, 2 * part + q, 2 * q, TOKENS, CHUNK, ROW_TILES, WARPS, B)
            copy_stage(
                ring, stages, (i + RING - 1) % RING, tiles, x, column + RING - 1, last, lane, TOKENS, WARPS, ROW_TILES,
                E8M0_SCALES, K_TAIL,
            )  # fmt: skip
            column = column + 1
    async_copy.wait_group(0)
    STORE: gl.constexpr = rows_first(WARPS)
    for r in gl.static_range(ROW_TILES):
        for c in gl.static_range(CHUNKS):
            v = sums[c * ROW_TILES + r] * (RESCALE * tensor_scale)
            first_row = (row_block * ROW_TILES + r) * (16 * WARPS)
            if HAS_BIAS:
                row = first_row + gl.arange(0, 16 * WARPS, layout=gl.SliceLayout(1, ACC))
                v = v + gl.load(bias_ptr + row, mask=row < N, other=0.0).to(gl.float32)[:, None]
            if not PARTIAL:
                v = activate(v, ACTIVATION, y_ptr.dtype.element_ty).to(y_ptr.dtype.element_ty)
            v = gl.convert_layout(v, STORE)
            row = first_row + gl.arange(0, 16 * WARPS, layout=gl.SliceLayout(1, STORE))
            m = first_token + c * CHUNK + gl.arange(0, CHUNK, layout=gl.SliceLayout(0, STORE))
            at = (split * M + m).to(gl.int64)[None, :] * y_stride + row[:, None]
            gl.store(y_ptr + at, v, mask=(row < N)[:, None] & (m < M)[None, :])
