"""VBLinear: an nn.Linear whose weight lives as planes in a tier stack."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.compiler import is_compiling

from vbrt.kernels.observers import dispatch_modes, is_tracing
from vbrt.layers.modules.compiled_forward import compiled_linear
from vbrt.layers.modules.unencoded_layers import become_shell, empty_weight
from vbrt.layers.modules.vb_layer import VBLayer

__all__ = ["VBLinear"]

_is_grad_enabled = torch.is_grad_enabled


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
        weight = handle.resident
        if weight is not None and parameters["weight"] is None and input.is_cuda is weight.is_cuda:
            ledger = handle.stack.ledger  # what `at_rest` says, without a call
            moving = ledger.travellers or ledger.retired or ledger.lost or ledger.guard.recorder
            if not (moving or _is_grad_enabled() or dispatch_modes() or is_tracing()):
                # the short way, with little more Python than nn.Linear's; modes would keep the very tensor, a page's
                handle.forwards += 1
                handle.page.hits += 1  # no call in between: one step for threads that share an interpreter lock
                return F.linear(input, weight, parameters["bias"])
        return self._product(input, parameters["bias"])

    def reset_parameters(self) -> None:
        """A new random weight, as nn.Linear draws it."""
        if self.materialized:
            become_shell(self, empty_weight(self._vb_handle))
        super().reset_parameters()

    def extra_repr(self) -> str:
        """nn.Linear's, and how the weight is held."""
        return f"{super().extra_repr()}, format={self._vb_handle.spec.label}"
