"""How a layer of routed experts computes, where the host decides which pages are leased.

| weights | how |
| --- | --- |
| `dense`, `exact` | the experts implementation that the model's config names, on the leased experts: its very bits |
| `dense`, few tokens with all pages on the GPU; all where it decides | on gathered pages: `gathered_dense.py` |
| 4 bits | the ops `experts_up` and `experts_down` on the leased pages |
| 4 bits, experts that are not on the device | the same by the CPU where `experts.miss` has it: `missed_experts.py` |
| tracers, transforms, weights that somebody has put in their place | the module's own forward on decoded temporaries |

Where the experts that a pass touches do not fit into the tier at once, or a prompt goes through nearly all of them,
they are leased in chunks, ascending. The rows of all pairs are kept until the last chunk, and are weighed and summed
then as the implementation does it, so that a budget changes no bit.

Legend: T tokens, k experts a token, P = T k pairs, E experts, H hidden.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vbrt.errors import TierError
from vbrt.kernels.experts import ExpertPages
from vbrt.kernels.frozen_product import as_autocast
from vbrt.layers.experts.gates import kept_gate, own_gate
from vbrt.layers.experts.gathered_dense import (
    Heard,
    HeardPart,
    batched,
    fits_gathered,
    gathered,
    gathered_weights,
    may_gather,
    ranked,
    why_not_gathered,
)
from vbrt.layers.experts.leased_experts import resident_pages
from vbrt.layers.experts.library_experts import ExpertsView, implementation_of
from vbrt.layers.experts.sequential import InTurn
from vbrt.layers.experts.touched_experts import local_ids, pairs_of, touched_experts
from vbrt.layers.weights.linear_product import pass_precision
from vbrt.residency.expert_leases import ExpertLeases, gathered_at_once

if TYPE_CHECKING:
    from vbrt.layers.experts.cpu_experts import HostWork, Operands, TeamWork
    from vbrt.layers.experts.experts_handle import ExpertsHandle
    from vbrt.layers.experts.experts_layer import VBExperts
    from vbrt.layers.experts.leased_experts import Leased
    from vbrt.layers.experts.residency_owner import CachedLayer

__all__ = ["Routed", "chunks_of", "plain_forward", "run_experts"]

#: the dtypes of x for which kernels take pages by address alone
BY_ADDRESS = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True, slots=True)
class Routed:
    """The arguments of a layer's forward: x [T, H], ids and weights [T, k]."""

    x: Tensor
    ids: Tensor
    weights: Tensor


def run_experts(layer: "VBExperts", routed: Routed, *, fetches: bool = False) -> Tensor:
    """Return the output of a layer, without gradients.

    Args:
        fetches: missed experts are fetched, whatever `experts.miss` says.
    """
    handle = layer.handle
    recorder = handle.stack.guard.routing
    if recorder is not None:
        recorder.note(handle.spec.name, routed.ids.tolist())
    precision = pass_precision()
    scan = routed.ids.numel() >= handle.spec.experts
    cached = handle.deciding.asked() if routed.x.device == handle.device else None
    if cached is not None and not handle.spec.dense and routed.x.dtype in BY_ADDRESS:
        return _by_device(layer, routed, cached, scan=scan)
    if cached is not None and handle.spec.dense and not why_not_gathered(handle):
        return _dense_by_device(layer, routed, cached, scan=scan)
    pages = resident_pages(handle, routed.x.device) if precision == "full" else None
    if pages is not None and not handle.spec.dense:
        handle.routing.unlease()
        return _Kernels(layer, routed).resident(pages, scan=scan)
    if pages is not None and fits_gathered(handle, routed.ids) and may_gather(handle):
        handle.routing.unlease()
        return gathered(layer, routed, pages)
    _refuse_captures(handle, routed.ids)
    missed = None if scan or fetches or precision != "full" else handle.deciding.missed
    operands = None if missed is None else missed.operands(layer, as_autocast(routed.x), routed.ids)
    experts = handle.spec.experts
    touched = touched_experts(routed.ids, experts) if operands is None else list(operands.pairs(experts))
    if scan:
        handle.routing.scan(touched)
    else:
        handle.routing.decode(touched, len(routed.x))
    work = None if operands is None else missed.begin(layer, operands)
    if work is not None:
        return _beside_host(layer, routed, operands, work)
    lossless = handle.spec.lossless and not (handle.spec.fine and precision == "coarse")
    compute = _Library(layer, routed) if lossless else _Kernels(layer, routed)
    chunks = list(chunks_of(handle, touched, scan=scan, precision=precision))
    if (scan or len(chunks) > 1) and not handle.stack.at_rest:
        handle.stack.announce(handle.keys_of(touched, precision))
    if len(chunks) == 1 and (lossless or not scan) and not compute.only_in_turn:
        with handle.lease(chunks[0], precision) as leased:
            return compute.whole(leased)
    if compute.in_order:
        return compute.in_turn(chunks, precision)
    for chunk in chunks:
        with handle.lease(chunk, precision) as leased:
            compute.add(leased)
    return compute.result()


