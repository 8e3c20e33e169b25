"""Forward of a layer of routed experts: dispatch by weights and residency.

| weights | computed by |
| --- | --- |
| `dense`, `exact` | the experts implementation that the model's config names, on the leased experts: its very bits |
| the same, all pages on the GPU, or the GPU decides | gathered pages: `gathered_experts.py` |
| 4 bits | the ops `experts_up` and `experts_down` on the leased pages |
| 4 bits, missing on the device, which decides | with `experts.miss`, some on the CPU: `hosted_experts.py` |
| 4 bits, missing on the device, the host decides | with `experts.miss`, the same ops on the CPU: `missed_experts.py` |
| under tracers and transforms, given weights | the module's own forward on decoded temporaries |

Which experts are touched the host hears from the device, for which it waits. It does not ask where all are leased: of
many pairs, where all pages are at home on the computing device, and in `leasing_all`, so that CUDA graphs can record.

If the touched experts do not fit into the tier at once, or a prompt touches nearly all of them, they are leased in
chunks, ascending. The rows of all pairs are kept until the last chunk, then weighted and summed as the implementation
does, so that the budget changes no bit.

Legend: T tokens, k experts a token, P = T k pairs, E experts, H hidden.
"""

import contextlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vbrt.errors import TierError
from vbrt.host import accelerator
from vbrt.kernels.frozen_product import as_autocast
from vbrt.layers.experts.adapted_experts import AdaptedLease, Adapters, adapters_of, with_adapters
from vbrt.layers.experts.gathered_experts import (
    Heard,
    batched,
    fits_gathered,
    gathered,
    may_gather,
    most_gathered,
    why_not_gathered,
)
from vbrt.layers.experts.kernels_product import KernelsProduct
from vbrt.layers.experts.leased_experts import resident_pages
from vbrt.layers.experts.library_experts import UNHEARD, ExpertsView, implementation_of
from vbrt.layers.experts.library_product import LibraryProduct
from vbrt.layers.experts.prompt_ring import chunks
from vbrt.layers.experts.protocols import ExpertsModule, ExpertsWeights, LeasedExperts
from vbrt.layers.experts.residency_owner import CachedLayer, HostOperands, HostRows
from vbrt.layers.experts.touched_experts import Routed, touched_experts
from vbrt.layers.weights.linear_product import pass_precision
from vbrt.residency.expert_leases import ExpertLeases

__all__ = ["chunks_of", "keeps_decoded", "leased_experts", "leasing_all", "plain_forward", "run_experts"]

#: the dtypes of x for which kernels take pages by address alone
BY_ADDRESS = (torch.bfloat16, torch.float16, torch.float32)

_NEARLY_ALL = 4  # pairs per expert from which nearly all are touched


class _Thread(threading.local):
    leases_all = False  # in a lease for each pass


_thread = _Thread()


@contextlib.contextmanager
def leasing_all() -> Iterator[None]:
    """Context in which this thread's passes of a layer lease all of its experts at once, whatever tokens are sent to:
    shapes and leases are the same for each routing, and the host waits for nothing."""
    before, _thread.leases_all = _thread.leases_all, True
    try:
        yield
    finally:
        _thread.leases_all = before


def keeps_decoded(layer: ExpertsModule, adapters: Adapters) -> bool:
    """True if autograd may keep the decoded weights of a pass for its backward, which comes at once: of all experts, in
    checkpointed blocks that are being recorded."""
    return _thread.leases_all and _decodes(layer.handle, pass_precision(), adapters)


def leased_experts(layer: ExpertsModule, ids_Tk: Tensor, *, decoded: bool) -> Sequence[int]:
    """Return the experts that a pass leases, ascending: those that ids name, for which it waits, or all.

    Args:
        decoded: the pass decodes what it leases.
    """
    experts, many = layer.handle.spec.experts, False
    if decoded and ids_Tk.numel() >= _NEARLY_ALL * experts:
        many = implementation_of(layer)[0] in UNHEARD and layer.handle.at_home
    if many or _thread.leases_all:
        return range(experts)
    return touched_experts(ids_Tk, experts)


@dataclass(frozen=True, slots=True)
class _Call:
    """One call of a layer.

    Attributes:
        scan: True if there are at least as many pairs as experts: nearly all experts are touched.
        fetches: missed experts are fetched, whatever `experts.miss` says.
        adapters: terms that are added to the weights.
    """

    layer: ExpertsModule
    handle: ExpertsWeights
    routed: Routed
    precision: str
    scan: bool
    fetches: bool
    adapters: Adapters


def run_experts(
    layer: ExpertsModule, routed: Routed, *, fetches: bool = False, adapters: Adapters | None = None
) -> Tensor:
    """Return the output of a layer, without gradients unless it `keeps_decoded`.

    Args:
        fetches: missed experts are fetched, whatever `experts.miss` says.
        adapters: terms that are added to the weights, which are decoded then.
    """
    handle = layer.handle
    recorder = handle.stack.guard.routing
    if recorder is not None:
        recorder.note(handle.spec.name, routed.ids.tolist())
    scan = routed.ids.numel() >= handle.spec.experts
    call = _Call(layer, handle, routed, pass_precision(), scan, fetches or bool(adapters), adapters or {})
    if call.adapters or (_thread.leases_all and handle.spec.lossless):
        return _leased(call)
    y = None if _thread.leases_all else _decided_by_device(call)
    if y is None:
        y = _resident(call)
    return _leased(call) if y is None else y


