"""Product of 4- and 8-bit experts: the ops `experts_up` and `experts_down` on pages.

All experts of few tokens go through the ops at once. A scan keeps the rows of pairs and applies routing weights at the
end, for any number of chunks, so that the budget changes no bit.
"""

from collections.abc import Callable

from torch import Tensor

from vbrt.host.accelerator import is_device
from vbrt.kernels.experts import ExpertPages
from vbrt.kernels.frozen_product import as_autocast
from vbrt.layers.experts.device_cache import Passing
from vbrt.layers.experts.gates import kept_gate, own_gate
from vbrt.layers.experts.library_product import has_norm
from vbrt.layers.experts.protocols import ExpertsModule, LeasedExperts
from vbrt.layers.experts.residency_owner import HostRows
from vbrt.layers.experts.touched_experts import Routed, local_ids, pairs_of

__all__ = ["KernelsProduct"]


class KernelsProduct:
    """One call of a layer by the ops on pages."""

    in_order = only_in_turn = False

    def __init__(self, layer: ExpertsModule, routed: Routed) -> None:
        self.layer, self.handle, self.ops = layer, layer.handle, layer.handle.coder.ops_of_pass()
        self.routed = Routed(as_autocast(routed.x), routed.ids, routed.weights)
        self.dtype = routed.x.dtype
        self.rows: Tensor | None = None

    def whole(self, leased: LeasedExperts) -> Tensor:
        """All touched experts at once."""
        return self.on_pages(leased.pages())

    def on_pages(self, pages: ExpertPages) -> Tensor:
        """All touched experts at once, on their pages."""
        x, ids_Tk, weights_Tk = self.routed.x, self.routed.ids, self.routed.weights
        if has_norm(self.layer):
            y = self.ops.sum(self._rows(x, ids_Tk, None, pages), ids_Tk, weights_Tk, pages.experts)
        else:
            y = self._rows(x, ids_Tk, weights_Tk, pages)
        return self._complete(y)

    def beside_host(self, pages: ExpertPages, ids_Tk: Tensor, add: Callable[[Tensor], None]) -> Tensor:
        """The touched experts of `ids_Tk` on their pages, and those that `add` adds to a y [T, N]."""
        y = self._rows(self.routed.x, ids_Tk, self.routed.weights, pages)
        add(y)
        return self._complete(y)

    def resident(self, pages: ExpertPages, *, scan: bool) -> Tensor:
        """All experts, with all pages resident on the GPU: bit-identical to leased pages."""
        if not scan:
            return self.on_pages(pages)
        self.add_rows(self.routed.ids, pages)
        return self.result()

    def add(self, leased: LeasedExperts) -> None:
        """Add a chunk of experts: the rows of their pairs."""
        x, ids_Tk = self.routed.x, self.routed.ids
        if is_device(x) and len(leased.experts) == self.handle.spec.experts:
            self.add_rows(ids_Tk, leased.pages())
            return
        local_Tk = local_ids(ids_Tk, self.handle.spec.experts, leased.experts)
        if is_device(x):  # kernels are chosen by the number of tokens: the same ones as where the device decides
            self.add_rows(ids_Tk.masked_fill(local_Tk == len(leased.experts), -1), leased.pages())
            return
        pairs_P = pairs_of(local_Tk, len(leased.experts))
        self._add_pairs(pairs_P, pairs_P // ids_Tk.shape[1], ids_Tk.reshape(-1, 1)[pairs_P], leased.pages())

    def _add_pairs(self, pairs_P: Tensor, tokens_P: Tensor, ids_P1: Tensor, pages: ExpertPages) -> None:
        """Keep the rows of pairs; all others are zero at first."""
        if self.rows is None:
            self.rows = self._no_rows()
        rows = self._rows(self.routed.x.index_select(0, tokens_P), ids_P1, None, pages)
        self.rows.index_copy_(0, pairs_P, rows)

    def _no_rows(self) -> Tensor:
        return self.routed.x.new_zeros(self.routed.ids.numel(), self.handle.spec.columns)

    def add_rows(self, ids_Tk: Tensor, pages: ExpertPages) -> None:
        """Add a chunk: the rows of pairs whose ids are no sentinels; all others are zero."""
        rows = self._rows(self.routed.x, ids_Tk, None, pages)
        if has_norm(self.layer):
            rows = rows.masked_fill(ids_Tk.reshape(-1, 1) < 0, 0.0)
        self.rows = rows if self.rows is None else self.rows.add_(rows)

    def add_passing(self, part: Passing, pages: ExpertPages) -> None:
        """Add a chunk: the rows of its pairs, by the kernels of the whole pass."""
        self._add_pairs(part.pairs, part.tokens, part.ids, pages)

    def add_host(self, work: HostRows) -> None:
        """Wait for the rows that the CPU computes, and add them."""
        rows = work.rows()
        if has_norm(self.layer):
            apart = work.ids().reshape(-1, 1).to(rows.device) < 0
            rows = self.layer.post_expert_norm(rows).masked_fill(apart, 0.0)
        self.rows = rows if self.rows is None else self.rows.add_(rows)  # each row has one summand that is not zero

    def _rows(self, x_TH: Tensor, ids_Tk: Tensor, weights_Tk: Tensor | None, pages: ExpertPages) -> Tensor:
        """W_down g(W_up x) of each pair, or their weighted sums."""
        layer, ops = self.layer, self.ops
        own = getattr(type(layer), "rows_of_pages", None)
        if own is not None:
            return own(layer, ops, Routed(x_TH, ids_Tk, weights_Tk), pages)
        up, down = (layer._parameters.get(f"{site.parameter}_bias") for site in self.handle.spec.sites)
        gate = kept_gate(layer)
        h_PI = ops.up(x_TH, ids_Tk, pages, gate=gate, bias_EN=up)
        h_PI = own_gate(layer)(h_PI) if gate is None else h_PI
        y = ops.down(h_PI, ids_Tk, weights_Tk, pages, bias_EN=down)
        return layer.post_expert_norm(y) if weights_Tk is None and has_norm(layer) else y

    def result(self) -> Tensor:
        """The output after the last chunk."""
        rows = self._no_rows() if self.rows is None else self.rows
        return self._complete(self.ops.sum(rows, self.routed.ids, self.routed.weights, self.handle.spec.experts))

    def _complete(self, y_TH: Tensor) -> Tensor:
        """Add the layer's terms other than its routed experts."""
        beside = getattr(type(self.layer), "beside_experts", None)
        return (y_TH if beside is None else y_TH + beside(self.layer, self.routed)).to(self.dtype)
