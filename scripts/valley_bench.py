"""Fused 4-bit layers at 65 to 4096 tokens beside cuBLAS in bf16, at shapes and counts that the launch table was not
fitted to.

Weights rotate past the second-level cache, also the 4-bit ones; both sides run as CUDA graphs that take turns. All
launches are compiled ahead, in processes of their own. Writes benchmarks/results/valley-<gpu>.json after each shape.
"""

import argparse
import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import geometric_mean

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch
import torch.nn.functional as F

from scripts.gpu_timing import BF16, CUDA, Shape, error, machine, plain, planes_of, say
from vbrt.formats import WeightPlanes, get_format
from vbrt.host.safe_files import write_file
from vbrt.kernels import resolve
from vbrt.kernels.cuda import devices
from vbrt.kernels.cuda.e2m1 import linear as e2m1_linear
from vbrt.kernels.cuda.launch_table import Choice, PersistentLaunch, choose
from vbrt.kernels.cuda.table import linear as table_linear
from vbrt.kernels.cuda.tuning import replays_us

#: (K, N) of models of half a billion to 70 billion parameters; none is a shape that launches were fitted to
SHAPES: tuple[Shape, ...] = (
    (896, 4864),
    (1024, 2816),
    (1536, 2048),
    (2048, 8192),
    (2304, 9216),
    (3584, 4608),
    (4096, 6144),
    (5120, 13824),
    (6144, 6144),
    (7168, 2048),
    (8960, 1536),
    (11008, 4096),
)
TOKENS = (65, 72, 90, 100, 120, 136, 160, 200, 240, 300, 320, 400, 500, 640, 777, 1000, 1500, 2000, 3000, 4096)
ROTATED_BYTES = 120 << 20  # of 4-bit weights
FEWEST, FEWEST_CALLS, REPEATS = 3, 4, 7


