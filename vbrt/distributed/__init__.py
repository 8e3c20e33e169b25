"""Models over several devices or ranks: pipeline split, rank watchdog, merged statistics."""

__all__: list[str] = []
