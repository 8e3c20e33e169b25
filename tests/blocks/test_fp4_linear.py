"""FusedFP4Linear: dense it is nn.Linear and an activation, frozen it is the same with a decoded 4-bit weight."""

import copy
import io
import json
import pickle

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load, save
from torch import nn

import vbrt
from vbrt.blocks import FusedFP4Linear, frozen_page
from vbrt.errors import ArgumentError, FormatError, WrapError
from vbrt.formats import get_format
from vbrt.kernels import Kernel
from vbrt.kernels.reference import ACTIVATIONS

FOUR_BIT = ["nvfp4", "mxfp4", "nf4", "quantile"]


def make(k=70, n=24, frozen=None, **given):  # 70: not a multiple of any block
    torch.manual_seed(2)
    layer = FusedFP4Linear(k, n, **given)
    return layer.quantize(frozen) if frozen else layer


def inputs(rows=5, k=70, dtype=torch.float32):
    torch.manual_seed(9)
    return torch.randn(2, rows, k, dtype=dtype)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("bias", [True, False])
def test_dense_it_is_linear_and_activation_with_the_same_first_weight(activation, bias):
    layer = make(activation=activation, bias=bias)
    torch.manual_seed(2)
    plain = nn.Linear(70, 24, bias=bias)
    assert torch.equal(layer(inputs()), ACTIVATIONS[activation](plain(inputs())))
    assert isinstance(layer, nn.Linear)
    assert list(layer.state_dict()) == list(plain.state_dict())
    layer.load_state_dict(plain.state_dict())


def test_it_trains_dense():
    layer, target = make(activation="silu"), torch.randn(2, 5, 24)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = F.mse_loss(layer(inputs()), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize("format", FOUR_BIT)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kernels", ["installed", "reference"])
def test_frozen_it_computes_with_the_decoded_weight(format, dtype, kernels, request):
    if kernels == "reference":
        request.getfixturevalue("plain_torch")
    layer = make(activation="gelu", dtype=dtype)
    fmt = get_format(format)
    expected = fmt.decode(fmt.encode(layer.weight.detach()), (24, 70), dtype)
    assert layer.quantize(format) is layer
    assert torch.equal(layer.weight, expected)
    x = inputs(dtype=dtype)
    with torch.no_grad():
        y, wanted = layer(x), F.gelu(F.linear(x, expected, layer.bias))
    assert torch.equal(y, wanted) if kernels == "reference" else torch.allclose(y, wanted, rtol=1e-2, atol=1e-2)


def test_frozen_it_holds_a_seventh_of_the_bytes_and_no_dense_weight():
    layer = make(1024, 1024, bias=False)
    assert layer.quantize().planes.dtype is torch.uint8
    held = sum(t.nbytes for t in (*layer.parameters(), *layer.buffers()))
    assert held < 1024 * 1024 * 4 / 7
    assert not list(layer.parameters())


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradients_flow_to_input_and_bias_as_through_a_dense_layer(activation):
    layer, x = make(activation=activation, frozen="nvfp4"), inputs().requires_grad_()
    bias, twin_x = layer.bias.detach().clone().requires_grad_(), x.detach().clone().requires_grad_()
    layer(x).square().sum().backward()
    ACTIVATIONS[activation](F.linear(twin_x, layer.weight, bias)).square().sum().backward()
    torch.testing.assert_close(x.grad, twin_x.grad)
    torch.testing.assert_close(layer.bias.grad, bias.grad)
    assert [name for name, _ in layer.named_parameters()] == ["bias"]
    assert not layer.weight.requires_grad


def test_the_decoded_weight_is_not_kept_for_the_backward_pass():
    layer, x, saved = make(frozen="nvfp4"), inputs().requires_grad_(), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.shape) or t, lambda t: t):
        layer(x)
    assert (24, 70) not in saved


def test_another_weight_between_forward_and_backward_is_named():
    layer, other, x = make(frozen="nvfp4"), make(frozen="nvfp4"), inputs().requires_grad_()
    y = layer(x)
    layer.load_state_dict(other.state_dict())
    with pytest.raises(WrapError, match="between forward and backward"):
        y.sum().backward()


