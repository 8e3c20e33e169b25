"""GPU workspace of routed experts during their layer's forward, simulated on the traced copy.

Lossless experts: those of one lease, decoded or gathered together, plus the allocations of the model's own
implementation; with several leases, its allocations for one lease's pairs, and output rows for all pairs. 4-bit
experts: inputs and outputs of both products for each pair, and with streamed pages the rows of earlier leases. See
`layers/experts/run_experts.py`.

Tokens are assumed to be routed at random: T tokens touch E (1 - (1 - k / E)^T) of E experts.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from vbrt.config import FORMATS
from vbrt.estimation.memory.task import Task
from vbrt.kernels.cuda.fine.merge import why_not_experts
from vbrt.kernels.cuda.launch_table import are_few
from vbrt.residency.expert_leases import ExpertLeases, gathered_at_once
from vbrt.residency.expert_pages import pages_of_scan
from vbrt.residency.host_slots import slots_wanted
from vbrt.residency.plan import Plan, Swap
from vbrt.residency.plan_data import lease_bytes
from vbrt.residency.room_division import auto_scan

__all__ = ["HeldExperts", "experts_at_once", "heard_by_host", "pairs_among", "slots_of", "touched_share"]


def pairs_among(values: Iterable[Any]) -> int:
    """Return the number of (token, expert) pairs in the arguments' expert ids; 0 without ids."""
    ids = next((v for v in values if isinstance(v, Tensor) and not v.is_floating_point()), None)
    return 0 if ids is None else ids.numel()


def touched_share(experts: int, top_k: int, tokens: float) -> float:
    """Return the share of a layer's experts that so many tokens are expected to touch."""
    return 1 - (1 - top_k / experts) ** tokens


def experts_at_once(leases: ExpertLeases, room_bytes: int | None) -> tuple[int, int]:
    """Return the most experts per lease: for few tokens, and in a scan; room_bytes: room for streamed pages."""
    largest = max(leases.page_bytes)
    wanted = 0 if room_bytes is None else pages_of_scan(auto_scan(largest), room_bytes, largest)
    few, scan = (leases.at_once(scan=scan, room_bytes=room_bytes, scan_pages=wanted) for scan in (False, True))
    return max(1, few), max(1, scan)


def slots_of(swap: Swap, plan: Plan) -> int | None:
    """Return a lossless MoE layer's slots in the GPU-managed expert cache; None without such a cache: rounded formats,
    or pages elsewhere than in host memory and on a drive below it."""
    if plan.compute_tier != "gpu" or not _is_gathered(swap) or not _is_below(swap, plan):
        return None
    moving = [one for one in plan.routed if any(page.home != "gpu" for page in one.pages)]
    room = plan.budgets["gpu"] - plan.home_bytes("gpu") - max(sum(page.nbytes for page in one.leased) for one in moving)
    slots = room // sum(map(_slot_bytes, moving))
    return min(slots, swap.experts) if slots > 0 else None


