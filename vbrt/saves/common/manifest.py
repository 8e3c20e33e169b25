"""vbrt.json, the manifest of a save: config, layers, kept tensors, and each tensor's file and digest.

The manifest carries a digest of its own content. Every field (names, types, dtypes, planes and their fields) is
validated before anything is built from it. Version 1 has no digest; versions 1 and 2 name a layer's modules in `name`
and `aliases`, all of one `kind`. All versions pass the same checks.
"""

import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import xxhash

from vbrt.config import known_formats
from vbrt.errors import CheckpointError, describe_os_error
from vbrt.formats import FORMATS, get_format
from vbrt.formats.fine_coding import CODED
from vbrt.formats.fine_plane import WIDTH, fine_fields, may_code
from vbrt.host.safe_files import read_bounded
from vbrt.layers.modules.layer_kinds import KINDS
from vbrt.residency.weight_site import WeightSite
from vbrt.saves.files.checkpoint_paths import MANIFEST
from vbrt.saves.files.safetensors_file import TENSOR_DTYPES

__all__ = [
    "SHARD",
    "KeptTensor",
    "Manifest",
    "SavedLayer",
    "SavedTensor",
    "content_digest",
    "parse_manifest",
    "read_manifest",
    "read_manifest_bytes",
    "text_of",
    "to_json",
]

SHARD = re.compile(r"vbrt-[0-9a-f]{8}-\d{5}-of-\d{5}\.safetensors")
_KIND, _VERSION = "vbrt save", 3
_MAX_BYTES = 64 << 20  # enough for about 50,000 layers
_STORED = ("float32", "bfloat16", "float16", "float64")
_FLOATS = tuple(name for name, dtype in TENSOR_DTYPES.items() if dtype.is_floating_point)

Expected = Mapping[str, tuple[str, tuple[int | None, ...]]]
"""Tensor names of a plane -> dtype and shape; None for any length."""


@dataclass(frozen=True, slots=True)
class SavedLayer:
    """Weight saved as planes.

    Attributes:
        sites: its places in the model; several where it is tied.
        stored_dtype: dtype of the weight before encoding.
        dtype: compute dtype of the layers.
        planes: tensor names of each plane.
    """

    sites: tuple[WeightSite, ...]
    stored_dtype: str
    dtype: str
    format: str
    fine: bool
    trainable: bool
    planes: Mapping[str, tuple[str, ...]]

    @property
    def site(self) -> WeightSite:
        """First site; the tensors are named after it."""
        return self.sites[0]

    @property
    def matrices(self) -> tuple[int | None, ...]:
        """Matrix indices of routed experts, each with planes of its own; `(None,)` for other kinds."""
        return tuple(range(self.site.matrices)) if KINDS[self.site.kind].routed else (None,)

    def file_tensor(self, plane: str, field: str, matrix: int | None = None) -> str:
        """Return the name in the files of one tensor of a plane."""
        name = self.site.tensor if matrix is None else f"{self.site.tensor}.{matrix}"
        if plane == "dense":
            return name
        return f"{name}.{field}" if plane == "coarse" else f"{name}.{plane}.{field}"

    def file_tensors(self) -> Iterator[str]:
        """Yield the names in the files of all tensors of all planes."""
        for matrix in self.matrices:
            for plane, names in self.planes.items():
                for field in names:
                    yield self.file_tensor(plane, field, matrix)

    def expected(self) -> dict[str, Expected]:
        """Return each plane's expected tensors. Raises FormatError: the format does not support the dtype."""
        dtype = getattr(torch, self.stored_dtype)
        kept = self.site.matrix_shape if FORMATS[self.format].lossless else self.site.shape
        layout = get_format(self.format).layout(kept, dtype)
        planes = {layout.plane: {field.name: (field.dtype, field.shape) for field in layout.fields}}
        coded_in = get_format(self.format) if self.coded and may_code(dtype) else None
        return planes | ({"fine": fine_fields(self.site.shape, dtype, coded_in)} if self.fine else {})

    @property
    def coded(self) -> bool:
        """True if the fine plane is coded."""
        return CODED in self.planes.get("fine", ())

    def as_written(self, tensors: Container[str]) -> "SavedLayer":
        """Return the entry with the fine plane's tensors that are in the files: of a coded one, or of a plain one."""
        if not self.fine or self.file_tensor("fine", CODED, self.matrices[0]) not in tensors:
            return self
        written = replace(self, planes={**self.planes, "fine": (CODED,)})
        return replace(self, planes={plane: tuple(fields) for plane, fields in written.expected().items()})

    def to_json(self) -> dict[str, Any]:
        """Return the layer's manifest entry."""
        shared = {name: getattr(self, name) for name in _SHARED}
        return {
            "sites": [[site.module, site.parameter, site.kind] for site in self.sites],
            "shape": self.site.shape,
            "matrices": self.site.matrices,
            "transposed": self.site.transposed,
            **shared,
        }


