"""Batches of many sequences with transformers' paged KV cache in 8 and 4 bits, by `vbrt.KVCache`'s codes."""

import copy
import dataclasses

import pytest
import torch

import vbrt
from vbrt.errors import ArgumentError, LibraryError, VBError

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

from tests.integrations import batch_cases  # noqa: E402 - imports transformers
from tests.integrations.batch_cases import HEADS, llama, prompts  # noqa: E402 - imports transformers
from tests.integrations.near_ties import largest_gap  # noqa: E402
from vbrt.generation.kv.paged_codes import PagedTokens  # noqa: E402
from vbrt.integrations import batches  # noqa: E402 - imports transformers
from vbrt.integrations.packaged_models import SMOLLM2, packaged_model  # noqa: E402
from vbrt.integrations.text_generation import Turn  # noqa: E402
from vbrt.libraries import transformers_batching  # noqa: E402

if transformers_batching.CODED_CACHE.refusal():
    pytest.skip(transformers_batching.CODED_CACHE.refusal(), allow_module_level=True)


def gemma():
    return batch_cases.gemma(window=96)


@pytest.fixture(params=[llama, gemma])
def vb(request):
    torch.manual_seed(0)
    with vbrt.wrap(request.param().eval(), "dense") as vb:
        yield vb


def generated(vb, asked, bits, *, new=8, sequences=4):
    return batch_cases.generated(vb, asked, bits=bits, new=new, sequences=sequences)


def test_long_and_short_prompts_that_enter_and_leave_give_their_own_tokens(vb):
    asked = prompts(1, 5, 63, 64, 65, 130, 300, 600)
    plain = generated(vb, asked, 16, new=70)
    coded = generated(vb, asked, 8, new=70)
    assert sum(plain[name] == coded[name] for name in asked) >= len(asked) - 1  # near ties of a random model may turn
    agree = sum(
        a == b for name in asked for a, b in zip(plain[name][:5], generated(vb, asked, 4)[name][:5], strict=True)
    )
    assert agree >= 0.8 * 5 * len(asked)


def cache_of(vb, bits, lengths, new=4, **more):
    """Generate, and return the manager with its cache."""
    asked = prompts(*lengths)
    how = batches.cache_for(vb, max(lengths) + new, 4, len(asked), kv_bits=bits)
    cache = {**how.config, **more}
    with transformers_batching.batching(
        vb.module, sample=False, max_new_tokens=new, cache=cache, storage=how.storage
    ) as manager:
        for name, ids in asked.items():
            manager.add_request(input_ids=ids, request_id=name, max_new_tokens=new, eos_token_id=-1)
        found = {result.request: result.tokens for result in transformers_batching.results_of(manager, len(asked))}
        return found, manager.batch_processor.cache


def test_the_cache_takes_the_bytes_of_its_codes(vb):
    bytes_of = {}
    for bits in (16, 8, 4):
        _, cache = cache_of(vb, bits, (300, 20, 500, 40))
        bytes_of[bits] = cache.cache_tensor.nbytes
        assert cache.num_blocks == 8
        if bits < 16:
            tails = sum(allocator.coded.nbytes for allocator in cache.cache_allocators.values())
            layers, each = vb.config.num_hidden_layers, 64 * HEADS["num_key_value_heads"] * HEADS["head_dim"] * 4
            assert tails == layers * (4 + 1) * each
    assert bytes_of[16] > 3.5 * bytes_of[8] > 3.5 * 1.7 * bytes_of[4]  # of a float32 model, with groups of 32 channels


def test_more_blocks_fit_in_the_same_memory(vb, monkeypatch):
    monkeypatch.setattr(batches, "_free_bytes", lambda vb: 16 << 20)
    blocks = {bits: batches.cache_for(vb, 4096, 32, kv_bits=bits).config["num_blocks"] for bits in (16, 8, 4)}
    tails = 3 * 32 * 64 * 64 * 4
    for bits in (8, 4):
        storage = batches.cache_for(vb, 4096, 32, kv_bits=bits).storage
        assert blocks[bits] == ((16 << 20) - tails) // (3 * storage.page_bytes)
    assert blocks[16] == (16 << 20) // (3 * 2 * 256 * 64 * 4)
    assert blocks[4] > 1.5 * blocks[8] > 1.5 * 2 * blocks[16]


def test_sequences_that_share_a_beginning_share_its_pages(monkeypatch):
    cache = pytest.importorskip("transformers.generation.continuous_batching.cache").PagedAttentionCache
    plain, shared = cache.search_prefix_match, []
    monkeypatch.setattr(cache, "search_prefix_match", lambda *args: shared.append(plain(*args)) or shared[-1])
    torch.manual_seed(0)
    with vbrt.wrap(llama().eval(), "dense") as vb:
        begin = prompts(520)["520"]
        asked = {str(number): [*begin, number + 5, 7] for number in range(6)}
        alone = {name: generated(vb, {name: ids}, 8)[name] for name, ids in asked.items()}
        assert generated(vb, asked, 8, sequences=1) == alone  # each after the other finds the pages
        assert shared.count(512) == 5


