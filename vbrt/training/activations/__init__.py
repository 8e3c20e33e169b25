"""Activation checkpointing of repeated blocks: keep, recompute in the backward pass, or offload to host memory."""

__all__: list[str] = []
