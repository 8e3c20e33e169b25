"""Estimates, advice and measurements where a GPU computes: beside its allocator, and within its memory."""

import gc
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest
import torch
from torch import nn

import vbrt
from tests.models import llama_of
from vbrt.config import Machine, parse_budget
from vbrt.estimation.advice import option_measurements
from vbrt.estimation.advice.machine_rates import measure_rates
from vbrt.estimation.memory.example_inputs import inputs_of
from vbrt.estimation.memory.task import Task

pytestmark = pytest.mark.gpu
pytest.importorskip("transformers")

GiB = 1 << 30
ON = Machine(64 * GiB, 64 * GiB, 64 * GiB, 64 * GiB)


def llama(device: str = "cuda") -> nn.Module:
    torch.manual_seed(0)
    return llama_of(
        device, hidden_size=1024, intermediate_size=4096, num_hidden_layers=6, num_attention_heads=8,
        num_key_value_heads=2, vocab_size=8192,
    )  # fmt: skip


@pytest.fixture(scope="module")
def rates() -> vbrt.Rates:
    return measure_rates()


@pytest.fixture
def limit() -> Iterator[int]:
    """Hold torch to two GiB beside what is held by now."""
    gc.collect()  # models of tests before
    torch.cuda.empty_cache()
    held = torch.cuda.memory_reserved()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((2 * GiB + held) / total)
    yield 2 * GiB
    torch.cuda.set_per_process_memory_fraction(1.0)
    torch.cuda.empty_cache()


def ran(model: nn.Module, task: Task) -> None:
    inputs = inputs_of(model.module if isinstance(model, vbrt.VBModelWrapper) else model, task, device="cuda")
    if task.kind == "decode":
        model.generate(**inputs, max_new_tokens=task.new, min_new_tokens=task.new, do_sample=False, pad_token_id=0)
    elif task.kind == "prefill":
        with torch.no_grad():
            model(**inputs, use_cache=False)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        for _ in range(2):
            model(**inputs, labels=inputs["input_ids"], use_cache=False).loss.backward()
            optimizer.step()
            optimizer.zero_grad()


def peak_of(task: Task, preset: str | None) -> int:
    """Return the peak bytes that torch allocated on the GPU."""
    model = llama().train(task.trains)
    model = model if preset is None else vbrt.wrap(model, preset).materialize(progress=False)
    torch.cuda.reset_peak_memory_stats()
    ran(model, task)
    return torch.cuda.max_memory_allocated()


@pytest.mark.parametrize(
    ("task", "preset"),
    [
        (Task("decode", 4, 512, 8), "fp4"),
        (Task("prefill", 2, 1024), "exact"),
        (Task("prefill", 2, 1024), None),
        (Task("train", 2, 512), None),
    ],
)
def test_an_estimate_is_what_the_allocator_gives_away(task, preset):
    found = vbrt.estimate(llama("meta"), task, preset, machine=ON)
    # a process of its own, where nothing else is allocated or freed
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        peak = process.submit(peak_of, task, preset).result()
    most = (
        1.08 if preset == "exact" else 1.05
    )  # a restored weight, 3 % here, is counted with outputs that come after it
    assert 0.98 * peak <= found.peak_bytes <= most * peak, (found.peak_bytes / peak, str(found))


def taken_with(preset: str, share: str) -> tuple[int, int, bool]:
    """Return the bytes of the GPU that generating takes in a process with a share of it, CUDA's context included, the
    share's budget, and whether pages were streamed."""
    model = llama_of(
        "cpu", hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=16,
        num_key_value_heads=4, vocab_size=32768,
    )  # fmt: skip
    vb = vbrt.wrap(model, preset, gpu_memory=share, context=2048).materialize(progress=False)
    for _ in range(2):  # captured steps stay beside a second call
        ran(vb, Task("decode", 1, 2048, 128))
    torch.cuda.synchronize()
    streamed = vb.stats().bytes_moved.get("cpu>gpu", 0) > 0
    return torch.cuda.mem_get_info()[0], vb.runtime.budgets["gpu"], streamed


@pytest.mark.alone
@pytest.mark.parametrize(("preset", "share"), [("fp4", "1900MiB"), ("exact", "2GiB"), ("dense", "2.2GB")])
def test_a_process_stays_within_its_share_of_the_gpu(preset, share, monkeypatch):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")  # as the docs say; the child has it
    gc.collect()
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0]  # of a GPU that nobody else uses meanwhile
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        left, budget, streamed = process.submit(taken_with, preset, share).result()
    most = parse_budget(share, where="").amount
    assert 0.6 * most < free - left <= most, (free - left, most, budget)
    assert streamed or preset == "fp4"


def test_measured_rates_are_those_of_a_gpu_and_its_link(rates):
    assert rates.name == torch.cuda.get_device_name() and rates.source == "measured here"
    assert rates.memory_gb_s > rates.link_gb_s > 1 and rates.tflops > rates.fp32_tflops > 1
    assert 0.5 < rates.launch_us < 100 and rates.drive_gb_s > 0 and rates.host_gb_s > 1


def test_the_first_answer_runs_in_the_memory_that_it_was_asked_for(rates, limit):
    task = Task("decode", 1, 512, 8)
    best = vbrt.advise(
        llama("meta"), "exact", task, machine=Machine(limit, limit, 64 * GiB, 64 * GiB), rates=rates
    ).best
    assert best.lossless and best.speed.ms > 0
    model = llama()
    model = model if best.config is None else vbrt.wrap(model, best.config).materialize(progress=False)
    ran(model, task)


def test_wrap_auto_follows_the_advice_for_this_gpu(rates, monkeypatch):
    from vbrt.estimation.advice import advise

    monkeypatch.setattr(advise, "kept_rates", lambda: rates)
    vb = vbrt.wrap(llama(), "auto")
    assert vb.stats().compute_tier == "gpu"
    ran(vb, Task("decode", 1, 64, 4))


@pytest.mark.parametrize("room", [None, 512 << 20])
def test_fit_batch_fills_the_memory_that_is_free_or_given(room, limit):
    each = 8 << 20

    def step(batch: int) -> None:
        torch.ones(batch, each // 4, dtype=torch.float32, device="cuda").add_(1.0)

    found = vbrt.fit_batch(step, room_bytes=room, at_most=10_000)
    most = (limit if room is None else room) // each
    assert 0.75 * most <= found <= most


def test_lessons_are_measured_on_the_gpu():
    rows = {row.case: row for row in option_measurements.attention((512,), heads=4, times=2, backward=True)}
    flash, math = rows["flash, 512 tokens"], rows["math, 512 tokens"]
    assert not flash.why and flash.peak_bytes < math.peak_bytes and flash.ms > 0
    steps = list(option_measurements.memory(llama().float(), Task("train", 2, 256), times=1))
    assert not any(row.why for row in steps) and steps[-1].peak_bytes < steps[0].peak_bytes
