"""VBLinear, one layer or a few: everything that other code does to an nn.Linear."""

import copy
import gc
import io
import pickle
import warnings
import weakref
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import vbrt
from tests.models import FORMATS, config, mlp, wrap, wrap_streamed
from vbrt.errors import FormatError, TierError, WrapError
from vbrt.kernels.reference import decode_weight
from vbrt.layers import VBLinear

#: the few tests that compare the bits of 4-bit layers with torch's matmul; all others run on the kernels that users get
torchs_bits = pytest.mark.usefixtures("plain_torch")


def dtype_of(format):
    return torch.bfloat16 if format == "exact" else torch.float32


@pytest.fixture(params=FORMATS)
def format(request):
    return request.param


@pytest.fixture(params=["resident", "streamed"])
def vb(request, format, tmp_path):
    """A wrapped mlp with biases, not materialized yet, in every holding."""
    yield from held(format, request.param, tmp_path)


@pytest.fixture(params=[("dense", "resident"), ("nvfp4", "resident"), ("exact", "streamed")], ids="-".join)
def some_vb(request, tmp_path):
    """As `vb`, in three holdings out of six."""
    yield from held(*request.param, tmp_path)


def held(format, how, path):
    model = mlp(dtype=dtype_of(format))
    with wrap(model, format) if how == "resident" else wrap_streamed(model, format, path) as vb:
        yield vb


def dense_twin(vb, model=None):
    """A plain model with the decoded weights."""
    twin = model or mlp(dtype=vb.model[0].weight.dtype)
    twin.load_state_dict(vb.state_dict())
    return twin


def inputs(vb, rows=3):
    torch.manual_seed(7)
    return torch.randn(rows, 64, dtype=vb.model[0].weight.dtype)


# -- forward and backward ----------------------------------------------------------------------------------------------


@torchs_bits
def test_outputs_are_those_of_a_dense_layer_with_the_decoded_weight(vb):
    x = inputs(vb)
    for _ in range(3):
        y = vb(x)
    assert torch.equal(y, dense_twin(vb)(x))


def test_dense_and_exact_give_the_very_outputs_of_the_original(vb, format):
    x = inputs(vb)
    assert torch.equal(vb(x), mlp(dtype=dtype_of(format))(x)) or format == "nvfp4"


@torchs_bits
def test_gradients_of_input_and_bias_are_those_of_a_dense_layer(vb):
    vb.materialize()
    twin = dense_twin(vb)
    x = inputs(vb).requires_grad_()
    x_twin = x.detach().clone().requires_grad_()
    vb(x).square().sum().backward()
    twin(x_twin).square().sum().backward()
    assert torch.equal(x.grad, x_twin.grad)
    for layer, plain in zip(vb.model[::2], twin[::2], strict=True):
        assert torch.equal(layer.bias.grad, plain.bias.grad)


@pytest.mark.parametrize("shape", [(64,), (0, 64), (1, 64), (2, 3, 64), (2, 1, 3, 64)])
def test_any_leading_shape_runs_forward_and_backward(shape):
    vb, plain = wrap(mlp(depth=1)), mlp(depth=1)
    x = torch.randn(shape, requires_grad=True)
    x_plain = x.detach().clone().requires_grad_()
    y, y_plain = vb(x), plain(x_plain)
    y.sum().backward()
    y_plain.sum().backward()
    assert torch.equal(y, y_plain) and torch.equal(x.grad, x_plain.grad)
    assert torch.equal(vb.model[0].bias.grad, plain[0].bias.grad)


def test_a_frozen_input_and_bias_make_no_graph(some_vb):
    some_vb.materialize().requires_grad_(False)
    assert not some_vb(inputs(some_vb)).requires_grad


def test_a_weight_loaded_between_forward_and_backward_is_an_error_not_a_wrong_gradient(some_vb):
    loss = some_vb(inputs(some_vb).requires_grad_()).sum()
    some_vb.load_state_dict(some_vb.state_dict())
    with pytest.raises(WrapError, match="between forward and backward"):
        loss.backward()


