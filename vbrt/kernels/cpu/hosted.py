"""Hosted products: a device's few-token products with weights that stay in host memory, by threads that poll mailboxes.

    team = new_team()
    box = team.attach(mailbox)                       # page-locked memory, which the device reads and writes
    entry = team.entry(box, [HostedPart(...)], tokens=1, dtype=torch.bfloat16)
    team.expect(box, 1)                              # before the launch of what posts; wakes the threads
    # device: x, then number << 16 | entry at POST; waits for the number at ANSWER; reads y

An entry may be a layer of routed experts instead (`HostedExperts`): posts name some of them by ids and weights behind
x, and y is their weighted sum. A post of the entry `NOTHING` asks for nothing and is not answered.

The computation is in `hosted.c`, which has the memory layout; results have the bits of `experts_up` with one expert,
whatever the number of threads. Neither posts nor answers involve Python. A post without a product (its entry was
forgotten, the mailbox detached, the team stopped) is answered with its number, negated.

Legend: T tokens, k experts per token, E experts, N rows of a matrix, K its columns.
"""

import ctypes
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from vbrt.errors import KernelError
from vbrt.formats.page import PageLayout
from vbrt.kernels.cpu.build import NUMBERS, Bank, Gating, Task
from vbrt.kernels.cpu.experts import FORMATS, bank_of, gating_of, takes_tiles
from vbrt.kernels.cpu.team import Team
from vbrt.kernels.cpu.thread_counts import leaving, team
from vbrt.kernels.cuda.e2m1.tiles import TILES
from vbrt.kernels.experts import ExpertPages, Gate

__all__ = [
    "ANSWER",
    "ENTRIES",
    "ENTRY_BITS",
    "GAVE_UP",
    "NOTHING",
    "POST",
    "HostedExperts",
    "HostedPart",
    "HostedTeam",
    "Mailbox",
    "Places",
    "X",
    "new_team",
    "places_of",
]

#: byte offsets of a mailbox's int64 words, each in a cache line of its own, and of x
POST, ANSWER, GAVE_UP, X = 0, 64, 128, 192
#: a post is number << ENTRY_BITS | entry
ENTRY_BITS = 16
NOTHING = (1 << ENTRY_BITS) - 1
ENTRIES = NOTHING
_LINE = 64
_SETTLE_S = 2e-5
_RAW = Gate("none", gated=False)
_WEIGHT = "weight"


class HostedPart(NamedTuple):
    """One product of an entry: y = x @ w.T + bias.

    Attributes:
        format: of the page; of `cpu.experts.FORMATS`.
        dtype: of the weight.
        shape: (N, K).
        layout: of the page, with the fields of one weight; in the order of rows, or of a GPU's tiles.
        page: uint8, in host memory; must not change while the entry exists.
        bias: [N] in host memory, or None.
        y: byte offset of y [tokens, N] in the mailbox, in x's dtype; a multiple of 64.
    """

    format: str
    dtype: torch.dtype
    shape: tuple[int, int]
    layout: PageLayout
    page: Tensor
    bias: Tensor | None
    y: int

    def pages(self) -> ExpertPages:
        """Return the page as the only one of a bank."""
        fields = tuple(replace(f, name=f"{_WEIGHT}.{f.name}") for f in self.layout.fields)
        layout = replace(self.layout, fields=fields)
        return ExpertPages(self.format, self.dtype, {_WEIGHT: self.shape}, layout, [self.page])


class Places(NamedTuple):
    """Byte offsets in a mailbox: posted ids int64 [T, k], weights fp32 [T, k], y fp32 [T, N], and the end of all."""

    ids: int
    weights: int
    y: int
    end: int


def places_of(tokens: int, k: int, inputs: int, outputs: int, dtype: torch.dtype) -> Places:
    """Return where a mailbox has what posts of a layer of routed experts bring and get, behind x [T, K] of a dtype."""
    ids = _lines(X + tokens * inputs * dtype.itemsize)
    weights = _lines(ids + tokens * k * 8)
    y = _lines(weights + tokens * k * 4)
    return Places(ids, weights, y, _lines(y + tokens * outputs * 4))


