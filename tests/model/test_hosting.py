"""Hosted weights without a GPU: a budget in front of host memory stands for one, and a thread's own calls for its
kernels; the choice, the states of weights, the mailbox and its team are those of a GPU."""

import contextlib
import ctypes
import gc
import queue
import threading
import time
import weakref
from types import SimpleNamespace

import pytest
import torch

import vbrt
from scripts import committed
from scripts.speculate import as_gpt2
from tests.layers.weights.hosted_cases import computed, shared_and_moved
from tests.model.test_streamed_blocks import LAYERS, Models
from tests.models import config, llama
from vbrt.errors import KernelError
from vbrt.kernels.cpu import build
from vbrt.kernels.cpu.hosted import ENTRY_BITS, NOTHING, HostedTeam
from vbrt.layers.weights import hosted_rates, hosted_weights
from vbrt.model import hosting, runtime
from vbrt.residency.hosted_share import HostRates
from vbrt.residency.scheduled import ScheduledPolicy
from vbrt.tiers import Level, MemoryTier, TierStack

WHY = build.refusal(torch.device("cpu"), "hosted")
pytestmark = pytest.mark.skipif(WHY is not None, reason=str(WHY))

CPU = torch.device("cpu")
FAST = HostRates(link_bytes_s=1e9, cpu_bytes_s=1e12)
EVEN = HostRates(link_bytes_s=1e9, cpu_bytes_s=1e9)
IDS = torch.arange(3, 15).reshape(1, 12)


class PlayedOutbox:
    """The posts of a GPU, by the thread that launches them. `answers`: False: nobody waits for an answer."""

    answers = True

    def __init__(self, room, words, entry_bits, device):
        self.room, self.words, self.wait_ns, self.number, self.broken = room, words, 5_000_000_000, 0, False

    def word(self, at):
        return ctypes.c_int64.from_address(self.room.data_ptr() + self.words[at])

    def exchange(self, x_MK, y_MN, bias_N, entry, result_at):
        assert x_MK.is_contiguous() and result_at % 64 == 0
        self.number += 1
        inputs = self.room[self.words[3] :][: x_MK.nbytes].view(x_MK.dtype)
        inputs.copy_(x_MK.flatten())
        post = self.number << ENTRY_BITS | entry
        if self.answers:
            self.word(0).value = post
        self.wait(post)
        results = self.room[result_at:][: y_MN.nbytes].view(y_MN.dtype).view(y_MN.shape)
        y_MN.copy_(results if bias_N is None else (results.float() + bias_N.float()).to(y_MN.dtype))
        if self.broken:
            y_MN.fill_(float("nan"))

    def post(self, x_TK, ids_Tk, kept_Tk, weights_Tk, entry, places):
        self.number, hosted = self.number + 1, ids_Tk != kept_Tk
        self.waits = bool(hosted.any())
        if self.waits:
            ids = torch.where(hosted, ids_Tk, -1).long()
            for at, value in zip((self.words[3], *places), (x_TK, ids, weights_Tk.float()), strict=True):
                self.room[at:][: value.nbytes].view(value.dtype).copy_(value.flatten())
        if self.answers:
            self.word(0).value = self.number << ENTRY_BITS | (entry if self.waits else NOTHING)

    def add(self, y_TN, entry, result_at):
        if self.waits:
            self.wait(self.number << ENTRY_BITS | entry)
            y_TN += self.room[result_at:][: 4 * y_TN.numel()].view(torch.float32).view(y_TN.shape)
            if self.broken:
                y_TN.fill_(float("nan"))

    def wait(self, post):
        begun = time.monotonic_ns()
        while self.word(1).value != self.number and not self.broken:
            if not self.answers or time.monotonic_ns() - begun > self.wait_ns:
                self.broken, self.word(2).value = True, post

    def mend(self):
        self.broken = False


class Queue:
    """Stream of a GPU, whose launches run later, in a thread."""

    def __init__(self):
        self.launches = queue.Queue()
        threading.Thread(target=self.run, daemon=True).start()

    def run(self):
        while True:
            launch = self.launches.get()
            time.sleep(0.05)
            launch()
            self.launches.task_done()

    def query(self):
        return not self.launches.unfinished_tasks

    def synchronize(self):
        self.launches.join()

    def wait_stream(self, other):
        assert other is self


