"""Fused Gluon kernel of `linear`: 4-bit codes of rows into the mma operand. Importing needs Triton.

It reads the plain coarse plane, 64 columns at a time. Lane l = 4 g + t of a warp owns rows g and g + 8 and, of each
group of 64 columns, those from 16 t on: 8 bytes of codes per row, of which four `mma.sync.m16n8k16` take 4 columns
each. So all columns of an instruction are in one block, and its scale multiplies the sums instead of the weights. With
blocks of 32 or 16 columns lane t owns 8 or 4: the four instructions then form two or four chains, each with its scale.

Codes of a table: the 16 levels, rounded to bf16, are in eight registers as bytes. `prmt` looks up four codes at once
among eight bytes: twice for the low and twice for the high bytes, bit 3 of the codes selects between the two, and two
more interleave them: eleven instructions for four weights.

Codes with an offset (OFFSETS): a code in the low bits of bf16's 128 is 128 + code, exact, for four and a half
instructions for four weights. The block's term is scale * (sum of (128 + code) x) + (offset - 128 * scale) * (sum of
x): an A operand of ones gives the sums of x in the registers that have the block's other sums, once for all 16 rows.
A scale and an offset are stored as

    none          a scale, of a table; there is no offset
    values        numbers of one dtype
    zeros         a scale, and a code as a byte: offset = -zero * scale
    superblock    bytes, times an fp16 number per 256 columns
"""

# ruff: noqa: RUF005  # the kernel language has no starred expressions

from collections import namedtuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from vbrt.kernels.cuda.e2m1.narrow_gluon import activate, out_layout, sum_over_warps

__all__ = ["linear_kernel"]


def _decode_assembly() -> str:
    """Words $16, $17 (row g) and $18, $19 (row g + 8) to the A operands of four instructions: operand o of instruction
    i in register 4 o + i. Low bytes of the levels in $20, $22, $24, $26, high bytes in $28, $30, $32, $34."""
    lines = ["{ .reg .b32 s, q, a, b, c, d;"]
    for row in range(2):
        for word in range(2):
            source = f"${16 + 2 * row + word}"
            lines.append(f"and.b32 s, {source}, 0x77777777; shr.u32 q, {source}, 1; and.b32 q, q, 0x44444444;")
            for half in range(2):
                if half:
                    lines.append("shr.u32 s, s, 16; shr.u32 q, q, 16;")
                instruction = 2 * word + half
                lines += [
                    "prmt.b32 a, $20, $22, s; prmt.b32 b, $24, $26, s; or.b32 d, q, 0x3210; prmt.b32 a, a, b, d;",
                    "prmt.b32 b, $28, $30, s; prmt.b32 c, $32, $34, s; prmt.b32 b, b, c, d;",
                    f"prmt.b32 ${4 * row + instruction}, a, b, 0x5140;",
                    f"prmt.b32 ${4 * (2 + row) + instruction}, a, b, 0x7362;",
                ]
    return " ".join([*lines, "}"])


def _multiply_assembly(chains: int) -> str:
    """Four instructions in chains, each with its own sums: the first $0..$3 = A, which follow all sums, in the order 4
    * operand + instruction, times B, which follow A: 2 * instruction, + 1."""
    lines, each, base = ["{ .reg .f32 z; mov.f32 z, 0f00000000;"], 4 // chains, 4 * chains
    for i in range(4):
        sums = ", ".join(f"${4 * (i // each) + j}" for j in range(4))
        source = sums if i % each else "z, z, z, z"
        a = ", ".join(f"${base + 4 * operand + i}" for operand in range(4))
        lines.append(
            f"mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {{{sums}}}, {{{a}}}, "
            f"{{${base + 16 + 2 * i}, ${base + 17 + 2 * i}}}, {{{source}}};"
        )
    return " ".join([*lines, "}"])


def _code_assembly() -> str:
    """The same words to the same operands, 128 + code instead of a level.

    Odd codes come from a copy that is shifted by 4, so that both halves of an operand have theirs in the low bits.
    """
    lines = ["{ .reg .b32 h, v;"]
    for row in range(2):
        for word in range(2):
            source = f"${16 + 2 * row + word}"
            lines.append(f"shr.u32 h, {source}, 4;")
            for byte in range(4):
                out = 4 * (2 * (byte % 2) + row) + 2 * word + byte // 2
                lines.append(
                    f"prmt.b32 v, {source}, h, {0x0400 + 0x1111 * byte:#06x}; "
                    f"lop3.b32 ${out}, v, 0x000F000F, 0x43004300, 0xEA;"
                )
    return " ".join([*lines, "}"])


