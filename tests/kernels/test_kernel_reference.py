import pytest
import torch
import torch.nn.functional as F

from vbrt.errors import KernelError
from vbrt.formats import WeightPlanes, block_formats, get_format, split_fine
from vbrt.kernels import resolve

CPU = torch.device("cpu")
FORMATS = ("nvfp4", "mxfp4", "nf4", "quantile")


def planes_of(w, name, *, exact=False):
    fmt = get_format(name)
    coarse = fmt.encode(w)
    return WeightPlanes(name, tuple(w.shape), w.dtype, coarse, split_fine(w, coarse, fmt) if exact else None)


@pytest.mark.parametrize("name", FORMATS)
def test_decode_weight_is_the_formats_decode(name):
    w = torch.randn(5, 70).bfloat16()
    planes = planes_of(w, name)
    expected = get_format(name).decode(planes.coarse, (5, 70), torch.bfloat16)
    assert torch.equal(resolve("decode_weight", "auto", CPU)(planes), expected)


@pytest.mark.parametrize("name", FORMATS)
def test_decode_weight_is_exact_with_the_fine_plane(name):
    w = torch.randn(5, 70).bfloat16()
    assert torch.equal(resolve("decode_weight", "reference", CPU)(planes_of(w, name, exact=True)), w)


def test_dense_planes_decode_to_the_very_weight():
    w = torch.randn(5, 7)
    assert resolve("decode_weight", "auto", CPU)(WeightPlanes("dense", (5, 7), w.dtype, {"weight": w})) is w


@pytest.mark.parametrize(
    ("activation", "fn"),
    [
        ("none", lambda y: y),
        ("relu", F.relu),
        ("gelu", F.gelu),
        ("gelu_tanh", lambda y: F.gelu(y, approximate="tanh")),
        ("silu", F.silu),
    ],
)
@pytest.mark.parametrize("name", ["dense", *FORMATS])
@pytest.mark.parametrize("bias", [None, torch.randn(6)])
def test_linear_applies_bias_and_activation_to_the_decoded_weight(name, activation, fn, bias):
    w, x = torch.randn(6, 50), torch.randn(2, 3, 50)
    planes = planes_of(w, name)
    decoded = get_format(name).decode(planes.coarse, (6, 50), w.dtype)
    y = resolve("linear", "auto", CPU)(x, planes, bias, activation)
    assert torch.equal(y, fn(F.linear(x, decoded, bias)))


def test_gradients_reach_the_input_and_the_bias():
    w, x, bias = torch.randn(6, 50), torch.randn(3, 50, requires_grad=True), torch.randn(6, requires_grad=True)
    planes = planes_of(w, "nvfp4")
    decoded = get_format("nvfp4").decode(planes.coarse, (6, 50), w.dtype)
    resolve("linear", "auto", CPU)(x, planes, bias, "none").sum().backward()
    torch.testing.assert_close(x.grad, decoded.sum(0).expand(3, -1))
    assert torch.equal(bias.grad, torch.full((6,), 3.0))


@pytest.mark.parametrize("name", FORMATS)
def test_tables_built_in_inference_mode_serve_training_later(name):
    for table in (
        block_formats.constant_quads,
        block_formats.e4m3_values,
        block_formats.powers_of_two,
        block_formats.ue4m4_values,
    ):
        table.cache_clear()
    linear, x = resolve("linear", "auto", CPU), torch.randn(3, 50, requires_grad=True)
    with torch.inference_mode():
        linear(x, planes_of(torch.randn(6, 50), name), None, "none")
    linear(x, planes_of(torch.randn(6, 50), name), None, "none").sum().backward()
    assert x.grad is not None


def test_an_unknown_activation_is_refused():
    with pytest.raises(KernelError, match="'swish'; expected one of none, relu"):
        resolve("linear", "auto", CPU)(torch.randn(1, 4), planes_of(torch.randn(2, 4), "dense"), None, "swish")
