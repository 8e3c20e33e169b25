"""Types of keyword overrides, for type checkers: `vbrt.wrap(model, tiers={"gpu": {"budget": "6GiB"}})`.

`SectionOverrides` takes sections alone; `vbrt.residency.user_policy.Overrides` also takes a policy of the user's.
Tables mirror the sections of `vbrt.config.schema` key by key; tests/config/test_overrides.py compares the two.
"""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from typing import Any, Literal, TypedDict

from vbrt.config.schema import (
    ComputeConfig,
    CpuTier,
    ExpertsConfig,
    GpuTier,
    PeerTier,
    PolicyConfig,
    SeparationConfig,
    SsdTier,
    TiersConfig,
    TrainingConfig,
    VBConfig,
    WeightsConfig,
)

__all__ = ["Config", "OtherSections", "PolicyOverrides", "Preset", "SectionOverrides", "TierName"]

TierName = Literal["gpu", "peer", "cpu", "ssd"]
Preset = Literal[
    "cpu-ssd", "dense", "exact", "fp4", "fp8", "full", "lru", "mxfp4", "mxint8", "nf4", "quantile", "train"
]
#: a preset, the path of a TOML file, a dict, or a config; None: the default
Config = Preset | VBConfig | Mapping[str, Any] | str | PathLike[str] | None


class WeightsOverrides(TypedDict, total=False):
    """Keys of `WeightsConfig`."""

    format: str
    fine: Literal["none", "exact"]
    fine_coding: Literal["auto", "plain", "coded"]
    include: list[str] | tuple[str, ...]
    exclude: list[str] | tuple[str, ...]
    min_parameters: int
    keep_head: bool | Literal["auto"]
    embeddings: bool | Literal["auto"]
    formats: Mapping[str, str]
    budget: int | str | None
    calibrate: str | PathLike[str] | None


class GpuOverrides(TypedDict, total=False):
    """Keys of `GpuTier`."""

    enabled: bool | Literal["auto"]
    budget: int | str
    links: list[int] | tuple[int, ...] | Literal["own", "auto"]
    devices: list[int] | tuple[int, ...] | Literal["current"]


class PeerOverrides(TypedDict, total=False):
    """Keys of `PeerTier`."""

    enabled: bool | Literal["auto"]
    budget: int | str
    devices: list[int] | tuple[int, ...] | Literal["auto"]


class CpuOverrides(TypedDict, total=False):
    """Keys of `CpuTier`."""

    enabled: bool
    budget: int | str
    pinned: bool
    shared: bool
    path: str | PathLike[str] | None


class SsdOverrides(TypedDict, total=False):
    """Keys of `SsdTier`."""

    enabled: bool
    budget: int | str
    path: str | PathLike[str] | None
    io: Literal["auto", "direct", "buffered"]


class TiersOverrides(TypedDict, total=False):
    """Keys of `TiersConfig`."""

    gpu: GpuOverrides | GpuTier
    peer: PeerOverrides | PeerTier
    cpu: CpuOverrides | CpuTier
    ssd: SsdOverrides | SsdTier


class PolicyOverrides(TypedDict, total=False):
    """Keys of `PolicyConfig`."""

    kind: Literal["auto", "scheduled", "lru", "experts"]
    prefetch: int | Literal["auto"]
    scope: Literal["auto", "layer", "model"]
    routing: str | PathLike[str] | None


class ExpertsOverrides(TypedDict, total=False):
    """Keys of `ExpertsConfig`."""

    miss: Literal["fetch", "compute", "auto"]
    drive_wait_s: int


class SeparationOverrides(TypedDict, total=False):
    """Keys of `SeparationConfig`."""

    levels: int
    refresh_every: int


class TrainingOverrides(TypedDict, total=False):
    """Keys of `TrainingConfig`."""

    activations: int | str
    activations_host: int | str
    moments: Literal["fp32", "8bit"]
    ahead: int | str


class ComputeOverrides(TypedDict, total=False):
    """Keys of `ComputeConfig`."""

    backend: Literal["auto", "reference", "compiled", "triton"]
    fp8: bool
    int8: bool
    captures: bool
    joins: bool
    exactness: Literal["bits", "rounded"]
    where: Literal["auto", "device"]


class OtherSections(TypedDict, total=False):
    """Sections of `VBConfig`, without `policy`."""

    weights: WeightsOverrides | WeightsConfig
    tiers: TiersOverrides | TiersConfig
    experts: ExpertsOverrides | ExpertsConfig
    separation: SeparationOverrides | SeparationConfig
    training: TrainingOverrides | TrainingConfig
    compute: ComputeOverrides | ComputeConfig
    mode: Literal["infer", "train", "full"]
    gpu_memory: int | str | None
    context: int | None
    budget: int | str | None


class SectionOverrides(OtherSections, total=False):
    """Sections of `VBConfig`."""

    policy: PolicyOverrides | PolicyConfig
