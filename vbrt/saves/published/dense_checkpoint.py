"""Dense checkpoints: read every weight by the model's name for it, and encode it."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vbrt.config import VBConfig, load_config
from vbrt.layers import Weight
from vbrt.layers.experts import ExpertsHandle
from vbrt.layers.experts.expert_encoding import EncodedExperts, MatricesOnDemand
from vbrt.layers.weights.weight_encoding import Planes
from vbrt.model.planner import make_plan
from vbrt.residency.plan import Beside, Plan, Swap
from vbrt.residency.weight_site import WeightSite
from vbrt.saves.common.assign import assign_, on_meta, with_values
from vbrt.saves.common.compatibility import check_names, ignored_names, other_dtypes, other_shapes, refuse_any
from vbrt.saves.common.renaming import Entry, own_dtypes
from vbrt.saves.files.gguf_file import GGUFFile
from vbrt.saves.files.read_target import HOST, Landing
from vbrt.saves.files.safetensors_file import TensorFile, TensorInfo

__all__ = ["DenseCheckpoint"]


class DenseCheckpoint:
    """Dense checkpoint as a `Source`.

    Args:
        files: files of the tensors, to prefetch.
        entries: maps the files' tensors to a model's names.
        named: config found with the files, used if the user names none.
    """

    def __init__(
        self,
        path: Path,
        files: Iterable[TensorFile | GGUFFile],
        entries: Callable[[nn.Module], dict[str, Entry]],
        named: VBConfig | None = None,
    ) -> None:
        self.path, self.files, self._entries_for, self._named = path, list(files), entries, named
        self._found: dict[str, Entry] = {}  # by model name
        self._entries: dict[str, str] = {}  # model name -> name of its entry; tied names share one

    def config(self, config: Any, overrides: Mapping[str, Any]) -> VBConfig:
        """See `Source`."""
        return load_config(self._named if config is None else config, **overrides)

    def outline_(self, model: nn.Module) -> None:
        """See `Source`."""
        self._found = self._entries_for(model)
        groups: dict[int, list[str]] = {}
        for name, tensor in (
            *model.named_parameters(remove_duplicate=False),
            *model.named_buffers(remove_duplicate=False),
        ):
            groups.setdefault(id(tensor), []).append(name)
        for names in groups.values():
            entry = next((name for name in names if name in self._found), None)
            if entry is not None:
                self._entries.update(dict.fromkeys(names, entry))
        known = self._found.keys() | self._entries.keys()
        check_names(self.path, model, known, optional=ignored_names(model, self._found))
        infos = {name: self._found[entry].info for name, entry in self._entries.items()}
        refuse_any(self.path, "shapes do not fit", other_shapes(model, infos))
        refuse_any(self.path, "dtypes do not fit", other_dtypes(model, infos))
        own = own_dtypes(model, _usual(infos.values()))
        done: set[int] = set()
        for name, parameter in list(model.named_parameters(remove_duplicate=False)):
            if id(parameter) not in done:
                done.add(id(parameter))
                dtype = own.get(name, infos[name].dtype)
                assign_(model, groups[id(parameter)], partial(on_meta, dtype=dtype, trains=parameter.requires_grad))

    @property
    def names(self) -> tuple[str, ...]:
        """Model names of all found tensors; for tied ones the first."""
        return tuple(dict.fromkeys(self._entries.values()))

    def read(self, name: str) -> torch.Tensor:
        """Read a tensor by one of its model names into fresh CPU memory. Raises CheckpointError."""
        return self._found[self._entries[name]].read()

    def has(self, name: str) -> bool:
        """See `Source`."""
        return name in self._entries

    def plan(self, model: nn.Module, config: VBConfig, beside: Beside | None) -> Plan:
        """See `Source`."""
        return make_plan(model, config, beside=beside)

    def encodes(self, swap: Swap) -> bool:
        """True if a weight is encoded while loading; False if the files hold its planes."""
        return True

    def dense(self, swap: Swap, site: WeightSite) -> torch.Tensor:
        """Return the parameter at one of a swap's sites, in the swap's dtype. Raises CheckpointError."""
        return self.read(site.tensor).to(getattr(torch, swap.dtype)).reshape(site.kept_shape)

    def planes_of(self, swap: Swap, handle: Weight) -> Planes:
        """See `Source`: encoded now."""
        return handle.split(self.read(swap.site.tensor))

    def experts_of(self, swap: Swap, handle: ExpertsHandle) -> Iterable[Planes]:
        """See `Source`: encoded one at a time, and read one at a time if the files hold experts separately."""
        sites = zip(handle.spec.parts, (swap.site, *swap.parts), strict=True)
        return EncodedExperts(handle, {part: self._matrices(site) for part, site in sites})

    def _matrices(self, site: WeightSite) -> torch.Tensor | MatricesOnDemand:
        entry, shape = self._found[self._entries[site.tensor]], (site.matrices, *site.matrix_shape)
        if entry.matrix is None:
            return entry.read().reshape(shape)
        read = entry.matrix
        return MatricesOnDemand(lambda expert: read(expert).reshape(shape[1:]), shape, entry.info.dtype)

    def computes_in(self, swap: Swap, handle: Weight | ExpertsHandle) -> torch.dtype:
        """See `Source`."""
        return handle.dtype

    def fill_kept_(self, model: nn.Module, landing: Landing) -> None:
        """See `Source`. Tied parameters share one tensor."""
        groups: dict[str, list[str]] = {}
        for name, _ in (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)):
            if name in self._entries:
                groups.setdefault(self._entries[name], []).append(name)
        for entry, names in groups.items():
            assign_(model, names, partial(_with_values, value=_landed(self._found[entry], landing)))


def _landed(entry: Entry, landing: Landing) -> torch.Tensor:
    if landing is HOST:
        return entry.map()
    return (entry.read() if entry.land is None else entry.land(landing.fill)).to(landing.device)


def _with_values(old: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return the values as a parameter or buffer; a parameter takes the dtype that it was outlined with."""
    return with_values(old, value.to(old.dtype) if isinstance(old, nn.Parameter) else value)


def _usual(infos: Iterable[TensorInfo]) -> torch.dtype:
    """Return the dtype of most bytes."""
    sizes: dict[torch.dtype, int] = {}
    for info in infos:
        sizes[info.dtype] = sizes.get(info.dtype, 0) + info.nbytes
    return max(sizes, key=lambda dtype: sizes[dtype], default=torch.float32)
