"""Fused Gluon kernel of `linear`: 8-bit integers into the mma operand. Importing needs Triton.

It reads the plain coarse plane, 64 columns at a time. Lane l = 4 g + t of a warp owns rows g and g + 8 and, of each
group of 64 columns, those from 16 t on: 16 bytes per row, of which four `mma.sync.m16n8k16` take 4 columns each.

Bytes are converted to bf16 in pairs: the lower seven bits are the mantissa of a number from 128 to 255, and the sign
selects what is subtracted, 128 or 256. 8-bit integers are exact in bf16, and scales are powers of two, so the
multiplied weights equal the decoded ones.
"""

# ruff: noqa: RUF005  # the kernel language has no starred expressions

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from vbrt.kernels.cuda.e2m1.narrow_gluon import activate, out_layout, sum_over_warps
from vbrt.kernels.cuda.e2m1.wide_gluon import register_operands

__all__ = ["byte_operands", "linear_kernel", "scale_pair"]


def _decode_assembly(by_instruction: bool) -> str:
    """Four words $16.. of row g and $20.. of row g + 8 to the A operands of four instructions, operand o of instruction
    i in register 4 o + i or, by_instruction, 4 i + o. Scales, twice a word, are in $24.. and $28.. for the two rows."""
    lines = ["{ .reg .b32 w, h, l; .reg .b32 one, z; mov.b32 one, 0x3F803F80; mov.b32 z, 0x80008000;"]
    for row in range(2):
        for i in range(4):
            for pair, selector in enumerate(("0x4140", "0x4342")):
                operand, scale = 2 * pair + row, f"${24 + 4 * row + i}"
                out = f"${4 * i + operand if by_instruction else 4 * operand + i}"
                lines += [
                    f"prmt.b32 w, ${16 + 4 * row + i}, 0, {selector};",
                    "and.b32 h, w, 0x007F007F; or.b32 h, h, 0x43004300;",
                    "and.b32 l, w, 0x00800080; or.b32 l, l, 0xC300C300;",
                    f"fma.rn.bf16x2 h, h, one, l; fma.rn.bf16x2 {out}, h, {scale}, z;",
                ]
    return " ".join([*lines, "}"])


def _multiply_assembly() -> str:
    """Sums $0.. = $28.. and four instructions: A in $4.. in the order 4 * operand + instruction, B in $20.., two words
    each."""
    lines = []
    for i in range(4):
        source = ", ".join(f"${(28 if i == 0 else 0) + j}" for j in range(4))
        a = ", ".join(f"${4 + 4 * operand + i}" for operand in range(4))
        lines.append(
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {$0, $1, $2, $3}, "
            f"{{{a}}}, {{${20 + 2 * i}, ${21 + 2 * i}}}, {{{source}}};"
        )
    return " ".join(lines)


DECODE = gl.constexpr(_decode_assembly(False))
DECODE_OPERANDS = gl.constexpr(_decode_assembly(True))
DECODE_REGISTERS = gl.constexpr(",".join(["=&r"] * 16) + ",r" * 16)
MULTIPLY = gl.constexpr(_multiply_assembly())
MULTIPLY_REGISTERS = gl.constexpr(",".join(["=&f"] * 4) + ",r" * 24 + ",f" * 4)


@gluon.jit
def load_groups(code_ptr, block_ptr, row, N, group, blocks, t, LAYOUT: gl.constexpr, UNROLL: gl.constexpr):
    """For each of UNROLL groups of 64 columns, for row and row + 8: four words of codes and a scale byte; zeros out of
    bounds."""
    four = gl.arange(0, 4, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    out = ()
    for j in gl.static_range(UNROLL):
        for half in gl.static_range(2):
            block = (group + j) * 2 + t // 2
            wanted = (row + 8 * half < N) & (block < blocks)
            index = (row + 8 * half).to(gl.int64) * blocks + block
            at = gl.multiple_of((index * 8 + t % 2 * 4)[:, None], (4, 4)) + four
            words = gl.load(code_ptr + at, mask=wanted[:, None], other=0, cache_modifier=".cg")
            out = out + (words, gl.load(block_ptr + index, mask=wanted, other=0).to(gl.int32))
    return out


@gluon.jit
def scale_pair(stored):
    """2^(byte - 127) / 64 in bf16, duplicated in a word."""
    bits = gl.where(stored > 6, (stored - 6) << 7, 1 << (stored & 7))
    return gl.where(stored == 255, 0x7FC0, bits) * 0x10001


@gluon.jit
def byte_operands(upper, lower, scale_g, scale_h, WARPS: gl.constexpr, A: gl.constexpr):
    """Four [16 * WARPS, 16] weights, for `e2m1/mma_gluon`: of rows g and g + 8 a lane's 16 columns of codes."""
    o = gl.inline_asm_elementwise(
        DECODE_OPERANDS,
        DECODE_REGISTERS,
        [upper, lower, scale_g[:, None], scale_h[:, None]],
        dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16),
        is_pure=True,
        pack=4,
    )
    return register_operands(o, WARPS, A)


