"""Routed experts: ops "experts_up" and "experts_down", their operands, and the reference in plain torch.

An MoE layer routes each token to k of its E experts. With gate g and routing weights w:

    h[p] = g(W_up[e] x[t] + b_up[e])            p = (t, j): the j-th expert e of token t      experts_up
    y[t] = sum over j of w[t, j] (W_down[e] h[p] + b_down[e])                                 experts_down

Weights come as one page per expert, with the planes of its parts concatenated (`formats/joint_planes.py`). Experts
without tokens need no page. An id outside 0 .. E - 1 is a sentinel: its pair is skipped, adds nothing, and its row of h
is zero.

Legend: T tokens, k experts per token, P = T k pairs, E experts, H hidden, I inner, N rows of a matrix.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from vbrt.errors import KernelError
from vbrt.formats import WeightPlanes
from vbrt.formats.joint_planes import part_fields
from vbrt.formats.page import PageLayout, unpack
from vbrt.kernels.reference import decode_weight

__all__ = [
    "GATES",
    "ExpertPages",
    "Gate",
    "addresses_of",
    "apply_gate",
    "experts_down",
    "experts_up",
    "pairs_of_experts",
    "part_planes",
    "weigh_and_sum",
]

#: activation functions of gates by name
GATES: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda x: x,
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
}


@dataclass(frozen=True, slots=True)
class Gate:
    """Activation after "up", fused into the kernel.

    Attributes:
        function: one of GATES.
        gated: True: rows are gates and values, g(v) = function(gate) * value; False: g(v) = function(v).
        interleaved: rows are gate 0, value 0, gate 1, ...; False: all gates, then all values.
        alpha: scale within the sigmoid of "silu": gate * sigmoid(alpha * gate), as in gpt-oss.
        limit: upper clamp of gates, and symmetric clamp of values; None: no clamp.
        shift: added to the values.
    """

    function: str
    gated: bool = True
    interleaved: bool = False
    alpha: float = 1.0
    limit: float | None = None
    shift: float = 0.0

    def columns(self, n: int) -> int:
        """Return the number of columns of g(v) for n columns of v."""
        return n // 2 if self.gated else n


@dataclass(frozen=True, slots=True)
class ExpertPages:
    """Pages of one plane of a layer's experts, in the computing device's memory.

    Attributes:
        format: of the plane, but for a `down_format`.
        dtype: of the weights.
        shapes: (N, K) of each part.
        layout: of every page.
        pages: by expert, uint8; None if not leased, or known to the device only.
        addresses: (on a GPU) int64 [E], device address of each expert's page; undefined for experts without one.
        places: (on a GPU, of `exact` experts, whose coarse planes these are) int64 [E, F], device addresses of the
            fields of both planes; undefined for experts without pages.
        down_format: of the part "down"; "": as of the others.
        whole: (tokens, pairs) of the pass of which a call computes a part: kernels are chosen by them, so that parts
            have its bits; (0, 0): a call is whole.
    """

    format: str
    dtype: torch.dtype
    shapes: Mapping[str, tuple[int, int]]
    layout: PageLayout
    pages: Sequence[Tensor | None]
    addresses: Tensor | None = None
    down_format: str = ""
    whole: tuple[int, int] = (0, 0)
    places: Tensor | None = None

    def counts_of(self, ids_Tk: Tensor) -> tuple[int, int]:
        """Return (tokens, pairs) by which kernels are chosen."""
        return self.whole if self.whole[1] else (ids_Tk.shape[0], ids_Tk.numel())

    def format_of(self, part: str) -> str:
        """Return the format of a part."""
        return self.down_format or self.format if part == "down" else self.format

    @property
    def formats(self) -> set[str]:
        """Formats of all parts."""
        return {self.format, self.down_format or self.format}

    @property
    def experts(self) -> int:
        """Number of experts E."""
        return len(self.pages)

    def offsets(self, part: str) -> dict[str, int]:
        """Return the byte offset of each field of a part within a page, by the format's field name."""
        head = f"{part}."
        return {f.name.removeprefix(head): f.offset for f in self.layout.fields if f.name.startswith(head)}


def addresses_of(pages: ExpertPages, device: torch.device) -> Tensor:
    """Return the table of page addresses, built on first use."""
    if pages.addresses is not None:
        return pages.addresses
    addresses = [0 if page is None else page.data_ptr() for page in pages.pages]
    return torch.tensor(addresses, dtype=torch.int64, device=device)


