"""Gradients through frozen routed experts: those of the plain module that holds the decoded weights."""

import copy
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import vbrt
from tests.matrix import matrix
from tests.models import TOKENS, config, qwen3_moe, wrap
from tests.zoo.experts import DECORATED, Holder, experts_module, routed
from vbrt.config import load_config
from vbrt.errors import TierError
from vbrt.layers.experts import VBExperts, run_experts

peft = pytest.importorskip("peft")

#: plain, interleaved with bias, transposed, without gate, with a norm behind
CLASSES = ("Qwen3MoeExperts", "GptOssExperts", "AriaExperts", "NemotronHExperts", "MuseSparkExperts")


def pair(name: str, format: str, *, kept: bool = True, **how) -> tuple[nn.Module, nn.Module]:
    """A module of experts in the tiers, and a plain one with the decoded weights; biases and norms train."""
    plain = experts_module(name, **how)
    names = {"gate_up_proj", "up_proj", "down_proj"}
    for parameter in (p for n, p in plain.named_parameters() if n not in names):
        parameter.requires_grad_(kept)
    vb = wrap(Holder(copy.deepcopy(plain)), format).materialize()
    assert isinstance(vb.module.experts, VBExperts)
    plain.load_state_dict(vb.module.experts.state_dict())
    plain.__dict__["vb"] = vb  # it lives as long as its twin
    return vb.module.experts, plain


def gradients(layer: nn.Module, args: tuple[torch.Tensor, ...], *, autocast: bool = False) -> dict[str, torch.Tensor]:
    """Output and gradients of x, routing weights and whatever of the layer trains."""
    x, ids, weights = args
    x, weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y = layer(x, ids, weights)
    y.float().square().sum().backward()
    kept = {name: p.grad.clone() for name, p in nn.Module.named_parameters(layer) if p.grad is not None}
    layer.zero_grad()
    return {"y": y.detach(), "x": x.grad, "weights": weights.grad} | kept


def assert_close(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor], most: float) -> None:
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        assert got[name].dtype == tensor.dtype, name
        assert (got[name] - tensor).float().norm() <= most * tensor.float().norm(), name
        assert tensor.abs().sum() > 0, name


@matrix(
    name=[name for name in CLASSES if name in DECORATED],
    format=["dense", "nvfp4", "mxfp4"],
    implementation=["eager", "grouped_mm", "batched_mm"],
    at_once=[8, 3],
)
def test_gradients_are_those_of_the_plain_module(name, format, implementation, at_once, monkeypatch):
    """Also where the experts are leased in chunks."""
    layer, plain = pair(name, format, implementation=implementation)
    monkeypatch.setattr(run_experts, "_experts_at_once", lambda handle, scan: at_once)
    args = routed(plain)
    assert_close(gradients(layer, args), gradients(plain, args), 1e-5 if format == "dense" else 1e-3)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", DECORATED)
def test_every_class_of_experts_has_the_gradients_of_the_plain_module(name):
    for format in ("dense", "nvfp4"):
        layer, plain = pair(name, format)
        args = routed(plain)
        assert_close(gradients(layer, args), gradients(plain, args), 1e-5 if format == "dense" else 2e-3)


@matrix(name=["Qwen3MoeExperts", "GptOssExperts"], format=["exact", "dense"], implementation=["eager", "grouped_mm"])
def test_gradients_of_bf16_weights_are_those_of_the_plain_module_under_autocast_too(name, format, implementation):
    layer, plain = pair(name, format, implementation=implementation, dtype=torch.bfloat16)
    args = routed(plain, dtype=torch.bfloat16)
    assert_close(gradients(layer, args), gradients(plain, args), 1e-2)
    # eager casts the activations of an fp32 stream to the weights' bf16 under autocast, and in the backward pass
    stream = (args[0].float(), args[1], args[2].float())
    if implementation == "eager" and name == "Qwen3MoeExperts":
        got, want = gradients(layer, stream, autocast=True), gradients(plain, stream, autocast=True)
        assert_close(got, want, 1e-2)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_changes_nothing(use_reentrant):
    layer, plain = pair("Qwen3MoeExperts", "nvfp4")
    args = routed(plain)

    def checkpointed(*args: torch.Tensor) -> torch.Tensor:
        return checkpoint(layer, *args, use_reentrant=use_reentrant)

    x, weights = args[0].clone().requires_grad_(), args[2].clone().requires_grad_()
    checkpointed(x, args[1], weights).square().sum().backward()
    want = gradients(layer, args)
    assert torch.equal(x.grad, want["x"]) and torch.equal(weights.grad, want["weights"])


