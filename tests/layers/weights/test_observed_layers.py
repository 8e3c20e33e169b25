"""What autograd, tracers, modes and transforms of torch do to a VB layer: each gives what it gives with the plain layer
that holds the decoded weight. Kernels are those that are installed."""

import copy
import itertools

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from tests.matrix import matrix
from tests.models import wrap, wrap_streamed
from vbrt.blocks import FusedFP4Linear
from vbrt.errors import WrapError
from vbrt.layers import VBLayer

K, N = 64, 32
KINDS = {
    "Linear": ("torch.nn", (K, N)),
    "Conv1D": ("transformers.pytorch_utils", (N, K)),
    "FalconLinear": ("transformers.models.falcon.modeling_falcon", (K, N)),
    "EsmFoldLinear": ("transformers.models.esm.modeling_esmfold", (K, N)),
}


def layer_of(kind, dtype):
    module, features = KINDS[kind]
    if module != "torch.nn":
        pytest.importorskip("transformers")
    torch.manual_seed(0)
    layer = getattr(__import__(module, fromlist=[kind]), kind)(*features)
    with torch.no_grad():
        layer.weight.normal_(), layer.bias.normal_()
    return nn.Sequential(layer).to(dtype).eval()


def pair(kind, format, holding, path):
    """(a wrapped layer, the plain one with its decoded weight, an input)."""
    dtype = torch.bfloat16 if format == "exact" else torch.float32
    other, twin = wrap(layer_of(kind, dtype), format).materialize(), layer_of(kind, dtype)
    twin.load_state_dict(other.state_dict())
    twin[0].weight.requires_grad_(False)
    model = layer_of(kind, dtype)
    if holding == "streamed":
        vb = wrap_streamed(nn.ModuleList([model, *(layer_of(kind, dtype) for _ in range(5))]), format, path)
    else:
        vb = wrap(model, format)
    if holding != "shell":
        vb.materialize()
    torch.manual_seed(1)
    return model, twin, torch.randn(3, K, dtype=dtype)


HELD = {
    "-".join(held): held
    for held in [
        ("Linear", "dense", "shell"),
        ("Linear", "dense", "resident"),
        ("Linear", "nvfp4", "resident"),
        ("Linear", "nvfp4", "streamed"),
        ("Linear", "exact", "streamed"),
        ("Linear", "quantile", "shell"),
        ("Conv1D", "nvfp4", "shell"),
        ("FalconLinear", "dense", "resident"),
        ("EsmFoldLinear", "nvfp4", "shell"),
    ]
}


@pytest.fixture(params=HELD.values(), ids=HELD)
def both(request, tmp_path):
    return pair(*request.param, tmp_path)


def check_same(got, expected):
    if isinstance(expected, (tuple, list)):
        for one, other in zip(got, expected, strict=True):
            check_same(one, other)
        return
    assert got.dtype is expected.dtype and got.shape == expected.shape
    bound = (1e-4 if expected.dtype is torch.float32 else 4e-2) * max(1.0, expected.detach().abs().max().item())
    torch.testing.assert_close(got.detach(), expected.detach(), rtol=0, atol=bound)


def total(model):
    return lambda x: model(x).sin().sum()


def under_no_grad(use):
    def run(model, x):
        with torch.no_grad():
            return use(model, x)

    return run


# -- derivatives and transforms ----------------------------------------------------------------------------------------


def gradient_penalty(model, x):
    x = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(total(model)(x), x, create_graph=True)
    gradient.square().sum().backward()
    return x.grad, model[0].bias.grad


def dual_numbers(model, x):
    with forward_ad.dual_level():
        return tuple(t.clone() for t in forward_ad.unpack_dual(model(forward_ad.make_dual(x, x.cos()))))


def forward_over_reverse(model, x):
    x = x.clone().requires_grad_()
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(model(forward_ad.make_dual(x, x.detach().cos())).sin()).tangent
        return torch.autograd.grad(tangent.sum(), x)


def vjp(model, x):
    y, back = torch.func.vjp(model, x)
    return y, back(y.cos())


def with_bias(model, x):
    return lambda bias, x=x: functional_call(model, {"0.bias": bias}, (x,))


