"""The layers that take the place of nn.Linear, of the subclasses that compute the same, of Conv1D and nn.Embedding.

Modules enter, whose class is changed in place (`swapped_layer.py`), so that hooks, attributes and every reference stay
valid. `weights` holds one weight each in the tiers, `modules` the classes around it, `experts` the modules that stack
the matrices of many experts.

**The layer must survive what torch does to a plain one** (docs/contract.md): either it gives what the plain layer
gives, or it refuses by name. `dense` and `exact` outputs equal the original's bit for bit, so the layer also takes the
path through torch that the original takes: `torch.matmul` folds the leading dimensions of its input if the weight
requires grad, and may batch instead if not, under `no_grad` too; so the weight that a lossless layer multiplies with
requires grad where the original's did. Copies share pages (they are read-only) and free them with their last owner; a
pickle carries its pages. `.to()` casts what the layer computes and shows; pages stay. Gradients flow to input and bias;
the backward pass leases the pages again instead of keeping the weight.

A layer does not follow its class: `nn.Linear.forward` that is replaced after `wrap` is not called, and a replaced
`F.linear` only where a layer decodes its weight for torch to multiply. Tools that work so go first, or use hooks.

**Parallel plans.** transformers' plans replace `module.forward` by a function that keeps the bound old one;
`rebind_forward.py` finds it in closures and puts the new class's there.
"""

from vbrt.layers.modules.layer_kinds import KINDS, Kind, kind_of, site_of
from vbrt.layers.modules.linear import VBLinear
from vbrt.layers.modules.unfreeze import thaw
from vbrt.layers.modules.vb_layer import VBLayer
from vbrt.layers.swapped_layer import SwappedLayer, strip
from vbrt.layers.weights.state import Weight, weights_in
from vbrt.layers.weights.weight_operators import handle_of
from vbrt.layers.weights.weight_spec import HandleSpec

__all__ = [
    "KINDS",
    "HandleSpec",
    "Kind",
    "SwappedLayer",
    "VBLayer",
    "VBLinear",
    "Weight",
    "handle_of",
    "kind_of",
    "site_of",
    "strip",
    "thaw",
    "weights_in",
]
