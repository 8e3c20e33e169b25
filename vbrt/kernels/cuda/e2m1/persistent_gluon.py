"""Persistent, warp-specialized kernel for Hopper and hundreds to thousands of tokens, without a decoded weight.

A program takes tiles of 128 rows by TOKENS tokens of the result until none are left. Two consumer warpgroups compute 64
rows each: a warp decodes one tile of `tiles` into the register operand of `wgmma`, while previous instructions run. A
producer warp fills a shared-memory ring with activations by TMA, which both warpgroups read. Accumulators stay in
registers, up to 128 per thread, and are stored through shared memory.

TOKENS is a multiple of 32 up to 256, so that tiles fit most numbers of tokens with little padding. Gluon tensors have
power-of-two sizes, so other numbers consist of *pieces*, 192 = 128 + 64: each has accumulators, a ring and instructions
of its own, with the same register operand.

Where whole tiles would leave multiprocessors idle in the last wave, the first tiles are cut along K into one equal
range per program (stream-K, Osama et al., arXiv:2301.03598). A program starts with the end of a tile, whose sums it
leaves in memory; the program with the tile's beginning processes that last, when the other sums exist. Sums are added
in a fixed order. Programs wait only for ones that the GPU starts before them. A flag holds the call's *ticket*, 64 bits
unique to the call, so flags need no launch that clears them; their reader does.

The tiles' column order suits the small-batch kernel, where a lane t of four reads 32 consecutive columns. Here the
instruction needs columns 8 m + 2 t and 8 m + 2 t + 1 from it, so the four lanes exchange: words first (the half of
eight columns that contains them), then decoded pairs. That costs a hundred instructions per tile. With ORDERED,
activations are in tile order, from a preceding launch, and nothing is exchanged: it saves the more, the larger
decoding's share of the time, so it is for tiles of few tokens. At 2048 tokens and 14336 columns that launch took a
tenth of the time.

Instruction order matters. A warpgroup keeps at least four wgmma in flight except once in two columns: with any in
flight at the loop's end, ptxas would run out of registers for their results and insert a wait after each.
"""

# ruff: noqa: RUF005  # the kernel language has no starred expressions

from collections import namedtuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from vbrt.kernels.cuda.e2m1.narrow_gluon import (
    DECODE_E4M3_HIGH,
    DECODE_E4M3_LOW,
    DECODE_E8M0,
    RESCALE,
    SCALE_REGISTERS,
    activate,
    advanced,
    allow_launch_after,
    decode_word,
    read_tiles,
    tile_pointers,
    wait_for_launch_before,
)
from vbrt.kernels.cuda.e2m1.wide_gluon import barrier, place_of_sums, register_operands
from vbrt.kernels.cuda.e2m1.wide_gluon import operands as operands_as_they_lie
from vbrt.kernels.cuda.launch_table import PERSISTENT_ROWS, PERSISTENT_WARPS
from vbrt.kernels.cuda.table.operands_gluon import (
    level_words,
    scale_pairs,
    table_column,
    table_operands,
    table_pointers,
)
from vbrt.libraries.triton_api import renamed

__all__ = ["COLUMNS", "box_of", "persistent_kernel"]

ROWS = gl.constexpr(PERSISTENT_ROWS)
#: columns of activations per copy: a 128-byte row in shared memory
COLUMNS = gl.constexpr(64)
#: bytes of shared memory for activations, and the maximum useful number of stages
RING_BYTES, MOST_STAGES = gl.constexpr(204_800), gl.constexpr(8)
#: per warpgroup; a program has three, the third one for the producer warp
WARPS = gl.constexpr(PERSISTENT_WARPS)

#: shared memory: activations of each piece, barriers of their stages, and one that delays a warpgroup
Ring = namedtuple("Ring", "pieces ready free go")
#: arguments of `persistent_kernel`, by use
Matrix = namedtuple("Matrix", "tile_ptr block_ptr level_ptr scale_ptr N columns blocks")
Cuts = namedtuple("Cuts", "part_ptr flag_ptr split ticket")
Result = namedtuple("Result", "bias_ptr y_ptr M N y_stride")
#: its constants
Constants = namedtuple("Constants", "TOKENS CUT_TILES CODES ORDERED ACTIVATION HAS_BIAS DEPENDENT")


