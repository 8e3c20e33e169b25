"""Experts in part on a drive, while the device decides: stand-ins for its kernels, the thread that reads is the real
one."""

import copy
import gc
import threading
import time
from dataclasses import replace

import pytest
import torch

from tests.layers.experts import tables
from tests.layers.experts.beside_gpu import wrap_beside
from tests.layers.experts.test_cached_lossless import EXPERTS, PAGE, both, decided, layer_of, routed  # noqa: F401
from tests.layers.experts.test_hosted_experts import NAME, TRACE, cached, device, outputs  # noqa: F401
from tests.models import qwen3_moe
from vbrt.errors import TierError
from vbrt.kernels.cuda.experts import drive_mail
from vbrt.layers.experts import device_cache
from vbrt.tiers.storage.ssd_tier import SsdTier

pytest.importorskip("transformers")
PASSES = (1, 2, 1, 3, 7, 1, 8, 40, 1, 12, 2)
SLOTS = 5  # of a layer, on the device


@pytest.fixture(autouse=True)
def mailed(monkeypatch):
    monkeypatch.setattr(drive_mail, "_launch", tables.drive_launch)


@pytest.fixture
def on_drive(decided, monkeypatch, tmp_path):  # noqa: F811
    """Wraps a model whose experts live on a drive; so many pages fit into host memory, two of which pass through. With
    `drive`, as many pages live there, the others in host memory."""

    def wrapped(model, host, *, format="dense", drive=None, device_decides=True):
        budget = None if drive is None else {"budget": drive * (PAGE + 8192)}
        ssd = {"enabled": True, "path": str(tmp_path)} | (budget or {})
        room = SLOTS * len(model.model.layers) + 2
        vb = wrap_beside(monkeypatch, model, format, room=room, cpu={"budget": host * PAGE}, ssd=ssd)
        if device_decides:
            expert_cache = vb._attachment.expert_cache
            expert_cache.follow()
            assert expert_cache.fallbacks == [], expert_cache.fallbacks
        return vb

    return wrapped


def cache_of(vb):
    return vb._attachment.expert_cache._cache


def files(vb):
    """Path of each page on the drive."""
    below = vb.stack.levels[-1]
    return {key: slot.room.path for key, slot in below.slots.items()}


def forget(vb):
    """Have neither the device nor the host keep pages."""
    cache = cache_of(vb)
    cache._tables.forget()
    cache.drive._torn = True


def flip(path, at=-100):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


dense = pytest.mark.parametrize("decided", ["dense"], indirect=True)


@torch.no_grad()
@pytest.mark.parametrize("implementation", ["batched_mm", "grouped_mm"])
@pytest.mark.parametrize("host", [5, 18])
def test_passes_of_any_size_give_the_bits_of_the_plain_module(on_drive, decided, request, host, implementation):  # noqa: F811
    format = request.node.callspec.params["decided"]
    planes = 2 if format.startswith("exact") else 1
    plain = qwen3_moe(count=EXPERTS, experts=implementation)
    vb = on_drive(copy.deepcopy(plain), 2 * planes + planes * host, format=format)
    assert {page.home for page in vb.stack.pages.values() if "#cache" not in page.key} == {2}
    layer, theirs = layer_of(vb.module), layer_of(plain)
    for tokens in PASSES * 4:
        assert torch.equal(*both(layer, theirs, routed(tokens))), tokens
    stats = vb.stats()
    experts, counts = stats.layers[layer.handle.spec.name].experts, cache_of(vb).drive.counts
    assert experts.decides == "gpu" and "decides" not in str(stats.fallbacks)
    moved = stats.layers[layer.handle.spec.name].bytes_moved
    assert moved["ssd>cpu"] == counts.bytes > 0 and moved["cpu>gpu"] >= moved["ssd>cpu"]
    assert sum(page.bytes_moved.get("ssd>cpu", 0) for page in layer.handle.pages) == counts.bytes
    vb.close()


