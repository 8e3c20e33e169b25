"""Exchange with host threads: one program posts inputs into page-locked memory and waits there for the results.

Importing this needs Triton. Words of the mailbox are read and written with PTX's acquire and release of system scope:
Triton's atomics would be read-modify-writes over the link. A load by acquire in every thread also keeps the results
that follow from being read out of a cache.
"""

import triton
import triton.language as tl

__all__ = ["exchange_kernel"]


@triton.jit
def _acquired(word_ptr):
    return tl.inline_asm_elementwise(
        "ld.acquire.sys.global.b64 $0, [$1];", "=l,l", [word_ptr], dtype=tl.int64, is_pure=False, pack=1
    )


@triton.jit
def _release(word_ptr, value):
    tl.inline_asm_elementwise(
        "st.release.sys.global.b64 [$1], $2; mov.b64 $0, 0;",
        "=l,l,l",
        [word_ptr, value],
        dtype=tl.int64,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _now_ns():
    return tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)


@triton.jit(do_not_specialize=["entry", "input_groups", "rows", "column_groups", "result_at", "wait_ns"])
def exchange_kernel(
    x_ptr, y_ptr, bias_ptr, words_ptr, state_ptr, entry, input_groups, rows, column_groups, result_at, wait_ns,
    POST: tl.constexpr, ANSWER: tl.constexpr, GAVE_UP: tl.constexpr, INPUT: tl.constexpr, ENTRY_BITS: tl.constexpr,
    HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """y = what host threads answer for x, plus a bias; grid (1,).

    x_ptr, y_ptr [rows, columns] of one dtype, in groups of eight numbers, aligned to 16 bytes; bias_ptr [columns].
    words_ptr: the
    mailbox, int64; its words POST, ANSWER, GAVE_UP and INPUT, and `result_at`, count in words. state_ptr int64 [2] on
    the device: the number of the last post, and whether the device has given up on one: from then on it waits for none,
    and y is NaN.
    """
    inputs, columns = input_groups * 8, column_groups * 8
    number = tl.load(state_ptr) + 1
    broken = tl.load(state_ptr + 1)
    to_ptr = (words_ptr + INPUT).to(x_ptr.dtype)
    for start in range(0, inputs, BLOCK):
        at = start + tl.arange(0, BLOCK)
        tl.store(to_ptr + at, tl.load(x_ptr + at, mask=at < inputs), mask=at < inputs)
    tl.debug_barrier()  # before it, all threads have written their part of x
    _release(words_ptr + POST, (number << ENTRY_BITS) | entry)
    begun = _now_ns()
    late = broken != 0
    answer = _acquired(words_ptr + ANSWER)
    while (answer != number) & (answer != -number) & (late == 0):
        answer = _acquired(words_ptr + ANSWER)
        late = _now_ns() - begun > wait_ns
    answered = answer == number
    tl.debug_barrier()
    from_ptr = (words_ptr + tl.multiple_of(result_at, 8)).to(y_ptr.dtype)
    for row in range(rows):
        for start in range(0, columns, BLOCK):
            at = start + tl.arange(0, BLOCK)
            y = tl.load(from_ptr + row * columns + at, mask=at < columns)
            if HAS_BIAS:
                bias = tl.load(bias_ptr + at, mask=at < columns)
                y = (y.to(tl.float32) + bias.to(tl.float32)).to(y_ptr.dtype.element_ty)
            tl.store(y_ptr + row * columns + at, tl.where(answered, y, float("nan")), mask=at < columns)
    tl.store(state_ptr, number)
    if answered == 0:
        tl.store(state_ptr + 1, 1)
        if broken == 0:
            tl.store(words_ptr + GAVE_UP, (number << ENTRY_BITS) | entry)
