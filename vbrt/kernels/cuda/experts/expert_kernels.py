"""MoE kernel selection for experts in tile order on a GPU: backend "triton" of the ops of `kernels.experts`.

The choice depends on numbers that the host knows: tokens, experts, shapes, the GPU. It never reads device data, so a
pass can be captured in a CUDA graph.

| pages | inputs | route |
| --- | --- | --- |
| in tile order, few pairs per expert | bf16, fp16, fp32 | "few": `few_tokens`, programs per expert or per pair |
| in tile order, on sm_90 | bf16, fp16, fp32 | "grouped": `many_tokens`, a fused kernel on pairs sorted by expert |
| in tile order, on other GPUs | bf16 | "decoded": weights decoded to scratch memory, then torch's grouped matmul |
| in tile order, on other GPUs | fp16, fp32, rows that are not multiples of 16 bytes | "few", in chunks of tokens |
| others | any | "reference": expert by expert, decoded by a kernel; synchronizes with the device |
"""

from collections.abc import Callable

import torch
from torch import Tensor

from vbrt.formats.page import PageLayout
from vbrt.kernels import experts
from vbrt.kernels.cuda import devices
from vbrt.kernels.cuda.e2m1.launches import SUMMANDS
from vbrt.kernels.cuda.e2m1.linear import decode_weight
from vbrt.kernels.cuda.e2m1.tiles import TILES
from vbrt.kernels.cuda.experts import decoded_experts, few_tokens, many_tokens, token_sums
from vbrt.kernels.cuda.experts.token_sums import weighted_sums
from vbrt.kernels.cuda.launch_table import MOST_FEW_PAIRS, WIDE, are_few
from vbrt.kernels.experts import ExpertPages, Gate

__all__ = ["NEEDS", "down", "route", "takes_addresses", "up", "weigh_and_sum"]

NEEDS = devices.BF16


def route(x_MK: Tensor, pairs: int, pages: ExpertPages, part: str) -> str:
    """Name the route of a product with this many pairs: "few", "grouped", "decoded" or "reference"."""
    if not x_MK.is_cuda or TILES not in pages.offsets(part):
        return "reference"
    major, served = devices.major(x_MK.device.index), x_MK.dtype in SUMMANDS
    if not devices.serves(x_MK.device.index, NEEDS):
        return "reference"
    if served and are_few(pairs, pages.experts):
        return "few"
    if served and major in WIDE:
        return "grouped"
    if decoded_experts.serves(x_MK, pages, part):
        return "decoded"
    return "few" if served else "reference"


def takes_addresses(layout: PageLayout, device: torch.device) -> bool:
    """True if products need only the addresses of pages of this layout."""
    tiled = any(field.name.endswith(f".{TILES}") for field in layout.fields)
    return tiled and devices.serves(device.index or 0, NEEDS)


def up(
    x_TH: Tensor,
    ids_Tk: Tensor,
    pages: ExpertPages,
    *,
    part: str = "up",
    gate: Gate | None = None,
    bias_EN: Tensor | None = None,
) -> Tensor:
    """See `kernels.experts.experts_up`."""
    way = route(x_TH, ids_Tk.numel(), pages, part)
    if way == "few":
        return _in_chunks(ids_Tk, x_TH, None, lambda ids, x, _: few_tokens.up(x, ids, pages, part, gate, bias_EN))
    if way == "grouped":
        return many_tokens.up(x_TH, ids_Tk, pages, part=part, gate=gate, bias_EN=bias_EN)
    if way == "decoded":
        return decoded_experts.products(x_TH, ids_Tk, pages, part=part, gate=gate, bias_EN=bias_EN)
    return experts.experts_up(x_TH, ids_Tk, pages, part=part, gate=gate, bias_EN=bias_EN, decode=decode_weight)


def down(
    h_PI: Tensor,
    ids_Tk: Tensor,
    weights_Tk: Tensor | None,
    pages: ExpertPages,
    *,
    part: str = "down",
    bias_EN: Tensor | None = None,
) -> Tensor:
    """See `kernels.experts.experts_down`."""
    way = route(h_PI, ids_Tk.numel(), pages, part)
    if way == "few":
        return _in_chunks(
            ids_Tk, h_PI, weights_Tk, lambda ids, h, weights: few_tokens.down(h, ids, weights, pages, part, bias_EN)
        )
    if way == "grouped":
        return many_tokens.down(h_PI, ids_Tk, weights_Tk, pages, part=part, bias_EN=bias_EN)
    rows = up(h_PI, ids_Tk.reshape(-1, 1), pages, part=part, bias_EN=bias_EN)
    return rows if weights_Tk is None else weigh_and_sum(rows, ids_Tk, weights_Tk, pages.experts)


def _in_chunks(
    ids_Tk: Tensor, x_MK: Tensor, weights_Tk: Tensor | None, product: Callable[[Tensor, Tensor, Tensor | None], Tensor]
) -> Tensor:
    """Return `product`'s rows, of at most `MOST_FEW_PAIRS` pairs at a time; x_MK has a row for each token or pair."""
    tokens, k = ids_Tk.shape
    step = max(1, MOST_FEW_PAIRS // max(1, k))
    if tokens <= step:
        return product(ids_Tk, x_MK, weights_Tk)
    ids, xs = ids_Tk.split(step), x_MK.split(step * (len(x_MK) // tokens))
    weights = [None] * len(ids) if weights_Tk is None else weights_Tk.split(step)
    return torch.cat([product(*chunk) for chunk in zip(ids, xs, weights, strict=True)])


def weigh_and_sum(rows_PH: Tensor, ids_Tk: Tensor, weights_Tk: Tensor, count: int) -> Tensor:
    """See `kernels.experts.weigh_and_sum`."""
    if rows_PH.is_cuda and rows_PH.dtype in SUMMANDS and devices.serves(rows_PH.device.index, token_sums.NEEDS):
        return weighted_sums(rows_PH.contiguous(), ids_Tk, weights_Tk, count)
    return experts.weigh_and_sum(rows_PH, ids_Tk, weights_Tk, count)
