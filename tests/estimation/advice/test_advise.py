"""`vbrt.advise`: what fits, how fast, and what is best for a goal; `wrap(model, "auto")`; `vbrt.fit_batch`."""

import functools
import json
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import nn

import vbrt
from tests.models import llama_of
from vbrt.config import Machine
from vbrt.errors import ArgumentError, ConfigError
from vbrt.estimation.advice import candidates
from vbrt.estimation.memory.extrapolation import whole_trace
from vbrt.estimation.memory.planned_weights import held_alike

transformers = pytest.importorskip("transformers")

MiB = 1 << 20
RATES = vbrt.data_sheet("NVIDIA GeForce RTX 4090")
CPU_RATES = vbrt.Rates("two cores", 0.0, 30.0, 0.43, launch_us=2.3, fp32_tflops=0.2)
HOST = Machine(None, None, 4000 * MiB, 4000 * MiB)


@pytest.fixture(autouse=True, scope="module")
def traces() -> Iterator[None]:
    """Trace each task of a model once for all tests: machines differ, traces do not."""
    known: dict = {}

    def once(bare: nn.Module, task: vbrt.Task, plan: object, activations: str | int) -> object:
        key = bare.config.hidden_size, bare.dtype, task, activations, held_alike(bare, plan, task)
        if key not in known:
            known[key] = whole_trace(bare, task, plan, activations)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(candidates, "whole_trace", once)
        yield


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return llama_of(
        hidden_size=1024, intermediate_size=9216, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=2,
        vocab_size=4096,
    )  # fmt: skip


def machine(gpu: int, cpu: int, ssd: int | None = None) -> Machine:
    return Machine(gpu * MiB, gpu * MiB, cpu * MiB, cpu * MiB, None if ssd is None else ssd * MiB)


@functools.cache  # tests read several things of one piece of advice
def asked(model: nn.Module, goal: str, on: Machine, **sizes: int) -> vbrt.Advice:
    return vbrt.advise(model, goal, machine=on, rates=RATES, **({"context": 256} | sizes))


@pytest.mark.exhaustive
def test_a_model_that_fits_stays_on_the_gpu_with_its_own_bits_unless_less_may_be_faster(model):
    exact = asked(model, "exact", machine(2000, 4000))
    assert exact.best.lossless and list(exact.best.found.tiers) == ["gpu"]
    fastest = asked(model, "fastest", machine(2000, 4000)).best
    assert fastest.name == "fp4" and fastest.speed.ms < exact.best.speed.ms


def test_what_does_not_fit_streams_within_the_memory_and_says_by_what_it_is_bound(model):
    on = machine(200, 4000)
    advice = asked(model, "exact", on)
    best = advice.best
    assert best.name == "exact" and best.speed.bound == "link"
    assert best.found.peak_bytes <= on.gpu_free_bytes and not best.found.missing
    plan = vbrt.make_plan(model, best.found.config, on)
    assert plan.home_bytes("cpu") == best.found.plan.home_bytes("cpu") > 0
    assert "This is it." in advice.explain() and "unwrapped: does not fit: the gpu lacks" in advice.explain()
    assert advice.command("./m").startswith("vbrt run ./m --config exact --set tiers.gpu.budget=")


def test_a_drive_is_used_where_host_memory_ends_and_only_there(model):
    with pytest.raises(ConfigError, match="nothing fits"):
        _ = asked(model, "exact", machine(200, 60)).best
    refused = {choice.name: choice.reason for choice in asked(model, "exact", machine(200, 60)).choices}
    assert refused["exact"].startswith("the pages take ") and "preset" not in refused["exact"]
    assert "raise tiers" not in refused["exact"]  # the budgets are advise's own
    with_drive = asked(model, "exact", machine(200, 60, 4000)).best
    assert with_drive.found.config.tiers.ssd.enabled and with_drive.found.plan.home_bytes("ssd")
    assert not asked(model, "exact", machine(200, 4000, 4000)).best.found.config.tiers.ssd.enabled


def test_what_advice_says_of_a_candidate_is_what_its_estimate_says():
    sizes = {"hidden_size": 256, "moe_intermediate_size": 512, "num_experts": 96, "num_experts_per_tok": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "num_hidden_layers": 1}
    config = transformers.Qwen3MoeConfig(vocab_size=1024, intermediate_size=512, **sizes, **heads)
    with torch.device("meta"):
        moe = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    on = machine(130, 800)
    found = {c.found.plan.swaps[-1].format: c for c in asked(moe, "fastest", on).fitting if c.config is not None}
    assert len(found) > 2
    for choice in found.values():
        alone = vbrt.estimate(moe, choice.task, choice.config, machine=on)
        assert alone.moments == choice.found.moments, choice.name


