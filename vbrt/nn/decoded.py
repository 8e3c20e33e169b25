"""What reading `.weight` of a VB layer gives: a decoded temporary that knows where it came from.

It is a plain tensor to every operation. It exists for code that treats the weight as storage: assigning `.data` (as
PEFT does to merge an adapter) reaches the layer, and a write into the temporary, which the layer cannot see, warns.
"""

import warnings
import weakref

import torch

__all__ = ["DecodedWeight"]


class DecodedWeight(torch.Tensor):
    """A decoded weight. Results of operations on it, its copies and pickles are plain tensors."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    _layer: weakref.ref
    _version_read: int

    @classmethod
    def of(cls, layer: torch.nn.Module, weight: torch.Tensor) -> "DecodedWeight":
        """`weight`, just decoded for `layer`, without a copy."""
        decoded = weight.as_subclass(cls)
        decoded._layer = weakref.ref(layer)
        decoded._version_read = _version(decoded)
        return decoded

    @property
    def data(self) -> torch.Tensor:
        """The values as a plain tensor; assigning gives the layer a new weight."""
        values = self.detach()  # unlike Tensor.data, shares the count of writes
        values._read_from = self  # and lives as long
        return values

    @data.setter
    def data(self, values: torch.Tensor) -> None:
        self._version_read = _version(self)  # `weight.data += delta` writes here and assigns: nothing is lost
        layer = self._layer()
        if layer is not None:
            layer.weight = values.detach().clone()

    def __del__(self) -> None:
        if _version(self) != self._version_read:
            layer = self._layer()
            name = layer.handle.spec.name if layer is not None else "a VB layer"
            warnings.warn(f"{name}.weight: a decoded temporary was written to, the layer keeps its weight; assign the "
                          "new one instead: layer.weight = new_weight", stacklevel=2)

    def __deepcopy__(self, memo: dict) -> torch.Tensor:
        return self.detach().clone()

    def __reduce_ex__(self, protocol: int):
        return self.detach().clone().__reduce_ex__(protocol)


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version  # inference tensors count no writes
