"""Runs what Triton compiles for a GPU on the CPU: PTX, a warp at a time, its 32 lanes in numpy.

Triton's interpreter knows no inline assembly, and no Gluon. This knows the instructions that our kernels are compiled
to, `wgmma` and the copy engine among them, and stops at any other. It is stricter than a GPU: an access outside of what
was allocated, or at an address that is no multiple of its size, is an error, and so are warps that wait for each other;
shared memory begins as NaN, and so does what `Machine.empty` gives. A `wgmma` reads shared memory at the last moment,
when it is waited for; copies write it then or, with `Machine.late` False, at once: so a wait that is missing shows.
Warps run until they wait and programs until they end, so a barrier that is missing between them may not.

    machine = Machine()
    y = machine.empty(4, 16, dtype=torch.bfloat16)
    machine.run(compiled(...).asm["ptx"], (2, 1), [machine.put(x), y, 4, 16])
    machine.get(y)

Semantics: the PTX ISA, chapter 9.7: which lane has what of a matrix (`mma`, `ldmatrix`, `wgmma`), matrix descriptors
and swizzles of 128 bytes, barriers and their phases.
"""

import functools
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch

from tests.kernels.cuda.gpu_cases import compiled

LANES = np.arange(32)
_BASE = 1 << 20  # of global memory; shared memory is below
_MOST_STEPS = 1 << 18  # of a warp
_SCALARS = {
    "pred": np.bool_, "b8": np.uint8, "u8": np.uint8, "s8": np.int8, "b16": np.uint16, "u16": np.uint16,
    "s16": np.int16, "b32": np.uint32, "u32": np.uint32, "s32": np.int32, "f32": np.float32, "b64": np.uint64,
    "u64": np.uint64, "s64": np.int64, "f16": np.float16, "f16x2": np.uint32, "bf16": np.uint16, "bf16x2": np.uint32,
}  # fmt: skip
_TYPES = {name: np.dtype(scalar) for name, scalar in _SCALARS.items()}
_UNSIGNED = {size: np.dtype(f"u{size}") for size in (1, 2, 4, 8)}
_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.int32: "i32",
          torch.uint8: "u8", torch.float8_e4m3fn: "fp8e4nv"}  # fmt: skip
_COMPARED = {
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "eq": np.equal,
    "ne": np.not_equal,
}
_NO_EFFECT = (
    "targets", "griddepcontrol", "prefetch", "bar.warp", "setmaxnreg", "fence", "wgmma.fence",
)  # fmt: skip
_BITS = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "not": np.invert}


class Buffer(NamedTuple):
    """A tensor in the machine's memory."""

    address: int
    shape: tuple[int, ...]
    dtype: torch.dtype


class Described(NamedTuple):
    """A matrix [rows, columns] of 16-bit numbers for the copy engine: boxes, in shared memory swizzled by 128 bytes."""

    matrix: Buffer
    stride: int  # of its rows
    box: tuple[int, int]


class Instruction(NamedTuple):
    guard: str | None  # "%p1", "!%p1"
    parts: list[str]  # of the opcode
    operands: list[str]


