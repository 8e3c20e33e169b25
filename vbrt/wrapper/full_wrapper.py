"""Wrapper of a model that trains from the tiers."""

import contextlib
import traceback
from collections.abc import Callable, Iterable
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vbrt.errors import WrapError
from vbrt.host.host_memory import storage_of
from vbrt.model.full_training import FullAttachment
from vbrt.saves.checkpoint.optimizer_checkpoint import load_training, save_training
from vbrt.training.full.optimizer_takeover import drop_gradients
from vbrt.training.full.streamed_parameter import StreamedParameter
from vbrt.training.full.update_rules import rule_names
from vbrt.wrapper.wrapper import VBModelWrapper

__all__ = ["Optimizer", "VBFullWrapper", "take_optimizer_of"]

Optimizer = torch.optim.Optimizer | Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


class VBFullWrapper(VBModelWrapper):
    """Model whose weights, gradients and optimizer state live in the tiers: `wrap` with mode = "full".

    `parameters()` are the model's own objects; those of weights in the tiers have no values, only `grad`, on the host.
    `state_dict()` has copies, fp32 masters included. The optimizer given to `wrap` updates all of them.
    """

    _attachment: FullAttachment

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer object that was given. Raises WrapError: none was."""
        return self._attachment.need("optimizer")

    def take_optimizer(self, optimizer: Optimizer) -> torch.optim.Optimizer:
        """Make an optimizer over `parameters()` update the weights from now on; return it.

        Raises:
            WrapError: its class cannot update in chunks, it lacks a weight that trains, or there is one already.
        """
        _check_optimizer(optimizer)
        made = optimizer if isinstance(optimizer, torch.optim.Optimizer) else _made(optimizer, self._vb_model)
        self._attachment.take(made)
        return made

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Do the optimizer's step; updates of weights in the tiers overlap the next forward, in which each layer waits
        for its own.

        Raises:
            TierError, WrapError: an update failed, this one or the last.
        """
        return self._attachment.need("optimizer").step(closure)

    def stepping(self) -> contextlib.AbstractContextManager[None]:
        """Overlap the optimizer's step with the last backward pass of a step, in a `with` block around it: each weight
        in the tiers is updated once its gradient is complete. `vb.step()` is not called then.

            with vb.stepping():
                loss.backward()
            vb.zero_grad()

        Raises:
            TierError: (on entering) an earlier update failed.
            WrapError: there is no optimizer; (at the end) the block had a second backward pass.
        """
        return self._attachment.stepping()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of all parameters, or set them to zero. Dropping does not wait for updates."""
        if set_to_none:
            drop_gradients(self._vb_model.parameters())
        self._vb_model.zero_grad(set_to_none)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale all gradients so that their norm is at most `max_norm`; return the norm before. Waits for all
        gradients.

        Equal to torch.nn.utils.clip_grad_norm_(vb.parameters(), max_norm, norm_type) on fp32 gradients. With the
        Euclidean norm, gradients in the tiers are read once, and scaled when the update reads them. `stats().updates`
        has the time.
        """
        return self._attachment.clip(max_norm, norm_type)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return host copies of all values under the model's names, with fp32 masters of weights in the tiers; tied
        names each have a copy. `keep_vars=True`: resident parameters and buffers are the tensors themselves."""
        found = super().state_dict(*args, **kwargs)
        if kwargs.get("keep_vars") or (len(args) > 2 and args[2]):
            return found
        held = (*self._vb_model.parameters(), *self._vb_model.buffers())
        kept = {_memory_of(tensor) for tensor in held if not isinstance(tensor, StreamedParameter)}
        copies = {name: v.to("cpu", copy=True) for name, v in found.items() if _memory_of(v) in kept}
        found.update(copies)
        return found

    def settle(self) -> None:
        """Wait until all updates are done. Raises TierError: one failed."""
        self._attachment.settle()

    def save_checkpoint(self, directory: str | PathLike, *, extra: Any = None, progress: bool | None = None) -> Path:
        """Write a training checkpoint into a directory, replacing the one there atomically.

        It has weights, moments, steps, buffers and group settings, written one weight at a time after all updates. A
        kill or a full disk leaves the previous checkpoint intact. Gradients are not saved: call it between steps.
        Generators, schedulers and counters go into `extra`.

        Args:
            extra: state dicts and other plain data with tensors, such as `{"schedule": scheduler.state_dict(),
                "random": torch.get_rng_state()}`.
            progress: as for `materialize`.

        Returns:
            The directory; `load_checkpoint` reads it with any tiers, `vbrt.read_checkpoint` for plain torch.

        Raises:
            CheckpointError: it cannot be written, or the disk is full: names the path; training can continue.
            TierError: an update failed, or a page cannot be read.
            WrapError: there is no optimizer, or the wrapper was closed.
        """
        return save_training(self._attachment, directory, extra, progress=progress)

    def load_checkpoint(self, directory: str | PathLike, *, progress: bool | None = None) -> Any:
        """Resume from a checkpoint: further steps are bitwise the same, whatever the tiers.

        Returns:
            The `extra` of `save_checkpoint`.

        Raises:
            CheckpointError: missing; damaged (weights before the damage are already loaded: load another one); or of
                another model or optimizer, and nothing was loaded.
            TierError: a page cannot be written.
            WrapError: there is no optimizer, or the wrapper was closed.
        """
        return load_training(self._attachment, directory, progress=progress)

    def unwrap(self) -> nn.Module:
        """Turn the model back into a plain one, in place, with its own parameter objects and their fp32 masters, and
        close the wrapper. The optimizer becomes the plain one again, with its moments."""
        return super().unwrap()


def _memory_of(value: Any) -> object:
    """Return a key that tensors with shared memory have in common; for other values their id."""
    return (value.device, storage_of(value)) if isinstance(value, Tensor) else id(value)


def _made(make: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer], model: nn.Module) -> torch.optim.Optimizer:
    """Call an optimizer factory on the model's parameters. Raises WrapError, naming the class, if it reads weights in
    the tiers."""
    try:
        return make(model.parameters())
    except WrapError as error:
        frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
        being_made = (frame.f_locals.get("self") for frame in frames)
        name = next((type(one).__name__ for one in being_made if isinstance(one, torch.optim.Optimizer)), "optimizer")
        raise WrapError(
            f'{name}: it could not be made over weights that train from the tiers ({error}); mode = "full" updates '
            f"weights in chunks, which it can do for {rule_names()}"
        ) from error


def take_optimizer_of(overrides: dict[str, Any]) -> Optimizer | None:
    """Pop `optimizer` from the arguments of `vbrt.wrap`.

    Raises:
        WrapError: it is neither an optimizer nor a factory.
    """
    given = overrides.pop("optimizer", None)
    if given is not None:
        _check_optimizer(given)
    return given


def _check_optimizer(given: Any) -> None:
    """Raise WrapError: it is neither an optimizer nor a factory."""
    if not isinstance(given, torch.optim.Optimizer) and not callable(given):
        raise WrapError(
            f"optimizer = {type(given).__name__}; expected a torch.optim.Optimizer over the model's parameters, or a "
            "function of parameters that returns one"
        )
