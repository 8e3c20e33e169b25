"""One model on a runtime: its plan, its VB layers, its passes, and the way back to a dense model."""

import contextlib
import sys
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from os import PathLike
from pathlib import Path

from torch import nn

from vbrt.config import VBConfig, load_config
from vbrt.errors import WrapError
from vbrt.layers import SwappedLayer, VBLayer, WeightHandle, shed
from vbrt.model.machine import release_host_memory
from vbrt.model.passes import PassHook, move_rest_, remove_pass_hooks
from vbrt.model.phase import named_phase
from vbrt.model.runtime import Runtime
from vbrt.model.snapshot import layer_stats, own_phases, stack_fallbacks, tier_stats
from vbrt.report.progress import with_progress
from vbrt.report.stats import LayerStats, Stats
from vbrt.report.timeline import TimelineTotals, check_timeline_path
from vbrt.residency.counts import PhaseCounts
from vbrt.residency.plan import PageSpec, Plan, Swap
from vbrt.residency.site import ROOT
from vbrt.tiers import Recorder, TierStack

__all__ = ["Attachment", "Terms"]


@dataclass(frozen=True, slots=True)
class Terms:
    """What was decided for one model: its config and plan, its name on the runtime, and its `prefix`: what page keys,
    errors and phases have before the names of its layers. The model that a runtime was built for has none."""

    settings: VBConfig
    plan: Plan
    name: str
    prefix: str = ""


@dataclass(frozen=True, slots=True)
class Seed:
    """What an attachment to a copied model is made of. `names`: of its VB layers."""

    kind: type["Attachment"]
    runtime: Runtime
    terms: Terms
    names: tuple[str, ...]
    timed: TimelineTotals | None
    closed: bool

    def attach_to(self, model: nn.Module) -> "Attachment":
        """Attach a copied model, whose layers are VB layers already."""
        layers = {name: model.get_submodule("" if name == ROOT else name) for name in self.names}
        terms = replace(self.terms, name=self.runtime.free_name(self.terms.name))
        attachment = self.kind(model, self.runtime, terms, layers)
        attachment.timed, attachment.closed = self.timed, self.closed
        return attachment