_SHARED = ("stored_dtype", "dtype", "format", "fine", "trainable", "planes")  # fields stored under the same name


@dataclass(frozen=True, slots=True)
class KeptTensor:
    """Parameter or buffer that was not swapped, under all its names."""

    name: str
    aliases: tuple[str, ...]
    kind: str  # "parameter", "buffer", or "non-persistent buffer"
    trainable: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """All names of the tensor."""
        return (self.name, *self.aliases)


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """File of a tensor, and XXH3-64 of its bytes in hex; version 1 has no dtype and shape."""

    file: str
    digest: str
    dtype: str | None = None
    shape: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Manifest:
    """Content of vbrt.json."""

    config: Mapping[str, Any]
    layers: tuple[SavedLayer, ...]
    kept: tuple[KeptTensor, ...]
    tensors: Mapping[str, SavedTensor]


def text_of(dtype: torch.dtype) -> str:
    """Return a dtype's name in the manifest."""
    return str(dtype).removeprefix("torch.")


# -- writing ----------------------------------------------------------------------------------------------------------


def to_json(manifest: Manifest) -> bytes:
    """Return the manifest as JSON, one line per layer, parameter, buffer and tensor. Raises CheckpointError: too
    large."""
    tensors = {name: [t.file, t.dtype, list(t.shape or ()), t.digest] for name, t in manifest.tensors.items()}
    content = {
        "kind": _KIND,
        "version": _VERSION,
        "vbrt": sys.modules["vbrt"].__version__,
        "config": manifest.config,
        "layers": [layer.to_json() for layer in manifest.layers],
        "kept": [asdict(entry) for entry in manifest.kept],
        "tensors": tensors,
    }
    content["digest"] = content_digest(content)
    text = ",\n".join(f"{json.dumps(key)}: {_lines(value)}" for key, value in content.items())
    data = f"{{\n{text}\n}}\n".encode()
    if len(data) > _MAX_BYTES:
        raise CheckpointError(
            f"{MANIFEST}: {len(data)} bytes for {len(manifest.layers)} layers and "
            f"{len(tensors)} tensors; expected at most {_MAX_BYTES}"
        )
    return data


def _lines(value: Any) -> str:
    if isinstance(value, list | tuple) and value:
        return "[\n " + ",\n ".join(json.dumps(item) for item in value) + "\n]"
    if isinstance(value, dict) and value:
        return "{\n " + ",\n ".join(f"{json.dumps(key)}: {json.dumps(item)}" for key, item in value.items()) + "\n}"
    return json.dumps(value)


def content_digest(content: Mapping[str, Any]) -> str:
    """Return XXH3-64 in hex of all but the digest, independent of key order and whitespace."""
    rest = {key: value for key, value in content.items() if key != "digest"}
    return xxhash.xxh3_64_hexdigest(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode())


# -- reading ----------------------------------------------------------------------------------------------------------


class _Damaged(Exception):
    """Defect of a manifest; names the entry."""


def read_manifest_bytes(directory: Path) -> bytes:
    """Return a directory's manifest as bytes. Raises OSError, also for a file larger than the limit."""
    return read_bounded(directory / MANIFEST, _MAX_BYTES)


def read_manifest(directory: Path) -> Manifest:
    """Read and validate a directory's manifest. Raises CheckpointError, with file and entry, for anything invalid."""
    path = directory / MANIFEST
    try:
        content = read_manifest_bytes(directory)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {describe_os_error(error)}") from error
    return parse_manifest(path, content)


