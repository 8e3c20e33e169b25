"""Instructions on memory: loads and stores, atomics, asynchronous copies, the copy engine and its barriers."""

import numpy as np

from tests.emulator.lanes import Lanes
from tests.emulator.memory import Barrier, Space, swizzled
from tests.emulator.parser import split
from tests.emulator.values import LANES


class Transfers(Lanes):
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
        names = (part.partition("::")[0] for part in parts[1:])  # after what orders accesses
        return self.spaces[next(name for name in names if name not in ("acquire", "release", "sys"))]

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
        told = self._barrier(int(self.address(barrier)[lane]))

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
            self.block.fill(self._barrier(at))
            self.set(operands[0], parity != self._barrier(at).phase % 2)
        else:
            tells = int(operands[2], 0) if parts[2] == "expect_tx" else 0
            lanes = 32 if self.guard is None else int(self.guard.sum())
            self.block.arrive(self._barrier(at), lanes, tells)

    def _barrier(self, at: int) -> Barrier:
        if at not in self.block.barriers:
            raise IndexError(f"no barrier was initialized at {at}")
        return self.block.barriers[at]

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
