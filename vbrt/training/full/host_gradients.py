"""Host gradients of weights in the tiers: D2H as they are computed, accumulated on the host.

Accumulation follows autograd, in the parameter's dtype: first within one backward pass, in order, then with earlier
passes. The first gradient of a step stays in bf16, in which it was computed, since it has the same values.

On a GPU, gradients are computed into a double buffer, and a separate stream copies one while the next is computed: the
first of a step straight into its page in host memory, later ones into a staging buffer, from which a thread accumulates
them. The device waits for a free buffer, the host does not.

`parameter.grad` is lazy (`lazy_gradient.py`). Once its numbers are needed it aliases the memory, as torch's does:
holders see accumulation, and their writes count. If a gradient is dropped while a user still holds it, the memory
becomes the user's. An assigned tensor becomes the gradient.
"""

import functools
import math
import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from vbrt.errors import TierError, WrapError
from vbrt.host import accelerator
from vbrt.host.host_memory import Loan, PinError, map_memory, pin
from vbrt.kernels import resolve
from vbrt.libraries.torch_api import current_graph_task
from vbrt.tiers import TierStack
from vbrt.tiers.stack.slots import Page
from vbrt.training.full.accumulate import Sums
from vbrt.training.full.gradient_pages import GradientPages
from vbrt.training.full.lazy_gradient import LazyGradient

__all__ = ["Complete", "Gradient", "Outlet", "Taken"]

_BUFFERS = 2  # on the GPU: one is computed into while the other is copied
_STAGING = 2  # on the host, for gradients to accumulate

Compute = Callable[[Tensor], object]
"""Computes a gradient into the tensor that it is given."""


class Taken(NamedTuple):
    """Gradient ready for use: `read` returns it in a dtype that holds its values; it is still to be multiplied by
    `factor` in fp32."""

    read: Callable[[], Tensor]
    factor: float


class Complete(NamedTuple):
    """Gradient of a step that arises in one piece: its memory (bf16), and `key` with it."""

    memory: Tensor
    key: tuple[int, int]


class Arising(NamedTuple):
    """Gradient being computed: autograd's pass number, whether it is the last one expected, and `key` with it."""

    number: int
    last: bool
    key: tuple[int, int]


