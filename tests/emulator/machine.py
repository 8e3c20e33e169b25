"""The machine: its memory, a program's warps, each run until it waits, and kernels launched on tensors of the CPU."""

import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np
import torch

from tests.emulator.arithmetic import Arithmetic
from tests.emulator.matrices import Matrices
from tests.emulator.memory import BASE, Barrier, Buffer, Described, Space
from tests.emulator.parser import Instruction, parsed
from tests.emulator.transfers import Transfers
from tests.emulator.values import TYPES
from tests.kernels.cuda.gpu_cases import compiled

TRITON = "3.6 to 3.9"  # written against 3.6; 3.9 gives .version 8.8 and 9.4
_MOST_STEPS = 1 << 18  # of a warp
NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.int32: "i32",
          torch.int64: "i64", torch.uint8: "u8", torch.int8: "i8", torch.float8_e4m3fn: "fp8e4nv"}  # fmt: skip
NO_EFFECT = (
    "targets", "griddepcontrol", "prefetch", "bar.warp", "setmaxnreg", "fence", "wgmma.fence",
)  # fmt: skip


class UnknownInstruction(NotImplementedError):
    """An instruction, or a modifier of one, that the machine does not know."""


class Machine:
    """A GPU's memory, and the kernels that run on it, one program after the other."""

    late = True  # when copies into shared memory arrive
    backward = False  # the last program first
    pages: Sequence[torch.Tensor] = ()  # what tables of addresses, int64, point to; `launched` puts it in memory

    def __init__(self, size: int = 1 << 25) -> None:
        self.memory = Space(BASE, size)

    def empty(self, *shape: int, dtype: torch.dtype, beyond: int = 0) -> Buffer:
        """Bytes 0xFF: NaN, or -1. At an address `beyond` a multiple of 256."""
        return Buffer(self.memory.allocate(prod(shape) * dtype.itemsize, beyond=beyond), shape, dtype)

    def put(self, tensor: torch.Tensor, beyond: int = 0) -> Buffer:
        buffer = self.empty(*tensor.shape, dtype=tensor.dtype, beyond=beyond)
        self.memory.bytes[self._range(buffer)] = tensor.contiguous().flatten().view(torch.uint8).numpy()
        return buffer

    def get(self, buffer: Buffer) -> torch.Tensor:
        data = torch.from_numpy(self.memory.bytes[self._range(buffer)].copy())
        return data.view(buffer.dtype).view(buffer.shape)

    def run(self, text: str, grid: tuple[int, int], arguments: Sequence[Buffer | Described | int | float]) -> None:
        """All programs of a kernel, one after the other. The arguments are those that are not constants."""
        parameters, known, maps = _parameters(text, arguments)
        code, labels, threads = *parsed(text), int(re.search(r"\.reqntid (\d+)", text)[1])
        known |= {"%ntid.x": threads, "%nctaid.x": grid[0], "%nctaid.y": grid[1], "global_smem": 0}
        programs = list(itertools.product(range(grid[1]), range(grid[0])))
        for y, x in programs[::-1] if self.backward else programs:
            shared = Space(0, 228 << 10)
            shared.allocate(len(shared.bytes))
            known |= {"%ctaid.x": x, "%ctaid.y": y}
            spaces = {"global": self.memory, "shared": shared, "param": parameters}
            Block(spaces, known, maps, threads, self.late).run(code, labels)

    def _range(self, buffer: Buffer) -> slice:
        first = buffer.address - BASE
        return slice(first, first + prod(buffer.shape) * buffer.dtype.itemsize)


def _parameters(
    text: str, arguments: Sequence[Buffer | Described | int | float]
) -> tuple[Space, dict[str, int], dict[int, Described]]:
    """(what a kernel reads its arguments from, where each is, by address what the copy engine is given)."""
    space, maps, known = Space(0, 4096), {}, {}
    declared = re.findall(r"\.param .*?\.([a-z]\d+) .*?(\w+_param_\d+)", text[text.index(".entry") :])
    values: list[Any] = []
    for argument in arguments:
        if isinstance(argument, Described):
            values += [argument, *argument.matrix.shape, argument.stride, 1]
        else:
            values.append(argument.address if isinstance(argument, Buffer) else argument)
    # behind the arguments there are places for memory that these kernels do not ask for
    values += [0] * (len(declared) - len(values))
    for (kind, name), value in zip(declared, values, strict=True):
        at = known[name] = space.allocate(8, 8)
        if isinstance(value, Described):
            maps[at] = value
        else:
            data = np.array([value]).astype(TYPES[kind]).view(np.uint8)
            space.bytes[at : at + len(data)] = data
    return space, known, maps


