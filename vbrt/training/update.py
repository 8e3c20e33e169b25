"""The update of weights that are trained from host memory: join, step, split.

A weight's fp32 master is two halves. The high half is a page that forwards compute with; the low half and the moments
stay on the host. `split_master` rounds half up, so that 16 bits are enough for the low half whatever the value; torch's
cast rounds ties to even, and differs in exact ties only.

The interface between the layers and the update:

| name | what |
| --- | --- |
| `split_master(w) -> hi, lo`, `join_master(hi, lo) -> w` | inverse of each other, bit for bit |
| `WeightState` | one weight: its high half's page, low half, moments, number of steps |
| `Rule` | how an optimizer's class updates; `rule_for(optimizer)` refuses one without a record, by name |
| `Updater.submit(state, grad, group)` | update a weight, now or in the background; `wait(state)`, `finish()` |

`HighPage` is what a state needs of the page: `rewriting()` yields the high half at home, to be changed in place;
`expect()` has leases wait until then.
"""

import contextlib
import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from vbrt.errors import WrapError

__all__ = ["HighPage", "Rule", "Updater", "WeightState", "join_master", "rule_for", "split_master"]

_HALF = 0x8000


def split_master(master: Tensor) -> tuple[Tensor, Tensor]:
    """Split fp32 into its high half (bf16, rounded half up) and the 16 bits that are left (int16), of the same shape.

    NaN stays NaN for every NaN that arithmetic makes; the bits come back whatever they are.
    """
    bits = master.contiguous().view(torch.int32) + _HALF
    high = (bits >> 16).to(torch.int16).view(torch.bfloat16)
    return high, bits.to(torch.int16)


def join_master(high: Tensor, low: Tensor) -> Tensor:
    """Return the fp32 values that `split_master` split."""
    bits = high.contiguous().view(torch.int16).to(torch.int32) << 16
    return (bits + (low.to(torch.int32) & 0xFFFF) - _HALF).view(torch.float32)


class HighPage(Protocol):
    """The page of a weight's high half."""

    def rewriting(self) -> contextlib.AbstractContextManager[Tensor]:
        """Yield the high half (bf16, the module's shape, on the CPU), to be changed in place."""

    def expect(self) -> None:
        """Have leases of the page wait until it was rewritten once."""


@dataclass(eq=False)
class WeightState:
    """What the update needs of one weight.

    Attributes:
        name: for errors.
        high: its page.
        low: int16, of the weight's shape, on the CPU.
        moments: fp32 by the names of torch's optimizer state, on the CPU; empty before the first step.
        steps: updates so far.
    """

    name: str
    high: HighPage
    low: Tensor
    moments: dict[str, Tensor] = field(default_factory=dict)
    steps: int = 0

    def master(self) -> Tensor:
        """Return a copy of the fp32 weight; the state must not be waiting for an update."""
        with self.high.rewriting() as high:
            return join_master(high, self.low)


@dataclass(frozen=True, slots=True)
class Rule:
    """How an optimizer's class updates one weight.

    Attributes:
        optimizer: torch's class, which is the reference.
        options: keywords for it beyond the group's.
        moments: the tensors of its state.
    """

    optimizer: type[torch.optim.Optimizer]
    moments: tuple[str, ...]
    options: Mapping[str, Any] = field(default_factory=dict)

    def update_(self, state: WeightState, grad: Tensor, group: Mapping[str, Any]) -> None:
        """Update a weight in place by a gradient of its shape, with the hyperparameters of a param group."""
        with state.high.rewriting() as high:
            master = nn.Parameter(join_master(high, state.low))
            master.grad = grad.to(torch.float32)
            takes = inspect.signature(self.optimizer).parameters
            own = {name: value for name, value in group.items() if name != "params" and name in takes}
            step = self.optimizer([master], **{**own, **self.options})
            if state.moments:
                step.state[master] = {
                    "step": torch.tensor(float(state.steps), dtype=torch.float32, device="cpu"),
                    **state.moments,
                }
            step.step()
            state.moments = {name: step.state[master][name] for name in self.moments if name in step.state[master]}
            new_high, new_low = split_master(master.detach())
            high.copy_(new_high)
            state.low.copy_(new_low)
        state.steps += 1


_FUSED = {"fused": True, "foreach": None}
_RULES = (
    Rule(torch.optim.AdamW, ("exp_avg", "exp_avg_sq"), _FUSED),
    Rule(torch.optim.Adam, ("exp_avg", "exp_avg_sq"), _FUSED),
    Rule(torch.optim.SGD, ("momentum_buffer",), _FUSED),
)


def rule_for(optimizer: torch.optim.Optimizer) -> Rule:
    """Return the rule of an optimizer's class. Raises WrapError for a class that has none."""
    for rule in _RULES:
        if type(optimizer) is rule.optimizer:
            return rule
    known = ", ".join(rule.optimizer.__name__ for rule in _RULES)
    raise WrapError(
        f'{type(optimizer).__name__}: mode = "full" updates weights where they live, in chunks, which it can do for '
        f"{known}; take one of these, or train resident"
    )


class Updater:
    """Updates weights; here at once, in the thread that submits."""

    def __init__(self, rule: Rule) -> None:
        self.rule = rule

    def submit(self, state: WeightState, grad: Tensor, group: Mapping[str, Any]) -> None:
        """Update a weight by its gradient, now or in the background."""
        self.rule.update_(state, grad, group)

    def wait(self, state: WeightState) -> None:
        """Return when the weight's update is done. Raises what went wrong in it."""

    def finish(self) -> None:
        """Return when all updates are done. Raises what went wrong in them."""

    def states(self) -> Iterable[WeightState]:
        """Return those that wait to be updated."""
        return ()
