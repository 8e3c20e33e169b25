"""FusedFP4Linear: an nn.Linear that trains dense and is frozen to 4 bits with one call.

    layer = FusedFP4Linear(1024, 4096, activation="gelu")
    ...                                         # trains like nn.Linear followed by the activation
    layer.quantize()                            # or vbrt.quantize(model), for every such layer

Frozen, the weight is one uint8 buffer, `planes`: the page of its format (vbrt/formats/page.py). Bytes are left alone
by `.to(dtype)`, copied by deepcopy and pickle, and saved by safetensors, where scales in 8-bit floats would not be. On
a GPU whose kernels want another order the buffer is kept in that order; state dicts hold the format's own, so they fit
any machine.

The road not taken: a tensor subclass as the weight. It would keep `weight` a Parameter, but optimizers, state dicts and
`torch.compile` each treat subclasses in ways of their own.
"""

import json
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.fx import Proxy

from vbrt.errors import ArgumentError, FormatError, WrapError
from vbrt.formats import FORMATS, PageLayout, WeightPlanes, get_format, new_page, pack, unpack
from vbrt.kernels import Kernel, Packing, resolve
from vbrt.kernels.reference import ACTIVATIONS, wants_grad
from vbrt.kernels.watched import is_bare
from vbrt.layers.decoded import DecodedWeight
from vbrt.layers.product import Product, as_autocast, sum_rows
from vbrt.layers.swapped import traced_call

__all__ = ["FusedFP4Linear", "quantize"]

_MAX_HEADER_BYTES = 4096
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64)
}


def _formats() -> tuple[str, ...]:
    """The formats that a layer can be frozen to."""
    return tuple(name for name, record in FORMATS.items() if not record.lossless)


