"""The stack: a policy's decisions become movement of pages between storage tiers.

A lease of pages enters; while it lasts they are on the computing device. One lock guards the ledger (levels, pages,
slots); bytes move outside it.
"""

__all__: list[str] = []
