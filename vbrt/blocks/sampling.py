"""Token sampling by the Gumbel-max trick, with correct tail probabilities.

argmax(logits / T + G) with G = -log(E), E ~ Exp(1), is distributed as softmax(logits / T) (Gumbel 1954; Maddison,
Tarlow and Minka 2014, "A* Sampling"). The noise is the numerical hazard: -log(-log(u)) of a float32 uniform never
exceeds 16.6, so a token of probability 1e-9 is never drawn against a likely one, and u = 0 gives -inf. Exponential
noise in float64 reaches 36 and, clamped away from zero, is always finite.

Legend: V vocabulary size.
"""

import math

import torch
from torch import Tensor

from vbrt.config.argument_checks import check_instance
from vbrt.errors import ArgumentError

__all__ = ["gumbel_max_sample"]

_SMALLEST = 2.0**-60  # below every non-zero float64 exponential sample (2^-53)


def gumbel_max_sample(
    logits: Tensor,
    temperature: float = 1.0,
    generator: torch.Generator | None = None,
    *,
    noise: Tensor | None = None,
    check: bool | None = None,
) -> Tensor:
    """Sample token indices, int64 [...], from softmax(logits / temperature) for floating logits [..., V].

    Temperature 0 is argmax. Tokens with logit -inf are never drawn. Noise and sums are float64 for any dtype. Results
    are reproducible with a generator on the logits' device, or with given noise: float64 [..., V] of Exp(1),
    overwritten.

    Shapes, dtypes and the temperature are checked on the host for free; whether each row is valid is known on the
    device only. `check` None raises for logits on a CPU and returns -1 for invalid rows on other devices, without
    synchronization; True always raises (and synchronizes), False never.

    Raises:
        ArgumentError: empty vocabulary, non-floating logits, a temperature that is negative or not finite; and, if
            checked, a row with NaN or +inf, or with nothing but -inf.
    """
    _check_arguments(logits, temperature)
    top = logits.amax(-1)  # NaN if the row has one
    valid = top.isfinite()
    if check or (check is None and logits.device.type == "cpu"):
        _check_rows(logits, valid)
    if temperature == 0:
        drawn = logits.argmax(-1)
    else:
        check_instance(generator, torch.Generator | None, "gumbel_max_sample: generator", "a torch.Generator, or None")
        check_instance(noise, Tensor | None, "gumbel_max_sample: noise", "a Tensor of the logits' shape, or None")
        if noise is None:
            noise = torch.empty(logits.shape, dtype=torch.float64, device=logits.device).exponential_(
                generator=generator
            )
        drawn = _perturbed(logits, top, temperature, noise).argmax(-1)
    return torch.where(valid, drawn, -1)


def _perturbed(logits: Tensor, top: Tensor, temperature: float, noise: Tensor) -> Tensor:
    """(logits - top) / temperature + Gumbel noise; subtracting the maximum prevents overflow at any temperature."""
    noise.clamp_(min=_SMALLEST).log_()
    return (logits.double() - top.double().unsqueeze(-1)).div_(float(temperature)).sub_(noise)


def _check_arguments(logits: Tensor, temperature: float) -> None:
    check_instance(logits, Tensor, "gumbel_max_sample: logits", "a Tensor")
    if not logits.is_floating_point():
        raise ArgumentError(f"gumbel_max_sample: logits are {logits.dtype}; expected floating point")
    if logits.ndim == 0 or logits.shape[-1] == 0:
        raise ArgumentError(f"gumbel_max_sample: logits have shape {tuple(logits.shape)}; expected (..., V), V >= 1")
    if not isinstance(temperature, int | float) or not 0 <= temperature < math.inf:
        raise ArgumentError(f"gumbel_max_sample: temperature = {temperature!r}; expected a finite number >= 0")


def _check_rows(logits: Tensor, valid: Tensor) -> None:
    if valid.all():
        return
    row = int((~valid).flatten().nonzero()[0])
    values = logits.flatten(0, -2)[row] if logits.ndim > 1 else logits
    what = "NaN" if values.isnan().any() else "+inf" if values.isposinf().any() else "nothing but -inf: all masked"
    raise ArgumentError(
        f"gumbel_max_sample: row {row} of {valid.numel()} holds {what}; expected at least one finite "
        "logit, and no NaN or +inf"
    )