class Attachment:
    """A model whose layers are swapped, on a runtime. Everything but `save` and the façade of `VBModelWrapper`.

    Attributes:
        runtime: shared with the other models on it.
        name: of the model on the runtime.
        prefix: see `Terms`.
        closed: True once its planes are gone.
        passes: how many have begun.
        timed: totals of the last recording.
    """

    def __init__(self, model: nn.Module, runtime: Runtime, terms: Terms, layers: Mapping[str, SwappedLayer]) -> None:
        self.runtime, self._terms = runtime, terms
        self.name, self.prefix = terms.name, terms.prefix
        self._settings, self._plan = terms.settings, terms.plan
        self._model = weakref.ref(model)
        self._layers = {layer_name: weakref.ref(layer) for layer_name, layer in layers.items()}
        self._dense: dict[WeightHandle, nn.Parameter] = {}  # decoded by `detach`
        self.timed: TimelineTotals | None = None
        self.passes = 0
        self.closed = False
        remove_pass_hooks(model)
        self._hook = model.register_forward_pre_hook(PassHook(self), with_kwargs=True)
        runtime.add(self)

    # -- what it is ---------------------------------------------------------------------------------------------------

    @property
    def model(self) -> nn.Module:
        """The model. Raises WrapError if nobody has kept it."""
        model = self._model()
        if model is None:
            raise WrapError(f"{self.name}: the model is gone; keep a reference to it for as long as it is used")
        return model

    @property
    def alive(self) -> bool:
        """True if the model is there and its planes are not gone."""
        return not self.closed and self._model() is not None

    @property
    def stack(self) -> TierStack:
        """The stack of the runtime."""
        return self.runtime.stack

    @property
    def settings(self) -> VBConfig:
        """The config of this model, with the budgets that the runtime has now."""
        tiers = self.runtime.settings.tiers
        return self._settings if self._settings.tiers == tiers else load_config(self._settings, tiers=asdict(tiers))

    @property
    def plan(self) -> Plan:
        """The plan of this model, with the budgets that the runtime has now."""
        budgets = self.runtime.budgets
        return self._plan if self._plan.budgets == budgets else replace(self._plan, budgets=budgets)

    @property
    def layers(self) -> dict[str, VBLayer]:
        """Name -> VB layer, tied names included; without those that have left the tiers to train."""
        found = {name: ref() for name, ref in self._layers.copy().items()}
        return {name: layer for name, layer in found.items() if isinstance(layer, SwappedLayer)}

    def pages(self) -> list[tuple[WeightHandle, tuple[PageSpec, ...]]]:
        """The pages of each weight: as they are stored, or as they are planned."""
        layers, names, found = self.layers, self.stack.names, []
        for swap in self._plan.swaps:
            if swap.name in layers:
                handle = layers[swap.name].handle
                stored = [page for page in map(self.stack.pages.get, handle.keys) if page is not None]
                specs = tuple(PageSpec(p.key, p.layout.plane, p.nbytes, names[p.home]) for p in stored)
                planned = (replace(page, key=self.prefix + page.key) for page in swap.pages)
                found.append((handle, specs or tuple(planned)))
        return found

    def assign_homes(self, homes: Mapping[str, str]) -> None:
        """Have weights that are stored from now on live in these tiers, by page key; stored pages stay."""
        for handle, pages in self.pages():
            given = {page.plane: homes.get(page.key, page.home) for page in pages}
            handle.spec = replace(handle.spec, homes=given)

    @property
    def lossless(self) -> bool:
        """True if every swapped weight is held bit for bit."""
        return all(swap.format == "dense" or swap.fine == "exact" for swap in self._plan.swaps)

    def check_open(self, what: str) -> None:
        """Raise WrapError if the planes are gone."""
        if self.closed:
            raise WrapError(
                f"{what}: the model was closed or unwrapped, its planes are gone; do that before, or wrap "
                "the model again"
            )

    # -- running ------------------------------------------------------------------------------------------------------

    def materialize(self, *, progress: bool | None = None) -> None:
        """Encode every layer now. See `VBModelWrapper.materialize`."""
        layers = self.layers
        for layer in layers.values():
            layer.keep_given_()
        waiting = {name: layer for name, layer in layers.items() if not layer.materialized}
        show = sys.stderr.isatty() if progress is None else progress
        for layer in with_progress("encoding", waiting, _dense_bytes, show=show):
            layer.materialize_()
        move_rest_(self.model, self.stack.device)
        if waiting:
            release_host_memory()

    def ready_to_save(self) -> VBConfig:
        """Encode every layer; return the config that a save of the planes has.

        Raises WrapError if the planes are gone.
        """
        self.check_open("save")
        self.materialize()
        return self.settings

    def set_budget(self, tier: str, budget: int | str) -> int:
        """Change the budget of a tier, for all models on the runtime. See `VBModelWrapper.set_budget`."""
        self.check_open("set_budget")
        return self.runtime.set_budget(tier, budget)

    def forget_ready(self) -> None:
        """Keep no views into pages: they may have moved."""
        for layer in self.layers.values():
            layer.handle.forget_ready()

    def stats(self) -> Stats:
        """Return a frozen snapshot of all counters; the tiers' are those of all models on the runtime."""
        stack, plan = self.stack, self.plan
        layers = self.layers  # other threads may encode, move and unwrap meanwhile
        swaps = [swap for swap in plan.swaps if swap.name in layers]  # none after unwrap()
        fallbacks = stack_fallbacks(stack)
        for swap in swaps:
            fallbacks += layers[swap.name].handle.all_fallbacks()
        balance = self.runtime.balance
        fallbacks += balance.fallbacks if balance else []
        return Stats(
            stack.levels[0].policy.kind,
            stack.names[0],
            self.passes,
            {swap.name: self._layer_stats(swap, layers[swap.name]) for swap in swaps},
            tier_stats(stack),
            plan.dense_bytes,
            plan.kept_bytes,
            self._held_bytes() + self.unpaged_bytes,
            tuple(dict.fromkeys(fallbacks)),
            self.timed,
            self._phases(),
        )

    def _phases(self) -> dict[str, PhaseCounts]:
        others = [other.prefix for other in self.runtime.attachments if other.prefix not in ("", self.prefix)]
        return own_phases(self.stack.phases(), self.prefix, others)

    @property
    def unpaged_bytes(self) -> int:
        """Bytes on the computing device outside the budgets: kept parameters and weights that are not encoded yet."""
        layers = self.layers
        shells = (swap for swap in self._plan.swaps if swap.name in layers and not layers[swap.name].materialized)
        return sum(swap.dense_bytes for swap in shells) + self._plan.kept_bytes

    def _held_bytes(self) -> int:
        """Bytes of this model's pages in the top tier; all that the tier holds, if it is the only model."""
        top = self.stack.levels[0]
        if len(self.runtime.attachments) < 2:
            return top.tier.held_bytes
        return sum(page.nbytes for _, pages in self.pages() for page in pages if page.key in top.slots)

    def _layer_stats(self, swap: Swap, layer: VBLayer) -> LayerStats:
        return layer_stats(self.stack, swap, layer)

    def phase(self, name: str, precision: str | None) -> contextlib.AbstractContextManager[None]:
        """Name the passes in a `with` block. See `VBModelWrapper.phase`."""
        self.check_open("phase")
        return named_phase(self, name, precision)

    def timeline(self, path: str | PathLike) -> contextlib.AbstractContextManager[Recorder]:
        """Record the passes that run in a `with` block. See `VBModelWrapper.timeline`."""
        self.check_open("timeline")
        return self._record(self.model, check_timeline_path(path))

    @contextlib.contextmanager
    def _record(self, model: nn.Module, path: Path) -> Iterator[Recorder]:
        recorder = Recorder(self.stack.device, self.stack.guard)
        recorder.start()
        hooks = []
        try:
            hooks.append(model.register_forward_pre_hook(recorder.begin_pass, prepend=True))
            hooks.append(model.register_forward_hook(recorder.end_pass, always_call=True))
            yield recorder
        finally:
            for hook in hooks:
                hook.remove()
            timeline = recorder.stop()
            self.timed = _of_model(timeline.totals, self.prefix)
            timeline.write(path)

    # -- the end ------------------------------------------------------------------------------------------------------

    def detach(self) -> nn.Module:
        """Give the dense model back, in place, and close. See `VBModelWrapper.unwrap`."""
        for name, layer in [(name, ref()) for name, ref in self._layers.items()]:
            if layer is not None:
                self._give_back(layer)
            del self._layers[name]
        for handle in self._dense:  # again, if Ctrl-C came in between
            handle.drop()
        self._dense.clear()
        self._hook.remove()
        self.close()
        return self.model

    def _give_back(self, layer: nn.Module) -> None:
        handle = layer.__dict__.get("_vb_handle")  # None, or of a plain layer: Ctrl-C came in an earlier call
        if isinstance(layer, SwappedLayer):
            layer.look()
            handle = layer.handle
            self._dense[handle] = layer.release_(self._dense.get(handle))._parameters["weight"]
        shed(layer)
        if handle is not None and not handle.layers:
            handle.drop()

    def close(self) -> None:
        """Free the pages of this model; the tiers too, if no other model or copy needs them. Idempotent."""
        self.closed = True
        own = {layer.handle for layer in self.layers.values()}
        for handle in own:
            handle.drop()
        self.runtime.close_unused(own)

    # -- copies -------------------------------------------------------------------------------------------------------

    def seed(self) -> Seed:
        """Return what a copy of the model is attached with."""
        return Seed(type(self), self.runtime, self._terms, tuple(self.layers), self.timed, self.closed)


def _dense_bytes(layer: VBLayer) -> int:
    spec = layer.handle.spec
    return spec.shape[0] * spec.shape[1] * spec.dtype.itemsize


def _of_model(totals: TimelineTotals, prefix: str) -> TimelineTotals:
    """The totals with the layers of one model, under the names that they have in it."""
    layers = {name.removeprefix(prefix): layer for name, layer in totals.layers.items() if name.startswith(prefix)}
    return replace(totals, layers=layers)
