"""Decode steps by recordings: the tokens of transformers' generate, whatever the model, the cache and the call."""

import contextlib
import functools
import itertools
import sys
import threading
import warnings
from types import SimpleNamespace

import pytest
import torch

import vbrt
from tests import models
from tests.generation.families import FAMILIES, MASK, PROMPT, generated, tiny
from tests.matrix import matrix
from vbrt.generation.capture.captured_step import Counted
from vbrt.generation.capture.session import CHANGED
from vbrt.generation.static.static_cache import Room, leave
from vbrt.kernels.operator_trace import recorder
from vbrt.model.mutation_watch import calls_others

transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.filterwarnings("ignore:vbrt.wrap"), pytest.mark.usefixtures("tapes")]


def wrapped(family: str = "llama", compute: dict | None = None, **sizes) -> vbrt.VBModelWrapper:
    return models.wrap(tiny(family, **sizes), compute=compute)


def same(vb, plain, **kwargs) -> None:
    """The wrapped model generates what the plain one does: bit for bit, or but for the order of sums."""
    want, got = generated(plain, **kwargs), generated(vb, **kwargs)
    assert torch.equal(got.sequences, want.sequences)
    exact = vb._attachment.settings.compute.exactness == "bits"
    for one, other in zip(got.logits, want.logits, strict=True):
        torch.testing.assert_close(one, other, atol=0 if exact else 1e-5, rtol=0 if exact else 1e-4)


def steps(vb) -> tuple[int, int]:
    counts = vb.stats().steps
    return counts.captured, counts.eager


#: families that attend without transformers' attention interface: their exact steps are eager
OTHERWISE = {"bloom": "computes with its attention mask outside"}


@pytest.mark.sample(5)
@matrix(
    family=list(FAMILIES),
    call={"sampled": {"do_sample": True}, "beams": {"num_beams": 2}},
    exactness=["bits", "rounded"],
)
def test_recorded_steps_give_the_tokens_of_transformers_generate(family, call, exactness):
    vb, plain = wrapped(family, {"exactness": exactness}), tiny(family)
    same(vb, plain, **call)
    if exactness == "bits" and family in OTHERWISE:
        assert steps(vb) == (0, 13) and OTHERWISE[family] in next(iter(vb.stats().steps.reasons))
        return
    assert steps(vb) == (13, 0), vb.stats().steps.reasons
    if family == "llama":
        counts = vb.stats().steps
        assert counts.joined["rotary"] == 2 * counts.recordings and not counts.unjoined
        assert "fused in captures: " in str(vb.stats(verbose=True))


@pytest.mark.parametrize(("exactness", "recordings"), [("rounded", 3), ("bits", 1)])
def test_a_second_call_replays_what_the_first_one_recorded(exactness, recordings):
    """Lengths 5 to 17 lie in three blocks of 8; exact attention reads no block."""
    vb = wrapped(compute={"exactness": exactness})
    first = generated(vb)
    made = vb.stats().steps.recordings
    assert torch.equal(generated(vb).sequences, first.sequences)
    assert vb.stats().steps.recordings == made == recordings


def test_what_the_first_recording_of_a_process_puts_into_transformers_is_no_change_of_the_model(monkeypatch):
    monkeypatch.setattr("transformers.utils.import_utils.is_cuda_stream_capturing", lambda: False)
    vb = wrapped()
    generated(vb)
    made = vb.stats().steps.recordings
    generated(vb)
    assert vb.stats().steps.recordings == made > 0


def test_layers_count_what_is_replayed():
    """After the first call, which records, each token is one forward of every layer."""
    vb = wrapped()
    generated(vb)
    before, replays = vb.stats(), vb._attachment.replays
    generated(vb)
    after = vb.stats()
    assert after.steps.captured - before.steps.captured == 13 == vb._attachment.replays - replays
    forwards = {name: layer.forwards - before.layers[name].forwards for name, layer in after.layers.items()}
    assert set(forwards.values()) == {14}


