"""A model that is attached while another library reads its weights: pages first, layers at the end.

Until the end the model is a plain one on the meta device, so that whatever the library does to modules, ties and
missing weights finds what it expects. Weights go into pages as they come; what nobody hands over is encoded last.
"""

import contextlib
from collections import deque
from collections.abc import Iterable

import torch
from torch import nn

from vbrt.config import VBConfig
from vbrt.errors import CheckpointError
from vbrt.host.mapped_weights import page_out
from vbrt.host.worker_threads import Crew
from vbrt.layers import Weight
from vbrt.layers.experts import ExpertsHandle
from vbrt.layers.experts.expert_encoding import EncodedExperts, MatricesOnDemand
from vbrt.model.attach import attach_held, make_handles, plan_for
from vbrt.model.attachment import Attachment, Terms
from vbrt.model.machine_memory import check_ssd_directory, release_host_memory
from vbrt.model.placement import Homes, current_homes, place_beside, place_pages, restore_homes
from vbrt.model.runtime import Runtime
from vbrt.residency.plan import Plan, Swap
from vbrt.residency.user_policy import PolicyFactory
from vbrt.residency.weight_site import ROOT, WeightSite
from vbrt.saves.load.sources import Source

__all__ = ["Filling"]

_TRIM_BYTES = 8 << 20


