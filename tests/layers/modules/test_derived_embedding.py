"""transformers' subclasses of nn.Embedding that compute with the rows: scaled and normed tables in the tiers."""

import copy
import importlib
import pickle
import re
from pathlib import Path

import pytest
import torch
from torch import fx, nn

import vbrt
from vbrt.layers import KINDS, kind_of
from vbrt.layers.modules.embedding import VBEmbedding

transformers = pytest.importorskip("transformers")
MODELS = Path(transformers.__file__).parent / "models"
IDS = torch.tensor([[0, 5, 299], [7, 7, 1]])
TIERS = {"gpu": {"enabled": False}}
#: class -> its arguments behind the table's sizes
CLASSES = {
    "Gemma3TextScaledWordEmbedding": (0, 8.0),
    "Gemma4TextScaledWordEmbedding": (0, 8.0),
    "BartScaledWordEmbedding": (1, 8.0),
    "InklingNormedEmbedding": (0, 1e-6),
    "MuseSparkTextNormedEmbedding": (0, 1e-6),
}
HOLDINGS = [("dense", "none", torch.float32), ("nvfp4", "exact", torch.bfloat16), ("nvfp4", "none", torch.float32)]


def class_of(name):
    kind = KINDS[name]
    return getattr(importlib.import_module(kind.package), name)


class Model(nn.Module):
    def __init__(self, name):
        super().__init__()
        torch.manual_seed(5)
        self.embed, self.lm_head = class_of(name)(300, 64, *CLASSES[name]), nn.Linear(64, 300, bias=False)
        self.lm_head.weight = self.embed.weight

    def forward(self, ids):
        return self.lm_head(self.embed(ids))


def wrapped(model, format="dense", fine="none", **tiers):
    weights = {"format": format, "fine": fine, "embeddings": True, "min_parameters": 0}
    return vbrt.wrap(model, weights=weights, tiers=TIERS | tiers)


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(("format", "fine", "dtype"), HOLDINGS)
@pytest.mark.parametrize("name", CLASSES)
def test_a_derived_table_gives_what_its_class_makes_of_the_rows(name, format, fine, dtype, streamed, tmp_path):
    model = Model(name).to(dtype).eval().requires_grad_(False)
    plain, below = copy.deepcopy(model), {"cpu": {"budget": "80KiB"}, "ssd": {"enabled": True, "path": str(tmp_path)}}
    vb = wrapped(model, format, fine, **below if streamed else {})
    assert {swap.kind for swap in vb.plan.swaps} == {name}
    assert isinstance(model.embed, VBEmbedding) and isinstance(model.embed, class_of(name))
    rows = model.embed(IDS)
    assert vb.stats().layers["embed"].weight_reads == 0
    if fine == "none" and format != "dense":
        plain.embed.weight.copy_(model.embed.weight)
    assert torch.equal(rows, plain.embed(IDS))
    if format == "dense":
        assert torch.equal(vb(IDS), plain(IDS))
    for twin in (copy.deepcopy(vb), pickle.loads(pickle.dumps(vb))):
        assert torch.equal(twin.module.embed(IDS), rows) and type(twin.module.embed) is type(model.embed)
    assert type(vb.unwrap().embed) is class_of(name) and model.lm_head.weight is model.embed.weight
    assert torch.equal(model.embed(IDS), rows)


@pytest.mark.parametrize("name", CLASSES)
def test_graphs_take_a_derived_table_whole(name):
    vb = wrapped(Model(name).eval()).materialize()
    expected = vb(IDS)
    assert torch.equal(torch.compile(vb.module, backend="aot_eager", fullgraph=True)(IDS), expected)
    traced = fx.GraphModule(vb.module, fx.Tracer().trace(vb.module))
    assert torch.equal(traced(IDS), expected) and any(node.target == "embed" for node in traced.graph.nodes)


def test_a_save_holds_a_derived_table_by_its_name(tmp_path):
    vb = wrapped(Model("Gemma4TextScaledWordEmbedding").eval())
    expected = vb(IDS)
    vb.save(tmp_path / "saved")
    other = Model("Gemma4TextScaledWordEmbedding").eval()
    other.embed.weight.data.zero_()
    with vbrt.load(tmp_path / "saved", other, tiers=TIERS) as loaded:
        assert torch.equal(loaded(IDS), expected) and isinstance(other.embed, VBEmbedding)


def test_every_scaled_or_normed_table_of_transformers_has_a_record():
    declared = re.compile(r"^class (\w+(?:Scaled(?:Word)?|Normed)Embedding)\(nn\.Embedding\)", re.M)
    found = {name for path in MODELS.glob("*/modeling_*.py") for name in declared.findall(path.read_text("utf-8"))}
    others = {"T5Gemma2TextScaledWordEmbedding"}  # puts a parameter of its own in the place of some rows
    assert len(found) > 20 and {name for name in found if name not in KINDS} == others & found
    assert all(kind_of(class_of(name)(3, 4, *CLASSES[name])) is KINDS[name] for name in CLASSES)