@dense
@torch.no_grad()
def test_hits_and_misses_do_not_depend_on_the_drive(on_drive, decided):  # noqa: F811
    found = []
    for vb in (decided(qwen3_moe(count=EXPERTS), SLOTS), on_drive(qwen3_moe(count=EXPERTS), 9)):
        layer = layer_of(vb.module)
        for tokens in PASSES:
            layer(*(getattr(routed(tokens), name) for name in ("x", "ids", "weights")))
        of = vb.stats(experts=True)
        name = layer.handle.spec.name
        rows = [(page.hits, page.misses, page.bytes_moved["cpu>gpu"]) for page in layer.handle.pages]
        found.append((rows, of.layers[name].hits, of.layers[name].misses))
        vb.close()
    assert found[0] == found[1]


@dense
@torch.no_grad()
def test_pages_in_host_memory_are_fetched_by_address_and_those_on_the_drive_are_read(on_drive, monkeypatch):
    plain = qwen3_moe(count=EXPERTS)
    vb = on_drive(copy.deepcopy(plain), 2 * EXPERTS - 9 + 6, drive=13)
    homes = [page.home for page in vb.stack.pages.values() if "#cache" not in page.key]
    assert 0 < homes.count(2) <= 20 and homes.count(1) == len(homes) - homes.count(2)
    read, get = set(), SsdTier.get
    monkeypatch.setattr(SsdTier, "get", lambda self, room, out, *, key: (read.add(key), get(self, room, out, key=key)))
    layer, theirs = layer_of(vb.module), layer_of(plain)
    for tokens in PASSES:
        assert torch.equal(*both(layer, theirs, routed(tokens))), tokens
    assert read == {page.key for page in layer.handle.pages if page.home == 2} and read
    vb.close()


@dense
@torch.no_grad()
def test_pages_that_the_device_misses_most_get_addresses(on_drive, monkeypatch):
    monkeypatch.setattr(device_cache, "_CHOOSE_EVERY", 4)
    plain = qwen3_moe(count=EXPERTS)
    vb = on_drive(copy.deepcopy(plain), 2 + 12)  # of which 3 are not fixed
    cache = cache_of(vb)
    assert len(cache.drive._staged.slots) == 12 and cache.drive.batch == 1
    layer, first = vb.module.model.layers[0].mlp.experts, plain.model.layers[0].mlp.experts
    ids = [[0, 1], [2, 9], [10, 11], [12, 13], [0, 1], [14, 15], [3, 4], [5, 6]]
    posts = []
    for _ in range(12):
        for row in ids:
            given = replace(routed(1), ids=torch.tensor([row]))
            assert torch.equal(*both(layer, first, given)), row
        posts.append(cache.drive.counts.posts)
    addresses = cache._tables._sources[0].tolist()
    fixed = [number for number, address in enumerate(addresses) if address >= 0]
    assert len(fixed) == 9 and max(fixed) < EXPERTS, fixed
    staged = {slot.data_ptr() for slot in cache.drive._staged.slots}
    assert all(addresses[number] in staged for number in fixed)
    assert posts[-1] - posts[-2] < posts[0]  # with all their pages fixed, leases post nothing
    vb.close()


@dense
@torch.no_grad()
@pytest.mark.parametrize("damage", ["flipped", "missing", "truncated"])
@pytest.mark.parametrize("tokens", [1, 40], ids=["decoding", "prompt"])
def test_a_page_that_cannot_be_read_is_an_error_by_name_and_the_next_call_works(on_drive, damage, tokens):
    plain = qwen3_moe(count=EXPERTS)
    vb = on_drive(copy.deepcopy(plain), 2 + 8)
    layer, theirs, given = layer_of(vb.module), layer_of(plain), routed(tokens)
    assert torch.equal(*both(layer, theirs, given))
    forget(vb)
    key = layer.handle.pages[int(given.ids[0, 0])].key
    path = files(vb)[key]
    whole = path.read_bytes()
    if damage == "missing":
        path.unlink()
    elif damage == "flipped":
        flip(path)
    else:
        path.write_bytes(whole[:-4096])
    with pytest.raises(TierError, match=r"lost|damaged|truncated") as caught:
        y = layer(given.x, given.ids, given.weights)
        assert tokens == 1 and y.isnan().all()
        cache_of(vb).check()
    assert key in str(caught.value) and str(path) in str(caught.value)
    assert ("NaN" in str(caught.value)) == (tokens == 1)
    path.write_bytes(whole)
    for each in (given, routed(2), given):
        assert torch.equal(*both(layer, theirs, each))
    cache_of(vb).check()
    vb.close()


