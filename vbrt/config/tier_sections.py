"""Config sections of the tiers, see `vbrt.config.schema`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from vbrt.config.parse_budgets import parse_budget
from vbrt.config.section import Section, opt
from vbrt.config.value_checks import auto_or, choice, directory, flag, gpus, gpus_or
from vbrt.errors import ConfigError

__all__ = ["IO_MODES", "CpuTier", "GpuTier", "PeerTier", "SsdTier", "memory_budget"]

IO_MODES = ("auto", "direct", "buffered")


def memory_budget(value: object, where: str) -> int | str:
    """Check for a budget; return it unchanged."""
    parse_budget(value, where=where)
    return value  # type: ignore[return-value]  # parse_budget raises on anything but int and str


@dataclass(frozen=True, slots=True)
class GpuTier(Section):
    """Device memory. enabled: "auto" uses a GPU where there is one, true insists on it.

    budget: "auto", bytes, "8GiB" or "40%" of the device; without a GPU it says nothing.
    links: the GPUs over whose links pages come from host memory: "own", only the computing one's; "auto", also those of
    all GPUs of this process that it reaches directly, which take a part of each page and hand it on; or their numbers.
    devices: the GPUs that a model's layers are split over, each with tiers of its own; "current": that alone.
    """

    _key: ClassVar[str] = "tiers.gpu"

    enabled: bool | Literal["auto"] = opt("auto", auto_or(flag))
    budget: int | str = opt("auto", memory_budget)
    links: tuple[int, ...] | Literal["own", "auto"] = opt("own", gpus_or("own", "auto"))
    devices: tuple[int, ...] | Literal["current"] = opt("current", gpus_or("current"))


@dataclass(frozen=True, slots=True)
class PeerTier(Section):
    """Memory of this machine's other GPUs, where pages live beyond the computing one's budget. Off unless asked for.

    enabled: "auto" uses other GPUs where there are any, true insists on one.
    budget: of each of them: "auto", bytes, "8GiB" or "40%" of the smallest.
    devices: their numbers, or "auto": all but the computing one.
    """

    _key: ClassVar[str] = "tiers.peer"

    enabled: bool | Literal["auto"] = opt(False, auto_or(flag))
    budget: int | str = opt("auto", memory_budget)
    devices: tuple[int, ...] | Literal["auto"] = opt("auto", auto_or(gpus))


@dataclass(frozen=True, slots=True)
class CpuTier(Section):
    """Host memory. pinned: page-locked where CUDA is there, so that copies to the device run in the background. Memory
    that is not is copied through a small relay that is, which takes a core.

    shared: ranks of one process group keep an equal part of each page, and gather pages on GPUs. budget: of each."""

    _key: ClassVar[str] = "tiers.cpu"

    enabled: bool = opt(True, flag)
    budget: int | str = opt("auto", memory_budget)
    pinned: bool = opt(True, flag)
    shared: bool = opt(False, flag)


@dataclass(frozen=True, slots=True)
class SsdTier(Section):
    """Page files under `path` ("~" is expanded; relative to the working directory). Off unless asked for.

    io: "direct" reads past the page cache, "buffered" through it, "auto" takes the faster one.
    Raises ConfigError when enabled without a path.
    """

    _key: ClassVar[str] = "tiers.ssd"

    enabled: bool = opt(False, flag)
    budget: int | str = opt("auto", memory_budget)
    path: str | None = opt(None, directory)
    io: Literal["auto", "direct", "buffered"] = opt("auto", choice(*IO_MODES))

    @classmethod
    def _rule(cls, values: Mapping[str, Any], where: str) -> None:
        if values["enabled"] and values["path"] is None:
            raise ConfigError(
                f"{where}.path is missing, and {cls._key}.enabled = true needs it; expected a directory on the drive "
                'to use, e.g. path = "~/.cache/vbrt/pages"'
            )
