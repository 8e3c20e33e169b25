"""Missed experts that the CPU computes where they lie: which, by what rates, and why others are fetched.

`experts.miss` names one of three ways. A pass that takes few experts from the cache, and whose experts the host leases,
asks here (`MissedExperts.begin`). What it gets computes in a thread of its own (`HostWork`), while the pass leases and
computes the other experts; then the rows of both are summed in the order of the ids. So the same experts on the
computing device give the same bits, and where a row was computed changes its rounding only.

Fetched as ever: prompts, passes with gradients, experts that are merged or dense, gates and calls that are a module's
own, and everything that the device decides by itself. Reasons are in `fallbacks`.
"""

import statistics
import time
import warnings
import weakref
from _thread import allocate_lock
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from vbrt.host.crew import Crew
from vbrt.kernels.cpu import build
from vbrt.layers.experts.gates import kept_gate
from vbrt.layers.experts.host_work import HostLayer, HostWork, Operands, host_ops
from vbrt.residency.missed import OPERATORS, Missed, MissRates, computed_experts, expected_misses, host_pays
from vbrt.tiers.lower import LowerLease, has_host_below, missing_worth

if TYPE_CHECKING:
    from vbrt.layers.experts.handle import ExpertsHandle
    from vbrt.layers.experts.layer import VBExperts

__all__ = ["MissedExperts"]

_TURNS = 5  # of each measurement, of which the median counts
_MOST_BYTES = 128 << 20  # of pages that are read to measure


class _Bias(NamedTuple):
    """A copy of a bias, and what tells whether it is still the bias."""

    stamp: tuple
    copy: Tensor


