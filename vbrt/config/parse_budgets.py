"""Parsing of user-written budgets: bytes, a percentage of the machine, or bits per weight."""

import re
from dataclasses import dataclass
from decimal import Decimal
from typing import Literal

from vbrt.config.value_checks import MAX_INT, wrong
from vbrt.errors import ConfigError

__all__ = ["Budget", "parse_activations", "parse_budget", "parse_share", "parse_weights_budget", "size_text"]

_BUDGET_EXPECTED = 'expected "auto", bytes, "8GiB" or "40%"'
_UNIT_BYTES = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_SIZE = re.compile(r"([0-9]{1,19}(?:\.[0-9]{1,19})?) ?([kmgt]?i?b)?", re.IGNORECASE)
_BITS = re.compile(r"([0-9]{1,4}(?:\.[0-9]{1,9})?) ?bits?", re.IGNORECASE)
_IN_BITS = re.compile(r"([0-9.]+) ?([KMGT]i?)b")  # a capital prefix with a small b: "8Gb" are gigabits
_PERCENT = re.compile(r"([0-9]{1,19}(?:\.[0-9]{1,19})?) ?%")


@dataclass(frozen=True, slots=True)
class Budget:
    """Parsed budget. amount: bytes (int) for kind "bytes", 0 < share <= 1 for "fraction", 0 for "auto", bits per
    weight for "bits"."""

    kind: Literal["auto", "bytes", "fraction", "bits"]
    amount: int | float = 0


def parse_budget(value: object, *, where: str, expected: str = _BUDGET_EXPECTED) -> Budget:
    """Parse `"auto"`, a number of bytes (8589934592, "8GiB", "8 GB", "512MiB") or a share ("40%").

    KB, MB, GB, TB count in thousands, KiB, MiB, GiB, TiB in 1024s, also in small letters; "8Gb" is refused, as bits.
    where: named in the ConfigError, e.g. "my.toml: tiers.gpu.budget". expected: said there for any other value.
    """
    if isinstance(value, str):
        if value == "auto":
            return Budget("auto")
        if match := _PERCENT.fullmatch(value):
            share = float(match[1]) / 100
            if not 0 < share <= 1:
                raise wrong(where, value, "expected more than 0% and at most 100%")
            return Budget("fraction", share)
        if match := _IN_BITS.fullmatch(value):
            raise wrong(where, value, f'"b" is for bits; expected bytes: "{match[1]}{match[2]}B"')
        if match := _SIZE.fullmatch(value):
            return Budget("bytes", _bytes_in_range(int(Decimal(match[1]) * _unit(match[2])), value, where))
    elif isinstance(value, int) and not isinstance(value, bool):
        return Budget("bytes", _bytes_in_range(value, value, where))
    raise wrong(where, value, expected)


def parse_ahead(value: object, *, where: str) -> Budget:
    """Parse the memory for updates ahead of the step: as `parse_budget`, or 0. where: as there."""
    if value == 0 and value is not False:
        return Budget("bytes", 0)
    return parse_budget(value, where=where, expected=f"{_BUDGET_EXPECTED}, or 0 for none")


def parse_share(value: object, *, where: str) -> Budget:
    """Parse a share of a GPU's memory: bytes ("12GB") or a percentage of it ("90%"). where: as for `parse_budget`."""
    if value == "auto":
        raise wrong(where, value, 'expected bytes, e.g. "12GB", or a share of the GPU, e.g. "90%"')
    return parse_budget(value, where=where)


def parse_weights_budget(value: object, *, where: str) -> Budget:
    """Parse the room for all pages of a model: bits per weight ("5 bits", "4.75 bits") or bytes (2147483648, "2GiB").

    where: named in the ConfigError, e.g. "my.toml: weights.budget".
    """
    expected = 'expected bits a weight, e.g. "5 bits", or bytes, e.g. "2GiB"'
    if isinstance(value, str) and (match := _BITS.fullmatch(value)) and float(match[1]) > 0:
        return Budget("bits", float(match[1]))
    return _parse_bytes(value, where, expected)


def parse_activations(value: object, *, where: str) -> Budget | str:
    """Parse `training.activations`: "keep", "recompute", "offload", or bytes of device memory ("6GiB").

    where: named in the ConfigError, e.g. "my.toml: training.activations".
    """
    if value in ("keep", "recompute", "offload"):
        return str(value)
    return _parse_bytes(value, where, 'expected "keep", "recompute", "offload" or bytes of device memory, e.g. "6GiB"')


def _parse_bytes(value: object, where: str, expected: str) -> Budget:
    try:
        parsed = parse_budget(value, where=where)
    except ConfigError:
        raise wrong(where, value, expected) from None
    if parsed.kind != "bytes":
        raise wrong(where, value, expected)
    return parsed


def _unit(text: str | None) -> int:
    return _UNIT_BYTES[(text or "").lower()]


def _bytes_in_range(nbytes: int, value: object, where: str) -> int:
    if nbytes < 1:
        raise wrong(where, value, f"{_BUDGET_EXPECTED}; to switch a tier off set enabled = false")
    if nbytes > MAX_INT:
        raise wrong(where, value, f"{_BUDGET_EXPECTED}, and no more than the machine has")
    return nbytes


def size_text(nbytes: int) -> str:
    """Return bytes as the size that a config takes, with two decimals, never more: 6646220800 -> "6.18GiB"."""
    power = next(power for power in (3, 2, 1, 0) if nbytes >= 1 << 10 * power or not power)
    hundredths = nbytes * 100 >> 10 * power
    return f"{hundredths // 100}.{hundredths % 100:02}".rstrip("0").rstrip(".") + ("B", "KiB", "MiB", "GiB")[power]
