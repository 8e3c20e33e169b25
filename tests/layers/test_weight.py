"""`.weight` of a VB layer as others hold it and write to it: what a parameter would do, the layer does."""

import copy
import gc
import io
import os
import pickle
import subprocess
import sys
import threading
import weakref
from multiprocessing.context import set_spawning_popen
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import prune

import vbrt
from tests.models import FORMATS, config, mlp, wrap, wrap_streamed
from vbrt.blocks import FusedFP4Linear
from vbrt.errors import FormatError, WrapError
from vbrt.layers import VBLinear

HOLDINGS = [("shell", "nvfp4"), ("resident", "dense"), ("resident", "nvfp4"), ("streamed", "exact")]


def dtype_of(format):
    return torch.bfloat16 if format == "exact" else torch.float32


@pytest.fixture(params=FORMATS)
def format(request):
    return request.param


@pytest.fixture(params=HOLDINGS, ids="-".join)
def vb(request, tmp_path):
    """A wrapped mlp of six layers; materialized but for "shell"."""
    how, format = request.param
    model = mlp(dtype=dtype_of(format))
    with wrap_streamed(model, format, tmp_path) if how == "streamed" else wrap(model, format) as vb:
        if how != "shell":
            with torch.no_grad():
                vb(inputs(vb)), vb(inputs(vb))
        yield vb


def inputs(vb, rows=2):
    torch.manual_seed(7)
    return torch.randn(rows, 64, dtype=vb.model[0].bias.dtype)


def tied(format="dense"):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)).to(dtype_of(format)).eval()
    model[2].weight = model[0].weight
    return model


# -- writes ------------------------------------------------------------------------------------------------------------


def assign_data(layer):
    layer.weight.data = layer.weight.data * 3


def add_to_data(layer):
    layer.weight.data += 1


def in_inference_mode(layer):
    with torch.inference_mode():
        layer.weight.mul_(3)


def in_a_graph(layer):
    torch.compile(lambda w: w.mul_(3), backend="eager")(layer.weight)


def through_numpy(layer):
    layer.weight.detach().view(torch.uint8).numpy()[:, 0] = 1


WRITES = {
    "data.add_": lambda layer: layer.weight.data.add_(1),
    "data.data": lambda layer: layer.weight.data.data.mul_(3),
    "data = ": assign_data,
    "data += ": add_to_data,
    "mul_": lambda layer: layer.weight.mul_(3),
    "item": lambda layer: layer.weight.__setitem__((0, 0), 3.0),
    "copy_": lambda layer: layer.weight.copy_(torch.ones(64, 64)),
    "row": lambda layer: layer.weight[3].zero_(),
    "rows": lambda layer: [row.mul_(3) for row in layer.weight],
    "chunk": lambda layer: layer.weight.chunk(2)[1].mul_(3),
    "transposed": lambda layer: layer.weight.T.copy_(torch.ones(64, 64)),
    "flat": lambda layer: layer.weight.detach().view(-1)[5:9].fill_(2),
    "init": lambda layer: nn.init.normal_(layer.weight),
    "out": lambda layer: torch.mul(torch.ones(64, 64), 3, out=layer.weight),
    "foreach": lambda layer: torch._foreach_mul_([layer.weight], 3.0),
    "numpy": through_numpy,
    "dlpack": lambda layer: torch.from_dlpack(layer.weight.detach()).mul_(3),
    "inference mode": in_inference_mode,
    "a graph": in_a_graph,
}


@pytest.mark.parametrize("write", WRITES)
def test_a_write_through_weight_is_the_layers_from_the_next_use_on(vb, write):
    layer, x = vb.model[0], inputs(vb)
    if write == "out" and x.dtype is not torch.float32:
        pytest.skip("the result has another dtype: torch refuses it")
    with torch.no_grad():
        plain = nn.Linear(64, 64, dtype=x.dtype)
        plain.weight.copy_(layer.weight)
        torch.manual_seed(1)
        WRITES[write](plain)
        torch.manual_seed(1)
        WRITES[write](layer)
        y = layer(x)
        assert layer.materialized
        assert torch.equal(layer.weight, plain.weight) or not layer.handle.spec.lossless
        assert torch.allclose(layer.weight, plain.weight, atol=0.3 * plain.weight.abs().max().item())
        assert torch.allclose(y, F.linear(x, layer.weight, layer.bias), atol=1e-4)


