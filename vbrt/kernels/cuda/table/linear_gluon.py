"""Fused Gluon kernel of `linear`: 4-bit codes of rows into the mma operand. Importing needs Triton.

It reads the plain coarse plane, 128 columns at a time, while the next ones load. Lane l = 4 g + t of a warp owns rows g
and g + 8 of each tile and, of blocks of 128 columns, those from 32 t on: 16 bytes of codes per row, of which eight
`mma.sync.m16n8k16` take 4 columns each. So all columns of an instruction are in one block, and its scale multiplies the
sums instead of the weights. With blocks of 64, 32 or 16 columns lane t owns 16, 8 or 4 of each: the instructions then
form two, four or eight chains, each with its scale. What bounds the kernel on an H200 are rows: a load of a warp is of
eight, as many cache lines, however few bytes of each.

SPREAD, for one or two tokens and blocks of 32 or 64 columns: lane t has 32 adjacent columns instead, 16 bytes a row, so
an instruction has columns of four places. Its eight B columns keep them apart: token n // 4 has, of x, those of lane
n % 4, and zeros. Each sum of eight instructions then has its block's scale, and the four of a token are added at last.

Codes of a table: the 16 levels, rounded to bf16, are in eight registers as bytes. `prmt` looks up four codes at once
among eight bytes: twice for the low and twice for the high bytes, bit 3 of the codes selects between the two, and two
more interleave them: eleven instructions for four weights.

Codes with an offset (OFFSETS): a code in the low bits of bf16's 128 is 128 + code, exact, for four and a half
instructions for four weights. The block's term is scale * (sum of (128 + code) x) + (offset - 128 * scale) * (sum of
x): an A operand of ones gives the sums of x in the registers that have the block's other sums, once for all 16 rows.
A scale and an offset are stored as

    none          a scale, of a table; there is no offset
    middle        a scale: offset = -8 * scale
    values        numbers of one dtype
    middles       numbers of one dtype, weights of code 8: offset = number - 8 * scale, rounded to fp32 as sums are
    zeros         a scale, and a code as a byte: offset = -zero * scale
    superblock    bytes, times an fp16 number per 256 columns
"""

# ruff: noqa: RUF005  # the kernel language has no starred expressions

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from vbrt.kernels.cuda.e2m1.narrow_gluon import (
    activate,
    allow_launch_after,
    out_layout,
    places,
    sum_over_warps,
    wait_for_launch_before,
)

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


def _multiply_assembly(chains: int, *, more: bool = False) -> str:
    """Four instructions in chains, each with its own sums: the first $0..$3 = A, which follow all sums, in the order 4
    * operand + instruction, times B, which follow A: 2 * instruction, + 1. more: plus the sums that follow B."""
    lines, each, base = ["{ .reg .f32 z; mov.f32 z, 0f00000000;"], 4 // chains, 4 * chains
    first = ", ".join(f"${base + 24 + j}" for j in range(4)) if more else "z, z, z, z"
    for i in range(4):
        sums = ", ".join(f"${4 * (i // each) + j}" for j in range(4))
        source = sums if i % each else first
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


def _sums_assembly(chains: int, *, more: bool = False) -> str:
    """Sums of x of four instructions, in chains, for two tokens each: $0.. from B, which follows them; plus those that
    follow B."""
    each, base = 4 // chains, 2 * chains
    first = f"${base + 8}, ${base + 9}, z, z" if more else "z, z, z, z"
    lines = ["{ .reg .f32 z, u, v; .reg .b32 one; mov.f32 z, 0f00000000; mov.b32 one, 0x3F803F80;"]
    for i in range(4):
        sums = f"${2 * (i // each)}, ${2 * (i // each) + 1}, u, v"
        lines.append(
            f"mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {{{sums}}}, {{one, one, one, one}}, "
            f"{{${base + 2 * i}, ${base + 1 + 2 * i}}}, {{{sums if i % each else first}}};"
        )
    return " ".join([*lines, "}"])


