"""Decode steps on a CPU by tapes: what eager steps give but for rounding, and whatever the call asks for."""

import threading
import warnings
from dataclasses import replace

import pytest
import torch

import vbrt
from tests import models
from tests.generation.families import FAMILIES, MASK, PROMPT, generated, tiny
from tests.matrix import matrix
from vbrt.generation.capture.session import FIRST, GROWN, KEEPS_BITS, SHRUNK
from vbrt.generation.generate import Terms
from vbrt.model.auto_budget import GpuBalance
from vbrt.residency.plan import GpuRoom

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore:vbrt.wrap")


@pytest.fixture(autouse=True)
def blocks(monkeypatch):
    """Record in blocks of 8 tokens."""
    monkeypatch.setattr("vbrt.generation.static.length_buckets.BLOCK", 8)


def wrapped(family: str = "llama", dtype: torch.dtype = torch.float32, **settings) -> vbrt.VBModelWrapper:
    return vbrt.wrap(tiny(family).to(dtype), "fp4", weights={"min_parameters": 1}, **settings)


def steps(vb) -> tuple[int, int]:
    counts = vb.stats().steps
    return counts.captured, counts.eager


def moved(vb) -> int:
    return sum(sum(page.bytes_moved.values()) for page in vb.stack.pages.values())


def same(vb, eager, *, atol: float = 1e-5, **kwargs) -> None:
    want, got = generated(eager, **kwargs), generated(vb, **kwargs)
    assert torch.equal(got.sequences, want.sequences)
    for one, other in zip(got.logits, want.logits, strict=True):
        torch.testing.assert_close(one, other, atol=atol, rtol=1e-4)


@pytest.mark.sample(5)
@matrix(family=list(FAMILIES), call={"sampled": {"do_sample": True}, "beams": {"num_beams": 2}})
def test_tapes_give_the_tokens_of_eager_steps(family, call):
    vb, eager = wrapped(family), wrapped(family, compute={"captures": False})
    same(vb, eager, **call)
    assert steps(vb) == (13, 0), vb.stats().steps.reasons
    if family == "llama":
        counts = vb.stats().steps
        assert counts.joined["attention"] == 2 * counts.recordings and not counts.unjoined


@pytest.mark.sample(1)
@matrix(dtype=[torch.bfloat16, torch.float16], format=["mxfp4", "nf4", "quantile"])
def test_tapes_in_16_bits_round_as_eager_steps_do(dtype, format):
    given = {"weights": {"min_parameters": 1, "format": format}}
    vb = vbrt.wrap(tiny("llama").to(dtype), "fp4", **given)
    eager = vbrt.wrap(tiny("llama").to(dtype), "fp4", compute={"captures": False}, **given)
    same(vb, eager, atol=0.03)
    assert steps(vb) == (13, 0)


@pytest.mark.parametrize("joins", [True, False])
def test_steps_in_4_bits_are_joined_unless_the_config_says_no(joins):
    vb = wrapped(compute={"joins": joins})
    same(vb, wrapped(compute={"captures": False}))
    counts = vb.stats().steps
    assert (counts.captured, counts.eager) == (13, 0) and ("attention" in counts.joined) is joins
    assert counts.recordings == (1 if joins else 3)  # joined attention passes over masked places: blocks of 32, not 8


def test_a_second_call_replays_what_the_first_one_recorded():
    vb = wrapped()
    first = generated(vb)
    assert torch.equal(generated(vb).sequences, first.sequences)
    counts = vb.stats().steps
    assert (counts.captured, counts.eager, counts.recordings) == (13 + 13, 0, 1)
    assert 0 < counts.held_bytes < 1 << 20 and "1 capture in " in str(vb.stats(verbose=True))
    vb.set_budget("cpu", 1 << 30)
    vb.close()
    assert vb.stats().steps.held_bytes == 0


def test_layers_and_their_pages_count_what_is_replayed():
    vb = wrapped()
    generated(vb)
    before, hits = vb.stats(), {key: page.hits for key, page in vb.stack.pages.items()}
    generated(vb)
    after = vb.stats()
    assert {layer.forwards - before.layers[name].forwards for name, layer in after.layers.items()} == {14}
    assert {page.hits - hits[key] for key, page in vb.stack.pages.items()} == {14}
    assert after.phases["decode"].passes - before.phases["decode"].passes == 13


