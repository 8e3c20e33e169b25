"""The part "fused" of `scripts/gpu_check.py`: launches that do the work of several, beside those."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
import torch.nn.functional as F

from scripts.gpu_timing import BF16, CUDA, Shape, dense_weights, planes_of, say, side_by_side
from vbrt.formats import WeightPlanes
from vbrt.kernels.cuda.e2m1 import fused_linear
from vbrt.kernels.cuda.e2m1 import linear as e2m1_linear
from vbrt.kernels.cuda.e2m1.tiles import TiledWeight, weight_of


def fused_rows(shapes: Sequence[Shape], tokens: Sequence[int]) -> Iterator[dict[str, object]]:
    """The launches that `vbrt.compile_options` puts into graphs beside those that they replace."""
    for k, n in shapes:
        planes = [planes_of("nvfp4", weight) for weight in dense_weights(k, n)]
        for m in tokens:
            x = torch.randn(m, k, device=CUDA, dtype=BF16)
            for name, (fused, separate) in fused_cases(x, planes).items():
                apart, together = side_by_side(separate, fused)
                row = {
                    "what": name,
                    "k": k,
                    "n": n,
                    "m": m,
                    "separate_us": round(apart, 2),
                    "fused_us": round(together, 2),
                    "ratio": round(apart / together, 3),
                }
                say(row)
                yield row


Calls = list[Callable[[], object]]


def fused_cases(x: torch.Tensor, planes: Sequence[WeightPlanes]) -> dict[str, tuple[Calls, Calls]]:
    """Name -> (calls of one launch, calls of the launches that it replaces), each launch that takes x."""
    (n, k), (m, _) = planes[0].shape, x.shape
    weights = [weight_of(p) for p in planes]
    following = weights[1:] + weights[:1]
    other, gain = torch.randn_like(x), torch.randn(k, device=CUDA, dtype=BF16)
    pairs = list(zip(weights, following, strict=True))
    copies = range(len(planes))
    cases = {
        "normed sum": (
            [partial(fused_linear.normed_sum, x, other, gain, 1e-5) for _ in copies],
            [partial(separate_norm, x, other, gain) for _ in copies],
        )
    }
    if fused_linear.gates_in_one(BF16, m, n, k):
        separate = [partial(two_launches, x, *pair) for pair in pairs]
        cases["gated"] = ([partial(fused_linear.gated, x, *pair, "silu") for pair in pairs], separate)
    if m <= fused_linear.SIBLING_TOKENS:
        separate = [partial(two_launches, x, *pair, "none") for pair in pairs]
        cases["siblings"] = ([partial(fused_linear.siblings, x, pair) for pair in pairs], separate)
    if m == 1:
        residual, gains = torch.randn(m, n, device=CUDA, dtype=BF16), torch.randn(n, device=CUDA, dtype=BF16)
        cases["residual"] = (
            [partial(fused_linear.residual, x, w, residual, gains) for w in weights],
            [partial(separate_residual, x, w, residual, gains) for w in weights],
        )
    return cases


def separate_norm(x: torch.Tensor, other: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x + other, gain.shape, gain, 1e-5)


def two_launches(
    x: torch.Tensor, gate: TiledWeight, up: TiledWeight, activation: str = "silu"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Without the product that the gated launch also computes."""
    return e2m1_linear.multiply(x, gate, None, activation), e2m1_linear.multiply(x, up, None, "none")


def separate_residual(
    x: torch.Tensor, weight: TiledWeight, other: torch.Tensor, gain: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """A layer, and the residual's sum with its norm."""
    return fused_linear.normed_sum(e2m1_linear.multiply(x, weight, None, "none"), other, gain, 1e-5)
