"""Checkpoints of training: everything that the next step depends on, in a directory, for any tiers and for plain
torch."""

__all__: list[str] = []
