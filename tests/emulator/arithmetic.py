"""Instructions on registers: arithmetic, bits, conversions, comparisons, and what lanes tell each other."""

import numpy as np
import torch

from tests.emulator.lanes import Lanes
from tests.emulator.values import BITS, COMPARED, FLOATS, INTEGERS, LANES, TYPES, UNSIGNED, packed, rounded, widened


class Arithmetic(Lanes):
    def compute(self, parts: list[str], operands: list[str]) -> None:
        """What works lane by lane on values of one type."""
        kind = parts[-1]
        *parts, _ = parts
        if "NaN" in parts:
            parts = [f"{parts[0]}.NaN", *(part for part in parts[1:] if part != "NaN")]
        if not {*parts[1:]} <= {"rn", "approx", "ftz", "full"}:
            raise NotImplementedError
        values = [self.value(name, kind) for name in operands[1:]]
        if parts[0] in BITS:
            self.set(operands[0], BITS[parts[0]](*values))
        elif kind in ("bf16", "bf16x2", "f16x2", "s16x2"):
            of = INTEGERS if kind == "s16x2" else FLOATS
            self.set(operands[0], packed(of[parts[0]], values, kind))
        elif kind == "f32":
            self.set(operands[0], FLOATS[parts[0]](*(v.astype(np.float64) for v in values)).astype(np.float32))
        else:
            self.set(operands[0], INTEGERS[parts[0]](*values).astype(values[0].dtype))

    def _mov(self, parts: list[str], to: str, source: str) -> None:
        if source.startswith("{"):
            made = [self.value(name, f"b{int(parts[1][1:]) // 2}") for name in self.names(source)]
            self.set(to, np.stack(made, -1).view(TYPES[parts[1]])[:, 0])
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
        if given == "e4m3x2":
            pair = np.ascontiguousarray(values[0]).view(np.uint8)
            numbers = torch.from_numpy(pair).view(torch.float8_e4m3fn).to(torch.float16).view(torch.int16).numpy()
            self.set(to, numbers.view(np.uint32))
        elif out.endswith("x2"):  # the first source is the upper half
            pair = np.stack([rounded(v, out[:-2]) for v in values[::-1]], -1)
            self.set(to, pair.view(UNSIGNED[2 * pair.dtype.itemsize])[:, 0])
        elif out in ("bf16", "f16"):
            self.set(to, rounded(values[0], out))
        elif given == "bf16":
            self.set(to, widened(values[0]).astype(TYPES[out]))
        elif out == "s8":  # a register has no 8 bits: the sign goes up
            self.set(to, values[0].astype(np.int8).astype(np.int16))
        else:
            self.set(to, values[0].astype(TYPES[out]))

    def _selp(self, parts: list[str], to: str, first: str, second: str, chosen: str) -> None:
        self.set(to, np.where(self.value(chosen, "pred"), self.value(first, parts[1]), self.value(second, parts[1])))

    def _setp(self, parts: list[str], to: str, first: str, second: str) -> None:
        a, b = (self.value(name, parts[-1]) for name in (first, second))
        holds = COMPARED[parts[1].removesuffix("u")](a, b)
        if parts[-1] == "f32" and parts[1] != "nan":
            nan = COMPARED["nan"](a, b)
            holds = holds | nan if parts[1].endswith("u") else holds & ~nan
        self.set(to, holds)

    def _mul(self, parts: list[str], to: str, first: str, second: str) -> None:
        if parts[-1] in ("f32", "bf16", "bf16x2", "f16x2"):
            self.compute(parts, [to, first, second])
        else:
            self._mad(parts, to, first, second, "0")

    def _mad(self, parts: list[str], to: str, first: str, second: str, added: str) -> None:
        """Of integers: the lower or the upper half of the product, or all of it."""
        kind, size = parts[-1], int(parts[-1][1:])
        if len(parts) != 3 or parts[1] not in ("lo", "hi", "wide"):
            raise NotImplementedError
        wide = kind if parts[1] == "lo" else f"{kind[0]}{2 * size}"
        product = np.multiply(*(self.value(name, kind).astype(TYPES[wide]) for name in (first, second)))
        if parts[1] == "hi":
            product, wide = (product >> product.dtype.type(size)).astype(TYPES[kind]), kind
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
        left = self.value(source, parts[1]) << np.uint32(32 - first - count).astype(TYPES[parts[1]])
        self.set(to, left >> np.uint32(32 - count).astype(TYPES[parts[1]]))

    def _shfl(self, parts: list[str], to: str, source: str, lane: str, clamp: str, mask: str) -> None:
        lane = self.value(lane, "u32")
        below = np.where(lane <= LANES, LANES - lane, LANES)
        from_lane = {"bfly": LANES ^ lane, "idx": lane & 31, "up": below}[parts[2]]
        self.set(to, self.value(source, "b32")[from_lane.astype(np.int64)])

    def _movmatrix(self, parts: list[str], to: str, source: str) -> None:
        """Transpose of an 8 by 8 matrix, of which lane 4 g + t has columns 2 t and 2 t + 1 of row g."""
        matrix = self.value(source, "b32").view(np.uint16).reshape(8, 8)
        self.set(to, np.ascontiguousarray(matrix.T).view(np.uint32).reshape(32))

    def _redux(self, parts: list[str], to: str, source: str, mask: str) -> None:
        fold = {"add": np.add, "min": np.minimum, "max": np.maximum}[parts[2]]
        value = self.value(source, parts[3])
        self.set(to, np.full(32, fold.reduce(value), value.dtype))

    def _elect(self, parts: list[str], to: str, mask: str) -> None:
        register, chosen = to.split("|")
        self.set(register, np.zeros(32, np.uint32))
        self.set(chosen, LANES == 0)

    def _cvta(self, parts: list[str], to: str, source: str) -> None:
        self.set(to, self.value(source, "b64"))
