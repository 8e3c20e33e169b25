"""Warnings for training with weights that are frozen planes."""

import math
from collections.abc import Sequence

from vbrt.host.logger import warn
from vbrt.layers.weights.state import Weight

__all__ = ["warn_of_thawing", "warn_of_training"]


def warn_of_thawing(weights: Sequence[Weight]) -> None:
    """Warn that weights leave the tiers to train: name the first, and the bytes of all as dense weights."""
    nbytes = sum(math.prod(weight.spec.shape) * weight.dtype.itemsize for weight in set(weights))
    named = f"{weights[0].name} and {len(weights) - 1} more" if weights[1:] else weights[0].name
    warn(
        f"requires_grad_(True): {named} left the tiers to train: plain layers with "
        f"{nbytes} bytes of dense weights, outside of all budgets. To train through 4 bits, wrap with "
        'mode="train"',
        stacklevel=4,
    )


def warn_of_training(stacklevel: int) -> None:
    """Warn with one text for all layers, so that Python's filter shows it once."""
    warn(
        "this model is in training mode and its VB layers hold frozen planes: their weights no longer train "
        "(gradients still flow through them, and adapters train). Without adapters call model.eval(), wrap with "
        'mode="train", or exclude what should train in weights.exclude',
        stacklevel=stacklevel + 1,
    )
