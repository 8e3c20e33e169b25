"""The GPU side of `fused_linear`: a norm, one or two matrices in tile order, and their activation, in one launch.

The loop is that of `fp4_gluon.linear_kernel`, with the row tile of a second matrix beside the first one's where there
are two. What the norm needs is gathered by the matrix instruction too, on activations that are in registers anyway:

    sum of squares   the diagonal of x xᵀ, its A operand being the registers of the B operand
    sum              ones times x
    W gain, W shift  two columns beside the tokens

so that y = rstd * (W (gain x) - mean * W gain) + W shift needs no pass over x before the product. Sums are fp32 over
exact products; gain x is rounded to bf16, as the input of a separate matmul would be. W gain and W shift are constants
of a weight and its norm: who keeps them (`fused_linear.folded`) saves their columns.
"""

# ruff: noqa: RUF005  # the kernel language has no starred expressions

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from vbrt.kernels.fp4_gluon import (
    DECODE,
    DECODE_REGISTERS,
    E4M3_HIGH,
    E4M3_LOW,
    E8M0,
    MULTIPLY,
    MULTIPLY_REGISTERS,
    RESCALE,
    SCALE_REGISTERS,
    activate,
    load_tiles,
    load_tokens,
)

__all__ = ["fused_kernel"]

_MMA = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {$0, $1, $2, $3},"


def _square_assembly(groups: int, group: int) -> str:
    """$0..$3 = rows of x times columns of one group of tokens, four instructions. Eight registers a group from $4 on
    (the B operands), then the four sums so far; rows g are group 0, rows g + 8 group 1 or nothing."""
    first = 4 + 8 * groups
    lines = ["{ .reg .b32 z; mov.b32 z, 0;"]
    source = ", ".join(f"${first + i}" for i in range(4))
    for word in range(4):
        low = [f"${4 + 8 * n + 2 * word}" for n in range(groups)]
        high = [f"${5 + 8 * n + 2 * word}" for n in range(groups)]
        rows = [low[0], low[1] if groups == 2 else "z", high[0], high[1] if groups == 2 else "z"]
        lines.append(f"{_MMA} {{{', '.join(rows)}}}, {{{low[group]}, {high[group]}}}, {{{source}}};")
        source = "$0, $1, $2, $3"
    return " ".join([*lines, "}"])


def _sum_assembly() -> str:
    """$0..$3 = ones times the B operands $4..$11, plus $12..$15: the sum of each token in every row."""
    lines, source = ["{ .reg .b32 o; mov.b32 o, 0x3F803F80;"], "$12, $13, $14, $15"
    for word in range(4):
        lines.append(f"{_MMA} {{o, o, o, o}}, {{${4 + 2 * word}, ${5 + 2 * word}}}, {{{source}}};")
        source = "$0, $1, $2, $3"
    return " ".join([*lines, "}"])


def _diagonal_assembly(group: int) -> str:
    """Sums $4..$7 of `_square_assembly` in lane $8: each lane gets those of its own two tokens, 2 t and 2 t + 1, for
    both of its rows. Token 2 t + e is in lane 4 (2 t + e) + t."""
    even, odd = (("$4", "$5"), ("$6", "$7"))[group]
    return (
        "{ .reg .b32 i, j; and.b32 i, $8, 3; mul.lo.u32 i, i, 9; add.u32 j, i, 4; "
        f"shfl.sync.idx.b32 $0, {even}, i, 31, 0xffffffff; shfl.sync.idx.b32 $1, {odd}, j, 31, 0xffffffff; "
        "mov.b32 $2, $0; mov.b32 $3, $1; }"
    )


_F4, _R4 = ",=&f" * 4, ",r" * 4
SQUARE_ONE = gl.constexpr(_square_assembly(1, 0))
SQUARE_LOW = gl.constexpr(_square_assembly(2, 0))
SQUARE_HIGH = gl.constexpr(_square_assembly(2, 1))
SQUARE_ONE_REGISTERS = gl.constexpr((_F4 + _R4 * 2 + ",f" * 4)[1:])
SQUARE_TWO_REGISTERS = gl.constexpr((_F4 + _R4 * 4 + ",f" * 4)[1:])
SUM = gl.constexpr(_sum_assembly())
DIAGONAL_LOW = gl.constexpr(_diagonal_assembly(0))
DIAGONAL_HIGH = gl.constexpr(_diagonal_assembly(1))
DIAGONAL_REGISTERS = gl.constexpr((_F4 + ",f" * 4 + _R4)[1:])
#: of four sums those of the even or odd columns, for both of their columns
EVEN = gl.constexpr("{ mov.b32 $0, $4; mov.b32 $1, $4; mov.b32 $2, $6; mov.b32 $3, $6; }")
ODD = gl.constexpr("{ mov.b32 $0, $5; mov.b32 $1, $5; mov.b32 $2, $7; mov.b32 $3, $7; }")
SPREAD_REGISTERS = gl.constexpr((_F4 + ",f" * 4)[1:])
#: product of bf16 pairs; `mul.bf16x2` would need sm_90
SCALE_PAIR = gl.constexpr("{ .reg .b32 z; mov.b32 z, 0x80008000; fma.rn.bf16x2 $0, $1, $2, z; }")
PAIR_REGISTERS = gl.constexpr("=r,r,r")


