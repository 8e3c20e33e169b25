"""Save units for conversion: a weight, one expert of a layer, or a kept tensor, encoded one at a time.

Nothing is attached: handles without pages encode the weights, in the format's own order, on a GPU where the config
allows one.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any, Protocol

import torch
from torch import nn

from vbrt.config import VBConfig
from vbrt.host import accelerator
from vbrt.layers import HandleSpec, Weight
from vbrt.layers.experts import ExpertsHandle, ExpertsSpec
from vbrt.layers.weights.weight_encoding import Planes
from vbrt.residency.plan import Beside, Plan, Swap
from vbrt.residency.weight_site import ROOT, WeightSite
from vbrt.saves.common.assign import compute_buffers_
from vbrt.saves.common.manifest import KeptTensor, SavedLayer, text_of
from vbrt.saves.files.read_target import HOST
from vbrt.saves.load.calibrate_from_files import calibrated
from vbrt.saves.load.sources import Source
from vbrt.saves.saved.save import find_kept
from vbrt.tiers import TierStack, detached_stack

__all__ = ["Piece", "Pieces", "conversion_plan"]


class _Make(Protocol):
    def __call__(self) -> Mapping[str, torch.Tensor]:
        """Return tensors by their names in the files."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Unit of writing: its module or tensor name, dense bytes, and the call that makes its tensors."""

    name: str
    nbytes: int
    tensors: _Make


def conversion_plan(source: Source, model: nn.Module, config: VBConfig) -> Plan:
    """Return the plan of a conversion, for a machine with unlimited memory; outlines the model on the way.

    Raises:
        CheckpointError: the files are of another model.
    """
    source.outline_(model)
    compute_buffers_(model, source.path, source.has)
    return source.plan(model, _here(config), Beside({"cpu": 1 << 62}, ()))


def _device(config: VBConfig) -> torch.device:
    """Return the device to encode on; all devices give the same planes."""
    return accelerator.default_device() if accelerator.is_used(config.tiers.gpu.enabled) else torch.device("cpu")


def _here(config: VBConfig, backend: str = "reference") -> VBConfig:
    """Return the config to plan with: CPU only, and without kernels by default, since nothing is computed."""
    tiers = replace(config.tiers, gpu=replace(config.tiers.gpu, enabled=False, budget="auto"))
    compute = replace(config.compute, backend=backend)
    return replace(config, tiers=tiers, compute=compute, gpu_memory=None, context=None, budget=None)


def _to_encode(config: VBConfig, device: torch.device) -> VBConfig:
    """Return the config to encode with on a device that may lack kernels the config asks for. Files are made small
    whatever computes with them: fine planes are coded unless the config says otherwise."""
    if config.weights.fine_coding == "auto":
        config = replace(config, weights=replace(config.weights, fine_coding="coded"))
    if device.type == accelerator.TYPE:
        return config
    return _here(config, "reference" if config.compute.backend == "reference" else "auto")


class Pieces:
    """All units of a model's save.

    Attributes:
        layers: manifest entries of weights in planes.
        kept: manifest entries of all other parameters and buffers.
    """

    def __init__(self, source: Source, model: nn.Module, config: VBConfig) -> None:
        plan, stack = conversion_plan(source, model, config), detached_stack(_device(config))
        plan = calibrated(source, model, plan, config, stack.device)
        names, held = _names_of(model), _to_encode(config, stack.device)
        weights = [_weight(swap, source, model, (held, stack, names)) for swap in plan.swaps]
        _forget_(model, plan)
        source.fill_kept_(model, HOST)
        kept = find_kept(model)
        self.layers: list[SavedLayer] = [layer for weight in weights for layer in weight.layers]
        self.kept: list[KeptTensor] = [entry for entry, _ in kept]
        self._weights, self._tensors = weights, kept

    def __iter__(self) -> Iterator[Piece]:
        for weight in self._weights:
            yield from weight.pieces()
        for entry, tensor in self._tensors:
            yield Piece(entry.name, tensor.nbytes, partial(dict, {entry.name: tensor}))


