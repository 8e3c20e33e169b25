"""The façade of a model that trains from the tiers."""

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

__all__ = ["VBFullWrapper", "take_optimizer_of"]

Optimizer = torch.optim.Optimizer | Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


class VBFullWrapper(VBModelWrapper):
    """A model whose weights, gradients and optimizer state live in the tiers: `wrap` with mode = "full".

    `parameters()` are the model's own objects; those of weights in the tiers have no values, only `grad`, on the host.
    `state_dict()` has copies, of fp32 masters. The optimizer that was given to `wrap` updates all of them.
    """

    _attachment: FullAttachment

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer, the object that was given. Raises WrapError before there is one."""
        return self._attachment.need("optimizer")

    def take_optimizer(self, optimizer: Optimizer) -> torch.optim.Optimizer:
        """Have an optimizer over `parameters()` update the weights from now on; returns it.

        Raises:
            WrapError: its class cannot update in chunks, it lacks a weight that trains, or there is one already.
        """
        _check_optimizer(optimizer)
        made = optimizer if isinstance(optimizer, torch.optim.Optimizer) else _made(optimizer, self._vb_model)
        self._attachment.take(made)
        return made

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Do the optimizer's step; weights in the tiers are updated while the next forward runs, which waits for a
        layer's update before the layer.

        Raises:
            TierError, WrapError: an update failed, this one or the last.
        """
        return self._attachment.need("optimizer").step(closure)

    def stepping(self) -> contextlib.AbstractContextManager[None]:
        """Do the optimizer's step within a `with` block around the last backward pass of a step: each weight in the
        tiers is updated as soon as its gradient is whole, while the pass goes on. `vb.step()` is not called then.

            with vb.stepping():
                loss.backward()
            vb.zero_grad()

        Raises:
            TierError: (on entering) an earlier update failed.
            WrapError: there is no optimizer; (at the end) there was a second backward pass in the block.
        """
        return self._attachment.stepping()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of all parameters, or set them to zero. Dropping waits for no update; the model's own
        zero_grad() reads each gradient first, so it waits for all of them."""
        if set_to_none:
            drop_gradients(self._vb_model.parameters())
        self._vb_model.zero_grad(set_to_none)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale all gradients so that their norm is at most `max_norm`; return what it was. It waits for all gradients.

        The same as torch.nn.utils.clip_grad_norm_(vb.parameters(), max_norm, norm_type), of gradients in fp32. With the
        Euclidean norm those in the tiers are read once, and scaled on their way into the update. `stats().updates` has
        the time that it took.
        """
        return self._attachment.clip(max_norm, norm_type)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return copies on the host of the values under the model's names, fp32 masters of weights in the tiers among
        them; tied names have one each. `keep_vars=True`: parameters that stay, and buffers, are themselves."""
        found = super().state_dict(*args, **kwargs)
        if kwargs.get("keep_vars") or (len(args) > 2 and args[2]):
            return found
        held = (*self._vb_model.parameters(), *self._vb_model.buffers())
        kept = {_memory_of(tensor) for tensor in held if not isinstance(tensor, StreamedParameter)}
        copies = {name: v.to("cpu", copy=True) for name, v in found.items() if _memory_of(v) in kept}
        found.update(copies)
        return found

    def settle(self) -> None:
        """Wait until all updates are done. Raises TierError for one that failed."""
        self._attachment.settle()

    def save_checkpoint(self, directory: str | PathLike, *, extra: Any = None, progress: bool | None = None) -> Path:
        """Write all that the next step depends on into a directory, in the place of the checkpoint that it holds.

        Weights, moments, steps, buffers and the groups' settings, one weight in memory at a time, after all updates. A
        process that is killed and a disk that is full leave the checkpoint before. Gradients are not saved: call it
        between steps. Generators, schedulers and counters are the caller's, in `extra`.

        Args:
            extra: state dicts and other plain data with tensors, such as `{"schedule": scheduler.state_dict(),
                "random": torch.get_rng_state()}`.
            progress: as for `materialize`.

        Returns:
            The directory; `load_checkpoint` takes it under any tiers, `vbrt.read_checkpoint` for plain torch.

        Raises:
            CheckpointError: it cannot be written, or the disk is full: names the path; training may go on.
            TierError: an update failed, or a page cannot be read.
            WrapError: there is no optimizer, or the wrapper was closed.
        """
        return save_training(self._attachment, directory, extra, progress=progress)

    def load_checkpoint(self, directory: str | PathLike, *, progress: bool | None = None) -> Any:
        """Be where `save_checkpoint` was called: the next steps have the same bits, whatever the tiers.

        Returns:
            What was given as `extra`.

        Raises:
            CheckpointError: there is none; it is damaged (weights before the damage are loaded then: load another one);
                or it is of another model or optimizer, and nothing was loaded.
            TierError: a page cannot be written.
            WrapError: there is no optimizer, or the wrapper was closed.
        """
        return load_training(self._attachment, directory, progress=progress)

    def unwrap(self) -> nn.Module:
        """Turn the model back into a plain one, in place, with its own parameter objects and their fp32 masters, and
        close the wrapper. The optimizer goes on as the plain one that it was, with its moments."""
        return super().unwrap()


def _memory_of(value: Any) -> object:
    """Return what two tensors that share memory have in common; other values are themselves."""
    return (value.device, storage_of(value)) if isinstance(value, Tensor) else id(value)


def _made(make: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer], model: nn.Module) -> torch.optim.Optimizer:
    """Return what a function makes of the model's parameters. Raises WrapError if that reads weights in the tiers: it
    names the class."""
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
    """Take `optimizer` out of the arguments of `vbrt.wrap`.

    Raises:
        WrapError: it is neither an optimizer nor makes one.
    """
    given = overrides.pop("optimizer", None)
    if given is not None:
        _check_optimizer(given)
    return given


def _check_optimizer(given: Any) -> None:
    """Raise WrapError: it is neither an optimizer nor makes one."""
    if not isinstance(given, torch.optim.Optimizer) and not callable(given):
        raise WrapError(
            f"optimizer = {type(given).__name__}; expected a torch.optim.Optimizer over the model's parameters, or a "
            "function of parameters that returns one"
        )
