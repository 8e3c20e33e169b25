"""Sharded weights: DTensors in a model, plain local parameters in the tiers.

`torch.distributed.tensor` shards a weight by a parallel plan; each rank has a plain local tensor. A layer in the tiers
holds that local part: kernels see local shapes, and communication (gather, all-reduce) stays in the plan's own hooks.
When the layer becomes plain again, its part becomes a DTensor again.

For shards to decode to the same values as the whole weight, encoding needs global facts: the largest magnitude
(`agreed_amax`), which decides a tensor scale, and for fitted codebooks the whole weight (`gathered`).

Rejected: a DTensor subclass of encoded planes, as other libraries have. Its dispatcher costs more than a
kernel at batch 1, and no operator but the product is ever called on planes.
"""

import sys
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from vbrt.errors import WrapError
from vbrt.libraries.transformers_api import loaded_part
from vbrt.residency.weight_site import EXPERTS, Shard

__all__ = [
    "Sharding",
    "agreed_amax",
    "as_whole",
    "gathered",
    "group_of",
    "is_sharded",
    "local_of",
    "matrix_shard",
    "restore_sharded_",
    "shard_refusal",
    "sum_refusal",
    "take_local_",
]

_LOCAL = "_vb_local"  # of a DTensor: the parameter that its part is
_groups: dict[str, Any] = {}  # process groups of shards, by name


def is_sharded(tensor: object) -> bool:
    """True for a DTensor, sharded or replicated over processes."""
    loaded = sys.modules.get("torch.distributed.tensor")  # nobody has made one before it is imported
    return loaded is not None and isinstance(tensor, loaded.DTensor)


def local_of(tensor: Any) -> Any:
    """Return the local part of a DTensor, always the same object, a parameter if the DTensor is one. Other values are
    returned unchanged."""
    if not is_sharded(tensor):
        return tensor
    if not isinstance(tensor, nn.Parameter):
        return tensor._local_tensor
    local, kept = tensor._local_tensor, tensor.__dict__.get(_LOCAL)
    if kept is None or kept.dtype is not local.dtype or kept.device != local.device or not _on_same(kept, local):
        kept = tensor.__dict__[_LOCAL] = nn.Parameter(local, requires_grad=tensor.requires_grad)
    return kept


def _on_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.is_meta or one.data_ptr() == other.data_ptr()


class Sharding(NamedTuple):
    """Mesh and placements of a DTensor: they rebuild it from this rank's part."""

    mesh: Any
    placements: tuple[Any, ...]
    shape: torch.Size
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Any) -> "Sharding":
        """Return the sharding of a DTensor."""
        return cls(tensor.device_mesh, tuple(tensor.placements), tensor.shape, tuple(tensor.stride()))

    @property
    def dim(self) -> int | None:
        """Sharded dimension, from 0; None if replicated."""
        cut = [_dim_of(placement, len(self.shape)) for placement in self.placements if not placement.is_replicate()]
        return cut[0] if cut else None

    def whole(self, local: torch.Tensor) -> Any:
        """Return the DTensor with `local` as this rank's part."""
        make = sys.modules["torch.distributed.tensor"].DTensor.from_local
        return make(local, self.mesh, self.placements, run_check=False, shape=self.shape, stride=self.stride)


def _dim_of(placement: Any, ndim: int) -> int:
    return placement.dim % ndim


def shard_refusal(tensor: Any) -> str | None:
    """Return why a DTensor cannot go into the tiers; None for one that can, and for plain tensors."""
    if not is_sharded(tensor):
        return None
    cut = [placement for placement in tensor.placements if not placement.is_replicate()]
    if len(cut) > 1:
        return f"it is cut along {len(cut)} dimensions of its mesh, {tuple(tensor.placements)}"
    if any(placement.is_partial() for placement in cut):
        return "it is a partial sum, of which no rank has the values"
    if any(_leaves_one_nothing(tensor, mesh_dim) for mesh_dim in range(len(tensor.placements))):
        return "the last rank holds nothing of it: there are more ranks than it can be cut for"
    return None


def sum_refusal(tensors: Iterable[Any]) -> str | None:
    """Return why the outputs of routed experts with these weights would not be added up over ranks if their module did
    not hold them; None if they are. transformers 5.17 adds them only where it sees a part among its parameters."""
    cut = any(is_sharded(tensor) and Sharding.of(tensor).dim is not None for tensor in tensors)
    style = loaded_part("distributed.tensor_parallel", "MoeExpertsParallel")
    if not cut or style is None:
        return None
    output = torch.empty(0, dtype=torch.float32, device="cpu")
    try:
        added = style.transform_output_post_forward(style.__new__(style), nn.Identity(), output, None)
    except AttributeError:  # it reads the group that it reduces over
        return None
    if added is not output:
        return None
    return (
        "it is cut over ranks, and this version of transformers adds their outputs only while it sees the parts; "
        "update transformers (5.23 always adds them)"
    )


