"""Kernel fusion of a decode step, without torch.compile.

A step enters as a graph of torch's operators (`step_graph`); patterns replace operators by fused launches (norms,
rotary embeddings, attention, routers, layers of one input), and a graph backend leaves: a CUDA graph, or on a CPU a
tape of prepared calls.

Half of a captured decode step is small kernels between the layers. The step runs once, for real, while its operators
are recorded with the very tensors that they ran on; caches and static inputs stay the same memory, and writes in place
stay writes, in their order. Layers of vbrt and attention are *leaves*, calls that run unseen and run again. A value of
a tensor that goes to Python, a shape that depends on data, autocast or derivatives end the record; the step goes on,
and is what one gets, with the reason.

**Patterns** (`fuse_step.py` lists them, in order) compare what models write, operator by operator, with traces of the
known ways to write it. Nothing is replaced if the step writes to memory that it reads. `same_bits` leaves only patterns
that give the eager kernels' bits: rotary embeddings and the cache's copies round where torch does, with products that
no compiler may contract; norms and softmax sum in another order.

**The check.** Kernels that are launched behind the dispatcher's back would be missing from the record. So the fused
step runs once from the state that the step began with, and its results are compared: bit for bit under `same_bits`,
else within a tenth of their norm. Where bits are lost the step is recorded anew and runs by its record with nothing
replaced, so that it can be captured all the same. `stats().steps` has what was fused and what was left, with the
reasons. Roads not taken: `make_fx`, which takes twenty times as long for the same record; and a kernel generated for
each chain of elementwise operators, because behind the patterns a layer of the measured models has none left.

**Deterministic attention** (`deterministic_attention.py`, `vbrt.kernels.step`). For a masked query on an H200 torch
2.11 takes cuDNN (`sdpa_sm80_flash_fprop_wmma_f16_knob_35_16x128x64_1x4x1`). In a step of a GPT-2 with 50 sequences it
gave other bits in each of ten runs of four steps from the same cache: compared module by module, the first that
differed was the output of attention, in one layer or another. At 16 sequences it repeated itself, and so it did 400
times alone; why is not known. With torch's "efficient" kernel, and with ours, all modules repeat themselves, and rows
of a verification have the bits of steps. A mode of torch's functions puts ours in the place of
`scaled_dot_product_attention`, where the mask is bool and alike for all heads, in steps of `exact` and `dense` models
that are captured or checked, and in verification. Models that attend otherwise (scores with a bias, "eager" attention)
keep torch's kernels; so do prompts, and steps with `compute.captures = false` or `compute.joins = false`.

**On a CPU** (`cpu_tape.py`) every result has an address, in blocks that results share whose lives do not overlap;
layers of one input are one C call, experts whose pages never move three (their ids are read by the host). Layers whose
pages move are leased by a Python call within the tape, and budgets, statistics and phases stay those of eager passes.
Attention goes over the places that the mask leaves, so a bucket of 1024 costs what it holds. Roads not taken: the whole
tape in one C call, since the calls themselves are a small part of a token; and torch.compile, whose code would be one
more thing to build where vbrt runs.

**Compiling ahead** (`precompile_launches.py`, `vbrt.kernels.cuda.compiling`): products of one token are noted when a
model is wrapped, those of a prompt when `generate` is called, on memory that stands in for weights and inputs
(`vbrt.layers.weights.precompile_kernels`), and fused launches when the step's graph is known, before it first runs.
`stats().steps.not_ahead` says why a launch was not compiled ahead.
"""

__all__: list[str] = []