def _by_device(layer: "VBExperts", routed: Routed, cached: "CachedLayer", *, scan: bool) -> Tensor:
    """`run_experts` where the device decides: nothing waits for it, and a graph may record what is launched."""
    handle, compute = layer.handle, _Kernels(layer, routed)
    if not scan and cached.whole(routed.ids):
        with cached.lease(routed.ids) as addresses:  # which the device counts, in graphs that are replayed too
            return compute.on_pages(cached.at(addresses))
    handle.routing.scan_unseen()
    cached.each_part(routed.ids, compute.add_rows)
    return compute.result()


def _dense_by_device(layer: "VBExperts", routed: Routed, cached: "CachedLayer", *, scan: bool) -> Tensor:
    """`_by_device` of experts held dense. In a lease of all that are touched nobody but the device knows which these
    are; what a scan touches the host hears, and has parts of it leased."""
    handle = layer.handle
    if not routed.ids.numel():
        return routed.x.new_zeros(len(routed.x), handle.spec.columns)
    if not scan and cached.whole(routed.ids):
        with cached.lease(routed.ids) as addresses:
            few, pages = fits_gathered(handle, routed.ids), cached.at(addresses)
            if few and implementation_of(layer)[0] == "batched_mm" and not layer.has_bias:
                return batched(layer, routed, *cached.slots(addresses, routed.ids))
            return gathered(layer, routed, pages) if few else _Library(layer, routed).unheard(pages)
    _refuse_captures(handle, routed.ids)
    handle.routing.scan_unseen()
    heard, compute, first = Heard(routed.ids, handle.spec.experts), _Library(layer, routed), 0
    parts = cached.parts(routed.ids, heard.touched, gathered_at_once(handle.pages[0].nbytes))
    for experts, part in parts:
        some = heard.part(first, first + len(experts))
        first += len(experts)
        with cached.lease_part(part) as addresses:
            pages = cached.at(addresses)
            if len(parts) == 1:
                return compute.whole_heard(some, heard.local_Tk, pages)
            compute.add_heard(some, pages)
    return compute.result()


def _refuse_captures(handle: "ExpertsHandle", ids_Tk: Tensor) -> None:
    """Raise TierError within a CUDA graph's capture."""
    if ids_Tk.is_cuda and torch.cuda.is_current_stream_capturing():
        raise TierError(
            f"{handle.spec.name}: the host hears which experts {ids_Tk.numel()} ids name, and cannot in a CUDA graph"
        )


def _beside_host(layer: "VBExperts", routed: Routed, operands: "Operands", work: "TeamWork | HostWork") -> Tensor:
    """`run_experts` where the CPU computes some experts, and the device meanwhile the others."""
    handle, compute = layer.handle, _Kernels(layer, routed)
    experts = [e for e in operands.pairs(handle.spec.experts) if e not in work.experts]
    for chunk in chunks_of(handle, experts, scan=False, precision="full"):
        with handle.lease(chunk) as leased:  # without any experts the policy hears of a lease, too
            if chunk and routed.x.is_cuda:  # kernels are chosen by the number of tokens, as where the device decides
                compute.add_rows(operands.sent(chunk, routed.ids), leased.pages())
            elif chunk:
                compute.add(leased)
    compute.add_host(work)
    return compute.result()


