"""Functions that torch.compile leaves alone, marked without dynamo's import."""

import subprocess
import sys

import pytest
import torch
from torch import nn

from vbrt.kernels.uncompiled import uncompiled

TOLD = "it leases when it runs"


def _inner(x):
    return x.sin() if torch.compiler.is_compiling() else x.cos()


def _ways(mark):
    """A function, a module and a module's method that a decorator marks."""

    @mark(reason=TOLD)
    def leased(x):
        return _inner(x) * 2

    class Layer(nn.Module):
        @mark(reason=TOLD)
        def forward(self, x):
            return leased(x)

    return {"function": leased, "module": Layer(), "method": Layer().forward}


def _counting(graphs):
    def backend(module, _):
        graphs.append([node.target for node in module.graph.nodes if node.op.startswith("call")])
        return module.forward

    return backend


def _torchs(*, reason):
    return torch.compiler.disable(reason=reason)


@pytest.mark.filterwarnings("error")  # dynamo warns where it looks into the decorator
@pytest.mark.parametrize("mark", (uncompiled, _torchs))
@pytest.mark.parametrize("way", ("function", "module", "method"))
def test_a_compiled_graph_ends_before_it_and_the_next_begins_behind_it(mark, way):
    graphs, x, call = [], torch.ones(3), _ways(mark)[way]
    torch._dynamo.reset()
    run = torch.compile(lambda x: call(x + 1) - 1, backend=_counting(graphs))
    for _ in range(2):
        assert torch.equal(run(x), (x + 1).cos() * 2 - 1)
    assert [len(graph) for graph in graphs] == [1, 1]
    with pytest.raises(torch._dynamo.exc.Unsupported, match=TOLD):
        torch.compile(lambda x: call(x), backend="eager", fullgraph=True)(x)


def test_wrapping_and_running_import_nothing_of_the_compiler():
    code = """
import sys, torch, vbrt
vbrt.wrap(torch.nn.Linear(32, 32).eval(), "dense")(torch.ones(1, 32))
from vbrt.layers.experts import special_calls
from vbrt.training.qat import qat_experts
from vbrt.training.full import full_weight
found = {"torch._dynamo", "torch._inductor", "sympy", "triton", "transformers"} & sys.modules.keys()
assert not found, found
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
