"""Rows of captured steps: drafts of any preset are verified with the bits of the plain step."""

import warnings

import pytest
import torch

from tests.generation.speculation.oracle import oracle
from tests.generation.speculation.test_speculation import (
    BF16,
    GREEDY,
    SAMPLED,
    TOKENS,
    assert_same,
    mistral,
    prompts,
    run,
)
from tests.matrix import matrix
from tests.models import ROUNDED, gpt2, llama, qwen3_moe, wrap, wrap_streamed
from vbrt.generation.capture import captured_step
from vbrt.generation.fusion import fuse_step
from vbrt.layers.weights import linear_product
from vbrt.layers.weights.products import Streamed

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore:vbrt.wrap")

DRAFTED = {"speculate": 4, "drafter": "ngrams"}


def assert_drafts_are_exact(vb, monkeypatch, batch, how):
    """Draft in two calls; the rows of the second are recorded."""
    plain = run(vb, prompts(batch), **how)
    oracle(monkeypatch, plain.sequences)
    monkeypatch.setattr(captured_step, "_LIVE", 1)
    for _ in range(2):
        assert_same(run(vb, prompts(batch), **how, **DRAFTED), plain)
    stats = vb.stats()
    assert stats.speculation.rounds < stats.speculation.tokens and stats.speculation.by_drafter["ngrams"]["accepted"]
    assert stats.steps.captured and not stats.steps.reasons
    assert not [reason for reason in stats.fallbacks if "speculate" in reason]


@pytest.mark.sample(2)
@matrix(
    format=["nvfp4", "nf4", "mxint8"],
    model={
        "llama": lambda: llama(dtype=BF16),
        "window": mistral,
        "gpt2": lambda: gpt2(dtype=BF16),
        "experts": lambda: qwen3_moe(experts="eager"),
    },
    batch=(1, 3),
    how={"greedy": GREEDY, "sampled": SAMPLED},
)
def test_drafts_of_rounded_weights_give_the_bits_of_captured_steps(format, model, batch, how, monkeypatch):
    with wrap(model(), format) as vb:
        assert_drafts_are_exact(vb, monkeypatch, batch, how)


@pytest.mark.sample(2)
@pytest.mark.parametrize("how", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("format", ["exact", "dense"])
@pytest.mark.parametrize("compute", [{}, ROUNDED], ids=["bits", "rounded"])
def test_drafts_of_lossless_weights_give_the_bits_of_captured_steps(recorded, format, how, compute, monkeypatch):
    for model in (llama(dtype=BF16), mistral()):
        with wrap(model, format, compute=compute) as vb:
            assert_drafts_are_exact(vb, monkeypatch, 2, how)


def test_streamed_weights_are_leased_once_for_all_rows(recorded, tmp_path, monkeypatch):
    leased = []
    of_rows = linear_product.linear_of_rows
    monkeypatch.setattr(
        "vbrt.generation.fusion.step_rows.linear_of_rows",
        lambda handle, rows, bias: leased.append(len(rows)) or of_rows(handle, rows, bias),
    )
    with wrap_streamed(llama(dtype=BF16), "nvfp4", tmp_path) as vb:
        plain = run(vb, prompts(1))
        oracle(monkeypatch, plain.sequences).share = 1.0
        before = sum(vb.stats().bytes_moved.values())
        run(vb, prompts(1))
        a_call = sum(vb.stats().bytes_moved.values()) - before
        assert_same(run(vb, prompts(1), **DRAFTED), plain)
        drafted = sum(vb.stats().bytes_moved.values()) - before - a_call
        weights = sum(name.endswith("_proj") for name in vb.stats().layers)
        assert len(leased) == weights * vb.stats().speculation.by_drafter["ngrams"]["rounds"] and max(leased) == 5
        assert drafted < a_call * (TOKENS - 5) / TOKENS


def test_layers_of_one_input_that_are_posted_together_have_the_bits_of_their_own(recorded, tmp_path, monkeypatch):
    """As those that the CPU computes for a GPU; here each is leased."""
    together = []

    def compute_siblings(self, weights, x):
        together.append(len(weights))
        return [linear_product.linear_without_grad(weight, x, None) for weight in weights]

    with wrap_streamed(llama(dtype=BF16), "nvfp4", tmp_path) as vb:
        plain = run(vb, prompts(1))
    monkeypatch.setattr(Streamed, "hosts", True)
    monkeypatch.setattr(Streamed, "compute_siblings", compute_siblings)
    patterns = [pattern._replace(on=("gpu", "cpu", "")) for pattern in fuse_step.PATTERNS if pattern.name == "posts"]
    monkeypatch.setattr(fuse_step, "PATTERNS", (*patterns, *fuse_step.PATTERNS))
    with wrap_streamed(llama(dtype=BF16), "nvfp4", tmp_path / "again") as vb:
        assert_same(run(vb, prompts(1)), plain)
        layers = sum(name.endswith("q_proj") for name in vb.stats().layers)
        assert vb.stats().steps.joined["layers of one post"] == 2 * layers * vb.stats().steps.recordings
        assert set(together) == {2, 3}
        oracle(monkeypatch, plain.sequences).share = 1.0
        assert_same(run(vb, prompts(1), **DRAFTED), plain)
        assert vb.stats().speculation.by_drafter["ngrams"]["accepted"]


def test_a_step_that_changes_more_than_its_cache_is_not_computed_in_rows(recorded, monkeypatch):
    from transformers import LlamaForCausalLM

    class Counting(LlamaForCausalLM):
        def forward(self, *args, **kwargs):
            self.calls.add_(1)
            return super().forward(*args, **kwargs)

    model = llama(dtype=BF16)
    model.register_buffer("calls", torch.zeros(1))
    model.__class__ = Counting
    with wrap(model, "exact") as vb, warnings.catch_warnings(record=True) as said:
        plain = run(vb, prompts(1))
        oracle(monkeypatch, plain.sequences)
        model.calls.zero_()
        assert_same(run(vb, prompts(1), **DRAFTED), plain)
        assert model.calls == TOKENS  # as in plain decoding
    assert sum("a step changes other memory of the model than its cache" in str(each.message) for each in said) == 1


def test_resident_weights_are_not_drafted_for_by_themselves(monkeypatch):
    with wrap(llama(dtype=BF16), "nvfp4") as vb, warnings.catch_warnings():
        warnings.simplefilter("error")
        plain = run(vb, prompts(1))
        oracle(monkeypatch, plain.sequences)
        assert_same(run(vb, prompts(1), speculate="auto"), plain)
        assert [why for why in vb.stats().fallbacks if "a row costs what a step costs" in why]
