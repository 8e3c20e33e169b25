"""Optimizer update on the host: join, step, split, in the background.

A weight's fp32 master is two halves and a tie bit. The high half is the page that forwards use; the low half, the tie
bits and the moments stay on the host, in memory or files.

| name | what |
| --- | --- |
| `split_master(w) -> halves`, `join_master(halves) -> w` | inverse of each other, bit for bit |
| `WeightState` | one weight: its high half's page, low half, ties, moments, number of updates |
| `Rule` | update rule of an optimizer class; `rule_for(optimizer)` refuses a class without one |
| `Updater.submit(state, grad, group)` | begin a weight's update; `wait(state)`, `finish()` |

A failed step can be completed: an update's error is raised to its waiter, and waiting again retries it. Each update
keeps its gradient until the weight is stored, so that nothing is updated twice, and a full disk or a failed read loses
nothing. A weight is not used for compute before its update is stored.

`Updater.prepare(prepared)` computes an update out of place before its step, in the spare memory of the weight, which
stays as it is until then (`update_ahead.py` says when). A `submit` that claims it exchanges memory, and computes
nothing.
"""

import atexit
import contextlib
import itertools
import os
import time
import weakref
from _thread import allocate_lock
from collections.abc import Callable, Mapping
from heapq import heappop, heappush
from queue import Empty, SimpleQueue
from typing import Any

import torch
from torch import Tensor

from vbrt.errors import TierError
from vbrt.host.logger import warn
from vbrt.host.worker_threads import Crew
from vbrt.kernels import kernel_refusal, resolve
from vbrt.kernels.update import GRADIENTS, Step, Updated, join_master, split_master
from vbrt.training.full.update_pages import STAGED, Fields
from vbrt.training.full.update_rules import Rule, Scaling, rule_for
from vbrt.training.full.update_state import HighPage, WeightState
from vbrt.training.full.update_threads import Helpers, cores

__all__ = [
    "HighPage",
    "Prepared",
    "Rule",
    "Scaling",
    "Updater",
    "WeightState",
    "join_master",
    "rule_for",
    "split_master",
]

Gradient = tuple[object, Callable[[], Tensor]]
_AHEAD = 1 << 32  # urgency of the first layer's update ahead of its step: more than any that is due
_COMPUTING = 2  # threads: while one's weight is computed, the other takes the pages of the next one, in Python
_LOOK_SECONDS = 0.02  # polling interval of waiters, in case a wake-up was lost


