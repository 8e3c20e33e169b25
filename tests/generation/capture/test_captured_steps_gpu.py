"""Decode steps as CUDA graphs: tokens of eager generate, what cannot be captured, memory that is freed."""

import copy
import gc

import pytest
import torch

import vbrt
from tests.generation.families import FAMILIES, MASK, PROMPT, SIZES, tiny
from tests.matrix import matrix
from vbrt.config.budgets import CONTEXT_BYTES
from vbrt.host import accelerator
from vbrt.kernels.cuda import compiling, devices
from vbrt.kernels.cuda.launch_table import WIDE, choose
from vbrt.model.auto_budget import GpuBalance
from vbrt.residency.plan import GpuRoom

transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:vbrt.wrap")]


def wrapped(model, preset: str = "dense", **formats: str) -> vbrt.VBModelWrapper:
    weights = {"min_parameters": 0, "formats": {f"*.{name}": format for name, format in formats.items()}}
    return vbrt.wrap(model, preset, weights=weights, tiers={"gpu": {"budget": "1GiB"}})


def generated(model, ids=PROMPT, **kwargs):
    torch.manual_seed(2)
    given = {"attention_mask": MASK.cuda(), "max_new_tokens": 12, "return_dict_in_generate": True}
    return model.generate(ids.cuda(), output_logits=True, **given | {"do_sample": False} | kwargs)


def same(vb, plain, **kwargs) -> None:
    got, want = generated(vb, **kwargs), generated(plain, **kwargs)
    assert torch.equal(got.sequences, want.sequences)
    for one, other in zip(got.logits, want.logits, strict=True):
        torch.testing.assert_close(one, other, atol=1e-3, rtol=1e-3)


@matrix(family=list(FAMILIES), call={"sampled": {"do_sample": True}, "beams": {"num_beams": 3}})
def test_captured_steps_give_the_tokens_of_eager_generate(family, call):
    model = tiny(family)
    plain = copy.deepcopy(model).cuda()
    vb = wrapped(model)
    vb.materialize()
    same(vb, plain, **call)
    steps = vb.stats().steps
    if family == "bloom":  # it attends without transformers' interface
        assert steps.captured == 0
        return
    if family != "qwen3_moe" or not steps.eager:  # its implementation may wait for the device, in float32
        assert (steps.captured, steps.eager) == (11, 0), steps.reasons


@pytest.mark.parametrize("formats", [{}, {"down_proj": "mxint8", "k_proj": "mxint8"}], ids=["4 bits", "some in 8"])
def test_fp4_steps_are_captured_and_follow_a_new_weight(formats):
    model = tiny("llama").to(torch.bfloat16).cuda()
    vb = wrapped(model, "fp4", **formats)
    first, again = generated(vb), generated(vb)
    assert torch.equal(first.sequences, again.sequences)
    steps = vb.stats().steps
    assert steps.eager == 0, steps.reasons
    state = {name: -tensor for name, tensor in vb.state_dict().items()}
    vb.load_state_dict(state)
    after = generated(vb)
    assert not torch.equal(after.logits[5], first.logits[5])
    assert vb.stats().steps.eager == 0


@pytest.mark.parametrize("batch", [1, 3])
def test_a_call_launches_nothing_that_was_not_compiled_ahead(batch):
    sizes = {"hidden_size": 384, "intermediate_size": 640, "num_attention_heads": 6}  # of no other test
    vb = wrapped(tiny("llama", **sizes).to(torch.bfloat16).cuda(), "fp4").materialize(progress=False)
    compiling.FIRST.clear()
    vb.generate(torch.full((batch, 70), 5, device="cuda"), max_new_tokens=4, do_sample=False)
    steps, firsts = vb.stats().steps, list(compiling.FIRST)
    assert steps.captured == 3 and not steps.not_ahead
    assert not any("compiled ahead" in reason for reason in steps.unjoined), steps.unjoined
    assert {launch.how for launch in firsts} <= {"ready", "waited", "compiled"}, firsts
    many = {"wgmma_kernel"}
    if devices.major(0) not in WIDE:  # some of them decode: layers this small are cuBLAS's where its matmul is fast
        many = set() if choose(devices.gpu(0), 70, 1, 384, 3) is None else {"mma_kernel"}
    assert batch > 1 or {launch.name for launch in firsts} >= many | {"siblings_kernel", "attend_kernel"}


