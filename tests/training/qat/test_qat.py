"""Training adapters through frozen planes: gradients are those of a dense model that holds the decoded weights."""

import itertools

import pytest
import torch
from torch import nn

import vbrt
from tests.matrix import matrix
from tests.models import TOKENS, config, dtype_of, llama, mlp
from vbrt.config import load_config
from vbrt.errors import WrapError

peft = pytest.importorskip("peft")

HOLDINGS = ("dense", "nvfp4", "mxfp4", "nf4", "quantile", "exact")
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def wrapped(format, path=None, *, layers=3, **sections):
    """A small Llama in one holding; with a path its pages live on the ssd, and four layers fit into memory."""
    model, settings = llama(dtype=dtype_of(format), layers=layers), config(format) | sections
    if path is not None:
        largest = max(swap.page_bytes for swap in vbrt.make_plan(model, load_config(settings)).swaps)
        settings["tiers"] |= {"cpu": {"budget": 4 * largest}, "ssd": {"enabled": True, "path": str(path)}}
    return vbrt.wrap(model, settings).materialize()


def dense_twin(vb, format, layers=3):
    twin = llama(dtype=dtype_of(format), layers=layers).requires_grad_(False)
    twin.load_state_dict(vb.state_dict())
    return twin


def with_lora(model):
    torch.manual_seed(11)
    return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=TARGETS, init_lora_weights=False))


def train(model, *, checkpointing: bool, autocast: bool) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Two optimizer steps of two accumulated batches each, clipped; the losses, and the gradients of the last step."""
    model.train()
    if checkpointing:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable({"use_reentrant": False})
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer, losses = torch.optim.AdamW(trained, lr=1e-2), []
    for _ in range(2):
        optimizer.zero_grad()
        for batch in (TOKENS, TOKENS.flip(1)):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
                loss = model(input_ids=batch, labels=batch, use_cache=False).loss / 2
            loss.backward()
            losses.append(loss.item())
        nn.utils.clip_grad_norm_(trained, 0.5)
        optimizer.step()
    return losses, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


WAYS = list(itertools.product([False, True], repeat=3))


@pytest.mark.sample(4)
@matrix(format=HOLDINGS, way=WAYS, kernels=["installed", "reference"])
def test_lora_steps_are_those_of_a_dense_model(format, way, kernels, tmp_path, request):
    """Bit for bit where weights are lossless, or the reference multiplies them; fused kernels sum in another order."""
    streamed, checkpointing, autocast = way
    if kernels == "reference":
        request.getfixturevalue("plain_torch")
    vb = wrapped(format, tmp_path if streamed else None)
    dense = dense_twin(vb, format)
    losses, grads = train(with_lora(vb.module), checkpointing=checkpointing, autocast=autocast)
    want_losses, want = train(with_lora(dense), checkpointing=checkpointing, autocast=autocast)
    assert losses[-1] < losses[0] and len(grads) == 2 * 7 * 3 and grads.keys() == want.keys()
    if kernels == "reference" or format in ("dense", "exact"):
        assert losses == want_losses
        assert all(torch.equal(grads[name], want[name]) for name in grads)
    else:
        assert losses == pytest.approx(want_losses, rel=1e-3)
        # autocast rounds the twin's weights to bf16, kernels do not; Adam's first steps are signs, which differ more
        most = 0.4 if autocast else 0.05
        assert all((grads[name] - want[name]).norm() <= most * want[name].norm() for name in grads)
    assert (vb.stats().misses > 0) == streamed
    vb.close()


@pytest.mark.exhaustive
@matrix(format=["nvfp4", "dense"], streamed={"streamed": True, "resident": False}, at_most=1)
def test_compiled_lora_gradients_are_those_of_a_dense_model(format, streamed, tmp_path):
    vb = wrapped(format, tmp_path if streamed else None, layers=1)
    dense = dense_twin(vb, format, layers=1)
    grads, plain = [], with_lora(dense)
    for model, called in ((lora := with_lora(vb.module), torch.compile(lora, backend="aot_eager")), (plain, plain)):
        called(input_ids=TOKENS, labels=TOKENS, use_cache=False).loss.backward()
        grads.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert grads[0].keys() == grads[1].keys() and len(grads[0]) == 14
    for name, grad in grads[0].items():
        torch.testing.assert_close(grad, grads[1][name], rtol=1e-4, atol=1e-6)
    vb.close()


def test_the_reverse_pass_is_fetched_ahead_in_reverse(tmp_path):
    vb = wrapped("dense", tmp_path)
    model = with_lora(vb.module)
    for _ in range(3):
        model(input_ids=TOKENS, labels=TOKENS, use_cache=False).loss.backward()
    before = vb.stats()
    model(input_ids=TOKENS, labels=TOKENS, use_cache=False).loss.backward()
    after = vb.stats()
    misses, ahead = (
        after.misses - before.misses,
        sum(after.layers[name].prefetched - before.layers[name].prefetched for name in after.layers),
    )
    assert misses > 20 and ahead >= 0.9 * misses
    vb.close()


def test_no_dense_weight_is_kept_for_the_backward_pass():
    vb = wrapped("nvfp4")
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(tuple(t.shape)), t)[1], lambda t: t):
        loss = with_lora(vb.module)(input_ids=TOKENS, labels=TOKENS, use_cache=False).loss
    weights = {swap.shape for swap in vb.plan.swaps} | {swap.shape[::-1] for swap in vb.plan.swaps}
    assert saved and not weights & set(saved)
    loss.backward()
    vb.close()


def test_a_weight_that_is_replaced_between_forward_and_backward_is_named():
    vb = vbrt.wrap(mlp(), config("nvfp4")).materialize()
    x = torch.randn(2, 64, requires_grad=True)
    loss = vb(x).sum()
    vb.load_state_dict(mlp().state_dict())
    with pytest.raises(WrapError, match="loaded anew between forward and backward"):
        loss.backward()
