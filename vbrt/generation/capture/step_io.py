"""Flattening of a decode step: a forward's arguments and results as lists of tensors, and back."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from vbrt.generation.static.cache_kinds import NotRecordable
from vbrt.libraries.torch_api import TreeSpec, tree_flatten, tree_unflatten

__all__ = ["Call", "Results", "cache_in", "ids_in", "new_tokens", "take_apart"]

_MASKS = ("decoder_attention_mask", "attention_mask")
_IDS = ("decoder_input_ids", "input_ids", "inputs_embeds", "decoder_inputs_embeds")
_CONSTANTS = (bool, int, float, str, type(None), torch.dtype, torch.device)


def cache_in(kwargs: Mapping[str, Any]) -> tuple[str, Any] | None:
    """Return name and value of the argument that is a transformers Cache; None if there is none."""
    from transformers import Cache

    return next(((name, value) for name, value in kwargs.items() if isinstance(value, Cache)), None)


def new_tokens(kwargs: Mapping[str, Any]) -> int:
    """Return the number of new tokens per sequence; 0 if unknown."""
    ids = ids_in(kwargs)
    return 0 if ids is None else ids.shape[1] if ids.ndim > 1 else 1


def ids_in(kwargs: Mapping[str, Any]) -> Tensor | None:
    """Return the new token ids [B, T], or their embeddings [B, T, D]; None if there are none."""
    return next((kwargs[name] for name in _IDS if isinstance(kwargs.get(name), Tensor)), None)


@dataclass(slots=True)
class Call:
    """Flattened arguments of a step.

    Attributes:
        cache_name, cache: the cache argument.
        length: tokens before the step; None if neither the cache nor a mask tells.
        mask_name, mask: the mask argument with a column per token, int or bool [B, length + 1]; None without one.
        tensors: all other tensors, in order.
        form: signature: steps of the same kind, names, shapes, dtypes and constants share a capture.
    """

    cache_name: str
    cache: Any
    length: int | None
    mask_name: str | None
    mask: Tensor | None
    tensors: list[Tensor]
    versions: list[float]
    form: tuple
    _spec: TreeSpec
    _leaves: list[Any]
    _kwargs: Mapping[str, Any]
    _places: Mapping[str, int]

    def inputs(self, end: int) -> list[Tensor]:
        """Return static inputs: copies of the tensors, the mask first, widened to `end` columns."""
        made = [tensor.clone(memory_format=torch.contiguous_format) for tensor in self.tensors]
        if self.mask is None:
            return made
        wide = torch.zeros((self.mask.shape[0], end), dtype=self.mask.dtype, device=self.mask.device)
        wide[:, : self.mask.shape[1]] = self.mask
        return [wide, *made]

    def load(self, inputs: Sequence[Tensor], before: "Call | None") -> None:
        """Copy the tensors into the static inputs; skip those unchanged since `before` (same object, same version)."""
        fixed = list(inputs)
        if self.mask is not None:
            self._load_mask(fixed.pop(0), before)
        changed = [
            place
            for place, now in enumerate(self.tensors)
            if before is None or before.tensors[place] is not now or _version(now) != before.versions[place]
        ]
        if changed:  # one launch per dtype
            torch._foreach_copy_([fixed[place] for place in changed], [self.tensors[place] for place in changed])

    def _load_mask(self, fixed: Tensor, before: "Call | None") -> None:
        columns = self.mask.shape[1]
        fixed[:, :columns].copy_(self.mask)
        if before is None or before.mask.shape[1] > columns:
            fixed[:, columns:].zero_()

    def next(self, kwargs: Mapping[str, Any], length: int | None) -> "Call | None":
        """Return a later step's call; None if anything besides contents of tensors has changed."""
        if len(kwargs) != len(self._kwargs):
            return None
        tensors = list(self.tensors)
        for name, value in kwargs.items():
            was = self._kwargs.get(name, kwargs)
            if value is was or name == self.mask_name:
                continue
            place = self._places.get(name)
            if place is None:
                if type(value) is not type(was) or type(value) not in _CONSTANTS or value != was:
                    return None
            elif not _alike(value, tensors[place]):
                return None
            else:
                tensors[place] = value
        mask = self._next_mask(kwargs)
        if mask is not None and length is None:
            length = mask.shape[1] - 1
        if mask is not None and (mask.shape[1] != length + 1 or mask.dtype is not self.mask.dtype):
            return None
        return replace(
            self, length=length, mask=mask, tensors=tensors, versions=list(map(_version, tensors)), _kwargs=kwargs
        )

    def _next_mask(self, kwargs: Mapping[str, Any]) -> Tensor | None:
        if self.mask is None or self.mask_name in kwargs:
            return kwargs.get(self.mask_name) if self.mask is not None else None
        return torch.nn.functional.pad(self.mask, (0, 1), value=1)  # the forward makes its own mask: extend ours

    def kwargs(self, inputs: Sequence[Tensor]) -> dict[str, Any]:
        """Return the forward's arguments with `inputs` in place of its tensors, in order."""
        rest = iter(inputs)
        masked = {} if self.mask_name is None else {self.mask_name: next(rest)}
        leaves = [next(rest) if isinstance(leaf, Tensor) else leaf for leaf in self._leaves]
        return {**tree_unflatten(leaves, self._spec), **masked, self.cache_name: self.cache}

    def given(self) -> list[Tensor]:
        """Return the caller's tensors, in the order of `inputs`."""
        return self.tensors if self.mask is None else [self.mask, *self.tensors]


