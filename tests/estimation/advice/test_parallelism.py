"""Ways to run a model on several GPUs, by what they stream, read, compute and sum."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import vbrt
from tests.models import llama, mlp
from vbrt.config import Machine, VBConfig, load_config
from vbrt.estimation.advice.machine_rates import data_sheet, device_name
from vbrt.estimation.advice.multi_gpu_rates import GroupRates, nvlink_rates
from vbrt.estimation.advice.parallelism import Comparison, compare_ways
from vbrt.estimation.advice.step_time import predict
from vbrt.estimation.memory.rank_share import rank_plan
from vbrt.host import accelerator
from vbrt.model.planner import make_plan

transformers = pytest.importorskip("transformers")

MIB = 1 << 20
RATES = replace(data_sheet("H200"), link_gb_s=55.0)


MACHINE = Machine(
    cpu_total_bytes=64 * MIB, cpu_available_bytes=64 * MIB, gpu_total_bytes=8 * MIB, gpu_free_bytes=8 * MIB
)


def budget_of(gpu: int) -> dict:
    return {"gpu": {"enabled": True, "budget": gpu}}


def dense(gpu: int) -> VBConfig:
    return load_config({"weights": {"format": "dense"}, "tiers": budget_of(gpu)})


def meta_llama() -> nn.Module:
    with torch.device("meta"):
        return llama(dtype=torch.bfloat16)


def compared(group: GroupRates, *, gpu: int, model: nn.Module | None = None) -> Comparison:
    model, config = model or meta_llama(), dense(gpu)
    part = rank_plan(model, group.ranks, config, MACHINE)
    return compare_ways(make_plan(model, config, MACHINE), part, RATES, group)


def by_name(found: Comparison, name: str):
    return next(way for way in found.ways if way.name.startswith(name))


def test_streamed_pages_are_divided_and_links_that_others_use_are_slower():
    fast = GroupRates(2, 37.0, 0.001, 1e6, 1e6, "no sums")
    found = compared(fast, gpu=64 << 10)
    one, data, shared = (by_name(found, name) for name in ("one", "data", "link"))
    assert one.bound == ("link", "link") and shared.streamed_gb == pytest.approx(one.streamed_gb / 2)
    assert data.pass_ms[0] == pytest.approx(one.pass_ms[0] * 55 / 37), "two at once get less of the host's memory"
    assert shared.pass_ms[0] == pytest.approx(data.pass_ms[0] / 2, rel=0.01)
    assert shared.host_gb == pytest.approx(one.host_gb / 2)
    found = compared(fast, gpu=160 << 10)
    one, split = by_name(found, "one"), by_name(found, "tensor parallel, columns and")
    assert split.streamed_gb == split.host_gb == 0 < one.streamed_gb, "each has a budget of its own"


def test_sums_decide_against_splitting_what_is_small_and_resident():
    found = compared(nvlink_rates(2), gpu=8 * MIB)
    assert by_name(found, "tensor parallel, columns and").bound[0] == "sums"
    assert found.advice[0].startswith("one stream of tokens: one GPU, 1.00 times")
    assert found.advice[1].startswith("many tokens: data parallel, 2.00 times")


def test_columns_and_rows_in_turn_sum_twice_a_block_and_the_others_every_layer():
    slow = GroupRates(2, 55.0, 1000.0, 1e6, 1e6, "slow to start")
    found = compared(slow, gpu=8 * MIB)
    turn, columns = by_name(found, "tensor parallel, columns and"), by_name(found, "tensor parallel, rows")
    assert turn.pass_ms[0] == pytest.approx(2 * 3, rel=0.01) and columns.pass_ms[0] == pytest.approx(7 * 3, rel=0.01)


def test_neighbours_keep_what_one_budget_has_no_room_for_and_the_source_of_each_figure_is_said():
    near = replace(nvlink_rates(2), neighbour_gb_s=300.0, name="Some GPU", backend="nccl", source="measured here")
    found = compared(near, gpu=64 << 10)
    one, beside = by_name(found, "one"), by_name(found, "neighbours")
    share = (64 << 10) / (one.host_gb * 1e9)  # of the pages below fits into the other GPU
    assert 0 < share < 1 and beside.host_gb == pytest.approx(one.host_gb * (1 - share))
    assert beside.pass_ms[0] == pytest.approx(one.pass_ms[0] * (1 - share + share * 55 / 300))
    assert "data sheet (H200); one link 55.0 GB/s" in found.source
    assert found.source.endswith("300 GB/s: measured here (2 ranks of Some GPU, nccl)")


def test_a_rank_of_a_split_model_has_what_an_estimate_of_it_has():
    found = compared(nvlink_rates(2), gpu=64 << 10)
    rank = vbrt.estimate(meta_llama(), "prefill", dense(64 << 10), machine=MACHINE, context=8, ranks=2).plan
    split = by_name(found, "tensor parallel, columns and")
    assert split.host_gb == pytest.approx(rank.home_bytes("cpu") / 1e9) and rank.home_bytes("cpu") > 0


def test_pages_that_a_budget_has_room_for_beside_those_at_home_are_not_streamed():
    settings = transformers.LlamaConfig(hidden_size=1024, intermediate_size=4096, num_hidden_layers=8, vocab_size=64)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(settings, dtype=torch.bfloat16)
    on, config = Machine(512 * MIB, 512 * MIB, 4096 * MIB, 4096 * MIB), load_config("exact", tiers=budget_of(190 * MIB))
    plan = make_plan(model, config, on)
    one = by_name(compare_ways(plan, "not split", RATES, nvlink_rates(2)), "one")
    assert one.host_gb == plan.home_bytes("cpu") / 1e9 > one.streamed_gb + 0.03
    found = vbrt.estimate(model, "prefill", config, machine=on, context=8)
    assert predict(model, found, RATES).link_ms == pytest.approx(1e3 * one.streamed_gb / 55, rel=0.15)


def test_a_model_that_cannot_be_split_is_compared_without_tensor_parallel_ways_and_says_why():
    for model, group, reason in (
        (mlp().bfloat16(), nvlink_rates(2), "Sequential has no tp_plan"),
        (meta_llama(), nvlink_rates(8), "num_attention_heads = 4 of LlamaForCausalLM is not divisible"),
    ):
        found = compared(group, gpu=64 << 10, model=model)
        assert reason in found.refused
        assert [way.name for way in found.ways] == ["one GPU", "neighbours", "data parallel", "link-sharded"]
    assert not compared(nvlink_rates(2), gpu=64 << 10).refused


def test_a_machine_goes_by_the_name_of_its_gpu(monkeypatch):
    monkeypatch.setattr(accelerator, "is_available", lambda: True)
    monkeypatch.setattr(accelerator, "get_device_name", lambda: "Some GPU")
    assert device_name() == "Some GPU"
