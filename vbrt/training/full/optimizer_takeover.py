"""Takeover of a user's optimizer for weights in the tiers, in place.

The object stays, since loops, schedulers, `Trainer` and state dicts hold it. Its class becomes a subclass whose `step`
runs the optimizer's own step for non-streamed parameters and submits the others to the updater.
"""

import functools
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from vbrt.errors import WrapError
from vbrt.training.full.clipping import Norms
from vbrt.training.full.full_weight import FullWeight
from vbrt.training.full.optimizer_state import StreamedState, load_state, state_with_moments, take_state
from vbrt.training.full.optimizer_update import Rule, Scaling, Updater, rule_for
from vbrt.training.full.resident_params import check_kept, load_kept, step_kept
from vbrt.training.full.streamed_parameter import StreamedParameter, StreamedWeight
from vbrt.training.full.update_ahead import Ahead

__all__ = ["StreamedOptimizer", "Turn", "drop_gradients", "open_turn", "release_optimizer", "take_optimizer"]


class StreamedOptimizer(torch.optim.Optimizer):
    """Mixin for optimizers that were taken over, in front of torch's class."""

    _vb_updater: Updater
    _vb_eight_bit = False
    _vb_turn: "Turn | None" = None  # an unfinished step
    _vb_ahead: Ahead | None = None

    @torch.optim.Optimizer.profile_hook_step
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Do the optimizer's step: non-streamed parameters now, weights in the tiers in the background.

        Raises:
            TierError: an earlier update failed; this call updates nothing. The next call completes that step first, and
                does nothing else if no weight in the tiers has a new gradient. Or the model was closed.
        """
        self._vb_updater.check_open(f"{type(self).__mro__[2].__name__}.step()")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        take_state(self)
        turn = self._vb_turn
        within_pass = turn is not None and turn.versions is None
        completed = not within_pass and self._vb_updater.finish()
        streamed = list(_streamed(self))
        if completed and not any(parameter.weight.gradient.fresh for parameter in streamed):
            return loss  # retry of the failed step
        divisor, overflowed = _scaled(self)
        submitted = [] if overflowed else self._checked()
        versions = {id(parameter): parameter.weight.gradient.version for parameter in streamed}
        if turn is None or turn.versions not in (None, versions):
            turn = Turn(next(_turns))
        if turn.versions is None:  # else Ctrl-C interrupted this very step
            turn = self._step_kept(streamed, Turn(turn.number, versions))
        for parameter, group in submitted:
            self._submit(parameter, group, turn, divisor)
        for parameter in streamed:
            parameter.weight.gradient.end_step(1.0 if overflowed else divisor)
        self._vb_turn = None
        if self._vb_ahead is not None:
            self._vb_ahead.end_step(self.param_groups)
        for parameter in streamed:
            parameter.weight.gradient.expose()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's; gradients in the tiers are dropped while updates still read them."""
        if set_to_none:
            drop_gradients(_streamed(self))
        super().zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's; weights in the tiers get optimizer state there.

        Raises:
            WrapError: a weight is of another model, or the group's settings are not supported for updates in chunks.
            TierError: the weights' optimizer state does not fit into the tiers.
        """
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        weights = [parameter.weight for parameter in group["params"] if isinstance(parameter, StreamedParameter)]
        try:
            for weight in weights:
                if weight.updater is not self._vb_updater:
                    raise WrapError(f"{weight.name}: it trains in the tiers of another model, with its own optimizer")
                kinds = weight.state.kinds if weight.state.placed else None  # if it was in another group
                self._vb_updater.rule.check(weight.name, group, kinds)
            _place(self, weights, self._vb_updater.rule, eight_bit=self._vb_eight_bit)
        except Exception:
            self.param_groups.pop()
            raise

    def _checked(self) -> list[tuple[StreamedParameter, dict[str, Any]]]:
        """Return the parameters in the tiers that have gradients, with their groups. Raises WrapError for unsupported
        settings, before anything is updated."""
        found = []
        for group in self.param_groups:
            for parameter in group["params"]:
                if isinstance(parameter, StreamedParameter) and not parameter.weight.gradient.empty:
                    self._vb_updater.rule.check(parameter.weight.name, group, parameter.weight.state.kinds)
                    found.append((parameter, group))
        return found

    def _step_kept(self, streamed: Iterable[StreamedParameter], turn: "Turn") -> "Turn":
        """Run torch's own step with gradients of weights in the tiers hidden, and mark it in the turn."""
        _hide(streamed, hidden=True)
        try:
            step_kept(self, type(self).__mro__[2])
            self._vb_turn = turn
        finally:
            _hide(streamed, hidden=False)
        return turn

    def _submit(self, parameter: StreamedParameter, group: dict[str, Any], turn: "Turn", divisor: float) -> None:
        weight = parameter.weight
        gradient = weight.gradient.held()
        if gradient is not None:
            mark = turn.number, weight.gradient.version
            claim = None if self._vb_ahead is None else partial(self._vb_ahead.claim, weight)
            scaling = Scaling(divisor, gradient.factor)
            self._vb_updater.submit(weight.state, (mark, gradient.read), group, scaling, claim=claim)

    def __reduce_ex__(self, protocol: int) -> Any:
        raise WrapError(
            f"{type(self).__mro__[2].__name__}: an optimizer of weights that train in the tiers cannot be copied or "
            "pickled; its state_dict() can, and unwrap() makes it a plain one again"
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the plain optimizer's state dict, after all updates; moments in the tiers alias host memory, not
        copies."""
        self._vb_updater.finish()
        return state_with_moments(self, super().state_dict)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this optimizer, or of a plain one of its class."""
        self._vb_updater.finish()
        load_state(self, state_dict, partial(load_kept, self))
        self.state = StreamedState(self)


StreamedOptimizer.step.hooked = True  # keeps load_state_dict from adding a second layer of hooks


class Turn(NamedTuple):
    """One step: its number, and gradient versions in the tiers once non-streamed parameters have stepped."""

    number: int
    versions: dict[int, int] | None = None


_turns = itertools.count()


def open_turn(optimizer: StreamedOptimizer) -> Turn:
    """Begin a step within the backward pass; the next `step` ends it."""
    optimizer._vb_turn = Turn(next(_turns))
    return optimizer._vb_turn


def drop_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Drop gradients in the tiers; updates that still read them go on."""
    for parameter in parameters:
        if isinstance(parameter, StreamedParameter):
            parameter.grad = None


def _scaled(optimizer: torch.optim.Optimizer) -> tuple[float, bool]:
    """Return GradScaler's scale, and whether it found a non-finite gradient."""
    scale, found = getattr(optimizer, "grad_scale", None), getattr(optimizer, "found_inf", None)
    return (1.0 if scale is None else float(scale)), found is not None and bool(found.item())


def take_optimizer(
    optimizer: torch.optim.Optimizer,
    weights: Iterable[FullWeight],
    *,
    eight_bit: bool = False,
    spare: Callable[[], int] | None = None,
) -> tuple[Updater, Ahead | None]:
    """Make an optimizer update weights in the tiers, in place.

    Args:
        eight_bit: 8-bit moments.
        spare: returns how many bytes of spare memory updates ahead of the step may take; None: there are none.

    Raises:
        WrapError: its class has no rule, or it lacks a weight that trains (named).
        TierError: the optimizer state does not fit into the tiers.
    """
    if isinstance(optimizer, StreamedOptimizer):
        raise WrapError(f"{type(optimizer).__mro__[2].__name__}: this optimizer updates another model in the tiers")
    rule = rule_for(optimizer)
    if not _is_counted(optimizer):
        raise WrapError(
            f"{type(optimizer).__name__}: its step was replaced on the instance, and updates in the tiers would leave "
            "that out; wrap first, and replace the step that the optimizer has then, or use register_step_pre_hook"
        )
    check_kept(optimizer)
    weights = list(weights)
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    missing = [weight.name for weight in weights if weight.trainable and id(weight.parameter) not in held]
    if missing:
        raise WrapError(
            f"{missing[0]}: it trains, and no param group of the optimizer has it ({len(missing)} such weights); add "
            "it to a group, or requires_grad_(False)"
        )
    for group in optimizer.param_groups:
        rule.check("", group)
    plain = type(optimizer)
    updater = Updater(rule)
    _place(optimizer, weights, rule, eight_bit=eight_bit)
    for rank, weight in enumerate(weights):
        weight.updater, weight.state.rank = updater, rank
        _take_state(optimizer, weight)
    norms = Norms(updater, weights)
    ahead = None if spare is None else Ahead(updater, weights, optimizer.param_groups, norms, spare)
    optimizer.__dict__.update(_vb_updater=updater, _vb_eight_bit=eight_bit, _vb_ahead=ahead)
    optimizer.__class__ = _class_for(plain)
    optimizer.state = StreamedState(optimizer)
    if "step" in optimizer.__dict__:  # wrapped by a scheduler
        optimizer.__dict__["step"] = _counted(optimizer)
    return updater, ahead


def release_optimizer(optimizer: torch.optim.Optimizer, weights: Iterable[FullWeight]) -> None:
    """Turn an optimizer back, in place; the weights' moments become its state."""
    for weight in weights:
        state = weight.state
        if state is not None and weight.parameter is not None and (state.has_moments or state.steps):
            moments = {name: moment.to(weight.parameter.device) for name, moment in state.moments.items()}
            optimizer.state[weight.parameter] = {
                "step": torch.tensor(float(state.steps), dtype=torch.float32, device="cpu"),
                **moments,
            }
    if isinstance(optimizer, StreamedOptimizer):
        optimizer.state = defaultdict(dict, optimizer.state)
        optimizer.__class__ = type(optimizer).__mro__[2]
        ahead = optimizer.__dict__.pop("_vb_ahead")
        if ahead is not None:
            ahead.detach()
        for name in ("_vb_updater", "_vb_eight_bit", "_vb_turn"):
            optimizer.__dict__.pop(name, None)
        if "step" in optimizer.__dict__ and _is_counted(optimizer):
            optimizer.__dict__["step"] = _counted(optimizer)


def _take_state(optimizer: torch.optim.Optimizer, weight: StreamedWeight) -> None:
    """Take over a weight's moments from an optimizer that has stepped before."""
    state = optimizer.state.pop(weight.parameter, None)
    if state:
        weight.state.steps = int(state.get("step", 0))
        moments = {name: state[name] for name in weight.state.kinds if state.get(name) is not None}
        weight.state.moments = {name: moment.detach().to("cpu", torch.float32) for name, moment in moments.items()}


def _place(optimizer: torch.optim.Optimizer, weights: Iterable[StreamedWeight], rule: Rule, *, eight_bit: bool) -> None:
    """Allocate low halves and moments of trained weights in the tiers."""
    groups = {id(parameter): group for group in optimizer.param_groups for parameter in group["params"]}
    for weight in weights:
        group = groups.get(id(weight.parameter))
        if group is not None:
            weight.place_state(rule.moments(group), eight_bit=eight_bit)


@functools.cache
def _class_for(plain: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    return type(f"Streamed{plain.__name__}", (StreamedOptimizer, plain), {"__module__": __name__})


def _counted(optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
    """Return an instance-level step as LR schedulers wrap it, with their call counter."""

    @functools.wraps(type(optimizer).step)
    def step(*args: Any, **kwargs: Any) -> Any:
        optimizer._opt_called = True
        return type(optimizer).step(optimizer, *args, **kwargs)

    step._wrapped_by_lr_sched = True
    return step


def _is_counted(optimizer: torch.optim.Optimizer) -> bool:
    """True if the step is the class's, apart from an LR scheduler's counter."""
    own = optimizer.__dict__.get("step")
    return own is None or getattr(own, "_wrapped_by_lr_sched", False)


def _streamed(optimizer: torch.optim.Optimizer) -> Iterable[StreamedParameter]:
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    return (parameter for parameter in parameters if isinstance(parameter, StreamedParameter))


def _hide(parameters: Iterable[nn.Parameter], *, hidden: bool) -> None:
    for parameter in parameters:
        parameter.weight.gradient.hidden = hidden
