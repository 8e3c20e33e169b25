"""Autotuning of launch configurations on this machine, for a model's shapes. Optional: nothing is searched implicitly.

    vb = vbrt.wrap(model)
    vbrt.tune(vb.plan)             # seconds per shape; cached for later processes
    vbrt tune MODEL_DIR            # the same on the command line, without the weights

The small-batch kernel uses the results from then on, see `tuned_configs`; `launch_table` remains for all other shapes,
kernels and GPUs. All configurations compute the same sums in different order.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from vbrt.errors import KernelError
from vbrt.kernels.cuda import devices
from vbrt.kernels.cuda.e2m1 import launches, tuned_configs
from vbrt.kernels.cuda.e2m1.linear import NEEDS
from vbrt.kernels.cuda.e2m1.tiles import FORMATS, TiledWeight, tile_shape
from vbrt.kernels.cuda.e2m1.tuned_configs import CANDIDATES, tuned, tuning_file
from vbrt.kernels.cuda.launch_table import Launch, launch_for, wide_for
from vbrt.report.progress import Progress
from vbrt.residency.plan import Plan

__all__ = ["Case", "Found", "cases", "check", "graph_us", "replays_us", "tune", "tuned", "tuning_file"]

_BEYOND_CACHE = 300 << 20  # bytes of weights, to exceed the cache
_GAIN = 0.97  # of the table's time; smaller differences are noise


@dataclass(frozen=True, slots=True)
class Case:
    """A search: a weight (n, k) in a format, and a number of tokens."""

    n: int
    k: int
    format: str
    tokens: int

    @property
    def key(self) -> tuple[int, int, int]:
        """Key in the file: (groups of 8 tokens, row tiles, columns)."""
        rows, columns, _ = tile_shape(self.format, (self.n, self.k))
        return -(-self.tokens // 8), rows, columns


@dataclass(frozen=True, slots=True)
class Found:
    """Result of a search: the table's configuration and the fastest one, possibly the same, with microseconds."""

    case: Case
    table: Launch
    table_us: float
    launch: Launch
    us: float


def check(tokens: Sequence[int], device: int) -> None:
    """Raises KernelError for unsupported numbers of tokens or devices."""
    tokens = tuple(tokens) if isinstance(tokens, Sequence) else (tokens,)
    if not tokens or not all(isinstance(m, int) and 0 < m <= 16 for m in tokens):
        raise KernelError(f"tune: tokens = {tokens}; expected numbers from 1 to 16")
    if not torch.cuda.is_available():
        raise KernelError("tune: no CUDA device; expected one from sm_80 on, the kernels run nowhere else")
    count = torch.cuda.device_count()
    if not isinstance(device, int) or not 0 <= device < count:
        raise KernelError(f"tune: device = {device}; expected 0 to {count - 1}, the CUDA devices of this machine")
    if why := devices.refusal(torch.device("cuda", device), NEEDS):
        raise KernelError(f"tune: the kernels cannot run on device {device}: {why}")


def cases(plan: Plan, *, tokens: Sequence[int] = (1, 16), device: int = 0) -> list[Case]:
    """Searches for a plan: layers on the small-batch kernel. Raises KernelError if there are none."""
    major = devices.major(device)
    # training multiplies by rounded dense weights, and a fine plane is merged into one
    served = [swap for swap in plan.swaps if swap.format in FORMATS and swap.fine == "none"]
    shapes = sorted({(swap.shape, swap.format) for swap in served}) if plan.mode == "infer" else []
    every = [Case(*shape, format, m) for shape, format in shapes for m in dict.fromkeys(tokens)]
    found = [case for case in every if wide_for(major, case.tokens, *case.key[1:]) is None]
    if not found:
        raise KernelError(
            f"tune: no layer of this plan runs on the kernel for few tokens at {tuple(tokens)} tokens; "
            'expected weights.format "nvfp4" or "mxfp4", weights.fine "none" and mode "infer"'
        )
    return found


def tune(
    plan: Plan, *, tokens: Sequence[int] = (1, 16), device: int = 0, report: Callable[[Found], object] | None = None
) -> Path:
    """Time configurations for a plan's layers on an idle CUDA device, and cache the fastest.

    Returns the path of the file.

    tokens: numbers of tokens, each representing its group of 1 to 8 or 9 to 16; the last one of a group decides.
    report: called with each result once it is in the file, so an interrupted search keeps its results.
    Raises KernelError for unsupported devices and numbers of tokens, and for a plan without layers on the kernel;
    VBError if the file cannot be written.
    """
    check(tokens, device)
    todo = cases(plan, tokens=tokens, device=device)
    found, identity, gpu = dict(tuned(device)), tuned_configs.identity(device), devices.gpu(device)
    path = tuned_configs.write(found, identity)  # fail before timing if the folder is not writable
    shape, timer = None, None
    with Progress("tuning", len(todo), unit="shapes") as work:
        for case in todo:
            work.at(f"{case.n} x {case.k}, {case.tokens} token{'s' if case.tokens > 1 else ''}")
            if shape != (case.n, case.k, case.format):
                timer = None  # frees its weights before the next ones are allocated
                shape, timer = (case.n, case.k, case.format), _timer(case.n, case.k, case.format, device)
            table = launch_for("linear", gpu, case.tokens, *case.key[1:])
            result = _fastest(case, table, partial(timer, case.tokens))
            found[case.key] = result.launch
            tuned_configs.write(found, identity)
            work.done()
            if report is not None:
                with work.paused():  # it may write to the terminal
                    report(result)
    return path


def _fastest(case: Case, table: Launch, us: Callable[[Launch], float]) -> Found:
    """The table's configuration, unless another is faster by more than noise."""
    table_us = us(table)
    best, best_us, limit = table, table_us, table_us * _GAIN
    for launch in CANDIDATES:
        taken = us(launch)
        if taken < limit:
            best, best_us, limit = launch, taken, taken
    return Found(case, table, table_us, best, best_us)


def _weights(n: int, k: int, format: str) -> list[TiledWeight]:
    """Tiles of random codes and scale 1, enough of them to exceed L2."""
    shape = tile_shape(format, (n, k))
    copies = 1 + _BEYOND_CACHE // (4 * shape[0] * shape[1] * shape[2])
    one = torch.ones((), dtype=torch.float32, device="cuda")
    draw = partial(torch.randint, 0, 0x38383838, shape, dtype=torch.int32, device="cuda")
    return [TiledWeight(draw(), one, format, n, k) for _ in range(min(64, copies))]


def _timer(n: int, k: int, format: str, device: int) -> Callable[[int, Launch], float]:
    """Return a function for the microseconds of a layer with a number of tokens and a configuration."""
    with torch.cuda.device(device):
        weights = _weights(n, k, format)

    def us(tokens: int, launch: Launch) -> float:
        with torch.no_grad(), torch.cuda.device(device):
            x_MK = torch.randn(tokens, k, device="cuda", dtype=torch.bfloat16)
            y_MN = torch.empty(tokens, n, device="cuda", dtype=torch.bfloat16)

            def calls() -> None:
                for weight in weights:
                    launches.narrow(x_MK, weight, None, y_MN, "none", launch)

            return graph_us(calls)[0] / len(weights)

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
