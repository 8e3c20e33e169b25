"""What sm_90's machine code says of waiting: which products a loop is done with before it waits for a kind of load.

A load names one of six scoreboards, an instruction the scoreboards that it waits for; loads that share one are waited
for together. `cuobjdump` prints instructions but not these fields, which are read from the 128 bits of each
(Jia et al., arXiv:1804.06826, for Volta; the same on Hopper).
"""

import re
import subprocess
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
    """The first loop with products."""
    for instruction in code:
        target = re.search(r"BRA.*0x([0-9a-f]+)", instruction.text)
        if target and int(target[1], 16) < instruction.at:
            loop = [i for i in code if int(target[1], 16) <= i.at <= instruction.at]
            if any("HMMA" in i.text for i in loop):
                return loop
    raise ValueError("no loop with HMMA")


def products_before_a_wait(cubin: Path, load: str) -> tuple[int, int]:
    """(products in the loop, those before the first wait for a `load` of the same turn, all if none waits)."""
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
