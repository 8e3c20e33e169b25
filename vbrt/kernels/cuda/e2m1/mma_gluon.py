"""Tile loop with `mma.sync` for tens to thousands of tokens, for GPUs without `warpgroup_mma`: sm_80 and newer.

`tile_sums` is the loop: 16 * ROW_TILES * WARPS rows of a weight times TOKENS tokens, over a range of K. `mma_kernel`
gives it the tokens and rows of a linear layer, `experts/grouped_mma_gluon` those of an expert. CODES selects how codes
become operands; the rest of the loop is the same for all.

Per 128 columns each warp decodes ROW_TILES tiles of 16 rows into operands in registers. Activations of all tokens are
copied into shared memory in their own order, and read in the order in which lanes have codes. Both come through a ring
of RING stages filled by asynchronous copies.

| CODES | a tile in shared memory | lane 4 g + t has, of rows g and g + 8, |
| --- | --- | --- |
| e4m3, e8m0: tiles of `tiles` | 1152, 1088 bytes, block scales included | columns 32 t .. + 31 |
| table, magnitudes: rows of 4-bit codes | 1024 bytes | columns 32 t .. + 31 |
| int8: rows of bytes | 2048 bytes | columns 16 t .. + 15, and 64 + 16 t .. + 15 |

Block scales of the latter two are loaded a column ahead, into registers. Shared memory per stage: 256 bytes a token and
the tiles. A lane reads 16 bytes of token g at a time; halves of 64 bytes, or with int8 of 32, are swapped in odd rows,
so that there are no bank conflicts.
"""

# ruff: noqa: RUF005  # the kernel language has no starred expressions

from collections import namedtuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from vbrt.kernels.cuda.e2m1.narrow_gluon import RESCALE, activate, copy_async
from vbrt.kernels.cuda.e2m1.wide_gluon import Ring, Tiles, copy_tiles, operands, read_tile, rows_first
from vbrt.kernels.cuda.table.linear_gluon import load_scale
from vbrt.kernels.cuda.table.operands_gluon import level_words, own_operands, scale_pairs
from vbrt.kernels.cuda.whole.linear_gluon import byte_operands, scale_pair
from vbrt.libraries.triton_api import renamed

__all__ = ["Activations", "Constants", "Weight", "copy_layout", "factor_of", "mma_kernel", "tile_sums"]

#: rows of x: their elements' offsets [TOKENS] from ptr on, in `copy_layout`, which of them exist, and their length
Activations = namedtuple("Activations", "ptr offset there K")
#: codes, block scales, levels; a thread's first row tile, their number, and how far apart a program's two halves are;
#: rows, groups of 128 columns, block scales of a row, 32-bit words of a row
Weight = namedtuple("Weight", "code_ptr block_ptr level_ptr row_tile row_tiles apart N columns blocks line")
#: BLOCK: columns per scale, of rows of codes. APART: row tiles are of two halves of the weight
Constants = namedtuple("Constants", "TOKENS WARPS ROW_TILES RING CODES BLOCK APART K_TAIL")
reinterpret = renamed(gl.shared_memory_descriptor, "reinterpret", "_reinterpret")


@gluon.constexpr_function
def are_tiles(CODES):
    return CODES in ("e4m3", "e8m0")


@gluon.constexpr_function
def lines_of(CODES):
    """Arrays of four words a lane that hold a tile's codes."""
    return 4 if CODES == "int8" else 2


@gluon.constexpr_function
def scales_of_row(CODES, BLOCK):
    """Block scales that a lane needs of a row of a tile."""
    return 2 if CODES == "int8" or BLOCK == 16 else 1


@gluon.constexpr_function
def chunk_of(TOKENS):
    """Tokens of an accumulator."""
    return min(32, TOKENS)


@gluon.constexpr_function
def sums_layout(WARPS):
    return gl.NVMMADistributedLayout([2, 0], [WARPS, 1], [16, 8])


@gluon.constexpr_function
def copy_layout(WARPS):
    """[TOKENS, 128] activations as they are copied: 16 bytes a lane."""
    return gl.BlockedLayout([1, 8], [2, 16], [WARPS, 1], [1, 0])


