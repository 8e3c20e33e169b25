"""Trellis-coded weights on GPUs: t3.

Few tokens: `linear_gluon.py` decodes a tile in the registers of the lanes that multiply it, on inputs that were rotated
once. Many tokens: `decode_triton.py` decodes, and the vendor's matmul multiplies. `viterbi.py` encodes.

Scales of columns, and the rotation, are one launch more, on the inputs.

For two weights the fused kernel takes a shift and a mask (their state), two multiply-adds (its hash, and that shifted),
two logical operations and an addition: 3.5 instructions a weight; as compiled for sm_90 with loads, scales and loop it
is 4.5, of which 2.3 are in the pipe of integer logic, which takes half a warp's instruction a cycle there. That pipe
limits it to 28 weights a cycle and multiprocessor, below what memory could bring.
"""

__all__: list[str] = []