def mixed() -> torch.nn.Module:
    """A model with routed experts of sizes that kernels take."""
    sizes = {
        "hidden_size": 256,
        "moe_intermediate_size": 128,
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "head_dim": 64,
    }
    config = transformers.Qwen3MoeConfig(**SIZES | sizes)
    torch.manual_seed(1)
    model = transformers.Qwen3MoeForCausalLM(config).to(torch.bfloat16).eval().cuda()
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    return model


@pytest.mark.parametrize("where", ["resident", "cached", "streamed"])
def test_steps_with_routed_experts_in_4_bits_are_captured(where):
    """All on the GPU; a cache of experts of which the GPU decides; and other layers' pages that come through a ring."""
    settings = {"weights": {"min_parameters": 0}, "policy": {"kind": "experts"}, "compute": {"where": "device"}}
    vb = vbrt.wrap(mixed(), "fp4", tiers={"gpu": {"budget": "8MiB"}}, **settings).materialize()
    resident = generated(vb).sequences
    if where != "resident":
        below = [key for key in vb.stack.pages if where == "streamed" or "experts" in key]
        vb.set_budget("gpu", int(vb.plan.page_bytes * 0.75))
        vb.stack.rehome(dict.fromkeys(below, "cpu"))
    got = generated(vb, logits_processor=[lambda ids, scores: scores])  # a callback, for which the model is watched
    steps = vb.stats().steps
    assert torch.equal(got.sequences, resident)
    assert (steps.captured, steps.eager) == (22, 0), steps.reasons


@pytest.mark.parametrize("preset", ["dense", "exact"])
@pytest.mark.parametrize("implementation", ["batched_mm", "grouped_mm"])
def test_lossless_experts_on_the_gpu_are_gathered_by_it_and_keep_their_bits(implementation, preset):
    plain = mixed()
    plain.config._experts_implementation = implementation
    vb = wrapped(copy.deepcopy(plain), preset).materialize()
    for tokens in (1, 2, 3, 4, 60):
        x = torch.randn(1, tokens, 256, device="cuda", dtype=torch.bfloat16)
        assert torch.equal(vb.module.model.layers[1].mlp(x), plain.model.layers[1].mlp(x)), tokens
    generated(vb)
    steps = vb.stats().steps
    assert (steps.captured, steps.eager) == (11, 0), steps.reasons


@pytest.mark.parametrize("together", [1 << 28, 3 * 196608], ids=["one copy", "three pages a copy"])
@pytest.mark.parametrize(("slots", "batch"), [(5, 1), (13, 3)])
@pytest.mark.parametrize("preset", ["dense", "exact"])
@pytest.mark.parametrize("implementation", ["batched_mm", "grouped_mm"])
def test_lossless_experts_of_which_the_gpu_decides_are_recorded_with_their_bits(
    implementation, preset, slots, batch, together, monkeypatch
):
    plain = mixed()
    plain.config._experts_implementation = implementation
    vb, ids = streamed(copy.deepcopy(plain), slots, preset), torch.randint(1, 97, (batch, 9), device="cuda")
    want = generated(wrapped(copy.deepcopy(plain)).materialize(), ids=ids, attention_mask=None)
    monkeypatch.setattr("vbrt.residency.expert_leases._CHUNK_BYTES", together)
    assert preset == "exact" or vb.plan.routed[0].pages[0].nbytes == 196608
    for tokens in (1, 2, 3, 4, 60, 1):
        x = torch.randn(1, tokens, 256, device="cuda", dtype=torch.bfloat16)
        assert torch.equal(vb.module.model.layers[1].mlp(x), plain.model.layers[1].mlp(x)), tokens
    for _ in range(2):
        got = generated(vb, ids=ids, attention_mask=None)
        assert torch.equal(got.sequences, want.sequences)
        assert all(torch.equal(*pair) for pair in zip(got.logits, want.logits, strict=True))
    stats = vb.stats()
    assert stats.layers["model.layers.1.mlp.experts"].experts.decides == "gpu"
    assert "the host decides" not in str(stats.fallbacks)
    assert (stats.steps.captured, stats.steps.eager) == (22, 0), stats.steps.reasons