@pytest.mark.exhaustive
def test_the_longest_context_is_the_last_that_fits(model):
    on = machine(300, 4000)
    best = asked(model, "longest", on).best
    assert best.task.context > 256 and best.found.peak_bytes <= on.gpu_free_bytes
    further = best.task.but(context=4 * best.task.context)  # advice leaves as much room again as comes and goes
    budget = {"gpu": {"budget": best.found.plan.largest_layer_bytes * 2}}
    assert not vbrt.estimate(model, further, vbrt.load_config(best.name, tiers=budget), machine=on).fits


@pytest.mark.exhaustive
def test_training_gives_up_no_more_than_it_must():
    model = llama_of(
        hidden_size=512, intermediate_size=2048, num_hidden_layers=3, num_attention_heads=4, vocab_size=512
    )
    advice = asked(model, "train", machine(4000, 4000), context=64)
    assert advice.best.name == "all weights"
    peaks = {choice.name: choice.found.peak_bytes for choice in advice.choices}
    assert peaks["LoRA 16 on fp4"] < peaks["LoRA 16 on the plain model"] < peaks["all weights"]
    room = (peaks["LoRA 16 on fp4"] >> 20) + 8
    with_host = asked(model, "train", machine(room, 4000), context=64)
    assert with_host.best.name == "all weights, from the tiers"
    assert 'vbrt.wrap(model, "full"' in with_host.command("./m")
    assert asked(model, "train", machine(room, 100), context=64).best.name.startswith("LoRA 16 on")
    found = {choice.name: choice for choice in with_host.choices}
    whole, rounded = (found[f"all weights, from the tiers{word}"] for word in ("", ", 8-bit moments"))
    assert rounded.found.tiers["cpu"] < whole.found.tiers["cpu"] and rounded.noise == whole.noise == 0
    less = replace(with_host, choices=(rounded, found["LoRA 16 on dense"]))  # where host memory has no room for all
    assert less.best is rounded and 'training={"moments": "8bit"}' in less.command("./m")


def test_the_front_holds_what_nothing_beats(model):
    advice = asked(model, "fastest", machine(400, 4000))
    front = advice.front
    assert {choice.name for choice in front} >= {"fp4"} and len(front) < len(advice.choices)
    for choice in front:
        assert not any(
            other.speed.ms < choice.speed.ms
            and other.speed.tokens_s >= choice.speed.tokens_s
            and other.noise <= choice.noise
            and other.found.peak_bytes <= choice.found.peak_bytes
            for other in advice.fitting
        )
    assert json.loads(json.dumps(advice.to_dict()))["choices"][0]["name"] == "unwrapped"


def test_fewer_pages_and_larger_batches_are_among_the_candidates(model):
    on = machine(400, 4000)
    advice = asked(model, "fastest", on)
    found = {choice.name: choice for choice in advice.choices}
    resident, passing = found["fp4"], found["fp4, pages pass through"]
    assert passing.found.peak_bytes < resident.found.peak_bytes and passing.speed.ms > resident.speed.ms
    assert {id(resident), id(passing)} <= {id(choice) for choice in advice.front}
    wide = asked(model, "throughput", on).best
    assert wide.task.batch > 1 and wide.speed.tokens_s > resident.speed.tokens_s
    assert wide.found.peak_bytes <= on.gpu_free_bytes
    assert advice.best.task.batch == 1


def test_formats_that_are_smaller_are_tried_and_what_is_rounded_more_is_no_better_for_that(model):
    advice = asked(model, "fastest", machine(400, 4000))
    found = {choice.name: choice for choice in advice.choices}
    assert found["mxfp4"].found.peak_bytes < found["fp4"].found.peak_bytes
    assert found["mxfp4"].noise > found["nf4"].noise > found["fp4"].noise > found["exact"].noise == 0
    assert found["mxfp4"] in advice.front and advice.best.name == "fp4"
    assert "mxfp4: fits, " in advice.explain() and "4-bit weights, 11.1% of noise" in advice.explain()


def test_products_in_fp8_are_tried_for_long_inputs_on_gpus_that_have_them(model):
    def tried(kind: str, rates: vbrt.Rates) -> dict:
        on = candidates.Asked(model, machine(2000, 4000), rates)
        return {way.name: (on, way) for way in candidates._run(on, vbrt.Task(kind, context=2048))}

    ways = tried("prefill", RATES)
    fp8, fp4 = (on.choice(way) for on, way in (ways["fp8"], ways["fp4"]))
    assert fp8.speed.ms < fp4.speed.ms and fp8.noise > fp4.noise
    assert "fp8" not in tried("prefill", vbrt.data_sheet("RTX 3090")) and "fp8" not in tried("decode", RATES)


def test_time_follows_the_link_where_it_decides(model):
    slow = vbrt.advise(model, "exact", machine=machine(200, 4000), rates=replace(RATES, link_gb_s=5.0), context=256)
    fast = vbrt.advise(model, "exact", machine=machine(200, 4000), rates=replace(RATES, link_gb_s=50.0), context=256)
    assert slow.best.speed.ms > 5 * fast.best.speed.ms


