"""Joined steps on a GPU, as CUDA graphs."""

import pytest
import torch

import vbrt
from tests.generation.fusion.test_fuse_step import both, built
from vbrt.generation.fusion.fuse_step import joined

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]

WIDE = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}


@pytest.fixture(autouse=True)
def on_the_gpu():
    with torch.device("cuda"):
        yield


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", ["Llama", "Phi3", "Qwen3Moe"])
def test_what_promises_bits_gives_those_of_eager_kernels(name, dtype):
    model = built(name, dtype, **WIDE)
    run, want, got = both(model, model.config, same_bits=True)
    assert torch.equal(got, want) and run.report.joined["cache writes, by rotary"] == 2


@pytest.mark.parametrize("name", ["Llama", "Qwen3", "Gemma", "Phi3", "GPTNeoX", "GPT2", "Qwen3Moe", "Mixtral"])
def test_every_pattern_s_kernels_are_within_rounding_of_eager_ones(name):
    more = {} if name == "GPT2" else WIDE
    model = built(name, torch.float32, **more)
    run, want, got = both(model, model.config, same_bits=False)
    assert run.report.joined["attention"] == 2
    torch.testing.assert_close(got, want, atol=2e-3 * float(want.abs().max()), rtol=0)


def test_layers_in_4_bits_are_joined_and_captured():
    vb = vbrt.wrap(built("Llama", torch.bfloat16, **WIDE), "fp4", weights={"min_parameters": 1}).materialize()
    weight, x = torch.randn(2, 1, 256, dtype=torch.bfloat16), torch.randn(2, 1, 256, dtype=torch.bfloat16)
    with torch.no_grad():
        layer = vb.module.model.layers[0]
        layer.mlp(layer.input_layernorm(x))  # planes that never move are known after a forward

        def step():
            y = layer.mlp(layer.input_layernorm(x + weight))
            attention = layer.self_attn
            return y, attention.q_proj(x), attention.k_proj(x), attention.v_proj(x)

        want = step()
        run = joined(step)
        assert {"layers of one input", "gated pair", "sum and norm before layers"} <= set(run.report.joined)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = run()
        graph.replay()
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, atol=0.02 * float(b.abs().max()), rtol=0.05)
    vb.close()


def test_numbers_that_python_makes_are_constants_of_the_graph():
    given, graph = torch.ones(3), torch.cuda.CUDAGraph()

    def step(x):
        scale = torch.tensor([1.0, 2.0, 3.0], device="cpu")
        return x * (scale + 1).to("cuda")

    run = joined(step, (given,))
    run(given)
    with torch.cuda.graph(graph):
        y = run(given)
    torch.full((1 << 20,), float("nan"))
    given.fill_(2)
    graph.replay()
    assert y.tolist() == [4, 6, 8] and "_to_copy.default" not in run.run.calls()


def test_what_the_host_changes_is_copied_and_not_a_constant():
    x = torch.ones(3, device="cpu")
    run = joined(lambda x: x.to("cuda") * 2, (x,))
    assert run(x + 1).tolist() == [4, 4, 4]
