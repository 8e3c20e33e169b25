"""Models over several devices and ranks."""

__all__: list[str] = []
