"""What the user asks for: one frozen tree of dataclasses, read from TOML, dicts or preset names.

    VBConfig
    ├── mode        "infer": frozen planes in tiers; "train": weights that an optimizer moves
    ├── weights     which modules are swapped, in which format, with or without the fine plane
    ├── tiers       gpu, cpu, ssd: on or off, and how many bytes each may hold
    ├── policy      what stays resident, and how far ahead pages are fetched
    ├── separation  the fitted codebook of the `quantile` format; in training the scales of every 4-bit format
    └── compute     which kernels run

Every value is checked where it enters, so a `VBConfig` that exists is a valid one; only `resolve_budgets` needs to
know the machine. An error names the source, the dotted key, what came and what would do:

    my.toml: tiers.gpu.budget = "8 Gigs"; expected "auto", bytes, "8GiB" or "40%"

Configs are frozen; derive a new one with `load_config(config, weights={"format": "nf4"})`,
`assign(config, ["weights.format=nf4"])` or `dataclasses.replace`.
Pure Python: this module imports without torch.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from decimal import Decimal
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from vbrt.config.formats import FORMATS
from vbrt.errors import ConfigError, describe_os_error
from vbrt.host.files import read_bounded

__all__ = [
    "BACKENDS",
    "DEFAULT_PRESET",
    "FINE_PLANES",
    "IO_MODES",
    "MODES",
    "POLICIES",
    "Budget",
    "ComputeConfig",
    "CpuTier",
    "GpuTier",
    "Machine",
    "PolicyConfig",
    "SeparationConfig",
    "SsdTier",
    "TiersConfig",
    "VBConfig",
    "WeightsConfig",
    "assign",
    "compute_tier",
    "load_config",
    "parse_budget",
    "preset_names",
    "preset_path",
    "resolve_budget",
    "resolve_budgets",
]

MODES = ("infer", "train")
FINE_PLANES = ("none", "exact")
POLICIES = ("scheduled", "lru")
IO_MODES = ("auto", "direct", "buffered")
BACKENDS = ("auto", "reference", "compiled", "triton")
DEFAULT_PRESET = "fp4"

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
_PERCENT = re.compile(r"([0-9]{1,19}(?:\.[0-9]{1,19})?) ?%")
_OVERRIDDEN = " with overrides"
_MAX_INT = 2**63 - 1  # what TOML guarantees to carry, and far above any memory

# share of what is free that "auto" takes; the rest is for activations, the allocator and other programs
AUTO_PERCENT = {"gpu": 90, "cpu": 80, "ssd": 90}


# ---------------------------------------------------------------------------------------------------------------------
# checks: (value, where) -> the value to store, or ConfigError. `where` reads "my.toml: weights.format".


def _shown(value: object) -> str:
    """`value` as the user wrote it in TOML or Python, short enough for one line."""
    if isinstance(value, bool):
        text = "true" if value else "false"
    elif isinstance(value, str):
        text = json.dumps(value, ensure_ascii=False)
    elif isinstance(value, tuple):
        text = repr(list(value))
    elif isinstance(value, int) and value.bit_length() > 256:
        text = f"a number of {value.bit_length()} bits"  # repr() of a far longer one raises
    else:
        text = " ".join(repr(value).split())
    return text if len(text) <= 80 else text[:77] + "..."


def _quoted(names: Iterable[str]) -> str:
    *head, last = [f'"{name}"' for name in names]
    return f"{', '.join(head)} or {last}" if head else last


def _did_you_mean(name: str, known: Iterable[str]) -> str:
    """`; did you mean "format"?`, or nothing where no known name is near."""
    near = difflib.get_close_matches(name.lower(), list(known), n=1)
    return f'; did you mean "{near[0]}"?' if near else ""


def _wrong(where: str, value: object, expected: str) -> ConfigError:
    return ConfigError(f"{where} = {_shown(value)}; {expected}")


def _flag(value: object, where: str) -> bool:
    if not isinstance(value, bool):
        raise _wrong(where, value, "expected true or false")
    return value


def _choice(*names: str) -> Callable[[object, str], str]:
    def check(value: object, where: str) -> str:
        if not isinstance(value, str) or value not in names:
            hint = _did_you_mean(value, names) if isinstance(value, str) else ""
            raise _wrong(where, value, f"expected {_quoted(names)}{hint}")
        return value

    return check


def _format(value: object, where: str) -> str:
    return _choice(*FORMATS)(value, where)


def _whole(low: int, high: int = _MAX_INT) -> Callable[[object, str], int]:
    span = f"a whole number from {low} to {high}" if high != _MAX_INT else f"a whole number, {low} or more"

    def check(value: object, where: str) -> int:
        # bool is an int in Python; `levels = true` is a slip, not a 1
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise _wrong(where, value, f"expected {span}")
        return value

    return check


def _auto_or(check: Callable[[object, str], Any]) -> Callable[[object, str], Any]:
    def check_both(value: object, where: str) -> Any:
        if value == "auto":
            return value
        try:
            return check(value, where)
        except ConfigError as error:
            raise ConfigError(f'{error}, or "auto"') from None

    return check_both


def _patterns(value: object, where: str) -> tuple[str, ...]:
    expected = 'expected a list of module name patterns, e.g. ["model.layers.*", "*.mlp.*"]'
    if not isinstance(value, list | tuple):
        raise _wrong(where, value, expected)
    for pattern in value:
        if not isinstance(pattern, str) or not pattern:
            raise _wrong(where, value, f"{expected}, not {_shown(pattern)} in it")
    return tuple(value)


def _directory(value: object, where: str) -> str | None:
    if value is None:
        return None
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if not isinstance(value, str) or not value.strip() or "\0" in value:
        raise _wrong(where, value, 'expected a directory, e.g. "~/.cache/vbrt/pages"')
    expanded = os.path.expanduser(value)
    if expanded.startswith("~"):  # left alone for a user that does not exist: it would become a folder of that name
        raise _wrong(where, value, 'expected a directory whose "~" names a user of this machine')
    return expanded


def _budget(value: object, where: str) -> int | str:
    parse_budget(value, where=where)
    return value  # type: ignore[return-value]  # parse_budget raises on anything but int and str


def _opt(default: Any, check: Callable[[object, str], Any]) -> Any:
    return field(default=default, metadata={"check": check})


# ---------------------------------------------------------------------------------------------------------------------
# the tree


@dataclass(frozen=True, slots=True)
class _Section:
    """A group of keys: each is checked on construction, and `_rule` checks them together."""

    _key: ClassVar[str] = ""

    def __post_init__(self) -> None:
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        for name, value in self._checked(values, f"{type(self).__name__}(...)").items():
            object.__setattr__(self, name, value)  # normalized: list -> tuple, "~" expanded

    @classmethod
    def _checked(cls, values: Mapping[str, Any], source: str) -> dict[str, Any]:
        """`values` (some or all fields) normalized; raises ConfigError that names `source` and the dotted key."""
        checks = {f.name: f.metadata["check"] for f in fields(cls)}
        checked = {name: checks[name](value, f"{source}: {cls._key}.{name}") for name, value in values.items()}
        defaults = {f.name: f.default for f in fields(cls)}
        cls._rule(defaults | checked, f"{source}: {cls._key}")
        return checked

    @classmethod
    def _rule(cls, values: Mapping[str, Any], where: str) -> None:
        """What must hold between keys of one section; raises ConfigError."""


@dataclass(frozen=True, slots=True)
class WeightsConfig(_Section):
    """Which modules are swapped, and what their weights become.

    include, exclude: fnmatch patterns on module names; a module is swapped if any of `include` and none of `exclude`
    matches. min_parameters: weights with fewer elements stay dense. keep_head: output heads stay dense.
    embeddings: lookup tables (nn.Embedding) go into the tiers too.
    Raises ConfigError, also for `fine = "exact"` with `format = "dense"`, which has nothing to add to.
    """

    _key: ClassVar[str] = "weights"

    format: str = _opt("nvfp4", _format)
    fine: Literal["none", "exact"] = _opt("none", _choice(*FINE_PLANES))
    include: tuple[str, ...] = _opt(("*",), _patterns)
    exclude: tuple[str, ...] = _opt((), _patterns)
    min_parameters: int = _opt(1024, _whole(0))
    keep_head: bool = _opt(True, _flag)
    embeddings: bool = _opt(False, _flag)

    @classmethod
    def _rule(cls, values: Mapping[str, Any], where: str) -> None:
        if not values["include"]:
            raise _wrong(f"{where}.include", [], 'expected at least one pattern; ["*"] takes every layer')
        if FORMATS[values["format"]].lossless and values["fine"] == "exact":
            already = f'format "{values["format"]}" is already exact'
            raise _wrong(f"{where}.fine", "exact", f'{already}: set fine = "none", or choose a 4-bit format')


@dataclass(frozen=True, slots=True)
class GpuTier(_Section):
    """Device memory. enabled: "auto" uses a GPU where there is one, true insists on it.

    budget: "auto", bytes, "8GiB" or "40%" of the device; without a GPU it says nothing.
    """

    _key: ClassVar[str] = "tiers.gpu"

    enabled: bool | Literal["auto"] = _opt("auto", _auto_or(_flag))
    budget: int | str = _opt("auto", _budget)


@dataclass(frozen=True, slots=True)
class CpuTier(_Section):
    """Host memory. pinned: page-locked where CUDA is there, so that copies to the device run in the background. Memory
    that is not is copied through a small relay that is, which takes a core."""

    _key: ClassVar[str] = "tiers.cpu"

    enabled: bool = _opt(True, _flag)
    budget: int | str = _opt("auto", _budget)
    pinned: bool = _opt(True, _flag)


@dataclass(frozen=True, slots=True)
class SsdTier(_Section):
    """Page files under `path` ("~" is expanded; relative to the working directory). Off unless asked for.

    io: "direct" reads past the page cache, "buffered" through it, "auto" takes the faster one.
    Raises ConfigError when enabled without a path.
    """

    _key: ClassVar[str] = "tiers.ssd"

    enabled: bool = _opt(False, _flag)
    budget: int | str = _opt("auto", _budget)
    path: str | None = _opt(None, _directory)
    io: Literal["auto", "direct", "buffered"] = _opt("auto", _choice(*IO_MODES))

    @classmethod
    def _rule(cls, values: Mapping[str, Any], where: str) -> None:
        if values["enabled"] and values["path"] is None:
            raise ConfigError(
                f"{where}.path is missing, and {cls._key}.enabled = true needs it; expected a directory on the drive "
                'to use, e.g. path = "~/.cache/vbrt/pages"'
            )


@dataclass(frozen=True, slots=True)
class PolicyConfig(_Section):
    """What stays resident: "scheduled" learns the order of the last pass, "lru" keeps what was used last.

    prefetch: pages fetched ahead of their use, 0 to 64, or "auto": what the link and the pages' sizes ask for.
    """

    _key: ClassVar[str] = "policy"

    kind: Literal["scheduled", "lru"] = _opt("scheduled", _choice(*POLICIES))
    prefetch: int | Literal["auto"] = _opt("auto", _auto_or(_whole(0, 64)))


@dataclass(frozen=True, slots=True)
class SeparationConfig(_Section):
    """The codebook of the `quantile` format: `levels` magnitudes plus a sign, refitted every `refresh_every` forwards.

    With mode = "train" also the block scales of every 4-bit format, and `refresh_every` counts optimizer steps.
    levels: 2 to 8, because a code has 4 bits and one of them is the sign.
    """

    _key: ClassVar[str] = "separation"

    levels: int = _opt(8, _whole(2, 8))
    refresh_every: int = _opt(100, _whole(1))


@dataclass(frozen=True, slots=True)
class ComputeConfig(_Section):
    """Which kernels run: "auto" takes the fastest that the device has, "reference" is plain torch, "compiled" C for
    CPUs, built at its first use, and "triton" for GPUs.

    fp8: multiply many tokens at a time in FP8 where the GPU can, which rounds activations to 3 bits of mantissa.
    fp4: experimental, never run on a GPU that has it: the same in FP4, which rounds activations to 1 bit of mantissa.
    With both, FP8 is for GPUs without FP4.
    """

    _key: ClassVar[str] = "compute"

    backend: str = _opt("auto", _choice(*BACKENDS))
    fp8: bool = _opt(False, _flag)
    fp4: bool = _opt(False, _flag)


def _check_sections(self: Any) -> None:
    for f in fields(self):
        if "section" in f.metadata and not isinstance(getattr(self, f.name), f.metadata["section"]):
            expected = f"expected a {f.metadata['section'].__name__}; VBConfig.from_dict takes dicts"
            raise _wrong(f"{type(self).__name__}(...): {f.name}", getattr(self, f.name), expected)


def _section(cls: type) -> Any:
    return field(default_factory=cls, metadata={"section": cls})


@dataclass(frozen=True, slots=True)
class TiersConfig:
    """The places where pages may live. Raises ConfigError when neither gpu nor cpu is enabled: ssd cannot compute."""

    gpu: GpuTier = _section(GpuTier)
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
    """Everything the user may ask for. `source` says where it came from, for messages; it is not compared.

    mode: "infer" holds weights as frozen planes in the tiers; "train" leaves them to an optimizer, on the computing
    device, and rounds them to 4 bits in each forward (not for "dense").
    Raises ConfigError on construction for any value out of place, also for `fine = "exact"` in training.
    """

    weights: WeightsConfig = _section(WeightsConfig)
    tiers: TiersConfig = _section(TiersConfig)
    policy: PolicyConfig = _section(PolicyConfig)
    separation: SeparationConfig = _section(SeparationConfig)
    compute: ComputeConfig = _section(ComputeConfig)
    mode: Literal["infer", "train"] = _opt("infer", _choice(*MODES))
    source: str = field(default="defaults", compare=False)

    def __post_init__(self) -> None:
        _check_sections(self)
        _choice(*MODES)(self.mode, f"{type(self).__name__}(...): mode")
        if self.mode == "train" and self.weights.fine == "exact":
            raise _wrong(
                f'{self.source}: mode = "train" with weights.fine',
                "exact",
                'a weight that trains has no planes to be restored from: set weights.fine = "none" to train '
                'through 4 bits, or weights.format = "dense" to train the exact weights',
            )

    @classmethod
    def from_dict(cls, d: Mapping[str, Any], *, source: str = "dict") -> Self:
        """The nested dict of `to_dict` (any part of it; what is absent keeps its default) as a config.

        Raises ConfigError, naming `source` and the dotted key, for unknown sections and keys, wrong types and values.
        """
        return cls(**_sections(cls, d, source, ""), source=source)

    @classmethod
    def from_toml(cls, path: str | os.PathLike[str]) -> Self:
        """The config in a TOML file. Raises ConfigError if it cannot be read, parsed or accepted."""
        source = os.fsdecode(path)
        return cls.from_dict(_read_toml(Path(os.path.expanduser(source)), source), source=source)

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, lists, strings, ints, bools (and None for no ssd path), without `source`; JSON takes it."""
        return {f.name: _plain(getattr(self, f.name)) for f in fields(self) if f.metadata}

    def to_toml(self) -> str:
        """The whole config as TOML text; `from_toml` of it gives an equal config."""
        return "\n".join(_toml_tables(self.to_dict(), "")).lstrip("\n") + "\n"