class Updater:
    """Background updater of weights: one at a time, multithreaded, the model's first layers first.

    A backward pass submits the last layers first, but the next forward needs the first layers first; so the last
    layers' updates overlap that forward. Results are bitwise independent of thread count and order. Weights with state
    in files go first, in order, with read-ahead and write-behind. After a failure, later updates wait.

    Args:
        rule: the update rule.
        threads: per weight; by default three quarters of the cores: as many saturate memory, and the others launch the
            GPU's kernels.

    Attributes:
        kernel: the update kernel.
        fallbacks: deviations from the config.
        ahead: updates that took what was computed before their step.
        discarded: results computed ahead that no step took.
    """

    def __init__(self, rule: Rule, *, threads: int | None = None) -> None:
        self.rule, device = rule, torch.device("cpu")
        self.kernel = resolve("update", "auto", device)
        self.fallbacks = []
        if self.kernel.backend == "reference":
            why = kernel_refusal(device, "update")
            self.fallbacks = [f"updates of weights: {why}; they run in plain torch, many times slower"]
            warn(self.fallbacks[0], stacklevel=2)
        self._threads = threads or cores() - cores() // 4
        self._open: dict[int, _Update] = {}  # by the state's id, in order of submission
        self.ahead = self.discarded = 0
        self._counting = allocate_lock()
        self._begin()
        _updaters.add(self)

    def _begin(self) -> None:
        self._pid = os.getpid()
        self.helpers = Helpers(self._threads)
        self._stages = tuple(_Stage(self._end, threads) for threads in (1, _COMPUTING, 1))
        self._loading, self._computing, self._storing = self._stages
        self._places: SimpleQueue[object] = SimpleQueue()  # staging slots, for states in files
        for place in range(1, STAGED + 1):
            self._places.put(place)

    # -- submission and waiting ---------------------------------------------------------------------------------------

    def step_of(self, state: WeightState, group: Mapping[str, Any], scaling: Scaling) -> Step:
        """Return the parameters of a weight's next update, with its group's settings of now."""
        number = state.steps + 1
        resumed = self.rule.resumes and number == 1 and state.has_moments
        return self.rule.step(group, number + resumed, scaling)

    def prepare(self, prepared: "Prepared") -> None:
        """Compute an update ahead of its step, after all updates that are due, the first layers' first. Errors leave
        it undone: its step will meet them."""
        if self._pid != os.getpid():
            self._begin()
        self._computing.give(prepared, self._prepare)

    def drop(self, prepared: "Prepared") -> None:
        """Discard what was, or will be, computed ahead."""
        prepared.dropped = True
        self.discarded += prepared.begun

    def submit(
        self,
        state: WeightState,
        grad: Gradient,
        group: Mapping[str, Any],
        scaling: Scaling | None = None,
        *,
        claim: "Callable[[Step], Prepared | None] | None" = None,
    ) -> None:
        """Begin a weight's update, unless it was begun with the same gradient before.

        Args:
            grad: key that identifies this gradient, and a reader of it (bf16 or fp32, of the weight's shape); the
                reader is called when its turn comes, so the gradient must not change until then.
            group: its settings, read now.
            claim: returns what was computed ahead for exactly this step, if anything.

        Raises:
            TierError: an earlier update failed.
        """
        mark, read = grad
        if state.applied == mark:  # Ctrl-C hit the caller after an earlier submit
            return
        self.wait(state)
        number, step = state.steps + 1, self.step_of(state, group, scaling or Scaling())
        update = _Update(state, read, step)
        update.prepared = None if claim is None else claim(step)
        self._open[id(state)] = update
        state.steps, state.has_moments, state.applied = number, True, mark  # nothing in between may fail
        if state.shown is not None and state.memory.in_memory:
            state.shown.fill_(float(number))
        self._give(update)
        state.high.expect(update, unless=lambda: update.rewritten)

    def wait(self, state: WeightState) -> None:
        """Wait until a weight's update is stored.

        Raises:
            TierError: it, or one before it, failed; waiting again retries it. Or the updater was closed before.
        """
        update = self._open.get(id(state))
        if update is not None:
            self._try_again()
            self._wait(update)

    @property
    def waiting(self) -> int:
        """Number of pending updates."""
        return len(self._open)

    def finish(self) -> bool:
        """Wait until all updates are stored; True if one of them had failed before. Raises TierError as `wait`."""
        tried = self._try_again()
        for update in list(self._open.values()):
            self._wait(update)
        return tried

    def calm(self) -> None:
        """Wait until no update is running, or one has failed. Raises nothing."""
        while self._pid == os.getpid() and not any(stage.failure or stage.closed for stage in self._stages):
            if not any(update.given for update in list(self._open.values())):
                return
            time.sleep(_LOOK_SECONDS)

    def close(self) -> None:
        """End the threads; updates that have not begun are discarded. Idempotent."""
        for stage in self._stages:
            stage.closed = True
        for stage in self._stages:
            stage.crew.stop()
        self.helpers.stop()

    def check_open(self, what: str) -> None:
        """Raise TierError after `close`. what: named in it."""
        if self._pid == os.getpid() and any(stage.closed for stage in self._stages):
            raise TierError(
                f"{what}: the model was closed, its pages are gone; wrap it again, or call unwrap() before close() to "
                "keep the weights"
            )

    def _try_again(self) -> bool:
        """Retry stages whose failure was reported; True if there were any."""
        heard = [stage for stage in self._stages if stage.heard]
        for stage in heard:
            stage.failure, stage.heard = None, False  # nothing in between may fail
        return bool(heard)

    def _wait(self, update: "_Update") -> None:
        while not update.ended:
            self.check_open(update.state.name)
            if not update.given or self._pid != os.getpid():  # Ctrl-C in `submit`, or a forked child without threads
                self._give(update)
            for stage in self._stages:
                if stage.failure is not None and not stage.heard:
                    failed, error = stage.failure
                    stage.heard = True
                    raise TierError(
                        f"{failed.state.name}: its update could not be completed ({error}); nothing is lost: "
                        "remove the cause, and call step() or settle() to continue"
                    ) from error
            with contextlib.suppress(Empty):
                update.bell.get(timeout=_LOOK_SECONDS)

    # -- pipeline stages ----------------------------------------------------------------------------------------------

    def _give(self, update: "_Update") -> None:
        """Hand an update to the stages; safe to repeat, finished work is not redone."""
        if self._pid != os.getpid():
            self._begin()
        if not update.state.memory.in_memory:
            update.loads = True
            self._loading.give(update, self._load)
        self._computing.give(update, self._compute)
        update.given = True

    def _prepare(self, prepared: "Prepared") -> None:
        if prepared.dropped or id(prepared.state) in self._open:
            return
        prepared.begun = True
        try:
            prepared.run(self.kernel.run, self.helpers)
            prepared.done = True
        except TierError:  # its pages are gone, or in files
            pass
        except Exception as error:  # noqa: BLE001 - the step will meet it, if it is one of the weight's
            reason = f"{prepared.state.name}: its update ahead of the step failed ({error}); it is made at the step"
            self.fallbacks += [] if prepared.state.high.gone or reason in self.fallbacks else [reason]
        finally:
            prepared.ended.release()

    def _await_prepared(self, update: "_Update") -> None:
        """Wait for what another thread is computing ahead for an update."""
        prepared = update.prepared
        if prepared is not None and prepared.begun:
            self._computing.take(prepared.ended)

    def _load(self, update: "_Update") -> None:
        """Read a state from its file into a free staging slot."""
        if update.staging is None and not (update.computed or update.ended):
            if update.place is None:
                update.place = self._loading.take(self._places)
            update.staging = update.state.memory.read()
        update.loaded.release()

    def _compute(self, update: "_Update") -> None:
        """Update a weight with all threads, and store its high half."""
        if update.ended or update.stores:
            return
        if update.loads and update.staging is None:
            self._computing.take(update.loaded)
        self._await_prepared(update)
        if update.take():
            with self._counting:
                self.ahead += 1
        with contextlib.ExitStack() as pages:
            update.run(pages, self.kernel.run, self.helpers)
        update.rewritten = True
        update.state.high.forgo(update)
        if update.staging is None:
            self._end(update)
        else:
            update.stores = True
            self._storing.give(update, self._store)

    def _store(self, update: "_Update") -> None:
        """Write a state to its file."""
        update.state.memory.write(update.staging)
        update.staging = None
        if update.place is not None:
            self._places.put(update.place)
        self._end(update)

    def _end(self, update: "_Update") -> None:
        if self._open.get(id(update.state)) is update:
            del self._open[id(update.state)]
        update.gradient = update.high = None
        update.ended = True
        update.bell.release()


