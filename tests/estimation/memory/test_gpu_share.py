"""`gpu_memory`: the estimate stays within the share, and what it is too little for is said by purpose."""

import re
from dataclasses import replace

import pytest
import torch
from torch import nn

import vbrt
from tests.models import llama, llama_of, mlp
from vbrt.config import Machine, load_config, parse_budget
from vbrt.config.budgets import CONTEXT_BYTES
from vbrt.errors import ConfigError, NoRoomError
from vbrt.estimation.memory.estimate_report import Estimate
from vbrt.estimation.memory.gpu_share import besides, settle_budget
from vbrt.residency.plan import GpuRoom

pytest.importorskip("transformers")

GiB = 1 << 30
RTX_3060 = Machine(12 * GiB - (80 << 20), 11 * GiB, 64 * GiB, 60 * GiB)
NO_GPU = Machine(None, None, 64 * GiB, 60 * GiB)


@pytest.fixture(scope="module")
def model() -> nn.Module:
    """Three GiB in bfloat16, a sixth of them embeddings and head."""
    return llama_of(
        hidden_size=2048, intermediate_size=8192, num_hidden_layers=22, num_attention_heads=16, num_key_value_heads=4,
        vocab_size=65536,
    )  # fmt: skip


def estimated(model: nn.Module, preset: str = "fp4", machine: Machine = RTX_3060, **share: object) -> Estimate:
    return vbrt.estimate(model, config=load_config(preset, **share), machine=machine)


def total(found: Estimate) -> int:
    pages = sum(row.nbytes for row in found.rows if row.tier == "gpu" and row.name == "pages")
    assert found.peak_bytes <= pages + sum(besides(found).values()) - besides(found)["the allocator's fragments"]
    return CONTEXT_BYTES + pages + sum(besides(found).values())


@pytest.mark.sample(1)
@pytest.mark.parametrize("preset", ["fp4", "exact", "dense"])
def test_the_estimate_stays_within_the_share_and_fills_it_while_pages_are_left(model, preset):
    before = 0
    for share in ("2GiB", "26%"):
        found = estimated(model, preset, gpu_memory=share)
        parsed = parse_budget(share, where="")
        most = parsed.amount * (RTX_3060.gpu_total_bytes if parsed.kind == "fraction" else 1)
        assert total(found) <= most and found.fits
        budget = found.plan.budgets["gpu"]
        resident = budget >= found.plan.page_bytes
        assert budget > before and resident == (preset == "fp4" and share == "26%")
        assert resident or total(found) > most - (64 << 20)
        assert found.plan.notes[-1].startswith(f'gpu_memory = "{share}" (') and "KV cache" in found.plan.notes[-1]
        assert found.config.gpu_memory is None and found.config.context is None  # settled
        before = budget


