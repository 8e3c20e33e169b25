"""Files with coded and with plain fine planes: each loads in either form, with every bit."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import vbrt
from tests.models import TOKENS, mlp, qwen3_moe, wrap
from tests.saves.cases import logits
from vbrt.formats.fine_coding import CODED
from vbrt.saves.common.manifest import read_manifest


def model():
    return mlp(dtype=torch.bfloat16, width=256)


def forms(vb):
    """Whether each weight's fine page is coded."""
    return [
        any(field.name == CODED for field in layout.fields)
        for layer in vb.module
        if isinstance(layer, nn.Linear)
        for layout in layer.handle.encoded_layouts()
        if layout.plane == "fine"
    ]


@pytest.mark.parametrize("held", ["auto", "plain", "coded"])
@pytest.mark.parametrize("saved", ["plain", "coded"])
def test_a_save_of_either_form_loads_in_the_form_that_is_asked_for(saved, held, tmp_path):
    dense, x = model(), torch.randn(3, 256).bfloat16()
    with wrap(copy.deepcopy(dense), "exact", fine_coding=saved) as vb:
        vb.materialize().save(tmp_path)
        assert set(forms(vb)) == {saved == "coded"}
    assert {layer.coded for layer in read_manifest(tmp_path).layers} == {saved == "coded"}
    with vbrt.load(tmp_path, model(), weights={"fine_coding": held}) as vb:
        assert set(forms(vb)) == {held == "coded"}
        assert torch.equal(logits(vb, x), logits(dense, x))
        assert all(
            torch.equal(one, other) for one, other in zip(vb.unwrap().parameters(), dense.parameters(), strict=True)
        )


def test_weights_that_coding_makes_larger_stay_plain_and_a_save_has_both_forms(tmp_path):
    dense = model()
    prune.l1_unstructured(dense[0], "weight", 0.6)
    prune.remove(dense[0], "weight")
    with wrap(copy.deepcopy(dense), "exact", fine_coding="coded") as vb:
        vb.materialize().save(tmp_path)
        assert forms(vb) == [False, True, True, True, True, True]
    with vbrt.load(tmp_path, model(), weights={"fine_coding": "coded"}) as vb:
        assert forms(vb) == [False, True, True, True, True, True]
        assert torch.equal(vb.unwrap()[0].weight, dense[0].weight)


def test_a_stream_too_long_for_its_counters_is_not_kept(monkeypatch):
    monkeypatch.setattr("vbrt.layers.weights.weight_encoding.MOST_STREAM_BYTES", 1000)
    with wrap(model(), "exact", fine_coding="coded") as vb:
        assert not any(forms(vb.materialize()))


def test_pages_of_coded_planes_are_smaller_in_the_plan_too():
    sizes = {
        coding: sum(
            swap.page_bytes
            for swap in vbrt.make_plan(
                model(), vbrt.load_config("exact", weights={"fine_coding": coding, "min_parameters": 0})
            ).swaps
        )
        for coding in ("plain", "coded", "auto")
    }
    assert sizes["coded"] < 0.9 * sizes["plain"] and sizes["auto"] in sizes.values()


@pytest.mark.parametrize(("saved", "held"), [("coded", "coded"), ("coded", "auto"), ("plain", "coded")])
def test_routed_experts_are_saved_and_loaded_in_either_form(saved, held, tmp_path):
    dense = qwen3_moe(dtype=torch.bfloat16)
    expected = logits(dense, TOKENS)
    with wrap(copy.deepcopy(dense), "exact", fine_coding=saved, include=["*experts"]) as vb:
        vb.materialize().save(tmp_path)
    assert {layer.coded for layer in read_manifest(tmp_path).layers} == {saved == "coded"}
    with vbrt.load(tmp_path, qwen3_moe(dtype=torch.bfloat16), weights={"fine_coding": held}) as vb:
        layouts = vb.module.model.layers[0].mlp.experts.handle.layouts_of(0)
        assert any(field.name.endswith(CODED) for field in layouts[1].fields) == (held == "coded")
        assert torch.equal(logits(vb, TOKENS), expected)
