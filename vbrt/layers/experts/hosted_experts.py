"""Hosted experts: in passes of few tokens the CPU computes a share of a layer's missed experts where their pages lie.

    layers = HostedMisses(missed, mailbox).take(handles)     # beside a device cache
    hosted = layers[name]
    shares = hosted.shares(routed)                           # None where all misses are fetched
    with cached.lease_beside(ids, shares, lambda: hosted.post(routed, shares.kept)) as addresses:
        ...                                                  # y of the experts that are kept, and then
        hosted.add(y)                                        # waits, and adds what the CPU has computed

The device decides which experts are resident, which misses it fetches, and which it posts into a mailbox in page-locked
memory (`kernels/cuda/mailbox.py`, `kernels/cpu/hosted.py`). The division is a table of counts from measured rates
(`miss_policy.py`), so that link and CPU end together. All of it is captured in a CUDA graph like any product.
"""

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from vbrt.kernels.cpu.hosted import HostedExperts, places_of
from vbrt.kernels.cuda.experts.residency import Shares
from vbrt.kernels.cuda.mailbox import GROUP
from vbrt.layers.experts.gates import kept_gate
from vbrt.layers.experts.library_product import has_norm
from vbrt.layers.experts.miss_rates import posted_rates
from vbrt.layers.experts.missed_experts import MissedExperts
from vbrt.layers.experts.protocols import ExpertsModule, ExpertsWeights
from vbrt.layers.experts.touched_experts import Routed
from vbrt.layers.weights.hosted_rates import resident_seconds
from vbrt.layers.weights.hosted_weights import MOST_TOKENS, Host, refusal
from vbrt.layers.weights.linear_product import pass_precision
from vbrt.libraries.torch_api import is_capturing
from vbrt.residency.hosted_share import HostRates
from vbrt.residency.miss_policy import hosted_counts
from vbrt.tiers.stack.staged_pages import on_drive

__all__ = ["HostedLayer", "HostedMisses"]


class HostedMisses:
    """Missed experts of one model that the CPU computes while the device decides.

    Args:
        missed: of the model: the mode, and which layers the CPU computes.
        mailbox: gives the mailbox with room for so many bytes of inputs and results.

    Attributes:
        rates: measured once, at first use.
    """

    def __init__(self, missed: MissedExperts, mailbox: Callable[[int], Host]) -> None:
        self._missed, self._mailbox = missed, mailbox
        self.rates: HostRates | None = None

    def refusal(self, handles: Iterable[ExpertsWeights]) -> str:
        """Return why the CPU computes none of these layers' experts for the device; "" if it computes some."""
        handles = list(handles)
        whys = [self._refusal(handle) for handle in handles]
        return whys[0] if all(whys) else refusal(handles[0].stack) or ""

    def _refusal(self, handle: ExpertsWeights) -> str:
        layer = next(iter(handle.layers), None)
        if layer is None or has_norm(layer):
            return f"{handle.spec.name}: it normalizes the rows of experts"
        sides = _shapes(handle)["up"][1], _shapes(handle)["down"][0]
        if any(side % GROUP for side in sides):
            return f"{handle.spec.name}: its inputs and outputs {sides} are no multiples of {GROUP}"
        if any(on_drive(handle.stack, key) for key in handle.keys):
            return f"{handle.spec.name}: some of its pages live on a drive"
        why = self._missed.why_fetched(layer)
        return f"{handle.spec.name}: {why}" if why else ""

    def told(self, layers: int) -> str:
        """Return the line of `stats(verbose=True)` for so many layers."""
        what = "computed on the CPU" if self.rates is None else f"divided between CPU and link ({self.rates})"
        return f"{what}, in {layers} layers, as the GPU decides"

    @torch.inference_mode(False)  # biases and the mailbox are written by passes outside of it, too
    def take(self, handles: Mapping[str, ExpertsWeights]) -> "dict[str, HostedLayer]":
        """Return the layers whose missed experts the CPU computes in part, by name.

        Raises KernelError: the CPU does not compute them; says why.
        """
        taken = {name: handle for name, handle in handles.items() if not self._refusal(handle)}
        host = self._mailbox(max(map(_room_bytes, taken.values())))
        layers = {name: HostedLayer(host, handle) for name, handle in taken.items()}
        if self._missed.mode == "auto" and self.rates is None:
            largest = max(taken, key=lambda name: taken[name].pages[0].nbytes)
            self.rates = posted_rates(layers[largest].experts, taken[largest].dtype, taken[largest].device)
        for layer in layers.values():
            layer.divide(self.rates)
        return layers


