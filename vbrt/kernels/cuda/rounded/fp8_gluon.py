"""Kernels of `fp8`: weights in tile order to E4M3 rows, activations to E4M3 rows. Importing needs Triton.

`decode8_kernel` is memory-bound (4.5 bits in, 8 bits out per weight), so it decodes by the bit arithmetic of
`narrow_gluon` and rounds by the conversion instruction of sm_89 and later.
"""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from vbrt.kernels.cuda.e2m1.narrow_gluon import (
    DECODE_E4M3_HIGH,
    DECODE_E4M3_LOW,
    DECODE_E8M0,
    SCALE_REGISTERS,
    load_tiles,
)

__all__ = ["decode8_kernel", "quantize_kernel"]


def _decode8_assembly(factor: int) -> str:
    """Words $8..$11 times block scales $12 (row g) and $16 (row g + 8) times `factor`, as E4M3: four consecutive
    columns per register, row g in $0..$3 and row g + 8 in $4..$7. $20: whether this lane's word pairs are swapped, see
    tiles.
    """
    lines = [
        "{ .reg .b32 w0, w1, w2, w3, t, u, z, c, p0, p1, p2, p3; .reg .b16 lo, hi; .reg .pred s;",
        f"mov.b32 z, 0x80008000; mov.b32 c, {factor:#x}; setp.ne.s32 s, $20, 0;",
        *(f"selp.b32 w{i}, ${8 + (i ^ 2)}, ${8 + i}, s;" for i in range(4)),
    ]
    for word in range(4):
        w = f"w{word}"
        lines += [
            f"shl.b32 t, {w}, 2; and.b32 p0, t, 0x81C081C0;",
            f"shl.b32 t, {w}, 6; and.b32 p1, t, 0x81C081C0;",
            f"shf.l.wrap.b32 t, {w}, {w}, 12; and.b32 p2, t, 0x81C081C0;",
            f"shr.u32 t, {w}, 8; lop3.b32 p3, {w}, t, 0x81C081C0, 0x28;",
        ]
        # two products, because one would exceed bf16's range; both are exact
        lines += [f"fma.rn.bf16x2 p{i}, p{i}, {('$12', '$16')[i & 1]}, z;" for i in range(4)]
        lines += [f"fma.rn.bf16x2 p{i}, p{i}, c, z;" for i in range(4)]
        for half in range(2):
            for name, pair in (("lo", f"p{half}"), ("hi", f"p{2 + half}")):
                lines += [
                    f"shl.b32 t, {pair}, 16; and.b32 u, {pair}, 0xFFFF0000;",
                    f"cvt.rn.satfinite.e4m3x2.f32 {name}, u, t;",
                ]
            lines.append(f"mov.b32 ${4 * half + word}, {{lo, hi}};")
    return " ".join([*lines, "}"])


# level * 2^-126 * scale * 2^112 * factor: at most 6 * 448 / 8 = 336 for nvfp4, 6 * 2^6 = 384 for mxfp4
DECODE8 = gl.constexpr(_decode8_assembly(0x45004500))  # 2^11
DECODE8_E8 = gl.constexpr(_decode8_assembly(0x49804980))  # 2^20
DECODE8_REGISTERS = gl.constexpr(",".join(["=&r"] * 8) + ",r" * 16)


