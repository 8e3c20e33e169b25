"""generate(speculate=...): the tokens and the logits of plain decoding, whatever stops it."""

import random
import warnings

import pytest
import torch

import vbrt
from tests.matrix import matrix
from tests.models import ROUNDED, gpt2, llama, qwen3_moe, wrap, wrap_streamed
from vbrt.errors import ArgumentError, TierError
from vbrt.generation.capture.captured_step import Recording
from vbrt.generation.speculation import cache_refusals, seeded_generate
from vbrt.generation.speculation.draft_length import Choice, Pace
from vbrt.generation.speculation.verification import in_one_pass, token_by_token
from vbrt.layers.weights.linear_product import pass_precision

pytest.importorskip("transformers")
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

BF16 = torch.bfloat16
GREEDY = {"do_sample": False}
SAMPLED = {"do_sample": True, "temperature": 1.2, "top_k": 30, "repetition_penalty": 1.2, "seed": 5}
TOKENS, K = 14, 5


def mistral(window=8):
    from transformers import MistralConfig, MistralForCausalLM

    torch.manual_seed(6)
    sizes = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
    return MistralForCausalLM(MistralConfig(**sizes, **heads, sliding_window=window)).to(BF16).eval()


def forgetful():
    """A model that masks nothing before its window, as Moshi: its cache forgets that."""
    from transformers import LlamaForCausalLM

    class Forgetful(LlamaForCausalLM):
        pass

    model = llama(dtype=BF16)
    model.__class__, model.config.sliding_window = Forgetful, 12
    return model


def prompts(batch, length=9):
    ids = torch.arange(3, 3 + batch * length).reshape(batch, length) % 120
    mask = torch.ones_like(ids)
    for row in range(1, batch):
        mask[row, : 2 * row] = 0
    return {"input_ids": ids, "attention_mask": mask}


def run(vb, inputs, **kwargs):
    settings = {"max_new_tokens": TOKENS, "pad_token_id": 0, "return_dict_in_generate": True, "output_logits": True}
    return vb.generate(**inputs, **{**settings, **kwargs})


def assert_same(got, plain):
    assert torch.equal(got.sequences, plain.sequences)
    assert len(got.logits) == len(plain.logits) and all(map(torch.equal, got.logits, plain.logits))
    assert got.past_key_values.get_seq_length() == plain.past_key_values.get_seq_length()


class Erratic(Pace):
    """Chooses any drafter and number of drafts, the same in each test."""

    def __init__(self, drafters, fixed=None):
        super().__init__(drafters, fixed)
        self.dice = random.Random(3)

    def choose(self, room, without=()):
        names = [name for name in self._records if name not in without]
        k = min(room, self.dice.choice((0, 1, 2, 4, 8)))
        return Choice(self.dice.choice(names), k) if names and k > 0 else Choice("", 0)

    def note(self, done):
        pass

    pays = property(lambda self: self.dice.random() < 0.5)


@pytest.fixture
def erratic(monkeypatch):
    monkeypatch.setattr(seeded_generate, "Pace", Erratic)


@pytest.fixture(scope="module")
def wrapped():
    with wrap(llama(dtype=BF16), "exact") as vb:
        yield vb


@pytest.fixture(scope="module", params=["eager rows", "captured rows"])
def drafting(request):
    """A model, and the arguments that have it draft."""
    eager = request.param == "eager rows"
    further = {} if eager else {"assistant_model": llama(dtype=BF16)}
    with wrap(llama(dtype=BF16), "exact" if eager else "nvfp4") as vb:
        yield vb, {"speculate": K, **further}
        assert vb.stats().speculation.accepted and (eager or vb.stats().steps.captured)


