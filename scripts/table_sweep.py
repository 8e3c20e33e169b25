"""Kernels of published codes beside nvfp4's, timed in turns; launches of those of 4-bit codes: row tiles x warps.

    python scripts/table_sweep.py --out benchmarks/results
    python scripts/table_sweep.py --formats superblock32 --shapes 4096x14336,14336x4096 --tokens 1,16 --launches 1x4,2x8
    python scripts/table_sweep.py --formats t3 --shapes 4096x14336,8192x28672 --tokens 1,16 --launches 1x4,1x8,1x16

A row has the microseconds of a call, TB/s of the coarse plane, that rate and the time relative to nvfp4's kernel in the
same turns (beyond 32 tokens: bf16's microseconds over those of the call), the relative error against float64 on decoded
weights, and the seconds that its weight took to encode. "own" is the launch that vbrt takes. A launch that does not
compile, or whose error exceeds 5e-3, is a row with the reason instead of a time. One GPU, no other work on it. With
--out, rows go into published-<gpu>.json, of which a table of docs/measurements.md is made.
"""

import argparse
import itertools
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # after the checkout is on the path
import torch.nn.functional as F
from torch import Tensor

from scripts.gpu_timing import BF16, CUDA, error, machine, planes_of, say, side_by_side
from scripts.measuring import markdown_table, named_machine
from vbrt.formats import WeightPlanes, get_format
from vbrt.host.safe_files import write_file
from vbrt.kernels import resolve
from vbrt.kernels.cuda import tuned_configs
from vbrt.kernels.cuda.launch_table import Launch
from vbrt.kernels.cuda.table import linear as table_linear
from vbrt.kernels.cuda.trellis import linear as trellis_linear

#: format -> whose codes it has
FORMATS = {
    "symmetric32-float16": "Q4_0",
    "symmetric128-float16": "GPTQ, W4A16",
    "levels32-float16": "IQ4_NL",
    "affine32-float16": "Q4_1",
    "superblock32": "Q4_K",
    "zeros128-float16": "AWQ, asymmetric GPTQ",
    "affine64-bfloat16": "MLX, 4 bits",
    "levels64-float32": "NF4 of bitsandbytes",
    "superbytes16": "Q6_K",
    "bytes32-float16": "Q8_0",
    "floatbytes128-float32": "FP8",
    "t3": "vbrt's own, 3 bits",
}
SHAPES = ((4096, 14336), (14336, 4096), (4096, 4096))  # (K, N)
_LAUNCHED = (*table_linear.SERVED, *trellis_linear.FORMATS)  # whose launches can be chosen; t3 has one row tile
ROW_TILES, WARPS = (1, 2, 4), (4, 8, 16)
_MOST_ERROR = 5e-3
_COPIES = 5  # of a weight, to exceed the cache together


def call(launch: tuple[int, int] | None, x: Tensor, planes: WeightPlanes) -> Tensor:
    """The product by a launch (row tiles, warps), or by vbrt's own."""
    if launch is None:
        return resolve("linear", "auto", CUDA, planes.format).run(x, planes)
    if planes.format in trellis_linear.FORMATS:
        with mock.patch.object(trellis_linear, "LAUNCH", Launch(*launch, True)):
            return trellis_linear.linear(x, planes)
    with mock.patch.object(tuned_configs, "found", lambda *_: Launch(*launch, True)):
        return table_linear.linear(x, planes)


def copies_of(format: str, weight: Tensor) -> list[WeightPlanes]:
    """A weight's planes at several addresses."""
    planes = planes_of(format, weight)
    return [replace(planes, coarse={name: t.clone() for name, t in planes.coarse.items()}) for _ in range(_COPIES)]


def rows(format: str, k: int, n: int, tokens: int, launches: Sequence[tuple[int, int]]) -> Iterator[dict[str, object]]:
    """A row per launch: its time, or why it has none."""
    weight, x = torch.randn(n, k, device=CUDA, dtype=BF16) * 0.02, torch.randn(tokens, k, device=CUDA, dtype=BF16)
    weight[-1, -1].item()  # waits for the GPU
    start = time.perf_counter()
    planes_of(format, weight).coarse["codes"].view(-1)[-1].item()
    encode_s = time.perf_counter() - start
    planes = copies_of(format, weight)
    if tokens <= table_linear.FUSED_TOKENS:
        beside, linear = "nvfp4", resolve("linear", "auto", CUDA, "nvfp4").run
        base = [(partial(linear, x, each), _nbytes(each)) for each in copies_of("nvfp4", weight)]
    else:
        beside, base = "bf16", [(partial(F.linear, x, weight.clone()), weight.nbytes) for _ in range(_COPIES)]
    want = x.double() @ get_format(format).decode(planes[0].coarse, (n, k), torch.float64).T
    head, sets = {"format": format, "k": k, "n": n, "m": tokens}, {}
    for launch in (None, *launches):
        name = "own" if launch is None else "{}x{}".format(*launch)
        try:
            found = error(call(launch, x, planes[0]), want)
        except Exception as failure:  # noqa: BLE001  # whatever a compiler raises becomes a row
            yield head | {"launch": name, "failed": f"{type(failure).__name__}: {str(failure)[-200:]}"}
            continue
        if not found < _MOST_ERROR:
            yield head | {"launch": name, "failed": f"relative error {found:.1e}"}
            continue
        sets[name] = found, [partial(call, launch, x, each) for each in planes]
    base_us, *times = side_by_side([call for call, _ in base], *(calls for _, calls in sets.values()))
    base_tb_s = base[0][1] / base_us / 1e6
    for (name, (found, _)), us in zip(sets.items(), times, strict=True):
        tb_s = _nbytes(planes[0]) / us / 1e6
        share = tb_s / base_tb_s if beside == "nvfp4" else base_us / us
        rates = {"us": round(us, 2), "tb_s": round(tb_s, 3), f"of_{beside}": round(share, 3)}
        rates |= {"times_faster": round(base_us / us, 3), "encode_s": round(encode_s, 2)}
        yield head | {"launch": name, **rates, "relative_error": found}


