"""Drafts of many families of models: the same tokens and logits, or a reason why there are none."""

import pytest
import torch

from tests import models
from tests.generation.families import FAMILIES, generated, tiny
from tests.matrix import matrix

pytest.importorskip("transformers")

#: why they decode one token at a time
REFUSED = {
    "bamba": "its cache cannot be rewound: DynamicCache of LinearAttentionLayer",
    "falcon_h1": "its cache cannot be rewound",
    "mamba": "its cache cannot be rewound: DynamicCache of LinearAttentionLayer",
    "t5": "T5ForConditionalGeneration is an encoder-decoder model",
    "bart": "BartForConditionalGeneration is an encoder-decoder model",
}
#: why they do if tokens must be those of plain decoding
UNVERIFIABLE = {
    "bloom": "row-wise verification failed: NotByToken: baddbmm of two tensors outside of attention",
    "qwen3_moe": "row-wise verification failed: NotByToken: linear of a tensor without a token dimension",
}


@pytest.mark.sample(3)
@matrix(family=FAMILIES.keys(), exactness=("tokens", "distribution"), at_most=6)
@pytest.mark.filterwarnings("ignore:generate. speculate", "ignore:vbrt.wrap")
def test_every_family_gives_the_tokens_of_plain_decoding_or_says_why_it_has_no_drafts(family, exactness):
    with models.wrap(tiny(family).to(torch.bfloat16), "exact") as vb:
        plain, got = generated(vb), generated(vb, speculate=4, exactness=exactness)
        assert exactness != "tokens" or torch.equal(got.sequences, plain.sequences)
        assert exactness != "tokens" or all(map(torch.equal, got.logits, plain.logits))
        reasons, counted = [why for why in vb.stats().fallbacks if "speculate" in why], vb.stats().speculation
        refused = REFUSED if exactness == "distribution" else REFUSED | UNVERIFIABLE
        if family in refused:
            assert counted is None and len(reasons) == 1 and refused[family] in reasons[0]
        else:
            assert counted.rounds < 13 and not reasons
