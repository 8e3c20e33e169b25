"""`.weight` of a VB layer as others hold it and write to it: a write to it is a write to the layer."""

import copy
import gc
import io
import pickle
import threading
import weakref

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.layers.holdings import dtype_of
from tests.layers.weights.temporaries import HOLDINGS, holding, inputs, tied
from tests.models import mlp, wrap
from vbrt.errors import FormatError, WrapError


@pytest.fixture(params=HOLDINGS, ids="-".join)
def vb(request, tmp_path):
    yield from holding(*request.param, tmp_path)


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
    "inference mode": in_inference_mode,
    "a graph": in_a_graph,
}


@pytest.mark.sample(34)
@pytest.mark.parametrize("write", WRITES)
def test_a_write_through_weight_is_the_layers_from_the_next_use_on(vb, write):
    layer, x = vb.module[0], inputs(vb)
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


@pytest.mark.sample(14)
@pytest.mark.parametrize("use", ["forward", "backward", "state_dict", "save", "copy", "pickle", "unwrap"])
@pytest.mark.parametrize("write", ["mul_", "flat", "rows", "a graph"])
def test_a_write_is_seen_by_whatever_comes_next_while_the_temporary_is_held(use, write, tmp_path):
    vb, plain = wrap(mlp(depth=2)).materialize(), mlp(depth=2)
    x, held = inputs(vb), vb.module[0].weight
    with torch.no_grad():
        WRITES[write](vb.module[0])
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
    layer, x = vb.module[0], inputs(vb)
    vb.materialize()
    held = layer.weight
    memory = held.detach().view(torch.uint8)
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
    layer = vb.materialize().module[0]
    held = layer.weight
    layer.weight = torch.ones(64, 64, dtype=held.dtype)
    with torch.no_grad():
        held.zero_()
    assert layer.weight.all() and layer.weight is not held


def test_a_written_temporary_needs_no_more_memory_than_the_weight_and_goes_when_it_is_encoded(format):
    vb = wrap(mlp(depth=1, dtype=dtype_of(format)), format).materialize()
    with torch.no_grad():
        vb.module[0].weight.mul_(2)
    kept = weakref.ref(vb.module[0].weight)
    assert vb.module[0].dense is kept() and vb.module[0]._parameters["weight"] is None
    with torch.no_grad():
        vb(inputs(vb))
    gc.collect()
    assert kept() is None and len(vb.stack.pages) == len(vb.module[0].handle.keys)


def test_a_written_temporary_that_cannot_be_encoded_says_so_by_name_until_it_is_repaired():
    vb = wrap(mlp(depth=1), "nvfp4").materialize()
    weight = vb.module[0].weight
    weight.data[3, 4] = float("nan")
    for _ in range(2):
        with pytest.raises(FormatError, match=r"^0: .*NaN"):
            vb(inputs(vb))
    weight.data[3, 4] = 0
    assert vb(inputs(vb)).isfinite().all()


def test_a_data_of_another_shape_is_refused_by_name_and_one_of_another_dtype_is_taken(vb):
    layer, x = vb.materialize().module[0], inputs(vb)
    before = layer.handle.weight()
    with pytest.raises(WrapError, match=r"^0\.weight: the new weight has shape \(3, 64\)"):
        layer.weight.data = torch.zeros(3, 64)
    assert torch.equal(layer.weight, before)
    layer.weight.data = torch.eye(64, dtype=torch.float16)
    layer.bias.data = layer.bias.data.half()
    assert torch.allclose(layer(x.half()), x.half() + layer.bias, atol=1e-2)


def test_two_threads_that_write_and_read_one_temporary_agree_in_the_end():
    vb, x = wrap(mlp(depth=1)).materialize(), torch.randn(2, 64)
    held, seen = vb.module[0].weight, []

    def write():
        for _ in range(50):
            with torch.no_grad():
                vb.module[0].weight.add_(1)

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
        assert len(seen) == 50 and torch.equal(vb(x), F.tanh(F.linear(x, held, vb.module[0].bias)))
    assert torch.allclose(held, before + 50, atol=1e-3)