@pytest.mark.parametrize("use", ["forward", "backward", "state_dict", "save", "copy", "pickle", "unwrap"])
@pytest.mark.parametrize("write", ["mul_", "numpy", "rows", "a graph"])
def test_a_write_is_seen_by_whatever_comes_next_while_the_temporary_is_held(use, write, tmp_path):
    vb, plain = wrap(mlp(depth=2)).materialize(), mlp(depth=2)
    x, held = inputs(vb), vb.model[0].weight
    with torch.no_grad():
        WRITES[write](vb.model[0])
        WRITES[write](plain[0])
    if use == "state_dict":
        assert torch.equal(vb.state_dict()["0.weight"], plain[0].weight)
    elif use == "backward":
        x.requires_grad_()
        (one,) = torch.autograd.grad(vb(x).sum(), x)
        (other,) = torch.autograd.grad(plain(x).sum(), x)
        assert torch.allclose(one, other, atol=1e-5)
    else:
        made = {
            "forward": lambda: vb,
            "save": lambda: vb.save(tmp_path) and vb,
            "copy": lambda: copy.deepcopy(vb),
            "pickle": lambda: pickle.loads(pickle.dumps(vb)),
            "unwrap": vb.unwrap,
        }[use]()
        assert torch.equal(made(x), plain(x))
    assert torch.equal(held, plain[0].weight)


def test_a_temporary_stays_the_layers_weight_over_forwards_and_loads(vb):
    layer, x = vb.model[0], inputs(vb)
    vb.materialize()
    held = layer.weight
    memory = held.detach().view(torch.uint8).numpy()
    with torch.no_grad():
        for _ in range(2):
            held.mul_(2)
            layer(x)
            assert layer.weight is held and torch.equal(held, layer.handle.weight())
            memory[0, 0] = 3
            layer(x)
            assert layer.weight is held and torch.equal(held, layer.handle.weight())
    layer.load_state_dict({"weight": torch.eye(64, dtype=x.dtype), "bias": layer.bias})
    assert layer.weight is held and torch.equal(held, torch.eye(64, dtype=x.dtype))


def test_a_layer_that_was_given_another_weight_hears_no_more_of_the_old_temporary(vb):
    layer = vb.materialize().model[0]
    held = layer.weight
    layer.weight = torch.ones(64, 64, dtype=held.dtype)
    with torch.no_grad():
        held.zero_()
    assert layer.weight.all() and layer.weight is not held


def test_a_written_temporary_needs_no_more_memory_than_the_weight_and_goes_when_it_is_encoded(format):
    vb = wrap(mlp(depth=1, dtype=dtype_of(format)), format).materialize()
    with torch.no_grad():
        vb.model[0].weight.mul_(2)
    kept = weakref.ref(vb.model[0].weight)
    assert vb.model[0]._parameters["weight"] is kept()
    with torch.no_grad():
        vb(inputs(vb))
    gc.collect()
    assert kept() is None and len(vb.stack.pages) == len(vb.model[0].handle.keys)


def test_a_written_temporary_that_cannot_be_encoded_says_so_by_name_until_it_is_repaired():
    vb = wrap(mlp(depth=1), "nvfp4").materialize()
    weight = vb.model[0].weight
    weight.data[3, 4] = float("nan")
    for _ in range(2):
        with pytest.raises(FormatError, match=r"^0: .*NaN"):
            vb(inputs(vb))
    weight.data[3, 4] = 0
    assert vb(inputs(vb)).isfinite().all()


def test_a_data_of_another_shape_is_refused_by_name_and_one_of_another_dtype_is_taken(vb):
    layer, x = vb.materialize().model[0], inputs(vb)
    before = layer.handle.weight()
    with pytest.raises(WrapError, match=r"^0\.weight: the new weight has shape \(3, 64\)"):
        layer.weight.data = torch.zeros(3, 64)
    assert torch.equal(layer.weight, before)
    layer.weight.data = torch.eye(64, dtype=torch.float16)
    layer.bias.data = layer.bias.data.half()
    assert torch.allclose(layer(x.half()), x.half() + layer.bias, atol=1e-2)


