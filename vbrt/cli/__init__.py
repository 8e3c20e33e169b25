"""Command line: one file per command, and their shared options and output."""

__all__: list[str] = []
