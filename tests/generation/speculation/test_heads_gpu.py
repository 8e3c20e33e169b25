"""Multi-token prediction heads on a GPU, resident and streamed, fed by the passes of generate."""

import pytest
import torch

import vbrt

pytest.importorskip("transformers")

import transformers

from tests.generation.speculation.mtp_models import FAMILIES, written
from tests.generation.speculation.test_heads import by_formula, head_of, of_ids
from vbrt.generation.speculation.heads import Heads, hidden_states_fed

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("how", ["resident", "streamed"])
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_drafts_on_a_gpu_are_those_of_the_formula(family, how, tmp_path):
    checkpoint = written(family, tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    config = vbrt.load_config("dense", compute={"captures": False})
    room = vbrt.make_plan(model, config).page_bytes // 2
    with vbrt.wrap(model, config, tiers={} if how == "resident" else {"gpu": {"budget": room}}) as vb:
        assert (vbrt.load_heads(vb).plan.home_bytes("cpu") > 0) == (how == "streamed")
        heads, ids = Heads(head_of(vb)), torch.randint(1, 97, (2, 9), device="cuda")
        with hidden_states_fed(vb.vbrt.module, heads.feed):
            ids = vb.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0)
        got = heads.propose(of_ids(ids), 3).cpu()
        hidden_BTD = vb(ids[:, :-1], use_cache=False, output_hidden_states=True).hidden_states[-1].cpu()
    ids = ids.cpu()
    for place in range(3):
        g_BTD = by_formula(checkpoint, family, ids[:, 1:], hidden_BTD)
        scores_BV = g_BTD[:, -1] @ checkpoint.model.lm_head.weight.T
        # TF32 or another order of sums may swap two tokens that score alike
        near = scores_BV.max(-1).values - scores_BV.gather(1, got[:, place : place + 1])[:, 0]
        assert near.max() < 0.05 * scores_BV.std()
        hidden_BTD = torch.cat([hidden_BTD, g_BTD[:, -1:]], 1)
        ids = torch.cat([ids, got[:, place : place + 1]], 1)
