"""Compiled models with layers whose planes never move: what inductor runs, and what a graph checks at each call."""

import copy
import logging
import pickle

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F

import vbrt
from tests.kernels.cuda.gpu_cases import error
from tests.kernels.cuda.graph_cases import Decoder, by_torch, ran, show, wrapped, written_out
from vbrt.formats import WeightPlanes
from vbrt.formats.page import new_page, unpack
from vbrt.kernels.cuda.e2m1 import fused_linear, launches
from vbrt.kernels.cuda.e2m1.tiles import tile_layout
from vbrt.kernels.cuda.graph_pass import wanted_guards
from vbrt.kernels.cuda.launch_table import fused_limit
from vbrt.layers.modules import compiled_forward as compiled

ONE = torch.ops.vbrt.fp4_linear.default


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


class Block(torch.nn.Module):
    def __init__(self, width=128):
        super().__init__()
        self.inner = torch.nn.Linear(width, width, bias=False)

    def forward(self, x):
        return self.inner(x).relu()


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
    "moved": lambda vb: show(vb.module[1].inner),
    "another format": lambda vb: show(vb.module[1].inner, "mxfp4"),
    "moving": lambda vb: vb.module[1].inner.handle.show_to_graphs(None),
    "a budget": lambda vb: vb.set_budget("cpu", "1GiB"),
    "assigned": lambda vb: setattr(vb.module[1].inner, "weight", torch.nn.Parameter(vb.module[0].inner.weight.clone())),
    "loaded": lambda vb: vb.module[1].load_state_dict(vb.module[0].state_dict()),
    "retyped": lambda vb: vb.module[1].inner.to(torch.float16).to(torch.bfloat16),
    "unwrapped": lambda vb: vb.unwrap(),
}


@pytest.fixture(params=[False, True], ids=["guard-by-guard", "by-tags"])
def guards(request):
    """Both ways of torch: 2.11 skips modules whose dicts have not changed, 2.13 does not by default."""
    with torch._dynamo.config.patch(use_recursive_dict_tags_for_guards=request.param):
        yield


@pytest.mark.sample(8)
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
    differs = (got - before).float().norm() > 2e-2 * before.float().norm()
    assert differs == (change in ("assigned", "loaded", "another format"))
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
    assert all(one.module[0].inner._vb_page is one.module[0].inner._vb_form is None for one in (copied, pickled))
    vb.close()


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_layers_get_planes_that_stay_once_and_again_when_they_lie_elsewhere(format, monkeypatch):
    model = wrapped(torch.nn.Sequential(Block())).module
    layer, layout, pages = model[0].inner, tile_layout(format, (128, 128)), []
    monkeypatch.setattr(layer.handle, "shows_planes", True)
    memory = [new_page(layout) for _ in range(2)]
    for page in (memory[0], memory[0], memory[1]):
        layer.handle.hold_resident(WeightPlanes(format, (128, 128), torch.bfloat16, unpack(page, layout)))
        pages.append(layer._vb_page)
        assert layer._vb_page.data_ptr() == page.data_ptr() and layer._vb_form == f"{format} 128 128 bfloat16 cpu"
    assert pages[0] is pages[1] is not pages[2]
    layer.handle.forget_ready()
    assert layer._vb_page is layer._vb_form is None


def test_few_tokens_are_for_the_fused_kernel_everywhere():
    summands = max(launches.SUMMANDS.values())
    assert all(compiled.FEW_TOKENS * summands <= fused_limit(major) for major in range(8, 13))
    assert compiled.FEW_TOKENS >= fused_linear.GATED_TOKENS


# --- on a GPU ---------------------------------------------------------------------------------------------------------


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
