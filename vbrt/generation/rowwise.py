"""One pass over several tokens that computes each of them as a pass of its own would, bit for bit.

    with one_by_one(model, cache, 1, tokens):
        logits = model(input_ids=ids[:, -tokens:], past_key_values=cache).logits

Sums are what depends on how many tokens there are: kernels and their order of summation are chosen by the shape. So
every operation that sums is run token by token, on what a pass of one token would have given it, and the others, which
compute each number for itself, on all tokens at once:

| operation | token by token |
| --- | --- |
| VB layers | one lease, and the weight is restored once; then the product of each token |
| other products, norms, means, softmax | a mode of torch's functions finds them and runs them on slices |
| attention | the model's own function: one query, the keys up to its token, the mask of a pass of one token |

Compared with passes in lockstep (`layers/lockstep.py`), of which the model sees nothing, this saves the host the Python
of all passes but one. Compared with a pass over all tokens it is exact as long as nothing else sums: whoever uses
it compares it with those first. What it does not know it refuses (`NotByToken`).
"""

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from vbrt.errors import VBError
from vbrt.generation.shadow import layer_ahead
from vbrt.layers.compute import products_by, shared_product

__all__ = ["NotByToken", "one_by_one"]

NAME = "vbrt_one_by_one"

#: sums over the last dimension, or all but the first ones
_SUMS = {
    "linear",
    "mean",
    "sum",
    "var",
    "std",
    "softmax",
    "log_softmax",
    "layer_norm",
    "rms_norm",
    "norm",
    "vector_norm",
}
_PRODUCTS = {"matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "addmm", "baddbmm"}
#: whose results may depend on other tokens, or on how many there are
_OTHERS = {
    "einsum",
    "conv1d",
    "conv2d",
    "scaled_dot_product_attention",
    "multi_head_attention_forward",
    "group_norm",
    "batch_norm",
    "cumsum",
    "cumprod",
    "logsumexp",
    "topk",
    "sort",
    "argsort",
    "scatter_add",
    "scatter_add_",
    "index_add",
    "index_add_",
    "_grouped_mm",
    "grouped_mm",
    "histc",
    "bincount",
}
_WATCHED = _SUMS | _PRODUCTS | _OTHERS
_KNOWN = {"sdpa", "eager"}


class NotByToken(VBError):
    """A pass cannot be computed token by token; the text says why."""


class _Here(threading.local):
    now: "_Pass | None" = None


_here = _Here()
_names: dict[int, str] = {}  # of configs that have ours in the place of their attention


@contextlib.contextmanager
def one_by_one(model: Any, cache: Any, rows: int, tokens: int) -> Iterator[None]:
    """Compute each token of passes in a `with` block as a pass of one token would.

    Args:
        model: of transformers; its attention goes by transformers' interface.
        cache: of the pass, with layers as `shadow.shadow_refusal` wants them.
        rows, tokens: sequences, and tokens of each, in the pass.

    Raises:
        NotByToken: (also in the block) something cannot be computed so.
    """
    _register()
    here = _Pass(cache, tokens)
    before, _here.now = _here.now, here
    try:
        with _attention_of(model), products_by(here), _Sums(rows, tokens):
            yield
    finally:
        _here.now = before


class _Pass:
    """A pass over several tokens.

    Attributes:
        kept: by whether layers have a sliding window: for each token, how many keys a pass of it alone attends to.
    """

    def __init__(self, cache: Any, tokens: int) -> None:
        self.cache, self.tokens = cache, tokens
        length = cache.get_seq_length()
        self.kept = {False: [(length + 1 + token, 0) for token in range(tokens)]}
        for layer in cache.layers:
            if layer.is_sliding not in self.kept:
                ahead = [layer, *(layer_ahead(layer, token) for token in range(1, tokens))]
                self.kept[layer.is_sliding] = [each.get_mask_sizes(1) for each in ahead]

    def slices(self, length: int, *, sliding: bool) -> list[slice]:
        """Return which of `length` keys, the last of them the last token's, each token attends to."""
        ends = [length - self.tokens + 1 + token for token in range(self.tokens)]
        return [slice(end - kept, end) for end, (kept, _) in zip(ends, self.kept[sliding], strict=True)]

    def product(self, handle: Any, kernels: Any, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x Wᵀ + bias for x [B, T, K], a token at a time, on one lease."""
        if x.dim() != 3 or x.shape[1] != self.tokens:
            raise NotByToken(f"{handle.name} gets tokens that are not a dimension of their own")
        with shared_product(handle, kernels, x.device) as product, torch._C.DisableTorchFunction():
            return torch.cat([product(one, bias) for one in _each(x)], 1)


def _each(x: torch.Tensor, place: int = 1) -> list[torch.Tensor]:
    """The tokens of [B, T, ...] as tensors [B, 1, ...] of their own; `place`: the dimension that has them."""
    return [one.contiguous() for one in x.split(1, place)]


class _Sums(TorchFunctionMode):
    """Runs what sums on a token at a time, and refuses what it does not know how to."""

    def __init__(self, rows: int, tokens: int) -> None:
        self.tokens, self._counts = tokens, {tokens, rows * tokens}

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name not in _WATCHED:
            return func(*args, **kwargs)
        if name in _SUMS:
            x = args[0] if args else kwargs.get("input")
            if self._has_tokens(x):
                place = self._place(x, name)
                return torch.cat([func(one, *args[1:], **kwargs) for one in _each(x, place)], place)
        elif name in _PRODUCTS:
            if args[0].shape[-1] != 1 and any(map(self._has_tokens, args)):
                raise NotByToken(f"{name} of two tensors outside of attention")
        elif name in _OTHERS and any(map(self._has_tokens, args)):
            raise NotByToken(name)
        return func(*args, **kwargs)

    def _has_tokens(self, x: Any) -> bool:
        summed = isinstance(x, torch.Tensor) and x.is_floating_point()  # sums of whole numbers are exact
        return summed and not self._counts.isdisjoint(x.shape)

    def _place(self, x: torch.Tensor, name: str) -> int:
        """The dimension that has the tokens: of [B, T, ...], or of heads' [B, H, T, D]."""
        if x.dim() > 2 and x.shape[1] == self.tokens:
            return 1
        if x.dim() == 4 and x.shape[2] == self.tokens:
            return 2
        raise NotByToken(f"{name} of tokens that are not a dimension of their own")


# -- attention --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _attention_of(model: Any) -> Iterator[None]:
    """Have the model's attention computed by `_attention`, with masks by `_masks`."""
    configs = {id(config): config for module in model.modules() if (config := getattr(module, "config", None))}
    held = {key: getattr(config, "_attn_implementation", None) for key, config in configs.items()}
    unknown = {name for name in held.values() if name is not None} - _KNOWN
    if unknown:
        raise NotByToken(f"attention by {', '.join(sorted(unknown))}")
    taken = {key: name for key, name in held.items() if name is not None}
    try:
        for key, name in taken.items():
            _names[key] = name
            configs[key]._attn_implementation_internal = NAME
        yield
    finally:
        for key, name in taken.items():
            configs[key]._attn_implementation_internal = name


def _register() -> None:
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    if NAME not in AttentionInterface._global_mapping:
        AttentionInterface.register(NAME, _attention)
        AttentionMaskInterface.register(NAME, _masks)


class _Masks(list):
    """The mask of each token, as a pass of one token has it."""


def _masks(*args: Any, **kwargs: Any) -> Any:
    """Make masks as transformers does, for each token of the pass."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    here = _here.now
    make = ALL_MASK_ATTENTION_FUNCTIONS[_names[id(kwargs["config"])]]
    if here is None:  # another thread, in a pass of its own
        return make(*args, **kwargs)
    if args or kwargs["q_length"] != here.tokens:
        raise NotByToken(f"a mask of {kwargs.get('q_length')} queries")
    sliding = kwargs.get("local_size") is not None
    if sliding not in here.kept:
        raise NotByToken("a mask for a window that no layer of the cache has")
    masks = _Masks()
    for token, (length, offset) in enumerate(here.kept[sliding]):
        own = {"q_length": 1, "q_offset": kwargs["q_offset"] + token, "kv_length": length, "kv_offset": offset}
        padding = kwargs.get("attention_mask")
        if padding is not None:
            own["attention_mask"] = padding[:, : padding.shape[1] - here.tokens + 1 + token]
        masks.append(make(**{**kwargs, **own}))
    return masks


def _attention(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any) -> Any:
    """Attend as the model would, one query at a time."""
    here, attend = _here.now, _attention_named(_names[id(module.config)], module)
    if here is None:
        return attend(module, query, key, value, attention_mask, **kwargs)
    if type(attention_mask) is not _Masks or query.shape[2] != here.tokens:
        raise NotByToken(f"{type(module).__name__} attends with a mask of its own")
    layer = here.cache.layers[module.layer_idx]
    outputs = []
    with torch._C.DisableTorchFunction():
        for token, held in enumerate(here.slices(key.shape[2], sliding=layer.is_sliding)):
            of_token = query[:, :, token : token + 1], key[:, :, held], value[:, :, held]
            outputs.append(attend(module, *of_token, attention_mask[token], **kwargs)[0])
        return torch.cat(outputs, 1), None


def _attention_named(name: str, module: Any) -> Callable[..., Any]:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    found = ALL_ATTENTION_FUNCTIONS.get(name)
    if found is None:  # of the file that has the model
        found = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    if found is None:
        raise NotByToken(f"{type(module).__name__} has no attention function")
    return found
