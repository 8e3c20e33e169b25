"""Optimizer updates on a CPU in C: backend "compiled" of the ops "update", "gradient_norm" and "gradient_sum".

One pass over memory, bit-exact with torch's fused optimizers. Their bits depend on how torch was compiled (which
products are contracted into FMAs), so the first call in a process compares a few thousand numbers with the reference,
and refuses on any difference. Calls release the GIL. Parts run in the caller's thread; a whole weight runs in one call,
on the caller and an `UpdateTeam`: threads that return to Python between parts would contend for the GIL and delay a
main thread that launches kernels.
"""

import ctypes
import functools
import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from vbrt.kernels import update as reference
from vbrt.kernels.cpu import build
from vbrt.kernels.cpu.team import Team
from vbrt.kernels.update import TILE, Coded, Halves, Step, Updated

__all__ = ["TeamPart", "UpdateTeam", "gradient_norm", "gradient_sum", "refusal", "update"]

_RULES = {"adam": 0, "sgd": 1, "lion": 2}
_TYPES = {torch.bfloat16: 0, torch.float32: 1}


class UpdateTeam(Team):
    """Threads that update weights and accumulate gradients together with the caller; one weight at a time.

    Args:
        threads: including the caller.
    """

    def __init__(self, threads: int) -> None:
        super().__init__("update", threads)

    def run(self, job: Callable[..., None], *arguments: object) -> None:
        """Run a job of update.c; returns when it is done and no thread accesses its operands."""
        if self._started < self._places:
            with self._lock:
                self._start()
        job(self._memory.address, *arguments)


class TeamPart:
    """A `Part` that a team can also run as a whole.

    Args:
        name: C function of a part; "team_" is prefixed for the whole.
        arguments: of both.
        held: objects that the arguments point to.
    """

    def __init__(self, name: str, arguments: tuple[ctypes.Structure, ...], held: object) -> None:
        library = build.library("update")
        self._part, self._whole = (getattr(library, f"vbrt_{which}") for which in (name, f"team_{name}"))
        self._arguments, self._held = arguments, held

    def __call__(self, begin: int, end: int) -> None:
        """Run the part in this thread."""
        self._part(*self._arguments, begin, end)

    def by_team(self, team: UpdateTeam, count: int) -> None:
        """Run [0, count) in this thread and a team's."""
        team.run(self._whole, *self._arguments, count)


def update(
    halves: Halves, moments: Mapping[str, Tensor | Coded], gradient: Tensor, step: Step, out: Updated | None = None
) -> TeamPart:
    """See `vbrt.kernels.update.update`."""
    reference.check(halves, moments, gradient, step, out)
    weight = _weight(halves, moments)
    weight.gradient = gradient.data_ptr()
    to = build.HalvedWeight() if out is None else _weight(*out)
    eight_bit = any(isinstance(moment, Coded) for moment in moments.values())
    own = _step(step, _TYPES[gradient.dtype], eight_bit)
    return TeamPart("update", (weight, to, own), held=(halves, moments, gradient, out))


def _weight(halves: Halves, moments: Mapping[str, Tensor | Coded]) -> build.HalvedWeight:
    weight = build.HalvedWeight(*(half.data_ptr() for half in halves))
    for name, moment in moments.items():
        if isinstance(moment, Coded):
            setattr(weight, f"{name}_scales", moment.scales.data_ptr())
            moment = moment.codes
        setattr(weight, name, moment.data_ptr())
    return weight


@functools.lru_cache(maxsize=64)
def _step(step: Step, gradient_type: int, eight_bit: bool) -> build.Step:
    """Return C's step constants, each rounded to fp32 like in torch's kernels."""
    root = math.sqrt(1 - step.beta2**step.number) if step.rule == "adam" else 1.0
    size = step.lr / (1 - step.beta1**step.number) if step.rule == "adam" else step.lr
    rest1 = 1 - (step.dampening if step.rule == "sgd" else step.beta1)
    decoupled = step.decoupled or step.rule == "lion"
    return build.Step(
        rule=_RULES[step.rule], gradient_type=gradient_type, eight_bit=eight_bit, decoupled=decoupled,
        maximize=step.maximize, nesterov=step.nesterov, begins=step.number == 1,
        divisor=step.divisor, factor=step.factor,
        decay=1 - step.lr * step.weight_decay if decoupled else step.weight_decay,
        lerp=1 - step.beta1, beta1=step.beta1, beta2=step.beta2, rest1=rest1, rest2=1 - step.beta2,
        root=root, epsilon=step.epsilon, rate=-size,
    )  # fmt: skip


def gradient_norm(gradient: Tensor, factor: float = 1.0) -> float:
    """See `vbrt.kernels.update.gradient_norm`."""
    return build.library("update").vbrt_norm(gradient.data_ptr(), _TYPES[gradient.dtype], gradient.numel(), factor)


def gradient_sum(held: Tensor, more: Tensor, out: Tensor, factor: float = 1.0) -> TeamPart:
    """See `vbrt.kernels.update.gradient_sum`."""
    reference.check_sum(held, more, out)
    tensors = held, more, out
    addresses, types = (tensor.data_ptr() for tensor in tensors), (_TYPES[tensor.dtype] for tensor in tensors)
    return TeamPart("add", (build.Sum(*addresses, *types, factor),), held=tensors)


# -- bit comparison


@functools.cache
def refusal(device: torch.device) -> str | None:
    """Return why the compiled update cannot serve a device, or None. The first call builds it and compares bits."""
    why = build.refusal(device, "update")
    if why is not None:
        return why
    differs = next((step for step in _CASES if _differs(step)), None)
    if differs is None:
        return None
    return f"the compiled update is not bitwise equal to torch {torch.__version__} here ({differs.rule})"


_CASES = (
    Step("adam", 3, 1e-3, 0.9, 0.999, 1e-8, 0.01, decoupled=True),
    Step("adam", 2, 1e-3, 0.3, 0.99, 1e-6, 0.01, maximize=True),
    Step("sgd", 2, 1e-2, 0.9, weight_decay=0.1, dampening=0.1, nesterov=True),
    Step("lion", 2, 1e-3, 0.9, 0.99, weight_decay=0.1),
)


def _differs(step: Step) -> bool:
    """True if any number differs from the reference's, for a weight of several tiles plus a remainder."""
    draws = torch.Generator().manual_seed(0)
    master, gradient, first, second = torch.randn(
        4, 4 * TILE + 7, generator=draws, dtype=torch.float32, device="cpu"
    ).unbind()
    results = []
    for module in (update, reference.update):
        halves = reference.split_master(master)
        moments = {"first": first.clone(), "second": second.square()}
        moments = {"first": moments["first"]} if step.rule != "adam" else moments
        module(halves, moments, gradient, step)(0, master.numel())
        results.append([t.view(torch.uint8).clone() for t in (*halves, *moments.values())])
    same = all(torch.equal(*pair) for pair in zip(*results, strict=True))
    return not same or gradient_norm(gradient) != reference.gradient_norm(gradient)
