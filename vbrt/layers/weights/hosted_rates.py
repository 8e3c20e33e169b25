"""Measured rates of link and CPU for hosted weights, on a model's own pages, with the threads of its passes."""

import contextlib
import ctypes
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vbrt.errors import KernelError
from vbrt.host import accelerator
from vbrt.kernels.cpu.hosted import ANSWER, ENTRY_BITS, POST, HostedTeam, Mailbox, X
from vbrt.kernels.cuda import devices
from vbrt.layers.weights.encoded_weight import EncodedWeight
from vbrt.layers.weights.hosted_weights import held_at_home, part_of, results_at, shared_team
from vbrt.residency.hosted_share import BETWEEN_S, HostRates

__all__ = [
    "ROUND_TRIP_S",
    "TURNS",
    "copying_pages",
    "device_seconds",
    "fastest",
    "line_through",
    "measured_rates",
    "posting",
    "resident_seconds",
    "rounded",
]

_MOST_BYTES = 512 << 20  # of pages that are read to measure: more than caches hold
TURNS = 24  # products, and copies, of each measurement; the median counts
#: a GPU kernel's post and its wait while the link is busy, beside the CPU's time for the product; 5 µs on an idle link
ROUND_TRIP_S = 20e-6
_FEW_BYTES = 64 << 20  # of the smallest pages
_NOTED_BYTES = 16 << 20  # of copies between two events, which would slow copies of a few MB down
_STEPS = 8  # of rates in a factor of two
_PATIENCE_S = 10.0
_AS_FAST = 0.97
_LAUNCH_S = 4e-6  # a product of few tokens on a GPU, beside the time for its bytes


def measured_rates(weights: Sequence[EncodedWeight], tokens: int) -> HostRates:
    """Return the rates of link and CPU, rounded to an eighth of a factor of two, so that runs on one machine agree.

    Chooses the team's threads first, if this process has not done that yet.

    Args:
        tokens: of a product.

    Raises KernelError: the CPU computes with none of the weights; says why.
    """
    by_size = sorted((weight for weight in weights if weight.pages), key=lambda weight: weight.pages[0].nbytes)
    large, small = list[_Held](), list[_Held]()
    try:
        _hold(large, reversed(by_size), _MOST_BYTES)
        _hold(small, by_size, _FEW_BYTES)
        if not large:
            raise KernelError("none of their pages is at home in page-locked host memory")
        team = shared_team(lambda counts: fastest(lambda team: _computed(large, team, 1), counts))
        return _rates(large, small, team, tokens)
    finally:
        for held in (*large, *small):
            held.lease.end()


class _Held(NamedTuple):
    weight: EncodedWeight
    page: Tensor
    lease: Any


def _hold(held: list[_Held], weights: Iterable[EncodedWeight], most_bytes: int) -> None:
    """Hold so many bytes of pages at home, or one page more."""
    nbytes = 0
    for weight in weights:
        lease = held_at_home(weight) if nbytes < most_bytes else None
        if lease is not None:
            (page,) = lease.wait().values()
            held.append(_Held(weight, page, lease))
            nbytes += page.nbytes


def fastest(computed: Callable[[HostedTeam], float], counts: Sequence[int]) -> HostedTeam:
    """Return a team of the fewest threads that are about as fast as the best of these counts: siblings on one core and
    slow cores may add nothing, where the memory is the limit.

    Args:
        computed: bytes/s of a team.
    """
    rates: dict[int, float] = {}
    for count in counts:
        team = HostedTeam(count)
        rates[count] = computed(team)
        team.stop()
    return HostedTeam(min(count for count, rate in rates.items() if rate >= _AS_FAST * max(rates.values())))


def resident_seconds(sizes: Sequence[int], device: torch.device) -> float:
    """Return about how long products of few tokens take on a GPU with resident pages of these sizes."""
    return sum(sizes) / (devices.gpu(device.index or 0).bytes_us * 1e6) + len(sizes) * _LAUNCH_S


def _rates(large: Sequence[_Held], small: Sequence[_Held], team: HostedTeam, tokens: int) -> HostRates:
    """From products with large pages and with small ones, which differ by what a call costs."""
    alone = _computed(large, team, 1)
    more = 0.0 if tokens < 2 else max(0.0, alone / _computed(large, team, tokens) - 1) / (tokens - 1)
    device = large[0].weight.device
    link = _copied(large, device)
    nbytes = 2 * TURNS * large[0].page.nbytes / alone * link  # for longer than the products take
    copying = [
        held.page for held in itertools.islice(itertools.cycle(large), math.ceil(nbytes / large[-1].page.nbytes))
    ]
    with copying_pages(copying, nbytes, device) as copied:
        cpu = _computed(large, team, 1)
        try:
            of_small = _computed(small, team, 1)
        except KernelError:  # the CPU computes with none of the small ones, so what a call costs is not known
            small, of_small = large, cpu
        link = min(link, copied())
    most, least = (statistics.median(held.page.nbytes for held in some) for some in (large, small))
    cpu, call_s = line_through((most, most / cpu), (least, least / of_small))
    return HostRates(rounded(link), rounded(cpu), more, 1 / rounded(1 / (call_s + ROUND_TRIP_S)), BETWEEN_S)