DERIVATIVES = {
    "hessian": lambda model, x: torch.autograd.functional.hessian(total(model), x),
    "gradient penalty": gradient_penalty,
    "func.hessian": lambda model, x: torch.func.hessian(total(model))(x),
    "jacrev": lambda model, x: torch.func.jacrev(model)(x),
    "jacfwd": lambda model, x: torch.func.jacfwd(model)(x),
    "jvp": lambda model, x: torch.func.jvp(model, (x,), (x.cos(),)),
    "vjp": vjp,
    "dual numbers": dual_numbers,
    "dual numbers, no grad": under_no_grad(dual_numbers),
    "forward over reverse": forward_over_reverse,
    "vmap": lambda model, x: torch.func.vmap(model)(x),
    "vmap, no grad": under_no_grad(lambda model, x: torch.func.vmap(model)(x)),
    "vmap of the last dimension": lambda model, x: torch.func.vmap(model, in_dims=2)(torch.stack([x, 2 * x], 2)),
    "vmap of grad": lambda model, x: torch.func.vmap(torch.func.grad(lambda row: model(row).sin().sum()))(x),
    "grad of a bias": lambda model, x: torch.func.grad(lambda bias: with_bias(model, x)(bias).sin().sum())(
        model[0].bias.detach()
    ),
    "vmap of biases": lambda model, x: torch.func.vmap(with_bias(model, x))(model[0].bias.detach().expand(2, N)),
    "vmap of biases and inputs": lambda model, x: torch.func.vmap(with_bias(model, x))(
        model[0].bias.detach().expand(len(x), N), x
    ),
    "functionalize": lambda model, x: torch.func.functionalize(model)(x),
    "functionalize of grad": lambda model, x: torch.func.functionalize(torch.func.grad(total(model)))(x),
}


@matrix(use=list(DERIVATIVES), both=HELD, turns=2, indirect=("both",))
def test_every_derivative_and_transform_is_that_of_the_plain_layer(use, both):
    model, twin, x = both
    check_same(DERIVATIVES[use](model, x), DERIVATIVES[use](twin, x))


def test_a_second_derivative_keeps_no_weight_and_counts_one_forward(tmp_path):
    model, _, x = pair("Linear", "nvfp4", "resident", tmp_path)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        gradient_penalty(model, x)
    assert max(kept) < N * K and model[0].handle.forwards == 1


# -- tracers and modes -------------------------------------------------------------------------------------------------


def traced(model, x):
    trace = torch.jit.trace(model, x)
    return trace(x.roll(1, 0)), trace(x)


def trained_trace(model, x):
    trace, x = torch.jit.trace(model, x), x.clone().requires_grad_()
    trace(x).sin().sum().backward()
    return x.grad


def made_fx(mode):
    def run(model, x):
        graph = make_fx(model, tracing_mode=mode, _allow_non_fake_inputs=True)(x)
        return graph(x.roll(1, 0)), graph(x)

    return run


def fx(model, x):
    graph = torch.fx.symbolic_trace(model)
    if isinstance(model[0], VBLayer):
        assert graph.get_submodule("0") is model[0]
    return graph(x)


class Watch(TorchDispatchMode):
    """Sees everything, changes nothing."""

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        return op(*args, **kwargs or {})


def watched(model, x):
    x = x.clone().requires_grad_()
    with Watch():
        total(model)(x).backward()
    return x.grad


def watched_forward(model, x):
    with Watch():
        return model(x)


def exported(strict):
    return lambda model, x: torch.export.export(model, (x,), strict=strict).module()(x)


TRACERS = {
    "jit.trace": traced,
    "jit.trace, no grad": under_no_grad(traced),
    "jit.trace, backward": trained_trace,
    **{f"make_fx, {mode}": made_fx(mode) for mode in ("real", "fake", "symbolic")},
    **{f"make_fx, {mode}, no grad": under_no_grad(made_fx(mode)) for mode in ("real", "fake", "symbolic")},
    "make_fx of a hessian": lambda model, x: make_fx(torch.func.hessian(total(model)))(x)(x.roll(1, 0)),
    "fx": fx,
    "fx, no grad": under_no_grad(fx),
    "a dispatch mode": watched,
    "a dispatch mode, no grad": under_no_grad(watched_forward),
    "export": exported(strict=False),
    "export, strict": exported(strict=True),
}


@pytest.mark.sample(20)
@matrix(use=list(TRACERS), both=HELD, turns=2, indirect=("both",))
def test_every_tracer_and_mode_sees_what_the_plain_layer_computes(use, both):
    model, twin, x = both
    check_same(TRACERS[use](model, x), TRACERS[use](twin, x))


@pytest.mark.parametrize("trace", [lambda model, x: torch.jit.trace(model, x), lambda model, x: make_fx(model)(x)])
@pytest.mark.parametrize("format", ["dense", "nvfp4"])
def test_a_trace_holds_no_page_and_follows_the_layer_to_a_new_weight(format, trace, tmp_path):
    model, _, x = pair("Linear", format, "resident", tmp_path)
    with torch.no_grad():
        graph = trace(model, x)
        model.load_state_dict({"0.weight": torch.eye(N, K), "0.bias": torch.zeros(N)})
        model.load_state_dict({"0.weight": torch.zeros(N, K), "0.bias": torch.zeros(N)})  # memory is used again
        assert not graph(x).any()


