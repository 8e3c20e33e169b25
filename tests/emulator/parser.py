"""PTX as text to instructions: what Triton writes, and assembly that a kernel has of its own."""

import functools
import re
from typing import NamedTuple

import numpy as np

from tests.emulator.values import UNSIGNED


class Instruction(NamedTuple):
    guard: str | None  # "%p1", "!%p1"
    parts: list[str]  # of the opcode
    operands: list[str]


def parsed(text: str) -> tuple[list[Instruction], dict[str, list[int]]]:
    """(instructions, label -> indices) of a kernel; assembly in braces may have labels of its own."""
    body = re.sub(r"//[^\n]*", "", text)
    body = body[body.index("{", body.index(".entry")) + 1 : body.rindex("\n}")]
    code: list[Instruction] = []
    labels: dict[str, list[int]] = {}
    for line in re.sub(r"^\s*\.(loc|file|section|pragma)[^\n]*$", "", body, flags=re.MULTILINE).split(";"):
        statement = line.strip().lstrip("{} \n\t")  # of assembly that has registers of its own
        while match := re.match(r"(\$?\w+):\s*", statement):
            labels.setdefault(match[1], []).append(len(code))
            statement = statement[match.end() :].lstrip("{} \n\t")
        if statement.startswith(".branchtargets"):
            code.append(Instruction(None, ["targets"], split(statement.removeprefix(".branchtargets"))))
        elif statement and not statement.startswith("."):
            match = re.fullmatch(r"(?:@(!?[%\w]+)\s+)?([\w.:]+)\s*(.*)", statement, re.DOTALL)
            guard, opcode, operands = match.groups()
            code.append(Instruction(guard, opcode.split("."), split(operands)))
    return code, labels


def split(operands: str) -> list[str]:
    """At commas that are not within braces or brackets."""
    out, depth = [""], 0
    for character in operands:
        depth += (character in "{[") - (character in "}]")
        if character == "," and depth == 0:
            out.append("")
        else:
            out[-1] += character
    return [one.strip() for one in out if one.strip()]


@functools.cache
def immediate(text: str, dtype: np.dtype) -> np.ndarray:
    """[32] of a number as it is written, for floats their bits; of a register that nothing was written to, ones."""
    if re.fullmatch(r"%(r|rs|rd|p)\d+", text):
        text = "-1"
    bits = int(text[2:], 16) if text.startswith("0f") else int(text.rstrip("U"), 0)
    return np.full(32, bits & (1 << 8 * dtype.itemsize) - 1, UNSIGNED[dtype.itemsize]).view(dtype)