def choice_of(shape: Shape, tokens: int) -> Choice:
    k, n = shape
    return choose(devices.gpu(0), tokens, 1, n, -(-k // 128))


def kinds(formats: tuple[str, ...], shapes: tuple[Shape, ...]) -> list[tuple[str, Shape, int]]:
    """A case (format, shape, tokens) for each kernel that the sweep compiles."""
    cases: dict[object, tuple[str, Shape, int]] = {}
    for format in formats:
        for shape in shapes:
            for tokens in TOKENS:
                choice = choice_of(shape, tokens)
                cuts = choice.cut > 0 if isinstance(choice, PersistentLaunch) else None
                kernel = choice if cuts is None else (choice.tokens, cuts, choice.ordered)
                cases.setdefault((format, kernel), (format, shape, tokens))
    return list(cases.values())


def compile_ahead(formats: tuple[str, ...], shapes: tuple[Shape, ...]) -> None:
    """Run each kernel once, in as many processes as there are cores, for what they leave in Triton's cache."""
    cases, began = kinds(formats, shapes), time.perf_counter()
    workers = min(len(cases), len(os.sched_getaffinity(0)))
    parts = [json.dumps(cases[i::workers]) for i in range(workers)]
    running = [subprocess.Popen([sys.executable, __file__, "--ahead", part]) for part in parts]
    failed = sum(process.wait() != 0 for process in running)
    print(
        f"# {len(cases)} kernels compiled in {time.perf_counter() - began:.0f} s, {failed} processes failed", flush=True
    )


def run_once(cases: list[tuple[str, Shape, int]]) -> None:
    for format, (k, n), tokens in cases:
        planes = planes_of(format, torch.randn(n, k, device=CUDA, dtype=BF16))
        multiply(torch.randn(tokens, k, device=CUDA, dtype=BF16), planes)
    torch.cuda.synchronize()


def multiply(x: torch.Tensor, planes: WeightPlanes) -> torch.Tensor:
    return resolve("linear", "auto", CUDA, planes.format).run(x, planes)


class Recorder:
    """Records graphs into one pool of memory: `torch.cuda.graph` empties caches each time, which takes longer than all
    that is timed."""

    def __init__(self) -> None:
        self._stream, self._pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()
        kept = torch.zeros(1, device=CUDA)
        self._kept = self.record([partial(kept.add_, 1)])  # the pool lives as long as one of its graphs

    def record(self, calls: list[Callable[[], object]]) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            calls[0]()
            torch.cuda.synchronize()
            graph.capture_begin(pool=self._pool)
            try:
                for call in calls:
                    call()
            finally:
                graph.capture_end()
        torch.cuda.synchronize()
        return graph

    def side_by_side(self, *sets: list[Callable[[], object]]) -> list[float]:
        """For each set of calls the median microseconds of one; the graphs of the sets take turns."""
        taken = replays_us([self.record(calls) for calls in sets], repeats=REPEATS)
        return [span / len(calls) for span, calls in zip(taken, sets, strict=True)]


def copies_of(planes: WeightPlanes, count: int) -> list[WeightPlanes]:
    """The same planes in other memory."""
    others = ({name: tensor.clone() for name, tensor in planes.coarse.items()} for _ in range(count - 1))
    return [planes, *(WeightPlanes(planes.format, planes.shape, planes.dtype, coarse) for coarse in others)]


def route(x: torch.Tensor, planes: WeightPlanes) -> str:
    """The launch of a call, or the name of the kernel where it has none."""
    n, k = planes.shape
    if e2m1_linear.packing(planes.format) is None:
        return table_linear.route(x, planes)
    return str(choice_of((k, n), x.shape[0]) or "decode+matmul")


def rows_of(format: str, shape: Shape, recorder: Recorder) -> Iterator[dict[str, object]]:
    """A row for each number of tokens."""
    k, n = shape
    dense = torch.randn(n, k, device=CUDA, dtype=BF16) * 0.02
    planes = planes_of(format, dense)
    exact = get_format(format).decode(plain(planes), (n, k), torch.float64)
    count = max(FEWEST, ROTATED_BYTES // (k * n // 2) + 1)
    weights, every = [dense, *(dense.clone() for _ in range(count - 1))], copies_of(planes, count)
    for m in TOKENS:
        x = torch.randn(m, k, device=CUDA, dtype=BF16)
        y = multiply(x, planes)
        used = max(FEWEST_CALLS, count) if m * n * k < 1 << 34 else FEWEST_CALLS
        theirs = [partial(F.linear, x, w) for w in weights[:used]]
        bf16, us = recorder.side_by_side(theirs, [partial(multiply, x, p) for p in every[:used]])
        yield {
            "format": format,
            "k": k,
            "n": n,
            "m": m,
            "route": route(x, planes),
            "bf16_us": round(bf16, 2),
            "us": round(us, 2),
            "ratio": round(bf16 / us, 3),
            "relative_error": error(y, x.double() @ exact.T),
        }


def summary(rows: list[dict[str, object]]) -> dict[str, dict[str, float]]:
    """Of each format the lowest ratio, the geometric mean, and the largest error."""
    out = {}
    for format in dict.fromkeys(row["format"] for row in rows):
        own = [row for row in rows if row["format"] == format]
        ratios = [float(row["ratio"]) for row in own]
        out[format] = {
            "points": len(own),
            "lowest": min(ratios),
            "geometric_mean": round(geometric_mean(ratios), 3),
            "largest_error": max(float(row["relative_error"]) for row in own),
        }
    return out


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--formats", default="nvfp4,mxfp4")
    parser.add_argument("--shapes", type=int, default=len(SHAPES), help="how many of them")
    parser.add_argument("--ahead", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.ahead:
        run_once([(format, tuple(shape), tokens) for format, shape, tokens in json.loads(options.ahead)])
        return
    formats, shapes = tuple(options.formats.split(",")), SHAPES[: options.shapes]
    compile_ahead(formats, shapes)
    gc.freeze()  # recording a graph collects garbage
    result, rows, recorder = machine(), [], Recorder()
    path = options.out / f"valley-{torch.cuda.get_device_name().lower().replace(' ', '-')}.json"
    for format in formats:
        for shape in shapes:
            for row in rows_of(format, shape, recorder):
                say(row)
                rows.append(row)
            torch.cuda.empty_cache()
            result |= {"summary": summary(rows), "rows": rows}
            write_file(path, (json.dumps(result, indent=1) + "\n").encode())
    print(json.dumps(result["summary"], indent=1))


if __name__ == "__main__":
    main()
