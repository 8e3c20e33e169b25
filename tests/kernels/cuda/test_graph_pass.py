"""Graphs of torch.compile after the pass that joins layers."""

import functools
import operator

import pytest
import torch
import torch.nn.functional as F
from torch._inductor.decomposition import select_decomp_table
from torch.fx import Graph, GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

import vbrt
from tests.kernels.cuda.graph_cases import by_torch, written_out
from vbrt.kernels import reference
from vbrt.kernels.cuda.graph_pass import JoinSiblings

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
        call = graph.call_function(ONE, (xs[name], tiles, scale, added, "nvfp4", n, activation))
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
    assert not rest and call.args[2:] == ("nvfp4", [64, 16, 32])
    assert [str(part) for part in call.args[1]] == ["tiles0", "scale0", "tiles1", "scale1", "tiles2", "scale2"]
    (outputs,) = next(node for node in graph.nodes if node.op == "output").args
    assert [(node.target, node.args) for node in outputs] == [(operator.getitem, (call, i)) for i in range(3)]
    assert [node.meta["val"].shape[-1] for node in outputs] == [64, 16, 32]
    GraphModule({}, graph).recompile()


def test_a_launch_takes_three_layers_and_only_those_of_one_input():
    plain = (False, "none")
    several, rest = joined(graph_of([*[("x", 16, *plain)] * 7, ("y", 16, *plain), ("z", 16, *plain)]))
    assert [len(call.args[3]) for call in several] == [3, 3] and len(rest) == 3


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


def traced(fn, tokens=1, n=256, k=128, dtype=torch.bfloat16):
    """The graph of fn(linear, x, first tiles, second tiles) as inductor decomposes it, after the pass."""

    def linear(x, tiles, activation="none", bias=None):
        return ONE(x, tiles, None, bias, "nvfp4", n, activation)

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
    for fn in (
        lambda linear, x, a, b: act(linear(x, a)) * linear(x, b),
        lambda linear, x, a, b: linear(x, b) * act(linear(x, a)),
    ):
        graph = traced(fn, tokens)
        x, a, b = graph.find_nodes(op="placeholder")
        (call,) = [node for node in graph.nodes if node.op == "call_function"]
        assert call.target is GATED and call.args == (x, [a, b], "nvfp4", 256, activation)
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
    [
        (17, 256, torch.bfloat16, [ONE, ONE]),
        (1, 112, torch.bfloat16, [SEVERAL]),
        (9, 112, torch.bfloat16, [ONE, ONE]),
        (16, 256, torch.float16, [ONE, ONE]),
    ],
)
def test_a_gated_pair_is_one_launch_only_where_that_is_fastest(tokens, n, dtype, left):
    graph = traced(lambda linear, x, a, b: F.silu(linear(x, a)) * linear(x, b), tokens, n, dtype=dtype)
    assert [target for target in targets(graph) if target in (ONE, SEVERAL, GATED)] == left


def test_what_reads_the_same_input_as_a_gated_pair_is_joined_beside_it():
    def parallel(linear, x, a, b):
        return linear(x, a), linear(x, b), F.silu(linear(x, a)) * linear(x, b)

    assert sorted(map(str, targets(traced(parallel)))) == sorted(map(str, [GATED, SEVERAL, *[operator.getitem] * 2]))


def normed(fn, shape=(1, 1, 128), dtype=torch.bfloat16, gain_dtype=torch.bfloat16):
    """The graph of fn(linear, x, residual, gain) as inductor gets it, after the pass."""

    def called(x, residual, gain, tiles):
        return fn(lambda x: ONE(x, tiles, None, None, "nvfp4", 256, "none"), x, residual, gain)

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


def shared(fn, shape=(1, 1, 128), n=128):
    """The graph of fn(out, gate, up, x, residual, gain), three layers of [256 -> n] and [n -> 256], after the pass."""

    def called(x, residual, gain, *tiles):
        out = functools.partial(layer, tiles=tiles[0], n=n, k=256)
        gate, up = (functools.partial(layer, tiles=one, n=256, k=n) for one in tiles[1:])
        return fn(out, gate, up, x, residual, gain)

    def layer(x, *, tiles, n, k, bias=None):
        return ONE(x, tiles, None, bias, "nvfp4", n, "none")

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
    assert made.args == (x, tiles, None, residual, gain, "nvfp4", 128)
    y, squares = call.args[0], call.args[-2]
    assert (y.args, squares.args) == ((made, 1), (made, 2)) and call.args[-1] == pytest.approx(3e-5)
    assert squares.meta["val"].shape == (8,) and squares.meta["val"].dtype is torch.float32
    total, *_ = graph.output_node().all_input_nodes
    assert total.args == (made, 0) and not {ONE, NORMED} & set(targets(graph))


UNSHARED = {
    "no layer before it": block(BEHIND["siblings"][0], before=lambda out, x, residual: residual + x[..., :128]),
    "a layer with a bias": block(BEHIND["siblings"][0], before=lambda out, x, r: r + out(x, bias=r.view(-1))),
    "a layer that is read again": lambda out, gate, up, x, residual, gain: (
        h := out(x),
        gate(written_out(h + residual, gain)),
    ),
    "the layer added to itself": block(BEHIND["siblings"][0], before=lambda out, x, residual: (h := out(x)) + h),
    "a norm that is read otherwise": block(lambda gate, up, y: (y, gate(y), up(y))),
    "a layer behind with a bias": block(lambda gate, up, y: gate(y, bias=y.new_zeros(256))),
}


@pytest.mark.parametrize("fn", UNSHARED.values(), ids=UNSHARED)
def test_a_norm_with_anything_else_around_it_keeps_its_launch(fn):
    graph = shared(fn)
    assert RESIDUAL not in targets(graph) and NORMED in targets(graph)


def test_only_one_token_s_norm_of_whole_eights_is_shared():
    gated = block(BEHIND["a gated pair"][0])
    assert RESIDUAL in targets(shared(gated)) and RESIDUAL in targets(shared(gated, n=120))
    assert RESIDUAL not in targets(shared(gated, (1, 2, 256))) and RESIDUAL not in targets(shared(gated, n=124))
