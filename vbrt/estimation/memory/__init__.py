"""Memory estimates before loading: `vbrt.estimate`, `vbrt.fit_batch`.

A model on the meta device, a config and a `Task` enter. The task runs once on fake tensors, a few blocks standing for
all; every allocation is counted as torch's CUDA allocator would count it. An `Estimate` leaves: rows of bytes by phase
and tier.

Phases follow the blocks, first and further ones apart, because peaks are linear in the number of blocks only within a
phase; the maximum is taken after the extrapolation from three and four blocks of each kind. Three and not two: until
the second, some of the first's inputs live on. The meter (`live_bytes.py`) counts work, too (operators, the bytes they
move, operations of products by dtype), so predicted times need no list of models. Weights that train from the tiers are
frozen stand-ins in bf16 that are not counted, with a buffer that their gradients go to; kept parameters step as fp32
masters by the runtime's own code. `traced_checkpointing.py` runs blocks through the same class as a model's.

`cuda_allocator.py` rounds as torch's allocator does: a tensor of 10 MiB or more has whole 2 MiB unless more than 1 MiB
can be split off. Pages, the caches of captured steps and their copies are put into `Blocks` one after the other, so
that rests of shared segments count. Decode has the inputs of `generate`, with a mask and positions for each sequence.
`again_bytes` is the peak of a further call of `generate`, beside which captured steps stay. Fake tensors are on the
CPU, since a build without CUDA has no others; what that changes is in `gpu_operator_sizes.py`. Functions are replaced
there, not intercepted by a mode, which is off where checkpointed blocks run again. Where the data decide a size, all
elements count, and loops over such sizes are shortened (`data_dependent_loops.py`). `scripts/estimates.py` compares
estimates with measured peaks.

`gpu_share.py` turns `gpu_memory`, the process's share of a GPU, into the budget of the pages, by the same estimate.
"""

__all__: list[str] = []
