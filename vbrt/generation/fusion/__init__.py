"""Kernel fusion of a decode step, without torch.compile.

A step enters as a graph of torch's operators (`step_graph`); patterns replace operators by fused launches (norms,
rotary embeddings, attention, routers, layers of one input), and a graph backend leaves: a CUDA graph, or on a CPU a
tape of prepared calls.
"""

__all__: list[str] = []