def test_room_that_resident_experts_would_take_beside_their_pages_is_used_where_few_are():
    """Remainders of blocks count for each page on the GPU: the estimate of all of them leaves too much."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 4096, "moe_intermediate_size": 1696, "num_experts": 64, "num_experts_per_tok": 4}
    config = transformers.Qwen3MoeConfig(**sizes, num_hidden_layers=24, vocab_size=32768, num_key_value_heads=4)
    with torch.device("meta"):
        model = transformers.Qwen3MoeForCausalLM(config).to(torch.bfloat16)
    found = estimated(model, gpu_memory="6GiB", context=512)
    assert 6 * GiB * 31 // 32 <= total(found) <= 6 * GiB


def test_large_tables_go_into_the_tiers_in_their_own_bits():
    model = llama_of(hidden_size=2048, intermediate_size=4096, num_hidden_layers=4, vocab_size=1 << 19)
    found = estimated(model, gpu_memory="3GiB", weights={"keep_head": False})
    (table,) = (swap for swap in found.plan.swaps if swap.name == "model.embed_tokens")
    assert (table.format, [page.home for page in table.pages]) == ("dense", ["cpu"]) and total(found) <= 3 * GiB
    assert any("lookup tables that take a tenth of the model or more are held" in note for note in found.plan.notes)
    with pytest.raises(NoRoomError, match="parameters that are not swapped"):
        estimated(model, gpu_memory="3GiB", weights={"keep_head": False, "embeddings": False})


def test_the_note_says_what_quantized_files_leave_unswapped_beyond_the_share(model):
    config = load_config("fp4", gpu_memory="12GB")
    share = settle_budget(model, config, RTX_3060)
    plan = vbrt.make_plan(model, share.config, RTX_3060)
    temporaries = next(row.nbytes for row in estimated(model, gpu_memory="12GB").rows if row.name == "temporaries")
    assert share.noted(plan).gpu_room == GpuRoom(12 * 10**9, temporaries, 2048) and plan.gpu_room is None
    assert share.noted(plan).notes == (*plan.notes, share.note)
    more = vbrt.make_plan(model, load_config(share.config, weights={"exclude": ["*.down_proj"]}), RTX_3060)
    assert share.noted(more).notes[-1] == f"{share.note}; the files leave 704.0 MiB more unswapped, beyond that"


@pytest.mark.exhaustive
def test_a_longer_context_leaves_less_for_pages(model):
    short, long = (estimated(model, gpu_memory="3GiB", context=context) for context in (1024, 8192))
    assert short.task.context == 1024 and long.task.context == 8192
    assert long.plan.budgets["gpu"] < short.plan.budgets["gpu"] and "8192 + 128 tokens" in long.plan.notes[-1]


def test_too_small_a_share_is_refused_by_purpose_and_what_it_asks_for_does(model):
    with pytest.raises(NoRoomError, match=r'gpu_memory = "1GiB"; 1\.0 GiB are too little for 2048 \+ 128') as error:
        estimated(model, gpu_memory="1GiB")
    for purpose in ("CUDA's context 614.0 MiB", "parameters that are not swapped", "KV cache", "weights.keep_head"):
        assert purpose in str(error.value)
    enough = re.search(r'expected at least "(.*?)"', str(error.value))[1]
    assert estimated(model, gpu_memory=enough).fits


def test_a_share_is_what_is_free_where_less_is_and_refused_where_the_gpu_is_smaller(model):
    busy = replace(RTX_3060, gpu_free_bytes=2 * GiB)
    found = estimated(model, "dense", busy, gpu_memory="12GiB")  # of a card sold as 12 GB, which has a little less
    assert total(found) <= 2 * GiB + CONTEXT_BYTES
    assert 'gpu_memory = "12GiB" (12.0 GiB); 2.6 GiB of it are free now' in found.plan.notes[-1]
    with pytest.raises(ConfigError, match=r'gpu_memory = "16GB"; the GPU has 11\.92GiB in all; expected no more'):
        estimated(model, gpu_memory="16GB")


def test_without_a_gpu_a_share_is_refused_by_name(model):
    with pytest.raises(ConfigError, match=r'gpu_memory = "12GB"; torch .* sees no GPU here: leave it out .*budget = "'):
        estimated(model, machine=NO_GPU, gpu_memory="12GB")
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="sees no GPU here"):
            vbrt.wrap(llama(), gpu_memory="12GB")


def test_a_model_that_cannot_be_traced_is_refused_with_the_budget_instead():
    class Odd(nn.Linear):
        main_input_name = "input_ids"

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            return super().forward(torch.ones(2, 64) * input_ids.sum().item())

    for odd, why in ((nn.Sequential(Odd(64, 64)), "nothing says what its forward takes"), (Odd(64, 64), "cannot be")):
        with pytest.raises(ConfigError, match=rf"gpu_memory.*{why}"):
            settle_budget(odd, load_config("fp4", gpu_memory="12GB"), RTX_3060)


def test_a_plan_of_pages_alone_does_not_ignore_a_share(model):
    with pytest.raises(ConfigError, match=r"gpu_memory = .*vbrt\.estimate\(model, config=\.\.\.\)\.plan"):
        vbrt.make_plan(model, load_config("fp4", gpu_memory="12GB"), RTX_3060)
    assert vbrt.make_plan(model, load_config("fp4", budget="1GiB"), RTX_3060).budgets["gpu"] == GiB
    assert vbrt.make_plan(model, load_config("fp4", budget="1GiB"), NO_GPU).budgets == {"cpu": GiB}


def test_budget_is_a_short_way_in_wrap_load_and_pipelines_and_a_runtime_has_its_own(tmp_path):
    on_cpu = {"gpu": {"enabled": False}}
    vb = vbrt.wrap(mlp(), "dense", tiers=on_cpu, weights={"min_parameters": 0}, budget="1MiB")
    assert vb.runtime.budgets["cpu"] == 1 << 20 and vb.vbrt.settings.tiers.cpu.budget == "1MiB"
    assert vbrt.wrap(mlp(), "dense", runtime=vb.runtime, tiers=on_cpu, budget="1MiB").runtime is vb.runtime
    for other, why in (({"budget": "2MiB"}, "tiers.cpu.budget = '2MiB', and"), ({"gpu_memory": "9GB"}, "share its bu")):
        with pytest.raises(ConfigError, match=why):
            vbrt.wrap(mlp(), "dense", runtime=vb.runtime, **other)
    vb.save(tmp_path)
    loaded = vbrt.load(tmp_path, mlp(), budget="2MiB").runtime
    assert loaded.budgets["cpu"] == 2 << 20 and loaded.settings.tiers.cpu.budget == "2MiB"

    class Pipeline:
        def __init__(self) -> None:
            self.model = mlp()

    held = vbrt.wrap(Pipeline(), "dense", tiers=on_cpu, weights={"min_parameters": 0}, budget="1MiB")
    assert held.runtime.budgets["cpu"] == 1 << 20 and held.runtime.settings.tiers.cpu.budget == "1MiB"
    with pytest.raises(ConfigError, match=r"gpu_memory = .* is estimated for one model, and a pipeline runs"):
        vbrt.wrap(Pipeline(), gpu_memory="12GB")
