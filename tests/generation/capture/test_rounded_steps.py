"""Captured steps of models in 4 bits, by the stand-in for CUDA graphs: C code is one operation, as a kernel is."""

import pytest
import torch

import vbrt
from tests.generation.families import generated, tiny
from tests.generation.speculation.test_speculation import K, assert_same, prompts, run
from tests.matrix import matrix
from tests.models import llama, wrap

pytest.importorskip("transformers")
pytestmark = [pytest.mark.filterwarnings("ignore:vbrt.wrap"), pytest.mark.usefixtures("tapes")]


def wrapped(family: str, format: str, *, captures: bool) -> vbrt.VBModelWrapper:
    weights, compute = {"min_parameters": 1, "format": format}, {"captures": captures}
    return vbrt.wrap(tiny(family), "fp4", weights=weights, compute=compute)


@pytest.mark.sample(2)
@matrix(
    family=["llama", "qwen3_moe", "t5"],
    format=["nvfp4", "mxfp4", "nf4"],
    call={"padded": {}, "sampled": {"do_sample": True}, "beams": {"num_beams": 2}},
)
def test_captured_steps_in_4_bits_give_the_tokens_of_eager_ones(family, format, call):
    vb, eager = (wrapped(family, format, captures=captures) for captures in (True, False))
    for _ in range(2):  # the second call replays from its first step on
        want, got = generated(eager, **call), generated(vb, **call)
        assert torch.equal(got.sequences, want.sequences)
        for one, other in zip(got.logits, want.logits, strict=True):
            torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)
    steps = vb.stats().steps
    assert (steps.captured, steps.eager) == (26, 0), steps.reasons
    assert steps.joined["layers of one input"]


def test_drafts_in_4_bits_are_captured_and_verified_with_the_bits_of_captured_steps():
    with wrap(llama(dtype=torch.bfloat16), "exact") as vb:
        plain = run(vb, prompts(2))
        before = vb.stats().steps.captured
        assert_same(run(vb, prompts(2), speculate=K), plain)
        steps, counted = vb.stats().steps, vb.stats().speculation
        by_drafts = counted.by_drafter["coarse"]["rounds"]
        assert steps.captured - before == counted.drafted + counted.rounds - by_drafts and steps.eager == 0, (
            steps.reasons
        )
        assert steps.joined["sum and norm"] and not vb.stats().fallbacks
