"""What the parts of `scripts/gpu_check.py` share: times of graphs and of the host, weights as pages hold them, rows."""

import importlib.metadata
import platform
import subprocess
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

from vbrt.formats import WeightPlanes, get_format
from vbrt.kernels import resolve
from vbrt.kernels.cuda.e2m1 import linear as e2m1_linear
from vbrt.kernels.cuda.tuning import graph_us

ROOT = Path(__file__).resolve().parent.parent
Shape = tuple[int, int]  # (K, N)
ROTATED_BYTES = 300 << 20
CUDA = torch.device("cuda")
BF16 = torch.bfloat16


def side_by_side(*sets: Sequence[Callable[[], object]], repeats: int = 15) -> list[float]:
    """For each set of calls the median time of one, in a graph that runs the set; the graphs take turns."""

    def all_of(calls: Sequence[Callable[[], object]]) -> None:
        for call in calls:
            call()

    taken = graph_us(*(partial(all_of, calls) for calls in sets), repeats=repeats)
    return [us / len(calls) for us, calls in zip(taken, sets, strict=True)]


def host_us(call: Callable[[], object], calls: int = 500) -> float:
    """Median host time of an asynchronous call, the GPU never being waited for."""
    times = []
    for _ in range(9):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls // 9):
            call()
        times.append((time.perf_counter() - start) / (calls // 9) * 1e6)
    torch.cuda.synchronize()
    return sorted(times)[len(times) // 2]


def copy_tb_s() -> float:
    """Bytes read and written a second by a kernel that copies: the roofline of this GPU's memory."""
    source = torch.randn(1 << 29, dtype=BF16, device=CUDA)
    target = torch.empty_like(source)
    (us,) = side_by_side([partial(torch.neg, source, out=target)])
    return 4 * source.numel() / us / 1e6


# -- weights ----------------------------------------------------------------------------------------------------------


def dense_weights(k: int, n: int) -> list[torch.Tensor]:
    copies = max(2, min(8, ROTATED_BYTES // (k * n // 2) + 1))
    return [torch.randn(n, k, device=CUDA, dtype=BF16) * 0.02 for _ in range(copies)]


def planes_of(format: str, weight: torch.Tensor) -> WeightPlanes:
    """As a page holds them."""
    shape = tuple(weight.shape)
    coarse = resolve("codec", "auto", CUDA, format).run(get_format(format)).encode(weight)
    packing = resolve("linear", "auto", CUDA, format).page_order(format)
    return WeightPlanes(format, shape, BF16, packing.pack(coarse, shape) if packing else coarse)


def plain(planes: WeightPlanes) -> dict[str, torch.Tensor]:
    packing = e2m1_linear.packing(planes.format)
    return packing.unpack(planes.coarse, planes.shape) if packing else planes.coarse


def error(y: torch.Tensor, want: torch.Tensor) -> float:
    return float((y.double() - want).norm() / want.norm())


def say(row: dict[str, object]) -> None:
    print(
        "  ".join(f"{name} {value:.2e}" if "error" in name else f"{name} {value}" for name, value in row.items()),
        flush=True,
    )


def machine() -> dict[str, object]:
    asked = ["git", "-c", "safe.directory=*", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=False)
    versions = {}
    for package in ("torch", "triton", "transformers", "bitsandbytes", "torchao", "gemlite"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    return {
        "gpu": torch.cuda.get_device_name(),
        "capability": list(torch.cuda.get_device_capability()),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "commit": commit.stdout.strip() or None,
        "versions": versions,
        "copy_tb_s": round(copy_tb_s(), 2),
    }
