"""Division of missed experts between CPU compute and fetching, by measured rates.

`experts.miss` has three modes. A pass of few experts that the host leases calls `MissedExperts.begin`. The returned
work runs in its own threads (`TeamWork`, `HostWork`) while the pass leases and computes the other experts; then rows
of both are summed in the order of the ids. So the same experts on the computing device give the same bits, and where a
row was computed changes its rounding only.

Always fetched: prompts, passes with gradients, merged or dense experts, modules with their own gate or call, and layers
whose residency the device decides. Reasons are in `fallbacks`.
"""

import os
import weakref
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from vbrt.host.accelerator import is_device
from vbrt.host.logger import warn
from vbrt.host.worker_threads import Crew
from vbrt.kernels.cpu import build
from vbrt.kernels.cpu.expert_team import ExpertTeam
from vbrt.layers.experts.cpu_experts import HostLayer, HostWork, Operands, TeamWork, host_ops, new_team
from vbrt.layers.experts.gates import kept_gate
from vbrt.layers.experts.miss_rates import measured_rates
from vbrt.layers.experts.protocols import ExpertsModule, ExpertsWeights
from vbrt.residency.miss_policy import Missed, MissRates, computed_experts, expected_misses, host_pays
from vbrt.tiers.stack.host_lease import LowerLease, has_host_below, missing_worth
from vbrt.tiers.stack.staged_pages import on_drive

__all__ = ["MissedExperts"]


class _Bias(NamedTuple):
    """Host copy of a bias, with the version that it was made of."""

    stamp: tuple
    copy: Tensor