@pytest.fixture
def device(monkeypatch):
    """What hosting asks of a GPU, on the CPU."""
    stream = SimpleNamespace(synchronize=int, wait_stream=lambda other: None, query=lambda: True)
    stands_in = SimpleNamespace(
        CUDA="cpu", pins=lambda: False, current_stream=lambda device: stream, synchronize=lambda device: None
    )
    for module in (hosting, hosted_weights):
        monkeypatch.setattr(module, "accelerator", stands_in)
    monkeypatch.setattr(hosting, "refusal", lambda stack: None)
    monkeypatch.setattr(hosting, "resident_seconds", lambda sizes, device: 0.0)
    monkeypatch.setattr(hosted_weights, "raw_stream", lambda index: 0)
    for module in (hosting, hosted_weights):
        monkeypatch.setattr(module, "is_capturing", lambda: False)
    monkeypatch.setattr(hosted_weights, "Outbox", PlayedOutbox)
    monkeypatch.setattr(hosted_rates, "_copied", lambda pages, device: 1e9)
    monkeypatch.setattr(hosted_rates, "copying_pages", lambda *args: contextlib.nullcontext(lambda: 1e9))
    monkeypatch.setattr(PlayedOutbox, "answers", True)
    yield
    gc.collect()  # mailboxes are detached while this device is there


def wrapped(monkeypatch, model=None, rates=FAST, format="nvfp4", pages=4, **compute):
    """A model whose weights are in host memory; `pages` of the largest one fit in front of it."""

    def build_stack(plan, config, factory=None):
        top = pages * max(swap.page_bytes for swap in plan.swaps)
        near, far = MemoryTier("gpu", CPU, top), MemoryTier("cpu", CPU, plan.budgets["cpu"])
        return TierStack([Level(near, ScheduledPolicy(top)), far])

    settings = config(format, exclude=["*embed*", "*lm_head*"]) | {"compute": compute}
    with monkeypatch.context() as patched:
        patched.setattr(runtime, "build_stack", build_stack)
        vb = vbrt.wrap(llama(dtype=torch.bfloat16, layers=4) if model is None else model, settings)
    vb.materialize(progress=False)
    if rates is not None:
        vb._attachment.hosting.rates = dict.fromkeys(range(9), rates)
    return vb


def generated(vb, new=6, batch=1, **further):
    how = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "pad_token_id": 0} | further
    return vb.generate(IDS.expand(batch, -1), output_logits=True, return_dict_in_generate=True, **how)


def close(got, want):
    return all(
        (one.float() - other.float()).norm() <= 0.02 * other.float().norm()
        for one, other in zip(got.logits, want.logits, strict=True)
    )


@pytest.mark.parametrize("rates", [FAST, EVEN, None], ids=["all", "half", "measured"])
def test_steps_of_generate_compute_what_does_not_fit(rates, device, monkeypatch):
    moved = wrapped(monkeypatch, where="device")
    want = generated(moved)
    assert computed(moved) == 0 and moved.stats().hosted == ""
    vb = wrapped(monkeypatch, rates=rates)
    got, again = generated(vb), generated(vb)
    hosting = vb._attachment.hosting
    if rates is None:  # this machine's own may be too slow for pages of 3 KiB
        assert set(hosting.rates) == {1} and hosting.rates[1].link_bytes_s > 0, vb.stats().fallbacks
        return
    stats, hosted = vb.stats(), len(hosting._hosted)
    assert hosted == 24 if rates is FAST else 5 < hosted < 20  # of 28, and four fit
    assert computed(vb) == stats.computed > 8 * hosted
    assert stats.hosted.startswith(f"{hosted} weights")
    assert close(got, want) and torch.equal(got.sequences, again.sequences)
    assert all(torch.equal(one, other) for one, other in zip(got.logits, again.logits, strict=True))
    assert stats.fallbacks == moved.stats().fallbacks


def test_a_plain_loop_over_tokens_computes_too(device, monkeypatch):
    vb = wrapped(monkeypatch)
    with torch.no_grad():
        cache = vb(IDS, use_cache=True).past_key_values
        for token in (5, 6, 7):
            out = vb(torch.tensor([[token]]), past_key_values=cache)
    assert computed(vb) == 3 * 24 and out.logits.isfinite().all()


def test_training_after_a_decode_step_is_recorded_as_before(device, monkeypatch, tmp_path):
    streamed = Models(monkeypatch, tmp_path, "cpu")
    vb, model = streamed()
    attachment = vb._attachment
    attachment.hosting.rates = dict.fromkeys(range(9), FAST)
    for turn in (1, 2):
        streamed.trained(model, 4)
        assert attachment.recorded.replays == 2 * turn * LAYERS and not attachment.recorded.reasons
        assert not vb.stats().hosted
        with torch.no_grad():
            model(input_ids=IDS[:, :1], use_cache=False)
        assert vb.stats().hosted


