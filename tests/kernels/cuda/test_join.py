import copy
import functools
import logging
import operator
import pickle
import weakref

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from torch._inductor.decomposition import select_decomp_table
from torch.fx import Graph, GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

import vbrt
from tests.kernels.cuda.gpu_cases import error, poison, tiled
from vbrt.errors import KernelError
from vbrt.formats import WeightPlanes, get_format
from vbrt.formats.page import new_page, pack, unpack
from vbrt.kernels import reference
from vbrt.kernels.cuda.e2m1 import fused as fused_linear
from vbrt.kernels.cuda.e2m1 import linear as fp4_linear
from vbrt.kernels.cuda.e2m1.launch_table import fused_limit
from vbrt.kernels.cuda.e2m1.tiles import TILES, pack_tiles, page_of, parts_of, tile_layout
from vbrt.kernels.cuda.graph_pass import JoinSiblings, wanted_guards
from vbrt.layers import fixed, linear
from vbrt.layers.graphs import GraphTiles, show_to_graphs

ONE, SEVERAL = torch.ops.vbrt.fp4_linear.default, torch.ops.vbrt.fp4_linears.default
GATED, NORMED = torch.ops.vbrt.fp4_gated.default, torch.ops.vbrt.normed_sum.default
RESIDUAL = torch.ops.vbrt.fp4_residual.default


def graph_of(layers, tokens=1, k=256):
    """A graph of `fp4_linear` calls; layers are (input, n, bias, activation)."""
    graph, xs = Graph(), {}
    for name in dict.fromkeys(layer[0] for layer in layers):
        xs[name] = graph.placeholder(name)
        xs[name].meta["val"] = torch.empty(1, tokens, k, device="meta")
    weights = [(graph.placeholder(f"tiles{i}"), graph.placeholder(f"scale{i}")) for i in range(len(layers))]
    calls = []
    for (name, n, bias, activation), (tiles, scale) in zip(layers, weights, strict=True):
        added = xs[name] if bias else None
        call = graph.call_function(ONE, (xs[name], tiles, scale, added, "nvfp4", n, k, activation))
        call.meta["val"] = torch.empty(1, tokens, n, device="meta")
        calls.append(call)
    graph.output(tuple(calls))
    return graph


def joined(graph):
    JoinSiblings()(graph)
    graph.lint()
    several, rest = ([node for node in graph.nodes if node.target is op] for op in (SEVERAL, ONE))
    return several, rest


def test_layers_on_one_input_become_one_call_with_the_outputs_in_place():
    graph = graph_of([("x", 64, False, "none"), ("x", 16, False, "none"), ("x", 32, False, "none")])
    (call,), rest = joined(graph)
    assert not rest and call.args[3:] == ("nvfp4", [64, 16, 32], 256)
    assert [str(tiles) for tiles in call.args[1]] == ["tiles0", "tiles1", "tiles2"]
    (outputs,) = next(node for node in graph.nodes if node.op == "output").args
    assert [(node.target, node.args) for node in outputs] == [(operator.getitem, (call, i)) for i in range(3)]
    assert [node.meta["val"].shape[-1] for node in outputs] == [64, 16, 32]
    GraphModule({}, graph).recompile()


def test_a_launch_takes_three_layers_and_only_those_of_one_input():
    plain = (False, "none")
    several, rest = joined(graph_of([*[("x", 16, *plain)] * 7, ("y", 16, *plain), ("z", 16, *plain)]))
    assert [len(call.args[1]) for call in several] == [3, 3] and len(rest) == 3


@pytest.mark.parametrize("odd", [("x", 16, True, "none"), ("x", 16, False, "silu"), ("y", 16, False, "none")])
def test_a_bias_an_activation_or_another_input_keeps_its_launch(odd):
    assert joined(graph_of([("x", 16, False, "none"), odd]))[0] == []


def test_many_tokens_keep_their_launches():
    two = [("x", 16, False, "none")] * 2
    assert len(joined(graph_of(two, tokens=8))[0]) == 1
    assert len(joined(graph_of(two, tokens=9))[0]) == 0


def test_a_weight_that_is_made_in_between_is_left_alone():
    graph = graph_of([("x", 16, False, "none"), ("x", 16, False, "none")])
    _, second = (node for node in graph.nodes if node.target is ONE)
    with graph.inserting_before(second):
        made = graph.call_function(operator.neg, (second.args[1],))
    second.update_arg(1, made)
    assert joined(graph)[0] == []


def test_compile_takes_the_options():
    options = vbrt.compile_options("reduce-overhead")
    assert options["triton.cudagraphs"] is True
    torch.compile(lambda x: x + 1, options=options)  # refuses what it does not know
    assert JoinSiblings().uuid() == JoinSiblings().uuid()


def test_inductor_is_told_of_operators_that_are_put_into_a_graph(monkeypatch):
    from torch._inductor.lowering import lowerings

    for op in (ONE, SEVERAL):
        monkeypatch.delitem(lowerings, op, raising=False)
    graph = graph_of([("x", 16, False, "none"), ("x", 16, False, "none"), ("y", 16, False, "none")])
    JoinSiblings()(graph)
    called = {node.target for node in graph.nodes if node.op == "call_function"}
    assert called == {ONE, SEVERAL, operator.getitem} and {ONE, SEVERAL} <= lowerings.keys()


