"""Small-batch kernel for weights in tile order, and their decoder. Importing this needs Triton.

A warp takes several row tiles and walks along K. In each step it loads its tiles (16 bytes per lane and load), converts
each word into the A operand of one `mma.sync.m16n8k16` by bit arithmetic and two products with the block scale, all
exact in bf16, and multiplies by activations loaded straight from global memory in B operand order. Weights never pass
through shared memory. The warps of a program split K; their sums are reduced in shared memory once, in a fixed order,
so results are deterministic.

On sm_90 and newer the kernels use programmatic dependent launch: they start while the stream's previous kernel ends,
prefetch their first weights meanwhile, and wait for its end before they read activations or write. Each triggers the
next one only after its own wait, so weights may come from any launch but the very last one; `Packing.pack` ensures
that.

Constants of the kernels for weights in tile order, here and in files that import this one:

    ROW_TILES        row tiles of 16 outputs per program
    TOKEN_GROUPS     groups of 8 tokens per program; they cover M
    K_WARPS          warps per program, which split K; its num_warps
    PREFETCH         load the next tiles before using the current ones
    CARRY_POINTERS   increment pointers from column to column, a quarter fewer instructions than recomputing; requires
                     PREFETCH, columns in whole rounds of K_WARPS, one matrix and aligned rows of x
    E8M0_SCALES      block scales are powers of two (mxfp4); otherwise E4M3 (nvfp4)
    ALL_TOKENS       M = 8 * TOKEN_GROUPS, so no token is masked; gains nothing with one group
    K_TAIL           K is not a multiple of 128, so the last column is masked
    ACTIVATION       "none", "relu", "gelu", "gelu_tanh" or "silu"
    HAS_BIAS         bias_ptr is a bias; otherwise any tensor
    WORD_LOADS       rows of x are aligned to 4 bytes only, with K even: a load per word. Otherwise to 16 bytes
    DEPENDENT        programmatic dependent launch, see above

Gluon instead of plain Triton, because correctness depends on the layout: an inline assembly block with pack=4 must get
the four words of one lane, and plain Triton may give it four lanes' words.

Device functions take arguments in named tuples, here and in other files. A tuple of constants must be assigned as a
`gl.constexpr`, or its items become tensors. Triton 3.6 drops the names of tuples within the right operand of a `+`. The
order of fields is not in the key of Triton's cache: clear the cache after changing it.
"""

# ruff: noqa: RUF005  # the kernel language has no starred expressions

from collections import namedtuple

from triton import language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from vbrt.libraries.triton_api import renamed

__all__ = ["decode_kernel", "decode_program", "linear_kernel", "linear_program", "pad_kernel", "sums_of_products"]

copy_async = renamed(async_copy, "async_load", "async_copy_global_to_shared")

#: what device functions share
Sizes = namedtuple("Sizes", "M N K columns x_stride")
Constants = namedtuple(
    "Constants",
    "ROW_TILES TOKEN_GROUPS K_WARPS PREFETCH E8M0_SCALES K_TAIL DEPENDENT CARRY_POINTERS WORD_LOADS ALL_TOKENS",
)

NAN_STAYS = gl.constexpr(tl.PropagateNan.ALL)
_OUT_16 = ",".join(["=&r"] * 16)


def decode_word(word: str, pairs: list[str], scales: tuple[str, str]) -> list[str]:
    """Instructions that convert one word of codes to four bf16 pairs, times the scales of rows g and g + 8.

    Require registers t, and z = 0x80008000.
    """
    lines = [
        f"shl.b32 t, {word}, 2; and.b32 {pairs[0]}, t, 0x81C081C0;",
        f"shl.b32 t, {word}, 6; and.b32 {pairs[1]}, t, 0x81C081C0;",
        f"shf.l.wrap.b32 t, {word}, {word}, 12; and.b32 {pairs[2]}, t, 0x81C081C0;",
        f"shr.u32 t, {word}, 8; lop3.b32 {pairs[3]}, {word}, t, 0x81C081C0, 0x28;",
    ]
    # x * s + (-0.0) is x * s; `mul.bf16x2` would need sm_90
    return lines + [f"fma.rn.bf16x2 {p}, {p}, {scales[k & 1]}, z;" for k, p in enumerate(pairs)]


def _decode_assembly(order: tuple[tuple[int, int], ...]) -> str:
    """Convert words $16..$19 to bf16 pairs times scales $20 (row g) and $24 (row g + 8); output k is pair order[k][0]
    of word order[k][1]."""
    place = {pair_word: f"${k}" for k, pair_word in enumerate(order)}
    lines = ["{ .reg .b32 t, z; mov.b32 z, 0x80008000;"]
    for word in range(4):
        lines += decode_word(f"${16 + word}", [place[pair, word] for pair in range(4)], ("$20", "$24"))
    return " ".join([*lines, "}"])


