"""`generate` of a wrapped transformers model with self-speculation, or with seeded sampling."""

import contextlib
import copy
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

import torch

from vbrt.errors import ArgumentError
from vbrt.generation.speculation.call_drafters import AUTO, checked_names, drafters_for, named_by, split_arguments
from vbrt.generation.speculation.coarse_drafts import CoarsePlanes
from vbrt.generation.speculation.draft_length import MOST, Pace
from vbrt.generation.speculation.draft_loop import EXACTNESS, speculate
from vbrt.generation.speculation.drafters import Drafter
from vbrt.generation.speculation.pass_states import PassStates, hidden_states_fed
from vbrt.generation.speculation.sampling_noise import Noise, greedy
from vbrt.generation.speculation.sequences import Sequences
from vbrt.generation.speculation.verification import DECODED_PLAINLY, Decoding, announce
from vbrt.layers import VBLayer
from vbrt.libraries import transformers_api
from vbrt.libraries.transformers_api import DRAFTS, cache_argument, cache_of
from vbrt.model.attachment import Attachment
from vbrt.model.mutation_watch import calls_others

__all__ = ["Speculation", "generate"]

_NOTHING = "nothing drafts: no weight has a fine plane, and no other drafter is named"
#: a fixed number of drafts comes from the first of these that proposes any
_PREFERRED = ("assistant", "heads", "coarse", "ngrams")
_INSTEAD = "transformers' own assisted loop decodes, several tokens in one pass, which may round differently"


@dataclass(frozen=True, slots=True)
class Speculation:
    """vbrt's own arguments of `generate`.

    Attributes:
        speculate: "auto" or a number: draft that many tokens and verify them in one pass over the weights; if that is
            impossible, a warning and `stats().fallbacks` give the reason. False: off.
        drafter: "auto": whatever drafter there is, by measured pay; or a name of `drafters.DRAFTERS`, or several.
        exactness: "tokens": tokens and logits are bitwise equal to decoding one token at a time: by captured steps
            where `generate` captures them, else by eager ones. "distribution": all drafts in one pass, faster, with
            different rounding.
        seed: sample with noise by seed, row and position, the same with and without drafts. None: with drafts, a seed
            is drawn from torch's default generator; without, transformers samples.
    """

    speculate: str | int | bool = False
    drafter: str | tuple[str, ...] = "auto"
    exactness: str = "tokens"
    seed: int | None = None

    def __post_init__(self) -> None:
        """Raises ArgumentError for invalid values."""
        k = self.speculate
        if not (k is False or k == "auto" or (type(k) is int and 1 <= k <= MOST)):
            raise ArgumentError(f'generate: speculate = {k!r}; expected "auto", a number from 1 to {MOST}, or False')
        checked_names(self.drafter)
        if self.exactness not in EXACTNESS:
            raise ArgumentError(f"generate: exactness = {self.exactness!r}; expected one of {', '.join(EXACTNESS)}")
        if self.seed is not None and type(self.seed) is not int:
            raise ArgumentError(f"generate: seed = {self.seed!r}; expected a whole number or None")

    @classmethod
    def taken(cls, kwargs: dict[str, Any], *, has_runtime: bool = True) -> tuple[Self, dict[str, Any]]:
        """Split `generate`'s arguments into these and the rest. Raises ArgumentError.

        Args:
            has_runtime: transformers' own arguments for drafts mean these, too, and stay in the rest.
        """
        names = {of.name for of in fields(cls)}
        own = {name: value for name, value in kwargs.items() if name in names}
        asks = has_runtime and own.get("speculate") is not False and kwargs.get("custom_generate") is None
        named = named_by(kwargs) if asks else ()
        if named:
            own = {"drafter": named, **own}
        if named or (asks and "drafter" in own):
            own = {"speculate": "auto", **own}
        how = cls(**own)
        if how.drafter != "auto" and "assistant" in how.drafters and kwargs.get("assistant_model") is None:
            raise ArgumentError('generate: drafter = "assistant" drafts with a small model: give assistant_model=')
        return how, {name: value for name, value in kwargs.items() if name not in names}

    @property
    def drafters(self) -> tuple[str, ...]:
        """Names of the drafters that may be used."""
        return checked_names(self.drafter)

    @property
    def asked(self) -> bool:
        """True if any of these options is used."""
        return self.speculate is not False or self.seed is not None


def generate(
    model: Any, attachment: Attachment, how: Speculation, plain: Callable[..., Any], args: tuple, kwargs: dict[str, Any]
) -> Any:
    """Run the model's own `generate`, `plain(*args, **kwargs)`, with the decoding loop that `how` selects.

    If drafting is impossible, a warning and `stats().fallbacks` give the reason.

    Raises:
        ArgumentError: a seed for a call that does not sample token by token, such as beam search.
    """
    given = kwargs
    ours, kwargs = ({}, dict(kwargs)) if how.speculate is False else split_arguments(kwargs)
    instead = _INSTEAD if ours and named_by(given) else DECODED_PLAINLY
    refusal = DRAFTS.refusal()
    if not refusal:
        config, _ = model._prepare_generation_config(**{"generation_config": None, **kwargs})
        refusal = _refusal(model, config, kwargs)
    if refusal:
        if how.seed is not None:
            raise ArgumentError(f"generate: seed = {how.seed}: {refusal}; use torch.manual_seed")
        announce(attachment.speculation, refusal, instead)
        return plain(*args, **given)
    criteria = _with_stop_strings(kwargs)
    method = _Method(attachment, how, kwargs.get("streamer"), ours)
    own = type(model).generate.__get__(model)
    return own(*args, custom_generate=method, stopping_criteria=criteria, **kwargs)