def test_two_threads_that_write_and_read_one_temporary_agree_in_the_end():
    vb, x = wrap(mlp(depth=1)).materialize(), torch.randn(2, 64)
    held, seen = vb.model[0].weight, []

    def write():
        for _ in range(50):
            with torch.no_grad():
                vb.model[0].weight.add_(1)

    def read():
        for _ in range(50):
            with torch.no_grad():
                seen.append(vb(x))

    before = held.clone()
    threads = [threading.Thread(target=task) for task in (write, read)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with torch.no_grad():
        assert len(seen) == 50 and torch.equal(vb(x), F.tanh(F.linear(x, held, vb.model[0].bias)))
    assert torch.allclose(held, before + 50, atol=1e-3)


@pytest.mark.parametrize(
    "view",
    [
        lambda w: w.data,
        lambda w: w.T,
        lambda w: w.data.data[3],
        lambda w: torch.from_dlpack(w.detach()),
        lambda w: torch.from_numpy(w.detach().numpy()[5:]),
        lambda w: w.unbind()[3],
        lambda w: next(iter(w)),
    ],
)
def test_a_view_that_outlives_the_temporary_is_written_through(view):
    vb, x = wrap(mlp(depth=1)).materialize(), torch.randn(2, 64)
    before, held = vb.model[0].weight.clone(), view(vb.model[0].weight)
    gc.collect()
    with torch.no_grad():
        held.zero_()
        y = vb.model[0](x)
        assert torch.equal(y, F.linear(x, vb.model[0].weight, vb.model[0].bias))
    assert not torch.equal(vb.model[0].weight, before)
    del held
    gc.collect()
    assert torch.equal(vb.model[0](x), y) and (vb.model[0].weight == 0).sum() >= 64


@pytest.mark.parametrize("made", [lambda w: w.detach(), lambda w: w.T, lambda w: w.numpy(), lambda w: w[0].data])
def test_reading_through_views_and_numpy_changes_nothing(vb, made):
    layer = vb.materialize().model[0]
    handle = layer.handle
    made(layer.weight.float() if layer.weight.dtype is torch.bfloat16 else layer.weight)
    gc.collect()
    with torch.no_grad():
        layer(inputs(vb))
    assert layer.handle is handle and layer.materialized


# -- identity and ties -------------------------------------------------------------------------------------------------


def test_the_weight_is_one_object_while_somebody_holds_it_for_tied_layers_too(format):
    vb = wrap(tied(format), format)
    assert vb.model[0].weight is vb.model[2].weight
    vb.materialize()
    assert vb.model[0].weight is vb.model[2].weight
    held = vb.model[0].weight
    with torch.no_grad():
        held.mul_(2)
    assert vb.model[2].weight is held
    with torch.no_grad():
        vb(inputs(vb))
    assert vb.model[2].weight is held and vb.model[0].handle is vb.model[2].handle
    assert vb.unwrap()[2].weight is held and type(held) is nn.Parameter


@pytest.mark.parametrize("materialized", [False, True])
def test_assigning_one_layers_weight_to_another_ties_them_and_encodes_nothing_again(format, materialized):
    vb = wrap(mlp(depth=3, dtype=dtype_of(format)), format)
    if materialized:
        vb.materialize()
    first, second = vb.model[0], vb.model[2]
    second.weight = first.weight
    assert second.handle is first.handle and second.materialized == materialized
    vb.materialize().stack.retire_unowned()
    assert len(vb.stack.pages) == len(first.handle.keys) + len(vb.model[4].handle.keys)
    with torch.no_grad():
        second.weight.zero_()
    assert not first.weight.any()
    model = vb.unwrap()
    assert model[0].weight is model[2].weight and not model[0].weight.any()


def test_a_parameter_of_the_weight_is_a_plain_one_of_its_own(vb):
    layer = vb.materialize().model[0]
    for requires_grad in (True, False):
        made = nn.Parameter(layer.weight, requires_grad=requires_grad)
        assert type(made) is nn.Parameter and made.requires_grad == requires_grad and made.is_leaf
        assert torch.equal(made, layer.weight)
        made.data.zero_()
    assert layer.weight.any()
    plain = nn.Linear(64, 64)
    plain.weight = nn.Parameter(layer.weight)
    pickle.dumps(plain)


def test_a_saved_state_dict_of_variables_holds_the_temporary_itself(vb):
    vb.materialize()
    state = vb.model.state_dict(keep_vars=True)
    assert state["0.weight"] is vb.model[0].weight
    file = io.BytesIO()
    torch.save(state, file)
    assert type(torch.load(io.BytesIO(file.getvalue()))["0.weight"]) is torch.Tensor


# -- requires_grad -----------------------------------------------------------------------------------------------------


def ask_weight(layer):
    layer.weight.requires_grad_(True)


def ask_attribute(layer):
    layer.weight.requires_grad = True


def ask_layer(layer):
    layer.requires_grad_(True)


def ask_model(layer):
    nn.Sequential(layer).requires_grad_()


@pytest.mark.parametrize("ask", [ask_weight, ask_attribute, ask_layer, ask_model])
def test_a_layer_that_is_asked_to_train_says_so_and_trains(vb, ask):
    vb.materialize().requires_grad_(False)
    layer, x = vb.model[2], inputs(vb)
    y, before = layer(x), layer.weight
    with pytest.warns(UserWarning, match=r"requires_grad_\(True\).*: 2 left the tiers to train.*mode=\"train\""):
        ask(layer)
    assert type(layer) is nn.Linear and layer.weight is before and isinstance(layer.weight, nn.Parameter)
    assert torch.allclose(layer(x), y, atol=1e-2)
    optimizer = torch.optim.AdamW([before], lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        vb(x).float().square().sum().backward()
        optimizer.step()
    assert not torch.allclose(layer(x), y, atol=1e-2)
    assert "2" not in vb.registry and "2" not in vb.stats().layers
    vb.materialize(), vb.set_budget("cpu", "20%" if "ssd" not in vb.plan.budgets else vb.plan.budgets["cpu"])
    model = vb.unwrap()
    assert [type(module) for module in model[::2]] == [nn.Linear] * 6 and model[2].weight is before


def test_a_frozen_shell_that_is_asked_to_train_before_its_first_forward_trains():
    vb = wrap(mlp(depth=2).requires_grad_(False))
    vb.model[0].weight.requires_grad_(True)
    vb(inputs(vb)).sum().backward()
    assert type(vb.model[0]) is nn.Linear and vb.model[0].weight.grad is not None
    assert type(vb.model[2]) is VBLinear


def test_freezing_a_layer_changes_nothing(vb):
    vb.materialize()
    vb.requires_grad_(False)
    vb.model[0].requires_grad_(False)
    vb.model[0].weight.requires_grad_(False)
    vb.model[0].weight.detach().requires_grad_(True)  # a leaf of somebody else's
    assert all(isinstance(layer, VBLinear) for layer in vb.model[::2])


def test_a_compiled_model_computes_with_what_was_written():
    vb, x = wrap(mlp(depth=2)).materialize(), torch.randn(2, 64)
    run = torch.compile(vb.model, backend="eager")
    with torch.no_grad():
        run(x)
        held = vb.model[0].weight
        for write in (held.zero_, lambda: held.copy_(torch.eye(64)), lambda: held.numpy().fill(0.5)):
            write()
            assert torch.allclose(run(x), vb(x), atol=1e-6)
            write()
            y = run(x)
            assert torch.allclose(y, vb(x), atol=1e-6)


def test_tied_layers_train_together():
    vb = wrap(tied()).materialize()
    with pytest.warns(UserWarning, match="left the tiers"):
        vb.model[2].requires_grad_(True)
    assert vb.model[0].weight is vb.model[2].weight and vb.model[0].weight.requires_grad


def test_a_copy_that_is_asked_to_train_leaves_the_original_alone(vb):
    vb.materialize()
    x = inputs(vb)
    y = vb.model[0](x)
    with pytest.warns(UserWarning, match="left the tiers"):
        clone = copy.deepcopy(vb.model[0]).requires_grad_(True)
    assert type(clone) is nn.Linear and clone.weight.requires_grad
    with torch.no_grad():
        clone.weight.zero_()
    assert type(vb.model[0]) is VBLinear and torch.equal(vb.model[0](x), y)


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
                vb.model[0].weight.mul_(2), plain[0].weight.mul_(2)
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
    layer = vb.model[0] if stage == "shell" else vb.materialize().model[0]
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
    assert vb.model[0].handle is vb.model[2].handle
    vb(x)
    assert vb.model[2].materialized
    model = vb.unwrap()
    assert model[0].weight is not model[2].weight and model[0].weight.data_ptr() == model[2].weight.data_ptr()
    assert len(list(model.parameters())) == 4


def test_a_tie_by_memory_that_was_cut_before_the_first_forward_stays_cut():
    model, x = tied(), torch.randn(2, 64)
    model[2].weight = nn.Parameter(model[0].weight.detach())
    vb = wrap(model)
    vb.model[2].weight.data = torch.eye(64)
    vb(x)
    assert torch.equal(vb.model[2](x), x + vb.model[2].bias) and not torch.equal(vb.model[0].weight, torch.eye(64))


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
    assert vb.materialize().model[0].weight.stride() == strides
    copies = [vb, copy.deepcopy(vb), pickle.loads(pickle.dumps(vb))]
    for rows in (1, 2, 3, 17):
        x = torch.randn(rows, 512, dtype=dtype_of(format))
        for each in copies:
            assert torch.equal(each(x), plain(x))
    weight = vb.unwrap()[0].weight
    assert weight.stride() == strides and torch.equal(weight, plain[0].weight)


# -- what would replace the weight -------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    "change",
    [
        lambda layer: prune.l1_unstructured(layer, "weight", 0.5),
        lambda layer: prune.random_structured(layer, "weight", 0.5, dim=0),
        nn.utils.weight_norm,
        nn.utils.parametrizations.weight_norm,
        nn.utils.parametrizations.spectral_norm,
        nn.utils.parametrizations.orthogonal,
    ],
)
def test_pruning_and_norms_are_refused_by_name_and_the_layer_is_as_it_was(vb, change):
    layer, x = vb.materialize().model[0], inputs(vb)
    before = dict(layer._parameters)
    with torch.no_grad():
        y = vb(x)
    with pytest.raises(WrapError, match=r"^0[.:].*before wrapping"):
        change(layer)
    assert list(layer._parameters.items()) == list(before.items()) and not layer._forward_pre_hooks
    assert not layer._buffers and type(layer) is VBLinear
    with torch.no_grad():
        assert torch.equal(vb(x), y)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_pruning_and_old_norms_are_refused_for_shells_too_and_parametrizations_get_a_plain_layer():
    for change in (lambda layer: prune.l1_unstructured(layer, "weight", 0.5), nn.utils.weight_norm):
        vb, x = wrap(mlp(depth=1)), torch.randn(2, 64)
        before = dict(vb.model[0]._parameters)
        with pytest.raises(WrapError, match=r"^0: .*before wrapping"):
            change(vb.model[0])
        assert list(vb.model[0]._parameters.items()) == list(before.items())
        assert torch.equal(vb(x), mlp(depth=1)(x)) and vb.model[0].materialized
    for change in (nn.utils.parametrizations.weight_norm, nn.utils.spectral_norm):
        vb, plain = wrap(mlp(depth=1)), mlp(depth=1)
        with pytest.warns(UserWarning, match="parametrization: 0 left the tiers"):
            torch.manual_seed(1)
            change(vb.model[0])
        torch.manual_seed(1)
        change(plain[0])
        assert torch.equal(vb(x), plain(x)) and not vb.registry


def test_a_layer_lists_its_weight_among_its_own_parameters_and_a_model_does_not(vb):
    layer = vb.materialize().model[0]
    held = layer.weight
    assert [name for name, _ in layer.named_parameters()] == ["weight", "bias"]
    assert next(layer.parameters()) is held
    assert "0.weight" not in dict(vb.model.named_parameters())


# -- state dicts and tools ---------------------------------------------------------------------------------------------


def test_a_state_dict_that_is_assigned_gives_its_dtype_and_tensors_as_to_a_plain_layer(vb):
    plain = nn.Linear(64, 64)
    state = {name: torch.randn_like(value).half() for name, value in plain.state_dict().items()}
    for layer in (vb.model[0], plain):
        layer.load_state_dict(state, assign=True)
    assert vb.model[0].weight.dtype is torch.float16 and torch.equal(vb.model[0].weight, plain.weight)
    x = torch.randn(2, 64).half()
    with torch.no_grad():
        vb.model[0](x)
    assert vb.model[0].materialized
    assert torch.allclose(vb.model[0](x), plain(x), atol=0 if vb.model[0].handle.spec.lossless else 3)


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


def test_accelerate_gives_a_shell_its_weight_and_materialize_encodes_it():
    utils = pytest.importorskip("accelerate.utils")
    vb, eye = wrap(mlp(depth=1)), torch.eye(64)
    utils.set_module_tensor_to_device(vb.model[0], "weight", "cpu", value=eye)
    x = torch.randn(2, 64)
    assert torch.equal(vb(x), torch.tanh(F.linear(x, eye, vb.model[0].bias)))
    vb.materialize()
    assert vb.model[0].materialized and torch.equal(vb.model[0].weight, eye)


@pytest.mark.parametrize("name", ["DeloraConfig", "HiraConfig", "LoraConfig"])
def test_adapters_that_peft_merges_in_place_are_merged(name):
    peft = pytest.importorskip("peft")
    outputs, x = [], torch.randn(2, 64)
    for model in (mlp(depth=2), wrap(mlp(depth=2)).materialize().model):
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
        adapted = peft.get_peft_model(vb.model, peft.LoraConfig(r=4, target_modules=["0"], modules_to_save=["2"]))
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
