"""Attachment of one model to a runtime: plan, VB layers, passes, stats, and detach back to a dense model."""

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from os import PathLike
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from vbrt.config import FORMATS, VBConfig, load_config
from vbrt.errors import WrapError
from vbrt.host import accelerator
from vbrt.kernels import libraries
from vbrt.kernels.operator_trace import recorder
from vbrt.layers import SwappedLayer, VBLayer
from vbrt.layers.experts import ExpertsHandle, VBExperts
from vbrt.layers.experts.hosted_experts import HostedMisses
from vbrt.layers.experts.missed_experts import MissedExperts
from vbrt.libraries.probe import losses
from vbrt.libraries.transformers_loss import drop_losses, replace_losses
from vbrt.libraries.versions import newer_than_tested
from vbrt.model.activation_settings import activations_of
from vbrt.model.expert_cache import ExpertCache
from vbrt.model.first_pass import show_encoding
from vbrt.model.hosting import Hosting
from vbrt.model.kv_caches import cache_stats
from vbrt.model.layer_registry import Registry
from vbrt.model.machine_memory import release_host_memory
from vbrt.model.parameter_methods import drop_methods, set_methods
from vbrt.model.pass_hooks import PassEndHook, PassHook, move_rest_, pass_hook_of, remove_pass_hooks
from vbrt.model.phase import BACKWARD, DECODE, inferred_phase, named_phase, phase_name, rows_of
from vbrt.model.recorded_blocks import RecordedBlocks
from vbrt.model.runtime import Runtime
from vbrt.model.snapshot import layer_stats, own_phases, stack_fallbacks, tier_stats
from vbrt.model.throughput import Work
from vbrt.report.progress import wanted
from vbrt.report.routing_recorder import RoutingRecorder
from vbrt.report.speculation_counters import SpeculationCounts
from vbrt.report.stats import Stats, StepCounts
from vbrt.report.timeline import TimelineTotals
from vbrt.residency.plan import Plan
from vbrt.residency.policy import FORWARD
from vbrt.residency.routing_file import write_routing
from vbrt.residency.routing_trace import plan_layers
from vbrt.residency.weight_site import ROOT
from vbrt.tiers import TierStack
from vbrt.tiers.stack.stack_lock import Guard
from vbrt.training.token_loss import TokenLoss

__all__ = ["Attachment", "Follower", "Terms", "attached_to"]


class Follower(Protocol):
    """Recorder of a model's decode steps, with the attachment's lifetime.

    Attributes:
        generates: True if there are any such steps; False for a model without `generate`.
    """

    generates: bool

    def counts(self) -> StepCounts:
        """Return its counters, for the model's stats."""

    def defer(self, model: nn.Module, begin: Callable[[], None]) -> bool:
        """Take over the call of `begin` for a forward of the model; False leaves it to the caller."""

    def end(self) -> None:
        """Detach from the model, and free all recordings. Idempotent."""


class Watcher(Protocol):
    """Monitor of the other ranks of a model."""

    def stop(self) -> None:
        """Stop monitoring. Idempotent."""

    def leave(self, error: BaseException) -> None:
        """Report that this rank has left a joint computation by an error; other ranks may have met the same error."""

    def compare(self, tensor: Tensor, what: str) -> None:
        """Collective: raise ArgumentError, on all ranks, if their tensors differ."""

    def least(self, number: int) -> int:
        """Collective: return the least of all ranks' numbers. Ranks must call it at the same place of their passes."""


@dataclass(frozen=True, slots=True)
class Terms:
    """Decisions for one model: config, plan, name on the runtime, and `prefix`, put before layer names in page keys,
    errors and phases; empty for the model that the runtime was built for."""

    settings: VBConfig
    plan: Plan
    name: str
    prefix: str = ""