def _lines(nbytes: int) -> int:
    return -(-nbytes // _LINE) * _LINE


class HostedExperts(NamedTuple):
    """Routed experts of an entry: y = sum over the posted experts of weight * (W_down g(W_up x + bias) + bias).

    Attributes:
        pages: of all experts, with parts "up" and "down", in host memory; must not change while the entry exists.
        gate: g.
        biases: [E, N] of "up" and of "down" in host memory, or None.
        k: experts per token.
    """

    pages: ExpertPages
    gate: Gate
    biases: tuple[Tensor | None, Tensor | None]
    k: int

    def places(self, tokens: int, dtype: torch.dtype) -> Places:
        """Return where a mailbox has the operands and results of so many tokens."""
        return places_of(tokens, self.k, self.pages.shapes["up"][1], self.pages.shapes["down"][0], dtype)


@dataclass(eq=False)
class Mailbox:
    """An attached mailbox: its memory, and by entry what C reads there."""

    memory: Tensor
    slot: int = -1
    jobs: dict[int, tuple] = field(default_factory=dict)
    next: int = 0


class HostedTeam(Team):
    """Threads that compute hosted products; all of them poll mailboxes, and sleep when no posts are expected.

    Of one process: a forked child makes its own team. May be used by several threads at a time.

    Args:
        threads: number of computing threads.
    """

    def __init__(self, threads: int) -> None:
        super().__init__("hosted", max(1, threads) + 1)  # the first place computes nothing
        self._boxes: set[Mailbox] = set()
        self._owner = threading.RLock()  # a finalizer may forget an entry anywhere
        self._expect = self._memory.library.vbrt_hosted_expect

    @property
    def threads(self) -> int:
        """Number of computing threads."""
        return self._places - 1

    def attach(self, mailbox: Tensor) -> Mailbox:
        """Poll a mailbox from now on.

        Args:
            mailbox: uint8 in host memory, page-locked if a device posts there; begins at a multiple of 64 bytes. New
                ones are zeros; one that another team has served continues its numbers.

        Raises KernelError: unsuitable memory, too many mailboxes, a stopped team, no threads.
        """
        self._check()
        if not (mailbox.is_cpu and mailbox.dtype is torch.uint8 and mailbox.is_contiguous()) or mailbox.numel() <= X:
            raise KernelError(
                f"hosted: a mailbox of {mailbox.dtype} {tuple(mailbox.shape)} on {mailbox.device}; expected contiguous "
                f"uint8 in host memory, more than {X} bytes"
            )
        if mailbox.data_ptr() % _LINE:
            raise KernelError(f"hosted: a mailbox at {mailbox.data_ptr():#x}; expected a multiple of {_LINE}")
        box = Mailbox(mailbox)
        self._boxes.add(box)  # first: an interrupted attach may be polled
        slot = self._memory.library.vbrt_hosted_attach(self._memory.address, mailbox.data_ptr())
        if slot < 0:
            self._boxes.discard(box)
            raise KernelError("hosted: too many mailboxes" if slot == -1 else "hosted: no memory for mailboxes")
        box.slot = slot
        with self._lock:
            self._start()
        if self._started == 1:
            self.detach(box)
            raise KernelError("hosted: the system starts no threads")
        return box

    def entry(
        self, box: Mailbox, parts: Sequence[HostedPart], tokens: int, dtype: torch.dtype, *, rounded: bool = False
    ) -> int:
        """Prepare products of one x; return their entry, the lowest 16 bits of a post.

        Pages and biases are kept alive, and must not change, until the entry is forgotten.

        Args:
            tokens: rows of x, which begins at `X`.
            dtype: of x and y.
            rounded: x may be quantized to int8 (`vbrt.kernels.cpu.int8`).

        Raises KernelError: what C cannot compute, or the mailbox has no room for.
        """
        self._check()
        held = _banks_and_tasks(box.memory, parts, tokens, dtype, rounded=rounded)
        make, (banks, tasks) = self._memory.library.vbrt_hosted_job, held[:2]
        job = _aligned(lambda memory: make(banks, tasks, len(parts), self.threads, memory))
        return self._register(box, job, held)

    def experts(self, box: Mailbox, experts: HostedExperts, tokens: int, dtype: torch.dtype) -> int:
        """Prepare a layer of routed experts; return its entry. See `entry`, and `HostedExperts.places`.

        Raises KernelError: what C cannot compute, or the mailbox has no room for.
        """
        self._check()
        banks, tasks, gating, weights, held = _both(box.memory, experts, tokens, dtype)
        make = self._memory.library.vbrt_hosted_experts
        job = _aligned(lambda memory: make(*banks, gating, *tasks, weights, self.threads, memory))
        return self._register(box, job, held)

    def _register(self, box: Mailbox, job: Tensor, held: object) -> int:
        """Return the entry of a job."""
        with self._owner:
            self._check_attached(box)
            if len(box.jobs) == ENTRIES:
                raise KernelError(f"hosted: a mailbox has {ENTRIES} entries; forget some")
            while box.next in box.jobs:
                box.next = (box.next + 1) % ENTRIES
            index = box.next
            box.next = (index + 1) % ENTRIES  # not at once again: a post may still be under way
            box.jobs[index] = (job, held)  # first: an interrupted call may be served
            if not self._memory.library.vbrt_hosted_set(self._memory.address, box.slot, index, job.data_ptr()):
                del box.jobs[index]
                self._check()
                raise KernelError(f"hosted: no memory for entry {index}")
        return index

    def forget(self, box: Mailbox, entry: int) -> None:
        """Release an entry's pages, after its product if one is being computed. Later posts of it fail. Idempotent."""
        with self._owner:
            if entry in box.jobs and box.slot >= 0 and self.pid == os.getpid():
                self._memory.library.vbrt_hosted_set(self._memory.address, box.slot, entry, None)
            box.jobs.pop(entry, None)

    def detach(self, box: Mailbox) -> None:
        """Poll a mailbox no longer; afterwards nobody accesses it. A post that waits fails. Idempotent."""
        with self._owner:
            if box.slot >= 0 and self.pid == os.getpid():
                self._memory.library.vbrt_hosted_detach(self._memory.address, box.slot)
            box.slot = -1
            box.jobs.clear()
            self._boxes.discard(box)

    def expect(self, box: Mailbox, posts: int) -> None:
        """Announce posts, right before the launch of what posts them; wakes the threads.

        They stay awake until these have come, or nothing has for 30 s. Raises KernelError: stopped, or detached.
        """
        if self.pid != os.getpid() or not self._expect(self._memory.address, box.slot, posts):
            self._check()
            self._check_attached(box)

    def served(self, box: Mailbox) -> int:
        """Return the number of posts whose products were computed."""
        return self._counts(box)[0]

    def failed(self, box: Mailbox) -> int:
        """Return the number of posts that were answered without a product."""
        return self._counts(box)[1]

    def settle(self, box: Mailbox, is_idle: Callable[[], bool]) -> None:
        """Wait until the posts announced so far have been taken: until then, their entries must not be forgotten.

        Args:
            is_idle: the device has run all that was launched; what was announced but not launched does not come.
        """
        announced = None
        while box.slot >= 0 and self.pid == os.getpid():
            _, _, taken, expected = self._counts(box)
            announced = expected if announced is None else min(announced, expected)
            if taken >= announced or is_idle():
                return
            time.sleep(_SETTLE_S)

    def _counts(self, box: Mailbox) -> ctypes.Array[ctypes.c_int64]:
        self._check_attached(box)
        counts = (ctypes.c_int64 * 4)()
        self._memory.library.vbrt_hosted_counts(self._memory.address, box.slot, counts)
        return counts

    def _check(self) -> None:
        if self.pid != os.getpid():
            raise KernelError(f"hosted: the threads are those of process {self.pid}; make a team after the fork")
        if not self._stop.alive:
            raise KernelError("hosted: the team was stopped; make another")

    def _check_attached(self, box: Mailbox) -> None:
        if box.slot < 0:
            raise KernelError("hosted: the mailbox was detached; attach it again")


def new_team() -> HostedTeam:
    """Return a team with the kernels' thread count, less the thread that launches the device's kernels."""
    with leaving(1):
        return HostedTeam(team(torch.get_num_threads()))


def _aligned(make: Callable[[int | None], int]) -> Tensor:
    """Return the C structures of an entry, with memory for x in the layout of the products, from a cache line on."""
    room = torch.empty(make(None) + _LINE, dtype=torch.uint8, device="cpu")
    memory = room[-room.data_ptr() % _LINE :]
    make(memory.data_ptr())
    return memory


def _both(
    mailbox: Tensor, experts: HostedExperts, tokens: int, dtype: torch.dtype
) -> tuple[tuple[Bank, Bank], tuple[Task, Task], Gating, int, object]:
    """C structures of routed experts, the address of posted weights, and the objects that they point to.

    Raises KernelError.
    """
    pages, places, start = experts.pages, experts.places(tokens, dtype), mailbox.data_ptr()
    _check_dtypes(pages, dtype, experts.gate)
    if places.end > mailbox.numel() or tokens < 1:
        raise KernelError(f"hosted: {tokens} tokens in a mailbox of {mailbox.numel()} bytes; expected {places.end}")
    for page in pages.pages:
        _check_page(page, pages.layout)
    for part, bias in zip(("up", "down"), experts.biases, strict=True):
        _check_bias(bias, (pages.experts, pages.shapes[part][0]))
    (up, of_up), (down, of_down) = (bank_of(pages, part, range(pages.experts)) for part in ("up", "down"))
    pairs, number = tokens * experts.k, NUMBERS[dtype]

    def task(per_row: int, part: str, x: int | None, bias: Tensor | None, y: int | None) -> Task:
        kind = 0 if bias is None else NUMBERS[bias.dtype]
        address = None if bias is None else bias.data_ptr()
        columns = pages.shapes[part][1]
        return Task(start + places.ids, pairs, per_row, pairs, x, address, y, columns, number, kind, number, False)

    tasks = (
        task(experts.k, "up", start + X, experts.biases[0], None),
        task(1, "down", None, experts.biases[1], start + places.y),
    )
    return (up, down), tasks, gating_of(experts.gate), start + places.weights, (of_up, of_down, experts)


def _banks_and_tasks(
    mailbox: Tensor, parts: Sequence[HostedPart], tokens: int, dtype: torch.dtype, *, rounded: bool
) -> tuple[ctypes.Array[Bank], ctypes.Array[Task], object]:
    """C structures of parts, and the objects that they point to. Raises KernelError."""
    pages = [_checked(part, dtype) for part in parts]
    inputs = {part.shape[1] for part in parts}
    if len(inputs) != 1 or tokens < 1:
        raise KernelError(f"hosted: {tokens} tokens, K of parts {sorted(inputs)}; expected some tokens, and one K")
    (k,) = inputs
    _check_room(mailbox.numel(), parts, tokens, k, dtype.itemsize)
    made = [bank_of(each, _WEIGHT, (0,)) for each in pages]
    ids, start, number = torch.zeros(tokens, dtype=torch.int64, device="cpu"), mailbox.data_ptr(), NUMBERS[dtype]
    tasks = [
        Task(
            ids.data_ptr(), tokens, 1, tokens,
            start + X, None if part.bias is None else part.bias.data_ptr(), start + part.y,
            k, number, 0 if part.bias is None else NUMBERS[part.bias.dtype], number, rounded,
        )
        for part in parts
    ]  # fmt: skip
    banks = (Bank * len(parts))(*(bank for bank, _ in made))
    return banks, (Task * len(parts))(*tasks), (made, ids, tuple(parts))


def _checked(part: HostedPart, dtype: torch.dtype) -> ExpertPages:
    """Return the bank of a part. Raises KernelError if C cannot multiply x of this dtype by it."""
    pages = part.pages()
    _check_dtypes(pages, dtype, _RAW)
    _check_page(part.page, part.layout)
    _check_bias(part.bias, part.shape[:1])
    return pages


def _check_dtypes(pages: ExpertPages, dtype: torch.dtype, gate: Gate) -> None:
    """Raise KernelError if C cannot multiply x of this dtype by the pages."""
    if not pages.formats.issubset(FORMATS) or dtype not in NUMBERS:
        known = ", ".join(str(of) for of in NUMBERS)
        raise KernelError(f"hosted: {dtype} times {pages.format}; expected {known}, and a format of 4 or 8 bits")
    if any(TILES in pages.offsets(part) for part in pages.shapes) and not takes_tiles(pages, dtype, gate):
        raise KernelError(f"hosted: this CPU does not multiply {dtype} by pages in a GPU's tile order; move the page")


def _check_page(page: Tensor | None, layout: PageLayout) -> None:
    """Raise KernelError if C cannot read a page."""
    if page is None:
        raise KernelError(f"hosted: no page; expected {layout.nbytes} bytes in host memory")
    if not page.is_cpu or page.dtype is not torch.uint8 or not page.is_contiguous() or page.numel() < layout.nbytes:
        raise KernelError(
            f"hosted: a page of {page.dtype} {tuple(page.shape)} on {page.device}; expected {layout.nbytes} bytes "
            "in host memory"
        )


def _check_bias(bias: Tensor | None, shape: tuple[int, ...]) -> None:
    """Raise KernelError if C cannot read a bias."""
    if bias is not None and not (
        bias.is_cpu and bias.dtype in NUMBERS and bias.shape == shape and bias.is_contiguous()
    ):
        raise KernelError(f"hosted: a bias {tuple(bias.shape)} on {bias.device}; expected {shape} in host memory")


def _check_room(room: int, parts: Sequence[HostedPart], tokens: int, k: int, size: int) -> None:
    """Raise KernelError where x or a part's y begins in the one before, or ends beyond the mailbox."""
    end = X + tokens * k * size
    for part in sorted(parts, key=lambda part: part.y):
        last, end = end, part.y + tokens * part.shape[0] * size
        if part.y < last or part.y % _LINE or end > room:
            raise KernelError(
                f"hosted: y {(tokens, part.shape[0])} at {part.y} in a mailbox of {room} bytes; expected a multiple of "
                f"{_LINE} from {last} on, with room for it"
            )
