"""Measured link and CPU rates for `experts.miss = "auto"`, on a layer's own pages, with the threads and memory of its
passes: where the host decides (`measured_rates`), and where the device does (`posted_rates`)."""

import itertools
import statistics
import time
from _thread import allocate_lock
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from vbrt.host import accelerator
from vbrt.host.worker_threads import Crew
from vbrt.kernels.cpu.expert_team import ExpertTeam
from vbrt.kernels.cpu.hosted import HostedExperts, HostedTeam
from vbrt.kernels.cuda.experts.residency import gather_pages
from vbrt.layers.experts.cpu_experts import HostLayer, Operands
from vbrt.layers.weights.hosted_rates import (
    ROUND_TRIP_S,
    TURNS,
    copying_pages,
    device_seconds,
    fastest,
    posting,
    rounded,
)
from vbrt.layers.weights.hosted_weights import shared_team
from vbrt.residency.hosted_share import HostRates
from vbrt.residency.miss_policy import OPERATORS, MissRates
from vbrt.tiers.stack.host_lease import LowerLease, missing_worth

__all__ = ["measured_rates", "posted_rates"]

_LINK_BYTES = 16 << 20  # fetched at a time to measure
_TURNS = 5  # runs of each measurement; the median counts
_MOST_BYTES = 512 << 20  # of pages that are read to measure


