"""One weight in the tiers: its spec, its planes, the kernels that multiply with it, and the temporary that `.weight`
gives.
"""

__all__: list[str] = []
