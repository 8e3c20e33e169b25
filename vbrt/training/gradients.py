"""The gradient of a streamed weight, on the host from the moment that it arises.

Gradients are summed as autograd sums them: in the parameter's dtype, in the order in which they arise. The first one of
a step is kept in the dtype that it was computed in, which holds the same values.
"""

import torch
from torch import Tensor

__all__ = ["Gradient"]


class Gradient:
    """One weight's gradient.

    Args:
        dtype: of the parameter.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._sum: Tensor | None = None
        self.hidden = False  # from the optimizer's own step

    def add_(self, dw: Tensor) -> None:
        """Add what one backward pass has computed, in the module's orientation."""
        arrived = dw.detach().to("cpu")
        if self._sum is None:
            self._sum = arrived
        else:
            self._sum = self._whole().add_(arrived)

    def _whole(self) -> Tensor:
        return self._sum.to(self.dtype)

    def tensor(self) -> Tensor | None:
        """Return the sum in the parameter's dtype; writes to it count."""
        if self.hidden or self._sum is None:
            return None
        self._sum = self._whole()
        return self._sum

    def put(self, value: Tensor | None) -> None:
        """Replace the sum."""
        self._sum = None if value is None else value.detach().to("cpu", self.dtype)

    def take(self) -> Tensor | None:
        """Return the sum as it is and keep none; any dtype that holds its values."""
        taken, self._sum = self._sum, None
        return taken
