"""Grouped MoE kernel with `mma.sync` for many tokens, for GPUs without `warpgroup_mma`: sm_80 and newer.

`e2m1/mma_gluon.tile_sums` for the tiles of routed experts. Pairs (token, expert) are sorted by expert. A program takes
a block of up to TOKENS pairs of one expert and, of its matrix, ROW_TILES * WARPS row tiles. Programs of one expert are
consecutive, those of the same weights first, so that weights and activations are shared in L2. Rows of activations are
gathered by the copies into shared memory, and results stored to each pair's own row: neither is copied before or after.

The gate is an epilogue on the accumulators. If a matrix has all gates first, half of a program's row tiles are of the
other half of the matrix, and a lane has a value where it has its gate.

Page addresses come from a table, and the number of pairs of an expert is known to the device only.

Legend: P pairs, E experts, N rows of a matrix, B blocks of up to TOKENS pairs of one expert.
"""

from collections import namedtuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from vbrt.kernels.cuda.e2m1.mma_gluon import (
    Activations,
    Constants,
    Weight,
    chunk_of,
    copy_layout,
    factor_of,
    sums_layout,
    tile_sums,
)
from vbrt.kernels.cuda.e2m1.wide_gluon import rows_first
from vbrt.kernels.cuda.experts.few_tokens_gluon import gate_function, gated_product

__all__ = ["grouped_mma_kernel"]

#: tensors of `pairs.Groups`
Groups = namedtuple("Groups", "order_ptr offset_ptr expert_ptr first_ptr")
#: biases of an expert's matrix, their number; where results go, and up to which pair in sorted order
Result = namedtuple("Result", "bias_ptr N order_ptr y_ptr n_out end")
#: constants of the gate
Gate = namedtuple("Gate", "FUNCTION GATED INTERLEAVED ALPHA LIMIT SHIFT HAS_BIAS")


