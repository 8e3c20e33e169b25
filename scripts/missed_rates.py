"""How fast a CPU computes routed experts where their pages lie, beside what copies of the pages take.

    python3 scripts/missed_rates.py [--threads 2] [--out benchmarks/results/missed-rates-2-threads.json]

GB/s of pages of Qwen3-30B-A3B's experts in 4 bits, eight at a time, rotated past the caches: computed by one token and
by four, in the format's order and in that of a GPU's tiles, as they lie (on x86 CPUs with AVX2) and put in order
first; and copied to the GPU, or within host memory where there is none. `experts.miss = "auto"` divides missed experts
by such rates, which it measures itself.
"""

import argparse
import itertools
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # after the checkout is on the path
from torch import Tensor

from scripts.measuring import interleaved, machine
from vbrt.formats import get_format
from vbrt.formats.joint_planes import join_fields, join_layouts
from vbrt.formats.page import PageLayout, new_page, pack
from vbrt.kernels.cpu.experts import experts_down, experts_up, takes_tiles
from vbrt.kernels.cpu.tiles import in_rows
from vbrt.kernels.cuda.e2m1.tiles import pack_tiles, tile_layout
from vbrt.kernels.experts import ExpertPages, Gate

FORMAT, AT_ONCE, GATE = "nvfp4", 8, Gate("silu")
TIMES = 9


class Bank:
    """Equal pages of random experts, in the format's order and in tiles; groups of them in turn."""

    def __init__(self, hidden: int, inner: int, groups: int) -> None:
        self.hidden, self.shapes = hidden, {"up": (2 * inner, hidden), "down": (hidden, inner)}
        fmt = get_format(FORMAT)
        coarse = {part: fmt.encode(torch.randn(shape, dtype=torch.float32)) for part, shape in self.shapes.items()}
        tiles = {part: pack_tiles(FORMAT, coarse[part], shape) for part, shape in self.shapes.items()}
        layouts = {part: fmt.layout(shape, torch.bfloat16) for part, shape in self.shapes.items()}
        self.layout = join_layouts(layouts)
        self.rows = self._pages(self.layout, coarse, groups)
        tiled = {part: tile_layout(FORMAT, shape) for part, shape in self.shapes.items()}
        self.tiles = self._pages(join_layouts(tiled), tiles, groups)

    def _pages(self, layout: PageLayout, fields: dict, groups: int) -> Iterator[ExpertPages]:
        page = pack(join_fields(fields), layout, new_page(layout))
        made = [[page.clone() for _ in range(AT_ONCE)] for _ in range(groups)]
        self.nbytes = AT_ONCE * layout.nbytes
        return itertools.cycle(ExpertPages(FORMAT, torch.bfloat16, self.shapes, layout, pages) for pages in made)

    def compute(self, tokens: int, order: str) -> Callable[[], Tensor]:
        x = torch.randn(tokens, self.hidden, dtype=torch.float32).bfloat16()
        ids = torch.arange(AT_ONCE).repeat(tokens, 1)

        def run() -> Tensor:
            pages = next(self.rows if order == "rows" else self.tiles)
            pages = in_rows(pages, self.layout) if order == "unpacked" else pages
            return experts_down(experts_up(x, ids, pages, gate=GATE), ids, None, pages)

        return run

    def copy(self) -> Callable[[], None]:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        locks = device.type == "cuda"
        pages = [[page.pin_memory() if locks else page for page in next(self.tiles).pages] for _ in range(6)]
        source = itertools.cycle(pages)
        there = [torch.empty_like(page, device=device) for page in next(source)]

        def run() -> None:
            for target, page in zip(there, next(source), strict=True):
                target.copy_(page, non_blocking=True)
            if device.type == "cuda":
                torch.cuda.synchronize()

        return run


def measured(hidden: int = 2048, inner: int = 768, groups: int = 6, times: int = TIMES) -> dict[str, float]:
    """GB/s of pages, by what is done with them."""
    bank = Bank(hidden, inner, groups)
    as_they_lie = takes_tiles(next(bank.tiles), torch.bfloat16, GATE)
    functions = {
        f"{tokens} token{'s' * (tokens > 1)}, {order}": bank.compute(tokens, order)
        for tokens in (1, 4)
        for order in ("rows", *(["tiles"] * as_they_lie), "unpacked")
    }
    functions |= {"copied": bank.copy()}
    with torch.no_grad():
        found = interleaved(functions, times=times)
    return {name: bank.nbytes / seconds / 1e9 for name, seconds in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rates = measured()
    for name, rate in rates.items():
        print(f"{name}: {rate:.1f} GB/s", flush=True)
    out = args.out or ROOT / "benchmarks" / "results" / f"missed-rates-{args.threads}-threads.json"
    out.write_text(json.dumps({"machine": machine(), "threads": args.threads, "gb_per_s": rates}, indent=1) + "\n")


if __name__ == "__main__":
    main()