@torch.no_grad()
def test_inductor_is_told_of_operators_that_a_model_calls(kernel_on_cpu, monkeypatch):
    from torch._inductor import exc
    from torch._inductor.lowering import lowerings

    said = []
    monkeypatch.delitem(lowerings, ONE, raising=False)
    monkeypatch.setattr(exc.OperatorIssue, "operator_str", lambda target, *_: said.append(target) or str(target))
    torch._logging.set_logs(inductor=logging.INFO)  # makes the text that torch 2.11 makes anyhow
    try:
        layer, x = torch.nn.Linear(128, 256, bias=False), torch.randn(3, 128).bfloat16()
        vb = wrapped(torch.nn.Sequential(layer))
        want = layer(x)
        show(layer)
        torch.testing.assert_close(torch.compile(layer)(x), want, rtol=2e-2, atol=2e-2)
    finally:
        torch._logging.set_logs()
        vb.close()
    assert ONE in lowerings and not said


# --- gate and up ------------------------------------------------------------------------------------------------------


def traced(fn, tokens=1, n=256, k=128, dtype=torch.bfloat16):
    """The graph of fn(linear, x, first tiles, second tiles) as inductor decomposes it, after the pass."""

    def linear(x, tiles, activation="none", bias=None):
        return ONE(x, tiles, None, bias, "nvfp4", n, k, activation)

    tiles = [torch.zeros(n // 16 * (k // 128) * 288 + 1, dtype=torch.int32) for _ in range(2)]
    x = torch.zeros(1, tokens, k, dtype=dtype)
    trace = make_fx(functools.partial(fn, linear), select_decomp_table(), tracing_mode="fake")
    with torch.no_grad():
        graph = trace(x, *tiles).graph
    JoinSiblings()(graph)
    graph.lint()
    return graph


def targets(graph):
    return [node.target for node in graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu"])
@pytest.mark.parametrize("tokens", [1, 9, 16])
def test_a_gate_and_what_it_gates_become_one_call(activation, tokens):
    act = reference.ACTIVATIONS[activation]
    for fn in (lambda linear, x, a, b: act(linear(x, a)) * linear(x, b),
               lambda linear, x, a, b: linear(x, b) * act(linear(x, a))):  # fmt: skip
        graph = traced(fn, tokens)
        x, a, b = graph.find_nodes(op="placeholder")
        (call,) = [node for node in graph.nodes if node.op == "call_function"]
        assert call.target is GATED and call.args == (x, a, None, b, None, "nvfp4", 256, 128, activation)
        assert graph.output_node().all_input_nodes == [call] and call.meta["val"].shape == (1, tokens, 256)


UNGATED = {
    "a gate that is read again": lambda linear, x, a, b: ((g := linear(x, a)), F.silu(g) * linear(x, b)),
    "an activation that is read again": lambda linear, x, a, b: ((s := F.silu(linear(x, a))), s * linear(x, b)),
    "an up that is read again": lambda linear, x, a, b: ((u := linear(x, b)), F.silu(linear(x, a)) * u),
    "one layer": lambda linear, x, a, b: F.silu(g := linear(x, a)) * g,
    "two inputs": lambda linear, x, a, b: F.silu(linear(x, a)) * linear(-x, b),
    "another activation": lambda linear, x, a, b: torch.tanh(linear(x, a)) * linear(x, b),
    "two activations": lambda linear, x, a, b: F.silu(linear(x, a)) * linear(x, b, "silu"),
    "a bias": lambda linear, x, a, b: F.silu(linear(x, a)) * linear(x, b, "none", x.new_zeros(256)),
    "a sum": lambda linear, x, a, b: F.silu(linear(x, a)) + linear(x, b),
}


@pytest.mark.parametrize("fn", UNGATED.values(), ids=UNGATED)
def test_what_is_no_gated_pair_keeps_its_calls(fn):
    assert GATED not in targets(traced(fn))


@pytest.mark.parametrize(
    ("tokens", "n", "dtype", "left"),
    [(17, 256, torch.bfloat16, [ONE, ONE]), (1, 112, torch.bfloat16, [SEVERAL]), (9, 112, torch.bfloat16, [ONE, ONE]),
     (16, 256, torch.float16, [ONE, ONE])],
)  # fmt: skip
def test_a_gated_pair_is_one_launch_only_where_that_is_fastest(tokens, n, dtype, left):
    graph = traced(lambda linear, x, a, b: F.silu(linear(x, a)) * linear(x, b), tokens, n, dtype=dtype)
    assert [target for target in targets(graph) if target in (ONE, SEVERAL, GATED)] == left


def test_what_reads_the_same_input_as_a_gated_pair_is_joined_beside_it():
    def parallel(linear, x, a, b):
        return linear(x, a), linear(x, b), F.silu(linear(x, a)) * linear(x, b)

    assert sorted(map(str, targets(traced(parallel)))) == sorted(map(str, [GATED, SEVERAL, *[operator.getitem] * 2]))


@torch.no_grad()
def test_inductor_runs_the_gated_pair(kernel_on_cpu):
    class Gated(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.gate, self.up = (torch.nn.Linear(128, 256, bias=False) for _ in range(2))

        def forward(self, x):
            return F.silu(self.gate(x)) * self.up(x)

    model, x = Gated(), torch.randn(1, 3, 128).bfloat16()
    vb = wrapped(model)
    want = model(x)
    for layer in (model.gate, model.up):
        show(layer)
    got, ops = ran(torch.compile(model, options=vbrt.compile_options()), x)
    assert set(ops) == {"vbrt::fp4_gated"}
    torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)
    vb.close()


# --- a residual sum and its norm --------------------------------------------------------------------------------------


def written_out(x, gain, eps=1e-6):
    """As in Hugging Face's models."""
    wide = x.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return gain * wide.to(x.dtype)


def by_torch(x, gain, eps=1e-6):
    return F.rms_norm(x, gain.shape, gain, eps)


def normed(fn, shape=(1, 1, 128), dtype=torch.bfloat16, gain_dtype=torch.bfloat16):
    """The graph of fn(linear, x, residual, gain) as inductor gets it, after the pass."""

    def called(x, residual, gain, tiles):
        return fn(lambda x: ONE(x, tiles, None, None, "nvfp4", 256, 128, "none"), x, residual, gain)

    inputs = *(torch.zeros(shape, dtype=dtype) for _ in range(2)), torch.zeros(128, dtype=gain_dtype)
    tiles = torch.zeros(16 * 288 + 1, dtype=torch.int32)
    with torch.no_grad():
        graph = make_fx(called, select_decomp_table(), tracing_mode="fake")(*inputs, tiles).graph
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.add_.Scalar):
        node.target = torch.ops.aten.add.Scalar
    JoinSiblings()(graph)
    graph.lint()
    return graph


@pytest.mark.parametrize("norm", [written_out, by_torch])
@pytest.mark.parametrize("shape", [(1, 1, 128), (2, 8, 128), (16, 128)], ids=str)
def test_a_residual_sum_and_its_norm_become_one_call(norm, shape):
    def block(linear, x, residual, gain):
        total = x + residual
        return total * 2, linear(norm(total, gain, 3e-5))

    graph = normed(block, shape)
    x, residual, gain, _ = graph.find_nodes(op="placeholder")
    (call,) = graph.find_nodes(op="call_function", target=NORMED)
    assert call.args[:3] == (x, residual, gain) and call.args[3] == pytest.approx(3e-5)
    assert [value.shape for value in call.meta["val"]] == [shape] * 2
    total, y = graph.find_nodes(op="call_function", target=operator.getitem)
    assert (total.args, y.args) == ((call, 0), (call, 1))
    assert [node.target for node in total.users] == [torch.ops.aten.mul.Tensor]
    assert [node.target for node in y.users] == [ONE] and len(targets(graph)) == 5


UNNORMED = {
    "no sum": lambda linear, x, residual, gain: linear(written_out(x, gain)),
    "a number added": lambda linear, x, residual, gain: linear(written_out(x + 1.0, gain)),
    "a scaled sum": lambda linear, x, residual, gain: linear(written_out(torch.add(x, residual, alpha=2), gain)),
    "another gain": lambda linear, x, residual, gain: linear(written_out(x + residual, 1 + gain)),
    "statistics that are read": lambda linear, x, residual, gain: (
        wide := (x + residual).to(torch.float32),
        mean := wide.pow(2).mean(-1, keepdim=True),
        linear(gain * (wide * torch.rsqrt(mean + 1e-6)).to(x.dtype)),
    )[1:],
    "another norm": lambda linear, x, residual, gain: linear(F.layer_norm(x + residual, (128,), gain)),
    "no layer behind": lambda linear, x, residual, gain: (written_out(x + residual, gain), linear(x)),
}


@pytest.mark.parametrize("fn", UNNORMED.values(), ids=UNNORMED)
def test_what_is_no_norm_of_a_sum_is_left_alone(fn):
    graph = normed(fn)
    assert NORMED not in targets(graph) and ONE in targets(graph)


def test_a_norm_of_many_tokens_or_another_dtype_is_left_alone():
    def block(linear, x, residual, gain):
        return linear(written_out(x + residual, gain))

    assert NORMED in targets(normed(block, (16, 128)))
    assert NORMED not in targets(normed(block, (17, 128)))
    assert NORMED not in targets(normed(block, dtype=torch.float16, gain_dtype=torch.float16))
    assert NORMED not in targets(normed(block, gain_dtype=torch.float32))


@torch.no_grad()
def test_inductor_runs_the_norm_and_the_siblings_behind_it(kernel_on_cpu):
    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.gate, self.up = (torch.nn.Linear(128, 256, bias=False) for _ in range(2))
            self.norm, self.gain = torch.nn.RMSNorm(128, 1e-6), torch.nn.Parameter(torch.rand(128))

        def forward(self, x, residual):
            x = x + residual
            x = self.norm(x) + x
            y = written_out(x, self.gain)
            return x, F.silu(self.gate(y)) * self.up(y)

    model = Layer()
    vb = wrapped(model)
    x, residual = torch.randn(2, 1, 3, 128).bfloat16()
    want = model(x, residual)
    for layer in (model.gate, model.up):
        show(layer)
    got, ops = ran(torch.compile(model, options=vbrt.compile_options()), x, residual)
    assert ops == {"vbrt::normed_sum": 1, "vbrt::fp4_gated": 1}
    torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)
    vb.close()


# --- a norm that the layers around it share ---------------------------------------------------------------------------


def shared(fn, shape=(1, 1, 128), n=128):
    """The graph of fn(out, gate, up, x, residual, gain), three layers of [256 -> n] and [n -> 256], after the pass."""

    def called(x, residual, gain, *tiles):
        out = functools.partial(layer, tiles=tiles[0], n=n, k=256)
        gate, up = (functools.partial(layer, tiles=one, n=256, k=n) for one in tiles[1:])
        return fn(out, gate, up, x, residual, gain)

    def layer(x, *, tiles, n, k, bias=None):
        return ONE(x, tiles, None, bias, "nvfp4", n, k, "none")

    inputs = [torch.zeros(*shape[:-1], width, dtype=torch.bfloat16) for width in (256, n)]
    tiles = [torch.zeros(16 * 288 + 1, dtype=torch.int32) for _ in range(3)]
    with torch.no_grad():
        traced = make_fx(called, select_decomp_table(), tracing_mode="fake")
        graph = traced(*inputs, torch.zeros(n, dtype=torch.bfloat16), *tiles).graph
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.add_.Scalar):
        node.target = torch.ops.aten.add.Scalar
    JoinSiblings()(graph)
    graph.lint()
    return graph


