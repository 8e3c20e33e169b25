"""MoE kernel selection for experts in tile order on a GPU: backend "triton" of the ops of `kernels.experts`.

The choice depends on numbers that the host knows: tokens, experts, shapes, the GPU. It never reads device data, so a
pass can be captured in a CUDA graph.

| pages | inputs | route |
| --- | --- | --- |
| in tile order, few pairs per expert | bf16, fp16, fp32 | "few": `few_tokens`, programs per expert or per pair |
| in tile order | bf16, fp16, fp32 | "grouped": `many_tokens`, a fused kernel on pairs sorted by expert |
| the same on sm_100, the most pairs | bf16 | "decoded": decoded to scratch memory, then torch's grouped matmul |
| others | any | "reference": expert by expert, decoded by a kernel; synchronizes with the device |
"""

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
from vbrt.kernels.cuda.launch_table import WIDE, are_few, grouped_mma_pays
from vbrt.kernels.experts import ExpertPages, Gate

__all__ = ["NEEDS", "down", "route", "takes_addresses", "up", "weigh_and_sum"]

NEEDS = devices.BF16


def route(x_MK: Tensor, pairs: int, pages: ExpertPages, part: str) -> str:
    """Name the route of a product with this many pairs: "few", "grouped", "decoded" or "reference"."""
    if not x_MK.is_cuda or TILES not in pages.offsets(part):
        return "reference"
    if x_MK.dtype not in SUMMANDS or not devices.serves(x_MK.device.index, NEEDS):
        return "reference"
    gpu = devices.gpu(x_MK.device.index)
    if are_few(pairs, pages.experts, gpu):
        return "few"
    pays = gpu.major in WIDE or grouped_mma_pays(gpu, pairs, pages.experts)
    return "grouped" if pays or not decoded_experts.serves(x_MK, pages, part) else "decoded"


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
    way = route(x_TH, pages.counts_of(ids_Tk)[1], pages, part)
    if way == "few":
        return few_tokens.up(x_TH, ids_Tk, pages, part, gate, bias_EN)
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
    way = route(h_PI, pages.counts_of(ids_Tk)[1], pages, part)
    if way == "few":
        return few_tokens.down(h_PI, ids_Tk, weights_Tk, pages, part, bias_EN)
    if way == "grouped":
        return many_tokens.down(h_PI, ids_Tk, weights_Tk, pages, part=part, bias_EN=bias_EN)
    rows = up(h_PI, ids_Tk.reshape(-1, 1), pages, part=part, bias_EN=bias_EN)
    return rows if weights_Tk is None else weigh_and_sum(rows, ids_Tk, weights_Tk, pages.experts)


def weigh_and_sum(rows_PH: Tensor, ids_Tk: Tensor, weights_Tk: Tensor, count: int) -> Tensor:
    """See `kernels.experts.weigh_and_sum`."""
    if rows_PH.is_cuda and rows_PH.dtype in SUMMANDS and devices.serves(rows_PH.device.index, token_sums.NEEDS):
        return weighted_sums(rows_PH.contiguous(), ids_Tk, weights_Tk, count)
    return experts.weigh_and_sum(rows_PH, ids_Tk, weights_Tk, count)
