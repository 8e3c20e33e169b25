"""Quantization-aware training: weights stay dense parameters, and forwards see them rounded to the format.

In training mode a layer's forward multiplies by the rounded weight, its backward passes gradients to the dense one
(straight-through), and `vb.save` writes planes for inference.

An optimizer owns the weights; there are no pages and no copies. Under `dense` the forward is the call of the original
class; under a 4-bit format `F.linear(x, decode(encode(W)), b)`: the gradient of W is dYᵀ X, as if the rounded weight
were the weight, that of X uses the rounded weight. Autograd keeps X and nothing of the weight's size. The backward pass
rounds again under the same scales and refuses, by the layer's name, if weight or scales have changed meanwhile. It is
made of differentiable operations, so second derivatives are right too. `rounded_layer.py` has nn.Module's protocol.

**Keeping scales** (`incremental_encoding.py`). The costly part of encoding is the search for block scales: nine
candidates per block for `nvfp4`. A `Frame` keeps scales and codebook. In each step a block whose largest weight lies a
sixth or more beyond the largest level gets the scale that puts it there, without a search: clipped weights are what
makes kept scales worse than fresh ones. Scales are searched again `refresh_every` optimizer steps after the last
search, or early, when the share of clipped weights exceeds one and a half times what it was right after the search,
plus one in a thousand. A step is a change of the parameter that a training forward sees, known by its address and
version; micro-batches, recomputation and evaluation change nothing, so they cannot count, and no order of them changes
the schedule. Fused optimizers do not count their writes in the version, so a hook after each
`torch.optim.Optimizer.step` of the process does it for them. The share is counted on the device in the pass that
rounds, and read at the next step, when it has long been there: no step waits. Weights that are zero when scales are
searched count as clipped once they grow.

Measured (docs/measurements.md, train-curves): 300 steps of a byte-level Llama with 1.6 M swapped weights at a constant
learning rate of 1e-3; scales are searched 3 to 4 times a layer. Held-out loss is 0.04 % (`nvfp4`) and 0.1 %
(`quantile`) above that of fresh scales in each step, training loss over the last 20 steps 0.2 and 0.4 %. The engine
with its share of the backward pass is 15 % of an `nvfp4` step (fresh: 56 %), 26 % of a `quantile` step (fresh: 72 %).

A state dict holds one uint8 tensor per weight (`*.separation`): scales, codebook and six numbers of history, so a
resumed run is bit-identical. One without it, of a dense model, loads under `strict` and starts a new history. In
compiled graphs a layer is one opaque operator, `vbrt::trained_linear`.

**Routed experts** (`qat_experts.py`): one engine for each stacked parameter: its matrices are rounded as one weight of
[E N, K], whose blocks never cross from one expert into another; a save cuts the rows of each expert out. The forward
runs the module's implementation on a view with rounded parameters; the backward pass rounds again and runs it once
more. DBRX stays dense: another module picks its matrices.
"""

__all__: list[str] = []