def _refusal(model: Any, config: Any, kwargs: dict[str, Any]) -> str:
    """Return why a call does not decode token by token with a cache; "" if it does."""
    mode = str(getattr(config.get_generation_mode(kwargs.get("assistant_model")), "value", ""))
    if kwargs.get("custom_generate") is not None:
        return "custom_generate runs its own decoding loop"
    if mode not in ("greedy_search", "sample"):
        return f"{mode.replace('_', ' ')} does not decode token by token"
    if model.config.is_encoder_decoder:
        return f"{type(model).__name__} is an encoder-decoder model"
    if config.output_attentions or config.output_hidden_states:
        return "output_attentions and output_hidden_states need every pass of plain decoding"
    if not config.use_cache:
        return "use_cache = False"
    if model.generation_config.stop_strings is not None:
        return "the model's generation_config has stop_strings; give them to generate instead"
    return ""


def _has_coarse(attachment: Attachment) -> bool:
    layers = attachment.registry.layers.values()
    return any(isinstance(layer, VBLayer) and layer.handle.spec.fine for layer in layers)


def _with_stop_strings(kwargs: dict[str, Any]) -> Any:
    """Pop stop strings from the arguments; return the caller's stopping criteria plus one for them.

    transformers passes the tokenizer, which they need, to its own decoding methods only.
    """
    from transformers import StoppingCriteriaList

    criteria = StoppingCriteriaList(kwargs.pop("stopping_criteria", None) or [])
    tokenizer, strings = kwargs.pop("tokenizer", None), kwargs.pop("stop_strings", None)
    config = kwargs.get("generation_config")
    if strings is None and config is not None and config.stop_strings is not None:
        strings, config = config.stop_strings, copy.deepcopy(config)
        kwargs["generation_config"], config.stop_strings = config, None
    if strings is not None:
        criteria.append(transformers_api.StopStringCriteria(tokenizer=tokenizer, stop_strings=strings))
    return criteria


_paces: "weakref.WeakKeyDictionary[Attachment, dict[tuple, Pace]]" = weakref.WeakKeyDictionary()


class _Method:
    """Decoding method in the form of transformers' `custom_generate`.

    Args:
        streamer: transformers puts the prompt to it, but passes it to its own methods only.
        ours: transformers' arguments for drafters.
    """

    def __init__(self, attachment: Attachment, how: Speculation, streamer: Any, ours: dict[str, Any]) -> None:
        self._attachment, self._how, self._streamer, self._ours = attachment, how, streamer, ours

    def __call__(
        self,
        model: Any,
        input_ids: torch.Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        **model_kwargs: Any,
    ) -> Any:
        counts = self._attachment.speculation
        counts.totals["exactness"] = self._how.exactness
        draw = self._noise().draw if generation_config.do_sample else greedy
        given = (input_ids, logits_processor, stopping_criteria, generation_config, self._streamer)
        sequences = Sequences(*given, draw)
        names = () if self._how.speculate is False else self._how.drafters
        prompt = {"input_ids": input_ids, "attention_mask": model_kwargs.get("attention_mask")}
        asked = {**self._ours, **prompt, "load": self._how.drafter != AUTO}
        made, refusal = drafters_for(names, model, generation_config, asked)
        found = {drafter.name: drafter for drafter in made}
        if "coarse" in names and _has_coarse(self._attachment):
            found["coarse"] = CoarsePlanes()
        if names and not found:
            announce(counts, refusal or _NOTHING)
        elif refusal:
            announce(counts, refusal, "drafted without it")
        pace = self._pace(len(input_ids), found)
        pace.begin_call(generation_config.max_length - input_ids.shape[1])
        decoding = Decoding(
            model,
            self._attachment,
            pace,
            self._how.exactness,
            counts,
            generation_config.max_length,
            watched=calls_others((logits_processor, stopping_criteria), {"streamer": self._streamer}),
            states=PassStates() if "heads" in found else None,
        )
        with _link_bytes(self._attachment), contextlib.ExitStack() as opened:
            for drafter in made:
                opened.callback(drafter.close)
            if decoding.states is not None:
                opened.enter_context(hidden_states_fed(model, decoding.states.note))
            outputs = model._prefill(input_ids, generation_config, model_kwargs)
            with self._attachment.work.counted_elsewhere():
                model_kwargs = speculate(decoding, sequences, found, outputs, model_kwargs)
        sequences.end()
        return _result(sequences, model_kwargs, generation_config)

    def _pace(self, batch: int, drafters: Mapping[str, Drafter]) -> Pace:
        """Return the pace; "auto" keeps what earlier calls have learned."""
        free = {name: drafters[name].free for name in _PREFERRED if name in drafters}
        if self._how.speculate != "auto":
            return Pace(free, int(self._how.speculate))
        case = batch, self._how.exactness, tuple(free)
        return _paces.setdefault(self._attachment, {}).setdefault(case, Pace(free))

    def _noise(self) -> Noise:
        seed = self._how.seed
        if seed is None:
            seed = int(torch.randint(2**62, (), dtype=torch.int64, device="cpu"))
        return Noise(seed)


@contextlib.contextmanager
def _link_bytes(attachment: Attachment) -> Iterator[None]:
    """Count bytes moved between tiers in a `with` block."""
    before = attachment.bytes_moved()
    try:
        yield
    finally:
        attachment.speculation.totals["link_bytes"] += attachment.bytes_moved() - before


def _result(sequences: Sequences, kwargs: dict[str, Any], config: Any) -> Any:
    if not config.return_dict_in_generate:
        return sequences.ids
    made = transformers_api.GenerateDecoderOnlyOutput
    return made(
        sequences=sequences.ids,
        scores=sequences.scores,
        logits=sequences.logits,
        **{cache_argument(made): cache_of(kwargs)},
    )
