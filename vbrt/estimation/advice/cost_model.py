"""Cost model of one machine: coefficients of predicted times, in a TOML file.

`cost_models/` has h200.toml, for GPUs, and zen4.toml, for CPUs; comments there give the meaning of each key, and its
source as far as that is known. Another machine's set is another file with the same keys: `vbrt advise --cost-model
FILE`.
"""

import datetime
import math
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any

from vbrt.config.format_records import FORMATS
from vbrt.config.presets import read_toml
from vbrt.config.value_checks import choice, did_you_mean, wrong
from vbrt.errors import ConfigError

__all__ = ["CostModel", "default_cost_model", "kernels_of", "read_cost_model"]

#: tier -> kernel family -> the family in `packed_read_share` that its products are predicted by
_MEASURED_AS = {
    "gpu": {"levels": "table", "affine": "table", "bytes": "int8", "plain": "int8", "trellis": "table"},
    "cpu": {"levels": "table", "affine": "e2m1", "bytes": "int8", "plain": "table"},
}
_FOLDER = Path(__file__).with_name("cost_models")
_DEFAULTS = {"gpu": _FOLDER / "h200.toml", "cpu": _FOLDER / "zen4.toml"}


def _number(value: object, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise wrong(where, value, "expected a number above 0")
    return value


def _text(value: object, where: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise wrong(where, value, "expected a string")
    return value


def _date(value: object, where: str) -> datetime.date:
    if type(value) is not datetime.date:
        raise wrong(where, value, "expected a date without quotes, such as 2026-11-24")
    return value


def _numbers(*names: str) -> Callable[[object, str], dict[str, float]]:
    """Return a check for a table of one number for each name."""

    def check(value: object, where: str) -> dict[str, float]:
        if not isinstance(value, dict):
            raise wrong(where, value, f"expected a table of {', '.join(names)}")
        _check_keys(value, names, f"{where}.")
        return {name: _number(value[name], f"{where}.{name}") for name in names}

    return check


def _by_tokens(value: object, where: str) -> dict[int, float]:
    if not isinstance(value, dict) or not all(key.isascii() and key.isdigit() for key in value):
        raise wrong(where, value, "expected a table from numbers of tokens, such as 512 = 1.1")
    return {int(key): _number(each, f"{where}.{key}") for key, each in value.items()}


def _key(check: Callable[[object, str], Any] = _number, *, tier: str | None = None, default: Any = MISSING) -> Any:
    """Return a field whose value is checked; tier: it is in files of this tier only, and others take the default."""
    return field(default=default, metadata={"check": check, "tier": tier})


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """Coefficients of one tier that computes, as the comments of h200.toml and zen4.toml explain them."""

    machine: str = _key(_text)
    date: datetime.date = _key(_date)
    script: str = _key(_text)
    computes_on: str = _key(choice(*_DEFAULTS))
    dense_read_share: float = _key()
    packed_read_share: Mapping[str, float] = _key(_numbers("e2m1", "table", "int8"))
    cache_read_share: float = _key()
    merged_bytes: float = _key()
    matmul_share: float = _key()
    matmul_train_share: float = _key()
    packed_matmul_share: float = _key()
    elementwise_share: float = _key()
    rounded_bytes: float = _key()
    operator_launches: Mapping[str, float] = _key(_numbers("prefill", "decode", "train"))
    lease_launches: float = _key()
    routed_layer_us: float = _key()
    update_launches: float = _key()
    update_bytes: Mapping[str, float] = _key(_numbers("fp32", "8bit"))
    block_launches: float = _key(tier="gpu", default=0.0)
    train_operator_us: float = _key(tier="gpu", default=0.0)
    elementwise_train_share: float | None = _key(tier="gpu", default=None)  # None: as in other passes
    few_rows_read_share: float = _key(tier="gpu", default=1.0)
    few_rows_most: float = _key(tier="gpu", default=0)
    fp8_matmul_ratio: Mapping[int, float] | None = _key(_by_tokens, tier="gpu", default=None)
    generate_ms: float = _key(tier="gpu", default=0.0)
    weight_us: float = _key(tier="gpu", default=0.0)
    routed_us: float = _key(tier="gpu", default=0.0)
    routed_dense_us: float = _key(tier="gpu", default=0.0)
    fetch_us: float = _key(tier="gpu", default=0.0)
    fetch_dense_us: float = _key(tier="gpu", default=0.0)
    ranks_read_share: float = _key(tier="gpu", default=1.0)
    ranks_matmul_share: float = _key(tier="gpu", default=1.0)
    attention_share: float | None = _key(tier="cpu", default=None)  # None: as other products
    recorded_operator_launches: float = _key(tier="cpu", default=0.0)

    @property
    def queued(self) -> bool:
        """True if the device works while the host launches what comes next."""
        return self.computes_on == "gpu"

    def read_share(self, kernels: str | None) -> float:
        """Return the share of the rate of copies at which products of one token read weights of a kernel family; None:
        dense. Those of published formats count as the measured one whose kernels they have, or that is nearest."""
        measured = _MEASURED_AS[self.computes_on].get(kernels or "", kernels or "")
        return self.packed_read_share.get(measured, self.dense_read_share)

    @property
    def repacks(self) -> bool:
        """True if products of experts take the time in which matrices are made ready for them, `Rates.repack_s`."""
        return self.computes_on == "cpu"

    def __str__(self) -> str:
        return f"{self.machine}, {self.date}"

    def to_dict(self) -> dict[str, str]:
        """Return where the coefficients come from, as plain data for JSON."""
        return {"machine": self.machine, "date": str(self.date), "script": self.script}


def kernels_of(format: str | None) -> str | None:
    """Return the kernel family of a format, in whatever order its columns are; None: dense, or decoded."""
    return None if format is None else FORMATS[FORMATS[format].base or format].kernels


def read_cost_model(path: str | os.PathLike[str]) -> CostModel:
    """Read a file of coefficients. Raises ConfigError: it cannot be read, or a key is missing, unknown or wrong."""
    source = os.fspath(path)
    found = read_toml(Path(os.path.expanduser(source)), source)
    tier = choice(*_DEFAULTS)(found.get("computes_on"), f"{source}: computes_on")
    checks = {f.name: f.metadata["check"] for f in fields(CostModel) if f.metadata["tier"] in (None, tier)}
    _check_keys(found, checks, f"{source}: ")
    return CostModel(**{name: check(found[name], f"{source}: {name}") for name, check in checks.items()})


@cache
def default_cost_model(tier: str) -> CostModel:
    """Return the coefficients that ship for a tier that computes, "gpu" or "cpu"."""
    return read_cost_model(_DEFAULTS[tier])


def _check_keys(found: Collection[str], known: Collection[str], where: str) -> None:
    """Raise ConfigError for a key that is unknown, and for one that is missing."""
    for name in found:
        if name not in known:
            raise ConfigError(
                f"{where}{name}: unknown{did_you_mean(name, known)}; expected the keys of files in {_FOLDER}"
            )
    for name in known:
        if name not in found:
            raise ConfigError(f"{where}{name}: missing; expected each key that a file in {_FOLDER} has")