def test_steps_that_scan_experts_held_dense_stay_eager_and_say_why():
    vb = streamed(mixed(), 5)
    with pytest.warns(UserWarning, match="the host hears which experts 12 ids name"):
        generated(vb, ids=torch.randint(1, 97, (3, 9), device="cuda"), attention_mask=None)
    assert vb.stats().steps.captured == 0


def streamed(model, slots: int, preset: str = "dense") -> vbrt.VBModelWrapper:
    """Experts live in host memory; a device cache has so many slots for each layer of them."""
    weights = {"min_parameters": 0}
    plan = vbrt.make_plan(model, vbrt.load_config(preset, weights=weights))
    page, layers = plan.routed[0].page_bytes // plan.routed[0].experts, len(plan.routed)
    rest = plan.page_bytes - sum(swap.page_bytes for swap in plan.routed)
    budget = rest + (plan.routed[0].top_k + slots * layers) * page
    how = {"policy": {"kind": "experts"}, "experts": {"miss": "fetch"}}
    vb = vbrt.wrap(model, preset, weights=weights, tiers={"gpu": {"budget": budget}}, **how)
    assert all(page.home == "cpu" for swap in vb.plan.routed for page in swap.pages)
    vb.materialize()
    each, pages = slot_bytes(vb), vb.stack.pages
    rest = vb.runtime.page_bytes - sum(pages[page.key].nbytes for swap in vb.plan.routed for page in swap.pages)
    vb.set_budget("gpu", rest + vb.plan.routed[0].top_k * max(each) + slots * sum(each))
    return vb


def slot_bytes(vb) -> list[int]:
    """Bytes of a slot for any expert of a layer, by layer, as encoded: fine planes take less than plans say."""

    def of(swap) -> int:
        largest = {}
        for page in swap.pages:
            largest[page.plane] = max(largest.get(page.plane, 0), vb.stack.pages[page.key].nbytes)
        return sum(largest.values())

    return list(map(of, vb.plan.routed))


def test_a_budget_and_another_implementation_are_followed_where_the_gpu_decides():
    plain = mixed()
    vb = streamed(copy.deepcopy(plain), 9)
    first = generated(vb)
    vb.set_budget("gpu", vb.plan.budgets["gpu"] - 2 * 196608)
    assert torch.equal(generated(vb).sequences, first.sequences)
    steps = vb.stats().steps
    assert (steps.captured, steps.eager) == (22, 0), steps.reasons
    for model in (vb.module, plain):
        model.set_experts_implementation("eager")
    x = torch.randn(1, 3, 256, device="cuda", dtype=torch.bfloat16)
    assert torch.equal(vb.module.model.layers[1].mlp(x), plain.model.layers[1].mlp(x))


