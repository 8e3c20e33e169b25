"""Saves of wrapped models: `vb.save` writes planes as they are, whole or by rank, and this reads them back."""

__all__: list[str] = []
