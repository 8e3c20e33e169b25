"""Persistent kernel for y = x @ w, the gradient to a layer's inputs, on the tiles of w that its forward reads.

`persistent_gluon` with the weight turned: the sum runs over the weight's rows, and a tile of the result consists of the
128 columns of a tile column by TOKENS tokens. The first warpgroup has the first 16 of each 32 columns, the second one
the others: the words of tiles lie in that order. Of each tile a lane takes one word, eight codes of two rows and four
columns, decodes it with the rows' scales, and `movmatrix` transposes each of the four pairs over the warp: that is the
register operand of one `wgmma`, 16 columns by 16 rows. No words or pairs are exchanged as in the forward, because the
order of the result's columns is free until they are stored.

Four warps read the same 16 bytes of a lane, a word each, so loads go through L1. A word for the next column is loaded
as soon as one has been decoded: half as many registers wait for words as in the forward.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from vbrt.kernels.cuda.e2m1.narrow_gluon import (
    DECODE_E4M3_HIGH,
    DECODE_E4M3_LOW,
    DECODE_E8M0,
    RESCALE,
    SCALE_REGISTERS,
    decode_word,
    wait_for_launch_before,
)
from vbrt.kernels.cuda.e2m1.persistent_gluon import (
    ROWS,
    WARPS,
    Constants,
    Cuts,
    Matrix,
    Result,
    add_partial_sums,
    copy_activations,
    halves,
    leave_partial_sums,
    multiply,
    next_stage,
    part_at,
    parts_of,
    piece_first,
    piece_tokens,
    pieces_of,
    shared_memory,
    stages_of,
    sums_layout,
    tokens_of,
    wait_for_products,
    zeros_of,
)
from vbrt.kernels.cuda.e2m1.wide_gluon import register_operands

__all__ = ["turned_kernel"]

#: row tiles of an operand of four instructions
FOUR = gl.constexpr(4)


def _turned_assembly() -> str:
    """Decode words $16..$19, with scales $20..$23 of rows g and $24..$27 of rows g + 8, to four A operands in $0..$15.

    The pairs of a word are columns 0 and 1 of row g, of row g + 8, then columns 2 and 3 of both. Transposed, those of
    lane t are rows 2 t and 2 t + 1 of the operand's first and second eight.
    """
    lines = ["{ .reg .b32 t, z, q0, q1, q2, q3; mov.b32 z, 0x80008000;"]
    for word in range(4):
        lines += decode_word(f"${16 + word}", ["q0", "q1", "q2", "q3"], (f"${20 + word}", f"${24 + word}"))
        lines += [
            f"movmatrix.sync.aligned.m8n8.trans.b16 ${4 * word + place}, q{pair};"
            for place, pair in enumerate((0, 2, 1, 3))
        ]
    return " ".join([*lines, "}"])


TURN = gl.constexpr(_turned_assembly())
TURN_REGISTERS = gl.constexpr(",".join(["=&r"] * 16) + ",r" * 12)


@gluon.constexpr_function
def staged_layout(TOKENS):
    """[tokens, 64 rows of an accumulator] as read from shared memory: a lane has eight columns of the result."""
    bits = TOKENS.bit_length() - 5
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 8], [0, 16]] + [[16 << i, 0] for i in range(bits)],
        lane_bases=[[0, 32], [0, 2], [0, 4], [1, 0], [2, 0]],
        warp_bases=[[4, 0], [8, 0]],
        block_bases=[],
        shape=[TOKENS, 64],
    )


@gluon.jit
def read_rows(w, place, tile, end, PART: gl.constexpr, C: gl.constexpr, LAYOUT: gl.constexpr):
    """A lane's words and scales in four row tiles: PART 0 or 1 of the 128 rows from row tile `tile` on; zeros from
    row tile `end` on.

    w.N: columns of the weight. place: (tile column, place of the lane's words among a tile's, its lane).
    """
    E8M0_SCALES: gl.constexpr = C.CODES == "e8m0"
    WORDS: gl.constexpr = 272 if E8M0_SCALES else 288
    tile_column, word, lane = place
    four = tile + PART * FOUR + gl.arange(0, FOUR, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    base = (four * ((w.N + 127) // 128) + tile_column) * WORDS
    wanted = (four < end) & (lane >= 0)[:, None]
    if E8M0_SCALES:
        scales = w.tile_ptr.to(gl.pointer_type(gl.int16)) + (2 * base + 512 + lane[:, None])
    else:
        scales = w.tile_ptr + (base + 256 + lane[:, None])
    words = gl.load(w.tile_ptr + (base + word[:, None]), mask=wanted, other=0)
    return words, gl.load(scales, mask=wanted, other=0).to(gl.int32)


@gluon.jit
def turned_operands(raw, HALF: gl.constexpr, C: gl.constexpr, A: gl.constexpr):
    """Four [64, 16] operands: columns by rows of the weight, times 2^-14 / tensor scale."""
    scale_g, scale_h = gl.inline_asm_elementwise(
        DECODE_E8M0 if C.CODES == "e8m0" else (DECODE_E4M3_LOW if HALF == 0 else DECODE_E4M3_HIGH),
        SCALE_REGISTERS,
        [raw[1]],
        dtype=(gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )
    o = gl.inline_asm_elementwise(
        TURN,
        TURN_REGISTERS,
        [raw[0], scale_g, scale_h],
        dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16),
        is_pure=False,
        pack=4,
    )
    return register_operands(o, WARPS, A)


@gluon.jit
def store_turned(v, result, staging, tile, first_token, own_token, HALF: gl.constexpr):
    """y = v [64 rows, up to 64 tokens], through shared memory.

    Row 16 w + 8 c + 2 t + e is column 32 t + 16 HALF + 4 w + 2 c + e of the tile: register, lane and warp bits are
    renamed, no value moves.
    """
    OUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    SIZE: gl.constexpr = v.shape[1]
    place = staging.slice(0, SIZE, dim=0)
    place.permute((1, 0)).store(v.to(result.y_ptr.dtype.element_ty))
    out = place.load(staged_layout(SIZE))
    out = gl.permute(gl.reshape(out, (SIZE, 4, 2, 4, 2)), (0, 3, 1, 2, 4))  # tokens w c t e to t w c e
    out = gl.convert_layout(gl.reshape(out, (SIZE, 64)), OUT, assert_trivial=True)
    at = gl.arange(0, 64, layout=gl.SliceLayout(0, OUT))
    column = tile * ROWS + at // 16 * 32 + HALF * 16 + at % 16
    m = first_token + gl.arange(0, SIZE, layout=gl.SliceLayout(1, OUT))
    mask = (column < result.N)[None, :] & ((m >= own_token) & (m < result.M))[:, None]
    gl.store(result.y_ptr + (m.to(gl.int64)[:, None] * result.y_stride + column[None, :]), out, mask=mask)


@gluon.jit
def store_turned_piece(v, result, staging, tile, first_token, own_token, HALF: gl.constexpr):
    """`store_turned` for the tokens of a piece."""
    if v.shape[1] <= 64:
        store_turned(v, result, staging, tile, first_token, own_token, HALF)
    else:
        SIZE: gl.constexpr = v.shape[1] // 2
        here, last = halves(v)
        store_turned_piece(here, result, staging, tile, first_token, own_token, HALF)
        store_turned_piece(last, result, staging, tile, first_token + SIZE, own_token, HALF)


@gluon.jit
def multiply_turned(ring, staging, w, cuts, result, tiles, HALF: gl.constexpr, C: gl.constexpr):
    """Consumer warpgroup for half of each tile's columns. What waits for what is as in `multiply_tiles`."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [WARPS, 1], [1, 0])
    TOKENS: gl.constexpr = C.TOKENS
    A: gl.constexpr = gl.DotOperandLayout(0, sums_layout(piece_tokens(TOKENS, 0)), 2)
    thread = gl.arange(0, 32 * WARPS, layout=gl.SliceLayout(1, LAYOUT))
    lane = thread % 32
    warp = thread // 32
    word = 128 * HALF + lane * 4 + 2 * ((warp // 2) ^ (lane % 4 // 2)) + warp % 2
    token_blocks = (result.M + TOKENS - 1) // TOKENS
    pairs = (w.columns + 1) // 2
    factor = gl.load(w.scale_ptr) * RESCALE
    begin, end, cut, parts = parts_of(cuts.split, pairs, tiles)
    stage = 0
    phase = 0
    for i in range(parts):
        tile, first_pair, last_pair = part_at(i, begin, end, cut, cuts.split, pairs)
        first_token, own_token = tokens_of(tile % token_blocks, result.M, TOKENS)
        tile_column = tile // token_blocks
        place = tile_column, word, lane
        first = 2 * first_pair
        last = 2 * last_pair
        end_tile = gl.minimum(w.blocks, 8 * last)
        raw = read_rows(w, place, 8 * first, end_tile, 0, C, LAYOUT)
        next_raw = read_rows(w, place, 8 * first, end_tile, 1, C, LAYOUT)
        if C.DEPENDENT:
            wait_for_launch_before()  # before the first result is written
        totals = zeros_of(TOKENS)
        a = turned_operands(raw, HALF, C, A)
        raw = read_rows(w, place, 8 * (first + 1), end_tile, 0, C, LAYOUT)
        if HALF == 1:
            mbarrier.wait(ring.go, 0, pred=i == 0)
        for column in range(first, last, 2):
            mbarrier.wait(ring.ready.index(stage), phase)
            totals = multiply(totals, a, ring.pieces, stage, 0, True)
            b = turned_operands(next_raw, HALF, C, A)
            totals = multiply(totals, b, ring.pieces, stage, 1, True)
            next_raw = read_rows(w, place, 8 * (column + 1), end_tile, 1, C, LAYOUT)
            totals = wait_for_products(totals, 4)
            a = turned_operands(raw, HALF, C, A)
            raw = read_rows(w, place, 8 * (column + 2), end_tile, 0, C, LAYOUT)
            done = stage
            stage, phase = next_stage(stage, phase, stages_of(TOKENS))
            mbarrier.wait(ring.ready.index(stage), phase)
            totals = multiply(totals, a, ring.pieces, stage, 0, True)
            totals = wait_for_products(totals, 4)
            mbarrier.arrive(ring.free.index(done), count=1)
            if HALF == 0:
                mbarrier.arrive(ring.go, count=1, pred=(i == 0) & (column == first))
            b = turned_operands(next_raw, HALF, C, A)
            totals = multiply(totals, b, ring.pieces, stage, 1, True)
            next_raw = read_rows(w, place, 8 * (column + 2), end_tile, 1, C, LAYOUT)
            totals = wait_for_products(totals, 4)
            a = turned_operands(raw, HALF, C, A)
            raw = read_rows(w, place, 8 * (column + 3), end_tile, 0, C, LAYOUT)
            totals = wait_for_products(totals, 0)
            mbarrier.arrive(ring.free.index(stage), count=1)
            stage, phase = next_stage(stage, phase, stages_of(TOKENS))
        if C.CUT_TILES and first_pair > 0:
            leave_partial_sums(totals, cuts, HALF, TOKENS)
        else:
            if C.CUT_TILES:
                until = (tile + 1) * pairs
                totals = add_partial_sums(totals, cuts, tile * pairs + last_pair, until, pairs, HALF, TOKENS)
            for p in gl.static_range(pieces_of(TOKENS)):
                token = first_token + piece_first(TOKENS, p)
                store_turned_piece(totals[p] * factor, result, staging, tile_column, token, own_token, HALF)


@gluon.jit(do_not_specialize=["M", "columns", "row_tiles", "split", "ticket"])
def turned_kernel(
    tile_ptr,
    scale_ptr,
    part_ptr,
    flag_ptr,
    y_ptr,
    x_desc,
    M,
    N,
    columns,
    row_tiles,
    split,
    ticket,
    TOKENS: gl.constexpr,
    CUT_TILES: gl.constexpr,
    CODES: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    """y [M, N] = x [M, K] @ w * scale in bf16, for a weight w [K, N] in `row_tiles` tiles of 16 rows.

    columns: groups of 128 columns of x. The rest, and the grid, is as for `persistent_kernel`.
    """
    ring, staging = shared_memory(x_desc, y_ptr.dtype.element_ty, TOKENS)
    tiles = (M + TOKENS - 1) // TOKENS * ((N + ROWS - 1) // ROWS)
    C: gl.constexpr = Constants(TOKENS, CUT_TILES, CODES, True, "none", False, DEPENDENT)
    w = Matrix(tile_ptr, tile_ptr, tile_ptr, scale_ptr, N, columns, row_tiles)
    cuts = Cuts(part_ptr, flag_ptr, split, ticket)
    result = Result(scale_ptr, y_ptr, M, N, N)
    gl.warp_specialize(
        [
            (multiply_turned, (ring, staging.index(0), w, cuts, result, tiles, 0, C)),
            (multiply_turned, (ring, staging.index(1), w, cuts, result, tiles, 1, C)),
            (copy_activations, (x_desc, ring, M, columns, split, tiles, TOKENS, DEPENDENT)),
        ],
        [WARPS, 1],
        [240, 24],
    )
