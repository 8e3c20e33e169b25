"""States of an encoded weight's planes, each with the product that layers call.

| state | planes | product |
| --- | --- | --- |
| `Streamed` | pages that move | `linear`: a lease for each product |
| `Hosted` (`hosted_weights.py`) | pages in host memory | `linear`: few tokens are computed there; for more, a lease |
| `Resident` | pages at home in the computing tier | `linear`, on planes that are used without a lease |
| `ResidentDense` | the same of a weight that is held dense, as nn.Linear keeps it | `F.linear` on the page |
| `ResidentSmallBatch` | 4-bit planes in host memory, on the CPU | a kernel for few tokens, all arguments prepared |

`vbrt.layers.weights.state` chooses one at each transition. A state does not reference its weight, so that reference
counting frees a weight with its last layer.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from vbrt.config import FORMATS
from vbrt.formats.format import WeightPlanes
from vbrt.host.accelerator import is_device
from vbrt.kernels.observers import dispatch_modes, is_bare, is_known_memory, is_tracing
from vbrt.layers.weights.encoded_weight import EncodedWeight
from vbrt.layers.weights.linear_product import linear, products_are_taken, requiring_grad
from vbrt.layers.weights.small_batch import SmallBatch
from vbrt.libraries.torch_api import is_any_autocast_enabled
from vbrt.tiers import Page

__all__ = ["STREAMED", "Resident", "ResidentDense", "ResidentSmallBatch", "Streamed", "resident"]

_is_grad_enabled = torch.is_grad_enabled


class Streamed:
    """Pages that may move: every product leases them.

    Attributes:
        planes: resident planes, used without a lease; None here.
        small_batch: kernel for few tokens on resident planes, or None.
        hosts: True if the CPU computes products of few tokens.
    """

    __slots__ = ()
    hosts = False
    planes: WeightPlanes | None = None
    small_batch: SmallBatch | None = None

    def product(self, weight: EncodedWeight, x: Tensor, bias: Tensor | None) -> Tensor:
        """x Wᵀ + bias for x [..., K] -> [..., N]; see `linear_product.linear`."""
        return linear(weight, x, bias)

    def compute(self, weight: EncodedWeight, x: Tensor, bias: Tensor | None) -> Tensor | None:
        """x Wᵀ + bias, computed where the page lies; None: a lease brings it."""
        return None

    def compute_rows(self, weight: EncodedWeight, rows: Sequence[Tensor], bias: Tensor | None) -> list[Tensor] | None:
        """`compute` of each x in `rows`, alike in shape, with the bits of a call for it alone."""
        return None

    def compute_siblings(self, weights: Sequence[EncodedWeight], x: Tensor) -> list[Tensor] | None:
        """`compute` with each of several weights, this one among them, without biases."""
        return None

    def end(self) -> None:
        """Let go of what the state holds. Idempotent."""


STREAMED = Streamed()


class Resident(Streamed):
    """Resident planes: their pages never move."""

    __slots__ = ("planes",)

    def __init__(self, planes: WeightPlanes) -> None:
        self.planes = planes


class ResidentDense(Resident):
    """Dense weight in a resident page, in nn.Linear's layout."""

    __slots__ = ("_on_device", "_page", "_weight")

    def __init__(self, planes: WeightPlanes, page: Page) -> None:
        super().__init__(planes)
        self._page, self._weight = page, planes.coarse["weight"]
        self._on_device = is_device(self._weight)

    def product(self, weight: EncodedWeight, x: Tensor, bias: Tensor | None) -> Tensor:
        """Fast path of `linear` for bare calls, with little more Python overhead than nn.Linear."""
        w_NK, ledger = self._weight, weight.stack.ledger
        moving = (
            ledger.travellers or ledger.retired or ledger.lost or ledger.guard.recorder
        )  # `at_rest`, without a call
        # modes would keep the very tensor, which is a page's
        if moving or is_device(x) is not self._on_device or _is_grad_enabled() or dispatch_modes() or is_tracing():
            return linear(weight, x, bias)
        weight.forwards += 1
        self._page.hits += 1  # no call in between: one step for threads that share an interpreter lock
        return F.linear(x, w_NK, bias)


class ResidentSmallBatch(Resident):
    """Resident 4-bit planes on a CPU, with a small-batch kernel whose arguments are prepared."""

    __slots__ = ("small_batch",)

    def __init__(self, planes: WeightPlanes, small_batch: SmallBatch) -> None:
        super().__init__(planes)
        self.small_batch = small_batch

    def product(self, weight: EncodedWeight, x: Tensor, bias: Tensor | None) -> Tensor:
        """`linear`, bit for bit; bare calls go to the prepared kernel."""
        y = self._prepared(weight, x, bias)
        return linear(weight, x, bias) if y is None else y

    def _prepared(self, weight: EncodedWeight, x: Tensor, bias: Tensor | None) -> Tensor | None:
        ledger = weight.stack.ledger
        if ledger.travellers or ledger.retired or ledger.lost or ledger.guard.recorder:
            return None  # as `at_rest` says, without a call
        if _is_grad_enabled() or is_any_autocast_enabled() or products_are_taken():
            return None
        if not is_bare(x) or not x.is_cpu or not (bias is None or (is_known_memory(bias) and bias.is_cpu)):
            return None
        y = self.small_batch(x, bias)
        if y is not None:
            weight.forwards += 1
            for page in weight.pages:
                page.hits += 1  # no call in between: one step for threads that share an interpreter lock
        return y


def resident(weight: EncodedWeight, planes: WeightPlanes) -> Resident:
    """Return the state of a weight with resident planes."""
    if FORMATS[planes.format].lossless:
        if weight.trainable:
            w_NK = requiring_grad(planes.coarse["weight"])
            planes = WeightPlanes(planes.format, planes.shape, planes.dtype, {"weight": w_NK})
        return Resident(planes) if weight.spec.transposed else ResidentDense(planes, weight.pages[0])
    kernels = weight.kernels
    if kernels is None or kernels.kernel.few is None or weight.separation is not None or weight.spec.fine:
        return Resident(planes)
    few = kernels.kernel.few(planes)
    return Resident(planes) if few is None else ResidentSmallBatch(planes, SmallBatch(few))
