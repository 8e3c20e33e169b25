"""Schedules: a round of passes that recurs is worked out once and replayed, also inside a CUDA graph.

The stack's leases enter by position; copies through a ring of buffers are issued ahead of them on the copy stream.
"""

__all__: list[str] = []
