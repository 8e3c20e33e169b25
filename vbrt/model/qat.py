"""A model whose weights train, on a runtime: the stack is empty, nothing moves."""

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
    """`Attachment` for mode = "train": weights stay parameters, and the forward sees them in 4 bits."""

    @property
    def lossless(self) -> bool:
        """True: the weights are the parameters that an optimizer moves; what rounds them is each forward."""
        return True

    def materialize(self, *, progress: bool | None = None) -> None:
        """Bring the model to the computing device now instead of at its first forward; there is nothing to encode."""
        move_rest_(self.model, self.stack.device)

    def ready_to_save(self) -> VBConfig:
        """Return the config of an inference model: a save has what the forward computes with now."""
        self.check_open("save")
        return replace(self.settings, mode="infer")

    def set_budget(self, tier: str, budget: int | str) -> int:
        """Raise WrapError: no tier holds weights that train."""
        raise WrapError(
            f'set_budget({tier!r}): mode = "train" keeps the weights out of the tiers, there is nothing to '
            "budget; for less memory use activation checkpointing or smaller batches"
        )

    def check_recordable(self) -> None:
        """Raise WrapError: nothing is leased or copied."""
        raise WrapError(
            'timeline(): mode = "train" moves no weights, so there are no waits and copies to record; '
            "torch.profiler shows where a step's time goes"
        )

    def record_routing(self, path: str | PathLike) -> contextlib.AbstractContextManager[RoutingRecorder]:
        """Raise WrapError: there are no pages that tokens could lease."""
        raise WrapError(
            'record_routing(): mode = "train" has no pages of experts whose use could be simulated; record with a '
            "model in the tiers (vbrt.load of what vb.save writes, or wrap after unwrap())"
        )

    def stats(self, *, experts: bool = False) -> Stats:
        """Return a frozen snapshot of all counters; waits for the device to have counted clipped weights."""
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
        """Give the model back, in place, with the very parameters that trained, and close."""
        for layer in self.layers.values():
            layer.release_()
        self.registry.clear()
        remove_pass_hooks(self.model)
        self.close()
        return self.model

    def close(self) -> None:
        """Stop the empty stack: the weights are parameters, and the layers go on as they are. Idempotent."""
        self.closed = True
        self.activations.release_()
        self.stack.close()
