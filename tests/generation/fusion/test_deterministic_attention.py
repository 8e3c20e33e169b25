"""Attention that sums each query by itself: what it takes, and that steps and verifications use one and the same."""

import pytest
import torch
import torch.nn.functional as F

from tests.models import ROUNDED, llama, wrap
from vbrt.generation.fusion import deterministic_attention

pytest.importorskip("transformers")
from transformers.integrations import sdpa_attention


@pytest.fixture
def seen(monkeypatch):
    """A kernel on the CPU that gives each query bits of its own; yields how many tokens each call had."""
    shapes = []

    def attended(q, k, v, mask, scale, is_steady):
        shapes.append(q.shape[2])
        masks = [None] * q.shape[2] if mask is None else mask.expand(-1, -1, q.shape[2], -1).split(1, 2)
        groups = q.shape[1] // k.shape[1]
        keys, values = (of.double().repeat_interleave(groups, 1) for of in (k, v))
        rows = [
            torch.cat(
                [
                    F.scaled_dot_product_attention(
                        q[b : b + 1, :, s : s + 1].double(),
                        keys[b : b + 1],
                        values[b : b + 1],
                        None if m is None else m.expand(len(q), -1, -1, -1)[b : b + 1],
                        scale=scale,
                    )
                    for b in range(len(q))
                ]
            )
            for s, m in enumerate(masks)
        ]
        return torch.cat(rows, 2).to(q.dtype)

    monkeypatch.setattr(deterministic_attention, "attended", attended)
    for place in ("fusion.deterministic_attention", "generate"):
        monkeypatch.setattr(f"vbrt.generation.{place}.is_steady_on", lambda device: True)
    return shapes


def test_only_masked_attention_of_few_heads_without_derivatives_is_taken(seen, monkeypatch):
    q, k = torch.randn(2, 4, 3, 8), torch.randn(2, 2, 5, 8)
    whole = torch.ones(2, 1, 3, 5, dtype=torch.bool)
    with torch.no_grad(), deterministic_attention.steady_attention():
        F.scaled_dot_product_attention(q, k, k, whole, enable_gqa=True)
        F.scaled_dot_product_attention(q[:, :, :1], k, k, enable_gqa=True)
        F.scaled_dot_product_attention(q, k, k, whole[:1, :, :1], enable_gqa=True)
        assert seen == [3, 1, 3]
        F.scaled_dot_product_attention(q, k, k, whole.float(), enable_gqa=True)
        F.scaled_dot_product_attention(q, k, k, enable_gqa=True)
        F.scaled_dot_product_attention(q, k, k, is_causal=True, enable_gqa=True)
    with deterministic_attention.steady_attention():
        F.scaled_dot_product_attention(q.requires_grad_(), k, k, whole, enable_gqa=True)
    monkeypatch.setattr(deterministic_attention, "_MOST_ROWS", 2 * 4 * 3 - 1)
    with torch.no_grad(), deterministic_attention.steady_attention():
        F.scaled_dot_product_attention(q, k, k, whole, enable_gqa=True)
    assert seen == [3, 1, 3]


def test_a_verification_attends_as_recorded_steps_do(seen, recorded):
    heads = 2 if hasattr(sdpa_attention, "pack_gqa") else 1  # of a step, in the place of tokens
    ids = torch.arange(3, 21).view(2, 9)
    settings = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 9, "pad_token_id": 0, "do_sample": False}
    with wrap(llama(dtype=torch.bfloat16), "exact", compute=ROUNDED) as vb:
        plain = vb.generate(ids, **settings)
        assert set(seen) == {heads} and vb.stats().steps.captured == 8, vb.stats().steps
        assert torch.equal(vb.generate(ids, **settings, speculate=3), plain)
        assert set(seen) == {heads} and vb.stats().speculation.accepted and not vb.stats().fallbacks
