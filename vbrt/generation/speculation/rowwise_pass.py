"""Row-wise pass: several tokens in one pass, each bitwise equal to a pass of that token alone.

    with one_by_one(model, cache, (1, tokens)):
        logits = model(input_ids=ids[:, -tokens:], past_key_values=cache).logits

Only reductions depend on the number of tokens: shapes choose kernels and summation order. So every operation that
reduces runs token by token, on the inputs of a single-token pass, and elementwise operations run on all tokens at once:

| operation | token by token |
| --- | --- |
| VB layers | one lease and one decode of the weight, then a product per token |
| other products, norms, means, softmax | intercepted by a torch function mode, and run on slices |
| attention | the model's own function: one query, with the keys and mask of a single-token pass |

Where one launch for all tokens gives the same bits, it is used instead (`bitwise_equivalence.py`).

Weights are read once for all tokens. The pass is exact only if nothing else reduces, so callers compare it with
single-token passes first. Unsupported operations are refused (`NotByToken`).
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from vbrt.generation.speculation.bitwise_equivalence import first_that_agrees, form_of
from vbrt.layers.weights.linear_product import products_by, shared_product
from vbrt.libraries.torch_api import DisableTorchFunction
from vbrt.libraries.transformers_attention import NotRouted, Route

__all__ = ["NotByToken", "masks_windows", "one_by_one"]

NAME = "vbrt_one_by_one"

#: reductions over the last dimension, or over all but the first ones
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
#: results may depend on other tokens, or on their number
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


class NotByToken(NotRouted):
    """A pass cannot be computed row-wise; the message gives the reason."""


class _Here(threading.local):
    now: "_Pass | None" = None
    asked: set[bool] | None = None  # windowed or not, of the masks that were requested


_here = _Here()


@contextlib.contextmanager
def one_by_one(model: Any, cache: Any, shape: tuple[int, int]) -> Iterator[None]:
    """Compute each token of passes in a `with` block like a single-token pass.

    Args:
        model: of transformers, with attention through its AttentionInterface.
        cache: of the pass; layers as `cache_refusals.cache_refusal` accepts.
        shape: (sequences, tokens per sequence) of the pass.

    Raises:
        NotByToken: (also in the block) an operation is not supported.
        NotRouted: nor is the model's attention.
    """
    here = _Pass(cache, shape[1])
    before, _here.now = _here.now, here
    try:
        with _ROUTE.of(model), products_by(here), _Sums(*shape):
            yield
    finally:
        _here.now = before


def masks_windows(model: Any, token: torch.Tensor) -> bool:
    """True if a model masks tokens before a sliding window, False if it relies on its cache to drop them.

    token: [1, 1], for a pass without a cache. Attention outside of torch's is passed the window, and masks it.
    """
    _here.asked = asked = set()
    try:
        with _ROUTE.of(model):
            model(input_ids=token, use_cache=False)
    except NotRouted:
        return True
    finally:
        _here.asked = None
    return True in asked


class _Pass:
    """A pass over several tokens.

    Attributes:
        kept: sliding or not -> per token, (key count, offset) of a single-token pass.
    """

    def __init__(self, cache: Any, tokens: int) -> None:
        self.cache, self.tokens = cache, tokens
        length = cache.get_seq_length()
        self.kept = {False: [(length + 1 + token, 0) for token in range(tokens)]}
        for layer in cache.layers:
            if layer.is_sliding:
                self.kept[True] = [_keys_in_window(layer, token) for token in range(tokens)]
                break

    def slices(self, length: int, *, sliding: bool) -> list[slice]:
        """Return, per token, its slice of `length` keys, the last of which are the pass's own."""
        ends = [length - self.tokens + 1 + token for token in range(self.tokens)]
        return [slice(end - kept, end) for end, (kept, _) in zip(ends, self.kept[sliding], strict=True)]

    def product(self, handle: Any, kernels: Any, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x Wᵀ + bias for x [B, T, K], token by token under one lease."""
        if x.dim() != 3 or x.shape[1] != self.tokens:
            raise NotByToken(f"{handle.name} gets x without a token dimension")
        if handle.held.hosts:
            with DisableTorchFunction():
                ys = handle.held.compute_rows(handle, _each(x), bias)
                if ys is not None:
                    return torch.cat(ys, 1)
        with DisableTorchFunction(), shared_product(handle, kernels, x.device) as product:
            ways = [functools.partial(product, x, bias)]
            form = "linear", form_of(x), form_of(product.weight), form_of(bias), kernels.precision
            return first_that_agrees(form, ways, functools.partial(_cat_by_token, product, (x, bias), {}))


def _keys_in_window(layer: Any, ahead: int) -> tuple[int, int]:
    """`get_mask_sizes(1)` of a sliding layer that holds `ahead` tokens more: key count and offset."""
    length = layer.get_seq_length() + ahead
    past = min(length, layer.sliding_window - 1)
    return past + 1, length - past


def _cat_by_token(func: Callable, args: tuple, kwargs: dict, place: int = 1) -> torch.Tensor:
    """Call a function on each token of its first argument, and concatenate."""
    return torch.cat([func(one, *args[1:], **kwargs) for one in _each(args[0], place)], place)


def _each(x: torch.Tensor, place: int = 1) -> list[torch.Tensor]:
    """Split [B, T, ...] into contiguous tensors [B, 1, ...]; `place`: the token dimension."""
    return [one.contiguous() for one in x.split(1, place)]


class _Sums(TorchFunctionMode):
    """Runs reductions token by token, and refuses unsupported ones."""

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
                return self._summed(func, args, kwargs)
        elif name in _PRODUCTS:
            if args[0].shape[-1] != 1 and any(map(self._has_tokens, args)):
                raise NotByToken(f"{name} of two tensors outside of attention")
        elif name in _OTHERS and any(map(self._has_tokens, args)):
            raise NotByToken(name)
        return func(*args, **kwargs)

    def _summed(self, func: Callable, args: tuple, kwargs: dict) -> torch.Tensor:
        """A reduction per token, in one launch if that is bitwise equal."""
        if not args:
            raise NotByToken(f"{func.__name__} of a keyword argument")
        place = self._place(args[0], func.__name__)
        form = func.__name__, place, *map(form_of, args), *((name, form_of(kwargs[name])) for name in sorted(kwargs))
        ways = [functools.partial(func, *args, **kwargs)]
        return first_that_agrees(form, ways, functools.partial(_cat_by_token, func, args, kwargs, place))

    def _has_tokens(self, x: Any) -> bool:
        summed = isinstance(x, torch.Tensor) and x.is_floating_point()  # integer sums are exact in any order
        return summed and not self._counts.isdisjoint(x.shape)

    def _place(self, x: torch.Tensor, name: str) -> int:
        """Return the token dimension of [B, T, ...], or of heads [B, H, T, D]."""
        if x.dim() > 2 and x.shape[1] == self.tokens:
            return 1
        if x.dim() == 4 and x.shape[2] == self.tokens:
            return 2
        raise NotByToken(f"{name} of a tensor without a token dimension")


# -- attention --------------------------------------------------------------------------------------------------------


class _Masks(list):
    """One mask per token, as in single-token passes."""


def _masks(*args: Any, **kwargs: Any) -> Any:
    """Make transformers' masks for each token of the pass."""
    here = _here.now
    make = _ROUTE.own_masks(kwargs["config"])
    if _here.asked is not None:
        _here.asked.add(kwargs.get("local_size") is not None)
    if here is None:  # another thread's pass
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
    """The model's attention, one query at a time."""
    here, attend = _here.now, _ROUTE.own_attention(module)
    if here is None:
        return attend(module, query, key, value, attention_mask, **kwargs)
    if type(attention_mask) is not _Masks or query.shape[2] != here.tokens:
        raise NotByToken(f"{type(module).__name__} makes its own attention mask")
    layer = here.cache.layers[module.layer_idx]
    with DisableTorchFunction():
        slices = here.slices(key.shape[2], sliding=layer.is_sliding)
        # laid out as in a pass over one token: cuDNN plans each layout of a length anew
        rows = zip(_each(query, 2), slices, attention_mask, strict=True)
        found = [
            attend(module, q, key[:, :, at].contiguous(), value[:, :, at].contiguous(), mask, **kwargs)[0]
            for q, at, mask in rows
        ]
        return torch.cat(found, 1), None


_ROUTE = Route(NAME, _attention, _masks)