def test_fake_tensors_make_no_pages(tmp_path):
    from torch._subclasses.fake_tensor import FakeTensorMode

    model, twin, x = pair("Linear", "nvfp4", "shell", tmp_path)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert model(mode.from_tensor(x)).shape == (3, N)
    check_same(model(x), twin(x))


def test_torch_jit_script_is_refused_by_name(tmp_path):
    model, _, _ = pair("Linear", "dense", "resident", tmp_path)
    with pytest.raises(WrapError, match=r"^0: torch\.jit\.script.*unwrap"):
        torch.jit.script(model)


@pytest.mark.sample(12)
@pytest.mark.parametrize("tensor", ["negated", "zero", "subclass", "jagged"])
def test_an_input_that_is_not_its_memory_is_read_as_the_plain_layer_reads_it(tensor, both):
    class Mine(torch.Tensor):
        pass

    model, twin, x = both
    if tensor == "jagged" and model[0].handle.spec.transposed:
        pytest.skip("a Conv1D takes none")
    given = {
        "negated": torch.complex(x.float(), x.float()).conj().imag.to(x.dtype),
        "subclass": x.as_subclass(Mine),
        "zero": torch._efficientzerotensor(x.shape, dtype=x.dtype),
        "jagged": torch.nested.nested_tensor([x, x[:1]], layout=torch.jagged),
    }[tensor]
    with torch.no_grad():
        got, expected = model(given), twin(given)
    assert type(got) is type(expected)
    if tensor == "jagged":
        got, expected = got.values(), expected.values()
    check_same(torch.Tensor(got.float()), torch.Tensor(expected.float()))


def test_a_default_device_is_for_new_tensors_only(both):
    model, twin, x = both
    with torch.no_grad():
        expected = twin(x)
        with torch.device("meta"):
            check_same(model(x), expected)


# -- functional_call ---------------------------------------------------------------------------------------------------


def called_with_a_weight(model, x):
    weight = torch.linspace(-1, 1, N * K, dtype=x.dtype).reshape(model[0].weight.shape).requires_grad_()
    y = functional_call(model, {"0.weight": weight}, (x,))
    y.sin().sum().backward()
    return y, weight.grad


def mapped_over_weights(model, x):
    weights = torch.stack([torch.ones_like(model[0].weight).detach() * i for i in range(3)])
    return torch.func.vmap(lambda weight: functional_call(model, {"0.weight": weight}, (x,)))(weights)


def grad_of_a_weight(model, x):
    loss = lambda weight: functional_call(model, {"0.weight": weight}, (x,)).sin().sum()  # noqa: E731  # names it
    return torch.func.grad(loss)(torch.ones_like(model[0].weight).detach())


@pytest.mark.sample(12)
@pytest.mark.parametrize(
    "use", [called_with_a_weight, mapped_over_weights, grad_of_a_weight, under_no_grad(mapped_over_weights)]
)
def test_functional_call_computes_with_the_weight_it_is_given_and_the_layer_keeps_its_own(use, both):
    model, twin, x = both
    check_same(use(model, x), use(twin, x))
    check_same(model(x), twin(x))
    assert model[0].materialized and model[0]._parameters["weight"] is None


def test_functional_call_gives_a_weight_to_all_tied_layers(tmp_path):
    model = nn.Sequential(nn.Linear(K, K), nn.Linear(K, K)).eval()
    model[1].weight = model[0].weight
    twin, x, given = copy.deepcopy(model), torch.randn(2, K), {"1.weight": torch.eye(K).mul(3)}
    vb = wrap(model).materialize()
    check_same(functional_call(vb.module, given, (x,)), functional_call(twin, given, (x,)))
    check_same(vb(x), twin(x))


def test_functional_call_with_the_layers_own_parameters_sees_later_writes_to_them(tmp_path):
    model, twin, x = pair("Linear", "dense", "shell", tmp_path)
    own = model.state_dict(keep_vars=True)
    check_same(functional_call(model, dict(own), (x,)), twin(x))
    with torch.no_grad():
        own["0.weight"].mul_(2), twin[0].weight.mul_(2)
    check_same(functional_call(model, dict(own), (x,)), twin(x))
    check_same(model(x), twin(x))


def test_a_copied_parameter_is_another_weight(tmp_path):
    model, twin, x = pair("Linear", "nvfp4", "shell", tmp_path)
    copied = copy.deepcopy(dict(model.state_dict(keep_vars=True)))
    with torch.no_grad():
        copied["0.weight"].zero_()
    check_same(functional_call(model, copied, (x,)), twin[0].bias.expand(3, N))
    check_same(model(x), twin(x))


# -- autocast and dtypes -----------------------------------------------------------------------------------------------


