"""Estimates of one of several ranks: what the model's own parallel plan gives it, planned and traced as any model."""

import pytest
import torch
from torch import nn

import vbrt
from tests.models import llama_of, qwen3_moe
from tests.zoo.zoo import build
from vbrt.config import Machine, load_config
from vbrt.errors import ArgumentError, ConfigError
from vbrt.estimation.memory.rank_share import part_of

pytest.importorskip("transformers")

GiB = 1 << 30
ON = Machine(GiB, GiB, 16 * GiB, 16 * GiB)
ALL = {"weights": {"min_parameters": 0}}


def rows(found: vbrt.Estimate) -> dict[str, int]:
    return {row.name: row.nbytes for row in found.rows if row.tier == found.compute_tier}


def meta_llama() -> nn.Module:
    return llama_of(
        hidden_size=512, intermediate_size=1024, num_hidden_layers=1, num_attention_heads=8, num_key_value_heads=4,
        vocab_size=1024,
    )  # fmt: skip


def test_a_rank_holds_its_part_of_pages_parameters_and_keys_and_its_share_of_host_memory():
    model = meta_llama()
    one, two = (vbrt.estimate(model, "decode", load_config("fp4", **ALL), machine=ON, ranks=n) for n in (1, 2))
    whole, part = rows(one), rows(two)
    assert part["pages"] == pytest.approx(whole["pages"] / 2, rel=0.03)  # pages are aligned
    assert part["KV cache"] == whole["KV cache"] // 2
    norms = sum(2 * p.numel() for name, p in model.named_parameters() if "norm" in name)
    assert part["not swapped"] - norms == pytest.approx((whole["not swapped"] - norms) / 2, rel=0.05)
    assert two.machine.cpu_available_bytes == 8 * GiB and two.machine.gpu_free_bytes == GiB
    assert str(two).splitlines()[0].endswith("each of 2 ranks") and "ranks" not in str(one)


def test_what_wrapping_would_plan_of_a_rank_is_what_is_estimated():
    part = part_of(meta_llama(), 2, None)
    plan = vbrt.make_plan(part, load_config("fp4", **ALL), ON)
    found = vbrt.estimate(meta_llama(), "decode", load_config("fp4", **ALL), machine=ON, ranks=2)
    assert found.plan.page_bytes == plan.page_bytes
    shapes = {swap.name.rpartition(".")[2]: swap.shape for swap in plan.swaps}
    whole = {
        name.rpartition(".")[2]: module.weight.shape for name, module in meta_llama().named_modules() if "proj" in name
    }
    for name in ("q_proj", "k_proj", "gate_proj"):
        assert shapes[name] == (whole[name][0] // 2, whole[name][1])
    for name in ("o_proj", "down_proj"):
        assert shapes[name] == (whole[name][0], whole[name][1] // 2)


def test_outputs_that_are_gathered_are_whole_and_experts_are_cut_within():
    part = part_of(meta_llama(), 2, None)
    vocabulary = meta_llama().lm_head.out_features
    assert (
        part.lm_head.weight.shape[0] == vocabulary // 2 and part.model.embed_tokens.weight.shape[0] == vocabulary // 2
    )
    states = torch.empty(1, 3, part.config.hidden_size, dtype=torch.bfloat16, device="meta")
    assert part.lm_head(states).shape == (1, 3, vocabulary)
    routed, cut = qwen3_moe().model.layers[0].mlp.experts, part_of(qwen3_moe(), 2, None).model.layers[0].mlp.experts
    experts, rows, width = routed.gate_up_proj.shape
    assert cut.gate_up_proj.shape == (experts, rows // 2, width)
    assert cut.down_proj.shape == (experts, width, rows // 4)


@pytest.mark.parametrize("kind", ["phi", "cohere", "glm4_moe_lite"])
def test_names_with_digits_heads_tied_to_whole_tables_and_what_plans_leave_whole_are_as_ranks_have_them(kind):
    model, _ = build("causal", kind, dtype=torch.bfloat16)
    part, cut = part_of(model, 2, None), {}
    for (name, one), other in zip(model.named_parameters(), part.parameters(), strict=True):
        cut[name.replace("layers.0.", "")] = one.numel() // other.numel()
    wanted = {
        "phi": {"model.mlp.fc1.weight": 2, "model.mlp.fc2.weight": 2, "lm_head.weight": 2},
        "cohere": {"model.mlp.up_proj.weight": 2, "model.embed_tokens.weight": 2},
        "glm4_moe_lite": {"model.self_attn.kv_a_proj_with_mqa.weight": 1, "model.self_attn.kv_b_proj.weight": 2},
    }[kind]
    assert {name: cut[name] for name in wanted} == wanted


@pytest.mark.parametrize(
    ("asked", "error", "words"),
    [
        ({"ranks": 0}, ArgumentError, "ranks = 0; expected a whole number of at least 1"),
        ({"ranks": 3}, ArgumentError, r"ranks = 3: num_attention_heads = \d+ of Llama\w+ is not divisible"),
        ({"ranks": 2, "config": "train"}, ConfigError, 'mode = "train" needs whole weights'),
        ({"ranks": 2, "model": nn.Sequential(nn.Linear(4, 4))}, ArgumentError, "Sequential has no tp_plan"),
    ],
)
def test_what_cannot_be_split_is_refused(asked, error, words):
    config = load_config("fp4", mode="train") if asked.get("config") else "fp4"
    with pytest.raises(error, match=words):
        vbrt.estimate(asked.get("model") or meta_llama(), "prefill", config, machine=ON, ranks=asked["ranks"])


def test_a_plan_that_cuts_in_an_unknown_way_is_refused_by_name(monkeypatch):
    model = meta_llama()
    monkeypatch.setattr(type(model), "tp_plan", {"model.layers.*.mlp.up_proj": "by_turns"})
    with pytest.raises(ArgumentError, match=r"model\.layers\.0\.mlp\.up_proj\.weight 'by_turns', not known here"):
        part_of(model, 2, None)