def parse_manifest(path: Path, content: bytes) -> Manifest:
    """Parse and validate `content`, read from `path`. Raises CheckpointError as `read_manifest` does."""
    try:
        data = json.loads(content.decode(), object_pairs_hook=_object, parse_constant=_constant)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: damaged: not valid JSON ({error})") from error
    if not isinstance(data, dict) or data.get("kind") != _KIND:
        raise CheckpointError(f'{path}: not written by vb.save(); expected "kind": "{_KIND}" in it')
    version = data.get("version")
    if type(version) is not int or version not in (1, 2, _VERSION):
        raise CheckpointError(
            f"{path}: a save of version {_shown(version)}, by vbrt {_shown(data.get('vbrt'))}; this "
            f"vbrt reads versions 1 to {_VERSION}: install that vbrt, or a newer one"
        )
    try:
        return _checked(data, version)
    except _Damaged as error:
        raise CheckpointError(f"{path}: damaged: {error}; copy the file again, or save the model again") from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"{_shown(twice)} appears twice in one object")
    return out


def _constant(text: str) -> None:
    raise ValueError(f"{text} is not a JSON number")


def _checked(data: dict[str, Any], version: int) -> Manifest:
    _exactly(data, _HEAD if version > 1 else _HEAD - {"digest"}, "the manifest")
    _expect(_is_name(data["vbrt"]), "vbrt", data["vbrt"], "a version")
    _expect(type(data["config"]) is dict, "config", data["config"], "a table")
    manifest = Manifest(
        data["config"],
        tuple(_layers(data["layers"], version)),
        tuple(_kept(data["kept"])),
        _tensors(data["tensors"], version),
    )
    _check_names(manifest)
    for number, layer in enumerate(manifest.layers):
        _check_sites(layer, f"layers[{number}]")
        _check_layer(layer, f"layers[{number}]")
    _check_routed(manifest)
    _check_tensors(manifest)
    if version > 1 and data["digest"] != content_digest(data):
        raise _Damaged(f'"digest" = {_shown(data["digest"])}, and that of the content is "{content_digest(data)}"')
    return manifest


_HEAD = {"kind", "version", "vbrt", "digest", "config", "layers", "kept", "tensors"}


def _is_name(value: Any) -> bool:
    return type(value) is str and value != ""


def _is_size(value: Any) -> bool:
    return type(value) is int and 1 <= value < 1 << 31


def _one_of(names: Iterable[str]) -> tuple[Callable[[Any], bool], str]:
    names = tuple(names)
    return lambda value: type(value) is str and value in names, f"one of {', '.join(names)}"


_Rule = tuple[Callable[[Any], bool], str]
_FLAG: _Rule = (lambda value: type(value) is bool, "true or false")
_NAME: _Rule = (_is_name, "a name")
_NAMES: _Rule = (lambda value: type(value) is list and all(map(_is_name, value)), "a list of names")
_PLANES: _Rule = (lambda value: type(value) is dict and all(map(_NAMES[0], value.values())), "lists of names by plane")
_LAYER_RULES: dict[str, _Rule] = {
    "shape": (
        lambda value: type(value) is list and len(value) == 2 and all(map(_is_size, value)),
        "two whole numbers from 1 on",
    ),
    "stored_dtype": _one_of(_STORED),
    "dtype": _one_of(_FLOATS),
    "fine": _FLAG,
    "transposed": _FLAG,
    "trainable": _FLAG,
    "planes": _PLANES,
}
_SITES: _Rule = (
    lambda value: type(value) is list and value != [] and all(map(_is_site, value)),
    "lists of module, parameter and kind",
)
_RULES = {"sites": _SITES, "matrices": (_is_size, "a whole number from 1 on"), **_LAYER_RULES}
_OLD_RULES = {"name": _NAME, "aliases": _NAMES, "kind": _one_of(KINDS), **_LAYER_RULES}
_KEPT_RULES: dict[str, _Rule] = {
    "name": _NAME,
    "aliases": _NAMES,
    "kind": _one_of(("parameter", "buffer", "non-persistent buffer")),
    "trainable": _FLAG,
}


