"""Embeddings in the tiers: rows of a table that stays where it lives, the same as the plain table's."""

import copy
import pickle
import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import vbrt
from vbrt.errors import FormatError, TierError, WrapError
from vbrt.kernels import reference
from vbrt.kernels.cpu.build import refusal
from vbrt.kernels.cuda.e2m1.linear import packing
from vbrt.kernels.cuda.e2m1.tiles import is_tiled, unpack_tiles
from vbrt.kernels.registry import _REGISTRY
from vbrt.layers import VBLinear
from vbrt.layers.modules.embedding import VBEmbedding

ROWS, WIDTH = 300, 96
NO_GPU = {"gpu": {"enabled": False}}
IDS = torch.tensor([[0, 5, 299], [7, 7, 1]])
HOLDINGS = [
    ({"format": "dense"}, torch.float32),
    ({"format": "dense"}, torch.float64),
    ({"format": "dense"}, torch.float16),
    ({"fine": "exact"}, torch.bfloat16),
    ({"fine": "exact"}, torch.float16),
    ({"format": "nvfp4"}, torch.float32),
    ({"format": "mxfp4"}, torch.bfloat16),
    ({"format": "nf4"}, torch.float16),
    ({"format": "quantile"}, torch.bfloat16),
    ({"format": "mxint8"}, torch.float32),
    ({"fine": "exact", "fine_coding": "coded"}, torch.bfloat16),
]
EXACT, FP4 = HOLDINGS[3], HOLDINGS[5]


class Model(nn.Module):
    def __init__(self, *, tied=False, **options):
        super().__init__()
        torch.manual_seed(4)
        self.embed = nn.Embedding(ROWS, WIDTH, **options)
        self.up = nn.Linear(WIDTH, WIDTH)
        self.lm_head = nn.Linear(WIDTH, ROWS, bias=False)
        if tied:
            self.lm_head.weight = self.embed.weight

    def forward(self, ids):
        return self.lm_head(self.up(self.embed(ids)))


def wrapped(holding=FP4, tmp_path=None, *, tied=False, model=None, **tiers):
    """On the CPU, or with a budget that is less than the table and pages on the ssd."""
    weights, dtype = holding
    model = Model(tied=tied).to(dtype).eval() if model is None else model
    if tmp_path is not None:
        tiers = {"cpu": {"budget": "20KiB"}, "ssd": {"enabled": True, "path": str(tmp_path)}} | tiers
    return vbrt.wrap(model, weights={"embeddings": True, "min_parameters": 0} | weights, tiers=tiers | NO_GPU)


def lossless(holding):
    return holding[0].get("format") == "dense" or "fine" in holding[0]