def _sections(cls: type, d: object, source: str, prefix: str) -> dict[str, Any]:
    """The constructor arguments of `cls`, a dataclass of sections and single keys, from the nested dict `d`."""
    known = {f.name: f.metadata for f in fields(cls) if f.metadata}
    built = {}
    for name, value in _table(d, known, source, prefix).items():
        if "check" in known[name]:
            built[name] = known[name]["check"](value, f"{source}: {name}")
            continue
        section = known[name]["section"]
        if issubclass(section, _Section):
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
    """`d`, known to be a table with no key outside `known`."""
    if not isinstance(d, Mapping):
        where = f"{source}: {key}" if key else source
        raise _wrong(where, d, f"expected a table with the keys {', '.join(known)}")
    for name in d:
        if name not in known:
            dotted = f"{key}.{name}" if key else f"{name}"
            kind = "key" if key and key != "tiers" else "section"
            hint = _did_you_mean(str(name), known)
            raise ConfigError(f"{source}: {dotted} is not a known {kind}{hint}; expected one of {', '.join(known)}")
    return d


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return list(value) if isinstance(value, tuple) else value


def _toml_tables(table: Mapping[str, Any], name: str) -> Iterable[str]:
    values = {key: value for key, value in table.items() if not isinstance(value, Mapping)}
    if values and name:
        yield f"\n[{name}]"
    for key, value in values.items():
        if value is not None:  # TOML has no null: an absent key is the default, None
            yield f"{key} = {_toml_value(value)}"
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _toml_tables(value, f"{name}.{key}" if name else key)