@pytest.mark.parametrize("preset", ["fp4", "exact", "dense"])
def test_experts_give_way_to_a_growing_context_and_come_back(preset, monkeypatch):
    """Steps are recorded once for the growth, and not again for the slots; for `dense` experts once each time."""
    vb = streamed(mixed(), 13, preset)
    first, budget = generated(vb), vb.plan.budgets["gpu"]
    page, tier = max(slot_bytes(vb)), vb.stack.levels[0].tier
    vb.runtime.balance = balance = GpuBalance(budget, GpuRoom(CONTEXT_BYTES + budget + 2 * page, 2 * page, 2048))
    monkeypatch.setattr("vbrt.model.auto_budget._LOOK_SECONDS", 0.0)
    monkeypatch.setattr("vbrt.model.auto_budget._LOOKS", 0)
    seen, static, held = [], 6 * page, vb.module.generate.steps
    taken = lambda: vb.plan.budgets["gpu"] + static * bool(held.kept)  # noqa: E731
    monkeypatch.setattr(accelerator, "memory_reserved", taken)
    monkeypatch.setattr(accelerator, "memory_allocated", taken)
    monkeypatch.setattr("vbrt.generation.capture.session.room_bytes", lambda cache, limit: static)
    resize = type(vb.runtime)._resize
    monkeypatch.setattr(type(vb.runtime), "_resize", lambda *a, **k: seen.append(resize(*a, **k)) or seen[-1])
    held.release()  # as for a growth beyond the static memory
    assert torch.equal(generated(vb).sequences, first.sequences)
    assert seen == [budget - static]  # before the memory was taken
    assert tier.held_bytes <= budget - static and vb.stats().steps.recordings == 2
    static = 0  # the context is small again
    for _ in range(2):
        assert torch.equal(generated(vb).sequences, first.sequences)
    assert seen[1:] == [budget] and balance.active and not balance.fallbacks
    stats = vb.stats()
    assert stats.layers["model.layers.1.mlp.experts"].experts.decides == "gpu"
    assert stats.steps.recordings == (3 if preset == "dense" else 2), stats.steps.causes
    assert (stats.steps.captured, stats.steps.eager) == (44, 0), stats.steps.reasons


@pytest.mark.parametrize("preset", ["fp4", "exact"])
def test_budgets_that_a_cache_of_experts_follows_record_nothing_again(preset):
    vb = streamed(mixed(), 13, preset)
    first, budget, page = generated(vb), vb.plan.budgets["gpu"], max(slot_bytes(vb))
    slots = lambda: vb._attachment.expert_cache._cache.slots(0)  # noqa: E731
    seen = []
    for less in (2, 8, 10, 4, 0):
        vb.set_budget("gpu", budget - less * page)
        assert vb.stack.levels[0].tier.held_bytes <= budget - less * page
        again = generated(vb)
        seen.append(slots())
        assert torch.equal(again.sequences, first.sequences)
        for got, want in zip(again.logits, first.logits, strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=0 if preset == "exact" else 1e-2)
    assert seen == [12, 9, 8, 11, 13]  # 8: all that the steps' ids may name
    steps = vb.stats().steps
    assert (steps.recordings, steps.captured, steps.eager) == (1, 66, 0), steps.causes
    vb.set_budget("gpu", budget - 14 * page)  # the cache ends: another one has 6 slots a layer for the steps' 8 ids
    again, few = generated(vb), streamed(mixed(), 6, preset)
    assert slots() == 6 and torch.equal(again.sequences, first.sequences)
    generated(few)
    rounds = 0 if preset == "exact" else 2e-2  # rows of parts are rounded, and a router near a tie may turn
    for got, want, other in zip(again.logits, first.logits, generated(few).logits, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=rounds)
        assert torch.equal(got, other)
    steps = vb.stats().steps
    told = (1, 66, 11) if preset == "exact" else (2, 77, 0)
    assert (steps.recordings, steps.captured, steps.eager) == told, steps.causes
    assert preset == "fp4" or "the host hears which experts 8 ids name" in str(steps.reasons)
    vb.set_budget("gpu", "1GiB")
    assert torch.equal(generated(vb).sequences, first.sequences)
    assert vb.stats().steps.recordings == told[0] + 1  # all pages lie on the GPU


def test_experts_that_the_host_leases_keep_steps_eager_and_are_named():
    model = mixed()
    model.set_experts_implementation("eager")  # which reads one expert after the other
    vb = wrapped(model, "exact")
    with pytest.warns(UserWarning, match="the host leases the experts that tokens are sent to"):
        generated(vb)
    assert vb.stats().steps.captured == 0


