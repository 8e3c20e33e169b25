"""Experts' pages on a drive, behind a device cache: a thread reads what the device asks for.

    drive = DrivePages(staged, planes, wait_s, device)
    tables = ResidentTables(..., mail=drive.mail)       # leases of the device post what they miss
    drive.awake()                                       # before launches of leases
    with drive.lent(numbers) as lent: ...               # pages for a prompt's copies, which the host launches
    changes = drive.choose(demand)                      # between passes, while the device is quiet

The table that the device reads has the address of each page in host memory, or says that it is on the drive. Missing
pages of the latter kind are posted into page-locked memory (`vbrt/kernels/cuda/experts/drive_mail.py`); the thread
reads them into slots, verified as by any other lease, and answers with addresses. The device waits meanwhile, and for
nothing else: routing stays unread. Which pages have addresses is *fixed* while passes run (`residency/host_slots.py`).

**What must not be overwritten.** A post comes, in stream order, behind all copies from slots of the post before it.
Slots that a prompt copies from are held until an event; the thread never waits for one, as other slots are always free.

**Counts.** Hits, misses and bytes to the device are the device's, and depend on routing alone. What was read from the
drive depends on timing only where a prompt's batches and posts of the device come at the same time.

**Errors.** A page that cannot be read answers its post without addresses: slots of the device get ones, results are
NaN, and `failure` has the error for the next lease, replay, or end of `generate`. So it is without an answer in time.

**The thread** only reads and sleeps: no call to the device, which a capture in another thread would forbid. It sleeps
50 us at a time while posts come, and 5 ms after a third of a second without one.
"""

import contextlib
import ctypes
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from vbrt.errors import TierError
from vbrt.host import accelerator
from vbrt.host.worker_threads import Crew
from vbrt.kernels.cuda.experts.drive_mail import ANSWER, COUNT, GAVE_UP, LIST, POST, WORD_BYTES, DriveMail, room_words
from vbrt.residency.host_slots import HostSlots, batch_pages
from vbrt.tiers.stack.staged_pages import StagedPages

__all__ = ["DriveCounts", "DrivePages", "Lent"]

_WINDOWS_S = 1.5  # Windows ends a kernel that runs for 2 s
_HELPERS = 3  # threads that read pages of one post, beside the one that answers it
_SHORTEST_S, _LONGEST_S, _PART = 50e-6, 5e-3, 64  # sleeps: a part of the time since the last post


class DriveCounts(NamedTuple):
    """Posts of the device, and pages and bytes read, for posts and prompts."""

    posts: int
    pages: int
    bytes: int


class Lent:
    """Pages of a batch in host memory.

    Attributes:
        pages: uint8, by number.
        copied: event behind the copies from them; None: they are done.
    """

    def __init__(self, pages: Mapping[int, Tensor]) -> None:
        self.pages = pages
        self.copied: torch.Event | None = None


class _Batch(NamedTuple):
    """Held slots, and where their copies were launched."""

    slots: Sequence[int]
    lent: Lent


class _Shelf:
    """Slots and the pages in them, for several threads. Attributes: pages, nbytes: read so far, in all."""

    def __init__(self, staged: StagedPages, batch: int) -> None:
        self._staged, self._lock = staged, threading.Lock()
        self._slots, self._crew = HostSlots(len(staged.slots), batch), Crew(_HELPERS)
        self._read: Counter[int] = Counter()
        self._batch, self.pages, self.nbytes = batch, 0, 0

    def bring(self, numbers: Sequence[int]) -> Mapping[int, int]:
        """Hold a slot for each page, and read those that are missing; return the slots. Raises TierError."""
        with self._lock:
            taken = self._slots.take(numbers)
        try:
            self._crew.share(len(taken.missing), lambda part: self._bring(taken.missing[part], taken.slots))
        except BaseException:
            self.release(taken.slots.values())
            raise
        return taken.slots

    def _bring(self, number: int, slots: Mapping[int, int]) -> None:
        self._staged.read(number, slots[number])
        with self._lock:
            self._slots.landed(number, slots[number])
            self._read[number] += 1
            self.pages, self.nbytes = self.pages + 1, self.nbytes + len(self._staged.view(number, slots[number]))

    def reset(self) -> None:
        """Forget which pages the slots have; nobody reads them."""
        with self._lock:
            self._slots = HostSlots(len(self._staged.slots), self._batch)

    def release(self, slots: Sequence[int]) -> None:
        """End the holds of a batch."""
        with self._lock:
            self._slots.release(slots)

    def choose(self, demand: Sequence[float]) -> dict[int, int | None]:
        """See `HostSlots.choose`."""
        with self._lock:
            return self._slots.choose(demand)

    def drained(self) -> Counter[int]:
        """Return how often each page was read since the last call."""
        with self._lock:
            read, self._read = self._read, Counter()
        return read

    def view(self, number: int, slot: int) -> Tensor:
        """Return the bytes of a page in its slot."""
        return self._staged.view(number, slot)

    def stop(self) -> None:
        """Stop the helpers. Idempotent."""
        self._crew.stop()


