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
| attention | the model's own function: one query, the keys and the mask that a pass of one token would have |

Where one launch for all tokens gives the bits of a launch for each, it takes their place (`bitwise_equivalence.py`).

Compared with passes in lockstep (`layers/weights/lockstep.py`), of which the model sees nothing, this saves the host
the Python of all passes but one. Compared with a pass over all tokens it is exact as long as nothing else sums: whoever
uses it compares it with those first. What it does not know it refuses (`NotByToken`).
"""

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from vbrt.errors import VBError
from vbrt.generation.fusion.deterministic_attention import steady_attention
from vbrt.generation.speculation.bitwise_equivalence import first_that_agrees, form_of
from vbrt.generation.speculation.cache_view import layer_ahead
from vbrt.generation.static.static_cache import Statics
from vbrt.host.host_memory import storage_of
from vbrt.layers.weights.linear_product import products_by, shared_product
from vbrt.libraries import transformers_api
from vbrt.libraries.torch_api import DisableTorchFunction
from vbrt.libraries.transformers_api import ROWS, attention_of, set_attention

__all__ = ["NotByToken", "masks_windows", "one_by_one"]

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
    asked: set[bool] | None = None  # whether masks that were asked for have a window


_here = _Here()
_names: dict[int, str] = {}  # of configs that have ours in the place of their attention


@contextlib.contextmanager
def one_by_one(model: Any, cache: Any, shape: tuple[int, int], statics: Statics | None = None) -> Iterator[None]:
    """Compute each token of passes in a `with` block as a pass of one token would.

    Args:
        model: of transformers; its attention goes by transformers' interface.
        cache: of the pass, with layers as `shadow.shadow_refusal` wants them.
        shape: sequences, and tokens of each, in the pass.
        statics: where the cache lies, to compute what recorded steps compute: these attend to a block of it, masked.
            None: what eager steps compute.

    Raises:
        NotByToken: (also in the block) something cannot be computed so.
    """
    _register()
    here = _Pass(cache, shape[1], statics)
    before, _here.now = _here.now, here
    try:
        attention = steady_attention(wanted=statics is not None and statics.steady)
        with _attention_of(model), products_by(here), attention, _Sums(*shape):
            yield
    finally:
        _here.now = before


def masks_windows(model: Any, token: torch.Tensor) -> bool:
    """True if a model masks what lies before a window, False if it leaves it to its cache to forget that.

    token: [1, 1], for a pass that has no cache. Attention that is none of torch's is told the window, and masks it.
    """
    _register()
    _here.asked = asked = set()
    try:
        with _attention_of(model):
            model(input_ids=token, use_cache=False)
    except NotByToken:
        return True
    finally:
        _here.asked = None
    return True in asked


class _Pass:
    """A pass over several tokens.

    Attributes:
        kept: by whether layers have a sliding window: for each token, how many keys a pass of it alone attends to.
        attending: True while attention runs, whose own sums are left to it.
    """

    def __init__(self, cache: Any, tokens: int, statics: Statics | None) -> None:
        self.cache, self.tokens, self.statics, self.attending = cache, tokens, statics, False
        self.kept: dict[bool, list[tuple[int, int]]] = {}
        if statics is None:
            self._see_keys()

    def _see_keys(self) -> None:
        cache, tokens = self.cache, self.tokens
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

    def block(self, *, sliding: bool) -> tuple[int, int]:
        """Return how many places recorded steps attend to, and the position of the first."""
        for layer in self.cache.layers:
            if layer.is_sliding is sliding:
                return self.statics.span.end - layer.first, layer.first
        raise NotByToken("a mask for a window that no layer of the cache has")

    def product(self, handle: Any, kernels: Any, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x Wᵀ + bias for x [B, T, K], a token at a time, on one lease."""
        if x.dim() != 3 or x.shape[1] != self.tokens:
            raise NotByToken(f"{handle.name} gets tokens that are not a dimension of their own")
        with DisableTorchFunction(), shared_product(handle, kernels, x.device) as product:
            ways = [functools.partial(product, x, bias)]
            form = "linear", form_of(x), form_of(product.weight), form_of(bias), kernels.precision
            return first_that_agrees(form, ways, functools.partial(_cat_by_token, product, (x, bias), {}))


def _cat_by_token(func: Callable, args: tuple, kwargs: dict, place: int = 1) -> torch.Tensor:
    """Call a function with each token of its first argument."""
    return torch.cat([func(one, *args[1:], **kwargs) for one in _each(args[0], place)], place)


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
        if name not in _WATCHED or (_here.now is not None and _here.now.attending):
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
        """A sum of each token, in one launch where that gives the same bits."""
        if not args:
            raise NotByToken(f"{func.__name__} of an argument by name")
        place = self._place(args[0], func.__name__)
        form = func.__name__, place, *map(form_of, args), *((name, form_of(kwargs[name])) for name in sorted(kwargs))
        ways = [functools.partial(func, *args, **kwargs)]
        return first_that_agrees(form, ways, functools.partial(_cat_by_token, func, args, kwargs, place))

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
    held = {key: attention_of(config) for key, config in configs.items()}
    unknown = {name for name in held.values() if name is not None} - _KNOWN
    if unknown:
        raise NotByToken(f"attention by {', '.join(sorted(unknown))}")
    taken = {key: name for key, name in held.items() if name is not None}
    try:
        for key, name in taken.items():
            _names[key] = name
            set_attention(configs[key], NAME)
        yield
    finally:
        for key, name in taken.items():
            set_attention(configs[key], name)


def _register() -> None:
    if missing := ROWS.refusal():
        raise NotByToken(missing)
    if NAME not in transformers_api.AttentionInterface._global_mapping:
        transformers_api.AttentionInterface.register(NAME, _attention)
        transformers_api.AttentionMaskInterface.register(NAME, _masks)