def _nbytes(planes: WeightPlanes) -> int:
    return sum(tensor.nbytes for tensor in planes.coarse.values())


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options; lists are separated by commas."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)

    def formats(text: str) -> tuple[str, ...]:
        if unknown := set(text.split(",")) - {*FORMATS, *_LAUNCHED}:
            raise argparse.ArgumentTypeError(f"{sorted(unknown)}; expected some of {', '.join({*FORMATS, *_LAUNCHED})}")
        return tuple(text.split(","))

    def pairs(text: str) -> tuple[tuple[int, int], ...]:
        return tuple((int(first), int(second)) for first, second in (pair.split("x") for pair in text.split(",")))

    def launches(text: str) -> tuple[tuple[int, int], ...]:
        found = pairs(text)
        if unknown := set(found) - set(itertools.product(ROW_TILES, WARPS)):
            raise argparse.ArgumentTypeError(f"{sorted(unknown)}; expected row tiles of {ROW_TILES}, warps of {WARPS}")
        return found

    def tokens(text: str) -> tuple[int, ...]:
        found = tuple(map(int, text.split(",")))
        if not all(1 <= count for count in found):
            raise argparse.ArgumentTypeError(f"{text}; expected at least one token")
        return found

    parser.add_argument("--formats", type=formats, metavar="A,B", default=tuple(FORMATS))
    parser.add_argument("--shapes", type=pairs, metavar="KxN,KxN", default=SHAPES)
    parser.add_argument("--tokens", type=tokens, metavar="M,M", default=(1, 16, 2048))
    parser.add_argument("--launches", type=launches, metavar="TxW,TxW", default=(), help="row tiles x warps, of 4 bits")
    parser.add_argument("--out", type=Path, help="folder of published-<gpu>.json")
    return parser.parse_args(arguments)


def main() -> None:
    options = parsed()
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device")
    result: dict[str, Any] = machine() | {"rows": []}
    print(result["gpu"], f"copies {result['copy_tb_s']} TB/s", flush=True)
    for k, n in options.shapes:
        for format in options.formats:
            for tokens in options.tokens:
                launches = options.launches if format in _LAUNCHED and tokens <= table_linear.FUSED_TOKENS else ()
                for row in rows(format, k, n, tokens, launches):
                    say(row)
                    result["rows"].append(row)
    if options.out is not None:
        path = options.out / f"published-{result['gpu'].lower().replace(' ', '-')}.json"
        write_file(path, (json.dumps(result, indent=1) + "\n").encode())


def published_table(path: Path) -> list[str]:
    """Lines of docs/measurements.md of a file of --out."""
    result = json.loads(path.read_text())
    own = {(row["format"], row["k"], row["n"], row["m"]): row for row in result["rows"] if row["launch"] == "own"}
    counts = sorted({m for *_, m in own})
    few = table_linear.FUSED_TOKENS
    heads = ["weights", "format", "K→N", *(f"M={m}: µs, {'TB/s, of nvfp4' if m <= few else 'of bf16'}" for m in counts)]
    lines = []
    for format, k, n in dict.fromkeys(key[:3] for key in own):
        cells = (own[format, k, n, m] for m in counts)
        figures = [
            f"{cell['us']:.1f}, {cell['tb_s']:.2f}, {cell['of_nvfp4']:.2f}"
            if cell["m"] <= few
            else f"{cell['us']:.0f}, {cell['of_bf16']:.2f}"
            for cell in cells
        ]
        lines.append([FORMATS[format], f"`{format}`", f"{k}→{n}", *figures])
    said = (
        "A linear layer on such codes, CUDA-graph replays of weights beyond L2, and its bytes a second over "
        "those of nvfp4's kernel in the same turns; beyond 32 tokens, bf16's time over its own. "
        f"Copies of this GPU: {result['copy_tb_s']} TB/s."
    )
    return [
        f"## {'three bits' if {key[0] for key in own} == {'t3'} else 'published codes'}, {result['gpu']}",
        "",
        said,
        "",
        *markdown_table(heads, lines),
        "",
        named_machine(result),
        "",
    ]


if __name__ == "__main__":
    main()
