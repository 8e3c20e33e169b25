"""Drafters by themselves: prompt lookup, and assistants whose caches follow what is accepted."""

import random
import re
from types import SimpleNamespace

import pytest
import torch

import vbrt
from scripts import committed
from scripts.speculate import as_gpt2, prompts_of
from tests.models import gpt2, llama, wrap
from vbrt.errors import ArgumentError
from vbrt.generation.speculation.assistant import Assistant, Translated
from vbrt.generation.speculation.call_drafters import drafters_for
from vbrt.generation.speculation.drafters import _PLACES, Ngrams, NotDraftable
from vbrt.generation.speculation.sampling_noise import Noise, greedy
from vbrt.generation.speculation.seeded_generate import Speculation
from vbrt.generation.speculation.sequences import Sequences

transformers = pytest.importorskip("transformers")

EOS, PAD = 2, 0
V, LIMIT, K = 128, 40, 4


def sequences(ids, draw=greedy, *, stops=(), limit=LIMIT):
    """A call's sequences, whose rows stop at EOS or at the length."""
    ids = torch.as_tensor(ids)
    criteria = [transformers.MaxLengthCriteria(limit)]
    if stops:
        criteria.append(transformers.EosTokenCriteria(torch.tensor(list(stops))))
    settings = SimpleNamespace(
        return_dict_in_generate=False, output_scores=False, output_logits=False, _pad_token_tensor=torch.tensor(PAD)
    )
    lists = transformers.LogitsProcessorList(), transformers.StoppingCriteriaList(criteria)
    return Sequences(ids, *lists, settings, None, draw)


def said(of, tokens):
    """Append tokens [B] as if the model had given them."""
    logits = torch.zeros(len(tokens), V)
    logits[torch.arange(len(tokens)), torch.tensor(tokens)] = 1
    of.look(of.append(logits))


# -- n-grams ----------------------------------------------------------------------------------------------------------


def ngrams(mask=None, **kwargs):
    return Ngrams(mask, frozenset([EOS]), **kwargs)


@pytest.mark.parametrize(
    ("text", "proposed"),
    [
        ([5, 6, 7, 8, 9, 5, 6], [7, 8, 9, 5]),
        ([5, 6, 7, 5, 6, 7, 5, 6], [7, 5, 6, 7]),  # goes on with its period beyond the end
        ([4, 4, 4], [4, 4, 4, 4]),
        ([1, 5, 6, 7, 3, 5, 6, 8, 1, 5, 6], [7, 3, 5, 6]),  # the longer match, not the newer one
        ([5, 6, 7, 3, 5, 6, 8, 9, 5, 6], [8, 9, 5, 6]),  # the newer of two
        ([5, 6, 7, EOS, 9, 5, 6], [7, EOS]),  # nothing follows EOS
        ([5, 6, 7, 8, 6], []),
        ([5], []),
        ([], []),
    ],
)
def test_a_proposal_continues_the_longest_earlier_match(text, proposed):
    ids = torch.tensor([text], dtype=torch.int64)
    assert ngrams().propose(sequences(ids), K).tolist() == [proposed]


def by_search(text, k, longest):
    """What `Ngrams` proposes, by a search of the whole text."""
    places = [p for p in range(len(text) - 2, 0, -1) if text[p - 1 : p + 1] == text[-2:]][:_PLACES]
    if not places:
        return []
    grown, best, start = list(text), 0, -1
    for place in places:
        alike = [n for n in range(2, min(longest, place + 1) + 1) if text[place - n + 1 : place + 1] == text[-n:]]
        if alike[-1] > best:
            best, start = alike[-1], place
    for at in range(start + 1, start + 1 + k):
        grown.append(grown[at])
        if grown[-1] == EOS:
            break
    return grown[len(text) :]


def test_the_index_gives_what_a_search_of_the_whole_text_gives():
    random.seed(0)
    found = 0
    for _ in range(60):
        letters, longest = random.choice([2, 3, 6, 20]), random.choice([2, 3, 5, 16])
        text = [random.randrange(letters) for _ in range(random.randrange(1, 40))]
        drafter, of = ngrams(longest=longest), sequences([text], limit=10_000)
        for _ in range(20):
            k = random.randrange(1, 9)
            proposed = drafter.propose(of, k)[0].tolist()
            assert proposed == by_search(text, k, longest), (text, k, longest)
            found += bool(proposed)
            for token in (*proposed[: random.randrange(k)], random.randrange(letters)):
                said(of, [token])
                text.append(token)
    assert found > 300


