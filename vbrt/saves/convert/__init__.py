"""Conversion of a checkpoint into a save, without the model: read, encode and write weight by weight, resumable."""

__all__: list[str] = []
