"""CPU compute of missed experts on their host pages, overlapped with the computing device's resident ones.

Work on pages in host memory is posted to a team of C threads (`TeamWork`): it costs the thread that launches the
device's kernels one call, and none of them takes the GIL. A Python thread (`HostWork`) computes the rest: pages that
must be read or reordered first, backends without C code, more pairs than the C code supports. Both hold the pages until
they are done, because a waiting thread may be interrupted.
"""

from _thread import allocate_lock
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from vbrt.errors import KernelError, TierError, VBError
from vbrt.formats.page import PageLayout
from vbrt.host import accelerator
from vbrt.kernels import resolve
from vbrt.kernels.cpu.build import NUMBERS
from vbrt.kernels.cpu.expert_team import ExpertTeam, HostProduct, TeamForm, team_form
from vbrt.kernels.cpu.experts import takes_tiles
from vbrt.kernels.cpu.thread_counts import leaving, team
from vbrt.kernels.cpu.tiles import in_rows
from vbrt.kernels.experts import ExpertPages, Gate
from vbrt.layers.experts.experts_coder import ExpertOps, ops_of
from vbrt.layers.experts.protocols import ExpertsWeights
from vbrt.tiers.stack.host_lease import LowerLease

__all__ = ["HostLayer", "HostWork", "Operands", "TeamWork", "host_ops", "host_pages", "new_team"]

CPU = torch.device("cpu")
_OTHERS = 2  # busy threads: one launches kernels, one copies pages


class Operands(NamedTuple):
    """Arguments of a layer in host memory: x [T, H], ids int64 [T, k]."""

    x: Tensor
    ids: Tensor

    @classmethod
    def of(cls, x: Tensor, ids: Tensor) -> "Operands":
        """Copy them from the computing device; waits for it, once for both."""
        if not accelerator.is_device(x):
            return cls(x.detach().cpu().contiguous(), ids.cpu().long().contiguous())
        host = torch.empty(x.shape, dtype=x.dtype, device=CPU, pin_memory=accelerator.pins())
        host.copy_(x.detach(), non_blocking=True)
        return cls(host, ids.cpu().long().contiguous())  # behind x in the same stream: both are there

    def pairs(self, experts: int) -> dict[int, int]:
        """Return how many pairs go to each expert that has any, ascending; ids of no expert are left out."""
        counts = Counter(self.ids.view(-1).tolist())
        return {e: counts[e] for e in sorted(counts) if 0 <= e < experts}

    def only(self, experts: Sequence[int]) -> "Operands":
        """Return the operands with ids of other experts masked."""
        return self._replace(
            ids=self.ids.masked_fill(~torch.isin(self.ids, torch.tensor(experts, dtype=torch.int64, device=CPU)), -1)
        )

    def sent(self, experts: Sequence[int], ids: Tensor) -> Tensor:
        """Return `ids`, which are on a GPU, with those of other experts masked; waits for nothing."""
        chosen = set(experts)
        masked = [[e if e in chosen else -1 for e in row] for row in self.ids.tolist()]
        return accelerator.sent(torch.tensor(masked, dtype=ids.dtype, device=CPU), ids.device)


class HostLayer(NamedTuple):
    """CPU implementation of a layer's experts.

    Attributes:
        ops: of a CPU.
        gate: of the experts.
        up, down: the biases [E, N] in host memory, or None.
        forms: of the pages as a team takes them, by dtype and layout, with the layout; None: no team computes them.
    """

    handle: ExpertsWeights
    ops: ExpertOps
    gate: Gate
    up: Tensor | None
    down: Tensor | None
    forms: dict[tuple, tuple[PageLayout, TeamForm | None]] | None = None

    @classmethod
    def of(cls, handle: ExpertsWeights, gate: Gate) -> "HostLayer":
        """A layer without biases."""
        ops, backend = host_ops(handle)
        return cls(handle, ops, gate, None, None, {} if backend == "compiled" else None)

    @torch.no_grad()
    def rows(self, operands: Operands, views: Mapping[int, Tensor]) -> Tensor:
        """Return W_down g(W_up x) of each pair, [P, N], zeros for masked ones.

        Args:
            views: pages in host memory, by expert.
        """
        with leaving(_OTHERS):
            pages = host_pages(self, views, operands.x.dtype)
            h_PI = self.ops.up(operands.x, operands.ids, pages, gate=self.gate, bias_EN=self.up)
            return self.ops.down(h_PI, operands.ids, None, pages, bias_EN=self.down)

    def to_send(self, operands: Operands, views: Mapping[int, Tensor]) -> Tensor:
        """Return `rows` in memory from which copies to the computing device are fastest."""
        rows = self.rows(operands, views)
        return accelerator.pinned(rows) if self.handle.device.type == accelerator.TYPE else rows

    def product(self, operands: Operands, views: Mapping[int, Tensor], most: int) -> HostProduct | None:
        """Return `to_send` as a job for a team, with memory for the rows; None where no team can compute it.

        Args:
            most: pairs of an expert.
        """
        form = None if self.forms is None else self._form(operands.x.dtype)
        if form is None or (form.most and most > form.most):
            return None
        if any(bias is not None and bias.dtype not in NUMBERS for bias in (self.up, self.down)):
            return None
        rows, pinned = operands.ids.numel(), self.handle.device.type == accelerator.TYPE and accelerator.pins()
        out = torch.empty((rows, self.handle.spec.columns), dtype=operands.x.dtype, device=CPU, pin_memory=pinned)
        return HostProduct(form, self.gate, (self.up, self.down), operands.x, operands.ids, views, out)

    def _form(self, dtype: torch.dtype) -> TeamForm | None:
        """Job parameters that depend only on the dtype of x and the page layout; cached."""
        handle = self.handle
        layout = handle.pages[0].layout
        key = dtype, id(layout)
        if key not in self.forms:
            self.forms[key] = layout, team_form(handle.form([None] * handle.spec.experts), dtype, self.gate)
        return self.forms[key][1]


