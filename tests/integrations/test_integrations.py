"""What transformers, PEFT and accelerate do to a wrapped model."""

import copy

import pytest
import torch
from torch import nn

from tests.models import FORMATS, TOKENS, dtype_of, gpt2, llama, wrap, wrap_streamed

pytest.importorskip("transformers")


def logits(model):
    with torch.no_grad():
        return model(input_ids=TOKENS).logits


# -- transformers ------------------------------------------------------------------------------------------------------


@pytest.mark.sample(4)
@pytest.mark.usefixtures("plain_torch")  # bits of torch's own matmul
@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("format", FORMATS)
def test_a_llama_gives_the_very_logits_of_its_decoded_weights(format, tied, streamed, tmp_path):
    model = llama(tied=tied, dtype=dtype_of(format))
    original = copy.deepcopy(model)
    vb = wrap_streamed(model, format, tmp_path) if streamed else wrap(model, format)
    for _ in range(2):
        y = logits(vb)
    assert torch.equal(y, logits(original)) or format == "nvfp4"
    original.load_state_dict(vb.state_dict())
    assert torch.equal(y, logits(original))
    vb.close()


@pytest.mark.sample(4)
@pytest.mark.parametrize("materialized", [False, True])
@pytest.mark.parametrize("make", [llama, lambda: llama(tied=True), gpt2])
@pytest.mark.parametrize("format", ["dense", "nvfp4"])
def test_save_pretrained_writes_the_weights_that_from_pretrained_reads(make, format, materialized, tmp_path):
    vb = wrap(make(), format)
    if materialized:
        vb.materialize()
    vb.save_pretrained(tmp_path)
    loaded = type(vb.module).from_pretrained(tmp_path).eval()
    state = vb.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in loaded.state_dict().items())
    if materialized or format == "dense":
        torch.testing.assert_close(logits(loaded), logits(vb))


def test_new_embeddings_and_ties_work_on_a_wrapped_model():
    vb = wrap(llama(), keep_head=False).materialize()
    before = vb.lm_head.weight
    vb.resize_token_embeddings(140)
    vb.tie_weights()
    assert torch.equal(vb.lm_head.weight[:128], before) and logits(vb).shape == (1, 12, 140)


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_gradient_checkpointing_gives_the_same_gradients(use_reentrant):
    grads = []
    for wrapped in (False, True):
        model = llama().train().requires_grad_(not wrapped)
        if wrapped:
            model = wrap(model).module
        model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        x = torch.linspace(-1, 1, 12 * 64).reshape(1, 12, 64).requires_grad_()
        model(inputs_embeds=x, labels=TOKENS).loss.backward()
        grads.append(x.grad)
    assert torch.equal(*grads)


# -- PEFT --------------------------------------------------------------------------------------------------------------


def with_lora(model, **options):
    peft = pytest.importorskip("peft")
    torch.manual_seed(11)
    return peft.get_peft_model(
        model,
        peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False, **options),
    )


def lora_grads(model):
    model.train()
    model(input_ids=TOKENS, labels=TOKENS).loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.sample(4)
@pytest.mark.usefixtures("plain_torch")  # bits of torch's own matmul
@pytest.mark.parametrize("materialized", [False, True])
@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("format", FORMATS)
def test_lora_gradients_are_those_of_a_dense_model_with_the_decoded_weights(format, streamed, materialized, tmp_path):
    model = llama(dtype=dtype_of(format))
    vb = wrap_streamed(model, format, tmp_path) if streamed else wrap(model, format)
    if materialized:
        vb.materialize()
    tuned = with_lora(vb.module)
    grads = lora_grads(tuned)
    dense = llama(dtype=dtype_of(format))
    dense.load_state_dict(
        {name.replace("base_layer.", ""): value for name, value in vb.state_dict().items() if "lora" not in name}
    )
    expected = lora_grads(with_lora(dense))
    assert len(grads) == 18 and grads.keys() == expected.keys()
    assert all(torch.equal(grads[name], expected[name]) for name in grads)
    vb.close()


