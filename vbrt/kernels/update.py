"""Optimizer step on a split master weight: the specification, in plain torch.

    master (fp32) = high (bf16: the model's weight) + low (16 bits) + ties (one bit), bit for bit
    part = update(halves, moments, gradient, step)
    part(0, TILE), part(TILE, n)                  # in place, in parts that begin at multiples of TILE: the same bits
    part = update(halves, moments, gradient, step, out=(others, theirs))  # into other memory

Adam, AdamW and SGD are torch's fused optimizers on the joined master; Lion follows its paper. Moments are fp32, or 8
bits with a scale per block. `vbrt.kernels.cpu.update` is bit-exact with this, in one pass over memory.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from vbrt.errors import ArgumentError

__all__ = [
    "BLOCK",
    "GRADIENTS",
    "TILE",
    "Coded",
    "Halves",
    "Part",
    "Step",
    "Updated",
    "decode_first",
    "decode_second",
    "encode_first",
    "encode_second",
    "gradient_norm",
    "gradient_sum",
    "join_master",
    "split_master",
    "update",
    "without_ties",
]

TILE = 1024  #: parts of a weight begin at multiples of it, and end at one or with the weight
BLOCK = 256  #: 8-bit moments per scale
Part = Callable[[int, int], None]
GRADIENTS = (torch.bfloat16, torch.float32)
_SMALLEST = torch.finfo(torch.float32).tiny


class Halves(NamedTuple):
    """A split master weight, from `split_master`: `high`, bf16 [n]; `low`, 16 bits [n]; `ties`, uint8 [ceil(n / 8)],
    the first weight's bit lowest; and `tied`, uint8 [ceil(n / 1024)], which tiles have any bit set in `ties`, since few
    have. Contiguous, on the CPU."""

    high: Tensor
    low: Tensor
    ties: Tensor
    tied: Tensor

    def part(self, begin: int, end: int) -> "Halves":
        """Return views of some weights' halves; `begin` is a multiple of `TILE`."""
        each = (1, 1, 8, TILE)
        return Halves(*(half[begin // n : -(-end // n)] for half, n in zip(self, each, strict=True)))


class Coded(NamedTuple):
    """8-bit moments: `codes`, int8 or (second moments) uint8 [n], and `scales`, fp32 [ceil(n / 256)]."""

    codes: Tensor
    scales: Tensor


class Updated(NamedTuple):
    """Memory for an update out of place: halves and moments of the weight's sizes and dtypes; `ties` are 0 in tiles
    whose `tied` is 0."""

    halves: Halves
    moments: Mapping[str, Tensor | Coded]


@dataclass(frozen=True, slots=True)
class Step:
    """Hyperparameters of one optimizer step, for one parameter group.

    Attributes:
        rule: "adam", "sgd" or "lion".
        number: of the step, from 1.
        lr, beta1, beta2, epsilon, weight_decay: of Adam and Lion; SGD's momentum is `beta1`.
        dampening, nesterov: of SGD.
        decoupled: weight decay acts on the weight (AdamW, Lion) instead of the gradient.
        maximize: gradient ascent.
        divisor: gradients are divided by it first (loss scaling).
        factor: then multiplied by it (clipping).
    """

    rule: str
    number: int
    lr: float
    beta1: float = 0.0
    beta2: float = 0.0
    epsilon: float = 0.0
    weight_decay: float = 0.0
    dampening: float = 0.0
    nesterov: bool = False
    decoupled: bool = False
    maximize: bool = False
    divisor: float = 1.0
    factor: float = 1.0


# -- halves


def split_master(master: Tensor) -> Halves:
    """Split fp32 into bf16, rounded to nearest even like `master.to(torch.bfloat16)`, 16 low bits and a tie bit.

    Adding 2^15 to the master's bits as an integer and cutting in half gives bf16, rounded half up, and the low bits. It
    differs from nearest even only at a tie (low bits 0) with an odd half, which is one too many: the tie bit records
    that. 65,537 masters round to an even half, both ties included, so 16 bits cannot tell them apart.

    Exact for every number. A NaN becomes quiet, and one whose high half would become zero (its upper 17 bits except the
    sign all set) loses the lowest of them.

    Args:
        master: any shape and device; `high` and `low` have the same.
    """
    bits = master.contiguous().view(torch.int32)
    bits = torch.where(bits & 0x7FFFFFFF > 0x7F800000, bits | 0x400000, bits)
    bits = torch.where(bits & 0x7FFF8000 == 0x7FFF8000, bits & ~0x8000, bits)
    bits = bits + 0x8000
    down = bits & 0x1FFFF == 0x10000
    high = ((bits >> 16) - down.to(torch.int32)).to(torch.int16).view(torch.bfloat16)
    ties = _packed_bits(down)
    tied = torch.nn.functional.pad(ties, (0, -ties.numel() % (TILE // 8))).view(-1, TILE // 8).any(1)
    return Halves(high, bits.to(torch.int16), ties, tied.to(torch.uint8))


def without_ties(high: Tensor, low: Tensor) -> Halves:
    """Return halves without tie bits: ties round up in magnitude."""
    ties, tied = (torch.zeros(-(-low.numel() // each), dtype=torch.uint8, device=low.device) for each in (8, TILE))
    return Halves(high, low, ties, tied)


def join_master(halves: Halves) -> Tensor:
    """Return the fp32 master, in the shape of `low`."""
    high, low, ties, _ = halves
    below = low.view(torch.int16).to(torch.int32) & 0xFFFF
    upper = high.view(torch.int16).to(torch.int32) + _unpacked_bits(ties, low.numel()).view(low.shape)
    return ((upper << 16) + below - 0x8000).view(torch.float32)


def _packed_bits(flags: Tensor) -> Tensor:
    eights = torch.nn.functional.pad(flags.flatten(), (0, -flags.numel() % 8)).view(-1, 8).to(torch.uint8)
    out = eights[:, 0].clone()
    for bit in range(1, 8):
        out |= eights[:, bit] << bit
    return out


def _unpacked_bits(packed: Tensor, count: int) -> Tensor:
    places = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return (packed[:, None] >> places & 1).flatten()[:count]


# -- moments of 8 bits
#
# Companding after FlashOptim (Gonzalez Ortiz et al., 2026, arXiv 2602.23349): x / (1 + |x|) for first moments, the
# square root for second ones, of numbers divided by their block's maximum. Differences: blocks of 256, and no positive
# second moment becomes 0, so no step divides by epsilon alone.


def encode_first(moment: Tensor) -> Coded:
    """Quantize first moments, fp32 [n], to 8 bits: error at most 0.0079 of the block's largest magnitude, 0.002 of it
    near 0. A block with a non-finite number becomes NaN."""
    x, scales = _scaled(moment)
    codes = torch.round(254.0 * x / (1.0 + x.abs()))
    return Coded(_packed(codes, scales, moment.numel(), torch.int8), scales)


def decode_first(coded: Coded) -> Tensor:
    """Dequantize first moments, fp32 [n]."""
    codes = _blocks(coded.codes.float())
    return (coded.scales[:, None] * (codes / (254.0 - codes.abs()))).flatten()[: coded.codes.numel()]


def encode_second(moment: Tensor) -> Coded:
    """Quantize non-negative second moments, fp32 [n], to 8 bits: error of the root at most 0.002 of the block's largest
    root, and up to 0.0039 of it upward for smaller roots. A block with a non-finite number becomes NaN.
    """
    x, scales = _scaled(moment)
    codes = torch.round(x.sqrt() * 255.0)
    codes = torch.where((_blocks(moment) > 0) & (codes < 1), torch.ones_like(codes), codes)
    return Coded(_packed(codes, scales, moment.numel(), torch.uint8), scales)


def decode_second(coded: Coded) -> Tensor:
    """Dequantize second moments, fp32 [n]."""
    roots = _blocks(coded.codes.float()) * _fp32(1.0 / 255.0)
    return (roots * roots * coded.scales[:, None]).flatten()[: coded.codes.numel()]


def _blocks(values: Tensor) -> Tensor:
    return torch.nn.functional.pad(values, (0, -values.numel() % BLOCK)).view(-1, BLOCK)


def _scaled(moment: Tensor) -> tuple[Tensor, Tensor]:
    """Return blocks [b, 256] divided by their scales, and the scales [b]: the largest magnitude; 0 if it is subnormal,
    NaN if the block has a non-finite number."""
    blocks = _blocks(moment)
    scales = blocks.abs().amax(1)
    scales = torch.where(scales.isfinite(), scales, torch.nan)
    scales = torch.where(scales < _SMALLEST, 0.0, scales)
    return blocks * torch.where(scales > 0, 1.0 / scales, 0.0)[:, None], scales


def _packed(codes: Tensor, scales: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    return torch.where((scales > 0)[:, None], codes, 0.0).to(dtype).flatten()[:count]


# -- update


def update(
    halves: Halves, moments: Mapping[str, Tensor | Coded], gradient: Tensor, step: Step, out: Updated | None = None
) -> Part:
    """Return a function of (begin, end) that applies one step to that part of a weight, in place or into `out`.

    Parts begin at multiples of `TILE` and end at one or with the weight. Threads may run them concurrently.

    Args:
        halves: the weight, [n].
        moments: by name, the rule's "first", "second" and "peak" (AMSGrad), each [n]; zeros before the first step.
            "first" and "second" are both fp32 or both 8 bits.
        gradient: bf16 or fp32 [n]; unchanged.
        out: other memory for the results; then halves and moments are unchanged.

    Raises:
        ArgumentError: unsupported rule, dtype or length; nothing was changed.
    """
    check(halves, moments, gradient, step, out)

    def part(begin: int, end: int) -> None:
        own, ours = halves.part(begin, end), _parts(moments, begin, end)
        if out is not None:
            to = Updated(out.halves.part(begin, end), _parts(out.moments, begin, end))
            for copy, value in zip(_tensors(*to), _tensors(own, ours), strict=True):
                copy.copy_(value)
            own, ours = to
        _update(own, ours, gradient[begin:end], step)

    return part


def _parts(moments: Mapping[str, Tensor | Coded], begin: int, end: int) -> dict[str, Tensor | Coded]:
    return {name: _part(moment, begin, end) for name, moment in moments.items()}


def _tensors(halves: Halves, moments: Mapping[str, Tensor | Coded]) -> list[Tensor]:
    found = [*halves]
    for name in sorted(moments):
        moment = moments[name]
        found += [*moment] if isinstance(moment, Coded) else [moment]
    return found


def _part(moment: Tensor | Coded, begin: int, end: int) -> Tensor | Coded:
    if not isinstance(moment, Coded):
        return moment[begin:end]
    return Coded(moment.codes[begin:end], moment.scales[begin // BLOCK : -(-end // BLOCK)])


def _update(halves: Halves, moments: Mapping[str, Tensor | Coded], gradient: Tensor, step: Step) -> None:
    master, decoded = join_master(halves), _decoded(moments)
    scaled = gradient.detach().float().clone()
    scaled = scaled if step.divisor == 1 else scaled / _fp32(step.divisor)
    scaled = scaled if step.factor == 1 else scaled * _fp32(step.factor)
    _RULES[step.rule](master, decoded, scaled, step)
    new = split_master(master)
    halves.high.copy_(new.high)
    halves.low.view(torch.int16).copy_(new.low)
    halves.ties.copy_(new.ties)
    halves.tied.copy_(new.tied)
    for name, moment in moments.items():
        if isinstance(moment, Coded):
            codes, scales = _ENCODE[name](decoded[name])
            moment.codes.copy_(codes)
            moment.scales.copy_(scales)


def check(
    halves: Halves, moments: Mapping[str, Tensor | Coded], gradient: Tensor, step: Step, out: Updated | None = None
) -> None:
    """Raise ArgumentError for unsupported arguments of `update`."""
    count = halves.high.numel()
    if step.rule not in _RULES:
        raise ArgumentError(f"an update by {step.rule!r}; expected one of {', '.join(sorted(_RULES))}")
    if gradient.dtype not in GRADIENTS or gradient.numel() != count:
        raise ArgumentError(
            f"a gradient of {gradient.numel()} x {gradient.dtype} for {count} weights; expected as many, bf16 or fp32"
        )
    own = _tensors(halves, moments)
    to = own if out is None else _tensors(*out)
    if [(t.dtype, t.numel()) for t in own] != [(t.dtype, t.numel()) for t in to]:
        raise ArgumentError(f"an update of {count} weights into memory of another layout; expected the weight's own")
    if not all(tensor.is_cpu and tensor.is_contiguous() for tensor in (*own, *to, gradient)):
        raise ArgumentError("an update of tensors that are not contiguous or not on the CPU")


def _fp32(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float32, device="cpu")


def _decoded(moments: Mapping[str, Tensor | Coded]) -> dict[str, Tensor]:
    return {name: _DECODE[name](m) if isinstance(m, Coded) else m for name, m in moments.items()}


def _adam(master: Tensor, moments: dict[str, Tensor], gradient: Tensor, step: Step) -> None:
    fused = torch._fused_adamw_ if step.decoupled else torch._fused_adam_
    peaks = [moments["peak"]] if "peak" in moments else []
    lists = [master], [gradient], [moments["first"]], [moments["second"]], peaks
    fused(
        *lists, [_fp32(step.number)], lr=step.lr, beta1=step.beta1, beta2=step.beta2, weight_decay=step.weight_decay,
        eps=step.epsilon, amsgrad=bool(peaks), maximize=step.maximize,
    )  # fmt: skip


def _sgd(master: Tensor, moments: dict[str, Tensor], gradient: Tensor, step: Step) -> None:
    buffers = [moments["first"]] if "first" in moments else []
    torch._fused_sgd_(
        [master], [gradient], buffers, lr=step.lr, momentum=step.beta1, weight_decay=step.weight_decay,
        dampening=step.dampening, nesterov=step.nesterov, maximize=step.maximize, is_first_step=step.number == 1,
    )  # fmt: skip


def _lion(master: Tensor, moments: dict[str, Tensor], gradient: Tensor, step: Step) -> None:
    """Chen et al., 2023, arXiv 2302.06675, algorithm 2; each product and sum is rounded separately."""
    gradient = -gradient if step.maximize else gradient
    first, products = (
        moments["first"],
        [_fp32(step.beta1), _fp32(1 - step.beta1), _fp32(step.beta2), _fp32(1 - step.beta2)],
    )
    if step.weight_decay:
        master.mul_(_fp32(1 - step.lr * step.weight_decay))
    direction = first * products[0] + gradient * products[1]
    master.add_(direction.sign().where(direction == direction, direction) * _fp32(-step.lr))
    first.copy_(first * products[2] + gradient * products[3])


_RULES = {"adam": _adam, "sgd": _sgd, "lion": _lion}
_DECODE = {"first": decode_first, "second": decode_second}
_ENCODE = {"first": encode_first, "second": encode_second}


def gradient_norm(gradient: Tensor, factor: float = 1.0) -> float:
    """Return the Euclidean norm of a gradient times a factor: `torch.linalg.vector_norm` in fp32."""
    scaled = gradient.detach().float()
    scaled = scaled if factor == 1 else scaled * _fp32(factor)
    return torch.linalg.vector_norm(scaled).item()


def gradient_sum(held: Tensor, more: Tensor, out: Tensor, factor: float = 1.0) -> Part:
    """Return a function of (begin, end) that accumulates gradients in that part: out = held * factor + more.

    Product and sum are each rounded to the dtype of `out`. Threads may run parts concurrently.

    Args:
        held, more: bf16 or of the dtype of `out`; contiguous, on the CPU, of one size.
        out: bf16 or fp32; may be `held`.

    Raises:
        ArgumentError: unsupported tensors; nothing was changed.
    """
    check_sum(held, more, out)
    flat = [tensor.detach().view(-1) for tensor in (held, more, out)]

    def part(begin: int, end: int) -> None:
        one, two, to = (tensor[begin:end] for tensor in flat)
        one = one if factor == 1 else one.float() * _fp32(factor)
        to.copy_(one.to(to.dtype) + two.to(to.dtype))

    return part


def check_sum(held: Tensor, more: Tensor, out: Tensor) -> None:
    """Raise ArgumentError for unsupported arguments of `gradient_sum`."""
    known = all(tensor.dtype in (torch.bfloat16, out.dtype) for tensor in (held, more)) and out.dtype in GRADIENTS
    if not known or len({tensor.numel() for tensor in (held, more, out)}) > 1:
        raise ArgumentError(
            f"a sum of gradients of {held.numel()} x {held.dtype} and {more.numel()} x {more.dtype} in {out.numel()} x "
            f"{out.dtype}; expected as many, in bf16 or in fp32 as the last"
        )
    if not all(tensor.is_cpu and tensor.is_contiguous() for tensor in (held, more, out)):
        raise ArgumentError("a sum of gradients that are not contiguous or not on the CPU")
