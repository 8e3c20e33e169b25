"""Kernel fusion of a decode step, without torch.compile.

`step_graph` holds the step as an FX graph of torch operators; `fuse_*` patterns replace operators by fused launches
(norms, rotary embeddings, attention, routers, layers sharing an input); `graph_backends` runs the result: as a CUDA
graph, or on a CPU as a tape of prepared calls (`cpu_tape`).
"""

__all__: list[str] = []
