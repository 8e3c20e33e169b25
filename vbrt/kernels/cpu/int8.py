"""int8 activations for few tokens on a CPU, for `[compute] int8 = true`: ops "linear" and the experts'.

Up to `linear.fused_tokens` tokens (`experts.most_pairs` per expert), x is quantized to int8 with a scale per eight
columns, and the 4-bit format's levels to multiples of one step, at most 127. Sums of eight products are exact in
integers (VNNI, AVX2, NEON, plain C), all others in fp32. The summation order depends only on the instruction set and
the row length.

Relative RMS error of a layer's output: see `ERRORS`. For Gaussian inputs the quantization of inputs alone costs 0.40 %;
with columns of different size (by exp(N(0, 1))) 0.54 %; with scales per 16 columns 0.76 %, per 32 1.02 %, per row 5.8
%. Levels of E2M1, int4 and IQ4_NL are exact multiples. Those of NF4 lose 0.5 %, of bitsandbytes' FP4 0.4 %, of a fitted
codebook 0.3 to 0.5 %. The 4-bit weights themselves lose 8 to 10 %.

Not used for more tokens, inputs that require gradients, and lossless layers.
"""

import functools

import torch

from vbrt.kernels.cpu import build, experts
from vbrt.kernels.cpu import linear as cpu_linear

__all__ = ["ERRORS", "experts_down", "experts_up", "int8_refusal", "linear"]

#: upper bound of a layer's relative error with Gaussian inputs, by format; published levels stay below the largest
ERRORS = {"nvfp4": 4.5e-3, "mxfp4": 4.5e-3, "nf4": 7e-3, "quantile": 7e-3}

linear = functools.partial(cpu_linear.linear, rounded=True)
experts_up = functools.partial(experts.experts_up, rounded=True)
experts_down = functools.partial(experts.experts_down, rounded=True)


def int8_refusal(device: torch.device) -> str | None:
    """Return why a device has no int8 products with 4-bit weights, or None. The first call for a CPU builds them."""
    return f"{device.type} has no int8 products of 4-bit weights" if device.type != "cpu" else build.refusal(device)
