"""Live bytes of a model on fake tensors: nothing is computed, every allocation is counted.

    meter = Meter()
    with FakeTensorMode(), meter:
        model(ids)
    meter.peaks["forward"]          # bytes

The method is that of torch.distributed._tools.MemTracker: a storage counts from the operator that made it until Python
and autograd release it.
"""

import weakref
from collections import Counter
from typing import Any

import torch
from torch import Tensor

from vbrt.estimation.memory.cuda_allocator import allocated_bytes
from vbrt.libraries.torch_api import TorchDispatchMode, tree_leaves

__all__ = ["Meter"]

_ATEN = torch.ops.aten
#: operators without a kernel, or with an empty one
_FREE = {_ATEN.empty, _ATEN.empty_like, _ATEN.new_empty, _ATEN.empty_strided, _ATEN.detach, _ATEN._unsafe_view}
#: operators that read no more of their inputs than they return
_PICKS = {_ATEN.embedding, _ATEN.index, _ATEN.index_select, _ATEN.gather, _ATEN.embedding_dense_backward}
#: operators that copy int32 indices, their third argument, to int64
_WIDENING = {_ATEN.gather, _ATEN.scatter, _ATEN.scatter_, _ATEN.scatter_add, _ATEN.scatter_add_}
_WIDENING |= {_ATEN.scatter_reduce, _ATEN.scatter_reduce_}

#: operators that read only the weights of routed-to experts, which no trace knows
_ROUTED = {getattr(_ATEN, name) for name in ("_grouped_mm",) if hasattr(_ATEN, name)}


class Meter(TorchDispatchMode):
    """Counts the storages that operators allocate while it is entered.

    Attributes:
        phase: current phase, set by the caller.
        in_block: True while a repeated block runs, set by the caller.
        kind: category of storages made now.
        peaks: peak bytes of each phase.
        work: counters: "operators", those within repeated blocks ("block operators"), bytes read and written ("moved"),
            and FLOPs of matmuls by dtype ("flops bfloat16"), with fused attention apart ("attention bfloat16").
    """

    def __init__(self) -> None:
        super().__init__()
        self.phase = self.kind = ""
        self.in_block = False
        self.peaks: dict[str, int] = {}
        self.live: Counter[str] = Counter()
        self.work: Counter[str] = Counter()
        from torch.utils.flop_counter import flop_registry  # imports Triton, so only on use

        self._flops_of = flop_registry
        self._total = 0
        self._held: dict[int, tuple[str, int]] = {}  # category and bytes of each live storage
        self._watches: dict[int, Any] = {}
        self._unseen: set[int] = set()

    @property
    def total(self) -> int:
        """Live bytes."""
        return self._total

    def leave_out(self, tensors: Any) -> None:
        """Exclude tensors that existed before, such as parameters."""
        for tensor in tensors:
            self._unseen.add(tensor.untyped_storage()._cdata)

    def name(self, tensor: Tensor, kind: str) -> None:
        """Set the category of a tensor's storage, if it is counted."""
        key = tensor.untyped_storage()._cdata
        before, nbytes = self._held.get(key, (kind, 0))
        if before != kind:
            self._held[key] = (kind, nbytes)
            self.live[before] -= nbytes
            self.live[kind] += nbytes

    def note(self) -> None:
        """Update the phase's peak."""
        self.peaks[self.phase] = max(self._total, self.peaks.get(self.phase, 0))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator; count its work and the storages that it allocates."""
        if func.overloadpacket in _WIDENING and args[2].dtype == torch.int32:
            args = (*args[:2], args[2].long(), *args[3:])
            self._add(args[2])
        if func is _ATEN.nonzero.default:  # the data decide: at most all elements
            result = args[0].new_empty((args[0].numel(), args[0].ndim), dtype=torch.long)
        else:
            result = func(*args, **(kwargs or {}))
        if not (func.is_view or func.namespace == "prim" or func.overloadpacket in _FREE):
            self._count(func.overloadpacket, args, kwargs or {}, result)
        grown = False
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                grown |= self._add(leaf)
        if grown:
            self.note()
        return result

    def _count(self, operator: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Add an operator to `work`."""
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self.work["operators"] += 1
        self.work["block operators"] += self.in_block
        if operator in _ROUTED:
            return
        if operator in self._flops_of and made:
            self.add_flops(made[0].dtype, self._flops_of[operator](*args, **kwargs, out_val=result))
            return
        read = made if operator in _PICKS else [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        self.work["moved"] += sum(tensor.numel() * tensor.element_size() for tensor in (*read, *made))

    def add_flops(self, dtype: torch.dtype, flops: int, of: str = "flops") -> None:
        """Add FLOPs of matmuls ("flops"), or of fused "attention", which is not dispatched as an operator."""
        self.work[f"{of} {str(dtype).removeprefix('torch.')}"] += flops

    def _add(self, tensor: Tensor) -> bool:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._held or key in self._unseen:
            return False
        nbytes = allocated_bytes(storage.nbytes())
        self._held[key] = (self.kind, nbytes)
        self._watches[key] = weakref.ref(storage, lambda _, key=key: self._drop(key))
        self.live[self.kind] += nbytes
        self._total += nbytes
        return True

    def _drop(self, key: int) -> None:
        kind, nbytes = self._held.pop(key)
        del self._watches[key]
        self.live[kind] -= nbytes
        self._total -= nbytes
