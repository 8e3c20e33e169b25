"""Several calls of one model in step: each weight is leased once, and every call multiplies with it in its turn.

    logits = in_lockstep([functools.partial(model, ids[:, t : t + 1], ...) for t in range(rows)])

Each call is the plain one, so its results are, bit for bit, those of calling one after the other, whatever the model
does between its weights. A baton goes round: call 0 computes up to its first VB layer, then call 1 does, and so on;
then call 0 multiplies and goes on to its next layer, and so on. So call t reaches each layer after call t - 1 has left
it: what an earlier call writes into a cache the later one reads, as it does when they run one after the other.

Each call has a thread, of which one runs at a time, because a model's forward cannot be left and taken up again in any
other way. Threads take over what torch keeps for each thread: gradients, autocast, streams, and Python's context.
"""

import contextlib
import contextvars
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import TYPE_CHECKING, Any

import torch

from vbrt.errors import WrapError
from vbrt.layers.weights.linear_product import products_by, shared_product

if TYPE_CHECKING:
    from vbrt.layers.weights.kernel_selection import Kernels
    from vbrt.layers.weights.state import Weight

__all__ = ["in_lockstep", "is_following"]

_following: contextvars.ContextVar[bool] = contextvars.ContextVar("vbrt_following", default=False)


def is_following() -> bool:
    """True in calls in lockstep but the first: their pass is a part of the first one's."""
    return _following.get()


def in_lockstep(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """Run calls of one model in step; return what they return, in order.

    An exception of a call ends all of them and is raised here; so is Ctrl-C, once the calls have ended.

    Raises:
        WrapError: a call uses other weights than the first one, or in another order.
    """
    if len(calls) == 1:
        return [calls[0]()]
    group = _Group(calls)
    try:
        group.run()
    finally:
        group.end()
    return [row.result for row in group.rows]


class _Abandoned(BaseException):
    """Ends a call because another one has failed."""


class _Group:
    """Calls in step.

    Attributes:
        rows: the calls.
        alive: those that have not ended.
        error: what has ended the calls early.
        begun: True once the baton goes round.
        product, of: the weight that is leased now, as `shared_product` gives it, and what it was leased for.
    """

    def __init__(self, calls: Sequence[Callable[[], Any]]) -> None:
        self.rows = [_Row(self, place, call) for place, call in enumerate(calls)]
        self.alive = list(self.rows)
        self.error: BaseException | None = None
        self.begun = False
        self.finished = threading.Semaphore(0)
        self.product: Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor] | None = None
        self.of: tuple[Any, ...] = ()
        self._lease = ExitStack()

    def run(self) -> None:
        """Run all calls to their end; raises what one of them raised."""
        for row in self.rows:
            row.thread.start()
        self.begun = True
        self.rows[0].gate.release()
        self.finished.acquire()
        if self.error is not None:
            raise self.error

    def end(self) -> None:
        """Wait until all threads have ended, early if they are still at it, and end the lease."""
        while any(row.thread.is_alive() for row in self.rows):
            try:
                self.error = self.error or _Abandoned()
                started = [row for row in self.rows if row.thread.ident is not None]
                if not self.begun:  # interrupted, or no more threads to be had
                    self.alive, self.begun = list(started), True
                    started[0].gate.release()
                for row in started:
                    row.thread.join()
            except KeyboardInterrupt as interrupt:  # again: they end at their next weight
                self.error = interrupt
        self._lease.close()

    def lease(self, handle: "Weight", kernels: "Kernels", device: torch.device) -> None:
        """Lease another weight for all calls."""
        self.give_back()
        self.product = self._lease.enter_context(shared_product(handle, kernels, device))
        self.of = handle, kernels, device

    def give_back(self) -> None:
        """End the lease."""
        self.product, self.of = None, ()
        self._lease.close()

    def leave(self, row: "_Row") -> None:
        """Take a call that has ended out of the round."""
        after = row.next
        self.alive.remove(row)
        if self.alive:
            after.gate.release()
        else:
            self.finished.release()


class _Row:
    """One call of a group, in a thread of its own."""

    def __init__(self, group: _Group, place: int, call: Callable[[], Any]) -> None:
        self.group, self.place, self.call = group, place, call
        self.gate = threading.Semaphore(0)
        self.result: Any = None
        context, state = contextvars.copy_context(), _thread_state()
        name = f"vbrt-row-{place}"
        self.thread = threading.Thread(target=context.run, args=(self._run, state), name=name, daemon=True)

    @property
    def next(self) -> "_Row":
        """The call that has its turn after this one."""
        alive = self.group.alive
        return alive[(alive.index(self) + 1) % len(alive)]

    def _run(self, state: Sequence[Callable[[], AbstractContextManager]]) -> None:
        self.gate.acquire()
        try:
            with ExitStack() as entered:
                for enter in state:
                    entered.enter_context(enter())
                entered.enter_context(products_by(self))
                _following.set(self.place > 0)
                if self.group.error is None:
                    self.result = self.call()
        except BaseException as error:  # noqa: BLE001 (raised in the thread that waits)
            if self.group.error is None:
                self.group.error = error
        finally:
            self.group.leave(self)

    def product(self, handle: "Weight", kernels: "Kernels", x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x Wᵀ + bias in this call's turn, on the weight that the first call has leased for all."""
        group = self.group
        self.next.gate.release()
        self.gate.acquire()
        if group.error is not None:
            raise _Abandoned
        if group.of != (handle, kernels, x.device):
            if self is not group.alive[0]:
                raise WrapError(
                    f"{handle.name}: passes in lockstep use other weights than the first of them: tokens of this model "
                    "take ways of their own; use speculate=False"
                )
            group.lease(handle, kernels, x.device)
        y = group.product(x, bias)
        if self is group.alive[-1]:
            group.give_back()
        return y


def _thread_state() -> list[Callable[[], AbstractContextManager]]:
    """What another thread enters so that torch computes there as it does here."""
    state: list[Callable[[], AbstractContextManager]] = []
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    state.append(lambda: torch.inference_mode(inference))
    state.append(lambda: torch.set_grad_enabled(grad))
    for kind in ("cpu", "cuda"):
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
            state.append(lambda kind=kind, dtype=dtype: torch.autocast(kind, dtype))
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        stream = torch.cuda.current_stream()
        state.append(lambda: _on_stream(stream))
    return state


@contextlib.contextmanager
def _on_stream(stream: torch.cuda.Stream) -> Iterator[None]:
    with torch.cuda.device(stream.device), torch.cuda.stream(stream):
        yield