def test_pages_count_a_hit_for_each_forward_that_is_replayed():
    stack = SimpleNamespace(ledger=SimpleNamespace(travellers=0))
    ran, idle = (
        SimpleNamespace(forwards=5, computed=0, pages=[SimpleNamespace(hits=9)], stack=stack) for _ in range(2)
    )
    counted = Counted()
    with counted.during([ran, idle]):
        ran.forwards += 1
    counted.passes += 3
    counted.settle()
    counted.settle()
    assert (ran.forwards, ran.pages[0].hits) == (9, 12)
    assert (idle.forwards, idle.pages[0].hits) == (5, 9)


def test_streamers_processors_and_criteria_are_asked_at_every_step():
    class Streamer(transformers.generation.streamers.BaseStreamer):
        def __init__(self):
            self.got = []

        def put(self, value):
            self.got.append(value.tolist())

        def end(self):
            self.got.append("end")

    def only_even(ids, scores):
        return scores.index_fill(1, torch.arange(1, 97, 2), -torch.inf)

    def ten(ids, scores, **kwargs):
        return torch.full((len(ids),), ids.shape[1] >= 15)

    got = []
    for model in (tiny("llama"), wrapped()):
        streamer = Streamer()
        kwargs = {"logits_processor": [only_even], "stopping_criteria": [ten], "streamer": streamer}
        got.append((generated(model, **kwargs).sequences.tolist(), streamer.got))
    assert got[0] == got[1]
    assert len(got[1][0][0]) == 15


def test_a_cache_that_the_caller_keeps_is_transformers_own_and_goes_on():
    """What comes back holds tensors of its own, and a second turn of a chat continues on it."""
    turns = []
    for model in (tiny("gemma3"), wrapped("gemma3")):
        first = model.generate(PROMPT[1:], max_new_tokens=12, do_sample=False, return_dict_in_generate=True)
        cache = first.past_key_values
        held = [layer.keys.clone() for layer in cache.layers]
        model.generate(PROMPT[1:] + 1, max_new_tokens=12, do_sample=False)  # runs on the memory of the first one
        assert all(torch.equal(layer.keys, keys) for layer, keys in zip(cache.layers, held, strict=True))
        assert {type(layer).__module__ for layer in cache.layers} == {"transformers.cache_utils"}
        ids = torch.cat((first.sequences, PROMPT[1:]), dim=1)
        again = model.generate(ids, past_key_values=cache, max_new_tokens=9, do_sample=False)
        turns.append((first.sequences.tolist(), again.tolist()))
    assert turns[0] == turns[1]


def test_a_further_call_computes_its_prompt_where_recordings_attend_to_it(monkeypatch):
    """There is one cache then, not two; one that the caller keeps after its prompt has memory of its own."""
    vb, plain, taken = wrapped(), tiny("llama"), []
    take = Room.take
    monkeypatch.setattr(Room, "take", lambda room, *held: taken.append(take(room, *held)) or taken[-1])
    same(vb, plain)
    assert not taken
    for model in (vb, plain):
        kept = generated(model, max_new_tokens=1).past_key_values
        held = [layer.keys.clone() for layer in kept.layers]
        again = model.generate(PROMPT.flip(1), max_new_tokens=5, do_sample=False, pad_token_id=0)
        assert all(torch.equal(layer.keys, keys) for layer, keys in zip(kept.layers, held, strict=True))
    same(vb, plain)
    assert len(taken) == 3 * len(kept.layers) and None not in taken
    assert torch.equal(vb.generate(PROMPT.flip(1), max_new_tokens=5, do_sample=False, pad_token_id=0), again)
    same(vb, plain, num_beams=3)  # another form: its memory is another
    assert None in taken
    vb.generate(PROMPT[1:].repeat(1, 12), max_new_tokens=2)  # longer than what there is
    same(vb, plain)


def test_a_cache_that_nobody_keeps_is_not_copied_as_a_call_ends(monkeypatch):
    left = []
    monkeypatch.setattr(
        "vbrt.generation.capture.session.leave", lambda of, **how: left.extend(of.layers) or leave(of, **how)
    )
    vb = wrapped()
    for _ in range(2):
        vb.generate(PROMPT, attention_mask=MASK, max_new_tokens=14)
    assert steps(vb) == (26, 0) and not left
    cache = generated(vb).past_key_values
    assert left == cache.layers