def _sums_assembly(chains: int) -> str:
    """Sums of x of four instructions, in chains, for two tokens each: $0.. from B, which follows them."""
    each, base = 4 // chains, 2 * chains
    lines = ["{ .reg .f32 z, u, v; .reg .b32 one; mov.f32 z, 0f00000000; mov.b32 one, 0x3F803F80;"]
    for i in range(4):
        sums = f"${2 * (i // each)}, ${2 * (i // each) + 1}, u, v"
        lines.append(
            f"mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {{{sums}}}, {{one, one, one, one}}, "
            f"{{${base + 2 * i}, ${base + 1 + 2 * i}}}, {{{sums if i % each else 'z, z, z, z'}}};"
        )
    return " ".join([*lines, "}"])


DECODE = gl.constexpr(_decode_assembly())
DECODE_REGISTERS = gl.constexpr(",".join(["=&r"] * 16) + ",r" * 20)
DECODE_CODES = gl.constexpr(_code_assembly())
DECODE_CODES_REGISTERS = gl.constexpr(",".join(["=&r"] * 16) + ",r" * 4)
SUMS = gl.constexpr(_sums_assembly(1))
SUMS_2 = gl.constexpr(_sums_assembly(2))
SUMS_4 = gl.constexpr(_sums_assembly(4))
SUMS_REGISTERS = gl.constexpr(",".join(["=&f"] * 2) + ",r" * 8)
SUMS_2_REGISTERS = gl.constexpr(",".join(["=&f"] * 4) + ",r" * 8)
SUMS_4_REGISTERS = gl.constexpr(",".join(["=&f"] * 8) + ",r" * 8)
MULTIPLY = gl.constexpr(_multiply_assembly(1))
MULTIPLY_REGISTERS = gl.constexpr("=&f,=&f,=&f,=&f" + ",r" * 24)
MULTIPLY_2 = gl.constexpr(_multiply_assembly(2))
MULTIPLY_2_REGISTERS = gl.constexpr(",".join(["=&f"] * 8) + ",r" * 24)
MULTIPLY_4 = gl.constexpr(_multiply_assembly(4))
MULTIPLY_4_REGISTERS = gl.constexpr(",".join(["=&f"] * 16) + ",r" * 24)

#: codes of N rows and what is stored of their blocks, groups of 64 columns and blocks in a row; super_ptr, least_ptr: of
#: scales and offsets of superblocks
Plane = namedtuple("Plane", "code_ptr block_ptr offset_ptr super_ptr least_ptr N groups blocks")


@gluon.jit
def level_bytes(level_ptr, first: gl.constexpr, SIGNED: gl.constexpr):
    """(low bytes, high bytes) of levels first .. first + 3 in bf16. SIGNED: 8 magnitudes, then their negatives."""
    low = 0
    high = 0
    for i in gl.static_range(4):
        level = gl.load(level_ptr + ((first + i) % 8 if SIGNED else first + i))
        if SIGNED and first >= 8:
            level = -level
        bits = level.to(gl.bfloat16).to(gl.int16, bitcast=True).to(gl.int32)
        low = low | ((bits & 255) << (8 * i))
        high = high | (((bits >> 8) & 255) << (8 * i))
    return low, high


