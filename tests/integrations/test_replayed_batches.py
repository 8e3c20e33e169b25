"""Decode steps of continuous batches that are captured for padded sizes and replayed: the same tokens."""

import contextlib
import functools

import pytest
import torch
from torch.nn import functional

import vbrt
from tests.integrations.near_ties import largest_gap

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

from tests.integrations.batch_cases import gemma, generated, llama, prompts  # noqa: E402 - imports transformers
from vbrt.generation.capture import batch_steps  # noqa: E402 - imports transformers
from vbrt.generation.capture.batch_steps import AGAIN, NEW_SIZE, BatchSteps  # noqa: E402 - imports transformers
from vbrt.generation.generate import Terms  # noqa: E402
from vbrt.integrations import batches  # noqa: E402
from vbrt.integrations.text_generation import Turn  # noqa: E402
from vbrt.kernels.cuda import compiling  # noqa: E402
from vbrt.libraries import torch_api, transformers_flash, transformers_runner  # noqa: E402
from vbrt.libraries.transformers_runner import padded_cached, padded_sequences  # noqa: E402
from vbrt.model.phase import DECODE, named_phase  # noqa: E402

for feature in (transformers_flash.FLASH_BATCHES, transformers_runner.RUNNER):
    if feature.refusal():
        pytest.skip(feature.refusal(), allow_module_level=True)


def masked_varlen(query_MHK, key_NGK, value_NGK, begins_M, begins_N, longest_M, longest_N, *, scale, left):
    """`flash_varlen` through one mask: nothing is read by Python, as on a GPU."""
    groups = query_MHK.shape[1] // key_NGK.shape[1]
    at = [torch.arange(len(x), device=x.device) for x in (query_MHK, key_NGK)]
    of = [torch.searchsorted(b[1:].contiguous(), a, right=True) for a, b in zip(at, (begins_M, begins_N), strict=True)]
    ends = [torch.cat((b[1:], b[-1:]))[o] for o, b in zip(of, (begins_M, begins_N), strict=True)]
    behind = [a - e for a, e in zip(at, ends, strict=True)]  # -1: the last of its sequence
    sees = (of[0][:, None] == of[1][None]) & (of[0][:, None] < len(begins_M) - 1)
    sees &= behind[1][None] <= behind[0][:, None]
    if left >= 0:
        sees &= behind[1][None] >= behind[0][:, None] - left
    q, k, v = (x.transpose(0, 1)[None] for x in (query_MHK, key_NGK, value_NGK))
    k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
    out = functional.scaled_dot_product_attention(q, k, v, attn_mask=sees, scale=scale)
    return out[0].transpose(0, 1).nan_to_num(0.0)


@pytest.fixture
def routed(monkeypatch):
    monkeypatch.setattr(transformers_flash, "flash_refusal", lambda model: "")
    monkeypatch.setattr(torch_api, "flash_varlen", masked_varlen)


def put(monkeypatch, steps):
    monkeypatch.setattr(batches, "replayed_steps", lambda vb, cache: contextlib.nullcontext(steps))


class Repeated:
    """Steps of which each is the first one of its key again: what a graph does."""

    def __init__(self):
        self.first, self.repeated, self.sizes = {}, 0, []

    def refusal(self):
        return ""

    def run(self, key, step, written, *, sequences):
        self.repeated += key in self.first
        self.sizes.append(sequences)
        self.first.setdefault(key, step)()


@pytest.mark.parametrize("make", [llama, gemma])
def test_a_step_of_padded_size_is_repeated_for_all_of_its_size(make, routed, monkeypatch):
    torch.manual_seed(0)
    with vbrt.wrap(make().eval(), "dense") as vb:
        asked, steps = prompts(1, 5, 63, 130, 300, 900, 1100), Repeated()
        plain = generated(vb, asked)
        put(monkeypatch, steps)
        assert generated(vb, asked) == plain
        assert steps.repeated > 40 and set(steps.sizes) >= {2, 4} and max(steps.sizes) == 4
        assert len(steps.first) > 1 and {key[2] % 512 for key in steps.first} <= {0, *(key[1] for key in steps.first)}


def test_sizes_are_few_and_hold_what_they_stand_for():
    assert [padded_sequences(count, 12) for count in (1, 2, 3, 5, 9, 12)] == [1, 2, 4, 8, 12, 12]
    assert [padded_cached(tokens, 10**6) for tokens in (0, 1, 1024, 1025, 2049, 3000, 70_000)] == [
        *(1024, 1024, 1024, 2048, 3072, 3072, 98_304)
    ]
    assert padded_cached(70_000, 80_000) == 80_000
    assert all(tokens <= padded_cached(tokens, 10**6) < 1.5 * tokens + 1024 for tokens in range(1, 20_000, 7))


