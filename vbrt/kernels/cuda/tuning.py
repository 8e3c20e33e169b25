"""Autotuning of launch configurations on this machine, for a model's shapes. Optional: nothing is searched implicitly.

    vb = vbrt.wrap(model)
    vbrt.tune(vb.plan)             # seconds per shape; cached for later processes
    vbrt tune MODEL_DIR            # the same on the command line, without the weights

Every family of kernels with a choice (`tuning_families`) uses its results from then on, see `tuned_configs`;
`launch_table` remains for all other shapes, numbers of tokens and GPUs. All configurations compute the same sums in
different order.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vbrt.errors import KernelError
from vbrt.kernels.cuda import devices, tuned_configs
from vbrt.kernels.cuda.tuning_families import NEEDS, Case, cases_of
from vbrt.report.progress import Progress
from vbrt.residency.plan import Plan

__all__ = ["TOKENS", "Found", "cases", "check", "graph_us", "replays_us", "tune"]

#: numbers of tokens that are searched by default: of a step, of speculation or small batches, and of prompts
TOKENS = (1, 16, 64, 256)
_MOST_TOKENS = 4096
_GAIN = 0.97  # of the table's time; smaller differences are noise


@dataclass(frozen=True, slots=True)
class Found:
    """Result of a search: the table's configuration and the fastest one, possibly the same, with microseconds."""

    case: Case
    table: Any
    table_us: float
    launch: Any
    us: float


def check(tokens: Sequence[int], device: int) -> None:
    """Raises KernelError for unsupported numbers of tokens or devices."""
    tokens = tuple(tokens) if isinstance(tokens, Sequence) else (tokens,)
    if not tokens or not all(isinstance(m, int) and 0 < m <= _MOST_TOKENS for m in tokens):
        raise KernelError(f"tune: tokens = {tokens}; expected numbers from 1 to {_MOST_TOKENS}")
    if not torch.cuda.is_available():
        raise KernelError("tune: no CUDA device; expected one from sm_80 on, the kernels run nowhere else")
    count = torch.cuda.device_count()
    if not isinstance(device, int) or not 0 <= device < count:
        raise KernelError(f"tune: device = {device}; expected 0 to {count - 1}, the CUDA devices of this machine")
    if why := devices.refusal(torch.device("cuda", device), NEEDS):
        raise KernelError(f"tune: the kernels cannot run on device {device}: {why}")


def cases(plan: Plan, *, tokens: Sequence[int] = TOKENS, device: int = 0) -> list[Case]:
    """Searches for a plan, by family. Raises KernelError if there are none."""
    found = list(cases_of(plan, tokens, device))
    if not found:
        raise KernelError(
            f"tune: no layer of this plan runs on a kernel with a choice of launches at {tuple(tokens)} tokens; "
            'expected a 4-bit or 8-bit weights.format, weights.fine "none" and mode "infer"'
        )
    return found


def tune(
    plan: Plan, *, tokens: Sequence[int] = TOKENS, device: int = 0, report: Callable[[Found], object] | None = None
) -> Path:
    """Time configurations for a plan's layers on an idle CUDA device, and cache the fastest.

    Returns the path of the file.

    tokens: numbers of tokens, each representing those down to half of it, 1 to 8 together; the first one decides.
    report: called with each result once it is in the file, so an interrupted search keeps its results.
    Raises KernelError for unsupported devices and numbers of tokens, and for a plan without layers on kernels with a
    choice; VBError if the file cannot be written.
    """
    check(tokens, device)
    todo = cases(plan, tokens=tokens, device=device)
    known, identity = dict(tuned_configs.tuned(device)), tuned_configs.identity(device)
    path = tuned_configs.write(known, identity)  # fail before timing if the folder is not writable
    with Progress("tuning", len(todo), unit="shapes") as work:
        for case in todo:
            work.at(f"{case.family} {case.n} x {case.k}, {case.tokens} token{'s' if case.tokens > 1 else ''}")
            result = _fastest(case, _timer(case, device))
            known[case.key] = result.launch
            tuned_configs.write(known, identity)
            work.done()
            if report is not None:
                with work.paused():  # it may write to the terminal
                    report(result)
    return path


def _fastest(case: Case, us: Callable[[Any], float]) -> Found:
    """The table's configuration, unless another is faster by more than noise."""
    table_us = us(case.table)
    best, best_us, limit = case.table, table_us, table_us * _GAIN
    for launch in case.candidates:
        taken = us(launch)
        if taken < limit:
            best, best_us, limit = launch, taken, taken
    return Found(case, case.table, table_us, best, best_us)


def _timer(case: Case, device: int) -> Callable[[Any], float]:
    """Return a function for the microseconds of a case's product with a configuration."""
    with torch.no_grad(), torch.cuda.device(device):
        calls, count = case.calls()

    def us(launch: Any) -> float:
        with torch.no_grad(), torch.cuda.device(device), tuned_configs.trying(device, case.key, launch):
            return graph_us(calls)[0] / count

    return us


def graph_us(*sets: Callable[[], None], repeats: int = 9) -> list[float]:
    """Median replay time of a graph of each set of calls."""
    return replays_us([_recorded(calls) for calls in sets], repeats=repeats)


def replays_us(graphs: Sequence[torch.cuda.CUDAGraph], *, repeats: int = 9) -> list[float]:
    """Median replay time of each graph. Graphs are interleaved, for equal clocks and temperature."""
    times: list[list[float]] = [[] for _ in graphs]
    for _ in range(repeats):
        for graph, own in zip(graphs, times, strict=True):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            own.append(start.elapsed_time(end) * 1e3)
    return [sorted(own)[repeats // 2] for own in times]


def _recorded(calls: Callable[[], None]) -> torch.cuda.CUDAGraph:
    calls()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        calls()
    return graph
