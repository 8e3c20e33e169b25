"""Grouped MoE kernels for few tokens, for experts in tile order. Importing this needs Triton.

Each program multiplies rows of one expert's matrix by up to 8 * TOKEN_GROUPS pairs of that expert, like
`e2m1/narrow_gluon`: weights go from their page straight to registers, the warps of a program split K, and their sums
are reduced in shared memory once, in a fixed order. A program's expert, pairs and page address come from tables on the
device, which the previous launch may have written, so everything is read after its end, except with WEIGHTS_FIRST.

    GROUPED          pairs are sorted by expert (`pairs.Groups`); otherwise each pair is a block of its own
    MATRICES         2: a program multiplies a row tile of the gates and the same one of the values; else 1
    GATING           "none", "halves" (all gates, then all values; requires MATRICES 2) or "interleaved"
    FUNCTION, ALPHA, LIMIT, SHIFT
                     of `vbrt.kernels.experts.Gate`; LIMIT may be None
    AHEAD            tile columns to prefetch
    SUMMANDS         x is [SUMMANDS, M, K]: bf16 summands of activations in fp16 or fp32
    WEIGHTS_FIRST    ids, addresses and pages are older than the previous launch, so the first weights are prefetched
                     while it runs
    the others       as in `narrow_gluon`

Legend: P pairs, E experts, k experts per token, N rows of a matrix, K columns; a column is one of tiles.
"""

# ruff: noqa: RUF005  # the kernel language has no starred expressions

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from vbrt.kernels.cuda.e2m1.narrow_gluon import (
    DECODE,
    DECODE_E4M3_HIGH,
    DECODE_E4M3_LOW,
    DECODE_E8M0,
    DECODE_REGISTERS,
    MULTIPLY,
    MULTIPLY_REGISTERS,
    NAN_STAYS,
    RESCALE,
    SCALE_REGISTERS,
    activate,
    allow_launch_after,
    out_layout,
    places,
    sum_over_warps,
    tanh_of,
    wait_for_launch_before,
)

__all__ = ["rows_kernel", "split_kernel", "token_kernel"]


# -- addresses of weights and activations ------------------------------------------------------------------------------


@gluon.jit
def pointers_of_tiles(
    address, row_tile, column, tiles, MATRICES: gl.constexpr, ROW_TILES: gl.constexpr, E8M0_SCALES: gl.constexpr
):
    """Pointers to ROW_TILES tiles from row_tile on of each of MATRICES matrices, in each thread's column.

    address: of the first tile of the first matrix, or one per thread [threads]. tiles: of a matrix, (rows, columns).
    """
    WORDS: gl.constexpr = 272 if E8M0_SCALES else 288
    base = address.to(gl.pointer_type(gl.int32))
    out = ()
    for m in gl.static_range(MATRICES):
        for r in gl.static_range(ROW_TILES):
            out = out + (base + ((row_tile + r + m * tiles[0]) * tiles[1] + column) * WORDS,)
    return out


@gluon.jit
def moved(pointers, step):
    out = ()
    for i in gl.static_range(len(pointers)):
        out = out + (pointers[i] + step,)
    return out


@gluon.jit
def read_weights(pointers, wanted, rows_left, lane, ROW_TILES: gl.constexpr, E8M0_SCALES: gl.constexpr):
    """(first words, second words, scale bytes) of each tile, zeros where not wanted.

    rows_left: row tiles of each matrix from the first of ROW_TILES on.
    """
    four = gl.arange(0, 4, layout=gl.SliceLayout(0, lane.type.layout.parent))[None, :]
    out = ()
    for i in gl.static_range(len(pointers)):
        # addresses are known at run time only, so the compiler must be told that tiles are 16-byte aligned
        words = gl.multiple_of(pointers[i] + lane * 4, 16)[:, None] + four
        there = wanted
        if ROW_TILES > 1:
            there = wanted & (i % ROW_TILES < rows_left)
        first = gl.load(words, mask=there[:, None], other=0, cache_modifier=".cg")
        second = gl.load(words + 128, mask=there[:, None], other=0, cache_modifier=".cg")
        if E8M0_SCALES:
            scale_ptr = (pointers[i] + 256).to(gl.pointer_type(gl.int16)) + lane
        else:
            scale_ptr = pointers[i] + (256 + lane)
        out = out + (first, second, gl.load(scale_ptr, mask=there, other=0).to(gl.int32))
    return out