class MissedExperts:
    """What one model does about experts that are missing on the computing device.

    Attributes:
        mode: "compute" or "auto"; where misses are fetched there is no such object.
        rates: measured once, when they are first needed.
        fallbacks: why some layers fetch nevertheless.
    """

    def __init__(self, mode: str) -> None:
        self.mode = mode
        self.rates: MissRates | None = None
        self.fallbacks: list[str] = []
        self._crew = Crew(1)
        self._layers: weakref.WeakKeyDictionary[VBExperts, HostLayer | None] = weakref.WeakKeyDictionary()
        self._biases: weakref.WeakKeyDictionary[VBExperts, dict[str, _Bias]] = weakref.WeakKeyDictionary()

    def told(self) -> str:
        """Return what stats say of it."""
        if self.mode == "compute":
            return "computed where they lie"
        return "computed where they lie, or fetched" + (f", by {self.rates}" if self.rates else "")

    # -- a pass -------------------------------------------------------------------------------------------------------

    def operands(self, layer: "VBExperts", x: Tensor, ids: Tensor) -> Operands | None:
        """Return what a pass from the cache is called with, in host memory; None where its misses are fetched."""
        handle = layer.handle
        if not handle.streams or (handle.device.type == "cpu" and not has_host_below(handle.stack)):
            return None  # every expert is computed where it lies, then
        return None if self._layer(layer) is None else Operands.of(x, ids)

    def begin(self, layer: "VBExperts", operands: Operands) -> HostWork | None:
        """Begin to compute the missed experts that the CPU is to compute; None if there are none.

        Raises TierError: the model was closed.
        """
        handle, pairs = layer.handle, operands.pairs(layer.handle.spec.experts)
        keys = dict(zip(handle.keys_of(list(pairs), "full"), pairs, strict=True))
        worth = missing_worth(handle.stack, keys)
        nbytes = handle.pages[0].nbytes
        missed = [Missed(keys[key], pairs[keys[key]], nbytes, value) for key, value in worth.items()]
        if not missed:
            return None
        experts = computed_experts(missed, self.rates_of(layer) if self.mode == "auto" else None)
        return self._begin(layer, operands, experts) if experts else None

    def _begin(self, layer: "VBExperts", operands: Operands, experts: Sequence[int]) -> HostWork | None:
        handle = layer.handle
        lower = LowerLease(handle.stack, handle.keys_of(experts, "full"))
        held = set(lower.begin())
        experts = [e for e, key in zip(experts, lower.keys, strict=True) if key in held]
        if not experts:
            return None
        handle.routing.computed += len(experts)
        work = HostWork(self._with_biases(layer), operands, lower, experts)
        self._crew.give(work.run)
        return work

    # -- who decides --------------------------------------------------------------------------------------------------

    def left_to_device(self, handles: Iterable["ExpertsHandle"], room_bytes: int) -> bool:
        """True if the device decides which experts are resident, and fetches all misses, although the host could
        divide them: by measured rates it is done earlier.

        Args:
            handles: of the layers that the device could decide for.
            room_bytes: what their pages share on the device.
        """
        layers = [(handle, next(iter(handle.layers), None)) for handle in handles]
        served = [(handle, layer) for handle, layer in layers if layer is not None and self._layer(layer) is not None]
        if not served or self.mode == "compute":
            return not served
        share = min(1.0, room_bytes / max(1, sum(page.nbytes for handle, _ in layers for page in handle.pages)))
        handle, layer = max(served, key=lambda one: one[0].pages[0].nbytes)
        rates = self.rates_of(layer)
        misses = expected_misses(handle.spec.top_k, share)
        if rates is None or host_pays(misses, handle.pages[0].nbytes, rates):
            return False
        self.announce(f"the GPU decides, which is faster at {rates}")
        return True

    def keeps_on_host(self, handle: "ExpertsHandle") -> bool:
        """True if the host decides for a layer because all its misses are computed, whatever the device could do."""
        layer = next(iter(handle.layers), None)
        return self.mode == "compute" and layer is not None and self._layer(layer) is not None

    # -- layers -------------------------------------------------------------------------------------------------------

    def why_fetched(self, layer: "VBExperts") -> str:
        """Return why the misses of a layer are fetched whatever is asked for; "" if they need not be."""
        spec, stack = layer.handle.spec, layer.handle.stack
        if not has_host_below(stack):
            return "there is no tier of host memory (tiers.cpu.enabled = false)"
        if spec.lossless:
            return f"it is held as {spec.label}, and the CPU computes 4-bit experts only"
        if getattr(type(layer), "rows_of_pages", None) is not None or kept_gate(layer) is None:
            return "its gate or its call is a function of its own, which the kernels for CPUs do not know"
        if not hasattr(stack.levels[0].policy, "passed"):
            return f'the policy {stack.levels[0].policy.kind} decides; it takes policy.kind = "experts"'
        if spec.first.backend != "reference" and host_ops(layer.handle)[1] == "reference":
            return f"the CPU has no kernels of its own ({build.refusal(torch.device('cpu'), 'experts')})"
        tiled = not layer.handle.coder.encoded_joint(layer.handle.pages[0].layout) == layer.handle.pages[0].layout
        refusal = build.refusal(torch.device("cpu"), "tiles") if tiled else None
        return "" if refusal is None else f"its pages are in the order of the GPU's kernels ({refusal})"

    def _layer(self, layer: "VBExperts") -> HostLayer | None:
        """How the CPU computes a layer; None where its misses are fetched."""
        if layer not in self._layers:
            why = self.why_fetched(layer)
            if why:
                self.announce(f"{layer.handle.spec.name}: {why}")
            ops = None if why else host_ops(layer.handle)[0]
            self._layers[layer] = None if ops is None else HostLayer(layer.handle, ops, kept_gate(layer), None, None)
        return self._layers[layer]

    def announce(self, why: str) -> None:
        """Say once that missed experts are fetched."""
        if not self.fallbacks:
            self.fallbacks.append(f'experts.miss = "{self.mode}": missed experts are fetched: {why}')
            if self.mode == "compute":
                warnings.warn(self.fallbacks[0], stacklevel=2)

    def _with_biases(self, layer: "VBExperts") -> HostLayer:
        """How the CPU computes a layer, with its biases as they are now."""
        up, down = (self._bias(layer, f"{site.parameter}_bias") for site in layer.handle.spec.sites)
        return self._layer(layer)._replace(handle=layer.handle, up=up, down=down)

    def _bias(self, layer: "VBExperts", name: str) -> Tensor | None:
        """A bias in host memory; a copy of it is made again only after it was written."""
        bias = layer._parameters.get(name)
        if bias is None or not bias.is_cuda:
            return None if bias is None else bias.detach()
        stamp = bias.data_ptr(), bias.dtype, -1 if bias.is_inference() else bias._version
        kept = self._biases.setdefault(layer, {})
        if name not in kept or kept[name].stamp != stamp:
            kept[name] = _Bias(stamp, bias.detach().cpu())
        return kept[name].copy

    # -- rates --------------------------------------------------------------------------------------------------------

    def rates_of(self, layer: "VBExperts") -> MissRates | None:
        """Return the measured rates; None, to compute all misses, while no page of the layer lies in host memory."""
        if self.rates is None:
            self.rates = self._measured(layer)
        return self.rates

    def _measured(self, layer: "VBExperts") -> MissRates | None:
        handle = layer.handle
        most = max(handle.spec.top_k, _MOST_BYTES // handle.pages[0].nbytes)
        keys = {key: e for e, key in enumerate(handle.keys[:most])}
        lower = LowerLease(handle.stack, tuple(keys), looks=True)
        try:
            views = {keys[key]: view for key, view in lower.wait().items()} if lower.begin() else {}
            return self._timed(layer, views) if views else None
        finally:
            lower.end()

    def _timed(self, layer: "VBExperts", views: dict[int, Tensor]) -> MissRates:
        handle, host, nbytes = layer.handle, self._with_biases(layer), layer.handle.pages[0].nbytes
        count = min(handle.spec.top_k, len(views))
        groups = [list(views)[at : at + count] for at in range(0, len(views) - count + 1, count)]

        def compute(group: Sequence[int], tokens: int) -> None:
            x = torch.zeros(tokens, handle.spec.sites[0].shape[1], dtype=handle.dtype, device="cpu")
            ids = torch.tensor([group] * tokens, dtype=torch.int64, device="cpu")
            host.rows(Operands(x, ids), {e: views[e] for e in group})

        def of(experts: int, tokens: int) -> float:
            return _median(lambda turn: compute(groups[turn % len(groups)][:experts], tokens))

        compute(groups[0], 1)  # builds the kernels
        one, all_, four = of(1, 1), of(count, 1), of(count, 4)
        each = (all_ - one) / (count - 1) if all_ > one else all_ / count
        there = [torch.empty(nbytes, dtype=torch.uint8, device=handle.device) for _ in range(count)]

        def copy(turn: int) -> None:
            for expert, page in zip(groups[turn % len(groups)], there, strict=True):
                page.copy_(views[expert], non_blocking=True)
            _wait_for(handle.device)

        copy(0)
        return MissRates(
            link_bytes_s=count * nbytes / _median(copy),
            cpu_bytes_s=nbytes / each,
            more=max(0.0, four / all_ - 1) / 3,
            call_s=self._call_seconds() + max(0.0, one - each),
            host_s=self._host_seconds(layer),
        )

    def _host_seconds(self, layer: "VBExperts") -> float:
        """The time that the host takes for its decisions, and to launch a layer's kernels one by one."""
        handle = layer.handle
        x = torch.zeros(1, handle.spec.sites[0].shape[1], dtype=handle.dtype, device=handle.device)
        ids = torch.arange(handle.spec.top_k, dtype=torch.int64, device=handle.device)[None]

        def decide(turn: int) -> None:
            keys = handle.keys_of(list(Operands.of(x, ids).pairs(handle.spec.experts)), "full")
            missing_worth(handle.stack, keys)
            lower = LowerLease(handle.stack, keys, looks=True)
            lower.begin()
            lower.end()

        def launch(turn: int) -> None:
            for _ in range(OPERATORS):
                torch.add(x, x)

        seconds = _median(decide) + _median(launch)
        _wait_for(handle.device)
        return seconds

    def _call_seconds(self) -> float:
        """The time in which the thread does nothing."""
        done = allocate_lock()
        done.acquire()

        def call(turn: int) -> None:
            self._crew.give(done.release)
            done.acquire(timeout=1.0)

        call(0)  # starts it
        return _median(call)


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def _median(run: Callable[[int], None]) -> float:
    """Return the median of the seconds of some runs, which are told their turn."""
    spans = []
    for turn in range(_TURNS):
        start = time.perf_counter()
        run(turn)
        spans.append(time.perf_counter() - start)
    return statistics.median(spans)
