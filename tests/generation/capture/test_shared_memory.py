"""Memory that recorded steps attend to: caches of a call never share it, and those that are kept have their own."""

import gc
import weakref

import pytest
import torch

import vbrt
from tests import models
from tests.generation.families import PROMPT, generated, tiny
from vbrt.generation.static import static_cache

transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.filterwarnings("ignore:vbrt"), pytest.mark.usefixtures("tapes")]


def wrapped(family: str = "llama") -> vbrt.VBModelWrapper:
    return models.wrap(tiny(family))


def empty(model) -> transformers.DynamicCache:
    return transformers.DynamicCache(config=model.config.get_text_config(decoder=True))


def other(model, tokens: int = 9):
    """A call with other prompts, on the memory of the last one."""
    return model.generate(PROMPT.flip(1), max_new_tokens=tokens, do_sample=False, pad_token_id=0)


def held(cache) -> list[torch.Tensor]:
    """Copies of all tensors of a cache."""
    found = [value for layer in cache.layers for _, value in sorted(vars(layer).items())]
    tensors = [list(value.values()) if isinstance(value, dict) else [value] for value in found]
    return [tensor.clone() for each in tensors for tensor in each if torch.is_tensor(tensor)]


def close(got: list, want: list) -> None:
    for one, two in zip(got, want, strict=True):
        torch.testing.assert_close(one, two, atol=1e-5, rtol=1e-4)


class Beside(transformers.LogitsProcessor):
    """Runs a model beside the call: a token of each of `rows` on one cache, and tokens of `more` on another."""

    def __init__(self, model, rows: int = 2, more: int = 0) -> None:
        self.model, self.rows, self.more, self.caches = model, rows, more, (empty(model), empty(model))

    def __call__(self, ids, scores):
        first = self.caches[0].get_seq_length() == 0
        for cache, tokens in zip(self.caches, (1, self.more), strict=True):
            new = PROMPT[: self.rows].flip(1) if first else ids[: self.rows, -tokens:]
            if tokens:
                scores = scores - 0.3 * self.model(input_ids=new, past_key_values=cache).logits[:1, -1]
        return scores


def test_a_cache_that_is_recorded_keeps_its_memory_while_another_one_runs_eagerly():
    """Three caches in a call: the call's own and one of its processor are recorded, its other takes two tokens."""
    found = []
    for model in (tiny("llama"), wrapped()):
        beside = Beside(getattr(model, "model", model) if model.__class__ is vbrt.VBModelWrapper else model, more=2)
        tokens = generated(model, logits_processor=[beside]).sequences
        kept = [held(cache) for cache in beside.caches]
        other(model)
        assert all(map(torch.equal, held(beside.caches[0]), kept[0]))
        found.append((tokens, kept))
    assert torch.equal(found[0][0], found[1][0])
    for one, two in zip(found[1][1], found[0][1], strict=True):
        close(one, two)


def test_nothing_holds_the_caches_of_a_call_that_has_ended():
    """Those of two forms, too: the last one recorded is not the only one."""
    vb = wrapped()
    beside = Beside(vb.module, rows=1)
    caches = [generated(vb, logits_processor=[beside]).past_key_values, beside.caches[0]]
    refs = [weakref.ref(of) for cache in caches for of in (cache, *cache.layers)]
    del beside, caches
    gc.collect()
    assert [ref() for ref in refs] == [None] * 6


@pytest.mark.sample(1)
@pytest.mark.parametrize("tokens", [1, 6])
def test_the_states_of_hybrid_layers_in_a_kept_cache_are_its_own(tokens):
    """Falcon-H1's layers have keys and values that grow, and states that keep their size."""
    vb, plain = wrapped("falcon_h1"), tiny("falcon_h1")
    generated(vb)
    got, want = (generated(model, max_new_tokens=tokens).past_key_values for model in (vb, plain))
    other(vb)
    close(held(got), held(want))


@pytest.mark.parametrize("tokens", [1, 6])
def test_a_processor_may_put_other_keys_into_a_cache(tokens):
    """As those do that drop the first tokens: parts of the same memory, which begin elsewhere."""
    found = []
    for model in (tiny("llama"), wrapped()):
        other(model)
        cache = empty(model)

        def drop(ids, scores, cache=cache):
            if ids.shape[1] in (5, 7):  # after the prompt, and after a recorded step
                for layer in cache.layers:
                    layer.keys, layer.values = layer.keys[:, :, 2:], layer.values[:, :, 2:]
            return scores

        given = {"do_sample": False, "pad_token_id": 96, "past_key_values": cache, "logits_processor": [drop]}
        ids = model.generate(PROMPT, max_new_tokens=tokens, **given)
        kept = held(cache)
        other(model)
        assert all(map(torch.equal, held(cache), kept))
        found.append((ids, kept))
    assert torch.equal(found[0][0], found[1][0])
    close(found[1][1], found[0][1])