@gluon.constexpr_function
def box_of(TOKENS):
    """Tokens of activations per copy."""
    return 32 if TOKENS % 64 else 64


@gluon.constexpr_function
def pieces_of(TOKENS):
    """Number of pieces of a tile."""
    return TOKENS.bit_count()


@gluon.constexpr_function
def piece_tokens(TOKENS, piece):
    """Tokens of a piece: the largest comes first."""
    sizes = [size for size in (256, 128, 64, 32) if TOKENS & size]
    return sizes[piece]


@gluon.constexpr_function
def piece_first(TOKENS, piece):
    """The first token of a piece."""
    sizes = [size for size in (256, 128, 64, 32) if TOKENS & size]
    return sum(sizes[:piece])


@gluon.constexpr_function
def stages_of(TOKENS):
    """Stages of the activation ring, each of TOKENS * 128 bf16."""
    return min(MOST_STAGES.value, RING_BYTES.value // (256 * TOKENS))


@gluon.constexpr_function
def sums_layout(TOKENS):
    return gl.NVMMADistributedLayout([3, 0], [WARPS.value, 1], [16, TOKENS, 16])


@gluon.constexpr_function
def first_column(instruction, PART, ORDERED):
    """First of the 16 columns that an instruction multiplies, among the 128 columns of a stage."""
    return 64 * PART + 16 * instruction if ORDERED else 32 * instruction + 16 * PART


tma_load = renamed(tma, "async_load", "async_copy_global_to_shared")


def _exchange_assembly() -> str:
    """Convert words $16..$19 of lane $36 to four A operands in $0..$15, columns in natural order.

    Word 2 p + j holds pairs c = 0, 1 of columns 32 t + 8 (p ^ (t // 2)) + 4 j + 2 c, for rows g and g + 8. Lane t gets
    pair j = t // 2, c = t % 2 of all four lanes' words: from lane t ^ 2 first, then from t ^ 1. The scales of rows g
    and g + 8 are $20 and $24 for words of lanes 0 and 1, $28 and $32 for those of 2 and 3. Operand s has lane s's
    columns.
    """
    lines = [
        "{ .reg .b32 t, z, s, r, q0, q1, q2, q3, w00, w01, w10, w11; .reg .pred high, odd; mov.b32 z, 0x80008000;",
        "and.b32 t, $36, 2; setp.ne.u32 high, t, 0; and.b32 t, $36, 1; setp.ne.u32 odd, t, 0;",
    ]
    for p in range(2):
        first, second = f"${16 + 2 * p}", f"${17 + 2 * p}"
        lines += [
            f"selp.b32 s, {first}, {second}, high; shfl.sync.bfly.b32 r, s, 2, 31, -1;",
            f"selp.b32 w0{p}, r, {first}, high; selp.b32 w1{p}, {second}, r, high;",
        ]
    for upper in range(2):
        for p in range(2):
            lines += decode_word(f"w{upper}{p}", ["q0", "q1", "q2", "q3"], (f"${20 + 8 * upper}", f"${24 + 8 * upper}"))
            for row in range(2):
                place = 2 * (p ^ upper) + row  # p ^ (t // 2), see tiles
                from_even, from_odd = f"${8 * upper + place}", f"${8 * upper + 4 + place}"
                lines += [
                    f"selp.b32 s, q{row}, q{2 + row}, odd; shfl.sync.bfly.b32 r, s, 1, 31, -1;",
                    f"selp.b32 {from_even}, r, q{row}, odd; selp.b32 {from_odd}, q{2 + row}, r, odd;",
                ]
    return " ".join([*lines, "}"])


EXCHANGE = gl.constexpr(_exchange_assembly())
EXCHANGE_REGISTERS = gl.constexpr(",".join(["=&r"] * 16) + ",r" * 24)
#: $2 of this lane and of lane t ^ 2, the one of the lower t first
BOTH = gl.constexpr(
    "{ .reg .b32 r, t; .reg .pred high; and.b32 t, $3, 2; setp.ne.u32 high, t, 0; "
    "shfl.sync.bfly.b32 r, $2, 2, 31, -1; selp.b32 $0, r, $2, high; selp.b32 $1, $2, r, high; }"
)


@gluon.jit
def scales_of_both(scale, lane):
    return gl.inline_asm_elementwise(
        BOTH, "=&r,=&r,r,r", [scale, lane], dtype=(gl.int32, gl.int32), is_pure=False, pack=1
    )


@gluon.jit
def operands(words, lower, upper, lane, PART: gl.constexpr, E8M0_SCALES: gl.constexpr, A: gl.constexpr):
    """Four [64, 16] weights times 2^-14 / tensor scale: of each 32 columns the first 16 or, with PART 1, the others."""
    SCALES: gl.constexpr = DECODE_E8M0 if E8M0_SCALES else (DECODE_E4M3_LOW if PART == 0 else DECODE_E4M3_HIGH)
    lower_g, lower_h = gl.inline_asm_elementwise(
        SCALES, SCALE_REGISTERS, [lower], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
    )
    upper_g, upper_h = gl.inline_asm_elementwise(
        SCALES, SCALE_REGISTERS, [upper], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
    )
    o = gl.inline_asm_elementwise(
        EXCHANGE,
        EXCHANGE_REGISTERS,
        [words, lower_g[:, None], lower_h[:, None], upper_g[:, None], upper_h[:, None], lane[:, None]],
        dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16),
        is_pure=False,
        pack=4,
    )
    return register_operands(o, WARPS, A)


