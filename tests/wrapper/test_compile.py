"""torch.compile: one graph, forward and backward, before and after materialize, resident and streamed."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests import forked
from tests.matrix import matrix
from tests.models import FORMATS, dtype_of, gpt2, llama, mlp, wrap, wrap_streamed
from vbrt.errors import WrapError

BACKEND = "aot_eager"  # traces forward and backward as inductor does, without its compiler


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def compiled(module):
    return torch.compile(module, fullgraph=True, backend=BACKEND)


@pytest.mark.sample(2)
@matrix(format=FORMATS, held=["shell", "materialized", "streamed"])
def test_a_compiled_model_computes_outputs_and_gradients_of_the_eager_one(format, held, tmp_path):
    model = mlp(depth=5, dtype=dtype_of(format))
    vb = wrap_streamed(model, format, tmp_path) if held == "streamed" else wrap(model, format)
    if held == "materialized":
        vb.materialize()
    got = []
    for run in (compiled(vb.module), vb.module):
        x = torch.linspace(-1, 1, 192, dtype=dtype_of(format)).reshape(3, 64).requires_grad_()
        for _ in range(2):
            y = run(x)
        y.square().sum().backward()
        got.append((y, x.grad, vb.module[0].bias.grad.clone()))
        vb.zero_grad()
    for one, other in zip(*got, strict=True):
        torch.testing.assert_close(one, other)
    assert all(layer.materialized for layer in vb.registry.values())
    assert vb.stats().layers["0"].forwards == 4
    vb.close()


def test_a_streamed_model_that_is_compiled_after_its_first_call_is_still_fetched_ahead(tmp_path):
    """Its hook marks no pass from then on."""
    vb = wrap_streamed(mlp(depth=12), "dense", tmp_path)
    x = torch.randn(2, 64)
    vb(x)
    run = compiled(vb.module)
    for _ in range(4):
        run(x)
    before = vb.stats().layers.values()
    for _ in range(3):
        run(x)
    after = vb.stats().layers.values()
    misses = sum(layer.misses for layer in after) - sum(layer.misses for layer in before)
    assert 0 < misses == sum(layer.prefetched for layer in after) - sum(layer.prefetched for layer in before)
    vb.close()


def test_layers_share_one_graph_however_many_there_are():
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(64, 64)

        def forward(self, x):
            return self.inner(x).relu()

    model, x = nn.Sequential(*[Block() for _ in range(12)]).eval(), torch.randn(2, 64)
    y = model(x)
    vb = wrap(model)
    for block in vb.module:
        block.compile(backend=count, fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(vb(x), y)
    assert len(graphs) == 1


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda vb: pickle.loads(pickle.dumps(vb))])
def test_a_copy_that_has_not_run_yet_can_be_compiled(copied):
    vb, x = wrap(mlp(depth=1)), torch.randn(2, 64)
    clone = copied(vb)
    torch.testing.assert_close(torch.compile(clone, fullgraph=True, backend=BACKEND)(x), vb.module(x))
    assert clone.module[0].materialized


def test_a_new_weight_is_used_without_compiling_again():
    vb, x = wrap(mlp(depth=1)), torch.randn(2, 64)
    run = compiled(vb.module)
    run(x)
    with torch.compiler.set_stance("fail_on_recompile"):
        vb.load_state_dict({"0.weight": torch.eye(64), "0.bias": torch.zeros(64)})
        torch.testing.assert_close(run(x), x.tanh())
        vb.module[0].weight = 2 * torch.eye(64)
        torch.testing.assert_close(run(x), (2 * x).tanh())


def test_reading_the_weight_is_part_of_the_graph():
    class Reader(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(64, 32)

        def forward(self, x):
            return F.linear(x, self.inner.weight) if self.inner.weight.dtype is x.dtype else x

    model, x = Reader().eval(), torch.randn(2, 64)
    y = model(x)
    vb = wrap(model).materialize()
    torch.testing.assert_close(compiled(vb.module)(x), y)


def test_a_compiled_model_under_autocast_computes_as_the_eager_one():
    vb, x = wrap(mlp()).materialize(), torch.randn(2, 64)
    with torch.autocast("cpu", torch.bfloat16):
        y, expected = compiled(vb.module)(x), vb.module(x)
    assert y.dtype is expected.dtype is torch.bfloat16
    torch.testing.assert_close(y, expected)


def gradient(run):
    return lambda x: torch.autograd.functional.hessian(lambda x: run(x).sin().sum(), x)


TRANSFORMS = {
    "vmap": torch.func.vmap,
    "grad": lambda run: torch.func.grad(lambda x: run(x).sin().sum()),
    "jvp": lambda run: lambda x: torch.func.jvp(run, (x,), (x.cos(),))[1],
    "hessian": lambda run: torch.func.hessian(lambda x: run(x).sin().sum()),
    "jacrev of jacrev": lambda run: torch.func.jacrev(torch.func.jacrev(lambda x: run(x).sin().sum())),
}


@pytest.mark.sample(3)
@matrix(transform=list(TRANSFORMS), format=["dense", "nvfp4"])
def test_a_transform_of_a_layer_gives_compiled_what_it_gives_the_plain_one(format, transform):
    vb, x = wrap(nn.Sequential(nn.Linear(16, 8)).eval(), format).materialize(), torch.randn(2, 16)
    plain = nn.Linear(16, 8)
    plain.load_state_dict({"weight": vb.module[0].weight, "bias": vb.module[0].bias})
    expected = TRANSFORMS[transform](plain)(x)
    torch.testing.assert_close(compiled(TRANSFORMS[transform](vb.module))(x), expected, atol=1e-5, rtol=1e-5)


def test_the_operator_has_every_derivative_by_itself():
    vb, x = wrap(mlp(depth=1)).materialize(), torch.randn(2, 64)
    handle = vb.module[0].handle
    weight = torch.Tensor(vb.module[0].weight)
    for transform in (*TRANSFORMS.values(), gradient):
        got = transform(lambda x: torch.ops.vbrt.linear(x, None, handle.token, 64))(x)
        torch.testing.assert_close(got, transform(lambda x: F.linear(x, weight))(x), atol=1e-5, rtol=1e-5)


def test_second_derivatives_of_a_graph_are_those_of_the_eager_model():
    vb, x = wrap(mlp(depth=1), "nvfp4").materialize(), torch.randn(2, 64)
    run = torch.compile(vb.module, fullgraph=True, backend="eager")
    torch.testing.assert_close(gradient(run)(x), gradient(vb.module)(x))


@pytest.mark.parametrize("format", ["dense", "nvfp4"])
def test_a_dtype_that_the_plain_layer_refuses_is_refused_compiled_too(format):
    vb = wrap(mlp(depth=1), format).materialize()
    with torch.no_grad(), pytest.raises(RuntimeError, match="dtype"):
        compiled(vb.module)(torch.randn(2, 64).half())


def test_a_weight_loaded_between_compiled_forward_and_backward_is_an_error():
    vb, x = wrap(mlp(depth=1)).materialize(), torch.randn(2, 64, requires_grad=True)
    loss = compiled(vb.module)(x).sum()
    vb.load_state_dict({"0.weight": torch.eye(64), "0.bias": torch.zeros(64)})
    with pytest.raises(WrapError, match="between forward and backward"):
        loss.backward()


def test_a_program_that_is_loaded_elsewhere_names_what_it_lacks_and_never_takes_another_models_layer(tmp_path):
    vb, x = wrap(mlp(depth=1), "nvfp4").materialize(), torch.randn(2, 64)
    program = torch.export.export(vb.module, (x,))
    torch.testing.assert_close(program.module()(x), vb.module(x))
    torch.export.save(program, tmp_path / "program.pt2")
    code = f"""
