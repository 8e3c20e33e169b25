"""The weight of a VBLinear as other code sees it, before and after its first forward."""

import copy
import gc
import io
import pickle
import warnings
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.layers.holdings import dtype_of, inputs
from tests.models import mlp, wrap
from vbrt.errors import FormatError, WrapError
from vbrt.layers import VBLinear

#: the few tests that compare the bits of 4-bit layers with torch's matmul; all others run on the kernels that users get
torchs_bits = pytest.mark.usefixtures("plain_torch")


# -- the weight as others see it ---------------------------------------------------------------------------------------


def test_weight_decodes_in_the_original_shape_dtype_and_device(vb, format):
    before = vb.module[0].weight.detach().clone()
    vb.materialize()
    weight = vb.module[0].weight
    assert (weight.shape, weight.dtype, weight.device) == (before.shape, before.dtype, before.device)
    assert not weight.requires_grad and weight.grad is None
    assert torch.equal(weight, before) or format == "nvfp4"


@torchs_bits
def test_reading_the_weight_directly_gives_what_the_layer_computes(vb):
    vb.materialize()
    layer, x = vb.module[0], inputs(vb)
    assert torch.equal(F.linear(x, layer.weight, layer.bias), layer(x))
    assert torch.equal(x @ layer.weight.T, F.linear(x, layer.weight))


def test_what_is_made_of_the_decoded_weight_is_a_plain_tensor(some_vb):
    some_vb.materialize()
    weight = some_vb.module[0].weight
    for derived in (
        weight + 0,
        weight.clone(),
        weight[[0, 1]],
        copy.deepcopy(weight),
        copy.deepcopy(weight.data),
        pickle.loads(pickle.dumps(weight)),
        weight.double(),
    ):
        assert type(derived) is torch.Tensor and torch.equal(derived, weight[: len(derived)].to(derived.dtype))
    file = io.BytesIO()
    torch.save({"w": weight}, file)
    assert torch.equal(torch.load(io.BytesIO(file.getvalue()))["w"], weight)


@pytest.mark.sample(9)
@pytest.mark.parametrize("made", [lambda w: w, nn.Parameter, lambda w: nn.Parameter(w, requires_grad=False)])
def test_assigning_a_weight_takes_effect_in_the_next_forward(vb, made):
    x = inputs(vb)
    vb(x)
    new = torch.eye(64, dtype=x.dtype)
    vb.module[0].weight = made(new)
    assert not vb.module[0].materialized
    assert torch.equal(vb.module[0](x), F.linear(x, new, vb.module[0].bias))
    assert vb.module[0].materialized and torch.equal(vb.module[0].weight, new)


def test_assigning_weight_data_takes_effect_too(some_vb):
    x = inputs(some_vb)
    some_vb(x)
    eye = torch.eye(64, dtype=x.dtype)
    some_vb.module[0].weight.data = 2 * eye
    assert torch.equal(some_vb.module[0].weight, 2 * eye)
    some_vb(x)
    with warnings.catch_warnings(record=True) as caught:  # raised in __del__, an error would go unseen
        some_vb.module[0].weight.data += eye
    assert not caught
    assert torch.equal(some_vb.module[0](x), F.linear(x, 3 * eye, some_vb.module[0].bias))


def test_reading_the_weight_warns_of_nothing(some_vb):
    some_vb.materialize()
    with warnings.catch_warnings(record=True) as caught:
        weight = some_vb.module[0].weight
        assert weight.data.sum() == weight.sum()
        del weight
    assert not caught


@pytest.mark.parametrize(
    ("bad", "error", "says"),
    [
        (None, TypeError, "expected a tensor, got NoneType"),
        (3.0, TypeError, "expected a tensor, got float"),
        (torch.zeros(3, 64), WrapError, r"shape \(3, 64\); expected \(64, 64\)"),
        (nn.Parameter(torch.zeros(64)), WrapError, r"shape \(64,\)"),
        (torch.zeros(64, 64, dtype=torch.int8), WrapError, r"torch\.int8; expected float32"),
    ],
)
def test_a_weight_of_the_wrong_kind_is_refused_and_the_old_one_stays(some_vb, bad, error, says):
    x = inputs(some_vb)
    y = some_vb(x)
    with pytest.raises(error, match=says):
        some_vb.module[0].weight = bad
    assert torch.equal(some_vb(x), y)


def test_removing_the_weight_is_refused_with_what_to_do(some_vb):
    some_vb.materialize()
    with pytest.raises(WrapError, match="unwrap"):
        del some_vb.module[0].weight
    with pytest.raises(WrapError, match="before wrapping"):
        nn.utils.parametrizations.weight_norm(some_vb.module[0])


