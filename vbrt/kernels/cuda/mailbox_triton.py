"""Exchange with host threads: one program posts inputs into page-locked memory and waits there for the results.

Importing this needs Triton. Words of the mailbox are read and written with PTX's acquire and release of system scope:
Triton's atomics would be read-modify-writes over the link. A load by acquire in every thread also keeps the results
that follow from being read out of a cache.
"""

import triton
import triton.language as tl

__all__ = ["acquired", "add_kernel", "answered", "exchange_kernel", "give_up", "now_ns", "post_kernel", "release"]


@triton.jit
def acquired(word_ptr):
    """Load of an int64 word that another processor may write, with acquire semantics."""
    return tl.inline_asm_elementwise(
        "ld.acquire.sys.global.b64 $0, [$1];", "=l,l", [word_ptr], dtype=tl.int64, is_pure=False, pack=1
    )


@triton.jit
def release(word_ptr, value):
    """Store of an int64 word that another processor reads, with release semantics."""
    tl.inline_asm_elementwise(
        "st.release.sys.global.b64 [$1], $2; mov.b64 $0, 0;",
        "=l,l,l",
        [word_ptr, value],
        dtype=tl.int64,
        is_pure=False,
        pack=1,
    )


@triton.jit
def now_ns():
    """Nanoseconds of the device's timer."""
    return tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)


@triton.jit
def answered(words_ptr, number, broken, wait_ns, ANSWER: tl.constexpr):
    """Wait for the answer to a post, unless the device has given up on one; True if it came in time."""
    begun = now_ns()
    late = broken != 0
    answer = acquired(words_ptr + ANSWER)
    while (answer != number) & (answer != -number) & (late == 0):
        answer = acquired(words_ptr + ANSWER)
        late = now_ns() - begun > wait_ns
    tl.debug_barrier()
    return answer == number


@triton.jit
def give_up(words_ptr, state_ptr, post, broken, GAVE_UP: tl.constexpr):
    """Note that the device waits for no answers any more; the host hears the first post that it gave up on."""
    tl.store(state_ptr + 1, 1)
    if broken == 0:
        tl.store(words_ptr + GAVE_UP, post)


