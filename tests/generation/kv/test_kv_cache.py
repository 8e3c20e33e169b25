"""`vbrt.KVCache` in transformers' generation: the same tokens and logits as with its own caches."""

import copy
import gc
import threading
import time

import pytest
import torch
import transformers
from torch import nn

import vbrt
from vbrt.errors import ArgumentError, TierError, WrapError

pytestmark = pytest.mark.usefixtures("no_fsync")
PROMPT = 41
NEW = 30
TINY = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
}


def model_of(family: str) -> nn.Module:
    torch.manual_seed(5)
    kinds = {
        "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**TINY)),
        "gpt2": lambda: transformers.GPT2LMHeadModel(
            transformers.GPT2Config(n_embd=32, n_layer=3, n_head=4, vocab_size=96, n_positions=512)
        ),
        "mistral": lambda: transformers.MistralForCausalLM(transformers.MistralConfig(**TINY, sliding_window=29)),
        "gemma3": lambda: transformers.Gemma3ForCausalLM(
            transformers.Gemma3TextConfig(**TINY, head_dim=8, sliding_window=17, sliding_window_pattern=2)
        ),
        "lfm2": lambda: transformers.Lfm2ForCausalLM(
            transformers.Lfm2Config(**TINY, layer_types=["conv", "full_attention", "full_attention"])
        ),
        "t5": lambda: transformers.T5ForConditionalGeneration(
            transformers.T5Config(
                d_model=32, d_ff=48, d_kv=8, num_heads=4, num_layers=2, vocab_size=96, decoder_start_token_id=0
            )
        ),
    }
    model = kinds[family]().eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def wrapped(model: nn.Module, path=None, **budgets) -> vbrt.VBModelWrapper:
    """All of the model in host memory; with `path`, an ssd tier below it."""
    tiers = {"gpu": {"enabled": False}, "cpu": budgets}
    if path is not None:
        tiers["ssd"] = {"enabled": True, "path": str(path)}
    weights = {"format": "dense", "fine": "none", "min_parameters": 0}
    return vbrt.wrap(copy.deepcopy(model), {"weights": weights, "tiers": tiers})


def ids(batch: int = 2) -> torch.Tensor:
    return torch.randint(1, 96, (batch, PROMPT), generator=torch.Generator().manual_seed(1))


def generated(model, **options):
    options = {"max_new_tokens": NEW, "do_sample": False} | options
    inputs = options.pop("inputs", ids())
    return model.generate(
        inputs, attention_mask=torch.ones_like(inputs), return_dict_in_generate=True, output_logits=True, **options
    )


def assert_same(found, wanted):
    assert torch.equal(found.sequences, wanted.sequences)
    assert all(torch.equal(a, b) for a, b in zip(found.logits, wanted.logits, strict=True))


@pytest.mark.sample(4)
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral", "gemma3", "lfm2", "t5"])
def test_tokens_and_logits_are_those_of_transformers_cache(family, tmp_path):
    model = model_of(family)
    wanted = generated(model)
    with wrapped(model, tmp_path) as vb:
        for room in (None, "72KiB"):
            cache = vbrt.KVCache(vb, page=4, room=room)
            assert_same(generated(vb, past_key_values=cache), wanted)
            files = sum(of.tier_bytes["ssd"] for of in vb.stats().caches.values())
            assert bool(files) == (room is not None)
            del cache
            gc.collect()


