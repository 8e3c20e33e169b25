"""Attachment of a model that trains from the tiers (mode = "full")."""

import contextlib
import functools
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from os import PathLike

import torch
from torch import Tensor, nn

from vbrt.config import VBConfig
from vbrt.config.parse_budgets import parse_ahead
from vbrt.errors import WrapError
from vbrt.host import accelerator
from vbrt.model.attachment import Attachment, Seed, Terms
from vbrt.model.machine_memory import this_machine
from vbrt.model.pass_hooks import remove_pass_hooks
from vbrt.model.runtime import Runtime
from vbrt.report.routing_recorder import RoutingRecorder
from vbrt.report.stats import Stats
from vbrt.report.training_counters import UpdateStats
from vbrt.training import FullLayer, FullWeight
from vbrt.training.full.clipping import clip_grad_norm_
from vbrt.training.full.full_layers import check_assigns
from vbrt.training.full.host_gradients import Outlet
from vbrt.training.full.optimizer_takeover import release_optimizer, take_optimizer
from vbrt.training.full.optimizer_update import Updater
from vbrt.training.full.resident_params import widen_kept
from vbrt.training.full.step_in_backward import Stepping
from vbrt.training.full.update_ahead import Ahead

__all__ = ["FullAttachment"]


class FullAttachment(Attachment):
    """`Attachment` for mode = "full".

    Attributes:
        optimizer: the user's, taken over; None before `take`.
        updater: updates its weights.
        ahead: their updates before the step; None where the config has none.
        clip_ns: time spent clipping.
    """

    def __init__(
        self, model: nn.Module, runtime: Runtime, terms: Terms, layers: Mapping[str, FullLayer], outlet: Outlet
    ) -> None:
        super().__init__(model, runtime, terms, layers)
        self.optimizer: torch.optim.Optimizer | None = None
        self.updater: Updater | None = None
        self.ahead: Ahead | None = None
        self._outlet = outlet
        self.clip_ns = 0
        model.__dict__["_apply"] = functools.partial(self._apply_to_all, model)
        self._loads = model.register_load_state_dict_pre_hook(self._before_load)

    @property
    def weights(self) -> list[FullWeight]:
        """Weights in model order."""
        return list(dict.fromkeys(layer.handle for layer in self.layers.values()))

    @property
    def lossless(self) -> bool:
        """True: masters come back bit for bit."""
        return True

    def take(self, optimizer: torch.optim.Optimizer) -> None:
        """Take over an optimizer of the model's parameters, to update the weights in the tiers.

        Raises:
            WrapError: the optimizer cannot update in chunks or lacks a weight, or there is an optimizer already.
        """
        self.check_open("optimizer")
        if self.optimizer is not None:
            raise WrapError("this model has an optimizer already; unwrap() and wrap it with the other one")
        self.materialize()
        asked = parse_ahead(self._settings.training.ahead, where="training.ahead")
        begins = accelerator.has_streams(self.stack.device) if asked.kind == "auto" else bool(asked.amount)
        self.updater, self.ahead = take_optimizer(
            optimizer,
            self.weights,
            eight_bit=self._settings.training.moments == "8bit",
            spare=self._spare_room if begins else None,
        )
        self.optimizer = optimizer

    def _spare_room(self) -> int:
        """Return the bytes that updates before the step may add to host memory: see `TrainingConfig.ahead`."""
        asked = parse_ahead(self._settings.training.ahead, where="training.ahead")
        machine = this_machine(self._settings)
        if asked.kind == "auto":
            in_files = any(not self.stack.levels[page.home].tier.memory for page in list(self.stack.pages.values()))
            return 0 if in_files else machine.cpu_available_bytes // 2
        share = machine.cpu_total_bytes / machine.ranks_here
        limit = int(asked.amount if asked.kind == "bytes" else asked.amount * share)
        return limit - self.ahead.spare_bytes

    def set_budget(self, tier: str, budget: int | str) -> int:
        """Change the budget of a tier, for all models on the runtime. See `VBModelWrapper.set_budget`."""
        with contextlib.nullcontext() if self.ahead is None else self.ahead.released():
            return super().set_budget(tier, budget)

    def _apply_to_all(self, model: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        """nn.Module's `_apply`, after a check that all weights in the tiers can follow. Raises WrapError."""
        for weight in self.weights:
            if weight.state is not None:
                weight.check_cast(fn(torch.zeros((), dtype=weight.dtype, device="cpu")).dtype)
        return type(model)._apply(model, fn, recurse)

    def _before_load(self, model: nn.Module, state_dict: Mapping, prefix: str, metadata: Mapping, *_: object) -> None:
        """Raise WrapError for a load that is refused, before it changes anything."""
        for weight in self.weights[:1]:
            check_assigns(weight, metadata)

    def need(self, what: str) -> torch.optim.Optimizer:
        """Return the optimizer. Raises WrapError if there is none."""
        self.check_open(what)
        if self.optimizer is None:
            raise WrapError(f'{what}: mode = "full" has no optimizer yet; give vbrt.wrap(..., optimizer=...) one')
        return self.optimizer

    def stats(self, *, experts: bool = False) -> Stats:
        """Return a frozen snapshot of all counters."""
        found, updater = super().stats(experts=experts), self.updater
        if updater is None:
            return found
        weights = self.weights
        updates = UpdateStats(
            updater.kernel.backend,
            max((weight.state.steps for weight in weights), default=0),
            updater.waiting,
            sum(weight.wait_ns for weight in weights) // 1000,
            self.clip_ns // 1000,
            self.stack.rewriter.refreshed_bytes,
            self._outlet.device_bytes,
            updater.ahead,
            updater.discarded,
            0 if self.ahead is None else self.ahead.spare_bytes,
            updater.helpers.busy_ns // 1000,
        )
        return replace(found, updates=updates)

    def clip(self, max_norm: float, norm_type: float) -> Tensor:
        """Scale all gradients. See `VBFullWrapper.clip_grad_norm_`."""
        start = time.perf_counter_ns()
        try:
            if norm_type == 2.0 and self.updater is not None:
                return clip_grad_norm_(self.model.parameters(), max_norm)
            return torch.nn.utils.clip_grad_norm_(self.model.parameters(), max_norm, norm_type)
        finally:
            self.clip_ns += time.perf_counter_ns() - start

    def stepping(self) -> Stepping:
        """Return the step that begins within a `with` block. See `VBFullWrapper.stepping`."""
        return Stepping(self.need("stepping"), self.weights, self._outlet)

    def settle(self) -> None:
        """Wait for all updates. Raises their errors."""
        if self.updater is not None:
            self.updater.finish()

    def ready_to_save(self) -> VBConfig:
        """Return the config of an inference model that holds the fp32 masters, after all updates."""
        self.check_open("save")
        stacked = next((swap.name for swap in self.plan.swaps if swap.site.stacked), None)
        if stacked is not None:
            raise WrapError(
                f'{stacked}: save: in mode "full" it is one page with the matrices of all experts, and saves have one '
                "for each; state_dict(), save_pretrained() and save_checkpoint() hold it, and unwrap() gives it back, "
                "to be wrapped for inference"
            )
        self.settle()
        return replace(self.settings, mode="infer")

    def record_routing(self, path: str | PathLike) -> contextlib.AbstractContextManager[RoutingRecorder]:
        """Raise WrapError: experts have no pages of their own."""
        raise WrapError(
            'record_routing(): mode = "full" keeps all experts of a layer in one page for each parameter; record the '
            "routing of a model that is wrapped for inference"
        )

    def detach(self) -> nn.Module:
        """Restore the model, in place, with its own parameters in fp32, and the optimizer with its state; close."""
        self.settle()
        if self.optimizer is not None:
            widen_kept(self.optimizer)
            release_optimizer(self.optimizer, self.weights)
            self.optimizer = None
        self.registry.release_()
        remove_pass_hooks(self.model)
        self._loads.remove()
        self.model.__dict__.pop("_apply", None)
        self.close()
        return self.model

    def close(self) -> None:
        """Free the pages of this model and stop its threads. Idempotent."""
        self._outlet.close()
        if self.ahead is not None:
            self.ahead.detach()
        if self.updater is not None:
            self.updater.close()
        super().close()

    def __reduce_ex__(self, protocol: int) -> Seed:
        return self.seed()

    def seed(self) -> Seed:
        """Raise WrapError: a copy would train the same pages."""
        raise WrapError(
            'a model that trains from the tiers (mode = "full") cannot be copied or pickled; unwrap() first'
        )