def _readable(gradient: Tensor) -> Tensor:
    gradient = gradient.detach().reshape(-1)
    return gradient if gradient.dtype in GRADIENTS else gradient.float()


class Prepared:
    """Update of a weight ahead of its step, into its spare memory.

    Args:
        gradient: on the host.

    Attributes:
        step: that it would be.
        begun, done, dropped: progress.
        ended: rings once a run has ended, done or not.
    """

    def __init__(self, state: WeightState, gradient: Tensor, step: Step) -> None:
        self.state, self.step, self.spare = state, step, state.spare
        self._gradient = gradient
        self.begun = self.done = self.dropped = False
        self.ended = _Bell()
        self.urgency = _AHEAD + state.rank

    def run(self, kernel: Callable[..., Any], helpers: Helpers) -> None:
        """Compute it. Raises TierError: its memory is not there any more."""
        state, spare = self.state, self.spare  # it stays with this update, whoever drops it
        with state.high.preparing(state.memory, spare) as (held, to, new):  # held: against rehoming; it is only read
            high = state.high.peek()
            if high is None or held is None or to is None or new is None:
                raise TierError(f"{state.name}: a budget change moved it into a file")
            own = state.halves_in(high, held), state.moments_in(held)
            out = Updated(state.halves_in(new["weight"], to), state.moments_in(to))
            helpers.run(high.numel(), kernel(*own, _readable(self._gradient), self.step, out))