def test_a_wrong_input_dtype_fails_as_in_a_dense_layer(some_vb):
    with pytest.raises(RuntimeError, match="dtype"):
        some_vb(inputs(some_vb).double())


MODES = (torch.enable_grad, torch.no_grad, torch.inference_mode)


@pytest.mark.parametrize("trainable", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("format", "how"), [("dense", "resident"), ("dense", "streamed"), ("exact", "resident")])
def test_a_transposed_input_of_four_dimensions_gives_the_bits_of_the_original(format, how, bias, trainable, tmp_path):
    # for a weight that requires grad torch.matmul sums in another order here, in fp32
    torch.manual_seed(0)
    layers = [nn.Linear(512, 96, bias=bias, dtype=dtype_of(format)).requires_grad_(trainable) for _ in range(5)]
    x = torch.randn(2, 8, 512, 8).as_strided((2, 8, 8, 512), (32768, 8, 1, 64))
    original, expected = copy.deepcopy(layers[0]).float(), []
    for mode in MODES:
        with mode():
            expected.append(original(x).detach())
    for first in MODES:  # the pages are made under it
        model = nn.Sequential(*copy.deepcopy(layers)).eval()
        with wrap(model, format) if how == "resident" else wrap_streamed(model, format, tmp_path) as vb:
            with first():
                vb.materialize()
            vb.float()
            for mode, y in zip(MODES, expected, strict=True):
                for same in (vb, copy.deepcopy(vb), pickle.loads(pickle.dumps(vb))):
                    with mode():
                        got = same.model[0](x)
                    assert torch.equal(got, y) and got.requires_grad == (bias and trainable and mode is MODES[0])
            assert not model[0].weight.requires_grad
            assert vb.unwrap()[0].weight.requires_grad == trainable


@pytest.mark.parametrize("format", ["dense", "exact"])
def test_the_weight_that_is_multiplied_requires_grad_where_the_original_did(format):
    for trainable in (True, False):
        vb, seen = wrap(mlp(depth=1, dtype=dtype_of(format)).requires_grad_(trainable), format).materialize(), []
        handle = vb.model[0].handle
        if handle.kernels is None:
            handle.take_kernels()
        handle.kernels = replace(
            handle.kernels,
            linear=lambda x, planes, bias, run=handle.kernels.linear, seen=seen: (
                seen.append(decode_weight(planes).requires_grad),
                run(x, planes, bias),
            )[1],
        )
        for _ in range(3):
            vb(inputs(vb))
        assert seen == [trainable] * 3


class Casts(TorchDispatchMode):
    """Counts casts while it is active."""

    count = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.count += op is torch.ops.aten._to_copy.default
        return op(*args, **kwargs or {})


def test_autocast_keeps_no_cast_of_a_weight_that_could_train():
    vb, x = wrap(nn.Sequential(nn.Linear(64, 64, bias=False)).eval()).materialize(), torch.randn(2, 64)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), Casts() as casts:
        for _ in range(3):
            vb(x)
    assert casts.count == 2 * 3  # of input and weight; a cast that is kept until autocast ends would be memory


@torchs_bits
@pytest.mark.parametrize("features", [(48, 40), (2730, 16), (17, 33), (1, 5)])
@pytest.mark.parametrize("format", [*FORMATS, "mxfp4", "nf4", "quantile"])
def test_sizes_that_are_no_multiple_of_the_block_are_padded(features, format):
    torch.manual_seed(0)
    layer = nn.Linear(*features, dtype=dtype_of(format)).eval()
    original = layer.weight.detach().clone()
    vb, x = wrap(layer, format), torch.randn(2, features[0], dtype=dtype_of(format))
    y = vb(x)
    assert layer.weight.shape == (features[1], features[0])
    assert torch.equal(y, F.linear(x, layer.weight, layer.bias))
    assert torch.equal(layer.weight, original) or format not in ("dense", "exact")


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_activation_checkpointing_gives_the_same_gradients(some_vb, use_reentrant):
    from torch.utils.checkpoint import checkpoint

    some_vb.materialize()
    grads = []
    for run in (some_vb.model, lambda x: checkpoint(some_vb.model, x, use_reentrant=use_reentrant)):
        x = inputs(some_vb).requires_grad_()
        run(x).square().sum().backward()
        grads.append(x.grad)
    assert torch.equal(*grads)