@gluon.jit
def item_of(program, row_blocks, groups, TOKENS: gl.constexpr):
    """(expert or -1, row block, begin of the pairs in sorted order, end of the expert's) of a program."""
    some = program // row_blocks  # a block of its expert: all have as many programs
    expert = gl.load(groups.expert_ptr + some)
    begin = gl.load(groups.offset_ptr + gl.maximum(expert, 0))
    end = gl.load(groups.offset_ptr + gl.maximum(expert, 0) + 1)
    first_block = some - (gl.load(groups.first_ptr + some) - begin) // TOKENS
    count = gl.maximum((end - begin + TOKENS - 1) // TOKENS, 1)
    own = program - first_block * row_blocks
    return expert, own // count, begin + own % count * TOKENS, end


@gluon.jit
def with_bias(v, result, first_row, WARPS: gl.constexpr, HAS_BIAS: gl.constexpr):
    """Add the biases of rows from first_row on."""
    if HAS_BIAS:
        row = first_row + gl.arange(0, 16 * WARPS, layout=gl.SliceLayout(1, sums_layout(WARPS)))
        v = v + gl.load(result.bias_ptr + row, mask=row < result.N, other=0.0).to(gl.float32)[:, None]
    return v


@gluon.jit
def store_rows(v, result, first, first_row):
    """Store v [rows, pairs] to the pairs' rows of y, columns from first_row on."""
    LAYOUT: gl.constexpr = v.type.layout
    row = first_row + gl.arange(0, v.shape[0], layout=gl.SliceLayout(1, LAYOUT))
    place = first + gl.arange(0, v.shape[1], layout=gl.SliceLayout(0, LAYOUT))
    pair = gl.load(result.order_ptr + place, mask=place < result.end, other=0)
    at = pair.to(gl.int64)[None, :] * result.n_out + row[:, None]
    keep = (row < result.n_out)[:, None] & (place < result.end)[None, :]
    gl.store(result.y_ptr + at, v.to(result.y_ptr.dtype.element_ty), mask=keep)


@gluon.jit
def store_sums(sums, factor, result, row_block, first, half, C: gl.constexpr, G: gl.constexpr):
    """Store the gate of an item's sums; `half`: rows of half a matrix."""
    DTYPE: gl.constexpr = result.y_ptr.dtype.element_ty
    CHUNK: gl.constexpr = chunk_of(C.TOKENS)
    OUT_TILES: gl.constexpr = C.ROW_TILES // 2 if C.APART else C.ROW_TILES
    for r in gl.static_range(OUT_TILES):
        first_row = (row_block * OUT_TILES + r) * (16 * C.WARPS)
        for c in gl.static_range(C.TOKENS // CHUNK):
            v = with_bias(sums[c * C.ROW_TILES + r] * factor, result, first_row, C.WARPS, G.HAS_BIAS)
            place = first + c * CHUNK
            if C.APART:
                u = sums[c * C.ROW_TILES + OUT_TILES + r] * factor
                u = with_bias(u, result, half + first_row, C.WARPS, G.HAS_BIAS)
                v = gated_product(v, u, G.FUNCTION, G.ALPHA, G.LIMIT, G.SHIFT, DTYPE)
                store_rows(gl.convert_layout(v.to(DTYPE), rows_first(C.WARPS)), result, place, first_row)
            elif G.GATED:
                v = gl.reshape(gl.convert_layout(v, rows_first(C.WARPS)), (8 * C.WARPS, 2, CHUNK))
                g, u = gl.split(gl.permute(v, (0, 2, 1)))
                v = gated_product(g, u, G.FUNCTION, G.ALPHA, G.LIMIT, G.SHIFT, DTYPE)
                store_rows(v, result, place, first_row // 2)
            else:
                v = gate_function(v, G.FUNCTION, 1.0, DTYPE).to(DTYPE)
                store_rows(gl.convert_layout(v, rows_first(C.WARPS)), result, place, first_row)


@gluon.jit
def clear_rows(result, row_block, first, ROWS: gl.constexpr, C: gl.constexpr):
    """Zero an item's ROWS columns of y in the rows of its pairs."""
    for r in gl.static_range(ROWS // (16 * C.WARPS) if ROWS > 16 * C.WARPS else 1):
        v = gl.zeros((16 * C.WARPS, C.TOKENS), result.y_ptr.dtype.element_ty, layout=rows_first(C.WARPS))
        store_rows(v, result, first, row_block * ROWS + r * (16 * C.WARPS))


@gluon.jit(do_not_specialize=["columns", "row_blocks", "experts", "k"])
def grouped_mma_kernel(
    x_ptr,
    order_ptr,
    offset_ptr,
    expert_ptr,
    first_ptr,
    address_ptr,
    bias_ptr,
    y_ptr,
    tile_offset,
    scale_offset,
    N,
    K,
    columns,
    row_blocks,
    experts,
    k,
    n_out,
    x_stride,
    TOKENS: gl.constexpr,
    WARPS: gl.constexpr,
    ROW_TILES: gl.constexpr,
    RING: gl.constexpr,
    CODES: gl.constexpr,
    K_TAIL: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    FUNCTION: gl.constexpr,
    GATED: gl.constexpr,
    INTERLEAVED: gl.constexpr,
    ALPHA: gl.constexpr,
    LIMIT: gl.constexpr,
    SHIFT: gl.constexpr,
):
    """y [P, n_out]: for each pair the gate of its expert's W x + bias [E, N]; zeros for sentinels.

    Pair p uses row p // k of x [.., K] bf16, which has rows of whole 16 bytes. order, offset, expert, first:
    `pairs.Groups` of blocks of up to TOKENS pairs. Matrices in tile order start tile_offset bytes after an address,
    their scales scale_offset. Grid (B * row_blocks,).
    """
    C: gl.constexpr = Constants(TOKENS, WARPS, ROW_TILES, RING, CODES, 0, GATED and not INTERLEAVED, K_TAIL)
    G: gl.constexpr = Gate(FUNCTION, GATED, INTERLEAVED, ALPHA, LIMIT, SHIFT, HAS_BIAS)
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [WARPS, 1], [1, 0])
    OUT_ROWS: gl.constexpr = 16 * WARPS * ROW_TILES // (2 if GATED else 1)
    groups = Groups(order_ptr, offset_ptr, expert_ptr, first_ptr)
    expert, row_block, first, end = item_of(gl.program_id(0), row_blocks, groups, TOKENS)
    if expert < 0:
        return
    result = Result(bias_ptr + expert.to(gl.int64) * N, N, order_ptr, y_ptr, n_out, end)
    if expert == experts:
        clear_rows(result, row_block, first, OUT_ROWS, C)
    else:
        address = gl.load(address_ptr + expert)
        tile_ptr = gl.multiple_of((address + tile_offset).to(gl.pointer_type(gl.int32)), 16)
        scale_ptr = (address + scale_offset).to(gl.pointer_type(gl.float32))
        row_tiles = (N + 15) // 16
        thread = gl.arange(0, 32 * WARPS, layout=gl.SliceLayout(1, LAYOUT))
        row_tile = row_block * (WARPS * ROW_TILES // (2 if C.APART else 1)) + thread // 32
        w = Weight(tile_ptr, scale_ptr, scale_ptr, row_tile, row_tiles, row_tiles // 2, N, columns, 0, 0)
        place = first + gl.arange(0, TOKENS, layout=gl.SliceLayout(1, copy_layout(WARPS)))
        pair = gl.load(order_ptr + place, mask=place < end, other=0)
        offset = (pair // k).to(gl.int64) * (x_stride // 8) * 8
        x = Activations(x_ptr, offset, place < end, K)
        factor = factor_of(scale_ptr, w, CODES)
        sums = tile_sums(w, x, gl.to_tensor(0), columns, thread % 32, C)
        store_sums(sums, factor, result, row_block, first, N // 2, C, G)
