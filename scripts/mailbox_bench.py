"""Hosted products without a GPU: round trip of a post, and bytes per second of weights that the team multiplies.

    python scripts/mailbox_bench.py                          # threads: one, half of torch's, and those of a step
    python scripts/mailbox_bench.py --threads 6 8 --format mxfp4 --rounds 50

A Python thread plays the device: it writes a post and spins for the answer, so a core must be left for it. Pages are
used in turn, and are more than caches hold. `split` is one
product of 6144 rows as three parts, as of q, k and v.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # scripts are no package

from vbrt.formats import get_format
from vbrt.formats.page import new_page, pack
from vbrt.kernels.cpu.build import libraries
from vbrt.kernels.cpu.experts import takes_tiles
from vbrt.kernels.cpu.hosted import ANSWER, ENTRY_BITS, POST, HostedPart, HostedTeam, X, new_team
from vbrt.kernels.cuda.e2m1.tiles import FORMATS, pack_tiles, tile_layout
from vbrt.kernels.experts import Gate

DTYPE = torch.bfloat16
#: rows of the parts, and columns
SHAPES = {
    "tiny": ((32,), 128),
    "split": ((4096, 1024, 1024), 4096),
    "square": ((4096,), 4096),
    "down": ((4096,), 14336),
}


class Device:
    """The mailbox's other side."""

    def __init__(self, nbytes: int) -> None:
        room = torch.zeros(nbytes + 64, dtype=torch.uint8)
        self.memory = room[-room.data_ptr() % 64 :][:nbytes]
        words = self.memory.numpy().view("int64")
        self.post, self.answer, self.number = words[POST // 8 :], words[ANSWER // 8 :], 0

    def seconds(self, entry: int) -> float:
        """Time of one round trip."""
        self.number += 1
        post, answer, number = self.number << ENTRY_BITS | entry, self.answer, self.number
        began = time.perf_counter()
        self.post[0] = post
        while answer[0] != number:
            if answer[0] == -number:
                raise SystemExit("the team answered that it has no product")
        return time.perf_counter() - began


def parts(
    format: str, rows: tuple[int, ...], k: int, tokens: int, copies: int, *, tiles: bool
) -> list[list[HostedPart]]:
    """Copies of the parts of one x."""
    fmt, made, y = get_format(format), [], X + tokens * k * DTYPE.itemsize
    for n in rows:
        coarse = fmt.encode(torch.randn(n, k))
        layout = tile_layout(format, (n, k)) if tiles else fmt.layout((n, k), DTYPE)
        page = pack(pack_tiles(format, coarse, (n, k)) if tiles else coarse, layout, new_page(layout))
        y = (y + 63) // 64 * 64
        made.append([HostedPart(format, DTYPE, (n, k), layout, page.clone(), None, y) for _ in range(copies)])
        y += tokens * n * DTYPE.itemsize
    return list(map(list, zip(*made, strict=True)))


def measure(team: HostedTeam, copies: list[list[HostedPart]], tokens: int, rounds: int) -> list[float]:
    """Sorted seconds of round trips."""
    device = Device(1 << 20)
    box = team.attach(device.memory)
    entries = [team.entry(box, each, tokens, DTYPE) for each in copies]
    turns = max(rounds, 2 * len(entries))
    team.expect(box, 2 * turns)
    seconds = [device.seconds(entries[at % len(entries)]) for at in range(2 * turns)]
    team.detach(box)
    return sorted(seconds[turns:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    most = new_team().threads
    parser.add_argument("--threads", type=int, nargs="+", default=sorted({1, max(1, most // 2), most}))
    parser.add_argument("--format", default="nvfp4")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--bytes", type=int, default=600 << 20, help="of the pages used in turn")
    given = parser.parse_args()
    for name, (rows, k) in SHAPES.items():
        for tiles in (False, True) if given.format in FORMATS else (False,):
            for tokens in given.tokens if name != "tiny" else (1,):
                (one,) = parts(given.format, rows, k, tokens, 1, tiles=tiles)
                if tiles and not all(takes_tiles(p.pages(), DTYPE, Gate("none", gated=False)) for p in one):
                    continue
                nbytes = sum(part.layout.nbytes for part in one)
                count = 1 if name == "tiny" else max(1, given.bytes // nbytes)
                copies = [[part._replace(page=part.page.clone()) for part in one] for _ in range(count)]
                for threads in given.threads:
                    team = HostedTeam(threads)
                    seconds = measure(team, copies, tokens, 2000 if name == "tiny" else given.rounds)
                    team.stop()
                    median = statistics.median(seconds)
                    print(
                        f"{name:7} {'tiles' if tiles else 'rows':5} {tokens} tokens {threads:3} threads: median "
                        f"{1e6 * median:8.1f} us, best {1e6 * seconds[0]:8.1f} us; {nbytes / median / 1e9:6.1f} GB/s, "
                        f"best {nbytes / seconds[0] / 1e9:6.1f}",
                        flush=True,
                    )
    print(libraries())


if __name__ == "__main__":
    main()
