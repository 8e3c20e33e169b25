"""Hosted experts on a GPU: of missed experts the CPU computes a share, eagerly and in recorded steps."""

import pytest
import torch

import vbrt
from tests.layers.weights.hosted_cases import generated
from tests.models import fallbacks
from vbrt.errors import KernelError
from vbrt.residency.hosted_share import HostRates

transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:vbrt.wrap")]
RATES = HostRates(1e9, 2e9)  # the CPU computes one miss of a layer, one or two of three
QWEN = {"moe_intermediate_size": 512, "num_experts": 16, "num_experts_per_tok": 4, "norm_topk_prob": True}
GPT = {"intermediate_size": 512, "num_local_experts": 16, "num_experts_per_tok": 4}


def model(kind="Qwen3Moe", layers=3):
    config = getattr(transformers, f"{kind}Config")(
        hidden_size=512, num_hidden_layers=layers, num_attention_heads=8, num_key_value_heads=4, head_dim=64,
        vocab_size=1024, tie_word_embeddings=False, pad_token_id=0, **(QWEN if kind == "Qwen3Moe" else GPT),
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device("cuda"):
        return getattr(transformers, f"{kind}ForCausalLM")(config).bfloat16().eval()


def wrapped(made, miss, *, rates=RATES, format="nvfp4", share=2, captures=True):
    """Half of the experts (1 / `share`) find room on the GPU; all of them live in host memory."""
    settings = {
        "weights": {"format": format, "min_parameters": 0},
        "experts": {"miss": miss},
        "compute": {"captures": captures},
    }
    plan = vbrt.make_plan(made, vbrt.config.load_config(settings))
    experts = sum(swap.page_bytes for swap in plan.swaps if swap.experts)
    settings["tiers"] = {"gpu": {"budget": plan.page_bytes - experts + 2 * plan.largest_layer_bytes + experts // share}}
    vb = vbrt.wrap(made, settings).materialize(progress=False)
    if vb._attachment.expert_cache.hosted is not None and miss == "auto":
        vb._attachment.expert_cache.hosted.rates = rates
    return vb


def experts_of(vb):
    return [layer.experts for layer in vb.stats().layers.values() if layer.experts is not None]


def computed(vb):
    return sum(experts.computed for experts in experts_of(vb))


def close(got, want, tokens=4):
    return all(
        (one - other).float().norm() < 0.02 * other.float().norm()
        for one, other in zip(got.logits[:tokens], want.logits[:tokens], strict=True)
    )


@pytest.mark.parametrize("miss", ["auto", "compute"])
@pytest.mark.parametrize("captures", [True, False], ids=["recorded", "eager"])
def test_generate_gives_what_fetched_experts_give_up_to_rounding(miss, captures):
    want = generated(wrapped(model(), "fetch", captures=captures))
    found = []
    for _ in range(2):
        vb = wrapped(model(), miss, captures=captures)
        found.append(generated(vb))
        steps = vb.stats().steps
        assert steps.eager == (0 if captures else 23), steps.reasons
        assert computed(vb) > 6 and all(experts.decides == "gpu" for experts in experts_of(vb))
        assert not fallbacks(vb)
        assert close(found[-1], want)
        vb.close()
    assert torch.equal(found[0].sequences, found[1].sequences)
    assert all(torch.equal(*both) for both in zip(found[0].logits, found[1].logits, strict=True))


def test_rates_are_measured_and_the_same_graph_is_replayed_in_the_next_run():
    vb = wrapped(model(), "auto", rates=None)
    first, again = generated(vb), generated(vb)
    rates = vb._attachment.expert_cache.hosted.rates
    assert min(rates.link_bytes_s, rates.cpu_bytes_s, rates.call_s) > 0 and "divided between" in vb.stats().missed
    assert close(again, first)
    vb.close()


@pytest.mark.filterwarnings("ignore:generate. speculate")
@pytest.mark.parametrize(("miss", "exactness"), [("auto", "tokens"), ("auto", "distribution"), ("fetch", "tokens")])
def test_drafts_come_where_rounding_does_not_depend_on_the_calls_before(miss, exactness):
    vb = wrapped(model(), miss)
    generated(vb)
    want = generated(vb)
    got = generated(vb, speculate=4, drafter="ngrams", exactness=exactness)
    refused = (miss, exactness) == ("auto", "tokens")
    assert any("experts.miss" in why for why in vb.stats().fallbacks) == refused, vb.stats().fallbacks
    assert (vb.stats().speculation is None) == refused
    if miss == "fetch":
        assert torch.equal(got.sequences, want.sequences) and all(map(torch.equal, got.logits, want.logits))
    vb.close()


@pytest.mark.parametrize(("kind", "format"), [("GptOss", "mxfp4"), ("GptOss", "nvfp4"), ("Qwen3Moe", "mxfp4")])
def test_formats_and_biases_and_batches(kind, format):
    for batch in (1, 2):
        want = generated(wrapped(model(kind), "fetch", format=format), batch, new=8)
        vb = wrapped(model(kind), "compute", format=format)
        got = generated(vb, batch, new=8)
        assert close(got, want), (kind, format, batch)
        assert batch > 1 or computed(vb) > 4
        vb.close()


def test_new_budgets_and_weights_are_followed():
    vb = wrapped(model(), "compute")
    first, before = generated(vb), computed(vb)
    assert before
    vb.set_budget("gpu", "1GiB")
    assert close(generated(vb), first) and computed(vb) == before
    vb.unwrap()
    vb = wrapped(model(), "compute")
    generated(vb)
    before = computed(vb)
    vb.load_state_dict({name: -tensor for name, tensor in vb.state_dict().items()})
    assert not torch.equal(generated(vb).logits[3], first.logits[3])
    assert computed(vb) > before
    vb.unwrap()


def test_experts_that_nobody_computes_raise_and_the_model_goes_on():
    vb = wrapped(model(), "compute")
    want = generated(vb)
    host = vb._attachment.hosting._host
    host._outbox.wait_ns = 50_000_000
    vb._attachment.follower.generating[0].steps.release()  # recorded kernels keep their limit
    expect, host._team.expect = host._team.expect, lambda box, posts: None
    host._team.detach(host._handle)  # nobody polls the mailbox any more
    with pytest.raises(KernelError, match=r"experts: the CPU did not answer"):
        generated(vb)
    host._team.expect = expect
    vb._attachment.expert_cache.forget_recording()
    vb._attachment.expert_cache.reset()
    vb._attachment.hosting._host = None
    assert torch.equal(generated(vb).sequences[:, :18], want.sequences[:, :18])
    vb.close()
