"""Takes a user's optimizer over for weights in the tiers, in place.

The object stays: loops, schedulers, `Trainer` and state dicts hold it. Its class becomes a subclass, as layers' classes
do, whose `step` runs the optimizer's own step for the parameters that stayed and submits the others to the updater.
"""

import functools
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn

from vbrt.errors import WrapError
from vbrt.training.full import FullWeight
from vbrt.training.kept import check_kept, load_kept, step_kept
from vbrt.training.optimizer_state import load_state, state_with_moments
from vbrt.training.streamed import StreamedParameter
from vbrt.training.update import Rule, Scaling, Updater, rule_for

__all__ = ["StreamedOptimizer", "release_optimizer", "take_optimizer"]


class StreamedOptimizer(torch.optim.Optimizer):
    """Common part of optimizers that were taken over; a mixin in front of torch's class."""

    _vb_updater: Updater
    _vb_begun = False  # the step, within the backward pass
    _vb_begun_with: dict[int, int] | None = None  # versions of gradients of a step that has not ended

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Do the optimizer's step: parameters that stayed now, weights in the tiers in the background.

        Raises:
            TierError: an earlier update of a weight failed: nothing is updated by this call. The next one completes
                that step first; where no weight in the tiers has a new gradient, that is all that it does.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        begun, self._vb_begun = self._vb_begun, False
        completed = False if begun else self._vb_updater.finish()
        streamed = list(_streamed(self))
        if completed and all(parameter.weight.gradient.empty for parameter in streamed):
            return loss  # the step that had failed is what was asked for again
        divisor, overflowed = _scaled(self)
        versions = {id(parameter): parameter.weight.gradient.version for parameter in streamed}
        if self._vb_begun_with != versions:  # else Ctrl-C has ended this very step before
            self._step_kept(streamed)
            self._vb_begun_with = versions
        for group in self.param_groups if not overflowed else ():
            for parameter in group["params"]:
                if isinstance(parameter, StreamedParameter):
                    self._submit(parameter, group, divisor)
        self._vb_begun_with = None
        return loss

    def _step_kept(self, streamed: Iterable[StreamedParameter]) -> None:
        """Do torch's own step, which sees no gradients of weights in the tiers."""
        _hide(streamed, hidden=True)
        try:
            step_kept(self, type(self).__mro__[2])
        finally:
            _hide(streamed, hidden=False)

    def _submit(self, parameter: StreamedParameter, group: dict[str, Any], divisor: float) -> None:
        weight = parameter.weight
        gradient = weight.gradient.held()
        if gradient is not None and parameter.requires_grad:
            scaling = Scaling(divisor, gradient.factor)
            mark = weight.gradient.version
            self._vb_updater.submit(weight.state, (mark, gradient.read), group, scaling)
        weight.gradient.take()  # now, since the update has it

    def state_dict(self) -> dict[str, Any]:
        """Return the state dict of the plain optimizer, after all updates; moments of weights in the tiers are those on
        the host, not copies."""
        self._vb_updater.finish()
        return state_with_moments(self, super().state_dict)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a state dict of this optimizer or of a plain one of its class."""
        self._vb_updater.finish()
        load_state(self, state_dict, partial(load_kept, self))


def _scaled(optimizer: torch.optim.Optimizer) -> tuple[float, bool]:
    """Return what torch's GradScaler has multiplied gradients with, and whether one of them is not finite."""
    scale, found = getattr(optimizer, "grad_scale", None), getattr(optimizer, "found_inf", None)
    return (1.0 if scale is None else float(scale)), found is not None and bool(found.item())


