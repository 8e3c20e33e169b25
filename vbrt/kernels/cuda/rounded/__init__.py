"""Products of which both operands are rounded to FP8, on GPUs.

Opt-in (`compute.fp8`), since they lose 3.3 % (nvfp4) or 2.7 % (mxfp4) of a layer's output; `fp8.py` says how that was
measured.
"""

__all__: list[str] = []