def test_autocast_computes_in_its_dtype_dense_and_frozen():
    layer, x = make(activation="gelu"), inputs().requires_grad_()
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            y = layer(x)
        assert y.dtype is torch.bfloat16
        y.float().sum().backward()
        assert x.grad.dtype is torch.float32
        if layer.format is None:
            layer.quantize()


@pytest.mark.sample(2)
@pytest.mark.parametrize("frozen", [None, "nvfp4", "quantile"])
@pytest.mark.parametrize("autocast", [False, True])
def test_it_compiles_to_one_graph_with_the_same_results_and_gradients(frozen, autocast):
    layer = make(activation="gelu", frozen=frozen)
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    grads = []
    for call in (layer, compiled):
        x = inputs().requires_grad_()
        layer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y = call(x)
            with torch.no_grad():
                torch.testing.assert_close(call(x), y.detach())
        y.float().square().sum().backward()
        grads.append((y.detach(), x.grad, layer.bias.grad))
    torch.testing.assert_close(*grads)


# -- refusals ---------------------------------------------------------------------------------------------------------


def test_quantizing_twice_is_named():
    layer = make(frozen="nvfp4")
    with pytest.raises(WrapError, match="already frozen in nvfp4"):
        layer.quantize("mxfp4")
    assert layer.format == "nvfp4"


@pytest.mark.parametrize("format", ["dense", "int8"])
def test_another_format_is_named_and_leaves_the_layer_dense(format):
    layer = make()
    with pytest.raises(FormatError, match=f"format '{format}'"):
        layer.quantize(format)
    assert layer.weight.requires_grad


@pytest.mark.parametrize("spoil", ["nan", "meta", "float64"])
def test_a_weight_that_cannot_be_encoded_leaves_the_layer_dense(spoil):
    layer = make(dtype=torch.float64) if spoil == "float64" else make(device="meta" if spoil == "meta" else "cpu")
    if spoil == "nan":
        layer.weight.data[3, 3] = float("nan")
    with pytest.raises(FormatError, match={"nan": "1 NaN", "meta": "meta", "float64": "float64"}[spoil]):
        layer.quantize()
    assert layer.format is None
    assert isinstance(layer.weight, nn.Parameter)


def test_an_unknown_activation_is_named():
    with pytest.raises(ArgumentError, match="activation = 'swish'; expected one of 'none', 'relu'"):
        FusedFP4Linear(4, 4, activation="swish")


def test_a_frozen_weight_cannot_be_replaced():
    layer = make(frozen="nvfp4")
    for change in (layer.reset_parameters, lambda: setattr(layer, "weight", nn.Parameter(torch.zeros(24, 70)))):
        with pytest.raises(WrapError, match="frozen"):
            change()


# -- state ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", [None, *FOUR_BIT])
@pytest.mark.parametrize("through", ["state", "safetensors", "file", "assign", "meta"])
def test_a_state_dict_goes_into_a_fresh_layer_and_nothing_is_encoded_again(format, through, monkeypatch):
    model = nn.Sequential(make(frozen=format), nn.Linear(24, 2))
    fresh = nn.Sequential(FusedFP4Linear(70, 24), nn.Linear(24, 2))
    state = model.state_dict()
    monkeypatch.setattr(FusedFP4Linear, "_encoded", lambda *_: pytest.fail("encoded again"))
    if through == "safetensors":
        state = load(save(state))
    elif through == "file":
        file = io.BytesIO()
        torch.save(state, file)
        file.seek(0)
        state = torch.load(file, weights_only=True)
    elif through == "meta":
        fresh = fresh.to("meta")
    assert str(fresh.load_state_dict(state, assign=through in ("assign", "meta"))) == "<All keys matched successfully>"
    assert fresh[0].format == format
    assert torch.equal(fresh(inputs()), model(inputs()))
    assert {k: v.tolist() for k, v in fresh.state_dict().items()} == {k: v.tolist() for k, v in state.items()}