# -- values -----------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(refusal(torch.device("cpu")) is not None, reason="no compiler")
@pytest.mark.parametrize("format", ["nvfp4", "nf4", "mxint8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_few_rows_of_a_resting_table_are_read_at_once(format, dtype, monkeypatch):
    """Of one that a head has leased, as each decoding step of a tied model finds it."""
    torch.manual_seed(4)
    model = nn.Sequential(nn.Embedding(ROWS, 256), nn.Linear(256, ROWS, bias=False)).to(dtype).eval()
    model[1].weight = model[0].weight
    vb = wrapped(({"format": format}, dtype), model=model)
    with torch.no_grad():
        vb(IDS)
        want = vb.module[0](torch.arange(ROWS))
        before = vb.stats().layers["0"].hits
        monkeypatch.setattr("vbrt.layers.modules.embedding.page_rows", None)
        assert torch.equal(vb.module[0](IDS), want[IDS])
        with pytest.raises(IndexError, match="index out of range in self"):
            vb.module[0](torch.tensor([ROWS]))
        with pytest.raises(IndexError, match="index out of range in self"):
            vb.module[0](torch.tensor([-1]))
    assert vb.stats().layers["0"].hits > before


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("holding", HOLDINGS)
def test_rows_are_those_of_the_table_as_it_is_held(holding, tied):
    model = Model(tied=tied).to(holding[1]).eval()
    rows, logits, table = model.embed(IDS).detach(), model(IDS).detach(), model.embed.weight.detach().clone()
    vb = wrapped(holding, model=model)
    assert type(vb.module.embed) is VBEmbedding and set(vb.registry) == {"embed", "up"} | (
        {"lm_head"} if tied else set()
    )
    held = vb.module.embed(IDS)
    assert torch.equal(held, vb.module.embed.weight[IDS]) and held.dtype is holding[1] and not held.requires_grad
    if lossless(holding):
        assert torch.equal(held, rows) and torch.equal(vb(IDS), logits)
        assert torch.equal(vb.unwrap().embed.weight, table) and type(model.embed) is nn.Embedding
        assert (model.lm_head.weight is model.embed.weight) == tied


@pytest.mark.parametrize("holding", [HOLDINGS[0], EXACT, FP4])
def test_a_table_larger_than_the_budget_is_read_by_rows_from_its_file(tmp_path, holding):
    expected = wrapped(holding).module.embed(IDS)
    vb = wrapped(holding, tmp_path, cpu={"budget": "12KiB" if holding is FP4 else "40KiB"})
    table = next(swap for swap in vb.plan.swaps if swap.name == "embed")
    assert (
        table.by_rows and table.page_bytes > vb.plan.budgets["cpu"] and {page.home for page in table.pages} == {"ssd"}
    )
    assert torch.equal(vb.module.embed(IDS), expected) and torch.equal(vb.module.embed(IDS), expected)
    stats = vb.stats().layers["embed"]
    assert (stats.hits, stats.misses, stats.home) == (0, 2 * len(table.pages), "ssd")
    assert 0 < stats.bytes_moved["ssd>cpu"] < 2 * table.page_bytes
    assert sum(counts.misses for counts in vb.stats().phases.values()) == vb.stats().misses
    assert torch.equal(vb.module.state_dict()["embed.weight"][IDS], expected)  # copied, beside the budget
    assert torch.equal(vb.unwrap().embed.weight[IDS], expected)


def test_a_tied_table_has_one_set_of_pages_for_its_rows_and_for_the_heads_product(tmp_path):
    for vb in (wrapped(EXACT, tied=True), wrapped(EXACT, tmp_path, tied=True, cpu={"budget": "80KiB"})):
        model = Model(tied=True).to(EXACT[1]).eval()
        (swap,) = [swap for swap in vb.plan.swaps if swap.name == "embed"]
        assert swap.aliases == ("lm_head",) and not swap.by_rows and "weights.keep_head keeps no head" in swap.note
        assert vb.module.embed.handle is vb.module.lm_head.handle and type(vb.module.lm_head) is VBLinear
        assert torch.equal(vb(IDS), model(IDS)) and len(vb.stack.pages) == 4


@pytest.mark.parametrize("fine", ["none", "exact"])
@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_rows_are_found_in_the_order_that_a_heads_kernel_wants(format, fine, monkeypatch):
    """As on a GPU, whose kernel decodes tiles of 16 rows and merges them with a fine plane."""
    holding = ({"format": format, "fine": fine}, torch.bfloat16)
    expected = wrapped(holding, tied=True).module.embed(IDS)

    def decode(planes):
        coarse = planes.coarse
        if is_tiled(coarse):
            coarse = unpack_tiles(format, coarse, planes.shape)
        return reference.decode_weight(replace(planes, coarse=coarse))

    for op, changes in (("linear", {"page_order": packing, "builds": False}), ("decode_weight", {"run": decode})):
        for key, kernel in list(_REGISTRY[op].items()):
            monkeypatch.setitem(_REGISTRY[op], key, replace(kernel, **changes))
    vb = wrapped(holding, tied=True)
    assert torch.equal(vb.module.embed(IDS), expected)
    with vb.registry["embed"].handle.lease() as (page, *_):
        assert is_tiled(page)
    alone = wrapped(holding)  # no kernel multiplies it: in the format's own order
    assert torch.equal(alone.module.embed(IDS), expected)
    with alone.registry["embed"].handle.lease() as (page, *_):
        assert "codes" in page


def test_a_head_stays_dense_and_keeps_its_table_where_the_user_excludes_it():
    plan = wrapped(({"exclude": ["lm_head"]}, torch.float32), tied=True).plan
    assert plan.skipped["embed"].reason == "shares storage with lm_head.weight, which stays dense"


def test_tables_stay_dense_unless_they_are_asked_for():
    with vbrt.wrap(Model(tied=True).eval(), weights={"min_parameters": 0}, tiers=NO_GPU) as vb:
        assert "weights.embeddings = true swaps it" in vb.plan.skipped["embed"].reason
        assert type(vb.module.embed) is nn.Embedding


class WithDevice(nn.Sequential):
    @property
    def device(self):
        return next(self.parameters()).device


def test_a_model_keeps_one_parameter_to_tell_its_device_by():
    model = WithDevice(nn.Embedding(60, 64), nn.Embedding(50, 64), nn.Linear(64, 64, bias=False)).eval()
    vb = wrapped(model=model).materialize()
    plan = vb.plan
    assert vb.device == vb.module.device
    assert [swap.name for swap in plan.swaps] == ["0", "2"] and "no parameter left" in plan.skipped["1"].reason


def test_a_table_of_constants_does_not_keep_layers_that_train():
    model = Model()
    model.embed.requires_grad_(False)
    vb = wrapped(model=model.eval())
    assert set(vb.registry) == {"embed", "up"} and not vb.unwrap().embed.weight.requires_grad


class Scaled(nn.Embedding):
    def forward(self, ids):
        return 3 * super().forward(ids)


def test_two_tables_of_one_weight_stay_with_a_reason_for_each():
    model = nn.ModuleList([Scaled(60, 64), Scaled(60, 64), nn.Linear(64, 64)])
    model[1].weight = model[0].weight
    plan = wrapped(model=model.eval()).plan
    assert "semantics of its own" in plan.skipped["0"].reason and plan.skipped["0"].nbytes == 15360
    assert (
        plan.skipped["1"].reason == "shares storage with 0.weight, which stays dense" and not plan.skipped["1"].nbytes
    )


@pytest.mark.parametrize(
    ("table", "mode", "words"),
    [
        (nn.Embedding(60, 64, max_norm=1.5), "infer", "max_norm = 1.5 rescales its rows as they are read"),
        (Scaled(60, 64), "infer", "Scaled: a lookup table, of a subclass of nn.Embedding with semantics of its own"),
        (nn.Embedding(60, 64), "train", 'a lookup table, which mode = "train" leaves dense'),
    ],
)
def test_what_cannot_be_read_by_rows_stays_with_the_reason(table, mode, words):
    config = vbrt.load_config(mode=mode, weights={"embeddings": True, "min_parameters": 0}, tiers=NO_GPU)
    assert words in vbrt.make_plan(nn.Sequential(table, nn.Linear(64, 64)), config).skipped["0"].reason


# -- as nn.Embedding --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(0,), (2, 0), (), (2, 3, 1)])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_indices_of_any_shape_give_what_the_plain_table_gives(shape, dtype):
    model, ids = Model().eval(), torch.randint(0, ROWS, shape).to(dtype)
    expected = model.embed(ids)
    assert torch.equal(wrapped(HOLDINGS[0], model=model).module.embed(ids), expected)


@pytest.mark.parametrize("ids", [[300], [-1], [0.5], [True]])
def test_other_indices_are_refused_in_torchs_words(ids):
    model = Model().eval()
    with pytest.raises((IndexError, RuntimeError)) as plain:
        model.embed(torch.tensor(ids))
    with pytest.raises(type(plain.value)) as held:
        wrapped(model=model).module.embed(torch.tensor(ids))
    assert str(held.value) == str(plain.value)


def test_what_only_counts_for_gradients_says_nothing():
    model = Model(padding_idx=7, scale_grad_by_freq=True, sparse=True).eval()
    expected = model.embed(IDS).detach()
    vb = wrapped(HOLDINGS[0], model=model)
    assert torch.equal(vb.module.embed(IDS), expected) and "padding_idx=7" in repr(vb.module.embed)


def test_autocast_leaves_lookups_alone():
    vb = wrapped(HOLDINGS[0])
    with torch.autocast("cpu", torch.bfloat16):
        assert vb.module.embed(IDS).dtype is torch.float32


@pytest.mark.parametrize("holding", [HOLDINGS[0], EXACT, FP4])
def test_casts_show_in_the_rows(holding):
    vb = wrapped(holding).materialize()
    vb.module.to(torch.float64)
    embed = vb.module.embed
    assert torch.equal(embed(IDS), embed.weight[IDS]) and embed(IDS).dtype is torch.float64


@pytest.mark.parametrize("holding", [EXACT, FP4])
def test_copies_and_pickles_give_the_same_rows(holding, tmp_path):
    vb = wrapped(holding, tmp_path, cpu={"budget": "40KiB"})
    rows = vb.module.embed(IDS)
    assert torch.equal(copy.deepcopy(vb.module).embed(IDS), rows)
    assert torch.equal(pickle.loads(pickle.dumps(vb.module.embed))(IDS), rows)


def test_a_table_can_be_written_assigned_and_loaded():
    vb = wrapped(EXACT).materialize()
    embed, new = vb.module.embed, torch.randn(ROWS, WIDTH).bfloat16()
    with torch.no_grad():
        embed.weight[5] = 2.0
    assert torch.equal(embed(IDS)[0, 1], torch.full((WIDTH,), 2.0).bfloat16())
    embed.weight = nn.Parameter(new)
    assert torch.equal(embed(IDS), new[IDS])
    vb.module.load_state_dict(vb.module.state_dict() | {"embed.weight": -new})
    assert torch.equal(embed(IDS), -new[IDS]) and embed.materialized
    embed.reset_parameters()
    assert not torch.equal(embed(IDS), -new[IDS])


def test_functional_call_gives_another_table():
    vb, new = wrapped(tied=True).materialize(), torch.randn(ROWS, WIDTH, requires_grad=True)
    rows = torch.func.functional_call(vb.module.embed, {"weight": new}, (IDS,))
    assert torch.equal(rows, new[IDS])
    rows.sum().backward()
    assert new.grad[7].eq(2).all()


def test_requires_grad_makes_a_plain_table_that_trains():
    vb = wrapped(HOLDINGS[0]).materialize()
    with pytest.warns(UserWarning, match="embed left the tiers to train"):
        vb.module.embed.requires_grad_(True)
    assert type(vb.module.embed) is nn.Embedding and vb.module.embed(IDS).requires_grad


def test_compiled_traced_and_mapped_lookups_are_those_of_eager_ones():
    vb = wrapped(tied=True).materialize()
    embed, rows = vb.module.embed, vb.module.embed(IDS)
    compiled = torch.compile(embed, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(IDS), rows) and torch.equal(compiled(IDS.T), rows.transpose(0, 1))
    assert torch.equal(torch.vmap(embed)(IDS), rows) and torch.equal(
        torch.vmap(embed, in_dims=1, out_dims=1)(IDS), rows
    )
    assert torch.equal(torch.jit.trace(embed, IDS)(IDS.flip(0)), rows.flip(0))
    assert torch.equal(torch.fx.symbolic_trace(vb.module)(IDS), vb(IDS))


def test_rows_that_are_to_be_rescaled_as_they_are_read_are_refused_by_name():
    vb = wrapped()
    with pytest.raises(WrapError, match="embed: max_norm"):
        vb.module.embed.max_norm = 1.0
    vb.module.embed.max_norm = None
    assert vb.module.embed(IDS).norm(dim=-1).max() > 1


class Halving(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        y = func(*args, **(kwargs or {}))
        return y / 2 if func is torch.nn.functional.embedding else y


class HalvingBelow(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        y = func(*args, **(kwargs or {}))
        return y / 2 if func is torch.ops.aten.embedding.default else y


@pytest.mark.parametrize("mode", [Halving, HalvingBelow])
def test_modes_see_the_lookup_of_a_plain_table(mode):
    embed = wrapped().materialize().module.embed
    rows = embed(IDS)
    with mode():
        assert torch.equal(embed(IDS), rows / 2)


def test_a_table_on_meta_is_refused_by_its_name():
    with torch.device("meta"):
        model = Model().eval()
    with pytest.raises(FormatError, match="embed: its weight is on the meta device"):
        wrapped(model=model).module.embed(IDS)


def test_a_closed_table_says_so():
    vb = wrapped().materialize()
    embed = vb.module.embed
    vb.close()
    with pytest.raises(TierError, match="embed: its pages are gone"):
        embed(IDS)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("holding", [HOLDINGS[0], EXACT, FP4])
def test_a_save_brings_tables_back_tied_as_they_were(tmp_path, holding, tied):
    vb = wrapped(holding, tied=tied)
    logits = vb(IDS)
    vb.save(tmp_path)
    with torch.device("meta"):
        model = Model(tied=tied).eval()
    loaded = vbrt.load(tmp_path, model, tiers=NO_GPU)
    assert type(loaded.module.embed) is VBEmbedding and torch.equal(loaded(IDS), logits)
    assert (loaded.module.lm_head.weight is loaded.module.embed.weight) == tied


def test_a_table_of_a_checkpoint_is_encoded_as_it_is_read(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    model = Model().bfloat16().eval()
    safetensors.save_file(model.state_dict(), tmp_path / "model.safetensors")
    with torch.device("meta"):
        empty = Model().eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        options = {"embeddings": True, "min_parameters": 0}
        vb = vbrt.load(tmp_path, empty, "exact", weights=options, tiers=NO_GPU)
    assert type(vb.module.embed) is VBEmbedding and torch.equal(vb(IDS), model(IDS))


# -- on a GPU ---------------------------------------------------------------------------------------------------------


def on_gpu(holding, *, tied, resident):
    """All pages on the GPU, or in host memory with room on the GPU for the largest that is leased."""
    model = Model(tied=tied).to(holding[1]).eval()
    settings = {"weights": {"embeddings": True, "min_parameters": 0} | holding[0], "tiers": {"cpu": {"budget": "8MiB"}}}
    settings["tiers"]["gpu"] = {"enabled": True, "budget": "1MiB"}
    if not resident:
        plan = vbrt.make_plan(model, vbrt.load_config(settings))
        settings["tiers"]["gpu"]["budget"] = max(plan.page_bytes // 2, plan.largest_layer_bytes, 16384)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return vbrt.wrap(model, settings)


@pytest.mark.gpu
@pytest.mark.parametrize("resident", [True, False])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("holding", HOLDINGS)
def test_rows_on_a_gpu_are_those_of_the_table_as_it_is_held(holding, tied, resident):
    vb, ids = on_gpu(holding, tied=tied, resident=resident), IDS.cuda()
    rows = vb.module.embed(ids)
    assert rows.is_cuda and torch.equal(rows, vb.module.embed.weight[ids])
    assert torch.equal(vb.module.embed(IDS), rows.cpu())  # indices from the host
    if lossless(holding):
        assert torch.equal(rows.cpu(), Model(tied=tied).to(holding[1]).embed(IDS))
    if not resident and not tied:
        assert vb.stats().layers["embed"].bytes_moved["cpu>gpu"] > 0


@pytest.mark.gpu
@pytest.mark.parametrize(("tied", "resident"), [(False, True), (True, True), (False, False)])
@pytest.mark.parametrize("holding", [HOLDINGS[0], EXACT, FP4])
def test_a_cuda_graph_records_lookups_in_a_table_on_the_gpu_and_in_page_locked_memory(holding, tied, resident):
    vb, ids = on_gpu(holding, tied=tied, resident=resident), IDS.cuda()
    rows = vb.materialize().module.embed(ids)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        recorded = vb.module.embed(ids)
    ids.copy_(IDS.flip(0))
    graph.replay()
    assert torch.equal(recorded, rows.flip(0))
    vb.unwrap()


@pytest.mark.gpu
def test_no_lookup_in_page_locked_memory_waits_for_the_gpu():
    vb, ids = on_gpu(HOLDINGS[0], tied=False, resident=False), IDS.cuda()
    rows = vb.module.embed(ids)
    torch.cuda.set_sync_debug_mode("error")
    try:
        again = vb.module.embed(ids)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(again, rows)
    stack = vb.module.embed._vb_handle.stack
    assert stack.pages["embed#dense"].put is not None
    with pytest.raises(TierError, match=r"tiers\.cpu\.budget = 4096: kernels .* read \d+ bytes in place"):
        stack.set_budget("cpu", 4096)  # of the wrapper, a budget below the largest layer is refused before