def test_only_new_tokens_are_read_back(monkeypatch):
    read, tolist = [], torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda tensor: read.append(tensor.shape[1]) or tolist(tensor))
    drafter, of = ngrams(), sequences([[5, 6, 7, 8, 9, 5]] * 2)
    for new in (0, 0, 3):
        of.ids = torch.cat([of.ids, of.ids[:, :new]], 1)
        drafter.propose(of, K)
    assert read == [6 + 1, 0 + 1, 3 + 1]  # and one number a row: whether it runs


def test_padding_is_no_text():
    ids = torch.tensor([[0, 0, 7, 0, 0]])  # the prompt's own tokens may look like padding
    mask = torch.tensor([[0, 0, 1, 1, 1]])
    assert ngrams(mask).propose(sequences(ids), K).tolist() == [[]]
    assert ngrams().propose(sequences(ids), K).tolist() == [[7, 0, 0, 7]]


def test_a_mask_may_be_of_more_tokens_than_the_ids():
    """The rest of the prompt is in embeddings or in a cache."""
    mask = torch.tensor([[0, 1, 1, 1, 1, 1, 1]])
    ids = torch.tensor([[5, 6, 7, 5, 6]])
    assert ngrams(mask).propose(sequences(ids), 1).tolist() == [[7]]
    assert ngrams(mask).propose(sequences(ids[:, :0]), 1).tolist() == [[]]


def test_rows_of_a_batch_propose_as_many_as_the_shortest():
    rows = torch.tensor([[5, 6, 7, 8, 5, 6], [0, 5, 6, EOS, 5, 6], [0, 0, 3, 4, 3, 4]])
    mask = torch.tensor([[1] * 6, [0] + [1] * 5, [0, 0] + [1] * 4])
    assert ngrams(mask).propose(sequences(rows), K).tolist() == [[7], [EOS], [3]]
    rows[0, 0] = 9  # no match any more
    assert ngrams(mask).propose(sequences(rows), K).shape == (3, 0)


def test_rows_that_have_stopped_propose_padding_and_hold_nobody_up():
    of, drafter = sequences([[5, 6, 7, 5, 6], [5, 6, 7, 8, 9]], stops=[EOS]), ngrams()
    assert drafter.propose(of, K).shape == (2, 0)
    said(of, [7, EOS])
    assert drafter.propose(of, 3).tolist() == [[5, 6, 7], [PAD] * 3]
    endless = sequences([[5, 6, 7, 5, 6], [5, 6, 7, 8, 9]])  # no EOS: rows that criteria stop are decoded on
    endless.unfinished[1] = 0
    assert ngrams().propose(endless, K).shape == (2, 0)


# -- assistants -------------------------------------------------------------------------------------------------------


def prompts(batch, length=9):
    ids = torch.arange(3, 3 + batch * length).reshape(batch, length) % 120
    mask = torch.ones_like(ids)
    for row in range(1, batch):
        mask[row, : 2 * row] = 0
    return ids, mask


