"""Protocols below the rest of the tiers: what a tier is, and what brings pages into the computing one.

`tier` for authors of a storage tier, `carrier` for copies over more than one link. Nothing here imports from the
packages beside it; those build on each other: storage, stack, schedule. A *memory* holds a page as a tensor that
kernels and copies use in place; a *store* writes and reads pages and verifies them.
"""

__all__: list[str] = []
