"""Published codes of 8 bits, and HQQ's, on GPUs, in plain Triton: no assembly, so that one source serves all of them.

A weight is decoded in registers to x's dtype, with the bits of `decode_weight`, and multiplied from there: few tokens
by sums of products, up to `FUSED_TOKENS` by `tl.dot`. For more, the weight is decoded once for the vendor's matmul.
"""

__all__: list[str] = []