def _parts(leases: ExpertLeases, slots: int) -> tuple[int, int]:
    """Return the most experts gathered together, for few tokens and in a scan, given the cache's slots."""
    gathered = gathered_at_once(leases.decoded_bytes)
    return gathered, gathered if slots == leases.experts else min(gathered, max(1, slots // 2))


def _is_below(swap: Swap, plan: Plan) -> bool:
    """True if all pages live in host memory, or on a drive below it, with slots in host memory for those."""
    homes = {page.home for page in swap.pages}
    if homes == {"cpu"} or not homes <= {"cpu", "ssd"} or "cpu" not in plan.budgets:
        return homes == {"cpu"}
    planes, largest = len(swap.pages) // swap.experts, max(page.nbytes for page in swap.pages)
    room = plan.budgets["cpu"] - plan.home_bytes("cpu") - max(lease_bytes(one.pages) for one in plan.routed)
    return room >= slots_wanted(len(swap.pages), planes)[0] * largest


def heard_by_host(swap: Swap, plan: Plan, pairs: int) -> bool:
    """True if the host must learn which experts so many pairs name, to lease them for a GPU."""
    homes = {page.home for page in swap.pages}
    if not (homes <= {"gpu"} or _is_below(swap, plan)) or (swap.lossless and not _is_gathered(swap)):
        return True
    if not swap.lossless:  # kernels take pages by address
        return homes != {"gpu"} and FORMATS[swap.format].kernels is None
    gathered = gathered_at_once(swap.dense_bytes // swap.experts)
    at_once = (slots_of(swap, plan) or 0) if homes != {"gpu"} else gathered
    return pairs >= swap.experts or pairs > at_once


def _is_gathered(swap: Swap) -> bool:
    """True if the device gathers lossless experts, of `exact` ones by a kernel that merges whole blocks."""
    if swap.fine != "exact":
        return swap.lossless
    return not any(why_not_experts(swap.format, site.shape) for site in (swap.site, *swap.parts))


def _slot_bytes(swap: Swap) -> int:
    return sum(page.nbytes for page in swap.pages[: len(swap.pages) // max(1, swap.experts)])


class HeldExperts(NamedTuple):
    """A layer's experts under a plan.

    Attributes:
        on_gpu: True if a GPU computes.
        at_once: see `experts_at_once`.
        most: maximum of experts that a prompt's tokens name; 0: unlimited.
        unheard: number of pairs whose lossless experts only the device knows: it gathers one expert per pair.
    """

    leases: ExpertLeases
    on_gpu: bool
    at_once: tuple[int, int]
    most: int
    unheard: int = 0

    @classmethod
    def of(cls, swap: Swap, plan: Plan, task: Task) -> Self:
        """Make it of a swap of the plan."""
        top = next(iter(plan.budgets))
        planes = len(swap.pages) // swap.experts
        pages = tuple(page.nbytes for page in swap.pages[:planes])
        decoded = swap.dense_bytes // swap.experts
        moves = any(page.home != top for page in swap.pages)
        room = plan.budgets[top] - plan.home_bytes(top) if moves else None
        leases = ExpertLeases(swap.experts, swap.top_k, decoded, pages, swap.lossless)
        slots, step = slots_of(swap, plan), task.batch * swap.top_k
        at_once = experts_at_once(leases, room) if slots is None else _parts(leases, slots)
        unheard = step if slots is not None and not heard_by_host(swap, plan, step) else 0
        return cls(leases, plan.compute_tier == "gpu", at_once, task.experts, unheard)

    def forward(self, module: nn.Module, own: Callable[..., Tensor], x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Forward that makes a layer's allocations; only the model's own implementation computes."""
        pairs = pairs_among((*args, *kwargs.values()))
        if torch.is_grad_enabled() or not self.on_gpu or not pairs:
            return x * 1
        stacked = [p for p in module.parameters(recurse=False) if p.dim() > 2]
        if self.leases.lossless:
            return self._by_library(stacked, own, pairs, (x, *args), kwargs)
        return self._by_kernels(stacked, pairs, x)

    def touched(self, pairs: int) -> int:
        """Return the experts that so many pairs are expected to touch."""
        experts, k = self.leases.experts, self.leases.top_k
        touched = math.ceil(experts * touched_share(experts, k, pairs / k))
        return min(touched, max(k, self.most)) if self.most else touched

    def leased(self, pairs: int) -> int:
        """Return the most experts per lease for so many pairs."""
        return self.at_once[pairs >= self.leases.experts]

    def _by_library(
        self, stacked: list[nn.Parameter], own: Callable[..., Tensor], pairs: int, args: tuple, kwargs: dict[str, Any]
    ) -> Tensor:
        touched, x = pairs if pairs <= self.unheard else self.touched(pairs), args[0]
        leased = min(touched, self.leased(pairs))
        decoded = [p.new_empty((leased, *p.shape[1:])) for p in stacked]
        if leased == touched:
            return own(*args, **kwargs)
        rows = x.new_zeros(pairs, x.shape[-1])
        tokens = max(1, len(x) * leased // touched)
        some = [v[:tokens] if isinstance(v, Tensor) and len(v) == len(x) else v for v in (*args, *kwargs.values())]
        own(*some[: len(args)], **dict(zip(kwargs, some[len(args) :], strict=True)))
        del decoded
        weighted = rows * 1
        return weighted.view(len(x), -1, x.shape[-1]).sum(dim=1)

    def _by_kernels(self, stacked: list[nn.Parameter], pairs: int, x: Tensor) -> Tensor:
        sorted_pairs = not are_few(pairs, self.leases.experts)
        inner = min(p.shape[1] * p.shape[2] // x.shape[-1] for p in stacked)  # twice that for gate and up
        before = x.new_empty(pairs, x.shape[-1]) if self.touched(pairs) > self.leased(pairs) else None
        gathered = x.new_empty(pairs, x.shape[-1]) if sorted_pairs else None
        h = x.new_empty(pairs, inner)
        del gathered
        gathered = torch.empty_like(h) if sorted_pairs else None
        rows = x.new_empty(pairs, x.shape[-1])
        del gathered, h, before, rows
        return x * 1