@gluon.constexpr_function
def stage_layout(TOKENS, CODES, FOR_LANES):
    """[TOKENS, 128] activations in shared memory, halves of 64 bytes swapped in odd rows, or of 32 with int8.

    Columns are in order or, FOR_LANES, 32 p + 8 t .. + 7 are those that lanes 4 g + t take for instructions 2 p and
    2 p + 1: the columns 32 t + 8 (p ^ (t // 2)) .. + 7, or with int8 64 (p // 2) + 16 t + 8 (p % 2) .. + 7.
    """
    bits = lambda v: v.bit_length() - 1  # noqa: E731  # must stay an expression inside a constexpr function
    if CODES == "int8":
        lanes, order = [[0, 32], [0, 8], [0, 16], [0, 64], [1, 32]], [[0, 8], [0, 16], [0, 32], [0, 64], [1, 8]]
    else:
        lanes, order = [[0, 32], [0, 64], [0, 8], [0, 48], [1, 64]], [[0, 8], [0, 16], [0, 32], [0, 64], [1, 16]]
    rows = [[1 << i, 0] for i in range(1, bits(TOKENS))]
    return gl.SharedLinearLayout([[0, 1], [0, 2], [0, 4]] + (lanes if FOR_LANES else order) + rows, [], 16)


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


# -- a stage of the ring -----------------------------------------------------------------------------------------------


