"""Which kernels serve routed experts in tile order on a GPU: the backend "triton" of the ops of `kernels.experts`.

What runs follows from numbers that the host knows: tokens, experts, shapes, the GPU. Nothing looks at what the device
knows, so a pass can be recorded in a CUDA graph.

| pages | inputs | way |
| --- | --- | --- |
| in tile order, few pairs of an expert | bf16, fp16, fp32 | "few": `few`, which walks along experts or pairs |
| in tile order, on sm_90 | bf16, fp16, fp32 | "grouped": `many`, a fused kernel on pairs sorted by expert |
| in tile order, on other GPUs | bf16 | "decoded": weights decoded to scratch memory, then torch's grouped matmul |
| in tile order, on other GPUs | fp16, fp32, as many pairs as have room | "few" |
| others | any | "reference": one expert after the other, decoded by a kernel; waits for the device |
"""

import torch
from torch import Tensor

from vbrt.formats.page import PageLayout
from vbrt.kernels import experts
from vbrt.kernels.cuda import devices
from vbrt.kernels.cuda.e2m1.launches import SUMMANDS
from vbrt.kernels.cuda.e2m1.linear import decode_weight
from vbrt.kernels.cuda.e2m1.tiles import TILES
from vbrt.kernels.cuda.experts import decoded_experts, few_tokens, many_tokens
from vbrt.kernels.cuda.experts.token_sums import weighted_sums
from vbrt.kernels.cuda.launch_table import MOST_FEW_PAIRS, WIDE, are_few
from vbrt.kernels.experts import ExpertPages, Gate

__all__ = ["down", "route", "takes_addresses", "up", "weigh_and_sum"]


def route(x_MK: Tensor, pairs: int, pages: ExpertPages, part: str) -> str:
    """Name the way of a product for so many pairs: "few", "grouped", "decoded" or "reference"."""
    if not x_MK.is_cuda or TILES not in pages.offsets(part):
        return "reference"
    major, served = devices.major(x_MK.device.index), x_MK.dtype in SUMMANDS
    if major < devices.MIN_MAJOR:
        return "reference"
    if served and are_few(pairs, pages.experts):
        return "few"
    if served and major in WIDE:
        return "grouped"
    if decoded_experts.serves(x_MK, pages, part):
        return "decoded"
    return "few" if served and pairs <= MOST_FEW_PAIRS else "reference"


def takes_addresses(layout: PageLayout, device: torch.device) -> bool:
    """True if products need nothing of pages of this layout but their addresses."""
    tiled = any(field.name.endswith(f".{TILES}") for field in layout.fields)
    return tiled and devices.major(device.index or 0) in WIDE


def up(
    x_TH: Tensor,
    ids_Tk: Tensor,
    pages: ExpertPages,
    *,
    part: str = "up",
    gate: Gate | None = None,
    bias_EN: Tensor | None = None,
) -> Tensor:
    """Return what `experts.experts_up` does."""
    way = route(x_TH, ids_Tk.numel(), pages, part)
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
    """Return what `experts.experts_down` does."""
    way = route(h_PI, ids_Tk.numel(), pages, part)
    if way == "few":
        return few_tokens.down(h_PI, ids_Tk, weights_Tk, pages, part, bias_EN)
    if way == "grouped":
        return many_tokens.down(h_PI, ids_Tk, weights_Tk, pages, part=part, bias_EN=bias_EN)
    rows = up(h_PI, ids_Tk.reshape(-1, 1), pages, part=part, bias_EN=bias_EN)
    return rows if weights_Tk is None else weigh_and_sum(rows, ids_Tk, weights_Tk, pages.experts)


def weigh_and_sum(rows_PH: Tensor, ids_Tk: Tensor, weights_Tk: Tensor, count: int) -> Tensor:
    """Return what `experts.weigh_and_sum` does."""
    if rows_PH.is_cuda and rows_PH.dtype in SUMMANDS and devices.major(rows_PH.device.index) in WIDE:
        return weighted_sums(rows_PH.contiguous(), ids_Tk, weights_Tk, count)
    return experts.weigh_and_sum(rows_PH, ids_Tk, weights_Tk, count)
