"""Training from the tiers: weights, gradients and optimizer state in host memory or files.

The forward and backward passes lease the high (bf16) half of each weight; gradients are copied to the host as they
arise and accumulated there; the optimizer's update joins both halves, steps, and splits them again, in the background.
A user's optimizer is taken over in place.
"""

__all__: list[str] = []