def _names_of(model: nn.Module) -> dict[str, list[str]]:
    """Return all names of each module, by its first name."""
    names: dict[int, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(id(module), []).append(name or ROOT)
    return {all_names[0]: all_names for all_names in names.values()}


def _forget_(model: nn.Module, plan: Plan) -> None:
    """Remove swapped parameters, which are meta, from the model; the rest is kept."""
    modules = {name or ROOT: module for name, module in model.named_modules(remove_duplicate=False)}
    for swap in plan.swaps:
        others = [replace(part, module=tied.module) for tied in swap.tied for part in swap.parts]
        for site in (*swap.sites, *others):
            modules[site.module]._parameters[site.parameter] = None


_Where = tuple[VBConfig, TierStack, Mapping[str, list[str]]]


def _weight(swap: Swap, source: Source, model: nn.Module, where: _Where) -> "_Weight | _Experts":
    config, stack, names = where
    parameter = getattr(
        model if swap.site.module == ROOT else model.get_submodule(swap.site.module), swap.site.parameter
    )
    if swap.experts:
        handle = ExpertsHandle(ExpertsSpec.of(swap, config), stack, trainable=parameter.requires_grad)
        encoders = handle.coder.encoders.values()
    else:
        handle = Weight(HandleSpec.of(swap, config), stack, trainable=parameter.requires_grad)
        encoders = [handle.encoder]
    for encoder in encoders:
        encoder.packing = None  # files hold the format's own order, not the packed one
    return (_Experts if swap.experts else _Weight)(source, swap, handle, names)


def _entry(handle: Any, sites: Iterable[WeightSite], dtype: torch.dtype, format: str) -> SavedLayer:
    layer = SavedLayer(
        tuple(sites), text_of(handle.spec.dtype), text_of(dtype), format, handle.spec.fine, handle.trainable, {}
    )
    return replace(layer, planes={plane: tuple(fields) for plane, fields in layer.expected().items()})


def _everywhere(sites: Iterable[WeightSite], names: Mapping[str, list[str]]) -> Iterator[WeightSite]:
    """Yield the sites under all names of their modules (tied modules have several)."""
    for site in sites:
        for name in names[site.module]:
            yield replace(site, module=name)


class _Weight:
    """Save unit of one weight."""

    def __init__(self, source: Source, swap: Swap, handle: Weight, names: Mapping[str, list[str]]) -> None:
        self._source, self._swap, self._handle = source, swap, handle
        dtype = source.computes_in(swap, handle)
        self.layers = [_entry(handle, _everywhere((swap.site, *swap.tied), names), dtype, swap.format)]

    def pieces(self) -> Iterator[Piece]:
        yield Piece(self._swap.name, self._swap.dense_bytes, self._tensors)

    def _tensors(self) -> dict[str, torch.Tensor]:
        planes, (layer,) = self._source.planes_of(self._swap, self._handle), self.layers
        for inputs in self._swap.inputs:
            inputs.moments = None
        return {
            layer.file_tensor(layout.plane, field): tensor if isinstance(tensor, torch.Tensor) else tensor.read()
            for layout, fields in planes
            for field, tensor in fields.items()
        }


class _Experts:
    """Save units of a layer's routed experts, encoded in order so that few are in memory."""

    def __init__(self, source: Source, swap: Swap, handle: ExpertsHandle, names: Mapping[str, list[str]]) -> None:
        self._source, self._swap, self._handle = source, swap, handle
        modules = [site.module for site in _everywhere((swap.site, *swap.tied), names)]
        dtype = source.computes_in(swap, handle)
        spec = handle.spec
        self._parts = dict(
            zip(
                spec.parts,
                (
                    _entry(handle, [replace(site, module=m) for m in modules], dtype, one.format)
                    for site, one in zip(spec.sites, spec.parts.values(), strict=True)
                ),
                strict=True,
            )
        )
        self._planes: Iterator[Planes] = iter(())
        self._next = -1  # the expert that the iterator yields next

    @property
    def layers(self) -> list[SavedLayer]:
        return list(self._parts.values())

    def pieces(self) -> Iterator[Piece]:
        each = self._swap.dense_bytes // self._swap.experts
        for expert in range(self._swap.experts):
            yield Piece(f"{self._swap.name}[{expert}]", each, partial(self._tensors, expert))

    def _tensors(self, expert: int) -> dict[str, torch.Tensor]:
        if self._next != expert:  # the first, or resuming after ones that are already written
            self._planes = islice(self._source.experts_of(self._swap, self._handle), expert, None)
        planes, self._next = next(self._planes), expert + 1
        if self._next == self._swap.experts:
            self._planes, self._next = iter(()), -1  # releases the layer's weights
        return {
            layer.file_tensor(layout.plane, field, expert): tensor
            for layout, fields in planes
            for part, layer in self._parts.items()
            if expert < layer.site.matrices
            for field, tensor in self._handle.coder.encoded_part(part, layout, fields).items()
        }
