"""Optimizer step overlapped with the backward pass: each weight is updated once its gradient is complete.

    for part in parts[:-1]:
        loss_of(part).backward()
    with vb.stepping():                  # the last pass of a step
        loss_of(parts[-1]).backward()

A gradient is complete after as many contributions as the weight had forwards since the last step; recomputed forwards
do not count. If that cannot be determined (a forward without a backward), the weight waits for the end of the block.
Whatever needs all gradients first, such as clipping by the norm, raises an error.
"""

import threading
from collections.abc import Iterable, Mapping
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch.optim.optimizer import _global_optimizer_pre_hooks

from vbrt.errors import WrapError
from vbrt.training.full.full_weight import FullWeight
from vbrt.training.full.host_gradients import Outlet
from vbrt.training.full.optimizer_takeover import StreamedOptimizer, Turn, drop_gradients, open_turn
from vbrt.training.full.optimizer_update import Scaling

__all__ = ["Stepping"]


class Stepping:
    """One step of an optimizer that was taken over, for one `with` block."""

    def __init__(self, optimizer: StreamedOptimizer, weights: Iterable[FullWeight], outlet: Outlet) -> None:
        self._optimizer, self._outlet = optimizer, outlet
        self._weights = [weight for weight in weights if weight.trainable]
        self._updated: set[int] = set()
        self._lock = threading.Lock()
        self._error: BaseException | None = None

    def __enter__(self) -> None:
        if self._optimizer._optimizer_step_pre_hooks or _global_optimizer_pre_hooks:
            raise WrapError(
                "vb.stepping(): hooks that run before an optimizer's step (register_step_pre_hook) are due before any "
                "weight is updated: use vb.step()"
            )
        self._optimizer._vb_updater.finish()
        groups: dict[int, Mapping[str, Any]] = {
            id(parameter): group for group in self._optimizer.param_groups for parameter in group["params"]
        }
        turn = open_turn(self._optimizer)
        for weight in self._weights:
            group = groups.get(id(weight.parameter))
            if group is not None:  # else it was frozen when wrapped
                weight.gradient.whole = partial(self._update, weight, group, turn)

    def _update(self, weight: FullWeight, group: Mapping[str, Any], turn: Turn) -> None:
        """Submit the update of a weight whose gradient is complete; called from a thread that may block for its
        copy."""
        try:
            with self._lock:
                if id(weight) in self._updated:
                    raise WrapError(
                        f"{weight.name}: a second gradient came after its update: within vb.stepping() is one backward "
                        "pass, the last one of a step; those before it belong outside"
                    )
                gradient, updater = weight.gradient.held(), self._optimizer._vb_updater
                if gradient is not None:
                    updater.rule.check(weight.name, group, weight.state.kinds)
                    self._updated.add(id(weight))
                    weight.gradient.applied = True
                    mark = turn.number, weight.gradient.version
                    updater.submit(weight.state, (mark, gradient.read), group, Scaling(factor=gradient.factor))
        except BaseException as error:  # noqa: BLE001 - raised at the end of the block
            self._error = self._error or error

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._outlet.drain()
        for weight in self._weights:
            weight.gradient.whole, weight.gradient.applied = None, False
        error = error or self._error
        if error is not None:
            self._optimizer._vb_turn = None
            drop_gradients(weight.parameter for weight in self._weights if id(weight) in self._updated)
            if self._updated:
                error.add_note(
                    f"vb.stepping(): {len(self._updated)} of {len(self._weights)} weights had been updated by then; "
                    "the model is usable, and between two steps: go on, or load the last checkpoint"
                )
            if error is self._error:
                raise error
            return
        with torch.no_grad():
            self._optimizer.step()