class Filling:
    """The planes of a model on their way into a runtime.

    A weight that several modules share is not taken: whether they do is known when everything is loaded.

    Args:
        model: on the meta device, in the dtypes that its weights will have, tied as they will be.
        config: for `mode = "infer"`; where there is a runtime, what `shared_config` makes of it.
        policy: makes the policy of each tier of a new runtime; by default the one that the config names.
        saved: makes the plan and the planes, instead of weights to encode; it is of this model.
        runtime: of models that share their tiers with this one; by default a new one.

    Attributes:
        plan: what is done to the model.
        stored: the names of parameters whose weights are in pages.

    Raises:
        ConfigError, TierError, WrapError: as `vbrt.wrap`.
    """

    def __init__(
        self,
        model: nn.Module,
        config: VBConfig,
        policy: PolicyFactory | None = None,
        saved: Source | None = None,
        *,
        runtime: Runtime | None = None,
    ) -> None:
        self._saved, self._joins, name = saved, runtime is not None, type(model).__name__
        if runtime is not None:
            runtime.check_open("from_pretrained")
            name = runtime.free_name(name)
        self.plan = _plan(model, config, saved, runtime)
        self.runtime = Runtime.of_plan(self.plan, config, policy) if runtime is None else runtime
        self._terms = Terms(config, self.plan, name, f"{name}/" if self._joins else "")
        self._handles = make_handles(self._terms, self.runtime.stack)
        self._targets = {
            site.tensor: (swap, handle, site)
            for swap, handle in zip(self.plan.swaps, self._handles, strict=True)
            if saved is not None or not swap.tied
            for site in (swap.site, *swap.parts)
        }
        self._dtypes = {name: parameter.dtype for name, parameter in model.named_parameters(remove_duplicate=False)}
        self._parts: dict[str, dict[str, torch.Tensor | MatricesOnDemand]] = {}  # of experts that are not complete
        self._bytes = 0
        self._mapped: deque[torch.Tensor] = deque()  # weights to be paged out, which takes long: nothing waits for it
        self._crew = Crew(1)
        self.stored: set[str] = set()

    def takes(self, name: str) -> bool:
        """True if the weight of this name goes into pages as it is read."""
        return name in self._targets

    def handle_of(self, name: str) -> Weight | ExpertsHandle:
        """Return what holds the pages of a weight that is taken."""
        return self._targets[name][1]

    def take(self, name: str, weight: torch.Tensor) -> None:
        """Encode a weight and store it in pages. A part of routed experts waits for the other parts; of planes that
        are saved, `weight` says only that it is their turn.

        Raises:
            CheckpointError: another shape than the model's.
            FormatError: NaN or Inf in it.
            TierError: the pages cannot be stored.
        """
        swap, handle, site = self._targets[name]
        if self._saved is not None:
            self._read_saved(swap, handle)
        elif tuple(weight.shape) != site.kept_shape:
            raise CheckpointError(f"{name} is {tuple(weight.shape)} in the files, and {site.kept_shape} in the model")
        elif swap.experts:
            self._take_part(name, weight.detach().reshape(-1, *site.matrix_shape))
        else:
            if weight.dtype is not handle.spec.dtype:
                handle.retype(weight.dtype)
            with torch.no_grad():
                handle.store(handle.split(weight))
            self._finished(swap, (weight,))

    def takes_matrices(self, name: str) -> bool:
        """True if `take_matrices` can be called with this name."""
        return self._saved is None and self.takes(name) and bool(self._targets[name][0].experts)

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Return the shape [E, ...] of all matrices of a part of routed experts, one behind the other."""
        site: WeightSite = self._targets[name][2]
        return (site.matrices, *site.matrix_shape)

    def take_matrices(self, name: str, matrices: MatricesOnDemand) -> None:
        """Store a part of routed experts, of which one matrix after the other is read; see `take`."""
        self._take_part(name, matrices)

    def _take_part(self, name: str, part: torch.Tensor | MatricesOnDemand) -> None:
        swap, handle, _ = self._targets[name]
        parts = self._parts.setdefault(swap.name, {})
        parts[handle.spec.part_of(name.rpartition(".")[2])] = part
        if len(parts) < len(handle.spec.parts):
            return
        del self._parts[swap.name]
        if part.dtype is not handle.spec.dtype:
            handle.retype(part.dtype)
        with torch.no_grad():
            handle.store(EncodedExperts(handle, {key: parts[key] for key in handle.spec.parts}))
        self._finished(swap, (p for p in parts.values() if isinstance(p, torch.Tensor)))

    def _read_saved(self, swap: Swap, handle: Weight | ExpertsHandle) -> None:
        if swap.site.tensor in self.stored:
            return
        if isinstance(handle, ExpertsHandle):
            handle.store(self._saved.experts_of(swap, handle))
        else:
            handle.store(self._saved.planes_of(swap, handle))
        handle.retype(self._dtypes[swap.site.tensor])
        self._finished(swap, ())

    def _finished(self, swap: Swap, weights: Iterable[torch.Tensor]) -> None:
        self.stored.update(site.tensor for site in (swap.site, *swap.parts))
        for weight in weights:
            if not weight.untyped_storage().resizable():  # mapped, and no copy of torch's
                self._mapped.append(weight)
                self._crew.give(_page_out_one, self._mapped)
        self._bytes += swap.dense_bytes
        if self._bytes > _TRIM_BYTES:
            release_host_memory()
            self._bytes = 0

    def finish(self, model: nn.Module) -> Attachment:
        """Swap the layers of the model, in place, and encode those whose weights were not taken.

        Raises:
            CheckpointError: weights that were planned as one are not one any more.
            FormatError, TierError: as `VBModelWrapper.materialize`.
        """
        _check_ties(model, self.plan)
        homes = current_homes(self.runtime)
        with self.runtime.stack.encoding:
            attachment = attach_held(model, self.runtime, self._terms, self._handles)
            if self._joins:
                _place(self.runtime, attachment, homes)
        layers = attachment.layers
        stored = (swap for swap in self.plan.swaps if swap.site.tensor in self.stored)
        for name in (name for swap in stored for name in swap.modules):
            layers[name].forget_dense_()
        attachment.materialize(progress=False)
        self._crew.stop()
        while self._mapped:
            _page_out_one(self._mapped)
        release_host_memory()
        return attachment

    def close(self) -> None:
        """Free the pages of a model that could not be loaded."""
        self._crew.stop()
        if not self._joins:
            self.runtime.stack.close()
            return
        for handle in self._handles:
            handle.retire()
        self.runtime.stack.retire_unowned()


def _place(runtime: Runtime, attachment: Attachment, homes: Homes) -> None:
    """Give the pages of all models their homes; if that fails, those of the others stay where they were."""
    try:
        place_pages(runtime)
    except BaseException:
        attachment.close()
        restore_homes(runtime, homes)
        raise


def _page_out_one(weights: deque[torch.Tensor]) -> None:
    with contextlib.suppress(IndexError):
        page_out(weights.popleft())


def _plan(model: nn.Module, config: VBConfig, saved: Source | None, runtime: Runtime | None) -> Plan:
    if saved is None:
        return plan_for(model, config, runtime)
    if runtime is None:
        check_ssd_directory(config)
    return saved.plan(model, config, None if runtime is None else place_beside(runtime))


def _check_ties(model: nn.Module, plan: Plan) -> None:
    modules = {name or ROOT: module for name, module in model.named_modules(remove_duplicate=False)}
    for swap in plan.swaps:
        held = {id(modules[site.module]._parameters[site.parameter]) for site in (swap.site, *swap.tied)}
        if len(held) > 1:
            names = " and ".join(site.tensor for site in (swap.site, *swap.tied))
            raise CheckpointError(
                f"{names} are one weight by the model's config, and several in its files; load it with "
                "tie_word_embeddings=False, or exclude them (weights.exclude)"
            )
