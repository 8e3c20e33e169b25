"""Inspection of a checkpoint from file headers alone: its content, and what a config makes of it."""

import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import nn

from vbrt.config import VBConfig
from vbrt.errors import CheckpointError
from vbrt.residency.plan import Plan, Swap
from vbrt.saves.common.manifest import text_of
from vbrt.saves.files.gguf_file import GGUFTensor
from vbrt.saves.load.save_units import conversion_plan
from vbrt.saves.load.sources import Source, describe
from vbrt.saves.published.published_checkpoint import WeightKind
from vbrt.saves.saved.saved_planes import SavedModel

__all__ = ["Inspection", "KindOfLayer", "Stays", "inspect"]


@dataclass(frozen=True, slots=True)
class KindOfLayer:
    """Swapped weights of one kind, dtype and format.

    Attributes:
        lossless: True if nothing is rounded.
        published: True if their planes are the checkpoint's own.
        page_bytes: an upper bound where there is a fine plane.
    """

    kind: str
    dtype: str
    becomes: str
    lossless: bool
    published: bool
    layers: int
    experts: int
    dense_bytes: int
    page_bytes: int


@dataclass(frozen=True, slots=True)
class Stays:
    """Parameters left unswapped for one reason."""

    reason: str
    modules: int
    nbytes: int
    example: str


@dataclass(frozen=True, slots=True)
class Inspection:
    """Content of files, and the model that a config makes of them.

    Attributes:
        layout: container and writer of the files.
        files, tensors, nbytes: counts, and total bytes of tensors.
        dtypes: bytes by dtype.
        method: quantization method; "" for dense weights.
        weights: kinds of weights in a checkpoint; empty for a vbrt save.
        layers, stays, notes: what becomes of the weights; empty if `refusal` is set.
        refusal: why they cannot be loaded.
    """

    layout: str
    files: int
    tensors: int
    nbytes: int
    dtypes: Mapping[str, int]
    method: str = ""
    weights: tuple[WeightKind, ...] = ()
    layers: tuple[KindOfLayer, ...] = ()
    stays: tuple[Stays, ...] = ()
    notes: tuple[str, ...] = ()
    refusal: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return asdict(self)


def inspect(source: Source, model: nn.Module, config: VBConfig) -> Inspection:
    """Inspect a source's files and what a config makes of them.

    Args:
        model: the architecture, on the meta device; it is consumed.

    Raises:
        CheckpointError: damaged files.
    """
    head = _held(source)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the notes repeat the warnings
            plan = conversion_plan(source, model, config)
    except CheckpointError as error:
        return replace(head, refusal=str(error))
    notes = plan.notes if plan.swaps else plan.notes[-1:]
    return replace(head, layers=_layers(plan), stays=_stays(plan), notes=notes)


def _held(source: Source) -> Inspection:
    """Return the content of the files."""
    files = source.files
    infos = [info for file in files for info in file.tensors.values()]
    dtypes: dict[str, int] = {}
    for info in infos:
        held = info.type if isinstance(info, GGUFTensor) else text_of(info.dtype)
        dtypes[held] = dtypes.get(held, 0) + info.nbytes
    ordered = dict(sorted(dtypes.items(), key=lambda item: -item[1]))
    made = Inspection("planes of vbrt", len(files), len(infos), sum(info.nbytes for info in infos), ordered)
    if isinstance(source, SavedModel):
        return made
    found = describe(source.path)
    packed = any(kind.becomes != "dense" for kind in found.kinds)
    what = (found.method or "quantized weights") if packed else "dense weights"
    return replace(made, layout=f"{found.container} of {what}", method=found.method, weights=found.kinds)


def _layers(plan: Plan) -> tuple[KindOfLayer, ...]:
    groups: dict[tuple[Any, ...], list[Swap]] = {}
    for swap in plan.swaps:
        key = swap.kind, swap.dtype, swap.label, swap.lossless, swap.published, swap.experts
        groups.setdefault(key, []).append(swap)
    made = [
        KindOfLayer(
            kind,
            dtype,
            label,
            lossless,
            published,
            len(swaps),
            experts,
            sum(swap.dense_bytes for swap in swaps),
            sum(swap.page_bytes for swap in swaps),
        )
        for (kind, dtype, label, lossless, published, experts), swaps in groups.items()
    ]
    return tuple(sorted(made, key=lambda layer: -layer.dense_bytes))


def _stays(plan: Plan) -> tuple[Stays, ...]:
    groups: dict[str, list[str]] = {}
    for name, skip in plan.skipped.items():
        groups.setdefault(skip.reason, []).append(name)
    made = [
        Stays(reason, len(names), sum(plan.skipped[name].nbytes for name in names), names[0])
        for reason, names in groups.items()
    ]
    return tuple(sorted(made, key=lambda stays: -stays.nbytes))
