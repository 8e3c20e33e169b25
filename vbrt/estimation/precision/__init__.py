"""Precision by layer: `vbrt.choose_precision`, and `weights.calibrate`.

A model, a byte budget and calibration text enter. Each layer's loss in 4 and in 8 bits is measured on the model's
logits, a knapsack spends the budget, and a `Precision` leaves, with the config to wrap with.
"""

__all__: list[str] = []
