"""Launch configurations found on this machine, for the shapes of a model. Optional: nothing searches by itself.

    vb = vbrt.wrap(model)
    vbrt.tune(vb.plan)             # seconds a shape; kept for later processes

The kernel for few tokens takes what is found from then on; the tables of `launch_table` stand for all other shapes,
kernels and GPUs. The file is named after the GPU, Triton's version and `KERNELS`; one that cannot be read or does not
belong here is announced and ignored. Every configuration computes the same sums in another order.
"""

import functools
import json
import os
import re
import tempfile
import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vbrt.errors import KernelError
from vbrt.kernels import fp4_tiles
from vbrt.kernels.launch_table import Launch, launch_for
from vbrt.plan import Plan

__all__ = ["CANDIDATES", "KERNELS", "graph_us", "tune", "tuned", "tuning_path"]

#: raised with each change of a kernel that can change which configuration is the fastest
KERNELS = 1
CANDIDATES = tuple(Launch(r, wk, ahead) for r in (1, 2, 4) for wk in (4, 8, 16) for ahead in (True, False))
_BEYOND_CACHE = 300 << 20  # bytes of weights, so that they come from memory
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
        return _parsed(json.loads(path.read_text()), identity)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        what = f"{type(error).__name__}: {error}"
        warnings.warn(f"{path} is ignored ({what}); delete it, or call vbrt.tune again", stacklevel=2)
        return {}


def tune(plan: Plan, *, tokens: Sequence[int] = (1, 16), device: int = 0) -> Path:
    """Time the configurations for the layers of a plan on an idle CUDA device and keep the fastest; the file's path.

    tokens: numbers of tokens, each standing for its group of 1 to 8 or 9 to 16.
    Raises KernelError without a device that the kernels serve, or for numbers of tokens that they do not.
    """
    from vbrt.kernels import fp4_linear

    if not torch.cuda.is_available() or fp4_linear.major(device) < fp4_linear.MIN_MAJOR:
        raise KernelError("tune: no CUDA device from sm_80 on; expected one, the kernels run nowhere else")
    if not all(0 < m <= 16 for m in tokens):
        raise KernelError(f"tune: tokens = {tuple(tokens)}; expected numbers from 1 to 16")
    found = dict(tuned(device))
    shapes = sorted({(swap.shape, swap.format) for swap in plan.swaps if swap.format in fp4_tiles.FORMATS})
    with torch.no_grad(), torch.cuda.device(device):
        for (n, k), format in shapes:
            weights = _weights(n, k, format)
            for m in tokens:
                rows, columns, _ = weights[0][0].shape
                key = -(-m // 8), rows, columns
                table = launch_for(fp4_linear.major(device), m, rows, columns)
                found[key] = _fastest(table, _timer(m, n, k, format, weights))
    path = _write(found, _identity(device))
    tuned.cache_clear()
    return path


def _fastest(table: Launch, us: Callable[[Launch], float]) -> Launch:
    """The table's own, unless another is faster by more than noise."""
    best, limit = table, us(table) * _GAIN
    for launch in CANDIDATES:
        taken = us(launch)
        if taken < limit:
            best, limit = launch, taken
    return best


def _weights(n: int, k: int, format: str) -> list[tuple[Tensor, Tensor]]:
    """Tiles of random codes and scale 1, enough of them to pass the second-level cache."""
    layout = {field.name: field.shape for field in fp4_tiles.tile_layout(format, (n, k)).fields}
    shape = layout[fp4_tiles.TILES]
    copies = 1 + _BEYOND_CACHE // (4 * shape[0] * shape[1] * shape[2])
    one = torch.ones((), device="cuda")
    draw = partial(torch.randint, 0, 0x38383838, shape, dtype=torch.int32, device="cuda")
    return [(draw(), one) for _ in range(min(64, copies))]


def _timer(m: int, n: int, k: int, format: str, weights: list[tuple[Tensor, Tensor]]) -> Callable[[Launch], float]:
    from vbrt.kernels import fp4_linear

    x_MK = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    y_MN = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)

    def us(launch: Launch) -> float:
        def calls() -> None:
            for tiles, scale in weights:
                fp4_linear.launch(x_MK, tiles, scale, None, y_MN, format, "none", launch)

        return graph_us(calls) / len(weights)

    return us


def graph_us(calls: Callable[[], None], repeats: int = 9) -> float:
    """Median time of a graph that records the calls."""
    calls()
    torch.cuda.synchronize()
    graph, times = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        calls()
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return sorted(times)[repeats // 2]


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
    """In place of what was there, at once."""
    path = tuning_path(identity["gpu"], identity["triton"])
    path.parent.mkdir(parents=True, exist_ok=True)
    rows: Iterable[list[Any]] = ([*key, *launch] for key, launch in sorted(launches.items()))
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=path.name, delete=False) as file:
        file.write(json.dumps({**identity, "launches": list(rows)}, indent=1) + "\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(file.name, path)
    return path
