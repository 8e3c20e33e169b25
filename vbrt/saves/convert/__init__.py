"""Conversion without the model: a checkpoint's weights are read, encoded and written one after the other, resumable."""

__all__: list[str] = []
