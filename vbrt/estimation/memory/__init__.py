"""Memory of a task before anything is loaded: `vbrt.estimate`, `vbrt.fit_batch`.

A model on the meta device, a config and a `Task` enter. The task runs once on fake tensors, a few blocks standing for
all; every allocation is counted as torch's CUDA allocator would count it. An `Estimate` leaves: rows of bytes by phase
and tier.
"""

__all__: list[str] = []