@dense
@torch.no_grad()
def test_a_drive_that_does_not_deliver_in_time_is_an_error_and_the_next_call_works(on_drive, monkeypatch):
    plain = qwen3_moe(count=EXPERTS)
    vb = on_drive(copy.deepcopy(plain), 2 + 8)
    cache_of(vb)._tables._mail.wait_us = 20_000
    layer, theirs, given = layer_of(vb.module), layer_of(plain), routed(1)
    get, slow = SsdTier.get, threading.Event()
    monkeypatch.setattr(SsdTier, "get", lambda self, room, out, *, key: (slow.wait(0.2), get(self, room, out, key=key)))
    assert layer(given.x, given.ids, given.weights).isnan().all()
    with pytest.raises(TierError, match=r"did not come from the drive within 10 s.*experts.drive_wait_s"):
        layer(given.x, given.ids, given.weights)
    slow.set()
    assert torch.equal(*both(layer, theirs, given))
    vb.close()


@dense
@torch.no_grad()
@pytest.mark.parametrize("where", ["read", "lent", "choose", "ask", "bring"])
def test_after_an_interrupt_the_next_call_works(on_drive, monkeypatch, where):
    monkeypatch.setattr(device_cache, "_CHOOSE_EVERY", 3)
    plain = qwen3_moe(count=EXPERTS)
    vb = on_drive(copy.deepcopy(plain), 2 + 12)
    layer, theirs = layer_of(vb.module), layer_of(plain)
    first, of_first = vb.module.model.layers[0].mlp.experts, plain.model.layers[0].mlp.experts
    for tokens in (1, 40, 1, 2):
        assert torch.equal(*both(first, of_first, routed(tokens)))
        assert torch.equal(*both(layer, theirs, routed(tokens)))

    def broken(*_, **__):
        raise KeyboardInterrupt

    drive, interrupted = cache_of(vb).drive, threading.current_thread()
    with monkeypatch.context() as patched:
        if where == "read":
            read = drive._staged.read
            patched.setattr(
                drive._staged, "read", lambda *of: (broken if threading.current_thread() is interrupted else read)(*of)
            )
            drive._torn = True
        elif where == "lent":
            patched.setattr("vbrt.layers.experts.prompt_ring.copy_pages", broken)
        elif where == "choose":
            patched.setattr(cache_of(vb)._tables, "publish", broken)
        else:
            launch = drive_mail._launch
            patched.setattr(drive_mail, "_launch", lambda name: broken if name == where else launch(name))
        with pytest.raises(KeyboardInterrupt):
            for _ in range(3):
                for tokens in (40, 1):
                    first(*(getattr(routed(tokens), name) for name in ("x", "ids", "weights")))
                    layer(*(getattr(routed(tokens), name) for name in ("x", "ids", "weights")))
    for _ in range(3):
        for tokens in PASSES:
            assert torch.equal(*both(first, of_first, routed(tokens))), tokens
            assert torch.equal(*both(layer, theirs, routed(tokens))), tokens
    vb.close()


@dense
def test_the_host_decides_with_the_reason_where_host_memory_has_too_little_room(on_drive):
    vb = on_drive(qwen3_moe(count=EXPERTS), 4, device_decides=False)
    vb._attachment.expert_cache.follow()
    (why,) = vb._attachment.expert_cache.fallbacks
    assert "tiers.cpu has room for 2 such pages beside those that pass through, of 3 at least" in why
    assert cache_of(vb) is None and all(handle.deciding.by == "host" for handle in vb._attachment.registry.handles)
    vb(input_ids=torch.arange(3, 9)[None])
    vb.close()


