"""Tokens of a layer in pages: the same as transformers' own layers hold, wherever the pages live."""

import copy
import random
import re
from _thread import allocate_lock

import pytest
import torch
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from tests.generation.kv.kv_stacks import PAGE, SHAPE, assert_empty, layers_of, stack_of, tokens
from vbrt.errors import TierError
from vbrt.generation.kv import fetch_ring
from vbrt.generation.kv.cache import KVLayer, KVSlidingLayer
from vbrt.generation.kv.quantized import KVShape, page_code
from vbrt.kernels.cuda import kv_pages

pytestmark = pytest.mark.usefixtures("no_fsync")
HOMES = {
    "near": {},
    "far": {"room": 42_000},
    "files": {"room": 42_000, "far": 0},
    "both": {"room": 50_000, "far": 9000},
}


def assert_same(found, wanted):
    assert all(torch.equal(a, b) and a.is_contiguous() for a, b in zip(found, wanted, strict=True))


def operate(choose: random.Random, layers, plain) -> None:
    """Do one thing to the layers of a cache and to transformers'."""
    batch, length = plain[0].keys.shape[0], plain[0].get_seq_length()
    name = choose.choice(["reorder_cache", "crop", "batch_select_indices", "batch_repeat_interleave"])
    if name == "crop":
        argument = -choose.choice([1, 2, PAGE, 3 * PAGE + 1, length - 1])
    elif name == "batch_repeat_interleave":
        argument = 2 if batch < 3 else 1
    else:
        count = batch if name == "reorder_cache" else choose.randint(1, batch)
        argument = torch.tensor([choose.randrange(batch) for _ in range(count)])
    for layer in (*layers, *plain):
        getattr(layer, name)(argument)


@pytest.mark.sample(3)
@pytest.mark.parametrize(("home", "dims"), [*((home, SHAPE[2:]) for home in HOMES), ("both", (8, 8))])
def test_any_sequence_of_operations_gives_what_transformers_gives(home, dims, tmp_path):
    options = dict(HOMES[home])
    stack = stack_of(tmp_path, far=options.pop("far", 1 << 30))
    layers = [KVLayer(layer) for layer in layers_of(stack, **options)]
    plain = [DynamicLayer() for _ in layers]
    choose = random.Random(home)
    for turn in range(70):
        count = choose.choice([1, 1, 1, 2, PAGE, 3 * PAGE, 40]) if turn % 20 else 70
        batch = plain[0].keys.shape[0] if turn else SHAPE[0]
        for layer, other in zip(layers, plain, strict=True):
            new = tokens(count, batch=batch, dims=dims)
            assert layer.get_mask_sizes(count) == other.get_mask_sizes(count)
            assert_same(layer.update(*new), other.update(*new))
        if choose.random() < 0.3:
            operate(choose, layers, plain)
            assert layers[0].get_seq_length() == plain[0].get_seq_length()
        if turn % 9 == 0:
            assert_same((layers[1].keys, layers[1].values), (plain[1].keys, plain[1].values))
        if plain[0].get_seq_length() > 250:
            for layer in (*layers, *plain):
                layer.reset()
            plain = [DynamicLayer() for _ in layers]
            layers = [type(layer)(layer.tokens) for layer in layers]
            new = tokens(3, dims=dims)
            for layer, other in zip(layers, plain, strict=True):
                assert_same(layer.update(*new), other.update(*new))
    used = layers[0].tokens.store.bytes_by_tier()
    assert bool(used["cpu"]) == (home in ("far", "both"))
    assert bool(used["ssd"]) == (home in ("files", "both"))
    assert used["gpu"] <= options.get("room", 1 << 30)
    del layers, layer
    assert_empty(stack)
    stack.close()


