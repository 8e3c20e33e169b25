import pytest
import torch
import torch.nn.functional as F

from vbrt.formats import WeightPlanes, get_format
from vbrt.kernels import reference
from vbrt.kernels.cuda import differentiable
from vbrt.kernels.cuda.e2m1 import linear as e2m1_linear
from vbrt.kernels.cuda.plain import linear as plain_linear
from vbrt.kernels.cuda.rounded import fp8 as fp8_linear
from vbrt.kernels.cuda.table import linear as table_linear
from vbrt.kernels.cuda.trellis import linear as trellis_linear
from vbrt.kernels.cuda.whole import linear as whole_linear

SHAPE = (32, 128)


def planes_of(format, dtype=torch.float32):
    return WeightPlanes(format, SHAPE, dtype, get_format(format).encode(torch.randn(SHAPE)))


def inputs(dtype=torch.float32):
    x, bias = torch.randn(2, 3, SHAPE[1], dtype=dtype), torch.randn(SHAPE[0], dtype=dtype)
    return x.requires_grad_(), bias.requires_grad_()


def decode(planes, dtype):
    return reference.decode_weight(planes).to(dtype)


def by_decoding(x, planes, bias, activation):
    return differentiable.linear_by_decoding(x, planes, bias, activation, decode)


def by_own_products(x, planes, bias, activation):
    """As a family with kernels for both passes calls it, with functions of its module."""
    return differentiable.linear(x, planes, bias, activation, multiply=multiply, gradient=gradient)


def multiply(x, planes):
    return F.linear(x, decode(planes, x.dtype))


def gradient(dy, planes):
    return dy @ decode(planes, dy.dtype)


def results(run, x, *rest):
    """The result, then its gradients for x and bias."""
    y = run(x, *rest)
    leaves = [tensor for tensor in (x, *rest) if isinstance(tensor, torch.Tensor) and tensor.requires_grad]
    return y, *torch.autograd.grad(y, leaves, torch.ones_like(y))


def same(got, want):
    return len(got) == len(want) and all(torch.equal(one, other) for one, other in zip(got, want, strict=True))


@pytest.mark.parametrize("run", [by_decoding, by_own_products])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("activation", ["none", "gelu"])
@pytest.mark.parametrize("biased", [True, False])
def test_results_and_gradients_are_the_plain_layers_bits(run, dtype, activation, biased):
    planes, (x, bias) = planes_of("nf4"), inputs(dtype)
    weight, bias = decode(planes, dtype), bias if biased else None

    def plain(x, planes, bias, activation):
        y = F.linear(x, weight)
        return reference.activate(y if bias is None else y + bias, activation)

    got = results(run, x, planes, bias, activation)
    assert got[0].dtype is got[1].dtype is dtype and same(got, results(plain, x, planes, bias, activation))


def test_backward_decodes_again_and_nothing_of_the_weights_size_is_saved():
    planes, (x, bias), decoded, saved = planes_of("nf4"), inputs(), [], []

    def counted(planes, dtype):
        decoded.append(dtype)
        return decode(planes, dtype)

    def packed(tensor):
        saved.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(packed, lambda tensor: tensor):
        y = differentiable.linear_by_decoding(x, planes, bias, "gelu", counted)
    assert len(decoded) == 1 and saved == [y.numel()]  # that of the activation
    y.sum().backward()
    assert len(decoded) == 2


# --- the families -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "format", "operator"),
    [
        (whole_linear, "mxint8", "whole_decode"),
        (trellis_linear, "t3", "trellis_decode"),
        (table_linear, "nf4", "table_decode"),
        (plain_linear, "bytes32-float16", "plain_decode"),
    ],
)
def test_a_compiled_graph_decodes_by_an_operator(family, format, operator):
    planes, (x, bias), decoded = planes_of(format), inputs(), []

    def stand_in(*args):
        decoded.append(args[-1])
        return decode(planes, args[-1])

    def run(x, bias):
        return differentiable.linear_by_decoding(x, planes, bias, "gelu", family._decode)

    torch.compiler.reset()
    with torch.library._scoped_library("vbrt", "IMPL") as library:
        library.impl(operator, stand_in, "CPU")
        got = results(torch.compile(run, fullgraph=True, backend="aot_eager"), x, bias)
    assert decoded and same(got, results(lambda x, bias: by_decoding(x, planes, bias, "gelu"), x, bias))


@pytest.mark.parametrize(("family", "operator"), [(e2m1_linear, "fp4_linear"), (fp8_linear, "fp8_linear")])
def test_a_compiled_graph_of_tiles_has_one_operator_for_each_pass(family, operator, monkeypatch):
    planes, (x, bias) = planes_of("nvfp4", torch.bfloat16), inputs(torch.bfloat16)
    tiles = e2m1_linear.packing("nvfp4").pack(planes.coarse, SHAPE)
    tiled = WeightPlanes("nvfp4", SHAPE, torch.bfloat16, tiles)
    monkeypatch.setattr(e2m1_linear, "serves", lambda planes: True)
    monkeypatch.setattr(fp8_linear, "_is_long", lambda x, planes: True)
    ran = []

    def multiplied(x, *_):
        ran.append(operator)
        return multiply(x, planes)

    def decoded(*args):
        ran.append("fp4_decode")
        return decode(planes, args[-1])

    torch.compiler.reset()
    with torch.library._scoped_library("vbrt", "IMPL") as library:
        library.impl(operator, multiplied, "CPU")
        library.impl("fp4_decode", decoded, "CPU")
        run = torch.compile(lambda x, bias: family.linear(x, tiled, bias, "gelu"), fullgraph=True, backend="aot_eager")
        got = results(run, x, bias)
    assert ran == [operator, "fp4_decode"]
    assert same(got, results(lambda x, bias: by_own_products(x, planes, bias, "gelu"), x, bias))