def _multiply_assembly() -> str:
    """Accumulators $0..$3 = A ($4 + 4 * operand + word) times B ($20..$27) plus $28..$31, four instructions."""
    lines, source = ["{"], "$28, $29, $30, $31"
    for word in range(4):
        b = 20 + 2 * word
        a = ", ".join(f"${4 + 4 * operand + word}" for operand in range(4))
        lines.append(
            f"mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {{$0, $1, $2, $3}}, {{{a}}}, "
            f"{{${b}, ${b + 1}}}, {{{source}}};"
        )
        source = "$0, $1, $2, $3"
    return " ".join([*lines, "}"])


def _e4m3_assembly(block: int, factors: tuple[int, ...]) -> str:
    """Extract one block's scales from the bytes of $2 (row g: blocks 0, 1; row g + 8: blocks 0, 1) as bf16, each twice.

    An E4M3 byte shifted to bits 10..4 is a bf16 of its value * 2^-120, subnormals included.
    """
    lines = [
        "{ .reg .b32 v, z, c; mov.b32 z, 0x80008000;",
        f"{('shl.b32', 'shr.u32')[block]} v, $2, 4; and.b32 v, v, 0x0FF00FF0;",
    ]
    lines += [f"mov.b32 c, {f:#x}; fma.rn.bf16x2 v, v, c, z;" for f in factors]
    return " ".join([*lines, "prmt.b32 $0, v, v, 0x1010; prmt.b32 $1, v, v, 0x3232; }"])


_TWO_120, _TWO_112 = 0x7B807B80, 0x77807780  # powers of two as pairs of bf16
_OPERANDS = tuple((pair, word) for pair in range(4) for word in range(4))
# output tensors (p, h): two words times pairs (c01, c23) of row half h are eight consecutive columns
_COLUMNS = tuple((2 * c + h, 2 * p + jj) for p in range(2) for h in range(2) for jj in range(2) for c in range(2))

DECODE = gl.constexpr(_decode_assembly(_OPERANDS))
DECODE_COLUMNS = gl.constexpr(_decode_assembly(_COLUMNS))
DECODE_REGISTERS = gl.constexpr(_OUT_16 + ",r" * 12)
MULTIPLY = gl.constexpr(_multiply_assembly())
MULTIPLY_REGISTERS = gl.constexpr("=&f,=&f,=&f,=&f" + ",r" * 24 + ",f" * 4)
#: block scale * 2^112, for either block of a lane
DECODE_E4M3_LOW = gl.constexpr(_e4m3_assembly(0, (_TWO_120, _TWO_112)))
DECODE_E4M3_HIGH = gl.constexpr(_e4m3_assembly(1, (_TWO_120, _TWO_112)))
#: block scale
DECODE_E4M3_LOW_PLAIN = gl.constexpr(_e4m3_assembly(0, (_TWO_120,)))
DECODE_E4M3_HIGH_PLAIN = gl.constexpr(_e4m3_assembly(1, (_TWO_120,)))
#: the byte is an exponent, see tiles
DECODE_E8M0 = gl.constexpr(
    "{ .reg .b32 v; prmt.b32 v, $2, 0, 0x4140; shl.b32 v, v, 7; prmt.b32 $0, v, v, 0x1010; prmt.b32 $1, v, v, 0x3232; }"
)
SCALE_REGISTERS = gl.constexpr("=&r,=&r,r")
#: code level * 2^-126 times block scale * 2^112
RESCALE = gl.constexpr(2.0**14)


