"""Launch configurations found on this machine, for the shapes of a model. Optional: nothing searches by itself.

    vb = vbrt.wrap(model)
    vbrt.tune(vb.plan)             # seconds a shape; kept for later processes
    vbrt tune MODEL_DIR            # the same on the command line, without the weights

The kernel for few tokens takes what is found from then on; the tables of `launch_table` stand for all other shapes,
kernels and GPUs. The file is named after the GPU, Triton's version and `KERNELS`; one that cannot be read or does not
belong here is announced and ignored. Every configuration computes the same sums in another order.
"""

import functools
import json
import os
import re
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vbrt.errors import KernelError, VBError, describe_os_error
from vbrt.host.files import read_bounded, write_file
from vbrt.kernels.cuda.e2m1 import tiles as fp4_tiles
from vbrt.kernels.cuda.e2m1.launch_table import Launch, launch_for, wide_for
from vbrt.residency.plan import Plan

__all__ = [
    "CANDIDATES",
    "KERNELS",
    "Case",
    "Found",
    "cases",
    "check",
    "graph_us",
    "tune",
    "tuned",
    "tuning_file",
    "tuning_path",
]

#: raised with each change of a kernel that can change which configuration is the fastest
KERNELS = 2
_READS = ((True, True), (True, False), (False, False))
CANDIDATES = tuple(Launch(r, wk, *reads) for r in (1, 2, 4) for wk in (4, 8, 16) for reads in _READS)
_BEYOND_CACHE = 300 << 20  # bytes of weights, so that they come from memory
_MAX_BYTES = 1 << 20
_GAIN = 0.97  # of the table's time; less of a difference is noise

Launches = dict[tuple[int, int, int], Launch]  # (groups of 8 tokens, tiles of rows, columns of tiles)


def tuning_path(gpu: str, triton: str) -> Path:
    """Where the configurations for a GPU and a version of Triton are kept: below $XDG_CACHE_HOME or ~/.cache."""
    root = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not root.is_absolute():  # unset, or to be ignored, says the XDG base directory specification
        root = Path("~/.cache").expanduser()
    name = re.sub(r"[^a-z0-9.]+", "-", f"{gpu} triton {triton} v{KERNELS}".lower())
    return root / "vbrt" / "tuning" / f"{name}.json"


@functools.cache
def tuned(index: int) -> Launches:
    """What has been found for a CUDA device; empty without a file that serves."""
    identity = _identity(index)
    path = tuning_path(identity["gpu"], identity["triton"])
    try:
        return _parsed(json.loads(read_bounded(path, _MAX_BYTES).decode()), identity)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, KeyError, AttributeError, ArithmeticError, RecursionError) as error:
        what = f"{type(error).__name__}: {error}"
        warnings.warn(f"{path} is ignored ({what}); delete it, or call vbrt.tune again", stacklevel=2)
        return {}