class MissedExperts:
    """Miss handling of one model.

    Attributes:
        mode: "compute" or "auto"; with "fetch" there is no such object.
        rates: measured once, at first use.
        fallbacks: reasons why some layers fetch nevertheless.
    """

    def __init__(self, mode: str) -> None:
        self.mode = mode
        self.rates: MissRates | None = None
        self.fallbacks: list[str] = []
        self._crew = Crew(1)
        self._team: ExpertTeam | None = None
        self._made_for = (0, 0)
        self._layers: weakref.WeakKeyDictionary[ExpertsModule, HostLayer | None] = weakref.WeakKeyDictionary()
        self._biases: weakref.WeakKeyDictionary[ExpertsModule, dict[str, _Bias]] = weakref.WeakKeyDictionary()

    def told(self) -> str:
        """Return the line of `stats(verbose=True)`: how missed experts are computed, and the rates behind it."""
        if self.mode == "compute":
            return "computed on the CPU"
        return "computed on the CPU or fetched, whichever is faster" + (f" ({self.rates})" if self.rates else "")

    # -- a pass -------------------------------------------------------------------------------------------------------

    def operands(self, layer: ExpertsModule, x: Tensor, ids: Tensor) -> Operands | None:
        """Return the arguments of a cached pass in host memory; None if its misses are fetched."""
        return Operands.of(x, ids) if self.serves(layer) else None

    def serves(self, layer: ExpertsModule) -> bool:
        """True if experts of a layer may be missing, and the CPU may compute those that are."""
        handle = layer.handle
        if not handle.streams or (handle.device.type == "cpu" and not has_host_below(handle.stack)):
            return False  # every expert is computed where it lies, then
        return self._layer(layer) is not None

    def begin(self, layer: ExpertsModule, operands: Operands) -> TeamWork | HostWork | None:
        """Start computing the CPU's share of missed experts; None if it has none.

        Raises:
            TierError: the model was closed.
            MemoryError: there is none for the work.
        """
        handle, pairs = layer.handle, operands.pairs(layer.handle.spec.experts)
        keys = dict(zip(handle.keys_of(list(pairs), "full"), pairs, strict=True))
        worth = missing_worth(handle.stack, keys)
        nbytes = handle.pages[0].nbytes
        missed = [Missed(keys[key], pairs[keys[key]], nbytes, value) for key, value in worth.items()]
        if not missed:
            return None
        experts = computed_experts(missed, self.rates_of(layer) if self.mode == "auto" else None)
        return self._begin(layer, operands, experts, max(map(pairs.get, experts))) if experts else None

    def _begin(
        self, layer: ExpertsModule, operands: Operands, experts: Sequence[int], most: int
    ) -> TeamWork | HostWork | None:
        handle = layer.handle
        lower = LowerLease(handle.stack, handle.keys_of(experts, "full"))
        held = set(lower.begin())
        experts = [e for e, key in zip(experts, lower.keys, strict=True) if key in held]
        if not experts:
            return None
        handle.routing.computed += len(experts)
        host, views = self._with_biases(layer), lower.views()
        pages = None if views is None else dict(zip(experts, views.values(), strict=True))
        product = None if pages is None else host.product(operands, pages, most)
        if product is not None:
            return TeamWork(self._awake(), product, lower, handle.device).post()
        work = HostWork(host, operands, lower, experts)
        self._crew.give(work.run)
        return work

    def _awake(self) -> ExpertTeam:
        """The team of this process, for the number of threads that torch has now."""
        made_for = os.getpid(), torch.get_num_threads()
        if self._team is None or self._made_for != made_for:
            self._team, self._made_for = new_team(), made_for
        return self._team

    # -- who decides --------------------------------------------------------------------------------------------------

    def left_to_device(self, handles: Iterable[ExpertsWeights], room_bytes: int, why: str) -> bool:
        """True if the device decides which experts are resident, and fetches all misses, although the host could
        divide them: by measured rates it is done earlier.

        Args:
            handles: of the layers that the device could decide for.
            room_bytes: what their pages share on the device.
            why: the CPU computes no misses while the device decides.
        """
        layers = [(handle, next(iter(handle.layers), None)) for handle in handles]
        served = [(handle, layer) for handle, layer in layers if layer is not None and self._layer(layer) is not None]
        if not served or self.mode == "compute":
            return not served
        if any(on_drive(handle.stack, key) for handle, _ in served for key in handle.keys):
            return True  # it waits for no routing; `announce` that, once it decides
        share = min(1.0, room_bytes / max(1, sum(page.nbytes for handle, _ in layers for page in handle.pages)))
        handle, layer = max(served, key=lambda one: one[0].pages[0].nbytes)
        rates = self.rates_of(layer)
        misses = expected_misses(handle.spec.top_k, share)
        if rates is None or host_pays(misses, handle.pages[0].nbytes, rates):
            return False
        self.announce(f"the GPU decides, which is faster at {rates}, and then {why}")
        return True

    def keeps_on_host(self, handle: ExpertsWeights) -> bool:
        """True if the host decides for a layer because all its misses are computed, whatever the device could do."""
        layer = next(iter(handle.layers), None)
        return self.mode == "compute" and layer is not None and self._layer(layer) is not None

    # -- layers -------------------------------------------------------------------------------------------------------

    def why_fetched(self, layer: ExpertsModule) -> str:
        """Return why a layer always fetches its misses; "" if it need not."""
        spec, stack = layer.handle.spec, layer.handle.stack
        if not has_host_below(stack):
            return "there is no tier of host memory (tiers.cpu.enabled = false)"
        if spec.lossless:
            return f"it is held as {spec.label}, and the CPU computes experts in 4 and 8 bits only"
        if getattr(type(layer), "rows_of_pages", None) is not None or kept_gate(layer) is None:
            return "its gate or its call is a function of its own, which the kernels for CPUs do not know"
        if not hasattr(stack.levels[0].policy, "passed"):
            return f'the policy {stack.levels[0].policy.kind} decides; it takes policy.kind = "experts"'
        if spec.first.backend != "reference" and host_ops(layer.handle)[1] == "reference":
            return f"the CPU has no kernels of its own ({build.refusal(torch.device('cpu'), 'experts')})"
        tiled = not layer.handle.coder.encoded_joint(layer.handle.pages[0].layout) == layer.handle.pages[0].layout
        refusal = build.refusal(torch.device("cpu"), "tiles") if tiled else None
        return "" if refusal is None else f"its pages are in the order of the GPU's kernels ({refusal})"

    def _is_config(self, layer: ExpertsModule) -> bool:
        """True if a layer's misses are fetched because the config has it so: its format, its policy or its tiers."""
        stack = layer.handle.stack
        other = not hasattr(stack.levels[0].policy, "passed")
        return layer.handle.spec.lossless or other or not has_host_below(stack)

    def _layer(self, layer: ExpertsModule) -> HostLayer | None:
        """CPU implementation of a layer; None if its misses are fetched."""
        if layer not in self._layers:
            why = self.why_fetched(layer)
            if why and (self.mode == "compute" or not self._is_config(layer)):
                self.announce(f"{layer.handle.spec.name}: {why}")
            self._layers[layer] = None if why else HostLayer.of(layer.handle, kept_gate(layer))
        return self._layers[layer]

    def announce(self, why: str) -> None:
        """Record and warn once that missed experts are fetched."""
        if not self.fallbacks:
            self.fallbacks.append(f'experts.miss = "{self.mode}": missed experts are fetched: {why}')
            if self.mode == "compute":
                warn(self.fallbacks[0], stacklevel=2)

    def _with_biases(self, layer: ExpertsModule) -> HostLayer:
        """CPU implementation of a layer, with its current biases."""
        up, down = (self._bias(layer, f"{site.parameter}_bias") for site in layer.handle.spec.sites)
        return self._layer(layer)._replace(handle=layer.handle, up=up, down=down)

    def _bias(self, layer: ExpertsModule, name: str) -> Tensor | None:
        """A bias in host memory, contiguous; a copy of it is made again only after it was written."""
        bias = layer._parameters.get(name)
        if bias is None or not is_device(bias):
            return None if bias is None else bias.detach().contiguous()
        stamp = bias.data_ptr(), bias.dtype, -1 if bias.is_inference() else bias._version
        kept = self._biases.setdefault(layer, {})
        if name not in kept or kept[name].stamp != stamp:
            kept[name] = _Bias(stamp, bias.detach().cpu().contiguous())
        return kept[name].copy

    # -- rates --------------------------------------------------------------------------------------------------------

    def rates_of(self, layer: ExpertsModule) -> MissRates | None:
        """Return the measured rates; None, to compute all misses, while no page of the layer lies in host memory."""
        if self.rates is None:
            self.rates = measured_rates(self._with_biases(layer), self._awake(), self._crew)
        return self.rates