# -- the device decides -----------------------------------------------------------------------------------------------


def _decided_by_device(call: _Call) -> Tensor | None:
    """Output if the device decides residency; None if the host does."""
    handle, x = call.handle, call.routed.x
    cached = handle.deciding.asked() if x.device == handle.device else None
    if cached is None:
        return None
    if handle.spec.lossless:
        if why_not_gathered(handle) or (handle.spec.fine and call.precision == "coarse"):
            return None
        return _lossless_from_cache(call, cached)
    return _kernels_from_cache(call, cached) if x.dtype in BY_ADDRESS else None


def _kernels_from_cache(call: _Call, cached: CachedLayer) -> Tensor:
    """Output from the device cache; without a sync unless a prompt passes through, so that a CUDA graph may capture
    it."""
    handle, ids, product = call.handle, call.routed.ids, KernelsProduct(call.layer, call.routed)
    if not call.scan and cached.whole(ids):
        hosted = None if call.fetches else cached.hosted
        shares = None if hosted is None else hosted.shares(product.routed)
        if shares is not None:
            with cached.lease_beside(ids, shares, lambda: hosted.post(product.routed, shares.kept)) as addresses:
                return product.beside_host(cached.at(addresses), shares.kept, hosted.add)
        with cached.lease(ids) as addresses:  # which the device counts, in graphs that are replayed too
            return product.on_pages(cached.at(addresses))
    handle.routing.scan_unseen()
    if cached.passes(ids):
        cached.pass_through(ids, product.add_passing, handle.spec.experts)
    else:
        cached.each_part(ids, product.add_rows)
    return product.result()


def _lossless_from_cache(call: _Call, cached: CachedLayer) -> Tensor:
    """`_kernels_from_cache` of lossless experts. In one lease of all touched experts only the device knows them; for a
    scan the host learns them, and leases parts."""
    layer, handle, routed = call.layer, call.handle, call.routed
    if not routed.ids.numel():
        return routed.x.new_zeros(len(routed.x), handle.spec.columns)
    if not call.scan and cached.whole(routed.ids):
        with cached.lease(routed.ids) as addresses:
            few, pages = fits_gathered(handle, routed.ids), cached.at(addresses)
            if few and handle.spec.dense and implementation_of(layer)[0] == "batched_mm" and not layer.has_bias:
                return batched(layer, routed, *cached.slots(addresses, routed.ids))
            return gathered(layer, routed, pages) if few else LibraryProduct(layer, routed).unheard(pages)
    handle.routing.scan_unseen()
    heard, product, most = _heard_product(call)
    if heard.touched and cached.passes(routed.ids):
        cached.pass_through(routed.ids, lambda part, pages: product.add_heard(heard.part(part.experts), pages), most)
        return product.result()
    parts = cached.parts(routed.ids, heard.touched, most)
    for experts, part in parts:
        some = heard.part(experts)
        with cached.lease_part(part) as addresses:
            pages = cached.at(addresses)
            if len(parts) == 1:
                return product.whole_heard(some, heard.local_Tk, pages)
            product.add_heard(some, pages)
    return product.result()


def _heard_product(call: _Call) -> tuple[Heard, LibraryProduct, int]:
    """Return a pass's routing as the host hears it, its product, and how many experts are gathered at once; syncs."""
    _refuse_captures(call.handle, call.routed.ids)
    heard = Heard(call.routed.ids, call.handle.spec.experts)
    return heard, LibraryProduct(call.layer, call.routed), most_gathered(call.handle)


# -- pages that never move --------------------------------------------------------------------------------------------


def _resident(call: _Call) -> Tensor | None:
    """Output without a lease if all experts are on the computing GPU; else None."""
    layer, handle, routed = call.layer, call.handle, call.routed
    pages = resident_pages(handle, routed.x.device) if call.precision == "full" else None
    if pages is None:
        return None
    if handle.spec.lossless and not may_gather(handle):
        return None
    handle.routing.unlease()
    if not handle.spec.lossless:
        return KernelsProduct(layer, routed).resident(pages, scan=call.scan)
    if fits_gathered(handle, routed.ids):
        return gathered(layer, routed, pages)
    heard, product, most = _heard_product(call)
    if len(heard.touched) <= most:
        return product.whole_heard(heard.part(heard.touched), heard.local_Tk, pages)
    for experts in chunks(heard.touched, most):
        product.add_heard(heard.part(experts), pages)
    return product.result()


# -- the host leases --------------------------------------------------------------------------------------------------