@gluon.jit
def load_vector(ptr, column, wanted, p, lane, K, LAYOUT: gl.constexpr, TAIL: gl.constexpr):
    """As `load_tokens`, of one vector [K] for every token."""
    four = gl.arange(0, 4, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    t = lane % 4
    offset = column * 64 + t * 16 + (p ^ (t // 2)) * 4
    if TAIL:
        wanted = wanted & (offset * 2 < K)
    return gl.load(ptr + (gl.multiple_of(offset[:, None], (4, 4)) + four), mask=wanted[:, None], other=0)


@gluon.constexpr_function
def out_layout(WK):
    """[COUNT, 32, 4] sums, one a thread."""
    return gl.BlockedLayout([1, 1, 1], [1, 8, 4], [WK // 4, 4, 1], [2, 1, 0])


@gluon.jit
def doubled(v, COUNT: gl.constexpr, INNER: gl.constexpr, WK: gl.constexpr):
    v = gl.permute(gl.join(v, v), (0, 3, 1, 2) if INNER else (3, 0, 1, 2))
    return gl.convert_layout(gl.reshape(v, (2 * COUNT, 32, 4)), out_layout(WK))


@gluon.jit
def repeated(v, COUNT: gl.constexpr, TIMES: gl.constexpr, INNER: gl.constexpr, WK: gl.constexpr):
    """[COUNT, 32, 4] as [COUNT * TIMES, 32, 4], TIMES up to 4: each entry repeated (INNER), or all over again."""
    if TIMES > 1:
        v = doubled(v, COUNT, INNER, WK)
    if TIMES > 2:
        v = doubled(v, 2 * COUNT, INNER, WK)
    return v


@gluon.jit
def summed(entries, FIRST: gl.constexpr, COUNT: gl.constexpr, WK: gl.constexpr):
    """[COUNT, 32, 4] of entries FIRST .. FIRST + COUNT [threads, 4], added up over the warps in their order."""
    IN: gl.constexpr = gl.BlockedLayout([1, 1, 4], [1, 32, 1], [1, WK, 1], [2, 1, 0])
    OUT: gl.constexpr = out_layout(WK)
    SHARED: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    shared = gl.allocate_shared_memory(gl.float32, [COUNT, 32 * WK, 4], SHARED)
    for i in gl.static_range(COUNT):
        entry = gl.convert_layout(entries[FIRST + i], gl.SliceLayout(0, IN))
        shared.slice(i, 1, dim=0).store(gl.expand_dims(entry, 0))
    v = shared.slice(0, 32, dim=1).load(OUT)
    for w in gl.static_range(1, WK):
        v = v + shared.slice(w * 32, 32, dim=1).load(OUT)
    return v


@gluon.jit(do_not_specialize=["M", "N", "columns", "eps"])
def fused_kernel(
    x_ptr, tile_ptr, scale_ptr, other_ptr, other_scale_ptr, gain_ptr, shift_ptr, column_ptr, bias_ptr, y_ptr,
    eps, M, N, K, columns, x_stride, y_stride,
    R: gl.constexpr, NT: gl.constexpr, WK: gl.constexpr, PREFETCH: gl.constexpr, E8: gl.constexpr,
    FULL: gl.constexpr, TAIL: gl.constexpr, ACTIVATION: gl.constexpr, BIAS: gl.constexpr, GATED: gl.constexpr,
    NORM: gl.constexpr, GAIN: gl.constexpr, FOLDED: gl.constexpr,
):  # fmt: skip
    """y [M, N] = activation(norm(x) @ w.T + bias), times norm(x) @ other.T if GATED. Grid (ceil(row tiles / R),), WK
    warps.

    NORM: "none", "rms", or "layer", which takes gain and shift, or, if FOLDED, gain and fp32 columns: W gain, W shift,
    and the same of other. NT groups of 8 tokens cover M, one or two.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [WK, 1], [1, 0])
    THREADS: gl.constexpr = 32 * WK
    MATRICES: gl.constexpr = 2 if GATED else 1
    LAYER: gl.constexpr = NORM == "layer"
    BESIDE: gl.constexpr = LAYER and not FOLDED
    thread = gl.arange(0, THREADS, layout=gl.SliceLayout(1, LAYOUT))
    lane = thread % 32
    column = thread // 32
    row_tiles = (N + 15) // 16
    row_tile = gl.program_id(0) * R + thread * 0
    x_words = x_ptr.to(gl.pointer_type(gl.int32))
    gain_words = gain_ptr.to(gl.pointer_type(gl.int32))
    shift_words = shift_ptr.to(gl.pointer_type(gl.int32))
    zero = gl.zeros((THREADS, 4), gl.float32, layout=LAYOUT)
    sums = ()  # of the first matrix the token groups, of each its row tiles; then of the second
    for _ in gl.static_range(R * NT * MATRICES):
        sums = sums + (zero,)
    squares = ()
    totals = ()
    for _ in gl.static_range(NT):
        squares = squares + (zero,)
        totals = totals + (zero,)
    vectors = ()  # of each matrix and row tile: W gain in the even columns, W shift in the odd ones
    for _ in gl.static_range(MATRICES * R):
        vectors = vectors + (zero,)
    if PREFETCH:
        tiles = load_tiles(tile_ptr, row_tile, row_tiles, column, columns, lane, LAYOUT, R, E8)
        if GATED:
            tiles = tiles + load_tiles(other_ptr, row_tile, row_tiles, column, columns, lane, LAYOUT, R, E8)
    for _ in range((columns + WK - 1) // WK):
        here = column < columns
        at = column + WK if PREFETCH else column
        ahead = load_tiles(tile_ptr, row_tile, row_tiles, at, columns, lane, LAYOUT, R, E8)
        if GATED:
            ahead = ahead + load_tiles(other_ptr, row_tile, row_tiles, at, columns, lane, LAYOUT, R, E8)
        if not PREFETCH:
            tiles = ahead
        tokens = ()
        for n in gl.static_range(NT):
            for p in gl.static_range(4):
                loaded = load_tokens(x_words, x_stride, column, here, n, p, lane, M, K, LAYOUT, FULL, TAIL)
                tokens = tokens + (loaded,)
        if NORM != "none":
            for part in gl.static_range(2):
                added = ()
                for n in gl.static_range(NT):
                    if NT == 1:
                        square = gl.inline_asm_elementwise(
                            SQUARE_ONE, SQUARE_ONE_REGISTERS, [tokens[2 * part], tokens[2 * part + 1], squares[0]],
                            dtype=gl.float32, is_pure=True, pack=4,
                        )  # fmt: skip
                    else:
                        square = gl.inline_asm_elementwise(
                            SQUARE_LOW if n == 0 else SQUARE_HIGH, SQUARE_TWO_REGISTERS,
                            [tokens[2 * part], tokens[2 * part + 1], tokens[4 + 2 * part], tokens[5 + 2 * part],
                             squares[n]],
                            dtype=gl.float32, is_pure=True, pack=4,
                        )  # fmt: skip
                    added = added + (square,)
                squares = added
                if LAYER:
                    added = ()
                    for n in gl.static_range(NT):
                        total = gl.inline_asm_elementwise(
                            SUM, SQUARE_ONE_REGISTERS,
                            [tokens[4 * n + 2 * part], tokens[4 * n + 2 * part + 1], totals[n]],
                            dtype=gl.float32, is_pure=True, pack=4,
                        )  # fmt: skip
                        added = added + (total,)
                    totals = added
        beside = ()
        if GAIN:
            gains = ()
            for p in gl.static_range(4):
                gains = gains + (load_vector(gain_words, column, here, p, lane, K, LAYOUT, TAIL),)
            scaled = ()
            for n in gl.static_range(NT):
                for p in gl.static_range(4):
                    product = gl.inline_asm_elementwise(
                        SCALE_PAIR, PAIR_REGISTERS, [tokens[4 * n + p], gains[p]],
                        dtype=gl.int32, is_pure=True, pack=1,
                    )  # fmt: skip
                    scaled = scaled + (product,)
            tokens = scaled
            if BESIDE:
                odd = ((lane // 4) % 2 == 1)[:, None]
                for p in gl.static_range(4):
                    shift = load_vector(shift_words, column, here, p, lane, K, LAYOUT, TAIL)
                    beside = beside + (gl.where(odd, shift, gains[p]),)
        for part in gl.static_range(2):
            added = ()
            added_vectors = ()
            for m in gl.static_range(MATRICES):
                a = ()
                for r in gl.static_range(R):
                    scale_g, scale_h = gl.inline_asm_elementwise(
                        E8M0 if E8 else (E4M3_LOW if part == 0 else E4M3_HIGH), SCALE_REGISTERS,
                        [tiles[3 * (m * R + r) + 2]], dtype=(gl.int32, gl.int32), is_pure=True, pack=1,
                    )  # fmt: skip
                    a0, a1, a2, a3 = gl.inline_asm_elementwise(
                        DECODE, DECODE_REGISTERS, [tiles[3 * (m * R + r) + part], scale_g[:, None], scale_h[:, None]],
                        dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=True, pack=4,
                    )  # fmt: skip
                    a = a + (a0, a1, a2, a3)
                    if BESIDE:
                        vector = gl.inline_asm_elementwise(
                            MULTIPLY, MULTIPLY_REGISTERS,
                            [a0, a1, a2, a3, beside[2 * part], beside[2 * part + 1], vectors[m * R + r]],
                            dtype=gl.float32, is_pure=True, pack=4,
                        )  # fmt: skip
                        added_vectors = added_vectors + (vector,)
                for n in gl.static_range(NT):
                    for r in gl.static_range(R):
                        total = gl.inline_asm_elementwise(
                            MULTIPLY, MULTIPLY_REGISTERS,
                            [a[4 * r], a[4 * r + 1], a[4 * r + 2], a[4 * r + 3], tokens[4 * n + 2 * part],
                             tokens[4 * n + 2 * part + 1], sums[(m * NT + n) * R + r]],
                            dtype=gl.float32, is_pure=True, pack=4,
                        )  # fmt: skip
                        added = added + (total,)
            sums = added
            if BESIDE:
                vectors = added_vectors
        if PREFETCH:
            tiles = ahead
        column = column + WK

    COUNT: gl.constexpr = NT * R
    OUT: gl.constexpr = out_layout(WK)
    entry = gl.arange(0, COUNT, layout=gl.SliceLayout(1, gl.SliceLayout(2, OUT)))[:, None][:, :, None]
    place = gl.arange(0, 32, layout=gl.SliceLayout(0, gl.SliceLayout(2, OUT)))[None, :][:, :, None]
    four = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, OUT)))[None, :][:, None, :]
    row = (gl.program_id(0) * R + entry % R) * 16 + place // 4 + 8 * (four // 2)
    token = (entry // R) * 8 + 2 * (place % 4) + four % 2
    scale = gl.load(scale_ptr) * RESCALE
    v = summed(sums, 0, COUNT, WK) * scale
    if GATED:
        other_scale = gl.load(other_scale_ptr) * RESCALE
        u = summed(sums, COUNT, COUNT, WK) * other_scale
    if NORM != "none":
        own = ()
        for n in gl.static_range(NT):
            diagonal = gl.inline_asm_elementwise(
                DIAGONAL_LOW if n == 0 else DIAGONAL_HIGH, DIAGONAL_REGISTERS, [squares[n], lane[:, None]],
                dtype=gl.float32, is_pure=True, pack=4,
            )  # fmt: skip
            own = own + (diagonal,)
        variance = summed(own, 0, NT, WK) / K
        if LAYER:
            mean = summed(totals, 0, NT, WK) / K
            variance = gl.maximum(variance - mean * mean, 0.0)
        rstd = repeated(gl.rsqrt(variance + eps), NT, R, True, WK)
        v = rstd * v
        if GATED:
            u = rstd * u
        if LAYER:
            drop = rstd * repeated(mean, NT, R, True, WK)
        if LAYER and FOLDED:
            here = row < N
            v = v - drop * gl.load(column_ptr + row, mask=here, other=0.0)
            v = v + gl.load(column_ptr + N + row, mask=here, other=0.0)
            if GATED:
                u = u - drop * gl.load(column_ptr + 2 * N + row, mask=here, other=0.0)
                u = u + gl.load(column_ptr + 3 * N + row, mask=here, other=0.0)
        if BESIDE:
            even = ()
            odd = ()
            for i in gl.static_range(MATRICES * R):
                vector = gl.inline_asm_elementwise(
                    EVEN, SPREAD_REGISTERS, [vectors[i]], dtype=gl.float32, is_pure=True, pack=4
                )
                even = even + (vector,)
                vector = gl.inline_asm_elementwise(
                    ODD, SPREAD_REGISTERS, [vectors[i]], dtype=gl.float32, is_pure=True, pack=4
                )
                odd = odd + (vector,)
            v = v - drop * (repeated(summed(even, 0, R, WK), R, NT, False, WK) * scale)
            v = v + repeated(summed(odd, 0, R, WK), R, NT, False, WK) * scale
            if GATED:
                u = u - drop * (repeated(summed(even, R, R, WK), R, NT, False, WK) * other_scale)
                u = u + repeated(summed(odd, R, R, WK), R, NT, False, WK) * other_scale
    if BIAS:
        v = v + gl.load(bias_ptr + row, mask=row < N, other=0.0).to(gl.float32)
    v = activate(v, ACTIVATION)
    if GATED:
        v = v * u
    gl.store(y_ptr + token.to(gl.int64) * y_stride + row, v.to(y_ptr.dtype.element_ty), mask=(row < N) & (token < M))