def _toml_value(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(_toml_value(item) for item in value)}]"
    # JSON literals are TOML literals, but for the DEL character, which only TOML wants escaped
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


_MAX_TOML_BYTES = 1 << 20


def _read_toml(path: Path, source: str) -> dict[str, Any]:
    try:
        text = read_bounded(path, _MAX_TOML_BYTES).decode("utf-8-sig")  # editors on Windows write a BOM, TOML has none
    except FileNotFoundError:
        hint = f'; for the preset write "{path.stem}"' if path.stem in preset_names() else ""
        raise ConfigError(f"{source}: no such file; expected a TOML file{hint}") from None
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{source}: not UTF-8 (at line {line}); expected a TOML file in UTF-8") from error
    except OSError as error:
        raise ConfigError(f"{source}: cannot be read ({describe_os_error(error)}); expected a TOML file") from error
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # plain ValueError: a number of thousands of digits
        reason = str(error).replace("at end of document", f"at line {text.count(chr(10)) + 1}, the end of the file")
        raise ConfigError(f'{source}: not valid TOML: {reason}; expected lines such as budget = "8GiB"') from error


# ---------------------------------------------------------------------------------------------------------------------
# presets and loading


def _preset_dir() -> Path:
    # an installed wheel carries the presets inside the package, a checkout keeps them beside it
    package = Path(__file__).parent.parent
    for folder in (package / "configs", package.parent / "configs"):
        if (folder / f"{DEFAULT_PRESET}.toml").is_file():
            return folder
    raise ConfigError(
        f"presets: no configs/{DEFAULT_PRESET}.toml in {package} or {package.parent}; "
        "expected the presets that ship with vbrt: reinstall it"
    )