@gluon.jit
def read_tokens(pointers, column, wanted, part, lane, K):
    """Operands 2 part and 2 part + 1 (as in `narrow_gluon.load_tokens`) of groups of eight rows of x.

    pointers: per lane, to its row and its 32 columns of tile column 0. wanted: lanes with a row.
    """
    four = gl.arange(0, 4, layout=gl.SliceLayout(0, lane.type.layout.parent))[None, :]
    t = lane % 4
    out = ()
    for n in gl.static_range(len(pointers)):
        for q in gl.static_range(2):
            offset = column * 64 + (q ^ (t // 2)) * 4 + 8 * part
            there = wanted[n] & ((offset + t * 16) * 2 < K)
            words = gl.multiple_of(pointers[n] + offset, 16)[:, None] + four
            out = out + (gl.load(words, mask=there[:, None], other=0),)
    return out


# -- products ----------------------------------------------------------------------------------------------------------


@gluon.jit
def decoded(tile, scales, part: gl.constexpr, E8M0_SCALES: gl.constexpr):
    """The four A operands of four instructions, from half of a tile's words."""
    scale_g, scale_h = gl.inline_asm_elementwise(
        DECODE_E8M0 if E8M0_SCALES else (DECODE_E4M3_LOW if part == 0 else DECODE_E4M3_HIGH),
        SCALE_REGISTERS,
        [scales],
        dtype=(gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )
    return gl.inline_asm_elementwise(
        DECODE,
        DECODE_REGISTERS,
        [tile, scale_g[:, None], scale_h[:, None]],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32),
        is_pure=True,
        pack=4,
    )


@gluon.jit
def multiplied(a, b0, b1, total):
    """total + A @ B, four instructions."""
    return gl.inline_asm_elementwise(
        MULTIPLY, MULTIPLY_REGISTERS, [a[0], a[1], a[2], a[3], b0, b1, total], dtype=gl.float32, is_pure=True, pack=4
    )


@gluon.jit
def added_products(sums, tiles, xs, column, wanted, lane, K, E8M0_SCALES: gl.constexpr):
    """sums + the products of one column: each tile with each token group, of which xs has all summands, in turn."""
    TILES: gl.constexpr = len(tiles) // 3
    TOKEN_GROUPS: gl.constexpr = len(sums) // TILES
    COUNT: gl.constexpr = len(xs)
    SUMMANDS: gl.constexpr = COUNT // TOKEN_GROUPS
    EARLY: gl.constexpr = COUNT <= 2  # more would spill registers
    tokens = ()
    if EARLY:
        for part in gl.static_range(2):
            tokens = tokens + read_tokens(xs, column, wanted, part, lane, K)
    for part in gl.static_range(2):
        if not EARLY:
            tokens = read_tokens(xs, column, wanted, part, lane, K)
        added = ()
        for i in gl.static_range(TILES):
            a = decoded(tiles[3 * i + part], tiles[3 * i + 2], part, E8M0_SCALES)
            for n in gl.static_range(TOKEN_GROUPS):
                total = sums[i * TOKEN_GROUPS + n]
                for s in gl.static_range(SUMMANDS):
                    if EARLY:
                        total = multiplied(
                            a,
                            tokens[2 * (COUNT * part + n * SUMMANDS + s)],
                            tokens[2 * (COUNT * part + n * SUMMANDS + s) + 1],
                            total,
                        )
                    else:
                        total = multiplied(a, tokens[2 * (n * SUMMANDS + s)], tokens[2 * (n * SUMMANDS + s) + 1], total)
                added = added + (total,)
        sums = added
    return sums


@gluon.jit
def gate_function(v, FUNCTION: gl.constexpr, ALPHA: gl.constexpr, DTYPE: gl.constexpr):
    """As accurate as `narrow_gluon.activate`."""
    if FUNCTION == "relu2":
        v = gl.maximum(v, 0.0, propagate_nan=NAN_STAYS)
        v = v * v
    elif ALPHA != 1.0:  # for any function, as in `vbrt.kernels.experts.apply_gate`
        if DTYPE == gl.bfloat16:
            half = 0.5 * v
            v = half + half * tanh_of((0.5 * ALPHA) * v)
        else:
            v = v / (1.0 + gl.exp(-ALPHA * v))
    else:
        v = activate(v, FUNCTION, DTYPE)
    return v


@gluon.jit
def gated_product(
    g, v, FUNCTION: gl.constexpr, ALPHA: gl.constexpr, LIMIT: gl.constexpr, SHIFT: gl.constexpr, DTYPE: gl.constexpr
):
    """function(g) * (v + SHIFT), clamped before."""
    if LIMIT is not None:
        g = gl.minimum(g, LIMIT, propagate_nan=NAN_STAYS)
        v = gl.maximum(gl.minimum(v, LIMIT, propagate_nan=NAN_STAYS), -LIMIT, propagate_nan=NAN_STAYS)
    return gate_function(g, FUNCTION, ALPHA, DTYPE) * (v + SHIFT)


# -- rows of pairs -----------------------------------------------------------------------------------------------------


@gluon.jit
def results(sums, FIRST: gl.constexpr, ROW_TILES: gl.constexpr, TOKEN_GROUPS: gl.constexpr, K_WARPS: gl.constexpr):
    """Sums over all warps of ROW_TILES tiles from FIRST on, in the order of `places`."""
    entries = ()
    for n in gl.static_range(TOKEN_GROUPS):
        for r in gl.static_range(ROW_TILES):
            entries = entries + (sums[(FIRST + r) * TOKEN_GROUPS + n],)
    return sum_over_warps(entries, 0, TOKEN_GROUPS * ROW_TILES, K_WARPS)


@gluon.constexpr_function
def pairs_layout(K_WARPS):
    return gl.BlockedLayout([1, 2], [32, 1], [K_WARPS, 1], [1, 0])


@gluon.jit
def neighbours(v, COUNT: gl.constexpr, K_WARPS: gl.constexpr):
    """(Even rows, odd rows) of accumulators [COUNT, 32, 4], each [64 COUNT]."""
    PAIRS: gl.constexpr = pairs_layout(K_WARPS)
    v = gl.permute(gl.reshape(v, (COUNT, 4, 2, 4, 4)), (0, 1, 3, 4, 2))
    even, odd = gl.split(gl.convert_layout(gl.reshape(v, (COUNT * 64, 2)), PAIRS))
    return gl.convert_layout(even, gl.SliceLayout(1, PAIRS)), gl.convert_layout(odd, gl.SliceLayout(1, PAIRS))


@gluon.jit
def places_of_neighbours(program, ROW_TILES: gl.constexpr, COUNT: gl.constexpr, K_WARPS: gl.constexpr):
    """(row of the result, token) of each pair of `neighbours`."""
    at = gl.arange(0, COUNT * 64, layout=gl.SliceLayout(1, pairs_layout(K_WARPS)))
    four = at % 4
    i = at // 64
    row = (program * ROW_TILES + i % ROW_TILES) * 8 + (at // 16) % 4 + 4 * (four // 2)
    return row, (i // ROW_TILES) * 8 + 2 * ((at // 4) % 4) + four % 2


@gluon.jit(
    do_not_specialize=[
        "E",
        "N",
        "K",
        "columns",
        "pairs_per_row",
        "x_stride",
        "x_plane",
        "y_stride",
        "tile_offset",
        "scale_offset",
    ]
)
def rows_kernel(
    x_ptr,
    id_ptr,
    order_ptr,
    offset_ptr,
    expert_ptr,
    first_ptr,
    address_ptr,
    bias_ptr,
    y_ptr,
    E,
    N,
    K,
    columns,
    pairs_per_row,
    x_stride,
    x_plane,
    y_stride,
    tile_offset,
    scale_offset,
    GROUPED: gl.constexpr,
    MATRICES: gl.constexpr,
    ROW_TILES: gl.constexpr,
    TOKEN_GROUPS: gl.constexpr,
    K_WARPS: gl.constexpr,
    SUMMANDS: gl.constexpr,
    E8M0_SCALES: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    GATING: gl.constexpr,
    FUNCTION: gl.constexpr,
    ALPHA: gl.constexpr,
    LIMIT: gl.constexpr,
    SHIFT: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    """y [P, rows] = g(W x + b) of each pair, from row pair // pairs_per_row of x.

    Grid (ceil(row tiles of a matrix / ROW_TILES), blocks of pairs).
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [K_WARPS, 1], [1, 0])
    STEP: gl.constexpr = (272 if E8M0_SCALES else 288) * K_WARPS
    COUNT: gl.constexpr = TOKEN_GROUPS * ROW_TILES
    DTYPE: gl.constexpr = y_ptr.dtype.element_ty
    if DEPENDENT:
        wait_for_launch_before()
    first = gl.program_id(1)
    if GROUPED:
        expert = gl.load(expert_ptr + first)
    else:
        expert = gl.load(id_ptr + first).to(gl.int32)
    if not GROUPED or expert >= 0:  # a block without pairs has nothing to do; rows of sentinels become zeros
        count = 1
        if GROUPED:
            behind = gl.load(offset_ptr + expert + 1)
            first = gl.load(first_ptr + first)
            count = gl.minimum(behind - first, 8 * TOKEN_GROUPS)
        thread = gl.arange(0, 32 * K_WARPS, layout=gl.SliceLayout(1, LAYOUT))
        lane = thread % 32
        column = thread // 32
        there = (expert >= 0) & (expert < E)
        address = gl.load(address_ptr + expert, mask=there, other=0)
        stop = gl.where(there, columns, 0)
        rows = N // MATRICES
        row_tiles = (rows + 15) // 16
        row_tile = gl.program_id(0) * ROW_TILES
        rows_left = row_tiles - row_tile
        tiles_of_matrix = (row_tiles, columns)
        weights = pointers_of_tiles(
            address + tile_offset, row_tile, column, tiles_of_matrix, MATRICES, ROW_TILES, E8M0_SCALES
        )
        tiles = read_weights(weights, column < stop, rows_left, lane, ROW_TILES, E8M0_SCALES)
        scale = gl.load((address + scale_offset).to(gl.pointer_type(gl.float32)), mask=there, other=0.0) * RESCALE

        x_words = x_ptr.to(gl.pointer_type(gl.int32))
        xs = ()
        has_row = ()
        for n in gl.static_range(TOKEN_GROUPS):
            own = n * 8 + lane // 4
            wanted = (own < count) & there
            own = first + own
            if GROUPED:
                own = gl.load(order_ptr + own, mask=wanted, other=0)
            x_row = x_words + (own // pairs_per_row).to(gl.int64) * (x_stride // 2) + (lane % 4) * 16
            for s in gl.static_range(SUMMANDS):
                xs = xs + (x_row + s * (x_plane // 2),)
                has_row = has_row + (wanted,)
        # epilogue operands are loaded before the loop, to hide their latency
        row, slot = places(gl.program_id(0), ROW_TILES, COUNT, out_layout(K_WARPS))
        biases = ()
        if HAS_BIAS:
            for m in gl.static_range(MATRICES):
                at = bias_ptr + expert.to(gl.int64) * N + m * rows + row
                biases = biases + (gl.load(at, mask=(row < rows) & there, other=0.0),)

        sums = ()
        for _sum in gl.static_range(MATRICES * COUNT):
            sums = sums + (gl.zeros((32 * K_WARPS, 4), gl.float32, layout=LAYOUT),)
        for _step in range((stop + K_WARPS - 1) // K_WARPS):
            weights = moved(weights, STEP)
            ahead = read_weights(weights, column + K_WARPS < stop, rows_left, lane, ROW_TILES, E8M0_SCALES)
            sums = added_products(sums, tiles, xs, column, has_row, lane, K, E8M0_SCALES)
            tiles = ahead
            column = column + K_WARPS
        if DEPENDENT:
            allow_launch_after()

        v = results(sums, 0, ROW_TILES, TOKEN_GROUPS, K_WARPS) * scale
        if HAS_BIAS:
            v = v + biases[0].to(gl.float32)
        if GATING == "halves":
            other = results(sums, ROW_TILES, ROW_TILES, TOKEN_GROUPS, K_WARPS) * scale
            if HAS_BIAS:
                other = other + biases[1].to(gl.float32)
            v = gated_product(v, other, FUNCTION, ALPHA, LIMIT, SHIFT, DTYPE)
        elif GATING == "interleaved":
            even, odd = neighbours(v, COUNT, K_WARPS)
            v = gated_product(even, odd, FUNCTION, ALPHA, LIMIT, SHIFT, DTYPE)
            row, slot = places_of_neighbours(gl.program_id(0), ROW_TILES, COUNT, K_WARPS)
        elif FUNCTION != "none":
            v = gate_function(v, FUNCTION, 1.0, DTYPE)
        keep = (row < (rows // 2 if GATING == "interleaved" else rows)) & (slot < count)
        pair = first + slot
        if GROUPED:
            pair = gl.load(order_ptr + pair, mask=keep, other=0)
        gl.store(y_ptr + pair.to(gl.int64) * y_stride + row, v.to(DTYPE), mask=keep)


# -- weighted sums -----------------------------------------------------------------------------------------------------


@gluon.jit(
    do_not_specialize=["E", "N", "K", "k", "columns", "x_stride", "x_plane", "y_stride", "tile_offset", "scale_offset"]
)
def token_kernel(
    x_ptr,
    id_ptr,
    weight_ptr,
    address_ptr,
    bias_ptr,
    y_ptr,
    E,
    N,
    K,
    k,
    columns,
    x_stride,
    x_plane,
    y_stride,
    tile_offset,
    scale_offset,
    SIDE_BY_SIDE: gl.constexpr,
    ROW_TILES: gl.constexpr,
    K_WARPS: gl.constexpr,
    AHEAD: gl.constexpr,
    SUMMANDS: gl.constexpr,
    E8M0_SCALES: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    WEIGHTS_FIRST: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    """y [T, N] = weighted sum of W x + b over a token's experts; grid (ceil(row tiles / ROW_TILES), T).

    SIDE_BY_SIDE experts at a time have K_WARPS / SIDE_BY_SIDE warps each, which split K.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [K_WARPS, 1], [1, 0])
    TURN: gl.constexpr = K_WARPS // SIDE_BY_SIDE
    STEP: gl.constexpr = (272 if E8M0_SCALES else 288) * TURN
    thread = gl.arange(0, 32 * K_WARPS, layout=gl.SliceLayout(1, LAYOUT))
    lane = thread % 32
    j = thread // 32 % SIDE_BY_SIDE
    begin = thread // (32 * SIDE_BY_SIDE)
    token = gl.program_id(1)
    row_tile = gl.program_id(0) * ROW_TILES
    rows_left = (N + 15) // 16 - row_tile
    x_words = x_ptr.to(gl.pointer_type(gl.int32))
    totals = ()
    for _t in gl.static_range(ROW_TILES):
        totals = totals + (gl.zeros((32 * K_WARPS, 4), gl.float32, layout=LAYOUT),)
    if DEPENDENT and not WEIGHTS_FIRST:
        wait_for_launch_before()
    for _turn in range((k + SIDE_BY_SIDE - 1) // SIDE_BY_SIDE):
        pair = token * k + j
        expert = gl.load(id_ptr + pair, mask=j < k, other=-1).to(gl.int32)
        there = (expert >= 0) & (expert < E)
        address = gl.load(address_ptr + expert, mask=there, other=0)
        stop = gl.where(there, columns, 0)
        column = begin
        tiles_of_matrix = ((N + 15) // 16, columns)
        weights = pointers_of_tiles(address + tile_offset, row_tile, column, tiles_of_matrix, 1, ROW_TILES, E8M0_SCALES)
        tiles = ()
        for d in gl.static_range(AHEAD):
            tiles = tiles + read_weights(weights, column + d * TURN < stop, rows_left, lane, ROW_TILES, E8M0_SCALES)
            weights = moved(weights, STEP)
        factor = gl.load((address + scale_offset).to(gl.pointer_type(gl.float32)), mask=there, other=0.0) * RESCALE
        if DEPENDENT and WEIGHTS_FIRST:
            wait_for_launch_before()
        factor = factor * gl.load(weight_ptr + pair, mask=there, other=0.0).to(gl.float32)
        x_row = x_words + pair.to(gl.int64) * (x_stride // 2) + (lane % 4) * 16
        xs = ()
        wanted = ()
        for s in gl.static_range(SUMMANDS):
            xs = xs + (x_row + s * (x_plane // 2),)
            wanted = wanted + (there & (lane < 4),)
        sums = ()
        for _s in gl.static_range(ROW_TILES):
            sums = sums + (gl.zeros((32 * K_WARPS, 4), gl.float32, layout=LAYOUT),)
        for _step in range((columns + TURN - 1) // TURN):
            read = read_weights(weights, column + AHEAD * TURN < stop, rows_left, lane, ROW_TILES, E8M0_SCALES)
            weights = moved(weights, STEP)
            sums = added_products(sums, tiles[: 3 * ROW_TILES], xs, column, wanted, lane, K, E8M0_SCALES)
            tiles = tiles[3 * ROW_TILES :] + read
            column = column + TURN
        weighed = ()
        for r in gl.static_range(ROW_TILES):
            weighed = weighed + (totals[r] + gl.where(there, factor, 0.0)[:, None] * sums[r],)
        totals = weighed
        j = j + SIDE_BY_SIDE
    if DEPENDENT:
        allow_launch_after()
    row, slot = places(gl.program_id(0), ROW_TILES, ROW_TILES, out_layout(K_WARPS))
    keep = (row < N) & (slot == 0)
    v = sum_over_warps(totals, 0, ROW_TILES, K_WARPS)
    if HAS_BIAS:
        for i in range(k):
            expert = gl.load(id_ptr + token * k + i).to(gl.int32)
            routed = (expert >= 0) & (expert < E)
            weight = gl.load(weight_ptr + token * k + i, mask=routed, other=0.0).to(gl.float32)
            bias = gl.load(bias_ptr + expert.to(gl.int64) * N + row, mask=keep & routed, other=0.0)
            v = v + weight * bias.to(gl.float32)
    gl.store(y_ptr + token.to(gl.int64) * y_stride + row, v.to(y_ptr.dtype.element_ty), mask=keep)


# -- activations -------------------------------------------------------------------------------------------------------


@gluon.jit(do_not_specialize=["K", "width", "x_stride", "k_stride", "plane"])
def split_kernel(
    x_ptr,
    o_ptr,
    K,
    width,
    x_stride,
    k_stride,
    plane,
    SUMMANDS: gl.constexpr,
    WARPS: gl.constexpr,
    SPAN: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    """o [SUMMANDS, M, width]: bf16 that add up to x [M, K], zero-padded; grid (M, ceil(width / SPAN)).

    Each summand takes the 8 leading bits of the previous remainder.
    """
    if DEPENDENT:
        wait_for_launch_before()
        allow_launch_after()
    at = gl.program_id(1) * SPAN + gl.arange(0, SPAN, layout=gl.BlockedLayout([2], [32], [WARPS], [0]))
    m = gl.program_id(0).to(gl.int64)
    rest = gl.load(x_ptr + m * x_stride + at.to(gl.int64) * k_stride, mask=at < K, other=0.0).to(gl.float32)
    for s in gl.static_range(SUMMANDS):
        part = rest.to(gl.bfloat16)
        gl.store(o_ptr + m * width + s * plane + at, part, mask=at < width)
        rest = rest - part.to(gl.float32)
