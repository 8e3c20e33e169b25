"""generate(speculate=...) on a GPU: drafts by the fused kernel, verification on streamed weights."""

import pytest
import torch

import vbrt
from tests.generation.speculation.oracle import oracle
from vbrt.generation.capture import captured_step

pytest.importorskip("transformers")
pytestmark = pytest.mark.gpu


def model():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(8)
    sizes = {"vocab_size": 512, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 512}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads)).to("cuda", torch.bfloat16).eval()


def wrap(how):
    config = vbrt.load_config("exact", weights={"min_parameters": 0})
    page = max(swap.page_bytes for swap in vbrt.make_plan(model(), config).swaps)
    budget = {} if how == "resident" else {"gpu": {"budget": 9 * page}}  # coarse planes, and fine ones that pass
    return vbrt.wrap(model(), config, tiers=budget).materialize()


@pytest.mark.parametrize("how", ["resident", "streamed"])
@pytest.mark.parametrize("batch", [1, 3])
def test_tokens_and_logits_on_a_gpu_are_those_of_plain_decoding(how, batch):
    ids = torch.randint(3, 500, (batch, 20), device="cuda")
    mask = torch.ones_like(ids)
    mask[1:, :3] = 0
    settings = {"max_new_tokens": 40, "pad_token_id": 0, "return_dict_in_generate": True, "output_logits": True}
    with wrap(how) as vb:
        for drawn in ({"do_sample": False}, {"do_sample": True, "seed": 4}):
            plain = vb.generate(ids, attention_mask=mask, **settings, **drawn)
            got = vb.generate(ids, attention_mask=mask, **settings, **drawn, speculate=5)
            assert torch.equal(plain.sequences, got.sequences)
            assert all(map(torch.equal, plain.logits, got.logits))
        stats = vb.stats()
        assert stats.speculation.acceptance > 0.3 and stats.steps.captured > 0, stats.steps.reasons
        assert batch > 1 or "layers of one input" in stats.steps.joined, stats.steps
        assert not any("speculate" in reason for reason in stats.fallbacks), stats.fallbacks
        if how == "streamed":
            assert vb.plan.home_bytes("cpu") > 0 and all("/" in layer.home for layer in stats.layers.values())


def test_fifty_rows_of_a_gpt2_repeat_themselves_and_are_drafted_bit_for_bit():
    """Biased products, strided queries, a batch at which libraries choose other kernels than for one row."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(2)
    plain = GPT2LMHeadModel(GPT2Config(vocab_size=256, n_embd=512, n_layer=3, n_head=8)).to("cuda", torch.bfloat16)
    ids = torch.randint(0, 256, (50, 100), device="cuda")
    settings = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 40, "pad_token_id": 0, "eos_token_id": None}
    with vbrt.wrap(plain.eval(), "exact", weights={"min_parameters": 0}) as vb:
        for drawn in ({"do_sample": False}, {"do_sample": True, "top_k": 0, "seed": 4}):
            first, again = (vb.generate(ids, **settings, **drawn) for _ in range(2))
            assert torch.equal(first, again)
            assert torch.equal(vb.generate(ids, **settings, **drawn, speculate=4), first)
        stats = vb.stats()
        assert stats.speculation.accepted > 0
        assert not any("speculate" in reason for reason in stats.fallbacks), stats.fallbacks


def test_a_coarse_pass_runs_the_fused_kernel_on_pages_that_exact_passes_merge():
    ids = torch.randint(3, 500, (1, 4), device="cuda")
    with torch.no_grad():
        want = model()(ids).logits
    fp4 = vbrt.wrap(model(), "fp4", weights={"min_parameters": 0})
    with wrap("resident") as vb, torch.no_grad():
        assert torch.equal(vb(ids).logits, want)
        with vb.phase("draft", precision="coarse"):
            vb(ids)
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
                draft = vb(ids).logits
        assert torch.equal(draft, fp4(ids).logits)
        kernels = {event.key for event in profiler.key_averages()}
        assert any("linear_kernel" in name for name in kernels) and not any("decode" in name for name in kernels)
    fp4.close()


@pytest.mark.parametrize("how", ["resident", "streamed"])
@pytest.mark.parametrize(
    ("preset", "compute"),
    [
        ("fp4", {}),
        ("nf4", {}),
        ("mxint8", {}),
        ("exact", {"exactness": "rounded"}),
        ("dense", {"exactness": "rounded"}),
    ],
    ids=["fp4", "nf4", "mxint8", "exact", "dense"],
)
def test_rows_of_captured_steps_have_their_bits(preset, compute, how, monkeypatch):
    """From Python at first, then as graphs."""
    config = vbrt.load_config(preset, weights={"min_parameters": 0}, compute=compute)
    pages = [swap.page_bytes for swap in vbrt.make_plan(model(), config).swaps]
    tiers = {"gpu": {"budget": max(9 * max(pages), sum(pages) // 2)}} if how == "streamed" else {}
    monkeypatch.setattr(captured_step, "_LIVE", 2)
    with vbrt.wrap(model(), config, tiers=tiers) as vb:
        for batch, drawn in ((1, {"do_sample": False}), (3, {"do_sample": True, "seed": 4})):
            ids = torch.randint(3, 500, (batch, 20), device="cuda")
            mask = torch.ones_like(ids)
            mask[1:, :3] = 0
            settings = {"attention_mask": mask, "max_new_tokens": 40, "pad_token_id": 0, "eos_token_id": None, **drawn}
            settings |= {"return_dict_in_generate": True, "output_logits": True}
            plain = vb.generate(ids, **settings)
            oracle(monkeypatch, plain.sequences)
            for _ in range(2):
                got = vb.generate(ids, **settings, speculate=4, drafter="ngrams")
                assert torch.equal(plain.sequences, got.sequences)
                assert all(map(torch.equal, plain.logits, got.logits))
        counted = vb.stats().speculation
        assert counted.rounds < counted.tokens
        assert not any("speculate" in reason for reason in vb.stats().fallbacks), vb.stats().fallbacks


def test_an_assistant_in_the_same_tiers_drafts():
    ids = torch.randint(3, 500, (1, 20), device="cuda")
    settings = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 30, "do_sample": False, "pad_token_id": 0}
    with vbrt.wrap(model(), "fp4", weights={"min_parameters": 0}) as vb:
        plain = vb.generate(ids, **settings)
        for small in (model(), vbrt.wrap(model(), "fp4", weights={"min_parameters": 0}, runtime=vb.runtime)):
            assert torch.equal(vb.generate(ids, **settings, assistant_model=small, speculate=3), plain)
        assert vb.stats().speculation.by_drafter["assistant"]["accepted"] > 0