DECODE = gl.constexpr(_decode_assembly())
DECODE_REGISTERS = gl.constexpr(",".join(["=&r"] * 16) + ",r" * 20)
DECODE_CODES = gl.constexpr(_code_assembly())
DECODE_CODES_REGISTERS = gl.constexpr(",".join(["=&r"] * 16) + ",r" * 4)
SUMS = gl.constexpr(_sums_assembly(1))
SUMS_2 = gl.constexpr(_sums_assembly(2))
SUMS_4 = gl.constexpr(_sums_assembly(4))
MORE_SUMS = gl.constexpr(_sums_assembly(1, more=True))
MORE_SUMS_REGISTERS = gl.constexpr("=&f,=&f" + ",r" * 8 + ",f" * 2)
SUMS_REGISTERS = gl.constexpr(",".join(["=&f"] * 2) + ",r" * 8)
SUMS_2_REGISTERS = gl.constexpr(",".join(["=&f"] * 4) + ",r" * 8)
SUMS_4_REGISTERS = gl.constexpr(",".join(["=&f"] * 8) + ",r" * 8)
MULTIPLY = gl.constexpr(_multiply_assembly(1))
MULTIPLY_REGISTERS = gl.constexpr("=&f,=&f,=&f,=&f" + ",r" * 24)
MULTIPLY_MORE = gl.constexpr(_multiply_assembly(1, more=True))
MULTIPLY_MORE_REGISTERS = gl.constexpr("=&f,=&f,=&f,=&f" + ",r" * 24 + ",f" * 4)
MULTIPLY_2 = gl.constexpr(_multiply_assembly(2))
MULTIPLY_2_REGISTERS = gl.constexpr(",".join(["=&f"] * 8) + ",r" * 24)
MULTIPLY_4 = gl.constexpr(_multiply_assembly(4))
MULTIPLY_4_REGISTERS = gl.constexpr(",".join(["=&f"] * 16) + ",r" * 24)


@gluon.jit
def level_bytes(level_ptr, first: gl.constexpr, SIGNED: gl.constexpr, there=True, SUMMAND: gl.constexpr = 0):
    """(low bytes, high bytes) of levels first .. first + 3 in bf16. SIGNED: 8 magnitudes, then their negatives.

    SUMMAND: of the bf16 numbers that add up to a level, this one. Zeros where not there.
    """
    low = 0
    high = 0
    for i in gl.static_range(4):
        level = gl.load(level_ptr + ((first + i) % 8 if SIGNED else first + i), mask=there, other=0.0)
        if SIGNED and first >= 8:
            level = -level
        for _ in gl.static_range(SUMMAND):
            level = level - level.to(gl.bfloat16).to(gl.float32)
        bits = level.to(gl.bfloat16).to(gl.int16, bitcast=True).to(gl.int32)
        low = low | ((bits & 255) << (8 * i))
        high = high | (((bits >> 8) & 255) << (8 * i))
    return low, high