def test_assigning_a_state_dict_takes_its_dtype_and_copying_it_does_not():
    state = make(frozen="nvfp4", dtype=torch.bfloat16).state_dict()
    copied, assigned = FusedFP4Linear(70, 24), FusedFP4Linear(70, 24)
    copied.load_state_dict(state)
    assigned.load_state_dict(state, assign=True)
    assert (copied.weight.dtype, assigned.weight.dtype) == (torch.float32, torch.bfloat16)
    assert assigned(inputs(dtype=torch.bfloat16)).dtype is torch.bfloat16


def test_loading_into_a_frozen_layer_replaces_its_planes_and_shares_no_memory():
    layer, other = make(frozen="nvfp4"), make(frozen="mxfp4")
    state = other.state_dict()
    layer.load_state_dict(state)
    state["planes"].zero_()
    assert layer.format == "mxfp4"
    assert layer.weight.abs().sum() > 0


@pytest.mark.parametrize("change", ["shape", "no header", "truncated", "garbage", "dense into frozen", "nothing"])
def test_a_state_dict_that_does_not_fit_is_named(change):
    layer, state = make(), make(frozen="nvfp4").state_dict()
    if change == "shape":
        state = make(n=32, frozen="nvfp4", bias=True).state_dict()
    elif change == "no header":
        del state["planes_header"]
    elif change == "truncated":
        state["planes"] = state["planes"][:-1]
    elif change == "garbage":
        state["planes_header"] = torch.zeros(9, dtype=torch.uint8)
    elif change == "dense into frozen":
        layer, state = make(frozen="nvfp4"), make().state_dict()
    else:
        layer, state = make(frozen="nvfp4"), {"bias": torch.zeros(24)}
    before = layer.weight.clone()
    with pytest.raises(RuntimeError, match=r"planes|frozen in nvfp4"):
        layer.load_state_dict(state)
    assert torch.equal(layer.weight, before)


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "load"},
        {"dtype": None},
        {"dtype": "int8"},
        {"layout": None},
        {"layout": {"version": 1}},
        ("nbytes", float("inf")),
        ("nbytes", "x"),
        ("fields", [["codes", "uint8", [float("inf")], 0]]),
        ("fields", 3),
        ("version", 9),
        "[" * 4000,
        "x" * 100_000,
    ],
)
def test_a_header_that_is_none_is_refused_by_name(change):
    layer, state = make(), make(frozen="nvfp4").state_dict()
    header = json.loads(bytes(state["planes_header"].tolist()))
    if isinstance(change, tuple):
        header["layout"][change[0]] = change[1]
    text = change if isinstance(change, str) else json.dumps(header | (change if isinstance(change, dict) else {}))
    state["planes_header"] = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    before = layer.weight.clone()
    with pytest.raises(RuntimeError, match="planes"):
        layer.load_state_dict(state)
    assert layer.format is None and torch.equal(layer.weight, before)


@pytest.mark.parametrize("frozen", [None, "nvfp4", "quantile"])
def test_copies_and_pickles_compute_the_same(frozen):
    layer = make(activation="relu", frozen=frozen)
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    copies = [copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), torch.load(file, weights_only=False)]
    for other in copies:
        assert torch.equal(other(inputs()), layer(inputs()))
        assert (other.format, other.activation) == (frozen, "relu")
    assert frozen is None or copies[0].planes.data_ptr() != layer.planes.data_ptr()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_cast_changes_what_a_frozen_layer_computes_in_and_not_its_planes(dtype):
    layer = make(frozen="nvfp4")
    planes, weight = layer.planes.clone(), layer.weight
    layer.to(dtype)
    assert torch.equal(layer.planes, planes)
    assert layer(inputs(dtype=dtype)).dtype is dtype
    assert torch.equal(layer.weight, weight.to(dtype))
    assert torch.equal(layer.float().weight, weight)


def test_a_frozen_layer_goes_to_the_meta_device_and_back():
    layer = make(frozen="nvfp4").to("meta")
    assert layer.planes.is_meta
    state = make(frozen="nvfp4").state_dict()
    layer.to_empty(device="cpu").load_state_dict(state)
    assert torch.equal(layer.weight, make(frozen="nvfp4").weight)