@gluon.jit
def wait_for_launch_before():
    """Wait for the previous kernel to end (griddepcontrol.wait); before, do not read what it writes."""
    gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def allow_launch_after():
    """Let the next kernel start (griddepcontrol.launch_dependents); it waits itself before reading results."""
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.constexpr_function
def out_layout(K_WARPS):
    """[COUNT, 32, 4] sums, one per thread."""
    return gl.BlockedLayout([1, 1, 1], [1, 8, 4], [max(1, K_WARPS // 4), min(4, K_WARPS), 1], [2, 1, 0])


@gluon.constexpr_function
def store_layout(ROW_TILES, TOKEN_GROUPS, warps):
    """Accumulators [row tiles * token groups, 32, 4] with 16 or 32 consecutive rows of the result in a warp's lanes."""
    bits = lambda v: v.bit_length() - 1  # noqa: E731  # must stay an expression inside a constexpr function
    bases = [[0, 4, 0], [0, 8, 0], [0, 16, 0], [0, 0, 2]]
    bases = bases + [[1 << i, 0, 0] for i in range(bits(ROW_TILES))]
    bases = bases + [[0, 1, 0], [0, 2, 0], [0, 0, 1]] + [[ROW_TILES << i, 0, 0] for i in range(bits(TOKEN_GROUPS))]
    warp = bases[5 : 5 + bits(warps)]
    warp = warp + [[0, 0, 0]] * (bits(warps) - len(warp))
    return gl.DistributedLinearLayout(
        reg_bases=bases[5 + bits(warps) :],
        lane_bases=bases[:5],
        warp_bases=warp,
        block_bases=[],
        shape=[ROW_TILES * TOKEN_GROUPS, 32, 4],
    )


@gluon.jit
def sum_over_warps(entries, FIRST: gl.constexpr, COUNT: gl.constexpr, K_WARPS: gl.constexpr):
    """Reduce entries FIRST .. FIRST + COUNT [threads, 4] over the warps, in order, to [COUNT, 32, 4]."""
    IN: gl.constexpr = gl.BlockedLayout([1, 1, 4], [1, 32, 1], [1, K_WARPS, 1], [2, 1, 0])
    OUT: gl.constexpr = out_layout(K_WARPS)
    SHARED: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    shared = gl.allocate_shared_memory(gl.float32, [COUNT, 32 * K_WARPS, 4], SHARED)
    for i in gl.static_range(COUNT):
        entry = gl.convert_layout(entries[FIRST + i], gl.SliceLayout(0, IN))
        shared.slice(i, 1, dim=0).store(gl.expand_dims(entry, 0))
    v = shared.slice(0, 32, dim=1).load(OUT)
    for w in gl.static_range(1, K_WARPS):
        v = v + shared.slice(w * 32, 32, dim=1).load(OUT)
    return v


@gluon.jit
def tanh_of(x):
    """tanh within 2^-11."""
    return gl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def activate(v, ACTIVATION: gl.constexpr, DTYPE: gl.constexpr):
    """Activation for a result of DTYPE: within |v| * 2.5e-4 + 3e-4 for bf16, single precision for others.
    GELU and SiLU are v times a factor in 0..1. That takes two special functions, which have the lowest throughput of a
    multiprocessor, or one as (1 + tanh) / 2.
    """
    if ACTIVATION == "relu":
        v = gl.maximum(v, 0.0, propagate_nan=NAN_STAYS)
    elif ACTIVATION != "none":
        if DTYPE == gl.bfloat16:
            half = 0.5 * v
            v = half + half * tanh_of(tanh_argument(v, ACTIVATION))
        else:
            v = activate_in_fp32(v, ACTIVATION)
    return v


@gluon.jit
def tanh_argument(v, ACTIVATION: gl.constexpr):
    if ACTIVATION == "silu":
        a = 0.5 * v
    elif ACTIVATION == "gelu":  # best fit a v + b v^3 with tanh close to erf(v / sqrt(2)), within 2.8e-4
        a = v * (0.80014206 + 0.034707733 * v * v)
    else:  # sqrt(2 / pi), and that times 0.044715
        a = v * (0.7978845608 + 0.0356774081 * v * v)
    return a


@gluon.jit
def activate_in_fp32(v, ACTIVATION: gl.constexpr):
    """Activation in single precision."""
    if ACTIVATION == "gelu":
        # Abramowitz and Stegun 7.1.26, within 1.5e-7: the library's erf is so long that instruction fetch would be
        # measurable
        x = gl.abs(v) * 0.7071067811865476
        t = 1.0 / (1.0 + 0.3275911 * x)
        tail = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
        tail = 0.5 * tail * gl.exp(-x * x)
        v = v * gl.where(v < 0, tail, 1.0 - tail)
    elif ACTIVATION == "gelu_tanh":
        v = v / (1.0 + gl.exp(-1.5957691216057308 * (v + 0.044715 * v * v * v)))
    else:
        v = v / (1.0 + gl.exp(-v))
    return v


@gluon.jit
def load_tiles(
    tile_ptr, row_tile, row_tiles, column, columns, lane, ROW_TILES: gl.constexpr, E8M0_SCALES: gl.constexpr
):
    """(first words, second words, scale bytes) of ROW_TILES tiles; zeros out of bounds."""
    WORDS: gl.constexpr = 272 if E8M0_SCALES else 288
    four = gl.arange(0, 4, layout=gl.SliceLayout(0, lane.type.layout.parent))[None, :]
    out = ()
    for r in gl.static_range(ROW_TILES):
        wanted = (column < columns) & (row_tile + r < row_tiles)
        base = ((row_tile + r) * columns + column) * WORDS
        word_ptr = tile_ptr + (gl.multiple_of((base + lane * 4)[:, None], (4, 4)) + four)
        # .cg: weights are read once; L1 is for activations
        first = gl.load(word_ptr, mask=wanted[:, None], other=0, cache_modifier=".cg")
        second = gl.load(word_ptr + 128, mask=wanted[:, None], other=0, cache_modifier=".cg")
        scale_ptr = tile_ptr + base + 256 + (lane // 2 if E8M0_SCALES else lane)
        scale = gl.load(scale_ptr, mask=wanted, other=0, cache_modifier=".cg")
        if E8M0_SCALES:  # two lanes per word
            scale = scale >> (16 * (lane % 2))
        out = out + (first, second, scale)
    return out


@gluon.jit
def load_tokens(x_ptr, column, wanted, n, p, lane, sizes, C: gl.constexpr):
    """Eight columns of eight tokens as four words per lane: the B operands of instructions 2 p and 2 p + 1."""
    four = gl.arange(0, 4, layout=gl.SliceLayout(0, lane.type.layout.parent))[None, :]
    token = n * 8 + lane // 4
    t = lane % 4
    offset = column * 64 + t * 16 + (p ^ (t // 2)) * 4
    if not C.ALL_TOKENS:
        wanted = wanted & (token < sizes.M)
    if C.WORD_LOADS:  # a load per word
        words = offset[:, None] + four
        whole = wanted[:, None] & (words * 2 < sizes.K)
        return gl.load(x_ptr + (token * (sizes.x_stride // 2))[:, None] + words, mask=whole, other=0)
    if C.K_TAIL:
        wanted = wanted & (offset * 2 < sizes.K)
    offset = offset + token * (sizes.x_stride // 2)
    return gl.load(x_ptr + (gl.multiple_of(offset[:, None], (4, 4)) + four), mask=wanted[:, None], other=0)


@gluon.jit
def tile_pointers(
    tile_ptr, row_tile, row_tiles, column, columns, lane, ROW_TILES: gl.constexpr, E8M0_SCALES: gl.constexpr
):
    """Pointers to the words and to the scales of each of ROW_TILES tiles; clamped to the last row of tiles."""
    WORDS: gl.constexpr = 272 if E8M0_SCALES else 288
    four = gl.arange(0, 4, layout=gl.SliceLayout(0, lane.type.layout.parent))[None, :]
    out = ()
    for r in gl.static_range(ROW_TILES):
        base = (gl.minimum(row_tile + r, row_tiles - 1) * columns + column) * WORDS
        words = tile_ptr + (gl.multiple_of((base + lane * 4)[:, None], (4, 4)) + four)
        if E8M0_SCALES:
            out = out + (words, (tile_ptr + base + 256).to(gl.pointer_type(gl.int16)) + lane)
        else:
            out = out + (words, tile_ptr + base + 256 + lane)
    return out


@gluon.jit
def token_pointers(x_ptr, x_stride, column, lane, TOKEN_GROUPS: gl.constexpr):
    """Pointers to the first, then the second operand that `load_tokens` reads, per token group."""
    four = gl.arange(0, 4, layout=gl.SliceLayout(0, lane.type.layout.parent))[None, :]
    t = lane % 4
    out = ()
    for n in gl.static_range(TOKEN_GROUPS):
        for p in gl.static_range(2):
            offset = (n * 8 + lane // 4) * (x_stride // 2) + column * 64 + t * 16 + (p ^ (t // 2)) * 4
            out = out + (x_ptr + (gl.multiple_of(offset[:, None], (4, 4)) + four),)
    return out


@gluon.jit
def advanced(pointers, EVEN: gl.constexpr, ODD: gl.constexpr, COUNT: gl.constexpr):
    """Increment pointers by EVEN and ODD elements, by their index in the tuple."""
    out = ()
    for i in gl.static_range(COUNT):
        out = out + (pointers[i] + (EVEN if i % 2 == 0 else ODD),)
    return out


@gluon.jit
def read_tiles(pointers, wanted, ROW_TILES: gl.constexpr, OUTSIDE: gl.constexpr):
    """Like `load_tiles`, but OUTSIDE, or undefined values if None, where tiles are not wanted."""
    out = ()
    for r in gl.static_range(ROW_TILES):
        words = pointers[2 * r]
        first = gl.load(words, mask=wanted[:, None], other=OUTSIDE, cache_modifier=".cg")
        second = gl.load(words + 128, mask=wanted[:, None], other=OUTSIDE, cache_modifier=".cg")
        out = out + (first, second, gl.load(pointers[2 * r + 1], mask=wanted, other=OUTSIDE).to(gl.int32))
    return out


@gluon.jit
def read_tokens(pointers, column, lane, sizes, C: gl.constexpr):
    """The operands of `load_tokens` for each token group and p."""
    out = ()
    for n in gl.static_range(C.TOKEN_GROUPS):
        for p in gl.static_range(4):
            pointer = pointers[2 * n + p % 2] + 8 * (p // 2)
            if C.ALL_TOKENS and not C.K_TAIL:
                out = out + (gl.load(pointer),)
            else:
                t = lane % 4
                wanted = n * 8 + lane // 4 < sizes.M
                if C.K_TAIL:
                    wanted = wanted & (column * 128 + t * 32 + (p ^ (t // 2)) * 8 < sizes.K)
                out = out + (gl.load(pointer, mask=wanted[:, None], other=0),)
    return out


@gluon.jit
def places(program, ROW_TILES: gl.constexpr, COUNT: gl.constexpr, LAYOUT: gl.constexpr):
    """(row, token) of each accumulator of a program, [COUNT, 32, 4]."""
    i = gl.arange(0, COUNT, layout=gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))[:, None][:, :, None]
    lane = gl.arange(0, 32, layout=gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))[None, :][:, :, None]
    four = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))[None, :][:, None, :]
    row = (program * ROW_TILES + i % ROW_TILES) * 16 + lane // 4 + 8 * (four // 2)
    return row, (i // ROW_TILES) * 8 + 2 * (lane % 4) + four % 2


@gluon.jit
def squares_at(square_ptr, K, SQUARES: gl.constexpr, WARPS: gl.constexpr):
    """(Pointers to SQUARES sums of squares of a vector of K, one per 16 numbers; mask of the valid ones)."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    at = gl.arange(0, SQUARES, layout=LAYOUT)
    return square_ptr + at, at < (K + 15) // 16


@gluon.jit
def first_tile(thread, program, N, ROW_TILES: gl.constexpr):
    """(column of each thread, row tile, row tiles of the weight) that a program starts with.

    Both branches compute the same in different order: ptxas assigns loads to scoreboards by it. If prefetched weights
    share a scoreboard with activations, a wait for one waits for both. With the second order that happens to
    `gated_kernel`, which then takes 8 to 15 % longer on an H200; so it passes None.
    """
    if program is None:
        column = thread // 32
        row_tiles = (N + 15) // 16
        row_tile = gl.program_id(0) * ROW_TILES + thread * 0
    else:
        row_tile = program * ROW_TILES + thread * 0
        row_tiles = (N + 15) // 16
        column = thread // 32
    return column, row_tile, row_tiles


@gluon.jit
def sums_of_products(x_ptr, tile_ptrs, scale_ptr, extras, squares, program, sizes, C: gl.constexpr):
    """16 * ROW_TILES rows of x [M, K] @ w.T for each of tile_ptrs, a sum per warp: [32 * K_WARPS, 4] for each token
    group and row tile of one matrix, then of the next. Also the values of the extras, then of *scale_ptr.

    extras: pointers and masks, loaded before the loop to hide their latency, as is *scale_ptr unless None. squares: ()
    or (pointer to sums of squares, shared memory to which they are being copied). program: whose rows to compute, None:
    the grid's.
    """
    MATRICES: gl.constexpr = len(tile_ptrs)
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [C.K_WARPS, 1], [1, 0])
    THREADS: gl.constexpr = 32 * C.K_WARPS
    thread = gl.arange(0, THREADS, layout=gl.SliceLayout(1, LAYOUT))
    lane = thread % 32
    column, row_tile, row_tiles = first_tile(thread, program, sizes.N, C.ROW_TILES)
    columns = sizes.columns
    x_words = x_ptr.to(gl.pointer_type(gl.int32))
    sums = ()
    for _ in gl.static_range(MATRICES * C.TOKEN_GROUPS * C.ROW_TILES):
        sums = sums + (gl.zeros((THREADS, 4), gl.float32, layout=LAYOUT),)
    if C.CARRY_POINTERS:
        STEP: gl.constexpr = (272 if C.E8M0_SCALES else 288) * C.K_WARPS
        weights = tile_pointers(tile_ptrs[0], row_tile, row_tiles, column, columns, lane, C.ROW_TILES, C.E8M0_SCALES)
        xs = token_pointers(x_words, sizes.x_stride, column, lane, C.TOKEN_GROUPS)
        tiles = read_tiles(weights, column < columns, C.ROW_TILES, None)
    elif C.PREFETCH:
        tiles = ()
        for m in gl.static_range(MATRICES):
            tiles = tiles + load_tiles(
                tile_ptrs[m], row_tile, row_tiles, column, columns, lane, C.ROW_TILES, C.E8M0_SCALES
            )
    if C.DEPENDENT:
        wait_for_launch_before()
    if len(squares) > 0:
        pointers, there = squares_at(squares[0], sizes.K, squares[1].shape[0], C.K_WARPS)
        copy_async(squares[1], pointers, mask=there)
        async_copy.commit_group()
    if scale_ptr is not None:
        scale = gl.load(scale_ptr)
    read = ()
    for i in gl.static_range(len(extras) // 2):
        read = read + (gl.load(extras[2 * i], mask=extras[2 * i + 1], other=0.0),)
    if scale_ptr is not None:
        read = read + (scale,)
    for _ in range((columns + C.K_WARPS - 1) // C.K_WARPS):
        here = column < columns
        if C.CARRY_POINTERS:
            weights = advanced(weights, STEP, 2 * STEP if C.E8M0_SCALES else STEP, 2 * C.ROW_TILES)
            ahead = read_tiles(weights, column + C.K_WARPS < columns, C.ROW_TILES, None)
        else:
            at = column + C.K_WARPS if C.PREFETCH else column
            ahead = ()
            for m in gl.static_range(MATRICES):
                ahead = ahead + load_tiles(
                    tile_ptrs[m], row_tile, row_tiles, at, columns, lane, C.ROW_TILES, C.E8M0_SCALES
                )
            if not C.PREFETCH:
                tiles = ahead
        tokens = ()
        if C.CARRY_POINTERS:
            tokens = read_tokens(xs, column, lane, sizes, C)
            xs = advanced(xs, 64 * C.K_WARPS, 64 * C.K_WARPS, 2 * C.TOKEN_GROUPS)
        elif C.TOKEN_GROUPS <= 4:  # more would spill registers
            for n in gl.static_range(C.TOKEN_GROUPS):
                for p in gl.static_range(4):
                    tokens = tokens + (load_tokens(x_words, column, here, n, p, lane, sizes, C),)
        for part in gl.static_range(2):
            added = ()
            for m in gl.static_range(MATRICES):
                a = ()
                for r in gl.static_range(C.ROW_TILES):
                    scale_g, scale_h = gl.inline_asm_elementwise(
                        DECODE_E8M0 if C.E8M0_SCALES else (DECODE_E4M3_LOW if part == 0 else DECODE_E4M3_HIGH),
                        SCALE_REGISTERS,
                        [tiles[3 * (m * C.ROW_TILES + r) + 2]],
                        dtype=(gl.int32, gl.int32),
                        is_pure=True,
                        pack=1,
                    )
                    a0, a1, a2, a3 = gl.inline_asm_elementwise(
                        DECODE,
                        DECODE_REGISTERS,
                        [tiles[3 * (m * C.ROW_TILES + r) + part], scale_g[:, None], scale_h[:, None]],
                        dtype=(gl.int32, gl.int32, gl.int32, gl.int32),
                        is_pure=True,
                        pack=4,
                    )
                    a = a + (a0, a1, a2, a3)
                for n in gl.static_range(C.TOKEN_GROUPS):
                    if C.TOKEN_GROUPS <= 4:
                        b0 = tokens[4 * n + 2 * part]
                        b1 = tokens[4 * n + 2 * part + 1]
                    else:
                        b0 = load_tokens(x_words, column, here, n, 2 * part, lane, sizes, C)
                        b1 = load_tokens(x_words, column, here, n, 2 * part + 1, lane, sizes, C)
                    for r in gl.static_range(C.ROW_TILES):
                        total = sums[(m * C.TOKEN_GROUPS + n) * C.ROW_TILES + r]
                        total = gl.inline_asm_elementwise(
                            MULTIPLY,
                            MULTIPLY_REGISTERS,
                            [a[4 * r], a[4 * r + 1], a[4 * r + 2], a[4 * r + 3], b0, b1, total],
                            dtype=gl.float32,
                            is_pure=True,
                            pack=4,
                        )
                        added = added + (total,)
            sums = added
        if C.PREFETCH:
            tiles = ahead
        column = column + C.K_WARPS

    if C.DEPENDENT:
        allow_launch_after()
    return sums, read


@gluon.jit
def linear_program(x_ptr, tile_ptr, scale_ptr, bias_ptr, row, extras, program, sizes, C: gl.constexpr):
    """x [M, K] @ w.T * scale + bias, unless None, at rows of `result_places`, and the extras' values; see
    `sums_of_products`."""
    # with few columns per warp the first weights would wait for the scale
    SCALE_FIRST: gl.constexpr = C.K_WARPS < 16 and C.ROW_TILES < 4
    first_ptr = scale_ptr if SCALE_FIRST else None
    sums, read = sums_of_products(x_ptr, (tile_ptr,), first_ptr, extras, (), program, sizes, C)
    if SCALE_FIRST:
        scale = read[len(extras) // 2]
    else:
        scale = gl.load(scale_ptr)
    if bias_ptr is not None:
        bias = gl.load(bias_ptr + row, mask=row < sizes.N, other=0.0)
    v = sum_over_warps(sums, 0, C.TOKEN_GROUPS * C.ROW_TILES, C.K_WARPS)
    v = gl.convert_layout(v, row.type.layout) * (RESCALE * scale)
    if bias_ptr is not None:
        v = v + bias.to(gl.float32)
    return v, read


@gluon.jit
def result_places(program, ROW_TILES: gl.constexpr, TOKEN_GROUPS: gl.constexpr, K_WARPS: gl.constexpr):
    """(row, token) of the results of a program of K_WARPS warps, in store layout."""
    return places(
        program,
        ROW_TILES,
        TOKEN_GROUPS * ROW_TILES,
        store_layout(ROW_TILES, TOKEN_GROUPS, K_WARPS) if TOKEN_GROUPS > 1 else out_layout(K_WARPS),
    )


@gluon.jit
def store_result(v, y_ptr, row, token, M, N, y_stride):
    keep = (row < N) & (token < M)
    gl.store(y_ptr + token.to(gl.int64) * y_stride + row, v.to(y_ptr.dtype.element_ty), mask=keep)


@gluon.jit(do_not_specialize=["M", "N", "columns"])
def linear_kernel(
    x_ptr,
    tile_ptr,
    scale_ptr,
    bias_ptr,
    y_ptr,
    M,
    N,
    K,
    columns,
    x_stride,
    y_stride,
    ROW_TILES: gl.constexpr,
    TOKEN_GROUPS: gl.constexpr,
    K_WARPS: gl.constexpr,
    PREFETCH: gl.constexpr,
    CARRY_POINTERS: gl.constexpr,
    E8M0_SCALES: gl.constexpr,
    ALL_TOKENS: gl.constexpr,
    K_TAIL: gl.constexpr,
    ACTIVATION: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    WORD_LOADS: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    """y [M, N] = activation(x [M, K] @ w.T * scale + bias). Grid (ceil(row tiles / ROW_TILES),)."""
    C: gl.constexpr = Constants(
        ROW_TILES, TOKEN_GROUPS, K_WARPS, PREFETCH, E8M0_SCALES, K_TAIL, DEPENDENT, CARRY_POINTERS, WORD_LOADS,
        ALL_TOKENS,
    )  # fmt: skip
    row, token = result_places(gl.program_id(0), ROW_TILES, TOKEN_GROUPS, K_WARPS)
    sizes = Sizes(M, N, K, columns, x_stride)
    bias = bias_ptr if HAS_BIAS else None
    v, _ = linear_program(x_ptr, tile_ptr, scale_ptr, bias, row, (), gl.program_id(0), sizes, C)
    store_result(activate(v, ACTIVATION, y_ptr.dtype.element_ty), y_ptr, row, token, M, N, y_stride)


@gluon.jit
def pad_kernel(
    x_ptr, o_ptr, K, width, x_stride, k_stride, WARPS: gl.constexpr, SPAN: gl.constexpr, DEPENDENT: gl.constexpr
):
    """o [M, width] = x [M, K] padded with zeros, grid (M, ceil(width / SPAN)). DEPENDENT: a dependent launch."""
    if DEPENDENT:
        wait_for_launch_before()
        allow_launch_after()
    at = gl.program_id(1) * SPAN + gl.arange(0, SPAN, layout=gl.BlockedLayout([2], [32], [WARPS], [0]))
    m = gl.program_id(0).to(gl.int64)
    v = gl.load(x_ptr + m * x_stride + at.to(gl.int64) * k_stride, mask=at < K, other=0.0)
    gl.store(o_ptr + m * width + at, v, mask=at < width)


@gluon.jit
def widen(pair, s, DTYPE: gl.constexpr, WARPS: gl.constexpr):
    """[threads, 4] bf16 pairs times s, as [threads, 8] of DTYPE."""
    low = (pair << 16).to(gl.float32, bitcast=True) * s
    high = (pair & -65536).to(gl.float32, bitcast=True) * s
    return gl.reshape(gl.join(low.to(DTYPE), high.to(DTYPE)), (32 * WARPS, 8))


@gluon.jit
def decode_program(program, tile_ptr, scale_ptr, w_ptr, N, K, columns, E8M0_SCALES: gl.constexpr, WARPS: gl.constexpr):
    """A program of `decode_kernel`, by its number."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [WARPS, 1], [1, 0])
    # a warp stores two rows of a tile at a time, 16 bytes a lane for 16-bit weights
    ROWS: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 2, 16], [WARPS, 1, 1], [2, 1, 0])
    thread = gl.arange(0, 32 * WARPS, layout=gl.SliceLayout(1, LAYOUT))
    lane = thread % 32
    groups = (columns + WARPS - 1) // WARPS  # consecutive in time, consecutive in memory
    row_tile = program // groups
    group = program % groups
    column = group * WARPS + thread // 32
    tiles = load_tiles(tile_ptr, row_tile + thread * 0, row_tile + 1, column, columns, lane, 1, E8M0_SCALES)
    tensor_scale = gl.load(scale_ptr)
    swapped = (lane % 4 >= 2)[:, None]  # p ^ (t // 2), see tiles
    warp = gl.arange(0, WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, ROWS)))[:, None][:, :, None]
    g = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, ROWS)))[None, :][:, :, None]
    within = gl.arange(0, 128, layout=gl.SliceLayout(0, gl.SliceLayout(1, ROWS)))[None, :][:, None, :]
    at = (group * WARPS + warp) * 128 + within
    pairs = ()
    scales = ()
    for part in gl.static_range(2):
        scale_g, scale_h = gl.inline_asm_elementwise(
            DECODE_E8M0 if E8M0_SCALES else (DECODE_E4M3_LOW_PLAIN if part == 0 else DECODE_E4M3_HIGH_PLAIN),
            SCALE_REGISTERS,
            [tiles[2]],
            dtype=(gl.int32, gl.int32),
            is_pure=True,
            pack=1,
        )
        scales = scales + (scale_g, scale_h)
        one = gl.full((32 * WARPS, 1), 0x7E807E80, gl.int32, layout=LAYOUT)  # 2^126: bare levels
        p0g, p0h, p1g, p1h = gl.inline_asm_elementwise(
            DECODE_COLUMNS,
            DECODE_REGISTERS,
            [tiles[part], one, one],
            dtype=(gl.int32, gl.int32, gl.int32, gl.int32),
            is_pure=True,
            pack=4,
        )
        pairs = pairs + (p0g, p0h, p1g, p1h)
    for half in gl.static_range(2):
        v = ()
        for part in gl.static_range(2):
            s = (scales[2 * part + half] << 16).to(gl.float32, bitcast=True)
            if E8M0_SCALES:
                s = s * 1.925929944387236e-34  # 2^-112, before the tensor scale can overflow
            s = (s * tensor_scale)[:, None]
            p0 = pairs[4 * part + half]
            p1 = pairs[4 * part + 2 + half]
            q0 = gl.where(swapped, p1, p0)
            q1 = gl.where(swapped, p0, p1)
            v = v + (widen(q0, s, w_ptr.dtype.element_ty, WARPS), widen(q1, s, w_ptr.dtype.element_ty, WARPS))
        # [threads, 8, 2, 2] to [threads, 2, 2, 8]: 32 adjacent columns a lane, 128 a row of the tile
        row_of_tile = gl.permute(gl.join(gl.join(v[0], v[2]), gl.join(v[1], v[3])), (0, 2, 3, 1))
        block = gl.convert_layout(gl.reshape(row_of_tile, (WARPS, 8, 128)), ROWS)
        row = row_tile * 16 + 8 * half + g
        gl.store(w_ptr + (row.to(gl.int64) * K + at), block, mask=(row < N) & (at < K))


@gluon.jit(do_not_specialize=["N", "columns"])
def decode_kernel(tile_ptr, scale_ptr, w_ptr, N, K, columns, E8M0_SCALES: gl.constexpr, WARPS: gl.constexpr):
    """w [N, K] in its own dtype, bit-exact with the format's `decode`; grid (row tiles * column groups,).

    level * (scale * tensor scale), both products rounded to fp32.
    """
    decode_program(gl.program_id(0), tile_ptr, scale_ptr, w_ptr, N, K, columns, E8M0_SCALES, WARPS)