def test_autocast_gives_the_outputs_and_gradients_of_a_dense_layer(some_vb):
    some_vb.materialize().float()
    twin = dense_twin(some_vb)
    got = []
    for model in (some_vb, twin):
        x = inputs(some_vb).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            y = model(x)
        y.float().square().sum().backward()
        got += [y, x.grad]
    assert got[0].dtype is torch.bfloat16
    assert torch.equal(got[0], got[2]) and torch.equal(got[1], got[3])


def test_weights_encoded_under_inference_mode_can_be_differentiated_through_later(vb):
    with torch.inference_mode():
        for _ in range(2):
            vb(inputs(vb))
    x = inputs(vb).requires_grad_()
    vb(x).sum().backward()
    F.linear(x, vb.model[0].weight).sum().backward()


# -- the weight as others see it ---------------------------------------------------------------------------------------


def test_weight_decodes_in_the_original_shape_dtype_and_device(vb, format):
    before = vb.model[0].weight.detach().clone()
    vb.materialize()
    weight = vb.model[0].weight
    assert (weight.shape, weight.dtype, weight.device) == (before.shape, before.dtype, before.device)
    assert not weight.requires_grad and weight.grad is None
    assert torch.equal(weight, before) or format == "nvfp4"


@torchs_bits
def test_reading_the_weight_directly_gives_what_the_layer_computes(vb):
    vb.materialize()
    layer, x = vb.model[0], inputs(vb)
    assert torch.equal(F.linear(x, layer.weight, layer.bias), layer(x))
    assert torch.equal(x @ layer.weight.T, F.linear(x, layer.weight))


def test_what_is_made_of_the_decoded_weight_is_a_plain_tensor(some_vb):
    some_vb.materialize()
    weight = some_vb.model[0].weight
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


@pytest.mark.parametrize("made", [lambda w: w, nn.Parameter, lambda w: nn.Parameter(w, requires_grad=False)])
def test_assigning_a_weight_takes_effect_in_the_next_forward(vb, made):
    x = inputs(vb)
    vb(x)
    new = torch.eye(64, dtype=x.dtype)
    vb.model[0].weight = made(new)
    assert not vb.model[0].materialized
    assert torch.equal(vb.model[0](x), F.linear(x, new, vb.model[0].bias))
    assert vb.model[0].materialized and torch.equal(vb.model[0].weight, new)


def test_assigning_weight_data_takes_effect_too(some_vb):
    x = inputs(some_vb)
    some_vb(x)
    eye = torch.eye(64, dtype=x.dtype)
    some_vb.model[0].weight.data = 2 * eye
    assert torch.equal(some_vb.model[0].weight, 2 * eye)
    some_vb(x)
    with warnings.catch_warnings(record=True) as caught:  # raised in __del__, an error would go unseen
        some_vb.model[0].weight.data += eye
    assert not caught
    assert torch.equal(some_vb.model[0](x), F.linear(x, 3 * eye, some_vb.model[0].bias))


def test_reading_the_weight_warns_of_nothing(some_vb):
    some_vb.materialize()
    with warnings.catch_warnings(record=True) as caught:
        weight = some_vb.model[0].weight
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
        some_vb.model[0].weight = bad
    assert torch.equal(some_vb(x), y)


def test_removing_the_weight_is_refused_with_what_to_do(some_vb):
    some_vb.materialize()
    with pytest.raises(WrapError, match="unwrap"):
        del some_vb.model[0].weight
    with pytest.raises(WrapError, match="before wrapping"):
        nn.utils.parametrizations.weight_norm(some_vb.model[0])