def take_apart(
    kwargs: Mapping[str, Any], cache_name: str, length: int | None, *, kind: object, masks: bool = False
) -> Call:
    """Flatten the arguments of a step.

    Args:
        kind: of the step: phase and precision.
        length: tokens in the cache; None if its layers do not count.
        masks: the forward takes a mask of the decoder's tokens, and makes one of the length if it gets none.

    Raises:
        NotRecordable: an argument is neither a tensor nor a constant; the message gives its type.
    """
    rest = {name: value for name, value in kwargs.items() if name != cache_name}
    if masks and length is not None and rest.get(_MASKS[0]) is None:
        ids = next(rest[name] for name in _IDS if isinstance(rest.get(name), Tensor))
        rest[_MASKS[0]] = torch.ones((ids.shape[0], length + 1), dtype=torch.int64, device=ids.device)
    mask_name = _growing_mask(rest, length)
    mask = None if mask_name is None else rest.pop(mask_name)
    if mask is not None and length is None:
        length = mask.shape[1] - 1
    leaves, spec = tree_flatten(rest)
    for leaf in leaves:
        if not isinstance(leaf, (Tensor, *_CONSTANTS)):
            raise NotRecordable(f"an argument of the forward is {type(leaf).__name__}")
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    of_mask = None if mask is None else (mask.dtype, mask.device, mask.shape[0])
    form = (kind, spec, cache_name, mask_name, of_mask, tuple(map(_form, leaves)))
    versions = list(map(_version, tensors))
    at = {id(tensor): place for place, tensor in enumerate(tensors)}
    places = {name: at[id(value)] for name, value in rest.items() if isinstance(value, Tensor)}
    return Call(
        cache_name, kwargs[cache_name], length, mask_name, mask, tensors, versions, form, spec, leaves, kwargs, places
    )


def _growing_mask(kwargs: Mapping[str, Any], length: int | None) -> str | None:
    """Return the name of the mask over all tokens: the decoder's in an encoder-decoder model."""
    paired = "encoder_outputs" in kwargs or "decoder_input_ids" in kwargs
    name = _MASKS[0] if paired else _MASKS[1]
    mask = kwargs.get(name)
    if not isinstance(mask, Tensor):
        return None
    if mask.ndim != 2:
        raise NotRecordable(f"{name} has {mask.ndim} dimensions")
    return name if length is None or mask.shape[1] == length + 1 else None


def _alike(tensor: Any, other: Tensor) -> bool:
    return (
        isinstance(tensor, Tensor)
        and tensor.shape == other.shape
        and tensor.dtype is other.dtype
        and tensor.device == other.device
    )


def _version(tensor: Tensor) -> float:
    """Return a tensor's version counter; NaN, which equals nothing, for inference tensors, which have none."""
    return math.nan if tensor.is_inference() else tensor._version


def _form(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return type(leaf), leaf
    return leaf.dtype, leaf.device, tuple(leaf.shape)


class Results:
    """Flattened results of a captured step: static tensors, and the structure to return copies in.

    Args:
        hidden: [B, 1, D], a result beside the forward's own: the decoder's last hidden state.
    """

    def __init__(self, out: Any, cache: Any, hidden: Tensor | None = None) -> None:
        self._hidden = hidden
        self._leaves, self._spec = tree_flatten(out, is_leaf=lambda item: item is cache)
        self._cache = next((place for place, leaf in enumerate(self._leaves) if leaf is cache), None)
        self._places = [place for place, leaf in enumerate(self._leaves) if isinstance(leaf, Tensor)]
        for leaf in self._leaves:
            if leaf is not cache and not isinstance(leaf, (Tensor, *_CONSTANTS)):
                raise NotRecordable(f"the forward returns {type(leaf).__name__}")

    @property
    def tensors(self) -> list[Tensor]:
        """Result tensors, in order, the hidden state last."""
        hidden = [] if self._hidden is None else [self._hidden]
        return [*(self._leaves[place] for place in self._places), *hidden]

    def put(self, tensors: Sequence[Tensor]) -> None:
        """Replace the result tensors by those of the fused step."""
        if self._hidden is not None:
            *tensors, self._hidden = tensors
        for place, tensor in zip(self._places, tensors, strict=True):
            self._leaves[place] = tensor

    def hidden(self, rows: Sequence[Sequence[Tensor]]) -> Tensor | None:
        """Return a copy of the hidden states [B, T, D] in the tensors of T rows; None if the step has none."""
        return None if self._hidden is None else torch.cat([tensors[-1] for tensors in rows], dim=1)

    def drop_cache(self) -> None:
        """Drop the reference to the cache that was used at capture."""
        if self._cache is not None:
            self._leaves[self._cache] = None

    def copied(self, call: Call, inputs: Sequence[Tensor], tensors: Sequence[Tensor] | None = None) -> Any:
        """Return a result in the forward's structure: copies, but inputs passed through are the caller's tensors.

        tensors: the static results, `self.tensors` if not given.
        """
        own = {id(fixed): given for fixed, given in zip(inputs, call.given(), strict=True)}
        leaves = list(self._leaves)
        tensors = self.tensors if tensors is None else tensors
        for place, tensor in zip(self._places, tensors[: len(self._places)], strict=True):
            leaves[place] = own[id(tensor)] if id(tensor) in own else tensor.clone()
        if self._cache is not None:
            leaves[self._cache] = call.cache
        return tree_unflatten(leaves, self._spec)