def steps_on_cpu(vb):
    """What `batch_steps` makes on a GPU, here with a tape in the place of CUDA graphs."""
    generating, attachment = vars(vb.module)["generate"], vb._attachment
    decoding = functools.partial(named_phase, attachment, DECODE, None)
    return BatchSteps(generating.steps, Terms(attachment, generating._recorder), decoding)


def test_steps_are_traced_fused_and_replayed_with_their_sampling(routed, monkeypatch):
    torch.manual_seed(0)
    with vbrt.wrap(llama().eval(), "fp4") as vb:
        asked = prompts(1, 5, 63, 130)
        plain = generated(vb, asked)
        assert vb.stats().steps.captured == 0  # a CPU's batch is eager
        put(monkeypatch, steps_on_cpu(vb))
        assert largest_gap(vb, asked, plain, generated(vb, asked)) < 0.1
        counts = vb.stats().steps
        assert counts.captured >= 20 and counts.causes[AGAIN] >= 1 and counts.joined and counts.reasons[NEW_SIZE]
        put(monkeypatch, steps := steps_on_cpu(vb))
        steps.release()
        assert generated(vb, asked) == plain and vb.stats().steps.captured == counts.captured


def test_steps_that_cannot_be_captured_are_eager_for_a_reason(routed, monkeypatch):
    torch.manual_seed(0)
    with vbrt.wrap(llama().eval(), "fp4") as vb:
        asked = prompts(5, 63)
        plain = {bits: generated(vb, asked, bits=bits) for bits in (16, 8)}
        put(monkeypatch, steps_on_cpu(vb))
        assert generated(vb, asked, bits=8) == plain[8]
        assert vb.stats().steps.reasons[transformers_runner.CODED] >= 29 and not vb.stats().steps.captured
        put(monkeypatch, steps_on_cpu(vb))
        reads = lambda *args, **how: (int(args[3][1]), masked_varlen(*args, **how))[1]  # noqa: E731
        monkeypatch.setattr(torch_api, "flash_varlen", reads)
        assert generated(vb, asked) == plain[16]
        (why,) = (reason for reason in vb.stats().steps.reasons if "cannot be captured" in reason)
        assert "reads a tensor's value" in why and not vb.stats().steps.captured
        monkeypatch.setattr(transformers_flash, "flash_refusal", lambda model: "no")
        put(monkeypatch, steps_on_cpu(vb))
        generated(vb, asked)
        assert vb.stats().steps.reasons[transformers_runner.MASKED] >= 29 and not vb.stats().steps.captured


@pytest.mark.parametrize(
    "error", [RuntimeError("no such stream"), torch.OutOfMemoryError("no room"), AttributeError("x")]
)
@pytest.mark.parametrize("where", ["capture", "replay", "moment"])
def test_an_error_in_a_capture_or_a_replay_leaves_the_batch_eager_with_one_warning(where, error, routed, monkeypatch):
    torch.manual_seed(0)
    with vbrt.wrap(llama().eval(), "fp4") as vb:
        asked = prompts(1, 5, 63, 130)
        plain = generated(vb, asked)
        put(monkeypatch, steps_on_cpu(vb))
        calls, wrong = [], {"capture": (Terms, "recorded"), "replay": (batch_steps._Captured, "replay")}.get(where)
        of, name = wrong or (Terms, "moment")
        before = getattr(of, name)

        def failing(*args):
            calls.append(name)
            if len(calls) > 3 * (where != "capture"):
                raise error
            return before(*args)

        monkeypatch.setattr(of, name, failing)
        with pytest.warns(UserWarning, match=type(error).__name__) as told:
            assert largest_gap(vb, asked, plain, generated(vb, asked)) < 0.1
        counts, said = vb.stats().steps, [str(one.message) for one in told if type(error).__name__ in str(one.message)]
        (why,) = (reason for reason in counts.reasons if type(error).__name__ in reason)
        assert len(said) == 1 and why in said[0] and str(error) in why and counts.reasons[why] >= 20
        assert counts.captured == {"capture": 0, "replay": 3, "moment": 1}[where]
        assert calls == [name] * (1 if where == "capture" else 4)


