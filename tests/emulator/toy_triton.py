"""A kernel as a new one would begin: tensors first, then numbers, then constants by name. Importing needs Triton."""

import triton
import triton.language as tl

__all__ = ["scale_kernel"]


@triton.jit(do_not_specialize=["N"])
def scale_kernel(x_ptr, y_ptr, N, BLOCK: tl.constexpr, DOUBLED: tl.constexpr):
    """y [N] = x [N], or twice that with DOUBLED. Grid (ceil(N / BLOCK),)."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x_ptr + at, mask=at < N, other=0.0)
    if DOUBLED:
        v = v + v
    tl.store(y_ptr + at, v, mask=at < N)
