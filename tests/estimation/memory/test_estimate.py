"""`vbrt.estimate`: figures beside what torch allocates, one code path with plan and runtime, and wrong use."""

import json
from collections.abc import Callable
from dataclasses import asdict, replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import ProfilerActivity, profile

import vbrt
from tests.models import config, qwen3_moe, wrap
from vbrt.config import Machine, load_config
from vbrt.errors import ArgumentError, WrapError
from vbrt.estimation.advice import cpu_expert_rates
from vbrt.estimation.advice.cost_model import default_cost_model
from vbrt.estimation.advice.machine_rates import device_name, keep_rates, kept_rates, rates_file
from vbrt.estimation.advice.step_time import Speed, predict
from vbrt.estimation.memory import traced_checkpointing
from vbrt.estimation.memory.estimate_report import records
from vbrt.estimation.memory.expert_workspace import HeldExperts, experts_at_once
from vbrt.estimation.memory.extrapolation import STAGES
from vbrt.estimation.memory.gpu_operator_sizes import _by_definition, gpu_sizes
from vbrt.estimation.memory.live_bytes import Meter
from vbrt.estimation.memory.option_savings import with_and_without
from vbrt.estimation.memory.traced_checkpointing import asked_of
from vbrt.kernels.cpu.experts import most_pairs
from vbrt.residency.expert_leases import ExpertLeases

transformers = pytest.importorskip("transformers")

GiB = 1 << 30
ON = Machine(None, None, 32 * GiB, 32 * GiB)
GPU = replace(ON, gpu_total_bytes=32 * GiB, gpu_free_bytes=32 * GiB)


def model_of(layers: int = 5) -> nn.Module:
    settings = transformers.LlamaConfig(
        hidden_size=128,
        intermediate_size=1024,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=512,
    )
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(settings).eval()


def allocated(run: Callable[[], object]) -> int:
    """The most bytes that lived at once, of all that torch allocated."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        run()
    now = peak = 0
    for event in record.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    return peak


def step_bytes(found: vbrt.Estimate) -> int:
    return sum(row.nbytes for row in found.rows if row.source == "traced")


IDS = torch.ones(2, 256, dtype=torch.long)


def forward(model: nn.Module) -> object:
    with torch.no_grad():
        return model(input_ids=IDS, use_cache=False)


class Hungry(nn.Module):
    """A module that holds a further 4 MB while it runs."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scratch = x.new_empty(1 << 20)
        return self.inner(x) + scratch[0] * 0


def test_a_pass_is_estimated_as_torch_allocates_it_and_a_further_allocation_shows():
    model, task = model_of(), {"batch": 2, "context": 256}
    estimated = step_bytes(vbrt.estimate(model, "prefill", None, machine=ON, **task))
    assert estimated == pytest.approx(allocated(lambda: forward(model)), rel=0.01)
    for layer in model.model.layers:
        layer.mlp.up_proj = Hungry(layer.mlp.up_proj)
    more = step_bytes(vbrt.estimate(model, "prefill", None, machine=ON, **task))
    assert more == pytest.approx(allocated(lambda: forward(model)), rel=0.01)
    assert more - estimated > 2 << 20