def test_wrong_goals_and_unknown_gpus_are_named(model):
    with pytest.raises(ArgumentError, match="goal = 'cheapest'; expected one of 'fastest'"):
        vbrt.advise(model, "cheapest")
    with pytest.raises(ArgumentError, match="no data sheet of a GPU 'Voodoo 2'; there are RTX 2080 Ti"):
        vbrt.data_sheet("Voodoo 2")


def test_rates_of_a_gpu_are_for_machines_that_have_one(model):
    with pytest.raises(ArgumentError, match=r"rates of a GPU, RTX 4090, and a machine without one; .*--gpu-memory"):
        vbrt.advise(model, machine=HOST, rates=RATES)
    with pytest.raises(ArgumentError, match=r"the rates of one without, two cores; name a GPU .*H200"):
        vbrt.advise(model, machine=machine(200, 4000), rates=CPU_RATES)


def test_on_a_cpu_host_and_device_are_one_and_int8_is_tried(model):
    advice = vbrt.advise(model, machine=HOST, rates=CPU_RATES, context=256)
    found = {choice.name: choice for choice in advice.choices}
    speed = found["unwrapped"].speed
    assert speed.ms == pytest.approx(speed.device_ms + speed.host_ms) and speed.host_ms > 0
    assert found["fp4"].speed.host_ms < found["exact"].speed.host_ms  # C replays steps of what loses bits
    int8 = found["fp4, activations in int8"]
    assert int8.noise > found["fp4"].noise and "compute.int8=true" in int8.settings()
    assert advice.best.name == "fp4" and "fp8" not in found


def test_prompts_of_4_bit_weights_are_in_fp32_on_cpus_without_bf16(model):
    def ms(way: str, rates: vbrt.Rates) -> float:
        on = candidates.Asked(model, HOST, rates)
        ways = {way.name: way for way in candidates._run(on, vbrt.Task("prefill", context=2048))}
        return on.choice(ways[way]).speed.ms

    slow = replace(CPU_RATES, tflops=CPU_RATES.fp32_tflops / 4)
    assert ms("unwrapped", slow) > 2 * ms("fp4", slow)
    assert ms("fp4", CPU_RATES) < ms("fp4", slow) < ms("unwrapped", slow)


@pytest.mark.sample(1)
@pytest.mark.parametrize(("goal", "gpu", "cpu"), [("fastest", 20, 20), ("exact", 60, 40)])
def test_what_is_said_to_be_enough_is_enough_and_the_goal_is_kept(model, goal, gpu, cpu):
    on = machine(gpu, cpu)
    advice = asked(model, goal, on)
    with pytest.raises(ConfigError, match=r"nothing fits; .* comes nearest and lacks .* would do"):
        _ = advice.best
    lacks = advice.nearest.lacks
    enough = candidates._larger(on, lacks)
    assert asked(model, goal, enough).fitting
    assert not asked(model, goal, candidates._larger(on, {tier: n // 2 for tier, n in lacks.items()})).fitting
    assert goal == "fastest" or advice.nearest.name in ("unwrapped", "dense", "exact")


def test_wrap_auto_takes_the_first_answer(monkeypatch):
    from vbrt.estimation.advice import advise

    settings = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2, vocab_size=128
    )
    model = transformers.LlamaForCausalLM(settings).eval()
    rates = RATES if torch.cuda.is_available() else CPU_RATES
    monkeypatch.setattr(advise, "kept_rates", lambda: rates)
    wanted = vbrt.advise(model).best.config or vbrt.load_config("dense")
    vb = vbrt.wrap(model, "auto")
    assert [swap.format for swap in vb.plan.swaps] == [
        swap.format for swap in vbrt.make_plan(vb.unwrap(), wanted).swaps
    ]


def test_fit_batch_finds_the_largest_that_fits_and_confirms_it():
    weight = torch.randn(256, 256)
    ran = []

    def step(batch: int) -> None:
        ran.append(batch)
        (torch.ones(batch, 256) @ weight).relu().sum()

    each = 256 * 4  # a row; two of three tensors live at once
    found = vbrt.fit_batch(step, room_bytes=100 * 2 * each)
    assert 95 <= found <= 100 and ran[-1] == found and len(ran) <= 6
    with pytest.raises(ArgumentError, match="a batch of 1 does not fit"):
        vbrt.fit_batch(step, room_bytes=each)


def test_fit_batch_goes_down_where_the_estimate_was_too_high():
    def step(batch: int) -> None:
        if batch > 40:
            raise torch.OutOfMemoryError("no")
        torch.ones(batch, 1024).relu()

    assert 30 <= vbrt.fit_batch(step, room_bytes=1 << 20) <= 40
