"""Product of lossless experts: the implementation that the model's config names, on decoded weights.

Sums are bit-identical to the plain module's: if experts are computed in chunks, rows of pairs are kept, then weighted
and summed after the last chunk as the implementation does.
"""

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from vbrt.kernels.experts import ExpertPages
from vbrt.layers.experts.gates import own_gate
from vbrt.layers.experts.gathered_experts import HeardPart, gathered_weights, most_gathered, ranked
from vbrt.layers.experts.library_experts import ExpertsView, implementation_of
from vbrt.layers.experts.protocols import ExpertsModule, LeasedExperts
from vbrt.layers.experts.sequential import InTurn
from vbrt.layers.experts.touched_experts import Routed, local_ids, pairs_of

__all__ = ["LibraryProduct", "has_norm"]


class LibraryProduct:
    """Computes by the implementation that the model's config names."""

    def __init__(self, layer: ExpertsModule, routed: Routed) -> None:
        self.layer, self.routed, self.handle = layer, routed, layer.handle
        self.name, self.forward = implementation_of(layer)
        self.in_order, self.only_in_turn = self.name is None, getattr(layer, "only_in_turn", False)
        self.rows: Tensor | None = None

    def _view(self, leased: LeasedExperts) -> ExpertsView:
        return ExpertsView(self.layer, leased.parameters(), leased.experts)

    def _local(self, leased: LeasedExperts) -> Tensor:
        return local_ids(self.routed.ids, self.handle.spec.experts, leased.experts)

    def whole(self, leased: LeasedExperts) -> Tensor:
        """All touched experts at once."""
        if not leased.experts:
            return self.routed.x.new_zeros(len(self.routed.x), self.handle.spec.columns)
        return self.forward(self._view(leased), self.routed.x, self._local(leased), self.routed.weights)

    def add(self, leased: LeasedExperts) -> None:
        """Add a chunk of experts."""
        self._add_rows(self._view(leased), self._local(leased), len(leased.experts))

    def in_turn(self, chunks: Sequence[Sequence[int]], precision: str) -> Tensor:
        """All experts, by an implementation that loops over them; each read leases."""
        x, ids, weights = self.routed.x, self.routed.ids, self.routed.weights
        with InTurn(self.handle, chunks, precision) as turns:
            spec = self.handle.spec
            stacks = {parameter: turns.stack(part) for parameter, part in zip(spec.parameters, spec.parts, strict=True)}
            return self.forward(ExpertsView(self.layer, stacks, None), x, ids, weights)

    def unheard(self, pages: ExpertPages) -> Tensor:
        """All touched experts, known only to the device, in chunks."""
        experts_P, local_Tk = ranked(self.routed.ids, self.handle.spec.experts)
        most, pairs = most_gathered(self.handle), len(experts_P)
        for first in range(0, pairs, most):
            if self.name == "batched_mm":
                self._put_pairs_from(first, min(pairs, first + most), pages)
                continue
            some_n = experts_P[first : first + most]
            view = self._gathered(some_n, pages)
            ahead_Tk = local_Tk - first
            self._put_unheard(view, ahead_Tk.where((ahead_Tk >= 0) & (ahead_Tk < len(some_n)), len(some_n)))
        return self.result()

    def _add_rows(self, view: ExpertsView, local_Tk: Tensor, count: int) -> None:
        """Add rows of pairs, before routing weights."""
        if self.name == "grouped_mm":
            self._add_groups(view, local_Tk, count)
            return
        pairs_P = pairs_of(local_Tk, count)
        ids_P = local_Tk.reshape(-1)[pairs_P]
        if self.name == "batched_mm":
            self._put_pairs(view, pairs_P, ids_P)
            return
        x, k = self.routed.x, local_Tk.shape[1]
        ones_P1 = x.new_ones(len(pairs_P), 1)
        self._put(pairs_P, self.forward(view, x[pairs_P // k], ids_P.unsqueeze(1), ones_P1))

    def _put(self, pairs_P: Tensor, y: Tensor) -> None:
        """Keep rows of pairs, in the dtype that they are computed in."""
        self._begun(y)[pairs_P] = y

    def _begun(self, y: Tensor) -> Tensor:
        """The rows of all pairs, zeros at first."""
        if self.rows is None:
            self.rows = y.new_zeros(self.routed.ids.numel(), self.handle.spec.columns)
        return self.rows

    def whole_heard(self, some: HeardPart, local_Tk: Tensor, pages: ExpertPages) -> Tensor:
        """All touched experts at once, from pages in device-managed slots."""
        if not some.experts:
            return self.routed.x.new_zeros(len(self.routed.x), self.handle.spec.columns)
        return self.forward(self._gathered(some.experts_n, pages), self.routed.x, local_Tk, self.routed.weights)

    def add_heard(self, some: HeardPart, pages: ExpertPages) -> None:
        """Add a chunk of experts, without a sync."""
        view = self._gathered(some.experts_n, pages)
        if self.name == "batched_mm":
            self._put_pairs(view, some.pairs_P, some.ids_P)
            return
        self._put(some.pairs_P, self._groups(view, some.pairs_P, some.ids_P, some.places_P, some.ends_n))

    def _gathered(self, experts_n: Tensor, pages: ExpertPages) -> ExpertsView:
        return ExpertsView(self.layer, gathered_weights(self.handle, pages, experts_n), experts_n)

    def _put_pairs_from(self, first: int, end: int, pages: ExpertPages) -> None:
        """The rows of the pairs from one to another as "batched_mm" computes them."""
        ids_P, experts = self.routed.ids.reshape(-1)[first:end].long(), self.handle.spec.experts
        outside_P1 = ((ids_P < 0) | (ids_P >= experts)).unsqueeze(1)
        view = self._gathered(ids_P.masked_fill(outside_P1.squeeze(1), -1), pages)
        places_P = torch.arange(end - first, dtype=torch.int64, device=ids_P.device)
        self._put_pairs(view, places_P + first, places_P)
        self.rows[first:end].masked_fill_(outside_P1, 0.0)

    def _put_pairs(self, view: ExpertsView, pairs_P: Tensor, ids_P: Tensor) -> None:
        """The rows of pairs, whose experts have these ids in the view, as "batched_mm" computes them."""
        library, k = sys.modules["transformers.integrations.moe"], self.routed.ids.shape[1]
        if len(pairs_P) == 1 < self.routed.ids.numel():  # torch multiplies a batch of one in another order
            pairs_P, ids_P = pairs_P.expand(2), ids_P.expand(2)

        def product(v: Tensor, name: str) -> Tensor:
            bias = getattr(view, f"{name}_bias")[ids_P] if view.has_bias else None
            return library._batched_linear(v, getattr(view, name)[ids_P], bias=bias, is_transposed=view.is_transposed)

        up, down = self.handle.spec.parameters
        y = product(self._gated(view, product(self.routed.x[pairs_P // k], up), pairs_P), down)
        self._put(pairs_P, view.post_expert_norm(y) if has_norm(view) else y)

    def _add_groups(self, view: ExpertsView, local_Tk: Tensor, count: int) -> None:
        """The rows of pairs as "grouped_mm" computes them: what a row gives depends on its place among those of its
        expert, and its sort is not stable."""
        perm_P = torch.sort(self.routed.ids.reshape(-1)).indices
        ids_P = local_Tk.reshape(-1)[perm_P]
        places_P = (ids_P < count).nonzero().squeeze(1)
        pairs_P, ids_P = perm_P[places_P], ids_P[places_P]
        ends_n = torch.bincount(ids_P, minlength=count).cumsum(0, dtype=torch.int32)
        self._put(pairs_P, self._groups(view, pairs_P, ids_P, places_P, ends_n))

    def _put_unheard(self, view: ExpertsView, local_Tk: Tensor) -> None:
        """`_add_groups` without a sync: rows of other experts come last, belong to no group, and are dropped."""
        perm_P, count = torch.sort(self.routed.ids.reshape(-1)).indices, view.num_experts
        ids_P = local_Tk.reshape(-1)[perm_P]
        places_P = (ids_P >= count).int().sort(stable=True).indices
        pairs_P, ids_P = perm_P[places_P], ids_P[places_P]
        here_P1, experts_n = (ids_P < count).unsqueeze(1), torch.arange(count, dtype=torch.int64, device=ids_P.device)
        ends_n = torch.searchsorted(ids_P, experts_n, right=True, out_int32=True)
        y = self._groups(view, pairs_P, ids_P.clamp(max=count - 1), places_P, ends_n)
        self._put(pairs_P, torch.where(here_P1, y, self._begun(y)[pairs_P]))

    def _groups(self, view: ExpertsView, pairs_P: Tensor, ids_P: Tensor, places_P: Tensor, ends_n: Tensor) -> Tensor:
        """What "grouped_mm" gives for pairs in the order of the view's experts, of which each one's rows end at
        `ends_n`; `places_P`: theirs among all pairs."""
        library, k = sys.modules["transformers.integrations.moe"], self.routed.ids.shape[1]

        def product(v: Tensor, name: str) -> Tensor:
            bias = getattr(view, f"{name}_bias")[ids_P] if view.has_bias else None
            return library._grouped_linear(v, getattr(view, name), ends_n, bias=bias, is_transposed=view.is_transposed)

        up, down = self.handle.spec.parameters
        y = product(self._gated(view, product(self.routed.x[pairs_P // k], up), places_P), down)
        return view.post_expert_norm(y) if has_norm(view) else y

    def _gated(self, view: ExpertsView, v_pN: Tensor, places_p: Tensor) -> Tensor:
        """g(v) of the rows that have these places among those of all pairs.

        On a CPU torch may give a number other bits at the end of a tensor than within it, so that all rows lie where
        they lie in the implementation's own tensor.
        """
        if v_pN.device.type != "cpu":
            return own_gate(view)(v_pN)
        v_PN = v_pN.new_zeros(self.routed.ids.numel(), v_pN.shape[1])
        v_PN[places_p] = v_pN
        return own_gate(view)(v_PN)[places_p]

    def result(self) -> Tensor:
        """The output after the last chunk."""
        weighted = self.rows * self.routed.weights.reshape(-1, 1)
        return weighted.view(*self.routed.ids.shape, -1).sum(dim=1).to(self.routed.x.dtype)


def has_norm(module: Any) -> bool:
    """True if the rows of experts go through a norm before they are weighed; older transformers know of none."""
    return getattr(module, "has_post_expert_norm", False)
