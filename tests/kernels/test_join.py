import operator

import pytest
import torch
from torch.fx import Graph, GraphModule

import vbrt
from tests.kernels.gpu_cases import error, tiled
from vbrt.kernels import fp4_linear
from vbrt.kernels.join import JoinSiblings, wanted_guards

ONE, SEVERAL = torch.ops.vbrt.fp4_linear.default, torch.ops.vbrt.fp4_linears.default


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


def held(model, format, n, k):
    """As if the planes of the model's layers stayed on a GPU."""
    for layer in model:
        tiles, scale = torch.zeros(n // 16, k // 128, 288, dtype=torch.int32), torch.ones(())
        for tensor in (tiles, scale):
            tensor._dynamo_static_input_type = "unguarded"
        layer._vb_handle.graph_args = (tiles, scale, format, n, k, torch.bfloat16)


def test_a_graph_does_without_tests_of_tiles_but_sees_planes_and_formats_change():
    torch.compiler.reset()
    compiled, graphs = [], []

    def backend(graph, inputs, **_):
        graphs.append(graph)
        return lambda *_: (torch.zeros(1, 128, dtype=torch.bfloat16),)

    def keep(guards):
        kept = wanted_guards(guards)
        compiled.append((len(kept), sum(kept)))
        return kept

    model = torch.nn.Sequential(*(torch.nn.Linear(128, 128, bias=False) for _ in range(3))).to(torch.bfloat16).eval()
    vb = vbrt.wrap(model, "fp4", weights={"keep_head": False, "min_parameters": 1}).materialize()
    run, x = torch.compile(model, backend=backend, options={"guard_filter_fn": keep}), torch.zeros(1, 128).bfloat16()
    with torch.no_grad():
        for format in ("nvfp4", "nvfp4", "mxfp4"):  # the second time on other tensors
            held(model, format, 128, 128)
            run(x)
        calls = [sum(node.target == torch.ops.vbrt.fp4_linear for node in graph.graph.nodes) for graph in graphs]
        assert calls == [3, 3]
        assert all(few < all_ - 5 for all_, few in compiled)
        for layer in model:
            layer._vb_handle.graph_args = None
        run(x)
        assert len(graphs) == 3
    vb.close()
    torch.compiler.reset()


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
def test_a_compiled_model_joins_its_siblings_and_computes_the_same():
    class Gated(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.gate, self.up, self.down = (torch.nn.Linear(1024, 1024, bias=False) for _ in range(3))

        def forward(self, x):
            return self.down(torch.nn.functional.silu(self.gate(x)) * self.up(x))

    model = Gated().to("cuda", torch.bfloat16).eval()
    with vbrt.wrap(model, "fp4", weights={"keep_head": False, "min_parameters": 1}) as vb, torch.no_grad():
        vb.materialize()
        for tokens in (1, 40):
            x = torch.randn(1, tokens, 1024, device="cuda", dtype=torch.bfloat16)
            want = model(x)
            run = torch.compile(model, options=vbrt.compile_options())
            run(x)
            with torch.profiler.profile() as profiler:
                got = run(x)
            assert error(got, want.double()) < 5e-3
            joined = any(event.key == "vbrt::fp4_linears" for event in profiler.key_averages())
            assert joined is (tokens == 1)