def block(behind, norm=written_out, before=lambda out, x, residual: residual + out(x)):
    def run(out, gate, up, x, residual, gain):
        total = before(out, x, residual)
        return total, behind(gate, up, norm(total, gain, 3e-5))

    return run


BEHIND = {
    "a gated pair": (lambda gate, up, y: F.silu(gate(y)) * up(y), GATED),
    "siblings": (lambda gate, up, y: (gate(y), up(y)), SEVERAL),
    "one layer": (lambda gate, up, y: gate(y), SEVERAL),
}


@pytest.mark.parametrize("before", [lambda out, x, residual: residual + out(x), lambda out, x, r: out(x) + r])
@pytest.mark.parametrize("norm", [written_out, by_torch])
@pytest.mark.parametrize("behind", BEHIND)
def test_one_token_s_norm_is_computed_by_the_layers_around_it(behind, norm, before):
    behind, target = BEHIND[behind]
    graph = shared(block(behind, norm, before))
    (made,) = graph.find_nodes(op="call_function", target=RESIDUAL)
    (call,) = graph.find_nodes(op="call_function", target=target)
    x, residual, gain, tiles, *_ = graph.find_nodes(op="placeholder")
    assert made.args == (x, tiles, None, residual, gain, "nvfp4", 128, 256)
    y, squares = call.args[0], call.args[-2]
    assert (y.args, squares.args) == ((made, 1), (made, 2)) and call.args[-1] == pytest.approx(3e-5)
    assert squares.meta["val"].shape == (8,) and squares.meta["val"].dtype is torch.float32
    total, *_ = graph.output_node().all_input_nodes
    assert total.args == (made, 0) and not {ONE, NORMED} & set(targets(graph))


