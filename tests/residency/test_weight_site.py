"""Sites: the names and shapes that plans, pages, saves and stats take from them."""

import pytest

from vbrt.residency.weight_site import EXPERTS, ROOT, Shard, WeightSite


@pytest.mark.parametrize(
    ("site", "name", "tensor", "kept_shape", "page"),
    [
        (WeightSite("up", (96, 64)), "up", "up.weight", (96, 64), "up#coarse"),
        (WeightSite(ROOT, (96, 64)), ROOT, "weight", (96, 64), "(root)#coarse"),
        (WeightSite("c_fc", (96, 64), transposed=True), "c_fc", "c_fc.weight", (64, 96), "c_fc#coarse"),
        (
            WeightSite("experts", (96, 64), "gate_up_proj", matrices=8, stacked=True),
            "experts.gate_up_proj",
            "experts.gate_up_proj",
            (8, 96, 64),
            "experts.gate_up_proj#coarse",
        ),
        (
            WeightSite("experts", (96, 64), "down_proj", matrices=8, transposed=True, stacked=True),
            "experts.down_proj",
            "experts.down_proj",
            (8, 64, 96),
            "experts.down_proj#coarse",
        ),
        (WeightSite("experts", (96, 64), "w1", matrices=8), "experts.w1", "experts.w1", (768, 64), "experts.w1#coarse"),
    ],
)
def test_a_site_names_its_weight_as_the_model_does(site, name, tensor, kept_shape, page):
    assert (site.name, site.tensor, site.kept_shape, site.page_key("coarse")) == (name, tensor, kept_shape, page)
    assert site.parameters == site.matrices * 96 * 64 and site.whole_shape == (96, 64)


def test_each_matrix_of_a_site_can_have_a_page():
    site = WeightSite("experts", (96, 64), "down_proj", matrices=3, stacked=True)
    assert [site.expert_key("fine", m) for m in range(3)] == [f"experts#fine.{m}" for m in range(3)]


@pytest.mark.parametrize(("dim", "whole"), [(0, (384, 64)), (1, (96, 256))])
def test_a_shard_is_a_part_of_each_matrix(dim, whole):
    assert WeightSite("up", (96, 64), shard=Shard(dim, index=1, count=4)).whole_shape == whole


def test_ranks_hold_the_ranges_that_torch_cuts_the_last_ones_less():
    ten = Shard(0, index=0, count=4, whole=10)
    assert [ten.spans(3, rank) for rank in range(4)] == [[(0, 3)], [(3, 6)], [(6, 9)], [(9, 10)]]
    packed = Shard(0, index=1, count=2, whole=8, parts=2)
    assert packed.spans(4) == [(2, 4), (6, 8)], "half of gate, then half of up"
    assert WeightSite("x", (4, 64), shard=packed).whole_shape == (8, 64)
    experts = WeightSite("x", (8, 8), matrices=3, shard=Shard(EXPERTS, 1, 2, whole=6))
    assert experts.whole_matrices == 6 and experts.whole_shape == (8, 8)
