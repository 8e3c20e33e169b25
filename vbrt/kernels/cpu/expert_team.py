"""Expert team: routed experts of few tokens on dedicated threads, overlapping with the caller's other work.

    team = ExpertTeam(threads)
    job = team.post(work, product)     # starts at once, without blocking; threads never need the GIL
    team.finish(job)                   # the caller takes part until the rows are complete

The computation is in `team.h` and `experts.c`: both products of a layer form one job, bit-exact with `experts_up` and
`experts_down`.

Operands are kept alive until the job is done, even if the caller is gone; for a job done for 20 ms without
a `finish`, a team thread calls `work.end`.
"""

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from vbrt.kernels.cpu.build import NUMBERS, Bank, Task
from vbrt.kernels.cpu.experts import FORMATS, bank_of, gating_of, most_pairs, takes_tiles
from vbrt.kernels.cpu.team import Team
from vbrt.kernels.cuda.e2m1.tiles import TILES
from vbrt.kernels.experts import ExpertPages, Gate

__all__ = ["ExpertTeam", "HostProduct", "Span", "TeamForm", "Work", "team_form"]


class Work(Protocol):
    """Owner of a job's resources."""

    def end(self) -> None:
        """Finish the job and release its resources. Idempotent."""


@dataclass(frozen=True, slots=True)
class TeamForm:
    """A layer's pages in C structures, except addresses.

    Attributes:
        up, down: banks without addresses; None if each page has its own levels.
        most: maximum pairs per expert for C; 0: unlimited.
        pages: layout and shapes, without pages.
    """

    up: Bank | None
    down: Bank | None
    held: tuple
    most: int
    pages: ExpertPages


def team_form(pages: ExpertPages, dtype: torch.dtype, gate: Gate) -> TeamForm | None:
    """Return the job-independent form of a layer's pages; None if a team cannot compute with them.

    Args:
        pages: layout and shapes, without pages.
        dtype: of x.
    """
    if not pages.formats.issubset(FORMATS) or dtype not in NUMBERS:
        return None
    tiled = any(TILES in pages.offsets(part) for part in pages.shapes)
    if tiled and not takes_tiles(pages, dtype, gate):
        return None
    banks = {part: (None, ()) if "levels" in pages.offsets(part) else bank_of(pages, part, ()) for part in pages.shapes}
    (up, *held), (down, *more) = banks["up"], banks["down"]
    return TeamForm(up, down, (held, more), 0 if tiled else most_pairs(), pages)


class HostProduct(NamedTuple):
    """Operands of W_down g(W_up x) for the pairs of some experts.

    Attributes:
        form: of the pages.
        gate: applied to W_up x.
        biases: [E, N] of "up" and of "down", or None.
        x: [T, H], contiguous.
        ids: int64 [T, k], contiguous.
        pages: of the computed experts, by expert.
        out: [T k, N], of x's dtype, contiguous; rows of other experts are zeroed.
    """

    form: TeamForm
    gate: Gate
    biases: tuple[Tensor | None, Tensor | None]
    x: Tensor
    ids: Tensor
    pages: Mapping[int, Tensor]
    out: Tensor


class Span(NamedTuple):
    """Start of the last job in a team thread (0: none joined) and its end, in monotonic nanoseconds."""

    begun_ns: int
    done_ns: int


class ExpertTeam(Team):
    """Threads that compute experts.

    Args:
        threads: number of computing threads, including the one that finishes a job; there is at least one other, to
            look after abandoned jobs.
    """

    def __init__(self, threads: int) -> None:
        super().__init__("experts", max(2, threads))
        self._posted: tuple[Work | None, HostProduct, tuple] | None = None
        self._number = 0

    def post(self, work: Work | None, product: HostProduct) -> int:
        """Start a job; return its number, for `finish`. Waits for an earlier job first.

        Keeps `work` and `product` alive until the job is done.

        Args:
            work: ended if nobody finishes the job.

        Raises MemoryError: no memory for the job.
        """
        memory = self._memory
        (up_bank, down_bank), held = _banks(product)
        up, down = _tasks(product)
        with self._lock:
            self._start()  # first: after an interrupt in between, a posted job would have no threads
            memory.library.vbrt_team_finish(memory.address, 0)
            self._posted = work, product, held  # first: threads read it once the job is open
            number = self._number = memory.library.vbrt_team_experts(
                memory.address, up_bank, down_bank, gating_of(product.gate), up, down
            )
        if not number:
            raise MemoryError(f"experts: no memory for {product.ids.numel()} pairs")
        return number

    def finish(self, number: int) -> None:
        """Take part in a job until it is done. Idempotent."""
        self._memory.library.vbrt_team_finish(self._memory.address, number)
        with self._lock:
            if number == self._number:
                self._posted = None  # no thread reads it anymore

    def span(self) -> Span:
        """Return the start and end of the last job."""
        times = (ctypes.c_int64 * 2)()
        self._memory.library.vbrt_team_times(self._memory.address, times)
        return Span(*times)

    def look_after(self) -> None:
        """End an abandoned job's work."""
        posted = self._posted
        if posted is not None and posted[0] is not None:
            posted[0].end()


def _banks(product: HostProduct) -> tuple[tuple[Bank, Bank], tuple]:
    """Banks with page addresses, and the objects that they point to."""
    form, pages = product.form, product.pages
    if form.up is None or form.down is None:
        every = [pages.get(expert) for expert in range(form.pages.experts)]
        whole = replace(form.pages, pages=every)
        (up, held), (down, more) = (bank_of(whole, part, pages) for part in ("up", "down"))
        return (up, down), (held, more)
    addresses = (ctypes.c_void_p * form.pages.experts)()
    for expert, page in pages.items():
        addresses[expert] = page.data_ptr()
    banks = Bank.from_buffer_copy(form.up), Bank.from_buffer_copy(form.down)
    for bank in banks:
        bank.pages = ctypes.addressof(addresses)
    return banks, (addresses,)


def _tasks(product: HostProduct) -> tuple[Task, Task]:
    """Tasks of both products; the second one's inputs are internal to the team."""
    form, ids, number = product.form, product.ids, NUMBERS[product.x.dtype]
    pairs, (up, down), shapes = ids.numel(), product.biases, form.pages.shapes
    most = form.most or pairs

    def task(part: str, per_row: int, x: Tensor | None, bias: Tensor | None, out: Tensor | None) -> Task:
        places = (None if tensor is None else tensor.data_ptr() for tensor in (x, bias, out))
        kind = 0 if bias is None else NUMBERS[bias.dtype]
        return Task(ids.data_ptr(), pairs, per_row, most, *places, shapes[part][1], number, kind, number, False)

    return task("up", ids.shape[1], product.x, up, None), task("down", 1, None, down, product.out)
