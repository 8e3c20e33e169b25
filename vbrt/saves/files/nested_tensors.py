"""Serialization of nested data with tensors (state dicts) to JSON plus named tensors."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from vbrt.errors import CheckpointError
from vbrt.saves.files.safetensors_file import TensorInfo

__all__ = ["taken_apart", "together"]

_KEYS = (str, int, float, bool, type(None))


def taken_apart(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """Return `value` as JSON data, with names in place of tensors, which are added to `tensors` under these names.

    Args:
        value: a `TensorInfo` in it stands for a tensor that the caller writes.
        path: prefix of names, also for errors.

    Raises:
        CheckpointError: it holds something other than plain data and tensors.
    """
    if isinstance(value, Tensor):
        tensors[path] = value
        return {"tensor": path}
    if isinstance(value, TensorInfo):
        return {"tensor": value.name}
    if isinstance(value, Mapping):
        odd = next((key for key in value if not isinstance(key, _KEYS)), None)
        if odd is not None:
            raise _refused(f"{path}: a key", odd)
        return {"dict": [[key, taken_apart(item, f"{path}.{key}", tensors)] for key, item in value.items()]}
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [taken_apart(item, f"{path}.{index}", tensors) for index, item in enumerate(value)]}
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": repr(value)}
    if type(value) in _KEYS:
        return value
    raise _refused(path, value)


def _refused(path: str, value: Any) -> CheckpointError:
    return CheckpointError(
        f"{path}: a {type(value).__module__}.{type(value).__qualname__} cannot be saved; expected tensors, numbers, "
        "text, None, and dicts, lists and tuples of them, as state_dict() makes them"
    )


def together(value: Any, tensor: Callable[[str], Any]) -> Any:
    """Inverse of `taken_apart`.

    Args:
        tensor: called with each tensor's name; returns its replacement.

    Raises:
        ValueError: not in the form that `taken_apart` makes.
    """
    if not isinstance(value, dict):
        if type(value) in _KEYS:
            return value
        raise ValueError(f"{value!r:.80} in the place of plain data")
    if len(value) != 1:
        raise ValueError(f"a table with {len(value)} keys; expected one that says what it holds")
    ((kind, items),) = value.items()
    if kind == "tensor" and isinstance(items, str):
        return tensor(items)
    if kind == "float" and items in ("inf", "-inf", "nan"):
        return float(items)
    if kind in ("list", "tuple") and isinstance(items, list):
        made = [together(item, tensor) for item in items]
        return made if kind == "list" else tuple(made)
    if kind == "dict" and isinstance(items, list) and all(isinstance(i, list) and len(i) == 2 for i in items):
        return {key: together(item, tensor) for key, item in items}
    raise ValueError(f"{kind!r} with {items!r:.80}")
