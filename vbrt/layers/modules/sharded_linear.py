"""ShardedLinear: a VBLinear whose weight is this rank's part of a DTensor.

Two families of parallel plans call it. transformers' hands it local tensors: then it is a VBLinear of local shapes.
torch's own (`torch.distributed.tensor.parallel`) hands it DTensors and expects one: lossless weights are multiplied by
torch's own rules for DTensors, so that outputs are those of the plain layer bit for bit; others by their kernels on the
local parts, of which the result is then declared.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from vbrt.layers.modules.linear import VBLinear
from vbrt.layers.swapped_layer import SwappedLayer
from vbrt.layers.weights.linear_product import kernels_of_pass, shared_product
from vbrt.layers.weights.weight_shards import Sharding, is_sharded

__all__ = ["ShardedLinear", "sharded_class"]


class ShardedLinear(VBLinear):
    """nn.Linear with its rank's part of the weight in a tier stack. Made by `vbrt.wrap`, not by hand."""

    _hf_quantized_needs_local_tp = True  # transformers: hand it local tensors, with gradients too
    _vb_shardings: dict[str, Sharding]

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """input [..., in_features] -> [..., out_features], of local sizes; a DTensor gives a DTensor."""
        if not is_sharded(input):
            return super().forward(input)
        return self._of_dtensor(input)

    def _of_dtensor(self, x: Any) -> Any:
        if self._vb_handle.lent is not None:
            self.notice_writes()
        self.materialize_()
        handle, bias, sharding = self._vb_handle, self._parameters["bias"], self._vb_shardings["weight"]
        if handle.spec.lossless and not (torch.is_grad_enabled() and x.requires_grad):
            handle.forwards += 1
            with shared_product(handle, kernels_of_pass(handle), handle.device) as product:
                return F.linear(x, sharding.whole(product.weight), bias)
        x = x.redistribute(placements=_inputs(sharding))
        y = self._product(x.to_local(grad_placements=_input_gradients(sharding)), None)
        y = _output(y, x, sharding)
        return y if bias is None else y + bias


def sharded_class(cls: type[SwappedLayer], module: nn.Module) -> type[SwappedLayer]:
    """Return the replacement class of a module, `cls` being that for unsharded weights."""
    return ShardedLinear if cls is VBLinear and is_sharded(module._parameters["weight"]) else cls


def _inputs(sharding: Sharding) -> list[Any]:
    """Return the input's placements: sharded like the weight's columns."""
    return [_cut_last(sharding) if _cuts_columns(sharding, p) else _replicate() for p in sharding.placements]


def _input_gradients(sharding: Sharding) -> list[Any]:
    """Return the placements of the input's gradient: a partial sum if the weight's rows are sharded."""
    tensor = _dtensor()
    columns = [_cuts_columns(sharding, p) for p in sharding.placements]
    return [
        _cut_last(sharding) if cut else _replicate() if placement.is_replicate() else tensor.Partial()
        for cut, placement in zip(columns, sharding.placements, strict=True)
    ]


def _output(y: torch.Tensor, x: Any, sharding: Sharding) -> Any:
    """Return `y` as local part of a DTensor: sharded like the weight's rows, or a partial sum."""
    tensor, shape = _dtensor(), (*y.shape[:-1], sharding.shape[0])
    placements = [
        tensor.Partial()
        if _cuts_columns(sharding, placement)
        else _replicate()
        if placement.is_replicate()
        else tensor.Shard(len(shape) - 1)
        for placement in sharding.placements
    ]
    stride = torch.empty(shape, dtype=y.dtype, device="meta").stride()
    return tensor.DTensor.from_local(y, sharding.mesh, placements, run_check=False, shape=shape, stride=stride)


def _cuts_columns(sharding: Sharding, placement: Any) -> bool:
    return not placement.is_replicate() and sharding.dim == 1


def _cut_last(sharding: Sharding) -> Any:
    return _dtensor().Shard(-1)


def _replicate() -> Any:
    return _dtensor().Replicate()


def _dtensor() -> Any:
    return torch.distributed.tensor