@pytest.mark.parametrize("window", [PAGE + 1, 5 * PAGE + 3])
def test_a_window_gives_what_transformers_gives_and_frees_what_it_has_passed(window, tmp_path):
    stack = stack_of(tmp_path)
    (tokens_of_layer,) = layers_of(stack, 1, room=42_000, window=window)
    layer, plain = KVSlidingLayer(tokens_of_layer), DynamicSlidingWindowLayer(window)
    for turn in range(60):
        count = (1, 1, 3, 2 * PAGE, 40)[turn % 5]
        new = tokens(count)
        assert layer.get_mask_sizes(count) == plain.get_mask_sizes(count)
        assert_same(layer.update(*new), plain.update(*new))
    parts = tokens_of_layer.held.parts
    assert sum(part.used for part in parts[1:]) * PAGE < window
    for one in (layer, plain):
        one.activate_past_recording()
    for _ in range(5):
        new = tokens(7)
        for one in (layer, plain):
            one.update(*new)
            one.crop(-5)
        new = tokens(1)
        assert_same(layer.update(*new), plain.update(*new))
        for one in (layer, plain):
            one.crop(0)
    stack.close()


def test_streamed_pages_come_ahead_of_their_use_and_are_written_once(tmp_path):
    stack = stack_of(tmp_path)
    layers = layers_of(stack, 3, room=60_000)
    store = layers[0].store
    for layer in layers:
        layer.append(*tokens(97))
    before = copy.copy(store.tally.bytes_moved)
    for _ in range(3):
        for layer in layers:
            layer.append(*tokens(1))
    tally = store.tally
    below = [e.filled * e.code.page_bytes for extents in store.extents.values() for e in extents if e.page.home]
    assert before["gpu>cpu"] == tally.bytes_moved["gpu>cpu"] == sum(below)
    assert tally.misses and tally.prefetched >= tally.misses - 1
    on_top = [sum(e.nbytes for e in extents if e.page.home == 0) for extents in store.extents.values()]
    assert len(set(on_top)) == 1 and on_top[0], "every layer has the same share"
    assert tally.bytes_moved["cpu>gpu"] == 3 * sum(below)
    stack.close()


def test_full_tiers_are_an_error_that_says_what_would_do_and_lose_nothing(tmp_path):
    stack = stack_of(tmp_path, near=60_000, far=20_000, files=0)
    (layer,) = layers_of(stack, 1)
    plain, count = DynamicLayer(), 0
    with pytest.raises(TierError, match=r"layer 0 fit into no tier .*set_budget.*bits=8"):
        while True:
            new, count = tokens(PAGE), count + 1
            found = layer.append(*new)
            assert_same(found, plain.update(*new))
    assert count > 15
    assert layer.length == plain.get_seq_length()
    stack.set_budget("cpu", 100_000)
    for _ in range(9):
        new = tokens(PAGE)
        assert_same(layer.append(*new), plain.update(*new))
    with pytest.raises(TierError, match=r"needs \d+ bytes of tiers.gpu .*raise the budget"):
        layers_of(stack, 1, room=500)[0].append(*tokens(1))
    stack.close()


def test_a_damaged_file_is_an_error_with_its_name(tmp_path):
    stack = stack_of(tmp_path, far=0)
    (layer,) = layers_of(stack, 1, room=40_000)
    layer.append(*tokens(120))
    extent = next(part.extent for part in layer.held.parts if part.extent.page.home)
    path = extent.level.slots[extent.key].room.path
    data = bytearray(path.read_bytes())
    data[5000] ^= 1
    path.write_bytes(data)
    length = layer.length
    for _ in range(2):
        with pytest.raises(TierError, match=re.escape(path.name)):
            layer.append(*tokens(1))
    assert layer.length == length
    data[5000] ^= 1
    path.write_bytes(data)
    layer.append(*tokens(1))
    stack.close()