@dense
@torch.no_grad()
def test_a_new_budget_makes_another_cache_and_the_thread_ends_with_it(on_drive):
    plain = qwen3_moe(count=EXPERTS)
    vb = on_drive(copy.deepcopy(plain), 2 + 8)
    layer, theirs = layer_of(vb.module), layer_of(plain)

    def readers():
        return sum(thread.name == "vbrt-drive" for thread in threading.enumerate())

    before = readers()
    assert torch.equal(*both(layer, theirs, routed(2)))
    held = vb.stack.levels[1].tier.used_bytes
    vb.set_budget("cpu", 24 * PAGE)
    assert readers() == before - 1 and vb.stack.levels[1].tier.used_bytes < held
    vb._attachment.expert_cache.follow()
    assert len(cache_of(vb).drive._staged.slots) == 22 and readers() == before
    assert torch.equal(*both(layer, theirs, routed(40)))
    vb.close()
    assert readers() == before - 1


@dense
@torch.no_grad()
@pytest.mark.parametrize("steps", [[SLOTS * 2 + 2], [26, SLOTS * 2 + 2]], ids=["at once", "when host memory is full"])
def test_experts_that_leave_the_gpu_leave_host_memory_slots_for_those_on_the_drive(on_drive, steps):
    plain = qwen3_moe(count=EXPERTS)
    vb = on_drive(copy.deepcopy(plain), 21, device_decides=False)
    lease = 2 * PAGE
    vb.stack.set_budget("gpu", 3 * EXPERTS * PAGE, lease)
    assert {page.home for page in vb.stack.pages.values()} == {0}
    for pages in steps:
        vb.stack.set_budget("gpu", pages * PAGE, lease)
    homes = [page.home for page in vb.stack.pages.values()]
    assert homes.count(0) == 0 and homes.count(1) > 9 and homes.count(2) > 9
    vb._attachment.expert_cache.follow()
    assert len(cache_of(vb).drive._staged.slots) == 21 - homes.count(1) - 2 >= 5
    layer, theirs = layer_of(vb.module), layer_of(plain)
    for tokens in PASSES:
        assert torch.equal(*both(layer, theirs, routed(tokens))), tokens
    assert vb.stats().layers[layer.handle.spec.name].experts.decides == "gpu"
    vb.close()


@dense
@torch.no_grad()
def test_a_lower_budget_of_host_memory_leaves_slots_and_without_room_on_the_drive_homes_come_first(on_drive):
    for drive, decides in ((None, True), (11, False)):
        vb = on_drive(qwen3_moe(count=EXPERTS), 2 * EXPERTS, drive=drive or 99, device_decides=False)
        vb.stack.rehome({key: "cpu" if n % 3 else "ssd" for n, key in enumerate(vb.stack.pages)})
        vb.stack.set_budget("cpu", 24 * PAGE, 2 * PAGE)
        homes = [page.home for page in vb.stack.pages.values()]
        vb._attachment.expert_cache.follow()
        assert (cache_of(vb) is not None) is decides, (homes.count(1), homes.count(2))
        assert homes.count(1) == (11 if drive is None else 21)  # as many leave for copies as must
        vb.close()


@dense
@torch.no_grad()
def test_weights_are_read_and_saved_as_before(on_drive):
    plain = qwen3_moe(count=EXPERTS)
    vb = on_drive(copy.deepcopy(plain), 2 + 8)
    layer, theirs = layer_of(vb.module), layer_of(plain)
    layer(*(getattr(routed(2), name) for name in ("x", "ids", "weights")))
    assert torch.equal(layer.down_proj, theirs.down_proj)  # through the room that is left
    state = plain.state_dict()
    restored = vb.unwrap()
    assert all(torch.equal(value, state[name]) for name, value in restored.state_dict().items())