UNSHARED = {
    "no layer before it": block(BEHIND["siblings"][0], before=lambda out, x, residual: residual + x[..., :128]),
    "a layer with a bias": block(BEHIND["siblings"][0], before=lambda out, x, r: r + out(x, bias=r.view(-1))),
    "a layer that is read again": lambda out, gate, up, x, residual, gain: (
        h := out(x), gate(written_out(h + residual, gain))),
    "the layer added to itself": block(BEHIND["siblings"][0], before=lambda out, x, residual: (h := out(x)) + h),
    "a norm that is read otherwise": block(lambda gate, up, y: (y, gate(y), up(y))),
    "a layer behind with a bias": block(lambda gate, up, y: gate(y, bias=y.new_zeros(256))),
}  # fmt: skip


@pytest.mark.parametrize("fn", UNSHARED.values(), ids=UNSHARED)
def test_a_norm_with_anything_else_around_it_keeps_its_launch(fn):
    graph = shared(fn)
    assert RESIDUAL not in targets(graph) and NORMED in targets(graph)


def test_only_one_token_s_norm_of_whole_eights_is_shared():
    gated = block(BEHIND["a gated pair"][0])
    assert RESIDUAL in targets(shared(gated)) and RESIDUAL in targets(shared(gated, n=120))
    assert RESIDUAL not in targets(shared(gated, (1, 2, 256))) and RESIDUAL not in targets(shared(gated, n=124))


