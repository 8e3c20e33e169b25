"""Passes of a model: hooks on the model tell its attachment when one begins, and its stack when it ends.

The hook is also where a model keeps its runtime alive: model -> hook -> attachment -> runtime. Attachments refer back
to the model weakly, so a model that nobody holds is freed at once, with its pages.
"""

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import nn

from vbrt.kernels.observers import unwatched
from vbrt.layers import VBLayer
from vbrt.layers.weights.lockstep import is_following
from vbrt.libraries.peft_api import adapters_of
from vbrt.model.adapter_refusals import check_adapters
from vbrt.tiers import TierStack

__all__ = [
    "EntryHook",
    "ModelPasses",
    "PassEndHook",
    "PassHook",
    "ShellsHook",
    "is_plain_data",
    "move_rest_",
    "pass_hook_of",
    "remove_pass_hooks",
]


class ModelPasses(Protocol):
    """The passes of a model, as its hooks see them: an `Attachment`."""

    @property
    def stack(self) -> TierStack:
        """The stack of the runtime."""

    @property
    def layers(self) -> Mapping[str, VBLayer]:
        """Name -> VB layer."""

    def begin_forward(self, model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """Count a forward that begins, and begin its pass."""

    def close(self) -> None:
        """Free the pages of the model. Idempotent."""


class PassHook:
    """A forward pre-hook of a model: begins a pass, and ends what wrapping left undone.

    Attributes:
        attachment: the model's place on its runtime; None in a model that was unpickled without one.
    """

    def __init__(self, attachment: ModelPasses | None) -> None:
        self.attachment = attachment
        self.stack = None if attachment is None else attachment.stack
        self._rest_is_moved, self._adapters = False, ()

    def __call__(self, model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling() or self.stack is None or self.stack.capturing() or is_following():
            return
        if not self._rest_is_moved:
            with self.stack.encoding:  # threads whose first passes meet: the others find it there
                if not self._rest_is_moved:
                    move_rest_(model, self.stack.device)
                    self._rest_is_moved = True
        if adapters_of(model) != self._adapters:
            check_adapters(model, self.attachment.layers)
            self._adapters = adapters_of(model)
        self.attachment.begin_forward(model, args, kwargs)
        if self.stack.shells:  # last, after those who look whether the model has changed
            ShellsHook.begin(model, self.stack)

    def __deepcopy__(self, memo: dict) -> "PassHook":
        return self

    def __reduce__(self):
        return PassHook, (None,)


class PassEndHook:
    """A forward hook of a model whose pages ranks bring together: verifies them before anybody has the output."""

    def __init__(self, stack: TierStack) -> None:
        self.stack: TierStack | None = stack

    def __call__(self, model: nn.Module, args: tuple, output: Any) -> None:
        """Raise TierError, on all ranks, if a rank had other pages or is gone."""
        top = None if self.stack is None or torch.compiler.is_compiling() else self.stack.levels[0]
        if top is not None and not (top.stream is not None and torch.cuda.is_current_stream_capturing()):
            top.check()

    def __deepcopy__(self, memo: dict) -> "PassEndHook":
        return self

    def __reduce__(self):
        return PassEndHook, (None,)


class ShellsHook:
    """A forward hook of a model that has weights which are not encoded yet, called even if the forward fails: encodes
    those that were read, and that no call of a layer has encoded, and is gone when nobody runs the model any more."""

    def __init__(self, stack: TierStack | None) -> None:
        self.stack = stack

    @classmethod
    def begin(cls, model: nn.Module, stack: TierStack) -> None:
        """Begin a pass of this thread."""
        with stack.encoding:
            stack.shells.begin()
            if not any(isinstance(hook, cls) for hook in model._forward_hooks.values()):
                model.register_forward_hook(cls(stack), always_call=True)

    def __call__(self, model: nn.Module, args: tuple, output: Any) -> None:
        """Raise FormatError, TierError if a weight cannot be held."""
        if torch.compiler.is_compiling() or self.stack is None:
            return
        with self.stack.encoding:
            if self.stack.shells.end():
                _remove_hooks(model, ShellsHook)
        if output is not None:  # the forward has not failed
            encode_read_(self.stack)

    def __deepcopy__(self, memo: dict) -> "ShellsHook":
        return self

    def __reduce__(self):
        return ShellsHook, (None,)


def encode_read_(stack: TierStack) -> None:
    """Encode the weights that were read while they were dense."""
    for handle in stack.shells.taken():
        layer = next(iter(handle.layers), None)
        if layer is not None:
            layer.materialize_()


class EntryHook:
    """Marks the begin of a pass at a method other than `forward`, such as the `decode` of an autoencoder.

    accelerate's protocol of hooks: a library calls `pre_forward` with the model before such a method, and
    `detach_hook` when the hook is removed.
    """

    def pre_forward(self, model: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple, dict[str, Any]]:
        """Begin a pass; the arguments are returned as they came."""
        hook = pass_hook_of(model)
        if hook is not None:
            hook(model, args, kwargs)
            hook.stack.shells.end()  # nobody tells when the method returns
            encode_read_(hook.stack)  # in the pass before
        return args, kwargs

    def detach_hook(self, model: nn.Module) -> nn.Module:
        """Return the model, of which nothing was changed."""
        return model


def pass_hook_of(model: nn.Module) -> PassHook | None:
    """Return the hook that ties a model to its place on a runtime; None for one that has none."""
    hooks = (hook for hook in model._forward_pre_hooks.values() if isinstance(hook, PassHook))
    return next((hook for hook in hooks if hook.attachment is not None), None)


def move_rest_(model: nn.Module, device: torch.device) -> None:
    """Move what was not swapped to a GPU that computes; pages stay where they are. Not as a part of what is traced,
    transformed or run in inference mode around it. A model that is there is left alone: torch would read gradients,
    which another thread may be dropping."""
    if device.type != "cpu" and any(each.device != device for each in (*model.parameters(), *model.buffers())):
        with unwatched(), torch.inference_mode(False):
            model.to(device)


def remove_pass_hooks(model: nn.Module) -> None:
    """Remove every PassHook of a model."""
    for hook_id, hook in list(model._forward_pre_hooks.items()):
        if isinstance(hook, PassHook):
            del model._forward_pre_hooks[hook_id]
            model._forward_pre_hooks_with_kwargs.pop(hook_id, None)
    _remove_hooks(model, PassEndHook | ShellsHook)


def _remove_hooks(model: nn.Module, kind: Any) -> None:
    """Remove the forward hooks of a kind."""
    for hook_id, hook in list(model._forward_hooks.items()):
        if isinstance(hook, kind):
            del model._forward_hooks[hook_id]
            model._forward_hooks_always_called.pop(hook_id, None)


def is_plain_data(value: Any) -> bool:
    """True if a model's argument is made of tensors and constants, which no forward is expected to change."""
    if type(value) in (list, tuple):
        return all(map(is_plain_data, value))
    if type(value) is dict:
        return all(map(is_plain_data, value.values()))
    return value is None or isinstance(value, torch.Tensor | bool | int | float | str | torch.dtype | torch.device)