def preset_names() -> tuple[str, ...]:
    """The names of the presets that ship with vbrt, sorted."""
    folder = _preset_dir()
    try:
        return tuple(sorted(path.stem for path in folder.glob("*.toml")))
    except OSError as error:
        raise ConfigError(
            f"presets: {folder} cannot be listed ({describe_os_error(error)}); give a config as a dict, "
            "or try again once that is mended"
        ) from error


def preset_path(name: str) -> Path:
    """The TOML file of a preset. Raises ConfigError, listing the presets, for an unknown name."""
    names = preset_names()
    if name not in names:
        raise ConfigError(
            f"{_shown(name)} is not a preset{_did_you_mean(str(name), names)}; "
            f"expected {_quoted(names)}, or the path of a TOML file"
        )
    return _preset_dir() / f"{name}.toml"


def load_config(
    config: VBConfig | str | os.PathLike[str] | Mapping[str, Any] | None = None, **overrides: Any
) -> VBConfig:
    """A config from whatever the user has, with `overrides` merged in key by key.

    config: None (the preset "fp4"), a preset name, the path of a TOML file, a nested dict, or a VBConfig.
    overrides: one nested dict (or config section) per section, e.g. `weights={"format": "nf4"}`,
    `tiers={"ssd": {"enabled": True, "path": "/nvme"}}`.
    Raises ConfigError; the config alone must be valid, and so must the result.
    """
    base = _load(config)
    if not overrides:
        return base
    merged = _merged(base.to_dict(), _plain(overrides))
    return VBConfig.from_dict(merged, source=f"{base.source.removesuffix(_OVERRIDDEN)}{_OVERRIDDEN}")


