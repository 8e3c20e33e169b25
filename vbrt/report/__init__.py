"""Statistics and timelines for people to read, in pure Python."""

__all__: list[str] = []
