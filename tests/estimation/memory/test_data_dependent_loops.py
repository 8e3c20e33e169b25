"""Loops around `nonzero`: two rounds beside what torch allocates in all of them, and rounds that pile up."""

from typing import Any

import pytest
import torch
from torch import nn

import vbrt
from tests.estimation.memory.test_estimate import ON, allocated, step_bytes
from vbrt.config import Machine, load_config
from vbrt.estimation.memory import data_dependent_loops
from vbrt.estimation.memory.fake_trace import _held_bytes

transformers = pytest.importorskip("transformers")

GiB = 1 << 30
SPARSE = {"ple_layer_ids": [1], "eos_token_id": 1, "indexer_kv_heads": 1, "indexer_compress_ratio": 4}
needs_qwen4 = pytest.mark.skipif(
    not hasattr(transformers, "Qwen4ExpTextConfig"), reason="this transformers has no qwen4_exp"
)


def qwen4(layers: int = 8, **more: Any) -> nn.Module:
    """Gated delta nets, an n-gram table, experts; in each fourth layer an indexer selects the tokens of each query."""
    sizes = {
        "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
        "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
        "vocab_size": 512, "hc_lowrank": 16, "ngram_vocab_size_base": 1000, "indexer_n_heads": 2,
        "indexer_head_dim": 32, "indexer_budget": 32,
    }  # fmt: skip
    settings = transformers.Qwen4ExpTextConfig(num_hidden_layers=layers, **SPARSE | sizes | more)
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(settings).bfloat16().eval()


def qwen4_of_108_billions() -> nn.Module:
    settings = transformers.Qwen4ExpTextConfig(**SPARSE, indexer_n_heads=16, indexer_head_dim=256, indexer_budget=2048)
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(settings, dtype=torch.bfloat16).eval()


@needs_qwen4
@pytest.mark.parametrize(
    ("sizes", "batch", "context"),
    [
        ({}, 1, 300),
        ({"indexer_budget": 2048}, 1, 300),  # indices of selected tokens are largest
        ({"indexer_head_dim": 256}, 1, 400),  # the indexer's keys are
        ({"hidden_size": 32, "hc_count": 2, "linear_num_value_heads": 2}, 2, 400),
    ],
)
def test_a_selection_of_tokens_is_estimated_as_torch_allocates_it(sizes, batch, context):
    model, ids = qwen4(4, **sizes), torch.ones(batch, context, dtype=torch.long)
    found = step_bytes(vbrt.estimate(model, "prefill", None, machine=ON, batch=batch, context=context))
    with torch.no_grad():
        real = allocated(lambda: model(input_ids=ids, use_cache=False))
    assert real <= found <= 1.02 * real


@needs_qwen4
def test_a_step_that_selects_tokens_is_estimated_as_torch_allocates_it():
    model, ids = qwen4(4, indexer_head_dim=128), torch.ones(1, 300, dtype=torch.long)
    parts = vbrt.estimate(model, "decode", None, machine=ON, context=300, new=2).parts["step"]
    with torch.no_grad():
        made = []
        allocated(lambda: made.append(model(input_ids=ids, use_cache=True).cache))  # the profiler knows what it frees
        (cache,) = made
        held = sum(_held_bytes(cache))
        mask, at = torch.ones(1, 301, dtype=torch.long), torch.tensor([[300]])
        how = {"attention_mask": mask, "position_ids": at, "cache": cache, "use_cache": True}
        real = held + allocated(lambda: model(input_ids=ids[:, :1], **how))
    assert real <= parts["KV cache"] + parts["temporaries"] <= 1.02 * real


@needs_qwen4
def test_two_rounds_of_a_loop_count_as_all_of_them(monkeypatch):
    ran, few = [], data_dependent_loops._few_rounds

    def counted(meter, *bounds):
        for index in few(meter, *bounds):
            ran.append(index)
            yield index

    def every(meter, *bounds):
        ran.extend(range(*bounds))
        return iter(range(*bounds))

    found = []
    for rounds in (counted, every):
        monkeypatch.setattr(data_dependent_loops, "_few_rounds", rounds)
        asked = {"machine": ON, "context": 40, "batch": 3}
        estimates = [vbrt.estimate(qwen4(4), task, None, **asked) for task in ("decode", "train")]
        found.append(([each.parts for each in estimates], [dict(each.work) for each in estimates], len(ran)))
        ran.clear()
    (parts, work, rounds), (all_parts, all_work, all_rounds) = found
    assert parts == all_parts and work == all_work
    assert rounds < all_rounds / 10


class Piling(nn.Linear):
    """Rounds that leave tensors in a container: all of them have to run."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        held = {}
        for row in range(x.shape[0]):
            held[row] = x[row].index_select(0, torch.nonzero(x[row]).flatten())
        return torch.stack(list(held.values()))


class Listing(nn.Linear):
    """Views in a list, which allocate nothing."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        held = []
        for row in range(x.shape[0]):
            held.append(x[row] if torch.nonzero(x[row]).shape[0] else x[0])
        return torch.stack(held)


@pytest.mark.parametrize("kind", [Piling, Listing])
def test_rounds_that_pile_up_all_run(kind):
    run = lambda model: model(torch.ones(16, 4096))  # noqa: E731
    found = step_bytes(vbrt.estimate(kind(8, 8), "prefill", None, machine=ON, step=run))
    assert found == pytest.approx(allocated(lambda: run(kind(8, 8))), rel=0.05)


@needs_qwen4
@pytest.mark.exhaustive
def test_a_model_of_108_billions_gets_the_budget_of_a_share():
    model, on = qwen4_of_108_billions(), Machine(24 * GiB, 24 * GiB, 256 * GiB, 256 * GiB)
    assert sum(p.numel() for p in model.parameters()) > 108e9
    config = load_config("fp4", gpu_memory="23GB")
    pages = []
    for context in (256, 2048):
        found = vbrt.estimate(model, config=config, machine=on, context=context)
        assert not found.refused and found.fits and found.peak_bytes < 23e9
        pages.append(found.parts["prompt"]["pages"])
    assert pages[0] > pages[1] > 0