def test_a_second_derivative_is_that_of_the_plain_module():
    layer, plain = pair("Qwen3MoeExperts", "dense")
    found = []
    for module in (layer, plain):
        x, ids, weights = routed(plain)
        x, weights = x.requires_grad_(), weights.requires_grad_()
        first = torch.autograd.grad(module(x, ids, weights).square().sum(), (x, weights), create_graph=True)
        found.append(torch.autograd.grad(sum(g.square().sum() for g in first), (x, weights)))
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_a_forward_for_training_decodes_no_layer_and_leases_the_experts_of_its_tokens_only():
    layer, plain = pair("GptOssExperts", "nvfp4")
    reads, (x, _, weights), pages = layer.handle.weight_reads, routed(plain, 2), plain.vb.stack.pages
    before = {key: page.hits + page.misses for key, page in pages.items()}
    y = layer(x.requires_grad_(), torch.tensor([[1, 5], [5, 1]]), weights)
    y.sum().backward()
    assert layer.handle.weight_reads == reads
    used = {key for key, page in pages.items() if page.hits + page.misses > before[key]}
    assert used == {"experts#coarse.1", "experts#coarse.5"}
    grad = layer.gate_up_proj_bias.grad
    assert set(grad.abs().sum(1).nonzero().flatten().tolist()) == {1, 5}


def test_compiled_gradients_are_those_of_eager_forwards():
    layer, plain = pair("Qwen3MoeExperts", "nvfp4")
    args = routed(plain)
    want = gradients(layer, args)
    torch._dynamo.reset()
    got = gradients(torch.compile(layer, backend="aot_eager", fullgraph=True), args)
    assert_close(got, want, 1e-5)


def test_sentinels_give_no_gradient():
    layer, plain = pair("Qwen3MoeExperts", "nvfp4")
    layer._is_expert_parallel = plain._is_expert_parallel = True
    x, ids, weights = routed(plain)
    ids[3], ids[5, 0] = 8, 8
    weights = weights.masked_fill(ids == 8, 0.0)
    got, want = gradients(layer, (x, ids, weights)), gradients(plain, (x, ids, weights))
    assert_close(got, want, 1e-3)
    assert not got["x"][3].any() and not got["weights"][ids == 8].any()


def test_only_the_gradients_that_are_asked_for_are_computed():
    layer, plain = pair("GptOssExperts", "dense", kept=False)
    x, ids, weights = routed(plain)
    y = layer(x, ids, weights.requires_grad_())
    y.sum().backward()
    assert weights.grad is not None and x.grad is None and layer.down_proj_bias.grad is None
    assert not layer(x, ids, weights.detach()).requires_grad


def test_weights_that_are_loaded_between_forward_and_backward_change_no_gradient():
    layer, plain = pair("Qwen3MoeExperts", "nvfp4")
    x, ids, weights = routed(plain)
    want = gradients(layer, (x, ids, weights))["x"]
    y = layer(x.requires_grad_(), ids, weights)
    layer.load_state_dict({name: 2 * tensor for name, tensor in plain.state_dict().items()})
    assert not torch.equal(layer(x, ids, weights), y)
    y.square().sum().backward()
    assert torch.equal(x.grad, want)


def test_pages_that_are_gone_by_the_backward_pass_are_named():
    layer, plain = pair("Qwen3MoeExperts", "nvfp4")
    x, ids, weights = routed(plain)
    y = layer(x.requires_grad_(), ids, weights)
    plain.vb.close()
    with pytest.raises(TierError, match="experts: its pages are gone"):
        y.sum().backward()


def lora_step(model: nn.Module, *, checkpointing: bool, autocast: bool) -> tuple[float, dict[str, torch.Tensor]]:
    torch.manual_seed(11)
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)).train()
    if checkpointing:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable({"use_reentrant": False})
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = model(input_ids=TOKENS, labels=TOKENS, use_cache=False).loss
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.requires_grad}