class _Update:
    """One weight's update, and its progress."""

    prepared: Prepared | None = None

    def __init__(self, state: WeightState, gradient: Callable[[], Tensor], step: Step) -> None:
        self.state, self.step = state, step
        self.gradient: Callable[[], Tensor] | None = gradient
        self.staging: Tensor | None = None  # state of a weight in a file
        self.high: Tensor | None = None  # the computed half, for a retry
        self.place: object = None  # staging slot
        self.rewritten = self.given = self.loads = self.torn = self.computed = self.stores = self.ended = False
        self.loaded, self.bell = _Bell(), _Bell()
        self.urgency = 1 + state.rank if state.memory.in_memory else 0

    def take(self) -> bool:
        """Take what was computed ahead, if it is complete and in memory; True if so."""
        prepared, self.prepared = self.prepared, None
        if prepared is None or self.loads or self.computed or not prepared.done:
            if prepared is not None:
                prepared.dropped = True
            return False
        spare = prepared.spare

        def taken() -> None:
            self.state.memory, spare.memory = spare.memory, self.state.memory
            self.computed = True

        return spare.memory.in_memory and self.state.memory.in_memory and self.state.high.take(spare, taken)

    def run(self, pages: contextlib.ExitStack, kernel: Callable[..., Any], helpers: Helpers) -> None:
        """Do one step; if it was computed but not stored, write the high half again. `pages` stores it."""
        state = self.state
        if self.computed and self.high is None:  # taken
            return
        high = pages.enter_context(state.high.rewriting()).view(-1)
        if self.computed:
            high.copy_(self.high)
            return
        if self.torn:
            raise TierError("it ended half way; load a checkpoint")
        fields = self._fields(pages)
        part = kernel(state.halves_in(high, fields), state.moments_in(fields), _readable(self.gradient()), self.step)
        self.torn = True
        helpers.run(high.numel(), part)
        self.high, self.computed, self.torn = high, True, False

    def _fields(self, pages: contextlib.ExitStack) -> Fields:
        """Return the state in place, if it is in memory, or a staged copy from its file, to be written back."""
        memory = self.state.memory
        if self.staging is None and memory.in_memory:
            held = pages.enter_context(memory.rewriting())
            if memory.in_memory:  # else a budget change moved it to a file
                return held
        self.staging = memory.read() if self.staging is None else self.staging
        return memory.fields_of(self.staging)


class _Bell:
    """One-shot event for one waiter, who also polls."""

    def __init__(self) -> None:
        self._lock = allocate_lock()
        self._lock.acquire()

    def release(self) -> None:
        """Set it."""
        if self._lock.locked():
            self._lock.release()

    def get(self, timeout: float) -> object:
        """Wait until it is set. Raises Empty after `timeout` seconds."""
        if not self._lock.acquire(timeout=timeout):
            raise Empty
        return self


class _Stage:
    """Pipeline stage of updates: threads which stop on a failure until told to retry.

    Args:
        end: called with an update that fails because its model was dropped, for which nobody can wait.
        threads: their number.

    Attributes:
        failure: the failed update and its error; the stage waits until this is None.
        heard: True once the failure was raised to a waiter.
        closed: True if it is to end.
    """

    def __init__(self, end: "Callable[[_Update], None]", threads: int) -> None:
        self.crew, self._end = Crew(threads), end
        self.failure: tuple[_Update, Exception] | None = None
        self.heard = self.closed = False
        self._serial = itertools.count()
        self._waiting: list[tuple[int, int, _Update, Callable[[_Update], None]]] = []  # a heap

    def give(self, update: _Update, work: Callable[[_Update], None]) -> None:
        """Queue work on an update by urgency (lowest first), then in order."""
        heappush(self._waiting, (update.urgency, next(self._serial), update, work))
        self.crew.give(self._do_next)

    def _do_next(self) -> None:
        self._await_retry()
        if self._waiting:
            _, _, update, work = heappop(self._waiting)
            self._do(update, work)

    def _await_retry(self) -> None:
        while self.failure is not None and not self.closed:
            time.sleep(_LOOK_SECONDS)

    def _do(self, update: _Update, work: Callable[[_Update], None]) -> None:
        while not self.closed:
            try:
                work(update)
                return
            except _Closed:
                return
            except Exception as error:  # noqa: BLE001 - raised to the waiter
                if update.state.high.gone:
                    self._end(update)
                    return
                self._await_retry()  # of another thread's, which is raised first
                self.failure = update, error
            self._await_retry()

    def take(self, queue: Any) -> object:
        """Return the next item of a queue, or a bell once it is set."""
        while not self.closed:
            with contextlib.suppress(Empty):
                return queue.get(timeout=_LOOK_SECONDS)
        raise _Closed


class _Closed(Exception):
    """The stage is closing."""


_updaters: "weakref.WeakSet[Updater]" = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """End threads that wait for a retry, before crews' threads are joined."""
    for updater in list(_updaters):
        updater.close()