@pytest.mark.sample(1)
@pytest.mark.parametrize("optimizer", ["AdamW", "SGD"])
def test_a_training_step_is_estimated_as_torch_allocates_it(optimizer):
    model = model_of()
    weights = sum(p.numel() * p.element_size() for p in model.parameters())

    def train() -> None:
        steps = getattr(torch.optim, optimizer)(model.parameters(), lr=1e-4, foreach=True)
        for _ in range(2):
            model(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
            steps.step()
            steps.zero_grad()

    found = vbrt.estimate(model, "train", None, machine=ON, batch=2, context=256, optimizer=optimizer)
    assert step_bytes(found) == pytest.approx(allocated(train), rel=0.02)
    assert found.peak_bytes == pytest.approx(step_bytes(found) + weights, rel=0.001)


def test_a_few_blocks_of_each_kind_tell_what_all_take():
    settings = transformers.Gemma3TextConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=14, num_attention_heads=2, num_key_value_heads=1,
        head_dim=64, sliding_window=64, vocab_size=256, layer_types=["sliding_attention", "full_attention"] * 7,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(settings)
    asked = {"batch": 2, "context": 200, "new": 56}
    found = vbrt.estimate(model, "decode", None, machine=ON, **asked)
    cache = transformers.DynamicCache(config=settings)
    with torch.no_grad():
        model(input_ids=torch.ones(2, 255, dtype=torch.long), past_key_values=cache, use_cache=True)
        model(input_ids=torch.ones(2, 1, dtype=torch.long), past_key_values=cache, use_cache=True)
    held = sum(t.untyped_storage().nbytes() for layer in cache.layers for t in (layer.keys, layer.values))
    rows = {row.name: row.nbytes for row in found.rows}
    full = 14 * 2 * 2 * 256 * 64 * 4
    assert held < 0.7 * full  # half of the layers keep 64 tokens of 256
    assert rows["KV cache"] == pytest.approx(held, rel=0.05)


def test_estimate_plan_and_runtime_count_the_same_pages():
    model = model_of()
    found = vbrt.estimate(model, "prefill", config("nvfp4"), machine=ON, batch=2, context=256)
    vb = wrap(model, "nvfp4").materialize(progress=False)
    assert found.plan.to_dict()["swaps"] == vb.plan.to_dict()["swaps"]
    rows = {row.name: row.nbytes for row in found.rows}
    held = vb.stats().tiers["cpu"].held_bytes
    assert held <= rows["pages"] <= 1.02 * held
    assert rows["not swapped"] == vb.plan.kept_bytes


def test_training_from_the_tiers_leaves_gradients_and_state_of_kept_parameters_alone_on_the_device():
    model, on = model_of().bfloat16(), Machine(GiB, GiB, 32 * GiB, 32 * GiB)
    asked = {"machine": on, "batch": 2, "context": 64}
    config = load_config("full", tiers={"gpu": {"budget": "4MiB"}}, weights={"embeddings": False})
    full = vbrt.estimate(model, "train", config, **asked)
    rows = {(row.name, row.tier): row.nbytes for row in full.rows}
    swapped = sum(swap.site.parameters for swap in full.plan.swaps)
    kept = sum(p.numel() for p in model.parameters()) - swapped
    assert rows["gradients", "gpu"] == pytest.approx(2 * kept, rel=0.05)
    assert rows["optimizer", "gpu"] == pytest.approx(12 * kept, rel=0.05)  # moments, halves
    assert rows["pages", "gpu"] == 4 << 20 and rows["pages", "cpu"] >= 14 * swapped
    largest = max(swap.site.parameters for swap in full.plan.swaps)
    counted = sum(row.nbytes for row in full.rows if row.tier == "gpu" and row.source == "counted")
    traced = dict(full.moments)["optimizer"] - counted - 4 * largest  # two buffers, through which gradients leave
    assert 12 * kept < traced < 32 * kept  # gradients, state; while it steps, masters and gradients in fp32


@pytest.mark.parametrize(("available", "ahead", "share"), [(32, "auto", 1.0), (0.05, "auto", 0.3), (32, 0, 0.0)])
def test_updates_ahead_take_host_memory_that_is_free(available, ahead, share):
    on = Machine(GiB, GiB, 32 * GiB, int(available * GiB))
    config = load_config("full", tiers={"gpu": {"budget": "4MiB"}}, training={"ahead": ahead})
    found = vbrt.estimate(model_of().bfloat16(), "train", config, machine=on, batch=2, context=64)
    rows = {(row.name, row.tier): row.nbytes for row in found.rows}
    wanted = sum(12.125 * swap.site.parameters for swap in found.plan.swaps)
    taken = rows["updates ahead", "cpu"]
    assert taken == found.spare_bytes and found.fits
    assert taken == pytest.approx(wanted, rel=0.02) if share == 1.0 else taken <= share * wanted
    assert taken <= (on.cpu_available_bytes - rows["pages", "cpu"]) // 2 and (taken > 0) == (share > 0)


@pytest.mark.exhaustive
def test_activations_are_counted_as_the_config_asks_for_them():
    on_gpu, sizes = Machine(GiB, GiB, 32 * GiB, 32 * GiB), {"batch": 2, "context": 256}
    block_input = 2 * 256 * 128 * 2

    def found(asked, layers=3):
        config = load_config("full", training={"activations": asked}, weights={"embeddings": False})
        estimate = vbrt.estimate(model_of(layers).bfloat16(), "train", config, machine=on_gpu, **sizes)
        return {row.name: row.nbytes for row in estimate.rows}["activations"], dict(estimate.moments)["backward"]

    kept, again, parked = found("keep"), found("recompute"), found("offload", layers=4)
    assert again[0] - parked[0] == (3 - 2) * block_input  # two are on their way, of any number of layers
    assert kept[1] > again[1]
    room = (kept[0] + again[0]) // 2
    bounded = found(room)
    assert bounded[0] == room and again[1] < bounded[1]
    assert asked_of(load_config("full", training={"activations": "offload"}), "cpu") == "recompute"


def test_recorded_blocks_take_memory_that_all_share(monkeypatch):
    on = Machine(GiB, GiB, 32 * GiB, 32 * GiB)
    config = load_config("full", training={"activations": "recompute"}, weights={"embeddings": False})

    def found():
        estimate = vbrt.estimate(model_of(3).bfloat16(), "train", config, machine=on, batch=2, context=256)
        return {row.name: row.nbytes for row in estimate.rows}["activations"], estimate.plan

    recorded, plan = found()
    monkeypatch.setattr(traced_checkpointing._Shared, "__call__", lambda *given: None)
    eager, _ = found()
    block = sum(swap.site.parameters for swap in plan.swaps if ".0." in swap.name)
    assert recorded - eager == 4 * (2 * 256 * 128 * 2) + 2 * 2 * block  # bf16


@pytest.mark.exhaustive
def test_options_show_what_each_saves():
    task = vbrt.Task("train", batch=2, context=256, lora=4)
    found = {option.name: option for option in with_and_without(model_of(2), task, None, ON)}
    assert set(found) >= {"4-bit weights", "flash attention", "checkpointing", "bf16 autocast"}
    for name in ("flash attention", "checkpointing"):
        assert found[name].having < found[name].without, name
    assert "saves" in str(found["checkpointing"])


@pytest.mark.parametrize(
    ("task", "sizes", "said"),
    [
        ("dream", {}, "expected one of 'decode'"),
        ("decode", {"batch": 0}, "batch = 0; expected a whole number of at least 1"),
        ("decode", {"experts": -1}, "experts = -1; expected a whole number of at least 0"),
        ("decode", {"widht": 3}, "no such argument of a task"),
        ("train", {"optimizer": "Adamant"}, "optimizer = 'Adamant'; expected a class of torch.optim"),
    ],
)
def test_wrong_tasks_are_named(task, sizes, said):
    with pytest.raises(ArgumentError, match=said):
        vbrt.estimate(model_of(3), task, None, machine=ON, **sizes)


def test_models_that_cannot_be_estimated_say_what_would_do():
    with pytest.raises(ArgumentError, match=r"Linear: nothing says what its forward takes; give .*step="):
        vbrt.estimate(nn.Linear(64, 64), "prefill", None, machine=ON)
    looked = lambda model: model(torch.ones(3, 64)).sum().item()  # noqa: E731 - a value that no fake tensor has
    with pytest.warns(
        UserWarning, match=r"Linear cannot be traced without weights.*only weights and pages are counted"
    ):
        found = vbrt.estimate(nn.Linear(64, 64), "prefill", None, machine=ON, step=looked)
    assert found.peak_bytes == 4 * (64 * 64 + 64) and "NOT TRACED" in str(found) and "It fits" not in str(found)
    found = vbrt.estimate(nn.Linear(64, 64), "prefill", None, machine=ON, step=lambda model: model(torch.ones(3, 64)))
    assert {row.name: row.nbytes for row in found.rows}["parameters"] == 4 * (64 * 64 + 64)
    wrapped = wrap(model_of(3), "nvfp4").module
    for ranks in (1, 2):
        with pytest.raises(WrapError, match="before it is wrapped"):
            vbrt.estimate(wrapped, "prefill", ranks=ranks)


@pytest.mark.exhaustive
def test_predicted_times_hold_against_every_committed_one():
    from scripts.times import every

    rows = list(every())
    far = [row for row in rows if not row.near]
    assert len(rows) >= 100 and len(far) <= 3, far
    assert not [row for row in far if row.bound == "link"], far


@pytest.mark.exhaustive
def test_estimates_hold_against_every_committed_peak():
    from scripts.estimates import families, streaming, training

    rows = [*families(), *streaming(), *training()]
    assert len(rows) >= 55
    assert [row for row in rows if not -0.02 <= row["off"] <= 0.05] == []


def test_estimates_hold_against_committed_peaks_of_streaming():
    from scripts.estimates import streaming

    rows = [row for _, row in zip(range(3), streaming(), strict=False)]
    assert [row for row in rows if not -0.02 <= row["off"] <= 0.05] == []
    assert load_config("fp4").mode == "infer"


def test_routed_experts_that_train_from_the_tiers_are_counted_with_their_gradients():
    model, on = qwen3_moe(), Machine(GiB, GiB, 32 * GiB, 32 * GiB)
    config = load_config("full", tiers={"gpu": {"budget": "4MiB"}}, weights={"min_parameters": 0})
    found = {
        tokens: dict(vbrt.estimate(model, "train", config, machine=on, context=tokens).moments)["backward"]
        for tokens in (32, 64)
    }
    experts = model.model.layers[0].mlp.experts
    both = 2 * (experts.gate_up_proj.numel() + experts.down_proj.numel())
    assert found[32] > (64 << 20) + both + 2 * 2 * experts.gate_up_proj.numel()
    pair = 2 * (64 + 64 + 32 + 64)  # inputs and outputs of both products, bf16
    assert found[64] - found[32] >= 2 * pair * 2 * 32


def quarter_of_the_experts(task: str, miss: str = "fetch", format: str = "nvfp4") -> tuple[nn.Module, vbrt.Estimate]:
    """A model, and the estimate of a task with all its other pages on the GPU and a quarter of its routed experts."""
    model, on = qwen3_moe(count=16, layers=3), Machine(GiB, GiB, 32 * GiB, 32 * GiB)
    format, _, fine = format.partition("+")
    weights = {"min_parameters": 0, "format": format, "fine": fine or "none"}
    options = {"weights": weights, "experts": {"miss": miss}}
    plan = vbrt.make_plan(model, load_config("fp4", **options), on)
    experts = sum(swap.page_bytes for swap in plan.routed)
    budget = plan.page_bytes - experts + 2 * plan.largest_layer_bytes + experts // 4
    config = load_config("fp4", **options, tiers={"gpu": {"budget": budget}})
    return model, vbrt.estimate(model, task, config, machine=on, context=8)


def test_missed_experts_count_as_the_link_brings_them_or_as_the_cpu_computes_them():
    def ms(miss: str, **rates: float) -> float:
        model, found = quarter_of_the_experts("decode", miss)
        return predict(model, found, replace(vbrt.data_sheet("RTX 4090"), **rates)).ms

    slow = {"link_gb_s": 1e-5, "experts_gb_s": 2e-5}
    fetch, compute, auto = (ms(miss, **slow) for miss in ("fetch", "compute", "auto"))
    assert auto < compute < fetch
    assert ms("auto") < ms("fetch") < ms("compute")


def test_weights_that_do_not_fit_are_computed_in_part_by_the_cpu_in_a_step_of_few_tokens():
    def speed(task: str = "decode", preset: str = "fp4", where: str = "auto", batch: int = 1) -> Speed:
        how = {"weights": {"min_parameters": 0}, "compute": {"where": where}, "tiers": {"gpu": {"budget": 1 << 19}}}
        found = vbrt.estimate(model, task, load_config(preset, **how), machine=on, context=8, batch=batch)
        return predict(model, found, rates)

    model, on = model_of(8), Machine(GiB, GiB, 32 * GiB, 32 * GiB)
    rates = replace(vbrt.data_sheet("RTX 4090"), link_gb_s=0.05, experts_gb_s=0.1)  # both take longer than all else
    both, link = speed(), speed(where="device")
    assert (link.bound, link.hosted_bytes, link.cpu_ms) == ("link", 0, 0) and both.hosted_bytes > 0
    assert max(both.link_ms, both.cpu_ms + both.device_ms) <= both.ms < 0.7 * link.ms
    assert both.cpu_ms == pytest.approx(both.hosted_bytes / 1e5, rel=0.05)  # and a round trip each
    assert 0 < speed(batch=8).hosted_bytes < both.hosted_bytes
    assert (
        speed("prefill").hosted_bytes == speed(preset="dense").hosted_bytes == speed(preset="exact").hosted_bytes == 0
    )


@pytest.mark.parametrize(
    ("task", "format", "waits"),
    [
        ("decode", "nvfp4", True),
        ("decode", "nf4", True),
        ("decode", "mxfp4+exact", True),
        ("decode", "quantile+exact", False),
        ("prefill", "nvfp4", False),
    ],
)
def test_a_recorded_step_waits_for_the_experts_that_it_misses_and_others_have_them_staged(task, format, waits):
    model, found = quarter_of_the_experts(task, format=format)
    assert found.recorded == waits  # the host leases experts that no kernel merges, whose levels are their own
    rates = replace(vbrt.data_sheet("RTX 4090"), link_gb_s=1e-5)  # the link takes longer than all else
    speed = predict(model, found, rates)
    assert speed.link_ms > speed.device_ms > 0
    assert speed.ms == pytest.approx(speed.link_ms + waits * max(speed.device_ms, speed.host_ms), rel=1e-9)
    assert predict(model, found, rates, hit_rate=1.0).link_ms == 0


def test_the_rate_of_experts_on_a_cpu_is_measured(monkeypatch):
    monkeypatch.setattr(cpu_expert_rates, "_SHAPES", {"up": (64, 128), "down": (128, 32)})
    monkeypatch.setattr(cpu_expert_rates, "_TIMES", 1)
    assert cpu_expert_rates.experts_gb_s() > 0
    plain, decoded, most = cpu_expert_rates.few_rows()
    assert plain > 0 and decoded > 0 and most == most_pairs()


@pytest.mark.parametrize("preset", ["fp4", "dense", None])
def test_products_of_few_rows_take_experts_longer_on_a_cpu_and_only_where_matrices_are_decoded(preset):
    model = qwen3_moe(count=16)
    asked = preset and load_config(preset, weights={"min_parameters": 0})
    found = vbrt.estimate(model, "prefill", asked, machine=ON, context=512)  # 64 tokens for each expert
    even = vbrt.Rates("a CPU", 0.0, 30.0, 0.4, few_tflops=0.4, few_decoded_tflops=0.4)
    rate, other = "few_tflops", "few_decoded_tflops"
    if preset == "fp4":
        rate, other = other, rate

    def ms(**changes: float) -> float:
        return predict(model, found, replace(even, **changes)).ms

    assert ms() == ms(**{other: 0.1}) < ms(**{rate: 0.1}) < ms(**{rate: 0.05})
    assert ms() < ms(**{rate: 0.0}) < ms(**{rate: 0.05})  # 0: not measured
    assert ms() == ms(**{rate: 0.1}, most_pairs=64) < ms(**{rate: 0.1}, most_pairs=63)


def test_attention_is_bound_by_its_softmax_in_fp32_on_a_cpu_and_counts_as_other_products_on_a_gpu():
    model, slow = model_of(2).bfloat16(), {"fp32_tflops": 0.01}
    for on, rates in ((ON, vbrt.Rates("a CPU", 0.0, 3000.0, 0.4, fp32_tflops=0.2)), (GPU, vbrt.data_sheet("H100"))):
        found = vbrt.estimate(model, "prefill", None, machine=on, context=512)
        scores = found.work["attention bfloat16"]
        assert scores == 2 * 4 * 512 * 512 * 128 // 2  # layers; two products for each, of which half is masked
        more = predict(model, found, replace(rates, **slow)).device_ms - predict(model, found, rates).device_ms
        expected = 0.0
        if on is ON:
            expected = 1e3 * scores / default_cost_model("cpu").attention_share * (1 / 0.01e12 - 1 / 0.2e12)
        assert more == pytest.approx(expected)


def test_rates_that_were_kept_before_few_rows_were_measured_are_read(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = vbrt.Rates(device_name(), 0.0, 30.0, 0.4)
    keep_rates(found)
    before = {name: value for name, value in asdict(found).items() if not name.startswith(("few", "most"))}
    rates_file().write_text(json.dumps(before))
    kept = kept_rates()
    assert kept == found and kept.repack_s(decoded=True) > kept.repack_s(decoded=False) > 0


def test_bars_are_shaded_by_what_the_largest_moments_are_made_of():
    found = vbrt.estimate(model_of(), "train", None, machine=ON, batch=2, context=64)
    bars = {line.split()[0]: line for line in found.table().splitlines() if "█" in line}
    longest = max(found.moments, key=lambda moment: moment[1])[0]
    assert set("█▓▞") <= set(bars[longest]) and "▒" in bars["forward"] and "▞" not in bars["forward"]
    widths = {
        stage: sum(line.count(shade) for shade in "█▓▞▒░") for stage, line in bars.items() if stage in STAGES["train"]
    }
    assert widths[longest] == 40 == max(widths.values())
    assert "█ weights" in found.table() and "KV cache" not in found.table()


def test_recorded_steps_have_a_workspace_of_their_own_which_the_first_prompt_comes_before():
    on = Machine(64 << 30, 64 << 30, 64 << 30, 64 << 30)
    found = vbrt.estimate(model_of(), "decode", "fp4", batch=1, context=64, new=8, machine=on)
    prompt, step = found.parts["prompt"], found.parts["step"]
    assert 0 < 2 * prompt["workspace"] == step["workspace"]
    assert 4 * found.in_place_bytes == step["KV cache"]  # of 64 tokens and of 256: further calls have no other cache
    further = prompt["workspace"] + step["KV cache"] - found.in_place_bytes
    again = dict(found.moments)["prompt"] + further + step["temporaries"]
    assert found.again_bytes == max(again, dict(found.moments)["step"] + step["temporaries"])
    assert found.peak_bytes == max(dict(found.moments).values())


def test_attention_with_a_bias_is_counted_as_torch_computes_it():
    q, k, v = (torch.randn(2, 4, 128, 64, dtype=torch.bfloat16) for _ in range(3))
    bias = torch.randn(1, 4, 128, 128, dtype=torch.bfloat16)

    def real() -> torch.Tensor:
        with torch.no_grad():
            return torch.ops.aten._scaled_dot_product_attention_math(q, k, v, bias, 0.0, False, None, scale=1.0)[0]

    with FakeTensorMode() as mode, torch.no_grad():
        fakes, meter = [mode.from_tensor(tensor) for tensor in (q, k, v, bias)], Meter()
        meter.leave_out(fakes)
        with meter:
            _by_definition(*fakes)
    assert max(meter.peaks.values()) == pytest.approx(allocated(real), rel=0.002)
    assert torch.equal(_by_definition(q, k, v, bias), real())


@pytest.mark.parametrize("trains", [False, True])
def test_a_boolean_mask_is_counted_as_the_bias_that_torch_makes_of_it(trains):
    with FakeTensorMode(), torch.set_grad_enabled(trains):
        q = torch.empty(1, 4, 2048, 64, dtype=torch.bfloat16, requires_grad=trains)
        mask, meter = torch.ones(1, 1, 2048, 2048, dtype=torch.bool), Meter()
        meter.leave_out((q, mask))
        with gpu_sizes("flash", (), meter), meter:
            out = F.scaled_dot_product_attention(q, q, q, attn_mask=mask)
        bias, rows = 2 * mask.numel(), 4 * 4 * 2048
        assert meter.peaks[""] == bias + out.nbytes + rows  # an H200: 2.258 bytes a score
        assert meter.total == out.nbytes + trains * (bias + rows)


@pytest.mark.parametrize("name", ["gather", "scatter", "scatter_add"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_indices_in_int32_are_counted_with_their_copies_in_int64(name, dtype):
    x, index = torch.ones(64, 512), torch.zeros(64, 256, dtype=dtype)
    source = () if name == "gather" else (torch.ones(64, 256),)
    with FakeTensorMode() as mode:
        fakes, meter = [mode.from_tensor(tensor) for tensor in (x, index, *source)], Meter()
        meter.leave_out(fakes)
        with meter:
            getattr(fakes[0], name)(1, *fakes[1:])
    assert meter.peaks[""] == allocated(lambda: getattr(x, name)(1, index, *source))


def experts_bytes(found: vbrt.Estimate) -> int:
    return found.parts["pass"]["outputs"] + found.parts["pass"]["temporaries"]


def test_leased_experts_are_decoded_beside_their_pages_and_a_prompt_holds_no_more_pages_than_it_touches():
    on = Machine(GiB, GiB, 32 * GiB, 32 * GiB)
    model = qwen3_moe(count=16, layers=3).bfloat16()
    expert = sum(p[0].numel() * 2 for p in model.model.layers[0].mlp.experts.parameters())

    def found(preset: str, **sizes: int) -> vbrt.Estimate:
        config = load_config(preset, weights={"min_parameters": 0}, tiers={"gpu": {"budget": "500KiB"}})
        return vbrt.estimate(model, "prefill", config, machine=on, **sizes)

    few, all_of_them = found("dense", context=4, experts=2), found("dense", context=4)
    pages = [{(r.name, r.tier): r.nbytes for r in of.rows}["pages", "gpu"] for of in (few, all_of_them)]
    assert pages[1] - pages[0] >= 3 * 4 * expert  # of three layers
    assert experts_bytes(few) > 2 * expert


@pytest.mark.parametrize(("hidden", "inner"), [(64, 32), (32, 64)])
def test_products_of_experts_in_4_bits_make_rows_for_all_pairs(hidden, inner):
    leases = ExpertLeases(experts=16, top_k=2, decoded_bytes=1 << 20, page_bytes=(1 << 18,), lossless=False)
    held, pairs = HeldExperts(leases, on_gpu=True, at_once=experts_at_once(leases, None), most=0), 2 * 1024
    with FakeTensorMode(), torch.no_grad():
        module, x = nn.Module(), torch.empty(1024, hidden, dtype=torch.bfloat16)
        module.up = nn.Parameter(torch.empty(16, 2 * inner, hidden, dtype=torch.bfloat16))
        module.down = nn.Parameter(torch.empty(16, hidden, inner, dtype=torch.bfloat16))
        ids, meter = torch.empty(1024, 2, dtype=torch.long), Meter()
        with meter:
            held.forward(module, lambda *_: x, x, ids)
    at_once = max(hidden + inner, 2 * inner + hidden)  # of each product: inputs in their experts' order, outputs
    assert max(meter.peaks.values()) == 2 * pairs * at_once


@pytest.mark.parametrize(
    ("preset", "budget", "batch", "recorded"),
    [
        ("dense", "1GiB", 1, True),
        ("dense", "1GiB", 7, True),
        ("dense", "1GiB", 8, False),  # as many pairs as experts
        ("dense", "500KiB", 1, True),
        ("dense", "500KiB", 7, False),  # more than the cache has slots
        ("exact", "1GiB", 7, True),
        ("exact", "1GiB", 8, False),
        ("exact", "500KiB", 1, True),
        ("exact", "500KiB", 7, False),
        ("fp4", "500KiB", 8, True),
    ],
)
def test_steps_are_recorded_unless_the_host_hears_which_experts_they_take(preset, budget, batch, recorded):
    config = load_config(preset, weights={"min_parameters": 0}, tiers={"gpu": {"budget": budget}})
    plan = vbrt.make_plan(qwen3_moe(count=16, layers=3).bfloat16(), config, Machine(GiB, GiB, 32 * GiB, 32 * GiB))
    assert records(vbrt.Task("decode", batch=batch), plan, "gpu") is recorded


@pytest.mark.parametrize(
    ("preset", "gpu", "cpu", "recorded"),
    [
        ("dense", "500KiB", "300KiB", True),
        ("fp4", "150KiB", "100KiB", True),
        ("dense", "500KiB", "40KiB", False),  # which has no slots for pages that the device asks for
        ("fp4", "150KiB", "16KiB", False),
    ],
)
def test_steps_whose_experts_lie_on_a_drive_are_recorded_if_host_memory_has_slots(preset, gpu, cpu, recorded, tmp_path):
    tiers = {"gpu": {"budget": gpu}, "cpu": {"budget": cpu}, "ssd": {"enabled": True, "path": str(tmp_path)}}
    config = load_config(preset, weights={"min_parameters": 0}, tiers=tiers)
    machine = Machine(GiB, GiB, 32 * GiB, 32 * GiB, ssd_free_bytes=GiB)
    plan = vbrt.make_plan(qwen3_moe(count=16, layers=3).bfloat16(), config, machine)
    assert {page.home for swap in plan.routed for page in swap.pages} >= {"ssd"}
    assert records(vbrt.Task("decode"), plan, "gpu") is recorded


def test_experts_of_which_the_gpu_decides_are_gathered_by_pair_and_scanned_by_half_of_the_slots():
    model = qwen3_moe(count=16, layers=3).bfloat16()
    held, page = {}, 12288
    for tokens, budget in ((1, "500KiB"), (4, "500KiB"), (7, "500KiB"), (4, "1GiB")):
        config = load_config("dense", weights={"min_parameters": 0}, tiers={"gpu": {"budget": budget}})
        plan = vbrt.make_plan(model, config, Machine(GiB, GiB, 32 * GiB, 32 * GiB))
        held[tokens, budget] = HeldExperts.of(plan.routed[0], plan, vbrt.Task("decode", batch=tokens))
    assert [of.unheard for of in held.values()] == [2, 8, 0, 0]  # 14 pairs are more than there are slots
    slots = held[1, "500KiB"].at_once[1] * 2
    assert 8 <= slots < 14 and held[1, "500KiB"].at_once[0] == (256 << 20) // page
    peaks = []
    for tokens in (1, 4):
        with FakeTensorMode(), torch.no_grad():
            module, x = nn.Module(), torch.empty(tokens, 64, dtype=torch.bfloat16)
            module.up = nn.Parameter(torch.empty(16, 96, 64, dtype=torch.bfloat16))
            ids, meter = torch.empty(tokens, 2, dtype=torch.long), Meter()
            with meter:
                held[4, "500KiB"].forward(module, lambda given, _: given, x, ids)
        peaks.append(max(meter.peaks.values()) // page)
    assert peaks == [2, 8]


def test_tokens_touch_as_many_experts_as_random_ones_would():
    leases = ExpertLeases(experts=16, top_k=2, decoded_bytes=1 << 20, page_bytes=(1 << 20,), lossless=True)
    held = HeldExperts(leases, on_gpu=True, at_once=experts_at_once(leases, 8 << 20), most=0)
    assert [held.touched(2 * tokens) for tokens in (1, 2, 1024)] == [2, 4, 16]
    assert held._replace(most=4).touched(2048) == 4
    assert held.leased(2) == 8 and held.leased(2048) == 1  # what finds room; a sixth of it in a scan
    assert experts_at_once(leases, None) == (256, 256)