def test_forked_sequences_go_on_from_copied_pages_and_tails(monkeypatch):
    torch.manual_seed(0)
    with vbrt.wrap(llama().eval(), "dense") as vb:
        (ids,) = prompts(90).values()
        how = batches.cache_for(vb, 200, 4, 3, kv_bits=8)
        plain, copied = PagedTokens.copy_tails, []

        def copying(tokens):
            copied.append(list(tokens._copies))
            plain(tokens)

        monkeypatch.setattr(PagedTokens, "copy_tails", copying)
        config = copy.deepcopy(vb.module.generation_config)
        config.num_return_sequences = 3
        monkeypatch.setattr(vb.module, "generation_config", config)
        with transformers_batching.batching(
            vb.module, sample=False, max_new_tokens=60, cache=how.config, storage=how.storage
        ) as manager:
            manager.add_request(input_ids=ids, request_id="a", max_new_tokens=60, eos_token_id=-1)
            found = [result.tokens for result in transformers_batching.results_of(manager, 3)]
        assert copied == [[(1, 2), (1, 3)]] and found == [found[0]] * 3 and len(found[0]) == 60
        assert found[0] == generated(vb, {"a": ids}, 8, new=60)["a"]


def test_a_real_models_tokens_are_those_of_kv_cache_in_8_bits():
    try:
        file = packaged_model(SMOLLM2)
    except VBError as error:
        pytest.skip(str(error))
    with vbrt.from_pretrained(file) as vb:
        tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        texts = ("The capital of France is", "def fib(n):\n" * 12, "Once upon a time there was a small boat. " * 9)
        asked = {text: tokenizer(text)["input_ids"] for text in texts}
        many = generated(vb, asked, 8, new=16)
        for name, ids in asked.items():
            cache = vbrt.KVCache(vb, bits=8, page=64)
            out = vb.generate(torch.tensor([ids]), past_key_values=cache, max_new_tokens=16, do_sample=False)
            assert many[name] == out[0, len(ids) :].tolist()[: len(many[name])]


def test_other_bits_and_odd_channels_are_refused_by_name(vb):
    with pytest.raises(ArgumentError, match=r"kv_bits = 5; expected one of 16, 8, 4"):
        next(batches.generate_many(vb, prompts(3), Turn(2), kv_bits=5))
    vb.config.head_dim = 31
    with pytest.raises(ArgumentError, match=r"bits = 4: keys and values of \(31, 31\) channels"):
        batches.cache_for(vb, 10, 1, kv_bits=4)


def test_a_transformers_without_such_a_cache_is_refused_by_name_and_plain_batches_run(vb, monkeypatch):
    plain = transformers_batching.CODED_CACHE
    lacking = dataclasses.replace(plain, asks=(*plain.asks, f"{transformers_batching._FULL}.copy_pages"))
    monkeypatch.setattr(transformers_batching, "CODED_CACHE", lacking)
    with pytest.raises(LibraryError, match=r"FullAttentionCacheAllocator\.copy_pages.*leave out --kv"):
        generated(vb, prompts(3), 8)
    assert len(generated(vb, prompts(3), 16)["3"]) == 8


def test_a_constructor_that_does_not_look_up_allocators_is_refused(monkeypatch):
    with pytest.raises(LibraryError, match=r"makes no use of ATTN_TYPE_TO_ALLOCATOR"):
        transformers_batching._with_names(lambda: None, ATTN_TYPE_TO_ALLOCATOR={})


@pytest.mark.parametrize("bits", [8, 4])
def test_coded_answers_turn_at_near_ties_only(vb, bits):
    asked = prompts(1, 64, 130, 600)
    wanted, found = generated(vb, asked, 16, new=70), generated(vb, asked, bits, new=70)
    assert largest_gap(vb, asked, wanted, found) < {8: 0.02, 4: 0.3}[bits]


@pytest.mark.gpu
@pytest.mark.parametrize("bits", [8, 4])
def test_a_gpu_gathers_tokens_by_the_kernel_and_its_answers_stay_near(bits, monkeypatch):
    from vbrt.kernels.cuda import kv_pages

    plain, gathered = kv_pages.gather, []
    monkeypatch.setattr(kv_pages, "gather", lambda *args: gathered.append(1) or plain(*args))
    torch.manual_seed(0)
    with vbrt.wrap(llama().eval().to("cuda"), "dense") as vb:
        asked = prompts(1, 64, 130, 600)
        wanted, found = generated(vb, asked, 16, new=70), generated(vb, asked, bits, new=70)
        assert gathered and {len(tokens) for tokens in found.values()} == {70}
        assert largest_gap(vb, asked, wanted, found) < {8: 0.02, 4: 0.3}[bits]