class Decoder(torch.nn.Module):
    """What stands around one norm and the next in a model like Llama."""

    first_norm = staticmethod(written_out)

    def __init__(self, k=1024, n=2048):
        super().__init__()
        self.out, self.down = torch.nn.Linear(k, k, bias=False), torch.nn.Linear(n, k, bias=False)
        self.gate, self.up = (torch.nn.Linear(k, n, bias=False) for _ in range(2))
        self.key, self.value = (torch.nn.Linear(k, k // 4, bias=False) for _ in range(2))
        self.gains = torch.nn.ParameterList(torch.rand(k) + 0.5 for _ in range(2))

    def forward(self, x, residual):
        x = residual + self.out(x)
        y = self.first_norm(x, self.gains[0])
        x = x + self.down(F.silu(self.gate(y)) * self.up(y))
        y = written_out(x, self.gains[1])
        return x, self.key(y), self.value(y)


@torch.no_grad()
def test_inductor_runs_layers_that_share_a_norm(kernel_on_cpu):
    class Layer(Decoder):
        first_norm = staticmethod(by_torch)

    model = Layer(128, 256)
    vb = wrapped(model)
    x, residual = torch.randn(2, 1, 1, 128).bfloat16()
    want = model(x, residual)
    for layer in (model.out, model.down, model.gate, model.up, model.key, model.value):
        show(layer)
    got, ops = ran(torch.compile(model, options=vbrt.compile_options()), x, residual)
    assert ops == {"vbrt::fp4_residual": 2, "vbrt::fp4_gated": 1, "vbrt::fp4_linears": 1}
    torch.testing.assert_close(got, want, rtol=4e-2, atol=4e-2)
    vb.close()


# --- what a compiled model checks at each call ------------------------------------------------------------------------


class Block(torch.nn.Module):
    def __init__(self, width=128):
        super().__init__()
        self.inner = torch.nn.Linear(width, width, bias=False)

    def forward(self, x):
        return self.inner(x).relu()


@pytest.fixture
def kernel_on_cpu():
    """Operators of ours as plain torch computes them."""

    def linear(x, tiles, scale, bias, format, n, k, activation):
        tiles, scale = fp4_linear.apart(tiles, scale, format, n, k)
        planes = WeightPlanes(format, (n, k), x.dtype, {TILES: tiles, "tensor_scale": scale})
        return reference.linear(x, fp4_linear._plain(planes), bias, activation)

    def gated(x, tiles, scale, other, other_scale, format, n, k, activation, squares=None, eps=0.0):
        x = divided(x, squares, eps)
        gate, up = ((tiles, scale, None, format, n, k, activation), (other, other_scale, None, format, n, k, "none"))
        return linear(x, *gate) * linear(x, *up)

    def linears(x, tiles, scales, format, ns, k, squares=None, eps=0.0):
        x, scales = divided(x, squares, eps), scales or [None] * len(ns)
        return [linear(x, t, s, None, format, n, k, "none") for t, s, n in zip(tiles, scales, ns, strict=True)]

    def divided(x, squares, eps):
        return x if squares is None else (x.float() * torch.rsqrt(squares.sum() / x.shape[-1] + eps)).to(x.dtype)

    def residual(x, tiles, scale, other, gain, format, n, k):
        total = linear(x, tiles, scale, None, format, n, k, "none") + other
        return total, total * gain, F.pad(total.flatten(), (0, -n % 16)).float().square().view(-1, 16).sum(1)

    def normed_sum(x, other, gain, eps):
        total = x + other
        return total, F.rms_norm(total, gain.shape, gain, eps)

    torch.compiler.reset()
    with torch.library._scoped_library("vbrt", "IMPL") as library:
        library.impl("normed_sum", normed_sum, "CPU")
        library.impl("fp4_linear", linear, "CPU")
        library.impl("fp4_gated", gated, "CPU")
        library.impl("fp4_linears", linears, "CPU")
        library.impl("fp4_residual", residual, "CPU")
        yield
    torch.compiler.reset()


def wrapped(model):
    model = model.to(torch.bfloat16).eval()
    config = {"weights": {"keep_head": False, "min_parameters": 1}, "tiers": {"gpu": {"enabled": False}}}
    return vbrt.wrap(model, "fp4", **config).materialize()


def ran(run, *given):
    """What a compiled model gives the second time, and how often it calls each operator of ours."""
    run(*given)
    with torch.profiler.profile() as profiler:
        got = run(*given)
    return got, {event.key: event.count for event in profiler.key_averages() if event.key.startswith("vbrt::")}


def show(layer, format="nvfp4"):
    """As if the planes of the layer stayed on a GPU."""
    (n, k), weight = layer.handle.spec.shape, layer.handle.weight()
    layout = tile_layout(format, (n, k))
    memory = torch.empty(layout.nbytes, dtype=torch.uint8)  # as on a GPU: the page is where its memory begins
    page = pack(pack_tiles(format, get_format(format).encode(weight.float()), (n, k)), layout, memory)
    planes, form = unpack(page, layout), f"{format} {n} {k} {str(weight.dtype).removeprefix('torch.')} cpu"
    show_to_graphs(layer.handle, GraphTiles(page_of(planes[TILES], planes["tensor_scale"]), form))


class Compiled:
    """A compiled model, its graphs and the guards that it keeps."""

    def __init__(self, model):
        self.graphs, self.guards = [], []
        self.run = torch.compile(model, backend=self._backend, options={"guard_filter_fn": self._keep})

    def _backend(self, graph, inputs, **_):
        self.graphs.append(graph)
        return graph

    def _keep(self, guards):
        kept = wanted_guards(guards)
        self.guards.append([guard for guard, keep in zip(guards, kept, strict=True) if keep])
        return kept

    def calls(self):
        return [sum(node.target == torch.ops.vbrt.fp4_linear for node in graph.graph.nodes) for graph in self.graphs]


@torch.no_grad()
def test_a_layer_of_planes_that_stay_is_checked_no_longer_than_a_linear_one(kernel_on_cpu):
    x = torch.randn(1, 128).bfloat16()
    model = torch.nn.Sequential(*(torch.nn.Linear(128, 128, bias=False) for _ in range(4))).to(torch.bfloat16).eval()
    plain = Compiled(model)
    plain.run(x)
    torch.compiler.reset()
    vb = wrapped(model)
    for layer in model:
        show(layer)
    swapped = Compiled(model)
    torch.testing.assert_close(swapped.run(x), vb(x), rtol=2e-2, atol=2e-2)
    assert swapped.calls() == [4] and not any("_vb_handle" in guard.name for guard in swapped.guards[0])
    counts = [sum("['2']" in guard.name for guard in one.guards[0]) for one in (plain, swapped)]
    assert counts[0] >= counts[1] > 0
    assert len(swapped.graphs[0].graph.find_nodes(op="placeholder")) == 5  # x, and one tensor a layer
    vb.close()


CHANGES = {
    "moved": lambda vb: show(vb.model[1].inner),
    "another format": lambda vb: show(vb.model[1].inner, "mxfp4"),
    "moving": lambda vb: show_to_graphs(vb.model[1].inner.handle, None),
    "a budget": lambda vb: vb.set_budget("cpu", "1GiB"),
    "assigned": lambda vb: setattr(vb.model[1].inner, "weight", torch.nn.Parameter(vb.model[0].inner.weight.clone())),
    "loaded": lambda vb: vb.model[1].load_state_dict(vb.model[0].state_dict()),
    "retyped": lambda vb: vb.model[1].inner.to(torch.float16).to(torch.bfloat16),
    "unwrapped": lambda vb: vb.unwrap(),
}


@pytest.fixture(params=[False, True], ids=["guard-by-guard", "by-tags"])
def guards(request):
    """Both ways of torch: 2.11 skips modules whose dicts have not changed, 2.13 does not by default."""
    with torch._dynamo.config.patch(use_recursive_dict_tags_for_guards=request.param):
        yield


@pytest.mark.parametrize("change", CHANGES)
@torch.no_grad()
def test_a_compiled_model_sees_what_becomes_of_its_planes(change, guards, kernel_on_cpu):
    model, x = torch.nn.Sequential(*(Block() for _ in range(3))), torch.randn(2, 128).bfloat16()
    vb = wrapped(model)
    for block in model:
        show(block.inner)
    compiled = Compiled(model)
    for _ in range(3):
        before = compiled.run(x)
    assert compiled.calls() == [3]
    CHANGES[change](vb)
    compiled.run(x)
    got, want = compiled.run(x), model(x)
    assert (compiled.calls() == [3]) is (change == "moved")
    tolerance = 0.2 if change == "another format" else 2e-2
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)
    assert torch.equal(got, before) is (change not in ("assigned", "loaded", "another format"))
    vb.close()


@torch.no_grad()
def test_equal_blocks_share_one_graph_and_others_take_one_more(kernel_on_cpu):
    model = torch.nn.Sequential(
        *(Block(128) for _ in range(6)), torch.nn.Linear(128, 256, bias=False), *(Block(256) for _ in range(6))
    )
    vb = wrapped(model)
    want = vb(x := torch.randn(1, 128).bfloat16())
    counting = torch._dynamo.testing.CompileCounter()
    for block in model:
        show(block if isinstance(block, torch.nn.Linear) else block.inner)
        block.compile(backend=counting, fullgraph=True)
    torch.testing.assert_close(vb(x), want, rtol=2e-2, atol=2e-2)
    assert counting.frame_count == 3
    vb.close()


@torch.no_grad()
def test_a_copy_does_not_compute_with_the_planes_of_the_original(kernel_on_cpu):
    model = torch.nn.Sequential(Block())
    vb = wrapped(model)
    show(model[0].inner)
    copied, pickled = copy.deepcopy(vb), pickle.loads(pickle.dumps(vb))
    assert model[0].inner._vb_page is not None
    assert all(one.model[0].inner._vb_page is one.model[0].inner._vb_form is None for one in (copied, pickled))
    vb.close()


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_layers_get_planes_that_stay_once_and_again_when_they_lie_elsewhere(format, monkeypatch):
    model = wrapped(torch.nn.Sequential(Block())).model
    layer, layout, pages = model[0].inner, tile_layout(format, (128, 128)), []
    monkeypatch.setattr(layer.handle, "shows_planes", True)
    memory = [new_page(layout) for _ in range(2)]
    for page in (memory[0], memory[0], memory[1]):
        fixed.keep(layer.handle, WeightPlanes(format, (128, 128), torch.bfloat16, unpack(page, layout)))
        pages.append(layer._vb_page)
        assert layer._vb_page.data_ptr() == page.data_ptr() and layer._vb_form == f"{format} 128 128 bfloat16 cpu"
    assert pages[0] is pages[1] is not pages[2]
    layer.handle.forget_ready()
    assert layer._vb_page is layer._vb_form is None


def test_few_tokens_are_for_the_fused_kernel_everywhere():
    summands = max(fp4_linear._SUMMANDS.values())
    assert all(linear._FEW_TOKENS * summands <= fused_limit(major) for major in range(fp4_linear.MIN_MAJOR, 13))
    assert linear._FEW_TOKENS >= fused_linear.MAX_TOKENS


def test_tiles_and_their_scale_come_apart_again():
    layout = tile_layout("nvfp4", (40, 200))
    planes = unpack(torch.randint(255, (layout.nbytes,), dtype=torch.uint8), layout)
    page = page_of(planes[TILES], planes["tensor_scale"])
    assert page.data_ptr() == planes[TILES].data_ptr() and page.dim() == 1
    for one in (page, page.clone()):
        parts = parts_of(one, "nvfp4", (40, 200))
        for got, want in zip(parts, planes.values(), strict=True):
            assert torch.equal(got.view(torch.int32), want.view(torch.int32))
    seen = weakref.ref(page)
    del page, one, parts
    assert seen() is None  # nothing keeps a page's memory


# --- on a GPU ---------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("shapes", [(256, 64), (1000, 40, 72), (4096, 1024, 1024)], ids=str)
@pytest.mark.parametrize("name", ["nvfp4", "mxfp4"])
def test_several_products_of_one_input_match_float64(name, shapes):
    made = [tiled(name, (n, 1024)) for n in shapes]
    tiles = [planes.coarse[fp4_linear.TILES] for planes, _ in made]
    scales = [planes.coarse["tensor_scale"] for planes, _ in made]
    for tokens in (1, 3, 8, 9, 40):
        x = torch.randn(1, tokens, 1024, device="cuda", dtype=torch.bfloat16)
        torch.full((1 << 24,), float("nan"), device="cuda")
        ys = fp4_linear.linears(x, tiles, scales, name, list(shapes), 1024)
        for y, (_, weight) in zip(ys, made, strict=True):
            assert y.shape == (1, tokens, len(weight)) and error(y, x.double() @ weight.T) < 3e-3
    torch.library.opcheck(torch.ops.vbrt.fp4_linears, (x, tiles, scales, name, list(shapes), 1024))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["nvfp4", "mxfp4"])