class _Service:
    """Thread that answers posts. It refers to nothing that ends it: `DrivePages` does, when it is collected."""

    def __init__(self, shelf: _Shelf, words: Tensor, batch: int) -> None:
        self._shelf, self._words, self._batch = shelf, words, batch
        self.errors: list[Exception] = []
        self.posts = 0
        self._held: Sequence[int] = ()  # slots of the last answer: the device reads them until the next post
        self._stopping, self._busy = threading.Event(), threading.Lock()
        self._since = time.monotonic()
        self._post, self._answer, self._count = (_word(words, at) for at in (POST, ANSWER, COUNT))
        self._thread = threading.Thread(target=self._serve, name="vbrt-drive", daemon=True)
        self._thread.start()

    def awake(self) -> None:
        """Poll often: posts are about to come."""
        self._since = time.monotonic()

    def _serve(self) -> None:
        seen = 0
        while not self._stopping.is_set():
            number = self._post.value
            if number == seen:
                time.sleep(min(_LONGEST_S, max(_SHORTEST_S, (time.monotonic() - self._since) / _PART)))
                continue
            with self._busy:
                seen = number
                answer = number if self._serves() else -number
                self._ordered()
                self._answer.value = answer
            self._since = time.monotonic()

    def _serves(self) -> bool:
        """Read the pages of a post, and write their addresses; False, with an error kept, if one cannot be read."""
        self._shelf.release(self._held)
        self._held = ()
        count = min(self._count.value, self._batch)
        numbers = self._words[LIST : LIST + count].tolist()
        try:
            slots = self._shelf.bring(numbers)
        except Exception as error:  # noqa: BLE001 - raised in the thread that computes: `DrivePages.failure`
            self.errors.append(error)
            return False
        self._held = list(slots.values())
        at = LIST + self._batch
        for place, number in enumerate(numbers):
            self._words[at + place] = self._shelf.view(number, slots[number]).data_ptr()
        self.posts += 1
        return True

    def _ordered(self) -> None:
        """Keep the answer behind the addresses: a lock that is released and taken again is a barrier."""
        for _ in range(2):
            with self._shelf._lock:
                pass

    def forget(self) -> None:
        """Hold no slots: they were reset."""
        self._held = ()

    def settle(self) -> None:
        """Wait until the last post is answered; the device has posted all that it will."""
        while abs(self._answer.value) != self._post.value and self._thread.is_alive():
            time.sleep(_SHORTEST_S)

    def stop(self) -> None:
        """End the thread, after the pages that it is reading. Idempotent."""
        self._stopping.set()
        if self._thread is not threading.current_thread():
            self._thread.join()
        self._shelf.stop()


