"""Drafters of one `generate` call, by name, and transformers' own arguments for them.

`assistant_model=` (with `tokenizer=` and `assistant_tokenizer=` if the tokenizers differ) and
`prompt_lookup_num_tokens=` name the drafters "assistant" and "ngrams". transformers' own loop for them computes several
tokens in one pass, which rounds differently from plain decoding.
"""

import copy
import weakref
from collections.abc import Callable, Collection, Mapping
from typing import Any

from vbrt.errors import ArgumentError
from vbrt.generation.speculation.assistant import Assistant, Translated, assistant_refusal, translated_refusal
from vbrt.generation.speculation.drafters import DRAFTERS, Drafter, Ngrams
from vbrt.generation.speculation.heads import heads_for
from vbrt.model.attachment import attached_to

__all__ = ["AUTO", "checked_names", "drafters_for", "named_by", "split_arguments"]

AUTO = "auto"
_ASSISTANT = "assistant_model"
_LOOKUP = "prompt_lookup_num_tokens"
_LONGEST = "max_matching_ngram_size"
#: transformers' arguments of `generate` that drafters take over; `tokenizer` stays, for stop strings
_OURS = (_ASSISTANT, "assistant_tokenizer", _LOOKUP, _LONGEST)


def checked_names(drafter: Any) -> tuple[str, ...]:
    """Return the drafters that `generate(drafter=...)` names, all for "auto". Raises ArgumentError."""
    if drafter == AUTO:
        return DRAFTERS
    names = (drafter,) if isinstance(drafter, str) else drafter
    if not isinstance(names, tuple) or not names or not all(name in DRAFTERS for name in names):
        raise ArgumentError(
            f'generate: drafter = {drafter!r}; expected "auto", or one or a tuple of {", ".join(DRAFTERS)}'
        )
    return tuple(dict.fromkeys(names))


def named_by(kwargs: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the drafters that transformers' own arguments of `generate` ask for."""
    found = (("ngrams", _asked(kwargs, _LOOKUP)), ("assistant", kwargs.get(_ASSISTANT)))
    return tuple(name for name, value in found if value is not None)


def _asked(kwargs: Mapping[str, Any], name: str) -> Any:
    given = kwargs.get(name)
    return getattr(kwargs.get("generation_config"), name, None) if given is None else given


def split_arguments(kwargs: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split the arguments of `generate` into those for drafters, with a copy of `tokenizer`, and the others."""
    rest = {name: value for name, value in kwargs.items() if name not in _OURS}
    ours = {name: value for name in (*_OURS, "tokenizer") if (value := _asked(kwargs, name)) is not None}
    config = rest.get("generation_config")
    if any(getattr(config, name, None) is not None for name in (_LOOKUP, _LONGEST)):
        rest["generation_config"] = copied = copy.deepcopy(config)
        for name in (_LOOKUP, _LONGEST):
            setattr(copied, name, None)
    return ours, rest


def drafters_for(
    names: Collection[str], model: Any, config: Any, kwargs: Mapping[str, Any]
) -> tuple[list[Drafter], str]:
    """Make the drafters of a call, of those named; "coarse", which has no state of its own, is the draft loop's.

    Args:
        model: the target; "heads" needs its attachment.
        config: generation config of the call, as transformers has prepared it.
        kwargs: `input_ids` [B, L], `attention_mask` or None, `load`: read a multi-token head from the checkpoint if
            the model has none yet; and what `split_arguments` found.

    Returns:
        The drafters, to be closed after the call, and why one that was named cannot be; "" if all can.
    """
    found, reasons = [], []
    for name, make in _MAKERS.items():
        made = make(model, config, kwargs) if name in names else None
        if isinstance(made, str):
            reasons.append(made)
        elif made is not None:
            found.append(made)
    return found, "; ".join(reasons)


def _ngrams(model: Any, config: Any, kwargs: Mapping[str, Any]) -> Drafter:
    longest = {} if kwargs.get(_LONGEST) is None else {"longest": kwargs[_LONGEST]}
    return Ngrams(kwargs.get("attention_mask"), _ids(config.eos_token_id), **longest)


def _ids(given: Any) -> frozenset[int]:
    """Return the token ids in a config's attribute: None, a number, a list or a tensor."""
    given = given.tolist() if hasattr(given, "tolist") else given
    return frozenset(() if given is None else [given] if isinstance(given, int) else given)


def _assistant(model: Any, config: Any, kwargs: Mapping[str, Any]) -> Drafter | str | None:
    """Make the drafter of `assistant_model`; None without that argument, or why it cannot be."""
    small = kwargs.get(_ASSISTANT)
    if small is None:
        return None
    attachment = attached_to(small)
    small = small if attachment is None else attachment.model  # a wrapper's type has no forward of the model
    ids, mask = kwargs["input_ids"], kwargs.get("attention_mask")
    if not ids.shape[1] or (mask is not None and mask.shape[1] > ids.shape[1]):
        return "the prompt is in embeddings or in a cache, which an assistant cannot read"
    tokenizers = kwargs.get("tokenizer"), kwargs.get("assistant_tokenizer")
    differ = None not in tokenizers and not _same_vocabulary(*tokenizers)
    refusal = translated_refusal(small, len(ids)) if differ else assistant_refusal(small, ids.shape[1])
    if refusal:
        return refusal
    if differ:
        return Translated(small, tokenizers, limit=config.max_length)
    sizes = [each.config.get_text_config().vocab_size for each in (model, small)]
    if None in tokenizers and sizes[0] != sizes[1]:
        return (
            f"the assistant {type(small).__name__} has another vocabulary ({sizes[1]} tokens; the model {sizes[0]}); "
            "tokenizer= and assistant_tokenizer= translate, or show that only the padding differs"
        )
    return Assistant(small, mask, limit=config.max_length, vocabulary=sizes[0])


def _heads(model: Any, config: Any, kwargs: Mapping[str, Any]) -> Drafter | str | None:
    """Make the drafter of the model's multi-token head; None if it has none, and none is asked for."""
    attachment, load = attached_to(model), kwargs.get("load", False)
    if attachment is None or (attachment.head is None and not load):
        part = f"{type(model).__name__} is a part of the wrapped model, and a multi-token head drafts for the whole"
        return part if load else None
    return heads_for(attachment, kwargs["input_ids"], kwargs.get("attention_mask"), load=load)


_MAKERS: dict[str, Callable[..., Drafter | str | None]] = {"ngrams": _ngrams, "assistant": _assistant, "heads": _heads}

_compared: "weakref.WeakKeyDictionary[Any, weakref.WeakKeyDictionary[Any, bool]]" = weakref.WeakKeyDictionary()


def _same_vocabulary(one: Any, other: Any) -> bool:
    """True if two tokenizers have the same tokens under the same ids; remembered: 100,000 tokens take 50 ms."""
    if one is other:
        return True
    known = _compared.setdefault(one, weakref.WeakKeyDictionary())
    if other not in known:
        known[other] = one.get_vocab() == other.get_vocab()
    return known[other]
