"""Frozen page: a 4-bit weight in one buffer, and its product as custom operators for compiled graphs."""

from typing import NamedTuple

import torch
from torch import Tensor

from vbrt.formats import PageLayout, WeightPlanes, get_format, new_page, pack, unpack
from vbrt.host import accelerator
from vbrt.kernels import Kernel, Packing, resolve
from vbrt.kernels.frozen_product import sum_rows

__all__ = ["PageForm", "frozen_linear", "frozen_weight", "kernels_of"]


class PageForm:
    """Layout of a weight (N, K) in its page: `packed` in a kernel's order, or in the format's own."""

    def __init__(self, format: str, shape: tuple[int, int], *, packed: bool = False) -> None:
        self.format, self.shape, self.packed = format, shape, packed
        order = Packing(format) if packed else None
        self.layout: PageLayout = order.layout(shape) if order else get_format(format).layout(shape, torch.float32)

    def text(self) -> str:
        """Serialize for operators: "format n k order"."""
        return f"{self.format} {self.shape[0]} {self.shape[1]} {'packed' if self.packed else 'plain'}"

    @staticmethod
    def parse(text: str) -> "PageForm":
        """Inverse of `text`."""
        format, n, k, order = text.split()
        return PageForm(format, (int(n), int(k)), packed=order == "packed")

    def planes(self, page: Tensor, dtype: torch.dtype) -> WeightPlanes:
        """Views into a page; the weight decodes to `dtype`."""
        return WeightPlanes(self.format, self.shape, dtype, unpack(page, self.layout))

    def multiply(self, x: Tensor, page: Tensor, bias: Tensor | None, dtype: torch.dtype, activation: str) -> Tensor:
        """activation(x Wᵀ + bias), [..., K] to [..., N]."""
        return kernels_of(page.device, self.format).linear.run(x, self.planes(page, dtype), bias, activation)

    def decode(self, page: Tensor, dtype: torch.dtype) -> Tensor:
        """The decoded weight [N, K]."""
        return kernels_of(page.device, self.format).decode.run(self.planes(page, dtype))

    def gradient(self, dy: Tensor, page: Tensor, dtype: torch.dtype) -> Tensor:
        """dY W, [..., N] to [..., K]."""
        kernels, planes = kernels_of(page.device, self.format), self.planes(page, dtype)
        if kernels.linear.gradient is not None:
            return kernels.linear.gradient(dy, planes)
        return dy.matmul(kernels.decode.run(planes).to(dy.dtype))

    def plain(self, page: Tensor) -> tuple["PageForm", Tensor]:
        """Repack a page into the format's own order."""
        if not self.packed:
            return self, page
        form = PageForm(self.format, self.shape)
        tensors = Packing(self.format).unpack(unpack(page, self.layout), self.shape)
        return form, pack(tensors, form.layout, new_page(form.layout, page.device))

    def for_kernel(self, page: Tensor) -> tuple["PageForm", Tensor]:
        """Repack a page into the order that its device's kernel prefers, if that is exact for it."""
        if self.packed and page.device.type == accelerator.TYPE:
            return self, page
        plain, page = self.plain(page)
        order = None if page.is_meta else kernels_of(page.device, self.format).linear.page_order(self.format)
        tensors = order.pack(unpack(page, plain.layout), self.shape) if order else None
        if tensors is None:
            return plain, page
        form = PageForm(self.format, self.shape, packed=True)
        return form, pack(tensors, form.layout, new_page(form.layout, page.device))


class _Kernels(NamedTuple):
    linear: Kernel
    decode: Kernel


_KERNELS: dict[tuple[torch.device, str], _Kernels] = {}


def kernels_of(device: torch.device, format: str) -> _Kernels:
    """The kernels for a device: resolved once, and outside of the layer, which is pickled."""
    kernels = _KERNELS.get((device, format))  # not functools.cache: torch.compile warns when it traces one
    if kernels is None:
        found = (resolve(op, "auto", device, format) for op in ("linear", "decode_weight"))
        kernels = _KERNELS[device, format] = _Kernels(*found)
    return kernels


# -- custom operators -------------------------------------------------------------------------------------------------


@torch.library.custom_op("vbrt::frozen_linear", mutates_args=())
def frozen_linear(
    x: Tensor, page: Tensor, bias: Tensor | None, form: str, dtype: torch.dtype, activation: str
) -> Tensor:
    """activation(x Wᵀ + bias), [..., K] to [..., N], on a page; `form`: `PageForm.text()`."""
    with torch.autocast(x.device.type, enabled=False):
        bias = None if bias is None else bias.to(dtype)
        return PageForm.parse(form).multiply(x, page, bias, dtype, activation)


@frozen_linear.register_fake
def _(x, page, bias, form, dtype, activation):
    return x.new_empty((*x.shape[:-1], PageForm.parse(form).shape[0]))


@torch.library.custom_op("vbrt::frozen_weight", mutates_args=())
def frozen_weight(page: Tensor, form: str, dtype: torch.dtype) -> Tensor:
    """The decoded weight [N, K]."""
    return PageForm.parse(form).decode(page, dtype)


@frozen_weight.register_fake
def _(page, form, dtype):
    return page.new_empty(PageForm.parse(form).shape, dtype=dtype)


@torch.library.custom_op("vbrt::frozen_linear_backward", mutates_args=())
def _frozen_linear_backward(dy: Tensor, page: Tensor, form: str, dtype: torch.dtype) -> Tensor:
    """dX [..., K] from dY [..., N]."""
    return PageForm.parse(form).gradient(dy, page, dtype)


@_frozen_linear_backward.register_fake
def _(dy, page, form, dtype):
    return dy.new_empty((*dy.shape[:-1], PageForm.parse(form).shape[1]))


def _keep_page(ctx, inputs, output) -> None:
    _, page, bias, ctx.form, ctx.dtype, _ = inputs
    ctx.save_for_backward(page)
    ctx.bias_dtype = None if bias is None else bias.dtype


def _compiled_backward(ctx, dy: Tensor):
    (page,) = ctx.saved_tensors
    dx = _frozen_linear_backward(dy, page, ctx.form, ctx.dtype) if ctx.needs_input_grad[0] else None
    dbias = sum_rows(dy).to(ctx.bias_dtype) if ctx.needs_input_grad[2] else None
    return dx, None, dbias, None, None, None


frozen_linear.register_autograd(_compiled_backward, setup_context=_keep_page)
