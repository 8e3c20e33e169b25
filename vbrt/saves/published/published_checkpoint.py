"""Published checkpoints with quantized weights: matching layouts go into pages unchanged, others are decoded.

Decoded weights are encoded one at a time, as the config says; weights that the checkpoint left unquantized stay dense.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from vbrt.config import FORMATS, VBConfig, compute_tier, load_config, names_format
from vbrt.config.schema import plain
from vbrt.config.tier_records import TIERS
from vbrt.errors import CheckpointError, ConfigError
from vbrt.host import accelerator
from vbrt.host.logger import warn
from vbrt.kernels import fused_on
from vbrt.layers import Weight
from vbrt.layers.experts import ExpertsHandle
from vbrt.layers.experts.expert_encoding import ExpertsOnDemand
from vbrt.layers.weights.weight_encoding import Planes
from vbrt.model.machine_memory import this_machine
from vbrt.model.planner import make_plan
from vbrt.model.weight_choice import choose
from vbrt.residency.plan import Beside, Plan, Swap
from vbrt.residency.weight_site import WeightSite
from vbrt.saves.common.renaming import Entry, entries_for
from vbrt.saves.files.gguf_file import GGUFFile
from vbrt.saves.files.read_target import Fill, for_encoder
from vbrt.saves.files.safetensors_file import TensorFile
from vbrt.saves.published.dense_checkpoint import DenseCheckpoint
from vbrt.saves.published.packed_files import PackedFiles, PackedWeight, read_scheme
from vbrt.saves.saved.saved_planes import for_this_machine

__all__ = ["Description", "PublishedCheckpoint", "WeightKind", "checkpoint_of", "describe_files", "without_kernels"]

_DEFAULT = "exact"  # for decoded weights: lossless


def checkpoint_of(path: Path, files: Sequence[TensorFile]) -> "DenseCheckpoint":
    """Return the source of a safetensors checkpoint. Raises CheckpointError."""
    scheme, dtype = read_scheme(path) if path.is_dir() else ({}, None)
    packed = PackedFiles(path, files, scheme, dtype)
    if not packed.weights:
        return DenseCheckpoint(path, files, partial(entries_for, path, files=files), _named_in(scheme))
    return PublishedCheckpoint(path, packed, files, partial(entries_for, path, files=[packed]))


def _lossless(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Overrides, with decoded weights held losslessly."""
    weights = overrides.get("weights") or {}
    return {**overrides, "weights": {"fine": "exact", **plain(weights)}}


def _named_in(scheme: Mapping[str, Any]) -> VBConfig | None:
    """Return the config in config.json for dense weights, as `save_pretrained` writes it."""
    config = scheme.get("config")
    if scheme.get("quant_method") != "vbrt" or not isinstance(config, Mapping):
        return None
    return for_this_machine(VBConfig.from_save(config, source="config.json"))


class QuantizedWeights(Protocol):
    """Quantized weights of a checkpoint, and user-facing remarks on its other tensors."""

    weights: Mapping[str, PackedWeight]

    @property
    def remarks(self) -> tuple[str, ...]:
        """User-facing remarks on tensors that are not quantized."""


