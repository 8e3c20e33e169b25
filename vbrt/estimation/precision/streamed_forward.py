"""Streamed forward: a module's weights are on the device only while its forward runs.

    with streamed(model, device, weights):
        model(ids.to(device))

The working set on the device is the modules that are running, so the largest module must fit; `lent` keeps resident as
many more as a budget allows.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from vbrt.residency.weight_site import ROOT

__all__ = ["Reader", "lent", "streamed"]

Reader = Callable[[], Tensor]
"""Reads a weight that the model does not hold, on any device."""

Notice = Callable[[str, str, Tensor | None], None]


class _Visit:
    """Pre- and post-forward hooks that put one module's tensors on a device.

    Attributes:
        readers: by parameter, for those without data in the module.
    """

    def __init__(self, name: str, module: nn.Module, device: torch.device, notice: Notice) -> None:
        self.name, self.module, self._device, self._notice = name, module, device, notice
        self.readers: dict[str, Reader] = {}
        self._own: list[tuple[dict[str, Any], str, Any]] = []
        self._depth = 0

    def begin(self, *_: Any) -> None:
        """Load the tensors; a reentrant call finds them loaded."""
        self._depth += 1
        if self._depth > 1:
            return
        for name, reader in self.readers.items():
            self._put(self.module._parameters, name, nn.Parameter(reader().to(self._device), requires_grad=False))
        for tensors in (self.module._parameters, self.module._buffers):
            for name, tensor in list(tensors.items()):
                if tensor is not None and not tensor.is_meta and tensor.device != self._device:
                    self._put(tensors, name, _copied(tensor, self._device))
        for name, parameter in self.module._parameters.items():
            if parameter is not None:
                self._notice(self.name, name, parameter)

    def end(self, *_: Any) -> None:
        """Restore the module's own tensors, after the outermost call."""
        self._depth -= 1
        if self._depth <= 0:
            self.restore()

    def restore(self) -> None:
        """Restore the module's own tensors, however its forward ended. Idempotent."""
        self._depth = 0
        while self._own:
            tensors, name, own = self._own.pop()
            tensors[name] = own
            self._notice(self.name, name, None)

    def _put(self, tensors: dict[str, Any], name: str, there: Tensor) -> None:
        self._own.append((tensors, name, tensors.get(name)))
        tensors[name] = there


@contextmanager
def streamed(
    model: nn.Module,
    device: torch.device,
    weights: Mapping[tuple[str, str], Reader],
    notice: Notice = lambda module, parameter, tensor: None,
) -> Iterator[None]:
    """Context in which the model's forwards run on a device; restores its own tensors, also after an error.

    Args:
        weights: readers by module and parameter, for parameters without data in the model.
        notice: called with each parameter of a module as its forward begins, and with None for each moved one as it
            ends.
    """
    visits, hooks = [], []
    try:
        for name, module in model.named_modules():
            visit = _Visit(name or ROOT, module, device, notice)
            visit.readers = {of: reader for (at, of), reader in weights.items() if at == visit.name}
            if visit.readers or module._parameters or module._buffers:
                visits.append(visit)
                hooks.append(module.register_forward_pre_hook(visit.begin))
                hooks.append(module.register_forward_hook(visit.end, always_call=True))
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for visit in visits:
            visit.restore()


@contextmanager
def lent(model: nn.Module, device: torch.device, room: int, budgeted: Collection[Tensor]) -> Iterator[None]:
    """Context in which the model's forwards run on a device, with its tensors resident there; of `budgeted`, as many as
    `room` bytes hold, the others streamed module by module. Restores them, also after an error."""
    counted, there, own = {id(tensor) for tensor in budgeted}, {}, []
    try:
        for tensors, name, tensor in _held(model):
            if tensor.device == device:
                continue
            if id(tensor) not in there:
                if id(tensor) in counted and tensor.nbytes > room:
                    continue
                room -= tensor.nbytes if id(tensor) in counted else 0
                there[id(tensor)] = _copied(tensor, device)
            own.append((tensors, name, tensor))
            tensors[name] = there[id(tensor)]
        with streamed(model, device, {}):
            yield
    finally:
        for tensors, name, tensor in own:
            tensors[name] = tensor


def _held(model: nn.Module) -> list[tuple[dict[str, Any], str, Tensor]]:
    """Return each tensor of each module, with its owning dict."""
    tables = [table for module in model.modules() for table in (module._parameters, module._buffers)]
    return [(table, name, tensor) for table in tables for name, tensor in table.items() if tensor is not None]


def _copied(tensor: Tensor, device: torch.device) -> Tensor:
    there = tensor.detach().to(device)
    return nn.Parameter(there, requires_grad=False) if isinstance(tensor, nn.Parameter) else there
