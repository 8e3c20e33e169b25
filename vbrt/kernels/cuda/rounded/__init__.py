"""Products of which both operands are rounded, to FP8."""

__all__: list[str] = []
