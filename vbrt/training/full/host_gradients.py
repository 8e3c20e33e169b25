"""Gradients of weights in the tiers: on the host from the moment that they arise.

Gradients are summed as autograd sums them, in the parameter's dtype: those of one backward pass with each other first,
in the order in which they arise, then with those of earlier passes. The first one of a step stays in bf16, in which it
was computed: that holds the same values.

On a GPU a gradient is computed into one of two buffers, and leaves on a stream of its own while the next one is
computed: the first of a step goes straight into its page in host memory, others into a staging buffer, from which a
thread adds them. The device waits for a buffer where it must, the host does not.

`parameter.grad` is the memory itself, as torch's is: who keeps it sees what is added, and writes to it count. Memory
that somebody still has as the gradient is dropped is theirs from then on. A tensor that is assigned is the gradient.
"""

import math
import queue
import threading
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from vbrt.errors import TierError, WrapError
from vbrt.host.host_memory import Loan, PinError, map_memory, pin
from vbrt.libraries.torch_api import current_graph_task
from vbrt.tiers import TierStack
from vbrt.tiers.stack.slots import Page
from vbrt.training.full.accumulate import Sums
from vbrt.training.full.gradient_pages import GradientPages

__all__ = ["Gradient", "Outlet", "Taken"]

_BUFFERS = 2  # on the GPU: one is computed into while the other leaves
_STAGING = 2  # on the host: for gradients that are added

Compute = Callable[[Tensor], object]
"""Computes a gradient into the tensor that it is given."""


class Taken(NamedTuple):
    """A gradient as it is held: `read` returns it, in a dtype that holds its values; it is to be multiplied with
    `factor` in fp32."""

    read: Callable[[], Tensor]
    factor: float


class Arising(NamedTuple):
    """A gradient on its way: the number of autograd's pass, and whether it is the last one that is expected in it."""

    number: int
    last: bool


