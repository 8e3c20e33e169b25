"""Forward hooks that mark passes: a pre-hook begins a pass on the attachment, end hooks verify and encode.

The pre-hook also keeps the runtime alive: model -> hook -> attachment -> runtime. Attachments refer back to the model
weakly, so an unreferenced model is freed at once, with its pages.
"""

import threading
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import nn

from vbrt.host import accelerator
from vbrt.kernels.observers import unwatched
from vbrt.layers import VBLayer
from vbrt.libraries.peft_api import adapters_of
from vbrt.model.adapter_refusals import check_adapters
from vbrt.model.first_pass import EncodingHook
from vbrt.tiers import TierStack

__all__ = [
    "EntryHook",
    "ModelPasses",
    "PassEndHook",
    "PassHook",
    "ShellsHook",
    "is_plain_data",
    "mark_own_calls",
    "move_rest_",
    "pass_hook_of",
    "remove_pass_hooks",
]


class ModelPasses(Protocol):
    """Protocol of an attachment, for the hooks of its model."""

    @property
    def stack(self) -> TierStack:
        """The stack of the runtime."""

    @property
    def layers(self) -> Mapping[str, VBLayer]:
        """Name -> VB layer."""

    def begin_forward(self, model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """Count a forward, and begin its pass."""

    def close(self) -> None:
        """Free the pages of the model. Idempotent."""


class PassHook:
    """Forward pre-hook of a model: moves unswapped parameters to the device, checks adapters, and begins a pass.

    Attributes:
        attachment: of the model; None in a model that was unpickled without one.
    """

    def __init__(self, attachment: ModelPasses | None) -> None:
        self.attachment = attachment
        self.stack = None if attachment is None else attachment.stack
        self._rest_is_moved, self._adapters = False, ()
        self.begun: set[int] = set()  # threads in a call of the wrapper that began the pass of their next model call

    def __call__(self, model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling() or self.stack is None or self.stack.capturing():
            return
        if self.begun and threading.get_ident() in self.begun:
            self.begun.discard(threading.get_ident())
            return
        if not self._rest_is_moved:
            with self.stack.encoding:  # concurrent first passes: one thread moves the rest
                if not self._rest_is_moved:
                    move_rest_(model, self.stack.device)
                    self._rest_is_moved = True
        if adapters_of(model) != self._adapters:
            check_adapters(model, self.attachment.layers)
            self._adapters = adapters_of(model)
        self.attachment.begin_forward(model, args, kwargs)
        if self.stack.shells:  # last, after the checks for a changed model
            ShellsHook.begin(model, self.stack)

    def __deepcopy__(self, memo: dict) -> "PassHook":
        return self

    def __reduce__(self):
        return PassHook, (None,)


class PassEndHook:
    """Forward hook for pages sharded over ranks: verifies the gathers before the output is returned."""

    def __init__(self, stack: TierStack) -> None:
        self.stack: TierStack | None = stack

    def __call__(self, model: nn.Module, args: tuple, output: Any) -> None:
        """Raise TierError, on all ranks, if a rank had different pages or is gone."""
        top = None if self.stack is None or torch.compiler.is_compiling() else self.stack.levels[0]
        if top is not None and not (top.stream is not None and accelerator.is_current_stream_capturing()):
            top.check()

    def __deepcopy__(self, memo: dict) -> "PassEndHook":
        return self

    def __reduce__(self):
        return PassEndHook, (None,)


class ShellsHook:
    """Forward hook for models with unencoded weights, called even if the forward fails: encodes the weights that were
    read without a call of their layer, and removes itself once no thread runs the model."""

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
        """Raise FormatError, TierError if a weight cannot be encoded or stored."""
        if torch.compiler.is_compiling() or self.stack is None:
            return
        with self.stack.encoding:
            if self.stack.shells.end():
                _remove_hooks(model, ShellsHook, EncodingHook)
        if output is not None:  # None: the forward failed
            encode_read_(self.stack)

    def __deepcopy__(self, memo: dict) -> "ShellsHook":
        return self

    def __reduce__(self):
        return ShellsHook, (None,)


def mark_own_calls(facade: nn.Module) -> None:
    """Mark passes at the calls of a wrapper whose `forward` was replaced, as by TRL's trainers: the replacement may run
    parts of the model, such as its backbone, without calling the model, whose hooks mark passes otherwise. Idempotent.
    """
    if _begin_own_call not in facade._forward_pre_hooks.values():  # nn.Module's methods: the wrapper's are its model's
        nn.Module.register_forward_pre_hook(facade, _begin_own_call, with_kwargs=True)
        nn.Module.register_forward_hook(facade, _end_own_call, always_call=True)


def _begin_own_call(facade: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
    hook = None if torch.compiler.is_compiling() else pass_hook_of(facade._vb_model)
    if hook is not None:
        hook(facade._vb_model, args, kwargs)
        hook.begun.add(threading.get_ident())


def _end_own_call(facade: nn.Module, args: tuple, output: Any) -> None:
    """End the pass, unless a call of the model did."""
    model = facade._vb_model
    hook = None if torch.compiler.is_compiling() else pass_hook_of(model)
    if hook is not None and threading.get_ident() in hook.begun:
        hook.begun.discard(threading.get_ident())
        for end in [end for end in model._forward_hooks.values() if isinstance(end, PassEndHook | ShellsHook)]:
            end(model, args, output)


def encode_read_(stack: TierStack) -> None:
    """Encode the dense weights that were read."""
    for handle in stack.shells.taken():
        layer = next(iter(handle.layers), None)
        if layer is not None:
            layer.materialize_()


class EntryHook:
    """Pass marker for entry methods other than `forward`, such as the `decode` of an autoencoder.

    It follows accelerate's hook protocol: a library calls `pre_forward` with the model before such a method, and
    `detach_hook` when the hook is removed.
    """

    def pre_forward(self, model: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple, dict[str, Any]]:
        """Begin a pass; return the arguments unchanged."""
        hook = pass_hook_of(model)
        if hook is not None:
            hook(model, args, kwargs)
            hook.stack.shells.end()  # the end of the method is not observable
            encode_read_(hook.stack)  # reads of the previous pass
        return args, kwargs

    def detach_hook(self, model: nn.Module) -> nn.Module:
        """Return the unchanged model."""
        return model


def pass_hook_of(model: nn.Module) -> PassHook | None:
    """Return the hook that holds a model's attachment; None without one."""
    hooks = (hook for hook in model._forward_pre_hooks.values() if isinstance(hook, PassHook))
    return next((hook for hook in hooks if hook.attachment is not None), None)


def move_rest_(model: nn.Module, device: torch.device) -> None:
    """Move unswapped parameters and buffers to the computing GPU; pages stay. Runs outside any surrounding tracing,
    functional transform or inference mode. A no-op if all are there already: torch's `to` would read gradients, which
    another thread may be freeing."""
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


def _remove_hooks(model: nn.Module, *kinds: type) -> None:
    """Remove the forward hooks of some kinds."""
    for hook_id, hook in list(model._forward_hooks.items()):
        if isinstance(hook, kinds):
            del model._forward_hooks[hook_id]
            model._forward_hooks_always_called.pop(hook_id, None)


def is_plain_data(value: Any) -> bool:
    """True if a model's argument consists of tensors and constants, which a forward is not expected to mutate."""
    if type(value) in (list, tuple):
        return all(map(is_plain_data, value))
    if type(value) is dict:
        return all(map(is_plain_data, value.values()))
    return value is None or isinstance(value, torch.Tensor | bool | int | float | str | torch.dtype | torch.device)