def mistral(window=8):
    torch.manual_seed(6)
    sizes = {"vocab_size": V, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
    return transformers.MistralForCausalLM(transformers.MistralConfig(**sizes, **heads, sliding_window=window)).eval()


def shaken(model, by=0.003):
    """The model with other weights, which agrees with it now and then."""
    torch.manual_seed(9)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += by * torch.randn_like(parameter)
    return model


@torch.no_grad()
def decoded(target, drafter, of, mask, k=K):
    """Decode in rounds of up to k drafts, verified by passes over the whole text; yields (drafted, accepted)."""
    while not of.finished:
        proposed = drafter.propose(of, k)
        for row in range(proposed.shape[1] + 1):
            seen = torch.nn.functional.pad(mask, (0, of.length - mask.shape[1]), value=1)
            places = (seen.cumsum(-1) - 1).clamp(min=0)
            tokens = of.append(target(of.ids, attention_mask=seen, position_ids=places).logits[:, -1])
            right = of.look(tokens, proposed[:, row] if row < proposed.shape[1] else None)
            if of.finished or not right:
                break
        yield proposed.shape[1], row + right if of.finished else row


@pytest.mark.sample(4)
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("draw", [greedy, Noise(5).draw], ids=["greedy", "sampled"])
@pytest.mark.parametrize("model", [llama, mistral, gpt2])
def test_an_assistant_that_is_the_target_is_always_right_and_reads_no_token_twice(model, draw, batch):
    (ids, mask), model, passes = prompts(batch), model(), []
    model.register_forward_pre_hook(
        lambda _, args, kwargs: passes.append(kwargs["input_ids"].shape[1]) if not args else None, with_kwargs=True
    )
    drafter, of = Assistant(model, mask, limit=LIMIT, vocabulary=V), sequences(ids, draw)
    found = list(decoded(model, drafter, of, mask))
    assert all(drafted == accepted for drafted, accepted in found[:-1]) and len(found) < (LIMIT - 9) / K
    assert passes[0] == 9 and set(passes[1:]) == {1, 2} and sum(passes) < LIMIT + K and drafter.one_time == 1


@pytest.mark.sample(3)
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("draw", [greedy, Noise(5).draw], ids=["greedy", "sampled"])
@pytest.mark.parametrize("model", [llama, mistral])
def test_a_cache_is_rewound_to_what_was_accepted(model, draw, batch):
    (ids, mask), target, model = prompts(batch), model(), shaken(model())
    of = sequences(ids, draw, stops=range(0 if batch == 1 else 16))
    drafter, made, running = Assistant(model, mask, limit=LIMIT, vocabulary=V), [], set()

    class Compared:
        def propose(self, of, k):
            k = min(LIMIT - of.length, 1 + len(made) % k)
            made.append(drafter.propose(of, k))
            running.add(int(of.running.sum()))
            assert drafter.length == of.length + k - 1
            fresh = Assistant(model, mask, limit=LIMIT, vocabulary=V)
            assert torch.equal(made[-1], fresh.propose(of, k))
            return made[-1]

    accepted = [accepted for _, accepted in decoded(target, Compared(), of, mask)]
    assert drafter.one_time == 1 and len(set(accepted)) > 1, accepted  # some right, some wrong
    assert len(running) > 1 or batch == 1  # a row stopped before the others


@pytest.mark.sample(1)
@pytest.mark.parametrize("model", [llama, mistral])
def test_a_wrapped_assistant_drafts_by_captured_steps(recorded, model):
    (ids, mask), target = prompts(2), model()
    with wrap(shaken(model()), "dense", compute={"exactness": "rounded"}) as vb:
        drafter, plain = (Assistant(of, mask, limit=LIMIT, vocabulary=V) for of in (vb.module, shaken(model())))
        of, compared = sequences(ids), []

        class Both:
            def propose(self, of, k):
                found = drafter.propose(of, k)
                compared.append(torch.equal(found, plain.propose(of, k)[:, : found.shape[1]]))
                return found

        with torch.no_grad():
            found = list(decoded(target, Both(), of, mask))
        steps = vb.stats().steps
        drafter.close()
        assert all(compared) and sum(drafted for drafted, _ in found)
        assert steps.captured > 9 and not steps.eager and drafter.one_time > 1, steps
        assert vb.generate(ids[:1], max_new_tokens=4, pad_token_id=0).shape == (1, 13)  # the session has ended


def widened(model, by):
    """The model with `by` tokens more in its vocabulary, which it likes best."""
    wide = llama()
    wide.resize_token_embeddings(V + by)
    with torch.no_grad():
        wide.lm_head.weight[V:] = 9
    return wide


@pytest.mark.parametrize("by", [24, -24])
def test_a_vocabulary_that_is_padded_otherwise_draws_with_the_same_noise(by):
    (ids, mask), target = prompts(2), llama()
    drafter, of = Assistant(widened(target, by), mask, limit=LIMIT, vocabulary=V), sequences(ids, Noise(3).draw)
    ids[0, 2] = V - 1  # beyond the smaller one
    right = [drafted == accepted for drafted, accepted in decoded(target, drafter, of, mask)]
    assert all(right[:-1]) == (by > 0) and int(of.ids.max()) < V


def test_an_assistant_of_few_positions_ends_with_them():
    (ids, mask), target = prompts(1), llama()
    small = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=V, n_embd=32, n_layer=1, n_head=2, n_positions=16)
    ).eval()
    drafter, of = Assistant(small, mask, limit=LIMIT, vocabulary=V), sequences(ids)
    drafted = [drafted for drafted, _ in decoded(target, drafter, of, mask)]
    assert drafted[0] == K and drafted[-1] == 0 and of.length == LIMIT


@pytest.mark.exhaustive
def test_a_small_trained_model_drafts_a_trained_model_well_and_its_prompt_repeats():
    model, text = as_gpt2(committed.dense(), torch.float32), prompts_of(committed.held_out(), 1)
    settings = {"tiers": {"gpu": {"enabled": False}}, "weights": {"min_parameters": 0}}
    limit, accepted = text.shape[1] + 20, []
    with vbrt.wrap(as_gpt2(committed.dense(), torch.float32), "fp4", **settings) as small:
        for draw in (greedy, Noise(2).draw):
            drafter = Assistant(small.module, None, limit=limit, vocabulary=256)
            rounds = decoded(model, drafter, sequences(text, draw, limit=limit), torch.ones_like(text), 6)
            accepted.append(sum(right for _, right in rounds))
            drafter.close()
    assert min(accepted) > 12, accepted
    twice = torch.cat([text, text[:, :30]], 1)
    rounds = list(decoded(model, ngrams(), sequences(twice, limit=len(twice[0]) + 20), torch.ones_like(twice), 6))
    assert sum(right for _, right in rounds) > 10, rounds


