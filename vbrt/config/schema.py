"""Config schema: one frozen tree of dataclasses, read from TOML, dicts or preset names.

    VBConfig
    ├── mode        "infer": frozen planes in tiers; "train": weights that an optimizer moves, through 4 bits;
    │               "full": weights, gradients and optimizer state that train from the tiers
    ├── weights     which modules are swapped, in which format, with or without the fine plane
    ├── tiers       gpu, peer, cpu, ssd: on or off, and how many bytes each may hold
    ├── policy      what stays resident, and how far ahead pages are prefetched
    ├── experts     what happens where a routed expert is missing on the GPU
    ├── separation  the fitted codebook of the `quantile` format; in training the scales of every 4-bit format
    ├── training    what is kept of a forward for its backward pass
    └── compute     which kernels run

Every value is checked where it enters, so a `VBConfig` that exists is a valid one; only `resolve_budgets` needs to
know the machine. An error names the source, the dotted key, what came and what would do:

    my.toml: tiers.gpu.budget = "8 Gigs"; expected "auto", bytes, "8GiB" or "40%"

Configs are frozen; derive a new one with `load_config(config, weights={"format": "nf4"})`,
`assign(config, ["weights.format=nf4"])` or `dataclasses.replace`.
Pure Python: this module imports without torch.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from vbrt.config.format_records import FORMATS, chosen_formats
from vbrt.config.parse_budgets import parse_activations, parse_weights_budget
from vbrt.config.presets import read_toml
from vbrt.config.section import Section, opt
from vbrt.config.tier_sections import IO_MODES, CpuTier, GpuTier, PeerTier, SsdTier, memory_budget
from vbrt.config.value_checks import (
    auto_or,
    choice,
    did_you_mean,
    file,
    flag,
    pattern_table,
    patterns,
    text,
    whole,
    wrong,
)
from vbrt.errors import ConfigError

__all__ = [
    "BACKENDS",
    "FINE_PLANES",
    "IO_MODES",
    "MISSES",
    "MODES",
    "MOMENTS",
    "POLICIES",
    "SAMPLES",
    "SCOPES",
    "ComputeConfig",
    "CpuTier",
    "ExpertsConfig",
    "GpuTier",
    "PeerTier",
    "PolicyConfig",
    "SeparationConfig",
    "SsdTier",
    "TiersConfig",
    "TrainingConfig",
    "VBConfig",
    "WeightsConfig",
    "plain",
]

MODES = ("infer", "train", "full")
FINE_PLANES = ("none", "exact")
POLICIES = ("auto", "scheduled", "lru", "experts")
SCOPES = ("auto", "layer", "model")
MISSES = ("fetch", "compute", "auto")
MOMENTS = ("fp32", "8bit")
BACKENDS = ("auto", "reference", "compiled", "triton")
#: keys of compute that saves of earlier versions have
_RETIRED_COMPUTE = ("fp4",)
#: `weights.calibrate` for text that the model writes itself
SAMPLES = "samples"


def _format(value: object, where: str) -> str:
    return choice(*chosen_formats(), "auto")(value, where)


def _has_fine_plane(format: str) -> bool:
    return format == "auto" or (FORMATS[format].bits == 4 and not FORMATS[format].lossless)


def _held_as(value: object, where: str) -> tuple[tuple[str, str], ...]:
    return pattern_table(*chosen_formats(), "exact")(value, where)


def _weights_budget(value: object, where: str) -> int | str | None:
    if value is not None:
        parse_weights_budget(value, where=where)
    return value  # type: ignore[return-value]  # parse_weights_budget raises on anything but int and str


def _activations(value: object, where: str) -> int | str:
    parse_activations(value, where=where)
    return value  # type: ignore[return-value]  # parse_activations raises on anything but int and str


# ---------------------------------------------------------------------------------------------------------------------
# the tree


@dataclass(frozen=True, slots=True)
class WeightsConfig(Section):
    """Which modules are swapped, and what their weights become.

    include, exclude: fnmatch patterns on module names; a module is swapped if any of `include` and none of `exclude`
    matches. min_parameters: weights with fewer elements stay dense. keep_head: output heads stay dense.
    embeddings: lookup tables (nn.Embedding) go into the tiers too.
    formats: what the weights of some modules become instead, by pattern: a format without fine plane, or "exact", which
    is `format` with it. The last pattern that matches decides.
    budget: with `format = "auto"`, the room for all pages, in bits a weight ("5 bits") or bytes ("2GiB").
    calibrate: a file of text or token ids (.json), or "samples" for text that the model writes itself. The model runs
    on it once, and 4-bit formats are encoded by the inputs that meet each weight.
    Raises ConfigError, also for `fine = "exact"` with `format = "dense"`, which has nothing to add to.
    """

    _key: ClassVar[str] = "weights"

    format: str = opt("nvfp4", _format)
    fine: Literal["none", "exact"] = opt("none", choice(*FINE_PLANES))
    include: tuple[str, ...] = opt(("*",), patterns)
    exclude: tuple[str, ...] = opt((), patterns)
    min_parameters: int = opt(1024, whole(0))
    keep_head: bool = opt(True, flag)
    embeddings: bool = opt(False, flag)
    formats: tuple[tuple[str, str], ...] = field(default=(), metadata={"check": _held_as, "plain": dict})
    budget: int | str | None = opt(None, _weights_budget)
    calibrate: str | None = opt(None, text)

    def held_as(self, *names: str) -> tuple[str, str]:
        """Return the format and the fine plane of a weight by all its names: of its modules, of its parameter."""
        found = [held for pattern, held in self.formats if any(fnmatchcase(name, pattern) for name in names)]
        if not found:
            return self.format, self.fine
        return (self.format, "exact") if found[-1] == "exact" else (found[-1], "none")

    @property
    def lossless(self) -> bool:
        """True if every weight is held bit for bit."""
        every = [(self.format, self.fine), *(self.held_as(pattern) for pattern, _ in self.formats)]
        return all(fine == "exact" or (format != "auto" and FORMATS[format].lossless) for format, fine in every)

    @classmethod
    def _rule(cls, values: Mapping[str, Any], where: str) -> None:
        cls._rule_of_auto(values, where)
        exact = next((pattern for pattern, held in values["formats"] if held == "exact"), None)
        if exact is not None and not _has_fine_plane(values["format"]):
            raise wrong(f"{where}.formats.{exact}", "exact", "set format to the 4-bit format of its coarse plane")
        every = {values["format"], *(held for _, held in values["formats"])}
        if values["calibrate"] is not None and every == {"dense"}:
            expected = "no weight is encoded: name a 4-bit format, or leave it out"
            raise wrong(f"{where}.calibrate", values["calibrate"], expected)
        if not values["include"]:
            raise wrong(f"{where}.include", [], 'expected at least one pattern; ["*"] takes every layer')
        if values["format"] == "dense" and values["fine"] == "exact":
            already = f'format "{values["format"]}" is already exact'
            raise wrong(f"{where}.fine", "exact", f'{already}: set fine = "none", or choose a 4-bit format')
        if values["fine"] == "exact" and not _has_fine_plane(values["format"]):
            expected = f'the codes of "{values["format"]}" have 8 bits, and a fine plane refines 4: choose a 4-bit one'
            raise wrong(f"{where}.fine", "exact", expected)

    @classmethod
    def _rule_of_auto(cls, values: Mapping[str, Any], where: str) -> None:
        auto, budget = values["format"] == "auto", values["budget"]
        if auto and values["fine"] == "exact":
            raise wrong(f"{where}.fine", "exact", 'format = "auto" chooses which layers are exact: set fine = "none"')
        if auto and budget is None:
            raise wrong(
                f"{where}.format", "auto", 'set budget too: bits a weight, e.g. "5 bits", or bytes, e.g. "2GiB"'
            )
        if budget is not None and not auto:
            raise wrong(f"{where}.budget", budget, 'is read with format = "auto" only')


@dataclass(frozen=True, slots=True)
class PolicyConfig(Section):
    """Which pages stay resident: "scheduled" learns the order of each phase, "experts" keeps the routed experts
    that are used often and lately, "lru" the last used pages; "auto" is "experts" for a model that has some, else
    "scheduled".

    prefetch: pages staged ahead of their use, 0 to 64, or "auto", which follows the link and the pages' sizes.
    scope: of "experts": each "layer" has a share of the room, or the "model" is one pool. "auto": whichever loads fewer
    bytes on the recorded routing, where there is one; else "layer".
    routing: a file of `vb.record_routing`, for scope "auto".
    Raises ConfigError for a routing with another scope or kind, which nobody would read.
    """

    _key: ClassVar[str] = "policy"

    kind: Literal["auto", "scheduled", "lru", "experts"] = opt("auto", choice(*POLICIES))
    prefetch: int | Literal["auto"] = opt("auto", auto_or(whole(0, 64)))
    scope: Literal["auto", "layer", "model"] = opt("auto", choice(*SCOPES))
    routing: str | None = opt(None, file)

    @classmethod
    def _rule(cls, values: Mapping[str, Any], where: str) -> None:
        for name, good in (("kind", ("auto", "experts")), ("scope", ("auto",))):
            if values["routing"] is not None and values[name] not in good:
                wants = " or ".join(f'{name} = "{value}"' for value in good)
                raise wrong(f"{where}.routing", values["routing"], f'is read with {wants}, not "{values[name]}"')


@dataclass(frozen=True, slots=True)
class ExpertsConfig(Section):
    """What happens where a token goes to a routed expert whose page is not on the GPU.

    miss: "fetch": the page comes over the link. "compute": the CPU computes the expert where its page lies, while the
    GPU computes the others. "auto": whichever is done earlier by measured rates; link and CPU share a layer's misses.
    Results of the last two are those of the first but for rounding. Only experts in 4 or 8 bits, some tokens at a time.
    """

    _key: ClassVar[str] = "experts"

    miss: Literal["fetch", "compute", "auto"] = opt("fetch", choice(*MISSES))


@dataclass(frozen=True, slots=True)
class SeparationConfig(Section):
    """The codebook of the `quantile` format: `levels` magnitudes plus a sign, refitted every `refresh_every` forwards.

    With mode = "train" also the block scales of every 4-bit format, and `refresh_every` counts optimizer steps.
    levels: 2 to 8, because a code has 4 bits and one of them is the sign.
    """

    _key: ClassVar[str] = "separation"

    levels: int = opt(8, whole(2, 8))
    refresh_every: int = opt(100, whole(1))


@dataclass(frozen=True, slots=True)
class TrainingConfig(Section):
    """What is kept for the backward pass and for the optimizer.

    What is kept of a model's repeated blocks from a forward until its backward pass; results are equal bit for bit:

    activations: "keep" leaves that to autograd; "recompute" keeps the input of each block and computes the rest again;
    "offload" has these inputs in page-locked host memory meanwhile; bytes, "6GiB": whichever of them fits into so much
    device memory, for as many blocks as possible the faster one.
    moments: of mode "full", what the optimizer keeps of gradients: "fp32", or "8bit", rounded after each step.
    activations_host: room for offloaded inputs, as a tier's budget; "auto": half of the memory that is available.
    """

    _key: ClassVar[str] = "training"

    activations: int | str = opt("keep", _activations)
    activations_host: int | str = opt("auto", memory_budget)
    moments: Literal["fp32", "8bit"] = opt("fp32", choice(*MOMENTS))


@dataclass(frozen=True, slots=True)
class ComputeConfig(Section):
    """Which kernels run: "auto" takes the fastest that the device has, "reference" is plain torch, "compiled" C for
    CPUs, built at its first use, and "triton" for GPUs.

    fp8: multiply many tokens at a time in FP8 where the GPU can, which rounds activations to 3 bits of mantissa.
    int8: multiply few tokens at a time in int8 on a CPU, which rounds activations to steps of 1/127 of eight's largest.
    captures: `generate` records its decode steps, as CUDA graphs or on a CPU as tapes; false: each runs Python.
    joins: recorded decode steps may join launches, which round elsewhere in 4 bits, and attend by a steady kernel.
    """

    _key: ClassVar[str] = "compute"

    backend: str = opt("auto", choice(*BACKENDS))
    fp8: bool = opt(False, flag)
    int8: bool = opt(False, flag)
    captures: bool = opt(True, flag)
    joins: bool = opt(True, flag)


def _check_sections(self: Any) -> None:
    for f in fields(self):
        if "section" in f.metadata and not isinstance(getattr(self, f.name), f.metadata["section"]):
            expected = f"expected a {f.metadata['section'].__name__}; VBConfig.from_dict takes dicts"
            raise wrong(f"{type(self).__name__}(...): {f.name}", getattr(self, f.name), expected)


def _section(cls: type) -> Any:
    return field(default_factory=cls, metadata={"section": cls})


@dataclass(frozen=True, slots=True)
class TiersConfig:
    """The places where pages may live. Raises ConfigError when neither gpu nor cpu is enabled: ssd cannot compute."""

    gpu: GpuTier = _section(GpuTier)
    peer: PeerTier = _section(PeerTier)
    cpu: CpuTier = _section(CpuTier)
    ssd: SsdTier = _section(SsdTier)

    def __post_init__(self) -> None:
        _check_sections(self)
        _require_compute_tier(self.gpu, self.cpu, "TiersConfig(...)")


def _require_compute_tier(gpu: GpuTier, cpu: CpuTier, source: str) -> None:
    if not (gpu.enabled or cpu.enabled):
        raise ConfigError(
            f"{source}: tiers.gpu.enabled = false and tiers.cpu.enabled = false; expected at least one of them true, "
            "the ssd tier cannot compute"
        )


@dataclass(frozen=True, slots=True)
class VBConfig:
    """All settings. `source` says where they came from, for messages; it is not compared.

    mode: "infer" holds weights as frozen planes in the tiers; "train" leaves them to an optimizer, on the computing
    device, and rounds them to 4 bits in each forward (not for "dense"); "full" holds weights that an optimizer updates
    on the host, as pages of their bf16 halves, with the rest of their state in host memory or files.
    Raises ConfigError on construction for any value out of place, also for `fine = "exact"` in training.
    """

    weights: WeightsConfig = _section(WeightsConfig)
    tiers: TiersConfig = _section(TiersConfig)
    policy: PolicyConfig = _section(PolicyConfig)
    experts: ExpertsConfig = _section(ExpertsConfig)
    separation: SeparationConfig = _section(SeparationConfig)
    training: TrainingConfig = _section(TrainingConfig)
    compute: ComputeConfig = _section(ComputeConfig)
    mode: Literal["infer", "train", "full"] = opt("infer", choice(*MODES))
    source: str = field(default="defaults", compare=False)

    def __post_init__(self) -> None:
        _check_sections(self)
        choice(*MODES)(self.mode, f"{type(self).__name__}(...): mode")
        if self.mode == "train" and self.weights.format == "auto":
            expected = "it measures a model that does not train: name a format, or take the formats that it chose"
            raise wrong(f'{self.source}: mode = "train" with weights.format', "auto", expected)
        if self.mode == "train" and self.weights.calibrate is not None:
            expected = "weights that train are rounded anew in each step: leave it out"
            raise wrong(f'{self.source}: mode = "train" with weights.calibrate', self.weights.calibrate, expected)
        exact = ["fine"] if self.weights.fine == "exact" else []
        exact += [f"formats.{pattern}" for pattern, held in self.weights.formats if held == "exact"]
        if self.mode == "full" and (self.weights.format != "dense" or self.weights.formats):
            key, value = (
                ("formats", dict(self.weights.formats)) if self.weights.formats else ("format", self.weights.format)
            )
            expected = 'the optimizer moves every bit: set weights.format = "dense" and no weights.formats'
            raise wrong(f'{self.source}: mode = "full" with weights.{key}', value, expected)
        if self.mode == "train" and exact:
            raise wrong(
                f'{self.source}: mode = "train" with weights.{exact[0]}',
                "exact",
                'a weight that trains has no planes to be restored from: set weights.fine = "none" to train '
                'through 4 bits, or weights.format = "dense" to train the exact weights',
            )

    @classmethod
    def from_dict(cls, d: Mapping[str, Any], *, source: str = "dict") -> Self:
        """Make a config from the nested dict of `to_dict`, or any part of it; absent keys keep their defaults.

        Raises ConfigError, naming `source` and the dotted key, for unknown sections and keys, wrong types and values.
        """
        return cls(**_sections(cls, d, source, ""), source=source)

    @classmethod
    def from_save(cls, d: Mapping[str, Any], *, source: str) -> Self:
        """`from_dict` for what `to_dict` gave, of this version or an earlier one, without keys that are gone."""
        compute = d.get("compute")
        if isinstance(compute, Mapping):
            d = {**d, "compute": {key: value for key, value in compute.items() if key not in _RETIRED_COMPUTE}}
        return cls.from_dict(d, source=source)

    @classmethod
    def from_toml(cls, path: str | os.PathLike[str]) -> Self:
        """Read a config from a TOML file. Raises ConfigError if it cannot be read, parsed or accepted."""
        if not isinstance(path, str | os.PathLike):
            raise wrong("path", path, "expected the path of a TOML file")
        source = os.fsdecode(path)
        return cls.from_dict(read_toml(Path(os.path.expanduser(source)), source), source=source)

    def to_dict(self) -> dict[str, Any]:
        """Return plain dicts, lists, strings, numbers, bools and None, without `source`; JSON takes it."""
        return {f.name: plain(getattr(self, f.name)) for f in fields(self) if f.metadata}


def _sections(cls: type, d: object, source: str, prefix: str) -> dict[str, Any]:
    """Return the constructor arguments of `cls`, a dataclass of sections and single keys, from the nested dict `d`."""
    known = {f.name: f.metadata for f in fields(cls) if f.metadata}
    built = {}
    for name, value in _table(d, known, source, prefix).items():
        if "check" in known[name]:
            built[name] = known[name]["check"](value, f"{source}: {name}")
            continue
        section = known[name]["section"]
        if issubclass(section, Section):
            keys = [f.name for f in fields(section)]
            table = _table(value, keys, source, section._key)
            built[name] = section(**section._checked(table, source))
        else:
            parts = _sections(section, value, source, name)
            # before the constructor's own check, so that the error can name the file
            _require_compute_tier(parts.get("gpu", GpuTier()), parts.get("cpu", CpuTier()), source)
            built[name] = section(**parts)
    return built


def _table(d: object, known: Iterable[str], source: str, key: str) -> Mapping[str, Any]:
    """Return `d` if it is a table with no key outside `known`; else raise ConfigError."""
    if not isinstance(d, Mapping):
        where = f"{source}: {key}" if key else source
        raise wrong(where, d, f"expected a table with the keys {', '.join(known)}")
    for name in d:
        if name not in known:
            dotted = f"{key}.{name}" if key else f"{name}"
            kind = "key" if key and key != "tiers" else "section"
            hint = did_you_mean(str(name), known)
            raise ConfigError(f"{source}: {dotted} is not a known {kind}{hint}; expected one of {', '.join(known)}")
    return d


def plain(value: Any) -> Any:
    """Return sections as dicts and tuples as lists, all the way down."""
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: f.metadata.get("plain", plain)(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    return list(value) if isinstance(value, tuple) else value
