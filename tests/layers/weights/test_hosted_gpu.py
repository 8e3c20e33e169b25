"""Hosted weights on a GPU: few tokens are computed by the CPU where pages lie, eagerly and in recorded steps."""

import dataclasses
import gc

import pytest
import torch

import vbrt
from scripts import committed
from scripts.speculate import as_gpt2
from tests.layers.weights.hosted_cases import computed, generated, shared_and_moved
from vbrt.errors import KernelError
from vbrt.layers.weights.hosted_weights import refusal
from vbrt.residency.hosted_share import HostRates

transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:vbrt.wrap")]

FAST = HostRates(link_bytes_s=1e9, cpu_bytes_s=1e12)  # then all that does not fit is hosted
EVEN = HostRates(link_bytes_s=1e9, cpu_bytes_s=1e9)


def llama(**changes):
    sizes = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 4, "num_attention_heads": 8}
    config = transformers.LlamaConfig(
        **{**sizes, "num_key_value_heads": 4, "vocab_size": 1024, "tie_word_embeddings": False, **changes}
    )
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).bfloat16().eval()


def wrapped(model, rates, format="nvfp4", where="auto", budget="8MiB", **compute):
    tiers = {"gpu": {"budget": budget}, "cpu": {"budget": "1GiB"}}
    weights = {"format": format, "min_parameters": 0}
    vb = vbrt.wrap(model, tiers=tiers, weights=weights, compute={"where": where, **compute})
    vb.materialize(progress=False)
    hosting = vb._attachment.hosting
    assert refusal(vb._attachment.stack) is None
    hosting.rates = dict.fromkeys(range(9), rates)
    return vb


@pytest.mark.parametrize("rates", [FAST, EVEN], ids=["all", "half"])
@pytest.mark.parametrize("captures", [True, False], ids=["recorded", "eager"])
def test_generate_gives_what_the_gpu_computes_up_to_rounding(rates, captures):
    model = llama()
    moved = wrapped(model, rates, where="device", captures=captures)
    want = generated(moved)
    assert computed(moved) == 0
    moved.unwrap()
    vb = wrapped(model, rates, captures=captures)
    got, again = generated(vb), generated(vb)
    steps = vb.stats().steps
    assert steps.eager == (0 if captures else 46), steps.reasons
    assert computed(vb) > 40
    for one, other in zip(got.logits[:4], want.logits[:4], strict=True):
        assert (one - other).float().norm() < 0.02 * other.float().norm()
    assert torch.equal(got.sequences, again.sequences)
    for one, other in zip(got.logits, again.logits, strict=True):
        assert torch.equal(one, other)


def test_a_trained_models_tokens_are_the_gpus():
    vb = wrapped(as_gpt2(committed.dense(), torch.bfloat16), FAST, budget="512KiB")
    text = committed.held_out()[:400].long().reshape(1, -1).cuda()
    shared, moved, counts = shared_and_moved(vb, text)
    assert counts[0] > 1000 and counts[1] == counts[0]
    assert (shared == moved).float().mean() >= 0.99


def test_a_new_budget_and_new_weights_are_followed():
    vb = wrapped(llama(), FAST)
    first = generated(vb)
    before = computed(vb)
    assert before
    vb.set_budget("gpu", "1GiB")
    resident = generated(vb)
    assert computed(vb) == before
    assert torch.equal(first.sequences[:, :18], resident.sequences[:, :18])
    vb.set_budget("gpu", "8MiB")
    state = {name: -tensor for name, tensor in vb.state_dict().items()}
    vb.load_state_dict(state)
    assert not torch.equal(generated(vb).logits[3], first.logits[3])
    assert computed(vb) > before
    vb.unwrap()


def test_a_product_that_nobody_answers_raises_and_the_model_goes_on():
    vb = wrapped(llama(), FAST)
    want = generated(vb)
    host = vb._attachment.hosting._host
    host._outbox.wait_ns = 50_000_000
    vb._attachment.follower.generating[0].steps.release()  # recorded kernels keep their limit
    expect, host._team.expect = host._team.expect, lambda box, posts: None
    serving = host._team
    box = host._handle
    serving.detach(box)  # nobody polls the mailbox any more
    with pytest.raises(KernelError, match="did not answer"):
        generated(vb)
    host._team.expect = expect
    vb._attachment.hosting.release()
    vb._attachment.hosting._host = None
    assert torch.equal(generated(vb).sequences, want.sequences)


@pytest.mark.parametrize("end", ["moved", "closed", "gone"])
def test_a_product_that_is_still_queued_has_the_weight_that_it_was_launched_with(end):
    vb = wrapped(llama(), FAST)
    generated(vb)
    weight = next(handle for handle in vb._attachment.registry.handles if handle.held.hosts)
    x = torch.randn(1, weight.spec.shape[1]).bfloat16().cuda()
    want = weight.held.compute(weight, x, None)
    torch.cuda._sleep(400_000_000)
    got = weight.held.compute(weight, x, None)
    assert not torch.cuda.current_stream().query()
    if end == "moved":
        weight.forget_ready()
    elif end == "closed":
        vb.close()
    else:
        del vb, weight
        gc.collect()
    assert torch.equal(got, want)