# -- two tokenizers ---------------------------------------------------------------------------------------------------


def words(order):
    """A tokenizer of the words w0, w1, ... with ids by `order`."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    made = Tokenizer(models.WordLevel({f"w{word}": int(index) for word, index in enumerate(order)}, unk_token="w0"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made)


def permuted(order):
    """`llama()` with its tokens in another order."""
    model = llama()
    with torch.no_grad():
        for weight in (model.model.embed_tokens.weight, model.lm_head.weight):
            weight[order] = weight.clone()
    model.generation_config.eos_token_id = model.generation_config.pad_token_id = None
    return model


@pytest.mark.parametrize("draw", [greedy, Noise(1).draw], ids=["greedy", "sampled"])
def test_an_assistant_with_another_tokenizer_drafts_by_text(draw):
    (ids, mask), target, order = prompts(1), llama(), torch.randperm(V)
    drafter = Translated(permuted(order), (words(range(V)), words(order)), limit=LIMIT)
    before = torch.random.get_rng_state()
    found = list(decoded(target, drafter, sequences(ids, draw), mask))
    drafted, accepted = (sum(counts) for counts in zip(*found, strict=True))
    assert drafted > 8 and (accepted > 0.8 * drafted or draw is not greedy), found
    assert torch.equal(torch.random.get_rng_state(), before)  # which the user's own sampling draws from


def test_texts_that_tokenizers_cannot_be_aligned_on_end_the_drafts(monkeypatch):
    ids, _ = prompts(1)
    drafter = Translated(llama(), (words(range(V)), words(range(V))), limit=LIMIT)
    drafter.propose(sequences(ids), 1)
    monkeypatch.setattr(drafter._generator, "get_candidates", lambda ids: [][0])
    with pytest.raises(NotDraftable, match="universal assisted generation failed: IndexError"):
        drafter.propose(sequences(ids), 1)


# -- arguments --------------------------------------------------------------------------------------------------------


def made(names, target=None, ids=None, **kwargs):
    ids, mask = prompts(2) if ids is None else (ids, None)
    settings = SimpleNamespace(max_length=LIMIT, eos_token_id=[EOS])
    prompt = {"input_ids": ids, "attention_mask": mask}
    return drafters_for(names, llama() if target is None else target, settings, {**prompt, **kwargs})


def tiny(name):
    from tests.generation.families import tiny

    return tiny(name)


def test_drafters_are_made_by_name():
    found, why = made(("ngrams", "assistant", "heads", "coarse"), assistant_model=llama())
    assert [type(each) for each in found] == [Ngrams, Assistant] and not why
    found, why = made(("ngrams", "assistant"))  # "auto", without a small model
    assert [type(each) for each in found] == [Ngrams] and not why
    with wrap(llama()) as vb:
        (drafter,), why = made(("assistant",), assistant_model=vb)
        assert drafter.propose(sequences(prompts(2)[0]), 2).shape == (2, 2)
        drafter.close()
    same = {"tokenizer": words(range(V)), "assistant_tokenizer": words(range(V))}
    assert isinstance(made(("assistant",), assistant_model=widened(None, 8), **same)[0][0], Assistant)
    other = same | {"assistant_tokenizer": words(range(V - 1, -1, -1))}
    assert isinstance(made(("assistant",), ids=prompts(1)[0], assistant_model=llama(), **other)[0][0], Translated)


@pytest.mark.parametrize(
    ("model", "further", "why"),
    [
        (lambda: tiny("t5"), {}, "T5ForConditionalGeneration is an encoder-decoder model"),
        (lambda: tiny("mamba"), {}, "MambaForCausalLM: its cache cannot be rewound: DynamicCache of LinearAttention"),
        (lambda: torch.nn.Linear(2, 2), {}, "is a Linear; expected a transformers model that generates"),
        (lambda: widened(None, 8), {}, r"has another vocabulary \(136 tokens; the model 128\); tokenizer= and"),
        (lambda: tiny("t5"), {"tokenizer": "one", "assistant_tokenizer": "other"}, "one sequence, not 2"),
        (gpt2, {"ids": torch.ones(1, 65, dtype=torch.int64)}, "GPT2LMHeadModel has 64 positions; the prompt has 65"),
        (llama, {"ids": torch.ones(1, 0, dtype=torch.int64)}, "the prompt is in embeddings or in a cache"),
        (llama, {"attention_mask": torch.ones(2, 12)}, "the prompt is in embeddings or in a cache"),
    ],
)
def test_an_assistant_that_cannot_draft_is_refused_by_name(model, further, why, monkeypatch):
    monkeypatch.setattr("vbrt.generation.speculation.call_drafters._same_vocabulary", lambda one, other: one == other)
    found, reason = made(("ngrams", "assistant"), assistant_model=model(), **further)
    assert [each.name for each in found] == ["ngrams"] and re.search(why, reason), reason


def taken(**kwargs):
    how, rest = Speculation.taken(kwargs)
    return how.speculate, how.drafter, sorted(rest)


def test_transformers_own_arguments_name_drafters():
    small = object()
    assert taken(assistant_model=small) == ("auto", ("assistant",), ["assistant_model"])
    assert taken(assistant_model=small, speculate=3)[:2] == (3, ("assistant",))
    assert taken(assistant_model=small, drafter="auto")[:2] == ("auto", "auto")
    assert taken(prompt_lookup_num_tokens=3, assistant_model=small)[:2] == ("auto", ("ngrams", "assistant"))
    of_config = transformers.GenerationConfig(prompt_lookup_num_tokens=3)
    assert taken(generation_config=of_config)[:2] == ("auto", ("ngrams",))
    assert taken(drafter="ngrams")[:2] == ("auto", "ngrams")
    assert taken(drafter=("ngrams", "coarse"), speculate=2)[:2] == (2, ("ngrams", "coarse"))
    # what is transformers' own loop
    assert taken(assistant_model=small, speculate=False) == (False, "auto", ["assistant_model"])
    assert taken(prompt_lookup_num_tokens=3, custom_generate=print)[0] is False
    assert Speculation.taken({"assistant_model": small}, has_runtime=False)[0].speculate is False


def test_unknown_drafters_are_refused_with_those_that_there_are():
    for drafter in ("bigrams", (), ("ngrams", "x"), 3, ["ngrams"], None):
        with pytest.raises(ArgumentError, match=r"expected .* of ngrams, assistant, heads, coarse"):
            taken(drafter=drafter)
    with pytest.raises(ArgumentError, match="give assistant_model="):
        taken(drafter=("assistant", "ngrams"))
    with pytest.raises(ArgumentError, match="speculate = 77"):
        taken(speculate=77, assistant_model=object())


def generated(vb, **kwargs):
    return vb.generate(prompts(1)[0], **{"max_new_tokens": 12, "do_sample": False, "pad_token_id": PAD, **kwargs})


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_calls_with_transformers_own_arguments_give_plain_tokens():
    with wrap(llama(dtype=torch.bfloat16), "exact") as vb:
        plain = generated(vb)
        for further in (
            {"prompt_lookup_num_tokens": 3},
            {"generation_config": transformers.GenerationConfig(prompt_lookup_num_tokens=3, max_new_tokens=12)},
            {"assistant_model": shaken(llama())},
            {"drafter": "ngrams", "seed": 3},
        ):
            before = vb.stats().speculation.rounds if vb.stats().speculation else 0
            assert torch.equal(generated(vb, **further), plain)
            assert vb.stats().speculation.rounds > before  # not transformers' own loop
        assert torch.equal(generated(vb, assistant_model=widened(None, 8)), plain)
        (why,) = (reason for reason in vb.stats().fallbacks if "speculate" in reason)
        assert "another vocabulary (136 tokens; the model 128)" in why and why.endswith("one token at a time")


def test_calls_that_do_not_decode_token_by_token_are_left_to_transformers():
    pairs, other = tiny("t5"), tiny("t5")
    with wrap(pairs) as vb, pytest.warns(UserWarning, match="is an encoder-decoder model; transformers' own assisted"):
        tokens = vb.generate(prompts(1)[0] % 97, max_new_tokens=6, assistant_model=other, do_sample=False)
        assert tokens.shape == (1, 7)
    with wrap(llama()) as vb:
        rounds = []
        small = llama()
        small.register_forward_pre_hook(lambda *_: rounds.append(1))
        plain = generated(vb)
        assert torch.equal(generated(vb, assistant_model=small, speculate=False), plain) and rounds
        assert not [reason for reason in vb.stats().fallbacks if "speculate" in reason]
