"""Config sections of the tiers, see `vbrt.config.schema`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from vbrt.config.parse_budgets import parse_budget
from vbrt.config.section import Section, opt
from vbrt.config.value_checks import auto_or, choice, directory, flag, gpus, gpus_or, wrong
from vbrt.errors import ConfigError

__all__ = ["IO_MODES", "CpuTier", "GpuTier", "PeerTier", "SsdTier", "memory_budget"]

IO_MODES = ("auto", "direct", "buffered")


def memory_budget(value: object, where: str) -> int | str:
    """Check for a budget; return it unchanged."""
    parse_budget(value, where=where)
    return value  # type: ignore[return-value]  # parse_budget raises on anything but int and str


@dataclass(frozen=True, slots=True)
class GpuTier(Section):
    """Device memory. enabled: "auto" uses a GPU with memory of its own if there is one, true requires any.

    budget: "auto", bytes, "8GiB" or "40%" of the device; ignored without a GPU.
    links: GPUs whose host links carry pages: "own": the computing one's only; "auto": also all GPUs of this process
    with peer access to it, which relay a part of each page; or their indices.
    devices: GPUs that a model's layers are split over, each with its own tiers; "current": the current one only.
    """

    _key: ClassVar[str] = "tiers.gpu"

    enabled: bool | Literal["auto"] = opt("auto", auto_or(flag))
    budget: int | str = opt("auto", memory_budget)
    links: tuple[int, ...] | Literal["own", "auto"] = opt("own", gpus_or("own", "auto"))
    devices: tuple[int, ...] | Literal["current"] = opt("current", gpus_or("current"))


@dataclass(frozen=True, slots=True)
class PeerTier(Section):
    """Memory of this machine's other GPUs, for pages beyond the computing one's budget. Off by default.

    enabled: "auto" uses other GPUs if there are any, true requires one.
    budget: per GPU: "auto", bytes, "8GiB" or "40%" of the smallest.
    devices: their indices, or "auto": all but the computing one.
    """

    _key: ClassVar[str] = "tiers.peer"

    enabled: bool | Literal["auto"] = opt(False, auto_or(flag))
    budget: int | str = opt("auto", memory_budget)
    devices: tuple[int, ...] | Literal["auto"] = opt("auto", auto_or(gpus))


@dataclass(frozen=True, slots=True)
class CpuTier(Section):
    """Host memory.

    pinned: page-locked with CUDA, so that H2D copies are asynchronous. Pageable memory is copied through a small pinned
    relay, which takes a core.
    shared: ranks of a process group hold an equal part of each page, and gather pages on GPUs; `budget` is per rank.
    path: directory on a tmpfs through which processes of one machine share pages: each page is in memory once.
    Raises ConfigError for `path` with `shared`.
    """

    _key: ClassVar[str] = "tiers.cpu"

    enabled: bool = opt(True, flag)
    budget: int | str = opt("auto", memory_budget)
    pinned: bool = opt(True, flag)
    shared: bool = opt(False, flag)
    path: str | None = opt(None, directory)

    @classmethod
    def _rule(cls, values: Mapping[str, Any], where: str) -> None:
        if values["shared"] and values["path"] is not None:
            raise wrong(f"{where}.path", values["path"], f"{cls._key}.shared = true shares pages already: leave it out")


@dataclass(frozen=True, slots=True)
class SsdTier(Section):
    """Page files under `path` ("~" is expanded; relative to the working directory). Off by default.

    io: "direct" bypasses the page cache, "buffered" uses it, "auto" takes the faster one.
    Raises ConfigError if enabled without a path.
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