@pytest.mark.sample(2)
@matrix(
    model={"llama": lambda: llama(dtype=BF16), "gpt2": lambda: gpt2(dtype=BF16), "window": mistral},
    how={"greedy": GREEDY, "sampled": SAMPLED},
    batch=(1, 3),
    k=(K, "auto"),
)
def test_tokens_and_logits_are_those_of_plain_decoding(model, how, batch, k, erratic):
    with wrap(model(), "exact") as vb:
        plain = run(vb, prompts(batch), **how)
        got = run(vb, prompts(batch), **how, speculate=k)
        assert_same(got, plain)
        counted = vb.stats().speculation
        assert counted.tokens == len(plain.logits) - 1 and counted.rounds < counted.tokens
        assert 0 < counted.accepted <= counted.tried <= counted.drafted


@pytest.mark.sample(1)
@pytest.mark.parametrize("model", [lambda: llama(dtype=BF16), mistral], ids=["full", "window"])
def test_keys_in_the_tiers_are_drafted_on_and_rewound(model):
    with wrap(model(), "exact") as vb:
        plain = run(vb, prompts(2))
        for k in (12, K):  # more rows than a window has keys, and fewer
            rounds = vb.stats().speculation.rounds if vb.stats().speculation else 0
            got = run(vb, prompts(2), past_key_values=vbrt.KVCache(vb, page=2), speculate=k)
            assert_same(got, plain)
            assert 0 < vb.stats().speculation.rounds - rounds < TOKENS - 1 and not vb.stats().fallbacks
        with pytest.warns(UserWarning, match="its cache rounds to 8 bits what it holds"):
            run(vb, prompts(2), past_key_values=vbrt.KVCache(vb, page=4, bits=8), speculate=K)


def test_windows_of_a_transformers_whose_past_does_not_fit_its_masks_are_decoded_plainly(monkeypatch):
    monkeypatch.setattr(cache_refusals, "_keeps_past", lambda: False)
    with wrap(mistral(), "exact", compute={"captures": False}) as vb:
        plain = run(vb, prompts(2))
        with pytest.warns(UserWarning, match="gives more past keys than its masks have"):
            assert_same(run(vb, prompts(2), speculate=K), plain)
        assert vb.stats().speculation is None


def drafts(vb):
    """Passes that drafted so far."""
    phases = vb.stats().phases
    return phases["draft"].passes if "draft" in phases else 0


def off_by_a_bit(decoding, draft):
    rows = in_one_pass(decoding, draft)
    return rows._replace(logits=[logits.nextafter(torch.ones_like(logits)) for logits in rows.logits])


@pytest.mark.sample(1)
@pytest.mark.parametrize("k", [3, "auto"])
def test_a_model_whose_rows_no_pass_can_verify_is_drafted_for_once_and_never_again(k, erratic):
    with wrap(qwen3_moe(experts="eager"), "exact") as vb, warnings.catch_warnings(record=True) as said:
        failed = "row-wise verification failed: NotByToken: linear of a tensor without a token dimension"
        why, drafted = f"generate: speculate: {failed}; decoded one token at a time", []
        for batch, how in ((2, GREEDY), (2, SAMPLED), (1, GREEDY)):
            plain = run(vb, prompts(batch), **how)
            assert_same(run(vb, prompts(batch), **how, speculate=k), plain)
            drafted.append(drafts(vb))
            assert [reason for reason in vb.stats().fallbacks if "speculate" in reason] == [why]
        assert drafted[0] > 0 and len(set(drafted)) == 1 and vb.stats().speculation is None
        assert [str(each.message) for each in said if "speculate" in str(each.message)] == [why]
        run(vb, prompts(2), speculate=k, exactness="distribution")
        assert vb.stats().speculation.accepted


def test_a_batch_size_whose_rows_differ_in_a_bit_is_drafted_for_once_and_others_still_are(monkeypatch):
    with wrap(llama(dtype=BF16), "exact") as vb:
        plain = run(vb, prompts(1))
        with monkeypatch.context() as patched:
            patched.setattr("vbrt.generation.speculation.verification.token_by_token", off_by_a_bit)
            with pytest.warns(UserWarning, match="is not bitwise equal to single-token passes"):
                assert_same(run(vb, prompts(1), speculate=K), plain)
        before = drafts(vb)
        assert_same(run(vb, prompts(1), speculate=K), plain)
        assert 0 < before == drafts(vb) and vb.stats().speculation.tokens < TOKENS - 1
        assert_same(run(vb, prompts(2), speculate=K), run(vb, prompts(2)))
        assert vb.stats().speculation.accepted