class Gradient:
    """One weight's gradient, in a page of host memory or a file.

    A sum in a file that `tensor` has read or a user has written stays in memory until it is taken, outside all budgets.

    Args:
        home: tier of the page.
        sums: accumulates gradients.

    Attributes:
        dtype: of the parameter, bf16 or fp32.
        pages: its storage.
        hidden: invisible to the optimizer's own step.
        version: number of changes; taking it does not count.
        edits: number of times that users were given its memory, or that pending scales were applied.
        ahead: called, in autograd's thread, with a step's gradient that arises in one piece, unless `whole` is set;
            returns what is to be called, from any thread, once it is on the host.
        whole: on completion: called, from a thread that may block, once every expected gradient is accumulated.
        applied: True from an update with this step's gradient to the end of the step.
        expected: forwards since the last step whose gradients are outstanding.
        factor: pending scale of the sum.
        error: why accumulation failed; raised by `wait`.
        settle: called before a gradient's memory is written: an update may still read it.
        on_norm: called when the norm is asked for, with whether it is known.
    """

    def __init__(self, name: str, stack: TierStack, dtype: torch.dtype, home: str, sums: Sums) -> None:
        self.name, self.dtype, self.hidden, self._sums = name, dtype, False, sums
        self.factor = 1.0
        self.pages = GradientPages(name, stack, home)
        self.expected = self.version = self.edits = 0
        self.ahead: Callable[[Complete], Callable[[], None] | None] | None = None
        self.whole: Callable[[], None] | None = None
        self.applied = False
        self._stepped = -1
        self._pass = -1
        self._of_pass: Tensor | None = None  # not yet added to earlier passes' sum
        self._sum: Tensor | None = None
        self._filed: Page | None = None
        self._assigned = False  # the sum is a user's tensor
        self._loan: Loan | None = None  # of the sum's memory, to users
        self._lazy: weakref.ref[LazyGradient] | None = None
        self._norm: tuple[object, float] | None = None  # the key that it is of
        self._measuring = threading.Lock()
        self._event: torch.Event | None = None
        self._adding: list[threading.Event] = []
        self.error: BaseException | None = None
        self.settle: Callable[[], object] = _nothing
        self.on_norm: Callable[[bool], object] = _nothing

    # -- memory -------------------------------------------------------------------------------------------------------

    def _lifted(self) -> Tensor:
        """Return the scaled sum, read from its file if it lives there."""
        summed = self.pages.read(self._filed) if self._sum is None else self._sum
        factor, self.factor = self.factor, 1.0
        if factor == 1:
            return summed
        scaled = summed.detach().float() * _fp32(factor)
        return summed.detach().copy_(scaled) if self.exposed else scaled

    @property
    def arrival(self) -> torch.Event | None:
        """Event of the copy into its memory; None once that was waited for."""
        return self._event

    @property
    def key(self) -> tuple[int, int]:
        """Value that changes whenever the gradient does, or may."""
        return self.version, self.edits

    def later_bytes(self, elements: int) -> int:
        """Return the bytes that its pages may still take: a sum's, in the parameter's dtype, beside the first's."""
        return sum(elements * d.itemsize for d in {torch.bfloat16, self.dtype} if not self.pages.holds(d))

    def retire(self) -> None:
        """Retire the gradient's pages. Idempotent."""
        self._hand_over()
        self.pages.retire()
        self._sum = self._filed = self._loan = None
        self._assigned = False

    @property
    def exposed(self) -> bool:
        """True if user code may read and write the sum, through a tensor from `tensor` or given to `put`."""
        return self._assigned or (self._loan is not None and self._loan.alive)

    # -- accumulation -------------------------------------------------------------------------------------------------

    @property
    def empty(self) -> bool:
        """True without a gradient."""
        return self._sum is None and self._filed is None

    def begin_(self, shape: tuple[int, ...], arising: "Arising") -> Tensor | None:
        """Return the memory for a step's first gradient, which counts from now on. None if it is not the first, or
        lives in a file: then use `add_`."""
        self.settle()
        self.pages.shape = shape
        if self._adding or not self.empty:
            return None
        self._sum = self.pages.room(torch.bfloat16)
        if self._sum is not None:
            self._pass = arising.number
        return self._sum

    def arrives(self, event: torch.Event | None) -> None:
        """Set the event of the copy into the memory of `begin_`."""
        self._event = event
        if event is not None:
            self.pages.keep_until(event)

    def arising(self) -> "Arising":
        """Register a gradient that is being computed; called in autograd's thread."""
        last, self.expected = self.expected == 1, max(self.expected - 1, 0)  # a graph may be traversed again
        self.version += 1
        if self.exposed:
            torch.autograd.Variable._execution_engine.queue_callback(self._arrived)
        return Arising(current_graph_task(), last, self.key)

    def _arrived(self) -> None:
        """Complete an exposed sum at the end of the backward pass."""
        self.wait()
        self._fold()

    def add_(self, dw: Tensor, arising: "Arising") -> None:
        """Accumulate a gradient, which is on the host."""
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
        """Add the current pass's sum to that of earlier passes."""
        of_pass, self._of_pass = self._of_pass, None
        if of_pass is not None:
            self._add(of_pass)

    def _add(self, more: Tensor) -> None:
        """Add a value to the sum, from now on in the parameter's dtype."""
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
        """Add a value to an exposed sum, in place."""
        self._lifted()
        held = self._sum.detach()
        if held.is_contiguous():
            self._sums(held, more, held)
        else:
            held.add_(more)

    def adding(self) -> threading.Event:
        """Register a gradient that a thread will accumulate; the thread sets the returned event."""
        event = threading.Event()
        self._adding.append(event)
        return event

    # -- reading ------------------------------------------------------------------------------------------------------

    def _synchronize(self) -> None:
        event, self._event = self._event, None
        if event is not None:
            event.synchronize()

    def wait(self) -> None:
        """Wait until all gradients are on the host and accumulated. Raises TierError if that failed."""
        for event in self._adding:
            event.wait()
        self._adding = []
        self._synchronize()
        error, self.error = self.error, None
        if error is not None:
            self._forget()
            raise TierError(f"{self.name}: its gradient could not be added ({error}); drop all gradients") from error

    def tensor(self) -> Tensor | None:
        """Return the sum in the parameter's dtype, aliasing its memory. Raises WrapError: it was already applied."""
        self.wait()
        if not self.hidden:
            self.check_here()
        if self.hidden or self.empty:
            return None
        self.edits += 1
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

    def shown(self) -> Tensor | None:
        """Return the sum as `parameter.grad` shows it: a `LazyGradient`, which reads nothing, or, while users hold its
        memory, `tensor`. Raises WrapError: it was already applied."""
        if self._adding:
            self.wait()
        if self.hidden or self.empty or self.exposed:
            return self.tensor()
        self.check_here()
        lazy = self._living
        if lazy is None:
            lazy = LazyGradient.of(self, self.pages.shape)
            self._lazy = weakref.ref(lazy)
        return lazy

    @property
    def _living(self) -> LazyGradient | None:
        """The lazy tensor of this sum that users hold, if it reads from here."""
        lazy = None if self._lazy is None else self._lazy()
        return lazy if lazy is not None and lazy.found is None else None

    def _hand_over(self) -> None:
        """Give a lazy tensor that users hold numbers of its own, before the sum goes."""
        lazy, self._lazy = self._living, None
        if lazy is not None and not self.empty:
            self.wait()
            self._fold()
            lazy.found = self._lifted().to(self.dtype, copy=True)

    def norm(self) -> float:
        """Return the scaled sum's Euclidean norm: see `vbrt.kernels.update.gradient_norm`."""
        held = self.held()
        if self.exposed:  # users may write it at any time
            return _norm_of(held.read(), held.factor)
        self.on_norm(self._is_measured(held.factor))
        return self.measured()

    def measured(self) -> float:
        """Return the norm of a sum that nobody else can write, measured once; from any thread."""
        held = self.held()
        with self._measuring:
            if not self._is_measured(held.factor):
                self._norm = (*self.key, held.factor), _norm_of(held.read(), held.factor)
            return self._norm[1]

    def measure(self, complete: "Complete") -> None:
        """Measure the norm of a gradient that has just arrived; from any thread."""
        with self._measuring:
            if self.key == complete.key:
                self._norm = (*complete.key, 1.0), _norm_of(complete.memory, 1.0)

    def _is_measured(self, factor: float) -> bool:
        return self._norm is not None and self._norm[0] == (*self.key, factor)

    def check_here(self) -> None:
        """Raise WrapError for a gradient that was already applied, within vb.stepping()."""
        if self.applied:
            raise WrapError(
                f"{self.name}: its gradient was applied within vb.stepping() as it arose; what needs all gradients, "
                "such as clipping by their norm, goes with vb.step() instead"
            )

    def put(self, value: Tensor | None) -> None:
        """Replace the sum, by the tensor itself if it is on the host; None drops it, while an update may still read
        it."""
        if value is not None:
            self.settle()
        self.wait()
        self.version += 1
        if value is not None and self._loan is not None and value is self._loan.last:
            return  # in-place writes, such as p.grad *= 2
        if isinstance(value, LazyGradient):
            if value is self._living:
                return
            value = value.resolve()
        self._hand_over()
        self._forget()
        if value is not None:
            self.pages.shape = tuple(value.shape)
            if value.is_cpu and value.layout is torch.strided and value.dtype is self.dtype:
                self._sum, self._assigned = value, True
            else:
                self._sum, self._filed = self.pages.put(value.detach().to("cpu", self.dtype))

    @property
    def fresh(self) -> bool:
        """True if there is a gradient that no step has used."""
        return not self.empty and self.version != self._stepped

    def end_step(self, divisor: float) -> None:
        """End a step that used it, dividing it by `divisor`. It stays until dropped, as torch's does."""
        self.factor /= divisor
        self._stepped, self.expected = self.version, 0

    def expose(self) -> None:
        """After a step, apply the pending scale to an exposed sum, which users may then read and write."""
        if self.exposed:
            self.settle()
            self._lifted()

    def held(self) -> "Taken | None":
        """Return the complete sum; None without a gradient. Valid until the next write after `settle`."""
        self.wait()
        self._fold()
        if self.empty:
            return None
        summed, filed = self._sum, self._filed
        return Taken(functools.partial(self.pages.read, filed) if summed is None else lambda: summed, self.factor)

    def scale_(self, factor: float) -> None:
        """Scale the sum in fp32, lazily: the update applies the factor as it reads."""
        self.wait()
        self._fold()
        if self.factor != 1:
            self.edits += 1
            self.settle()
            lifted = self._lifted().to(self.dtype)
            if not self.exposed:
                self._sum, self._filed = self.pages.put(lifted)
        self.factor = factor
        if self.exposed and self.dtype is torch.float32:  # in bf16 that would round
            self._lifted()

    def _forget(self) -> None:
        if self._loan is not None and self._loan.alive:
            self.pages.retire()  # users keep its memory
        self._sum = self._filed = self._of_pass = self._loan = None
        self._assigned = False
        self.factor = 1.0
        self._pass = -1


