"""Training from the tiers: weights, gradients and optimizer state in host memory or files.

The forward and backward passes lease the high (bf16) half of each weight; gradients are copied to the host as they
arise and accumulated there; the optimizer's update joins both halves, steps, and splits them again, in the background.
A user's optimizer is taken over in place.

**A weight in two halves and a bit** (`update_state.py`, `vbrt.kernels.update`). The fp32 master's high half is bf16,
what torch's cast gives: to nearest even. An even half has 65,537 masters that round to it, both of its ties among them,
so 16 more bits cannot tell them apart. The halves of the master's bits plus 2^15, an integer, are bf16, rounded half
up, and the 16 lower bits; where these are 0 and the half is odd, nearest even is one less, and the weight's bit in a
bitmap says so. A list of such ties would be shorter in training, where one weight in 131,072 is one, but not at its
beginning: of weights that were fp16 once a sixteenth are. The bitmap is 1 % of the memory (1/8 of 14 bytes) and nearly
none of the traffic: a byte for each 1,024 weights says whether any of their bits is 1. The high half is a page that
streams like any other. Low half, moments and gradient are pages that the host alone uses: planned, in the budgets, not
page-locked but for gradients.

**Updates** (`optimizer_update.py`). `optimizer.step()` submits each weight's gradient and returns; a lease of the
weight waits until its update is stored. Updates are done in the order of the next forward, so the last layers' go on
while it runs. One thread goes through the weights, a team in C shares the parts of one. An error is kept and raised at
the next wait, and the update is tried again at the wait after it; gradients stay until their weight is stored, so a
step is completed and nothing is updated twice. Work never runs in the thread that waits, so Ctrl-C finds no weight half
updated. State in files goes through two more threads: read ahead into memory for three weights, verified, and written
behind as a new file that replaces the old one. The norm for clipping reads gradients once, in torch's order, which is
one chain of sums for each weight; the factor is applied as the update reads the gradient. A weight's update takes
Python's lock once, since threads that take it for each part wait for it, and the main thread, which launches the GPU's
work, waits with them: on two cores four threads that update weights of 3 M parameters leave a main thread that calls
small layers 0.9 of its speed, where they left 0.24 (`scripts/update_bench.py --beside`). A budget may give a weight's
state another home just as its update begins: so the update looks again once it holds the page, and computes on a copy
if that is now in a file. Roads not taken: undoing a step that fails, which needs a copy of all state; and stepping by
the norm of the step before, which trains another model.

**The user's objects stay.** A weight's parameter keeps its identity, shape and dtype and loses its values
(`streamed_parameter.py`): `p.grad` is the gradient on the host, writes to it count, and whatever asks for values is
refused by name. The optimizer's class changes in place: its `step` does torch's own for what stayed and submits the
rest. bf16 parameters that stayed are stepped as fp32 masters, too; parameters of more than 16 M numbers, such as a
head, in chunks (`resident_params.py`), 135 MB of masters and gradients in fp32 at a time, where a head of 128,256 x
4,096 took 4.2 GB, the peak of the 8B shape's step. fp32 tables and what no kind knows stay on the computing device and
are stepped there by torch.

**Gradients** (`host_gradients.py`) leave through two buffers on the GPU, the only memory of a weight's size beside the
ring. `vb.stepping()` around the last backward pass updates each weight when its gradient is whole.

**Routed experts** (`full_experts.py`): each stacked parameter, [experts, N, K], is one weight. The road not taken yet
is a page for each expert. It pays where a step's tokens leave experts out: with 128 experts, eight a token, evenly
spread, 16 tokens meet 64 % of them, 64 tokens 98 %. It needs high halves in a page for each expert; an update that
writes high halves expert by expert, with low halves, moments and gradient still stacked, since each step changes all of
them, and since the norm of a gradient and writes to `p.grad` concern the whole; and products on pages that are not side
by side, with the bits of the eager implementation only.

**Where a step's time goes** (`scripts/full_bench.py --profile`). On an H200 with 12 of 16 cores the 1.5 B model's step
took 0.71 s, an update by itself 0.45: it is hidden, and layers waited 52 ms for it. With 8 threads it took 0.69 s
though the update by itself took 0.55: cores that update are cores that do not launch. Forward and backward without any
update took no less, 0.73 s, and resident training, in another run, 0.62: what is left is in how weights come and
gradients leave, and was not profiled.
"""

__all__: list[str] = []
