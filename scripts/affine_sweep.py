"""Scratch: launches of the fused kernel of codes with offsets, beside nvfp4's."""

import itertools
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(ROOT / "scripts"))

import torch

from scripts.gpu_timing import BF16, CUDA, copy_tb_s, error, planes_of, side_by_side
from vbrt.formats import get_format
from vbrt.kernels import resolve
from vbrt.kernels.cuda import tuned_configs
from vbrt.kernels.cuda.launch_table import Launch
from vbrt.kernels.cuda.table import linear as table_linear


def copied(format, weight, count):
    one = planes_of(format, weight)
    return [replace(one, coarse={name: t.clone() for name, t in one.coarse.items()}) for _ in range(count)]


def main():
    print(torch.cuda.get_device_name(), "copy TB/s", round(copy_tb_s(), 2))
    shapes = [(4096, 14336), (14336, 4096), (4096, 4096)]
    formats = sys.argv[1].split(",") if len(sys.argv) > 1 else ["superblock32", "zeros128-float16", "affine32-float16"]
    unrolls, warps, many = (2, 4), (4, 8, 16), (1, 16)
    variants = list(itertools.product(unrolls, warps))
    found = tuned_configs.found
    state = {}

    def patched(device, kernel, *rest):
        return (
            Launch(1, state["warps"], True) if kernel == "table" and "warps" in state else found(device, kernel, *rest)
        )

    tuned_configs.found = patched

    def call(f, plane, x, u, w):
        table_linear._UNROLL[table_linear.weight_of(plane.coarse).stored] = u
        state["warps"] = w
        y = table_linear.linear(x, plane)
        state.pop("warps")
        return y

    for k, n in shapes:
        weight = torch.randn(n, k, device=CUDA, dtype=BF16) * 0.02
        copies = max(4, min(16, (150 << 20) // (n * k // 2)))
        for m in many:
            x = torch.randn(m, k, device=CUDA, dtype=BF16)
            base = copied("nvfp4", weight, copies)
            nbytes = sum(t.nbytes for t in base[0].coarse.values())
            linear = resolve("linear", "auto", CUDA, "nvfp4").run
            (us,) = side_by_side([partial(linear, x, p) for p in base])
            rate = nbytes / us / 1e6
            print(f"{k}x{n} m {m} nvfp4 {us:.2f} us {rate:.2f} TB/s", flush=True)
            for f in ["nf4", *formats] if m == 1 else formats:
                planes = copied(f, weight, copies)
                exact = get_format(f).decode(planes[0].coarse, (n, k), torch.float64)
                nbytes = sum(t.nbytes for t in planes[0].coarse.values())
                tried = [(2, 8)] if f == "nf4" else [v for v in variants if m == 1 or v[1] < 16]
                times = side_by_side(*[[partial(call, f, p, x, u, w) for p in planes] for u, w in tried])
                cells = [
                    f"u{u}w{w} {t:.2f} ({nbytes / t / 1e6 / rate:.2f})" for (u, w), t in zip(tried, times, strict=True)
                ]
                e = error(call(f, planes[0], x, *tried[0]), x.double() @ exact.T)
                print("  ", f, "error", f"{e:.1e}", "  ".join(cells), flush=True)


main()
