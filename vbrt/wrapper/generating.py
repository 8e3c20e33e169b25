"""`vb.generate`: the model's own, with what vbrt adds to it."""

from typing import TYPE_CHECKING, Any

from vbrt.generation.generate import Speculation
from vbrt.generation.generate import generate as generate_as

if TYPE_CHECKING:
    from vbrt.wrapper.wrapper import VBModelWrapper

__all__ = ["generate"]


def generate(
    self: "VBModelWrapper",
    *args: Any,
    speculate: str | int | bool = False,
    exactness: str = "tokens",
    seed: int | None = None,
    **kwargs: Any,
) -> Any:
    """Generate as the model does, with the model's own arguments.

    Args:
        speculate: "auto" or a number: draft that many tokens with the coarse planes of `exact` weights, and verify them
            in one pass; where that cannot be, a warning and `stats().fallbacks` say why. False: do not.
        exactness: "tokens": tokens and logits are, bit for bit, those of decoding one token at a time. "distribution":
            all drafts are verified at once, which is faster and rounds otherwise.
        seed: sampled tokens are drawn with noise by seed, row and position, the same with drafts and without; None:
            with drafts one is drawn from torch's default generator, without them the model samples as ever.

    Raises:
        ArgumentError: a value out of range; a seed where no tokens are sampled one by one.
        WrapError: the wrapper was closed or unwrapped.
    """
    return generate_as(self._attachment, Speculation(speculate, exactness, seed), args, kwargs)
