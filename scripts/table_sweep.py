"""Launches of the fused kernel of rows of 4-bit codes, timed in turns: row tiles x warps of a program.

    python scripts/table_sweep.py --formats superblock32 --shapes 4096x14336,14336x4096 --tokens 1,16 --launches 1x4,2x8

A row has the microseconds of a call, TB/s of the coarse plane, that rate relative to nvfp4's kernel in the same turns,
and the relative error against float64 on decoded weights. "own" is the launch that vbrt takes. A launch that does not
compile, or whose error exceeds 5e-3, is a row with the reason instead of a time. One GPU, no other work on it.
"""

import argparse
import itertools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # after the checkout is on the path
from torch import Tensor

from scripts.gpu_timing import BF16, CUDA, copy_tb_s, error, planes_of, say, side_by_side
from vbrt.formats import WeightPlanes, get_format
from vbrt.kernels import resolve
from vbrt.kernels.cuda import tuned_configs
from vbrt.kernels.cuda.launch_table import Launch
from vbrt.kernels.cuda.table import linear as table_linear

FORMATS = ("nf4", "superblock32", "zeros128-float16", "affine32-float16")
SHAPES = ((4096, 14336), (14336, 4096))  # (K, N)
LAUNCHES = ((1, 4), (1, 8), (1, 16), (2, 4), (2, 8), (4, 4))
ROW_TILES, WARPS = (1, 2, 4), (4, 8, 16)
_MOST_ERROR = 5e-3
_COPIES = 5  # of a weight, to exceed the cache together


def call(launch: tuple[int, int] | None, x: Tensor, planes: WeightPlanes) -> Tensor:
    """The product by a launch (row tiles, warps), or by vbrt's own."""
    if launch is None:
        return table_linear.linear(x, planes)
    with mock.patch.object(tuned_configs, "found", lambda *_: Launch(*launch, True)):
        return table_linear.linear(x, planes)


def copies_of(format: str, weight: Tensor) -> list[WeightPlanes]:
    """A weight's planes at several addresses."""
    planes = planes_of(format, weight)
    return [replace(planes, coarse={name: t.clone() for name, t in planes.coarse.items()}) for _ in range(_COPIES)]


def rows(format: str, k: int, n: int, tokens: int, launches: Sequence[tuple[int, int]]) -> Iterator[dict[str, object]]:
    """A row per launch: its time, or why it has none."""
    weight, x = torch.randn(n, k, device=CUDA, dtype=BF16) * 0.02, torch.randn(tokens, k, device=CUDA, dtype=BF16)
    base, planes = copies_of("nvfp4", weight), copies_of(format, weight)
    linear = resolve("linear", "auto", CUDA, "nvfp4").run
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
    base_us, *times = side_by_side([partial(linear, x, each) for each in base], *(calls for _, calls in sets.values()))
    base_tb_s = _nbytes(base[0]) / base_us / 1e6
    for (name, (found, _)), us in zip(sets.items(), times, strict=True):
        tb_s = _nbytes(planes[0]) / us / 1e6
        rates = {"us": round(us, 2), "tb_s": round(tb_s, 3), "of_nvfp4": round(tb_s / base_tb_s, 3)}
        yield head | {"launch": name, **rates, "relative_error": found}


def _nbytes(planes: WeightPlanes) -> int:
    return sum(tensor.nbytes for tensor in planes.coarse.values())


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options; lists are separated by commas."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)

    def formats(text: str) -> tuple[str, ...]:
        if unknown := set(text.split(",")) - set(table_linear.SERVED):
            raise argparse.ArgumentTypeError(f"{sorted(unknown)}; expected some of {', '.join(table_linear.SERVED)}")
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
        if not all(1 <= count <= table_linear.FUSED_TOKENS for count in found):
            raise argparse.ArgumentTypeError(f"{text}; the kernel takes 1 to {table_linear.FUSED_TOKENS} tokens")
        return found

    parser.add_argument("--formats", type=formats, metavar="A,B", default=FORMATS)
    parser.add_argument("--shapes", type=pairs, metavar="KxN,KxN", default=SHAPES)
    parser.add_argument("--tokens", type=tokens, metavar="M,M", default=(1, 16))
    parser.add_argument("--launches", type=launches, metavar="TxW,TxW", default=LAUNCHES, help="row tiles x warps")
    return parser.parse_args(arguments)


def main() -> None:
    options = parsed()
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device")
    print(torch.cuda.get_device_name(), f"copies {copy_tb_s():.2f} TB/s", flush=True)
    for k, n in options.shapes:
        for format in options.formats:
            for tokens in options.tokens:
                for row in rows(format, k, n, tokens, options.launches):
                    say(row)


if __name__ == "__main__":
    main()
