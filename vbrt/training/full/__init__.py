"""Training from the tiers: weights, gradients and optimizer state in host memory or files.

Forward and backward lease the high (bf16) half of each weight; gradients are copied D2H as they are computed, and
accumulated on the host; the optimizer's update joins both halves, steps, and splits them again, overlapped with the
next passes. The user's optimizer is taken over in place.
"""

__all__: list[str] = []
