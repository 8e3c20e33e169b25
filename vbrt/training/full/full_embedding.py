"""FullEmbedding: an nn.Embedding whose table trains from the tiers.

The forward gathers rows where the table's page lives; the table does not move. The gradient is dense, as torch's, and
goes to the host like those of linear layers; a table tied to an output head accumulates both gradients.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from vbrt.tiers.stack.pass_counts import in_backward
from vbrt.tiers.stack.row_lookup import page_rows
from vbrt.training.full.full_layers import FullLayer, check_held, check_same, wanted
from vbrt.training.full.full_weight import FullWeight, graphs_end_here

__all__ = ["FullEmbedding"]


class FullEmbedding(FullLayer, nn.Embedding):
    """nn.Embedding that trains from the tiers. Made by `vbrt.wrap(model, "full", optimizer=...)`, not by hand."""

    def forward(self, input: Tensor) -> Tensor:
        """Return rows [..., embedding_dim] in bf16 for int32 or int64 indices [...].

        Raises:
            IndexError: an index out of range (GPU indices are checked on the host).
            TierError: a page cannot be read, or the table's last update failed.
        """
        return self._rows(input)

    @graphs_end_here
    def _rows(self, ids: Tensor) -> Tensor:
        handle = self._vb_handle
        if not handle.keys:
            self.materialize_()
        handle.forwards += 1
        check_held(self, handle)
        if not (torch.is_grad_enabled() and handle.trainable):
            return _taken(handle, ids)
        handle.gradient.expected += not in_backward()
        padding = -1 if self.padding_idx is None else self.padding_idx
        return _Lookup.apply(handle.parameter, ids, handle, padding, self.scale_grad_by_freq)

    def extra_repr(self) -> str:
        """nn.Embedding's, and where it trains."""
        return f"{super().extra_repr()}, trains from the tiers"


def _taken(handle: FullWeight, ids: Tensor) -> Tensor:
    handle.check_pages()
    handle.settle()
    rows_TK = page_rows(handle.stack, handle.keys[0]).take("weight", ids.reshape(-1).long())
    return rows_TK.to(handle.device).view(*ids.shape, handle.spec.shape[1])


class _Lookup(Function):
    """Embedding lookup whose gradient goes to the weight's handle; `parameter` anchors it in autograd's graph."""

    @staticmethod
    def forward(
        ctx: Any, parameter: nn.Parameter, ids: Tensor, handle: FullWeight, padding: int, by_frequency: bool
    ) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.handle, ctx.version, ctx.padding, ctx.by_frequency = handle, handle.state.version, padding, by_frequency
        return _taken(handle, ids)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (ids,) = ctx.saved_tensors
        check_same(ctx)
        rows = ctx.handle.spec.weight_shape[0]

        def compute(out: Tensor) -> None:
            out.copy_(torch.ops.aten.embedding_dense_backward(dy, ids, rows, ctx.padding, ctx.by_frequency))

        if wanted(ctx, ctx.handle):
            ctx.handle.outlet.send(ctx.handle.gradient, ctx.handle.spec.weight_shape, compute)
        return None, None, None, None, None
