"""Kernels for weights with table lookup: nf4 and quantile."""

__all__: list[str] = []
