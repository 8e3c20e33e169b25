"""Activation memory of repeated blocks: kept, recomputed in the backward pass, or offloaded to host memory."""

__all__: list[str] = []
