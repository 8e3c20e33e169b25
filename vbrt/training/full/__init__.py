"""Training from the tiers: weights, gradients and optimizer state in host memory or files.

The forward and backward passes lease the high (bf16) half of each weight; gradients are copied to the host as they are
computed and accumulated there; the optimizer's update joins both halves, steps, and splits them again, in the
background. The user's optimizer is adapted in place.

**A weight in two halves and a bit** (`update_state.py`, `vbrt.kernels.update`). The fp32 master's high half is bf16,
rounded to nearest even like torch's cast. 65,537 masters round to an even half, both of its ties included, so 16 more
bits cannot tell them apart. The halves of the master's bits plus 2^15, an integer, are bf16, rounded half up, and the
16 lower bits; where these are 0 and the half is odd, nearest even is one less, and the weight's bit in a bitmap says
so. A list of such ties would be shorter in training, where one weight in 131,072 is one, but not at its beginning: of
weights that were fp16 once a sixteenth are. The bitmap is 1 % of the memory (1/8 of 14 bytes) and nearly none of the
traffic: a byte for each 1,024 weights says whether any of their bits is 1. The high half is a page, streamed like any
other. Low half, moments and gradient are pages for the host only: planned, in the budgets, and pageable, except for
gradients.

**Updates** (`optimizer_update.py`). `optimizer.step()` submits each weight's gradient and returns; a lease of the
weight waits until its update is stored. Updates run in the order of the next forward, so the last layers' overlap with
it. A team of C threads shares the parts of one weight at a time; of two threads one is in that call, while the other
takes the pages of the next weight, in Python. An error is raised at the next wait, and the update is retried at the
wait after it; gradients are kept until their weight is stored, so a step is completed and nothing is updated twice.
Updates never run in the waiting thread, so Ctrl-C leaves no weight half updated. State in files uses two more threads:
read-ahead for three weights, verified, and write-behind to a new file that replaces the old one. The norm for clipping
reads gradients once, in torch's order, which is one chain of sums for each weight (`clipping.py`): on a GPU's host as
they arrive, from the second step with clipping on, while threads have no updates; the factor is applied as the update
reads the gradient. A weight's update takes the GIL once, since taking it per part stalls the main thread, which
launches the GPU's work: on two cores, with four threads that update weights of 3 M parameters, a main thread that calls
small layers runs at 0.9 of its speed, instead of 0.24 (`scripts/update_bench.py --beside`). Around it, the pages of an
update are taken together, with the tensors that the tiers have of them: torch releases the GIL in every call, each view
of a page is one, and at each, as at each lock, the launching thread may have to sleep (`scripts/training_host.py`
counts how often). A budget change may rehome a weight's state just as its update begins: so the update checks again
once it holds the page, and computes on a copy if the state is now in a file. Rejected: rollback of a failed step, which
needs a copy of all state; and clipping by the previous step's norm, which trains another model.

**Updates ahead of the step** (`update_ahead.py`). What people type is `loss.backward(); optimizer.step()`, and updates
that begin at the step overlap with the next forward only, the shorter half. So a weight is updated within the backward
pass, out of place, and the step exchanges memory: of its state between two pages of the host, of its high half between
two page-locked ones (`Rewriter.exchange`), so that nothing is copied. It takes as much memory again as state and high
half, which is why it is bounded, and not needed. On the GPU's machine, gradients are queued as they reach the host, and
those of the first layers are updated first, so that what is left at the step is due last in the next forward. The C
code stores results past the caches: without that it would read the memory that it overwrites (`scripts/update_bench.py`
times it, "out of place").

**The user's objects** keep their identity. A weight's parameter keeps its shape and dtype and loses its values
(`streamed_parameter.py`): `p.grad` is the gradient on the host, writable and lazy (`lazy_gradient.py`), so that torch's
own clipping converts and writes none; reads of values raise an error with the parameter's name. The optimizer's class
changes in place: its `step` runs torch's own for resident parameters and submits the others. Resident bf16 parameters
have fp32 masters, too; parameters of more than 16 M numbers, such as a head, are stepped in chunks
(`resident_params.py`) with 135 MB of fp32 masters and gradients at a time, instead of 4.2 GB for a head of 128,256 x
4,096, the peak of the 8B shape's step. fp32 tables and modules without a layer kind stay on the computing device and
are stepped there by torch.

**Gradients** (`host_gradients.py`) are copied D2H through two buffers on the GPU, the only memory of a weight's size
besides the ring. `vb.stepping()` around the last backward pass updates each weight once its gradient is complete.

**Recorded blocks** (`block_weights.py`, `vbrt/model/recorded_blocks.py`). Seven leases, products and gradients a block,
three times a step, are a tenth of a millisecond of Python each, which holds up the GPU below 16,000 tokens. So a block
whose activations are checkpointed is replayed as CUDA graphs, which read all its pages in a ring of blocks and compute
its gradients into memory that every second block shares; from there they go to the host as those of eager layers do.

**Routed experts** (`full_experts.py`): each stacked parameter, [experts, N, K], is one weight. Not implemented: a page
per expert. It pays if a step's tokens touch few experts: with 128 experts, eight per token, evenly spread, 16 tokens
touch 64 % of them, 64 tokens 98 %. It needs high halves in a page for each expert; an update that writes high halves
expert by expert, with low halves, moments and gradient still stacked, since each step changes all of them, and since
the norm of a gradient and writes to `p.grad` concern the whole; and products on pages that are not side by side, with
the bits of the eager implementation only.

**Where a step's time goes** (`scripts/full_bench.py --profile`). On an H200 with 12 of 16 cores the 1.5 B model's step
took 0.71 s, an update alone 0.45: it overlaps, and layers waited 52 ms for it. With 8 threads the step took 0.69 s
although the update alone took 0.55: update threads compete with launches for cores. Forward and backward without any
update took no less, 0.73 s, and resident training, in another run, 0.62: the rest is due to copies of weights and
gradients, and was not profiled.
"""

__all__: list[str] = []