@dense
def test_a_cache_that_is_collected_ends_its_thread(on_drive):
    vb = on_drive(qwen3_moe(count=EXPERTS), 2 + 8)
    thread, held = cache_of(vb).drive._service._thread, vb.stack.levels[1].tier.used_bytes
    for handle in vb._attachment.registry.handles:
        handle.deciding.end_on_device()
    vb._attachment.expert_cache._cache = None
    gc.collect()
    assert not thread.is_alive()
    vb.stack.retire_unowned()
    assert vb.stack.levels[1].tier.used_bytes < held
    vb.close()


@torch.no_grad()
@pytest.mark.parametrize("miss", ["fetch", "auto"])
def test_four_bit_experts_give_what_they_give_in_host_memory(cached, tmp_path, miss):  # noqa: F811
    want = outputs(cached(miss="fetch"), TRACE)
    ids, how = torch.arange(3, 9).reshape(1, 6), {"max_new_tokens": 8, "do_sample": False}
    tokens = cached(miss="fetch").generate(ids, **how)
    budget = 12 * cached(miss="fetch").stats().layers[NAME].plane_bytes["coarse"] // 8
    vb = cached(miss=miss, cpu={"budget": budget}, ssd={"enabled": True, "path": str(tmp_path)})
    got = outputs(vb, TRACE)
    stats = vb.stats()
    assert stats.layers[NAME].experts.decides == "gpu" and cache_of(vb).drive.counts.pages > 0
    for one, other in zip(got, want, strict=True):
        assert torch.equal(one, other)
    assert torch.equal(vb.generate(ids, **how), tokens)
    told = [why for why in stats.fallbacks if "experts.miss" in why]
    assert bool(told) == (miss == "auto") and all("some of its pages live on a drive" in why for why in told)
    vb.close()


@torch.no_grad()
def test_where_the_cpu_is_to_compute_all_misses_the_host_decides(cached, tmp_path):  # noqa: F811
    budget = 12 * cached(miss="fetch").stats().layers[NAME].plane_bytes["coarse"] // 8
    vb = cached(miss="compute", cpu={"budget": budget}, ssd={"enabled": True, "path": str(tmp_path)})
    outputs(vb, TRACE)
    assert vb.stats().layers[NAME].experts.decides == "host" and vb.stats().layers[NAME].experts.computed
    vb.close()


@torch.no_grad()
def test_generate_raises_what_could_not_be_read(cached, tmp_path):  # noqa: F811
    budget = 12 * cached(miss="fetch").stats().layers[NAME].plane_bytes["coarse"] // 8
    vb = cached(miss="fetch", cpu={"budget": budget}, ssd={"enabled": True, "path": str(tmp_path)})
    ids, how = torch.arange(3, 9).reshape(1, 6), {"max_new_tokens": 8, "do_sample": False}
    want = vb.generate(ids, **how)
    forget(vb)
    whole = {path: path.read_bytes() for path in files(vb).values()}
    for path in whole:
        flip(path)
    with pytest.raises(TierError, match="damaged"):
        vb.generate(ids, **how)
    for path, data in whole.items():  # but of the last layer, which nothing follows in a call of one pass
        path.write_bytes(data)
    for key, path in files(vb).items():
        if key.startswith("model.layers.1."):
            flip(path)
    forget(vb)
    with pytest.raises(TierError, match="damaged"):
        vb.generate(ids[:, :1], max_new_tokens=1, do_sample=False)
    for path, data in whole.items():
        path.write_bytes(data)
    assert torch.equal(vb.generate(ids, **how), want)
    vb.close()


def test_posts_are_answered_within_a_few_milliseconds_after_a_pause(on_drive, decided):  # noqa: F811
    vb = on_drive(qwen3_moe(count=EXPERTS), 2 + 8)
    layer, waits = layer_of(vb.module), []
    for tokens in (1, 2, 3):
        time.sleep(0.1)
        begun = time.monotonic()
        with torch.no_grad():
            layer(*(getattr(routed(tokens), name) for name in ("x", "ids", "weights")))
        waits.append(time.monotonic() - begun)
    assert min(waits) < 0.5
    vb.close()
