"""Routed experts of few tokens, computed by threads of their own while the caller does something else.

    team = ExpertTeam(threads)
    job = team.post(work, product)     # they begin; nobody waits, and no thread needs Python's lock
    team.finish(job)                   # the caller takes part until the rows are there

`team.h` and `experts.c` have the computation: both products of a layer are one job, whose results are those of
`experts_up` and `experts_down`, bit for bit.

What is posted is kept until it is done, whatever becomes of the caller; a job that nobody comes for within 20 ms is
handed to `work.end`, in a thread of the team.
"""

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
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
    """What a job is for."""

    def end(self) -> None:
        """Finish the job, and give back what it needed. Idempotent."""


@dataclass(frozen=True, slots=True)
class TeamForm:
    """Pages of a layer as the C code sees them, but for their addresses.

    Attributes:
        up, down: banks without addresses; None where each page has levels of its own.
        most: pairs of an expert that the C code multiplies; 0: any number.
        pages: without any page.
    """

    up: Bank | None
    down: Bank | None
    held: tuple
    most: int
    pages: ExpertPages


def team_form(pages: ExpertPages, dtype: torch.dtype, gate: Gate) -> TeamForm | None:
    """Return what is the same in all jobs of a layer; None where a team cannot compute with such pages.

    Args:
        pages: without any page.
        dtype: of x.
    """
    if pages.format not in FORMATS or dtype not in NUMBERS:
        return None
    tiled = any(TILES in pages.offsets(part) for part in pages.shapes)
    if tiled and not takes_tiles(pages, dtype, gate):
        return None
    banks = {part: (None, ()) if "levels" in pages.offsets(part) else bank_of(pages, part, ()) for part in pages.shapes}
    (up, *held), (down, *more) = banks["up"], banks["down"]
    return TeamForm(up, down, (held, more), 0 if tiled else most_pairs(), pages)


class HostProduct(NamedTuple):
    """W_down g(W_up x) of the pairs of some experts.

    Attributes:
        form: of the pages.
        gate: applied to W_up x.
        biases: [E, N] of "up" and of "down", or None.
        x: [T, H], contiguous.
        ids: int64 [T, k], contiguous.
        pages: those of the experts that are computed, by expert.
        out: [T k, N], of x's dtype, contiguous; rows of other experts become 0.
    """

    form: TeamForm
    gate: Gate
    biases: tuple[Tensor | None, Tensor | None]
    x: Tensor
    ids: Tensor
    pages: Mapping[int, Tensor]
    out: Tensor


class Span(NamedTuple):
    """When the last job began in a thread of the team, 0 if in none, and when it was done: monotonic nanoseconds."""

    begun_ns: int
    done_ns: int


class ExpertTeam(Team):
    """Threads that compute experts.

    Args:
        threads: that compute, the one that finishes a job among them; one more at least looks after what nobody comes
            for.
    """

    def __init__(self, threads: int) -> None:
        super().__init__("experts", max(2, threads))
        self._posted: tuple[Work | None, HostProduct, tuple] | None = None
        self._number = 0

    def post(self, work: Work | None, product: HostProduct) -> int:
        """Have the team compute; return the number of the job, for `finish`. Waits for an earlier one, if there is any.

        `work` and `product` are kept until the job is done.

        Args:
            work: what is ended where nobody comes for the job.

        Raises MemoryError: there is no memory for the job.
        """
        memory = self._memory
        (up_bank, down_bank), held = _banks(product)
        up, down = _tasks(product)
        with self._lock:
            self._start()  # before the job: Ctrl-C between both would leave it to nobody
            memory.library.vbrt_team_finish(memory.address, 0)
            self._posted = work, product, held  # before the job: threads read it from then on
            number = self._number = memory.library.vbrt_team_experts(
                memory.address, up_bank, down_bank, gating_of(product.gate), up, down
            )
        if not number:
            raise MemoryError(f"experts: no memory for {product.ids.numel()} pairs")
        return number

    def finish(self, number: int) -> None:
        """Return when a job is done; this thread takes part in it until then. Idempotent."""
        self._memory.library.vbrt_team_finish(self._memory.address, number)
        with self._lock:
            if number == self._number:
                self._posted = None  # no thread reads it any more

    def span(self) -> Span:
        """Return when the last job began and ended."""
        times = (ctypes.c_int64 * 2)()
        self._memory.library.vbrt_team_times(self._memory.address, times)
        return Span(*times)

    def look_after(self) -> None:
        """End the work that nobody has come for."""
        posted = self._posted
        if posted is not None and posted[0] is not None:
            posted[0].end()


def _banks(product: HostProduct) -> tuple[tuple[Bank, Bank], tuple]:
    """The banks with the addresses of the pages, and what they point to."""
    form, pages = product.form, product.pages
    if form.up is None or form.down is None:
        every = [pages.get(expert) for expert in range(form.pages.experts)]
        whole = ExpertPages(form.pages.format, form.pages.dtype, form.pages.shapes, form.pages.layout, every)
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
    """Both products; the second one's inputs are the team's own."""
    form, ids, number = product.form, product.ids, NUMBERS[product.x.dtype]
    pairs, (up, down), shapes = ids.numel(), product.biases, form.pages.shapes
    most = form.most or pairs

    def task(part: str, per_row: int, x: Tensor | None, bias: Tensor | None, out: Tensor | None) -> Task:
        places = (None if tensor is None else tensor.data_ptr() for tensor in (x, bias, out))
        kind = 0 if bias is None else NUMBERS[bias.dtype]
        return Task(ids.data_ptr(), pairs, per_row, most, *places, shapes[part][1], number, kind, number, False)

    return task("up", ids.shape[1], product.x, up, None), task("down", 1, None, down, product.out)