def test_keys_that_differ_in_a_bit_where_logits_do_not_are_found(monkeypatch):
    def off_in_the_cache(decoding, draft):
        rows = token_by_token(decoding, draft)
        draft.cache.layers[-1].values[:, :, -1 - K].mul_(2)  # of the first row
        return rows

    monkeypatch.setattr("vbrt.generation.speculation.verification.token_by_token", off_in_the_cache)
    with wrap(llama(dtype=BF16), "exact") as vb:
        plain = run(vb, prompts(1))
        with pytest.warns(UserWarning, match="is not bitwise equal to single-token passes"):
            assert_same(run(vb, prompts(1), speculate=K), plain)


def test_a_page_that_cannot_be_read_is_no_verdict_on_the_model(monkeypatch):
    def fail(decoding, draft):
        raise TierError("cannot be read")

    with wrap(llama(dtype=BF16), "exact") as vb:
        with monkeypatch.context() as patched, pytest.raises(TierError, match="cannot be read"):
            patched.setattr("vbrt.generation.speculation.verification.token_by_token", fail)
            run(vb, prompts(1), speculate=K)
        assert_same(run(vb, prompts(1), speculate=K), run(vb, prompts(1)))
        assert vb.stats().speculation.accepted


def test_greedy_tokens_are_those_of_the_dense_model_in_transformers(wrapped):
    inputs = prompts(2)
    plain = run(llama(dtype=BF16), inputs, **GREEDY)
    assert_same(run(wrapped, inputs, **GREEDY, speculate=K), plain)


def test_eager_steps_of_a_seeded_call_are_counted_with_their_reason():
    with wrap(llama(dtype=BF16), "exact") as vb:
        run(vb, prompts(1), **SAMPLED)
        steps = vb.stats().steps
    assert (steps.captured, steps.eager) == (0, TOKENS - 1) and set(steps.reasons.values()) == {TOKENS - 1}


def test_streamed_weights_are_read_once_a_round(tmp_path):
    with wrap_streamed(llama(dtype=BF16), "exact", tmp_path) as vb:
        plain = run(vb, prompts(1))
        passes = vb.stats().phases["decode"]
        a_pass = (passes.hits + passes.misses) / passes.passes
        assert_same(run(vb, prompts(1), speculate=K), plain)
        verify, counted = vb.stats().phases["verify"], vb.stats().speculation
        assert verify.hits + verify.misses == a_pass * verify.passes
        assert verify.passes <= counted.rounds + 2 * 4  # first rows of the first two are computed in two ways
        assert counted.link_bytes > 0 and counted.bytes_per_token < counted.link_bytes


def test_what_stops_decoding_stops_it_at_the_same_token_within_a_draft(drafting):
    vb, drafts = drafting
    inputs = prompts(1)
    tokens = run(vb, inputs).sequences[0, 9:].tolist()
    for stop in (3, 4):
        for settings in ({"eos_token_id": tokens[stop]}, {"max_new_tokens": stop}):
            assert_same(run(vb, inputs, **settings, **drafts), run(vb, inputs, **settings))
    rows = prompts(8)
    eos = run(vb, rows).sequences[1, 12].item()
    assert_same(run(vb, rows, eos_token_id=eos, **drafts), run(vb, rows, eos_token_id=eos))


class Nudge(LogitsProcessor):
    """Favours a token by the number of its calls, so it must not be called ahead."""

    def __init__(self, calls):
        self.calls = calls

    def __call__(self, input_ids, scores):
        self.calls.append(input_ids.tolist())
        return scores + torch.eye(128)[(7 * len(self.calls)) % 128]


class After(StoppingCriteria):
    """Stops after some calls."""

    def __init__(self, calls):
        self.calls = calls

    def __call__(self, input_ids, scores, **kwargs):
        self.calls.append(input_ids.tolist())
        return torch.full((len(input_ids),), len(self.calls) > 18)


