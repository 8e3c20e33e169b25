"""VBFalconLinear: Falcon's linear layer, which rounds the product before it adds the bias, as it
was trained.

Imported only once a model holds such a layer, so transformers stays optional.
"""

import torch
from torch.compiler import is_compiling
from torch.fx import Proxy

from vbrt.kernels.observers import traced_call
from vbrt.layers.modules.compiled_forward import compiled_linear
from vbrt.layers.modules.linear import VBLinear
from vbrt.libraries.transformers_api import FalconLinear

__all__ = ["VBFalconLinear"]


class VBFalconLinear(VBLinear, FalconLinear):
    """FalconLinear with its weight in a tier stack."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """input [..., in_features] -> [..., out_features]; raises what VBLinear.forward raises."""
        if isinstance(input, Proxy):
            return traced_call(self, input)
        product = compiled_linear(self, input, None) if is_compiling() else self._product(input, None)
        bias = self._parameters["bias"]
        return product if bias is None else product + bias