def test_a_copy_shares_sealed_pages_and_goes_on_by_itself(tmp_path):
    stack = stack_of(tmp_path)
    (layer,), (other,) = layers_of(stack, 1, room=42_000), layers_of(stack, 1, room=42_000)
    plain = DynamicLayer()
    new = tokens(101)
    layer.append(*new), plain.update(*new)
    pages = len(stack.pages)
    layer.copy_to(other)
    assert len(stack.pages) <= pages + 2, "a tail and a ring"
    second = copy.deepcopy(plain)
    for _ in range(30):
        for one, like in ((layer, plain), (other, second)):
            new = tokens(1)
            assert_same(one.append(*new), like.update(*new))
    del layer, one
    new = tokens(1)
    assert_same(other.append(*new), second.update(*new))
    stack.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bits", [8, 4])
def test_the_error_of_rounded_pages_is_half_a_step_of_their_group(bits, dtype):
    shape = KVShape(2, 3, 128, 16, 24, dtype)
    code = page_code(shape, bits)
    keys = (torch.randn(2, 3, 256, 16) + 20 * torch.randn(16)).to(dtype)  # channels with offsets, as keys have
    values = torch.randn(2, 3, 256, 24).to(dtype)
    found = tuple(torch.empty_like(x) for x in (keys, values))
    code.decode(code.encode(keys, values), found)
    for x, y, along, group in ((keys, found[0], 2, 64), (values, found[1], 3, 24)):
        groups = x.float().unflatten(along, (-1, group))
        low, high = groups.amin(along + 1, keepdim=True), groups.amax(along + 1, keepdim=True)
        bound = (high - low + low.abs() * 2**-7) / (2**bits - 1) / 2 * (1 + 2**-6)
        rounding = groups.abs().amax() * torch.finfo(dtype).eps
        error = (groups - y.float().unflatten(along, (-1, group))).abs()
        assert (error <= bound + rounding).all()
        assert error.max() > 0
    usual = page_code(KVShape(1, 8, 256, 128, 128, dtype), bits)
    assert usual.page_bytes * 8 == usual.shape.plain_bytes * 8 / (8 * dtype.itemsize) * (bits + 0.5)


def test_the_tail_is_exact_and_sealed_pages_are_rounded_once(tmp_path):
    stack = stack_of(tmp_path)
    (layer,) = layers_of(stack, 1, bits=4, page=8)
    plain = DynamicLayer()
    earlier = None
    for _ in range(60):
        new = tokens(1)
        found, wanted = layer.append(*new), plain.update(*new)
        exact = layer.held.open
        assert exact >= min(layer.length, 8)
        assert_same((x[:, :, -exact:].contiguous() for x in found), (x[:, :, -exact:] for x in wanted))
        if earlier is not None:
            assert torch.equal(found[0][:, :, :8], earlier)
        if layer.held.sealed >= 8:
            earlier = earlier if earlier is not None else layer.read()[0][:, :, :8].clone()
    assert not torch.equal(found[0], wanted[0])
    stack.close()


def test_keys_and_values_of_one_shape_are_copied_at_once(tmp_path, monkeypatch):
    copied = []
    monkeypatch.setattr(kv_pages, "serves", lambda pages, out: copied.append([x.shape[0] for x in out]))
    layer, plain = KVLayer(layers_of(stack_of(tmp_path))[0]), DynamicLayer()
    for count in (5 * PAGE, 1):
        new = tokens(count, dims=(8, 8))
        assert_same(layer.update(*new), plain.update(*new))
    assert copied and all(each == [2 * SHAPE[0]] for each in copied)
    for each in (layer, plain):
        each.reorder_cache(torch.tensor([1, 0]))
    new = tokens(1, dims=(8, 8))
    assert_same(layer.update(*new), plain.update(*new))
    assert copied[-1] == [SHAPE[0]] * 2


def test_a_wait_for_an_extent_that_no_thread_reads_ends_in_an_error(monkeypatch):
    monkeypatch.setattr(fetch_ring, "_LONGEST_S", 0.01)
    bell = allocate_lock()
    load = fetch_ring.Load((3, 1), None, 1, 0, ahead=True, bell=bell)
    bell.acquire()
    with pytest.raises(TierError, match=r"layer 3: extent 1 was not read .*make another cache"):
        load.join()
    bell.release()
    load.join()
    assert not bell.locked()