@gluon.jit
def table_of(
    level_ptr, OFFSETS: gl.constexpr, SIGNED: gl.constexpr, there, SUMMAND: gl.constexpr, LAYOUT: gl.constexpr
):
    """Bytes of 16 levels for `sums_of_rows`, see `level_bytes`; () for codes with offsets."""
    lows = ()
    highs = ()
    if OFFSETS == "none":
        blank = gl.zeros((LAYOUT.warps_per_cta[0] * 32, 2), gl.int32, layout=LAYOUT)
        for quarter in gl.static_range(4):
            low, high = level_bytes(level_ptr, 4 * quarter, SIGNED, there, SUMMAND)
            lows = lows + (blank + low,)
            highs = highs + (blank + high,)
    return lows + highs


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
def load_words(pointer, wanted, BYTES: gl.constexpr):
    """Words [threads] of BYTES stored bytes from each thread's pointer on; zeros where not wanted."""
    OWN: gl.constexpr = pointer.type.layout
    if BYTES >= 4:
        words = numbers_of(
            load_vector(pointer.to(gl.pointer_type(gl.int32)), wanted, BYTES // 4, min(BYTES, 16), ""), OWN
        )
    else:
        TYPE: gl.constexpr = gl.int16 if BYTES == 2 else gl.int8
        words = (gl.load(pointer.to(gl.pointer_type(TYPE)), mask=wanted, other=0).to(gl.int32),)
    return words


@gluon.jit
def number_of(bits, TYPE: gl.constexpr):
    """A stored number in fp32, of a word's lowest bits. A byte is the end of 2^23 + byte's mantissa: a conversion would
    take a slower unit."""
    if TYPE == gl.uint8:
        return ((bits & 0xFF) | 0x4B000000).to(gl.float32, bitcast=True) - 8388608.0
    elif TYPE == gl.float32:
        return bits.to(gl.float32, bitcast=True)
    else:
        return bits.to(gl.int16).to(TYPE, bitcast=True).to(gl.float32)


@gluon.jit
def scale_of(bits, TYPE: gl.constexpr, OFFSETS: gl.constexpr):
    """A block scale in fp32, see `number_of`; of a table a byte is UE4M4: 1920 = (127 - 7) << 4 makes an exponent."""
    if TYPE == gl.uint8 and OFFSETS == "none":
        word = bits & 0xFF
        return gl.where(word > 0, ((word + 1920) << 19).to(gl.float32, bitcast=True), 0.0)
    else:
        return number_of(bits, TYPE)


@gluon.jit
def bits_at(words, INDEX: gl.constexpr, SIZE: gl.constexpr):
    """Stored number INDEX, of SIZE bytes, in the lowest bits."""
    SHIFT: gl.constexpr = INDEX * SIZE % 4 * 8
    word = words[INDEX * SIZE // 4]
    return word >> SHIFT if SHIFT else word


@gluon.constexpr_function
def size_of(TYPE):
    """Bytes of a number."""
    return TYPE.primitive_bitwidth // 8


@gluon.jit
def bits_of(words, index: gl.constexpr, SIZE: gl.constexpr, PAIR: gl.constexpr):
    """Bits of a block's stored number, [threads, 1]; PAIR: of blocks index and index + 1, [threads, 2]."""
    bits = bits_at(words, index, SIZE)
    if PAIR:
        LAYOUT: gl.constexpr = vector_layout(2, bits.shape[0] // 32)
        return gl.convert_layout(gl.join(bits, bits_at(words, index + 1, SIZE)), LAYOUT)
    else:
        return bits[:, None]


@gluon.jit
def terms_of(
    stored, index: gl.constexpr,
    CHAINS: gl.constexpr, TYPE: gl.constexpr, OFFSET: gl.constexpr, OFFSETS: gl.constexpr, PAIR: gl.constexpr,
):  # fmt: skip
    """Scales, fp32 [threads, 1], of blocks index .. index + CHAINS; with OFFSETS then the factors of their sums of x.

    stored: see `load_stored`. PAIR: of the two blocks of a lane's two sums instead, [threads, 2].
    """
    ZERO: gl.constexpr = 136.0 if OFFSETS == "middles" else 128.0  # of 128 + code
    scales = ()
    offsets = ()
    for chain in gl.static_range(CHAINS):
        scale = scale_of(bits_of(stored[0], index + chain, size_of(TYPE), PAIR), TYPE, OFFSETS)
        if OFFSETS == "middle":
            offset = -8.0 * scale
        elif OFFSETS != "none":
            offset = number_of(bits_of(stored[1], index + chain, size_of(OFFSET), PAIR), OFFSET)
        if OFFSETS == "superblock":
            scale = number_of(stored[2][0], gl.float16)[:, None] * scale
            offset = -(number_of(stored[3][0], gl.float16)[:, None] * offset)
        elif OFFSETS == "zeros":
            offset = -(offset * scale)
        scales = scales + (scale,)
        if OFFSETS != "none":
            offsets = offsets + (offset - ZERO * scale,)
    return scales + offsets


@gluon.jit
def load_numbers(pointer, inside, left, COUNT: gl.constexpr, RAGGED: gl.constexpr):
    """Words of COUNT stored numbers; zeros where not inside. RAGGED: read one by one, zeros from number left on."""
    TYPE: gl.constexpr = pointer.dtype.element_ty
    if RAGGED:
        BITS: gl.constexpr = gl.int32 if size_of(TYPE) == 4 else (gl.uint16 if size_of(TYPE) == 2 else gl.uint8)
        OF_WORD: gl.constexpr = min(4 // size_of(TYPE), COUNT)
        out = ()
        for i in gl.static_range(COUNT // OF_WORD):
            word = gl.zeros_like(left)
            for j in gl.static_range(OF_WORD):
                wanted = inside & (i * OF_WORD + j < left)
                bits = gl.load(pointer.to(gl.pointer_type(BITS)) + (i * OF_WORD + j), mask=wanted, other=0)
                word = word | (bits.to(gl.int32) << (8 * size_of(TYPE) * j))
            out = out + (word,)
    else:
        out = load_words(pointer, inside, COUNT * size_of(TYPE))
    return out


@gluon.jit
def load_stored(
    row, inside, left, FIRST: gl.constexpr, COUNT: gl.constexpr, OFFSETS: gl.constexpr, RAGGED: gl.constexpr
):
    """Words of a row's scales of COUNT blocks from FIRST on, of their offsets, and of superblocks' numbers of both."""
    _codes, block_ptr, offset_ptr, large_ptr, least_ptr = row
    out = (load_numbers(block_ptr + FIRST, inside, left - FIRST, COUNT, RAGGED),)
    if OFFSETS != "none" and OFFSETS != "middle":
        out = out + (load_numbers(offset_ptr + FIRST, inside, left - FIRST, COUNT, RAGGED),)
    if OFFSETS == "superblock":
        out = out + (load_words(large_ptr, inside, 2), load_words(least_ptr, inside, 2))
    return out


@gluon.jit
def load_unit(pointer, inside, left, BLOCK: gl.constexpr, BYTES: gl.constexpr, RAGGED: gl.constexpr):
    """Two words of codes, [threads, 2], of each of two groups of 64 columns; zeros where not inside or, RAGGED, from
    block left on."""
    LAYOUT: gl.constexpr = vector_layout(2, pointer.shape[0] // 32)
    OF_ROWS: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    two = gl.arange(0, 2, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    if BYTES == 16:
        first, second = halves_of(load_vector(pointer, inside, 4, 16, ".cg"))
        first = gl.convert_layout(first, LAYOUT, assert_trivial=True)
        second = gl.convert_layout(second, LAYOUT, assert_trivial=True)
        return first, second
    else:
        pointer = gl.convert_layout(pointer, OF_ROWS, assert_trivial=True)
        inside = gl.convert_layout(inside, OF_ROWS, assert_trivial=True)
        left = gl.convert_layout(left, OF_ROWS, assert_trivial=True)
        out = ()
        for j in gl.static_range(2):
            if BYTES == 8:
                wanted = inside & (j < left) if RAGGED else inside
                at = gl.multiple_of(pointer + 8 * j, 8)[:, None] + two
                out = out + (gl.load(at, mask=wanted[:, None], other=0, cache_modifier=".cg"),)
            elif BYTES == 4:
                # lanes have a quarter of a block each, so two of these loads share a sector: it stays in L1
                wanted = inside[:, None] & (2 * j + two < left[:, None]) if RAGGED else inside[:, None] & (two < 2)
                out = out + (gl.load((pointer + 8 * j)[:, None] + 4 * two, mask=wanted, other=0),)
            else:
                at = pointer[:, None] + (16 * j + 8 * two)
                wanted = inside[:, None] & (4 * j + 2 * two < left[:, None])
                low = gl.load(at, mask=wanted, other=0)
                wanted = inside[:, None] & (4 * j + 2 * two + 1 < left[:, None])
                high = gl.load(at + 4, mask=wanted, other=0)
                out = out + ((low.to(gl.int32) & 0xFFFF) | (high.to(gl.int32) << 16),)
        return out[0], out[1]


@gluon.jit
def load_scale(block_ptr, at, mask):
    """A block scale as stored, a byte as a word; zero out of bounds."""
    stored = gl.load(block_ptr + at, mask=mask, other=0)
    return stored.to(gl.int32) if block_ptr.dtype.element_ty == gl.uint8 else stored


@gluon.jit
def load_tokens(pointer, wanted, j: gl.constexpr, left, BYTES: gl.constexpr, K_TAIL: gl.constexpr):
    """B operands of group j's four instructions, [threads, 2] each. left: columns of x from the thread's first on."""
    LAYOUT: gl.constexpr = pointer.type.layout.parent
    # words from the thread's first on: of this group, and between its loads
    FIRST: gl.constexpr = j // 2 * 64 + j % 2 * 8 if BYTES == 16 else 32 * j
    SIZE: gl.constexpr = 2 if BYTES == 2 else 4
    APART: gl.constexpr = 4 if BYTES >= 8 else (16 if BYTES == 4 else 8)
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
    """A row from STEP times 128 columns later on."""
    BLOCKS: gl.constexpr = STEP * 128 // BLOCK
    WORDS: gl.constexpr = STEP * (32 if BLOCK == 16 else 16)  # of two or four bytes
    codes, scales, offsets, supers, leasts = row
    return codes + WORDS, scales + BLOCKS, offsets + BLOCKS, supers + STEP // 2, leasts + STEP // 2


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
def added_products(upper, lower, a, x, totals, terms_g, terms_h, CHAINS: gl.constexpr, OFFSETS: gl.constexpr):
    """Sums of rows g and of rows g + 8, plus those of four instructions times their blocks' scales, and offsets times
    totals, the sums of x."""
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
        for chain in gl.static_range(CHAINS):
            upper += s[2 * chain] * terms_g[chain]
            lower += s[2 * chain + 1] * terms_h[chain]
            upper += totals[chain] * terms_g[CHAINS + chain]
            lower += totals[chain] * terms_h[CHAINS + chain]
    return upper, lower


@gluon.jit
def start_of(thread, BLOCK: gl.constexpr, BYTES: gl.constexpr):
    """A thread's first (128 columns, block, column)."""
    unit = thread // 32
    return unit, unit * (128 // BLOCK), unit * 128 + thread % 4 * (2 * BYTES)


@gluon.constexpr_function
def bytes_of_lane(BLOCK, SPREAD):
    """Bytes of codes that a lane has together."""
    return 16 if BLOCK >= 128 or SPREAD else BLOCK // 8


@gluon.jit
def rows_of(
    N, code_ptr, block_ptr, offset_ptr, scale_ptr, least_ptr, thread, blocks,
    ROW_TILES: gl.constexpr, BLOCK: gl.constexpr, SPREAD: gl.constexpr,
):  # fmt: skip
    """Pointers [threads] of rows g and g + 8 of each tile of the program's, to codes, scales, offsets and superblocks'
    fp16 numbers of both, from a thread's first column on. Beyond the last row it is the last one again.

    Triton 3.6 loses the names of named tuples within a tuple.
    """
    BYTES: gl.constexpr = bytes_of_lane(BLOCK, SPREAD)
    unit, first_block, _column = start_of(thread, BLOCK, BYTES)
    t = thread % 4
    out = ()
    for half in gl.static_range(2 * ROW_TILES):
        row = gl.minimum(gl.program_id(0) * (16 * ROW_TILES) + 8 * half + thread % 32 // 4, N - 1)
        if BYTES == 2:
            codes = code_ptr.to(gl.pointer_type(gl.int16)) + (row * (4 * blocks) + unit * 32 + t)
        else:
            codes = code_ptr + (row * (blocks * (BLOCK // 8)) + unit * 16 + t * (BYTES // 4))
        block = row * blocks + first_block
        if SPREAD:
            block = block + t % 2 * (64 // BLOCK)
        large = row * ((blocks * BLOCK + 255) // 256) + unit // 2
        out = out + ((codes, block_ptr + block, offset_ptr + block, scale_ptr + large, least_ptr + large),)
    return out


@gluon.jit
def products(a, x, more):
    """Sums of rows g and of rows g + 8 of four instructions, plus more unless ()."""
    if len(more) == 0:
        s = gl.inline_asm_elementwise(
            MULTIPLY, MULTIPLY_REGISTERS, a + x, dtype=(gl.float32, gl.float32), is_pure=True, pack=2
        )
    else:
        s = gl.inline_asm_elementwise(
            MULTIPLY_MORE, MULTIPLY_MORE_REGISTERS, a + x + more, dtype=(gl.float32, gl.float32), is_pure=True, pack=2
        )
    return s


@gluon.jit
def more_totals(x, more):
    """Sums of x of four instructions for the two tokens that a lane has, plus more unless ()."""
    if len(more) == 0:
        s = gl.inline_asm_elementwise(SUMS, SUMS_REGISTERS, x, dtype=gl.float32, is_pure=True, pack=2)
    else:
        s = gl.inline_asm_elementwise(MORE_SUMS, MORE_SUMS_REGISTERS, x + more, dtype=gl.float32, is_pure=True, pack=2)
    return (s,)


@gluon.jit
def from_lane(v, APART: gl.constexpr):
    """The numbers of the lane whose number differs in that bit."""
    return gl.inline_asm_elementwise(
        "shfl.sync.bfly.b32 $0, $1, 1, 31, -1;" if APART == 1 else "shfl.sync.bfly.b32 $0, $1, 2, 31, -1;",
        "=f,f",
        [v],
        dtype=gl.float32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def sums_of_spread(v):
    """SPREAD: a row's sums of both tokens, [threads, 2], in lanes of t = 0, where products have them."""
    first, second = gl.split(v)
    own = first + second
    own = own + from_lane(own, 1)
    return gl.convert_layout(gl.join(own, from_lane(own, 2)), v.type.layout)


@gluon.jit
def decoded(upper, lower, table, OFFSETS: gl.constexpr):
    """A operands of four instructions from two words of codes of rows g and of rows g + 8."""
    return gl.inline_asm_elementwise(
        DECODE if OFFSETS == "none" else DECODE_CODES,
        DECODE_REGISTERS if OFFSETS == "none" else DECODE_CODES_REGISTERS,
        (upper, lower) + table,
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32, gl.int32, gl.int32, gl.int32, gl.int32),
        is_pure=True,
        pack=2,
    )


@gluon.jit
def sums_of_rows(
    rows, xs, present, table, thread, blocks, K,
    ROW_TILES: gl.constexpr, K_WARPS: gl.constexpr, BLOCK: gl.constexpr, OFFSETS: gl.constexpr,
    RAGGED: gl.constexpr, K_TAIL: gl.constexpr, SPREAD: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    """A warp's part of x times the rows of `rows_of`: [threads, 4], row halves by 2 tokens, of each tile for the first
    8 tokens, then for the next.

    xs: pointers to the thread's first columns of a token's row, per group of 8 tokens; present: lanes with a token.
    table: bytes of levels, eight words. No blocks: zeros, nothing is read.
    """
    CHAINS: gl.constexpr = 64 // BLOCK if BLOCK < 64 and not SPREAD else 1
    JOINED: gl.constexpr = BLOCK >= 128 or SPREAD  # all of a lane's 32 columns have a scale
    BYTES: gl.constexpr = bytes_of_lane(BLOCK, SPREAD)
    PAIR: gl.constexpr = SPREAD and BLOCK == 32
    COUNT: gl.constexpr = (64 if SPREAD else 128) // BLOCK
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 2], [32, 1], [K_WARPS, 1], [1, 0])
    TYPE: gl.constexpr = rows[0][1].dtype.element_ty
    OFFSET: gl.constexpr = rows[0][2].dtype.element_ty
    units = (blocks * BLOCK + 127) // 128
    unit, first_block, column = start_of(thread, BLOCK, BYTES)
    inside = unit < units
    left = blocks - first_block
    codes = ()
    stored = ()
    for r in gl.static_range(2 * ROW_TILES):
        codes = codes + (load_unit(rows[r][0], inside, left, BLOCK, BYTES, RAGGED),)
        if not RAGGED:
            stored = stored + (load_stored(rows[r], inside, left, 0, COUNT, OFFSETS, RAGGED),)
    uppers = ()  # sums of rows g
    lowers = ()  # of rows g + 8
    for _ in gl.static_range(len(xs) * ROW_TILES):
        uppers = uppers + (gl.zeros((32 * K_WARPS, 2), gl.float32, layout=LAYOUT),)
        lowers = lowers + (gl.zeros((32 * K_WARPS, 2), gl.float32, layout=LAYOUT),)
    for _ in range((units + K_WARPS - 1) // K_WARPS):
        ahead = unit + K_WARPS < units
        left_ahead = left - K_WARPS * 128 // BLOCK
        later = ()
        next_codes = ()
        next_stored = ()
        for r in gl.static_range(2 * ROW_TILES):
            later = later + (moved(rows[r], K_WARPS, BLOCK),)
            next_codes = next_codes + (load_unit(later[r][0], ahead, left_ahead, BLOCK, BYTES, RAGGED),)
            if not RAGGED:
                next_stored = next_stored + (load_stored(later[r], ahead, left_ahead, 0, COUNT, OFFSETS, RAGGED),)
        terms = ()
        s = ()
        totals = ()
        for j in gl.static_range(2):
            a = ()
            for r in gl.static_range(ROW_TILES):
                a = a + (decoded(codes[2 * r][j], codes[2 * r + 1][j], table, OFFSETS),)
            if not JOINED or j == 0:
                terms = ()
                for r in gl.static_range(2 * ROW_TILES):
                    if RAGGED:  # a load a number: kept from an iteration before, they would be spilled
                        numbers = load_stored(rows[r], inside, left, 64 * j // BLOCK, CHAINS, OFFSETS, RAGGED)
                        terms = terms + (terms_of(numbers, 0, CHAINS, TYPE, OFFSET, OFFSETS, PAIR),)
                    else:
                        terms = terms + (terms_of(stored[r], 64 * j // BLOCK, CHAINS, TYPE, OFFSET, OFFSETS, PAIR),)
            next_s = ()
            next_totals = ()
            added_uppers = ()
            added_lowers = ()
            for n in gl.static_range(len(xs)):
                x = load_tokens(xs[n], present[n] & inside, j, K - column, BYTES, K_TAIL)
                if JOINED:
                    if OFFSETS != "none":
                        next_totals = next_totals + (more_totals(x, totals[n] if j else ()),)
                    for r in gl.static_range(ROW_TILES):
                        next_s = next_s + (products(a[r], x, s[n * ROW_TILES + r] if j else ()),)
                else:
                    sums_of_x = sums_of_tokens(x, CHAINS) if OFFSETS != "none" else ()
                    for r in gl.static_range(ROW_TILES):
                        v, w = added_products(
                            uppers[n * ROW_TILES + r], lowers[n * ROW_TILES + r], a[r], x, sums_of_x,
                            terms[2 * r], terms[2 * r + 1], CHAINS, OFFSETS,
                        )  # fmt: skip
                        added_uppers = added_uppers + (v,)
                        added_lowers = added_lowers + (w,)
            s = next_s
            totals = next_totals
            if not JOINED:
                uppers = added_uppers
                lowers = added_lowers
        if JOINED:
            added_uppers = ()
            added_lowers = ()
            for n in gl.static_range(len(xs)):
                for r in gl.static_range(ROW_TILES):
                    v = uppers[n * ROW_TILES + r] + s[n * ROW_TILES + r][0] * terms[2 * r][0]
                    w = lowers[n * ROW_TILES + r] + s[n * ROW_TILES + r][1] * terms[2 * r + 1][0]
                    if OFFSETS != "none":
                        v += totals[n][0] * terms[2 * r][1]
                        w += totals[n][0] * terms[2 * r + 1][1]
                    added_uppers = added_uppers + (v,)
                    added_lowers = added_lowers + (w,)
            uppers = added_uppers
            lowers = added_lowers
        codes = next_codes
        stored = next_stored
        rows = later
        inside = ahead
        left = left_ahead
        unit = unit + K_WARPS
        column = column + 128 * K_WARPS
        moved_xs = ()
        for n in gl.static_range(len(xs)):
            moved_xs = moved_xs + (xs[n] + 64 * K_WARPS,)
        xs = moved_xs
    if DEPENDENT:
        allow_launch_after()
    WIDE: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [K_WARPS, 1], [1, 0])
    sums = ()
    for n in gl.static_range(len(uppers)):
        first = sums_of_spread(uppers[n]) if SPREAD else uppers[n]
        second = sums_of_spread(lowers[n]) if SPREAD else lowers[n]
        both = gl.permute(gl.join(first, second), (0, 2, 1))  # [threads, row half, token]
        sums = sums + (gl.convert_layout(gl.reshape(both, (32 * K_WARPS, 4)), WIDE),)
    return sums


@gluon.jit(do_not_specialize=["M", "N", "K", "blocks", "x_stride", "y_stride"])
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
    ROW_TILES: gl.constexpr,
    K_WARPS: gl.constexpr,
    BLOCK: gl.constexpr,
    SIGNED: gl.constexpr,
    OFFSETS: gl.constexpr,
    RAGGED: gl.constexpr,
    K_TAIL: gl.constexpr,
    SPREAD: gl.constexpr,
    ACTIVATION: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    """y [M, N] = activation(x [M, K] @ w.T + bias), grid (ceil(N / 16),), K_WARPS warps that split K.

    x is bf16, its rows 16-byte aligned; TOKEN_GROUPS groups of 8 tokens cover M. K_TAIL: K is less than the columns of
    all groups, which may end behind the last block. RAGGED: rows of codes end within 128 columns.
    block_ptr: scales [N, blocks] of BLOCK columns each: floats, UE4M4 bytes with scale_ptr's tensor scale, or bytes of
    superblocks, whose numbers are scale_ptr's and least_ptr's. offset_ptr: [N, blocks], see OFFSETS above.
    """
    if DEPENDENT:
        wait_for_launch_before()
    BYTES: gl.constexpr = OFFSETS == "none" and block_ptr.dtype.element_ty == gl.uint8
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 2], [32, 1], [K_WARPS, 1], [1, 0])
    thread = gl.arange(0, 32 * K_WARPS, layout=gl.SliceLayout(1, LAYOUT))
    eighth = thread % 32 // 4
    rows = rows_of(N, code_ptr, block_ptr, offset_ptr, scale_ptr, least_ptr, thread, blocks, ROW_TILES, BLOCK, SPREAD)
    _unit, _block, column = start_of(thread, BLOCK, bytes_of_lane(BLOCK, SPREAD))
    xs = ()
    present = ()
    for n in gl.static_range(TOKEN_GROUPS):
        token = eighth // 4 if SPREAD else n * 8 + eighth
        xs = xs + (x_ptr.to(gl.pointer_type(gl.int32)) + (token * (x_stride // 2) + column // 2),)
        present = present + ((token < M) & (eighth % 4 == thread % 4) if SPREAD else token < M,)
    table = table_of(level_ptr, OFFSETS, SIGNED, True, 0, LAYOUT)
    sums = sums_of_rows(
        rows, xs, present, table, thread, blocks, K,
        ROW_TILES, K_WARPS, BLOCK, OFFSETS, RAGGED, K_TAIL, SPREAD, DEPENDENT,
    )  # fmt: skip
    out_row, out_token = places(gl.program_id(0), ROW_TILES, TOKEN_GROUPS * ROW_TILES, out_layout(K_WARPS))
    v = sum_over_warps(sums, 0, TOKEN_GROUPS * ROW_TILES, K_WARPS)
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
        "least_at", "level_at",
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
    level_ptr,
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
    level_at,
    GROUPED: gl.constexpr,
    TOKEN_GROUPS: gl.constexpr,
    ROW_TILES: gl.constexpr,
    K_WARPS: gl.constexpr,
    BLOCK: gl.constexpr,
    LEVELS: gl.constexpr,
    SUMMAND: gl.constexpr,
    OFFSETS: gl.constexpr,
    SCALES: gl.constexpr,
    RAGGED: gl.constexpr,
    K_TAIL: gl.constexpr,
    SPREAD: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    """y [P, N] = W x + b of each pair (token, expert), from row pair // pairs_per_row of x; zeros for sentinels.

    Grid (ceil(N / 16), blocks of pairs). GROUPED: pairs are sorted by expert (`pairs.Groups`); otherwise each is a
    block of its own. W is in its expert's page, whose address a table has; code_at and the like: bytes from there on.
    SCALES: dtype of scales, and of values and middles. LEVELS: how many a page has, 16, or 8 magnitudes; 0: 16
    are level_ptr's. SUMMAND: see `level_bytes`.
    """
    if DEPENDENT:
        wait_for_launch_before()
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 2], [32, 1], [K_WARPS, 1], [1, 0])
    TERM: gl.constexpr = pointer_to(SCALES)
    OFFSET: gl.constexpr = pointer_to(SCALES if OFFSETS == "values" or OFFSETS == "middles" else "uint8")
    BYTES: gl.constexpr = OFFSETS == "none" and SCALES == "uint8"
    LARGE: gl.constexpr = pointer_to("float32" if BYTES else "float16")
    FLOATS: gl.constexpr = pointer_to("float32")
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
        own_ptr = level_ptr if LEVELS == 0 else (address + level_at).to(FLOATS)
        thread = gl.arange(0, 32 * K_WARPS, layout=gl.SliceLayout(1, LAYOUT))
        eighth = thread % 32 // 4
        rows = rows_of(
            N, code_ptr, block_ptr, offset_ptr, scale_ptr, least_ptr, thread, blocks, ROW_TILES, BLOCK, SPREAD
        )
        _unit, _block, column = start_of(thread, BLOCK, bytes_of_lane(BLOCK, SPREAD))
        xs = ()
        present = ()
        for n in gl.static_range(TOKEN_GROUPS):
            own = eighth // 4 if SPREAD else n * 8 + eighth
            wanted = (own < count) & there
            if SPREAD:
                wanted = wanted & (eighth % 4 == thread % 4)
            own = first + own
            if GROUPED:
                own = gl.load(order_ptr + own, mask=wanted, other=0)
            at = (own // pairs_per_row).to(gl.int64) * (x_stride // 2) + column // 2
            xs = xs + (x_ptr.to(gl.pointer_type(gl.int32)) + at,)
            present = present + (wanted,)
        table = table_of(own_ptr, OFFSETS, LEVELS == 8, there, SUMMAND, LAYOUT)
        sums = sums_of_rows(
            rows, xs, present, table, thread, stop, K,
            ROW_TILES, K_WARPS, BLOCK, OFFSETS, RAGGED, K_TAIL, SPREAD, DEPENDENT,
        )  # fmt: skip
        out_row, slot = places(gl.program_id(0), ROW_TILES, TOKEN_GROUPS * ROW_TILES, out_layout(K_WARPS))
        v = sum_over_warps(sums, 0, TOKEN_GROUPS * ROW_TILES, K_WARPS)
        if BYTES:
            v = v * gl.load(scale_ptr, mask=there, other=0.0)
        if HAS_BIAS:
            at = bias_ptr + expert.to(gl.int64) * N + out_row
            v = v + gl.load(at, mask=(out_row < N) & there, other=0.0).to(gl.float32)
        keep = (out_row < N) & (slot < count)
        pair = first + slot
        if GROUPED:
            pair = gl.load(order_ptr + pair, mask=keep, other=0)
        gl.store(y_ptr + pair.to(gl.int64) * N + out_row, v, mask=keep)
