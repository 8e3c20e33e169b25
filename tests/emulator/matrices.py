"""Instructions on matrices, by which lane has what of them: `mma`, and `wgmma` of four warps."""

import re

import numpy as np

from tests.emulator.lanes import Lanes
from tests.emulator.memory import swizzled
from tests.emulator.values import halves, widened


class Matrices(Lanes):
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
