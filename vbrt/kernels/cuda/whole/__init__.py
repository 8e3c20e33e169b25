"""Weights that are whole numbers of 8 bits under scales of a power of two, on GPUs: mxint8.

Bytes become bf16 in registers and are scaled there, which is exact, for `mma.sync`: in a kernel of their own for few
tokens, in `kernels/cuda/e2m1/mma_gluon.py` for more; for the most the weight is decoded, then cuBLAS multiplies. No GPU
has run these kernels yet; the PTX emulator has.
"""

__all__: list[str] = []