@matrix(format=["dense", "nvfp4"], checkpointing=[False, True], autocast=[False, True], at_most=3)
def test_adapters_beside_frozen_experts_train_as_beside_plain_ones(format, checkpointing, autocast):
    vb = wrap(qwen3_moe(dtype=torch.float32, experts="eager"), format).materialize()
    plain = qwen3_moe(dtype=torch.float32, experts="eager").requires_grad_(False)
    plain.load_state_dict(vb.state_dict())
    loss, grads = lora_step(vb.module, checkpointing=checkpointing, autocast=autocast)
    want_loss, want = lora_step(plain, checkpointing=checkpointing, autocast=autocast)
    assert loss == pytest.approx(want_loss, rel=1e-2 if autocast else 1e-4) and grads.keys() == want.keys()
    most = 0.4 if autocast else 1e-3
    assert all((grads[name] - want[name]).norm() <= most * want[name].norm() for name in grads)


def test_drafts_in_coarse_precision_have_the_gradients_of_the_coarse_plane():
    vb = wrap(qwen3_moe(dtype=torch.bfloat16), "exact").materialize()
    layer, (x, ids, weights) = vb.module.get_submodule("model.layers.0.mlp.experts"), _bf16_routing()
    with vb.phase("draft", precision="coarse"):
        vb(TOKENS)  # the phase begins with a pass
        coarse = layer(x.requires_grad_(), ids, weights)
    full = layer(x, ids, weights)
    assert not torch.equal(coarse, full)
    grads = [torch.autograd.grad(y.float().square().sum(), x)[0] for y in (coarse, full)]
    assert not torch.equal(*grads)


def _bf16_routing() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(3)
    x = torch.randn(4, 64, dtype=torch.bfloat16)
    return x, torch.rand(4, 8).topk(2).indices, torch.rand(4, 2, dtype=torch.bfloat16)


def streamed(plain: nn.Module, path: Path) -> VBExperts:
    """Dense experts at home on the ssd, with host memory for those of one token."""
    settings = config("dense")
    held = Holder(copy.deepcopy(plain))
    budget = vbrt.make_plan(held, load_config(settings)).largest_layer_bytes
    settings["tiers"] |= {"cpu": {"budget": budget}, "ssd": {"enabled": True, "path": str(path)}}
    vb = vbrt.wrap(held, settings).materialize()
    assert vb.plan.home_bytes("ssd") == vb.plan.page_bytes > 2 * budget
    plain.__dict__["vb"] = vb
    return vb.module.experts


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
def test_gradients_of_streamed_experts_are_those_of_the_plain_module_any_number_of_times(implementation, tmp_path):
    """A derivative of a derivative must not read a page that is another expert's by then."""
    plain, found = experts_module("Qwen3MoeExperts", implementation=implementation), []
    for module in (streamed(plain, tmp_path), plain):
        x, ids, weights = routed(plain)
        inputs = (x.requires_grad_(), weights.requires_grad_())
        first = torch.autograd.grad(module(x, ids, weights).square().sum(), inputs, create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), inputs)
        found.append([*(g.detach() for g in first), *second])
    for got, want in zip(*found, strict=True):
        assert (got - want).norm() <= 1e-5 * want.norm()
    plain.vb.close()


@pytest.mark.gpu
@pytest.mark.parametrize("format", ["nvfp4", "dense"])
@pytest.mark.parametrize("tokens", [2, 40])
@pytest.mark.parametrize("share", [2.0, 0.75], ids=["resident", "cached"])
def test_gradients_on_a_gpu_are_those_of_the_plain_module(format, tokens, share):
    """The forward is the kernels', resident or leased; the backward pass decodes."""
    plain = experts_module("Qwen3MoeExperts", dtype=torch.bfloat16)
    settings = {"weights": config(format)["weights"]}
    pages = vbrt.make_plan(Holder(plain), load_config(settings)).page_bytes
    settings["tiers"] = {"gpu": {"budget": int(share * pages)}}
    vb = vbrt.wrap(Holder(copy.deepcopy(plain)), settings).materialize()
    plain.load_state_dict(vb.module.experts.state_dict())
    args = tuple(tensor.cuda() for tensor in routed(plain, tokens, dtype=torch.bfloat16))
    got, want = gradients(vb.module.experts, args), gradients(plain.cuda(), args)
    assert_close(got, want, 2e-2)
    if format == "dense" and share < 1:
        assert next(iter(vb.stats().layers.values())).experts.decides == "gpu"
    vb.close()