@torchs_bits
def test_a_new_bias_is_used(some_vb):
    x = inputs(some_vb)
    some_vb(x)
    some_vb.model[0].bias = nn.Parameter(torch.ones(64, dtype=x.dtype))
    assert torch.equal(some_vb.model[0](x), F.linear(x, some_vb.model[0].weight, torch.ones(64, dtype=x.dtype)))
    some_vb.model[0].bias = None
    assert torch.equal(some_vb.model[0](x), F.linear(x, some_vb.model[0].weight))


def test_reset_parameters_draws_a_new_weight(some_vb):
    some_vb.materialize()
    before = some_vb.model[0].weight.clone()
    torch.manual_seed(5)
    some_vb.model[0].reset_parameters()
    torch.manual_seed(5)
    expected = nn.Linear(64, 64, dtype=before.dtype).weight
    assert torch.equal(some_vb.model[0].weight, expected)


def test_the_layer_is_an_nn_linear_by_class_attributes_and_repr(some_vb):
    layer = some_vb.model[0]
    assert isinstance(layer, nn.Linear) and type(layer) is VBLinear
    assert (layer.in_features, layer.out_features) == (64, 64)
    assert repr(layer).startswith("VBLinear(in_features=64, out_features=64, bias=True, format=")


# -- the dense weight is gone ------------------------------------------------------------------------------------------


def test_after_its_first_forward_a_layer_keeps_no_reference_to_the_dense_weight(vb):
    dead = weakref.ref(vb.model[0].weight)
    other = weakref.ref(vb.model[2].weight)
    with torch.no_grad():
        vb.model[0](inputs(vb))
    gc.collect()
    assert dead() is None and other() is not None
    vb.materialize()
    gc.collect()
    assert other() is None


def test_the_parameters_that_are_left_are_the_biases(some_vb):
    names = [name for name, _ in some_vb.model.named_parameters()]
    assert len(names) == 12
    some_vb.materialize()
    assert [name for name, _ in some_vb.model.named_parameters()] == [name for name in names if "bias" in name]


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
    assert vb.model[0].materialized and not vb.model[2].materialized
    vb.model[2].weight = good
    assert vb(x).isfinite().all()


def test_dense_holds_nan_as_it_is():
    model = mlp()
    with torch.no_grad():
        model[0].weight[0, 0] = float("nan")
    assert wrap(model, "dense").materialize().model[0].weight.isnan().sum() == 1


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


# -- casts -------------------------------------------------------------------------------------------------------------


@torchs_bits
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_casting_the_model_casts_what_the_layer_computes_and_shows(some_vb, dtype, when):
    original = mlp(dtype=some_vb.model[0].weight.dtype).to(dtype)
    if when == "after":
        some_vb.materialize()
    some_vb.to(dtype)
    x = inputs(some_vb)
    y = some_vb(x)
    assert y.dtype is x.dtype is dtype is some_vb.model[0].weight.dtype
    assert all(value.dtype is dtype for value in some_vb.state_dict().values())
    if some_vb.model[0].handle.spec.lossless:
        assert torch.equal(y, original(x))
    model = some_vb.unwrap()
    assert all(parameter.dtype is dtype for parameter in model.parameters()) and torch.equal(model(x), y)


def test_casts_back_and_forth_lose_nothing_of_the_pages(some_vb):
    some_vb.materialize()
    before = some_vb.model[0].weight
    some_vb.half().to(before.dtype)
    assert torch.equal(some_vb.model[0].weight, before)


def test_moving_to_the_device_it_is_on_changes_nothing(some_vb):
    x = inputs(some_vb)
    y = some_vb(x)
    some_vb.to("cpu")
    some_vb.to(torch.device("cpu"), non_blocking=True)
    some_vb.model.share_memory()
    assert torch.equal(some_vb(x), y)