@gluon.constexpr_function
def is_table(CODES):
    """True for table codes: an index into 16 levels, or into eight magnitudes with a sign in bit 3."""
    return CODES in ("table", "magnitudes")


@gluon.jit
def weight_pointers(w, row_tile, column, lane, LAYOUT: gl.constexpr, C: gl.constexpr):
    """Pointers to a warp's tile of 16 rows and 128 columns."""
    if is_table(C.CODES):
        return table_pointers(w.tile_ptr, w.block_ptr, row_tile, w.N, column, w.blocks, lane, LAYOUT)
    else:
        row_tiles = (w.N + 15) // 16
        return tile_pointers(w.tile_ptr, row_tile, row_tiles, column, w.columns, lane, 1, C.CODES == "e8m0")


@gluon.jit
def read_column(pointers, wanted, column, blocks, lane, LAYOUT: gl.constexpr, C: gl.constexpr):
    """(words of a warp's tile, more of them, scales) as stored, and pointers to the next tile."""
    if is_table(C.CODES):
        return table_column(pointers, wanted, column, blocks, lane, LAYOUT)
    else:
        STEP: gl.constexpr = 272 if C.CODES == "e8m0" else 288
        SCALE_STEP: gl.constexpr = 2 * STEP if C.CODES == "e8m0" else STEP  # scales of mxfp4 are read as 16 bits
        return read_tiles(pointers, wanted, 1, 0), advanced(pointers, STEP, SCALE_STEP, 2)


@gluon.jit
def scales_of(raw, lane, C: gl.constexpr):
    """Scales of a column in the form of `operands_of`."""
    if is_table(C.CODES):
        return (scale_pairs(raw[2]),)
    elif C.ORDERED:
        return (raw[2],)
    else:
        return scales_of_both(raw[2], lane)


@gluon.jit
def operands_of(raw, scales, levels, lane, PART: gl.constexpr, C: gl.constexpr, A: gl.constexpr):
    """Four [64, 16] weights: of each 32 columns the first 16 or, with PART 1, the others."""
    if is_table(C.CODES):
        return table_operands(raw, scales[0], levels, lane, PART, WARPS, A)
    elif C.ORDERED:
        return operands_as_they_lie(raw[PART], scales[0], PART, C.CODES == "e8m0", WARPS, A)
    else:
        return operands(raw[PART], scales[0], scales[1], lane, PART, C.CODES == "e8m0", A)


