"""Row gather by GPU threads from page-locked host memory (zero-copy reads).

Importing this needs Triton; plain operations only, so that its interpreter runs it too.
"""

import triton
import triton.language as tl

__all__ = ["gather_rows_kernel"]


@triton.jit(do_not_specialize=["total", "rows", "words"])
def gather_rows_kernel(index_ptr, table_ptr, out_ptr, total, rows, words, BLOCK: tl.constexpr):
    """out[t] = table[index[t]], rows of so many words; grid (cdiv(total, BLOCK),).

    index_ptr int64 [total / words]; total: words of all results. Rows that the table does not have are zeros.
    """
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(index_ptr + at // words, mask=at < total, other=-1)
    inside = (row >= 0) & (row < rows)
    word = tl.load(table_ptr + row * words + at % words, mask=inside, other=0)
    tl.store(out_ptr + at, word, mask=at < total)