# -- state dict --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("materialized", [False, True])
def test_state_dict_has_the_keys_shapes_and_order_of_the_dense_model(some_vb, materialized):
    if materialized:
        some_vb.materialize()
    plain = mlp(dtype=some_vb.model[0].weight.dtype).state_dict()
    got = [(name, value.shape, value.dtype) for name, value in some_vb.state_dict().items()]
    assert got == [(name, value.shape, value.dtype) for name, value in plain.items()]
    assert list(some_vb.model.state_dict(prefix="a.")) == [f"a.{k}" for k in plain]
    assert type(some_vb.state_dict()["0.weight"]) is torch.Tensor


def test_a_state_dict_shares_no_memory_with_pages(some_vb):
    x = inputs(some_vb)
    y = some_vb(x)
    for value in some_vb.state_dict().values():
        if value.dim() == 2:
            value.zero_()
    assert torch.equal(some_vb(x), y)


@torchs_bits
@pytest.mark.parametrize("materialized", [False, True])
def test_loading_another_models_state_gives_its_outputs(vb, format, materialized):
    if materialized:
        vb.materialize()
    x = inputs(vb)
    torch.manual_seed(99)
    other = mlp(dtype=x.dtype)
    for parameter in other.parameters():
        nn.init.normal_(parameter, std=0.1)
    result = vb.load_state_dict(other.state_dict())
    assert not result.missing_keys and not result.unexpected_keys
    assert torch.equal(vb(x), dense_twin(vb)(x))
    assert torch.equal(vb(x), other(x)) or format == "nvfp4"


@pytest.mark.parametrize("format", [*FORMATS, "mxfp4", "nf4"])
def test_loading_ones_own_state_changes_nothing(format):
    model = mlp(dtype=dtype_of(format))
    vb, x = wrap(model, format), torch.randn(3, 64, dtype=dtype_of(format))
    y = vb(x)
    state = vb.state_dict()
    for _ in range(2):
        vb.load_state_dict(state)
        assert all(torch.equal(a, b) for a, b in zip(vb.state_dict().values(), state.values(), strict=True))
    assert torch.equal(vb(x), y)


@torchs_bits
def test_a_state_dict_of_another_dtype_is_cast(some_vb):
    some_vb.materialize()
    state = {k: v.to(torch.float16) for k, v in mlp().state_dict().items()}
    dtype = some_vb.model[0].weight.dtype
    some_vb.load_state_dict(state)
    assert some_vb.model[0].weight.dtype is dtype
    assert torch.equal(some_vb(inputs(some_vb)), dense_twin(some_vb)(inputs(some_vb)))


def test_missing_unexpected_and_misshapen_keys_are_reported_as_by_a_dense_model(some_vb):
    some_vb.materialize()
    plain, x = mlp(dtype=some_vb.model[0].weight.dtype), inputs(some_vb)
    y = some_vb(x)
    state = some_vb.state_dict()
    del state["2.weight"], state["4.bias"]
    state["0.weight"], state["nobody.weight"], state["2.wait"] = torch.zeros(3, 3), torch.zeros(1), torch.zeros(1)
    kept = dict(state)
    messages = []
    for model in (some_vb, plain):
        with pytest.raises(RuntimeError) as caught:
            model.load_state_dict(state)
        messages.append(sorted(str(caught.value).replace("\t", "").splitlines()[1:]))
    assert messages[0] == messages[1]
    assert state.keys() == kept.keys() and torch.equal(some_vb(x), y)
    del state["0.weight"]
    got, expected = some_vb.load_state_dict(state, strict=False), plain.load_state_dict(state, strict=False)
    assert set(got.missing_keys) == set(expected.missing_keys) == {"0.weight", "2.weight", "4.bias"}
    assert set(got.unexpected_keys) == set(expected.unexpected_keys)


def test_loading_nan_is_refused_by_name_and_the_old_weight_stays():
    vb, x = wrap(mlp(), "nvfp4"), torch.randn(2, 64)
    y = vb(x)
    state = vb.state_dict()
    state["2.weight"] = torch.full((64, 64), float("nan"))
    with pytest.raises(FormatError, match=r"^2: "):
        vb.load_state_dict(state)
    assert vb.model[2].materialized and torch.equal(vb(x), y)


