"""The ways in: `wrap`, `load` and the wrapper that stands for its model."""

__all__: list[str] = []