@gluon.jit
def row_tile_of(w, r: gl.constexpr, C: gl.constexpr):
    """A thread's row tile number r: those of the first half of the weight before those of the second, if APART."""
    if C.APART:
        return w.row_tile + r % (C.ROW_TILES // 2) * C.WARPS + r // (C.ROW_TILES // 2) * w.apart
    else:
        return w.row_tile + r * C.WARPS


@gluon.jit
def copy_rows(ring, place, w, row_tile, column, last, lane, CODES: gl.constexpr):
    """Start copying a tile of rows of codes: first words of rows g and g + 8, then their second words, if any."""
    LAYOUT: gl.constexpr = lane.type.layout.parent
    LINES: gl.constexpr = lines_of(CODES)
    WORDS: gl.constexpr = 8 * LINES  # of a row, a column
    four = gl.arange(0, 4, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    for i in gl.static_range(LINES):
        row = row_tile * 16 + lane // 4 + i % 2 * 8
        word = lane % 4 * 4 + i // 2 * 16
        wanted = (row < w.N) & (column < last) & (column * WORDS + word < w.line)
        at = gl.multiple_of((row * gl.multiple_of(w.line, 4) + word)[:, None], (4, 4)) + four
        lines = ring.firsts if i % 2 == 0 else ring.seconds
        copy_async(lines.index(place * (LINES // 2) + i // 2), w.code_ptr + column * WORDS + at, mask=wanted[:, None])


@gluon.jit
def copy_tokens(place, x, column, last, TOKENS: gl.constexpr, WARPS: gl.constexpr, K_TAIL: gl.constexpr):
    """Start copying 128 columns of the activations into a stage of the ring [TOKENS, 128]; zeros out of bounds."""
    k = gl.arange(0, 128, layout=gl.SliceLayout(0, copy_layout(WARPS)))
    inside = x.there[:, None] & (k >= 0)[None, :] & (column < last)
    if K_TAIL:
        inside = inside & (column * 128 + k // 8 * 8 < x.K)[None, :]
    # only a scalar changes from stage to stage
    copy_async(place, x.ptr + column * 128 + (x.offset[:, None] + k[None, :]), mask=inside)


@gluon.jit
def copy_stage(ring, stages, place, w, x, column, last, lane, C: gl.constexpr):
    """Start copying one column of tiles and activations into a stage of the ring."""
    for r in gl.static_range(C.ROW_TILES):
        row_tile = row_tile_of(w, r, C)
        if are_tiles(C.CODES):
            of_row = Tiles(w.code_ptr, row_tile, w.row_tiles, w.columns)
            copy_tiles(ring, place * C.ROW_TILES + r, of_row, column, last, lane, C.CODES == "e8m0")
        else:
            copy_rows(ring, place * C.ROW_TILES + r, w, row_tile, column, last, lane, C.CODES)
    copy_tokens(stages.index(place), x, column, last, C.TOKENS, C.WARPS, C.K_TAIL)
    async_copy.commit_group()


@gluon.jit
def load_scales(w, column, last, lane, C: gl.constexpr):
    """A thread's block scales of a column, as stored: for each tile those of rows g and g + 8; zeros out of bounds."""
    out = ()
    if not are_tiles(C.CODES):
        EACH: gl.constexpr = scales_of_row(C.CODES, C.BLOCK)
        for r in gl.static_range(C.ROW_TILES):
            row = row_tile_of(w, r, C) * 16 + lane // 4
            for i in gl.static_range(EACH):
                if C.CODES == "int8":
                    block = column * 4 + i * 2 + lane % 4 // 2
                else:
                    block = (column * 128 + lane % 4 * 32 + i * 16) // C.BLOCK
                there = (block < w.blocks) & (column < last)
                at = row * w.blocks + block
                out = out + (load_scale(w.block_ptr, at, there & (row < w.N)),)
                out = out + (load_scale(w.block_ptr, at + 8 * w.blocks, there & (row + 8 < w.N)),)
    return out


@gluon.jit
def decoded(ring, place, scales, r: gl.constexpr, part: gl.constexpr, levels, lane, A: gl.constexpr, C: gl.constexpr):
    """Four operands [16 * WARPS, 16] of a tile: those of instructions 4 * part .. + 3."""
    LAYOUT: gl.constexpr = lane.type.layout.parent
    if are_tiles(C.CODES):
        first, second, scale = read_tile(ring, place, lane, LAYOUT, C.CODES == "e8m0")
        return operands(first if part == 0 else second, scale, part, C.CODES == "e8m0", C.WARPS, A)
    else:
        EACH: gl.constexpr = scales_of_row(C.CODES, C.BLOCK)
        AT: gl.constexpr = 2 * (r * EACH + (part if EACH == 2 else 0))
        if C.CODES == "int8":
            upper = ring.firsts.index(2 * place + part).load(LAYOUT)
            lower = ring.seconds.index(2 * place + part).load(LAYOUT)
            return byte_operands(upper, lower, scale_pair(scales[AT]), scale_pair(scales[AT + 1]), C.WARPS, A)
        else:
            upper = ring.firsts.index(place).load(LAYOUT)
            lower = ring.seconds.index(place).load(LAYOUT)
            scale_g, scale_h = scale_pairs(scales[AT]), scale_pairs(scales[AT + 1])
            return own_operands(upper, lower, scale_g, scale_h, levels, lane, part, C.WARPS, A)


# -- products ----------------------------------------------------------------------------------------------------------


@gluon.jit
def token_operands(stage, p: gl.constexpr, FIRST: gl.constexpr, CHUNK: gl.constexpr,
                   WARPS: gl.constexpr, B: gl.constexpr):  # fmt: skip
    """The [16, CHUNK] operands of instructions 2 p and 2 p + 1, of the tokens from FIRST on."""
    v = stage.slice(FIRST, CHUNK, dim=0).slice(32 * p, 32, dim=1).load(b_layout(CHUNK, WARPS))
    v = gl.permute(gl.reshape(v, (CHUNK, 4, 2, 2, 2)), (3, 1, 4, 0, 2))  # m t jj c e -> c t e m jj
    low, high = gl.split(gl.reshape(v, (16, CHUNK, 2)))
    return gl.convert_layout(low, B, assert_trivial=True), gl.convert_layout(high, B, assert_trivial=True)


@gluon.jit
def multiply(sums, a, stage, p: gl.constexpr, FIRST: gl.constexpr, B: gl.constexpr, C: gl.constexpr):
    """Instructions 2 p and 2 p + 1 on all sums [TOKENS / CHUNK][ROW_TILES]; `a` has four operands of each row tile."""
    CHUNK: gl.constexpr = chunk_of(C.TOKENS)
    out = ()
    for c in gl.static_range(C.TOKENS // CHUNK):
        b = token_operands(stage, p, c * CHUNK, CHUNK, C.WARPS, B)
        for r in gl.static_range(C.ROW_TILES):
            s = mma_v2(a[4 * r + FIRST], b[0], sums[c * C.ROW_TILES + r])
            out = out + (mma_v2(a[4 * r + FIRST + 1], b[1], s),)
    return out


@gluon.jit
def tile_sums(w, x, column, last, lane, C: gl.constexpr):
    """Sums [16 * WARPS, CHUNK] in `sums_layout` over the columns from `column` to `last`, of all [TOKENS /
    CHUNK][ROW_TILES]: to be multiplied with `factor_of` the weight."""
    LAYOUT: gl.constexpr = lane.type.layout.parent
    THREADS: gl.constexpr = 32 * C.WARPS
    CHUNK: gl.constexpr = chunk_of(C.TOKENS)
    ACC: gl.constexpr = sums_layout(C.WARPS)
    A: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    B: gl.constexpr = gl.DotOperandLayout(1, ACC, 2)
    LINES: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    TILES: gl.constexpr = C.RING * C.ROW_TILES
    ARRAYS: gl.constexpr = TILES * lines_of(C.CODES) // 2
    firsts = gl.allocate_shared_memory(gl.int32, [ARRAYS, THREADS, 4], LINES)
    seconds = gl.allocate_shared_memory(gl.int32, [ARRAYS, THREADS, 4], LINES)
    block_scales = firsts
    if are_tiles(C.CODES):
        block_scales = gl.allocate_shared_memory(gl.int32, [TILES, THREADS], LINE)
    stages = gl.allocate_shared_memory(
        gl.bfloat16, [C.RING, C.TOKENS, 128], stage_layout(C.TOKENS, C.CODES, FOR_LANES=False)
    )
    ring = Ring(firsts, seconds, block_scales)
    for i in gl.static_range(C.RING - 1):
        copy_stage(ring, stages, i, w, x, column + i, last, lane, C)
    scales = load_scales(w, column, last, lane, C)
    levels = ()
    if C.CODES == "table" or C.CODES == "magnitudes":
        levels = level_words(w.level_ptr, C.CODES == "magnitudes", LAYOUT)
    sums = ()
    for _ in gl.static_range(C.ROW_TILES * (C.TOKENS // CHUNK)):
        sums = sums + (gl.zeros((16 * C.WARPS, CHUNK), gl.float32, layout=ACC),)
    for _ in range((last - column + C.RING - 1) // C.RING):
        for i in gl.static_range(C.RING):  # columns beyond the last are zeros
            async_copy.wait_group(C.RING - 2)
            later = load_scales(w, column + 1, last, lane, C)
            stage = reinterpret(
                stages.index(i), gl.bfloat16, [C.TOKENS, 128], stage_layout(C.TOKENS, C.CODES, FOR_LANES=True)
            )
            for part in gl.static_range(2):
                a = ()
                for r in gl.static_range(C.ROW_TILES):
                    a = a + decoded(ring, i * C.ROW_TILES + r, scales, r, part, levels, lane, A, C)
                for q in gl.static_range(2):
                    sums = multiply(sums, a, stage, 2 * part + q, 2 * q, B, C)
            copy_stage(ring, stages, (i + C.RING - 1) % C.RING, w, x, column + C.RING - 1, last, lane, C)
            scales = later
            column = column + 1
    async_copy.wait_group(0)
    return sums


@gluon.jit
def factor_of(scale_ptr, w, CODES: gl.constexpr):
    """What `tile_sums` are to be multiplied with: the tensor scale, if the format has one."""
    if are_tiles(CODES):
        return RESCALE * gl.load(scale_ptr)
    elif CODES != "int8" and w.block_ptr.dtype.element_ty == gl.uint8:
        return gl.load(scale_ptr)
    else:
        return 1.0


@gluon.jit(do_not_specialize=["M", "columns", "per_split", "splits", "blocks", "line"])
def mma_kernel(
    x_ptr,
    code_ptr,
    block_ptr,
    level_ptr,
    scale_ptr,
    bias_ptr,
    y_ptr,
    M,
    N,
    K,
    columns,
    per_split,
    splits,
    blocks,
    line,
    x_stride,
    y_stride,
    TOKENS: gl.constexpr,
    WARPS: gl.constexpr,
    ROW_TILES: gl.constexpr,
    PARTIAL: gl.constexpr,
    RING: gl.constexpr,
    CODES: gl.constexpr,
    BLOCK: gl.constexpr,
    K_TAIL: gl.constexpr,
    ACTIVATION: gl.constexpr,
    HAS_BIAS: gl.constexpr,
):
    """y [M, N] = activation(x [M, K] @ w.T * scale + bias), or PARTIAL: y [splits, M, N] fp32, summands of the product.

    x has rows of whole 16 bytes. Grid (token blocks * splits * row blocks,). Split s takes the columns of tiles from
    s * per_split. block: scales of rows of codes, [N, blocks]; a row has `line` words, a multiple of four.
    """
    C: gl.constexpr = Constants(TOKENS, WARPS, ROW_TILES, RING, CODES, BLOCK, False, K_TAIL)
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [WARPS, 1], [1, 0])
    CHUNK: gl.constexpr = chunk_of(TOKENS)
    ACC: gl.constexpr = sums_layout(WARPS)

    token_blocks = (M + TOKENS - 1) // TOKENS
    program = gl.program_id(0)
    first_token = (program % token_blocks) * TOKENS  # neighbouring programs share weights in L2
    split = (program // token_blocks) % splits
    row_block = program // (token_blocks * splits)
    thread = gl.arange(0, 32 * WARPS, layout=gl.SliceLayout(1, LAYOUT))
    row_tile = row_block * (WARPS * ROW_TILES) + thread // 32
    w = Weight(code_ptr, block_ptr, level_ptr, row_tile, (N + 15) // 16, 0, N, columns, blocks, line)
    row = gl.arange(0, TOKENS, layout=gl.SliceLayout(1, copy_layout(WARPS)))
    own_ptr = x_ptr + first_token.to(gl.int64) * x_stride
    x = Activations(own_ptr, row * (x_stride // 8) * 8, row < M - first_token, K)
    column = split * per_split
    last = gl.minimum(column + per_split, columns)
    factor = factor_of(scale_ptr, w, CODES)
    sums = tile_sums(w, x, column, last, thread % 32, C)
    STORE: gl.constexpr = rows_first(WARPS)
    for r in gl.static_range(ROW_TILES):
        for c in gl.static_range(TOKENS // CHUNK):
            v = sums[c * ROW_TILES + r] * factor
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