def take_optimizer(
    optimizer: torch.optim.Optimizer, weights: Iterable[FullWeight], *, eight_bit: bool = False
) -> Updater:
    """Have an optimizer update weights in the tiers, in place.

    Args:
        eight_bit: moments have 8 bits.

    Raises:
        WrapError: its class has no rule, or it lacks a weight that trains: named.
        TierError: the state of the weights does not fit into the tiers.
    """
    rule = rule_for(optimizer)
    check_kept(optimizer)
    weights = list(weights)
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    missing = [weight.name for weight in weights if weight.trainable and id(weight.parameter) not in held]
    if missing:
        raise WrapError(
            f"{missing[0]}: it trains, and no param group of the optimizer has it ({len(missing)} weights in all); add "
            "it to a group, or requires_grad_(False)"
        )
    plain = type(optimizer)
    updater = Updater(rule)
    _place(optimizer, weights, rule, eight_bit=eight_bit)
    for rank, weight in enumerate(weights):
        weight.updater, weight.state.rank = updater, rank
        _take_state(optimizer, weight)
    optimizer.__dict__["_vb_updater"] = updater
    optimizer.__class__ = _class_for(plain)
    if "step" in optimizer.__dict__:  # a scheduler has wrapped it
        optimizer.__dict__["step"] = _counted(optimizer)
    return updater


def release_optimizer(optimizer: torch.optim.Optimizer, weights: Iterable[FullWeight]) -> None:
    """Turn an optimizer back, in place; the moments of the weights become its state."""
    for weight in weights:
        state = weight.state
        if state is not None and weight.parameter is not None and (state.has_moments or state.steps):
            moments = {name: moment.to(weight.parameter.device) for name, moment in state.moments.items()}
            optimizer.state[weight.parameter] = {
                "step": torch.tensor(float(state.steps), dtype=torch.float32, device="cpu"),
                **moments,
            }
    if isinstance(optimizer, StreamedOptimizer):
        optimizer.__class__ = type(optimizer).__mro__[2]
        optimizer.__dict__.pop("_vb_updater", None)
        for name in ("_vb_begun", "_vb_begun_with"):
            optimizer.__dict__.pop(name, None)
        if "step" in optimizer.__dict__:
            optimizer.__dict__["step"] = _counted(optimizer)


def _take_state(optimizer: torch.optim.Optimizer, weight: FullWeight) -> None:
    """Take the moments that an optimizer has of a weight, where it has made steps before."""
    state = optimizer.state.pop(weight.parameter, None)
    if state:
        weight.state.steps = int(state.get("step", 0))
        moments = {name: state[name] for name in weight.state.kinds if state.get(name) is not None}
        weight.state.moments = {name: moment.detach().to("cpu", torch.float32) for name, moment in moments.items()}


def _place(optimizer: torch.optim.Optimizer, weights: list[FullWeight], rule: Rule, *, eight_bit: bool) -> None:
    """Give the masters' low halves and the moments of weights that train their place in the tiers."""
    groups = {id(parameter): group for group in optimizer.param_groups for parameter in group["params"]}
    for weight in weights:
        group = groups.get(id(weight.parameter))
        if group is not None:
            home = weight.spec.home("state", weight.stack.names[-1])
            weight.state.place((weight.stack, weight.owner), rule.moments(group), home, eight_bit=eight_bit)


@functools.cache
def _class_for(plain: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    return type(f"Streamed{plain.__name__}", (StreamedOptimizer, plain), {"__module__": __name__})


def _counted(optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
    """The step of an instance, as schedulers count it."""

    @functools.wraps(type(optimizer).step)
    def step(*args: Any, **kwargs: Any) -> Any:
        optimizer._opt_called = True
        return type(optimizer).step(optimizer, *args, **kwargs)

    step._wrapped_by_lr_sched = True
    return step


def _streamed(optimizer: torch.optim.Optimizer) -> Iterable[StreamedParameter]:
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    return (parameter for parameter in parameters if isinstance(parameter, StreamedParameter))


def _hide(parameters: Iterable[nn.Parameter], *, hidden: bool) -> None:
    for parameter in parameters:
        parameter.weight.gradient.hidden = hidden
