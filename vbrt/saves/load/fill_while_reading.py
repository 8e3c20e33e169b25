"""Filling while another library reads: weights go into pages as they arrive, layers are swapped at the end.

Until then the model stays a plain one on the meta device, as the library's handling of modules, ties and missing
weights expects. Weights that were never handed over are encoded last.
"""

import contextlib
from collections import deque
from collections.abc import Iterable

import torch
from torch import nn

from vbrt.config import VBConfig
from vbrt.errors import CheckpointError
from vbrt.estimation.memory.gpu_share import settle_budget
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
    """Pages of a model that another library is loading.

    Weights shared by several modules are not taken: whether they are tied is known only after loading.

    Args:
        model: on the meta device, in the final dtypes, tied as it will be.
        config: for `mode = "infer"`; with a runtime, the result of `shared_config`.
        policy: factory for each tier's policy in a new runtime; by default the config's.
        saved: source of plan and planes, in place of weights to encode; of this model.
        runtime: shared with other models; by default a new one.

    Attributes:
        settings: the config on this machine: `gpu_memory` as the budget of a tier.
        plan: the model's plan.
        stored: names of parameters whose weights are in pages.

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
        share = settle_budget(model, config)
        self.settings = config = share.config
        self.plan = share.noted(_plan(model, config, saved, runtime))
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
        self._parts: dict[str, dict[str, torch.Tensor | MatricesOnDemand]] = {}  # incomplete experts
        self._bytes = 0
        self._mapped: deque[torch.Tensor] = deque()  # mapped weights to page out in the background: that takes long
        self._crew = Crew(1)
        self.stored: set[str] = set()

    def takes(self, name: str) -> bool:
        """True if this weight goes into pages as it is read."""
        return name in self._targets

    def handle_of(self, name: str) -> Weight | ExpertsHandle:
        """Return the handle of a weight that is taken."""
        return self._targets[name][1]

    def take(self, name: str, weight: torch.Tensor) -> None:
        """Encode a weight and store its pages. Parts of routed experts are held until all have arrived; with saved
        planes, `weight` only signals whose turn it is.

        Raises:
            CheckpointError: its shape differs from the model's.
            FormatError: it holds NaN or Inf.
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
        """True if `take_matrices` accepts this name."""
        return self._saved is None and self.takes(name) and bool(self._targets[name][0].experts)

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Return the stacked shape [E, ...] of a part of routed experts."""
        site: WeightSite = self._targets[name][2]
        return (site.matrices, *site.matrix_shape)

    def take_matrices(self, name: str, matrices: MatricesOnDemand) -> None:
        """Store a part of routed experts that is read matrix by matrix; see `take`."""
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
            if not weight.untyped_storage().resizable():  # a file mapping, not torch's copy
                self._mapped.append(weight)
                self._crew.give(_page_out_one, self._mapped)
        self._bytes += swap.dense_bytes
        if self._bytes > _TRIM_BYTES:
            release_host_memory()
            self._bytes = 0

    def finish(self, model: nn.Module) -> Attachment:
        """Swap the model's layers in place, and encode the weights that were not taken.

        Raises:
            CheckpointError: weights planned as tied are no longer tied.
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
        """Free the pages of a model that failed to load."""
        self._crew.stop()
        if not self._joins:
            self.runtime.stack.close()
            return
        for handle in self._handles:
            handle.retire()
        self.runtime.stack.retire_unowned()


def _place(runtime: Runtime, attachment: Attachment, homes: Homes) -> None:
    """Place the pages of all models; on failure, restore the other models' homes."""
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
                f"{names} are tied by the model's config, and separate in its files; load it with "
                "tie_word_embeddings=False, or exclude them (weights.exclude)"
            )
