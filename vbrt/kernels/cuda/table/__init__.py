"""Rows of 4-bit codes on GPUs: nf4, quantile, and the published formats of 16 levels or with offsets.

Few tokens: `linear_gluon.py`, lookups by `prmt`, or codes with offsets by bit arithmetic; block scales and offsets on
fp32 sums, exact but for the rounding of sums. Many tokens of formats with offsets: decoded, for the vendor's matmul.
Their routed experts: the same loop, by addresses of pages (`kernels/cuda/experts`).

Many tokens of tables, nf4 and quantile: the persistent kernel of `e2m1` with operands made here (`operands_gluon.py`),
scales on the weights, in bf16. There, lanes exchange codes before they are decoded: the two columns that an instruction
wants of a lane are one byte. Byte scales have five significant bits, so level times scale is rounded once, to bf16;
levels are rounded before. On other GPUs, and for the published formats, `kernels/cuda/e2m1/mma_gluon.py` multiplies
many tokens: activations come in the order in which lanes have codes. Scales of more bits are rounded to bf16 as well.
"""

__all__: list[str] = []