def assign(config: VBConfig, assignments: Iterable[str]) -> VBConfig:
    """A config with the command line's `--set`: "tiers.gpu.budget=8GiB", "weights.exclude=['*.mlp.*']".

    A value is read as TOML where it is a number, true, false, a quoted string or a list, and else taken as it stands.
    Later ones win. Raises ConfigError, naming the settings, for what a file may not say either.
    """
    assignments = tuple(assignments)
    if not assignments:
        return config
    merged = config.to_dict()
    for text in assignments:
        key, equals, value = text.partition("=")
        parts = [part.strip() for part in key.split(".")]
        if not equals or not all(parts):
            raise ConfigError(f"--set {text}: expected key=value with a dotted key, e.g. tiers.gpu.budget=8GiB")
        nested: Any = _assigned(value.strip())
        for part in reversed(parts):
            nested = {part: nested}
        merged = _merged(merged, nested)
    return VBConfig.from_dict(merged, source=f"{config.source} with {' '.join(f'--set {a}' for a in assignments)}")


def _assigned(text: str) -> Any:
    try:
        values = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    is_one = len(values) == 1 and isinstance(values["value"], bool | int | float | str | list)
    return values["value"] if is_one else text  # TOML also has dates and tables, no key takes one


def _load(config: object) -> VBConfig:
    if isinstance(config, VBConfig):
        return config
    if config is None:
        config = DEFAULT_PRESET
    if isinstance(config, Mapping):
        return VBConfig.from_dict(config)
    if isinstance(config, str):
        names_a_file = config.endswith(".toml") or "/" in config or os.sep in config or os.path.isfile(config)
        if names_a_file and config not in preset_names():
            return VBConfig.from_toml(config)
        return replace(VBConfig.from_toml(preset_path(config)), source=f'preset "{config}"')
    if isinstance(config, os.PathLike):
        return VBConfig.from_toml(config)
    raise ConfigError(
        f"config = {_shown(config)}; expected a preset name, the path of a TOML file, a dict or a VBConfig"
    )