def test_a_scale_behind_its_tiles_is_found_by_every_operator(name):
    ops, x = torch.ops.vbrt, torch.randn(1, 5, 256, device="cuda", dtype=torch.bfloat16)
    made = [tiled(name, (512, 256))[0].coarse for _ in range(2)]
    (tiles, others), (scale, other_scale) = ([planes[part] for planes in made] for part in (TILES, "tensor_scale"))
    pages = [torch.cat([planes[TILES].flatten(), planes["tensor_scale"].view(torch.int32)]) for planes in made]
    one, gated = (None, name, 512, 256, "silu"), (name, 512, 256, "silu")
    assert torch.equal(ops.fp4_linear(x, pages[0], None, *one), ops.fp4_linear(x, tiles, scale, *one))
    got = ops.fp4_gated(x, pages[0], None, pages[1], None, *gated)
    assert torch.equal(got, ops.fp4_gated(x, tiles, scale, others, other_scale, *gated))
    got = ops.fp4_linears(x, pages, [], name, [512, 512], 256)
    want = ops.fp4_linears(x, [tiles, others], [scale, other_scale], name, [512, 512], 256)
    assert all(torch.equal(*pair) for pair in zip(got, want, strict=True))
    checks = "test_schema", "test_faketensor"  # others compute right after a copy of tiles, which kernels load early
    torch.library.opcheck(ops.fp4_linear, (x, pages[0], None, *one), test_utils=checks)
    torch.library.opcheck(ops.fp4_linears, (x, pages, [], name, [512, 512], 256), test_utils=checks)
    torch.library.opcheck(ops.fp4_gated, (x, pages[0], None, pages[1], None, *gated), test_utils=checks)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(256, 64), (120, 200), (4096, 4096), (4096, 14336), (8200, 2730)], ids=str)