class Streamer:
    def __init__(self):
        self.put_values, self.ended = [], 0

    def put(self, value):
        self.put_values.append(value.tolist())

    def end(self):
        self.ended += 1


@pytest.mark.sample(1)
def test_processors_criteria_and_streamers_are_called_as_plain_decoding_calls_them(drafting):
    vb, drafts = drafting
    results = []
    for further in ({}, drafts):
        seen, streamer = [], Streamer()
        extra = {"logits_processor": [Nudge(seen)], "stopping_criteria": StoppingCriteriaList([After(seen)])}
        out = run(vb, prompts(1), **extra, streamer=streamer, **further)
        results.append((out.sequences.tolist(), seen, streamer.put_values, streamer.ended))
    assert results[0] == results[1] and results[0][3] == 1


class Rescaling(LogitsProcessor):
    """Changes how a layer scales what it attends to, at some tokens."""

    def __init__(self, layer):
        self.layer, self.calls = layer, 0

    def __call__(self, input_ids, scores):
        self.calls += 1
        if self.calls in (6, 11):
            self.layer.scaling = 4 - self.layer.scaling
        return scores


def test_rows_behind_a_token_whose_callback_changes_the_model_are_computed_anew(drafting):
    vb, drafts = drafting
    layer, found = vb.module.model.layers[0].self_attn, []
    before = layer.scaling
    for further in ({}, drafts):
        found.append(run(vb, prompts(2), logits_processor=LogitsProcessorList([Rescaling(layer)]), **further))
        layer.scaling = before
    assert_same(*found)


def test_autocast_is_that_of_plain_decoding(recorded):
    with wrap(llama(dtype=BF16), "exact") as vb:
        with torch.autocast("cpu", BF16):
            assert_same(run(vb, prompts(2), speculate=K), run(vb, prompts(2)))
        assert vb.stats().steps.reasons.keys() == {"autocast is on"} and vb.stats().speculation.rounds < TOKENS - 1
        assert_same(run(vb, prompts(2), speculate=K), run(vb, prompts(2)))


@pytest.mark.sample(1)
def test_a_batch_whose_rows_accept_different_counts_keeps_what_a_row_has_right(drafting):
    vb, drafts = drafting
    rows = prompts(3)
    before = vb.stats().speculation
    assert_same(run(vb, rows, **{**drafts, "speculate": 8}, **SAMPLED), run(vb, rows, **SAMPLED))
    counted = vb.stats().speculation
    assert counted.rounds - (before.rounds if before else 0) < TOKENS - 1


def test_distribution_draws_what_the_model_gives(wrapped):
    torch.manual_seed(0)
    batch, top = 600, 3
    inputs = {"input_ids": prompts(1)["input_ids"].expand(batch, -1)}
    how = {"do_sample": True, "top_k": top, "temperature": 3.0, "max_new_tokens": 3, "min_new_tokens": 3}
    drawn = wrapped.generate(
        **inputs, attention_mask=torch.ones_like(inputs["input_ids"]), pad_token_id=0, **how, speculate=2,
        exactness="distribution",
    )[:, 9:]  # fmt: skip
    pairs, counts = torch.unique(drawn[:, :2], dim=0, return_counts=True)
    statistic, cells = 0.0, 0
    with torch.no_grad():
        for first in pairs[:, 0].unique():
            ids = torch.cat([inputs["input_ids"][:1], first.view(1, 1)], 1)
            kept = (wrapped(ids).logits[0, -1].float() / 3.0).topk(top)
            of_first = pairs[:, 0] == first
            expected = kept.values.softmax(-1) * counts[of_first].sum()
            got = [counts[of_first & (pairs[:, 1] == token)].sum() for token in kept.indices]
            assert sum(got) == counts[of_first].sum()
            statistic += sum(((g - e) ** 2 / e).item() for g, e in zip(got, expected, strict=True))
            cells += top - 1
    assert statistic < cells + 4 * (2 * cells) ** 0.5