def _shapes(handle: ExpertsWeights) -> Mapping[str, tuple[int, int]]:
    return handle.form([None] * handle.spec.experts).shapes


def _room_bytes(handle: ExpertsWeights) -> int:
    shapes = _shapes(handle)
    return places_of(MOST_TOKENS, handle.spec.top_k, shapes["up"][1], shapes["down"][0], handle.dtype).end


def _room_for(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else torch.empty(bias.shape, dtype=bias.dtype, device="cpu")


class HostedLayer:
    """One layer.

    Attributes:
        experts: in host memory; their pages stay there while a device cache has them.
    """

    def __init__(self, host: Host, handle: ExpertsWeights) -> None:
        stack, layer = handle.stack, next(iter(handle.layers))
        views: list[Tensor | None] = [stack.levels[page.home].slots[page.key].view for page in handle.pages]
        self._host, self._name, self._dtype = host, handle.spec.name, handle.dtype
        self._device, self._nbytes = handle.device, handle.pages[0].nbytes
        self._layer: weakref.ref[Any] = weakref.ref(layer)
        self._sites = tuple(f"{site.parameter}_bias" for site in handle.spec.sites)
        self._stamps: tuple[Any, ...] = ()
        up, down = map(_room_for, self._biases(layer))
        self.experts = HostedExperts(handle.form(views), kept_gate(layer), (up, down), handle.spec.top_k)
        self._counts = torch.zeros(len(views) + 1, dtype=torch.int64, device=handle.device)
        self._entries: dict[int, int] = {}
        self.refresh()
        self._enter(1)
        if up is not None or down is not None:
            host.refreshed.add(self)

    def divide(self, rates: HostRates | None) -> None:
        """Have the CPU compute a share of misses by rates; None: all of them."""
        device_s = 0.0 if rates is None else resident_seconds([self.experts.k * self._nbytes // 2] * 2, self._device)
        counts = hosted_counts(len(self._counts) - 1, self._nbytes, rates, device_s=device_s)
        self._counts.copy_(torch.tensor(counts, dtype=torch.int64, device="cpu"))

    # -- passes -------------------------------------------------------------------------------------------------------

    def shares(self, routed: Routed) -> Shares | None:
        """Return the division of a pass's misses; None if all are fetched."""
        x, ids = routed.x, routed.ids
        if not 0 < len(x) <= MOST_TOKENS or ids.shape[1] != self.experts.k or x.dtype is not self._dtype:
            return None
        if pass_precision() != "full" or (is_capturing() and not self._host.capturing):
            return None
        return Shares(self._counts, torch.empty_like(ids, memory_format=torch.contiguous_format))

    def post(self, routed: Routed, kept_Tk: Tensor) -> None:
        """Launch the post of the experts that are not kept. Raises KernelError: an earlier one was not answered."""
        x_TK, ids_Tk, weights_Tk = routed.x.contiguous(), routed.ids.contiguous(), routed.weights.contiguous()
        if x_TK.data_ptr() % 16:
            x_TK = x_TK.clone()
        places = self.experts.places(len(x_TK), x_TK.dtype)
        if not is_capturing():
            self.refresh()
        self._host.post(x_TK, ids_Tk, kept_Tk, weights_Tk, self._enter(len(x_TK)), places)

    def add(self, y_TN: Tensor) -> None:
        """Launch the wait for the last post, and the sum."""
        tokens = len(y_TN)
        self._host.add(y_TN, self._enter(tokens), self.experts.places(tokens, self._dtype).y)

    def _enter(self, tokens: int) -> int:
        if tokens not in self._entries:
            self._entries[tokens] = self._host.enter_experts(self._name, self.experts, tokens, self._dtype)
        return self._entries[tokens]

    # -- biases -------------------------------------------------------------------------------------------------------

    def _biases(self, layer: ExpertsModule) -> list[Tensor | None]:
        return [layer._parameters.get(name) for name in self._sites]

    def refresh(self) -> None:
        """Copy biases that were written to since the last time."""
        layer = self._layer()
        biases = [] if layer is None else self._biases(layer)
        stamps = tuple(None if b is None else (b.data_ptr(), -1 if b.is_inference() else b._version) for b in biases)
        if stamps == self._stamps:
            return
        self._stamps = stamps
        for copy, bias in zip(self.experts.biases, biases, strict=False):
            if copy is not None and bias is not None:
                copy.copy_(bias.detach())

    # -- the end ------------------------------------------------------------------------------------------------------

    def end(self) -> None:
        """Let the pages go, once launched products have been computed. Idempotent."""
        self._host.refreshed.discard(self)
        try:
            self._host.settle()
        finally:
            while self._entries:
                self._host.leave(self._entries.popitem()[1])
