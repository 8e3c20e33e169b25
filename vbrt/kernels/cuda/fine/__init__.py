"""Merge of fine and coarse planes into the original weight."""

__all__: list[str] = []
