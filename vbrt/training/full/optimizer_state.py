"""State dict of an optimizer that was taken over: the plain optimizer's, with moments from the tiers."""

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from vbrt.errors import WrapError
from vbrt.training.full.streamed_parameter import StreamedParameter, StreamedWeight

__all__ = ["StreamedState", "load_state", "moments_of", "numbered", "put_moments", "state_with_moments", "take_state"]


class StreamedState(defaultdict):
    """`state` of an optimizer that was taken over: `clear` also drops moments in the tiers; looking up a weight there
    raises an error that names `state_dict()`."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(dict, optimizer.state)
        self._optimizer = weakref.ref(optimizer)

    def __missing__(self, key: Any) -> Any:
        if isinstance(key, StreamedParameter):
            raise WrapError(f"{key.weight.name}: its moments are in the tiers; optimizer.state_dict() has them")
        return super().__missing__(key)

    def clear(self) -> None:
        """Drop steps and moments of all parameters."""
        super().clear()
        optimizer = self._optimizer()
        optimizer._vb_updater.finish()
        for parameter in _streamed(optimizer):
            put_moments(parameter.weight, {})


def take_state(optimizer: torch.optim.Optimizer) -> None:
    """Adopt a state dict assigned to `optimizer.state`, including moments for weights in the tiers."""
    if not isinstance(optimizer.state, StreamedState):
        optimizer._vb_updater.finish()
        for parameter in _streamed(optimizer):
            put_moments(parameter.weight, optimizer.state.pop(parameter, {}))
        optimizer.state = StreamedState(optimizer)


def numbered(optimizer: torch.optim.Optimizer) -> dict[int, int]:
    """Return each parameter's index in a state dict, by the parameter's id."""
    numbers: dict[int, int] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            numbers.setdefault(id(parameter), len(numbers))
    return numbers


def moments_of(weight: StreamedWeight) -> dict[str, Tensor]:
    """Return a plain optimizer's state of a weight, on the host, without copying; empty before the first step."""
    state = weight.state
    if not (state.steps or state.has_moments):
        return {}
    return {"step": state.step, **state.moments}


def put_moments(weight: StreamedWeight, own: Mapping[str, Any]) -> None:
    """Set a weight's optimizer state from a plain optimizer's; its update must be done."""
    weight.state.steps = int(own.get("step", 0))
    weight.state.moments = {
        name: own[name].detach().to("cpu", torch.float32, copy=True)
        for name in weight.state.kinds
        if own.get(name) is not None
    }


def state_with_moments(optimizer: torch.optim.Optimizer, made: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the result of `made`, called while the optimizer's state includes the moments in the tiers.

    Args:
        made: torch's `state_dict` of the optimizer.
    """
    streamed = list(_streamed(optimizer))
    try:
        for parameter in streamed:
            own = moments_of(parameter.weight)
            if own:
                optimizer.state[parameter] = own
        return made()
    finally:
        for parameter in streamed:
            optimizer.state.pop(parameter, None)


def load_state(
    optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any], load: Callable[[dict[str, Any]], None]
) -> None:
    """Load a state dict; `load`, torch's, gets the state of non-streamed parameters and the groups."""
    numbers, groups = numbered(optimizer), state_dict["param_groups"]
    theirs = [number for group in groups for number in group["params"]]
    names = dict(zip(numbers.values(), dict.fromkeys(theirs), strict=False))  # torch refuses groups of other sizes
    weights = {names.get(numbers[id(parameter)]): parameter.weight for parameter in _streamed(optimizer)}
    state = state_dict["state"]
    load({**state_dict, "state": {name: own for name, own in state.items() if name not in weights}})
    for name, weight in weights.items():
        put_moments(weight, state.get(name, {}))


def _streamed(optimizer: torch.optim.Optimizer) -> Iterator[StreamedParameter]:
    parameters: Iterator[nn.Parameter] = (p for group in optimizer.param_groups for p in group["params"])
    return (parameter for parameter in parameters if isinstance(parameter, StreamedParameter))
