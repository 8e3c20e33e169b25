"""Multi-GPU rates: concurrent H2D links, all-reduce, all-gather, and peer copies; measured, or of H200s."""

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from vbrt.estimation.advice.machine_rates import device_name, link_gb_s
from vbrt.host import accelerator
from vbrt.host.safe_files import cache_folder, read_bounded, write_file

__all__ = ["GroupRates", "group_rates_file", "kept_group_rates", "measure_group_rates", "nvlink_rates"]

_MAX_BYTES = 1 << 16
_SMALL, _LARGE = 16 << 10, 32 << 20


@dataclass(frozen=True, slots=True)
class GroupRates:
    """Rates of a group of ranks, with a GPU each.

    Attributes:
        ranks: number of ranks.
        link_gb_s: H2D to each GPU while all copy.
        sum_us: latency of a small all-reduce; all-gathers are assumed to have the same.
        sum_gb_s: bytes of a large tensor per time of its all-reduce.
        gather_gb_s: bytes of a whole page per time of its all-gather.
        source: "measured here", or the machine measured.
        neighbour_gb_s: from one GPU to the next, while all copy.
        name: of the GPU; of the CPU where ranks had none.
        backend: the group's backend, such as "nccl".
    """

    ranks: int
    link_gb_s: float
    sum_us: float
    sum_gb_s: float
    gather_gb_s: float
    source: str
    neighbour_gb_s: float = 341.0  # H200s of one host, scripts/ranks_bench.py
    name: str = ""
    backend: str = ""

    def sum_s(self, nbytes: float) -> float:
        """Seconds of an all-reduce of a tensor."""
        return 1e-6 * self.sum_us + nbytes / (1e9 * self.sum_gb_s)

    def gather_s(self, nbytes: float) -> float:
        """Seconds of an all-gather to a tensor of so many bytes on every rank."""
        return 1e-6 * self.sum_us + nbytes / (1e9 * self.gather_gb_s)


#: H200s of one host, by number of ranks: concurrent links, NCCL in CUDA graphs (docs/scaling.md)
_MEASURED = {
    2: GroupRates(2, 53.7, 12.5, 223.0, 230.0, "two H200s of one host"),
    4: GroupRates(4, 37.0, 15.0, 190.0, 202.0, "four H200s of one host"),
}


def nvlink_rates(ranks: int) -> GroupRates:
    """Return rates of H200s on one host: measured for 2 and 4, extrapolated otherwise: links share the total bandwidth
    of 4, and an all-reduce takes a quarter longer for each doubling."""
    if ranks in _MEASURED:
        return _MEASURED[ranks]
    four = _MEASURED[4]
    link = min(_MEASURED[2].link_gb_s, 4 * four.link_gb_s / ranks)
    slower = 1.25 ** ((ranks - 1).bit_length() - 2)
    return GroupRates(ranks, link, four.sum_us * slower, four.sum_gb_s / slower, four.gather_gb_s, "of four H200s")


def group_rates_file(ranks: int) -> Path:
    """Return the file of the rates of `measure_group_rates`; it need not exist."""
    return cache_folder() / f"machine-{ranks}-ranks.json"


def kept_group_rates(ranks: int) -> GroupRates | None:
    """Return the stored rates for a number of ranks, whatever their device: see `name`."""
    try:
        return GroupRates(**json.loads(read_bounded(group_rates_file(ranks), _MAX_BYTES).decode()))
    except (OSError, ValueError, TypeError):
        return None


def measure_group_rates(*, keep: bool = True) -> GroupRates:
    """Measure the default process group, in some seconds; all ranks call this, and rank 0 stores the result.

    Raises OSError: the result cannot be stored.
    """
    gpu = accelerator.is_used()
    device = torch.device(accelerator.TYPE if gpu else "cpu")
    dist.barrier()
    link = torch.tensor([link_gb_s() if gpu else 0.0], dtype=torch.float32, device=device)
    dist.all_reduce(link, dist.ReduceOp.MIN)
    small, large = (_sum_s(nbytes, device) for nbytes in (_SMALL, _LARGE))
    found = GroupRates(
        ranks=dist.get_world_size(),
        link_gb_s=float(link),
        sum_us=1e6 * small,
        sum_gb_s=_gb_s(_LARGE, large - small),
        gather_gb_s=_gb_s(_LARGE, _gather_s(_LARGE, device) - small),
        source="measured here",
        neighbour_gb_s=_gb_s(_LARGE, _pass_on_s(_LARGE, device)),
        name=device_name(),
        backend=dist.get_backend(),
    )
    if keep and dist.get_rank() == 0:
        path = group_rates_file(found.ranks)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, json.dumps(asdict(found), indent=1).encode())
    return found


def _gb_s(nbytes: int, seconds: float) -> float:
    return nbytes / max(seconds, 1e-9) / 1e9


def _sum_s(nbytes: int, device: torch.device) -> float:
    tensor = torch.zeros(nbytes // 4, dtype=torch.float32, device=device)
    return _seconds(lambda: dist.all_reduce(tensor), device)


def _gather_s(nbytes: int, device: torch.device) -> float:
    whole = torch.zeros(nbytes // 4, dtype=torch.float32, device=device)
    part = whole.chunk(dist.get_world_size())[0].clone()
    whole = whole[: part.numel() * dist.get_world_size()]
    return _seconds(lambda: dist.all_gather_into_tensor(whole, part), device)


def _pass_on_s(nbytes: int, device: torch.device) -> float:
    """Return the seconds in which every rank sends a tensor to the next one."""
    own, other = (torch.zeros(nbytes // 4, dtype=torch.float32, device=device) for _ in range(2))
    rank, count = dist.get_rank(), dist.get_world_size()

    def run() -> None:
        sent = dist.P2POp(dist.isend, own, (rank + 1) % count)
        for work in dist.batch_isend_irecv([sent, dist.P2POp(dist.irecv, other, (rank - 1) % count)]):
            work.wait()

    return _seconds(run, device)


def _seconds(run: Callable[[], object], device: torch.device, times: int = 20) -> float:
    """Return the mean seconds of a collective, issued back to back; the slowest rank counts."""
    for turn in range(2 * times):
        if turn == times:
            _wait(device)
            start = time.perf_counter()
        run()
    _wait(device)
    taken = torch.tensor([(time.perf_counter() - start) / times], dtype=torch.float32, device=device)
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    return float(taken)


def _wait(device: torch.device) -> None:
    if device.type == accelerator.TYPE:
        accelerator.synchronize()