@dataclass(frozen=True, slots=True)
class Case:
    """What is timed at once: a weight (n, k) in a format, and a number of tokens."""

    n: int
    k: int
    format: str
    tokens: int

    @property
    def key(self) -> tuple[int, int, int]:
        """(groups of 8 tokens, tiles of rows, columns of tiles)."""
        rows, columns, _ = fp4_tiles.tile_shape(self.format, (self.n, self.k))
        return -(-self.tokens // 8), rows, columns


@dataclass(frozen=True, slots=True)
class Found:
    """What a search has found: the table's configuration and the fastest, which may be the same, in microseconds."""

    case: Case
    table: Launch
    table_us: float
    launch: Launch
    us: float


def tuning_file(device: int) -> Path:
    """Where the configurations for a CUDA device are kept; the file need not be there."""
    identity = _identity(device)
    return tuning_path(identity["gpu"], identity["triton"])


def check(tokens: Sequence[int], device: int) -> None:
    """Raises KernelError for numbers of tokens or a device that `tune` cannot serve."""
    from vbrt.kernels.cuda.e2m1 import linear as fp4_linear

    if not tokens or not all(0 < m <= 16 for m in tokens):
        raise KernelError(f"tune: tokens = {tuple(tokens)}; expected numbers from 1 to 16")
    if not torch.cuda.is_available():
        raise KernelError("tune: no CUDA device; expected one from sm_80 on, the kernels run nowhere else")
    count = torch.cuda.device_count()
    if not 0 <= device < count:
        raise KernelError(f"tune: device = {device}; expected 0 to {count - 1}, the CUDA devices of this machine")
    if fp4_linear.major(device) < fp4_linear.MIN_MAJOR:
        raise KernelError(f"tune: device {device} is older than sm_80; the kernels need that or newer")
    if not fp4_linear.available():
        raise KernelError("tune: no Triton with Gluon in this Python; the kernels are written in it")


def cases(plan: Plan, *, tokens: Sequence[int] = (1, 16), device: int = 0) -> list[Case]:
    """What `tune` times for a plan, in order: what runs on the kernel for few tokens. Raises KernelError for none."""
    from vbrt.kernels.cuda.e2m1 import linear as fp4_linear

    major = fp4_linear.major(device)
    # training multiplies by rounded dense weights, and a fine plane is merged into one
    served = [swap for swap in plan.swaps if swap.format in fp4_tiles.FORMATS and swap.fine == "none"]
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
    """Time the configurations for the layers of a plan on an idle CUDA device and keep the fastest; the file's path.

    tokens: numbers of tokens, each standing for its group of 1 to 8 or 9 to 16; of two in one group the last decides.
    report: is called with each result once the file holds it, so an interrupted search keeps what it has found.
    Raises KernelError without a device that the kernels serve, for numbers of tokens that they do not, and for a plan
    without layers that they run; VBError where the file cannot be written.
    """
    from vbrt.kernels.cuda.e2m1 import linear as fp4_linear

    check(tokens, device)
    todo = cases(plan, tokens=tokens, device=device)
    found, identity, major = dict(tuned(device)), _identity(device), fp4_linear.major(device)
    path = _write(found, identity)  # a folder that cannot be written is refused before anything is timed
    shape, timer = None, None
    for case in todo:
        if shape != (case.n, case.k, case.format):
            timer = None  # its weights go before the next ones come
            shape, timer = (case.n, case.k, case.format), _timer(case.n, case.k, case.format, device)
        result = _fastest(case, launch_for(major, case.tokens, *case.key[1:]), partial(timer, case.tokens))
        found[case.key] = result.launch
        _write(found, identity)
        tuned.cache_clear()
        if report is not None:
            report(result)
    return path


def _fastest(case: Case, table: Launch, us: Callable[[Launch], float]) -> Found:
    """The table's own, unless another is faster by more than noise."""
    table_us = us(table)
    best, best_us, limit = table, table_us, table_us * _GAIN
    for launch in CANDIDATES:
        taken = us(launch)
        if taken < limit:
            best, best_us, limit = launch, taken, taken
    return Found(case, table, table_us, best, best_us)


def _weights(n: int, k: int, format: str) -> list[tuple[Tensor, Tensor]]:
    """Tiles of random codes and scale 1, enough of them to pass the second-level cache."""
    shape = fp4_tiles.tile_shape(format, (n, k))
    copies = 1 + _BEYOND_CACHE // (4 * shape[0] * shape[1] * shape[2])
    one = torch.ones((), dtype=torch.float32, device="cuda")
    draw = partial(torch.randint, 0, 0x38383838, shape, dtype=torch.int32, device="cuda")
    return [(draw(), one) for _ in range(min(64, copies))]


def _timer(n: int, k: int, format: str, device: int) -> Callable[[int, Launch], float]:
    """Microseconds of a layer for a number of tokens and a configuration."""
    from vbrt.kernels.cuda.e2m1 import linear as fp4_linear

    with torch.cuda.device(device):
        weights = _weights(n, k, format)

    def us(tokens: int, launch: Launch) -> float:
        with torch.no_grad(), torch.cuda.device(device):
            x_MK = torch.randn(tokens, k, device="cuda", dtype=torch.bfloat16)
            y_MN = torch.empty(tokens, n, device="cuda", dtype=torch.bfloat16)

            def calls() -> None:
                for tiles, scale in weights:
                    fp4_linear.launch(x_MK, tiles, scale, None, y_MN, format, "none", launch)

            return graph_us(calls)[0] / len(weights)

    return us


def graph_us(*sets: Callable[[], None], repeats: int = 9) -> list[float]:
    """Median time of a graph of each set of calls. The graphs take turns: clocks and heat are the same for all."""
    graphs, times = [_recorded(calls) for calls in sets], [[] for _ in sets]
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


# -- the file ---------------------------------------------------------------------------------------------------------


def _identity(index: int) -> dict[str, Any]:
    import triton

    return {"gpu": torch.cuda.get_device_name(index), "triton": triton.__version__, "kernels": KERNELS}


def _parsed(content: Any, identity: dict[str, Any]) -> Launches:
    """Raises ValueError or TypeError for what is not a file of this GPU, Triton and kernels."""
    for name, own in identity.items():
        if content.get(name) != own:
            raise ValueError(f"{name} = {content.get(name)!r}; expected {own!r}")
    out = {}
    for groups, rows, columns, *launch in content["launches"]:
        if Launch(*launch) not in CANDIDATES:
            raise ValueError(f"launch {launch}; expected one of {len(CANDIDATES)} that tune() tries")
        out[int(groups), int(rows), int(columns)] = Launch(*launch)
    return out


def _write(launches: Launches, identity: dict[str, Any]) -> Path:
    """In place of what was there, at once. Raises VBError where that cannot be."""
    path = tuning_path(identity["gpu"], identity["triton"])
    rows: Iterable[list[Any]] = ([*key, *launch] for key, launch in sorted(launches.items()))
    text = json.dumps({**identity, "launches": list(rows)}, indent=1) + "\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, text.encode())
    except OSError as error:
        raise VBError(
            f"{path}: cannot be written: {describe_os_error(error)}; expected a folder that can be, "
            "$XDG_CACHE_HOME names another"
        ) from error
    return path
