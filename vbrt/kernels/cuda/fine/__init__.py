"""Fine planes merged with coarse ones into the original weight."""

__all__: list[str] = []