def test_two_caches_in_one_call_do_not_share_memory():
    """A processor that decodes beside the call, on a cache of the same form."""
    found = []
    for model in (tiny("llama"), wrapped()):
        target = model.module if isinstance(model, vbrt.VBModelWrapper) else model
        for _ in range(2):
            beside = Beside(target)
            found.append(generated(model, logits_processor=[beside]).sequences.tolist())
            beside.cache = None
    assert found[2:] == found[:2]


class Beside(transformers.LogitsProcessor):
    """Subtracts what a model says of another prompt, followed by the same tokens."""

    def __init__(self, model) -> None:
        self.model, self.cache = model, transformers.DynamicCache(config=model.config)

    def __call__(self, ids, scores):
        new = PROMPT.flip(1) if self.cache.get_seq_length() == 0 else ids[:, -1:]
        return 2 * scores - self.model(input_ids=new, past_key_values=self.cache).logits[:, -1]


def test_assisted_decoding_records_what_the_assistant_does():
    plain, helper = tiny("llama"), wrapped()
    want = plain.generate(PROMPT[1:], max_new_tokens=14, do_sample=False)
    vb = wrapped()
    got = vb.generate(PROMPT[1:], max_new_tokens=14, do_sample=False, assistant_model=helper.module)
    assert torch.equal(got, want)
    assert sum(steps(vb)) > 0


@pytest.mark.parametrize(
    ("kwargs", "why"),
    [
        ({"output_attentions": True}, "attention weights are wanted"),
        ({"use_cache": False}, "use_cache=False"),
        ({"cache_implementation": "static"}, "layers of the cache are StaticLayer"),
    ],
)
def test_what_cannot_be_recorded_stays_eager_and_is_counted_with_its_reason(kwargs, why):
    vb, plain = wrapped(), tiny("llama")
    plain.set_attn_implementation("eager")
    vb.set_attn_implementation("eager")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        same(vb, plain, **kwargs)
    counts = vb.stats().steps
    assert (counts.captured, counts.eager) == (0, 13)
    assert [reason for reason in counts.reasons if why in reason]
    assert why in str(vb.stats())


def test_a_config_keeps_steps_eager_and_every_bit():
    plain = tiny("llama")
    settings = models.config("dense") | {"compute": {"captures": False}}
    vb = vbrt.wrap(tiny("llama"), settings)
    want, got = generated(plain), generated(vb)
    assert all(torch.equal(a, b) for a, b in zip(got.logits, want.logits, strict=True))
    assert vb.stats().steps.reasons == {"compute.captures = false": 13}