class Interrupting(LogitsProcessor):
    def __call__(self, input_ids, scores):
        if input_ids.shape[1] == 13:
            raise KeyboardInterrupt
        return scores


@pytest.mark.sample(2)
@pytest.mark.parametrize("where", ["processor", "row alone", "all rows"])
def test_ctrl_c_leaves_the_model_as_it_was(where):
    rows = {"row alone": 1, "all rows": K + 1}
    with wrap(llama(dtype=BF16), "exact") as vb:
        inputs = prompts(1)
        plain = run(vb, inputs)

        def interrupt(module, args):
            if pass_precision() == "full" and args[0].shape[1] == rows.get(where):
                raise KeyboardInterrupt

        hook = vb.module.model.layers[1].mlp.register_forward_pre_hook(interrupt)
        processors = LogitsProcessorList([Interrupting()] if where == "processor" else [])
        with pytest.raises(KeyboardInterrupt):
            run(vb, inputs, speculate=K, logits_processor=processors)
        hook.remove()
        assert_same(run(vb, inputs, speculate=K), plain)
        assert vb.stats().speculation.accepted and not vb.stats().fallbacks


def test_what_cannot_be_drafted_is_decoded_plainly_and_says_why_once():
    with wrap(llama(), "nvfp4") as vb, pytest.warns(UserWarning, match="no weight has a fine plane"):
        run(vb, prompts(1), speculate="auto", drafter="coarse")
    with wrap(llama(dtype=BF16), "exact") as vb:
        with pytest.warns(UserWarning, match="beam search does not decode token by token"):
            run(vb, prompts(1), speculate="auto", num_beams=2)
        plain = run(vb, prompts(1), cache_implementation="static")
        with pytest.warns(UserWarning, match="its cache (cannot be rewound: StaticCache|has layers of StaticLayer)"):
            got = run(vb, prompts(1), speculate="auto", cache_implementation="static")
        assert torch.equal(got.sequences, plain.sequences)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            run(vb, prompts(1), speculate="auto", num_beams=2)
        assert sum("speculate" in reason for reason in vb.stats().fallbacks) == 2


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("model", "how"), [(lambda: llama(dtype=BF16), GREEDY), (mistral, SAMPLED)], ids=["full", "window, sampled"]
)
@pytest.mark.parametrize("compute", [{}, ROUNDED], ids=["bits", "rounded"])
def test_tokens_and_logits_are_those_of_recorded_steps_where_plain_decoding_replays_them(recorded, model, how, compute):
    with wrap(model(), "exact", compute=compute) as vb:
        plain = run(vb, prompts(2), **how)
        eager = vb.stats().steps.eager
        before = vb.stats().steps.captured
        got = run(vb, prompts(2), **how, speculate=3)
        assert_same(got, plain)
        steps, counted = vb.stats().steps, vb.stats().speculation
        assert before == TOKENS - 1 and eager == 0 and steps.captured > before, steps.reasons
        assert counted.rounds < TOKENS - 1 and not vb.stats().fallbacks
        assert (
            run(vb, prompts(2), **how, speculate=3, exactness="distribution").sequences.shape == plain.sequences.shape
        )


@pytest.mark.sample(2)
@pytest.mark.parametrize("exactness", ["tokens", "distribution"])
@pytest.mark.parametrize("steps", ["recorded", "eager"])
def test_a_model_that_leaves_it_to_its_cache_to_forget_is_decoded_plainly(steps, exactness, request):
    if steps == "recorded":
        request.getfixturevalue("recorded")
    with wrap(forgetful(), "exact") as vb, warnings.catch_warnings(record=True) as said:
        plain = run(vb, prompts(2), **SAMPLED)
        got = run(vb, prompts(2), **SAMPLED, speculate=3, exactness=exactness)
        assert torch.equal(got.sequences, plain.sequences)
        rows_by_steps = (steps, exactness) == ("recorded", "tokens")  # these see no token before the window
        assert (vb.stats().speculation is not None) is rows_by_steps
        assert run(vb, prompts(2), max_new_tokens=2, speculate=3).sequences.shape == (2, 11)
        assert vb.stats().speculation.rounds or rows_by_steps  # the window is not passed by then
    assert rows_by_steps or sum("Forgetful relies on its cache to drop" in str(each.message) for each in said) == 1


