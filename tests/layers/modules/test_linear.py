"""VBLinear computes, casts and is hooked as an nn.Linear."""

import copy
import pickle
import warnings
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.layers.holdings import dense_twin, dtype_of, inputs
from tests.models import FORMATS, mlp, wrap, wrap_streamed
from vbrt.errors import WrapError
from vbrt.kernels.reference import decode_weight

#: the few tests that compare the bits of 4-bit layers with torch's matmul; all others run on the kernels that users get
torchs_bits = pytest.mark.usefixtures("plain_torch")


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
    for layer, plain in zip(vb.module[::2], twin[::2], strict=True):
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
    assert torch.equal(vb.module[0].bias.grad, plain[0].bias.grad)


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


@pytest.mark.sample(3)
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
                        got = same.module[0](x)
                    assert torch.equal(got, y) and got.requires_grad == (bias and trainable and mode is MODES[0])
            assert not model[0].weight.requires_grad
            assert vb.unwrap()[0].weight.requires_grad == trainable


@pytest.mark.parametrize("format", ["dense", "exact"])
def test_the_weight_that_is_multiplied_requires_grad_where_the_original_did(format):
    for trainable in (True, False):
        vb, seen = wrap(mlp(depth=1, dtype=dtype_of(format)).requires_grad_(trainable), format).materialize(), []
        handle = vb.module[0].handle
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
@pytest.mark.parametrize("format", [*FORMATS, "mxfp4", "nf4", "quantile", "mxint8"])
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
    for run in (some_vb.module, lambda x: checkpoint(some_vb.module, x, use_reentrant=use_reentrant)):
        x = inputs(some_vb).requires_grad_()
        run(x).square().sum().backward()
        grads.append(x.grad)
    assert torch.equal(*grads)


@torchs_bits
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
    F.linear(x, vb.module[0].weight).sum().backward()


# -- casts -------------------------------------------------------------------------------------------------------------


@pytest.mark.sample(12)
@torchs_bits
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_casting_the_model_casts_what_the_layer_computes_and_shows(some_vb, dtype, when):
    original = mlp(dtype=some_vb.module[0].weight.dtype).to(dtype)
    if when == "after":
        some_vb.materialize()
    some_vb.to(dtype)
    x = inputs(some_vb)
    y = some_vb(x)
    assert y.dtype is x.dtype is dtype is some_vb.module[0].weight.dtype
    assert all(value.dtype is dtype for value in some_vb.state_dict().values())
    if some_vb.module[0].handle.spec.lossless:
        assert torch.equal(y, original(x))
    model = some_vb.unwrap()
    assert all(parameter.dtype is dtype for parameter in model.parameters()) and torch.equal(model(x), y)


def test_casts_back_and_forth_lose_nothing_of_the_pages(some_vb):
    some_vb.materialize()
    before = some_vb.module[0].weight
    some_vb.half().to(before.dtype)
    assert torch.equal(some_vb.module[0].weight, before)


def test_moving_to_the_device_it_is_on_changes_nothing(some_vb):
    x = inputs(some_vb)
    y = some_vb(x)
    some_vb.to("cpu")
    some_vb.to(torch.device("cpu"), non_blocking=True)
    some_vb.module.share_memory()
    assert torch.equal(some_vb(x), y)


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
        wrap(model).module(torch.randn(1, 64))
    assert {str(w.message) for w in caught} == {str(caught[0].message)}
    with pytest.warns(UserWarning, match="frozen planes"):
        wrap(mlp().train()).materialize()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wrap(mlp())(torch.randn(1, 64))
        wrap(mlp().train().requires_grad_(False))(torch.randn(1, 64))
        with torch.no_grad():
            wrap(mlp().train())(torch.randn(1, 64))
