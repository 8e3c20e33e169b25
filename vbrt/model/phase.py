"""Phase of a pass: set by the user for a `with` block, else inferred from the input's shape."""

import contextlib
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any

import torch

from vbrt.errors import ArgumentError
from vbrt.layers.weights.linear_product import precision as precision_of_passes
from vbrt.residency.policy import FORWARD

__all__ = ["BACKWARD", "DECODE", "PROMPT", "first_input", "inferred_phase", "named_phase", "phase_name", "rows_of"]

PROMPT, DECODE, BACKWARD = "prompt", "decode", "backward"

_FIRST = ("input_ids", "inputs_embeds", "hidden_states")  # keyword arguments with the tokens
_named: ContextVar[Mapping[int, str]] = ContextVar("vbrt_phases", default=MappingProxyType({}))  # by owner


@contextlib.contextmanager
def named_phase(owner: object, phase: str, precision: str | None) -> Iterator[None]:
    """Name the passes of `owner` that begin in this block, in this thread; the innermost block counts.

    Raises:
        ArgumentError: no name, or not a precision.
    """
    if not isinstance(phase, str) or not phase.strip():
        raise ArgumentError(f'phase {phase!r}; expected a name such as "draft"')
    token = _named.set({**_named.get(), id(owner): phase})
    try:
        with contextlib.nullcontext() if precision is None else precision_of_passes(precision):
            yield
    finally:
        _named.reset(token)


def phase_name(owner: object) -> str | None:
    """Return the phase set for passes of `owner` by the enclosing block; None without one."""
    return _named.get().get(id(owner))


def inferred_phase(args: tuple, kwargs: Mapping[str, Any]) -> str:
    """Return "forward" where gradients are enabled, else "decode" for one new token per sequence, else "prompt"."""
    if torch.is_grad_enabled():
        return FORWARD
    return DECODE if _new_tokens(args, kwargs) == 1 else PROMPT


def rows_of(args: tuple, kwargs: Mapping[str, Any]) -> int:
    """Return the number of tokens in the first input, over all sequences; 0 without one."""
    first = first_input(args, kwargs)
    if not isinstance(first, torch.Tensor):
        return 0
    return first.numel() // (first.shape[-1] if first.is_floating_point() and first.ndim else 1)


def _new_tokens(args: tuple, kwargs: Mapping[str, Any]) -> int:
    """Return the number of tokens per sequence in the first input: the last dimension of ids, else the second to last;
    of a matrix, its rows."""
    first = first_input(args, kwargs)
    if not isinstance(first, torch.Tensor):
        return 0
    features = 1 if first.is_floating_point() else 0
    return first.size(-1 - features) if first.ndim > features else 1


def first_input(args: tuple, kwargs: Mapping[str, Any]) -> torch.Tensor | None:
    """Return the main input tensor of a forward: the tokens, if any, else the first tensor; None without one."""
    if args and not kwargs and isinstance(args[0], torch.Tensor):
        return args[0]
    named = (kwargs.get(name) for name in _FIRST)
    given = (kwargs.get("decoder_input_ids"), *args, *named, *kwargs.values())
    return next((value for value in given if isinstance(value, torch.Tensor)), None)
