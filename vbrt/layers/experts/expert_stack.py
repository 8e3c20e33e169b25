"""Zero-copy stack of expert matrices, for implementations on a CPU.

A module's implementation reads its weights as one tensor [n, ...], but leased pages are separate. Copying them into one
takes as long as multiplying by them. A `Bank` has that tensor's shape, dtype and device, without storage: reads by
expert (an index, `grouped_mm`) get the matrices in place, any other operation a copy of all.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from vbrt.libraries.torch_api import DisableTorchFunctionSubclass

__all__ = ["FACTS", "Bank"]


class Bank(Tensor):
    """Matrices of one shape and dtype, on the CPU, as the tensor [n, ...] that stacking them would give.

    Attributes:
        matrices: the matrices.
        turned: True if it stands for their transposes.
    """

    matrices: Sequence[Tensor]
    turned: bool

    @classmethod
    def of(cls, matrices: Sequence[Tensor], *, turned: bool = False) -> "Bank":
        """Return the bank of one or more matrices."""
        one = matrices[0]
        shape = one.t().shape if turned else one.shape
        bank = torch.empty(1, dtype=one.dtype, device="cpu").expand(len(matrices), *shape).as_subclass(cls)
        bank.matrices, bank.turned = matrices, turned
        return bank

    def one(self, place: int) -> Tensor:
        """Return one matrix."""
        return self.matrices[place].t() if self.turned else self.matrices[place]

    def stacked(self) -> Tensor:
        """Return a copy of all."""
        stacked = torch.stack(list(self.matrices))
        return stacked.transpose(1, 2) if self.turned else stacked

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        with DisableTorchFunctionSubclass():
            if func in FACTS:
                return func(*args)
            found = _READS[func](*args, **kwargs or {}) if func in _READS else NotImplemented
            if found is NotImplemented:
                args, kwargs = _without_banks(args), {k: _without_banks((v,))[0] for k, v in (kwargs or {}).items()}
                found = func(*args, **kwargs)
            return found


def _without_banks(values: Sequence[Any]) -> tuple[Any, ...]:
    """Replace banks by copies, also within lists and tuples."""
    return tuple(
        v.stacked() if isinstance(v, Bank) else type(v)(_without_banks(v)) if type(v) in (list, tuple) else v
        for v in values
    )


def _item(bank: Any, index: Any) -> Any:
    """bank[index] of a number, or of a row of them: those matrices."""
    if type(index) is Tensor and index.dtype in (torch.int64, torch.int32) and index.dim() <= 1:
        index = index.tolist()
    if not isinstance(bank, Bank):
        return NotImplemented
    if type(index) is int:
        return bank.one(index)
    if type(index) is list and index and all(type(i) is int for i in index):
        chosen = torch.stack([bank.matrices[i] for i in index])
        return chosen.transpose(1, 2) if bank.turned else chosen
    return NotImplemented


def _transpose(bank: Any, first: Any, second: Any) -> Any:
    if isinstance(bank, Bank) and {first, second} in ({1, 2}, {-1, -2}, {1, -1}, {-2, 2}):
        return Bank.of(bank.matrices, turned=not bank.turned)
    return NotImplemented


def _grouped_mm(x_SK: Tensor, bank: Any, offs: Any = None, **others: Any) -> Any:
    """`torch.nn.functional.grouped_mm` as torch computes it on a CPU: a product for each group of rows."""
    if type(x_SK) is Bank or not isinstance(bank, Bank) or offs is None or any(v is not None for v in others.values()):
        return NotImplemented
    parts, start = [], 0
    with torch.autocast("cpu", enabled=False):  # which leaves grouped products alone
        for place, end in enumerate(offs.tolist()):
            if end > start:
                parts.append(torch.mm(x_SK[start:end], bank.one(place)))
            start = end
    if start < len(x_SK):  # rows of no group: torch leaves them as they come
        parts.append(x_SK.new_zeros(len(x_SK) - start, bank.shape[2]))
    return torch.cat(parts) if parts else x_SK.new_zeros(0, bank.shape[2])


#: what is asked of a tensor without its content
FACTS = {
    *(
        getattr(Tensor, name).__get__
        for name in ("shape", "dtype", "device", "is_cuda", "is_cpu", "requires_grad", "ndim")
    ),
    *(Tensor.size, Tensor.dim, Tensor.__len__, Tensor.is_floating_point, Tensor.element_size, Tensor.numel),
}
_READS = {Tensor.__getitem__: _item, Tensor.transpose: _transpose, torch._grouped_mm: _grouped_mm}
