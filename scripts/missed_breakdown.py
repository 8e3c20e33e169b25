"""Where a layer of experts spends the host's time while the CPU computes its missed experts, in microseconds a layer.

    with breakdown() as spans:
        ...                  # passes
    spans.row(layers=48, tokens=128)

Functions of vbrt's are timed by their wall clock, in the thread that runs the model. `experts_decode.py --breakdown`
prints it for each way of `experts.miss`.
"""

import contextlib
import functools
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch  # after the checkout is on the path

from vbrt.kernels.cpu.expert_team import ExpertTeam
from vbrt.layers.experts import cpu_experts, expert_gradients, experts_handle, kernels_product, run_experts
from vbrt.layers.experts.missed_experts import MissedExperts
from vbrt.tiers.stack.host_lease import LowerLease
from vbrt.tiers.stack.mover import Mover

__all__ = ["Spans", "breakdown"]

#: what is timed: the name of its line, whose attribute, which
TIMED = (
    ("layer, in all", expert_gradients, "run_experts"),
    ("waits for x and ids", cpu_experts.Operands, "of"),
    ("decides and posts", MissedExperts, "begin"),
    (". of that the lower lease", LowerLease, "begin"),
    (". of that the post", ExpertTeam, "post"),
    ("leases, and launches on the GPU", run_experts, "_beside_host"),
    (". of that leasing and releasing", experts_handle.ExpertsHandle, "lease"),
    (". of that the GPU's experts", kernels_product.KernelsProduct, "_rows"),
    (". of that waiting for the CPU", cpu_experts.TeamWork, "end"),
    (". of that waiting for a thread of Python's", cpu_experts.HostWork, "rows"),
    (". of that the weighted sum", kernels_product.KernelsProduct, "result"),
    ("pages staged by threads", Mover, "_load_ahead"),
)
BEGUN, DONE = "the team: from the post until a thread has it", "the team: from the post until it is done"
#: small copies, by the GPU's clock: a few microseconds, unless they wait behind pages on the link
CROSSING = (
    ("on the GPU: ids over the link", cpu_experts.Operands, "sent"),
    ("on the GPU: rows over the link", cpu_experts.TeamWork, "sent"),
)
LINES = (*(line for line, *_ in TIMED), BEGUN, DONE, *(line for line, *_ in CROSSING))


class Spans:
    """Seconds and calls by line."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.calls: dict[str, int] = defaultdict(int)
        self._posted_ns = 0
        self._crossings: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    def add(self, line: str, seconds: float) -> None:
        self.seconds[line] += seconds
        self.calls[line] += 1

    def forget(self) -> None:
        """Begin anew."""
        self.seconds.clear()
        self.calls.clear()
        self._crossings.clear()

    def row(self, layers: int, tokens: int) -> dict[str, float]:
        """Microseconds a layer by line, and of pages staged by threads their number a layer. The GPU must be done."""
        for line, begun, done in self._crossings:
            self.add(line, begun.elapsed_time(done) / 1e3)
        self._crossings.clear()
        lines = [line for line in LINES if line in self.seconds]
        found = {line: self.seconds[line] / (layers * tokens) * 1e6 for line in lines}
        return found | {f"{line}, calls": n / (layers * tokens) for line, n in self.calls.items() if "staged" in line}

    def timed(self, line: str, function: Any) -> Any:
        """A function that adds its time to a line."""

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.add(line, time.perf_counter() - start)

        return run

    def crossed(self, line: str, function: Any) -> Any:
        """A function whose copies add to a line by the GPU's clock, where there is one."""

        @functools.wraps(function)
        def run(*args: Any) -> Any:
            if not torch.cuda.is_available():
                return function(*args)
            begun, done = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begun.record()
            result = function(*args)
            done.record()
            self._crossings.append((line, begun, done))
            return result

        return run

    def entered(self, line: str, function: Any) -> Any:
        """A context manager whose ends, not its block, add to a line."""

        @contextlib.contextmanager
        def run(*args: Any, **kwargs: Any) -> Iterator[Any]:
            manager, start = function(*args, **kwargs), time.perf_counter()
            with contextlib.ExitStack() as stack:
                given = stack.enter_context(manager)
                self.add(line, time.perf_counter() - start)
                try:
                    yield given
                finally:
                    start = time.perf_counter()
            self.add(line, time.perf_counter() - start)

        return run

    def posted(self, function: Any) -> Any:
        """`ExpertTeam.post`, with the moment at which it returns."""

        @functools.wraps(function)
        def run(team: ExpertTeam, *args: Any) -> int:
            number = function(team, *args)
            self._posted_ns = time.monotonic_ns()
            return number

        return run

    def finished(self, function: Any) -> Any:
        """`ExpertTeam.finish`, with when the job began and ended."""

        @functools.wraps(function)
        def run(team: ExpertTeam, number: int) -> None:
            function(team, number)
            begun, done = team.span()
            first = max(0, begun - self._posted_ns) if begun else 0
            self.add(BEGUN, first / 1e9)
            self.add(DONE, max(0, (done or time.monotonic_ns()) - self._posted_ns) / 1e9)

        return run


@contextlib.contextmanager
def breakdown() -> Iterator[Spans]:
    """Time the functions of TIMED inside the block."""
    spans, before = Spans(), []

    def put(owner: Any, name: str, value: Any) -> None:
        before.append((owner, name, vars(owner)[name]))
        setattr(owner, name, value)

    try:
        for line, owner, name in TIMED:
            plain = vars(owner)[name]
            if name == "lease":
                put(owner, name, spans.entered(line, plain))
            elif isinstance(plain, classmethod):
                put(owner, name, classmethod(spans.timed(line, plain.__func__)))
            else:
                put(owner, name, spans.timed(line, plain))
        for line, owner, name in CROSSING:
            put(owner, name, spans.crossed(line, vars(owner)[name]))
        put(ExpertTeam, "post", spans.posted(ExpertTeam.post))
        put(ExpertTeam, "finish", spans.finished(ExpertTeam.finish))
        yield spans
    finally:
        for owner, name, plain in reversed(before):
            setattr(owner, name, plain)
