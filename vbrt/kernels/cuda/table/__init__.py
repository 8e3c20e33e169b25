"""Weights whose codes are looked up in a table, on GPUs: nf4, quantile and the published formats of 16 levels.

Few tokens: `linear_gluon.py`, lookups by `prmt`, block scales on fp32 sums. Many, nf4 and quantile: the persistent
kernel of `e2m1` with operands made here (`operands_gluon.py`), scales on the weights, in bf16. There, lanes exchange
codes before they are decoded: the two columns that an instruction wants of a lane are one byte. Byte scales have five
significant bits, so level times scale is rounded once, to bf16; levels are rounded before. On other GPUs, and for the
published formats, `kernels/cuda/e2m1/mma_gluon.py` multiplies many tokens: activations come in the order in which lanes
have codes. Scales of more bits are rounded to bf16 as well.
"""

__all__: list[str] = []