@gluon.jit(do_not_specialize=["M", "N", "K", "blocks", "x_stride", "y_stride"])
def linear_kernel(
    x_ptr,
    code_ptr,
    block_ptr,
    bias_ptr,
    y_ptr,
    M,
    N,
    K,
    blocks,
    x_stride,
    y_stride,
    TOKEN_GROUPS: gl.constexpr,
    K_WARPS: gl.constexpr,
    UNROLL: gl.constexpr,
    ACTIVATION: gl.constexpr,
    HAS_BIAS: gl.constexpr,
):
    """y [M, N] = activation(x [M, K] @ w.T + bias), grid (ceil(N / 16),), K_WARPS warps that split K.

    x is bf16, its rows 16-byte aligned, K a multiple of 8; TOKEN_GROUPS groups of 8 tokens cover M.
    code_ptr: four codes per word, [N, 8 blocks]; block_ptr: E8M0 bytes [N, blocks], of 32 columns each.
    """
    groups = (blocks + 1) // 2
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [K_WARPS, 1], [1, 0])
    thread = gl.arange(0, 32 * K_WARPS, layout=gl.SliceLayout(1, LAYOUT))
    four = gl.arange(0, 4, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    lane = thread % 32
    t = lane % 4
    row = gl.program_id(0) * 16 + lane // 4
    group = (thread // 32) * UNROLL
    x_words = x_ptr.to(gl.pointer_type(gl.int32))
    blank = gl.zeros((32 * K_WARPS, 4), gl.int32, layout=LAYOUT)
    loaded = load_groups(code_ptr, block_ptr, row, N, group, blocks, t, LAYOUT, UNROLL)
    sums = ()
    for _ in gl.static_range(TOKEN_GROUPS):
        sums = sums + (gl.zeros((32 * K_WARPS, 4), gl.float32, layout=LAYOUT),)
    STEP: gl.constexpr = K_WARPS * UNROLL
    for _ in range((groups + STEP - 1) // STEP):
        ahead = load_groups(code_ptr, block_ptr, row, N, group + STEP, blocks, t, LAYOUT, UNROLL)
        for j in gl.static_range(UNROLL):
            a = gl.inline_asm_elementwise(
                DECODE,
                DECODE_REGISTERS,
                [
                    loaded[4 * j],
                    loaded[4 * j + 2],
                    blank + scale_pair(loaded[4 * j + 1])[:, None],
                    blank + scale_pair(loaded[4 * j + 3])[:, None],
                ],
                dtype=(gl.int32, gl.int32, gl.int32, gl.int32),
                is_pure=True,
                pack=4,
            )
            added = ()
            for n in gl.static_range(TOKEN_GROUPS):
                token = n * 8 + lane // 4
                column = (group + j) * 64 + t * 16
                at = gl.multiple_of((token * (x_stride // 2) + column // 2)[:, None], (4, 4)) + four
                low = gl.load(x_words + at, mask=((token < M) & (column < K))[:, None], other=0)
                high = gl.load(x_words + at + 4, mask=((token < M) & (column + 8 < K))[:, None], other=0)
                total = gl.inline_asm_elementwise(
                    MULTIPLY,
                    MULTIPLY_REGISTERS,
                    [a[0], a[1], a[2], a[3], low, high, sums[n]],
                    dtype=gl.float32,
                    is_pure=True,
                    pack=4,
                )
                added = added + (total,)
            sums = added
        loaded = ahead
        group = group + STEP
    OUT: gl.constexpr = out_layout(K_WARPS)
    tokens = gl.arange(0, TOKEN_GROUPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, OUT)))[:, None][:, :, None]
    place = gl.arange(0, 32, layout=gl.SliceLayout(0, gl.SliceLayout(2, OUT)))[None, :][:, :, None]
    each = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, OUT)))[None, :][:, None, :]
    out_row = gl.program_id(0) * 16 + place // 4 + 8 * (each // 2)
    out_token = tokens * 8 + 2 * (place % 4) + each % 2
    v = sum_over_warps(sums, 0, TOKEN_GROUPS, K_WARPS)
    if HAS_BIAS:
        v = v + gl.load(bias_ptr + out_row, mask=out_row < N, other=0.0).to(gl.float32)
    v = activate(v, ACTIVATION, y_ptr.dtype.element_ty)
    keep = (out_row < N) & (out_token < M)
    gl.store(y_ptr + out_token.to(gl.int64) * y_stride + out_row, v.to(y_ptr.dtype.element_ty), mask=keep)