def line_through(large: tuple[float, float], small: tuple[float, float]) -> tuple[float, float]:
    """Return bytes/s and the seconds of a call, by the bytes and seconds of a large product and a small one."""
    (most, long_s), (least, short_s) = large, small
    if most < 2 * least or long_s <= short_s:
        return most / long_s, 0.0
    rate = (most - least) / (long_s - short_s)
    call_s = long_s - most / rate
    return (rate, call_s) if call_s > 0 else (most / long_s, 0.0)


@contextlib.contextmanager
def copying_pages(pages: Sequence[Tensor], nbytes: float, device: torch.device) -> Iterator[Callable[[], float]]:
    """Copy so many bytes of pages to the device while the block runs; gives the bytes/s of the copies that have ended,
    infinite for too few."""
    stream, there, copies = accelerator.Stream(device), torch.empty_like(pages[0], device=device), []
    copied = noted = 0
    with accelerator.stream(stream):
        for page in pages:
            there[: page.nbytes].copy_(page, non_blocking=True)
            copied += page.nbytes
            if copied - noted >= _NOTED_BYTES:
                copies.append((stream.record_event(accelerator.Event(enable_timing=True)), copied - noted))
                noted = copied
            if copied >= nbytes:
                break

    def rate() -> float:
        ended = [copy for copy in copies if copy[0].query()]
        if len(ended) < 3:
            return math.inf
        (first, _), *others = ended
        return 1e3 * sum(size for _, size in others) / first.elapsed_time(others[-1][0])

    try:
        yield rate
    finally:
        accelerator.synchronize(device)


def rounded(rate: float) -> float:
    return 2.0 ** (round(math.log2(rate) * _STEPS) / _STEPS)


def _computed(pages: Sequence[_Held], team: HostedTeam, tokens: int) -> float:
    """Return the bytes/s of products of so many tokens: this thread posts like a GPU. Raises KernelError."""
    sizes = [sum(weight.spec.shape) * tokens * weight.dtype.itemsize for weight, *_ in pages]
    with posting(team, X + max(sizes)) as (handle, _, ask):
        entries, why = [], ""
        for weight, page, _ in pages:
            part = part_of(weight, page, results_at(weight, tokens))
            try:
                entry = team.entry(handle, [part], tokens, weight.dtype)
            except KernelError as error:
                why = str(error)
                continue
            entries.append((entry, page.nbytes))
        if not entries:
            raise KernelError(why)
        round_ = itertools.cycle(entries)
        turns = (next(round_) for _ in range(TURNS + 2))
        return statistics.median([nbytes / ask(entry) for entry, nbytes in turns][2:])


@contextlib.contextmanager
def posting(team: HostedTeam, nbytes: int) -> Iterator[tuple[Mailbox, Tensor, Callable[[int], float]]]:
    """A mailbox in which this thread posts like a GPU: the mailbox, its memory, and a function that posts an entry and
    returns the seconds until it is answered. That raises KernelError."""
    room = torch.zeros(nbytes + 64, dtype=torch.uint8, device="cpu")
    room = room[-room.data_ptr() % 64 :]
    handle, numbers = team.attach(room), itertools.count(1)
    post, answer = (ctypes.c_int64.from_address(room.data_ptr() + at) for at in (POST, ANSWER))

    def ask(entry: int) -> float:
        number = next(numbers)
        team.expect(handle, 1)
        begun = time.perf_counter()
        post.value = number << ENTRY_BITS | entry
        while answer.value != number:
            if time.perf_counter() - begun > _PATIENCE_S:
                raise KernelError(f"a product took longer than {_PATIENCE_S:g} s")
        return time.perf_counter() - begun

    try:
        yield handle, room, ask
    finally:
        team.detach(handle)


def _copied(pages: Sequence[_Held], device: torch.device) -> float:
    """Return the bytes/s of copies to the device."""
    there = torch.empty(max(held.page.nbytes for held in pages), dtype=torch.uint8, device=device)
    round_, rates = itertools.cycle([held.page for held in pages]), []
    for _ in range(TURNS):
        page = next(round_)
        seconds = device_seconds(lambda page=page: there[: page.nbytes].copy_(page, non_blocking=True), device)
        rates.append(page.nbytes / seconds)
    return statistics.median(rates[2:])


def device_seconds(launch: Callable[[], object], device: torch.device) -> float:
    """Return the seconds that launches take on the current stream of the device, by events; synchronizes."""
    begun, ended = (accelerator.Event(enable_timing=True) for _ in range(2))
    stream = accelerator.current_stream(device)
    begun.record(stream)
    launch()
    ended.record(stream)
    accelerator.synchronize(device)
    return begun.elapsed_time(ended) / 1e3
