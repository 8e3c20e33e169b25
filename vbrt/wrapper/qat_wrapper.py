"""Wrapper of a model in quantization-aware training."""

from os import PathLike
from pathlib import Path

from torch import nn

from vbrt.wrapper.wrapper import VBModelWrapper

__all__ = ["VBTrainingWrapper"]


class VBTrainingWrapper(VBModelWrapper):
    """Model whose weights train: `wrap` with mode = "train". The stack is empty and nothing moves: `set_budget` and
    `timeline` raise WrapError.

    `parameters()` are the model's own. The state dict has their names and, for 4-bit formats, each engine's state
    (`*.separation`), so that a resumed run is the same run.
    """

    def save(self, directory: str | PathLike, *, progress: bool | None = None) -> Path:
        """Save the weights as the forward rounds them now, as planes: `vbrt.load` makes an inference model of them. To
        continue training, save `state_dict()` instead, because planes lack the weights' last bits.

        Raises:
            CheckpointError: it cannot be written, or the disk is full: names the path.
            FormatError: a weight holds NaN or Inf.
            WrapError: the wrapper was unwrapped.
        """
        return super().save(directory, progress=progress)

    def unwrap(self) -> nn.Module:
        """Turn the model back into a plain one, in place, with the parameter objects that trained, so that optimizers
        keep working, and close the wrapper."""
        return super().unwrap()