class DrivePages:
    """Pages on a drive, by number, and the slots in host memory that they are read into.

    Args:
        staged: the slots.
        planes: pages of an expert, at most.
        wait_s: the device waits so long for pages.
        device: that asks.

    Attributes:
        batch: pages of a post, and of `lent`, at most.
    """

    def __init__(self, staged: StagedPages, planes: int, wait_s: float, device: torch.device) -> None:
        self._wait_s = min(wait_s, _WINDOWS_S) if sys.platform == "win32" else wait_s
        self._staged, self._device = staged, device
        self.batch = batch_pages(len(staged.slots), planes)
        self._shelf = _Shelf(staged, self.batch)
        pins = accelerator.has_streams(device) and accelerator.pins()
        words = torch.zeros(room_words(self.batch), dtype=torch.int64, device="cpu", pin_memory=pins)
        self._words, self._gave_up = words, _word(words, GAVE_UP)
        self._lent: list[_Batch] = []
        self._torn = False  # an interrupt came while slots were given to pages, or the device was told of them
        self._service = _Service(self._shelf, words, self.batch)
        self.awake = self._service.awake
        self._end = weakref.finalize(self, self._service.stop)

    def mail(self, table: int) -> DriveMail:
        """Return the device's side of the mailbox, for leases that miss so many pages at most."""
        return DriveMail(self._words, self.batch, table, int(self._wait_s * 1e6), self._device)

    # -- prompts ------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def lent(self, numbers: Sequence[int]) -> Iterator[Lent]:
        """Lend pages for copies that are launched in the block, of `batch` pages at most.

        Raises TierError: a page cannot be read.
        """
        with self.changing():
            while len(self._lent) > 1:
                self._take_back(self._lent[0])
                del self._lent[0]
            slots = self._shelf.bring(numbers)
            lent = Lent({number: self._shelf.view(number, slot) for number, slot in slots.items()})
            self._lent.append(_Batch(list(slots.values()), lent))
            yield lent

    def _take_back(self, batch: _Batch) -> None:
        if batch.lent.copied is not None:
            batch.lent.copied.synchronize()
        elif accelerator.has_streams(self._device):  # the block has failed
            accelerator.synchronize(self._device)
        self._shelf.release(batch.slots)

    # -- interrupts ---------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def changing(self) -> Iterator[None]:
        """Context of changes to slots, and of telling the device: interrupted, they are undone by `recovers`."""
        self._torn = True
        try:
            yield
        except Exception:
            self._torn = False
            raise
        self._torn = False

    def recovers(self) -> bool:
        """Empty all slots if an interrupt has left them torn; True if so: then the device must be told that every page
        is on the drive."""
        if not self._torn:
            return False
        if accelerator.has_streams(self._device):
            accelerator.synchronize(self._device)
        self._service.settle()
        self._lent.clear()
        self._service.forget()
        self._shelf.reset()
        self._torn = False
        return True

    # -- between passes -----------------------------------------------------------------------------------------------

    def choose(self, demand: Sequence[float]) -> dict[int, int | None]:
        """Choose the pages that keep their places in host memory; return the addresses that changed, None for pages
        that are on the drive now. The device must be quiet."""
        changes = self._shelf.choose(demand)
        return {n: None if slot is None else self._shelf.view(n, slot).data_ptr() for n, slot in changes.items()}

    def failure(self) -> TierError | None:
        """Return why pages have not come since `mend`; None if all have."""
        if self._service.errors:
            error = TierError(f"{self._service.errors[0]}; results since then are NaN")
            error.__cause__ = self._service.errors[0]
            return error
        if self._gave_up.value:
            return TierError(
                f"{self._staged.keys[0]}: pages did not come from the drive within {self._wait_s:g} s, so that results "
                "since then are NaN; raise experts.drive_wait_s, or move tiers.ssd.path to a faster drive"
            )
        return None

    def mend(self) -> None:
        """Forget failures; the device runs nothing by now."""
        self._service.settle()
        self._service.errors.clear()
        self._gave_up.value = 0

    # -- counts, the end ----------------------------------------------------------------------------------------------

    def drained(self) -> dict[str, int]:
        """Return how often each page was read since the last call, by key."""
        return {self._staged.keys[number]: times for number, times in self._shelf.drained().items()}

    @property
    def link(self) -> str:
        """Name of the link from the drive, such as "ssd>cpu"."""
        return self._staged.link

    @property
    def counts(self) -> DriveCounts:
        """What was read so far."""
        return DriveCounts(self._service.posts, self._shelf.pages, self._shelf.nbytes)

    def close(self) -> None:
        """End the thread and free the slots, once the device has run what was launched. Idempotent."""
        self._end()
        self._lent.clear()
        self._staged.close()


def _word(words: Tensor, at: int) -> ctypes.c_int64:
    return ctypes.c_int64.from_address(words.data_ptr() + at * WORD_BYTES)
