"""Finds the layer that made a loss NaN: `watch_nonfinite` checks the output of every module of a model.

    with vbrt.watch_nonfinite(model) as watch:
        loss = model(x)
    print(watch.first)          # layers.3.up: its output holds 12 NaN of 4096; inputs and parameters are finite
    watch.raise_first()         # or as an error

Hooks exist inside the `with` block only; each module's check synchronizes the device. Compiled graphs are not checked:
watch the original model instead of the compiled one.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from vbrt.config.argument_checks import check_instance
from vbrt.errors import NonfiniteError
from vbrt.libraries.torch_api import tree_leaves
from vbrt.residency.weight_site import ROOT
from vbrt.wrapper.model_proxy import Facade

__all__ = ["Nonfinite", "NonfiniteWatch", "watch_nonfinite"]


@dataclass(frozen=True, slots=True)
class Nonfinite:
    """First module with a non-finite output, and its cause.

    `cause` is "weight", "bias" or another parameter or buffer of the module itself, "input", or "output" if the module
    made it from finite values; `nan`, `inf` and `size` count elements of the cause.
    """

    module: str
    cause: str
    nan: int
    inf: int
    size: int

    def __str__(self) -> str:
        held = " and ".join(f"{count} {what}" for count, what in ((self.nan, "NaN"), (self.inf, "Inf")) if count)
        rest = "inputs and parameters are finite" if self.cause == "output" else "it is the first to pass that on"
        return f"{self.module}: its {self.cause} holds {held} of {self.size}; {rest}"


class NonfiniteWatch:
    """Result of `watch_nonfinite`. `first` is None as long as every output is finite."""

    first: Nonfinite | None = None

    def raise_first(self) -> None:
        """Raise NonfiniteError, with the first one, if an output was not finite."""
        if self.first is not None:
            raise NonfiniteError(str(self.first))


@contextmanager
def watch_nonfinite(model: nn.Module) -> Iterator[NonfiniteWatch]:
    """Watch the outputs of a model's modules for NaN and Inf in a `with` block, including recomputed forwards.

    Modules are checked in the order in which they end, so the innermost and earliest is named.

    Args:
        model: any module, wrapped or not.

    Returns:
        A context manager; it yields the watch, with the finding in `first`.
    """
    check_instance(model, nn.Module, "watch_nonfinite(): model", "a torch.nn.Module")
    watch, root = NonfiniteWatch(), model.vbrt.module if isinstance(model, Facade) else model
    hooks = [
        module.register_forward_hook(partial(_look, watch, name or ROOT), with_kwargs=True)
        for name, module in root.named_modules()
    ]
    try:
        yield watch
    finally:
        for hook in hooks:
            hook.remove()


def _look(watch: NonfiniteWatch, name: str, module: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
    if watch.first is None and not torch.compiler.is_compiling() and _any_nonfinite(tree_leaves(output)):
        watch.first = _describe(name, module, (args, kwargs), output)


def _describe(name: str, module: nn.Module, inputs: Any, output: Any) -> Nonfinite:
    own = {**module._parameters, **module._buffers}
    causes = [*((label, [tensor]) for label, tensor in own.items()), ("input", tree_leaves(inputs))]
    for cause, values in causes:
        if _any_nonfinite(values):
            return Nonfinite(name, cause, *_count(values))
    return Nonfinite(name, "output", *_count(tree_leaves(output)))


def _floats(values: Iterable[Any]) -> list[Tensor]:
    return [v for v in values if isinstance(v, Tensor) and v.is_floating_point() and not v.is_meta]


def _any_nonfinite(values: Iterable[Any]) -> bool:
    return any(not torch.isfinite(tensor).all() for tensor in _floats(values))


def _count(values: Iterable[Any]) -> tuple[int, int, int]:
    found = _floats(values)
    return tuple(
        sum(int(count(tensor)) for tensor in found)
        for count in (lambda t: t.isnan().sum(), lambda t: t.isinf().sum(), Tensor.numel)
    )
