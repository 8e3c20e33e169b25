"""Memory estimates before loading: `vbrt.estimate`, `vbrt.fit_batch`.

A model on the meta device, a config and a `Task` enter. The task runs once on fake tensors, a few blocks standing for
all, and every allocation is counted with the CUDA allocator's rounding. An `Estimate` leaves: rows of bytes by tier,
and peaks by stage.
"""

__all__: list[str] = []
