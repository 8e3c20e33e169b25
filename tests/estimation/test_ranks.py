"""Ways to run a model on several GPUs, by what they stream, read, compute and sum."""

from dataclasses import replace

import pytest
import torch

from tests.models import llama
from vbrt.config import Machine, load_config
from vbrt.estimation.group_rates import GroupRates, nvlink_rates
from vbrt.estimation.ranks import Comparison, compare_ways
from vbrt.estimation.rates import SHEETS, device_name
from vbrt.model.planner import make_plan

MIB = 1 << 20
RATES = replace(SHEETS["H200"], link_gb_s=55.0)


def compared(group: GroupRates, *, gpu: int, tokens: int = 2048) -> Comparison:
    with torch.device("meta"):
        model = llama(dtype=torch.bfloat16)
    machine = Machine(
        cpu_total_bytes=64 * MIB, cpu_available_bytes=64 * MIB, gpu_total_bytes=8 * MIB, gpu_free_bytes=8 * MIB
    )
    settings = {"weights": {"format": "dense"}, "tiers": {"gpu": {"enabled": True, "budget": gpu}}}
    plan = make_plan(model, load_config(settings), machine)
    return compare_ways(plan, RATES, group, tokens)


def by_name(found: Comparison, name: str):
    return next(way for way in found.ways if way.name.startswith(name))


def test_streamed_pages_are_divided_and_links_that_others_use_are_slower():
    fast = GroupRates(4, 37.0, 0.001, 1e6, 1e6, "no sums")
    found = compared(fast, gpu=64 << 10)
    one, data, shared, split = (
        by_name(found, name) for name in ("one", "data", "link", "tensor parallel, columns and")
    )
    assert one.bound == ("link", "link") and shared.streamed_gb == pytest.approx(one.streamed_gb / 4)
    assert data.pass_ms[0] == pytest.approx(one.pass_ms[0] * 55 / 37), "four at once get less of the host's memory"
    assert shared.pass_ms[0] == pytest.approx(data.pass_ms[0] / 4, rel=0.01)
    assert split.streamed_gb < one.streamed_gb / 4, "each has a budget of its own"
    assert split.host_gb == pytest.approx(split.streamed_gb) and shared.host_gb == pytest.approx(one.host_gb / 4)


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


def test_a_machine_goes_by_the_name_of_its_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Some GPU")
    assert device_name() == "Some GPU"
