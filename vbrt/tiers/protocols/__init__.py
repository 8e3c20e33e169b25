"""Protocols below the rest of the tiers: what a tier is, and what brings pages into the computing one.

`tier` for whoever writes a storage tier, `carrier` for copies over more than one link. Nothing here imports from the
packages beside it; those build on each other: storage, stack, schedule.
"""

__all__: list[str] = []
