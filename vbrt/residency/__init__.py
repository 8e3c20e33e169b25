"""Which pages should be where, in pure Python: policies, room, simulation, the plan."""

__all__: list[str] = []