def test_loading_needs_no_room_beside_the_old_pages(format):
    model = mlp(dtype=dtype_of(format))
    vb = wrap(model, format).materialize()
    held = vb.stats().tiers["cpu"].held_bytes
    vb.unwrap()
    slack = 8192 if format == "exact" else 0  # its side lists differ in length from weight to weight
    budget = max(held, vb.plan.page_bytes) + slack
    vb = vbrt.wrap(model, config(format) | {"tiers": {"gpu": {"enabled": False}, "cpu": {"budget": budget}}})
    vb.materialize()
    torch.manual_seed(1)
    for _ in range(2):
        vb.load_state_dict({k: torch.randn_like(v) for k, v in vb.state_dict().items()})
    assert vb.stats().tiers["cpu"].peak_bytes <= budget and all(layer.materialized for layer in vb.registry.values())


# -- copies ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("how", "materialized"), [("wrapper", False), ("wrapper", True), ("model", True)])
def test_a_deep_copy_computes_the_same_and_is_independent(some_vb, materialized, how):
    x = inputs(some_vb)
    if materialized:
        some_vb.materialize()
    clone = copy.deepcopy(some_vb) if how == "wrapper" else copy.deepcopy(some_vb.model)
    clone_layers = clone.model if how == "wrapper" else clone
    y = some_vb(x)
    assert torch.equal(clone(x), y) and clone_layers[0].materialized
    state = {k: torch.zeros_like(v) for k, v in some_vb.state_dict().items()}
    clone.load_state_dict(state)
    some_vb.model[2].weight = torch.eye(64, dtype=x.dtype)
    clone_layers[2].weight = 2 * torch.eye(64, dtype=x.dtype)
    some_vb(x), clone(x)
    assert torch.equal(some_vb.model[2].weight, torch.eye(64, dtype=x.dtype))
    assert torch.equal(clone_layers[2].weight, 2 * torch.eye(64, dtype=x.dtype))
    assert not clone_layers[0].weight.any() and some_vb.model[0].weight.any()


@torchs_bits
def test_a_copy_can_go_without_hurting_the_original_and_the_reverse(vb, format):
    x = inputs(vb)
    y = vb(x)
    first, second, third = copy.deepcopy(vb), copy.deepcopy(vb.model), copy.deepcopy(vb)
    first.close()
    del second
    gc.collect()
    assert torch.equal(vb(x), y)
    assert torch.equal(copy.deepcopy(vb).unwrap()(x), y)
    vb.close()
    with pytest.raises(TierError, match="closed"):
        vb(x)
    assert torch.equal(third(x), y)
    third.close()


def test_pages_go_when_their_last_owner_goes(some_vb):
    x = inputs(some_vb)
    some_vb(x)
    pages = len(some_vb.stack.pages)
    clone = copy.deepcopy(some_vb.model)
    clone[0].weight = torch.zeros(64, 64, dtype=x.dtype)
    clone(x)
    assert len(some_vb.stack.pages) == pages + len(some_vb.model[0].handle.keys)
    del clone
    gc.collect()
    some_vb(x)
    assert len(some_vb.stack.pages) == pages


@pytest.mark.parametrize("materialized", [False, True])
def test_wrapper_and_model_can_be_pickled_and_saved(vb, materialized):
    x = inputs(vb)
    if materialized:
        vb.materialize()
    file = io.BytesIO()
    torch.save(vb.model, file)
    copies = [
        pickle.loads(pickle.dumps(vb)),
        pickle.loads(pickle.dumps(vb.model)),
        torch.load(io.BytesIO(file.getvalue()), weights_only=False),
    ]
    y = vb(x)
    vb.close()
    for clone in copies:
        assert torch.equal(clone(x), y)
    copies[0].stats()
    copies[0].close()
    assert torch.equal(copies[1](x), y) and torch.equal(pickle.loads(pickle.dumps(copies[2]))(x), y)