import torch, vbrt
from tests.models import mlp, wrap
other = [wrap(mlp(depth=1)).materialize() for _ in range(20)]
try:
    torch.export.load({str(tmp_path / "program.pt2")!r}).module()(torch.randn(2, 64))
except vbrt.errors.WrapError as error:
    print(error)
"""
    done = forked.run(code)
    assert "no longer exists in this process" in done.stdout and "unwrap()" in done.stdout, done.stderr


def test_dynamic_batches_compile_once_more_at_most():
    vb = wrap(mlp(depth=2)).materialize()
    run = torch.compile(vb.module, fullgraph=True, backend=BACKEND)
    run(torch.randn(2, 64)), run(torch.randn(3, 64))
    with torch.compiler.set_stance("fail_on_recompile"):
        for rows in (4, 7, 9):
            x = torch.randn(rows, 64)
            torch.testing.assert_close(run(x), vb.module(x))


@pytest.mark.sample(1)
@pytest.mark.parametrize("make", [llama, gpt2])
def test_a_whole_transformer_is_one_graph(make):
    vb = wrap(make(), "dense", keep_head=False)
    tokens = torch.arange(8)[None]
    with torch.no_grad():
        logits = compiled(vb.module)(tokens).logits
        torch.testing.assert_close(logits, vb.module(tokens).logits)


def test_an_unwrapped_model_compiles_anew_and_dense():
    vb, x = wrap(mlp()), torch.randn(2, 64)
    run = compiled(vb.module)
    y = run(x)
    model = vb.unwrap()
    torch.testing.assert_close(run(x), y)
    assert type(model[0]) is nn.Linear


def test_a_graph_of_layers_that_are_gone_says_so():
    vb, x = wrap(mlp(depth=1)), torch.randn(2, 64)
    handle = vb.module[0].handle
    token, out_features = handle.token, 64
    assert torch.ops.vbrt.linear(x, None, token, out_features).shape == (2, 64)
    vb.unwrap()
    del vb, handle
    with pytest.raises(WrapError, match="no longer exists in this process; compile or trace again"):
        torch.ops.vbrt.linear(x, None, token, out_features)


def test_the_ops_pass_torchs_own_checks():
    vb = wrap(mlp(depth=1)).materialize()
    handle, x = vb.module[0].handle, torch.randn(2, 64, requires_grad=True)
    bias = torch.randn(64, requires_grad=True)
    torch.library.opcheck(torch.ops.vbrt.linear, (x, bias, handle.token, 64))
    torch.library.opcheck(torch.ops.vbrt.linear_backward, (x.detach(), handle.token, 64))
    torch.library.opcheck(torch.ops.vbrt.weight, (handle.token, 64, 64, torch.float32, "cpu"))


@pytest.mark.sample(1)
@pytest.mark.parametrize("materialized", [False, True])
def test_another_weight_within_a_compiled_function_is_refused_by_name_and_the_layers_own_is_not(materialized):
    model = mlp(depth=2)
    own = dict(model.named_parameters())
    vb = wrap(model, "nvfp4")
    if materialized:
        vb.materialize()
    name = next(iter(vb.registry))
    x = torch.randn(3, vb.registry[name].in_features)

    def call(x, given):
        return torch.func.functional_call(model, given, (x,)) + model(x)

    for weight in (lambda: torch.zeros_like(own[f"{name}.weight"]), lambda: 2 * own[f"{name}.weight"]):
        with pytest.raises(torch._dynamo.exc.TorchDynamoException, match=f"WrapError: {name}: functional_call"):
            compiled(lambda x, weight=weight: call(x, {f"{name}.weight": weight()}))(x)
    given = {f"{name}.bias": torch.ones_like(own[f"{name}.bias"])} if materialized else dict(model.named_parameters())
    torch.testing.assert_close(compiled(lambda x: call(x, given))(x), call(x, given))
