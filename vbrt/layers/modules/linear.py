"""VBLinear: an nn.Linear whose weight lives as planes in a tier stack."""

import torch
from torch import nn
from torch.compiler import is_compiling

from vbrt.layers.modules.compiled_forward import compiled_linear
from vbrt.layers.modules.vb_layer import VBLayer

__all__ = ["VBLinear"]


class VBLinear(VBLayer, nn.Linear):
    """nn.Linear with its weight in a tier stack. Made by `vbrt.wrap`, not by hand."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """input [..., in_features] -> [..., out_features]; gradients flow to input and bias.

        Raises:
            TierError: a page cannot be read or verified, or does not fit beside what is in use.
            FormatError: (first forward) the weight cannot be encoded.
        """
        if is_compiling():
            return compiled_linear(self, input, self._parameters["bias"])
        handle, parameters = self._vb_handle, self._parameters
        product = handle.product
        if product is not None and type(input) is torch.Tensor and parameters["weight"] is None:
            return product(handle, input, parameters["bias"])  # as `_product`, with a call less
        del handle  # as in `_product`
        return self._product(input, parameters["bias"])

    def reset_parameters(self) -> None:
        """A new random weight, as nn.Linear draws it."""
        if self.materialized:
            self.weight = self._vb_handle.empty_parameter()
        super().reset_parameters()

    def extra_repr(self) -> str:
        """nn.Linear's, and how the weight is held."""
        return f"{super().extra_repr()}, format={self._vb_handle.spec.label}"
