"""Facts about a weight in the tiers, which forwards read without decoding it."""

import pytest
import torch
from torch import nn

import vbrt
from vbrt.kernels.decoded_weight import DecodedWeight

TIERS = {"gpu": {"enabled": False}}


class Asking(nn.Module):
    """Asks its table and its layer as transformers' n-gram tables and T5's feed-forward do."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.embed, self.up = nn.Embedding(300, 64), nn.Linear(64, 32)

    def forward(self, ids):
        device = self.embed.weight.device if self.embed.weight.device.type != "meta" else None
        rows = self.embed(ids.to(device)).to(self.up.weight.dtype)
        return self.up(rows.view(-1, self.up.weight.shape[1]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_forward_that_asks_for_device_dtype_and_shape_decodes_nothing(dtype):
    model, ids = Asking().to(dtype).eval().requires_grad_(False), torch.tensor([1, 299, 7])
    expected = model(ids)
    with vbrt.wrap(model, "exact", weights={"embeddings": True, "min_parameters": 0}, tiers=TIERS) as vb:
        for _ in range(50):  # CPython specializes what runs often
            assert torch.equal(vb(ids), expected)
        layers = vb.stats().layers
        assert [(layers[name].forwards, layers[name].weight_reads) for name in ("embed", "up")] == [(50, 0)] * 2
        cast = vb.to(torch.float16).module.up.weight.dtype
        assert (cast, vb.stats().layers["up"].weight_reads) == (torch.float16, 0)


def test_facts_are_those_of_the_weight_before_and_after_it_is_encoded():
    model = Asking().eval()
    with vbrt.wrap(model, weights={"embeddings": True, "min_parameters": 0}, tiers=TIERS) as vb:
        for encoded in (False, True):
            assert model.embed.materialized == encoded
            facts = model.embed.weight.device, model.embed.weight.dtype, model.embed.weight.shape
            assert facts == (torch.device("cpu"), torch.float32, torch.Size([300, 64]))
            vb.materialize()


def test_long_code_asks_for_facts_as_short_code_does():
    names = "".join(f"    if not model: model.name_{i}\n" for i in range(300))
    scope = {}
    exec(f"def asks(model):\n{names}    return model.up.weight.dtype", scope)
    model = Asking().eval()
    with vbrt.wrap(model, weights={"min_parameters": 0}, tiers=TIERS) as vb:
        vb.materialize()
        assert scope["asks"](model) is torch.float32 and vb.stats().layers["up"].weight_reads == 0


def test_any_other_reader_gets_the_weight():
    model = Asking().eval()
    with vbrt.wrap(model, weights={"embeddings": True, "min_parameters": 0}, tiers=TIERS) as vb:
        vb.materialize()
        weight = model.up.weight
        assert type(weight) is DecodedWeight and weight.dtype is torch.float32
        assert type(getattr(model.up, "weight")) is DecodedWeight  # noqa: B009 - a reader without such bytecode
        assert model.up.weight.dtype.itemsize == 4 and model.up.weight.numel() == 2048
        assert (model.up.weight.T.dtype, model.up.weight.ndim) == (torch.float32, 2)