def _leaves_one_nothing(tensor: Any, mesh_dim: int) -> bool:
    """True if the last rank's shard is empty. All ranks agree, since they encode together."""
    placement, count = tensor.placements[mesh_dim], tensor.device_mesh.size(mesh_dim)
    if placement.is_replicate():
        return False
    each = tensor.shape[_dim_of(placement, tensor.dim())] // getattr(placement, "split_factor", 1)
    return -(-each // count) * (count - 1) >= each


def matrix_shard(tensor: Any, *, stacked: bool, transposed: bool) -> Shard | None:
    """Return which part of each matrix of a DTensor this process holds; None for all of it, and for plain tensors.

    Args:
        stacked: True if its matrices lie along a dimension in front.
        transposed: True if it keeps each matrix as [K, N].
    """
    if not is_sharded(tensor):
        return None
    for mesh_dim, placement in enumerate(tensor.placements):
        if placement.is_replicate():
            continue
        dim = _dim_of(placement, tensor.dim()) - stacked
        dim = EXPERTS if dim < 0 else 1 - dim if transposed else dim
        mesh, group = tensor.device_mesh, tensor.device_mesh.get_group(mesh_dim)
        _groups[group.group_name] = group
        return Shard(
            dim=dim,
            index=mesh.get_local_rank(mesh_dim),
            count=mesh.size(mesh_dim),
            whole=tensor.shape[_dim_of(placement, tensor.dim())],
            parts=getattr(placement, "split_factor", 1),
            group=group.group_name,
        )
    return None


def group_of(shard: Shard) -> Any:
    """Return the process group of the ranks that hold the parts. Raises WrapError: it is of another process."""
    group = _groups.get(shard.group)
    if group is None:
        raise WrapError(
            f"process group {shard.group!r}: not of this process; a layer whose weight is split over ranks cannot be "
            "encoded in another process than the one that wrapped it"
        )
    return group


# -- modules ----------------------------------------------------------------------------------------------------------


def take_local_(module: nn.Module, parameters: tuple[str, ...]) -> None:
    """Replace a module's DTensors with local parameters."""
    held = {name: module._parameters[name] for name in parameters}
    shardings = {name: Sharding.of(tensor) for name, tensor in held.items() if is_sharded(tensor)}
    if shardings:
        module.__dict__["_vb_shardings"] = shardings
        module._parameters.update((name, local_of(held[name])) for name in shardings)


def restore_sharded_(module: nn.Module) -> None:
    """Replace a module's local parameters with DTensors again."""
    for name, sharding in module.__dict__.get("_vb_shardings", {}).items():
        local = module._parameters.get(name)
        if local is not None and not is_sharded(local):
            whole = sharding.whole(local.detach())
            module._parameters[name] = nn.Parameter(whole, requires_grad=local.requires_grad)


def as_whole(module: nn.Module, name: str, local: torch.Tensor) -> Any:
    """Return a parameter of a module as the DTensor that it is part of; a plain one as it is."""
    sharding = module.__dict__.get("_vb_shardings", {}).get(name)
    return local if sharding is None or is_sharded(local) else sharding.whole(local)


# -- what all ranks know ----------------------------------------------------------------------------------------------


def agreed_amax(w_ENK: torch.Tensor, shard: Shard) -> list[float]:
    """Return the largest magnitude of each matrix over all ranks: every rank calls it at the same point. NaN and Inf on
    any rank are inf."""
    ends = torch.stack([torch.stack(torch.aminmax(w_NK)).abs().amax() for w_NK in w_ENK]).float()
    amax_E = torch.where(ends.isfinite(), ends, float("inf"))
    dist.all_reduce(amax_E, dist.ReduceOp.MAX, group=group_of(shard))
    return amax_E.tolist()


def gathered(w_NK: torch.Tensor, shard: Shard) -> torch.Tensor:
    """All-gather the whole matrix from local parts `w_NK`: every rank calls it at the same point."""
    dim, size = shard.dim, w_NK.shape[shard.dim]
    held = [shard.spans(size, index) for index in range(shard.count)]
    most = max(sum(end - begin for begin, end in spans) for spans in held)
    padded = w_NK.new_zeros([most if at == dim else extent for at, extent in enumerate(w_NK.shape)])
    padded.narrow(dim, 0, size).copy_(w_NK)
    parts = [torch.empty_like(padded) for _ in held]
    dist.all_gather(parts, padded, group=group_of(shard))
    whole = w_NK.new_empty([shard.whole if at == dim else extent for at, extent in enumerate(w_NK.shape)])
    for part, spans in zip(parts, held, strict=True):
        at = 0
        for begin, end in spans:
            whole.narrow(dim, begin, end - begin).copy_(part.narrow(dim, at, end - begin))
            at += end - begin
    return whole