class Space:
    """Bytes with addresses; only what was allocated may be read or written."""

    def __init__(self, first: int, size: int) -> None:
        self.first, self.bytes, self.valid = first, np.full(size, 0xFF, np.uint8), np.zeros(size, np.bool_)
        self.end = 0

    def allocate(self, size: int, align: int = 256, beyond: int = 0) -> int:
        """`beyond` a multiple of align; what lies between two allocations is outside."""
        at = -(-self.end // align) * align + beyond
        self.end = at + size + 1
        self.valid[at : at + size] = True
        return self.first + at

    def places(self, addresses: np.ndarray, size: int) -> np.ndarray:
        """[lanes, size] indices of the bytes at addresses [lanes]."""
        at = addresses.astype(np.int64) - self.first
        if (at % size).any():
            raise IndexError(f"an address is no multiple of {size}")
        places = at[:, None] + np.arange(size)
        if (places < 0).any() or (places >= len(self.bytes)).any() or not self.valid[places].all():
            raise IndexError(f"{size} bytes at {at.tolist()}: outside of what was allocated")
        return places


class Machine:
    """A GPU's memory, and the kernels that run on it, one program after the other."""

    late = True  # when copies into shared memory arrive
    backward = False  # the last program first

    def __init__(self, size: int = 1 << 25) -> None:
        self.memory = Space(_BASE, size)

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
        first = buffer.address - _BASE
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
            data = np.array([value]).astype(_TYPES[kind]).view(np.uint8)
            space.bytes[at : at + len(data)] = data
    return space, known, maps


@dataclass
class Barrier:
    """What is still to come until the phase ends: arrivals, and bytes that the copy engine has been told of."""

    count: int
    pending: int
    bytes: int = 0
    phase: int = 0


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


def launched(kernel: Any, capability: int, grid: Sequence[int], given: Sequence[Any], named: dict[str, Any]) -> None:
    """What `kernel[grid](*given, **named)` does, on tensors of the CPU."""
    machine, arguments = Machine(), []
    types, constants, aligned = {}, {}, []
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
        if isinstance(value, torch.Tensor):
            kind, multiple = f"*{_NAMES[value.dtype]}", value.data_ptr() % 16 == 0
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
    warps, gluon = named["num_warps"], kernel.is_gluon()
    binary = compiled(kernel, types, constants, capability, warps=warps, aligned=aligned, gluon=gluon)
    machine.run(binary.asm["ptx"], (*grid, 1)[:2], arguments)
    for buffer, line in buffers.values():
        line.copy_(machine.get(buffer))


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
def _immediate(text: str, dtype: np.dtype) -> np.ndarray:
    """[32] of a number as it is written, for floats their bits; of a register that nothing was written to, ones."""
    if re.fullmatch(r"%(r|rs|rd|p)\d+", text):
        text = "-1"
    bits = int(text[2:], 16) if text.startswith("0f") else int(text.rstrip("U"), 0)
    return np.full(32, bits & (1 << 8 * dtype.itemsize) - 1, _UNSIGNED[dtype.itemsize]).view(dtype)


def rounded(value: np.ndarray, kind: str = "bf16") -> np.ndarray:
    """To the bits of bf16, f16 or e4m3, to nearest even; to the largest e4m3 beyond it."""
    tensor = torch.from_numpy(np.ascontiguousarray(value))
    if kind == "e4m3":
        return tensor.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    return tensor.to(torch.float16 if kind == "f16" else torch.bfloat16).view(torch.int16).numpy().view(np.uint16)


def widened(bits: np.ndarray) -> np.ndarray:
    """bf16's bits to float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def halves(words: np.ndarray) -> np.ndarray:
    """[..., 2] 16-bit parts of 32-bit words, the lower first."""
    return np.ascontiguousarray(words, np.uint32).view(np.uint16).reshape(*words.shape, 2)


class Later:
    """What a warp has begun, in groups: each is done when it is waited for."""

    def __init__(self) -> None:
        self.groups: list[list[Callable[[], None]]] = [[]]

    def add(self, step: Callable[[], None]) -> None:
        self.groups[-1].append(step)

    def commit(self) -> None:
        self.groups.append([])

    def wait(self, rest: int) -> None:
        """For all groups but the last so many."""
        done = max(0, len(self.groups) - 1 - rest)
        for step in itertools.chain.from_iterable(self.groups[:done]):
            step()
        del self.groups[:done]


class Warp:
    def __init__(self, code: list[Instruction], labels: dict[str, list[int]], block: Block, warp: int) -> None:
        self.code, self.labels, self.block, self.warp = code, labels, block, warp
        self.spaces, self.known, self.shared = block.spaces, block.known, block.spaces["shared"]
        self.registers: dict[str, np.ndarray] = {"%tid.x": (LANES + 32 * warp).astype(np.uint32)}
        self.guard: np.ndarray | None = None
        self.copies, self.products = Later(), Later()

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
            elif not ".".join(parts).startswith(_NO_EFFECT):
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
        except (IndexError, KeyError, NotImplementedError, ValueError) as error:
            raise type(error)(f"{'.'.join(parts)} {', '.join(operands)}: {error}") from error

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

    # -- operands -----------------------------------------------------------------------------------------------------

    def value(self, name: str, kind: str) -> np.ndarray:
        """[32] of the type, or for bf16 its bits."""
        if name.startswith("!"):
            return ~self.value(name[1:], kind)
        dtype = _TYPES[kind]
        held = self.registers.get(name)
        if held is not None:
            return held.view(dtype) if held.dtype.itemsize == dtype.itemsize else held.astype(dtype)
        if name in self.known:
            return np.full(32, self.known[name], dtype)
        return _immediate(name, dtype)

    def set(self, name: str, value: np.ndarray) -> None:
        """Lanes that the guard leaves out keep what they have."""
        value = np.ascontiguousarray(value)
        value = value if value.dtype == np.bool_ else value.view(_UNSIGNED[value.dtype.itemsize])
        if self.guard is not None:
            value = np.where(self.guard, value, self.registers.get(name, np.zeros_like(value)))
        self.registers[name] = value

    def address(self, operand: str) -> np.ndarray:
        base, _, offset = operand.strip("[] ").partition("+")
        return (self.value(base.strip(), "b64").view(np.int64) + int(offset or "0", 0)).view(np.uint64)

    def names(self, operand: str) -> list[str]:
        return [name.strip() for name in operand.strip("{}").split(",")]

    # -- instructions -------------------------------------------------------------------------------------------------

    def step(self, parts: list[str], operands: list[str]) -> None:
        special: Callable[..., None] | None = getattr(self, f"_{parts[0]}", None)
        if special is not None:
            special(parts, *operands)
        else:
            self.compute(parts, operands)

    def compute(self, parts: list[str], operands: list[str]) -> None:
        """What works lane by lane on values of one type."""
        kind = parts[-1]
        *parts, _ = parts
        if "NaN" in parts:
            parts = [f"{parts[0]}.NaN", *(part for part in parts[1:] if part != "NaN")]
        if not {*parts[1:]} <= {"rn", "approx", "ftz", "full"}:
            raise NotImplementedError
        values = [self.value(name, kind) for name in operands[1:]]
        if parts[0] in _BITS:
            self.set(operands[0], _BITS[parts[0]](*values))
        elif kind in ("bf16", "bf16x2"):
            self.set(operands[0], _packed(_FLOATS[parts[0]], values, kind))
        elif kind == "f32":
            self.set(operands[0], _FLOATS[parts[0]](*(v.astype(np.float64) for v in values)).astype(np.float32))
        else:
            self.set(operands[0], _INTEGERS[parts[0]](*values).astype(values[0].dtype))

    def _mov(self, parts: list[str], to: str, source: str) -> None:
        if source.startswith("{"):
            made = [self.value(name, f"b{int(parts[1][1:]) // 2}") for name in self.names(source)]
            self.set(to, np.stack(made, -1).view(_TYPES[parts[1]])[:, 0])
        elif to.startswith("{"):
            value = np.ascontiguousarray(self.value(source, parts[1]))
            apart = value.view(f"u{value.dtype.itemsize // 2}").reshape(32, 2)
            for i, name in enumerate(self.names(to)):
                self.set(name, apart[:, i])
        else:
            self.set(to, self.value(source, parts[1]))

    def _cvt(self, parts: list[str], to: str, *sources: str) -> None:
        out, given = parts[-2], parts[-1]
        if not {*parts[1:-2]} <= {"rn", "satfinite"}:
            raise NotImplementedError
        values = [self.value(name, given) for name in sources]
        if out.endswith("x2"):  # the first source is the upper half
            pair = np.stack([rounded(v, out[:-2]) for v in values[::-1]], -1)
            self.set(to, pair.view(_UNSIGNED[2 * pair.dtype.itemsize])[:, 0])
        elif out in ("bf16", "f16"):
            self.set(to, rounded(values[0], out))
        elif given == "bf16":
            self.set(to, widened(values[0]).astype(_TYPES[out]))
        else:
            self.set(to, values[0].astype(_TYPES[out]))

    def _selp(self, parts: list[str], to: str, first: str, second: str, chosen: str) -> None:
        self.set(to, np.where(self.value(chosen, "pred"), self.value(first, parts[1]), self.value(second, parts[1])))

    def _setp(self, parts: list[str], to: str, first: str, second: str) -> None:
        a, b = (self.value(name, parts[-1]) for name in (first, second))
        holds = _COMPARED[parts[1].removesuffix("u")](a, b)
        if parts[-1] == "f32":
            nan = np.isnan(a) | np.isnan(b)
            holds = holds | nan if parts[1].endswith("u") else holds & ~nan
        self.set(to, holds)

    def _mul(self, parts: list[str], to: str, first: str, second: str) -> None:
        if parts[-1] in ("f32", "bf16", "bf16x2"):
            self.compute(parts, [to, first, second])
        else:
            self._mad(parts, to, first, second, "0")

    def _mad(self, parts: list[str], to: str, first: str, second: str, added: str) -> None:
        """Of integers: the lower or the upper half of the product, or all of it."""
        kind, size = parts[-1], int(parts[-1][1:])
        if len(parts) != 3 or parts[1] not in ("lo", "hi", "wide"):
            raise NotImplementedError
        wide = kind if parts[1] == "lo" else f"{kind[0]}{2 * size}"
        product = np.multiply(*(self.value(name, kind).astype(_TYPES[wide]) for name in (first, second)))
        if parts[1] == "hi":
            product, wide = (product >> product.dtype.type(size)).astype(_TYPES[kind]), kind
        self.set(to, product + self.value(added, wide))

    def _shf(self, parts: list[str], to: str, low: str, high: str, by: str) -> None:
        both = self.value(low, "b32").astype(np.uint64) | self.value(high, "b32").astype(np.uint64) << np.uint64(32)
        count = self.value(by, "b32").astype(np.uint64) & np.uint64(31)
        count = count if parts[1] == "r" else np.uint64(32) - count
        self.set(to, (both >> count).astype(np.uint32))

    def _lop3(self, parts: list[str], to: str, first: str, second: str, third: str, table: str) -> None:
        a, b, c = (self.value(name, "b32") for name in (first, second, third))
        out = np.zeros(32, np.uint32)
        for case in range(8):
            if int(table, 0) >> case & 1:
                bits = [value if case >> 2 - i & 1 else ~value for i, value in enumerate((a, b, c))]
                out |= bits[0] & bits[1] & bits[2]
        self.set(to, out)

    def _prmt(self, parts: list[str], to: str, low: str, high: str, selector: str) -> None:
        given = np.stack([self.value(name, "b32") for name in (low, high)], -1).view(np.uint8)
        nibbles = np.stack([self.value(selector, "b32") >> np.uint32(4 * i) & np.uint32(15) for i in range(4)], -1)
        taken = np.take_along_axis(given, (nibbles & 7).astype(np.int64), 1)
        signs = np.where(taken >> 7, 0xFF, 0).astype(np.uint8)
        self.set(to, np.where(nibbles & 8, signs, taken).astype(np.uint8).view(np.uint32)[:, 0])

    def _bfe(self, parts: list[str], to: str, source: str, first: str, count: str) -> None:
        first, count = int(first, 0), int(count, 0)
        left = self.value(source, parts[1]) << np.uint32(32 - first - count).astype(_TYPES[parts[1]])
        self.set(to, left >> np.uint32(32 - count).astype(_TYPES[parts[1]]))

    def _shfl(self, parts: list[str], to: str, source: str, lane: str, clamp: str, mask: str) -> None:
        lane = self.value(lane, "u32")
        from_lane = {"bfly": LANES ^ lane, "idx": lane & 31}[parts[2]]
        self.set(to, self.value(source, "b32")[from_lane.astype(np.int64)])

    def _redux(self, parts: list[str], to: str, source: str, mask: str) -> None:
        fold = {"add": np.add, "min": np.minimum, "max": np.maximum}[parts[2]]
        value = self.value(source, parts[3])
        self.set(to, np.full(32, fold.reduce(value), value.dtype))

    # -- memory -------------------------------------------------------------------------------------------------------

    def _ld(self, parts: list[str], to: str, source: str) -> None:
        names, dtype, lanes, places = self._access(parts, to, source)
        data = self._space(parts).bytes[places].view(dtype)
        for i, name in enumerate(names):
            old = self.registers.get(name, np.zeros(32, dtype)).copy()
            new = data[:, i] if old.dtype.itemsize == dtype.itemsize else data[:, i].astype(old.dtype)
            old[lanes] = new
            self.registers[name] = old

    def _st(self, parts: list[str], to: str, source: str) -> None:
        names, dtype, lanes, places = self._access(parts, source, to)
        data = np.stack([self.value(name, parts[-1])[lanes] for name in names], -1).astype(dtype)
        self._space(parts).bytes[places] = np.ascontiguousarray(data).view(np.uint8).reshape(places.shape)

    def _access(
        self, parts: list[str], registers: str, address: str
    ) -> tuple[list[str], np.dtype, np.ndarray, np.ndarray]:
        names, dtype = self.names(registers), np.dtype(f"u{int(parts[-1][1:]) // 8}")
        lanes = LANES if self.guard is None else LANES[self.guard]
        places = self._space(parts).places(self.address(address)[lanes], len(names) * dtype.itemsize)
        return names, dtype, lanes, places

    def _space(self, parts: list[str]) -> Space:
        return self.spaces[parts[1].partition("::")[0]]

    def _cp(self, parts: list[str], *operands: str) -> None:
        if "bulk" in parts:
            self._box(*operands)
        elif parts[2] == "wait_group":
            self.copies.wait(int(operands[0], 0))
        elif parts[2] == "commit_group":
            self.copies.commit()
        else:
            self._copy(*operands)

    def _copy(self, to: str, source: str, *rest: str) -> None:
        size, wanted = int(rest[0], 0), self.value(rest[1], "u32") if len(rest) > 1 else np.full(32, int(rest[0], 0))
        assert ((wanted == 0) | (wanted == size)).all()
        lanes = (wanted > 0) & (True if self.guard is None else self.guard)
        places = self.shared.places(self.address(to), size)
        given, memory = np.zeros((32, size), np.uint8), self.spaces["global"]
        given[lanes] = memory.bytes[memory.places(self.address(source)[lanes], size)]
        kept = slice(None) if self.guard is None else self.guard

        def arrive() -> None:
            self.shared.bytes[places[kept]] = given[kept]

        if self.block.late:
            self.copies.add(arrive)
        else:
            arrive()

    def _box(self, to: str, source: str, barrier: str) -> None:
        """What lies outside of the matrix is zero."""
        lane = int(np.flatnonzero(self.guard)[0]) if self.guard is not None else 0
        assert self.guard is None or self.guard.sum() == 1
        described, at = split(source.strip("[] "))
        matrix, stride, (rows, columns) = self.block.maps[int(self.value(described, "b64")[lane])]
        column, row = (int(self.value(name, "s32")[lane]) for name in self.names(at))
        rs, cs = row + np.arange(rows)[:, None], column + np.arange(columns)[None, :]
        inside = (rs >= 0) & (rs < matrix.shape[0]) & (cs >= 0) & (cs < matrix.shape[1])
        memory, box = self.spaces["global"], np.zeros((rows, columns), np.uint16)
        places = memory.places((matrix.address + 2 * (rs * stride + cs))[inside], 2)
        box[inside] = memory.bytes[places].view(np.uint16)[:, 0]
        first = int(self.address(to)[lane])
        assert columns == 64 and first % 128 == 0
        places = self.shared.places(swizzled(first + 2 * np.arange(rows * columns)), 2)
        told = self.block.barriers[int(self.address(barrier)[lane])]

        def fill() -> None:
            self.shared.bytes[places] = box.reshape(-1, 1).view(np.uint8)
            self.block.arrive(told, 0, -2 * rows * columns)

        if self.block.late:
            self.block.boxes.append((told, fill))
        else:
            fill()

    def _mbarrier(self, parts: list[str], *operands: str) -> None:
        address = operands[0 if parts[1] == "init" else 1]
        (at,) = set(self.address(address)[slice(None) if self.guard is None else self.guard].tolist())
        if parts[1] == "init":
            count = int(self.value(operands[1], "u32")[0])
            self.block.barriers[at] = Barrier(count, count)
        elif parts[1] == "try_wait":
            parity = self.value(operands[2], "u32") & np.uint32(1)
            self.block.fill(self.block.barriers[at])
            self.set(operands[0], parity != self.block.barriers[at].phase % 2)
        else:
            tells = int(operands[2], 0) if parts[2] == "expect_tx" else 0
            lanes = 32 if self.guard is None else int(self.guard.sum())
            self.block.arrive(self.block.barriers[at], lanes, tells)

    def _atom(self, parts: list[str], to: str, address: str, given: str) -> None:
        """A lane after the other."""
        kind, operation = parts[-1], parts[-2]
        space, value = self._space(parts), self.value(given, kind)
        old = np.zeros(32, value.dtype)
        for lane in LANES if self.guard is None else LANES[self.guard]:
            place = space.places(self.address(address)[lane : lane + 1], value.dtype.itemsize)[0]
            old[lane] = space.bytes[place].view(value.dtype)[0]
            new = {"exch": value[lane], "add": old[lane] + value[lane], "or": old[lane] | value[lane]}[operation]
            space.bytes[place] = np.array([new], value.dtype).view(np.uint8)
        self.set(to, old)

    def _elect(self, parts: list[str], to: str, mask: str) -> None:
        register, chosen = to.split("|")
        self.set(register, np.zeros(32, np.uint32))
        self.set(chosen, LANES == 0)

    def _cvta(self, parts: list[str], to: str, source: str) -> None:
        self.set(to, self.value(source, "b64"))

    def _stmatrix(self, parts: list[str], to: str, source: str) -> None:
        names = self.names(source)
        matrices = np.stack([self.value(name, "b32") for name in names]).view(np.uint16).reshape(-1, 8, 8)
        rows = matrices.transpose(0, 2, 1) if "trans" in parts else matrices
        places = self.shared.places(self.address(to)[: 8 * len(names)], 16)
        self.shared.bytes[places] = np.ascontiguousarray(rows).reshape(-1, 8).view(np.uint8)

    def _ldmatrix(self, parts: list[str], to: str, source: str) -> None:
        rows = self.shared.bytes[self.shared.places(self.address(source), 16)].view(np.uint16).reshape(4, 8, 8)
        for matrix, name in zip(rows, self.names(to), strict=False):
            matrix = matrix.T if "trans" in parts else matrix
            self.set(name, np.ascontiguousarray(matrix).view(np.uint32).reshape(32))

    # -- matrices -----------------------------------------------------------------------------------------------------

    def _mma(self, parts: list[str], to: str, a: str, b: str, c: str) -> None:
        """m16n8k16: lane 4 g + t has rows g and g + 8 of a and c, and column g of b."""
        if parts[3:] != ["m16n8k16", "row", "col", "f32", "bf16", "bf16", "f32"]:
            raise NotImplementedError
        a, b = (np.stack([self.value(name, "b32") for name in self.names(v)], -1).reshape(8, 4, -1) for v in (a, b))
        a = widened(halves(a)).reshape(8, 4, 2, 2, 2).transpose(3, 0, 2, 1, 4).reshape(16, 16)  # g t (k row) pair
        b = widened(halves(b)).transpose(2, 1, 3, 0).reshape(16, 8)
        added = np.stack([self.value(name, "f32") for name in self.names(c)], -1).reshape(8, 4, 2, 2)
        out = (a.astype(np.float64) @ b).reshape(2, 8, 4, 2).transpose(1, 2, 0, 3) + added
        for i, name in enumerate(self.names(to)):
            self.set(name, out.reshape(32, 4)[:, i].astype(np.float32))

    def _wgmma(self, parts: list[str], *operands: str) -> None:
        if parts[1] == "wait_group":
            for warp in self.block.warps[self.warp // 4 * 4 :][:4]:
                warp.products.wait(int(operands[0], 0))
        elif parts[1] == "commit_group":
            self.products.commit()
        else:
            self._product(parts, *operands)

    def _product(self, parts: list[str], to: str, a: str, b: str, keeps: str, *signs: str) -> None:
        """A warp's 16 rows of m64nNk16: a in registers, b [N, 16] in shared memory, in lines of 64 columns."""
        if parts[5:] != ["f32", "bf16", "bf16"] or signs != ("1", "1", "0") or not a.startswith("{"):
            raise NotImplementedError
        rows = int(re.fullmatch(r"m64n(\d+)k16", parts[4])[1])
        word = int(self.value(b, "b64")[0])
        first, stride, swizzle = (word & 0x3FFF) << 4, (word >> 32 & 0x3FFF) << 4, word >> 62
        assert swizzle == 1 and word >> 49 & 7 == 0
        n, k = np.arange(rows)[:, None], np.arange(16)
        places = self.shared.places(swizzled(first + n // 8 * stride + n % 8 * 128 + 2 * k).flatten(), 2)
        a = np.stack([self.value(name, "b32") for name in self.names(a)], -1).reshape(8, 4, 4)
        a = widened(halves(a)).reshape(8, 4, 2, 2, 2).transpose(3, 0, 2, 1, 4).reshape(16, 16).astype(np.float64)
        kept = self.value(keeps, "pred") if keeps.startswith("%") else np.full(32, int(keeps) != 0)

        def multiply() -> None:
            b_NK = widened(self.shared.bytes[places].view(np.uint16).reshape(rows, 16))
            out = (a @ b_NK.T).reshape(2, 8, rows // 8, 4, 2).transpose(1, 3, 2, 0, 4).reshape(32, -1)
            for i, name in enumerate(self.names(to)):
                total = out[:, i] + np.where(kept, self.value(name, "f32"), 0.0)
                self.registers[name] = total.astype(np.float32).view(np.uint32)

        self.products.add(multiply)


def swizzled(addresses: np.ndarray) -> np.ndarray:
    """Of lines of 128 bytes, eight of which are a pattern: units of 16 bytes change places."""
    return addresses ^ (addresses >> 7 & 7) << 4


def _packed(fn: Callable[..., np.ndarray], values: list[np.ndarray], kind: str) -> np.ndarray:
    """fn on bf16, or on both parts of pairs of them."""
    if kind == "bf16":
        return rounded(fn(*(widened(v).astype(np.float64) for v in values)))
    parts = [widened(halves(v)).astype(np.float64) for v in values]
    return rounded(fn(*parts)).view(np.uint32)[:, 0]


def _shifted(fn: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    """Shifts by 32 and more are not those of the CPU."""

    def shift(value: np.ndarray, by: np.ndarray) -> np.ndarray:
        most = 8 * value.dtype.itemsize - 1
        out = fn(value, np.minimum(by, most).astype(value.dtype))
        return np.where(by > most, fn(out, value.dtype.type(1)), out)

    return shift


def _tanh(a: np.ndarray) -> np.ndarray:
    """As far off as the instruction may be, 2^-11 of the value."""
    fraction, exponent = np.frexp(np.tanh(a))
    return np.ldexp(np.round(fraction * 2048) / 2048, exponent)


def _quotient(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.trunc(a.astype(np.float64) / b)


_INTEGERS: dict[str, Callable[..., np.ndarray]] = {
    "add": np.add, "sub": np.subtract, "min": np.minimum, "max": np.maximum, "neg": np.negative, "abs": np.abs,
    "shl": _shifted(np.left_shift), "shr": _shifted(np.right_shift), "div": _quotient,
    "rem": lambda a, b: a - _quotient(a, b).astype(a.dtype) * b,
}  # fmt: skip
_FLOATS: dict[str, Callable[..., np.ndarray]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide, "min": np.fmin, "max": np.fmax,
    "max.NaN": np.maximum,
    "neg": np.negative, "abs": np.abs, "fma": lambda a, b, c: a * b + c, "ex2": np.exp2,
    "sqrt": np.sqrt, "tanh": _tanh, "rsqrt": lambda a: 1 / np.sqrt(a),
}  # fmt: skip
