"""What is known of an operation, and how it is judged: by what the plain layer does."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from tests.contract.holdings import Holding, Subject, held, meets
from vbrt.errors import WrapError

__all__ = ["FROZEN", "OPERATIONS", "ROUNDED", "Documented", "Operation", "Refused", "judge", "operation"]

FROZEN = {"state": ("shell", "materialized")}
ROUNDED = {"state": "trained", "lossless": False}  # mode = "train" through 4 bits

#: relative to the largest value, for results of 4-bit weights: another order of summation, in the result's dtype
TOLERANCE = {torch.float64: 1e-6, torch.float32: 2e-5, torch.bfloat16: 4e-2, torch.float16: 8e-3}
GPU_TOLERANCE = {**TOLERANCE, torch.float32: 2e-3}


@dataclass(frozen=True, slots=True)
class Refused:
    """Where an operation raises `error`, whose message must contain `says`."""

    where: Mapping[str, Any]
    says: str
    error: type[Exception] = WrapError

    def __str__(self) -> str:
        return f"refused: `{self.error.__name__}`"


@dataclass(frozen=True, slots=True)
class Documented:
    """Where the result differs as docs/wrapping.md says, in these words: `holds(result, plain result)`."""

    where: Mapping[str, Any]
    note: str
    words: str
    holds: Callable[[Any, Any], bool]

    def __str__(self) -> str:
        return f"differs: {self.note}"


@dataclass(frozen=True, slots=True)
class Operation:
    """Something that is done to a subject and returns what is compared: tensors and values in tuples, lists and dicts.

    Attributes:
        text: what it does, in code or a few words.
        rules: where the result is not that of the plain layer; the first that meets a holding counts.
        only: the holdings that it has a meaning for.
        sample: how many holdings a short run tries, other ones for each operation.
        bits: whether results of lossless weights are the very bits; else they are as near as those of 4 bits.
        computed_in: the lowest dtype on the way, where results do not show it.
        calls_after: whether subjects can be called afterwards; then they are, and that is compared too.
    """

    name: str
    group: str
    text: str
    run: Callable[[Subject], Any]
    rules: tuple[Refused | Documented, ...] = ()
    only: Mapping[str, Any] | None = None
    sample: int = 2
    calls_after: bool = True
    bits: bool = True
    computed_in: torch.dtype | None = None

    def rule(self, holding: Holding) -> Refused | Documented | None:
        """What is said of a holding; None: the same as plain."""
        return next((rule for rule in self.rules if meets(holding, rule.where)), None)

    def has_meaning(self, holding: Holding) -> bool:
        """Whether it can be tried there."""
        return meets(holding, self.only or {})


OPERATIONS: dict[str, Operation] = {}


def operation(group: str, text: str, *rules: Refused | Documented, **options: Any) -> Callable[[Callable], Callable]:
    """Put a function on the list; its name, with spaces, is the operation's."""

    def add(run: Callable[[Subject], Any]) -> Callable[[Subject], Any]:
        name = run.__name__.strip("_").replace("_", " ")
        assert name not in OPERATIONS, name
        OPERATIONS[name] = Operation(name, group, text, run, rules, **options)
        return run

    return add


# -- judging ----------------------------------------------------------------------------------------------------------


def judge(operation: Operation, holding: Holding, path: Path) -> str | None:
    """None where the list is right about a holding, else what happened instead."""
    plain, wrapped = held(holding, path)
    before = plain.whole(plain.x).detach()
    expected = _outcome(operation, plain)
    try:
        got = _outcome(operation, wrapped)
        return _verdict(operation, holding, expected, got, before)
    finally:
        wrapped.close()


@dataclass(frozen=True, slots=True)
class _Outcome:
    result: Any = None
    after: Any = None
    error: Exception | None = None


def _outcome(operation: Operation, subject: Subject) -> _Outcome:
    result, failed = None, None
    try:
        result = operation.run(subject)
    except Exception as error:  # noqa: BLE001  # whatever it is, it is what the other side is compared with
        failed = error
    return _Outcome(result, _called(subject) if operation.calls_after else None, failed)


def _called(subject: Subject) -> Tensor | str:
    try:
        return subject.whole(subject.x).detach()
    except Exception as error:  # noqa: BLE001
        return f"raises {type(error).__name__}: {error}"


