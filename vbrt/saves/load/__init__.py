"""From files into a runtime: finds what a path holds, and fills planes weight by weight without the dense model."""

__all__: list[str] = []