@pytest.mark.parametrize("mode", ["inference", "autocast"])
def test_modes_of_torch_are_those_of_eager_steps(mode):
    vb, plain = wrapped(), tiny("llama")
    same(vb, plain)
    modes = {"inference": torch.inference_mode, "autocast": lambda: torch.autocast("cpu", torch.bfloat16)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with modes[mode]():
            want, got = generated(plain), generated(vb)
    assert torch.equal(want.sequences, got.sequences)
    assert steps(vb) == ((26, 0) if mode == "inference" else (13, 13))
    same(vb, plain)


@pytest.mark.parametrize("of", ["DynamicLayer", "Cache"])
def test_a_cache_whose_methods_somebody_replaced_stays_eager(of, monkeypatch):
    """As tools do that forget keys: between calls, and only beyond a length."""
    kind = getattr(transformers.cache_utils, of)
    real, (vb, plain) = kind.update, (wrapped(), tiny("llama"))

    def forgetting(self, *args, **kwargs):
        keys, values = real(self, *args, **kwargs)
        return (keys, values) if keys.shape[2] < 12 else (keys, values.index_fill(2, torch.arange(3), 0))

    same(vb, plain)
    with monkeypatch.context() as patched:
        patched.setattr(kind, "update", forgetting)
        with pytest.warns(UserWarning, match=rf"{of}\.update of the cache is not transformers' own"):
            same(vb, plain)
    same(vb, plain)
    assert steps(vb) == (26, 13)
    cache = transformers.DynamicCache(config=vb.config)
    owner = cache if of == "Cache" else cache.layers[0]
    owner.update = functools.partial(real, owner)
    with pytest.warns(UserWarning, match="update of the cache is not transformers' own"):
        generated(vb, past_key_values=cache)


def test_methods_of_caches_that_transformers_decorates_are_its_own(monkeypatch):
    from transformers.utils.deprecation import deprecate_kwarg

    decorated = deprecate_kwarg("max_length", new_name="tokens_to_remove", version="5.18")  # as in 5.17
    kind = transformers.cache_utils.DynamicLayer
    monkeypatch.setattr(kind, "crop", decorated(kind.crop))
    vb = wrapped()
    same(vb, tiny("llama"))
    assert steps(vb) == (13, 0), vb.stats().steps.reasons


def test_the_reason_is_warned_of_once():
    vb = wrapped()
    vb.module.model.layers[1].register_forward_hook(lambda module, args, out: None)
    with pytest.warns(UserWarning, match=r"model\.layers\.1 has a hook .*, which a graph does not call"):
        generated(vb)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        generated(vb)
    assert steps(vb) == (0, 26)


def test_a_hook_of_the_whole_model_runs_around_every_recorded_step():
    vb, seen = wrapped(), []
    vb.register_forward_hook(lambda module, args, out: seen.append(out.logits.shape))
    generated(vb)
    assert steps(vb) == (13, 0)
    assert len(seen) == 14


def test_a_model_that_counts_in_python_is_found_and_stays_eager():
    """Its recording would repeat the number of the step that was recorded."""

    def counting(model):
        count = itertools.count(1)

        class Counting(type(model.model.norm)):
            def forward(self, x):
                return super().forward(x) * (1 + next(count) % 3)

        model.model.norm.__class__ = Counting
        return model

    vb = models.wrap(counting(tiny("llama")))
    with pytest.warns(UserWarning, match="differs from the eager one"):
        generated(vb)
    assert steps(vb)[0] <= 1


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ["rotate_half", "apply_rotary_pos_emb", "eager_attention_forward"])
def test_a_function_that_a_forward_looks_up_may_be_replaced_between_calls(name, monkeypatch):
    vb, plain = wrapped(), tiny("llama")
    for model in (vb, plain):
        model.set_attn_implementation("eager")
    same(vb, plain)
    functions = sys.modules[type(plain).__module__]
    real = getattr(functions, name)

    def other(*args, **kwargs):
        out = real(*args, **kwargs)
        return -out if torch.is_tensor(out) else (0.5 * out[0], out[1])

    with monkeypatch.context() as patched:
        patched.setattr(functions, name, other)
        same(vb, plain)
    same(vb, plain)
    assert steps(vb) == (39, 0), vb.stats().steps.reasons


class Changing(transformers.LogitsProcessor):
    """Changes a model between its fifth and its ninth token."""

    def __init__(self, model, change):
        self.model, self.change, self.calls, self.undo = model, change, 0, None

    def __call__(self, ids, scores):
        self.calls += 1
        if self.calls == 5:
            self.undo = self.change(self.model)
        if self.calls == 9:
            self.undo()
        return scores


def set_attribute(layer):
    before, layer.self_attn.scaling = layer.self_attn.scaling, 0.01
    return lambda: setattr(layer.self_attn, "scaling", before)


def set_data(layer):
    norm, before = layer.input_layernorm.weight, layer.input_layernorm.weight.data
    norm.data = before * torch.linspace(0, 3, 32)
    return lambda: setattr(norm, "data", before)


def set_forward(layer):
    layer.mlp.forward = torch.zeros_like
    return lambda: layer.mlp.__dict__.pop("forward")


CHANGES = {
    "attribute": set_attribute,
    "data": set_data,
    "forward": set_forward,
    "hook": lambda layer: layer.mlp.register_forward_hook(lambda module, args, out: 0 * out).remove,
    "container": lambda layer: set_scale(layer.mlp.act_fn, 3.0),
}


def set_scale(module, value):
    module.scales["now"], before = value, module.scales["now"]
    return lambda: module.scales.update(now=before)