def measured_rates(host: HostLayer, team: ExpertTeam, crew: Crew) -> MissRates | None:
    """Return the rates of link and CPU for a layer; None while no page of it lies in host memory.

    Args:
        team: which computes missed experts.
        crew: whose thread computes those that the team cannot.
    """
    handle = host.handle
    most = max(handle.spec.top_k, _MOST_BYTES // handle.pages[0].nbytes)
    keys = {key: expert for expert, key in enumerate(handle.keys[:most])}
    lower = LowerLease(handle.stack, tuple(keys), looks=True)
    try:
        views = {keys[key]: view for key, view in lower.wait().items()} if lower.begin() else {}
        return _rates(host, (team, crew), views) if views else None
    finally:
        lower.end()


def _rates(host: HostLayer, threads: tuple[ExpertTeam, Crew], views: Mapping[int, Tensor]) -> MissRates:
    handle, nbytes = host.handle, host.handle.pages[0].nbytes
    count = min(handle.spec.top_k, len(views))
    starts = range(0, len(views) - count + 1, count)
    groups = itertools.cycle([list(views)[at : at + count] for at in starts])  # never what caches still have

    def computed(experts: int, tokens: int) -> float:
        return _median(lambda: _compute(host, threads, {e: views[e] for e in next(groups)[:experts]}, tokens))

    computed(count, 1)  # builds the kernels, and starts the thread and its team
    one, all_, four = computed(1, 1), computed(count, 1), computed(count, 4)
    each = (all_ - one) / (count - 1) if all_ > one else all_ / count
    return MissRates(
        link_bytes_s=count * nbytes / _copy_seconds(handle.device, views, groups),
        cpu_bytes_s=nbytes / each,
        more=max(0.0, four / all_ - 1) / 3,
        call_s=max(0.0, one - each) or _median(lambda: _in_thread(threads[1], int)),
        host_s=_host_seconds(host),
    )


def posted_rates(experts: HostedExperts, dtype: torch.dtype, device: torch.device) -> HostRates:
    """Return the rates of link and CPU for experts that a device posts, rounded so that runs on one machine agree.

    Chooses the team's threads first, if this process has not done that yet.

    Args:
        experts: of a layer.
        dtype: of x.

    Raises KernelError: the CPU does not compute them; says why.
    """
    pages = [page for page in experts.pages.pages if page is not None]
    nbytes = pages[0].nbytes
    team = shared_team(lambda counts: fastest(lambda team: 1 / _posted_seconds(experts, dtype, team)[1], counts))
    link = _fetched(pages, device)
    one, all_ = _posted_seconds(experts, dtype, team)
    copied = 1.5 * TURNS * (one + all_) * link  # for longer than the posts take
    copying = list(itertools.islice(itertools.cycle(pages), int(copied / nbytes) + 1))
    with copying_pages(copying, copied, device) as link_now:
        one, all_ = _posted_seconds(experts, dtype, team)
        link = min(link, link_now())
    more = experts.k - 1
    each = (all_ - one) / more if more and all_ > one else all_ / experts.k
    call_s = 1 / rounded(1 / (max(0.0, one - each) + ROUND_TRIP_S))
    return HostRates(rounded(link), rounded(nbytes / each), call_s=call_s)


def _posted_seconds(experts: HostedExperts, dtype: torch.dtype, team: HostedTeam) -> tuple[float, float]:
    """Seconds of posts of one token that name one expert, and `k`: never those that caches still have."""
    places, turns = experts.places(1, dtype), itertools.cycle(range(experts.pages.experts))
    with posting(team, places.end) as (box, room, ask):
        entry = team.experts(box, experts, 1, dtype)
        ids = room[places.ids : places.ids + 8 * experts.k].view(torch.int64)

        def median(count: int) -> float:
            spans = []
            for _ in range(TURNS):
                ids.fill_(-1)
                ids[:count] = torch.tensor(list(itertools.islice(turns, count)), dtype=torch.int64, device="cpu")
                spans.append(ask(entry))
            return statistics.median(spans[2:])

        return median(1), median(experts.k)


def _fetched(pages: Sequence[Tensor], device: torch.device) -> float:
    """Bytes/s at which the device fetches pages by itself."""
    nbytes = pages[0].nbytes
    addresses = torch.tensor([page.data_ptr() for page in pages], dtype=torch.int64, device=device)
    count = max(1, min(len(pages), _LINK_BYTES // nbytes))
    turns = torch.arange(len(pages), dtype=torch.int64, device=device).split(count)[: len(pages) // count]
    rates = []
    for some in itertools.islice(itertools.cycle(turns), TURNS):
        seconds = device_seconds(lambda some=some: gather_pages(addresses, some, nbytes), device)
        rates.append(count * nbytes / seconds)
    return statistics.median(rates[2:])


def _compute(host: HostLayer, threads: tuple[ExpertTeam, Crew], pages: Mapping[int, Tensor], tokens: int) -> None:
    """Compute some experts for some tokens, like a pass."""
    handle, (team, crew) = host.handle, threads
    x = torch.zeros(tokens, handle.spec.sites[0].shape[1], dtype=handle.dtype, device="cpu")
    operands = Operands(x, torch.tensor([list(pages)] * tokens, dtype=torch.int64, device="cpu"))
    product = host.product(operands, pages, tokens)
    if product is None:
        _in_thread(crew, lambda: host.to_send(operands, pages))
    else:
        team.finish(team.post(None, product))


def _in_thread(crew: Crew, call: Callable[[], object]) -> None:
    """Call a function in the crew's thread and wait. Raises its exception."""
    begun, done, failed = allocate_lock(), allocate_lock(), []
    done.acquire()

    def run() -> None:
        if not begun.acquire(blocking=False):
            return
        try:
            call()
        except Exception as error:  # noqa: BLE001 - raised below
            failed.append(error)
        finally:
            done.release()

    crew.give(run)
    while not done.acquire(timeout=1.0):
        run()  # where no thread could be started
    if failed:
        raise failed[0]


def _copy_seconds(device: torch.device, views: Mapping[int, Tensor], groups: "itertools.cycle[list[int]]") -> float:
    """Seconds to copy a group's pages to the computing device."""
    there = [torch.empty_like(views[expert], device=device) for expert in next(groups)]

    def copy() -> None:
        for expert, page in zip(next(groups), there, strict=True):
            page.copy_(views[expert], non_blocking=True)
        _wait_for(device)

    copy()
    return _median(copy)


def _host_seconds(host: HostLayer) -> float:
    """Seconds of host overhead: its decisions, and launching a layer's kernels individually."""
    handle = host.handle
    x = torch.zeros(1, handle.spec.sites[0].shape[1], dtype=handle.dtype, device=handle.device)
    ids = torch.arange(handle.spec.top_k, dtype=torch.int64, device=handle.device)[None]

    def decide() -> None:
        keys = handle.keys_of(list(Operands.of(x, ids).pairs(handle.spec.experts)), "full")
        missing_worth(handle.stack, keys)
        lower = LowerLease(handle.stack, keys, looks=True)
        lower.begin()
        lower.end()

    def launch() -> None:
        for _ in range(OPERATORS):
            torch.add(x, x)

    seconds = _median(decide) + _median(launch)
    _wait_for(handle.device)
    return seconds


def _wait_for(device: torch.device) -> None:
    if accelerator.has_streams(device):
        accelerator.current_stream(device).synchronize()


def _median(run: Callable[[], object]) -> float:
    """Return the median of the seconds of some runs."""
    spans = []
    for _ in range(_TURNS):
        start = time.perf_counter()
        run()
        spans.append(time.perf_counter() - start)
    return statistics.median(spans)
