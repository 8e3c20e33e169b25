"""Fused Gluon kernels of `linear` and of routed experts: trellis codes into the mma operand. Importing needs Triton.

It reads the plain coarse plane (vbrt/formats/t3.py), 64 columns at a time: four tiles of 16 x 16. Lane l = 4 g + t of
a warp has, of each tile, the pairs of columns that the A operand of `mma.sync.m16n8k16` wants: a word of low bytes, its
neighbour's, and two words of upper bits give the 32 bits that hold all four states of the lane in a tile.

A pair's values are sums of two words of bf16, exact. Block scales and the tensor scale are applied to fp32 sums.
"""

# ruff: noqa: RUF005  # the kernel language has no starred expressions

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from vbrt.kernels.cuda.e2m1.narrow_gluon import activate, out_layout, places, sum_over_warps
from vbrt.kernels.cuda.whole.linear_gluon import MULTIPLY, MULTIPLY_REGISTERS

__all__ = ["experts_kernel", "linear_kernel"]

# the codebook's hash, see vbrt/formats/t3.py; the second word is the first times 32
_FACTOR, _ADDEND = 0x9E3779B1, 64248484


def _decode_assembly() -> str:
    """Low bytes $16, the neighbour's $17 and upper bits $18, $19 to the A operands of four instructions, operand o of
    instruction i in register 4 o + i."""
    lines = ["{ .reg .b32 m, w, s, p, q, one; mov.b32 one, 0x3F803F80;"]
    for tile in range(4):
        top, first = f"${18 + tile // 2}", 4 + 2 * (tile % 2)
        lines += [
            f"prmt.b32 m, $16, {top}, {tile | first << 4 | (first + 1) << 8};",
            f"prmt.b32 w, m, $17, {0x0210 | (4 + tile) << 12};",
        ]
        for operand in range(4):
            shift = 18 - 6 * operand
            lines += [f"shr.u32 s, w, {shift};" if shift else "mov.b32 s, w;"]
            lines += ["and.b32 s, s, 0x3FFF;"] if operand else []
            lines += [
                f"mad.lo.u32 p, s, {_FACTOR}, {_ADDEND};",
                f"mad.lo.u32 q, s, {_FACTOR * 32 % 2**32}, {_ADDEND * 32 % 2**32};",
                "lop3.b32 p, p, 0x81F081F0, one, 0x6A;",  # (p & mask) ^ one
                "lop3.b32 q, q, 0x81F081F0, one, 0x6A;",
                f"fma.rn.bf16x2 ${4 * operand + tile}, p, one, q;",
            ]
    return " ".join([*lines, "}"])


DECODE = gl.constexpr(_decode_assembly())
DECODE_REGISTERS = gl.constexpr(",".join(["=&r"] * 16) + ",r" * 4)


