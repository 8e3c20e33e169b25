"""Quantization-aware training: weights stay dense parameters, and forwards see them rounded to the format.

A layer enters in training mode; its forward multiplies by the rounded weight, its backward passes gradients to the
dense one (straight-through estimator), and saving gives planes as inference reads them.
"""

__all__: list[str] = []
