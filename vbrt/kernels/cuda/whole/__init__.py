"""Kernels for 8-bit integer weights with power-of-two scales: mxint8."""

__all__: list[str] = []