class Gradient:
    """One weight's gradient, in a page of host memory or of a file.

    A sum in a file that is read, or written to, by `tensor` is in memory until it is taken, outside of all budgets.

    Args:
        home: the tier that the page lives in.
        sums: adds gradients.

    Attributes:
        dtype: of the parameter, bf16 or fp32.
        pages: where it lies.
        hidden: from the optimizer's own step.
        version: counts its changes, but for being taken.
        whole: called, by a thread that may wait, when all gradients that are expected have arisen.
        applied: whether the gradient of this step has been taken for an update, and the step has not ended.
        expected: forwards since the last step whose gradients have not arisen yet.
        factor: what the sum is still to be multiplied with.
        error: why a gradient could not be added; raised by `wait`.
        settle: called before the memory of a gradient may be written to: an update may still read it.
    """

    def __init__(self, name: str, stack: TierStack, dtype: torch.dtype, home: str, sums: Sums) -> None:
        self.name, self.dtype, self.hidden, self._sums = name, dtype, False, sums
        self.factor = 1.0
        self.pages = GradientPages(name, stack, home)
        self.expected = self.version = 0
        self.whole: Callable[[], None] | None = None
        self.applied = False
        self._stepped = -1
        self._pass = -1
        self._of_pass: Tensor | None = None  # what is not added to the sum of earlier passes yet
        self._sum: Tensor | None = None
        self._filed: Page | None = None
        self._assigned = False  # the sum is a tensor of the user's
        self._loan: Loan | None = None  # of the memory of the sum
        self._event: torch.cuda.Event | None = None
        self._adding: list[threading.Event] = []
        self.error: BaseException | None = None
        self.settle: Callable[[], object] = _nothing

    # -- memory -------------------------------------------------------------------------------------------------------

    def _lifted(self) -> Tensor:
        """Return the sum, from its file if it lies in one, and scaled."""
        summed = self.pages.read(self._filed) if self._sum is None else self._sum
        factor, self.factor = self.factor, 1.0
        if factor == 1:
            return summed
        scaled = summed.detach().float() * _fp32(factor)
        return summed.detach().copy_(scaled) if self.exposed else scaled

    def retire(self) -> None:
        """Retire the pages of the gradient, which is gone. Idempotent."""
        self.pages.retire()
        self._sum = self._filed = self._loan = None
        self._assigned = False

    @property
    def exposed(self) -> bool:
        """True if others may read and write the sum: they have what `tensor` has returned, or gave it to `put`."""
        return self._assigned or (self._loan is not None and self._loan.alive)

    # -- arriving -----------------------------------------------------------------------------------------------------

    @property
    def empty(self) -> bool:
        """True if there is none yet."""
        return self._sum is None and self._filed is None

    def begin_(self, shape: tuple[int, ...], arising: "Arising") -> Tensor | None:
        """Return the memory that the first gradient of a step may be written into; it counts from now on. None if it
        is not the first, or lives in a file: `add_` takes it."""
        self.settle()
        self.pages.shape = shape
        if self._adding or not self.empty:
            return None
        self._sum = self.pages.room(torch.bfloat16)
        if self._sum is not None:
            self._pass = arising.number
        return self._sum

    def arrives(self, event: torch.cuda.Event | None) -> None:
        """Note when what `begin_` returned is there."""
        self._event = event
        if event is not None:
            self.pages.keep_until(event)

    def arising(self) -> "Arising":
        """Return what is known of a gradient that arises now, in autograd's thread."""
        last, self.expected = self.expected == 1, max(self.expected - 1, 0)  # a graph may be gone through again
        self.version += 1
        if self.exposed:
            torch.autograd.Variable._execution_engine.queue_callback(self._arrived)
        return Arising(current_graph_task(), last)

    def _arrived(self) -> None:
        """Have the sum whole at the end of a backward pass, for others who have it."""
        self.wait()
        self._fold()

    def add_(self, dw: Tensor, arising: "Arising") -> None:
        """Add a gradient, which is on the host."""
        self._synchronize()
        if arising.number == self._pass and self._of_pass is not None:
            own = self._of_pass
            out = own if own.dtype is self.dtype else torch.empty(own.shape, dtype=self.dtype, device="cpu")
            self._of_pass = self._sums(own, dw, out)
            return
        self._fold()
        if self.empty or arising.number == self._pass or arising.last:
            if self.empty:
                self._sum, self._filed = self.pages.put(dw)
            else:
                self._add(dw)
        else:
            self._of_pass = dw.clone()
        self._pass = arising.number

    def _fold(self) -> None:
        """Add what one pass has summed up to what earlier ones have."""
        of_pass, self._of_pass = self._of_pass, None
        if of_pass is not None:
            self._add(of_pass)

    def _add(self, more: Tensor) -> None:
        """Add a value to the sum, in the parameter's dtype from now on."""
        if self.exposed:
            self._add_in_place(more)
            return
        held = self.pages.read(self._filed) if self._sum is None else self._sum
        room = self.pages.room(self.dtype)
        out = torch.empty(held.shape, dtype=self.dtype, device="cpu") if room is None else room
        self._sums(held, more, out, self.factor)
        self.factor = 1.0
        self._sum, self._filed = self.pages.put(out)

    def _add_in_place(self, more: Tensor) -> None:
        """Add a value to a sum that others have."""
        self._lifted()
        held = self._sum.detach()
        if held.is_contiguous():
            self._sums(held, more, held)
        else:
            held.add_(more)

    def adding(self) -> threading.Event:
        """Note that a gradient is on its way that a thread will add; it sets the event then."""
        event = threading.Event()
        self._adding.append(event)
        return event

    # -- reading ------------------------------------------------------------------------------------------------------

    def _synchronize(self) -> None:
        event, self._event = self._event, None
        if event is not None:
            event.synchronize()

    def wait(self) -> None:
        """Return when all that has arisen is on the host, and added. Raises TierError if that failed."""
        for event in self._adding:
            event.wait()
        self._adding = []
        self._synchronize()
        error, self.error = self.error, None
        if error is not None:
            self._forget()
            raise TierError(f"{self.name}: its gradient could not be added ({error}); drop all gradients") from error

    def tensor(self) -> Tensor | None:
        """Return the sum in the parameter's dtype, the memory itself. Raises WrapError for one that was applied."""
        self.wait()
        if not self.hidden:
            self.check_here()
        if self.hidden or self.empty:
            return None
        self._fold()
        self.settle()
        sum = self._lifted()
        if self._assigned:
            return self._sum
        if sum.dtype is not self.dtype:
            room = self.pages.room(self.dtype)
            sum = sum.to(self.dtype) if room is None else room.copy_(sum)
        self._sum, self._filed = sum, None
        if self._loan is None or self._loan.memory is not sum:
            self._loan = Loan(sum)
        return self._loan.tensor()

    def check_here(self) -> None:
        """Raise WrapError for a gradient that was applied as it arose."""
        if self.applied:
            raise WrapError(
                f"{self.name}: its gradient was applied within vb.stepping() as it arose; what needs all gradients, "
                "such as clipping by their norm, goes with vb.step() instead"
            )

    def put(self, value: Tensor | None) -> None:
        """Replace the sum, by the tensor itself if it is on the host; None drops it: an update may still read it."""
        if value is not None:
            self.settle()
        self.wait()
        self.version += 1
        if value is not None and self._loan is not None and value is self._loan.last:
            return  # p.grad *= 2
        self._forget()
        if value is not None:
            self.pages.shape = tuple(value.shape)
            if value.is_cpu and value.layout is torch.strided and value.dtype is self.dtype:
                self._sum, self._assigned = value, True
            else:
                self._sum, self._filed = self.pages.put(value.detach().to("cpu", self.dtype))

    @property
    def fresh(self) -> bool:
        """True if there is one that no step has had."""
        return not self.empty and self.version != self._stepped

    def end_step(self, divisor: float) -> None:
        """Note that a step has had it, such as it is divided by that. It stays until it is dropped, as torch's does."""
        self.factor /= divisor
        self._stepped, self.expected = self.version, 0

    def expose(self) -> None:
        """Have others who have the sum be free to write to it, and see it as it is, once a step has had it."""
        if self.exposed:
            self.settle()
            self._lifted()

    def held(self) -> "Taken | None":
        """Return the sum as it is, once all of it is there; None if there is none. It is valid until `settle` has
        returned and something is written."""
        self.wait()
        self._fold()
        if self.empty:
            return None
        summed, filed = self._sum, self._filed
        return Taken(partial(self.pages.read, filed) if summed is None else lambda: summed, self.factor)

    def scale_(self, factor: float) -> None:
        """Multiply the sum, in fp32, as it is read next: an update does that on its way."""
        if self.factor != 1:
            self.settle()
            lifted = self._lifted().to(self.dtype)
            if not self.exposed:
                self._sum, self._filed = self.pages.put(lifted)
        self.factor = factor
        if self.exposed and self.dtype is torch.float32:  # in bf16 that would round
            self._lifted()

    def _forget(self) -> None:
        if self._loan is not None and self._loan.alive:
            self.pages.retire()  # its memory stays while others have it
        self._sum = self._filed = self._of_pass = self._loan = None
        self._assigned = False
        self.factor = 1.0
        self._pass = -1


