"""The benchmark of published mixtures: rows of tiny models of each of its classes."""

import pytest
import torch

pytest.importorskip("transformers")

import vbrt
from scripts import experts_decode, experts_models
from scripts.experts_decode import Decoder, Turns
from scripts.experts_models import MODELS, rows

SIZES = {"vocab_size": 1024, "hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32}
SIZES |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "num_experts_per_tok": 2}
OWN = {
    "gpt-oss-120b": {"num_local_experts": 8},
    "Qwen3.6-35B-A3B": {"num_experts": 8, "shared_expert_intermediate_size": 32, "linear_num_key_heads": 2}
    | {"linear_num_value_heads": 2, "linear_key_head_dim": 32, "linear_value_head_dim": 32},
    "GLM-4.5-Air": {"n_routed_experts": 8},
}
OWN["Qwen3.8-Flash-Next"] = OWN["Qwen3.6-35B-A3B"] | {"hc_lowrank": 16, "ngram_vocab_size_base": 1000}
OWN["Qwen3.8-Flash-Next"] |= {"indexer_n_heads": 2, "indexer_head_dim": 32, "indexer_budget": 32}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.filterwarnings("ignore")
def test_a_tiny_model_has_a_row(name, monkeypatch):
    monkeypatch.setattr(experts_decode, "WARM", 1)
    monkeypatch.setattr(experts_decode, "COUNTED", 2)
    if MODELS[name].turns is not None:
        monkeypatch.setitem(MODELS, name, MODELS[name]._replace(turns=Turns(1, 3)))
    (row,) = rows(name, 4, [], [16], torch.device("cpu"), **SIZES | OWN[name])
    assert row["model"] == name and row["layers"] == 4 < row["of"]
    assert row["whole_tokens_s"] == pytest.approx(1e3 / row["ms"] * 4 / row["of"])
    assert row["counted_tokens"] == (2 if MODELS[name].turns is None else 3)
    assert row["prompt_16_ms"] > 0 and row["whole_prompt_16_tokens_s"] > 0


@pytest.mark.filterwarnings("ignore")
def test_steps_that_the_host_launches_are_few_and_compared_with_transformers(monkeypatch):
    """The plain model's steps come first, with its experts in bf16, then as many of the wrapped one."""
    name, steps, seen = "Qwen3.8-Flash-Next", [], []
    step, build = Decoder.step, experts_models.build

    def stepped(self):
        steps.append(type(self._model))
        seen.append(getattr(self._model.config, "_experts_implementation", None))
        step(self)

    def built(*args, **sizes):
        model, whole = build(*args, **sizes)
        assert {weight.dtype for weight in model.parameters()} == {torch.bfloat16}
        built.before = model.config._experts_implementation
        return model, whole

    monkeypatch.setattr(Decoder, "step", stepped)
    monkeypatch.setattr(experts_models, "build", built)
    monkeypatch.setitem(MODELS, name, MODELS[name]._replace(turns=Turns(1, 2)))
    (row,) = rows(name, 4, [], [16], torch.device("cpu"), **SIZES | OWN[name])
    first = 3 + 1 + 2  # of a decoder, warm, counted
    assert [issubclass(kind, vbrt.VBModelWrapper) for kind in steps] == [False] * first + [True] * first
    assert set(seen[:first]) == {"batched_mm"} and set(seen[first:]) == {built.before}
    assert row["plain_ms"] > 0 and row["counted_tokens"] == 2
    assert MODELS["GLM-4.5-Air"].turns is None