@pytest.mark.parametrize("name", ["nvfp4", "mxfp4"])
def test_layers_that_share_a_norm_match_float64(name, shape):
    (n, k), ops = shape, torch.ops.vbrt
    out, weight = tiled(name, shape)
    behind = [tiled(name, (rows, n)) for rows in (512, 512, 72)]
    tiles, scales = ([planes.coarse[part] for planes, _ in behind] for part in (TILES, "tensor_scale"))
    x, other, gain = (torch.randn(1, 1, size, device="cuda").bfloat16() for size in (k, n, n))
    gain = gain.flatten()
    given = (x, out.coarse[TILES], out.coarse["tensor_scale"], other, gain, name, n, k)
    poison()
    total, y, squares = ops.fp4_residual(*given)
    assert error(total, x.double() @ weight.T + other.double()) < 3e-3
    assert torch.equal(y, total * gain)
    torch.testing.assert_close(squares.sum(), total.float().square().sum())
    want = y.double() * torch.rsqrt(total.double().square().mean() + 1e-5)
    for count in (1, 2, 3):
        poison()
        rows = [512, 512, 72][:count]
        zs = ops.fp4_linears(y, tiles[:count], scales[:count], name, rows, n, squares, 1e-5)
        for z, (_, w) in zip(zs, behind, strict=False):
            assert error(z, want @ w.T) < 3e-3
    poison()
    gated = ops.fp4_gated(y, tiles[0], scales[0], tiles[1], scales[1], name, 512, n, "silu", squares, 1e-5)
    gate, up = (want @ w.T for _, w in behind[:2])
    assert error(gated, F.silu(gate) * up) < 3e-3
    for again in (ops.fp4_residual(*given) for _ in range(3)):
        assert all(torch.equal(*pair) for pair in zip(again, (total, y, squares), strict=True))
    checks = "test_schema", "test_faketensor"
    torch.library.opcheck(ops.fp4_residual, given, test_utils=checks)
    several = (y, tiles, scales, name, [512, 512, 72], n, squares, 1e-5)
    torch.library.opcheck(ops.fp4_linears, several, test_utils=checks)