class Outlet:
    """Gradient path of one model: device buffers, D2H stream, accumulating thread.

    Args:
        largest: elements of the largest gradient.

    Attributes:
        sums: accumulates gradients on the host.
    """

    def __init__(self, device: torch.device, largest: int) -> None:
        self._device, self._largest, self.sums = device, largest, Sums()
        self._next, self._here = 0, threading.Lock()
        self._buffers: list[Tensor] = []
        self._left: list[torch.Event | None] = [None] * _BUFFERS
        self._stream: torch.Stream | None = None
        self._staging: queue.SimpleQueue[Tensor] = queue.SimpleQueue()
        self._waiting: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def send(self, gradient: Gradient, shape: tuple[int, ...], compute: Compute) -> None:
        """Compute a gradient (bf16) and accumulate it into a weight's."""
        if not accelerator.has_streams(self._device):
            self._send_here(gradient, shape, compute)
            return
        if not self._buffers:
            self._open()
        place, self._next = self._next, (self._next + 1) % _BUFFERS
        current = accelerator.current_stream(self._device)
        left = self._left[place]
        if left is not None:
            current.wait_event(left)
        dw = self._buffers[place][: math.prod(shape)].view(shape)
        compute(dw)
        self._stream.wait_event(current.record_event())
        self._left[place] = self._send(gradient, dw)

    def send_computed(self, gradients: Sequence[tuple[Gradient, Tensor]]) -> torch.Event | None:
        """Accumulate gradients (bf16) that the current stream computes; return the event after which their memory may
        be overwritten, None: now."""
        if not accelerator.has_streams(self._device):
            for gradient, dw in gradients:
                self._send_here(gradient, tuple(dw.shape), lambda out, dw=dw: out.copy_(dw))
            return None
        if not self._buffers:
            self._open()
        self._stream.wait_event(accelerator.current_stream(self._device).record_event())
        event = None
        for gradient, dw in gradients:
            event = self._send(gradient, dw)
        return event

    def _send_here(self, gradient: Gradient, shape: tuple[int, ...], compute: Compute) -> None:
        arising = gradient.arising()
        with self._here:  # serializes backward passes of several threads
            first = self._add_here(gradient, shape, compute, arising)
        begins = self._completed(gradient, arising, first)
        if begins is not None:
            begins()

    @staticmethod
    def _completed(gradient: Gradient, arising: Arising, first: Tensor | None) -> Callable[[], None] | None:
        """Return what is to be called once a gradient is on the host, if anything."""
        if arising.last and gradient.whole is not None:
            return gradient.whole
        if arising.last and first is not None and gradient.ahead is not None:
            return gradient.ahead(Complete(first, arising.key))
        return None

    @property
    def device_bytes(self) -> int:
        """Bytes of the buffers on the computing device."""
        return sum(buffer.nbytes for buffer in self._buffers)

    def drain(self) -> None:
        """Wait until everything sent is accumulated, or handed on."""
        if self._thread is not None:
            done = threading.Event()
            self._waiting.put(done.set)
            done.wait()

    def _send(self, gradient: Gradient, dw: Tensor) -> torch.Event:
        """Begin the copy of a gradient, for which the stream of copies waits; return the event of its end."""
        arising = gradient.arising()
        whole = gradient.whole if arising.last else None
        first = gradient.begin_(tuple(dw.shape), arising)
        if first is not None:
            event = self._copied(first, dw)
            gradient.arrives(event)
        else:
            staging = self._staging.get()
            target = staging[: dw.numel()].view(dw.shape)
            event = self._copied(target, dw)
            add = functools.partial(gradient.add_, target, arising)
            self._waiting.put(functools.partial(self._add, gradient, add, staging, event, gradient.adding()))
        begins = self._completed(gradient, arising, first)
        if begins is not None:
            self._waiting.put(begins if whole is not None else functools.partial(_after, event, begins))
        return event

    @staticmethod
    def _add_here(gradient: Gradient, shape: tuple[int, ...], compute: Compute, arising: Arising) -> Tensor | None:
        """Compute a gradient; return its memory if it is a step's first."""
        first = gradient.begin_(shape, arising)
        if first is not None:
            compute(first)
            return first
        further = torch.empty(shape, dtype=torch.bfloat16, device="cpu")
        compute(further)
        gradient.add_(further, arising)
        return None

    def _copied(self, target: Tensor, dw: Tensor) -> torch.Event:
        event = accelerator.sleeping_event()
        with accelerator.stream(self._stream):
            target.copy_(dw, non_blocking=True)
            event.record(self._stream)
        return event

    def _open(self) -> None:
        self._stream = accelerator.Stream(self._device)
        self._buffers = [torch.empty(self._largest, dtype=torch.bfloat16, device=self._device) for _ in range(_BUFFERS)]
        for _ in range(_STAGING):
            staging = map_memory(2 * self._largest).view(torch.bfloat16)
            try:
                pin(staging, staging)
            except PinError:
                pass  # pageable copies block the host; the cpu tier has reported that
            self._staging.put(staging)
        self._thread = threading.Thread(target=_work, args=(self._waiting,), name="vbrt-gradients", daemon=True)
        self._thread.start()

    def _add(
        self, gradient: Gradient, add: Callable[[], None], staging: Tensor, event: torch.Event, added: threading.Event
    ) -> None:
        try:
            event.synchronize()
            add()
        except BaseException as error:  # noqa: BLE001 - raised by the gradient's reader
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
        del task  # an idle thread keeps nothing alive


def _after(event: torch.Event | None, arrived: Callable[[], None]) -> None:
    try:
        if event is not None:
            event.synchronize()
    except Exception:  # noqa: BLE001 - of the device: raised by the gradient's reader, who waits for the event too
        return
    arrived()


def _nothing(*_: object) -> None:
    """Default of `settle` and `on_norm`: no update, no optimizer."""


@functools.cache
def _norm_kernel() -> Callable[..., float]:
    return resolve("gradient_norm", "auto", torch.device("cpu")).run


def _norm_of(gradient: Tensor, factor: float) -> float:
    return _norm_kernel()(gradient.detach().reshape(-1), factor)


def _fp32(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float32, device="cpu")