class PublishedCheckpoint(DenseCheckpoint):
    """Checkpoint quantized by another library, as a `Source`.

    Args:
        packed: the quantized weights, complete once the entries have been found.
        files, entries: as for `DenseCheckpoint`; `Entry.rows` names weights of `packed`.
    """

    def __init__(
        self,
        path: Path,
        packed: QuantizedWeights,
        files: Iterable[TensorFile | GGUFFile],
        entries: Callable[[nn.Module], dict[str, Entry]],
    ) -> None:
        super().__init__(path, files, entries)
        self._packed = packed
        self._states = {at: _state(at) for at in (*(file.path for file in self.files), path / "config.json")}
        self._formats: dict[str, tuple[str, ...]] = {}  # of the parts of each swap whose planes are taken unchanged
        self._again: set[str] = set()  # swaps with planes that the config rounds to another format
        self._slow: dict[str, str] = {}  # format of those that would be decoded at each use, so that they are once

    def config(self, config: Any, overrides: Mapping[str, Any]) -> VBConfig:
        """See `Source`. Where no format is named, decoded weights are held losslessly."""
        if names_format(overrides) or names_format(config):
            return load_config(config, **overrides)
        return load_config(_DEFAULT, **overrides) if config is None else load_config(config, **_lossless(overrides))

    def plan(self, model: nn.Module, config: VBConfig, beside: Beside | None) -> Plan:
        """See `Source`. Swaps with planes in the checkpoint have its formats, unless the config rounds them to another
        one; unquantized weights stay dense."""
        machine = this_machine(config)
        computing = "cpu" if TIERS[compute_tier(config, machine)].hosts else accelerator.CUDA
        chosen = self._chosen(model, config, computing)
        own = {swap.name: formats for swap in chosen if (formats := self._formats_of(swap))}
        rounded = {swap.name: swap.format for swap in chosen if not swap.lossless}
        self._again = {name for name, formats in own.items() if name in rounded and {rounded[name]} != set(formats)}
        self._slow = {n: f for n, formats in own.items() for f in formats if computing not in fused_on(f)}
        left = self._again | self._slow.keys()
        self._formats = {name: formats for name, formats in own.items() if name not in left}
        swaps = [self._held(swap) for swap in chosen]
        if config.weights.calibrate is not None and not any(map(self._is_searched, swaps)):
            raise ConfigError(
                f'{config.source}: weights.calibrate = "{config.weights.calibrate}": {self.path} has weights in 4 bits '
                "already, which are taken as they are: leave it out, or load a checkpoint of the dense model"
            )
        plan = make_plan(model, config, machine, saved=swaps, beside=beside)
        notes = tuple(self._notes(swaps))
        lost = tuple(note for note in notes if "decoded" in note)
        for note in lost:
            warn(f"{self.path}: {note}", stacklevel=5)
        return replace(plan, notes=(*plan.notes, *notes), fallbacks=(*plan.fallbacks, *lost))

    def _chosen(self, model: nn.Module, config: VBConfig, computing: str) -> list[Swap]:
        """Return the config's swaps, and heads and tables that stay as they are where the config leaves them to "auto".

        computing: type of the device. On GPUs rows of a table in host memory would take steps out of their graphs.
        """
        chosen, _ = choose(model, config)
        weights, names = config.weights, {swap.name for swap in chosen}
        keeps = weights.keep_head if weights.keep_head != "auto" else False
        tables = weights.embeddings if weights.embeddings != "auto" else computing == "cpu"
        if config.mode != "infer" or (keeps, tables) == (weights.keep_head, weights.embeddings):
            return chosen

        def as_it_is(swap: Swap) -> bool:
            formats = self._formats_of(swap)
            return swap.lossless and bool(formats) and all(computing in fused_on(format) for format in formats)

        more, _ = choose(model, replace(config, weights=replace(weights, keep_head=keeps, embeddings=tables)))
        return [swap for swap in more if swap.name in names or as_it_is(swap)]

    def _is_searched(self, swap: Swap) -> bool:
        """True if a weight is encoded into a lossy format while loading, with searched block scales."""
        return self.encodes(swap) and not FORMATS[swap.format].lossless

    def _held(self, swap: Swap) -> Swap:
        if swap.name in self._formats:
            return replace(swap.in_formats(self._formats[swap.name]), fine="none", note="", published=True)
        if any(self._weights_of(site) for site in (swap.site, *swap.parts)):
            return swap
        return replace(swap, format="dense", fine="none", note="not quantized in the checkpoint: held dense")

    def _formats_of(self, swap: Swap) -> tuple[str, ...]:
        """Return the format of the planes of each part of a swap; none if they must be decoded."""
        formats = tuple(self._format_at(site) for site in (swap.site, *swap.parts))
        if "" in formats or len({*formats[:-1]}) > 1:  # gates and values come of one kernel
            return ()
        if swap.experts and any(FORMATS[format].base for format in formats):  # kernels of experts share one x
            return ()
        return formats

    def _format_at(self, site: WeightSite) -> str:
        entry, weights = self._entry(site), self._packed.weights
        joined = [weights.get(name) for row in entry.rows for name in row]
        if not joined or None in joined or not all(_joinable([weights[name] for name in row]) for row in entry.rows):
            return ""
        matrices = {weight.outline.matrices for weight in joined}
        stacked = len(entry.rows) == 1 and matrices == {site.matrices} and site.stacked
        apart = len(entry.rows) == site.matrices and matrices == {0}
        turned = {weight.outline.transposed for weight in joined} == {site.transposed}
        formats = {weight.outline.format for weight in joined}
        return formats.pop() if (stacked or apart) and turned and len(formats) == 1 else ""

    def _entry(self, site: WeightSite) -> Entry:
        return self._found[self._entries[site.tensor]]

    def _weights_of(self, site: WeightSite) -> list[PackedWeight]:
        """Return the quantized weights that a parameter is made of, as far as they are known."""
        entry = self._entry(site)
        names = [name for row in entry.rows for name in row] or entry.sources
        return [self._packed.weights[name] for name in names if name in self._packed.weights]

    def encodes(self, swap: Swap) -> bool:
        """See `DenseCheckpoint.encodes`."""
        return swap.name not in self._formats

    def planes_of(self, swap: Swap, handle: Weight) -> Planes:
        """See `Source`: unchanged from the files, or encoded now."""
        if swap.name not in self._formats:
            return super().planes_of(swap, handle)
        fill = for_encoder(handle.encoder, handle.stack)
        return handle.encoder.from_encoded({"coarse": self._plane(swap.site, 0, fill)})

    def experts_of(self, swap: Swap, handle: ExpertsHandle) -> Iterable[Planes]:
        """See `Source`: unchanged from the files, or encoded now; one expert at a time."""
        if swap.name not in self._formats:
            return super().experts_of(swap, handle)
        sites = dict(zip(handle.spec.parts, (swap.site, *swap.parts), strict=True))
        encoders = handle.coder.encoders

        def make(expert: int) -> Planes:
            held = {part: site for part, site in sites.items() if expert < site.matrices}
            fills = {part: for_encoder(encoders[part], handle.stack) for part in held}
            return handle.coder.from_encoded(
                {part: {"coarse": self._plane(site, expert, fills[part])} for part, site in held.items()}
            )

        return ExpertsOnDemand(make, swap.experts)

    def _plane(self, site: WeightSite, matrix: int, fill: Fill) -> dict[str, torch.Tensor]:
        rows = self._entry(site).rows
        weights = [self._packed.weights[name] for name in rows[matrix if len(rows) > 1 else 0]]
        planes = [weight.plane(matrix if weight.outline.matrices else None, fill) for weight in weights]
        if len(planes) == 1:  # saves a copy, which would take as long as the read
            return planes[0]
        once = {name for name in planes[0] if name in ("tensor_scale", "levels", "unit")}
        return {
            name: tensor if name in once else torch.cat([plane[name] for plane in planes])
            for name, tensor in planes[0].items()
        }

    @property
    def rounds_again(self) -> bool:
        """True if the config rounds quantized weights to another format."""
        return bool(self._again)

    def published_tensors(self, model: nn.Module, plan: Plan) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
        """Return the files' tensors as they are, but the model's values of those outside of pages, and the files'
        metadata.

        Raises:
            CheckpointError: a file is gone or has changed, or a tensor outside of pages has that they hold in another
                form.
        """
        self._check_unchanged()
        tensors, paged = self._packed.raw(), {self._entries[site.tensor] for swap in plan.swaps for site in swap.sites}
        named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
        own = {e: value for name, value in named if (e := self._entries.get(name)) is not None and e not in paged}
        done: set[tuple[int, int]] = set()
        for name, value in own.items():
            entry = self._found[name]
            source, place = "" if entry.sources else entry.rows[0][0], (value.data_ptr(), value.nbytes)
            if source and place in done:  # tied, and in the files twice
                del tensors[source]
            elif source and source not in self._packed.weights:
                done.add(place)
                tensors[source] = value.detach()
            elif not torch.equal(entry.read().to(value), value):
                raise CheckpointError(
                    f"save_pretrained: {name} has changed since the model was loaded, and {self.path} holds it in "
                    "another form: save dense weights, by unwrap() first"
                )
        return tensors, self._packed.metadata

    def _check_unchanged(self) -> None:
        changed = next((path for path, state in self._states.items() if _state(path) != state), None)
        if changed is not None:
            raise CheckpointError(
                f"{changed}: gone or changed since the model was loaded, and quantized weights are copied from it; put "
                "it back, or save dense weights, by unwrap() first"
            )

    # -- notes --------------------------------------------------------------------------------------------------------

    def _notes(self, swaps: list[Swap]) -> Iterator[str]:
        as_they_are: Counter[tuple[str, str]] = Counter()
        decoded: Counter[tuple[str, str]] = Counter()
        for swap in swaps:
            weights = self._weights_of(swap.site)
            if swap.name in self._formats:
                layouts = (weight.layout.name for site in (swap.site, *swap.parts) for weight in self._weights_of(site))
                as_they_are[" and ".join(dict.fromkeys(layouts)), swap.label] += 1
            elif weights:
                decoded[self._why_decoded(swap, weights[0]), swap.label] += 1
        for (layout, format), count in as_they_are.items():
            yield f"{count} layers: {layout}, taken as {format} bit for bit"
        for (why, held), count in decoded.items():
            yield f"{count} layers: decoded and held as {held}: {why}"
        yield from self._packed.remarks

    def _why_decoded(self, swap: Swap, weight: PackedWeight) -> str:
        if swap.name not in self._again:
            slow = self._slow.get(swap.name)
            return f"{weight.layout.name}: {slow} has {without_kernels(slow)}" if slow else weight.outline.why or _APART
        by = f"{FORMATS[swap.format].noise:.1%} of the weights' RMS"
        return f"{weight.layout.name}, rounded again as the config asks, by {by}; without weights.format its bits stay"


