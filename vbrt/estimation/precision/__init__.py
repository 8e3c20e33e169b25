"""Precision by layer: `vbrt.choose_precision`, and `weights.calibrate`.

A model, a byte budget and calibration text enter. Each layer's loss in 4 and in 8 bits is measured on the model's own
logits while its weights stream, a knapsack spends the budget, and a `Precision` leaves, which a config takes.
"""

__all__: list[str] = []