@pytest.mark.gpu
def test_layers_that_share_a_norm_take_one_token():
    planes, _ = tiled("nvfp4", (256, 128))
    tiles, scale = planes.coarse[TILES], planes.coarse["tensor_scale"]
    x, other = (torch.zeros(2, size, device="cuda", dtype=torch.bfloat16) for size in (128, 256))
    with pytest.raises(KernelError, match="one token of 128"):
        torch.ops.vbrt.fp4_residual(x, tiles, scale, other, other[0], "nvfp4", 256, 128)
    squares = torch.zeros(8, device="cuda")
    with pytest.raises(KernelError, match="one token of 128"):
        torch.ops.vbrt.fp4_gated(x, tiles, scale, tiles, scale, "nvfp4", 256, 128, "silu", squares, 1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@torch.no_grad()
def test_a_compiled_block_shares_its_norms_and_is_as_close_to_float64(mode):
    torch.compiler.reset()
    model = Decoder().to("cuda", torch.bfloat16).eval()
    with vbrt.wrap(model, "fp4", weights={"keep_head": False, "min_parameters": 1}) as vb:
        vb.materialize()
        x, residual = torch.randn(2, 1, 1, 1024, device="cuda", dtype=torch.bfloat16)
        eager = model(x, residual)
        exact = Decoder().to("cuda", torch.float64)
        exact.load_state_dict({name: value.double() for name, value in model.state_dict().items()})
        want = exact(x.double(), residual.double())
        run = torch.compile(model, options=vbrt.compile_options(mode))
        for _ in range(4):
            got, ops = ran(lambda x: [one.clone() for one in run(x, residual)], x)
        assert mode != "default" or set(ops) == {"vbrt::fp4_residual", "vbrt::fp4_gated", "vbrt::fp4_linears"}
        for one, other, right in zip(got, eager, want, strict=True):
            assert error(one, right) < 1.1 * error(other, right) + 1e-4
    torch.compiler.reset()


class Pair(torch.nn.Module):
    def __init__(self, n=1024):
        super().__init__()
        self.gate, self.up = (torch.nn.Linear(1024, n, bias=False) for _ in range(2))

    def forward(self, x):
        return self.gate(x), self.up(x)


class GatedPair(Pair):
    def forward(self, x):
        return F.silu(self.gate(x)) * self.up(x)


@pytest.mark.gpu
@torch.no_grad()
def test_a_compiled_model_joins_its_siblings_and_computes_the_same():
    model = Pair().to("cuda", torch.bfloat16).eval()
    with vbrt.wrap(model, "fp4", weights={"keep_head": False, "min_parameters": 1}) as vb:
        vb.materialize()
        for tokens in (1, 40):
            x = torch.randn(1, tokens, 1024, device="cuda", dtype=torch.bfloat16)
            want = model(x)
            got, ops = ran(torch.compile(model, options=vbrt.compile_options()), x)
            assert all(error(one, other.double()) < 5e-3 for one, other in zip(got, want, strict=True))
            assert ("vbrt::fp4_linears" in ops) is (tokens == 1)


@pytest.mark.gpu
@pytest.mark.parametrize("n", [512, 1024, 4096])
@torch.no_grad()
def test_a_compiled_gated_pair_is_at_least_as_close_to_float64_as_two_layers(n):
    torch.compiler.reset()
    model = GatedPair(n).to("cuda", torch.bfloat16).eval()
    with vbrt.wrap(model, "fp4", weights={"keep_head": False, "min_parameters": 1}) as vb:
        vb.materialize()
        model(torch.zeros(1, 1024, device="cuda", dtype=torch.bfloat16))  # planes that never move are known from here
        gate, up = model.gate.weight.double(), model.up.weight.double()
        for tokens in (1, 8, 16, 17):
            x = torch.randn(1, tokens, 1024, device="cuda", dtype=torch.bfloat16)
            want = F.silu(x.double() @ gate.T) * (x.double() @ up.T)
            got, ops = ran(torch.compile(model, options=vbrt.compile_options(), dynamic=False), x)
            assert ("vbrt::fp4_gated" in ops) is (n >= 1024 and tokens <= 16)
            assert error(got, want) < max(3e-3, 1.1 * error(model(x), want))
    torch.compiler.reset()


@pytest.mark.gpu
@torch.no_grad()
def test_a_cuda_graph_of_resident_layers_follows_a_new_weight():
    torch.compiler.reset()
    model = GatedPair().to("cuda", torch.bfloat16).eval()
    with vbrt.wrap(model, "fp4", weights={"keep_head": False, "min_parameters": 1}) as vb:
        vb.materialize()
        x = torch.randn(1, 1, 1024, device="cuda", dtype=torch.bfloat16)
        model(x)
        assert model.gate._vb_form == "nvfp4 1024 1024 bfloat16 cuda:0"
        run = torch.compile(model, options=vbrt.compile_options("reduce-overhead"))
        for _ in range(4):
            got = run(x).clone()
        assert error(got, model(x).double()) < 1e-2
        model.gate.load_state_dict({"weight": -2 * model.gate.weight})
        for _ in range(4):
            got = run(x).clone()
        assert error(got, model(x).double()) < 1e-2
    torch.compiler.reset()
