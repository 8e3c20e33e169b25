"""Products and the decoder of published codes. Importing needs Triton.

A weight is (code - zero) * scale * unit + offset. Each operation is rounded to fp32, a difference from a zero point to
the dtype of that, the result to the weight's: launch without contraction to FMA. Arguments of all kernels:

    code_ptr            [N, blocks * BLOCK] bytes by CODES: "int8", "uint8" or "e4m3"; "nibbles": two codes each
    block_ptr           scales [N, blocks]: numbers, or bytes by SCALE_BYTES: "superblock"; "powers": 2 ** (byte - 133)
    offset_ptr          by OFFSETS, [N, blocks]: "values"; "zeros"; "superblock", bytes; "none": any
    large_ptr, least_ptr  of superblocks d and dmin, fp16 [N, columns / 256 rounded up]; large_ptr: else a unit, or any

CONVERTS: the device converts E4M3 itself.
"""

# ruff: noqa: RUF005  # the kernel language has no starred expressions

import triton
import triton.language as tl

__all__ = [
    "decode_experts_kernel",
    "decode_kernel",
    "dots_kernel",
    "groups_kernel",
    "pairs_kernel",
    "pointer_of",
    "sums_kernel",
]


@triton.jit
def _numbers(byte, CODES: tl.constexpr, CONVERTS: tl.constexpr):
    """fp32 of codes that take a byte each."""
    if CODES != "e4m3":
        return byte.to(tl.float32)
    if CONVERTS:
        return byte.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    bits = byte.to(tl.int32)
    magnitude = bits & 0x7F
    normal = ((magnitude << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    number = tl.where(magnitude > 7, normal, magnitude.to(tl.float32) * 0.001953125)
    number = tl.where(magnitude == 0x7F, float("nan"), number)
    return (number.to(tl.int32, bitcast=True) | ((bits & 0x80) << 24)).to(tl.float32, bitcast=True)


@triton.jit
def _from_zero(number, zero):
    """Codes less their zero point, rounded to its dtype if that is a float."""
    number = number - zero.to(tl.float32)
    if zero.dtype.is_floating():
        number = number.to(zero.dtype).to(tl.float32)
    return number


@triton.jit
def _scale_and_offset(
    block_ptr, offset_ptr, large_ptr, least_ptr, row, block, index, inside, blocks,
    BLOCK: tl.constexpr, OFFSETS: tl.constexpr, SCALE_BYTES: tl.constexpr,
):  # fmt: skip
    """fp32 numbers of blocks; the offset is one of "values" and "superblock", else the scale."""
    if SCALE_BYTES == "powers":
        byte = tl.load(block_ptr + index, mask=inside, other=0).to(tl.int32)
        scale = tl.where(byte > 0, byte << 23, 1 << 22).to(tl.float32, bitcast=True) * 0.015625
    else:
        scale = tl.load(block_ptr + index, mask=inside, other=0).to(tl.float32)
    if SCALE_BYTES == "superblock":
        large = row.to(tl.int64) * ((blocks * BLOCK + 255) // 256) + block * BLOCK // 256
        scale = tl.load(large_ptr + large, mask=inside, other=0).to(tl.float32) * scale
    offset = scale
    if OFFSETS == "values" or OFFSETS == "superblock":
        offset = tl.load(offset_ptr + index, mask=inside, other=0).to(tl.float32)
    if OFFSETS == "superblock":
        offset = -tl.load(least_ptr + large, mask=inside, other=0).to(tl.float32) * offset
    return scale, offset


@triton.jit
def _weights(
    code_ptr, block_ptr, offset_ptr, large_ptr, least_ptr, row, block, N, blocks,
    BLOCK: tl.constexpr, CODES: tl.constexpr, OFFSETS: tl.constexpr, SCALE_BYTES: tl.constexpr, UNIT: tl.constexpr,
    CONVERTS: tl.constexpr,
):  # fmt: skip
    """fp32 [rows, blocks, BLOCK] of `row` [rows, 1, 1] and `block` [1, blocks, 1]; zeros outside, where offsets are."""
    inside = (row < N) & (block < blocks)
    index = row.to(tl.int64) * blocks + block
    if CODES == "nibbles":
        HALF: tl.constexpr = BLOCK // 2
        byte = tl.load(code_ptr + (index * HALF + tl.arange(0, HALF)[None, None, :]), mask=inside, other=0).to(tl.int32)
        pair = tl.join((byte & 15).to(tl.float32), (byte >> 4).to(tl.float32))
        number = tl.reshape(pair, (byte.shape[0], byte.shape[1], BLOCK))
    else:
        byte = tl.load(code_ptr + (index * BLOCK + tl.arange(0, BLOCK)[None, None, :]), mask=inside, other=0)
        number = _numbers(byte, CODES, CONVERTS)
    if OFFSETS == "zeros":
        number = _from_zero(number, tl.load(offset_ptr + index, mask=inside, other=0))
    scale, offset = _scale_and_offset(
        block_ptr, offset_ptr, large_ptr, least_ptr, row, block, index, inside, blocks, BLOCK, OFFSETS, SCALE_BYTES
    )
    weight = number * scale
    if UNIT:
        weight = weight * tl.load(large_ptr)
    if OFFSETS == "values" or OFFSETS == "superblock":
        weight = weight + offset
    return weight


@triton.jit
def _decode(
    code_ptr, block_ptr, offset_ptr, large_ptr, least_ptr, w_ptr, row, block, N, K, blocks,
    BLOCK: tl.constexpr, CODES: tl.constexpr, OFFSETS: tl.constexpr, SCALE_BYTES: tl.constexpr, UNIT: tl.constexpr,
    CONVERTS: tl.constexpr,
):  # fmt: skip
    """Store weights of `row` [rows, 1, 1] and `block` [1, blocks, 1]."""
    weight = _weights(
        code_ptr, block_ptr, offset_ptr, large_ptr, least_ptr, row, block, N, blocks,
        BLOCK, CODES, OFFSETS, SCALE_BYTES, UNIT, CONVERTS,
    )  # fmt: skip
    column = block * BLOCK + tl.arange(0, BLOCK)[None, None, :]
    keep = (row < N) & (block < blocks) & (column < K)
    tl.store(w_ptr + (row.to(tl.int64) * K + column), weight.to(w_ptr.dtype.element_ty), mask=keep)


@triton.jit
def decode_kernel(
    code_ptr, block_ptr, offset_ptr, large_ptr, least_ptr, w_ptr, N, K, blocks,
    BLOCKS: tl.constexpr, BLOCK: tl.constexpr, CODES: tl.constexpr, OFFSETS: tl.constexpr, SCALE_BYTES: tl.constexpr,
    UNIT: tl.constexpr, CONVERTS: tl.constexpr,
):  # fmt: skip
    """w [N, K] in its own dtype; grid (N, groups of BLOCKS blocks)."""
    row = tl.program_id(0) + tl.arange(0, 1)[:, None, None]
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)[None, :, None]
    _decode(
        code_ptr, block_ptr, offset_ptr, large_ptr, least_ptr, w_ptr, row, block, N, K, blocks,
        BLOCK, CODES, OFFSETS, SCALE_BYTES, UNIT, CONVERTS,
    )  # fmt: skip


@triton.jit
def _sums(
    code_ptr, block_ptr, offset_ptr, large_ptr, least_ptr, x_ptr, M, N, K, blocks, x_stride,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr, CODES: tl.constexpr, OFFSETS: tl.constexpr, SCALE_BYTES: tl.constexpr, UNIT: tl.constexpr,
    CONVERTS: tl.constexpr,
):  # fmt: skip
    """fp32 [ROWS] of the program's rows for each of TOKENS rows of x; zeros where there are no blocks.

    Scales and offsets apply to fp32 sums over 16 columns, which one thread has.
    """
    PART: tl.constexpr = 16
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None, None]
    PARTS: tl.constexpr = BLOCK // PART
    place = tl.arange(0, PARTS)[None, None, :, None] * PART + tl.arange(0, PART)[None, None, None, :]
    none = tl.zeros((ROWS, BLOCKS, PARTS), tl.float32)
    sums = (none,)
    for _ in tl.static_range(TOKENS - 1):
        sums = sums + (none,)
    for start in range(0, blocks, BLOCKS):
        block = start + tl.arange(0, BLOCKS)[None, :, None]
        inside = (row < N) & (block < blocks)
        index = row.to(tl.int64) * blocks + block
        if CODES == "nibbles":
            half = (place // 2).to(tl.int32)
            byte = tl.load(code_ptr + (index[:, :, :, None] * (BLOCK // 2) + half), mask=inside[:, :, :, None], other=0)
            number = ((byte.to(tl.int32) >> (place % 2 * 4)) & 15).to(tl.float32)
        else:
            byte = tl.load(code_ptr + (index[:, :, :, None] * BLOCK + place), mask=inside[:, :, :, None], other=0)
            number = _numbers(byte, CODES, CONVERTS)
        if OFFSETS == "zeros":
            number = _from_zero(number, tl.load(offset_ptr + index, mask=inside, other=0)[:, :, :, None])
        scale, offset = _scale_and_offset(
            block_ptr, offset_ptr, large_ptr, least_ptr, row, block, index, inside, blocks, BLOCK, OFFSETS, SCALE_BYTES
        )
        # a column for each row: then x has the layout of the codes, and is not exchanged between threads
        column = block[:, :, :, None] * BLOCK + place + tl.zeros((ROWS, 1, 1, 1), tl.int32)
        added = ()
        for m in tl.static_range(TOKENS):
            there = tl.full((1, 1, 1, 1), m, tl.int32) < M
            x = tl.load(x_ptr + (m * x_stride + column), mask=(column < K) & there, other=0.0).to(tl.float32)
            total = tl.fma(tl.sum(number * x, 3), tl.broadcast_to(scale, (ROWS, BLOCKS, PARTS)), sums[m])
            if OFFSETS == "values" or OFFSETS == "superblock":
                total += tl.sum(x, 3) * offset  # of x that is loaded in fp32, Triton 3.6 compiles no fma
            added = added + (total,)
        sums = added
    rows = ()
    for m in tl.static_range(TOKENS):
        y = tl.sum(tl.sum(sums[m], 2), 1)
        if UNIT:
            y *= tl.load(large_ptr, mask=blocks > 0, other=0.0)
        rows = rows + (y,)
    return rows


@triton.jit
def sums_kernel(
    code_ptr, block_ptr, offset_ptr, large_ptr, least_ptr, x_ptr, bias_ptr, y_ptr, M, N, K, blocks, x_stride,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr, CODES: tl.constexpr, OFFSETS: tl.constexpr, SCALE_BYTES: tl.constexpr, UNIT: tl.constexpr,
    CONVERTS: tl.constexpr,
):  # fmt: skip
    """y [M, N] = x [M, K] @ w.T + bias for up to TOKENS tokens, a power of two; grid (ceil(N / ROWS),)."""
    rows = _sums(
        code_ptr, block_ptr, offset_ptr, large_ptr, least_ptr, x_ptr, M, N, K, blocks, x_stride,
        TOKENS, ROWS, BLOCKS, BLOCK, CODES, OFFSETS, SCALE_BYTES, UNIT, CONVERTS,
    )  # fmt: skip
    out = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    for m in tl.static_range(TOKENS):
        y = rows[m]
        if HAS_BIAS:
            y += tl.load(bias_ptr + out, mask=out < N, other=0.0).to(tl.float32)
        tl.store(y_ptr + (m * N + out), y.to(y_ptr.dtype.element_ty), mask=(out < N) & (tl.full((1,), m, tl.int32) < M))


@triton.jit
def _dots(
    code_ptr, block_ptr, offset_ptr, large_ptr, least_ptr, x_ptr, token_at, present, first, stop, N, K, blocks,
    ROWS: tl.constexpr, BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr, CODES: tl.constexpr, OFFSETS: tl.constexpr, SCALE_BYTES: tl.constexpr, UNIT: tl.constexpr,
    CONVERTS: tl.constexpr,
):  # fmt: skip
    """fp32 [ROWS, tokens] of the program's rows and blocks first .. stop; token_at: starts of rows of x."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None, None]
    COLUMNS: tl.constexpr = BLOCKS * BLOCK
    sums = tl.zeros((ROWS, token_at.shape[0]), tl.float32)
    for start in range(first, stop, BLOCKS):
        block = start + tl.arange(0, BLOCKS)[None, :, None]
        weight = _weights(
            code_ptr, block_ptr, offset_ptr, large_ptr, least_ptr, row, block, N, blocks,
            BLOCK, CODES, OFFSETS, SCALE_BYTES, UNIT, CONVERTS,
        ).to(x_ptr.dtype.element_ty)  # fmt: skip
        column = start * BLOCK + tl.arange(0, COLUMNS)
        keep = (column[:, None] < K) & present[None, :]
        x = tl.load(x_ptr + (token_at[None, :] + column[:, None]), mask=keep, other=0.0)
        sums = tl.dot(tl.reshape(weight, (ROWS, COLUMNS)), x, sums)
    return sums


@triton.jit
def dots_kernel(
    code_ptr, block_ptr, offset_ptr, large_ptr, least_ptr, x_ptr, part_ptr, M, N, K, blocks, x_stride, share,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr, CODES: tl.constexpr, OFFSETS: tl.constexpr, SCALE_BYTES: tl.constexpr, UNIT: tl.constexpr,
    CONVERTS: tl.constexpr,
):  # fmt: skip
    """part [splits, M, N], fp32, of x [M, K] @ w.T; grid (ceil(N / ROWS), splits), each of `share` blocks of a row."""
    token = tl.arange(0, TOKENS)
    first = tl.program_id(1) * share
    sums = _dots(
        code_ptr, block_ptr, offset_ptr, large_ptr, least_ptr, x_ptr, token * x_stride, token < M,
        first, tl.minimum(first + share, blocks), N, K, blocks,
        ROWS, BLOCKS, BLOCK, CODES, OFFSETS, SCALE_BYTES, UNIT, CONVERTS,
    )  # fmt: skip
    out = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at = (tl.program_id(1) * M + token[None, :]) * N + out[:, None]
    tl.store(part_ptr + at, sums, mask=(out[:, None] < N) & (token[None, :] < M))


@triton.jit
def pointer_of(address, TYPE: tl.constexpr):
    """A pointer to numbers of a dtype by name, from an address that is a multiple of 16."""
    if TYPE == "int8":
        pointer = address.to(tl.pointer_type(tl.int8))
    elif TYPE == "int16":
        pointer = address.to(tl.pointer_type(tl.int16))
    elif TYPE == "int32":
        pointer = address.to(tl.pointer_type(tl.int32))
    elif TYPE == "float16":
        pointer = address.to(tl.pointer_type(tl.float16))
    elif TYPE == "bfloat16":
        pointer = address.to(tl.pointer_type(tl.bfloat16))
    elif TYPE == "float32":
        pointer = address.to(tl.pointer_type(tl.float32))
    else:
        pointer = address.to(tl.pointer_type(tl.uint8))
    return tl.multiple_of(pointer, 16)


_NUMBERS = ("E", "N", "blocks", "per_row", "code_at", "block_at", "large_at", "offset_at", "least_at")


@triton.jit(do_not_specialize=_NUMBERS)
def pairs_kernel(
    x_ptr, id_ptr, address_ptr, bias_ptr, y_ptr, E, N, K, blocks, per_row, code_at, block_at, large_at, offset_at,
    least_at, x_stride,
    ROWS: tl.constexpr, BLOCKS: tl.constexpr, HAS_BIAS: tl.constexpr, SCALES: tl.constexpr, ZEROS: tl.constexpr,
    LARGE: tl.constexpr, BLOCK: tl.constexpr, CODES: tl.constexpr, OFFSETS: tl.constexpr, SCALE_BYTES: tl.constexpr,
    UNIT: tl.constexpr, CONVERTS: tl.constexpr,
):  # fmt: skip
    """y [P, N] = W x + b of each pair (token, expert), from row pair // per_row of x; zeros for sentinels.

    Grid (ceil(N / ROWS), P). W is in its expert's page, whose address a table has; code_at and the like: bytes from
    there on, of numbers of the dtypes SCALES, ZEROS (offsets) and LARGE.
    """
    pair = tl.program_id(1)
    expert = tl.load(id_ptr + pair).to(tl.int32)
    there = (expert >= 0) & (expert < E)
    address = tl.load(address_ptr + expert, mask=there, other=0)
    rows = _sums(
        pointer_of(address + code_at, CODES), pointer_of(address + block_at, SCALES),
        pointer_of(address + offset_at, ZEROS), pointer_of(address + large_at, LARGE),
        pointer_of(address + least_at, "float16"),
        x_ptr + (pair // per_row).to(tl.int64) * x_stride, 1, N, K, tl.where(there, blocks, 0), 0,
        1, ROWS, BLOCKS, BLOCK, CODES, OFFSETS, SCALE_BYTES, UNIT, CONVERTS,
    )  # fmt: skip
    out = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    y = rows[0]
    if HAS_BIAS:
        y += tl.load(bias_ptr + (expert.to(tl.int64) * N + out), mask=(out < N) & there, other=0.0).to(tl.float32)
    tl.store(y_ptr + (pair.to(tl.int64) * N + out), y, mask=out < N)


@triton.jit(do_not_specialize=_NUMBERS)
def groups_kernel(
    x_ptr, order_ptr, bound_ptr, expert_ptr, first_ptr, address_ptr, bias_ptr, y_ptr, E, N, K, blocks, per_row, code_at,
    block_at, large_at, offset_at, least_at, x_stride,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr, HAS_BIAS: tl.constexpr, SCALES: tl.constexpr,
    ZEROS: tl.constexpr, LARGE: tl.constexpr, BLOCK: tl.constexpr, CODES: tl.constexpr, OFFSETS: tl.constexpr,
    SCALE_BYTES: tl.constexpr, UNIT: tl.constexpr, CONVERTS: tl.constexpr,
):  # fmt: skip
    """The same for pairs sorted by expert (`pairs.Groups`), TOKENS at a time. Grid (ceil(N / ROWS), groups)."""
    expert = tl.load(expert_ptr + tl.program_id(1))
    if expert >= 0:  # a group without pairs has nothing to do
        first = tl.load(first_ptr + tl.program_id(1))
        count = tl.load(bound_ptr + expert + 1) - first
        there = expert < E
        address = tl.load(address_ptr + expert, mask=there, other=0)
        token = tl.arange(0, TOKENS)
        pair = tl.load(order_ptr + (first + token), mask=token < count, other=0).to(tl.int64)
        sums = _dots(
            pointer_of(address + code_at, CODES), pointer_of(address + block_at, SCALES),
            pointer_of(address + offset_at, ZEROS), pointer_of(address + large_at, LARGE),
            pointer_of(address + least_at, "float16"), x_ptr, pair // per_row * x_stride, token < count,
            0, tl.where(there, blocks, 0), N, K, blocks,
            ROWS, BLOCKS, BLOCK, CODES, OFFSETS, SCALE_BYTES, UNIT, CONVERTS,
        )  # fmt: skip
        out = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        if HAS_BIAS:
            at = expert.to(tl.int64) * N + out
            sums += tl.load(bias_ptr + at, mask=(out < N) & there, other=0.0).to(tl.float32)[:, None]
        keep = (out[:, None] < N) & (token < count)[None, :]
        tl.store(y_ptr + (pair[None, :] * N + out[:, None]), sums, mask=keep)


@triton.jit(do_not_specialize=["first", "N", "blocks", "code_at", "block_at", "large_at", "offset_at", "least_at"])
def decode_experts_kernel(
    address_ptr, bound_ptr, w_ptr, first, N, K, blocks, code_at, block_at, large_at, offset_at, least_at,
    ROWS: tl.constexpr, BLOCKS: tl.constexpr, SCALES: tl.constexpr, ZEROS: tl.constexpr, LARGE: tl.constexpr,
    BLOCK: tl.constexpr, CODES: tl.constexpr, OFFSETS: tl.constexpr, SCALE_BYTES: tl.constexpr, UNIT: tl.constexpr,
    CONVERTS: tl.constexpr,
):  # fmt: skip
    """w [experts, N, K] from the pages of experts `first` .. that have pairs; the others are left uninitialized.

    Grid (ceil(N / ROWS), experts). code_at and the like: see `pairs_kernel`. bound_ptr: pairs before each expert's.
    """
    expert = first + tl.program_id(1)
    if tl.load(bound_ptr + expert + 1) > tl.load(bound_ptr + expert):
        address = tl.load(address_ptr + expert)
        row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None, None]
        w_ptr += tl.program_id(1).to(tl.int64) * N * K
        for start in range(0, blocks, BLOCKS):
            _decode(
                pointer_of(address + code_at, CODES), pointer_of(address + block_at, SCALES),
                pointer_of(address + offset_at, ZEROS), pointer_of(address + large_at, LARGE),
                pointer_of(address + least_at, "float16"), w_ptr,
                row, start + tl.arange(0, BLOCKS)[None, :, None], N, K, blocks,
                BLOCK, CODES, OFFSETS, SCALE_BYTES, UNIT, CONVERTS,
            )  # fmt: skip
