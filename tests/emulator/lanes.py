"""What every instruction of a warp works on: registers of 32 lanes, guards, addresses."""

from typing import TYPE_CHECKING

import numpy as np

from tests.emulator.memory import Later
from tests.emulator.parser import immediate
from tests.emulator.values import LANES, TYPES, UNSIGNED

if TYPE_CHECKING:
    from tests.emulator.machine import Block


class Lanes:
    """The registers of a warp. Instructions are methods of subclasses, `_NAME(parts of the opcode, *operands)`."""

    def __init__(self, block: "Block", warp: int) -> None:
        self.block, self.warp = block, warp
        self.spaces, self.known, self.shared = block.spaces, block.known, block.spaces["shared"]
        self.registers: dict[str, np.ndarray] = {"%tid.x": (LANES + 32 * warp).astype(np.uint32)}
        self.guard: np.ndarray | None = None
        self.reads = 0  # of the clock
        self.copies, self.products = Later(), Later()

    def value(self, name: str, kind: str) -> np.ndarray:
        """[32] of the type, or for bf16 its bits."""
        if name.startswith("!"):
            return ~self.value(name[1:], kind)
        dtype = TYPES[kind]
        held = self.registers.get(name)
        if held is not None:
            return held.view(dtype) if held.dtype.itemsize == dtype.itemsize else held.astype(dtype)
        if name == "%globaltimer":  # in nanoseconds
            self.reads += 1
            return np.full(32, self.reads, dtype)
        if name in self.known:
            return np.full(32, self.known[name], dtype)
        return immediate(name, dtype)

    def set(self, name: str, value: np.ndarray) -> None:
        """Lanes that the guard leaves out keep what they have."""
        value = np.ascontiguousarray(value)
        value = value if value.dtype == np.bool_ else value.view(UNSIGNED[value.dtype.itemsize])
        if self.guard is not None:
            value = np.where(self.guard, value, self.registers.get(name, np.zeros_like(value)))
        self.registers[name] = value

    def address(self, operand: str) -> np.ndarray:
        base, _, offset = operand.strip("[] ").partition("+")
        return (self.value(base.strip(), "b64").view(np.int64) + int(offset or "0", 0)).view(np.uint64)

    def names(self, operand: str) -> list[str]:
        return [name.strip() for name in operand.strip("{}").split(",")]
