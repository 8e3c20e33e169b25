"""FusedFP4Linear: an nn.Linear that trains dense and is frozen to 4 bits by one call.

    layer = FusedFP4Linear(1024, 4096, activation="gelu")
    ...                                         # trains like nn.Linear followed by the activation
    layer.quantize()                            # or vbrt.quantize(model), for every such layer

The frozen weight is one uint8 buffer, `planes`: a page of its format (vbrt/formats/page.py). `.to(dtype)` leaves uint8
alone, deepcopy and pickle copy it, and safetensors can store it, unlike float8 scales. On a GPU whose kernels prefer
another order, the buffer is repacked; state dicts always hold the format's own order, so they load on any machine.

The road not taken: a tensor subclass as the weight. `weight` would remain a Parameter, but optimizers, state dicts and
`torch.compile` each treat subclasses differently.
"""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.fx import Proxy

from vbrt.blocks.frozen_page import PageForm, frozen_linear, frozen_weight
from vbrt.config import FORMATS, chosen_formats
from vbrt.config.argument_checks import check_instance, check_one_of, check_whole
from vbrt.errors import FormatError, WrapError
from vbrt.formats import PageLayout, get_format, new_page, pack, unpack
from vbrt.host import accelerator
from vbrt.host.logger import warn
from vbrt.kernels.decoded_weight import DecodedWeight
from vbrt.kernels.frozen_product import Product, as_autocast
from vbrt.kernels.observers import is_bare, traced_call
from vbrt.kernels.reference import ACTIVATIONS, wants_grad

__all__ = ["FusedFP4Linear", "quantize"]

_MAX_HEADER_BYTES = 4096
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64)
}


def _formats() -> tuple[str, ...]:
    """Formats that a layer can be frozen to."""
    return tuple(name for name in chosen_formats() if not FORMATS[name].lossless)


