"""Layers split over devices in one process, with the CPU for each of them."""

import pytest
import torch
from torch import nn

import vbrt
from tests.distributed.cases import TOKENS, llama
from tests.models import config
from vbrt.config import load_config
from vbrt.distributed.block_split import part_units
from vbrt.distributed.pipeline_devices import split_over
from vbrt.errors import ConfigError, WrapError

CPU = torch.device("cpu")


@torch.no_grad()
def test_a_split_model_gives_the_bits_and_tokens_of_the_whole_and_takes_a_budget_on_each_device():
    plain, model = llama(), llama()
    want = plain(TOKENS).logits
    split = split_over(model, load_config(config("exact")), [CPU, CPU])
    assert [sorted(part.units) for part in split.parts] == [
        ["model.embed_tokens", "model.layers.0", "model.rotary_emb"],
        ["lm_head", "model.layers.1", "model.norm"],
    ]
    for _ in range(3):
        assert torch.equal(split(TOKENS).logits, want)
    given = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(split.generate(TOKENS, **given), plain.generate(TOKENS, **given))
    stats = split.stats(verbose=True)
    assert stats.verbose and not split.stats().verbose
    assert len(stats.layers) == 14 and all(layer.forwards >= 6 for layer in stats.layers.values())
    assert "without capture" in stats.fallbacks[0] and set(stats.tiers) == {"cpu of cpu"}
    assert all(plan.page_bytes for plan in split.plans.values())
    back = split.unwrap()
    assert back is model and torch.equal(back(TOKENS).logits, want)
    assert not any(module._forward_pre_hooks for module in back.modules())


def test_units_go_by_their_bytes_and_tied_ones_together():
    model = llama()
    model.lm_head.weight = model.model.embed_tokens.weight
    first, second = part_units(model, {}, 2)
    assert "lm_head" in first and "model.norm" in second
    blocks = nn.Sequential(*(nn.Linear(8, 8 * wide) for wide in (6, 1, 1, 1, 1, 1, 1)))
    parts = part_units(nn.Sequential(nn.Linear(8, 8), nn.ModuleList(blocks)), {}, 3)
    assert [sum(name.startswith("1.") for name in part) for part in parts] == [1, 2, 4]
    assert [list(part) for part in part_units(blocks, {"0": 10, "6": 10_000}, 2)] == [list("012345"), ["6"]]


def test_what_cannot_be_split_is_refused_by_name():
    model = llama()
    layers = model.model.layers
    layers[1].mlp.up_proj.weight = layers[0].mlp.up_proj.weight
    with pytest.raises(WrapError, match=r"layers\.1\.mlp\.up_proj\.weight is tied to a parameter of model\.layers"):
        split_over(model, load_config(config("exact")), [CPU, CPU])
    with pytest.raises(WrapError, match=r"has 2 blocks in model\.layers, for 3 devices"):
        split_over(llama(), load_config(config("exact")), [CPU] * 3)
    with pytest.raises(ConfigError, match=r"tiers\.gpu\.devices = \[0, 1\]; vbrt\.wrap of one model splits it"):
        vbrt.make_plan(llama(), load_config("exact", tiers={"gpu": {"devices": [0, 1]}}))
    with pytest.raises(ConfigError, match=r"tiers\.gpu\.devices = \[0, 9\]; this process sees \d+ GPUs"):
        vbrt.wrap(llama(), "exact", tiers={"gpu": {"devices": [0, 9]}})
