"""A new format is one file and one record: then it is chosen, planned, computed with, saved and refused by name."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import vbrt
from vbrt import formats
from vbrt.config import FORMATS, FormatRecord
from vbrt.errors import ConfigError, FormatError
from vbrt.formats import get_format
from vbrt.saves.common import manifest


@pytest.fixture(autouse=True)
def int4(monkeypatch):
    monkeypatch.setitem(FORMATS, "int4", FormatRecord("int4", "tests.formats.toy:Int4", block=32))
    monkeypatch.setattr(formats, "_INSTANCES", dict(formats._INSTANCES))
    # read when the package is imported, before which a record of the package itself is there
    monkeypatch.setitem(manifest._RULES, "format", manifest._one_of(FORMATS))


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(70, 64), nn.ReLU(), nn.Linear(64, 40)).eval()


def wrap(made, **options):
    weights = {"format": "int4", "min_parameters": 0, "keep_head": False} | options.pop("weights", {})
    return vbrt.wrap(made, weights=weights, tiers={"gpu": {"enabled": False}}, **options)


def test_a_model_computes_with_the_weights_that_the_new_format_decodes():
    plain = model()
    with wrap(model()) as vb:
        layer, x = vb.module[0], torch.randn(3, 70)
        y = layer(x)
        fmt = get_format("int4")
        decoded = fmt.decode(fmt.encode(plain[0].weight.detach()), (64, 70), torch.float32)
        assert torch.equal(layer.weight, decoded) and not torch.equal(decoded, plain[0].weight)
        assert torch.equal(y, F.linear(x, decoded, plain[0].bias))
        stats = vb.stats()
        assert {(layer.kernel, layer.format) for layer in stats.layers.values() if layer.forwards} == {
            ("reference", "int4")
        }
        pages = {page.key: page.nbytes for swap in vb.plan.swaps for page in swap.pages}
        assert pages["0#coarse"] == fmt.layout((64, 70), torch.float32).nbytes


def test_its_save_loads_with_the_same_bits(tmp_path):
    x = torch.randn(3, 70)
    with wrap(model()) as vb:
        y = vb(x)
        vb.save(tmp_path)
    with vbrt.load(tmp_path, model(), tiers={"gpu": {"enabled": False}}) as vb:
        assert torch.equal(vb(x), y)


def test_blocks_freeze_to_it():
    layer = vbrt.FusedFP4Linear(64, 32)
    fmt, w = get_format("int4"), layer.weight.detach().clone()
    layer.quantize("int4")
    assert torch.equal(layer.weight, fmt.decode(fmt.encode(w), (32, 64), torch.float32))


def test_it_is_listed_where_a_name_is_wrong():
    with pytest.raises(ConfigError, match=r'"int5"; expected .*"dense", "int4" or "auto"; did you mean "int4"'):
        wrap(model(), weights={"format": "int5"})


def test_what_it_cannot_do_is_refused_by_name():
    with pytest.raises(FormatError, match="format 'int4' has no 4-bit codes in blocks to refine"):
        wrap(model().bfloat16(), weights={"fine": "exact"}).materialize()
    with pytest.raises(FormatError, match="format 'int4' has no 4-bit codes in blocks to train through"):
        wrap(model(), mode="train")
