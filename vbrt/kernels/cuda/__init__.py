"""Kernels for NVIDIA GPUs, by family of number formats, with their launch code."""

__all__: list[str] = []
