"""Few tokens on a CPU with inputs in int8, for `[compute] int8 = true`: the ops "linear" and the experts'.

Up to `linear.fused_tokens` tokens (an expert's up to `experts.most_pairs`) are rounded to int8 with a scale for each
eight columns, and the levels of the 4-bit format to whole steps of one size, at most 127. Sums of eight products are
exact in integers (VNNI, AVX2, NEON, plain C), all others in fp32. The order of sums depends on the instruction set and
the length of a row alone.

Error of a layer's output, relative, root of mean square: see `ERRORS`. For Gaussian inputs that of the inputs alone is
0.40 %; where columns differ in size (by exp(N(0, 1))) 0.54 %, with scales for 16 columns 0.76 %, for 32 1.02 %, for a
whole row 5.8 %. Levels of E2M1, int4 and IQ4_NL are whole steps. Those of NF4 lose 0.5 %, of bitsandbytes' FP4 0.4 %,
of a fitted codebook 0.3 to 0.5 %. The 4-bit weights themselves lose 8 to 10 %.

More tokens, inputs that a gradient is asked of, and lossless layers are computed as without it.
"""

import functools

import torch

from vbrt.kernels.cpu import build, experts
from vbrt.kernels.cpu import linear as cpu_linear

__all__ = ["ERRORS", "experts_down", "experts_up", "int8_refusal", "linear"]

#: bound of a layer's relative error with Gaussian inputs, by format; published levels are within the largest
ERRORS = {"nvfp4": 4.5e-3, "mxfp4": 4.5e-3, "nf4": 7e-3, "quantile": 7e-3}

linear = functools.partial(cpu_linear.linear, rounded=True)
experts_up = functools.partial(experts.experts_up, rounded=True)
experts_down = functools.partial(experts.experts_down, rounded=True)


def int8_refusal(device: torch.device) -> str | None:
    """Why a device has no int8 products with 4-bit weights, or None. The first call for a CPU builds them."""
    return f"{device.type} has no int8 products of 4-bit weights" if device.type != "cpu" else build.refusal(device)