def test_steps_that_are_refused_after_an_error_are_captured_no_more(routed, monkeypatch):
    torch.manual_seed(0)
    with vbrt.wrap(llama().eval(), "fp4") as vb:
        asked = prompts(5, 63)
        plain = generated(vb, asked)
        put(monkeypatch, steps := steps_on_cpu(vb))
        generated(vb, asked)
        counts = vb.stats().steps
        assert counts.captured and steps._captured
        steps.refuse("an earlier batch has failed")
        assert not steps._captured and generated(vb, asked) == plain
        assert vb.stats().steps.captured == counts.captured
        assert vb.stats().steps.reasons["an earlier batch has failed"] >= 29


# -- on a GPU ---------------------------------------------------------------------------------------------------------


def on_gpu(make=llama):
    torch.manual_seed(0)
    return make().eval().to("cuda", torch.bfloat16)


def wrapped(model, config, budget):
    return vbrt.wrap(model, config, weights={"min_parameters": 0}, tiers={"gpu": {"budget": budget}})


@pytest.mark.gpu
@pytest.mark.parametrize("config", ["dense", "fp4"])
@pytest.mark.parametrize("make", [llama, gemma])
def test_a_gpus_steps_are_replayed_with_the_tokens_of_eager_ones_and_of_generate(config, make, monkeypatch):
    asked = prompts(1, 5, 63, 130, 300, 600)
    with wrapped(on_gpu(make), config, "1GiB") as vb:
        found = generated(vb, asked)
        counts = vb.stats().steps
        assert counts.captured > 40 and counts.recordings >= 2 and set(counts.reasons) == {NEW_SIZE}, counts
        with monkeypatch.context() as patch:
            put(patch, None)
            assert largest_gap(vb, asked, generated(vb, asked), found) < 0.2
        out = {}
        for name, ids in asked.items():
            new = vb.generate(torch.tensor([ids], device="cuda"), max_new_tokens=30, do_sample=False, pad_token_id=0)
            out[name] = new[0, len(ids) :].tolist()
        assert largest_gap(vb, asked, out, found) < 0.2


@pytest.mark.gpu
def test_a_gpus_steps_whose_pages_stream_are_replayed_and_follow_budgets(monkeypatch):
    asked = prompts(1, 5, 63, 130, 300, 600)
    with wrapped(on_gpu(), "fp4", "100KB") as vb:
        found = generated(vb, asked, new=60)
        counts = vb.stats().steps
        assert counts.captured > 80 and vb._attachment.stack.ledger.travellers, counts
        with monkeypatch.context() as patch:
            put(patch, None)
            assert largest_gap(vb, asked, generated(vb, asked, new=60), found) < 0.2
        whole = batches.generate_many(vb, asked, Turn(60), 2)  # the budget changes between its sequences
        results = [next(whole)]
        vb.set_budget("gpu", "1GiB")
        results += [next(whole)]
        vb.set_budget("gpu", "80KB")
        results += list(whole)
        results = {result.request: result.tokens for result in results}
        assert largest_gap(vb, asked, found, results) < 0.2


@pytest.mark.gpu
def test_a_gpus_steps_of_lossless_weights_that_stream_are_eager_by_name():
    with wrapped(on_gpu(), "dense", "200KB") as vb:
        generated(vb, prompts(5, 63))
        counts = vb.stats().steps
        assert not counts.captured and any("lossless weights stream" in reason for reason in counts.reasons), counts


@pytest.mark.gpu
def test_a_gpus_steps_draw_tokens_anew_at_each_replay():
    model = on_gpu()
    with torch.no_grad():
        model.lm_head.weight.zero_()  # all tokens are as likely
    with wrapped(model, "dense", "1GiB") as vb:
        found = batches.generate_many(vb, prompts(5), Turn(40, sample=True), 1)
        (result,) = found
        assert vb.stats().steps.captured > 20 and len(set(result.tokens)) > 15


@pytest.mark.gpu
def test_a_gpus_batch_launches_nothing_that_was_not_compiled_ahead():
    sizes = {"hidden_size": 640, "intermediate_size": 896, "num_hidden_layers": 2}  # of no other test
    with vbrt.wrap(llama(**sizes, head_dim=64).bfloat16().cuda(), "fp4") as vb:
        vb.materialize(progress=False)
        compiling.FIRST.clear()
        generated(vb, prompts(1, 5, 63, 130, 300, 600), new=8)
        firsts = list(compiling.FIRST)
        assert firsts and {launch.how for launch in firsts} <= {"ready", "waited", "compiled"}, firsts
        assert not vb.stats().steps.not_ahead