def _verdict(operation: Operation, holding: Holding, expected: _Outcome, got: _Outcome, before: Tensor) -> str | None:
    rule = operation.rule(holding)
    difference = _difference(expected.result, got.result, holding, operation)
    if isinstance(rule, Refused):
        if not isinstance(got.error, rule.error):
            return f"not refused by a {rule.error.__name__}: {_shown(got, difference)}"
        if rule.says not in str(got.error):
            return f"refused with other words: {got.error}"
        changed = _difference(before, got.after, holding, operation) if operation.calls_after else None
        return f"refused, but the next call is another: {changed}" if changed else None
    if isinstance(rule, Documented):
        if got.error is not None:
            return _shown(got, difference)
        return None if rule.holds(got.result, expected.result) else f"not as documented: {difference or 'the same'}"
    if (expected.error is None) != (got.error is None) or _other_error(expected.error, got.error):
        return f"{_shown(got, difference)}; plain: {_shown(expected, None)}"
    after = _difference(expected.after, got.after, holding, operation)
    return difference or (f"the next call: {after}" if after else None)


def _other_error(expected: Exception | None, got: Exception | None) -> bool:
    """Code that catches the plain layer's must catch vbrt's too."""
    return expected is not None and not isinstance(got, _public(type(expected)))


def _public(cls: type) -> type:
    return next(c for c in cls.__mro__ if c.__module__ == "builtins")


def _shown(outcome: _Outcome, difference: str | None) -> str:
    if outcome.error is not None:
        return f"{type(outcome.error).__name__}: {' '.join(str(outcome.error).split())[:300]}"
    return difference or "a result"


def _difference(expected: Any, got: Any, holding: Holding, operation: Operation) -> str | None:
    """What differs between two results; None where nothing does."""
    if isinstance(expected, Tensor) and isinstance(got, Tensor):
        return _tensors_differ(expected, got, holding, operation)
    if isinstance(got, str) and not isinstance(expected, str):
        return got[:300]
    if type(expected) is not type(got):
        return f"{type(got).__name__} instead of {type(expected).__name__}"
    if isinstance(expected, dict):
        if list(expected) != list(got):
            return f"keys {list(got)} instead of {list(expected)}"
        parts = {key: _difference(expected[key], got[key], holding, operation) for key in expected}
        return next((f"{key}: {text}" for key, text in parts.items() if text), None)
    if isinstance(expected, list | tuple):
        if len(expected) != len(got):
            return f"{len(got)} values instead of {len(expected)}"
        parts = [_difference(a, b, holding, operation) for a, b in zip(expected, got, strict=True)]
        return next((f"result {i}: {text}" for i, text in enumerate(parts) if text), None)
    return None if expected == got else f"{str(got)[:300]!r} instead of {str(expected)[:300]!r}"


def _tensors_differ(expected: Tensor, got: Tensor, holding: Holding, operation: Operation) -> str | None:
    for what in ("dtype", "shape", "device"):
        if getattr(expected, what) != getattr(got, what):
            return f"{what} {getattr(got, what)} instead of {getattr(expected, what)}"
    if is_fake(expected) != is_fake(got):
        return f"a {type(got).__name__} instead of a {type(expected).__name__}"
    if expected.is_meta:
        return None
    expected, got = expected.detach(), got.detach()
    if (holding.lossless and operation.bits) or not expected.is_floating_point():
        same = torch.equal(expected.nan_to_num(7e3), got.nan_to_num(7e3))
    else:
        tolerances = GPU_TOLERANCE if holding.device == "cuda" else TOLERANCE
        dtypes = (holding.dtype, expected.dtype, operation.computed_in or holding.dtype)
        tolerance = max(tolerances[dtype] for dtype in dtypes)
        largest = expected.abs().nan_to_num(0, 0, 0).max().item() if expected.numel() else 0.0
        same = torch.allclose(expected, got, rtol=0, atol=tolerance * largest, equal_nan=True)
    if same:
        return None
    error = (expected.double() - got.double()).abs().nan_to_num(math.inf).max().item()
    return f"values differ by up to {error:.3g} of {expected.double().abs().max().item():.3g}"
