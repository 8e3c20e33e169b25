"""The façade of a model whose weights train."""

from os import PathLike
from pathlib import Path

from torch import nn

from vbrt.wrapper.wrapper import VBModelWrapper

__all__ = ["VBTrainingWrapper"]


class VBTrainingWrapper(VBModelWrapper):
    """A model whose weights train: `wrap` with mode = "train". The stack is empty, nothing moves: `set_budget` and
    `timeline` raise WrapError.

    `parameters()` are the model's own, the state dict has their names and, for 4-bit formats, what the engine keeps
    beside each weight (`*.separation`), so that a run that is taken up again is the same run.
    """

    def save(self, directory: str | PathLike, *, progress: bool | None = None) -> Path:
        """Write the weights as the forward rounds them now, as planes, into a directory: `vbrt.load` makes an inference
        model of it. To continue training later, save `state_dict()` instead: planes lack the weights' last bits.

        Raises:
            CheckpointError: it cannot be written, or the disk is full: names the path.
            FormatError: a weight holds NaN or Inf.
            WrapError: the wrapper was unwrapped.
        """
        return super().save(directory, progress=progress)

    def unwrap(self) -> nn.Module:
        """Turn the model back into a plain one, in place, with the very parameters that trained, and close the wrapper:
        an optimizer keeps working."""
        return super().unwrap()