@pytest.mark.parametrize(
    "view",
    [lambda w: w.data, lambda w: w.T, lambda w: w.data.data[3], lambda w: w.unbind()[3], lambda w: next(iter(w))],
)
def test_a_view_that_outlives_the_temporary_is_written_through(view):
    vb, x = wrap(mlp(depth=1)).materialize(), torch.randn(2, 64)
    before, held = vb.module[0].weight.clone(), view(vb.module[0].weight)
    gc.collect()
    with torch.no_grad():
        held.zero_()
        y = vb.module[0](x)
        assert torch.equal(y, F.linear(x, vb.module[0].weight, vb.module[0].bias))
    assert not torch.equal(vb.module[0].weight, before)
    del held
    gc.collect()
    assert torch.equal(vb.module[0](x), y) and (vb.module[0].weight == 0).sum() >= 64


@pytest.mark.sample(4)
@pytest.mark.parametrize("made", [lambda w: w.detach(), lambda w: w.T, lambda w: w.numpy(), lambda w: w[0].data])
def test_reading_through_views_and_numpy_changes_nothing(vb, made):
    layer = vb.materialize().module[0]
    handle = layer.handle
    made(layer.weight.float() if layer.weight.dtype is torch.bfloat16 else layer.weight)
    gc.collect()
    with torch.no_grad():
        layer(inputs(vb))
    assert layer.handle is handle and layer.materialized


def test_memory_that_leaves_torch_cannot_be_written(vb):
    layer = vb.materialize().module[0]
    before = layer.weight.clone()
    bytes_ = layer.weight.detach().view(torch.uint8).numpy()
    assert bytes_.base is not None and (bytes_ == before.view(torch.uint8).numpy()).all(), "it shares the memory"
    for array in (bytes_, bytes_[1:].T, np.asarray(layer.weight.detach().view(torch.uint8))):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1
    for weight in (layer.weight, layer.weight.detach(), layer.weight[3:]):
        with pytest.raises(WrapError, match=r"weight: __dlpack__ .* while it lives in the tiers"):
            torch.from_dlpack(weight)
    assert torch.equal(torch.from_dlpack(layer.weight.clone()), before) and torch.equal(layer.weight, before)


# -- identity and ties -------------------------------------------------------------------------------------------------


def test_the_weight_is_one_object_while_somebody_holds_it_for_tied_layers_too(format):
    vb = wrap(tied(format), format)
    assert vb.module[0].weight is vb.module[2].weight
    vb.materialize()
    assert vb.module[0].weight is vb.module[2].weight
    held = vb.module[0].weight
    with torch.no_grad():
        held.mul_(2)
    assert vb.module[2].weight is held
    with torch.no_grad():
        vb(inputs(vb))
    assert vb.module[2].weight is held and vb.module[0].handle is vb.module[2].handle
    assert vb.unwrap()[2].weight is held and type(held) is nn.Parameter


@pytest.mark.parametrize("materialized", [False, True])
def test_assigning_one_layers_weight_to_another_ties_them_and_encodes_nothing_again(format, materialized):
    vb = wrap(mlp(depth=3, dtype=dtype_of(format)), format)
    if materialized:
        vb.materialize()
    first, second = vb.module[0], vb.module[2]
    second.weight = first.weight
    assert second.handle is first.handle and second.materialized == materialized
    vb.materialize().stack.retire_unowned()
    assert len(vb.stack.pages) == len(first.handle.keys) + len(vb.module[4].handle.keys)
    with torch.no_grad():
        second.weight.zero_()
    assert not first.weight.any()
    model = vb.unwrap()
    assert model[0].weight is model[2].weight and not model[0].weight.any()


def test_a_parameter_of_the_weight_is_a_plain_one_of_its_own(vb):
    layer = vb.materialize().module[0]
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
    state = vb.module.state_dict(keep_vars=True)
    assert state["0.weight"] is vb.module[0].weight
    file = io.BytesIO()
    torch.save(state, file)
    assert type(torch.load(io.BytesIO(file.getvalue()))["0.weight"]) is torch.Tensor
