"""StreamedParameter: parameter object of a weight whose values live in the tiers.

Optimizers, schedulers and loops hold parameters by identity, so the object stays, in the module and in the optimizer's
groups, with shape, dtype and device but no values. `grad` is the gradient on the host. Any operation on values raises
an error that names the operation.

Rejected: parameters on the meta device, as accelerate leaves them, whose operations succeed without meaning.
"""

import weakref
from collections.abc import Mapping
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from vbrt.errors import WrapError
from vbrt.libraries.torch_api import DisableTorchFunctionSubclass
from vbrt.training.full.host_gradients import Gradient
from vbrt.training.full.lazy_gradient import METADATA
from vbrt.training.full.optimizer_update import Updater, WeightState

__all__ = ["StreamedParameter", "StreamedWeight"]

_GETS = "_backward_hooks _post_accumulate_grad_hooks _version output_nr retains_grad"
_CALLS = "stride storage_offset requires_grad_ is_inference is_shared is_pinned type"
_ALLOWED = METADATA | {getattr(Tensor, name).__get__ for name in _GETS.split()}
_ALLOWED |= {getattr(Tensor, name) for name in _CALLS.split()} | {Tensor.requires_grad.__set__}
_WEIGHT = "_vb_weight"


class StreamedWeight(Protocol):
    """The weight of a streamed parameter, as the parameter and optimizers see it: a `FullWeight`.

    Attributes:
        device: that computes with it.
        parameter, gradient, state, updater: see `FullWeight`.
    """

    device: torch.device
    parameter: "StreamedParameter | None"
    gradient: Gradient
    state: WeightState | None
    updater: Updater | None

    @property
    def name(self) -> str:
        """The name of the weight."""

    @property
    def spare_bytes(self) -> int:
        """Bytes of spare memory for an update ahead of the step; 0 if its pages are not in host memory."""

    def place_state(self, moments: Mapping[str, str], *, eight_bit: bool) -> None:
        """Give the master's low half and the moments their place in the tiers, once."""

    def place_spare(self, *, besides: int) -> bool:
        """Allocate spare memory; False without room for it besides so many bytes."""


class StreamedParameter(nn.Parameter):
    """Parameter whose values live in the tiers; converted from a plain one in place, by `become_`."""

    @classmethod
    def become_(cls, parameter: nn.Parameter, weight: StreamedWeight) -> "StreamedParameter":
        """Drop a parameter's values: a single expanded element on the computing device stands for them."""
        empty = torch.full((), float("nan"), dtype=parameter.dtype, device=weight.device).expand(parameter.shape)
        parameter.grad = None
        parameter.data = empty
        parameter.__dict__[_WEIGHT] = weakref.ref(weight)
        parameter.__class__ = cls
        return parameter

    def restore_(self, values: Tensor) -> nn.Parameter:
        """Turn the parameter back into a plain one with these values."""
        self.__class__ = nn.Parameter
        self.__dict__.pop(_WEIGHT, None)
        self.data = values
        return self

    @property
    def weight(self) -> StreamedWeight:
        """The weight in the tiers."""
        found = self.__dict__[_WEIGHT]()
        if found is None:
            raise WrapError("a parameter's weight lived in the tiers of a model that is gone")
        return found

    @property
    def grad(self) -> Tensor | None:
        """Gradient on the host, in the parameter's shape and dtype, lazy until its numbers are needed; None without
        one. Writes to it count."""
        return self.weight.gradient.shown()

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if value is not None and not self._fits(value):
            raise WrapError(f"{self.weight.name}: a gradient has to be a tensor of {tuple(self.shape)} in {self.dtype}")
        self.weight.gradient.put(value)

    @grad.deleter
    def grad(self) -> None:
        self.weight.gradient.put(None)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"StreamedParameter({self.weight.name}, {tuple(self.shape)}, {self.dtype}, values in the tiers)"

    def __reduce_ex__(self, protocol: int) -> Any:
        raise self._refusal("pickling")

    def __deepcopy__(self, memo: dict) -> Any:
        raise self._refusal("copying")

    def _fits(self, gradient: Any) -> bool:
        return isinstance(gradient, Tensor) and gradient.shape == self.shape and gradient.dtype is self.dtype

    def _refusal(self, what: str) -> WrapError:
        several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        ranks = '; such weights are not sharded or summed over ranks: DDP and FSDP need mode = "train"'
        return WrapError(
            f"{self.weight.name}: {what} needs the values of a weight that trains in the tiers; vb.state_dict() has "
            "all of them, layer.weight_now() one layer's, and unwrap() restores plain parameters" + ranks * several
        )

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func in _ALLOWED and (func is not Tensor.type or len(args) == 1):  # Tensor.type with a dtype is a cast
            with DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        streamed = next((a for a in args if isinstance(a, StreamedParameter)), None)
        what = getattr(func, "__name__", str(func))
        if what == "__get__":
            what = f"reading .{getattr(func.__self__, '__name__', 'an attribute')}"
        if streamed is None:
            raise WrapError(f"{what}: it was given a list with parameters of weights that train in the tiers")
        raise streamed._refusal(what)
