"""Sites: the names and shapes that plans, pages, saves and stats take from them."""

import pytest

from vbrt.residency.site import ROOT, Shard, WeightSite


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