@gluon.jit(do_not_specialize=["N", "columns"])
def decode8_kernel(
    tile_ptr, scale_ptr, w_ptr, row_scale_ptr, N, quads, columns, E8M0_SCALES: gl.constexpr, WARPS: gl.constexpr
):
    """w as E4M3 [N, 16 * quads], four per word, and row_scale [N]: fp32 factor of each row.

    Grid (row tiles * column groups,). 16 * quads is K rounded up to 16; K is zero-padded in the tiles.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [WARPS, 1], [1, 0])
    ROWS: gl.constexpr = gl.BlockedLayout([1, 1, 4], [1, 4, 8], [WARPS, 1, 1], [2, 1, 0])  # a row of a tile: 8 lanes
    thread = gl.arange(0, 32 * WARPS, layout=gl.SliceLayout(1, LAYOUT))
    lane = thread % 32
    groups = (columns + WARPS - 1) // WARPS
    row_tile = gl.program_id(0) // groups
    group = gl.program_id(0) % groups
    column = group * WARPS + thread // 32
    tiles = load_tiles(tile_ptr, row_tile + thread * 0, row_tile + 1, column, columns, lane, 1, E8M0_SCALES)
    swapped = ((lane % 4) // 2)[:, None]
    parts = ()
    for part in gl.static_range(2):
        scale_g, scale_h = gl.inline_asm_elementwise(
            DECODE_E8M0 if E8M0_SCALES else (DECODE_E4M3_LOW if part == 0 else DECODE_E4M3_HIGH),
            SCALE_REGISTERS,
            [tiles[2]],
            dtype=(gl.int32, gl.int32),
            is_pure=True,
            pack=1,
        )
        low, high = gl.inline_asm_elementwise(
            DECODE8_E8 if E8M0_SCALES else DECODE8,
            DECODE8_REGISTERS,
            [tiles[part], scale_g[:, None], scale_h[:, None], swapped],
            dtype=(gl.int32, gl.int32),
            is_pure=True,
            pack=4,
        )
        parts = parts + (low, high)  # noqa: RUF005  # the kernel language has no starred expressions
    warp = gl.arange(0, WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, ROWS)))[:, None][:, :, None]
    g = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, ROWS)))[None, :][:, :, None]
    word = gl.arange(0, 32, layout=gl.SliceLayout(0, gl.SliceLayout(1, ROWS)))[None, :][:, None, :]
    at = (group * WARPS + warp) * 32 + word
    words = quads * 4  # tells the compiler that rows are 16-byte aligned
    for half in gl.static_range(2):
        joined = gl.permute(gl.join(parts[half], parts[2 + half]), (0, 2, 1))  # [threads, part, word]
        block = gl.convert_layout(gl.reshape(joined, (WARPS, 8, 32)), ROWS)
        row = row_tile * 16 + 8 * half + g
        gl.store(w_ptr + (row.to(gl.int64) * words + at), block, mask=(row < N) & (at < words))
    if group == 0:
        LINE: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
        line = row_tile * 16 + gl.arange(0, 16, layout=LINE)
        value = gl.load(scale_ptr) * (0.015625 if E8M0_SCALES else 8.0)
        gl.store(row_scale_ptr + line, gl.full((16,), 1.0, gl.float32, layout=LINE) * value, mask=line < N)


@triton.jit
def quantize_kernel(x_ptr, q_ptr, scale_ptr, K, x_stride, q_stride, BLOCK: tl.constexpr, WHOLE_ROW: tl.constexpr):
    """q = x * 448 / max |x| per row, as E4M3; scale = max |x| / 448. One program per row; q has K rounded up to 16
    columns.

    WHOLE_ROW: a row fits into BLOCK and is read once; otherwise twice, the second time from cache.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    x_ptr += row * x_stride
    q_ptr += row * q_stride
    if WHOLE_ROW:
        x = tl.load(x_ptr + column, mask=column < K, other=0.0).to(tl.float32)
        largest = tl.max(tl.abs(x))
    else:
        seen = tl.zeros((BLOCK,), tl.float32)
        for first in range(0, K, BLOCK):
            x = tl.load(x_ptr + first + column, mask=first + column < K, other=0.0).to(tl.float32)
            seen = tl.maximum(seen, tl.abs(x))
        largest = tl.max(seen)
    largest = tl.maximum(largest, 7.888609052210118e-31)  # 2^-100: 448 / largest stays finite
    factor = 448.0 / largest
    tl.store(scale_ptr + row, largest / 448.0)
    if WHOLE_ROW:
        tl.store(q_ptr + column, (x * factor).to(tl.float8e4nv), mask=column < q_stride)
    else:
        for first in range(0, K, BLOCK):
            x = tl.load(x_ptr + first + column, mask=first + column < K, other=0.0).to(tl.float32)
            tl.store(q_ptr + first + column, (x * factor).to(tl.float8e4nv), mask=first + column < q_stride)
