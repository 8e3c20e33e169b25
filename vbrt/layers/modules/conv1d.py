"""VBConv1D: transformers' Conv1D (the GPT-2 family), a linear layer that keeps its weight as [in, out].

Imported only once a model holds such a layer, so transformers stays optional.
"""

import torch
from torch.compiler import is_compiling

from vbrt.layers.modules.compiled_forward import compiled_linear
from vbrt.layers.modules.vb_layer import VBLayer
from vbrt.libraries.transformers_api import Conv1D

__all__ = ["VBConv1D"]


class VBConv1D(VBLayer, Conv1D):
    """Conv1D with its weight in a tier stack; coarse planes hold the transposed weight, [out, in]."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in] -> [..., out]; raises what VBLinear.forward raises."""
        if is_compiling():
            return compiled_linear(self, x, self._parameters["bias"])
        return self._product(x, self._parameters["bias"])