@torchs_bits
def test_an_unpickled_wrapper_unwraps(some_vb):
    x = inputs(some_vb)
    y = some_vb(x)
    model = pickle.loads(pickle.dumps(some_vb)).unwrap()
    assert type(model[0]) is nn.Linear and torch.equal(model(x), y)


# -- ties --------------------------------------------------------------------------------------------------------------


def tied(dtype=torch.float32):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64, bias=False), nn.Linear(64, 64)).to(dtype)
    model[3].weight = model[0].weight
    return model.eval()


def test_tied_layers_share_one_page_under_both_names(format):
    model, x = tied(dtype_of(format)), torch.randn(2, 64, dtype=dtype_of(format))
    y = model(x).detach()
    vb = wrap(model, format)
    swap = vb.plan.swaps[0]
    assert (swap.name, swap.aliases, set(vb.registry)) == ("0", ("3",), {"0", "2", "3"})
    assert torch.equal(vb(x), y) or format == "nvfp4"
    assert vb.model[0].handle is vb.model[3].handle
    assert len(vb.stack.pages) == 2 * len(swap.pages)
    assert vb.stats().layers["0"].forwards == 2
    unwrapped = vb.unwrap()
    assert unwrapped[0].weight is unwrapped[3].weight


def test_one_tied_layer_running_frees_the_dense_weight_of_all(format):
    model = tied(dtype_of(format))
    dead = weakref.ref(model[0].weight)
    vb = wrap(model, format)
    with torch.no_grad():
        vb.model[3](torch.randn(1, 64, dtype=dtype_of(format)))
    gc.collect()
    assert dead() is None and vb.model[0].materialized


def test_loading_keeps_a_tie_and_assigning_cuts_it(format):
    vb = wrap(tied(dtype_of(format)), format).materialize()
    vb.load_state_dict(vb.state_dict())
    assert vb.model[0].handle is vb.model[3].handle and len(vb.stack.pages) == 2 * len(vb.plan.swaps[0].pages)
    vb.model[3].weight = torch.zeros(64, 64, dtype=dtype_of(format))
    vb(torch.randn(1, 64, dtype=dtype_of(format)))
    assert vb.model[0].weight.any() and not vb.model[3].weight.any()


def test_a_tie_survives_casts_copies_and_pickles(format):
    vb, x = wrap(tied(dtype_of(format)), format), torch.randn(2, 64, dtype=torch.float16)
    y = vb.half()(x)
    for clone in (copy.deepcopy(vb), pickle.loads(pickle.dumps(vb))):
        assert clone.model[0].handle is clone.model[3].handle and torch.equal(clone(x), y)


# -- hooks -------------------------------------------------------------------------------------------------------------


def test_hooks_on_a_layer_survive_wrapping_and_unwrapping():
    model, seen = mlp(), []
    model[0].register_forward_hook(lambda *_: seen.append("forward"))
    model[0].register_forward_pre_hook(lambda *_: seen.append("pre"))
    model[0].register_full_backward_hook(lambda *_: seen.append("backward"))
    model[0].register_state_dict_post_hook(lambda *_: seen.append("state"))
    vb = wrap(model)
    for use in (vb, vb, vb.unwrap()):
        seen.clear()
        use(torch.randn(1, 64, requires_grad=True)).sum().backward()
        use.state_dict()
        assert seen == ["pre", "forward", "backward", "state"]


def test_training_mode_warns_that_weights_are_frozen_once_and_only_if_they_were_trainable():
    model = mlp().train()
    with pytest.warns(UserWarning, match=r"frozen planes.*weights\.exclude") as caught:
        wrap(model).model(torch.randn(1, 64))
    assert {str(w.message) for w in caught} == {str(caught[0].message)}
    with pytest.warns(UserWarning, match="frozen planes"):
        wrap(mlp().train()).materialize()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wrap(mlp())(torch.randn(1, 64))
        wrap(mlp().train().requires_grad_(False))(torch.randn(1, 64))
        with torch.no_grad():
            wrap(mlp().train())(torch.randn(1, 64))
