"""Decode steps by recordings: the tokens of transformers' generate, whatever the model, the cache and the call."""

import pytest
import torch

import vbrt
from tests import models
from tests.generation.families import FAMILIES, generated, tiny
from tests.generation.tape import TapeRecorder

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore:vbrt.wrap")


@pytest.fixture(autouse=True)
def tape(monkeypatch):
    """Record on the CPU, in blocks of 8 tokens."""
    monkeypatch.setattr("vbrt.generation.generating.recorder_for", lambda device: TapeRecorder())
    monkeypatch.setattr("vbrt.generation.spans.BLOCK", 8)


def wrapped(family: str = "llama", format: str = "dense") -> vbrt.VBModelWrapper:
    return models.wrap(tiny(family), format)


def same(vb: vbrt.VBModelWrapper, plain, **kwargs) -> None:
    """The wrapped model generates what the plain one does, and its logits are equal but for the order of sums."""
    want, got = generated(plain, **kwargs), generated(vb, **kwargs)
    assert torch.equal(got.sequences, want.sequences)
    for one, other in zip(got.logits, want.logits, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_recorded_steps_give_the_tokens_of_transformers_generate(family):
    vb, plain = wrapped(family), tiny(family)
    same(vb, plain, do_sample=True)
    same(vb, plain, num_beams=2)
    steps = vb.stats().steps
    assert (steps.captured, steps.eager) == (2 * 13, 0), steps.reasons