def _merged(base: Any, over: Any) -> Any:
    if not (isinstance(base, Mapping) and isinstance(over, Mapping)):
        return over
    return {**base, **{key: _merged(base.get(key), value) for key, value in over.items()}}


# ---------------------------------------------------------------------------------------------------------------------
# budgets


@dataclass(frozen=True, slots=True)
class Budget:
    """A parsed budget. amount: bytes (int) for kind "bytes", 0 < share <= 1 for "fraction", 0 for "auto"."""

    kind: Literal["auto", "bytes", "fraction"]
    amount: int | float = 0


@dataclass(frozen=True, slots=True)
class Machine:
    """What there is to share out, in bytes. gpu: None without a device; ssd: None where no ssd tier is asked for."""

    gpu_total_bytes: int | None
    gpu_free_bytes: int | None
    cpu_total_bytes: int
    cpu_available_bytes: int
    ssd_free_bytes: int | None = None


def parse_budget(value: object, *, where: str) -> Budget:
    """`"auto"`, a number of bytes (8589934592, "8GiB", "8 GB", "512MiB") or a share ("40%").

    KB, MB, GB, TB count in thousands, KiB, MiB, GiB, TiB in 1024s; case does not matter. where: what the ConfigError
    names, e.g. "my.toml: tiers.gpu.budget".
    """
    if isinstance(value, str):
        if value == "auto":
            return Budget("auto")
        if match := _PERCENT.fullmatch(value):
            share = float(match[1]) / 100
            if not 0 < share <= 1:
                raise _wrong(where, value, "expected more than 0% and at most 100%")
            return Budget("fraction", share)
        if match := _SIZE.fullmatch(value):
            return Budget("bytes", _bytes_in_range(int(Decimal(match[1]) * _unit(match[2])), value, where))
    elif isinstance(value, int) and not isinstance(value, bool):
        return Budget("bytes", _bytes_in_range(value, value, where))
    raise _wrong(where, value, _BUDGET_EXPECTED)


