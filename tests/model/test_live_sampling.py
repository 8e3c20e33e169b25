"""Samples of this process: right, and taken without a lock and without the device."""

import threading
import time
import warnings

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import vbrt
from tests.models import TOKENS, llama, mlp, qwen3_moe, wrap, wrap_streamed
from vbrt.host import stats_endpoint
from vbrt.model import live_sampling
from vbrt.report.live_sample import LiveSample


@pytest.fixture
def own_directory(tmp_path, monkeypatch):
    monkeypatch.setattr(stats_endpoint, "directories", lambda: [tmp_path / "offers"])


class NoDevice(TorchDispatchMode):
    def __torch_dispatch__(self, func, *_args, **_kwargs):
        raise AssertionError(f"{func} was computed")


def test_a_sample_says_what_stats_say(tmp_path):
    vb, x = wrap_streamed(mlp(), "nvfp4", tmp_path), torch.randn(2, 64)
    with torch.no_grad():
        for _ in range(3):
            vb(x)
    now, stats = live_sampling.runtime_now(vb.runtime), vb.stats()
    assert (now.hits, now.misses, now.prefetched) == (
        stats.hits,
        stats.misses,
        sum(x.prefetched for x in stats.layers.values()),
    )
    assert now.models == {"Sequential": 3} and now.policy == stats.policy and now.moved == stats.bytes_moved
    assert now.wait_us == pytest.approx(stats.wait_us, abs=len(stats.layers)) and set(now.waits) <= {"#"}
    for name, tier in stats.tiers.items():
        own = now.tiers[name]
        assert (own.held_bytes, own.budget_bytes, own.peak_bytes, own.pages) == (
            tier.held_bytes,
            tier.budget_bytes,
            tier.peak_bytes,
            tier.resident_pages,
        )
    vb.close()
    assert vb.runtime not in [ref() for ref in live_sampling._known] or not live_sampling.sample(vb.runtime).runtimes


def test_a_sample_is_taken_while_every_lock_is_held_and_computes_nothing(tmp_path, monkeypatch):
    vb = wrap(qwen3_moe(), "nvfp4").materialize()
    monkeypatch.setattr(
        type(vb._attachment.expert_cache), "settle", lambda *_args, **_kwargs: pytest.fail("asked the device")
    )
    held, done = threading.Event(), threading.Event()

    def hold():
        with vb.stack.encoding, vb.stack.guard.lock:
            held.set()
            done.wait(10)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(10)
    try:
        with NoDevice():
            found = live_sampling.sample(vb.runtime)
    finally:
        done.set()
        thread.join()
    assert found.names == ["Qwen3MoeForCausalLM"] and found.runtimes[0].tiers["cpu"].held_bytes


def test_samples_are_taken_while_layers_are_encoded_and_retired():
    stop, taken, errors = threading.Event(), [], []

    def look():
        while not stop.is_set():
            try:
                taken.append(live_sampling.sample())
                time.sleep(0)
            except Exception as error:  # noqa: BLE001 - whatever it is, the test fails of it
                errors.append(error)

    thread = threading.Thread(target=look)
    thread.start()
    for _ in range(2):
        vb = wrap(mlp(depth=8), "nvfp4").materialize()
        vb.unwrap()
    stop.set()
    thread.join()
    assert not errors and taken


def test_work_is_counted_in_tokens_read_written_and_trained():
    vb = wrap(llama())
    vb.generate(TOKENS, max_new_tokens=5, do_sample=False, pad_token_id=0)
    assert live_sampling.runtime_now(vb.runtime).work == {
        "tokens read": 12,
        "tokens written": 4,
        "tokens trained": 0,
        "images": 0,
        "steps": 0,
        "decodes": 0,
    }
    with torch.no_grad():
        vb(inputs_embeds=torch.randn(2, 7, vb.module.config.hidden_size))
    assert live_sampling.runtime_now(vb.runtime).work["tokens read"] == 26
    vb(TOKENS)
    assert live_sampling.runtime_now(vb.runtime).work["tokens trained"] == 12


def test_drafts_are_no_tokens_of_their_own():
    vb = wrap(llama(dtype=torch.bfloat16), "exact")
    out = vb.generate(TOKENS, max_new_tokens=9, do_sample=False, pad_token_id=0, speculate=2)
    work = live_sampling.runtime_now(vb.runtime).work
    assert work["tokens written"] == vb.stats().speculation.tokens >= out.shape[1] - TOKENS.shape[1] - 1
    assert work["tokens read"] == 12


def test_images_and_training_have_their_units():
    vb = wrap(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(48, 48)))
    with torch.no_grad():
        vb(torch.randn(3, 3, 4, 4))
    assert live_sampling.runtime_now(vb.runtime).work["images"] == 3
    trained = vbrt.wrap(mlp().train(), "train", weights={"min_parameters": 0}, tiers={"gpu": {"enabled": False}})
    trained(torch.randn(2, 64)).sum().backward()
    now = live_sampling.runtime_now(trained.runtime)
    assert now.policy == "none" and now.models == {"Sequential": 1} and not now.tiers


def test_models_of_one_runtime_are_told_apart(tmp_path):
    first = wrap(mlp())
    second = vbrt.wrap(mlp(), runtime=first.runtime)
    with torch.no_grad():
        second(torch.randn(1, 64))
    assert live_sampling.runtime_now(first.runtime).models == {"Sequential": 0, "Sequential-2": 1}


def test_samples_that_take_long_are_given_again(monkeypatch):
    taken, slow, clock = [], live_sampling.sample, [100.0]

    def sample():
        taken.append(clock[0])
        clock[0] += 0.002
        return slow()

    monkeypatch.setattr(live_sampling, "sample", sample)
    monkeypatch.setattr(live_sampling.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(live_sampling._offered, "again", 0.0)
    for now in (100.0, 100.003, 100.15):  # samples take a hundredth of the time
        clock[0] = max(clock[0], now)
        live_sampling._answer()
    assert taken == [100.0] and live_sampling._offered.again == pytest.approx(100.002 + live_sampling.REST * 0.002)
    clock[0] = live_sampling._offered.again
    live_sampling._answer()
    assert len(taken) == 2


def test_the_environment_has_a_process_offer_itself_and_says_where_it_cannot(own_directory, tmp_path, monkeypatch):
    import json
    import os

    monkeypatch.setenv("VBRT_TOP", "1")
    vb = wrap(mlp())
    try:
        found = LiveSample.from_dict(json.loads(stats_endpoint.ask(os.getpid())))
        assert "Sequential" in found.names
        live_sampling._offered.again = 0.0
        monkeypatch.setattr(live_sampling, "sample", lambda: 1 / 0)
        assert json.loads(stats_endpoint.ask(os.getpid()))["error"] == "ZeroDivisionError: division by zero"
    finally:
        live_sampling.withdraw()
    assert live_sampling._offered.offer is None and not stats_endpoint.pids()
    (tmp_path / "offers").rmdir()
    (tmp_path / "offers").write_text("")
    with pytest.warns(UserWarning, match="VBRT_TOP: this process cannot be offered to vbrt top"):
        wrap(mlp())
    monkeypatch.setenv("VBRT_TOP", "0")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wrap(mlp())
    del vb