class Scaled(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.scales = {"now": 1.0}

    def forward(self, x):
        return torch.relu(x) * self.scales["now"]


@pytest.mark.parametrize("change", CHANGES)
def test_a_model_that_a_callback_changes_within_a_call_is_eager_while_it_is_another(change):
    vb, plain = wrapped(), tiny("llama")
    for model in (vb.module, plain):
        for layer in model.model.layers:
            layer.mlp.act_fn = Scaled()
    for _ in range(2):
        found = []
        for model, inner in ((vb, vb.module), (plain, plain)):
            changing = Changing(inner.model.layers[0], CHANGES[change])
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found.append(generated(model, logits_processor=[changing]))
        for one, other in zip(*(out.logits for out in found), strict=True):
            torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)
    assert steps(vb) == (2 * 9, 2 * 4), vb.stats().steps.reasons
    assert CHANGED in vb.stats().steps.reasons


def test_steps_are_recorded_where_transformers_changes_how_experts_compute_in_front_of_them(monkeypatch):
    vb, plain = wrapped("qwen3_moe"), tiny("qwen3_moe")

    @contextlib.contextmanager
    def switched(self):  # as transformers does it on devices other than CPUs
        before = self.get_experts_implementation()
        self.set_experts_implementation("batched_mm")
        yield
        self.set_experts_implementation(before)

    for model in (vb.module, plain):
        model.set_experts_implementation("grouped_mm")
        monkeypatch.setattr(type(model), "_optimize_model_for_decode", switched)
    same(vb, plain, logits_processor=[lambda ids, scores: scores])
    assert steps(vb) == (13, 0), vb.stats().steps.reasons
    change = Changing(vb.module, lambda model: model.set_experts_implementation("eager") or vb.module.eval)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        generated(vb, logits_processor=[change])
    assert CHANGED in vb.stats().steps.reasons


def test_only_callbacks_of_others_have_a_model_watched():
    processors = transformers.LogitsProcessorList([transformers.TopKLogitsWarper(3)])
    known = {"logits_processor": processors, "streamer": transformers.TextStreamer(None)}
    assert not calls_others((PROMPT,), known | {"assistant_model": tiny("llama"), "max_new_tokens": 3})
    for other in ({"streamer": SimpleNamespace()}, {"prefix_allowed_tokens_fn": steps}, {"logits_processor": [steps]}):
        assert calls_others((PROMPT,), known | other)
    assert calls_others((PROMPT, None, [functools.partial(steps)]), {})


class Stateful(torch.nn.Module):
    """Scales by a count of forwards, which a buffer holds."""

    def __init__(self, how):
        super().__init__()
        self.register_buffer("count", torch.zeros(1))
        self.register_buffer("last", torch.zeros(1, 1))
        self.how = how

    def forward(self, x):
        if self.how == "another buffer":
            self.count = self.count + 1
        else:
            self.count.add_(1)
        before = self.last[0].clone()
        self.last[torch.zeros(1, dtype=torch.int64)] = self.count[:, None]
        if self.how == "refused":
            assert self.count.item()
        if self.how == "raises":
            assert recorder() is None
        return x * (1 + 0.05 * self.count + 0.02 * before)


@pytest.mark.parametrize("how", ["in place", "another buffer", "refused", "raises", "differs"])
def test_states_in_buffers_advance_once_a_step_whether_it_is_recorded_or_not(how, monkeypatch):
    vb, plain = wrapped(), tiny("llama")
    for model in (vb.module, plain):
        layer = model.model.layers[0]
        layer.input_layernorm = torch.nn.Sequential(layer.input_layernorm, Stateful(how))
    if how == "differs":
        monkeypatch.setattr("vbrt.generation.capture.session.difference", lambda *args, **kwargs: "it is off")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        same(vb, plain)
    assert steps(vb) == ((13, 0) if how == "in place" else (0, 13)), vb.stats().steps.reasons
    same(vb, plain)
    counts = [model.model.layers[0].input_layernorm[1].count for model in (vb.module, plain)]
    assert torch.equal(*counts) and counts[0] == 28


