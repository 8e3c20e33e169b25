"""Advice on configs for a model, a task and a machine: `vbrt.advise`, with predicted step times.

Candidates (presets, budgets, training options) are planned, estimated and timed by a cost model, with measured rates or
a data sheet's. An `Advice` leaves: the best candidates, and why the others lose. `compare_ways` does so for multi-GPU
parallelism.
"""

__all__: list[str] = []