def outcome(model, x):
    """What a forward and backward give, or the kind of what they raise."""
    try:
        y = model(x)
    except RuntimeError as error:
        return type(error)
    if not y.requires_grad:
        return y
    y.float().square().sum().backward()
    return y, x.grad


DTYPES = (torch.float32, torch.bfloat16, torch.float64)


@pytest.mark.parametrize("autocast", [torch.bfloat16, torch.float16, None], ids=str)
@pytest.mark.parametrize("format", ["dense", "nvfp4", "exact", "nf4"])
def test_dtypes_are_those_of_the_plain_layer_with_and_without_autocast(format, autocast, tmp_path):
    model, twin, _ = pair("Linear", format, "resident", tmp_path)
    for dtype, rows, grad in itertools.product(DTYPES, (1, 3, 70), (True, False)):
        x, results = torch.randn(rows, K).to(dtype), []
        for layer in (model, twin):
            on = torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None)
            with on, torch.set_grad_enabled(grad):
                results.append(outcome(layer, x.clone().requires_grad_(grad)))
        if isinstance(results[1], type):
            assert results[0] is results[1]
        else:
            check_low_precision(*results)


def check_low_precision(got, expected):
    for one, other in zip(got, expected, strict=True) if isinstance(expected, tuple) else [(got, expected)]:
        assert one.dtype is other.dtype and one.shape == other.shape
        torch.testing.assert_close(one.float(), other.float(), rtol=0, atol=0.03 * other.abs().max().item())


@pytest.mark.parametrize("autocast", [True, False])
@pytest.mark.parametrize("format", ["dense", "nvfp4"])
def test_a_bias_of_another_dtype_is_taken_as_by_the_plain_layer(format, autocast, tmp_path):
    model, twin, x = pair("Linear", format, "resident", tmp_path)
    results = []
    for layer in (model, twin):
        layer[0].bias = nn.Parameter(layer[0].bias.detach().half())
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            results.append(outcome(layer, x.clone().requires_grad_()))
    if autocast:
        check_low_precision(*results)
    else:
        assert results == [RuntimeError, RuntimeError]


# -- in place ----------------------------------------------------------------------------------------------------------


def write_in_place(model, x):
    x = x[None].clone().requires_grad_()
    y = model(x)
    y.mul_(2)
    y[:, [0]] += x.detach()[:, [0], :N]
    torch.relu_(y).sin().sum().backward()
    return y, x.grad


def write_where_nothing_trained(model, x):
    delta = torch.ones(1, 1, N, dtype=x.dtype, requires_grad=True)
    y = model.requires_grad_(False)(x[None])
    y[:, [0]] += delta
    y.sin().sum().backward()
    return y, delta.grad


@pytest.mark.sample(9)
@pytest.mark.parametrize("use", [write_in_place, write_where_nothing_trained])
def test_outputs_can_be_written_to_in_place(use, both):
    model, twin, x = both
    check_same(use(model, x), use(twin, x))


# -- checkpointing and hooks -------------------------------------------------------------------------------------------


def checkpointed(model, x):
    gradients = []
    for reentrant in (True, False):
        x = x.detach().clone().requires_grad_()
        checkpoint(model, x, use_reentrant=reentrant).sin().sum().backward()
        gradients.append(x.grad)
    return gradients


def hooked(model, x):
    seen, layer = [], model[0]
    hooks = [
        layer.register_full_backward_hook(lambda module, into, out: seen.extend([*into, *out])),
        layer.register_forward_hook(lambda module, args, out: out * 2),
        layer.register_forward_pre_hook(lambda module, args: (args[0] * 3,)),
    ]
    x = x.clone().requires_grad_()
    total(model)(x).backward()
    for hook in hooks:
        hook.remove()
    return *seen, x.grad


@pytest.mark.sample(9)
@pytest.mark.parametrize("use", [checkpointed, hooked])
def test_checkpointing_and_hooks_see_the_plain_layers_gradients(use, both):
    model, twin, x = both
    check_same(use(model, x), use(twin, x))


# -- FusedFP4Linear ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "use",
    [*DERIVATIVES.values(), *TRACERS.values(), write_in_place, checkpointed, hooked],
    ids=[*DERIVATIVES, *TRACERS, "in place", "checkpoints", "hooks"],
)
def test_a_frozen_building_block_does_what_the_plain_layer_does(use):
    torch.manual_seed(0)
    frozen, twin, x = FusedFP4Linear(K, N).eval(), nn.Linear(K, N).eval(), torch.randn(3, K)
    frozen.quantize()
    twin.load_state_dict({"weight": frozen.weight, "bias": frozen.bias})
    twin.weight.requires_grad_(False)
    check_same(use(nn.Sequential(frozen), x), use(nn.Sequential(twin), x))