def test_without_memory_for_a_mailbox_weights_are_moved_and_the_reason_is_kept(device, monkeypatch):
    want = generated(wrapped(monkeypatch, where="device"))

    def full(*args):
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(hosting, "Host", full)
    vb = wrapped(monkeypatch)
    got = generated(vb)
    assert computed(vb) == 0 and torch.equal(got.sequences, want.sequences)
    assert any("no mailbox" in said and "out of memory" in said for said in vb.stats().fallbacks)


def test_a_trained_models_tokens_are_the_devices(device, monkeypatch):
    vb = wrapped(monkeypatch, as_gpt2(committed.dense(), torch.bfloat16), pages=1)
    text = committed.held_out()[:110].long().reshape(1, -1)
    shared, moved, counts = shared_and_moved(vb, text)
    assert counts[0] > 1500 and counts[1] == counts[0]
    assert (shared == moved).float().mean() >= 0.99


def test_what_is_hosted_follows_budgets_and_new_weights(device, monkeypatch):
    vb = wrapped(monkeypatch)
    first, before = generated(vb), computed(vb)
    stack = vb._attachment.stack
    names = [handle.keys[0] for handle in vb._attachment.registry.handles if handle.held.hosts]
    assert names and all(stack.levels[1].slots[key].holders for key in names)
    stack.set_budget("gpu", 1 << 20, 0)  # all fit
    vb._attachment.registry.forget_ready()
    assert not any(stack.levels[0].slots[key].holders for key in names)
    assert close(generated(vb), first) and computed(vb) == before
    vb.load_state_dict({name: -tensor for name, tensor in vb.state_dict().items()})
    assert not close(generated(vb), first)
    vb.unwrap()


def test_the_same_pages_are_hosted_again_after_they_were_let_go(device, monkeypatch):
    """Passes with hosted pages lease the others alone; their order is not that of the whole."""
    vb = wrapped(monkeypatch, rates=EVEN)
    generated(vb)
    hosting = vb._attachment.hosting
    first = set(hosting._hosted)
    for _ in range(2):
        hosting.release()
        assert not hosting._hosted
        generated(vb)
        assert first == set(hosting._hosted) != set()


def test_more_tokens_than_the_cpu_takes_are_moved(device, monkeypatch):
    vb = wrapped(monkeypatch)
    generated(vb)
    before = computed(vb)
    generated(vb, batch=9)
    assert computed(vb) == before


@pytest.mark.parametrize("batch", [1, 2])
def test_drafts_have_the_bits_of_steps_whose_weights_are_hosted(batch, device, monkeypatch):
    exchange = PlayedOutbox.exchange

    def rounded_otherwise(self, x_MK, y_MN, *rest):
        exchange(self, x_MK, y_MN, *rest)
        y_MN.mul_(1.0625)

    monkeypatch.setattr(PlayedOutbox, "exchange", rounded_otherwise)
    vb = wrapped(monkeypatch, rates=EVEN, captures=False)
    how = {"new": 16, "batch": batch}
    generated(vb, **how)
    want, before = generated(vb, **how), computed(vb)
    got = generated(vb, **how, speculate=4, drafter="ngrams")
    stats = vb.stats()
    assert stats.speculation.rounds and stats.speculation.accepted, stats.fallbacks
    assert computed(vb) > before and not [why for why in stats.fallbacks if "speculate" in why]
    assert torch.equal(got.sequences, want.sequences) and all(map(torch.equal, got.logits, want.logits))


def test_a_product_that_is_not_answered_raises_and_the_model_goes_on(device, monkeypatch):
    vb = wrapped(monkeypatch)
    want = generated(vb)
    monkeypatch.setattr(PlayedOutbox, "answers", False)
    with pytest.raises(KernelError, match=r"the CPU did not answer within 5 s.*compute\.where"):
        generated(vb)
    monkeypatch.setattr(PlayedOutbox, "answers", True)
    assert torch.equal(generated(vb).sequences, want.sequences)