def part_planes(pages: ExpertPages, expert: int, part: str) -> WeightPlanes:
    """Return one matrix of one expert. Raises KernelError if its page is missing."""
    page = pages.pages[expert]
    if page is None:
        raise KernelError(f"expert {expert}: its page is not here; lease the pages of all routed experts")
    fields = part_fields(unpack(page, pages.layout), part)
    return WeightPlanes(pages.format_of(part), pages.shapes[part], pages.dtype, fields)


def experts_up(
    x_TH: Tensor,
    ids_Tk: Tensor,
    pages: ExpertPages,
    *,
    part: str = "up",
    gate: Gate | None = None,
    bias_EN: Tensor | None = None,
    decode: Callable[[WeightPlanes], Tensor] = decode_weight,
) -> Tensor:
    """Return g(W x + b) for each pair, [P, N] or, gated, [P, N / 2], in x's dtype; zero rows for sentinels.

    Args:
        ids_Tk: int32 or int64 [T, k].
        gate: None: identity.
        decode: decodes a matrix.
    """
    k = ids_Tk.shape[1]
    out = x_TH.new_zeros(ids_Tk.numel(), pages.shapes[part][0])
    for expert, pairs in pairs_of_experts(ids_Tk, pages.experts):
        weight = decode(part_planes(pages, expert, part)).to(x_TH.dtype)
        bias = None if bias_EN is None else bias_EN[expert].to(x_TH.dtype)
        out[pairs] = F.linear(x_TH[pairs // k], weight, bias)
    if gate is None:
        return out
    gated = apply_gate(out, gate)
    return gated.masked_fill_((ids_Tk.reshape(-1, 1) < 0) | (ids_Tk.reshape(-1, 1) >= pages.experts), 0)


def experts_down(
    h_PI: Tensor,
    ids_Tk: Tensor,
    weights_Tk: Tensor | None,
    pages: ExpertPages,
    *,
    part: str = "down",
    bias_EN: Tensor | None = None,
    decode: Callable[[WeightPlanes], Tensor] = decode_weight,
) -> Tensor:
    """Return the weighted sums [T, H] in h's dtype or, without weights, the rows of all pairs [P, H].

    The sum over a token's experts is in fp32, in the order of `ids_Tk`.
    """
    rows = experts_up(h_PI, ids_Tk.reshape(-1, 1), pages, part=part, bias_EN=bias_EN, decode=decode)
    return rows if weights_Tk is None else weigh_and_sum(rows, ids_Tk, weights_Tk, pages.experts)


def weigh_and_sum(rows_PH: Tensor, ids_Tk: Tensor, weights_Tk: Tensor, experts: int) -> Tensor:
    """Return the weighted sum over each token's experts, [T, H] in the rows' dtype; sentinels have weight zero."""
    routed = (ids_Tk >= 0) & (ids_Tk < experts)
    rows_TkH, weights_Tk = rows_PH.view(*ids_Tk.shape, rows_PH.shape[1]), weights_Tk.float().masked_fill(~routed, 0.0)
    weighted = rows_TkH.float() * weights_Tk.unsqueeze(-1)
    return weighted.sum(dim=1).to(rows_PH.dtype)


def apply_gate(v_PN: Tensor, gate: Gate) -> Tensor:
    """Return g(v), [P, N] or, gated, [P, N / 2]."""
    function = GATES[gate.function]
    if not gate.gated:
        return function(v_PN)
    g, v = (v_PN[..., ::2], v_PN[..., 1::2]) if gate.interleaved else v_PN.chunk(2, dim=-1)
    if gate.limit is not None:
        g, v = g.clamp(max=gate.limit), v.clamp(-gate.limit, gate.limit)
    g = g * torch.sigmoid(gate.alpha * g) if gate.alpha != 1.0 else function(g)
    return g * (v + gate.shift if gate.shift else v)


def pairs_of_experts(ids_Tk: Tensor, experts: int) -> list[tuple[int, Tensor]]:
    """Return (expert, its pairs int64, ascending) for every expert with tokens, ascending; synchronizes."""
    ids_P = ids_Tk.reshape(-1)
    order = torch.argsort(ids_P, stable=True)
    found, counts = ids_P[order].unique_consecutive(return_counts=True)
    groups = order.split(counts.tolist())
    return [(e, pairs) for e, pairs in zip(found.tolist(), groups, strict=True) if 0 <= e < experts]