@gluon.jit
def zeros_of(TOKENS: gl.constexpr):
    """Zero accumulators, [64 rows, tokens] for each piece."""
    out = ()
    for p in gl.static_range(pieces_of(TOKENS)):
        out = out + (
            gl.zeros((ROWS // 2, piece_tokens(TOKENS, p)), gl.float32, layout=sums_layout(piece_tokens(TOKENS, p))),
        )
    return out


@gluon.jit
def multiply(totals, a, rings, stage, PART: gl.constexpr, ORDERED: gl.constexpr):
    """Issue four instructions per piece on `operands_of` and a stage of the rings."""
    for s in gl.static_range(4):
        out = ()
        for p in gl.static_range(len(rings)):
            half = rings[p].index(2 * stage + first_column(s, PART, ORDERED) // 64)
            b = half.slice(first_column(s, PART, ORDERED) % 64, 16, dim=1).permute((1, 0))
            out = out + (hopper.warpgroup_mma(a[s], b, totals[p], is_async=True),)
        totals = out
    return totals


@gluon.jit
def wait_for_products(totals, LEFT: gl.constexpr):
    """Return the sums after all but the last LEFT instructions of each piece; the hardware counts to seven."""
    COUNT: gl.constexpr = len(totals)
    if COUNT == 1:
        x = hopper.warpgroup_mma_wait(LEFT, deps=totals)
        return (x,)
    elif COUNT == 2:
        x, y = hopper.warpgroup_mma_wait(min(7, 2 * LEFT), deps=totals)
        return (x, y)
    else:
        x, y, z = hopper.warpgroup_mma_wait(min(7, 3 * LEFT), deps=totals)
        return (x, y, z)


@gluon.jit
def next_stage(stage, phase, STAGES: gl.constexpr):
    """The next stage of the ring, and the parity of its barriers' phase."""
    last = stage == STAGES - 1
    return gl.where(last, 0, stage + 1), gl.where(last, phase ^ 1, phase)


@gluon.jit
def halves(v):
    """Split [rows, tokens] into first and last tokens, in place in registers."""
    return gl.permute(gl.reshape(v, (v.shape[0], 2, v.shape[1] // 2)), (0, 2, 1)).split()


@gluon.jit
def store_tokens(v, result, staging, first_row, first_token, own_token, C: gl.constexpr):
    """y = activation(v [64 rows, up to 64 tokens]), through shared memory: coalesces a token's rows."""
    OUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    SIZE: gl.constexpr = v.shape[1]
    DTYPE: gl.constexpr = result.y_ptr.dtype.element_ty
    place = staging.slice(0, SIZE, dim=0)
    place.permute((1, 0)).store(activate(v, C.ACTIVATION, DTYPE).to(DTYPE))
    out = place.load(OUT)
    row = first_row + gl.arange(0, 64, layout=gl.SliceLayout(0, OUT))
    m = first_token + gl.arange(0, SIZE, layout=gl.SliceLayout(1, OUT))
    at = m.to(gl.int64)[:, None] * result.y_stride + row[None, :]
    mask = (row < result.N)[None, :] & ((m >= own_token) & (m < result.M))[:, None]
    gl.store(result.y_ptr + at, out, mask=mask)


@gluon.jit
def store_half(v, result, staging, first_row, first_token, own_token, C: gl.constexpr):
    """y = activation(v [64 rows, 128 tokens])."""
    quarters = halves(v)
    for i in gl.static_range(2):
        store_tokens(quarters[i], result, staging, first_row, first_token + i * 64, own_token, C)


@gluon.jit
def store_piece(v, result, staging, first_row, first_token, own_token, C: gl.constexpr):
    """y = activation(v [64 rows, tokens of a piece] + bias)."""
    SIZE: gl.constexpr = v.shape[1]
    if C.HAS_BIAS:
        row = first_row + gl.arange(0, ROWS // 2, layout=gl.SliceLayout(1, sums_layout(SIZE)))
        v = v + gl.load(result.bias_ptr + row, mask=row < result.N, other=0.0).to(gl.float32)[:, None]
    if SIZE <= 64:
        store_tokens(v, result, staging, first_row, first_token, own_token, C)
    elif SIZE == 128:
        store_half(v, result, staging, first_row, first_token, own_token, C)
    elif C.ACTIVATION == "none" or C.ACTIVATION == "relu":
        here, last = halves(v)
        store_half(here, result, staging, first_row, first_token, own_token, C)
        store_half(last, result, staging, first_row, first_token + 128, own_token, C)
    else:  # more instructions: fetching them takes longer than running the others twice
        here, last = halves(v)
        for i in range(gl.minimum((result.M - first_token + 127) // 128, 2)):
            store_half(here, result, staging, first_row, first_token + i * 128, own_token, C)
            here = last


@gluon.jit
def share_of(program, programs, split, pairs):
    """[begin, end) of the column pairs of cut tiles for a program; the last program has the first range."""
    at = programs - 1 - program
    return at * (split * pairs) // programs, (at + 1) * (split * pairs) // programs


@gluon.jit
def parts_of(split, pairs, tiles):
    """(begin of this program's range, its end, parts of cut tiles in it, parts plus whole tiles)."""
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    begin, end = share_of(program, programs, split, pairs)
    cut = gl.where(end > begin, (end - 1) // pairs - begin // pairs + 1, 0)
    return begin, end, cut, cut + gl.maximum(tiles - split - program + programs - 1, 0) // programs


@gluon.jit
def part_at(i, begin, end, cut, split, pairs):
    """(tile, first column pair, end pair) of a program's part i."""
    tile = gl.where(i < cut, begin // pairs + i, split + gl.program_id(0) + (i - cut) * gl.num_programs(0))
    first = gl.where(i < cut, gl.maximum(begin - tile * pairs, 0), 0)
    return tile, first, gl.where(i < cut, gl.minimum(end - tile * pairs, pairs), pairs)


@gluon.jit
def leave_partial_sums(totals, cuts, HALF: gl.constexpr, TOKENS: gl.constexpr):
    """Store a program's partial sums for the one that has the tile's beginning."""
    place = 2 * gl.program_id(0) + HALF
    own = cuts.part_ptr + place.to(gl.int64) * (ROWS // 2 * TOKENS)
    for p in gl.static_range(pieces_of(TOKENS)):
        gl.store(
            place_of_sums(own + ROWS // 2 * piece_first(TOKENS, p), place * 0, sums_layout(piece_tokens(TOKENS, p))),
            totals[p],
        )
    barrier()
    gl.atomic_xchg(cuts.flag_ptr + place, cuts.ticket, sem="release", scope="gpu")


@gluon.jit
def add_partial_sums(totals, cuts, behind, until, pairs, HALF: gl.constexpr, TOKENS: gl.constexpr):
    """Add other programs' sums of column pairs `behind` to `until` to totals, once they exist."""
    programs = gl.num_programs(0)
    program = gl.program_id(0) - 1
    while behind < until:
        place = 2 * program + HALF
        while gl.atomic_add(cuts.flag_ptr + place, cuts.ticket * 0, sem="acquire", scope="gpu") != cuts.ticket:
            pass
        barrier()
        theirs = cuts.part_ptr + place.to(gl.int64) * (ROWS // 2 * TOKENS)
        out = ()
        for p in gl.static_range(pieces_of(TOKENS)):
            pointers = place_of_sums(
                theirs + ROWS // 2 * piece_first(TOKENS, p), place * 0, sums_layout(piece_tokens(TOKENS, p))
            )
            out = out + (totals[p] + gl.load(pointers, cache_modifier=".cg"),)
        totals = out
        gl.store(cuts.flag_ptr + place, cuts.ticket * 0)  # for the next replay of a graph, with the same ticket
        _, behind = share_of(program, programs, cuts.split, pairs)
        program = program - 1
    return totals


@gluon.jit
def tokens_of(block, M, TOKENS: gl.constexpr):
    """(first token of a block, first one that is stored). The last block reaches back, if there are tokens before it:
    TMA is slower for out-of-bounds rows than for existing ones."""
    return gl.minimum(block * TOKENS, gl.maximum(M - TOKENS, 0)), block * TOKENS


@gluon.jit
def copy_activations(x_desc, ring, M, columns, split, tiles, TOKENS: gl.constexpr, DEPENDENT: gl.constexpr):
    """Producer warp that keeps the ring full, for an even number of columns; columns outside x are zeros.

    Boxes without tokens are skipped.
    """
    BOX: gl.constexpr = box_of(TOKENS)
    if DEPENDENT:
        wait_for_launch_before()
        allow_launch_after()
    token_blocks = (M + TOKENS - 1) // TOKENS
    pairs = (columns + 1) // 2
    begin, end, cut, parts = parts_of(split, pairs, tiles)
    stage = 0
    phase = 0
    for i in range(parts):
        tile, first_pair, last_pair = part_at(i, begin, end, cut, split, pairs)
        token, _ = tokens_of(tile % token_blocks, M, TOKENS)
        boxes = gl.minimum((M - token + BOX - 1) // BOX, TOKENS // BOX)
        for column in range(2 * first_pair, 2 * last_pair):
            mbarrier.wait(ring.free.index(stage), phase ^ 1)
            bar = ring.ready.index(stage)
            for count in gl.static_range(1, TOKENS // BOX + 1):
                mbarrier.expect(bar, count * (2 * BOX * COLUMNS * 2), pred=boxes == count)
            for half in gl.static_range(2):
                for p in gl.static_range(pieces_of(TOKENS)):
                    place = ring.pieces[p].index(2 * stage + half)
                    for box in gl.static_range(piece_tokens(TOKENS, p) // BOX):
                        first = piece_first(TOKENS, p) + box * BOX
                        at = [token + first, (2 * column + half) * COLUMNS]
                        tma_load(x_desc, at, bar, place.slice(box * BOX, BOX, dim=0), pred=first // BOX < boxes)
            stage, phase = next_stage(stage, phase, stages_of(TOKENS))


@gluon.jit
def multiply_tiles(ring, staging, w, cuts, result, tiles, HALF: gl.constexpr, C: gl.constexpr):
    """Consumer warpgroup, for the lower or the upper HALF of each tile's rows.

    The second one starts a column after the first, so that one stores its results while the other multiplies.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [WARPS, 1], [1, 0])
    TOKENS: gl.constexpr = C.TOKENS
    A: gl.constexpr = gl.DotOperandLayout(0, sums_layout(piece_tokens(TOKENS, 0)), 2)
    thread = gl.arange(0, 32 * WARPS, layout=gl.SliceLayout(1, LAYOUT))
    lane = thread % 32
    always = thread >= 0
    token_blocks = (result.M + TOKENS - 1) // TOKENS
    pairs = (w.columns + 1) // 2
    factor = gl.load(w.scale_ptr) * (1.0 if is_table(C.CODES) else RESCALE)
    levels = level_words(w.level_ptr, C.CODES == "magnitudes", LAYOUT) if is_table(C.CODES) else ()
    begin, end, cut, parts = parts_of(cuts.split, pairs, tiles)
    stage = 0
    phase = 0
    for i in range(parts):
        tile, first_pair, last_pair = part_at(i, begin, end, cut, cuts.split, pairs)
        # neighbouring programs share weights in L2
        first_token, own_token = tokens_of(tile % token_blocks, result.M, TOKENS)
        first_row = tile // token_blocks * ROWS + HALF * (ROWS // 2)
        last = gl.minimum(2 * last_pair, w.columns)
        weights = weight_pointers(w, first_row // 16 + thread // 32, 2 * first_pair, lane, LAYOUT, C)
        raw, weights = read_column(weights, always, 2 * first_pair, w.blocks, lane, LAYOUT, C)
        wanted = always & (2 * first_pair + 1 < last)
        next_raw, weights = read_column(weights, wanted, 2 * first_pair + 1, w.blocks, lane, LAYOUT, C)
        if C.DEPENDENT:
            wait_for_launch_before()  # before the first result is written
        totals = zeros_of(TOKENS)
        scales = scales_of(raw, lane, C)
        a = operands_of(raw, scales, levels, lane, 0, C, A)
        if HALF == 1:
            mbarrier.wait(ring.go, 0, pred=i == 0)
        for column in range(2 * first_pair, 2 * last_pair, 2):
            mbarrier.wait(ring.ready.index(stage), phase)
            totals = multiply(totals, a, ring.pieces, stage, 0, C.ORDERED)
            b = operands_of(raw, scales, levels, lane, 1, C, A)
            totals = multiply(totals, b, ring.pieces, stage, 1, C.ORDERED)
            wanted = always & (column + 2 < last)
            raw, weights = read_column(weights, wanted, column + 2, w.blocks, lane, LAYOUT, C)
            totals = wait_for_products(totals, 4)
            scales = scales_of(next_raw, lane, C)
            a = operands_of(next_raw, scales, levels, lane, 0, C, A)
            done = stage
            stage, phase = next_stage(stage, phase, stages_of(TOKENS))
            mbarrier.wait(ring.ready.index(stage), phase)
            totals = multiply(totals, a, ring.pieces, stage, 0, C.ORDERED)
            totals = wait_for_products(totals, 4)
            mbarrier.arrive(ring.free.index(done), count=1)
            if HALF == 0:
                mbarrier.arrive(ring.go, count=1, pred=(i == 0) & (column == 2 * first_pair))
            b = operands_of(next_raw, scales, levels, lane, 1, C, A)
            totals = multiply(totals, b, ring.pieces, stage, 1, C.ORDERED)
            wanted = always & (column + 3 < last)
            next_raw, weights = read_column(weights, wanted, column + 3, w.blocks, lane, LAYOUT, C)
            totals = wait_for_products(totals, 4)
            scales = scales_of(raw, lane, C)
            a = operands_of(raw, scales, levels, lane, 0, C, A)
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
                v = totals[p] * factor
                store_piece(v, result, staging, first_row, first_token + piece_first(TOKENS, p), own_token, C)


@gluon.jit
def shared_memory(x_desc, DTYPE: gl.constexpr, TOKENS: gl.constexpr):
    """(The ring, with its barriers ready for use; [2, 64, 64] values of DTYPE, in which warpgroups stage results)."""
    STAGES: gl.constexpr = stages_of(TOKENS)
    pieces = ()
    for p in gl.static_range(pieces_of(TOKENS)):
        pieces = pieces + (
            gl.allocate_shared_memory(gl.bfloat16, [2 * STAGES, piece_tokens(TOKENS, p), COLUMNS], x_desc.layout),
        )
    staging = gl.allocate_shared_memory(DTYPE, [2, 64, ROWS // 2], x_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    go = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(free.index(i), count=2)
    mbarrier.init(go, count=1)
    hopper.fence_async_shared()
    return Ring(pieces, ready, free, go), staging


@gluon.jit(do_not_specialize=["M", "columns", "blocks", "split", "ticket"])
def persistent_kernel(
    tile_ptr,
    block_ptr,
    level_ptr,
    scale_ptr,
    bias_ptr,
    part_ptr,
    flag_ptr,
    y_ptr,
    x_desc,
    M,
    N,
    columns,
    blocks,
    y_stride,
    split,
    ticket,
    TOKENS: gl.constexpr,
    CUT_TILES: gl.constexpr,
    CODES: gl.constexpr,
    ORDERED: gl.constexpr,
    ACTIVATION: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    """y [M, N] = activation(x [M, K] @ w.T * scale + bias) in bf16, by programs of WARPS warps.

    x_desc: x in boxes [box_of(TOKENS), COLUMNS], rows 16-byte aligned, 128-byte swizzle. ORDERED: its columns are in
    tile order, see `order_kernel`. CUT_TILES: the first `split` tiles are cut, with sums in part [programs, 2, 64 *
    TOKENS] fp32 and flags [programs, 2] int64, which may be anything but the ticket. At most as many programs as the
    GPU has multiprocessors, and as there are tiles or, of cut ones, column pairs.
    """
    ring, staging = shared_memory(x_desc, y_ptr.dtype.element_ty, TOKENS)
    tiles = (M + TOKENS - 1) // TOKENS * ((N + ROWS - 1) // ROWS)
    C: gl.constexpr = Constants(TOKENS, CUT_TILES, CODES, ORDERED, ACTIVATION, HAS_BIAS, DEPENDENT)
    w = Matrix(tile_ptr, block_ptr, level_ptr, scale_ptr, N, columns, blocks)
    cuts = Cuts(part_ptr, flag_ptr, split, ticket)
    result = Result(bias_ptr, y_ptr, M, N, y_stride)
    gl.warp_specialize(
        [
            (multiply_tiles, (ring, staging.index(0), w, cuts, result, tiles, 0, C)),
            (multiply_tiles, (ring, staging.index(1), w, cuts, result, tiles, 1, C)),
            (copy_activations, (x_desc, ring, M, columns, split, tiles, TOKENS, DEPENDENT)),
        ],
        [WARPS, 1],
        [240, 24],
    )