def _unit(text: str | None) -> int:
    return _UNIT_BYTES[(text or "").lower()]


def _bytes_in_range(nbytes: int, value: object, where: str) -> int:
    if nbytes < 1:
        raise _wrong(where, value, f"{_BUDGET_EXPECTED}; to switch a tier off set enabled = false")
    if nbytes > _MAX_INT:
        raise _wrong(where, value, f"{_BUDGET_EXPECTED}, and no more than the machine has")
    return nbytes


def resolve_budgets(config: VBConfig, machine: Machine) -> dict[str, int]:
    """Tier name -> bytes, for each tier that is enabled and exists here, fastest first.

    "auto" is 90 % of the free device memory, 80 % of the available host memory, 90 % of the free space of the drive.
    A percentage counts from the total (of the drive: from the free space). Raises ConfigError for more than the
    machine has, for an ssd path whose free space is unknown, and as `compute_tier`.
    """
    tiers = config.tiers
    here = {"gpu": compute_tier(config, machine) == "gpu", "cpu": tiers.cpu.enabled, "ssd": tiers.ssd.enabled}
    return {name: resolve_budget(config, machine, name) for name, is_here in here.items() if is_here}


def compute_tier(config: VBConfig, machine: Machine) -> str:
    """ "gpu" or "cpu": where kernels run. Raises ConfigError where a GPU is insisted on and there is none, and when no
    tier is left to compute on."""
    tiers, has_gpu = config.tiers, machine.gpu_total_bytes is not None
    if tiers.gpu.enabled is True and not has_gpu:
        raise _wrong(
            f"{config.source}: tiers.gpu.enabled",
            True,
            'this machine has no GPU that torch can use; "auto" computes on the cpu where there is none',
        )
    if not tiers.cpu.enabled and not (tiers.gpu.enabled and has_gpu):
        why = "this machine has no GPU" if tiers.gpu.enabled else "tiers.gpu.enabled = false"
        raise ConfigError(
            f"{config.source}: tiers.cpu.enabled = false, and {why}; no tier is left to compute on, "
            "set tiers.cpu.enabled = true"
        )
    return "gpu" if tiers.gpu.enabled and has_gpu else "cpu"


def resolve_budget(config: VBConfig, machine: Machine, name: str) -> int:
    """The bytes of one tier that is enabled and exists here, whatever the others ask for; as `resolve_budgets`."""
    total, free = _room(config, machine, name)
    return _resolved(getattr(config.tiers, name).budget, name, total, free, f"{config.source}: tiers.{name}.budget")


def _room(config: VBConfig, machine: Machine, name: str) -> tuple[int, int]:
    """(total, free) in bytes."""
    if name == "gpu":
        total, free = machine.gpu_total_bytes, machine.gpu_free_bytes
        return total, total if free is None else free
    if name == "cpu":
        return machine.cpu_total_bytes, machine.cpu_available_bytes
    if machine.ssd_free_bytes is None:
        raise _wrong(
            f"{config.source}: tiers.ssd.path",
            config.tiers.ssd.path,
            "expected a directory on a drive whose free space is known",
        )
    return machine.ssd_free_bytes, machine.ssd_free_bytes


def _resolved(value: int | str, name: str, total: int, free: int, where: str) -> int:
    budget = parse_budget(value, where=where)
    if budget.kind == "auto":
        return free * AUTO_PERCENT[name] // 100
    if budget.kind == "fraction":
        return int(total * budget.amount)
    if budget.amount > total:
        has = f"{total / 2**30:.2f} GiB ({total} bytes)" + (" free" if name == "ssd" else "")
        raise _wrong(where, value, f'this machine has {has}; expected no more than that, "auto" or a percentage')
    return int(budget.amount)