@pytest.mark.parametrize("end", ["moved", "rewritten", "closed", "gone"])
def test_a_product_that_is_still_queued_has_the_weight_that_it_was_launched_with(end, device, monkeypatch):
    vb = wrapped(monkeypatch)
    generated(vb)
    weight = next(handle for handle in vb._attachment.registry.handles if handle.held.hosts)
    name, x = weight.spec.name, torch.randn(1, weight.spec.shape[1]).bfloat16()
    want, stream = weight.held.compute(weight, x, None), Queue()
    monkeypatch.setattr(hosted_weights.accelerator, "current_stream", lambda device: stream)
    weight.held._host._launches._stream = stream
    exchange = PlayedOutbox.exchange
    late = lambda *operands: stream.launches.put(lambda: exchange(*operands))  # noqa: E731
    monkeypatch.setattr(PlayedOutbox, "exchange", late)
    got = weight.held.compute(weight, x, None)
    assert not stream.query()
    if end == "moved":
        weight.forget_ready()
    elif end == "rewritten":
        vb.load_state_dict({f"{name}.weight": torch.zeros(weight.spec.shape)}, strict=False)
    elif end == "closed":
        vb.close()
    else:
        alive = weakref.ref(weight.held._host)
        del vb, weight
        gc.collect()
        assert alive() is None and stream.query()
    stream.synchronize()
    assert torch.equal(got, want)


def test_lossless_weights_and_other_pages_are_moved(device, monkeypatch):
    vb = wrapped(monkeypatch, format="exact")
    generated(vb)
    assert computed(vb) == 0 and vb._attachment.hosting._host is None
    odd = llama(dtype=torch.bfloat16)
    odd.model.layers[0].mlp.up_proj = torch.nn.Linear(64, 97, bias=False).bfloat16()
    odd.model.layers[0].mlp.gate_proj = torch.nn.Linear(64, 97, bias=False).bfloat16()
    odd.model.layers[0].mlp.down_proj = torch.nn.Linear(97, 64, bias=False).bfloat16()
    vb = wrapped(monkeypatch, odd)
    generated(vb)
    counts = {name: layer.handle.computed for name, layer in vb._attachment.layers.items()}
    assert not any(counts[f"model.layers.0.mlp.{name}_proj"] for name in ("up", "gate", "down"))
    assert sum(counts.values()) > 40


def test_a_cpu_without_kernels_is_said_once(device, monkeypatch):
    monkeypatch.setattr(hosting, "refusal", lambda stack: "no compiler was found")
    vb = wrapped(monkeypatch)
    generated(vb)
    (why,) = (why for why in vb.stats().fallbacks if "compute.where" in why)
    assert why.endswith("no compiler was found") and computed(vb) == 0


def test_what_a_call_costs_is_the_difference_of_large_and_small_products():
    rate, call_s = hosted_rates.line_through((33e6, 33e6 / 80e9 + 30e-6), (2e6, 2e6 / 80e9 + 30e-6))
    assert rate == pytest.approx(80e9) and call_s == pytest.approx(30e-6)
    assert hosted_rates.line_through((33e6, 0.5e-3), (20e6, 0.2e-3)) == (66e9, 0.0)  # too alike
    assert hosted_rates.line_through((33e6, 0.5e-3), (2e6, 0.6e-3)) == (66e9, 0.0)  # a thread lost its core
    assert hosted_rates.line_through((32e6, 0.5e-3), (16e6, 0.2e-3)) == (64e9, 0.0)  # small ones are in a cache


@pytest.mark.parametrize(("rates", "threads"), [({6: 3.0, 9: 3.9, 12: 4.0}, 9), ({6: 2.0, 9: 3.0, 12: 4.0}, 12)])
def test_the_team_has_the_fewest_threads_that_are_about_as_fast(rates, threads):
    team = hosted_rates.fastest(lambda team: rates[team.threads], sorted(rates))
    assert team.threads == threads
    team.stop()


def test_threads_in_question_leave_the_main_thread_its_core(monkeypatch):
    monkeypatch.setattr(hosted_weights, "_teams", {})
    asked, before = [], torch.get_num_threads()
    torch.set_num_threads(16)
    try:
        team = hosted_weights.shared_team(lambda counts: asked.append(counts) or HostedTeam(1))
        assert hosted_weights.shared_team() is team and asked == [[8, 12, 15]]
    finally:
        torch.set_num_threads(before)
    assert hosted_weights.shared_team() is not team or before == 16


def test_layers_whose_last_products_read_one_input_are_a_group():
    def weight(name, at, inputs=64):
        return SimpleNamespace(keys=(name,), input_at=at, spec=SimpleNamespace(shape=(8, inputs)))

    weights = [weight("q", 1), weight("k", 1), weight("v", 1), weight("o", 2), weight("up", 1), weight("down", 1, 32)]
    groups = hosting._groups([*weights, weight("never", 0), weight("seen", 0)])
    assert groups == {"q": "q", "k": "q", "v": "q"} | {name: name for name in ("o", "up", "down", "never", "seen")}
