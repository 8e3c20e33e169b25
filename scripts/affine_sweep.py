"""Scratch: launches of the fused kernel of codes with offsets, beside nvfp4's; stops by itself after 80 s.

A cell: 64-column groups and warps, microseconds, and bytes per second relative to nvfp4's. A variant that fails prints
its error; the others go on.
"""

import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(ROOT / "scripts"))

import torch

from scripts.gpu_timing import BF16, CUDA, copy_tb_s, error, planes_of, side_by_side
from vbrt.formats import WeightPlanes, get_format
from vbrt.kernels import resolve
from vbrt.kernels.cuda import tuned_configs
from vbrt.kernels.cuda.launch_table import Launch
from vbrt.kernels.cuda.table import linear as table_linear

SHAPES = ((4096, 14336), (14336, 4096))  # (K, N)
FORMATS = ("superblock32", "zeros128-float16", "affine32-float16")
#: tokens -> (64-column groups, warps); vbrt has (4, 8) of superblocks, else (2, 8)
VARIANTS = {1: ((2, 8), (4, 8), (4, 4), (2, 16)), 16: ((2, 8), (4, 8))}
MOST_S = 80
Variant = tuple[int, int] | None


def copied(format: str, weight: torch.Tensor) -> list[WeightPlanes]:
    one = planes_of(format, weight)
    return [replace(one, coarse={name: t.clone() for name, t in one.coarse.items()}) for _ in range(5)]


def bytes_of(planes: list[WeightPlanes]) -> int:
    return sum(t.nbytes for t in planes[0].coarse.values())


def call(x: torch.Tensor, planes: WeightPlanes, variant: Variant) -> torch.Tensor:
    stored, found = table_linear.weight_of(planes.coarse).stored, tuned_configs.found
    unroll = table_linear.UNROLL[stored]
    try:
        if variant is not None:
            table_linear.UNROLL[stored] = variant[0]
            tuned_configs.found = lambda *_: Launch(1, variant[1], True)
        return table_linear.linear(x, planes)
    finally:
        table_linear.UNROLL[stored], tuned_configs.found = unroll, found


def working(x: torch.Tensor, planes: WeightPlanes, want: torch.Tensor, tokens: int) -> Iterator[tuple[Variant, float]]:
    for variant in VARIANTS[tokens] if planes.format in FORMATS else (None,):
        try:
            found = error(call(x, planes, variant), want)
        except Exception as failure:  # noqa: BLE001  # any: the next variant may work
            print("  ", planes.format, variant, "FAILED", type(failure).__name__, str(failure)[-300:], flush=True)
            print(traceback.format_exc(limit=-2), file=sys.stderr)
        else:
            yield variant, found


def measure(k: int, n: int, tokens: int, weight: torch.Tensor, late: Callable[[], bool]) -> None:
    x, base = torch.randn(tokens, k, device=CUDA, dtype=BF16), copied("nvfp4", weight)
    linear = resolve("linear", "auto", CUDA, "nvfp4").run
    for format in ("nf4", *FORMATS):
        if late():
            print("   out of time before", format)
            return
        planes = copied(format, weight)
        want = x.double() @ get_format(format).decode(planes[0].coarse, (n, k), torch.float64).T
        tried = dict(working(x, planes[0], want, tokens))
        sets = [[partial(call, x, each, variant) for each in planes] for variant in tried]
        base_us, *times = side_by_side([partial(linear, x, each) for each in base], *sets)
        rate = bytes_of(base) / base_us / 1e6
        cells = [
            f"{variant or 'own'} {us:.2f} ({bytes_of(planes) / us / 1e6 / rate:.2f})"
            for variant, us in zip(tried, times, strict=True)
        ]
        print(
            f"   {format}, error {max(tried.values(), default=0):.1e}, nvfp4 {base_us:.2f} us, {rate:.2f} TB/s:",
            end=" ",
        )
        print(*cells, sep="  ", flush=True)


def main() -> None:
    end = time.monotonic() + MOST_S
    print(torch.cuda.get_device_name(), "copy TB/s", round(copy_tb_s(), 2))
    for tokens in VARIANTS:
        for k, n in SHAPES:
            print(f"{tokens} tokens, K {k}, N {n}, after {MOST_S - end + time.monotonic():.0f} s")
            weight = torch.randn(n, k, device=CUDA, dtype=BF16) * 0.02
            try:
                measure(k, n, tokens, weight, lambda: time.monotonic() > end)
            except Exception:  # noqa: BLE001  # any: the next shape may work
                traceback.print_exc()


main()
