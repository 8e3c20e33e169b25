"""Routed experts in training: each forward sees them in 4 bits, and gradients go straight through to the weights."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

import vbrt
from tests.matrix import matrix
from tests.models import TOKENS, qwen3_moe
from tests.training.reference import FOUR_BIT, counts, rounded, steps, wrap
from tests.zoo.experts import DECORATED, SPECIAL, Holder, called, experts_module, routed, special_module
from vbrt.errors import WrapError
from vbrt.training import TrainedExperts

#: plain, interleaved with bias, transposed, without gate, with a norm behind
CLASSES = ("Qwen3MoeExperts", "GptOssExperts", "AriaExperts", "NemotronHExperts", "MuseSparkExperts")
NAME = "model.layers.0.mlp.experts"
WEIGHTS = ("gate_up_proj", "up_proj", "down_proj")


class StraightThrough(nn.Module):
    """The reference: a module on weights that are rounded by fresh scales, and autograd for everything else."""

    def __init__(self, plain: nn.Module, format: str) -> None:
        super().__init__()
        self.plain, self.format = plain, format

    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        found = {}
        for name, weight in self.plain.named_parameters():
            if name in WEIGHTS:
                found[name] = weight + (self._rounded(weight.detach()) - weight).detach()
        return torch.func.functional_call(self.plain, found, args)

    def _rounded(self, weight: torch.Tensor) -> torch.Tensor:
        w_ENK = weight.mT if self.plain.is_transposed else weight
        w_ENK = rounded(self.format, w_ENK.flatten(0, 1).contiguous()).view(w_ENK.shape)
        return w_ENK.mT if self.plain.is_transposed else w_ENK


def pair(name: str, format: str, **how) -> tuple[nn.Module, nn.Module]:
    """Experts in training, and a plain twin."""
    plain = experts_module(name, **how).requires_grad_().train()
    vb = wrap(Holder(copy.deepcopy(plain)), format)
    assert isinstance(vb.module.experts, TrainedExperts)
    plain.__dict__["vb"] = vb  # it lives as long as its twin
    return vb.module.experts, plain


def gradients(layer: nn.Module, args: tuple[torch.Tensor, ...]) -> dict[str, torch.Tensor]:
    """Output and gradients of everything."""
    x, ids, weights = args
    x, weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
    y = layer(x, ids, weights)
    y.float().square().sum().backward()
    kept = {name.removeprefix("plain."): p.grad.clone() for name, p in layer.named_parameters()}
    layer.zero_grad()
    return {"y": y.detach(), "x": x.grad, "weights": weights.grad} | kept


def assert_close(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor], most: float = 1e-5) -> None:
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        assert got[name].dtype == tensor.dtype and tensor.abs().sum() > 0, name
        assert (got[name] - tensor).norm() <= most * tensor.norm(), name


@matrix(
    name=[name for name in CLASSES if name in DECORATED],
    format=FOUR_BIT,
    implementation=["eager", "grouped_mm", "batched_mm"],
)
def test_gradients_are_those_at_the_rounded_weights(name, format, implementation):
    layer, plain = pair(name, format, implementation=implementation)
    args = routed(plain)
    assert_close(gradients(layer, args), gradients(StraightThrough(plain, format), args))
    assert not torch.equal(layer(*args), plain(*args))


def test_dense_trains_bit_for_bit_as_the_unwrapped_model():
    plain = qwen3_moe(dtype=torch.float32, experts="eager").train()
    vb = wrap(copy.deepcopy(plain), "dense")
    assert isinstance(vb.module.get_submodule(NAME), TrainedExperts)
    assert steps(vb, 2) == steps(plain, 2)
    for one, other in zip(vb.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("autocast", [False, True])
def test_a_model_of_routed_experts_learns_and_counts_its_steps(autocast):
    vb = wrap(qwen3_moe(dtype=torch.float32).train(), "nvfp4", every=3)
    losses = steps(vb, 5, autocast=autocast)
    assert losses[-1] < losses[0] - 0.3
    assert counts(vb, NAME) == (3, 2)
    stats = vb.stats().layers[NAME]
    assert stats.forwards == 10 and 0 < stats.plane_bytes["scales"] < stats.plane_bytes["dense"]


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_changes_nothing(use_reentrant):
    layer, plain = pair("GptOssExperts", "nvfp4")
    args = routed(plain)
    want = gradients(layer, args)
    x, weights = args[0].clone().requires_grad_(), args[2].clone().requires_grad_()
    checkpoint(layer, x, args[1], weights, use_reentrant=use_reentrant).square().sum().backward()
    assert torch.equal(x.grad, want["x"]) and torch.equal(weights.grad, want["weights"])
    assert all(torch.equal(p.grad, want[name]) for name, p in layer.named_parameters())
    assert counts(plain.vb) == (0, 1)


def test_a_second_derivative_is_the_reference_one():
    layer, plain = pair("Qwen3MoeExperts", "nvfp4")
    found = []
    for module in (layer, StraightThrough(plain, "nvfp4")):
        x, ids, weights = routed(plain)
        inputs = (x.requires_grad_(), weights.requires_grad_(), *module.parameters())
        first = torch.autograd.grad(module(x, ids, weights).square().sum(), inputs, create_graph=True)
        found.append(torch.autograd.grad(sum(g.square().sum() for g in first), inputs))
    for got, want in zip(*found, strict=True):
        assert (got - want).norm() <= 1e-4 * want.norm()


def test_only_the_gradients_that_are_asked_for_are_computed():
    layer, plain = pair("GptOssExperts", "nvfp4")
    layer.gate_up_proj.requires_grad_(False)
    x, ids, weights = routed(plain)
    layer(x, ids, weights).sum().backward()
    assert layer.gate_up_proj.grad is None and layer.down_proj.grad is not None and x.grad is None


def test_no_copy_of_the_weights_is_kept_for_the_backward_pass():
    layer, plain = pair("Qwen3MoeExperts", "nvfp4")
    saved: list[tuple[int, ...]] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(tuple(t.shape)), t)[1], lambda t: t):
        y = layer(*routed(plain))
    assert saved and not any(len(shape) == 3 for shape in saved)
    y.sum().backward()


def test_weights_that_change_between_forward_and_backward_are_named():
    layer, plain = pair("Qwen3MoeExperts", "nvfp4")
    y = layer(*routed(plain))
    with torch.no_grad():
        layer.down_proj.mul_(2)
    with pytest.raises(WrapError, match=r"experts\.down_proj: its weight was changed or loaded anew between"):
        y.sum().backward()


@pytest.mark.sample(1)
@pytest.mark.parametrize("format", ["nvfp4", "quantile", "dense"])
def test_a_save_loads_as_an_inference_model_of_what_the_forward_computed(format, tmp_path):
    vb = wrap(qwen3_moe(dtype=torch.float32).train(), format)
    steps(vb, 2)
    vb.module.eval()
    with torch.no_grad():
        want = vb(TOKENS).logits
    vb.save(tmp_path)
    tiers = {"gpu": {"enabled": False}}
    loaded = vbrt.load(tmp_path, qwen3_moe(dtype=torch.float32), tiers=tiers)
    assert loaded.plan.skipped.keys().isdisjoint({NAME})
    with torch.no_grad():
        torch.testing.assert_close(loaded(TOKENS).logits, want, rtol=1e-4, atol=1e-5)


def test_a_save_before_the_first_forward_has_scales_of_its_own(tmp_path):
    vb = wrap(qwen3_moe(dtype=torch.float32), "nvfp4")
    vb.save(tmp_path)
    loaded = vbrt.load(tmp_path, qwen3_moe(dtype=torch.float32), tiers={"gpu": {"enabled": False}})
    with torch.no_grad():
        want = vbrt.wrap(qwen3_moe(dtype=torch.float32), "fp4", weights={"min_parameters": 0})(TOKENS).logits
        torch.testing.assert_close(loaded(TOKENS).logits, want, rtol=1e-4, atol=1e-5)


def test_a_run_that_is_taken_up_again_is_the_same_run():
    whole = wrap(qwen3_moe(dtype=torch.float32).train(), every=3)
    optimizer = torch.optim.AdamW(whole.parameters(), lr=3e-3)
    steps(whole, 2, optimizer=optimizer)
    state, moments = copy.deepcopy(whole.state_dict()), copy.deepcopy(optimizer.state_dict())
    assert f"{NAME}.gate_up_proj.separation" in state
    want = steps(whole, 3, optimizer=optimizer)
    again = wrap(qwen3_moe(dtype=torch.float32).train(), every=3)
    optimizer = torch.optim.AdamW(again.parameters(), lr=3e-3)
    again.load_state_dict(state)
    optimizer.load_state_dict(moments)
    assert steps(again, 3, optimizer=optimizer) == want
    assert counts(again, NAME) == counts(whole, NAME)


def test_states_of_dense_models_load_strictly_and_those_of_other_formats_are_refused_by_name():
    vb, other = (wrap(qwen3_moe(dtype=torch.float32), format) for format in ("nvfp4", "mxfp4"))
    with torch.no_grad():
        vb(TOKENS)
        other(TOKENS)
    vb.load_state_dict(qwen3_moe(dtype=torch.float32).state_dict())
    assert vb.module.get_submodule(NAME).handle.separation.counters.refreshes == 0
    with pytest.raises(RuntimeError, match=r"experts\.gate_up_proj\.separation: .* saved with another weights\.format"):
        vb.load_state_dict(other.state_dict())


@pytest.mark.sample(1)
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda vb: pickle.loads(pickle.dumps(vb))], ids=["copy", "pickle"])
def test_a_copy_trains_on_as_the_original_and_apart_from_it(copied):
    vb = wrap(qwen3_moe(dtype=torch.float32).train(), "nvfp4", every=3)
    optimizer = torch.optim.SGD(vb.parameters(), lr=0.1)
    steps(vb, 2, optimizer=optimizer)
    clone = copied(vb)
    layer = clone.module.get_submodule(NAME)
    assert isinstance(layer, TrainedExperts) and layer.handle is not vb.module.get_submodule(NAME).handle
    losses = steps(clone, 2, optimizer=torch.optim.SGD(clone.parameters(), lr=0.1))
    assert losses == steps(vb, 2, optimizer=optimizer) and counts(clone, NAME) == counts(vb, NAME)


def test_unwrap_gives_back_the_very_parameters_and_the_class():
    model = qwen3_moe(dtype=torch.float32)
    own, cls = dict(model.named_parameters()), type(model.get_submodule(NAME))
    vb = wrap(model)
    assert dict(vb.named_parameters()).keys() == own.keys()
    steps(vb, 1)
    plain = vb.unwrap()
    assert type(plain.get_submodule(NAME)) is cls and not hasattr(plain.get_submodule(NAME), "_vb_handle")
    assert all(p is own[name] for name, p in plain.named_parameters())


def test_a_cast_model_goes_on_in_its_new_dtype():
    vb = wrap(qwen3_moe(dtype=torch.float32).train())
    steps(vb, 1)
    vb.to(torch.bfloat16)
    assert vb.module.get_submodule(NAME).handle.dtype is torch.bfloat16
    assert all(torch.isfinite(torch.tensor(steps(vb, 2))))


def test_another_weight_starts_a_new_history_and_computed_ones_are_refused_by_name():
    layer, plain = pair("Qwen3MoeExperts", "nvfp4")
    layer(*routed(plain))
    layer.down_proj = nn.Parameter(torch.zeros_like(layer.down_proj))
    assert not layer(*routed(plain)).any()
    with pytest.raises(WrapError, match=r"experts\.gate_up_proj cannot be removed or computed from something else"):
        nn.utils.parametrize.register_parametrization(layer, "gate_up_proj", nn.Identity())
    with pytest.raises(WrapError, match=r"experts\.down_proj cannot be removed or computed"):
        prune.random_unstructured(layer, "down_proj", 0.5)


def test_routing_is_recorded_in_the_tiers_only(tmp_path):
    vb = wrap(qwen3_moe(dtype=torch.float32))
    with pytest.raises(WrapError, match=r'record_routing\(\): mode = "train" has no pages of experts'):
        vb.record_routing(tmp_path / "routing")
    assert not list(tmp_path.iterdir())


def test_tracers_that_would_keep_the_rounded_weights_are_refused_by_name():
    layer, plain = pair("Qwen3MoeExperts", "nvfp4")
    with pytest.raises(WrapError, match="cannot record experts in training"):
        torch.fx.experimental.proxy_tensor.make_fx(lambda x, w: layer(x, routed(plain)[1], w))(
            routed(plain)[0], routed(plain)[2]
        )


def test_transforms_of_torch_func_see_the_rounded_weights():
    layer, plain = pair("Qwen3MoeExperts", "nvfp4")
    x, ids, weights = routed(plain)
    got = torch.func.grad(lambda x: layer(x, ids, weights).square().sum())(x)
    torch.testing.assert_close(got, gradients(layer, (x, ids, weights))["x"], rtol=1e-4, atol=1e-5)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", DECORATED)
def test_every_class_of_experts_has_the_gradients_at_the_rounded_weights(name):
    layer, plain = pair(name, "nvfp4")
    args = routed(plain)
    assert_close(gradients(layer, args), gradients(StraightThrough(plain, "nvfp4"), args))


@pytest.mark.sample(6)
@pytest.mark.parametrize("name", SPECIAL)
@pytest.mark.parametrize("format", ["nvfp4", "dense"])
def test_experts_that_are_called_otherwise_train_too(name, format, tmp_path):
    plain = special_module(name).requires_grad_().train()
    vb = wrap(Holder(copy.deepcopy(plain)), format)
    args, found = called(name, 6), []
    if name == "DbrxExperts":
        assert "stay dense in mode" in vb.plan.skipped["experts.mlp"].reason
        return
    layer = vb.module.experts
    assert isinstance(layer, TrainedExperts)
    names = set(layer.trained_parameters)
    with torch.no_grad():
        layer(*args)
        for name, stack in layer.handle.stacks.items() if format != "dense" else ():
            plain.get_parameter(name).copy_(stack.stacked_as_before(getattr(layer, name), torch.float32))
    for module in (layer, plain):
        floats = [a.clone().requires_grad_() for a in args if _is_float(a)]
        given = iter(floats)
        y = module(*(next(given) if _is_float(a) else a for a in args))
        y.square().sum().backward()
        found.append(
            [y.detach(), *(a.grad for a in floats), *(p.grad for n, p in module.named_parameters() if n in names)]
        )
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    vb.save(tmp_path)
    assert vbrt.load(tmp_path, Holder(special_module(name_of(plain))), tiers={"gpu": {"enabled": False}}).plan.swaps


def name_of(module: nn.Module) -> str:
    return type(module).__name__


def _is_float(argument: object) -> bool:
    return isinstance(argument, torch.Tensor) and argument.is_floating_point()


@pytest.mark.sample(1)
@matrix(name=["Qwen3MoeExperts", "GptOssExperts", "MuseSparkExperts"], format=["nvfp4", "dense"], at_most=3)
def test_compiled_experts_train_as_eager_ones(name, format):
    if name not in DECORATED:
        pytest.skip("this transformers does not have them")
    layer, plain = pair(name, format, implementation="grouped_mm")
    args = routed(plain)
    want = gradients(layer, args)
    torch._dynamo.reset()
    compiled = torch.compile(plain.vb.module, backend="aot_eager", fullgraph=format != "dense")
    x, weights = args[0].clone().requires_grad_(), args[2].clone().requires_grad_()
    y = compiled(x, args[1], weights)
    y.square().sum().backward()
    kept = {name: p.grad for name, p in layer.named_parameters()}
    assert_close({"y": y.detach(), "x": x.grad, "weights": weights.grad} | kept, want)


@pytest.mark.gpu
@pytest.mark.parametrize("autocast", [False, True])
def test_a_model_of_routed_experts_learns_on_a_gpu(autocast):
    model = qwen3_moe(dtype=torch.float32).train().cuda()
    vb = vbrt.wrap(model, mode="train", weights={"format": "nvfp4", "min_parameters": 0})
    optimizer, tokens, losses = torch.optim.AdamW(vb.parameters(), lr=3e-3, fused=True), TOKENS.cuda(), []
    for _ in range(5):
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            loss = vb(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.3 and counts(vb, NAME) == (4, 1)
