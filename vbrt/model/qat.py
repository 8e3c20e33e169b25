"""Attachment for quantization-aware training (mode = "train"): weights stay parameters, the stack is empty."""

import contextlib
from dataclasses import replace
from os import PathLike

from torch import nn

from vbrt.config import VBConfig
from vbrt.errors import WrapError
from vbrt.libraries.versions import newer_than_tested
from vbrt.model.attachment import Attachment
from vbrt.model.pass_hooks import move_rest_, remove_pass_hooks
from vbrt.model.snapshot import trained_layer_stats
from vbrt.report.routing_recorder import RoutingRecorder
from vbrt.report.stats import LayerStats, Stats
from vbrt.residency.plan import Swap
from vbrt.training import TrainedLayer

__all__ = ["TrainingAttachment"]


class TrainingAttachment(Attachment):
    """`Attachment` for mode = "train": weights stay parameters, fake-quantized to 4 bits in each forward."""

    @property
    def lossless(self) -> bool:
        """True: the parameters are kept unrounded; only the forward rounds them."""
        return True

    def materialize(self, *, progress: bool | None = None) -> None:
        """Move the model to the computing device now instead of at its first forward; there is nothing to encode."""
        move_rest_(self.model, self.stack.device)

    def ready_to_save(self) -> VBConfig:
        """Return the config of an inference model: a save holds the rounded weights of the forward."""
        self.check_open("save")
        return replace(self.settings, mode="infer")

    def set_budget(self, tier: str, budget: int | str) -> int:
        """Raise WrapError: no tier holds weights that train."""
        raise WrapError(
            f'set_budget({tier!r}): mode = "train" keeps the weights out of the tiers, there is nothing to '
            "budget; for less memory use activation checkpointing or smaller batches"
        )

    def check_recordable(self) -> None:
        """Raise WrapError: there are no leases or copies to record."""
        raise WrapError(
            'timeline(): mode = "train" moves no weights, so there are no waits and copies to record; '
            "torch.profiler shows where a step's time goes"
        )

    def record_routing(self, path: str | PathLike) -> contextlib.AbstractContextManager[RoutingRecorder]:
        """Raise WrapError: there are no pages of experts."""
        raise WrapError(
            'record_routing(): mode = "train" has no pages of experts whose use could be simulated; record with a '
            "model in the tiers (vbrt.load of what vb.save writes, or wrap after unwrap())"
        )

    def stats(self, *, experts: bool = False) -> Stats:
        """Return a frozen snapshot of all counters; synchronizes with the device for the count of clipped weights."""
        here = self.layers
        swaps = [swap for swap in self._plan.swaps if swap.name in here]  # none after unwrap()
        layers = {swap.name: self._layer_stats(swap, here[swap.name]) for swap in swaps}
        kept_for_scales = sum(stats.plane_bytes.get("scales", 0) for stats in layers.values())
        dense_bytes, kept_bytes = self._plan.dense_bytes, self._plan.kept_bytes
        return Stats(
            "none",
            self.stack.names[0],
            self.passes,
            layers,
            {},
            dense_bytes,
            kept_bytes,
            dense_bytes + kept_for_scales,
            tuple(self.activations.fallbacks),
            activations=self.activations.stats(),
            untested=newer_than_tested(loaded=True),
        )

    def _layer_stats(self, swap: Swap, layer: TrainedLayer) -> LayerStats:
        return trained_layer_stats(self.stack, swap, layer)

    def detach(self) -> nn.Module:
        """Restore the model, in place, with the same trained parameters, and close."""
        for layer in self.layers.values():
            layer.release_()
        self.registry.clear()
        remove_pass_hooks(self.model)
        self.close()
        return self.model

    def close(self) -> None:
        """Close the empty stack; the layers and their parameters keep working. Idempotent."""
        self.closed = True
        self.activations.release_()
        self.stack.close()
