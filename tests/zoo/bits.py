"""What the checks of the zoo compare: outputs bit for bit, generated tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

__all__ = ["NEW_TOKENS", "difference", "generate", "reason_of"]

NEW_TOKENS = 4


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


def difference(expected: Mapping[str, Tensor], got: Mapping[str, Tensor]) -> str:
    """ "" when every tensor is there with the same dtype, shape and bits (NaN payloads and signed zeros included)."""
    if expected.keys() != got.keys():
        return f"outputs differ: {sorted(expected.keys() ^ got.keys())[:3]}"
    for name, a in expected.items():
        b = got[name]
        if a.dtype != b.dtype or a.shape != b.shape:
            return f"{name}: {a.dtype} {tuple(a.shape)} became {b.dtype} {tuple(b.shape)}"
        if not torch.equal(_bits(a), _bits(b)):
            gap = (a.double() - b.double()).abs().max() if a.is_floating_point() else (a != b).sum()
            return f"{name}: not bit-identical, largest difference {float(gap):.3g}"
    return ""


def generate(model: Any, inputs: Mapping[str, Any]) -> Tensor:
    torch.manual_seed(0)
    return model.generate(**inputs, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False)


def reason_of(e: BaseException) -> str:
    lines = str(e).strip().splitlines()
    return f"{type(e).__name__}: {lines[0] if lines else ''}"[:300]