@gluon.jit
def load_codes(code_ptr, row, group, blocks, t, wanted, LAYOUT: gl.constexpr, BLOCK: gl.constexpr):
    """For rows of blocks of less than 64 columns: the two words of codes that lane t owns of a group, [threads, 2]."""
    two = gl.arange(0, 2, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    if BLOCK == 32:
        at = (row * (4 * blocks) + group * 8 + t)[:, None] + 4 * two
        mask = wanted[:, None] & ((group * 2)[:, None] + two < blocks)
        return gl.load(code_ptr + at, mask=mask, other=0, cache_modifier=".cg")
    else:
        halves = code_ptr.to(gl.pointer_type(gl.int16))
        at = (row * (4 * blocks) + group * 16 + t)[:, None] + 8 * two
        first = (group * 4)[:, None] + 2 * two
        low = gl.load(halves + at, mask=wanted[:, None] & (first < blocks), other=0, cache_modifier=".cg")
        mask = wanted[:, None] & (first + 1 < blocks)
        high = gl.load(halves + at + 4, mask=mask, other=0, cache_modifier=".cg")
        return (low.to(gl.int32) & 0xFFFF) | (high.to(gl.int32) << 16)


@gluon.jit
def load_scale(block_ptr, at, mask):
    """A block scale as stored, a byte as a word; zero out of bounds."""
    stored = gl.load(block_ptr + at, mask=mask, other=0)
    return stored.to(gl.int32) if block_ptr.dtype.element_ty == gl.uint8 else stored


@gluon.constexpr_function
def blocks_of_step(UNROLL, BLOCK):
    """Blocks of a row in UNROLL groups of 64 columns; 1 if all of them are in one."""
    return max(1, 64 * UNROLL // BLOCK)


@gluon.jit
def load_terms(plane, row, group, UNROLL: gl.constexpr, BLOCK: gl.constexpr, OFFSETS: gl.constexpr):
    """Scales of the blocks of UNROLL groups of 64 columns of a row as stored, then their offsets; zeros outside."""
    COUNT: gl.constexpr = blocks_of_step(UNROLL, BLOCK)
    first = group // (BLOCK // 64) if BLOCK > 64 else group * (64 // BLOCK)
    out = ()
    for i in gl.static_range(COUNT):
        there = (row < plane.N) & (first + i < plane.blocks)
        out = out + (load_scale(plane.block_ptr, row * plane.blocks + first + i, there),)
    if OFFSETS != "none":
        for i in gl.static_range(COUNT):
            there = (row < plane.N) & (first + i < plane.blocks)
            out = out + (load_scale(plane.offset_ptr, row * plane.blocks + first + i, there),)
    if OFFSETS == "superblock":
        there = (row < plane.N) & (group < plane.groups)
        at = row * ((plane.groups + 3) // 4) + group // 4
        out = out + (load_scale(plane.super_ptr, at, there), load_scale(plane.least_ptr, at, there))
    return out


@gluon.jit
def load_blocks(
    plane, row, group, t, LAYOUT: gl.constexpr, UNROLL: gl.constexpr, BLOCK: gl.constexpr, OFFSETS: gl.constexpr
):
    """(codes, terms) of UNROLL groups of 64 columns: codes of row and row + 8 for each group, terms of both rows."""
    two = gl.arange(0, 2, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    codes = ()
    for j in gl.static_range(UNROLL):
        for half in gl.static_range(2):
            own = row + 8 * half
            wanted = (own < plane.N) & (group + j < plane.groups)
            if BLOCK >= 64:
                at = gl.multiple_of(((own * plane.groups + group + j) * 8 + t * 2)[:, None], (2, 2)) + two
                codes = codes + (gl.load(plane.code_ptr + at, mask=wanted[:, None], other=0, cache_modifier=".cg"),)
            else:
                codes = codes + (load_codes(plane.code_ptr, own, group + j, plane.blocks, t, wanted, LAYOUT, BLOCK),)
    upper = load_terms(plane, row, group, UNROLL, BLOCK, OFFSETS)
    return codes, upper, load_terms(plane, row + 8, group, UNROLL, BLOCK, OFFSETS)


@gluon.jit
def scale_of(stored):
    """A block scale in fp32: as it is, or of a UE4M4 byte, of which 1920 = (127 - 7) << 4 makes an exponent."""
    if stored.dtype == gl.int32:
        return gl.where(stored > 0, ((stored + 1920) << 19).to(gl.float32, bitcast=True), 0.0)
    else:
        return stored.to(gl.float32)


@gluon.jit
def terms_of(stored, j: gl.constexpr, BLOCK: gl.constexpr, UNROLL: gl.constexpr, OFFSETS: gl.constexpr):
    """Scales, fp32 [threads, 1], of the chains of group j; with OFFSETS then what their sums of x are multiplied with."""
    COUNT: gl.constexpr = blocks_of_step(UNROLL, BLOCK)
    CHAINS: gl.constexpr = 64 // BLOCK if BLOCK < 64 else 1
    FIRST: gl.constexpr = 64 * j // BLOCK
    scales = ()
    offsets = ()
    for chain in gl.static_range(CHAINS):
        if OFFSETS == "superblock":
            scale = stored[2 * COUNT].to(gl.float32) * stored[FIRST + chain].to(gl.float32)
            offset = -(stored[2 * COUNT + 1].to(gl.float32) * stored[COUNT + FIRST + chain].to(gl.float32))
        else:
            scale = scale_of(stored[FIRST + chain])
            if OFFSETS == "zeros":
                offset = -(stored[COUNT + FIRST + chain].to(gl.float32) * scale)
            elif OFFSETS == "values":
                offset = stored[COUNT + FIRST + chain].to(gl.float32)
        scales = scales + (scale[:, None],)
        if OFFSETS != "none":
            offsets = offsets + ((offset - 128.0 * scale)[:, None],)
    return scales + offsets


@gluon.jit
def sums_of_tokens(x, CHAINS: gl.constexpr):
    """Sums of x over the columns of each chain, for the two tokens that a lane has."""
    s = gl.inline_asm_elementwise(
        SUMS if CHAINS == 1 else (SUMS_2 if CHAINS == 2 else SUMS_4),
        SUMS_REGISTERS if CHAINS == 1 else (SUMS_2_REGISTERS if CHAINS == 2 else SUMS_4_REGISTERS),
        x,
        dtype=(gl.float32,) * CHAINS if CHAINS > 1 else gl.float32,
        is_pure=True,
        pack=2,
    )
    return s if CHAINS > 1 else (s,)


@gluon.jit
def multiplied(a, x, terms_g, terms_h, CHAINS: gl.constexpr, OFFSETS: gl.constexpr):
    """Sums of four instructions times their blocks' scales, and offsets: for row g, for row g + 8."""
    s = gl.inline_asm_elementwise(
        MULTIPLY if CHAINS == 1 else (MULTIPLY_2 if CHAINS == 2 else MULTIPLY_4),
        MULTIPLY_REGISTERS if CHAINS == 1 else (MULTIPLY_2_REGISTERS if CHAINS == 2 else MULTIPLY_4_REGISTERS),
        a + x,
        dtype=(gl.float32, gl.float32) * CHAINS,
        is_pure=True,
        pack=2,
    )
    upper = s[0] * terms_g[0]
    lower = s[1] * terms_h[0]
    for chain in gl.static_range(1, CHAINS):
        upper += s[2 * chain] * terms_g[chain]
        lower += s[2 * chain + 1] * terms_h[chain]
    if OFFSETS != "none":
        total = sums_of_tokens(x, CHAINS)
        for chain in gl.static_range(CHAINS):
            upper += total[chain] * terms_g[CHAINS + chain]
            lower += total[chain] * terms_h[CHAINS + chain]
    return upper, lower


@gluon.jit(do_not_specialize=["M", "N", "blocks"])
def linear_kernel(
    x_ptr,
    code_ptr,
    block_ptr,
    level_ptr,
    scale_ptr,
    offset_ptr,
    least_ptr,
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
    BLOCK: gl.constexpr,
    SIGNED: gl.constexpr,
    OFFSETS: gl.constexpr,
    K_TAIL: gl.constexpr,
    ACTIVATION: gl.constexpr,
    HAS_BIAS: gl.constexpr,
):
    """y [M, N] = activation(x [M, K] @ w.T + bias), grid (ceil(N / 16),), K_WARPS warps that split K.

    x is bf16, its rows 16-byte aligned; TOKEN_GROUPS groups of 8 tokens cover M. K_TAIL: K ends within the last group.
    block_ptr: scales [N, blocks] of BLOCK columns each: floats, UE4M4 bytes with scale_ptr's tensor scale, or bytes of
    superblocks, whose numbers are scale_ptr's and least_ptr's. offset_ptr: [N, blocks], see OFFSETS above.
    """
    BYTES: gl.constexpr = OFFSETS == "none" and block_ptr.dtype.element_ty == gl.uint8
    CHAINS: gl.constexpr = 64 // BLOCK if BLOCK < 64 else 1
    if BLOCK > 64:
        groups = blocks * (BLOCK // 64)
    elif BLOCK < 64:
        groups = (blocks + CHAINS - 1) // CHAINS
    else:
        groups = blocks
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 2], [32, 1], [K_WARPS, 1], [1, 0])
    thread = gl.arange(0, 32 * K_WARPS, layout=gl.SliceLayout(1, LAYOUT))
    two = gl.arange(0, 2, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    lane = thread % 32
    t = lane % 4
    row = gl.program_id(0) * 16 + lane // 4
    group = (thread // 32) * UNROLL
    x_words = x_ptr.to(gl.pointer_type(gl.int32))
    zero = gl.zeros((32 * K_WARPS, 2), gl.float32, layout=LAYOUT)
    blank = gl.zeros((32 * K_WARPS, 2), gl.int32, layout=LAYOUT)
    plane = Plane(code_ptr, block_ptr, offset_ptr, scale_ptr, least_ptr, N, groups, blocks)
    tiles = load_blocks(plane, row, group, t, LAYOUT, UNROLL, BLOCK, OFFSETS)
    lows = ()
    highs = ()
    if OFFSETS == "none":
        for quarter in gl.static_range(4):
            low, high = level_bytes(level_ptr, 4 * quarter, SIGNED)
            lows = lows + (blank + low,)
            highs = highs + (blank + high,)
    uppers = ()  # sums of rows g, per token group
    lowers = ()  # of rows g + 8
    for _ in gl.static_range(TOKEN_GROUPS):
        uppers = uppers + (zero,)
        lowers = lowers + (zero,)
    STEP: gl.constexpr = K_WARPS * UNROLL
    for _ in range((groups + STEP - 1) // STEP):
        ahead = load_blocks(plane, row, group + STEP, t, LAYOUT, UNROLL, BLOCK, OFFSETS)
        for j in gl.static_range(UNROLL):
            a = gl.inline_asm_elementwise(
                DECODE if OFFSETS == "none" else DECODE_CODES,
                DECODE_REGISTERS if OFFSETS == "none" else DECODE_CODES_REGISTERS,
                (tiles[0][2 * j], tiles[0][2 * j + 1]) + lows + highs,
                dtype=(gl.int32, gl.int32, gl.int32, gl.int32, gl.int32, gl.int32, gl.int32, gl.int32),
                is_pure=True,
                pack=2,
            )
            terms_g = terms_of(tiles[1], j, BLOCK, UNROLL, OFFSETS)
            terms_h = terms_of(tiles[2], j, BLOCK, UNROLL, OFFSETS)
            added_uppers = ()
            added_lowers = ()
            for n in gl.static_range(TOKEN_GROUPS):
                token = n * 8 + lane // 4
                x = ()
                for part in gl.static_range(4):
                    offset = (group + j) * 32 + t * (8 // CHAINS) + part // (4 // CHAINS) * (32 // CHAINS)
                    offset = offset + part % (4 // CHAINS) * 2
                    wanted = (token < M) & (group + j < groups)
                    if K_TAIL:
                        wanted = wanted & (offset * 2 < K)
                    offset = offset + token * (x_stride // 2)
                    at = gl.multiple_of(offset[:, None], (2, 2)) + two
                    x = x + (gl.load(x_words + at, mask=wanted[:, None], other=0),)
                upper, lower = multiplied(a, x, terms_g, terms_h, CHAINS, OFFSETS)
                added_uppers = added_uppers + (uppers[n] + upper,)
                added_lowers = added_lowers + (lowers[n] + lower,)
            uppers = added_uppers
            lowers = added_lowers
        tiles = ahead
        group = group + STEP
    WIDE: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [K_WARPS, 1], [1, 0])
    sums = ()
    for n in gl.static_range(TOKEN_GROUPS):
        both = gl.permute(gl.join(uppers[n], lowers[n]), (0, 2, 1))  # [threads, row half, token]
        sums = sums + (gl.convert_layout(gl.reshape(both, (32 * K_WARPS, 4)), WIDE),)
    OUT: gl.constexpr = out_layout(K_WARPS)
    tokens = gl.arange(0, TOKEN_GROUPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, OUT)))[:, None][:, :, None]
    place = gl.arange(0, 32, layout=gl.SliceLayout(0, gl.SliceLayout(2, OUT)))[None, :][:, :, None]
    four = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, OUT)))[None, :][:, None, :]
    out_row = gl.program_id(0) * 16 + place // 4 + 8 * (four // 2)
    out_token = tokens * 8 + 2 * (place % 4) + four % 2
    v = sum_over_warps(sums, 0, TOKEN_GROUPS, K_WARPS)
    if BYTES:
        v = v * gl.load(scale_ptr)
    keep = (out_row < N) & (out_token < M)
    if HAS_BIAS:
        v = v + gl.load(bias_ptr + out_row, mask=out_row < N, other=0.0).to(gl.float32)
    v = activate(v, ACTIVATION, y_ptr.dtype.element_ty)
    gl.store(y_ptr + out_token.to(gl.int64) * y_stride + out_row, v.to(y_ptr.dtype.element_ty), mask=keep)
