"""Experts on a drive on a GPU, which decides: the bits of experts in host memory, eagerly and in recorded steps."""

import time

import pytest
import torch

import vbrt
from tests.layers.experts.test_hosted_experts_gpu import experts_of, model
from tests.layers.weights.hosted_cases import generated
from vbrt.errors import TierError
from vbrt.layers.experts import device_cache
from vbrt.model import expert_cache
from vbrt.tiers.storage.ssd_tier import SsdTier

transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:vbrt.wrap")]


def wrapped(made, path=None, *, format="nvfp4", host=0.5, captures=True, fine="none", **sections):
    """Half of the experts find room on the GPU. With a path all live there, and host memory has room for a share."""
    settings = {
        "weights": {"format": format, "min_parameters": 0, "fine": fine},
        "experts": {"miss": "fetch"},
        "compute": {"captures": captures},
    } | sections
    plan = vbrt.make_plan(made, vbrt.config.load_config(settings))
    experts = sum(swap.page_bytes for swap in plan.swaps if swap.experts)
    lease = plan.largest_layer_bytes
    settings["tiers"] = {"gpu": {"budget": plan.page_bytes - experts + 2 * lease + experts // 2}}
    if path is not None:
        settings["tiers"]["cpu"] = {"budget": int(host * experts) + 2 * lease}
        settings["tiers"]["ssd"] = {"enabled": True, "path": str(path)}
    vb = vbrt.wrap(made, settings).materialize(progress=False)
    if path is not None:
        assert {page.home for key, page in vb.stack.pages.items() if ".experts#" in key} == {2}
    return vb


def drive_of(vb):
    return vb._attachment.expert_cache._cache.drive


def same(one, other):
    return torch.equal(one.sequences, other.sequences) and all(map(torch.equal, one.logits, other.logits))


@pytest.mark.parametrize("captures", [True, False], ids=["recorded", "eager"])
@pytest.mark.parametrize("kind", ["Qwen3Moe", "GptOss"])
@pytest.mark.parametrize("host", [0.1, 0.6])
def test_generate_gives_what_experts_in_host_memory_give(tmp_path, monkeypatch, kind, captures, host):
    monkeypatch.setattr(device_cache, "_CHOOSE_EVERY", 5)
    whole = wrapped(model(kind), captures=captures)
    want = [generated(whole), generated(whole, new=40)]
    counts = [(layer.hits, layer.misses) for layer in whole.stats().layers.values() if layer.experts]
    vb = wrapped(model(kind), tmp_path, captures=captures, host=host)
    got = [generated(vb), generated(vb, new=40)]
    assert all(map(same, got, want))
    stats = vb.stats()
    assert all(experts.decides == "gpu" for experts in experts_of(vb)) and "decides" not in str(stats.fallbacks)
    assert stats.steps.eager == (0 if captures else 62), stats.steps.reasons
    assert counts == [(layer.hits, layer.misses) for layer in stats.layers.values() if layer.experts]
    read, moved = drive_of(vb).counts, [layer.bytes_moved for layer in stats.layers.values() if layer.experts]
    assert read.posts > 3 and read.bytes == sum(of["ssd>cpu"] for of in moved)
    assert any(at >= 0 for at in vb._attachment.expert_cache._cache._tables._sources[0].tolist())
    vb.close()
    whole.close()


def test_eager_steps_have_the_bits_of_those_that_the_host_decides(tmp_path, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(expert_cache, "why_host", lambda handle: "this test has it so")
        host = wrapped(model(), tmp_path / "host", captures=False)
        want = generated(host)
        assert all(experts.decides == "host" for experts in experts_of(host))
        host.close()
    vb = wrapped(model(), tmp_path / "device", captures=False)
    assert same(generated(vb), want) and all(experts.decides == "gpu" for experts in experts_of(vb))
    vb.close()


@pytest.mark.parametrize(("format", "fine"), [("dense", "none"), ("nvfp4", "exact")])
def test_lossless_experts_have_the_bits_of_those_in_host_memory(tmp_path, format, fine):
    whole = wrapped(model(), format=format, fine=fine)
    want = generated(whole)
    whole.close()
    vb = wrapped(model(), tmp_path, format=format, fine=fine)
    assert same(generated(vb), want) and all(experts.decides == "gpu" for experts in experts_of(vb))
    assert drive_of(vb).counts.pages > 0
    vb.close()


def test_batches_and_long_prompts(tmp_path):
    whole, vb = wrapped(model()), wrapped(model(), tmp_path, host=0.2)
    torch.manual_seed(2)
    for batch, tokens in ((1, 400), (4, 30), (9, 3), (1, 64)):
        ids = torch.randint(10, 1000, (batch, tokens), device="cuda")
        how = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
        assert torch.equal(vb.generate(ids, **how), whole.generate(ids, **how)), (batch, tokens)
    vb.close()
    whole.close()


@pytest.mark.parametrize("captures", [True, False], ids=["recorded", "eager"])
@pytest.mark.parametrize("damage", ["flipped", "missing"])
def test_a_page_that_cannot_be_read_is_an_error_by_name_and_the_model_goes_on(tmp_path, captures, damage):
    vb = wrapped(model(), tmp_path, captures=captures, host=0.1)
    want = generated(vb)
    files = {slot.room.path: slot.room.path.read_bytes() for slot in vb.stack.levels[-1].slots.values()}
    cache = vb._attachment.expert_cache._cache
    cache._tables.forget()
    cache.drive._torn = True  # nothing is in memory
    for path, data in files.items():
        if damage == "missing":
            path.unlink()
        else:
            path.write_bytes(data[:-50] + bytes([data[-50] ^ 1]) + data[-49:])
    with pytest.raises(TierError, match=r"\.experts#coarse\.\d+: .*(damaged|missing)"):
        generated(vb)
    for path, data in files.items():
        path.write_bytes(data)
    assert same(generated(vb), want)
    vb.close()


def test_a_drive_that_is_too_slow_is_an_error_after_the_wait_and_the_model_goes_on(tmp_path, monkeypatch):
    vb = wrapped(model(), tmp_path, host=0.1, experts={"miss": "fetch", "drive_wait_s": 1})
    want = generated(vb)
    cache = vb._attachment.expert_cache._cache
    get, slow = SsdTier.get, [True]

    def late(self, room, out, *, key):
        if slow:
            slow.clear()
            time.sleep(2.5)
        get(self, room, out, key=key)

    ids = torch.randint(10, 1000, (1, 1), device="cuda")  # a pass of one token: the device asks
    cache._tables.forget()
    cache.drive._torn = True
    monkeypatch.setattr(SsdTier, "get", late)
    begun = time.monotonic()
    with pytest.raises(TierError, match="within 1 s"):
        vb.generate(ids, max_new_tokens=3, do_sample=False, pad_token_id=0)
    assert time.monotonic() - begun < 20
    assert same(generated(vb), want)
    vb.close()


@pytest.mark.parametrize("drive", [False, True], ids=["in host memory", "in part on a drive"])
def test_experts_that_leave_the_gpu_are_decided_on_by_it(tmp_path, drive):
    """A model that was whole on the GPU, in a smaller one: host memory is not filled to the brim with homes."""
    made, settings = model(), {"weights": {"format": "nvfp4", "min_parameters": 0}, "experts": {"miss": "fetch"}}
    plan = vbrt.make_plan(made, vbrt.config.load_config(settings))
    experts, lease = sum(swap.page_bytes for swap in plan.swaps if swap.experts), plan.largest_layer_bytes
    tiers = {"gpu": {"budget": "2GiB"}, "cpu": {"budget": (experts * 2 // 3 if drive else 4 * experts) + lease}}
    tiers |= {"ssd": {"enabled": True, "path": str(tmp_path)}} if drive else {}
    vb = vbrt.wrap(made, settings, tiers=tiers).materialize(progress=False)
    assert {page.home for page in vb.stack.pages.values()} == {0}
    want = generated(vb)
    for share in (0.75, 0.5):
        vb.set_budget("gpu", plan.page_bytes - experts + 2 * lease + int(share * experts))
        assert torch.equal(generated(vb).sequences, want.sequences)
        assert all(each.decides == "gpu" for each in experts_of(vb)), vb.stats().fallbacks
    homes = {page.home for key, page in vb.stack.pages.items() if ".experts#" in key and "#cache" not in key}
    assert homes == ({1, 2} if drive else {1}) and vb.stats().steps.eager == 0
    vb.close()


def test_new_budgets_and_weights_are_followed(tmp_path):
    vb = wrapped(model(), tmp_path)
    want = generated(vb)
    vb.set_budget("cpu", vb.stack.levels[1].tier.capacity_bytes * 3 // 4)
    assert same(generated(vb), want) and all(experts.decides == "gpu" for experts in experts_of(vb))
    vb.load_state_dict(vb.state_dict())
    generated(vb)
    assert all(experts.decides == "gpu" for experts in experts_of(vb))
    vb.unwrap()