def host_pages(layer: HostLayer, views: Mapping[int, Tensor], dtype: torch.dtype) -> ExpertPages:
    """Return pages in host memory, by expert, as the CPU's kernels take them for x of a dtype."""
    handle = layer.handle
    pages: list[Tensor | None] = [None] * handle.spec.experts
    for expert, view in views.items():
        pages[expert] = view
    form = handle.form(pages)
    return form if takes_tiles(form, dtype, layer.gate) else in_rows(form, handle.coder.encoded_joint(form.layout))


def host_ops(handle: ExpertsWeights) -> tuple[ExpertOps, str]:
    """Return the CPU's ops for the format of a layer, and the name of their backend."""
    spec = handle.spec.first
    backend = "reference" if spec.backend == "reference" else "auto"
    return ops_of(handle.spec, backend, CPU), resolve("experts_up", backend, CPU, spec.format).backend


def new_team() -> ExpertTeam:
    """Return a team with the kernels' thread count, less the threads that launch and copy meanwhile."""
    with leaving(_OTHERS):
        return ExpertTeam(team(torch.get_num_threads()))


class HostWork:
    """Rows of some experts, computed once by the first thread that gets to them.

    Attributes:
        experts: which, ascending.
    """

    def __init__(self, layer: HostLayer, operands: Operands, lower: "LowerLease", experts: Sequence[int]) -> None:
        self.experts, self._layer, self._lower = tuple(experts), layer, lower
        self._operands = operands.only(self.experts)
        self._begun, self._ended = allocate_lock(), allocate_lock()
        self._ended.acquire()
        self._rows: Tensor | None = None
        self._error: BaseException | None = None

    def run(self) -> None:
        """Compute the rows and release the pages. `rows` raises errors."""
        if not self._begun.acquire(blocking=False):
            return
        try:
            self._rows = self._compute()
        except BaseException as error:  # noqa: BLE001 - raised where the rows are wanted
            self._error = error
        finally:
            self._lower.end()
            self._ended.release()

    def _compute(self) -> Tensor:
        handle, views = self._layer.handle, self._lower.wait()
        keys = handle.keys_of(self.experts, "full")
        return self._layer.to_send(self._operands, {e: views[key] for e, key in zip(self.experts, keys, strict=True)})

    def rows(self) -> Tensor:
        """Return the rows on the computing device, [P, N], zeros for other experts; wait for them.

        Raises:
            TierError, KernelError: they could not be computed; names the layer and the experts.
        """
        while not self._ended.acquire(timeout=1.0):
            self.run()  # where no thread could be started
        self._ended.release()
        if isinstance(self._error, Exception):
            raise self._named(self._error) from self._error
        if self._error is not None:  # Ctrl-C, where this thread has computed
            raise self._error
        return self._rows.to(self._layer.handle.device, non_blocking=True)

    def ids(self) -> Tensor:
        """Return the ids [T, k] in host memory, those of other experts masked."""
        return self._operands.ids

    def _named(self, error: Exception) -> VBError:
        kind = TierError if isinstance(error, TierError) else KernelError
        who = ", ".join(map(str, self.experts))
        what = str(error) or type(error).__name__
        return kind(f"{self._layer.handle.spec.name}: computing experts {who} on the CPU failed: {what}")


class TeamWork:
    """Rows of some experts, computed by a team.

    Attributes:
        experts: which, ascending.
    """

    def __init__(self, team: ExpertTeam, product: HostProduct, lower: "LowerLease", device: torch.device) -> None:
        self.experts = tuple(product.pages)
        self._team, self._product, self._lower, self._device = team, product, lower, device
        self._number = 0  # any job that the team has: none of this one until it is posted

    def post(self) -> "TeamWork":
        """Post the job to the team. Raises MemoryError."""
        try:
            self._number = self._team.post(self, self._product)
        except BaseException:
            self.end()  # the number may be lost, where Ctrl-C came, but not the job
            raise
        return self

    def end(self) -> None:
        """Wait for the rows and release the pages. Idempotent."""
        try:
            self._end()
        except BaseException:
            self._end()  # what Ctrl-C left: nobody looks after a job that was finished
            raise

    def _end(self) -> None:
        self._team.finish(self._number)
        self._lower.end()

    def rows(self) -> Tensor:
        """Return the rows on the computing device, [P, N], zeros for other experts; this thread helps to compute."""
        self.end()
        return self.sent()

    def sent(self) -> Tensor:
        """Return the rows on the computing device, once they are computed; waits for nothing."""
        return self._product.out.to(self._device, non_blocking=True)

    def ids(self) -> Tensor:
        """Return the ids [T, k] in host memory, those of other experts masked."""
        return Operands(self._product.x, self._product.ids).only(self.experts).ids
