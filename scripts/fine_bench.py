"""Time merges of plain and of coded fine planes, and the coder, on the shapes of Llama-3-8B's layers: on a GPU; without
one on one core of the CPU.

python3 scripts/fine_bench.py [--format nvfp4] [--quick]

A row per shape, order of the coarse plane and kernel: microseconds, weights a second, bytes of the fine plane a second.
Each merge is compared with the weight, bit for bit. The coder's bytes are those of the dense weight. On a CPU time is
that of the process, the least of some calls.
"""

import argparse
import copy
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # after the checkout is on the path

import vbrt
from scripts.gpu_timing import CUDA, side_by_side
from vbrt.formats import WeightPlanes, get_format, split_fine
from vbrt.formats.fine_coding import code_fine
from vbrt.kernels import EXACT, resolve
from vbrt.kernels.cuda.e2m1.tiles import FORMATS as TILED
from vbrt.kernels.cuda.e2m1.tiles import pack_tiles
from vbrt.kernels.cuda.fine import merge

_SHAPES = ((4096, 4096), (1024, 4096), (14336, 4096), (4096, 14336))
_READS = {0: "by weight", 1: "by 8"}
_ROTATED_BYTES = 300 << 20  # of fine planes: more than a GPU's cache


def kernels(warps: tuple[int, ...]) -> dict[str, Callable[[WeightPlanes, torch.Tensor], None]]:
    """Name -> launch of a merge of a coded plane."""
    return {
        f"coded, {name}, {count} warps": partial(merge.launch_coded, read=read, warps=count)
        for read, name in _READS.items()
        for count in warps
    }


def timed(format: str, shape: tuple[int, int], warps: tuple[int, ...]) -> None:
    """Print the rows of a shape."""
    fmt, (n, k) = get_format(format), shape
    encode, split = resolve("encode_many", "auto", CUDA, format).run, split_fine
    count = _ROTATED_BYTES // (n * k) + 1
    weights = [torch.randn(n, k, device=CUDA, dtype=torch.bfloat16) * 0.02 for _ in range(count)]
    coarse = [dict(next(iter(encode(fmt, w.unsqueeze(0)))).coarse) for w in weights]
    coder = partial(code_fine, weights[0], coarse[0], fmt)
    coder()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    coder()
    torch.cuda.synchronize()
    taken = time.perf_counter() - begin
    print(f"{format} {n} x {k}: coded at {2 * n * k / taken / 1e9:.2f} GB/s of dense bytes", flush=True)
    plain = [WeightPlanes(format, shape, w.dtype, c, split(w, c, fmt)) for w, c in zip(weights, coarse, strict=True)]
    coded = [replace(p, fine=code_fine(w, p.coarse, fmt)) for w, p in zip(weights, plain, strict=True)]
    orders = {"rows": (plain, coded)}
    if format in TILED:
        tiles = [pack_tiles(format, c, shape) for c in coarse]
        orders["tiles"] = tuple([replace(p, coarse=t) for p, t in zip(of, tiles, strict=True)] for of in (plain, coded))
    out = torch.empty_like(weights[0])
    for order, (plain, coded) in orders.items():
        calls = {"plain": (merge.launch, plain)} | {name: (run, coded) for name, run in kernels(warps).items()}
        for launch, planes in calls.values():
            for w, one in zip(weights, planes, strict=True):
                launch(one, out)
                assert torch.equal(out.view(torch.int16), w.view(torch.int16)), (format, shape, order)
        sets = [[partial(launch, one, out) for one in planes] for launch, planes in calls.values()]
        for (name, (_, planes)), us in zip(calls.items(), side_by_side(*sets), strict=True):
            fine = sum(t.nbytes for t in planes[0].fine.values())
            print(
                f"  {order:5} {name:24} {us:8.1f} us  {n * k / us / 1e3:7.0f} G weights/s  "
                f"{fine / us / 1e3:6.0f} GB/s of fine bytes, {8 * fine / n / k:.2f} bits",
                flush=True,
            )


def on_a_core(format: str, shape: tuple[int, int]) -> None:
    """Print a shape's rows on a CPU: merging and making both kinds of planes, and forwards of an exact layer."""
    fmt, (n, k) = get_format(format), shape
    plain = torch.nn.Linear(k, n, bias=False, dtype=torch.bfloat16).requires_grad_(False)
    w = plain.weight
    coarse = resolve("codec", "auto", w.device, format).run(fmt).encode(w)
    for coding, op in (("plain", "split_fine"), ("coded", "code_fine")):
        make = resolve(op, "auto", w.device, format).run
        merge = resolve("decode_weight", "auto", w.device, EXACT).run
        planes = WeightPlanes(format, shape, w.dtype, coarse, make(w, coarse, fmt))
        assert torch.equal(merge(planes).view(torch.int16), w.view(torch.int16)), (format, shape, coding)
        weights = {"format": format, "keep_head": False, "fine_coding": coding}
        with vbrt.wrap(torch.nn.Sequential(copy.deepcopy(plain)), "exact", weights=weights) as vb:
            vb.materialize(progress=False)
            calls = {"made": partial(make, w, coarse, fmt), "merged": partial(merge, planes)}
            calls |= {f"{tokens} tokens": partial(vb, w.new_ones(tokens, k)) for tokens in (1, 64, 512)}
            taken = {name: _least_s(call) for name, call in calls.items()}
        rates = ", ".join(f"{name} {n * k / taken[name] / 1e6:.0f} M weights/s" for name in ("made", "merged"))
        forwards = ", ".join(f"{name} {1e3 * taken[name]:.1f} ms" for name in list(taken)[2:])
        print(f"{format} {n} x {k}, one core, {coding}: {rates}; forward of {forwards}", flush=True)


def _least_s(call: Callable[[], object], times: int = 7) -> float:
    spans = []
    for _ in range(times):
        begin = time.process_time()
        with torch.no_grad():
            call()
        spans.append(time.process_time() - begin)
    return min(spans)


def main() -> None:
    """Print all rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--format", nargs="+", default=["nvfp4", "mxfp4"])
    parser.add_argument("--warps", nargs="+", type=int, default=[4, 8, 16])
    parser.add_argument("--quick", action="store_true", help="one shape only")
    options = parser.parse_args()
    shapes = _SHAPES[2:3] if options.quick else _SHAPES
    if not torch.cuda.is_available():
        torch.set_num_threads(1)
    for format in options.format:
        for shape in shapes:
            if torch.cuda.is_available():
                timed(format, shape, tuple(options.warps))
            else:
                on_a_core(format, shape)


if __name__ == "__main__":
    main()