def _state(path: Path) -> tuple[int, ...]:
    """Return what changes with a file's content; empty if it is not there."""
    try:
        found = path.stat()
    except OSError:
        return ()
    return found.st_size, found.st_mtime_ns


def without_kernels(format: str) -> str:
    """Return where no fused kernel computes with a format, so that weights are decoded when they are loaded; "" if one
    does on CPUs and GPUs."""
    record, devices = FORMATS.get(format), fused_on(format)
    if record is None or record.lossless or len(devices) > 1:
        return ""
    if not devices:
        return "no fused kernels"
    return f"no fused kernels on {'CPUs' if accelerator.CUDA in devices else 'GPUs'}"


_APART = "its parts are quantized differently, which one plane cannot hold"


def _joinable(weights: list[PackedWeight]) -> bool:
    """True if the rows of weights can be concatenated into one plane."""
    if len(weights) == 1:
        return True
    formats = {weight.outline.format for weight in weights}
    if any(format and FORMATS[format].base for format in formats):  # their columns may be in different orders
        return False
    return all(_shared(weight) == _shared(weights[0]) for weight in weights)


def _shared(weight: PackedWeight) -> Any:
    """Return the fields that all rows of a plane share, which must be equal for concatenation."""
    name = next((field for field in ("global", "quant_map") if field in weight.files), None)
    value = None if name is None else tuple(weight.files[name][0].read(weight.files[name][1]).reshape(-1).tolist())
    return weight.layout.name, weight.outline.shape[1], weight.outline.format, value