class Outlet:
    """Where gradients leave the computing device; of one model.

    Args:
        largest: elements of the largest gradient.

    Attributes:
        sums: adds gradients on the host.
    """

    def __init__(self, device: torch.device, largest: int) -> None:
        self._device, self._largest, self.sums = device, largest, Sums()
        self._next, self._here = 0, threading.Lock()
        self._buffers: list[Tensor] = []
        self._left: list[torch.cuda.Event | None] = [None] * _BUFFERS
        self._stream: torch.cuda.Stream | None = None
        self._staging: queue.SimpleQueue[Tensor] = queue.SimpleQueue()
        self._waiting: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def send(self, gradient: Gradient, shape: tuple[int, ...], compute: Compute) -> None:
        """Compute a gradient (bf16) and have it added to a weight's."""
        arising = gradient.arising()
        whole = gradient.whole if arising.last else None
        if self._device.type != "cuda":
            with self._here:  # backward passes of several threads
                self._add_here(gradient, shape, compute, arising)
            if whole is not None:
                whole()
            return
        self._send(gradient, shape, compute, arising)
        if whole is not None:
            self._waiting.put(whole)

    @property
    def device_bytes(self) -> int:
        """Bytes of the buffers on the computing device."""
        return sum(buffer.nbytes for buffer in self._buffers)

    def drain(self) -> None:
        """Return when all that has been sent was added, or handed on."""
        if self._thread is not None:
            done = threading.Event()
            self._waiting.put(done.set)
            done.wait()

    def _send(self, gradient: Gradient, shape: tuple[int, ...], compute: Compute, arising: Arising) -> None:
        if not self._buffers:
            self._open()
        place, self._next = self._next, (self._next + 1) % _BUFFERS
        current = torch.cuda.current_stream(self._device)
        left = self._left[place]
        if left is not None:
            current.wait_event(left)
        elements = math.prod(shape)
        dw = self._buffers[place][:elements].view(shape)
        compute(dw)
        self._stream.wait_event(current.record_event())
        target = gradient.begin_(shape, arising)
        if target is not None:
            self._left[place] = self._copied(target, dw)
            gradient.arrives(self._left[place])
        else:
            staging = self._staging.get()
            target = staging[:elements].view(shape)
            event = self._left[place] = self._copied(target, dw)
            add = partial(gradient.add_, target, arising)
            self._waiting.put(partial(self._add, gradient, add, staging, event, gradient.adding()))

    @staticmethod
    def _add_here(gradient: Gradient, shape: tuple[int, ...], compute: Compute, arising: Arising) -> None:
        first = gradient.begin_(shape, arising)
        if first is not None:
            compute(first)
        else:
            further = torch.empty(shape, dtype=torch.bfloat16, device="cpu")
            compute(further)
            gradient.add_(further, arising)

    def _copied(self, target: Tensor, dw: Tensor) -> torch.cuda.Event:
        with torch.cuda.stream(self._stream):
            target.copy_(dw, non_blocking=True)
            return self._stream.record_event()

    def _open(self) -> None:
        self._stream = torch.cuda.Stream(self._device)
        self._buffers = [torch.empty(self._largest, dtype=torch.bfloat16, device=self._device) for _ in range(_BUFFERS)]
        for _ in range(_STAGING):
            staging = map_memory(2 * self._largest).view(torch.bfloat16)
            try:
                pin(staging, staging)
            except PinError:
                pass  # the copy holds the host up then; the cpu tier has said so
            self._staging.put(staging)
        self._thread = threading.Thread(target=_work, args=(self._waiting,), name="vbrt-gradients", daemon=True)
        self._thread.start()

    def _add(
        self,
        gradient: Gradient,
        add: Callable[[], None],
        staging: Tensor,
        event: torch.cuda.Event,
        added: threading.Event,
    ) -> None:
        try:
            event.synchronize()
            add()
        except BaseException as error:  # noqa: BLE001 - raised by whoever reads the gradient
            gradient.error = error
        finally:
            self._staging.put(staging)
            added.set()

    def close(self) -> None:
        """Stop the threads. Idempotent."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._waiting.put(None)
            thread.join()
        self.sums.close()


def _work(waiting: "queue.SimpleQueue[Callable[[], None] | None]") -> None:
    while (task := waiting.get()) is not None:
        task()


def _nothing() -> None:
    """There is no update."""


def _fp32(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float32, device="cpu")