def test_a_model_that_steps_compute_otherwise_where_they_are_recorded_is_decoded_plainly(recorded):
    from transformers import LlamaForCausalLM

    class ByMask(LlamaForCausalLM):
        def forward(self, *args, attention_mask=None, **kwargs):
            out = super().forward(*args, attention_mask=attention_mask, **kwargs)
            out.logits = out.logits * (1 + (attention_mask.shape[1] > 18))
            return out

    found, how = [], SAMPLED | {"max_new_tokens": 20}
    for further in ({}, {"speculate": 3}):
        model = llama(dtype=BF16)
        model.__class__ = ByMask
        with wrap(model, "exact", compute=ROUNDED) as vb, warnings.catch_warnings(record=True) as said:
            found.append(run(vb, prompts(2), **how, **further))
    assert_same(*found)
    assert vb.stats().speculation.rounds  # in the blocks where they are alike
    why = "row-wise verification is not bitwise equal"  # by the steps that are eager from there on
    assert [each for each in said if f"speculate: {why}" in str(each.message)]


def test_a_call_whose_steps_cannot_be_recorded_any_more_goes_on_plainly(recorded, monkeypatch):
    with wrap(llama(dtype=BF16), "exact") as vb:
        plain, replays = run(vb, prompts(1)), []
        replay = Recording.replay

        def out_of_memory(self, call, *on):
            replays.append(call)
            if len(replays) == 7:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return replay(self, call, *on)

        monkeypatch.setattr(Recording, "replay", out_of_memory)
        with pytest.warns(UserWarning, match="no memory for it: CUDA out of memory"):
            got = run(vb, prompts(1), speculate=2)
        assert torch.equal(got.sequences, plain.sequences)


def test_values_out_of_range_are_refused(wrapped):
    for bad in ({"speculate": 0}, {"speculate": True}, {"speculate": 99}, {"exactness": "bits"}, {"seed": 0.5}):
        with pytest.raises(ArgumentError, match=next(iter(bad))):
            run(wrapped, prompts(1), **bad)
    with pytest.raises(ArgumentError, match="seed = 3: beam search"):
        run(wrapped, prompts(1), seed=3, num_beams=2)


def test_a_timeline_has_each_round_with_its_drafts_and_verification_inside(wrapped, tmp_path):
    before = wrapped.stats().speculation
    with wrapped.timeline(tmp_path / "out.html") as recording:
        run(wrapped, prompts(1), speculate=3, exactness="distribution", **GREEDY)
    counts = wrapped.stats().speculation
    of = {row: [span for span in recording.timeline.spans if span.row == row] for row in ("round", "pass")}
    assert len(of["round"]) == counts.rounds - (before.rounds if before else 0) > 0
    taken = [int(span.page.split()[0]) for span in of["round"]]
    assert sum(taken) == counts.tokens - (before.tokens if before else 0)
    passes = [[p.page for p in of["pass"] if r.start_us <= p.start_us and p.end_us <= r.end_us] for r in of["round"]]
    want = [int(span.page.split(" of ")[1].split()[0]) for span in of["round"]]  # drafts; a round of none only verifies
    assert passes == [["draft"] * k + ["verify" if k else "decode"] for k in want] and want[0] == 3


def test_drafts_go_on_where_memory_of_a_shorter_call_ends(recorded):
    with wrap(llama(dtype=BF16), "exact") as vb:
        run(vb, prompts(1), max_new_tokens=3, speculate=2)
        got = run(vb, prompts(1), speculate=2)
        assert_same(got, run(vb, prompts(1)))
        assert vb.stats().steps.eager == 0, vb.stats().steps
