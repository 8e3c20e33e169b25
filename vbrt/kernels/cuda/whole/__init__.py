"""Weights that are whole numbers of 8 bits under scales of a power of two: mxint8."""

__all__: list[str] = []
