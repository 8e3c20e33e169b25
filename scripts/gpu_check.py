"""Time FP4 linears against the same GPU's bf16 matmul and write benchmarks/results/kernels-<gpu>.json.

CUDA-graph replays over enough weights to pass the second-level cache, random normal data, medians; microseconds a
call. A ratio is bf16 time / FP4 time.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402  # after the checkout is on the path
import torch.nn.functional as F  # noqa: E402

from vbrt.formats import WeightPlanes, get_format  # noqa: E402
from vbrt.kernels import fp4_linear  # noqa: E402

SHAPES = ((4096, 14336), (14336, 4096), (4096, 4096), (8192, 28672))  # (K, N)
TOKENS = (1, 4, 8, 16, 32, 64, 256, 2048)
ROTATED_BYTES = 300 << 20


def replay_us(calls: Sequence[Callable[[], object]], repeats: int = 15) -> float:
    """Median time of one call, in a graph that runs them all."""
    for call in calls:
        call(), call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(calls))
    return sorted(times)[len(times) // 2]


def measure(format: str, k: int, n: int, tokens: Sequence[int]) -> list[dict[str, object]]:
    copies = max(2, min(8, ROTATED_BYTES // (k * n // 2) + 1))
    dense = [torch.randn(n, k, device="cuda", dtype=torch.bfloat16) * 0.02 for _ in range(copies)]
    packing = fp4_linear.packing(format)
    planes = []
    for weight in dense:
        coarse = get_format(format).encode(weight)
        planes.append(WeightPlanes(format, (n, k), torch.bfloat16, packing.pack(coarse, (n, k))))
    rows = []
    for m in tokens:
        x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
        y = fp4_linear.linear(x, planes[0]).double()
        want = x.double() @ get_format(format).decode(coarse_of(planes[0]), (n, k), torch.float64).T
        bf16 = replay_us([partial(F.linear, x, w) for w in dense])
        fp4 = replay_us([partial(fp4_linear.linear, x, p) for p in planes])
        rows.append(
            {
                "format": format,
                "k": k,
                "n": n,
                "m": m,
                "route": fp4_linear.route(x, planes[0]),
                "bf16_us": round(bf16, 2),
                "fp4_us": round(fp4, 2),
                "ratio": round(bf16 / fp4, 3),
                "relative_error": float((y - want).norm() / want.norm()),
            }
        )
        r = rows[-1]
        print(
            f"{format} {k}->{n} M={m:<5} bf16 {bf16:8.1f} us  fp4 {fp4:8.1f} us  {r['ratio']:.2f}x  "
            f"error {r['relative_error']:.1e}  {r['route']}",
            flush=True,
        )
    return rows


def coarse_of(planes: WeightPlanes) -> dict[str, torch.Tensor]:
    return fp4_linear.packing(planes.format).unpack(planes.coarse, planes.shape)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--formats", nargs="*", default=["nvfp4", "mxfp4"])
    parser.add_argument("--tokens", nargs="*", type=int, default=TOKENS)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device")
    rows = [row for format in options.formats for k, n in SHAPES for row in measure(format, k, n, options.tokens)]
    name = torch.cuda.get_device_name().lower().replace(" ", "-")
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f"kernels-{name}.json"
    machine = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "cuda": torch.version.cuda}
    path.write_text(json.dumps({**machine, "rows": rows}, indent=1) + "\n")
    print(path)


if __name__ == "__main__":
    main()
