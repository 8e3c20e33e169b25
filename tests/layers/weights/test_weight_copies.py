"""Copies, memory order, state dicts and tools of other packages on the weight of a VB layer."""

import copy
import gc
import os
import pickle
import subprocess
import sys
from multiprocessing.context import set_spawning_popen
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import vbrt
from tests.layers.holdings import dtype_of
from tests.layers.weights.temporaries import HOLDINGS, holding, inputs, tied
from tests.models import config, mlp, wrap
from vbrt.blocks import FusedFP4Linear
from vbrt.errors import WrapError
from vbrt.layers import VBLinear


@pytest.fixture(params=HOLDINGS, ids="-".join)
def vb(request, tmp_path):
    yield from holding(*request.param, tmp_path)


# -- copies ------------------------------------------------------------------------------------------------------------

STAGES = ["shell", "materialized", "written"]


@pytest.mark.parametrize("end", ["close", "unwrap"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_copy_outlives_the_end_of_the_original_and_the_reverse(stage, end):
    for first_is_copy in (False, True):
        vb, plain = wrap(mlp(depth=2)), mlp(depth=2)
        x = inputs(vb)
        if stage != "shell":
            vb.materialize()
        if stage == "written":
            with torch.no_grad():
                vb.module[0].weight.mul_(2), plain[0].weight.mul_(2)
        copies = [vb, copy.deepcopy(vb)]
        ends, stays = copies[::-1] if first_is_copy else copies
        getattr(ends, end)()
        with torch.no_grad():
            assert torch.equal(stays(x), plain(x))
        stays.materialize()
        assert torch.equal(stays.unwrap()(x), plain(x))


@pytest.mark.parametrize("stage", STAGES)
def test_copies_and_pickles_of_single_layers_compute_the_same_and_are_their_own(stage):
    vb, x = wrap(mlp(depth=2)), torch.randn(2, 64)
    layer = vb.module[0] if stage == "shell" else vb.materialize().module[0]
    if stage == "written":
        layer.weight.data.mul_(2)
    expected = F.linear(x, layer.weight, layer.bias)
    for made in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert type(made) is VBLinear and torch.equal(made(x), expected)
        made.weight.data.zero_()
        assert torch.equal(made(x), made.bias.expand(2, 64))
    assert torch.equal(layer(x), expected)


def test_layers_that_were_tied_by_memory_alone_come_back_as_two_parameters_on_one_storage(format):
    model = tied(format)
    model[2].weight = nn.Parameter(model[0].weight.detach())
    vb, x = wrap(model, format), torch.randn(2, 64, dtype=dtype_of(format))
    assert vb.module[0].handle is vb.module[2].handle
    vb(x)
    assert vb.module[2].materialized
    model = vb.unwrap()
    assert model[0].weight is not model[2].weight and model[0].weight.data_ptr() == model[2].weight.data_ptr()
    assert len(list(model.parameters())) == 4


def test_a_tie_by_memory_that_was_cut_before_the_first_forward_stays_cut():
    model, x = tied(), torch.randn(2, 64)
    model[2].weight = nn.Parameter(model[0].weight.detach())
    vb = wrap(model)
    vb.module[2].weight.data = torch.eye(64)
    vb(x)
    assert torch.equal(vb.module[2](x), x + vb.module[2].bias) and not torch.equal(vb.module[0].weight, torch.eye(64))


# -- memory order ------------------------------------------------------------------------------------------------------


def lying(how, dtype):
    torch.manual_seed(0)
    layer = nn.Linear(512, 96, dtype=dtype)
    weight = {
        "transposed": lambda: torch.randn(512, 96).t(),
        "strided": lambda: torch.randn(96, 1024)[:, ::2],
        "rows": lambda: torch.randn(96, 600)[:, :512],
    }[how]()
    layer.weight = nn.Parameter(
        weight.to(dtype).as_strided(weight.shape, weight.stride())
        if dtype == weight.dtype
        else torch.empty_strided(weight.shape, weight.stride(), dtype=dtype).copy_(weight)
    )
    return nn.Sequential(layer).eval()


@pytest.mark.parametrize("how", ["transposed", "strided", "rows"])
@pytest.mark.parametrize("format", ["dense", "exact"])
def test_a_weight_that_is_not_contiguous_gives_the_same_bits_and_comes_back_as_it_lay(how, format):
    plain = lying(how, dtype_of(format))
    vb, strides = wrap(lying(how, dtype_of(format)), format), plain[0].weight.stride()
    assert vb.materialize().module[0].weight.stride() == strides
    copies = [vb, copy.deepcopy(vb), pickle.loads(pickle.dumps(vb))]
    for rows in (1, 2, 3, 17):
        x = torch.randn(rows, 512, dtype=dtype_of(format))
        for each in copies:
            assert torch.equal(each(x), plain(x))
    weight = vb.unwrap()[0].weight
    assert weight.stride() == strides and torch.equal(weight, plain[0].weight)


# -- state dicts and tools ---------------------------------------------------------------------------------------------


def test_a_state_dict_that_is_assigned_gives_its_dtype_and_tensors_as_to_a_plain_layer(vb):
    plain = nn.Linear(64, 64)
    state = {name: torch.randn_like(value).half() for name, value in plain.state_dict().items()}
    for layer in (vb.module[0], plain):
        layer.load_state_dict(state, assign=True)
    assert vb.module[0].weight.dtype is torch.float16 and torch.equal(vb.module[0].weight, plain.weight)
    x = torch.randn(2, 64).half()
    with torch.no_grad():
        vb.module[0](x)
    assert vb.module[0].materialized
    assert torch.allclose(vb.module[0](x), plain(x), atol=0 if vb.module[0].handle.spec.lossless else 3)


def test_loading_its_own_state_leaves_a_fitted_codebooks_weight_as_it_is():
    torch.manual_seed(0)
    vb = wrap(nn.Sequential(nn.Linear(40, 96), nn.Linear(96, 40)).eval(), "quantile").materialize()
    state = vb.state_dict()
    for _ in range(2):
        vb.load_state_dict(state)
        assert all(torch.equal(value, state[name]) for name, value in vb.state_dict().items())


class Launch:
    """Stands for a process that is about to be spawned: it is handed files, and begins later."""

    def __init__(self):
        self.files = []

    def duplicate_for_child(self, file):
        self.files.append(file)
        return file

    def DupFd(self, file):
        return file


@pytest.mark.parametrize("mode", ["infer", "train"])
def test_a_warm_model_hands_a_spawned_process_no_file_that_is_closed_before_it_begins(mode):
    vb = vbrt.wrap(mlp(depth=2), {**config("nvfp4"), "mode": mode})
    vb(inputs(vb))
    launch = Launch()
    set_spawning_popen(launch)
    try:
        made = ForkingPickler.dumps(vb)
    finally:
        set_spawning_popen(None)
    gc.collect()
    pipe = os.pipe()  # what is opened next takes the numbers of what was closed
    assert made.nbytes and len({*launch.files, *pipe}) == len(launch.files) + 2
    for file in (*launch.files, *pipe):
        os.fstat(file)
    for file in pipe:
        os.close(file)


@pytest.mark.parametrize("materialized", [False, True])
def test_a_parameter_that_a_tool_puts_into_a_layer_is_computed_with_and_materialize_encodes_it(materialized):
    vb, eye = wrap(mlp(depth=1)), torch.eye(64)
    if materialized:
        vb.materialize()
    vb.module[0]._parameters["weight"] = nn.Parameter(eye)
    x = torch.randn(2, 64)
    assert torch.equal(vb(x), torch.tanh(F.linear(x, eye, vb.module[0].bias)))
    vb.materialize()
    assert vb.module[0].materialized and torch.equal(vb.module[0].weight, eye)


@pytest.mark.parametrize("name", ["DeloraConfig", "HiraConfig", "LoraConfig"])
def test_adapters_that_peft_merges_in_place_are_merged(name):
    peft = pytest.importorskip("peft")
    outputs, x = [], torch.randn(2, 64)
    for model in (mlp(depth=2), wrap(mlp(depth=2)).materialize().module):
        torch.manual_seed(1)
        adapted = peft.get_peft_model(model, getattr(peft, name)(r=4, target_modules=["0", "2"]))
        for parameter in adapted.parameters():
            parameter.data += 0.1 if parameter.requires_grad else 0
        adapted.eval()
        with torch.no_grad():
            seen = [adapted(x)]
            adapted.merge_adapter()
            seen.append(adapted(x))
            adapted.unmerge_adapter()
            outputs.append([*seen, adapted(x)])
    assert all(torch.equal(one, other) for one, other in zip(*outputs, strict=True))


def test_modules_that_peft_saves_train(format):
    peft = pytest.importorskip("peft")
    vb = wrap(mlp(depth=2, dtype=dtype_of(format)), format).materialize()
    with pytest.warns(UserWarning, match="left the tiers to train"):
        adapted = peft.get_peft_model(vb.module, peft.LoraConfig(r=4, target_modules=["0"], modules_to_save=["2"]))
    x = inputs(vb)
    before = adapted(x).detach()
    (saved,) = (p for n, p in adapted.named_parameters() if "modules_to_save" in n and n.endswith("weight"))
    optimizer = torch.optim.AdamW([saved], lr=0.1)
    adapted(x).float().square().sum().backward()
    optimizer.step()
    assert not torch.allclose(adapted(x), before, atol=1e-2)
    with adapted.disable_adapter():
        assert torch.allclose(adapted(x), before, atol=1e-2)


# -- building blocks ---------------------------------------------------------------------------------------------------


def test_the_weight_of_a_frozen_building_block_is_refused_as_storage_by_name():
    layer = FusedFP4Linear(64, 64).quantize()
    before = layer.weight.clone()
    for write in (
        lambda: layer.weight.data.add_(1),
        lambda: layer.weight.mul_(2),
        lambda: layer.weight[0].zero_(),
        lambda: layer.weight.requires_grad_(True),
        lambda: setattr(layer.weight, "data", before),
    ):
        with pytest.raises(WrapError, match=r"^FusedFP4Linear\(64, 64\): its weight is frozen"):
            write()
    with pytest.warns(UserWarning, match="only its bias trains"):
        layer.requires_grad_(True)
    assert torch.equal(layer.weight, before)


def test_weights_are_written_to_saved_and_loaded_without_numpy_which_vbrt_does_not_require(tmp_path):
    script = """
import sys
sys.modules["numpy"] = None
import torch, vbrt
from torch import nn
model = nn.Sequential(nn.Linear(64, 64))
vb = vbrt.wrap(model, "dense", weights={"min_parameters": 0}, tiers={"gpu": {"enabled": False}}).materialize()
weight = model[0].weight
weight.untyped_storage()
weight.data.zero_()
y = vb(torch.ones(1, 64))
assert y.equal(model[0].bias[None])
vb.save(sys.argv[1])
assert vbrt.load(sys.argv[1], nn.Sequential(nn.Linear(64, 64)))(torch.ones(1, 64)).equal(y)
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", script, tmp_path / "saved"], check=True, timeout=120)
