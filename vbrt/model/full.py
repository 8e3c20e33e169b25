"""A model that trains from the tiers, on a runtime."""

import contextlib
from collections.abc import Mapping
from dataclasses import replace
from os import PathLike

import torch
from torch import nn

from vbrt.config import VBConfig
from vbrt.errors import WrapError
from vbrt.model.attachment import Attachment, Seed, Terms
from vbrt.model.runtime import Runtime
from vbrt.report.routing import RoutingRecorder
from vbrt.training import FullLayer, FullWeight
from vbrt.training.gradients import Outlet
from vbrt.training.kept import widen_kept
from vbrt.training.optimizers import release_optimizer, take_optimizer
from vbrt.training.stepping import Stepping
from vbrt.training.update import Updater

__all__ = ["FullAttachment"]


class FullAttachment(Attachment):
    """`Attachment` for mode = "full".

    Attributes:
        optimizer: the user's, taken over; None before `take`.
        updater: of its weights.
    """

    def __init__(
        self, model: nn.Module, runtime: Runtime, terms: Terms, layers: Mapping[str, FullLayer], outlet: Outlet
    ) -> None:
        super().__init__(model, runtime, terms, layers)
        self.optimizer: torch.optim.Optimizer | None = None
        self.updater: Updater | None = None
        self._outlet = outlet

    @property
    def weights(self) -> list[FullWeight]:
        """The weights in the order of the model."""
        return list(dict.fromkeys(layer.handle for layer in self.layers.values()))

    @property
    def lossless(self) -> bool:
        """True: masters come back bit for bit."""
        return True

    def take(self, optimizer: torch.optim.Optimizer) -> None:
        """Have an optimizer over the model's parameters update the weights in the tiers.

        Raises:
            WrapError: it has no form that updates in chunks, lacks a weight, or there is an optimizer already.
        """
        self.check_open("optimizer")
        if self.optimizer is not None:
            raise WrapError("this model has an optimizer already; unwrap() and wrap it with the other one")
        self.materialize()
        self.updater = take_optimizer(optimizer, self.weights, eight_bit=self._settings.training.moments == "8bit")
        self.optimizer = optimizer

    def need(self, what: str) -> torch.optim.Optimizer:
        """Return the optimizer. Raises WrapError if there is none."""
        self.check_open(what)
        if self.optimizer is None:
            raise WrapError(f'{what}: mode = "full" has no optimizer yet; give vbrt.wrap(..., optimizer=...) one')
        return self.optimizer

    def stepping(self) -> Stepping:
        """Return the step that begins within a `with` block. See `VBFullWrapper.stepping`."""
        return Stepping(self.need("stepping"), self.weights, self._outlet)

    def settle(self) -> None:
        """Wait for all updates. Raises what went wrong in them."""
        if self.updater is not None:
            self.updater.finish()

    def ready_to_save(self) -> VBConfig:
        """Return the config of an inference model that holds the fp32 masters, after all updates."""
        self.check_open("save")
        self.settle()
        return replace(self.settings, mode="infer")

    def record_routing(self, path: str | PathLike) -> contextlib.AbstractContextManager[RoutingRecorder]:
        """Raise WrapError: routed experts stay parameters."""
        raise WrapError('record_routing(): mode = "full" has no pages of routed experts')

    def detach(self) -> nn.Module:
        """Give the model back, in place, with its own parameters and fp32 values, the optimizer with its state, and
        close."""
        self.settle()
        if self.optimizer is not None:
            widen_kept(self.optimizer)
            release_optimizer(self.optimizer, self.weights)
            self.optimizer = None
        self.registry.release_()
        self._hook.remove()
        self.close()
        return self.model

    def close(self) -> None:
        """Free the pages of this model and stop its threads. Idempotent."""
        self._outlet.close()
        if self.updater is not None:
            self.updater.close()
        super().close()

    def seed(self) -> Seed:
        """Raise WrapError: a copy would train the same pages."""
        raise WrapError(
            'a model that trains from the tiers (mode = "full") cannot be copied or pickled; unwrap() first'
        )