def test_biases_and_batches_and_other_formats():
    for format, batch in (("nvfp4", 3), ("mxfp4", 1), ("mxint8", 2)):
        vb = wrapped(llama(attention_bias=True, mlp_bias=True), FAST, format=format)
        with torch.no_grad():
            for name, parameter in vb.named_parameters():
                if name.endswith("bias"):
                    parameter.normal_(std=0.1)
        got = generated(vb, batch)
        told = vb._attachment.hosting.told(), vb.stats().fallbacks
        vb._attachment.hosting.release()
        vb._attachment.hosting._where = "device"
        want = generated(vb, batch)
        assert computed(vb) > 0, (format, told)
        for one, other in zip(got.logits[:3], want.logits[:3], strict=True):
            assert (one - other).float().norm() < 0.02 * other.float().norm(), format
        vb.unwrap()


@pytest.mark.parametrize(("batch", "bias"), [(1, False), (3, True)])
def test_layers_of_one_input_are_one_post_with_the_bits_of_their_own(batch, bias):
    vb = wrapped(llama(attention_bias=bias, mlp_bias=bias), dataclasses.replace(FAST, call_s=1e-4))
    generated(vb, batch)
    assert vb.stats().steps.joined["layers of one post"]
    weights = {name: layer.handle for name, layer in vb._attachment.layers.items()}
    families = [[weights[f"model.layers.{i}.mlp.{name}_proj"] for name in ("gate", "up")] for i in range(4)]
    some = next(family for family in families if all(weight.held.hosts for weight in family))
    states = [weight.held for weight in some]
    x = torch.randn(batch, 1, 1024).bfloat16().cuda()
    for weight, y in zip(some, states[0].compute_siblings(some, x), strict=True):
        assert torch.equal(y, weight.held.compute(weight, x, None))
    shared = list(states[0]._shared.values())
    states[1].end()
    assert shared and all(each.entry is None for each in shared)
    vb.unwrap()


class FewAndMany(torch.nn.Module):
    """Layers of one token, as those that a time step modulates, beside layers of many."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.few = torch.nn.ModuleList(torch.nn.Linear(1024, 2048) for _ in range(6))
        self.many = torch.nn.ModuleList(torch.nn.Linear(1024, 1024) for _ in range(6))

    def forward(self, x, time):
        for few, many in zip(self.few, self.many, strict=True):
            scale, shift = few(time).chunk(2, -1)
            x = torch.tanh(many(x) * (1 + scale) + shift)
        return x


def test_layers_of_few_tokens_are_hosted_in_a_model_of_many():
    vb = wrapped(FewAndMany().bfloat16().eval(), FAST)
    x, time = torch.randn(64, 1024).bfloat16().cuda(), torch.randn(1, 1024).bfloat16().cuda()
    with torch.no_grad():
        want = vb(x, time)
        got = [vb(x, time) for _ in range(3)]
    counts = {name: layer.handle.computed for name, layer in vb._attachment.layers.items()}
    assert any(count for name, count in counts.items() if name.startswith("few")), vb._attachment.hosting.told()
    assert not any(count for name, count in counts.items() if name.startswith("many"))
    assert (got[-1] - want).float().norm() < 0.02 * want.float().norm()
    vb.unwrap()


def test_a_product_in_a_graph_of_the_users_is_moved():
    """Nobody announces the replays of such a graph to the CPU's threads."""
    vb = wrapped(FewAndMany().bfloat16().eval(), FAST)
    x, time = torch.randn(64, 1024).bfloat16().cuda(), torch.randn(1, 1024).bfloat16().cuda()
    with torch.no_grad():
        for _ in range(3):
            want = vb(x, time)
        hosted = next(layer.handle for name, layer in vb._attachment.layers.items() if layer.handle.held.hosts)
        assert hosted.held.compute(hosted, time, None) is not None
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            assert hosted.held.compute(hosted, time, None) is None
    assert want.isfinite().all()


def test_a_recording_of_the_users_announces_its_products():
    vb = wrapped(torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(24))).bfloat16().eval(), EVEN)
    x = torch.randn(1, 1024).bfloat16().cuda()
    with torch.no_grad():
        for _ in range(8):
            want = vb(x).clone()
        recording, graph = vb.runtime.recording("decode"), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph), recording:
            out = vb(x)
        before = computed(vb)
        for _ in range(3):
            out.zero_()
            assert recording.replay(graph), recording.ended
            assert torch.equal(out, want)
        assert before  # replays are no calls of layers
        vb._attachment.hosting.release()
        assert not recording.replay(graph) and "other weights" in recording.ended
        assert (vb(x) - want).float().norm() < 0.02 * want.float().norm()
    vb.unwrap()
