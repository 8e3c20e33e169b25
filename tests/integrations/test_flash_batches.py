"""Batches that attend by torch's flash kernel: the same tokens as through transformers' masks."""

import pytest
import torch
from torch.nn import functional

import vbrt
from tests.integrations.near_ties import largest_gap

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

from tests.integrations.batch_cases import gemma, generated, llama, prompts  # noqa: E402 - imports transformers
from vbrt.libraries import torch_api, transformers_flash  # noqa: E402

if transformers_flash.FLASH_BATCHES.refusal():
    pytest.skip(transformers_flash.FLASH_BATCHES.refusal(), allow_module_level=True)


def reference(query_MHK, key_NGK, value_NGK, begins_M, begins_N, longest_M, longest_N, *, scale, left):
    """What `flash_varlen` computes, a sequence after the other."""
    groups, out = query_MHK.shape[1] // key_NGK.shape[1], torch.empty_like(query_MHK)
    ends_M, ends_N = begins_M.tolist(), begins_N.tolist()
    for first_M, last_M, first_N, last_N in zip(ends_M, ends_M[1:], ends_N, ends_N[1:], strict=False):
        query, keys = slice(first_M, last_M), slice(first_N, last_N)
        at = torch.arange(last_N - first_N - (last_M - first_M), last_N - first_N)[:, None]
        there = torch.arange(last_N - first_N)[None]
        sees = (there <= at) if left < 0 else (there <= at) & (there >= at - left)
        q, k, v = (x.transpose(0, 1)[None] for x in (query_MHK[query], key_NGK[keys], value_NGK[keys]))
        k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
        mask = sees.to(q.device)
        out[query] = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)[0].transpose(0, 1)
    return out


@pytest.mark.parametrize("make", [llama, gemma])
def test_sequences_that_attend_each_by_itself_have_the_tokens_of_a_masked_batch(make, monkeypatch):
    torch.manual_seed(0)
    with vbrt.wrap(make().eval(), "dense") as vb:
        asked, calls = prompts(1, 5, 63, 130, 300, 600), []
        plain = generated(vb, asked)
        monkeypatch.setattr(transformers_flash, "flash_refusal", lambda model: "")
        called = lambda *args, **how: calls.append(how) or reference(*args, **how)  # noqa: E731
        monkeypatch.setattr(torch_api, "flash_varlen", called)
        assert generated(vb, asked) == plain
        assert {how["left"] for how in calls} == ({-1} if make is llama else {-1, 39})
        assert vb.module.config._attn_implementation == "sdpa"
        ids = torch.tensor([asked["63"]])
        with transformers_flash.flash_batches(vb.module) as routed:  # and calls beside a batch attend as ever
            assert routed and vb(ids).logits.shape == (1, 63, 128)


def test_a_batch_on_a_cpu_is_not_routed_and_a_gpu_is_told_why(monkeypatch):
    said = []
    monkeypatch.setattr(transformers_flash, "announce", said.append)
    with transformers_flash.flash_batches(llama()) as routed:
        assert not routed and not said
    assert "needs an NVIDIA GPU" in transformers_flash.flash_refusal(llama())


def on_gpu(**more):
    return llama(**more).to("cuda", torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize("left", [-1, 0, 39])
def test_the_kernel_is_the_reference(left):
    torch.manual_seed(0)
    lengths = [(1, 1), (1, 600), (70, 70), (5, 300), (1, 40)]
    queries, keys = (sum(each) for each in zip(*lengths, strict=True))
    q = torch.randn(queries, 8, 64, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(keys, 2, 64, device="cuda", dtype=torch.bfloat16) for _ in "kv")
    begins = [
        torch.tensor([0, *each], device="cuda", dtype=torch.int32).cumsum(0, dtype=torch.int32)
        for each in zip(*lengths, strict=True)
    ]
    out = torch_api.flash_varlen(q, k, v, *begins, 70, 600, scale=0.125, left=left)
    wanted = reference(q.float(), k.float(), v.float(), *begins, 70, 600, scale=0.125, left=left)
    assert out.shape == q.shape and (out.float() - wanted).abs().max() < 0.02
    q = q[: len(lengths)]  # one query of each sequence: what a step has
    begins[0] = torch.arange(len(lengths) + 1, device="cuda", dtype=torch.int32)
    out = torch_api.flash_varlen(q, k, v, *begins, 1, 600, scale=0.125, left=left)
    wanted = reference(q.float(), k.float(), v.float(), *begins, 1, 600, scale=0.125, left=left)
    assert (out.float() - wanted).abs().max() < 0.02


@pytest.mark.gpu
@pytest.mark.parametrize("budget", ["1GiB", "200KB"])
def test_a_gpus_batch_has_the_tokens_of_generate(budget):
    torch.manual_seed(0)
    asked = prompts(1, 5, 63, 130, 300, 600)
    with vbrt.wrap(on_gpu().eval(), "dense", tiers={"gpu": {"budget": budget}}) as vb:
        assert transformers_flash.flash_refusal(vb.module) == ""
        found, wanted = generated(vb, asked, new=12), {}
        for name, ids in asked.items():
            out = vb.generate(torch.tensor([ids], device="cuda"), max_new_tokens=12, do_sample=False, pad_token_id=0)
            wanted[name] = out[0, len(ids) :].tolist()
        assert largest_gap(vb, asked, wanted, found) < 0.1


@pytest.mark.gpu
def test_what_the_kernel_does_not_take_is_told_by_name():
    said = transformers_flash.flash_refusal(llama().to("cuda"))
    assert "takes 16-bit heads of up to 256 channels; here 32 of torch.float32" in said
