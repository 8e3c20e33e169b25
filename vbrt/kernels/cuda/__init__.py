"""Kernels for NVIDIA GPUs, by family of number formats, and what launches them."""

__all__: list[str] = []