@gluon.jit
def load_groups(code_at, upper_at, lower_at, left, UNROLL: gl.constexpr, BLOCK: gl.constexpr):
    """For each of UNROLL groups of 64 columns: four words of codes, and scale bytes of row and row + 8; any, out of
    bounds. left: groups from here on."""
    out = ()
    for j in gl.static_range(UNROLL):
        words = gl.load(code_at + j * 96, mask=(j < left)[:, None], cache_modifier=".cg")
        if j * 64 % BLOCK == 0:
            first = gl.load(upper_at + j * 64 // BLOCK, mask=j < left).to(gl.int32)
            second = gl.load(lower_at + j * 64 // BLOCK, mask=j < left).to(gl.int32)
        out = out + (words, first, second)
    return out


@gluon.jit
def scale_of(byte):
    """Value of a scale byte, fp32: 4 bits of exponent, 4 of mantissa; byte 0 is 0."""
    return gl.where(byte == 0, 0, (byte + (120 << 4)) << 19).to(gl.float32, bitcast=True)


@gluon.jit
def sums_of_tiles(
    program, code_ptr, scale_ptr, x_ptr, starts, N, groups, stop,
    K_WARPS: gl.constexpr, UNROLL: gl.constexpr, BLOCK: gl.constexpr, WHOLE: gl.constexpr,
):  # fmt: skip
    """For each group of 8 tokens, fp32 [threads, 4] of 16 rows by a warp's part of K.

    starts: int64 [threads], the words of x_ptr that the tokens' rotated inputs begin at. stop: groups, or 0.
    WHOLE: groups are a multiple of K_WARPS * UNROLL. Lanes without a row compute another one's.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [K_WARPS, 1], [1, 0])
    STEP: gl.constexpr = K_WARPS * UNROLL
    TOKEN_GROUPS: gl.constexpr = len(starts)
    thread = gl.arange(0, 32 * K_WARPS, layout=gl.SliceLayout(1, LAYOUT))
    four = gl.arange(0, 4, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    lane = thread % 32
    row = program * 16 + lane // 4
    group = (thread // 32) * UNROLL
    left = stop - group
    # the lane's low bytes, those of the lane before, and both words of upper bits
    within = gl.where(four == 1, ((lane + 31) % 32)[:, None], lane[:, None] + 32 * gl.maximum(four - 1, 0))
    code_at = code_ptr + (program.to(gl.int64) * groups * 96 + ((group * 96)[:, None] + within))
    upper_at = scale_ptr + (gl.minimum(row, N - 1).to(gl.int64) * (groups * 64 // BLOCK) + group * 64 // BLOCK)
    lower_at = scale_ptr + (gl.minimum(row + 8, N - 1).to(gl.int64) * (groups * 64 // BLOCK) + group * 64 // BLOCK)
    zero = gl.zeros((32 * K_WARPS, 4), gl.float32, layout=LAYOUT)
    loaded = load_groups(code_at, upper_at, lower_at, left, UNROLL, BLOCK)
    sums = ()
    x_at = ()
    for n in gl.static_range(TOKEN_GROUPS):
        sums = sums + (zero,)
        word = starts[n] + (group * 32 + lane % 4 * 8)
        x_at = x_at + (x_ptr.to(gl.pointer_type(gl.int32)) + (gl.multiple_of(word[:, None], (4, 4)) + four),)
    for _ in range((stop + STEP - 1) // STEP):
        code_at += STEP * 96
        upper_at += STEP * 64 // BLOCK
        lower_at += STEP * 64 // BLOCK
        ahead = load_groups(code_at, upper_at, lower_at, left - STEP, UNROLL, BLOCK)
        totals = sums  # of a block
        for j in gl.static_range(UNROLL):
            a = gl.inline_asm_elementwise(
                DECODE,
                DECODE_REGISTERS,
                [loaded[3 * j]],
                dtype=(gl.int32, gl.int32, gl.int32, gl.int32),
                is_pure=True,
                pack=4,
            )
            before, totals = totals, ()
            for n in gl.static_range(TOKEN_GROUPS):
                at = x_at[n] + j * 32
                if WHOLE:
                    low, high = gl.load(at), gl.load(at + 4)
                else:
                    inside = (j < left)[:, None]
                    low, high = gl.load(at, mask=inside, other=0), gl.load(at + 4, mask=inside, other=0)
                total = gl.inline_asm_elementwise(
                    MULTIPLY,
                    MULTIPLY_REGISTERS,
                    [a[0], a[1], a[2], a[3], low, high, zero if j * 64 % BLOCK == 0 else before[n]],
                    dtype=gl.float32,
                    is_pure=True,
                    pack=4,
                )
                totals = totals + (total,)
            if (j + 1) * 64 % BLOCK == 0 or j + 1 == UNROLL:
                scale = gl.where(four < 2, scale_of(loaded[3 * j + 1])[:, None], scale_of(loaded[3 * j + 2])[:, None])
                added = ()
                for n in gl.static_range(TOKEN_GROUPS):
                    added = added + (sums[n] + totals[n] * scale,)
                sums = added
        loaded = ahead
        left = left - STEP
        moved = ()
        for n in gl.static_range(TOKEN_GROUPS):
            moved = moved + (x_at[n] + STEP * 32,)
        x_at = moved
    return sums


@gluon.jit(do_not_specialize=["M", "N", "groups", "y_stride"])
def linear_kernel(
    x_ptr,
    code_ptr,
    scale_ptr,
    unit_ptr,
    bias_ptr,
    y_ptr,
    M,
    N,
    groups,
    y_stride,
    TOKEN_GROUPS: gl.constexpr,
    K_WARPS: gl.constexpr,
    UNROLL: gl.constexpr,
    BLOCK: gl.constexpr,
    ACTIVATION: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    WHOLE: gl.constexpr,
):
    """y [M, N] = activation(x [M, K] @ w.T + bias), grid (ceil(N / 16),), K_WARPS warps that split K.

    x_ptr: bf16 [M, 64 groups], rotated and in the order of `linear.rotation`; TOKEN_GROUPS groups of 8 tokens cover M.
    code_ptr: int32 [ceil(N / 16), 96 groups]; scale_ptr: bytes [N, 64 groups / BLOCK]; unit_ptr: fp32 [1].
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [K_WARPS, 1], [1, 0])
    token = gl.arange(0, 32 * K_WARPS, layout=gl.SliceLayout(1, LAYOUT)) % 32 // 4
    starts = ()
    for n in gl.static_range(TOKEN_GROUPS):
        # lanes without a token compute another one's
        starts = starts + (gl.minimum(n * 8 + token, M - 1).to(gl.int64) * groups * 32,)
    program = gl.program_id(0)
    sums = sums_of_tiles(program, code_ptr, scale_ptr, x_ptr, starts, N, groups, groups, K_WARPS, UNROLL, BLOCK, WHOLE)
    out_row, out_token = places(program, 1, TOKEN_GROUPS, out_layout(K_WARPS))
    v = sum_over_warps(sums, 0, TOKEN_GROUPS, K_WARPS) * gl.load(unit_ptr)
    if HAS_BIAS:
        v = v + gl.load(bias_ptr + out_row, mask=out_row < N, other=0.0).to(gl.float32)
    v = activate(v, ACTIVATION, y_ptr.dtype.element_ty)
    keep = (out_row < N) & (out_token < M)
    gl.store(y_ptr + out_token.to(gl.int64) * y_stride + out_row, v.to(y_ptr.dtype.element_ty), mask=keep)


@gluon.jit(do_not_specialize=["P", "E", "N", "groups", "code_at", "scale_at", "unit_at"])
def experts_kernel(
    x_ptr,
    id_ptr,
    order_ptr,
    bound_ptr,
    expert_ptr,
    first_ptr,
    address_ptr,
    bias_ptr,
    y_ptr,
    P,
    E,
    N,
    groups,
    code_at,
    scale_at,
    unit_at,
    GROUPED: gl.constexpr,
    TOKEN_GROUPS: gl.constexpr,
    TERMS: gl.constexpr,
    K_WARPS: gl.constexpr,
    UNROLL: gl.constexpr,
    BLOCK: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    WHOLE: gl.constexpr,
):
    """y fp32 [P, N] = W x + b of each pair (token, expert); zeros for sentinels.

    Grid (ceil(N / 16), blocks of pairs). GROUPED: pairs are sorted by expert (`pairs.Groups`); otherwise each is a
    block of its own. x_ptr: bf16 [TERMS, P, 64 groups], rotated (`decode_triton.rotate_pairs_kernel`), the sum of
    TERMS. W is in its expert's page, whose address a table has; code_at and the like: bytes from there on.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [K_WARPS, 1], [1, 0])
    first = gl.program_id(1)
    if GROUPED:
        expert = gl.load(expert_ptr + first)
    else:
        expert = gl.load(id_ptr + first).to(gl.int32)
    if not GROUPED or expert >= 0:  # a block without pairs has nothing to do
        count = 1
        if GROUPED:
            behind = gl.load(bound_ptr + expert + 1)
            first = gl.load(first_ptr + first)
            count = gl.minimum(behind - first, 8 * TOKEN_GROUPS)
        there = (expert >= 0) & (expert < E)
        address = gl.load(address_ptr + expert, mask=there, other=0)
        code_ptr = (address + code_at).to(gl.pointer_type(gl.int32))
        scale_ptr = (address + scale_at).to(gl.pointer_type(gl.uint8))
        token = gl.arange(0, 32 * K_WARPS, layout=gl.SliceLayout(1, LAYOUT)) % 32 // 4
        starts = ()
        for n in gl.static_range(TOKEN_GROUPS):
            pair = first + gl.minimum(n * 8 + token, count - 1)
            if GROUPED:
                pair = gl.load(order_ptr + pair)
            for term in gl.static_range(TERMS):
                starts = starts + ((pair.to(gl.int64) + term * P.to(gl.int64)) * groups * 32,)
        program = gl.program_id(0)
        stop = gl.where(there, groups, 0)
        terms = sums_of_tiles(
            program, code_ptr, scale_ptr, x_ptr, starts, N, groups, stop, K_WARPS, UNROLL, BLOCK, WHOLE
        )
        sums = ()
        for n in gl.static_range(TOKEN_GROUPS):
            total = terms[n * TERMS]
            for term in gl.static_range(1, TERMS):
                total = total + terms[n * TERMS + term]
            sums = sums + (total,)
        out_row, slot = places(program, 1, TOKEN_GROUPS, out_layout(K_WARPS))
        unit = gl.load((address + unit_at).to(gl.pointer_type(gl.float32)), mask=there, other=0.0)
        v = sum_over_warps(sums, 0, TOKEN_GROUPS, K_WARPS) * unit
        if HAS_BIAS:
            at = bias_ptr + expert.to(gl.int64) * N + out_row
            v = v + gl.load(at, mask=(out_row < N) & there, other=0.0).to(gl.float32)
        keep = (out_row < N) & (slot < count)
        pair = first + slot
        if GROUPED:
            pair = gl.load(order_ptr + pair, mask=keep, other=0)
        gl.store(y_ptr + pair.to(gl.int64) * N + out_row, v, mask=keep)