@torchs_bits
def test_a_new_bias_is_used(some_vb):
    x = inputs(some_vb)
    some_vb(x)
    some_vb.module[0].bias = nn.Parameter(torch.ones(64, dtype=x.dtype))
    assert torch.equal(some_vb.module[0](x), F.linear(x, some_vb.module[0].weight, torch.ones(64, dtype=x.dtype)))
    some_vb.module[0].bias = None
    assert torch.equal(some_vb.module[0](x), F.linear(x, some_vb.module[0].weight))


def test_reset_parameters_draws_a_new_weight(some_vb):
    some_vb.materialize()
    before = some_vb.module[0].weight.clone()
    torch.manual_seed(5)
    some_vb.module[0].reset_parameters()
    torch.manual_seed(5)
    expected = nn.Linear(64, 64, dtype=before.dtype).weight
    assert torch.equal(some_vb.module[0].weight, expected)


def test_the_layer_is_an_nn_linear_by_class_attributes_and_repr(some_vb):
    layer = some_vb.module[0]
    assert isinstance(layer, nn.Linear) and type(layer) is VBLinear
    assert (layer.in_features, layer.out_features) == (64, 64)
    assert repr(layer).startswith("VBLinear(in_features=64, out_features=64, bias=True, format=")


# -- the dense weight is gone ------------------------------------------------------------------------------------------


def test_after_its_first_forward_a_layer_keeps_no_reference_to_the_dense_weight(vb):
    dead = weakref.ref(vb.module[0].dense)
    other = weakref.ref(vb.module[2].dense)
    with torch.no_grad():
        vb.module[0](inputs(vb))
    gc.collect()
    assert dead() is None and other() is not None
    vb.materialize()
    gc.collect()
    assert other() is None


def test_the_parameters_that_are_left_are_the_biases_from_wrap_on(some_vb):
    biases = [f"{i}.bias" for i in range(0, 12, 2)]
    assert [name for name, _ in some_vb.model.named_parameters()] == biases
    some_vb.materialize()
    assert [name for name, _ in some_vb.model.named_parameters()] == biases


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("format", ["nvfp4", "exact", "nf4"])
def test_a_weight_with_nan_or_inf_is_refused_by_name_and_can_be_repaired(format, value):
    model = mlp(dtype=dtype_of(format))
    good = model[2].weight.detach().clone()
    with torch.no_grad():
        model[2].weight[3, 4] = value
    vb = wrap(model, format)
    x = torch.randn(2, 64, dtype=dtype_of(format))
    for attempt in (vb.materialize, lambda: vb(x)):
        with pytest.raises(FormatError, match=r"^2: .*NaN.*Inf.*weights\.exclude"):
            attempt()
    assert vb.module[0].materialized and not vb.module[2].materialized
    vb.module[2].weight = good
    assert vb(x).isfinite().all()


def test_dense_holds_nan_as_it_is():
    model = mlp()
    with torch.no_grad():
        model[0].weight[0, 0] = float("nan")
    assert wrap(model, "dense").materialize().module[0].weight.isnan().sum() == 1


def test_a_weight_without_data_is_refused_until_it_is_loaded(format):
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(64, 64, dtype=dtype_of(format)))
    vb = wrap(model.eval(), format)
    x, source = torch.randn(2, 64, dtype=dtype_of(format)), nn.Linear(64, 64, dtype=dtype_of(format))
    with pytest.raises(FormatError, match=r"^0: its weight is on the meta device.*assign=True"):
        vb(x)
    vb.load_state_dict({f"0.{k}": v for k, v in source.state_dict().items()}, assign=True)
    assert torch.equal(vb(x), source(x)) or format == "nvfp4"


def test_a_shell_on_the_meta_device_gets_memory_from_to_empty():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(64, 64))
    vb, source, x = wrap(model.eval()), nn.Linear(64, 64), torch.randn(2, 64)
    vb.to_empty(device="cpu")
    vb.load_state_dict({f"0.{k}": v for k, v in source.state_dict().items()})
    assert torch.equal(vb(x), source(x))


@pytest.mark.parametrize("name", ["weight_bar", "weight_orig", "weight_g"])
def test_a_parameter_that_would_take_the_weights_place_is_refused_and_the_layer_stays(name):
    vb = wrap(mlp(depth=1))
    x = torch.randn(2, vb.module[0].in_features)
    before, layer = vb(x), vb.module[0]
    weight = layer._parameters.pop("weight")  # as tools do before they register what they compute it from
    assert weight is None
    with pytest.raises(WrapError, match=f"{name} cannot take the place of its weight"):
        layer.register_parameter(name, torch.nn.Parameter(torch.zeros(1)))
    assert torch.equal(vb(x), before)