def test_a_lora_training_step_changes_the_loss_and_no_page():
    vb = wrap(llama(), "nvfp4").materialize()
    layer = vb.registry["model.layers.0.self_attn.q_proj"]
    before = layer.weight
    tuned = with_lora(vb.module)
    optimizer = torch.optim.SGD([p for p in tuned.parameters() if p.requires_grad], lr=0.5)
    losses = []
    for _ in range(5):
        losses.append(tuned(input_ids=TOKENS, labels=TOKENS).loss)
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < losses[0] and torch.equal(layer.weight, before)


@pytest.mark.parametrize("safe_merge", [False, True])
def test_merging_an_adapter_reaches_the_weights(safe_merge):
    vb = wrap(llama()).materialize()
    tuned = with_lora(vb.module).eval()
    y = logits(tuned)
    base = logits(llama())
    merged = tuned.merge_and_unload(safe_merge=safe_merge)
    torch.testing.assert_close(logits(merged), y, atol=1e-4, rtol=1e-4)
    assert (logits(merged) - base).abs().max() > 0.01
    torch.testing.assert_close(logits(vb.unwrap()), y, atol=1e-4, rtol=1e-4)


def test_merging_and_unmerging_gives_the_base_back():
    vb = wrap(llama()).materialize()
    tuned = with_lora(vb.module).eval()
    y = logits(tuned)
    tuned.merge_adapter()
    torch.testing.assert_close(logits(tuned), y, atol=1e-4, rtol=1e-4)
    tuned.unmerge_adapter()
    torch.testing.assert_close(logits(tuned), y, atol=1e-4, rtol=1e-4)
    with tuned.disable_adapter():
        torch.testing.assert_close(logits(tuned), logits(llama()), atol=1e-4, rtol=1e-4)


def test_wrapping_a_model_with_adapters_swaps_the_base_and_leaves_the_adapters_training():
    tuned = with_lora(llama())
    vb = wrap(tuned, "nvfp4")
    assert all("base_layer" in name or "lora" not in name for name in vb.registry)
    assert any("trains (requires_grad)" in skip.reason for name, skip in vb.plan.skipped.items() if "lora_A" in name)
    assert len(lora_grads(vb.module)) == 18


# -- accelerate --------------------------------------------------------------------------------------------------------


def test_hooks_of_accelerate_on_every_layer_survive_use_copy_and_unwrap():
    hooks = pytest.importorskip("accelerate.hooks")
    vb = wrap(llama()).materialize()
    y = logits(vb)
    for layer in vb.registry.values():
        hooks.add_hook_to_module(layer, hooks.ModelHook())
    assert torch.equal(logits(vb), y) and torch.equal(logits(copy.deepcopy(vb)), y)
    model = vb.unwrap()
    assert torch.equal(logits(model), y)
    hooks.remove_hook_from_module(model, recurse=True)
    assert torch.equal(logits(model), y) and type(model.model.layers[0].mlp.up_proj) is nn.Linear


@pytest.mark.parametrize("how", ["dispatch_model", "cpu_offload", "prepare"])
def test_accelerate_can_place_a_wrapped_model(how):
    accelerate = pytest.importorskip("accelerate")
    vb = wrap(llama()).materialize()
    y = logits(vb)
    place = {
        "dispatch_model": lambda m: accelerate.dispatch_model(m, device_map={"": "cpu"}),
        "cpu_offload": lambda m: accelerate.cpu_offload(m, execution_device=torch.device("cpu")),
        "prepare": accelerate.Accelerator(cpu=True).prepare,
    }
    assert torch.equal(logits(place[how](vb.module)), y)


def test_layers_that_accelerate_hooked_before_are_refused_with_what_to_do():
    accelerate = pytest.importorskip("accelerate")
    model = accelerate.cpu_offload(llama(), execution_device=torch.device("cpu"))
    vb = wrap(model)
    assert not vb.plan.swaps
    assert any("remove_hook_from_submodules first" in skip.reason for skip in vb.plan.skipped.values())
