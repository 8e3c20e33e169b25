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

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from vbrt.kernels.cuda.e2m1.narrow_gluon import activate, out_layout, sum_over_warps

__all__ = ["experts_kernel", "linear_kernel"]


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


@gluon.constexpr_function
def blocks_of_step(UNROLL, BLOCK):
    """Blocks of a row in UNROLL groups of 64 columns; 1 if all of them are in one."""
    return max(1, 64 * UNROLL // BLOCK)


@gluon.constexpr_function
def vector_layout(SIZE, K_WARPS):
    """[threads, SIZE], all of a row in one thread."""
    return gl.BlockedLayout([1, SIZE], [32, 1], [K_WARPS, 1], [1, 0])


@gluon.jit
def halves_of(v):
    """The first and the second half of a thread's numbers [threads, 4 or more]."""
    SIZE: gl.constexpr = v.shape[1]
    K_WARPS: gl.constexpr = v.shape[0] // 32
    first, second = gl.split(gl.permute(gl.reshape(v, (v.shape[0], 2, SIZE // 2)), (0, 2, 1)))
    HALF: gl.constexpr = vector_layout(SIZE // 2, K_WARPS)
    return gl.convert_layout(first, HALF, assert_trivial=True), gl.convert_layout(second, HALF, assert_trivial=True)


@gluon.jit
def numbers_of(v, OWN: gl.constexpr):
    """A thread's numbers, [threads] each, in the layout of one per thread."""
    SIZE: gl.constexpr = v.shape[1]
    if SIZE == 1:
        out = (gl.convert_layout(gl.reshape(v, (v.shape[0],)), OWN, assert_trivial=True),)
    elif SIZE == 2:
        first, second = gl.split(v)
        first = gl.convert_layout(first, OWN, assert_trivial=True)
        out = (first, gl.convert_layout(second, OWN, assert_trivial=True))
    else:
        first, second = halves_of(v)
        out = numbers_of(first, OWN) + numbers_of(second, OWN)
    return out


@gluon.jit
def load_vector(pointer, wanted, SIZE: gl.constexpr, BYTES: gl.constexpr, CACHE: gl.constexpr):
    """[threads, SIZE] from each thread's pointer on, whose address is a multiple of BYTES; zeros where not wanted."""
    V: gl.constexpr = vector_layout(SIZE, pointer.shape[0] // 32)
    OF_ROWS: gl.constexpr = gl.SliceLayout(1, V)
    pointer = gl.multiple_of(gl.convert_layout(pointer, OF_ROWS, assert_trivial=True), BYTES)
    wanted = gl.convert_layout(wanted, OF_ROWS, assert_trivial=True)
    at = pointer[:, None] + gl.arange(0, SIZE, layout=gl.SliceLayout(0, V))[None, :]
    return gl.load(at, mask=wanted[:, None], other=0, cache_modifier=CACHE)


@gluon.jit
def load_terms(pointer, inside, left, COUNT: gl.constexpr, WHOLE: gl.constexpr):
    """COUNT stored terms, bytes as words; zeros where not inside, and from the number that is left on."""
    OWN: gl.constexpr = pointer.type.layout
    SIZE: gl.constexpr = pointer.dtype.element_ty.primitive_bitwidth // 8
    if WHOLE:
        out = numbers_of(load_vector(pointer, inside, COUNT, COUNT * SIZE, ""), OWN)
    else:
        out = ()
        for i in gl.static_range(COUNT):
            out = out + (gl.load(pointer + i, mask=inside & (i < left), other=0),)
    return out


@gluon.jit
def load_codes(pointer, inside, left, UNROLL: gl.constexpr, BLOCK: gl.constexpr, WHOLE: gl.constexpr):
    """Two words of codes, [threads, 2], of each of UNROLL groups of 64 columns; zeros outside. left: blocks."""
    LAYOUT: gl.constexpr = pointer.type.layout.parent
    two = gl.arange(0, 2, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    out = ()
    if BLOCK >= 128:
        for u in gl.static_range(UNROLL // 2):
            wanted = inside & (u * 128 // BLOCK < left)
            first, second = halves_of(load_vector(pointer + 16 * u, wanted, 4, 16, ".cg"))
            out = out + (gl.convert_layout(first, LAYOUT, assert_trivial=True),)
            out = out + (gl.convert_layout(second, LAYOUT, assert_trivial=True),)
    else:
        for j in gl.static_range(UNROLL):
            if BLOCK == 64:
                wanted = inside if WHOLE else inside & (j < left)
                at = gl.multiple_of(pointer + 8 * j, 8)[:, None] + two
                out = out + (gl.load(at, mask=wanted[:, None], other=0, cache_modifier=".cg"),)
            elif BLOCK == 32:
                # lanes have a quarter of a block each, so two of these loads share a sector: it stays in L1
                wanted = inside[:, None] & (two < 2) if WHOLE else inside[:, None] & (2 * j + two < left[:, None])
                out = out + (gl.load((pointer + 8 * j)[:, None] + 4 * two, mask=wanted, other=0),)
            else:
                at = pointer[:, None].to(gl.pointer_type(gl.int16)) + (16 * j + 8 * two)
                wanted = inside[:, None] & (4 * j + 2 * two < left[:, None])
                low = gl.load(at, mask=wanted, other=0)
                wanted = inside[:, None] & (4 * j + 2 * two + 1 < left[:, None])
                high = gl.load(at + 4, mask=wanted, other=0)
                out = out + ((low.to(gl.int32) & 0xFFFF) | (high.to(gl.int32) << 16),)
    return out


@gluon.jit
def load_row(row, inside, left, UNROLL: gl.constexpr, BLOCK: gl.constexpr, OFFSETS: gl.constexpr, WHOLE: gl.constexpr):
    """(codes, terms) of UNROLL groups of 64 columns: scales as stored, then offsets, then those of superblocks.

    row: pointers [threads] to codes, scales, offsets and superblocks' fp16 numbers of both, from a thread's first
    column on. Triton 3.6 loses the names of named tuples within a tuple.
    """
    COUNT: gl.constexpr = blocks_of_step(UNROLL, BLOCK)
    code_ptr, block_ptr, offset_ptr, large_ptr, least_ptr = row
    codes = load_codes(code_ptr, inside, left, UNROLL, BLOCK, WHOLE)
    terms = load_terms(block_ptr, inside, left, COUNT, WHOLE)
    if OFFSETS != "none":
        terms = terms + load_terms(offset_ptr, inside, left, COUNT, WHOLE)
    if OFFSETS == "superblock":
        terms = terms + (gl.load(large_ptr, mask=inside, other=0), gl.load(least_ptr, mask=inside, other=0))
    return codes, terms


@gluon.jit
def scale_of(stored):
    """A block scale in fp32: as it is, or of a UE4M4 byte, of which 1920 = (127 - 7) << 4 makes an exponent."""
    if stored.dtype == gl.uint8:
        word = stored.to(gl.int32)
        return gl.where(word > 0, ((word + 1920) << 19).to(gl.float32, bitcast=True), 0.0)
    else:
        return stored.to(gl.float32)


@gluon.jit
def terms_of(stored, j: gl.constexpr, BLOCK: gl.constexpr, UNROLL: gl.constexpr, OFFSETS: gl.constexpr):
    """Scales, fp32 [threads, 1], of the chains of group j; with OFFSETS then the factors of their sums of x."""
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
def load_scale(block_ptr, at, mask):
    """A block scale as stored, a byte as a word; zero out of bounds."""
    stored = gl.load(block_ptr + at, mask=mask, other=0)
    return stored.to(gl.int32) if block_ptr.dtype.element_ty == gl.uint8 else stored


@gluon.jit
def load_tokens(pointer, wanted, j: gl.constexpr, left, BLOCK: gl.constexpr, K_TAIL: gl.constexpr):
    """B operands of group j's four instructions, [threads, 2] each. left: columns of x from the thread's first on."""
    LAYOUT: gl.constexpr = pointer.type.layout.parent
    # words from the thread's first on: of this group, and between its loads
    FIRST: gl.constexpr = j // 2 * 64 + j % 2 * 8 if BLOCK >= 128 else 32 * j
    SIZE: gl.constexpr = 2 if BLOCK == 16 else 4
    APART: gl.constexpr = 4 if BLOCK >= 64 else (16 if BLOCK == 32 else 8)
    out = ()
    for i in gl.static_range(8 // SIZE):
        there = wanted & (2 * (FIRST + i * APART) < left) if K_TAIL else wanted
        v = load_vector(pointer + (FIRST + i * APART), there, SIZE, 4 * SIZE, "")
        if SIZE == 4:
            first, second = halves_of(v)
            out = out + (gl.convert_layout(first, LAYOUT, assert_trivial=True),)
            out = out + (gl.convert_layout(second, LAYOUT, assert_trivial=True),)
        else:
            out = out + (gl.convert_layout(v, LAYOUT, assert_trivial=True),)
    return out


@gluon.jit
def moved(row, STEP: gl.constexpr, BLOCK: gl.constexpr):
    """A row from STEP groups of 64 columns later on."""
    CODES: gl.constexpr = STEP * (16 if BLOCK == 16 else 8)
    BLOCKS: gl.constexpr = STEP * 64 // BLOCK
    codes, scales, offsets, supers, leasts = row
    return codes + CODES, scales + BLOCKS, offsets + BLOCKS, supers + STEP // 4, leasts + STEP // 4


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
def added_products(upper, lower, a, x, terms_g, terms_h, CHAINS: gl.constexpr, OFFSETS: gl.constexpr):
    """Sums of rows g and of rows g + 8, plus those of four instructions times their blocks' scales, and offsets."""
    s = gl.inline_asm_elementwise(
        MULTIPLY if CHAINS == 1 else (MULTIPLY_2 if CHAINS == 2 else MULTIPLY_4),
        MULTIPLY_REGISTERS if CHAINS == 1 else (MULTIPLY_2_REGISTERS if CHAINS == 2 else MULTIPLY_4_REGISTERS),
        a + x,
        dtype=(gl.float32, gl.float32) * CHAINS,
        is_pure=True,
        pack=2,
    )
    if OFFSETS == "none":
        u = s[0] * terms_g[0]
        v = s[1] * terms_h[0]
        for chain in gl.static_range(1, CHAINS):
            u += s[2 * chain] * terms_g[chain]
            v += s[2 * chain + 1] * terms_h[chain]
        upper += u
        lower += v
    else:
        total = sums_of_tokens(x, CHAINS)
        for chain in gl.static_range(CHAINS):
            upper += s[2 * chain] * terms_g[chain]
            lower += s[2 * chain + 1] * terms_h[chain]
            upper += total[chain] * terms_g[CHAINS + chain]
            lower += total[chain] * terms_h[CHAINS + chain]
    return upper, lower


@gluon.jit
def start_of(thread, K_WARPS: gl.constexpr, UNROLL: gl.constexpr, BLOCK: gl.constexpr):
    """A thread's first (group of 64 columns, block, column)."""
    OF_X: gl.constexpr = 2 if BLOCK == 16 else words_of_lane(BLOCK) * 4
    group = (thread // 32) * UNROLL
    block = group // (BLOCK // 64) if BLOCK >= 64 else group * (64 // BLOCK)
    return group, block, group * 64 + thread % 4 * (2 * OF_X)


@gluon.constexpr_function
def words_of_lane(BLOCK):
    """Words of codes that a lane has together."""
    return 4 if BLOCK >= 128 else (2 if BLOCK == 64 else 1)


@gluon.jit
def row_of(
    row, code_ptr, block_ptr, offset_ptr, scale_ptr, least_ptr, thread, blocks,
    K_WARPS: gl.constexpr, UNROLL: gl.constexpr, BLOCK: gl.constexpr,
):  # fmt: skip
    """A row's pointers, see `load_row`."""
    group, first_block, _column = start_of(thread, K_WARPS, UNROLL, BLOCK)
    t = thread % 4
    if BLOCK == 16:
        codes = code_ptr.to(gl.pointer_type(gl.int16)) + (row * (4 * blocks) + group * 16 + t)
    else:
        codes = code_ptr + (row * (blocks * (BLOCK // 8)) + group * 8 + t * words_of_lane(BLOCK))
    block = row * blocks + first_block
    large = row * ((blocks * BLOCK + 255) // 256) + group // 4
    return codes, block_ptr + block, offset_ptr + block, scale_ptr + large, least_ptr + large


@gluon.jit
def sums_of_rows(
    row_g, row_h, xs, present, table, thread, blocks, K,
    K_WARPS: gl.constexpr, UNROLL: gl.constexpr, BLOCK: gl.constexpr, OFFSETS: gl.constexpr, WHOLE: gl.constexpr,
    K_TAIL: gl.constexpr,
):  # fmt: skip
    """A warp's part of x times rows g and g + 8, per 8 tokens: [threads, 4], row halves by 2 tokens.

    xs: pointers to the thread's first columns of a token's row, per group of 8 tokens; present: lanes with a token.
    table: bytes of levels, eight words. No blocks: zeros, nothing is read.
    """
    CHAINS: gl.constexpr = 64 // BLOCK if BLOCK < 64 else 1
    STEP: gl.constexpr = K_WARPS * UNROLL
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 2], [32, 1], [K_WARPS, 1], [1, 0])
    groups = (blocks * BLOCK + 63) // 64
    group, first_block, column = start_of(thread, K_WARPS, UNROLL, BLOCK)
    inside = group < groups
    left = blocks - first_block
    upper = load_row(row_g, inside, left, UNROLL, BLOCK, OFFSETS, WHOLE)
    lower = load_row(row_h, inside, left, UNROLL, BLOCK, OFFSETS, WHOLE)
    uppers = ()  # sums of rows g, per token group
    lowers = ()  # of rows g + 8
    for _ in gl.static_range(len(xs)):
        uppers = uppers + (gl.zeros((32 * K_WARPS, 2), gl.float32, layout=LAYOUT),)
        lowers = lowers + (gl.zeros((32 * K_WARPS, 2), gl.float32, layout=LAYOUT),)
    for _ in range((groups + STEP - 1) // STEP):
        row_g = moved(row_g, STEP, BLOCK)
        row_h = moved(row_h, STEP, BLOCK)
        left = left - STEP * 64 // BLOCK
        ahead = group + STEP < groups
        next_upper = load_row(row_g, ahead, left, UNROLL, BLOCK, OFFSETS, WHOLE)
        next_lower = load_row(row_h, ahead, left, UNROLL, BLOCK, OFFSETS, WHOLE)
        for j in gl.static_range(UNROLL):
            a = gl.inline_asm_elementwise(
                DECODE if OFFSETS == "none" else DECODE_CODES,
                DECODE_REGISTERS if OFFSETS == "none" else DECODE_CODES_REGISTERS,
                (upper[0][j], lower[0][j]) + table,
                dtype=(gl.int32, gl.int32, gl.int32, gl.int32, gl.int32, gl.int32, gl.int32, gl.int32),
                is_pure=True,
                pack=2,
            )
            terms_g = terms_of(upper[1], j, BLOCK, UNROLL, OFFSETS)
            terms_h = terms_of(lower[1], j, BLOCK, UNROLL, OFFSETS)
            added_uppers = ()
            added_lowers = ()
            for n in gl.static_range(len(xs)):
                wanted = present[n] & (inside if WHOLE else group + j < groups)
                x = load_tokens(xs[n], wanted, j, K - column, BLOCK, K_TAIL)
                u, v = added_products(uppers[n], lowers[n], a, x, terms_g, terms_h, CHAINS, OFFSETS)
                added_uppers = added_uppers + (u,)
                added_lowers = added_lowers + (v,)
            uppers = added_uppers
            lowers = added_lowers
        upper = next_upper
        lower = next_lower
        inside = ahead
        group = group + STEP
        column = column + 64 * STEP
        moved_xs = ()
        for n in gl.static_range(len(xs)):
            moved_xs = moved_xs + (xs[n] + 32 * STEP,)
        xs = moved_xs
    WIDE: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [K_WARPS, 1], [1, 0])
    sums = ()
    for n in gl.static_range(len(xs)):
        both = gl.permute(gl.join(uppers[n], lowers[n]), (0, 2, 1))  # [threads, row half, token]
        sums = sums + (gl.convert_layout(gl.reshape(both, (32 * K_WARPS, 4)), WIDE),)
    return sums


@gluon.jit
def places(TOKEN_GROUPS: gl.constexpr, K_WARPS: gl.constexpr):
    """(row, token) of each number in the layout of `sum_over_warps`."""
    OUT: gl.constexpr = out_layout(K_WARPS)
    tokens = gl.arange(0, TOKEN_GROUPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, OUT)))[:, None][:, :, None]
    place = gl.arange(0, 32, layout=gl.SliceLayout(0, gl.SliceLayout(2, OUT)))[None, :][:, :, None]
    four = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, OUT)))[None, :][:, None, :]
    return gl.program_id(0) * 16 + place // 4 + 8 * (four // 2), tokens * 8 + 2 * (place % 4) + four % 2


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
    WHOLE: gl.constexpr,
    K_TAIL: gl.constexpr,
    ACTIVATION: gl.constexpr,
    HAS_BIAS: gl.constexpr,
):
    """y [M, N] = activation(x [M, K] @ w.T + bias), grid (ceil(N / 16),), K_WARPS warps that split K.

    x is bf16, its rows 16-byte aligned; TOKEN_GROUPS groups of 8 tokens cover M. K_TAIL: K is less than the columns of
    all groups, which may end behind the last block. WHOLE: rows of codes end with a step of UNROLL groups.
    block_ptr: scales [N, blocks] of BLOCK columns each: floats, UE4M4 bytes with scale_ptr's tensor scale, or bytes of
    superblocks, whose numbers are scale_ptr's and least_ptr's. offset_ptr: [N, blocks], see OFFSETS above.
    """
    BYTES: gl.constexpr = OFFSETS == "none" and block_ptr.dtype.element_ty == gl.uint8
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 2], [32, 1], [K_WARPS, 1], [1, 0])
    thread = gl.arange(0, 32 * K_WARPS, layout=gl.SliceLayout(1, LAYOUT))
    eighth = thread % 32 // 4
    row = gl.program_id(0) * 16 + eighth  # beyond the last row it is the last one again, and not stored
    row_g = row_of(
        gl.minimum(row, N - 1), code_ptr, block_ptr, offset_ptr, scale_ptr, least_ptr, thread, blocks,
        K_WARPS, UNROLL, BLOCK,
    )  # fmt: skip
    row_h = row_of(
        gl.minimum(row + 8, N - 1), code_ptr, block_ptr, offset_ptr, scale_ptr, least_ptr, thread, blocks,
        K_WARPS, UNROLL, BLOCK,
    )  # fmt: skip
    _group, _block, column = start_of(thread, K_WARPS, UNROLL, BLOCK)
    xs = ()
    present = ()
    for n in gl.static_range(TOKEN_GROUPS):
        token = n * 8 + eighth
        xs = xs + (x_ptr.to(gl.pointer_type(gl.int32)) + (token * (x_stride // 2) + column // 2),)
        present = present + (token < M,)
    lows = ()
    highs = ()
    if OFFSETS == "none":
        blank = gl.zeros((32 * K_WARPS, 2), gl.int32, layout=LAYOUT)
        for quarter in gl.static_range(4):
            low, high = level_bytes(level_ptr, 4 * quarter, SIGNED)
            lows = lows + (blank + low,)
            highs = highs + (blank + high,)
    sums = sums_of_rows(
        row_g, row_h, xs, present, lows + highs, thread, blocks, K,
        K_WARPS, UNROLL, BLOCK, OFFSETS, WHOLE, K_TAIL,
    )  # fmt: skip
    out_row, out_token = places(TOKEN_GROUPS, K_WARPS)
    v = sum_over_warps(sums, 0, TOKEN_GROUPS, K_WARPS)
    if BYTES:
        v = v * gl.load(scale_ptr)
    keep = (out_row < N) & (out_token < M)
    if HAS_BIAS:
        v = v + gl.load(bias_ptr + out_row, mask=out_row < N, other=0.0).to(gl.float32)
    v = activate(v, ACTIVATION, y_ptr.dtype.element_ty)
    gl.store(y_ptr + out_token.to(gl.int64) * y_stride + out_row, v.to(y_ptr.dtype.element_ty), mask=keep)


@gluon.constexpr_function
def pointer_to(TYPE):
    """Pointer type of a dtype by name."""
    return gl.pointer_type(getattr(gl, TYPE))


@gluon.jit(
    do_not_specialize=[
        "E", "N", "K", "blocks", "pairs_per_row", "x_stride", "code_at", "block_at", "offset_at", "scale_at",
        "least_at",
    ]
)  # fmt: skip
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
    E,
    N,
    K,
    blocks,
    pairs_per_row,
    x_stride,
    code_at,
    block_at,
    scale_at,
    offset_at,
    least_at,
    GROUPED: gl.constexpr,
    TOKEN_GROUPS: gl.constexpr,
    K_WARPS: gl.constexpr,
    UNROLL: gl.constexpr,
    BLOCK: gl.constexpr,
    OFFSETS: gl.constexpr,
    SCALES: gl.constexpr,
    WHOLE: gl.constexpr,
    K_TAIL: gl.constexpr,
    HAS_BIAS: gl.constexpr,
):
    """y [P, N] = W x + b of each pair (token, expert), from row pair // pairs_per_row of x; zeros for sentinels.

    Grid (ceil(N / 16), blocks of pairs). GROUPED: pairs are sorted by expert (`pairs.Groups`); otherwise each is a
    block of its own. W is in its expert's page, whose address a table has; code_at and the like: bytes from there on.
    SCALES: dtype of scales, and of offsets if they are values. Only codes with offsets.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 2], [32, 1], [K_WARPS, 1], [1, 0])
    TERM: gl.constexpr = pointer_to(SCALES)
    OFFSET: gl.constexpr = pointer_to(SCALES if OFFSETS == "values" else "uint8")
    LARGE: gl.constexpr = pointer_to("float16")
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
        stop = gl.where(there, blocks, 0)
        code_ptr = (address + code_at).to(gl.pointer_type(gl.int32))
        block_ptr = (address + block_at).to(TERM)
        offset_ptr = (address + offset_at).to(OFFSET)
        scale_ptr = (address + scale_at).to(LARGE)
        least_ptr = (address + least_at).to(LARGE)
        thread = gl.arange(0, 32 * K_WARPS, layout=gl.SliceLayout(1, LAYOUT))
        eighth = thread % 32 // 4
        row = gl.program_id(0) * 16 + eighth
        row_g = row_of(
            gl.minimum(row, N - 1), code_ptr, block_ptr, offset_ptr, scale_ptr, least_ptr, thread, blocks,
            K_WARPS, UNROLL, BLOCK,
        )  # fmt: skip
        row_h = row_of(
            gl.minimum(row + 8, N - 1), code_ptr, block_ptr, offset_ptr, scale_ptr, least_ptr, thread, blocks,
            K_WARPS, UNROLL, BLOCK,
        )  # fmt: skip
        _group, _block, column = start_of(thread, K_WARPS, UNROLL, BLOCK)
        xs = ()
        present = ()
        for n in gl.static_range(TOKEN_GROUPS):
            own = n * 8 + eighth
            wanted = (own < count) & there
            own = first + own
            if GROUPED:
                own = gl.load(order_ptr + own, mask=wanted, other=0)
            at = (own // pairs_per_row).to(gl.int64) * (x_stride // 2) + column // 2
            xs = xs + (x_ptr.to(gl.pointer_type(gl.int32)) + at,)
            present = present + (wanted,)
        sums = sums_of_rows(
            row_g, row_h, xs, present, (), thread, stop, K,
            K_WARPS, UNROLL, BLOCK, OFFSETS, WHOLE, K_TAIL,
        )  # fmt: skip
        out_row, slot = places(TOKEN_GROUPS, K_WARPS)
        v = sum_over_warps(sums, 0, TOKEN_GROUPS, K_WARPS)
        if HAS_BIAS:
            at = bias_ptr + expert.to(gl.int64) * N + out_row
            v = v + gl.load(at, mask=(out_row < N) & there, other=0.0).to(gl.float32)
        keep = (out_row < N) & (slot < count)
        pair = first + slot
        if GROUPED:
            pair = gl.load(order_ptr + pair, mask=keep, other=0)
        gl.store(y_ptr + pair.to(gl.int64) * N + out_row, v, mask=keep)