def _is_site(value: Any) -> bool:
    return type(value) is list and len(value) == 3 and all(map(_is_name, value)) and value[2] in KINDS


def _format_rule() -> _Rule:
    formats = known_formats()  # asked for each save: plug-ins come after this module
    expected = f"one of {', '.join(formats)}, or one of a plug-in that is imported first"
    return lambda value: type(value) is str and value in formats, expected


def _layers(data: Any, version: int) -> Iterator[SavedLayer]:
    rules = _RULES if version > 2 else _OLD_RULES
    for entry in _entries(data, "layers", rules | {"format": _format_rule()}):
        shape, transposed = tuple(entry["shape"]), entry["transposed"]
        names = (
            entry["sites"]
            if version > 2
            else [[name, "weight", entry["kind"]] for name in (entry["name"], *entry["aliases"])]
        )
        matrices = entry.get("matrices", 1)
        sites = [
            WeightSite(module, shape, parameter, kind, matrices, transposed, stacked=KINDS[kind].stacked)
            for module, parameter, kind in names
        ]
        planes = {plane: tuple(fields) for plane, fields in entry["planes"].items()}
        yield SavedLayer(tuple(sites), **{name: entry[name] for name in _SHARED} | {"planes": planes})


def _kept(data: Any) -> Iterator[KeptTensor]:
    for entry in _entries(data, "kept", _KEPT_RULES):
        yield KeptTensor(entry["name"], tuple(entry["aliases"]), entry["kind"], entry["trainable"])


def _entries(data: Any, where: str, rules: Mapping[str, _Rule]) -> Iterator[dict[str, Any]]:
    """Yield the entries of a list of tables, each checked by its rules."""
    _expect(type(data) is list, where, data, "a list")
    for number, entry in enumerate(data):
        here = f"{where}[{number}]"
        _expect(type(entry) is dict, here, entry, "a table")
        _exactly(entry, set(rules), here)
        for key, (holds, expected) in rules.items():
            _expect(holds(entry[key]), f"{here}.{key}", entry[key], expected)
        yield entry


def _tensors(data: Any, version: int) -> dict[str, SavedTensor]:
    _expect(type(data) is dict, "tensors", data, "a table")
    return {name: _tensor(entry, f"tensors.{name}", version) for name, entry in data.items()}


def _tensor(entry: Any, where: str, version: int) -> SavedTensor:
    length = 4 if version > 1 else 2
    _expect(type(entry) is list and len(entry) == length, where, entry, f"a list of {length}")
    file, digest = entry[0], entry[-1]
    _expect(
        type(file) is str and SHARD.fullmatch(file) is not None,
        f"{where}[0]",
        file,
        "a file of the name vbrt-xxxxxxxx-NNNNN-of-NNNNN.safetensors",
    )
    _expect(
        type(digest) is str and re.fullmatch("[0-9a-f]{16}", digest) is not None,
        f"{where}[{length - 1}]",
        digest,
        "16 hexadecimal digits",
    )
    if version == 1:
        return SavedTensor(file, digest)
    _, dtype, shape, _ = entry
    _expect(type(dtype) is str and dtype in TENSOR_DTYPES, f"{where}[1]", dtype, "a dtype")
    _expect(type(shape) is list and all(type(n) is int and n >= 0 for n in shape), f"{where}[2]", shape, "a shape")
    return SavedTensor(file, digest, dtype, tuple(shape))


def _check_names(manifest: Manifest) -> None:
    """Check that names of layers, parameters and buffers are unique."""
    taken: dict[str, str] = {}
    layers = [[(site.name, site.tensor) for site in layer.sites] for layer in manifest.layers]
    kept = [[(name, name) for name in entry.names] for entry in manifest.kept]
    for where, entries in (("layers", layers), ("kept", kept)):
        for number, names in enumerate(entries):
            for name, tensor in names:
                if tensor in taken:
                    raise _Damaged(f"{where}[{number}] has the name {_shown(name)}, which {taken[tensor]} has already")
                taken[tensor] = f"{where}[{number}]"