@pytest.mark.sample(4)
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 3},
        {"num_beams": 3, "num_return_sequences": 2, "do_sample": True},
        {"prompt_lookup_num_tokens": 3, "inputs": ids(1).repeat(1, 2)},
        {"prefill_chunk_size": 16},
        {"do_sample": True, "num_return_sequences": 2},
        {"cache_implementation": "vbrt", "cache_config": {"page": 4, "room": "100KiB"}},
    ],
    ids=["beams", "sampled beams", "drafts of the prompt", "prompt in chunks", "two of each", "by name"],
)
def test_every_way_of_decoding_gives_the_same(options, tmp_path):
    model, by_name = model_of("llama"), "cache_implementation" in options
    torch.manual_seed(0)
    plain = {name: value for name, value in options.items() if name != "prompt_lookup_num_tokens"}
    wanted = generated(model, **({} if by_name else plain))
    with wrapped(model, tmp_path) as vb:
        if not by_name:
            options = {**options, "past_key_values": vbrt.KVCache(vb, page=4, room="100KiB")}
        torch.manual_seed(0)
        found = generated(vb, **options)
        assert_same(found, wanted)
        assert isinstance(found.past_key_values, vbrt.KVCache)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_conversation_goes_on_from_a_shared_prefix(tmp_path):
    model = model_of("llama")
    more = torch.cat([ids(), ids().flip(1)], 1)
    with wrapped(model, tmp_path) as vb, torch.no_grad():
        prefix = vbrt.KVCache(vb, page=4, room="72KiB")
        plain = transformers.DynamicCache()
        vb(ids(), past_key_values=prefix), model(ids(), past_key_values=plain)
        for _ in range(2):
            found = generated(vb, inputs=more, past_key_values=copy.deepcopy(prefix))
            assert_same(found, generated(model, inputs=more, past_key_values=copy.deepcopy(plain)))
        assert prefix.get_seq_length() == PROMPT
        with pytest.raises(WrapError, match="deepcopy"):
            copy.copy(prefix)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_budgets_change_while_it_is_used_and_two_caches_share_the_room(tmp_path):
    model = model_of("llama")
    wanted = generated(model).sequences
    with wrapped(model, tmp_path, budget="1MiB") as vb, torch.no_grad():
        one, two = vbrt.KVCache(vb, page=4), vbrt.KVCache(vb, page=4)
        for cache, batch in ((one, ids()), (two, ids())):
            cache.tokens = [vb(batch, past_key_values=cache).logits[:, -1:].argmax(-1)]
        for step in range(1, NEW):
            if step % 8 == 0:
                vb.set_budget("cpu", ("230KiB", "400KiB", "1MiB")[step // 8 - 1])
            for cache in (one, two):
                logits = vb(cache.tokens[-1], past_key_values=cache).logits
                cache.tokens.append(logits[:, -1:].argmax(-1))
            tiers = vb.stats().tiers
            assert tiers["cpu"].held_bytes <= tiers["cpu"].peak_bytes <= tiers["cpu"].budget_bytes
            if step in (8, 24):
                assert bool(vb.stats().caches[one.name].tier_bytes["ssd"]) == (step == 8)
        for cache in (one, two):
            assert torch.equal(torch.cat(cache.tokens, 1), wanted[:, PROMPT:])


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_weights_give_way_to_the_room_that_a_cache_names(tmp_path):
    model = model_of("llama")
    with wrapped(model, tmp_path, budget="120KiB") as vb:
        with pytest.raises(TierError, match="pass room="):
            generated(vb, past_key_values=vbrt.KVCache(vb, page=4))
        cache = vbrt.KVCache(vb, page=4, room="48KiB")
        assert_same(generated(vb, past_key_values=cache), generated(model))
        homes = {layer.home for layer in vb.stats().layers.values()}
        assert homes == {"cpu", "ssd"}
        tier = vb.stats().tiers["cpu"]
        assert tier.held_bytes <= tier.peak_bytes <= tier.budget_bytes


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_threads_decode_with_caches_of_their_own_while_budgets_change(tmp_path):
    model = model_of("llama")
    wanted, found = generated(model).sequences, {}
    with wrapped(model, tmp_path, budget="1MiB") as vb:

        def work(name: int) -> None:
            found[name] = generated(vb.module, past_key_values=vbrt.KVCache(vb, page=4)).sequences

        threads = [threading.Thread(target=work, args=(name,)) for name in range(3)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            for budget in ("600KiB", "1MiB"):
                vb.set_budget("cpu", budget)
                time.sleep(0.02)
        assert len(found) == 3 and all(torch.equal(tokens, wanted) for tokens in found.values())


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_pages_go_with_the_cache_and_the_cache_with_the_model(tmp_path):
    vb = wrapped(model_of("llama"), tmp_path)
    with torch.no_grad():
        cache = vbrt.KVCache(vb, page=4, room="72KiB")
        before = set(vb.stack.pages)
        vb(ids(), past_key_values=cache)
        assert set(vb.stack.pages) > before
        gc.disable()
        try:
            del cache  # no cycle keeps it
            vb(ids())
            assert set(vb.stack.pages) == before
        finally:
            gc.enable()
        assert not vb.stats().caches
        cache = vbrt.KVCache(vb, page=4, room="72KiB")
        vb(ids(), past_key_values=cache)
        vb.close()
        assert list(tmp_path.iterdir()) == []
        with pytest.raises(TierError, match="closed"):
            cache.layers[0].update(torch.zeros(2, 2, 1, 8), torch.zeros(2, 2, 1, 8))


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("bits", [8, 4])
def test_rounded_caches_stay_close(bits, tmp_path):
    model = model_of("llama")
    with wrapped(model, tmp_path) as vb, torch.no_grad():
        wanted = model(ids()).logits[:, -1]
        cache = vbrt.KVCache(vb, page=4, bits=bits)
        vb(ids()[:, :-1], past_key_values=cache)
        error = (vb(ids()[:, -1:], past_key_values=cache).logits[:, -1] - wanted).norm() / wanted.norm()
        assert 0 < error < {8: 0.002, 4: 0.03}[bits]


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_stats_and_timelines_show_the_cache(tmp_path):
    vb = wrapped(model_of("llama"), tmp_path / "tier")
    with torch.no_grad():
        cache = vbrt.KVCache(vb, page=4, room="72KiB")
        with vb.timeline(tmp_path / "out.html") as recording:
            generated(vb, past_key_values=cache)
    stats = vb.stats()
    of = stats.caches[cache.name]
    assert (of.tokens, of.bits, of.layers) == (PROMPT + NEW - 1, 16, 3)
    assert of.misses > of.prefetched > 0
    assert f"KV cache {cache.name}: 70 tokens" in str(stats)
    assert vbrt.Stats.from_dict(stats.to_dict()).caches == stats.caches
    spans = [span for span in recording.timeline.spans if span.layer.startswith(f"{cache.name}/")]
    assert {span.row for span in spans} == {"ssd>cpu"}
    assert sum(span.nbytes for span in spans) == of.bytes_moved["ssd>cpu"]
    vb.close()


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_what_it_cannot_do_is_refused_by_name(tmp_path):
    model = model_of("llama")
    with pytest.raises(WrapError, match=r"vbrt\.wrap\(model\)"):
        vbrt.KVCache(model)
    with wrapped(model) as vb:
        for options in ({"bits": 5}, {"page": 0}, {"room": "40%"}):
            with pytest.raises(ArgumentError):
                vbrt.KVCache(vb, **options)
        with pytest.raises(TierError, match=r"raise the budget|fit into"), torch.no_grad():
            vb(ids(), past_key_values=vbrt.KVCache(vb, page=4, room=1000))
        cache = vbrt.KVCache(vb, page=4)
        with torch.no_grad():
            vb(ids(), past_key_values=cache)
            with pytest.raises(WrapError, match="reset"):
                vb(ids(1), past_key_values=cache)
        with pytest.raises(WrapError, match="no_grad"):
            cache.layers[0].update(torch.zeros(2, 2, 1, 8, requires_grad=True), torch.zeros(2, 2, 1, 8))
        with pytest.raises(ArgumentError, match="negative"):
            cache.crop(5)
    with vbrt.wrap(nn.Sequential(nn.Linear(64, 64)), {"weights": {"min_parameters": 0}}) as vb:
        with pytest.raises(WrapError, match="transformers config"):
            vbrt.KVCache(vb)
