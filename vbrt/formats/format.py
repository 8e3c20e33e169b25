"""Interface of number formats: encoder, decoder and page layout, all pure tensor functions.

Legend: N rows (outputs), K columns (inputs), Kp = K padded to the block, B blocks, b weights per block.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from vbrt.config.format_records import FormatRecord
from vbrt.errors import FormatError
from vbrt.formats.page import PageLayout

__all__ = [
    "EncodedGroup",
    "Format",
    "WeightPlanes",
    "check_weight",
    "check_weights",
    "padded",
    "refuse_nonfinite",
    "tiles",
]

# A tile and about five fp32 temporaries should fit in a core's L2 cache (1-2 MiB).
TILE_WEIGHTS = 1 << 17
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class WeightPlanes:
    """Planes of one weight in memory: the operands of a kernel.

    shape (N, K) and dtype are the original weight's. For format "dense", coarse = {"weight": W_NK}. `prepared` caches a
    kernel's preprocessing of them.
    """

    format: str
    shape: tuple[int, int]
    dtype: torch.dtype
    coarse: dict[str, Tensor]
    fine: dict[str, Tensor] | None = None
    prepared: object = field(default=None, init=False, repr=False, compare=False)


class EncodedGroup(NamedTuple):
    """Matrices of one shape, encoded together.

    Attributes:
        members: indices among the given matrices.
        coarse: fields of their planes. Fields with rows have all members' rows concatenated; per-plane ones, such as
            the tensor scale, are common to all members.
    """

    members: Sequence[int]
    coarse: Mapping[str, Tensor]

    def planes(self, layout: PageLayout) -> Iterator[dict[str, Tensor]]:
        """Yield each member's plane as views; `layout`: of one plane."""
        rows = {field.name: field.shape[0] for field in layout.fields}
        shared = {name for name, tensor in self.coarse.items() if tensor.shape[0] == rows[name]}
        for at in range(len(self.members)):
            yield {
                name: tensor if name in shared else tensor[at * rows[name] : (at + 1) * rows[name]]
                for name, tensor in self.coarse.items()
            }


class Format(ABC):
    """A number format. Instances are stateless except for lookup tables, and shared (`get_format`).

    Attributes:
        code_dtype: of the field "codes", if it has one.
        with_feedback: `error_feedback.compensated` of a format whose codes are not chosen one by one: (w_NK, coarse,
            moments) to coarse; None: column by column.
    """

    code_dtype = "uint8"
    with_feedback: Callable[[Tensor, dict[str, Tensor], Tensor], dict[str, Tensor]] | None = None

    def __init__(self, record: FormatRecord) -> None:
        self.record = record
        self.name, self.block = record.name, record.block

    @abstractmethod
    def encode(self, w_NK: Tensor, squares: Tensor | None = None) -> dict[str, Tensor]:
        """Encode a finite fp32, bf16 or fp16 weight into a coarse plane on its device; K is zero-padded internally.

        squares: mean square of each input, fp32 [K], positive and about 1: weights of the squared errors in the scale
        search.
            Ignored by formats without a search.

        Raises FormatError for another dtype or rank, an empty weight, or NaN/Inf (with their counts).
        """

    def encode_many(
        self, w_ENK: Tensor, amax_E: Sequence[float] | None = None, squares: Tensor | None = None
    ) -> Iterator[EncodedGroup]:
        """Encode matrices of one shape, bit-exact with `encode` on each, in fewer operations.

        Args:
            amax_E: largest magnitudes, finite, of the matrices that these are parts of; default: their own.
            squares: [E, K], as in `encode` for each.

        Raises FormatError like `encode`.
        """
        for at, w_NK in enumerate(w_ENK):
            yield EncodedGroup((at,), self.encode(w_NK) if squares is None else self.encode(w_NK, squares[at]))

    @abstractmethod
    def decode(self, tensors: dict[str, Tensor], shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        """Decode to the weight [N, K] in `dtype`, on the tensors' device, without padding."""

    @abstractmethod
    def layout(self, shape: tuple[int, int], dtype: torch.dtype) -> PageLayout:
        """Page layout of `encode`'s tensors; depends only on the weight's shape and dtype."""

    def __repr__(self) -> str:
        return f"<format {self.name}, block {self.block}>"


def padded(k: int, block: int) -> int:
    """k rounded up to a multiple of block."""
    return -(-k // block) * block


def check_weight(w_NK: Tensor, format: str) -> float:
    """Return the largest magnitude of a weight; raises FormatError if it cannot be encoded."""
    if w_NK.dtype not in _DTYPES:
        raise FormatError(f"{format}: weight is {w_NK.dtype}; expected float32, bfloat16 or float16")
    if w_NK.ndim != 2 or not w_NK.numel():
        raise FormatError(f"{format}: weight has shape {tuple(w_NK.shape)}; expected (N, K) with at least one weight")
    low, high = torch.aminmax(w_NK)
    amax = max(-low.item(), high.item())
    if not amax < float("inf"):
        refuse_nonfinite(w_NK, format)
    return amax


def check_weights(w_ENK: Tensor, format: str) -> list[float]:
    """Return the largest magnitude of each weight; raises FormatError if one cannot be encoded."""
    if w_ENK.dtype not in _DTYPES or w_ENK.ndim != 3 or not w_ENK.numel():
        return [check_weight(w_NK, format) for w_NK in w_ENK]  # raises with the reason
    ends = torch.stack([end.float() for w_NK in w_ENK for end in torch.aminmax(w_NK)]).tolist()  # one synchronization
    amax_E = [max(-low, high) for low, high in zip(ends[::2], ends[1::2], strict=True)]
    for w_NK, amax in zip(w_ENK, amax_E, strict=True):
        if not amax < float("inf"):
            refuse_nonfinite(w_NK, format)
    return amax_E


def refuse_nonfinite(w_NK: Tensor, format: str) -> None:
    """Raise a FormatError with the numbers of NaN and Inf in a weight."""
    nan = int(w_NK.isnan().sum())
    inf = int(w_NK.isinf().sum())
    raise FormatError(
        f"{format}: weight of shape {tuple(w_NK.shape)} holds {nan} NaN and {inf} Inf; expected finite values"
    )


def tiles(shape: tuple[int, int], block: int, size: int = TILE_WEIGHTS) -> Iterator[tuple[slice, slice]]:
    """Yield (rows, columns) slices of about `size` weights that cover [N, K]; columns start at multiples of block."""
    n, k = shape
    wide = max(block, size // block * block)
    high = max(1, size // padded(min(k, wide), block))
    for row in range(0, n, high):
        for column in range(0, k, wide):
            yield slice(row, min(row + high, n)), slice(column, min(column + wide, k))