# -- descriptions -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WeightKind:
    """Weights of a checkpoint with the same layout and outcome.

    Attributes:
        layout: a layout's name, or a dtype.
        becomes: a format, "decoded", or "dense".
        count: number of weights; a stack of experts counts once.
        nbytes: in the files.
        why: why they are decoded, or computed slowly.
    """

    layout: str
    becomes: str
    count: int
    nbytes: int
    why: str = ""


@dataclass(frozen=True, slots=True)
class Description:
    """Description of a checkpoint's weights.

    Attributes:
        method: `quant_method` of its config; "" for a dense checkpoint.
        kinds: its weights, most bytes first.
        unused: number of tensors without a use, such as activation scales.
        container: file format.
    """

    method: str
    kinds: tuple[WeightKind, ...]
    unused: int = 0
    container: str = "safetensors"

    @property
    def nbytes(self) -> int:
        """Bytes of all weights in the files."""
        return sum(kind.nbytes for kind in self.kinds)


def describe_files(path: Path, files: Iterable[TensorFile]) -> Description:
    """Describe safetensors files from their headers. Raises CheckpointError."""
    scheme, dtype = read_scheme(path) if path.is_dir() else ({}, None)
    packed = PackedFiles(path, files, scheme, dtype)
    counts: Counter[tuple[str, str, str]] = Counter()
    nbytes: Counter[tuple[str, str, str]] = Counter()
    for name, info in packed.tensors.items():
        weight = packed.weights.get(name)
        if weight is None:
            key = (str(info.dtype).removeprefix("torch."), "dense", "")
        else:
            key = (weight.layout.name, weight.outline.format or "decoded", weight.outline.why)
            key = (*key[:2], key[2] or without_kernels(key[1]))
        counts[key] += 1
        nbytes[key] += info.nbytes if weight is None else weight.nbytes
    kinds = (
        WeightKind(layout, becomes, counts[key], n, why)
        for key, n in nbytes.most_common()
        for layout, becomes, why in [key]
    )
    return Description(str(scheme.get("quant_method", "")), tuple(kinds), len(packed.unused))
