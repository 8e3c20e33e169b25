"""What a person reads: statistics and timelines, in pure Python."""

__all__: list[str] = []