class FusedFP4Linear(nn.Linear):
    """activation(x Wᵀ + bias): dense until `quantize`, afterwards with a frozen 4-bit weight.

    When frozen, `weight` returns a decoded temporary, the bias still trains, and gradients flow to the input.
    Optimizers created before still hold the dense weight and must be replaced.

    Attributes:
        activation: "none", "relu", "gelu", "gelu_tanh" or "silu".
        format: of the frozen weight; None while dense.

    Raises:
        ArgumentError: an unknown activation.
    """

    format: str | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        activation: str = "none",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_one_of(activation, ACTIVATIONS, "FusedFP4Linear: activation")
        check_whole(in_features, "FusedFP4Linear: in_features")
        check_whole(out_features, "FusedFP4Linear: out_features")
        super().__init__(in_features, out_features, bias, device, dtype)
        self.activation, self.format = activation, None
        self._dtype, self._form = self._parameters["weight"].dtype, None  # dtype and form of the page, once frozen

    def forward(self, input: Tensor) -> Tensor:
        """input [..., in_features] -> [..., out_features]."""
        bias = self._parameters["bias"]
        if self.format is None:
            return ACTIVATIONS[self.activation](F.linear(input, self._parameters["weight"], bias))
        if not is_compiling() and not is_bare(input):
            return traced_call(self, input) if isinstance(input, Proxy) else self._watched(input, bias)
        input, bias = as_autocast(input), as_autocast(bias)  # as autocast does for nn.Linear
        if is_compiling():
            return self._compiled(input, bias)
        if not wants_grad(input, bias):
            return self._form.multiply(input, self.planes, bias, self._dtype, self.activation)
        return ACTIVATIONS[self.activation](Product.here(input, bias, _Snapshot(self, self.planes), False))

    def _watched(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Fallback under tracers, modes and transforms: a dense product with the decoded weight."""
        weight = frozen_weight(self.planes, self._form.text(), self._dtype)
        return ACTIVATIONS[self.activation](F.linear(x, weight, bias))

    # -- freezing -----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def quantize(self, format: str = "nvfp4") -> "FusedFP4Linear":
        """Encode the weight in a 4-bit format and drop the dense one with its gradient; returns self.

        Raises:
            WrapError: the layer is already frozen.
            FormatError: not a 4-bit format, or a weight that cannot be encoded (NaN, Inf, float64, meta device); the
                layer stays dense.
        """
        self._freeze(format, self._encoded(format))
        return self

    def _encoded(self, format: str) -> Tensor:
        """Encode the weight into a page."""
        if self.format is not None:
            raise WrapError(
                f"FusedFP4Linear({self.in_features}, {self.out_features}): its weight is already frozen in "
                f"{self.format}; encoding it twice would only lose more"
            )
        if format not in _formats():
            raise FormatError(f"FusedFP4Linear: format {format!r}; expected one of {', '.join(_formats())}")
        weight = self._parameters["weight"].detach()
        if weight.is_meta:
            raise FormatError("FusedFP4Linear: its weight is on the meta device, without data; load it first")
        layout = PageForm(format, self._shape).layout
        return pack(get_format(format).encode(weight), layout, new_page(layout, weight.device))

    def _freeze(self, format: str, page: Tensor) -> None:
        """Replace the dense weight by a page in the format's own order."""
        if self.format is None:
            self._dtype = self._parameters.pop("weight").dtype
        self.format = format
        self._hold(*PageForm(format, self._shape).for_kernel(page))

    def _hold(self, form: PageForm, page: Tensor) -> None:
        self.register_buffer("planes", page, persistent=False)  # saved and loaded below, with a header
        self._form = form

    @property
    def _shape(self) -> tuple[int, int]:
        return (self.out_features, self.in_features)

    # -- the frozen weight --------------------------------------------------------------------------------------------

    def _decoded(self) -> Tensor:
        with torch.no_grad():
            return self._form.decode(self.planes, self._dtype)

    def _compiled(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """The product as one custom operator, opaque to torch.compile."""
        dtype = x.dtype if torch.is_autocast_enabled(x.device.type) else self._dtype
        if not wants_grad(x, bias):
            return frozen_linear(x, self.planes, bias, self._form.text(), dtype, self.activation)
        return ACTIVATIONS[self.activation](frozen_linear(x, self.planes, bias, self._form.text(), dtype, "none"))

    def __getattr__(self, name: str) -> Any:
        if name == "weight" and self.__dict__.get("format") is not None:
            return self._decoded() if is_compiling() else DecodedWeight.of(_FrozenOwner(self), self._decoded())
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight" and self.__dict__.get("format") is not None:
            raise WrapError("FusedFP4Linear: its weight is frozen; make a new layer for a new weight")
        super().__setattr__(name, value)

    def requires_grad_(self, requires_grad: bool = True) -> "FusedFP4Linear":
        """As in nn.Module; a frozen layer warns that only its bias trains."""
        if requires_grad and self.__dict__.get("format") is not None:
            warn(
                f"requires_grad_(True): FusedFP4Linear({self.in_features}, {self.out_features}) is frozen in "
                f"{self.format}, only its bias trains",
                stacklevel=2,
            )
        return super().requires_grad_(requires_grad)

    def reset_parameters(self) -> None:
        """Reinitialize the weight like nn.Linear. Raises WrapError if frozen."""
        if self.__dict__.get("format") is not None:
            raise WrapError("FusedFP4Linear: its weight is frozen; make a new layer for a new weight")
        super().reset_parameters()

    # -- nn.Module hooks -----------------------------------------------------------------------------------------------

    def _apply(self, fn, recurse: bool = True):
        """On a frozen layer, a cast changes the compute dtype only; its planes are only moved."""
        super()._apply(fn, recurse)
        if self.format is None:
            self._dtype = self._parameters["weight"].dtype
            return self
        self._dtype = fn(torch.empty(0, dtype=self._dtype, device="cpu")).dtype
        self._hold(*self._form.for_kernel(self.planes))
        return self

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        if self._form is not None and self._form.packed and self.planes.device.type != accelerator.TYPE:
            self._hold(*self._form.plain(self.planes))  # torch.load(..., map_location="cpu")

    def _save_to_state_dict(self, destination, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.format is not None:
            destination[prefix + "planes"] = self._form.plain(self.planes)[1].detach()
            destination[prefix + "planes_header"] = _header(self._form, self._dtype)

    def _load_from_state_dict(
        self, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
    ) -> None:
        names = [prefix + "planes", prefix + "planes_header"]
        rest = {name: value for name, value in state_dict.items() if name not in names}
        if names[0] in state_dict:
            error = self._adopt(state_dict, *names, assign=local_metadata.get("assign_to_params_buffers", False))
            if error:
                error_msgs.append(f"{prefix}planes: {error}")
        elif self.format is not None and prefix + "weight" in state_dict:
            error_msgs.append(
                f"{prefix}weight: this layer is frozen in {self.format} and the checkpoint holds a dense "
                "weight; load it into a fresh layer"
            )
            del rest[prefix + "weight"]
        elif self.format is not None and strict:
            missing_keys.append(names[0])
        super()._load_from_state_dict(rest, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)

    def _adopt(self, state_dict: Mapping[str, Tensor], planes: str, header: str, *, assign: bool) -> str | None:
        """Load a page, and its dtype if `assign`; returns an error message, or None."""
        if header not in state_dict:
            return f"expected {header} beside it"
        try:
            if state_dict[header].numel() > _MAX_HEADER_BYTES:
                return f"a header of {state_dict[header].numel()} bytes; expected at most {_MAX_HEADER_BYTES}"
            read = json.loads(bytes(state_dict[header].tolist()))
            layout, dtype = PageLayout.from_dict(read["layout"]), _DTYPES[read["dtype"]]
            unpack(state_dict[planes], layout)
            expected = PageForm(layout.format, self._shape).layout if layout.format in _formats() else None
        except (FormatError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            return f"{header}: {error}"
        if layout != expected:
            fits = f"[{self.out_features}, {self.in_features}] in one of {', '.join(_formats())}"
            return f"a page of another shape or format ({layout.format}); expected {fits}"
        held = self._buffers.get("planes") if self.format else self._parameters["weight"]
        page = state_dict[planes].detach()
        self._freeze(layout.format, page.clone() if held.is_meta else page.to(held.device, copy=True))
        if assign:
            self._dtype = dtype
        return None

    def extra_repr(self) -> str:
        """nn.Linear's, plus activation and format."""
        return f"{super().extra_repr()}, activation={self.activation}, format={self.format or 'dense'}"


def _header(form: PageForm, dtype: torch.dtype) -> Tensor:
    """JSON as uint8: metadata of the page, storable in any checkpoint file."""
    layout = PageForm(form.format, form.shape).layout
    text = json.dumps({"layout": layout.to_dict(), "dtype": str(dtype).removeprefix("torch.")})
    return torch.tensor(list(text.encode()), dtype=torch.uint8, device="cpu")


class _FrozenOwner:
    """Owner of a decoded weight; refuses writes and training, naming the layer. Calling it returns itself."""

    def __init__(self, layer: FusedFP4Linear) -> None:
        self.name = f"FusedFP4Linear({layer.in_features}, {layer.out_features})"

    def __call__(self) -> "_FrozenOwner":
        return self

    def refuse(self, what: object) -> None:
        raise WrapError(
            f"{self.name}: its weight is frozen, and `.weight` returns a decoded copy, which can be "
            "neither written to nor trained; make a new layer for a new weight"
        )

    check = take_over = thaw = refuse

    def freeze(self) -> None:
        """No-op: already frozen."""

    def died_written(self, weight: Tensor) -> None:
        warn(
            f"{self.name}: a decoded copy of its frozen weight was written to; the layer has not changed", stacklevel=2
        )


class _Snapshot(NamedTuple):
    """The frozen weight at the time of a forward."""

    layer: FusedFP4Linear
    page: Tensor

    def times(self, x: Tensor, bias: Tensor | None) -> Tensor:
        if not is_bare(x):
            return F.linear(x, self._weight(x.dtype), bias)
        return self.layer._form.multiply(x, self.layer.planes, bias, self.layer._dtype, "none")

    def back(self, dy: Tensor) -> Tensor:
        if not is_bare(dy):
            return dy.matmul(self._weight(dy.dtype))
        self._check()
        return self.layer._form.gradient(dy, self.page, self.layer._dtype)

    def product(self, x: Tensor, *, back: bool) -> Tensor:
        return (Product.here if is_bare(x) else Product.apply)(x, None, self, back)

    def _check(self) -> None:
        if self.layer.planes is not self.page:
            raise WrapError(
                "FusedFP4Linear: its weight was loaded or moved between forward and backward; run the forward again"
            )

    def _weight(self, dtype: torch.dtype) -> Tensor:
        self._check()
        return self.layer._decoded().to(dtype)


def quantize(model: nn.Module, format: str = "nvfp4") -> int:
    """Freeze every dense FusedFP4Linear of a model; returns how many. All or none.

    All are encoded before the first is frozen, so all pages exist next to the dense weights for a while.

    Raises:
        FormatError: not a 4-bit format, or a weight that cannot be encoded, with its name.
        WrapError: all such layers of the model are frozen already.
    """
    check_instance(model, nn.Module, "quantize(): model", "a torch.nn.Module")
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, FusedFP4Linear)}
    dense = {name: layer for name, layer in layers.items() if layer.format is None}
    if layers and not dense:
        raise WrapError(f"quantize: all {len(layers)} FusedFP4Linear layers of the model are frozen already")
    pages = []
    with torch.no_grad():
        for name, layer in dense.items():
            try:
                pages.append(layer._encoded(format))
            except FormatError as error:
                raise FormatError(f"{name or type(model).__name__}: {error}") from error
        for layer, page in zip(dense.values(), pages, strict=True):
            layer._freeze(format, page)
    return len(dense)