@pytest.mark.sample(1)
@pytest.mark.parametrize("window", [6, 10, 16])
def test_a_model_that_leaves_it_to_the_cache_to_forget_is_found_behind_its_window(window):
    """As Moshi does: its mask is causal, and its cache holds as many tokens as the window has."""
    vb, plain = wrapped(compute=models.ROUNDED, sliding_window=window), tiny("llama", sliding_window=window)
    with pytest.warns(UserWarning, match="differs from the eager one"):
        same(vb, plain)
    assert steps(vb) == (window - 5, 18 - window)  # the prompt has five tokens
    same(vb, plain, attention_mask=torch.ones_like(MASK))
    same(vb, plain, max_new_tokens=20)


def test_exact_steps_read_only_what_a_plain_cache_holds():
    """Moshi's mask forgets nothing, and exact steps attend to no slot behind the window."""
    vb, plain = wrapped(sliding_window=6), tiny("llama", sliding_window=6)
    same(vb, plain)
    assert steps(vb) == (13, 0)


def test_a_model_that_takes_the_size_of_a_mask_for_the_length_is_found_in_the_block_where_it_matters():
    class Scaled(transformers.LlamaForCausalLM):
        def forward(self, *args, attention_mask=None, **kwargs):
            out = super().forward(*args, attention_mask=attention_mask, **kwargs)
            out.logits = out.logits * (1 + (attention_mask.shape[1] > 12))
            return out

    def scaled(model):
        model.__class__ = Scaled
        return model

    vb = models.wrap(scaled(tiny("llama")), compute=models.ROUNDED)
    plain = scaled(tiny("llama"))
    with pytest.warns(UserWarning, match="differs from the eager one"):
        same(vb, plain)
    assert steps(vb) == (3, 10)  # up to length 8


def test_a_step_that_waits_for_the_device_stays_eager():
    class Waiting(torch.nn.Module):
        def forward(self, x):
            return x * (1 if x.sum().item() > 0 else 1.5)

    vb, plain = wrapped(), tiny("llama")
    for model in (vb.module, plain):
        model.model.layers[0].input_layernorm = torch.nn.Sequential(model.model.layers[0].input_layernorm, Waiting())
    with pytest.warns(UserWarning, match="a step cannot be captured"):
        same(vb, plain)
    assert steps(vb) == (0, 13)


@pytest.mark.parametrize("error", [KeyboardInterrupt, torch.OutOfMemoryError])
def test_an_interrupted_recording_leaves_the_model_usable(error, monkeypatch):
    vb, plain = wrapped(), tiny("llama")
    record = "tests.generation.fusion.tape_cases.TapeRecorder.record"

    def failing(self, step, within):
        step()
        raise error("now")

    with monkeypatch.context() as patched:
        patched.setattr(record, failing)
        if error is KeyboardInterrupt:
            with pytest.raises(KeyboardInterrupt):
                generated(vb)
        else:
            with pytest.warns(UserWarning, match="no memory for it"):
                same(vb, plain)
    assert "forward" not in vars(vb.module)
    same(vb, plain)


def test_a_changed_model_is_recorded_again():
    """Weights, plain attributes and config: what a recording has read in Python or by address."""
    vb, plain = wrapped(), tiny("llama")
    same(vb, plain)
    for model in (vb.module, plain):
        model.load_state_dict({name: 1.5 * tensor for name, tensor in model.state_dict().items()})
    same(vb, plain)
    for model in (vb.module, plain):
        model.model.layers[0].self_attn.scaling = 0.1
    same(vb, plain)
    for model in (vb.module, plain):
        torch.manual_seed(7)
        model.lm_head = torch.nn.Linear(32, 97, bias=False).requires_grad_(False)
    same(vb, plain)
    assert steps(vb)[1] == 0


def test_two_threads_may_generate_at_one_time():
    vb, plain, got = wrapped(), tiny("llama"), {}
    want = plain.generate(PROMPT, attention_mask=MASK, max_new_tokens=14, do_sample=False)

    def work(name):
        got[name] = vb.generate(PROMPT, attention_mask=MASK, max_new_tokens=14, do_sample=False)

    threads = [threading.Thread(target=work, args=(name,)) for name in range(3)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert all(torch.equal(tokens, want) for tokens in got.values())
    assert len(got) == 3