def chunks_of(
    handle: "ExpertsHandle", touched: Sequence[int], *, scan: bool, precision: str
) -> Iterator[Sequence[int]]:
    """Yield the experts of each lease, ascending."""
    count = max(1, _experts_at_once(handle, scan=scan))
    for first in range(0, max(1, len(touched)), count):  # once none, if there are none
        yield touched[first : first + count]


def _experts_at_once(handle: "ExpertsHandle", *, scan: bool) -> int:
    """How many experts one lease takes."""
    spec, policy = handle.spec, handle.stack.levels[0].policy
    moving = tuple(page.nbytes for page in handle.pages[: handle.planes])
    leases = ExpertLeases(spec.experts, spec.top_k, spec.weight_bytes // spec.experts, moving, spec.lossless)
    if not handle.streams:
        return leases.at_once(scan=scan, room_bytes=None)
    wanted = getattr(policy, "scan_pages", 0)
    return leases.at_once(scan=scan, room_bytes=policy.capacity_bytes, scan_pages=wanted)


# -- lossless ---------------------------------------------------------------------------------------------------------


class _Library:
    """Computes by the implementation that the model's config names."""

    def __init__(self, layer: "VBExperts", routed: Routed) -> None:
        self.layer, self.routed, self.handle = layer, routed, layer.handle
        self.name, self.forward = implementation_of(layer)
        self.in_order, self.only_in_turn = self.name is None, getattr(layer, "only_in_turn", False)
        self.rows: Tensor | None = None

    def _view(self, leased: "Leased") -> ExpertsView:
        return ExpertsView(self.layer, leased.parameters(), leased.experts)

    def _local(self, leased: "Leased") -> Tensor:
        return local_ids(self.routed.ids, self.handle.spec.experts, list(leased.experts))

    def whole(self, leased: "Leased") -> Tensor:
        """All touched experts at once."""
        if not leased.experts:
            return self.routed.x.new_zeros(len(self.routed.x), self.handle.spec.columns)
        return self.forward(self._view(leased), self.routed.x, self._local(leased), self.routed.weights)

    def add(self, leased: "Leased") -> None:
        """Some of them."""
        self._add_rows(self._view(leased), self._local(leased), len(leased.experts))

    def in_turn(self, chunks: Sequence[Sequence[int]], precision: str) -> Tensor:
        """All of them, by an implementation that reads them one after the other, which leases them as it does."""
        x, ids, weights = self.routed.x, self.routed.ids, self.routed.weights
        with InTurn(self.handle, chunks, precision) as turns:
            spec = self.handle.spec
            stacks = {parameter: turns.stack(part) for parameter, part in zip(spec.parameters, spec.parts, strict=True)}
            return self.forward(ExpertsView(self.layer, stacks, None), x, ids, weights)

    def unheard(self, pages: ExpertPages) -> Tensor:
        """All touched experts, of which only the device knows which they are, some at a time."""
        experts_P, local_Tk = ranked(self.routed.ids, self.handle.spec.experts)
        most, pairs = gathered_at_once(self.handle.pages[0].nbytes), len(experts_P)
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
        """The rows of pairs, before they are weighed."""
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
        """All touched experts at once, from pages that the device has put where it likes."""
        if not some.experts:
            return self.routed.x.new_zeros(len(self.routed.x), self.handle.spec.columns)
        return self.forward(self._gathered(some.experts_n, pages), self.routed.x, local_Tk, self.routed.weights)

    def add_heard(self, some: HeardPart, pages: ExpertPages) -> None:
        """Some of them; nothing waits."""
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
        ids_P = ids_P.clamp(0, experts - 1)
        view = self._gathered(ids_P, pages)
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
        self._put(pairs_P, view.post_expert_norm(y) if _has_norm(view) else y)

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
        """`_add_groups` without a wait: rows of other experts come last, belong to no group, and are dropped."""
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
        return view.post_expert_norm(y) if _has_norm(view) else y

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


def plain_forward(layer: "VBExperts", *args: Any) -> Tensor:
    """The module's own forward on decoded temporaries, or on what somebody has put in their place."""
    plain, handle = type(layer).plain_class(), layer.handle
    forward = getattr(type(layer), "own_rows", plain.forward)
    if not layer._given():
        weights = {
            site.parameter: torch.ops.vbrt.expert_weight(
                handle.token_at(handle.generation),
                site.parameter,
                list(site.kept_shape),
                handle.dtype,
                handle.device_name,
            )
            for site in handle.spec.sites
        }
        return forward(ExpertsView(layer, weights, None), *args)
    return forward(layer, *args)


# -- 4 bits -----------------------------------------------------------------------------------------------------------


class _Kernels:
    """Computes by the ops on pages.

    All experts of few tokens go through the ops at once. In a scan the rows of pairs are kept and weighed at the end,
    in one chunk as in many.
    """

    in_order = only_in_turn = False

    def __init__(self, layer: "VBExperts", routed: Routed) -> None:
        self.layer, self.handle, self.ops = layer, layer.handle, layer.handle.coder.ops_of_pass()
        self.routed = Routed(as_autocast(routed.x), routed.ids, routed.weights)
        self.dtype = routed.x.dtype
        self.rows: Tensor | None = None

    def whole(self, leased: "Leased") -> Tensor:
        """All touched experts at once."""
        return self.on_pages(leased.pages())

    def on_pages(self, pages: ExpertPages) -> Tensor:
        """All touched experts at once, on their pages."""
        x, ids_Tk, weights_Tk = self.routed.x, self.routed.ids, self.routed.weights
        if _has_norm(self.layer):
            y = self.ops.sum(self._rows(x, ids_Tk, None, pages), ids_Tk, weights_Tk, pages.experts)
        else:
            y = self._rows(x, ids_Tk, weights_Tk, pages)
        return self._complete(y)

    def resident(self, pages: ExpertPages, *, scan: bool) -> Tensor:
        """All experts, where all pages are on the GPU: as where they are not, bit for bit."""
        if not scan:
            return self.on_pages(pages)
        self.add_rows(self.routed.ids, pages)
        return self.result()

    def add(self, leased: "Leased") -> None:
        """Some of them: the rows of their pairs."""
        x, ids_Tk = self.routed.x, self.routed.ids
        if self.rows is None and not x.is_cuda:
            self.rows = x.new_zeros(ids_Tk.numel(), self.handle.spec.columns)
        local_Tk = local_ids(ids_Tk, self.handle.spec.experts, list(leased.experts))
        if x.is_cuda:  # kernels are chosen by the number of tokens: the same ones as where the device decides
            self.add_rows(ids_Tk.masked_fill(local_Tk == len(leased.experts), -1), leased.pages())
            return
        pairs_P = pairs_of(local_Tk, len(leased.experts))
        ids_P1 = ids_Tk.reshape(-1, 1)[pairs_P]
        self.rows[pairs_P] = self._rows(x[pairs_P // ids_Tk.shape[1]], ids_P1, None, leased.pages())

    def add_rows(self, ids_Tk: Tensor, pages: ExpertPages) -> None:
        """Some of them: the rows of the pairs whose ids are no sentinels; all others are zero."""
        rows = self._rows(self.routed.x, ids_Tk, None, pages)
        if _has_norm(self.layer):
            rows = rows.masked_fill(ids_Tk.reshape(-1, 1) < 0, 0.0)
        self.rows = rows if self.rows is None else self.rows.add_(rows)

    def add_host(self, work: "TeamWork | HostWork") -> None:
        """Add the rows that the CPU computes, when they are there."""
        rows = work.rows()
        if _has_norm(self.layer):
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
        return layer.post_expert_norm(y) if weights_Tk is None and _has_norm(layer) else y

    def result(self) -> Tensor:
        """The output after the last chunk."""
        return self._complete(self.ops.sum(self.rows, self.routed.ids, self.routed.weights, self.handle.spec.experts))

    def _complete(self, y_TH: Tensor) -> Tensor:
        """With what the layer adds beside its experts."""
        beside = getattr(type(self.layer), "beside_experts", None)
        return (y_TH if beside is None else y_TH + beside(self.layer, self.routed)).to(self.dtype)


def _has_norm(module: Any) -> bool:
    """True if the rows of experts go through a norm before they are weighed; older transformers know of none."""
    return getattr(module, "has_post_expert_norm", False)
