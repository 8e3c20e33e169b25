"""Loading from files into a runtime: a path's source is opened, planes are filled weight by weight, and the dense model
is never in memory."""

__all__: list[str] = []
