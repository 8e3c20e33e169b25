"""A plan as text: what each tier holds as bars, kinds of layers, and why the rest stays."""

import pytest
import torch
from torch import nn

from vbrt import load_config
from vbrt.config import Machine
from vbrt.model.planner import make_plan
from vbrt.residency.plan_text import picture_lines

HOST = Machine(None, None, 64 << 30, 32 << 30, ssd_free_bytes=64 << 30)


@pytest.fixture(scope="module")
def plan():
    with torch.device("meta"):
        blocks = [nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)) for _ in range(12)]
        model = nn.Sequential(nn.Embedding(1000, 512), *blocks, nn.LayerNorm(512)).bfloat16()
    tiers = {"cpu": {"budget": "14MiB"}, "ssd": {"enabled": True, "path": "/tmp", "budget": "1GiB"}}
    return make_plan(model, load_config("exact", tiers=tiers), HOST)


@pytest.mark.parametrize("width", [40, 80, 120])
def test_it_stays_within_the_width_and_has_a_line_for_each_kind(plan, width):
    text = plan.table(width=width)
    assert max(map(len, text.splitlines()[1:])) <= max(width, 60)  # names are not folded
    head = next(at for at, line in enumerate(text.splitlines()) if line.startswith("swapped in 1-12 "))
    assert [line.split()[:2] for line in text.splitlines()[head + 1 : head + 3]] == [["0", "12"], ["2", "12"]]
    assert "0: 1000.0 KiB, Embedding" in text


def test_bars_are_as_long_as_the_bytes_of_their_tier(plan):
    (model, *tiers), total = list(picture_lines(plan, 200)), plan.dense_bytes
    assert model.count("█") == 40
    by_tier = {line.split()[0]: line for line in tiers}
    for tier in plan.budgets:
        held = sum(page.nbytes for swap in plan.swaps for page in swap.pages if page.home == tier)
        held += plan.kept_bytes if tier == plan.compute_tier else 0
        drawn = sum(by_tier[tier].count(fill) for fill in "█▓▒░")
        assert abs(drawn - 40 * held / total) <= 2, tier
    assert "░" in by_tier["cpu"] and {"▓", "▒"} <= set("".join(tiers))


def test_every_layer_is_named_on_request(plan, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    assert all(swap.name in plan.table(each=True) for swap in plan.swaps)
    assert "3.0" not in str(plan).replace("3.0 MiB", "") and str(plan) == plan.table()


def test_a_model_of_which_nothing_is_swapped_says_so():
    plan = make_plan(nn.Sequential(nn.LayerNorm(8)), load_config("exact"), HOST)
    assert str(plan).startswith("nothing is swapped") and "0: " in str(plan)


def test_a_notebook_shows_the_same_text(plan):
    assert plan._repr_html_().startswith("<pre>") and "-&gt;" in plan._repr_html_()
