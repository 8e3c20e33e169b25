"""Configs for a model, a task and a machine: `vbrt.advise`, with predicted times of a step.

Candidates (presets, budgets, options of training, ways over several GPUs) are planned, estimated and timed by a cost
model whose rates are measured, or come from data sheets. An `Advice` leaves: the best candidates, and why the others
are not.
"""

__all__: list[str] = []