class FusedFP4Linear(nn.Linear):
    """activation(x Wᵀ + bias), dense until `quantize`, with a frozen 4-bit weight after.

    Once frozen, `weight` reads as a decoded temporary, the bias still trains, and gradients flow to the input; an
    optimizer made before should be made anew, as it still holds the dense weight.

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
        if activation not in ACTIVATIONS:
            raise ArgumentError(f"FusedFP4Linear: activation {activation!r}; expected one of {', '.join(ACTIVATIONS)}")
        super().__init__(in_features, out_features, bias, device, dtype)
        self.activation, self.format = activation, None
        self._dtype, self._packed = self._parameters["weight"].dtype, False

    def forward(self, input: Tensor) -> Tensor:
        """input [..., in_features] -> [..., out_features]."""
        bias = self._parameters["bias"]
        if self.format is None:
            return ACTIVATIONS[self.activation](F.linear(input, self._parameters["weight"], bias))
        if not is_compiling() and not is_bare(input):
            return traced_call(self, input) if isinstance(input, Proxy) else self._watched(input, bias)
        input, bias = as_autocast(input), as_autocast(bias)  # as it does for nn.Linear
        if not wants_grad(input, bias):
            return (self._compiled if is_compiling() else self._multiply)(input, bias, self.activation)
        y = self._compiled(input, bias, "none") if is_compiling() else Product.here(input, bias, self._now(), False)
        return ACTIVATIONS[self.activation](y)

    def _watched(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """The dense layer's calls on the decoded weight, for tracers, modes and transforms."""
        shape = (self.out_features, self.in_features)
        weight = _weight_op(self.planes, self.format, *shape, self._packed, self._dtype)
        return ACTIVATIONS[self.activation](F.linear(x, weight, bias))

    def _now(self) -> "_Moment":
        return _Moment(self, self.planes)

    # -- freezing -----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def quantize(self, format: str = "nvfp4") -> "FusedFP4Linear":
        """Encode the weight in a 4-bit format and drop the dense one, with its gradient; returns self.

        Raises:
            WrapError: the layer is frozen already.
            FormatError: a format that is not one of the 4-bit ones, or a weight that it cannot hold (NaN, Inf,
                float64, no data); the layer stays dense.
        """
        self._freeze(format, self._encoded(format))
        return self

    def _encoded(self, format: str) -> Tensor:
        """The page of the weight."""
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
        layout = self._layout(format)
        return pack(get_format(format).encode(weight), layout, new_page(layout, weight.device))

    def _freeze(self, format: str, page: Tensor) -> None:
        """Hold a page in the format's own order, and no dense weight any more."""
        if self.format is None:
            self._dtype = self._parameters.pop("weight").dtype
        self.format = format
        self._hold(page, packed=False)
        self._order_for_kernel()

    def _hold(self, page: Tensor, *, packed: bool) -> None:
        self.register_buffer("planes", page, persistent=False)  # saved and loaded below, with a header
        self._packed, self._held = packed, self._layout(self.format, packed=packed)

    def _layout(self, format: str, *, packed: bool = False) -> PageLayout:
        shape = (self.out_features, self.in_features)
        if packed:
            return Packing(format).layout(shape)
        return get_format(format).layout(shape, torch.float32)

    def _order_for_kernel(self) -> None:
        """Bring the page into the order of the kernel of its device, if it wants one that is exact for it."""
        packing = None if self.planes.is_meta else _ops(self.planes.device, self.format)[0].page_order(self.format)
        if self._packed or packing is None:
            return
        shape = (self.out_features, self.in_features)
        tensors = packing.pack(unpack(self.planes, self._layout(self.format)), shape)
        if tensors is not None:
            layout = packing.layout(shape)
            self._hold(pack(tensors, layout, new_page(layout, self.planes.device)), packed=True)

    # -- the frozen weight --------------------------------------------------------------------------------------------

    def _planes(self) -> WeightPlanes:
        coarse = unpack(self.planes, self._held)
        return WeightPlanes(self.format, (self.out_features, self.in_features), self._dtype, coarse)

    def _decoded(self) -> Tensor:
        with torch.no_grad():
            return _ops(self.planes.device, self.format)[1].run(self._planes())

    def _multiply(self, x: Tensor, bias: Tensor | None, activation: str) -> Tensor:
        return _ops(self.planes.device, self.format)[0].run(x, self._planes(), bias, activation)

    def _compiled(self, x: Tensor, bias: Tensor | None, activation: str) -> Tensor:
        """`_multiply` as one op, which torch.compile does not look into."""
        dtype = x.dtype if torch.is_autocast_enabled(x.device.type) else self._dtype
        shape = (self.out_features, self.in_features)
        return _frozen_op(x, self.planes, bias, self.format, *shape, self._packed, dtype, activation)

    def __getattr__(self, name: str) -> Any:
        if name == "weight" and self.__dict__.get("format") is not None:
            return self._decoded() if is_compiling() else DecodedWeight.of(_Frozen(self), self._decoded())
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight" and self.__dict__.get("format") is not None:
            raise WrapError("FusedFP4Linear: its weight is frozen; make a new layer for a new weight")
        super().__setattr__(name, value)

    def requires_grad_(self, requires_grad: bool = True) -> "FusedFP4Linear":
        """As in nn.Module; of a frozen layer only the bias trains, which is warned of."""
        if requires_grad and self.__dict__.get("format") is not None:
            warnings.warn(
                f"requires_grad_(True): FusedFP4Linear({self.in_features}, {self.out_features}) is frozen in "
                f"{self.format}, only its bias trains",
                stacklevel=2,
            )
        return super().requires_grad_(requires_grad)

    def reset_parameters(self) -> None:
        """A new random weight, as nn.Linear draws it. Raises WrapError for a frozen layer."""
        if self.__dict__.get("format") is not None:
            raise WrapError("FusedFP4Linear: its weight is frozen; make a new layer for a new weight")
        super().reset_parameters()

    # -- nn.Module's walks --------------------------------------------------------------------------------------------

    def _apply(self, fn, recurse: bool = True):
        """A cast of a frozen layer changes what it computes in; its planes only move."""
        super()._apply(fn, recurse)
        if self.format is None:
            self._dtype = self._parameters["weight"].dtype
            return self
        self._dtype = fn(torch.empty(0, dtype=self._dtype, device="cpu")).dtype
        if self._packed and self.planes.device.type != "cuda":
            self._hold(self._plain_page(), packed=False)
        self._order_for_kernel()
        return self

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        if self._packed and self.planes.device.type != "cuda":  # torch.load(..., map_location="cpu")
            self._hold(self._plain_page(), packed=False)

    def _plain_page(self) -> Tensor:
        """The page in the format's own order."""
        if not self._packed:
            return self.planes
        layout = self._layout(self.format)
        tensors = Packing(self.format).unpack(unpack(self.planes, self._held), (self.out_features, self.in_features))
        return pack(tensors, layout, new_page(layout, self.planes.device))

    def _save_to_state_dict(self, destination, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.format is not None:
            destination[prefix + "planes"] = self._plain_page().detach()
            destination[prefix + "planes_header"] = self._header()

    def _header(self) -> Tensor:
        """JSON in uint8: what is needed to read the page, in a form that every checkpoint file can hold."""
        dtype = str(self._dtype).removeprefix("torch.")
        text = json.dumps({"layout": self._layout(self.format).to_dict(), "dtype": dtype})
        return torch.tensor(list(text.encode()), dtype=torch.uint8, device="cpu")

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
        """Take a page over as it is, and its dtype if it is to be assigned; what is wrong with it, or None."""
        if header not in state_dict:
            return f"expected {header} beside it"
        try:
            if state_dict[header].numel() > _MAX_HEADER_BYTES:
                return f"a header of {state_dict[header].numel()} bytes; expected at most {_MAX_HEADER_BYTES}"
            read = json.loads(bytes(state_dict[header].tolist()))
            layout, dtype = PageLayout.from_dict(read["layout"]), _DTYPES[read["dtype"]]
            unpack(state_dict[planes], layout)
            expected = self._layout(layout.format) if layout.format in _formats() else None
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
        """nn.Linear's, the activation and the format."""
        return f"{super().extra_repr()}, activation={self.activation}, format={self.format or 'dense'}"


class _Frozen:
    """Refuses, by name, what is done to a decoded weight for it to be the layer's. It is the function, too, that gives
    the owner of one."""

    def __init__(self, layer: FusedFP4Linear) -> None:
        self.name = f"FusedFP4Linear({layer.in_features}, {layer.out_features})"

    def __call__(self) -> "_Frozen":
        return self

    def refuse(self, what: object) -> None:
        raise WrapError(
            f"{self.name}: its weight is frozen, and what `.weight` gives is a decoded copy, which is "
            "neither written to nor trained; make a new layer for a new weight"
        )

    check = take_over = thaw = refuse

    def died_written(self, weight: Tensor) -> None:
        warnings.warn(
            f"{self.name}: a decoded copy of its frozen weight was written to; the layer has not changed", stacklevel=2
        )


class _Moment(NamedTuple):
    """A frozen weight as it was then."""

    layer: FusedFP4Linear
    page: Tensor

    def times(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return self.layer._multiply(x, bias, "none") if is_bare(x) else F.linear(x, self._weight(x.dtype), bias)

    def back(self, dy: Tensor) -> Tensor:
        return dy.matmul(self._weight(dy.dtype))

    def product(self, x: Tensor, *, back: bool) -> Tensor:
        return (Product.here if is_bare(x) else Product.apply)(x, None, self, back)

    def _weight(self, dtype: torch.dtype) -> Tensor:
        if self.layer.planes is not self.page:
            raise WrapError(
                "FusedFP4Linear: its weight was loaded or moved between forward and backward; run the forward again"
            )
        return self.layer._decoded().to(dtype)


_OPS: dict[tuple[torch.device, str], tuple[Kernel, Kernel]] = {}


def _ops(device: torch.device, format: str) -> tuple[Kernel, Kernel]:
    """The ops "linear" and "decode_weight" for a device: resolved once, and not kept in a layer that is pickled."""
    ops = _OPS.get((device, format))  # no functools.cache: torch.compile warns when it traces one
    if ops is None:
        ops = _OPS[device, format] = tuple(resolve(op, "auto", device, format) for op in ("linear", "decode_weight"))
    return ops


# -- in compiled graphs -----------------------------------------------------------------------------------------------


def _read(page: Tensor, format: str, n: int, k: int, packed: bool, dtype: torch.dtype) -> WeightPlanes:
    layout = Packing(format).layout((n, k)) if packed else get_format(format).layout((n, k), torch.float32)
    return WeightPlanes(format, (n, k), dtype, unpack(page, layout))


@torch.library.custom_op("vbrt::frozen_linear", mutates_args=())
def _frozen_op(
    x: Tensor,
    page: Tensor,
    bias: Tensor | None,
    format: str,
    n: int,
    k: int,
    packed: bool,
    dtype: torch.dtype,
    activation: str,
) -> Tensor:
    """activation(x Wᵀ + bias), [..., K] to [..., N], with the weight in a page."""
    with torch.autocast(x.device.type, enabled=False):
        planes = _read(page, format, n, k, packed, dtype)
        return _ops(page.device, format)[0].run(x, planes, None if bias is None else bias.to(dtype), activation)


@_frozen_op.register_fake
def _(x, page, bias, format, n, k, packed, dtype, activation):
    return x.new_empty((*x.shape[:-1], n))


@torch.library.custom_op("vbrt::frozen_weight", mutates_args=())
def _weight_op(page: Tensor, format: str, n: int, k: int, packed: bool, dtype: torch.dtype) -> Tensor:
    """The decoded weight [N, K]."""
    return _ops(page.device, format)[1].run(_read(page, format, n, k, packed, dtype))


@_weight_op.register_fake
def _(page, format, n, k, packed, dtype):
    return page.new_empty(n, k, dtype=dtype)


@torch.library.custom_op("vbrt::frozen_linear_backward", mutates_args=())
def _frozen_backward_op(
    dy: Tensor, page: Tensor, format: str, n: int, k: int, packed: bool, dtype: torch.dtype
) -> Tensor:
    """dX [..., K] from dY [..., N]."""
    return dy.matmul(_ops(page.device, format)[1].run(_read(page, format, n, k, packed, dtype)).to(dy.dtype))


@_frozen_backward_op.register_fake
def _(dy, page, format, n, k, packed, dtype):
    return dy.new_empty((*dy.shape[:-1], k))


def _keep_page(ctx, inputs, output) -> None:
    _, page, bias, *ctx.read, _ = inputs
    ctx.save_for_backward(page)
    ctx.bias_dtype = None if bias is None else bias.dtype


def _compiled_backward(ctx, dy: Tensor):
    (page,) = ctx.saved_tensors
    dx = _frozen_backward_op(dy, page, *ctx.read) if ctx.needs_input_grad[0] else None
    dbias = sum_rows(dy).to(ctx.bias_dtype) if ctx.needs_input_grad[2] else None
    return dx, None, dbias, *[None] * 6


_frozen_op.register_autograd(_compiled_backward, setup_context=_keep_page)


def quantize(model: nn.Module, format: str = "nvfp4") -> int:
    """Freeze every FusedFP4Linear of a model that is still dense; returns how many that were. All or none.

    Each is encoded before the first one is frozen, so that the pages of all live beside the dense weights for a while.

    Raises:
        FormatError: a format that is not one of the 4-bit ones, or a weight that it cannot hold, with its name.
        WrapError: the model has such layers, and all are frozen already.
    """
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