@pytest.mark.parametrize("share", [0.4, 0.7])
def test_steps_whose_pages_move_are_captured_with_their_copies(share):
    model = tiny("llama")
    plain = copy.deepcopy(model).cuda()
    pages = vbrt.make_plan(model, vbrt.load_config("dense", weights={"min_parameters": 0})).page_bytes
    how = {"tiers": {"gpu": {"budget": int(pages * share)}}, "compute": {"exactness": "rounded"}}
    vb = vbrt.wrap(model, "dense", weights={"min_parameters": 0}, **how)
    same(vb, plain)
    same(vb, plain, do_sample=True)
    steps = vb.stats().steps
    assert (steps.captured, steps.eager) == (22, 0), steps.reasons
    vb.set_budget("gpu", int(pages * 0.55))
    same(vb, plain)
    assert vb.stats().steps.captured == 33, vb.stats().steps.reasons


def test_graphs_and_caches_are_freed_with_the_model():
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    vb = wrapped(tiny("llama"))
    generated(vb)
    vb.close()
    del vb
    gc.collect()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_allocated() <= before + 64 * 2**20  # cuBLAS keeps a workspace for the stream


def test_numbers_that_python_makes_tensors_of_are_read_by_every_replay():
    """They are constants of what is recorded: others may use the memory that the host or the device had them in."""

    class Scaled(torch.nn.Module):
        def forward(self, x):
            return x * torch.tensor([1.5] * 32, device=x.device) * torch.tensor(2.0, device=x.device)

    model = tiny("llama").cuda()
    model.model.norm = torch.nn.Sequential(model.model.norm, Scaled()).eval()
    vb = wrapped(copy.deepcopy(model))
    first = generated(vb)
    used = [torch.full((1 << 16,), float("nan"), device="cuda") for _ in range(64)]
    again = generated(vb)
    del used
    assert torch.equal(first.sequences, again.sequences)
    same(vb, model)


def test_a_step_that_waits_for_the_device_stays_eager_and_sampling_goes_on():
    model = tiny("llama").cuda()
    plain = copy.deepcopy(model)
    for each in (model, plain):
        layer = each.model.layers[1].mlp
        plain_forward = type(layer).forward

        class Waiting(type(layer)):
            def forward(self, x, then=plain_forward):
                assert x.sum().item() == x.sum().item()
                return then(self, x)

        layer.__class__ = Waiting
    vb = wrapped(model)
    with pytest.warns(UserWarning, match="a step cannot be captured"):
        same(vb, plain, do_sample=True)
    assert vb.stats().steps.captured == 0
    torch.cuda.empty_cache()
    same(vb, plain, do_sample=True)
    other = wrapped(copy.deepcopy(tiny("gpt2")))
    generated(other)
    assert other.stats().steps.captured == 11


def test_a_further_call_has_one_cache_and_takes_the_memory_of_the_first():
    """Its prompt is computed where recorded steps have their cache; the first call has a layer of two at a time."""
    sizes = {"hidden_size": 512, "intermediate_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8}
    config = transformers.LlamaConfig(**SIZES | sizes | {"num_key_value_heads": 8, "max_position_embeddings": 8192})
    with torch.device("cuda"):
        model = transformers.LlamaForCausalLM(config).to(torch.bfloat16).eval()
    vb = vbrt.wrap(model, "fp4")
    vb.materialize()
    ids = torch.randint(2, 97, (2, 4000), device="cuda")
    cache = 2 * 4096 * 512 * 2 * 2 * 8  # batch, places, width, bytes, keys and values, layers
    own = []
    for _ in range(3):
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        vb.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0)
        own.append(torch.cuda.max_memory_allocated() - before)
    held = vb.stats().steps.held_bytes
    assert cache <= held < 1.1 * cache
    assert max(own[1:]) < own[0] - 0.75 * cache, (own, held)
