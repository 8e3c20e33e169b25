"""What vbrt does beside a transformers that lacks a part: it goes another way and says so, or refuses by name."""

import copy
import importlib
import sys
import warnings

import pytest
import torch

import vbrt
from tests.models import llama
from vbrt.errors import ArgumentError, LibraryError
from vbrt.libraries import probe, transformers_api

transformers = pytest.importorskip("transformers")

IDS = torch.arange(3, 12)[None]
HOW = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}


@pytest.fixture
def without(monkeypatch):
    """A function that has probes not find a part, which transformers itself goes on using."""

    def without(asked):
        find = probe.find
        absent = lambda library, path, default=None: default if path == asked else find(library, path, default)  # noqa: E731
        monkeypatch.setattr(probe, "find", absent)
        monkeypatch.setattr(probe, "_losses", {})

    return without


def wrapped(preset="exact"):
    return vbrt.wrap(llama(dtype=torch.bfloat16), preset, weights={"min_parameters": 0, "keep_head": False})


def test_without_the_parts_of_a_decoding_method_there_are_no_drafts_and_seeds_are_refused(without):
    vb = wrapped()
    plain = vb.generate(IDS, **HOW)
    without("generation.utils:GenerationMixin._prefill")
    with pytest.warns(UserWarning, match=r"transformers \S+ has no .*_prefill.*; decoded one token at a time"):
        assert torch.equal(vb.generate(IDS, **HOW, speculate=3), plain)
    with pytest.raises(ArgumentError, match=r"seed = 1: transformers .*_prefill"):
        vb.generate(IDS, **HOW, seed=1)
    assert any("_prefill" in reason for reason in vb.stats().fallbacks)


def test_without_attention_interfaces_only_distribution_has_drafts(without):
    vb = wrapped()
    plain = vb.generate(IDS, **HOW)
    without("masking_utils:ALL_MASK_ATTENTION_FUNCTIONS")
    with pytest.warns(UserWarning, match="ALL_MASK_ATTENTION_FUNCTIONS.*; decoded one token at a time"):
        assert torch.equal(vb.generate(IDS, **HOW, speculate=3), plain)
    assert any("ALL_MASK_ATTENTION_FUNCTIONS" in reason for reason in vb.stats().fallbacks)
    assert vb.stats().speculation is None
    vb.generate(IDS, **HOW, speculate=3, exactness="distribution")
    assert vb.stats().speculation.rounds


def test_without_a_class_of_cache_layers_steps_are_not_recorded(without):
    without("cache_utils:LinearAttentionLayer")
    vb = vbrt.wrap(llama(), "fp4", weights={"min_parameters": 0})
    with pytest.warns(UserWarning, match="LinearAttentionLayer"):
        vb.generate(IDS, **{**HOW, "max_new_tokens": 40})
    steps = vb.stats().steps
    assert steps.captured == 0 and any("LinearAttentionLayer" in reason for reason in steps.reasons), steps.reasons


def test_without_its_base_class_a_cache_in_the_tiers_is_refused(without, monkeypatch):
    without("cache_utils:CacheLayerMixin")
    monkeypatch.delitem(sys.modules, "vbrt.generation.kv.cache", raising=False)
    with pytest.raises(LibraryError, match=r"transformers \S+ has no .*CacheLayerMixin.*: vbrt.KVCache"):
        importlib.import_module("vbrt.generation.kv.cache")


def test_without_rules_for_checkpoints_their_own_names_are_taken(without, tmp_path):
    model = llama(dtype=torch.bfloat16)
    model.save_pretrained(tmp_path)
    without("core_model_loading:rename_source_key")
    with pytest.warns(UserWarning, match="rename_source_key .*: tensors of checkpoints are read by their names"):
        vb = vbrt.load(tmp_path, copy.deepcopy(model), "dense")
    with torch.no_grad():
        assert torch.equal(vb(IDS).logits, model(IDS).logits)
    assert any("rename_source_key" in reason for reason in vb.stats().fallbacks)


def test_a_cache_goes_by_either_name_and_no_warning_is_ours():
    vb = wrapped()
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        found = [
            vb.generate(IDS, **HOW, **{name: transformers.DynamicCache()}) for name in ("cache", "past_key_values")
        ]
        plain = vb.generate(IDS, **HOW, cache_implementation="vbrt")
        drafted = vb.generate(IDS, **HOW, speculate=2, return_dict_in_generate=True, seed=0)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], plain)
    assert torch.equal(drafted.sequences, plain)
    assert transformers_api.cache_of(drafted).get_seq_length() == plain.shape[1] - 1


def test_without_a_table_of_implementations_experts_run_by_their_modules_forward_and_it_is_said(monkeypatch):
    moe = importlib.import_module("transformers.integrations.moe")
    monkeypatch.setattr(probe, "_losses", {})
    assert transformers_api.experts_function("batched_mm") is not None and not probe.losses()
    monkeypatch.delattr(moe, "ALL_EXPERTS_FUNCTIONS")
    with pytest.warns(UserWarning, match="ALL_EXPERTS_FUNCTIONS .*routed experts are computed one by one"):
        assert transformers_api.experts_function("batched_mm") is None
    assert len(probe.losses()) == 1