class _Masks(list):
    """The mask of each token, as a pass of one token has it.

    Attributes:
        added: as numbers to add to the scores.
        whole: of all tokens, where these attend to one block.
    """

    added: Sequence[torch.Tensor] = ()
    whole: torch.Tensor | None = None


def _masks(*args: Any, **kwargs: Any) -> Any:
    """Make masks as transformers does, for each token of the pass."""
    here = _here.now
    make = transformers_api.ALL_MASK_ATTENTION_FUNCTIONS[_names[id(kwargs["config"])]]
    if _here.asked is not None:
        _here.asked.add(kwargs.get("local_size") is not None)
    if here is None:  # another thread, in a pass of its own
        return make(*args, **kwargs)
    if args or kwargs["q_length"] != here.tokens:
        raise NotByToken(f"a mask of {kwargs.get('q_length')} queries")
    sliding = kwargs.get("local_size") is not None
    if here.statics is not None:
        return _masks_of_block(make, here, kwargs, sliding=sliding)
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


def _masks_of_block(make: Callable[..., Any], here: _Pass, kwargs: dict[str, Any], *, sliding: bool) -> _Masks:
    """Make masks as recorded steps have them: of all places of a block."""
    size, first = here.block(sliding=sliding)
    own = {"kv_length": size, "kv_offset": first, "allow_is_causal_skip": False}
    padding = kwargs.get("attention_mask")
    if padding is not None:
        own["attention_mask"] = torch.nn.functional.pad(padding, (0, first + size - padding.shape[1]))
    whole = make(**{**kwargs, **own})
    masks = _Masks(_each(whole, 2))
    masks.whole = whole
    masks.added = masks if whole.dtype is not torch.bool else _each(_as_numbers(whole, kwargs["dtype"]), 2)
    return masks


def _as_numbers(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -torch.inf)


def _attention(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any) -> Any:
    """Attend as the model would, one query at a time."""
    here, attend = _here.now, _attention_named(_names[id(module.config)], module)
    if here is None:
        return attend(module, query, key, value, attention_mask, **kwargs)
    if type(attention_mask) is not _Masks or query.shape[2] != here.tokens:
        raise NotByToken(f"{type(module).__name__} attends with a mask of its own")
    layer = here.cache.layers[module.layer_idx]
    if here.statics is not None and here.statics.steady:
        return _steadily(here, attend, module, (query, _block_of(layer, key), attention_mask), kwargs), None
    with DisableTorchFunction():
        if here.statics is None:
            pairs, ways = _keys_until(here, layer, key, value), []
        else:
            block = _block_of(layer, key)
            pairs = [block] * here.tokens
            ways = [functools.partial(_over_one_block, attend, module, query, block, attention_mask, kwargs)]
        form = "attention", type(module), form_of(query), form_of(pairs[0][0]), form_of(attention_mask[0])
        return first_that_agrees(
            form, ways, functools.partial(_by_query, attend, module, query, pairs, attention_mask, kwargs)
        ), None


def _steadily(here: _Pass, attend: Callable, module: Any, given: tuple, kwargs: dict) -> torch.Tensor:
    """All queries at once, each summed by itself, where the kernel takes them; else one after the other."""
    query, block, masks = given
    form = "steady", type(module), form_of(query), form_of(block[0]), form_of(masks.whole)
    here.attending = True
    try:
        ways = [lambda: attend(module, query, *block, masks.whole, **kwargs)[0]]
        by_query = functools.partial(_by_query, attend, module, query, [block] * here.tokens, masks, kwargs)
        return first_that_agrees(form, ways, by_query)
    finally:
        here.attending = False


def _by_query(
    attend: Callable, module: Any, query: torch.Tensor, pairs: Sequence[tuple], masks: Sequence[Any], kwargs: dict
) -> torch.Tensor:
    queries = _each(query, 2)
    return torch.cat(
        [attend(module, q, *pair, mask, **kwargs)[0] for q, pair, mask in zip(queries, pairs, masks, strict=True)], 1
    )


def _over_one_block(
    attend: Callable, module: Any, query: torch.Tensor, block: tuple, masks: "_Masks", kwargs: dict
) -> torch.Tensor:
    """`_by_query` with keys and values repeated for the heads, and masks made numbers, once instead of each time."""
    groups = query.shape[1] // block[0].shape[1]
    if groups > 1:
        block = tuple(of.repeat_interleave(groups, 1) for of in block)
        module = _Repeated(module)
    return _by_query(attend, module, query, [block] * len(masks), masks.added, kwargs)


class _Repeated:
    """An attention module whose keys are there for each head of the queries."""

    num_key_value_groups = 1

    def __init__(self, module: Any) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _keys_until(here: _Pass, layer: Any, key: Any, value: Any) -> list[tuple[Any, Any]]:
    """The keys and values that each token attends to, up to its own."""
    slices = here.slices(key.shape[2], sliding=layer.is_sliding)
    return [(key[:, :, held], value[:, :, held]) for held in slices]


def _block_of(layer: Any, key: Any) -> tuple[Any, Any]:
    """The keys and values that each token attends to as a recorded step does."""
    block = layer.block()
    if storage_of(key) != storage_of(block[0]):
        raise NotByToken(f"{type(layer).__name__}: the model attends to other keys than its cache holds")
    return block


def _attention_named(name: str, module: Any) -> Callable[..., Any]:
    found = transformers_api.ALL_ATTENTION_FUNCTIONS.get(name)
    if found is None:  # of the file that has the model
        found = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    if found is None:
        raise NotByToken(f"{type(module).__name__} has no attention function")
    return found