@matrix(experts=[4, 8], compute={"exact": {}, "int8": {"int8": True}})
def test_experts_whose_pages_never_move_are_counted_as_if_leased(experts, compute):
    def counts(vb):
        layers = [m for m in vb.module.modules() if hasattr(m, "_vb_handle") and hasattr(m._vb_handle, "routing")]
        handles = [layer._vb_handle for layer in layers]
        assert len(handles) == 2
        routed = [
            (h.forwards, h.routing.cached, h.routing.tokens, h.routing.touched, h.routing.reused) for h in handles
        ]
        return routed, [page.hits for h in handles for page in h.pages], [h.pages[0].tally.hits for h in handles]

    given = {"max_new_tokens": 12, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    found = []
    for captures in (False, True):
        model = tiny("qwen3_moe", num_experts=experts)
        vb = vbrt.wrap(model, "fp4", weights={"min_parameters": 1}, compute={"captures": captures, **compute})
        vb.generate(PROMPT[1:], **given)
        before = counts(vb)
        out = vb.generate(PROMPT[1:], **given)
        added = torch.tensor([a - b for a, b in zip(flat(counts(vb)), flat(before), strict=True)])
        found.append((out, added, vb.stats().steps.captured))
    (want, eager, _), (got, taped, captured) = found
    assert torch.equal(got.sequences, want.sequences) and captured == 11 + 11
    for one, other in zip(got.logits, want.logits, strict=True):
        torch.testing.assert_close(one, other, atol=0.03, rtol=1e-2)
    assert torch.equal(eager, taped)


def flat(of) -> list[int]:
    return [n for part in of for n in flat(part)] if isinstance(of, list | tuple) else [of]


def test_layers_whose_pages_move_are_leased_within_a_tape(tmp_path):
    eager = wrapped(compute={"captures": False})
    budget = sum(page.nbytes for page in eager.materialize().stack.pages.values()) // 2
    vb = wrapped(tiers={"cpu": {"budget": budget}, "ssd": {"enabled": True, "path": str(tmp_path)}})
    same(vb, eager)
    assert steps(vb) == (13, 0), vb.stats().steps.reasons
    before = moved(vb)
    generated(vb)
    assert moved(vb) > before
    vb.set_budget("cpu", 4 * budget)
    same(vb, eager)


def test_a_changed_model_is_recorded_again():
    vb, eager = wrapped(), wrapped(compute={"captures": False})
    same(vb, eager)
    for model in (vb.module, eager.module):
        model.load_state_dict({name: 1.5 * tensor for name, tensor in model.state_dict().items()})
    same(vb, eager)
    for model in (vb.module, eager.module):
        model.model.layers[0].self_attn.scaling = 0.1
    same(vb, eager)
    assert vb.stats().steps.recordings == 3


@pytest.mark.sample(1)
@pytest.mark.parametrize("mode", ["inference", "autocast"])
def test_modes_of_torch_are_those_of_eager_steps(mode):
    vb, eager = wrapped(), wrapped(compute={"captures": False})
    same(vb, eager)
    modes = {"inference": torch.inference_mode, "autocast": lambda: torch.autocast("cpu", torch.bfloat16)}
    with warnings.catch_warnings(), modes[mode]():
        warnings.simplefilter("ignore")
        assert torch.equal(generated(eager).sequences, generated(vb).sequences)
    assert steps(vb) == ((26, 0) if mode == "inference" else (13, 13))
    same(vb, eager)


def test_a_cache_that_the_caller_keeps_goes_on():
    turns = []
    for model in (wrapped("gemma3", compute={"captures": False}), wrapped("gemma3")):
        first = model.generate(PROMPT[1:], max_new_tokens=12, do_sample=False, return_dict_in_generate=True)
        cache = first.past_key_values
        held = [layer.keys.clone() for layer in cache.layers]
        model.generate(PROMPT[1:] + 1, max_new_tokens=12, do_sample=False)  # runs on the memory of the first one
        assert all(torch.equal(layer.keys, keys) for layer, keys in zip(cache.layers, held, strict=True))
        ids = torch.cat((first.sequences, PROMPT[1:]), dim=1)
        again = model.generate(ids, past_key_values=cache, max_new_tokens=9, do_sample=False)
        turns.append((first.sequences.tolist(), again.tolist()))
    assert turns[0] == turns[1]
    assert steps(model)[0] > 20


def test_lossless_weights_keep_the_bits_of_eager_steps():
    plain, vb = tiny("llama"), models.wrap(tiny("llama"))
    want, got = generated(plain), generated(vb)
    assert all(torch.equal(a, b) for a, b in zip(got.logits, want.logits, strict=True))
    assert vb.stats().steps.reasons == {KEEPS_BITS: 13}


def test_a_hook_within_the_model_is_named_and_called():
    vb, seen = wrapped(), []
    vb.module.model.layers[1].register_forward_hook(lambda module, args, out: seen.append(1))
    with pytest.warns(UserWarning, match=r"without capture: model\.layers\.1 has a hook"):
        generated(vb)
    assert steps(vb) == (0, 13) and len(seen) == 14


class Counted(torch.nn.Module):
    """A layer that adds up what it has seen, or reads numbers as a list."""

    def __init__(self, inner, how):
        super().__init__()
        self.inner, self.how, self.sum = inner, how, 0

    def forward(self, x):
        if self.how == "tolist":
            return self.inner(x) * (2 if x[0, -1].tolist()[0] > 0 else 1)
        self.sum = self.sum + x[:, -1:]
        return self.inner(x) + 0.1 * self.sum


@pytest.mark.parametrize(("how", "why"), [("tolist", r"Tensor\.tolist reads"), ("sums", r"it changes .*\.mlp\.sum")])
def test_a_layer_whose_python_a_replay_would_miss_stays_eager(how, why):
    vb, eager = wrapped(), wrapped(compute={"captures": False})
    for model in (vb.module, eager.module):
        model.model.layers[1].mlp = Counted(model.model.layers[1].mlp, how)
    with pytest.warns(UserWarning, match=why):
        same(vb, eager)
    assert steps(vb) == (0, 13)


def test_a_cache_with_states_of_its_own_stays_eager():
    from transformers import DynamicCache

    class Own(DynamicCache):
        pass

    vb = wrapped()
    with pytest.warns(UserWarning, match="the cache is a Own"):
        generated(vb, past_key_values=Own())
    assert steps(vb) == (0, 13)


def test_layers_of_a_cache_that_hold_nothing_may_be_of_any_class():
    from transformers.cache_utils import DummyLayer

    from vbrt.generation.static.static_cache import Idle, _made

    layer = DummyLayer()
    layer.__class__ = _made(Idle, DummyLayer)
    assert isinstance(layer, Idle) and isinstance(layer, DummyLayer)
    layer.enter_(None)
    layer.leave_()
    assert type(layer) is DummyLayer


@pytest.mark.parametrize("error", [KeyboardInterrupt, torch.OutOfMemoryError])
def test_an_interrupted_replay_leaves_the_model_usable(error, monkeypatch):
    vb, eager = wrapped(), wrapped(compute={"captures": False})
    generated(vb)

    def failing(self, *inputs):
        raise error("now")

    with monkeypatch.context() as patched, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patched.setattr("vbrt.generation.fusion.cpu_tape.Tape.__call__", failing)
        if error is KeyboardInterrupt:
            with pytest.raises(KeyboardInterrupt):
                generated(vb)
        else:
            same(vb, eager)
    same(vb, eager)


def test_threads_generate_with_one_model_at_once():
    vb, got = wrapped(), {}
    want = generated(wrapped(compute={"captures": False})).sequences
    threads = [threading.Thread(target=lambda n=n: got.update({n: generated(vb).sequences})) for n in range(2)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(got) == 2 and all(torch.equal(tokens, want) for tokens in got.values())


@pytest.mark.sample(5)
@matrix(
    family=list(FAMILIES),
    format=["nvfp4", "mxfp4", "nf4", "quantile", "mxint8"],
    dtype=[torch.float32, torch.bfloat16],
    compute=[{}, {"int8": True}, {"backend": "reference"}],
    rows=[1, 2],
)
def test_the_first_call_has_the_bits_of_the_next_ones(family, format, dtype, compute, rows):
    weights = {"min_parameters": 1, "format": format}
    vb = vbrt.wrap(tiny(family).to(dtype), "fp4", weights=weights, compute=compute)
    given = {"max_new_tokens": 14, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    first, *others = (vb.generate(PROMPT[-rows:], attention_mask=MASK[-rows:], **given) for _ in range(3))
    assert steps(vb) == (3 * 13, 0)
    for other in others:
        assert torch.equal(first.sequences, other.sequences)
        assert all(map(torch.equal, first.logits, other.logits))


def test_a_growing_cache_asks_for_room_before_it_takes_memory_and_is_recorded_once_for_it(monkeypatch):
    vb, asked, way = wrapped(), [], []
    monkeypatch.setattr(Terms, "make_room", lambda self, nbytes: asked.append((nbytes, len(steps_of(vb).kept))))
    monkeypatch.setattr(Terms, "gives_way", lambda self: bool(way))
    generated(vb)
    statics = steps_of(vb).kept[0].statics
    assert asked == [(sum(tensor.nbytes for tensor in statics.tensors()) - statics.position.nbytes, 0)]
    generated(vb)
    assert len(asked) == 1  # static memory is kept
    way.append(True)
    generated(vb)
    assert steps_of(vb).kept[0].statics is statics and len(asked) == 1
    ids = torch.randint(1, 97, (len(PROMPT), 3 * statics.room))
    for _ in range(2):
        vb.generate(ids, max_new_tokens=4, do_sample=False)
    assert len(asked) == 2 and steps_of(vb).kept[0].statics.room > statics.room
    assert vb.stats().steps.causes == {FIRST: 1, GROWN: 1}
    for _ in range(2):
        generated(vb)  # which needs little of it: pages get the rest back
    assert len(asked) == 3 and steps_of(vb).kept[0].statics.room == statics.room
    vb.generate(PROMPT[:1], max_new_tokens=4, do_sample=False)  # memory of one form at a time while it is short
    assert [len(kept.statics.rooms) for kept in steps_of(vb).kept] == [2] and asked[3][1] == 0
    steps = vb.stats().steps
    assert steps.causes == {FIRST: 2, GROWN: 1, SHRUNK: 1} and steps.recordings == 4


def test_pages_that_move_for_a_cache_cost_one_recording_and_not_another_one_after_it(monkeypatch):
    vb = wrapped()
    want = generated(vb).sequences
    steps_of(vb).release()

    def moves(self, nbytes):
        self._stack.ledger.changes += 1

    monkeypatch.setattr(Terms, "make_room", moves)
    assert torch.equal(generated(vb).sequences, want)
    steps = vb.stats().steps
    assert (steps.recordings, steps.eager) == (2, 0) and sum(steps.causes.values()) == 2


def steps_of(vb):
    return vb.module.generate.steps


@pytest.fixture
def short_of_room(monkeypatch):
    """Returns a wrapped model that has room for a pass over 32 tokens, and the lengths of its forwards."""

    def made(family="llama", **settings):
        vb, lengths = wrapped(family, **settings), []
        attachment = vb._attachment
        monkeypatch.setattr(attachment, "_plan", replace(attachment._plan, gpu_room=GpuRoom(1 << 30, 0, 32)))
        balance = GpuBalance(1 << 30, GpuRoom(1 << 30, 0, 32))
        balance.active, balance.wanted_bytes = False, 0
        attachment.runtime.balance = balance
        vb.module.model.register_forward_pre_hook(
            lambda module, args, kwargs: lengths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
        )
        return vb, lengths

    return made


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_prompts_that_gpu_memory_has_no_room_for_are_computed_in_parts(family, short_of_room):
    prompt = torch.randint(3, 90, (2, 40), generator=torch.Generator().manual_seed(0))
    how = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    want = wrapped(family).generate(prompt, **how)
    vb, lengths = short_of_room(family)
    with pytest.warns(UserWarning, match="prompts of more than 32 tokens are computed in parts of as many"):
        assert torch.equal(vb.generate(prompt, **how), want)
    assert lengths[:3] == [16, 16, 8]
    assert any("in parts of as many" in reason for reason in vb.stats().fallbacks)


@pytest.mark.parametrize(
    "given", [{"prefill_chunk_size": 20}, {"use_cache": False}, {"ids": torch.full((2, 16), 5)}], ids=str
)
def test_prompts_are_left_whole_where_the_call_says_so_or_there_is_room(given, short_of_room):
    vb, lengths = short_of_room()
    given = dict(given)
    ids = given.pop("ids", torch.full((2, 40), 5))
    vb.generate(ids, max_new_tokens=2, do_sample=False, pad_token_id=0, **given)
    assert lengths[0] == given.get("prefill_chunk_size", ids.shape[1]) and not vb.stats().fallbacks


def test_prompts_that_must_have_plain_bits_are_left_whole(short_of_room, monkeypatch):
    vb, lengths = short_of_room()
    monkeypatch.setattr(type(vb._attachment), "lossless", property(lambda self: True))
    vb.generate(torch.full((2, 40), 5), max_new_tokens=2, do_sample=False, pad_token_id=0)
    assert lengths[0] == 40
