"""VB layers on a CUDA device: as in tests/layers/modules/test_linear.py, with pages on the GPU or streamed to it."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import vbrt
from tests.models import fallbacks, mlp
from vbrt.formats import get_format

pytestmark = pytest.mark.gpu

WIDTH = 512


@pytest.fixture(params=["resident", "streamed"])
def how(request):
    return request.param


@pytest.fixture(params=["dense", "nvfp4", "exact"])
def format(request):
    return request.param


def wrap(model, format, how="resident"):
    settings = {
        "weights": {
            "format": "nvfp4" if format == "exact" else format,
            "fine": "exact" if format == "exact" else "none",
        },
        "compute": {"where": "device"},  # the CPU's products round otherwise
    }
    if how == "streamed":
        page = max(swap.page_bytes for swap in vbrt.make_plan(model, vbrt.load_config(settings)).swaps)
        settings["tiers"] = {"gpu": {"budget": 4 * page}}
    return vbrt.wrap(model, settings)


def inputs():
    torch.manual_seed(7)
    return torch.randn(3, WIDTH, device="cuda", dtype=torch.bfloat16)


def model():
    return mlp(width=WIDTH, dtype=torch.bfloat16)


def twin(vb):
    plain = model().cuda()
    plain.load_state_dict(vb.state_dict())
    return plain


def assert_same(y, want, format):
    """Bit for bit, where a layer computes as nn.Linear does; kernels of 4-bit weights add in another order."""
    if format == "nvfp4":
        assert (y - want).float().norm() < 5e-3 * want.float().norm()
    else:
        assert torch.equal(y, want)


def test_outputs_and_gradients_are_those_of_a_dense_layer(format, how):
    vb = wrap(model(), format, how).materialize()
    got = []
    for run in (vb, vb, twin(vb)):
        x = inputs().requires_grad_()
        y = run(x)
        y.float().square().sum().backward()
        got.append((y, x.grad))
    for y, grad in got[:2]:
        assert_same(y, got[2][0], format)
        assert (grad - got[2][1]).float().norm() < 1e-2 * grad.float().norm()
    assert torch.equal(got[0][0], got[1][0])
    assert torch.equal(got[0][0], model().cuda()(inputs())) or format == "nvfp4"


def test_weights_are_read_assigned_and_loaded_on_the_device(format, how):
    vb, x = wrap(model(), format, how), inputs()
    vb(x)
    layer = vb.module[0]
    assert layer.weight.device == x.device
    assert_same(layer(x), F.linear(x, layer.weight, layer.bias), format)
    layer.weight = torch.eye(WIDTH, dtype=torch.bfloat16)
    assert torch.equal(layer(x), x + layer.bias)
    layer.weight.data = 2 * torch.eye(WIDTH, dtype=torch.bfloat16, device="cuda")
    torch.testing.assert_close(layer(x), 2 * x + layer.bias)
    vb.load_state_dict(model().state_dict())
    assert_same(vb(x), twin(vb)(x), format)
    want = model()[0].weight
    if format == "nvfp4":  # as a CPU encodes it
        want = get_format(format).decode(get_format(format).encode(want), want.shape, want.dtype)
    assert torch.equal(layer.weight.cpu(), want)


def test_copies_pickles_and_unwrap_leave_the_device_right(format, how):
    vb, x = wrap(model(), format, how), inputs()
    y = vb(x)
    clone = copy.deepcopy(vb)
    assert torch.equal(clone(x), y)
    clone.close()
    unpickled = pickle.loads(pickle.dumps(vb))
    assert unpickled.device.type == "cpu" and unpickled.module[0].weight.device.type == "cpu"
    assert torch.equal(unpickled.module[0].weight, vb.module[0].weight.cpu())
    plain = vb.unwrap()
    assert {p.device.type for p in plain.parameters()} == {"cuda"} and type(plain[0]) is nn.Linear
    assert_same(plain(x), y, format)


@pytest.mark.parametrize("options", [{}, {"backend": "aot_eager"}], ids=str)
def test_compiled_layers_compute_what_eager_ones_do(how, options):
    vb, x = wrap(model(), "nvfp4", how).materialize(), inputs().requires_grad_()
    run = torch.compile(vb.module, fullgraph=True, **options)
    grads = []
    for call in (run, run, vb.module):
        y = call(x)
        y.float().square().sum().backward()
        grads.append((y.detach().clone(), x.grad.clone()))
        x.grad = None
    for compiled in grads[:2]:  # inductor keeps fp32 between bf16 operations
        torch.testing.assert_close(compiled, grads[2], atol=2e-2, rtol=2e-2)


def test_cuda_graphs_leave_the_layers_out(how):
    vb, x = wrap(model(), "nvfp4", how).materialize(), inputs()
    run = torch.compile(vb.module, fullgraph=True, mode="reduce-overhead")
    with torch.no_grad():
        for step in range(5):
            got = run(x + step).clone()
            torch.testing.assert_close(got, vb.module(x + step), atol=2e-2, rtol=2e-2)


def test_moving_a_wrapped_model_keeps_pages_where_the_tiers_put_them(how):
    vb, x = wrap(model(), "nvfp4", how), inputs()
    y = vb(x)
    held = vb.stats().tiers["gpu"].held_bytes
    vb.cuda()
    assert torch.equal(vb(x), y) and vb.stats().tiers["gpu"].held_bytes == held
    before = torch.cuda.memory_allocated()
    dense = sum(swap.dense_bytes for swap in vb.plan.swaps)
    vb.unwrap()
    assert torch.cuda.memory_allocated() - before > dense - held - (1 << 20)


def test_the_dense_weights_leave_the_gpu():
    torch.cuda.empty_cache()
    base = torch.cuda.memory_allocated()
    vb = wrap(model().cuda(), "nvfp4").materialize()
    held = torch.cuda.memory_allocated() - base
    assert held < 0.35 * vb.plan.dense_bytes
    vb.close()


@pytest.mark.parametrize("format", ["nf4", "quantile", "mxfp4", "mxint8"])
def test_other_formats_run_on_kernels_and_match_their_decoded_weight(format):
    vb, x = wrap(model(), format).materialize(), inputs()
    layer = vb.module[0]
    assert layer.handle.kernel == "triton" and not fallbacks(vb)
    torch.testing.assert_close(layer(x), F.linear(x, layer.weight, layer.bias), atol=2e-2, rtol=2e-2)
    run = torch.compile(layer, fullgraph=True, mode="reduce-overhead")
    with torch.no_grad():
        for step in range(4):
            torch.testing.assert_close(run(x + step).clone(), layer(x + step), atol=2e-2, rtol=2e-2)


def test_the_fp8_preset_rounds_long_inputs_and_no_others():
    vb = vbrt.wrap(model(), "fp8").materialize()
    layer = vb.module[0]
    x = torch.randn(1024, WIDTH, device="cuda", dtype=torch.bfloat16)
    exact = F.linear(x, layer.weight, layer.bias)
    error = ((layer(x) - exact).double().norm() / exact.double().norm()).item()
    assert error < 3e-3 if fallbacks(vb) else 1e-2 < error < 4e-2
    torch.testing.assert_close(layer(x[:64]), exact[:64], atol=2e-2, rtol=2e-2)


def test_a_large_weight_in_host_memory_comes_through_the_relay_as_it_is(monkeypatch):
    monkeypatch.setattr("vbrt.layers.weights.weight_encoding._UPLOADED_BYTES", 1)
    monkeypatch.setattr("vbrt.tiers.storage.pinned_staging._CHUNK_BYTES", 1000)  # several chunks and a rest
    vb = wrap(model(), "exact").materialize()
    relay = vb.stack.levels[0].relay
    assert relay._mine.chunks
    for layer, plain in zip(vb.module, model(), strict=True):
        if isinstance(plain, nn.Linear):
            assert torch.equal(layer.weight.cpu(), plain.weight)
    vb.close()


def test_input_on_another_device_runs_and_is_announced():
    vb = wrap(model(), "nvfp4").materialize()
    layer = vb.module[0]
    layer.bias = None
    x = inputs().cpu()
    torch.testing.assert_close(layer(x), layer(x.cuda()).cpu(), atol=0.05, rtol=0.05)
    assert "input on cpu" in vb.stats().fallbacks[0]
