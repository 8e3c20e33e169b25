"""Operands from table codes, for `e2m1/persistent_gluon` and `e2m1/mma_gluon`.

Both read the plain coarse plane. Of 128 columns lane t of four has the 32 from 32 t on, of rows g and g + 8: four words
of codes each. `warpgroup_mma` needs columns 2 t, 2 t + 1 and 8 + 2 t, 9 + 2 t of each sixteen: one byte of a word, so
the four lanes exchange bytes before the lookup, two words at a time. For `mma.sync` activations come in any order, and
each lane decodes what it has. Levels are rounded to bf16, and so are block scales, of which bytes are exact, and the
products. With the rest of a scale in a second product the results were no closer.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from vbrt.kernels.cuda.e2m1.wide_gluon import register_operands
from vbrt.kernels.cuda.table.linear_gluon import level_bytes

__all__ = ["level_words", "own_operands", "scale_pairs", "table_column", "table_operands", "table_pointers"]

_SELECTORS = {  # prmt selectors for lanes with a bit of t clear, and set
    "sa": ("high", 0x7632, 0x5410),  # sent to lane t ^ 2: its bytes of two words
    "va": ("high", 0x5410, 0x3254),  # own and received bytes, of the first word by lane,
    "vb": ("high", 0x7610, 0x3276),  # and of the second
    "sb": ("odd", 0x7531, 0x6420),  # the same between t and t ^ 1
    "ua": ("odd", 0x5240, 0x3514),
    "ub": ("odd", 0x7260, 0x3716),
}


def _look_up(source: str, outs: list[str], scales: tuple[str, str]) -> list[str]:
    """Instructions from a word of codes to four bf16 pairs, times the first scale, and from the third on the second.

    Levels' low bytes are in $24 to $27, high bytes in $28 to $31.
    """
    lines = [f"and.b32 s, {source}, 0x77777777; shr.u32 q, {source}, 1; and.b32 q, q, 0x44444444;"]
    for half in range(2):
        if half:
            lines.append("shr.u32 s, s, 16; shr.u32 q, q, 16;")
        lines += [
            "prmt.b32 a, $24, $25, s; prmt.b32 b, $26, $27, s; or.b32 d, q, 0x3210; prmt.b32 a, a, b, d;",
            "prmt.b32 b, $28, $29, s; prmt.b32 c, $30, $31, s; prmt.b32 b, b, c, d;",
            f"prmt.b32 {outs[2 * half]}, a, b, 0x5140; prmt.b32 {outs[2 * half + 1]}, a, b, 0x7362;",
        ]
    return lines + [f"fma.rn.bf16x2 {out}, {out}, {scales[i // 2]}, z;" for i, out in enumerate(outs)]


def _own_assembly(part: int) -> str:
    """Words $16 to $19 of row g and $20 to $23 of row g + 8 of lane $32 to four A operands in $0..$15.

    Instructions 4 part and 4 part + 1 take word 2 part of lanes with t < 2, the next one of others, and two more
    instructions the other one: see `e2m1/mma_gluon.stage_layout`. Row g's scale is in $36, that of row g + 8 in $40.
    """
    lines = [
        "{ .reg .b32 t, z, s, q, a, b, c, d, u0, u1; .reg .pred high;",
        "mov.b32 z, 0x80008000; and.b32 t, $32, 2; setp.ne.u32 high, t, 0;",
    ]
    for row in range(2):
        first, second = (f"${16 + 4 * row + 2 * part + half}" for half in range(2))
        lines.append(f"selp.b32 u0, {second}, {first}, high; selp.b32 u1, {first}, {second}, high;")
        scale = f"${36 + 4 * row}"
        for half in range(2):
            outs = [f"${4 * (2 * half + jj) + 2 * c + row}" for jj in range(2) for c in range(2)]
            lines += _look_up(f"u{half}", outs, (scale, scale))
    return " ".join([*lines, "}"])


def _operand_assembly(part: int) -> str:
    """Words $16 to $19 of row g and $20 to $23 of row g + 8 of lane $36 to four A operands in $0..$15.

    Scales of row g's two blocks are in $32, $33, those of row g + 8 in $34, $35. Operand s has lane s's columns.
    """
    lines = [
        "{ .reg .b32 t, z, s, q, a, b, c, d, r, v0, v1, u0, u1, sa, va, vb, sb, ua, ub; .reg .pred high, odd;",
        "mov.b32 z, 0x80008000; and.b32 t, $36, 2; setp.ne.u32 high, t, 0; and.b32 t, $36, 1; setp.ne.u32 odd, t, 0;",
        *(f"selp.b32 {name}, {there}, {here}, {bit};" for name, (bit, here, there) in _SELECTORS.items()),
    ]
    for row in range(2):
        first, second = (f"${16 + 4 * row + 2 * part + half}" for half in range(2))
        lines += [
            f"prmt.b32 s, {first}, {second}, sa; shfl.sync.bfly.b32 r, s, 2, 31, -1;",
            f"prmt.b32 v0, {first}, r, va; prmt.b32 v1, {second}, r, vb;",
            "prmt.b32 s, v0, v1, sb; shfl.sync.bfly.b32 r, s, 1, 31, -1;",
            "prmt.b32 u0, v0, r, ua; prmt.b32 u1, v1, r, ub;",
        ]
        scales = f"${32 + 2 * row}", f"${33 + 2 * row}"
        for half in range(2):
            lines += _look_up(f"u{half}", [f"${4 * s + 2 * half + row}" for s in range(4)], scales)
    return " ".join([*lines, "}"])


PARTS_0 = gl.constexpr(_operand_assembly(0))
PARTS_1 = gl.constexpr(_operand_assembly(1))
REGISTERS = gl.constexpr(",".join(["=&r"] * 16) + ",r" * 24)
OWN_0 = gl.constexpr(_own_assembly(0))
OWN_1 = gl.constexpr(_own_assembly(1))
OWN_REGISTERS = gl.constexpr(",".join(["=&r"] * 16) + ",r" * 28)


@gluon.jit
def level_words(level_ptr, SIGNED: gl.constexpr, LAYOUT: gl.constexpr):
    """(low bytes, high bytes) of 16 levels in bf16, four in each of a lane's four words."""
    four = gl.arange(0, 4, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    lows = gl.zeros((LAYOUT.warps_per_cta[0] * 32, 4), gl.int32, layout=LAYOUT)
    highs = lows
    for i in gl.static_range(4):
        low, high = level_bytes(level_ptr, 4 * i, SIGNED)
        lows = gl.where(four == i, low, lows)
        highs = gl.where(four == i, high, highs)
    return lows, highs


@gluon.jit
def table_pointers(code_ptr, block_ptr, row_tile, N, column, blocks, lane, LAYOUT: gl.constexpr):
    """Pointers to a column's codes of rows g and g + 8 and to their four scales; clamped to the last row."""
    four = gl.arange(0, 4, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    g = gl.minimum(row_tile * 16 + lane // 4, N - 1)
    h = gl.minimum(row_tile * 16 + lane // 4 + 8, N - 1)
    at = column * 16 + lane % 4 * 4
    upper = code_ptr + (gl.multiple_of((g * (8 * blocks) + at)[:, None], (4, 4)) + four)
    lower = code_ptr + (gl.multiple_of((h * (8 * blocks) + at)[:, None], (4, 4)) + four)
    rows = gl.where(four < 2, g[:, None], h[:, None])
    return upper, lower, block_ptr + (rows * blocks + 2 * column + four % 2)


@gluon.jit
def table_column(pointers, wanted, column, blocks, lane, LAYOUT: gl.constexpr):
    """(codes of row g, of row g + 8, scales) of 128 columns, zeros out of bounds; and pointers to the next ones."""
    four = gl.arange(0, 4, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    inside = (wanted & (2 * column + lane % 4 // 2 < blocks))[:, None]
    upper = gl.load(pointers[0], mask=inside, other=0, cache_modifier=".cg")
    lower = gl.load(pointers[1], mask=inside, other=0, cache_modifier=".cg")
    with_scale = wanted[:, None] & (2 * column + four % 2 < blocks)
    scale = gl.load(pointers[2], mask=with_scale, other=0).to(gl.int32)
    return (upper, lower, scale), (pointers[0] + 16, pointers[1] + 16, pointers[2] + 2)


@gluon.jit
def scale_pairs(stored):
    """Block scales as bf16, duplicated in a word: floats, or UE4M4 bytes; 1920 = (127 - 7) << 4."""
    if stored.dtype == gl.int32:
        return gl.where(stored > 0, ((stored + 1920) << 3) * 0x10001, 0)
    else:
        return (stored.to(gl.bfloat16).to(gl.int16, bitcast=True).to(gl.int32) & 0xFFFF) * 0x10001


@gluon.jit
def table_operands(raw, scales, levels, lane, PART: gl.constexpr, WARPS: gl.constexpr, A: gl.constexpr):
    """Four [64, 16] weights over the tensor scale: of each 32 columns the first 16 or, with PART 1, the others."""
    o = gl.inline_asm_elementwise(
        PARTS_0 if PART == 0 else PARTS_1,
        REGISTERS,
        [raw[0], raw[1], levels[0], levels[1], scales, lane[:, None]],
        dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16),
        is_pure=False,
        pack=4,
    )
    return register_operands(o, WARPS, A)


@gluon.jit
def own_operands(
    upper, lower, scale_g, scale_h, levels, lane, PART: gl.constexpr, WARPS: gl.constexpr, A: gl.constexpr
):
    """Four [16 * WARPS, 16] weights over the tensor scale, of the codes that lanes have: two of their four words.

    Scales as for `table_operands`.
    """
    o = gl.inline_asm_elementwise(
        OWN_0 if PART == 0 else OWN_1,
        OWN_REGISTERS,
        [upper, lower, levels[0], levels[1], lane[:, None], scale_g[:, None], scale_h[:, None]],
        dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16),
        is_pure=True,
        pack=4,
    )
    return register_operands(o, WARPS, A)