def test_a_cache_that_may_hold_more_than_its_layers_computes_its_prompt_by_itself():
    class Seen(transformers.DynamicCache):
        seen = ()

        def update(self, *args, **kwargs):
            out = super().update(*args, **kwargs)
            self.seen = (*self.seen, self.layers[0].keys)
            return out

    vb, plain, found = wrapped(), tiny("llama"), []
    for model in (vb, plain):
        generated(model)
        cache = Seen(config=plain.config)
        generated(model, past_key_values=cache)
        other(model)
        found.append(cache.seen)
    close(*found)


def test_a_forward_that_enables_gradients_leaves_no_history_in_memory():
    class Enabling(transformers.models.llama.modeling_llama.LlamaAttention):
        def forward(self, hidden_states, *args, **kwargs):
            with torch.set_grad_enabled(hidden_states.shape[1] > 1 or self.always):
                return super().forward(hidden_states, *args, **kwargs)

    vb, plain = wrapped(), tiny("llama")
    for model in (vb.module, plain):
        attention = model.model.layers[0].self_attn
        attention.__class__, attention.always = Enabling, False
        model.model.layers[0].input_layernorm.requires_grad_(True)
        attention.q_proj.weight.requires_grad_(True)
        model.get_input_embeddings().weight.requires_grad_(True)
    for always in (False, False, True, False):
        for model in (vb.module, plain):
            model.model.layers[0].self_attn.always = always
        want, got = generated(plain), generated(vb)
        assert torch.equal(want.sequences, got.sequences)
        rooms = [room for kept in vb.module.generate.steps.kept for room in kept.statics.rooms.values()]
        assert not any(tensor.requires_grad for room in rooms for tensor in room.tensors)


@pytest.mark.parametrize("fails", [0, 1, 2, 3])
def test_a_cache_stays_whole_where_memory_for_a_layer_is_wanting(fails, monkeypatch):
    vb, plain, made, longer = wrapped(), tiny("llama"), [], static_cache._longer

    def wanting(*args):
        made.append(args)
        if len(made) == fails + 1:
            raise torch.OutOfMemoryError("there is none")
        return longer(*args)

    monkeypatch.setattr(static_cache, "_longer", wanting)
    for _ in range(2):
        want, got = generated(plain), generated(vb)
        assert torch.equal(want.sequences, got.sequences)
        close(held(got.past_key_values), held(want.past_key_values))
    assert vb.stats().steps.captured == 13  # the second call records


def test_a_kept_cache_has_the_memory_to_itself_where_there_is_none_for_a_copy(monkeypatch):
    vb, leave = wrapped(), static_cache.Growing.leave_

    def wanting(layer, *, copied=True):
        if copied:
            raise torch.OutOfMemoryError("there is none")
        leave(layer, copied=False)

    with monkeypatch.context() as patched:
        patched.setattr(static_cache.Growing, "leave_", wanting)
        cache = generated(vb).past_key_values
    assert {type(layer) for layer in cache.layers} == {transformers.cache_utils.DynamicLayer}
    kept = held(cache)
    other(vb)
    assert all(map(torch.equal, held(cache), kept))


def test_layers_of_cross_attention_take_no_memory_of_those_that_grow():
    """A pair whose first half has no layers before its prompt: the second half's are not where they would be."""
    found = []
    for model in (tiny("t5"), wrapped("t5")):
        generated(model)
        pair = transformers.EncoderDecoderCache(transformers.DynamicCache(), empty(model))
        found.append(generated(model, past_key_values=pair))
    assert torch.equal(found[0].sequences, found[1].sequences)
    close(found[1].logits, found[0].logits)


@pytest.mark.parametrize("tokens", [1, 6])
def test_layers_are_their_own_though_the_cache_that_they_were_in_is_gone(tokens):
    """A processor that makes a cache of a kept one's layers for each of its forwards."""
    vb, layers = wrapped(), empty(tiny("llama")).layers

    def beside(ids, scores):
        again = transformers.DynamicCache()
        again.layers = layers
        new = PROMPT if again.get_seq_length() == 0 else ids[:, -1:]
        return scores - vb.module(input_ids=new, past_key_values=again).logits[:, -1]

    generated(vb, max_new_tokens=tokens + 1, logits_processor=[beside])
    kept = [layer.keys.clone() for layer in layers]
    other(vb)
    assert all(torch.equal(layer.keys, keys) for layer, keys in zip(layers, kept, strict=True))
    assert {type(layer) for layer in layers} == {transformers.cache_utils.DynamicLayer}


def test_a_call_that_is_interrupted_before_its_prompt_leaves_the_caller_a_plain_cache(monkeypatch):
    vb, cache = wrapped(), empty(tiny("llama"))
    generated(vb)

    def interrupted(*given):
        static_cache.offer(*given)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr("vbrt.generation.capture.session.offer", interrupted)
        generated(vb, past_key_values=cache)
    assert {type(layer) for layer in cache.layers} == {transformers.cache_utils.DynamicLayer}