def _check_sites(layer: SavedLayer, where: str) -> None:
    """Check that each site's kind has the parameter, with this orientation and number of matrices."""
    for site in layer.sites:
        kind = KINDS[site.kind]
        if site.parameter not in kind.parameters:
            raise _Damaged(f"{where}: a {site.kind} has no weight of the name {_shown(site.parameter)}")
        if site.transposed != kind.keeps_transposed(site.parameter):
            raise _Damaged(f"{where}.transposed = {_shown(site.transposed)}, which a {site.kind} is not")
        if site.matrices != 1 and not kind.routed:
            raise _Damaged(f"{where}.matrices = {site.matrices}; a {site.kind} has 1")


def _check_routed(manifest: Manifest) -> None:
    """Check that modules of routed experts are complete, and that their weights agree in dtype, format and sites."""
    held: dict[str, list[SavedLayer]] = {}
    for layer in manifest.layers:
        if KINDS[layer.site.kind].routed:
            held.setdefault(layer.site.module, []).append(layer)
    for module, layers in held.items():
        kinds = {site.kind for layer in layers for site in layer.sites}
        ragged = KINDS[layers[0].site.kind].ragged
        matrices = {layer.site.matrices for layer in layers if not ragged}
        held_by = {tuple((site.module, site.parameter == x.site.parameter) for site in x.sites) for x in layers}
        alike = {(x.stored_dtype, x.dtype, x.fine) for x in layers}
        published, last = all(FORMATS[x.format].published for x in layers), KINDS[layers[0].site.kind].parameters[-1]
        formats = {x.format for x in layers if not (published and x.site.parameter == last)}
        found = sorted(layer.site.parameter for layer in layers)
        if len(kinds) > 1 or found != sorted(KINDS[layers[0].site.kind].parameters):
            raise _Damaged(
                f"layers has {', '.join(found)} of the experts {_shown(module)}, and not what they consist of"
            )
        if any(len(of_all) > 1 for of_all in (alike, formats, matrices, held_by)):
            raise _Damaged(f"layers has {', '.join(found)} of the experts {_shown(module)} held in different ways")


def _check_layer(layer: SavedLayer, where: str) -> None:
    if not FORMATS[layer.format].lossless and layer.stored_dtype == "float64":
        raise _Damaged(f'{where}.stored_dtype = "float64", which {layer.format} does not hold')
    if layer.fine and (FORMATS[layer.format].lossless or getattr(torch, layer.stored_dtype) not in WIDTH):
        raise _Damaged(f"{where}.fine = true, which {layer.stored_dtype} in {layer.format} cannot have")
    expected = {plane: set(tensors) for plane, tensors in layer.expected().items()}
    if {plane: set(names) for plane, names in layer.planes.items()} != expected:
        wanted = "; ".join(f"{plane}: {', '.join(names)}" for plane, names in expected.items())
        raise _Damaged(f"{where}.planes = {_shown({p: list(n) for p, n in layer.planes.items()})}; expected {wanted}")


def _check_tensors(manifest: Manifest) -> None:
    """Check that exactly the tensors of layers, parameters and buffers are listed."""
    wanted = Counter(name for layer in manifest.layers for name in layer.file_tensors())
    wanted.update(entry.name for entry in manifest.kept)
    for name, count in wanted.items():
        if count > 1:
            raise _Damaged(f"{count} layers, parameters or buffers have a tensor of the name {_shown(name)}")
        if name not in manifest.tensors:
            raise _Damaged(f'"tensors" has no {_shown(name)}')
    for name in manifest.tensors:
        if name not in wanted:
            raise _Damaged(f'"tensors" has {_shown(name)}, which no layer, parameter or buffer has')


def _exactly(data: Mapping[str, Any], keys: set[str], where: str) -> None:
    for what, names in (("has no", keys - data.keys()), ("has an unknown", data.keys() - keys)):
        if names:
            raise _Damaged(f"{where} {what} {_shown(min(names))}")


def _expect(holds: bool, where: str, value: Any, expected: str) -> None:
    if not holds:
        raise _Damaged(f"{where} = {_shown(value)}; expected {expected}")


def _shown(value: Any) -> str:
    text = json.dumps(value) if isinstance(value, str | int | float | bool | None) else repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