def test_a_layer_in_the_kernels_order_saves_and_leaves_the_gpu_in_the_formats_own(monkeypatch):
    """What a GPU's kernels ask for, on the CPU, with the reference behind it."""
    plain = make(128, 64, frozen="nvfp4")
    monkeypatch.setattr(frozen_page, "kernels_of", _kernels_on_tiles)
    packed = make(128, 64, frozen="nvfp4")
    assert packed._form.packed
    assert packed.planes.shape != plain.planes.shape or not torch.equal(packed.planes, plain.planes)
    assert torch.equal(packed.weight, plain.weight)
    assert torch.equal(packed.state_dict()["planes"], plain.planes)
    loaded = FusedFP4Linear(128, 64)
    loaded.load_state_dict(plain.state_dict())
    assert torch.equal(loaded.planes, packed.planes)
    monkeypatch.undo()
    for moved in (pickle.loads(pickle.dumps(packed)), packed.to("cpu")):
        assert torch.equal(moved.planes, plain.planes)
        assert not moved._form.packed


def _kernels_on_tiles(device, format):
    from vbrt.kernels.cuda.e2m1 import linear as fp4_linear

    linear = Kernel("linear", "triton", fp4_linear.linear, page_order=fp4_linear.packing)
    return frozen_page._Kernels(linear, Kernel("decode_weight", "triton", fp4_linear.decode_weight))


# -- a model ----------------------------------------------------------------------------------------------------------


def test_quantize_freezes_every_such_layer_and_counts_them():
    torch.manual_seed(0)
    model = nn.Sequential(FusedFP4Linear(64, 64, activation="relu"), nn.Linear(64, 64), FusedFP4Linear(64, 8))
    model[2].quantize("mxfp4")
    assert vbrt.quantize(model, "nf4") == 1
    assert [layer.format for layer in (model[0], model[2])] == ["nf4", "mxfp4"]
    assert type(model[1]) is nn.Linear
    with pytest.raises(WrapError, match="all 2 FusedFP4Linear layers"):
        vbrt.quantize(model)
    assert vbrt.quantize(nn.Linear(2, 2)) == 0


def test_quantize_names_the_layer_it_cannot_encode_and_freezes_none():
    model = nn.ModuleDict({"up": FusedFP4Linear(16, 16), "down": FusedFP4Linear(16, 16)})
    model["down"].weight.data[0, 0] = float("inf")
    with pytest.raises(FormatError, match=r"down: nvfp4: .* 1 Inf"):
        vbrt.quantize(model)
    assert model["up"].format is None


def test_wrap_leaves_it_alone():
    model = nn.Sequential(FusedFP4Linear(64, 64), nn.Linear(64, 64)).eval()
    vbrt.quantize(model)
    with vbrt.wrap(model, "dense", weights={"min_parameters": 0}) as vb:
        vb(torch.randn(2, 64))
        assert type(model[0]) is FusedFP4Linear
        assert type(model[1]) is vbrt.VBLinear


@pytest.mark.gpu
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_gpu_computes_the_same(activation):
    layer = make(256, 384, activation=activation, frozen="nvfp4", dtype=torch.bfloat16)
    x = inputs(k=256, dtype=torch.bfloat16)
    with torch.no_grad():
        expected = layer(x)
        state = layer.state_dict()
        layer.cuda()
        torch.testing.assert_close(layer(x.cuda()).cpu(), expected, atol=2e-2, rtol=2e-2)
    assert torch.equal(layer.state_dict()["planes"].cpu(), state["planes"])
    assert torch.equal(layer.cpu().planes, state["planes"])


@pytest.mark.gpu
def test_a_gpu_computes_one_gradient_eagerly_and_compiled():
    layer = make(1024, 2048, bias=False, frozen="nvfp4", dtype=torch.bfloat16).cuda()
    x = torch.randn(1024, 1024, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn(1024, 2048, device="cuda", dtype=torch.bfloat16)
    (dx,) = torch.autograd.grad(layer(x), x, dy)
    (compiled,) = torch.autograd.grad(torch.compile(layer)(x), x, dy)
    assert torch.equal(dx, compiled)
    want = dy.double() @ layer.weight.double()
    assert (dx.double() - want).norm() < 3e-3 * want.norm()
