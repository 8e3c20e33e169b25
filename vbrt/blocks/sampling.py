"""Drawing tokens: the Gumbel-max trick, right in the tails.

argmax(logits / T + G) with G = -log(E), E ~ Exp(1), has the distribution softmax(logits / T) (Gumbel 1954; Maddison,
Tarlow and Minka 2014, "A* Sampling"). The noise is what goes wrong in practice: -log(-log(u)) of a float32 uniform
never exceeds 16.6, so a token of probability 1e-9 is never drawn beside a likely one, and u = 0 gives -inf.
Exponential noise in float64 reaches 36 and, kept away from zero, never becomes infinite.

Legend: V tokens of the vocabulary.
"""

import math

import torch
from torch import Tensor

from vbrt.config.argument_checks import check_instance
from vbrt.errors import ArgumentError

__all__ = ["gumbel_max_sample"]

_SMALLEST = 2.0**-60  # below every non-zero value of float64 exponential noise (2^-53)


def gumbel_max_sample(
    logits: Tensor,
    temperature: float = 1.0,
    generator: torch.Generator | None = None,
    *,
    noise: Tensor | None = None,
    check: bool | None = None,
) -> Tensor:
    """Token indices, int64 [...], drawn from softmax(logits / temperature) of floating logits [..., V].

    Temperature 0 is argmax. Tokens with a logit of -inf are never drawn. Noise and sums are float64, whatever the
    logits' dtype. A generator, on the logits' device, makes the result reproducible, and so does noise that is given:
    float64 [..., V] of Exp(1), which is overwritten.

    Shapes, dtypes and the temperature are checked on the host, at no cost. Whether each row has something to draw is
    known on the device only: `check` None raises for logits on a CPU and, so as not to wait for a GPU, gives -1 for
    such rows on other devices; True always raises (and waits), False never.

    Raises:
        ArgumentError: no vocabulary, logits that are not floating, a temperature that is negative or not finite; and,
            if checked, a row that holds NaN or +inf, or nothing but -inf.
    """
    _check_arguments(logits, temperature)
    top = logits.amax(-1)  # NaN wherever a row has one
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
    """(logits - top) / temperature + Gumbel noise; with the largest at zero no temperature overflows it."""
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
