"""Report how the compiler schedules a loop for sm_90: the products it is done with before it waits for a kind of load.

A load names one of six scoreboards, an instruction the scoreboards that it waits for; loads that share one are waited
for together. `cuobjdump` prints instructions but not these fields, which are read from the 128 bits of each
(Jia et al., arXiv:1804.06826, for Volta; the same on Hopper). Nothing documents them, and a newer compiler may schedule
otherwise with correct kernels: so `scripts/gpu_check.py` records this beside the times, and no test asserts it.
"""

import itertools
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_LINE = re.compile(r"\s*/\*([0-9a-f]{4,5})\*/\s+(.*?);\s+/\* 0x[0-9a-f]{16} \*/\n\s+/\* 0x([0-9a-f]{16}) \*/")


class Instruction(NamedTuple):
    at: int
    text: str
    sets: int  # its scoreboard, 7 for none
    waits: int  # a bit for each scoreboard


def instructions(cubin: Path) -> list[Instruction]:
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    code = subprocess.run([tool, "-sass", cubin], capture_output=True, text=True, check=True).stdout
    found = [(int(at, 16), text, int(high, 16)) for at, text, high in _LINE.findall(code)]
    return [Instruction(at, text, high >> 46 & 7, high >> 52 & 63) for at, text, high in found]


def main_loop(code: list[Instruction]) -> list[Instruction]:
    """Return the first loop with products."""
    for instruction in code:
        target = re.search(r"BRA.*0x([0-9a-f]+)", instruction.text)
        if target and int(target[1], 16) < instruction.at:
            loop = [i for i in code if int(target[1], 16) <= i.at <= instruction.at]
            if any("HMMA" in i.text for i in loop):
                return loop
    raise ValueError("no loop with HMMA")


def products_before_a_wait(cubin: Path, load: str) -> tuple[int, int]:
    """Return (products in the loop, those before the first wait for a `load` of the same turn, all if none waits)."""
    loop = main_loop(instructions(cubin))
    products = sum("HMMA" in i.text for i in loop)
    done, pending = 0, 0
    for i in loop:
        if i.waits & pending:
            return products, done
        done += "HMMA" in i.text
        if load in i.text:
            pending |= 1 << i.sets
    return products, products


def rows() -> Iterator[dict[str, object]]:
    """Report on the gated pair's kernel for one token.

    Where the third product waited for the next tiles already, a pair of 14336 rows took 8 to 15 % longer on an H200.
    """
    from tests.kernels.cuda.gpu_cases import compiled_gated

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "gated.cubin"
        for format, squares in itertools.product(("nvfp4", "mxfp4"), (0, 256)):
            path.write_bytes(compiled_gated(90, 1, squares, 4, format).asm["cubin"])
            products, before = products_before_a_wait(path, "LDG.E.128.STRONG")
            row = {"kernel": "gated", "format": format, "squares": squares, "products": products}
            yield row | {"before_a_wait": before, "enough": 8}
