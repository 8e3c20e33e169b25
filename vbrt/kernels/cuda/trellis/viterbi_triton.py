"""Triton encoder of trellis codes: Viterbi's algorithm, a program for each tile. Importing needs Triton."""

import triton
import triton.language as tl

__all__ = ["path_kernel"]


@triton.jit
def advance(cost, x_ptr, table_ptr, back_ptr):
    """Costs [256] of the best paths after a pair, by their last 8 bits; the 6 bits before those go to back_ptr.

    State 256 b + m comes from memory (256 b + m) / 64. Its first bits b ride in the lowest ones of a cost, so that a
    minimum brings them along; costs keep 18 bits, 4e-6 of their size.
    """
    bits = tl.arange(0, 64)[:, None]
    memory = tl.arange(0, 256)
    before = tl.reshape(tl.broadcast_to(tl.reshape(cost, (64, 4))[:, :, None], (64, 4, 64)), (64, 256))
    word = tl.load(table_ptr + (bits * 256 + memory[None, :]))
    first = (word << 16).to(tl.float32, bitcast=True)
    second = (word & -65536).to(tl.float32, bitcast=True)
    # squared distances but for the square of x, which all have in common
    error = before + first * (first - 2 * tl.load(x_ptr)) + second * (second - 2 * tl.load(x_ptr + 1))
    tagged = (error.to(tl.int32, bitcast=True) & -64) | bits
    best = tl.min(tagged.to(tl.float32, bitcast=True), 0)
    tl.store(back_ptr + memory, (best.to(tl.int32, bitcast=True) & 63).to(tl.uint8))
    return best


@triton.jit
def path_kernel(x_ptr, table_ptr, back_ptr, state_ptr, PAIRS: tl.constexpr, WARM: tl.constexpr):
    """State of each pair on a closed path, int32 [tiles, PAIRS]: `trellis_path` of vbrt/formats/t3.py. Grid (tiles,).

    x_ptr: fp32 [tiles, PAIRS, 2]; table_ptr: both values of a state, bf16 in a word; back_ptr: [tiles, PAIRS, 256].
    """
    tile = tl.program_id(0).to(tl.int64)
    x_ptr += tile * (2 * PAIRS)
    back_ptr += tile * (256 * PAIRS)
    state_ptr += tile * PAIRS
    memory = tl.arange(0, 256)
    cost = tl.zeros((256,), tl.float32)
    for i in range(2 * WARM):
        cost = advance(cost, x_ptr + 2 * ((i + PAIRS - WARM) % PAIRS), table_ptr, back_ptr + 256 * i)
    at = tl.argmin(cost, 0)
    tl.debug_barrier()  # all threads' bytes
    for i in range(WARM):
        at = (tl.load(back_ptr + 256 * (2 * WARM - 1 - i) + at).to(tl.int32) * 256 + at) // 64
    closed = at
    tl.debug_barrier()  # before they are written again
    cost = tl.where(memory == closed, 0.0, 1e30)
    for i in range(PAIRS):
        cost = advance(cost, x_ptr + 2 * i, table_ptr, back_ptr + 256 * i)
    tl.debug_barrier()
    at = closed
    for i in range(PAIRS):
        pair = PAIRS - 1 - i
        state = tl.load(back_ptr + 256 * pair + at).to(tl.int32) * 256 + at
        tl.store(state_ptr + pair, state)
        at = state // 64
