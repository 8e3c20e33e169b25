"""`requires_grad_(True)` turns VB layers back into plain, dense ones; `requires_grad_(False)` has `unwrap` give frozen
parameters back.

`nn.Module.requires_grad_` walks through parameters; importing this file patches it to find weights in the tiers, too.
"""

import functools
from collections.abc import Sequence

from torch import nn

from vbrt.layers.modules.training_warnings import warn_of_thawing
from vbrt.layers.modules.vb_layer import VBLayer
from vbrt.layers.swapped_layer import SwappedLayer

__all__ = ["thaw"]


def thaw(layers: Sequence[VBLayer]) -> None:
    """Turn VB layers into plain, dense ones that can train, with a warning."""
    if layers:
        warn_of_thawing([layer.handle for layer in layers])
    for layer in layers:
        if isinstance(layer, VBLayer):  # not yet, with one that is tied to it
            layer.thaw_()


def _see_requires_grad() -> None:
    """Patch nn.Module.requires_grad_, which walks through parameters, to find weights in the tiers."""
    plain = nn.Module.requires_grad_

    @functools.wraps(plain)
    def requires_grad_(self: nn.Module, requires_grad: bool = True) -> nn.Module:
        if requires_grad:
            thaw([module for module in self.modules() if isinstance(module, VBLayer)])
        else:
            for module in self.modules():
                if isinstance(module, SwappedLayer):
                    module.freeze_()
        return plain(self, requires_grad)

    nn.Module.requires_grad_ = requires_grad_


_see_requires_grad()
