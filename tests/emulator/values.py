"""Numbers as the instructions see them: their types, their rounding, and what works lane by lane on them."""

from collections.abc import Callable

import numpy as np
import torch

LANES = np.arange(32)
SCALARS = {
    "pred": np.bool_, "b8": np.uint8, "u8": np.uint8, "s8": np.int8, "b16": np.uint16, "u16": np.uint16,
    "s16": np.int16, "b32": np.uint32, "u32": np.uint32, "s32": np.int32, "f32": np.float32, "b64": np.uint64,
    "u64": np.uint64, "s64": np.int64, "f16": np.float16, "f16x2": np.uint32, "bf16": np.uint16, "bf16x2": np.uint32,
    "e4m3x2": np.uint16, "s16x2": np.uint32,
}  # fmt: skip
TYPES = {name: np.dtype(scalar) for name, scalar in SCALARS.items()}
UNSIGNED = {size: np.dtype(f"u{size}") for size in (1, 2, 4, 8)}
COMPARED = {
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "eq": np.equal,
    "ne": np.not_equal,
    "nan": lambda a, b: np.isnan(a) | np.isnan(b),
}
BITS = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "not": np.invert}


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


def packed(fn: Callable[..., np.ndarray], values: list[np.ndarray], kind: str) -> np.ndarray:
    """fn on bf16, or on both parts of pairs of them, of f16 or of s16."""
    if kind == "s16x2":
        return np.ascontiguousarray(fn(*(halves(v).view(np.int16) for v in values))).view(np.uint32)[:, 0]
    if kind == "f16x2":
        return (
            fn(*(halves(v).view(np.float16).astype(np.float64) for v in values))
            .astype(np.float16)
            .view(np.uint32)[:, 0]
        )
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


INTEGERS: dict[str, Callable[..., np.ndarray]] = {
    "add": np.add, "sub": np.subtract, "min": np.minimum, "max": np.maximum, "neg": np.negative, "abs": np.abs,
    "shl": _shifted(np.left_shift), "shr": _shifted(np.right_shift), "div": _quotient,
    "rem": lambda a, b: a - _quotient(a, b).astype(a.dtype) * b,
}  # fmt: skip
FLOATS: dict[str, Callable[..., np.ndarray]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide, "min": np.fmin, "max": np.fmax,
    "max.NaN": np.maximum, "min.NaN": np.minimum,
    "neg": np.negative, "abs": np.abs, "fma": lambda a, b, c: a * b + c, "ex2": np.exp2,
    "sqrt": np.sqrt, "tanh": _tanh, "rsqrt": lambda a: 1 / np.sqrt(a),
}  # fmt: skip