@triton.jit(do_not_specialize=["entry", "input_groups", "rows", "column_groups", "result_line", "wait_ns"])
def exchange_kernel(
    x_ptr, y_ptr, bias_ptr, words_ptr, state_ptr, entry, input_groups, rows, column_groups, result_line, wait_ns,
    POST: tl.constexpr, ANSWER: tl.constexpr, GAVE_UP: tl.constexpr, INPUT: tl.constexpr, ENTRY_BITS: tl.constexpr,
    HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """y = what host threads answer for x, plus a bias; grid (1,).

    x_ptr, y_ptr [rows, columns] of one dtype, in groups of eight numbers, aligned to 16 bytes; bias_ptr [columns].
    words_ptr: the mailbox, int64; its words POST, ANSWER, GAVE_UP and INPUT count in words, `result_line` in lines of
    64 bytes. state_ptr int64 [2] on the device: the number of the last post, and whether the device has given up on
    one: from then on it waits for none, and y is NaN.
    """
    inputs, columns = input_groups * 8, column_groups * 8
    number = tl.load(state_ptr) + 1
    broken = tl.load(state_ptr + 1)
    to_ptr = (words_ptr + INPUT).to(x_ptr.dtype)
    for start in range(0, inputs, BLOCK):
        at = start + tl.arange(0, BLOCK)
        tl.store(to_ptr + at, tl.load(x_ptr + at, mask=at < inputs), mask=at < inputs)
    tl.debug_barrier()  # before it, all threads have written their part of x
    release(words_ptr + POST, (number << ENTRY_BITS) | entry)
    came = answered(words_ptr, number, broken, wait_ns, ANSWER)
    from_ptr = (words_ptr + result_line * 8).to(y_ptr.dtype)
    for row in range(rows):
        for start in range(0, columns, BLOCK):
            at = start + tl.arange(0, BLOCK)
            y = tl.load(from_ptr + row * columns + at, mask=at < columns)
            if HAS_BIAS:
                bias = tl.load(bias_ptr + at, mask=at < columns)
                y = (y.to(tl.float32) + bias.to(tl.float32)).to(y_ptr.dtype.element_ty)
            tl.store(y_ptr + row * columns + at, tl.where(came, y, float("nan")), mask=at < columns)
    tl.store(state_ptr, number)
    if came == 0:
        give_up(words_ptr, state_ptr, (number << ENTRY_BITS) | entry, broken, GAVE_UP)


@triton.jit(do_not_specialize=["entry", "input_groups", "pairs", "ids_at", "weights_at"])
def post_kernel(
    x_ptr, id_ptr, kept_ptr, weight_ptr, words_ptr, state_ptr, entry, input_groups, pairs, ids_at, weights_at,
    POST: tl.constexpr, INPUT: tl.constexpr, ENTRY_BITS: tl.constexpr, NOTHING: tl.constexpr, PAIRS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Post routed experts that the device does not compute; grid (1,). `add_kernel` waits for them.

    x_ptr in groups of eight numbers, aligned to 16 bytes; id_ptr, kept_ptr [pairs]: experts, and -1 in the place of
    those to be posted; weight_ptr [pairs]. ids_at, weights_at: as int64 and fp32 in the mailbox, in words. state_ptr
    int64 [3]: as of `exchange_kernel`, and whether the last post has experts; without any, it is one of NOTHING.
    """
    number = tl.load(state_ptr) + 1
    i = tl.arange(0, PAIRS)
    id = tl.load(id_ptr + i, mask=i < pairs, other=-1)
    kept = tl.load(kept_ptr + i, mask=i < pairs, other=-1)
    hosted = id != kept
    some = tl.max(hosted.to(tl.int32)) > 0
    if some:
        inputs = input_groups * 8
        to_ptr = (words_ptr + INPUT).to(x_ptr.dtype)
        for start in range(0, inputs, BLOCK):
            at = start + tl.arange(0, BLOCK)
            tl.store(to_ptr + at, tl.load(x_ptr + at, mask=at < inputs), mask=at < inputs)
        weight = tl.load(weight_ptr + i, mask=i < pairs, other=0.0).to(tl.float32)
        tl.store(words_ptr + ids_at + i, tl.where(hosted, id, -1).to(tl.int64), mask=i < pairs)
        tl.store((words_ptr + weights_at).to(tl.pointer_type(tl.float32)) + i, weight, mask=i < pairs)
    tl.debug_barrier()  # all threads have written their part, and read the state
    release(words_ptr + POST, (number << ENTRY_BITS) | tl.where(some, entry, NOTHING))
    tl.store(state_ptr, number)
    tl.store(state_ptr + 2, some.to(tl.int64))


@triton.jit(do_not_specialize=["entry", "output_groups", "result_line", "wait_ns"])
def add_kernel(
    y_ptr, answer_ptr, words_ptr, state_ptr, entry, output_groups, result_line, wait_ns,
    ANSWER: tl.constexpr, GAVE_UP: tl.constexpr, ENTRY_BITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """y += what host threads answer to the experts of the last post, fp32; grid (1,). Without an answer, NaN.

    y_ptr in groups of eight numbers, aligned to 16 bytes. answer_ptr: the mailbox in fp32.
    """
    outputs = output_groups * 8
    if tl.load(state_ptr + 2) != 0:
        number = tl.load(state_ptr)
        broken = tl.load(state_ptr + 1)
        came = answered(words_ptr, number, broken, wait_ns, ANSWER)
        from_ptr = answer_ptr + result_line * 16
        for start in range(0, outputs, BLOCK):
            at = start + tl.arange(0, BLOCK)
            more = tl.load(from_ptr + at, mask=at < outputs)
            y = tl.load(y_ptr + at, mask=at < outputs).to(tl.float32) + more
            tl.store(y_ptr + at, tl.where(came, y, float("nan")).to(y_ptr.dtype.element_ty), mask=at < outputs)
        if came == 0:
            give_up(words_ptr, state_ptr, (number << ENTRY_BITS) | entry, broken, GAVE_UP)