@dataclass(frozen=True, slots=True)
class Seed:
    """State from which a copied model is attached. `modules`: the name of each VB layer's module."""

    kind: type["Attachment"]
    runtime: Runtime
    terms: Terms
    modules: Mapping[str, str]
    timed: TimelineTotals | None
    closed: bool

    def attach_to(self, model: nn.Module) -> "Attachment":
        """Attach a copied model whose layers are VB layers already."""
        layers = {name: model.get_submodule(module) for name, module in self.modules.items()}
        terms = replace(self.terms, name=self.runtime.free_name(self.terms.name))
        attachment = self.kind(model, self.runtime, terms, layers)
        attachment.timed, attachment.closed = self.timed, self.closed
        return attachment


class Attachment:
    """Model with swapped layers on a runtime: everything but `save` and the façade of `VBModelWrapper`.

    Attributes:
        runtime: shared with the other models on it.
        registry: its VB layers by name.
        hosting: choice of the weights that the CPU computes where they lie.
        missed: CPU compute of missed experts; None where missed experts are fetched.
        name: of the model on the runtime.
        prefix: see `Terms`.
        closed: True once its planes are freed.
        passes: number of passes begun, replays excluded.
        replays: number of replayed passes.
        work: throughput counters.
        timed: totals of the last timeline.
        activations: activation policy of the model's blocks.
        recorded: graphs of the model's checkpointed blocks, in training.
        speculation: counters of `generate(speculate=...)`.
        follower: recorder of the decode steps of `generate`; None without one.
        watcher: monitor of the other ranks with parts of the weights; None without any.
        name_phase: maps the inferred phase of a pass without gradients to its name; None keeps the inferred one.
    """

    def __init__(self, model: nn.Module, runtime: Runtime, terms: Terms, layers: Mapping[str, SwappedLayer]) -> None:
        self.runtime, self._terms = runtime, terms
        self.name, self.prefix = terms.name, terms.prefix
        self._settings, self._plan = terms.settings, terms.plan
        self._model = weakref.ref(model)
        self.registry = Registry(layers, terms.plan, runtime.stack, terms.prefix)
        miss = terms.settings.missed_experts
        self.missed = None if miss == "fetch" else MissedExperts(miss)
        self.hosting = Hosting(runtime.stack, self.registry, terms.settings.compute.where)
        wait_s = float(terms.settings.experts.drive_wait_s)
        hosted = None if self.missed is None else HostedMisses(self.missed, self.hosting.mailbox)
        self.expert_cache = ExpertCache(runtime.stack, self.registry.layers_now, self.missed, hosted, wait_s)
        for layer in layers.values():
            if isinstance(layer, VBExperts):
                if runtime.stack.device.type == accelerator.TYPE:
                    layer.handle.deciding.ask_with(self.expert_cache.follow)
                layer.handle.deciding.compute_misses_by(self.missed)
        self.timed: TimelineTotals | None = None
        self.speculation = SpeculationCounts()
        self.name_phase: Callable[[str], str] | None = None
        self.follower: Follower | None = None
        self.watcher: Watcher | None = None
        self._head: nn.Module | None = None
        self.passes, self.replays, self.work = 0, 0, Work()
        self.activations = activations_of(model, terms.settings, runtime.stack.device)
        graphs = runtime.stack.device.type == accelerator.TYPE and "graphs" not in accelerator.LACKS
        self.recorded = RecordedBlocks(runtime.stack, captures=graphs and terms.settings.compute.captures)
        self.activations.replay = partial(_replay_of, weakref.ref(self))
        self.activations.ran = partial(_ran, weakref.ref(self))
        self.closed = False
        remove_pass_hooks(model)
        model.register_forward_pre_hook(PassHook(self), with_kwargs=True)
        if getattr(runtime.stack.levels[0].lanes, "together", False):
            model.register_forward_hook(PassEndHook(runtime.stack))
        if terms.settings.mode == "infer":
            set_methods(model, self.registry)
        replace_losses(model, TokenLoss)
        runtime.add(self)

    # -- state --------------------------------------------------------------------------------------------------------

    @property
    def model(self) -> nn.Module:
        """The model, held weakly. Raises WrapError if it was collected."""
        model = self._model()
        if model is None:
            raise WrapError(f"{self.name}: the model is gone; keep a reference to it for as long as it is used")
        return model

    @property
    def alive(self) -> bool:
        """True while the model exists and its planes are not freed."""
        return not self.closed and self._model() is not None

    @property
    def stack(self) -> TierStack:
        """The stack of the runtime."""
        return self.runtime.stack

    @property
    def settings(self) -> VBConfig:
        """Config of this model, with the runtime's present budgets."""
        tiers = self.runtime.settings.tiers
        return self._settings if self._settings.tiers == tiers else load_config(self._settings, tiers=asdict(tiers))

    @property
    def plan(self) -> Plan:
        """Plan of this model, with the runtime's present budgets."""
        budgets = self.runtime.budgets
        return self._plan if self._plan.budgets == budgets else replace(self._plan, budgets=budgets)

    @property
    def layers(self) -> dict[str, VBLayer]:
        """Name -> VB layer, see `Registry.layers`."""
        return self.registry.layers

    @property
    def lossless(self) -> bool:
        """True if every swapped weight is held without rounding, and computed with like the plain model's."""
        return all(swap.lossless for swap in self._plan.swaps)

    @property
    def original(self) -> bool:
        """True if every swapped weight has all bits that it came with, be they those of a quantized checkpoint."""
        return self.lossless or all(swap.original for swap in self._plan.swaps)

    def rounded_formats(self) -> list[str]:
        """Return formats to which vbrt rounded weights; a quantized checkpoint's own format is none of them."""
        if self.original:
            return []
        specs = (handle.spec for handle in self.registry.handles if handle.keys)
        return sorted({spec.format for spec in specs if not (spec.lossless or FORMATS[spec.format].published)})

    @property
    def head(self) -> nn.Module | None:
        """Multi-token prediction head that drafts for the model, attached to the same runtime; None without one."""
        own = None if self._head is None else attached_to(self._head)
        return None if own is None or own.closed else self._head

    @head.setter
    def head(self, head: nn.Module) -> None:
        self._head = head

    def check_open(self, what: str) -> None:
        """Raise WrapError if the planes are freed."""
        if self.closed:
            raise WrapError(
                f"{what}: the model was closed or unwrapped, its planes are gone; do that before, or wrap "
                "the model again"
            )

    # -- passes -------------------------------------------------------------------------------------------------------

    def begin_forward(self, model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """Count a forward, and begin its pass, unless the follower takes that over."""
        if not self.passes and wanted():
            show_encoding(model, self.registry)
        if self.passes == 1:
            release_host_memory()  # dense weights were freed during the first pass
        if self.passes and self.runtime.balance is not None:
            self.runtime.follow_free_memory()
        self.passes += 1
        self.work.note(args, kwargs)
        begin = partial(self._begin_pass, args, kwargs)
        if self.follower is None or not self.follower.defer(model, begin):
            begin()

    def begin_part(self, args: tuple, kwargs: dict[str, Any]) -> None:
        """Count and begin a pass of a larger model that contains this one, whose own forward is not called."""
        self.check_open("forward")
        self.passes += 1
        self._begin_pass(args, kwargs)

    def _begin_pass(self, args: tuple, kwargs: dict[str, Any]) -> None:
        """Begin a pass on the stack; phases, and so learned orders, are per model."""
        decodes = inferred_phase(args, kwargs) == DECODE
        if torch.is_grad_enabled():
            if self.recorded.begin(self.model):
                self.hosting.release()  # the CPU computes products of few tokens, and graphs read all pages of a block
        else:
            self.recorded.rest(decodes=decodes)
        named = phase_name(self)
        phase = named or self._unnamed_phase(args, kwargs)
        if decodes:
            self.hosting.follow(self.prefix + phase, rows_of(args, kwargs))
        elif self.follower is None or not self.follower.generates:
            self.hosting.follow(self.prefix + phase)
        backward = self.prefix + BACKWARD if named is None and phase == FORWARD else ""
        step = recorder()
        if step is None:
            self.stack.begin_pass(self.prefix + phase, backward=backward)
        else:
            step.leaf(self._begin_again, self.prefix + phase, backward)

    def _begin_again(self, phase: str, backward: str) -> None:
        """Begin a pass in the replay of a recorded step; a no-op under CUDA graph capture."""
        if not self.stack.capturing():
            self.stack.begin_pass(phase, backward=backward)

    def _unnamed_phase(self, args: tuple, kwargs: dict[str, Any]) -> str:
        phase = inferred_phase(args, kwargs)
        return phase if self.name_phase is None or torch.is_grad_enabled() else self.name_phase(phase)

    # -- running ------------------------------------------------------------------------------------------------------

    def materialize(self, *, progress: bool | None = None) -> None:
        """Encode every layer now. See `VBModelWrapper.materialize`."""
        encoded = self.registry.materialize_(progress=progress)
        move_rest_(self.model, self.stack.device)
        if encoded:
            release_host_memory()

    def ready_to_save(self) -> VBConfig:
        """Encode every layer; return the config to save with the planes.

        Raises WrapError if the planes are freed.
        """
        self.check_open("save")
        self.materialize()
        return self.settings

    def set_budget(self, tier: str, budget: int | str) -> int:
        """Change the budget of a tier, for all models on the runtime. See `VBModelWrapper.set_budget`."""
        self.check_open("set_budget")
        return self.runtime.set_budget(tier, budget)

    def bytes_moved(self) -> int:
        """Bytes that this model's pages have moved between tiers so far."""
        self.expert_cache.settle(each=False)
        census = self.stack.ledger.census()
        tallies = (census.family(layer.handle.keys).tally() for _, _, layer in self.registry.swapped())
        return sum(sum(tally.bytes_moved.values()) for tally in tallies)

    def stats(self, *, experts: bool = False) -> Stats:
        """Return a frozen snapshot of all counters; counters of tiers cover all models on the runtime. `experts`: also
        per routed expert."""
        stack, plan = self.stack, self.plan
        self.expert_cache.settle(each=experts)
        swapped = self.registry.swapped()  # other threads may encode, move and unwrap meanwhile
        fallbacks = [*plan.fallbacks, *stack_fallbacks(stack)]
        for _, _, layer in swapped:
            fallbacks += layer.handle.all_fallbacks()
        others = [other.prefix for other in self.runtime.attachments if other is not self]
        balance = self.runtime.balance
        fallbacks += balance.fallbacks if balance else []
        fallbacks += self.hosting.fallbacks
        fallbacks += self.expert_cache.fallbacks + (self.missed.fallbacks if self.missed else [])
        fallbacks += [reason for cache in list(self.runtime.caches) for reason in cache.fallbacks]
        fallbacks += self.speculation.reasons + self.activations.fallbacks + self.recorded.reasons + losses()
        if self.head is not None:
            fallbacks += [f"head: {reason}" for reason in attached_to(self.head).plan.fallbacks]
        return Stats(
            stack.levels[0].policy.kind,
            stack.names[0],
            self.passes,
            {name: layer_stats(stack, swap, layer, each=experts) for name, swap, layer in swapped},
            tier_stats(stack),
            plan.dense_bytes,
            plan.kept_bytes,
            (self.registry.resident_bytes() if others else stack.levels[0].tier.held_bytes) + self.unpaged_bytes,
            tuple(dict.fromkeys(fallbacks)),
            self.timed,
            own_phases(stack.phases(), self.prefix, [p for p in others if p not in ("", self.prefix)]),
            self.speculation.stats(),
            StepCounts() if self.follower is None else self.follower.counts(),
            caches=cache_stats(self.runtime.caches),
            leases=stack.ledger.programmes.told(),
            activations=self.activations.stats(),
            libraries=libraries(),
            missed=self.expert_cache.told() or self._missed_told(),
            hosted=self.hosting.told(),
            untested=newer_than_tested(loaded=True),
        )

    def _missed_told(self) -> str:
        """What becomes of missed experts where the host decides; "" where none moves, or all are fetched."""
        moving = any(isinstance(handle, ExpertsHandle) and handle.streams for handle in self.registry.handles)
        return self.missed.told() if self.missed and moving else ""

    @property
    def unpaged_bytes(self) -> int:
        """Bytes on the computing device outside the budgets: kept parameters and weights that are not encoded yet."""
        return self.registry.shell_bytes() + self._plan.kept_bytes

    def phase(self, name: str, precision: str | None) -> contextlib.AbstractContextManager[None]:
        """Name the passes in a `with` block. See `VBModelWrapper.phase`."""
        self.check_open("phase")
        return named_phase(self, name, precision)

    def check_recordable(self) -> None:
        """Raise WrapError if its passes have no timeline. See `vbrt.model.timeline_recording`."""
        self.check_open("timeline")

    def record_routing(self, path: str | PathLike) -> contextlib.AbstractContextManager[RoutingRecorder]:
        """Record expert routing in a `with` block. See `VBModelWrapper.record_routing`."""
        self.check_open("record_routing")
        layers = plan_layers(self.plan)
        if not layers:
            raise WrapError("record_routing: no layer of routed experts is swapped in this model; see vb.plan.skipped")
        return _routed(self.stack.guard, RoutingRecorder(layers, path, prefix=self.prefix))

    # -- the end ------------------------------------------------------------------------------------------------------

    def detach(self) -> nn.Module:
        """Restore the dense model, in place, and close. See `VBModelWrapper.unwrap`."""
        self.hosting.release()
        self.registry.release_()
        remove_pass_hooks(self.model)
        self.close()
        return self.model

    def close(self) -> None:
        """Free the pages of this model, and the tiers if no other model or copy needs them. Idempotent."""
        self.closed = True
        if self.head is not None:
            attached_to(self.head).close()
        self.activations.release_()
        self.recorded.release()
        if self.follower is not None:
            self.follower.end()
        if self.watcher is not None:
            self.watcher.stop()
        self.expert_cache.end()
        self.hosting.release()
        if self._model() is not None:
            drop_methods(self.model)
            drop_losses(self.model, TokenLoss)
        own = self.registry.handles
        for handle in own:
            handle.retire()
        self.runtime.close_unused(own)

    # -- copies -------------------------------------------------------------------------------------------------------

    def seed(self) -> Seed:
        """Return the state from which a copy of the model is attached."""
        holders = {name: module for swap in self._plan.swaps for name, module in swap.modules.items()}
        modules = {name: "" if module == ROOT else module for name, module in holders.items() if name in self.layers}
        return Seed(type(self), self.runtime, self._terms, modules, self.timed, self.closed)


def attached_to(module: nn.Module) -> Attachment | None:
    """Return the attachment of a model; None for unwrapped models and submodules."""
    hook = pass_hook_of(module)
    return hook.attachment if hook is not None and isinstance(hook.attachment, Attachment) else None


def _replay_of(
    attachment: weakref.ref[Attachment], block: nn.Module, function: partial, args: tuple
) -> Callable[[], Any] | None:
    own = attachment()
    return None if own is None else own.recorded.recorded(block, function, args)


def _ran(attachment: weakref.ref[Attachment], outputs: Any) -> None:
    own = attachment()
    if own is not None:
        own.recorded.ran(outputs)


@contextlib.contextmanager
def _routed(guard: Guard, recorder: RoutingRecorder) -> Iterator[RoutingRecorder]:
    write_routing(recorder.routing, recorder.path)  # fails early if the path cannot be written
    with guard.lock:
        if guard.routing is not None:
            raise WrapError("record_routing: this model is being recorded already; leave that `with` block first")
        guard.routing = recorder
    try:
        yield recorder
    finally:
        guard.routing = None
        recorder.write()
