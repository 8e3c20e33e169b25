"""Kernels for CPUs, in C, built on the machine that runs them."""

__all__: list[str] = []