@dataclass
class Block:
    """What the warps of a program share."""

    spaces: dict[str, Space]
    known: dict[str, int]  # parameters and special registers
    maps: dict[int, Described]  # by address
    threads: int
    late: bool
    boxes: list[tuple[Barrier, Callable[[], None]]] = field(default_factory=list)  # that the copy engine has begun
    warps: list["Warp"] = field(default_factory=list)
    named: dict[str, Barrier] = field(default_factory=dict)
    barriers: dict[int, Barrier] = field(default_factory=dict)  # by address in shared memory
    arrivals: int = 0

    def arrive(self, barrier: Barrier, count: int, bytes: int = 0) -> None:
        self.arrivals += 1
        barrier.pending, barrier.bytes = barrier.pending - count, barrier.bytes + bytes
        assert barrier.pending >= 0, "more arrivals than the barrier was made for"
        if barrier.pending == 0 and barrier.bytes == 0:
            barrier.pending, barrier.phase = barrier.count, barrier.phase + 1

    def fill(self, barrier: Barrier) -> None:
        """Finish the boxes that a barrier is told of."""
        for step in [step for of, step in self.boxes if of is barrier]:
            step()
        self.boxes = [(of, step) for of, step in self.boxes if of is not barrier]

    def run(self, code: list[Instruction], labels: dict[str, list[int]]) -> None:
        """The warps in turn, each until it waits. What they wait for are arrivals."""
        self.warps = [Warp(code, labels, self, warp) for warp in range(self.threads // 32)]
        running = [warp.run() for warp in self.warps]
        while running:
            before, there = self.arrivals, len(running)
            running = [warp for warp in running if next(warp, "ended") != "ended"]
            if len(running) == there and self.arrivals == before:
                raise TimeoutError(f"{there} warps wait for each other")


class Warp(Arithmetic, Transfers, Matrices):
    def __init__(self, code: list[Instruction], labels: dict[str, list[int]], block: Block, warp: int) -> None:
        super().__init__(block, warp)
        self.code, self.labels = code, labels

    def run(self) -> Iterator[None]:
        """Yields where it waits."""
        at = steps = 0
        while at < len(self.code):
            guard, parts, operands = self.code[at]
            self.guard = None if guard is None else self.value(guard, "pred")
            at, steps = at + 1, steps + 1
            if steps > _MOST_STEPS:
                raise TimeoutError(f"a loop that does not end, at {'.'.join(parts)} {', '.join(operands)}")
            if parts[0] in ("bra", "brx", "ret"):
                at = self._jump(at, parts, operands)
            elif parts[0] in ("bar", "barrier") and parts[1] == "sync":
                yield from self._meet(operands[0], (int(operands[1]) if operands[1:] else self.block.threads) // 32)
            elif not ".".join(parts).startswith(NO_EFFECT):
                self._do(parts, operands)
                if parts[:2] == ["mbarrier", "try_wait"] and not self.registers[operands[0]].all():
                    yield
                elif parts[:2] == ["wgmma", "commit_group"]:  # an instruction of four warps
                    yield from self._meet(f"wgmma {self.warp // 4}", 4)

    def _do(self, parts: list[str], operands: list[str]) -> None:
        if self.guard is not None and not self.guard.any():
            return
        try:
            with np.errstate(all="ignore"):
                self.step(parts, operands)
        except IndexError as error:
            raise IndexError(f"{'.'.join(parts)} {', '.join(operands)}: {error}") from error
        except (KeyError, NotImplementedError, TypeError, ValueError) as error:
            raise UnknownInstruction(
                f"{'.'.join(parts)} {', '.join(operands)}: the machine knows the PTX of Triton {TRITON}, not this "
                f"({type(error).__name__}: {error}); teach it in tests/emulator, with a case in instructions.py"
            ) from error

    def _jump(self, at: int, parts: list[str], operands: list[str]) -> int:
        taken = np.ones(1, np.bool_) if self.guard is None else self.guard
        assert taken.all() or not taken.any(), f"lanes part at {operands}"
        if not taken.all():
            return at
        if parts[0] == "ret":
            return len(self.code)
        if parts[0] == "brx":
            index, label = self.value(operands[0], "u32")[0], operands[1]
            operands = [self.code[self.labels[label][0]].operands[index]]
        places = self.labels[operands[0]]
        return places[0] if len(places) == 1 else max(place for place in places if place < at)

    def _meet(self, name: str, warps: int) -> Iterator[None]:
        barrier = self.block.named.setdefault(name, Barrier(warps, warps))
        assert barrier.count == warps
        phase = barrier.phase
        self.block.arrive(barrier, 1)
        while barrier.phase == phase:
            yield

    def step(self, parts: list[str], operands: list[str]) -> None:
        special: Callable[..., None] | None = getattr(self, f"_{parts[0]}", None)
        if special is not None:
            special(parts, *operands)
        else:
            self.compute(parts, operands)


def _moved(addresses: torch.Tensor, places: dict[int, int]) -> torch.Tensor:
    """A table with other addresses of the same pages; other numbers stay."""
    return torch.tensor([places.get(at, at) for at in addresses.flatten().tolist()])


def launched(kernel: Any, capability: int, grid: Sequence[int], given: Sequence[Any], named: dict[str, Any]) -> None:
    """What `kernel[grid](*given, **named)` does, on tensors of the CPU."""
    machine, arguments = Machine(), []
    types, constants, aligned, tables = {}, {}, [], []
    buffers: dict[int, tuple[Buffer, torch.Tensor]] = {}

    def taken(tensor: torch.Tensor) -> Buffer:
        """The memory from a tensor's first to its last element, a copy for each address."""
        span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        line = tensor.as_strided((span,), (1,))
        at = line.data_ptr()
        if at not in buffers:
            buffers[at] = machine.put(line, beyond=at % 16), line
        return buffers[at][0]

    for parameter in kernel.params:
        name, specialized = parameter.name, not parameter.do_not_specialize
        value = given[parameter.num] if parameter.num < len(given) else named[name]
        if parameter.is_constexpr or (isinstance(value, int) and value == 1 and specialized):
            constants[name] = value
            continue
        if isinstance(value, torch.Tensor) and value.dtype is torch.int64:
            kind, multiple, table = "*i64", True, value
            value = machine.put(_moved(table, {page.data_ptr(): taken(page).address for page in Machine.pages}))
            tables.append((value, table))
        elif isinstance(value, torch.Tensor):
            kind, multiple = f"*{NAMES[value.dtype]}", value.data_ptr() % 16 == 0
            value = taken(value)
        elif isinstance(value, int | float):
            kind = "fp32" if isinstance(value, float) else "i32"
            multiple = kind == "i32" and value % 16 == 0 and specialized
        else:
            kind, multiple = f"tensordesc<bf16{value.block_shape},{value.layout!r}>", False
            matrix = taken(value.base)._replace(shape=tuple(value.shape))
            value = Described(matrix, value.strides[0], tuple(value.block_shape))
        types[name] = kind
        arguments.append(value)
        aligned += [name] if multiple else []
    options = {"warps": named["num_warps"], "gluon": kernel.is_gluon(), "fused": named.get("enable_fp_fusion", True)}
    binary = compiled(kernel, types, constants, capability, aligned=aligned, **options)
    machine.run(binary.asm["ptx"], (*grid, 1)[:2], arguments)
    for buffer, line in buffers.values():
        line.copy_(machine.get(buffer))
    places = {taken(page).address: page.data_ptr() for page in Machine.pages}
    for buffer, table in tables:
        table.copy_(_moved(machine.get(buffer), places).view(table.shape))
