"""Kernels for weights of E2M1 codes: nvfp4 and mxfp4."""

__all__: list[str] = []
