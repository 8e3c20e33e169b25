"""Products of which both operands are rounded, to FP8 or FP4."""

__all__: list[str] = []
