"""Kernel fusion of a decode step, without torch.compile.

Input: a trace of a step's torch operators (`step_graph`). Patterns replace operators by fused launches (norms, rotary
embeddings, attention, routers, layers of one input). Output: a graph backend, that is a CUDA graph, or on a CPU a tape
of prepared calls.

Half of a captured decode step is small kernels between the layers. The step runs eagerly once, while its operators are
traced with their actual tensors; caches and static inputs keep their memory, and in-place writes keep their order.
Layers of vbrt and attention are *leaves*: opaque calls, repeated as such. A tensor value read by Python, a
data-dependent shape, autocast or gradients end the trace; the step completes eagerly, with the reason.

**Patterns** (`fuse_step.py` lists them, in order) match the model's operators against traces of known implementations.
Nothing is replaced if the step writes to memory that it reads. `same_bits` keeps only patterns that give the eager
kernels' bits: rotary embeddings and cache copies round where torch does, without FMA contraction; norms and softmax sum
in another order.

**The check.** Kernels launched outside the dispatcher would be missing from the trace. So the fused step runs once from
the initial state of the traced one, and its results are compared: bit for bit under `same_bits`, else within a tenth of
their norm. If bits differ, the step is traced anew and replayed without replacements, so that it can still be captured.
`stats().steps` lists fused and unfused operators, with reasons. Rejected: `make_fx`, which takes twenty times as long
for the same trace; and generated kernels for chains of elementwise operators, since after the patterns a layer of the
measured models has none left.

**Deterministic attention** (`deterministic_attention.py`, `vbrt.kernels.step`). For a masked query on an H200 torch
2.11 takes cuDNN (`sdpa_sm80_flash_fprop_wmma_f16_knob_35_16x128x64_1x4x1`). In a step of a GPT-2 with 50 sequences it
gave other bits in each of ten runs of four steps from the same cache: compared module by module, the first that
differed was the output of attention, in one layer or another. At 16 sequences it repeated itself, and so it did 400
times alone; why is not known. With torch's "efficient" kernel, and with ours, all modules repeat themselves, and rows
of a verification have the bits of steps. A mode of torch's functions puts ours in the place of
`scaled_dot_product_attention`, where the mask is bool and equal for all heads, under `compute.exactness = "rounded"`:
in steps of `exact` and `dense` models that are captured or checked, and in their verification. Models that attend
otherwise (scores with a bias, "eager" attention) keep torch's kernels; so do prompts, and steps with
`compute.captures = false` or `compute.joins = false`.

**On a CPU** (`cpu_tape.py`) every result has an address, in blocks that results share whose lives do not overlap;
layers of one input are one C call, experts whose pages never move three (their ids are read by the host). Layers whose
pages move are leased by a Python call within the tape, so budgets, statistics and phases are as in eager passes.
Attention skips masked positions, so the cost of a bucket of 1024 follows the tokens in it. Rejected: the whole tape in
one C call, since call overhead is a small part of a token's time; and torch.compile, which would need one more build on
the user's machine.

**Compiling ahead** (`precompile_launches.py`, `vbrt.kernels.cuda.compiling`): products of one token are noted when a
model is wrapped, those of a prompt when `generate` is called, on memory that stands in for weights and inputs
(`vbrt.layers.weights.precompile_kernels`), and fused launches when the step's graph is known, before it first runs.
`stats().steps.not_ahead` says why a launch was not compiled ahead.
"""

__all__: list[str] = []