def _leased(call: _Call) -> Tensor:
    """Output by leases of the touched experts; the CPU may compute missed ones."""
    layer, handle, routed = call.layer, call.handle, call.routed
    if not _thread.leases_all:
        _refuse_captures(handle, routed.ids)
    divides = not (call.scan or call.fetches) and call.precision == "full"
    missed = handle.deciding.missed if divides else None
    operands = None if missed is None else missed.operands(layer, as_autocast(routed.x), routed.ids)
    experts = handle.spec.experts
    if operands is not None:
        leased: Sequence[int] = list(operands.pairs(experts))
    else:
        leased = leased_experts(layer, routed.ids, decoded=_decodes(handle, call.precision, call.adapters))
    if isinstance(leased, range):
        handle.routing.scan_unseen()
    elif call.scan:
        handle.routing.scan(leased)
    else:
        handle.routing.decode(leased, len(routed.x))
    work = None if operands is None else missed.begin(layer, operands)
    if work is not None:
        return _beside_host(layer, routed, operands, work)
    return _in_chunks(call, leased)


def _decodes(handle: ExpertsWeights, precision: str, adapters: Adapters) -> bool:
    """True if experts are decoded, and multiplied by the implementation that the config names."""
    spec = handle.spec
    return bool(adapters) or (spec.lossless and not (spec.fine and precision == "coarse"))


def _in_chunks(call: _Call, touched: Sequence[int]) -> Tensor:
    """Output by as many leases as the budget requires."""
    handle, precision = call.handle, call.precision
    decoded = _decodes(handle, precision, call.adapters)
    product = LibraryProduct(call.layer, call.routed) if decoded else KernelsProduct(call.layer, call.routed)
    leases = list(chunks_of(handle, touched, scan=call.scan, precision=precision))
    if (call.scan or len(leases) > 1) and not (_thread.leases_all or handle.stack.at_rest):
        handle.stack.announce(handle.keys_of(touched, precision))
    if len(leases) == 1 and (decoded or not call.scan) and not product.only_in_turn:
        with handle.lease(leases[0], precision) as leased:
            return product.whole(_adapted(leased, call))
    if product.in_order and not call.adapters:
        return product.in_turn(leases, precision)
    for chunk in leases:
        with handle.lease(chunk, precision) as leased:
            product.add(_adapted(leased, call))
    return product.result()


def _adapted(leased: LeasedExperts, call: _Call) -> LeasedExperts | AdaptedLease:
    return AdaptedLease(leased, call.adapters) if call.adapters else leased


def _beside_host(layer: ExpertsModule, routed: Routed, operands: HostOperands, work: HostRows) -> Tensor:
    """Output with some experts computed by the CPU, overlapped with the others on the device."""
    handle, product = layer.handle, KernelsProduct(layer, routed)
    experts = [e for e in operands.pairs(handle.spec.experts) if e not in work.experts]
    for chunk in chunks_of(handle, experts, scan=False, precision="full"):
        with handle.lease(chunk) as leased:  # without any experts the policy hears of a lease, too
            # on the device kernels are chosen by the number of tokens, as where the device decides
            if chunk and accelerator.is_device(routed.x):
                product.add_rows(operands.sent(chunk, routed.ids), leased.pages())
            elif chunk:
                product.add(leased)
    product.add_host(work)
    return product.result()


def _refuse_captures(handle: ExpertsWeights, ids_Tk: Tensor) -> None:
    """Raise TierError within a CUDA graph's capture."""
    if accelerator.is_device(ids_Tk) and accelerator.is_current_stream_capturing():
        raise TierError(
            f"{handle.spec.name}: the host hears which experts {ids_Tk.numel()} ids name, and cannot in a CUDA graph"
        )


def chunks_of(handle: ExpertsWeights, touched: Sequence[int], *, scan: bool, precision: str) -> Iterator[Sequence[int]]:
    """Yield the experts of each lease, ascending."""
    count = len(touched) if _thread.leases_all else _experts_at_once(handle, scan=scan)
    for first in range(0, max(1, len(touched)), max(1, count)):  # once none, if there are none
        yield touched[first : first + count]


def _experts_at_once(handle: ExpertsWeights, *, scan: bool) -> int:
    """Return the number of experts per lease."""
    spec, policy = handle.spec, handle.stack.levels[0].policy
    moving = tuple(page.nbytes for page in handle.pages[: handle.planes])
    leases = ExpertLeases(spec.experts, spec.top_k, spec.weight_bytes // spec.experts, moving, spec.lossless)
    if not handle.streams:
        return leases.at_once(scan=scan, room_bytes=None)
    wanted = getattr(policy, "scan_pages", 0)
    return leases.at_once(scan=scan, room_bytes=policy.capacity_bytes, scan_pages=wanted)


def plain_forward(layer: ExpertsModule, *args: Any) -> Tensor:
    """Module's own forward, on decoded temporaries or given weights."""
    plain, handle = type(layer).plain_class(), layer.handle
    forward = getattr(type(layer), "own_rows", plain.forward)
    if not layer._is_given():
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
        return forward(ExpertsView(layer, with_adapters(weights, adapters_of(layer), None), None), *args)
    adapters = adapters_of(layer)
    if adapters:
        given = {name: getattr(layer, name) for name in adapters}
        return forward(ExpertsView(layer, with_adapters(given, adapters, None), None), *args)
    return forward(layer, *args)
