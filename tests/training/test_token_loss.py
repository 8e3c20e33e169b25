"""Losses of language models in chunks of tokens: the plain bits, and gradients in the memory of logits."""

import copy
import gc
import pickle

import pytest
import torch
from torch.nn import functional

import vbrt
from vbrt.libraries.transformers_loss import LOSSES
from vbrt.training import token_loss
from vbrt.training.token_loss import TokenLoss

transformers = pytest.importorskip("transformers")

from transformers.loss.loss_utils import ForCausalLMLoss  # noqa: E402

VOCABULARY = 103  # rows begin at any alignment
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture
def chunks(monkeypatch):
    """Chunks of 16 tokens; returns how many rows were widened so far."""
    monkeypatch.setattr(token_loss, "_CHUNK", 20 * VOCABULARY)
    found, plain = [], token_loss._chunks
    monkeypatch.setattr(token_loss, "_chunks", lambda x: found.append(len(x)) or plain(x))
    return found


def made(device, dtype, *shape):
    logits = (3 * torch.randn(*shape, VOCABULARY, device=device)).to(dtype)
    labels = torch.randint(0, VOCABULARY, shape, device=device)
    labels[torch.rand(shape, device=device) < 0.2] = -100
    return logits, labels


def results(loss, logits, labels, **how):
    x = logits.clone().requires_grad_()
    value = loss(x * 1, labels, VOCABULARY, **how)  # what a model computes is no leaf
    (3 * value).backward()
    return value.detach(), x.grad


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("how", ["mean", "items", "shift_labels", "ignore 0", "nothing"])
def test_losses_and_gradients_have_the_plain_bits(device, dtype, how, chunks):
    logits, labels = made(device, dtype, 3, 50)
    more = {}
    if how == "items":
        more = {"num_items_in_batch": torch.tensor(77)}
    elif how == "shift_labels":
        labels, more = None, {"shift_labels": labels, "position_ids": None}
    elif how == "ignore 0":
        more = {"ignore_index": 0}
        labels = labels.clamp(min=0)
    elif how == "nothing":
        labels = torch.full_like(labels, -100)
    ours = results(TokenLoss(ForCausalLMLoss), logits, labels, **more)
    assert chunks == [150, 150]
    wanted = results(ForCausalLMLoss, logits, labels, **more)
    assert all(torch.equal(*pair) or pair[0].isnan().equal(pair[1].isnan()) for pair in zip(ours, wanted, strict=True))
    assert ours[0].isnan() == (how == "nothing")


@pytest.mark.gpu
@pytest.mark.parametrize("vocabulary", [32000, 50257, 128256])
def test_a_vocabulary_of_a_real_model_has_the_plain_bits_on_a_gpu_in_less_memory(vocabulary):
    logits = torch.randn(4, 2048, vocabulary, device="cuda", dtype=torch.bfloat16)
    labels = torch.randint(0, vocabulary, (4, 2048), device="cuda")
    found, peaks = [], []
    for loss in (TokenLoss(ForCausalLMLoss), ForCausalLMLoss):
        x = logits.clone().requires_grad_()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        value = loss(x * 1, labels, vocabulary)
        value.backward()
        peaks.append(torch.cuda.max_memory_allocated() - before)
        found.append((value.detach(), x.grad))
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))
    assert peaks[0] < 2.1 * logits.nbytes + 5 * 4 * token_loss._CHUNK  # logits, and the gradient of x
    assert peaks[1] > 4.9 * logits.nbytes


def test_no_gradient_is_computed_where_none_is_asked(chunks):
    logits, labels = made("cpu", torch.bfloat16, 2, 40)
    loss = TokenLoss(ForCausalLMLoss)(logits, labels, VOCABULARY)
    assert not loss.requires_grad and torch.equal(loss, ForCausalLMLoss(logits, labels, VOCABULARY))
    assert chunks == [80]


# -- memory of the logits ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("holds", ["nothing", "logits", "a view", "a detached view", "the graph"])
def test_gradients_overwrite_logits_that_nobody_holds(holds, chunks):
    x, labels = made("cpu", torch.bfloat16, 2, 40)
    logits = x.clone().requires_grad_() * 1
    addresses = [logits.data_ptr()]
    logits.register_hook(lambda grad: addresses.append(grad.data_ptr()))
    loss = TokenLoss(ForCausalLMLoss)(logits, labels, VOCABULARY)
    held = {"logits": logits, "a view": logits[0], "a detached view": logits.detach()[1]}.get(holds)
    before = None if held is None else held.detach().clone()
    del logits
    gc.collect()
    loss.backward(retain_graph=holds == "the graph")
    assert (addresses[0] == addresses[1]) is (holds == "nothing")
    assert held is None or torch.equal(held, before)
    if holds == "the graph":
        loss.backward()


def test_a_pass_that_keeps_its_graph_gives_the_same_gradient_again(chunks):
    logits, labels = made("cpu", torch.bfloat16, 2, 40)
    x = logits.requires_grad_()
    loss = TokenLoss(ForCausalLMLoss)(x * 1, labels, VOCABULARY)
    (first,) = torch.autograd.grad(loss, x, retain_graph=True)
    (second,) = torch.autograd.grad(loss, x)
    assert torch.equal(first, second)


def test_logits_that_change_before_the_backward_pass_are_refused(chunks):
    x, labels = made("cpu", torch.bfloat16, 2, 40)
    logits = x.requires_grad_() * 1
    loss = TokenLoss(ForCausalLMLoss)(logits, labels, VOCABULARY)
    logits.detach().zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_labels_of_another_number_raise_as_they_do_plainly(chunks):
    logits, labels = made("cpu", torch.bfloat16, 2, 40)
    with pytest.raises(ValueError, match="batch_size"):
        TokenLoss(ForCausalLMLoss)(logits, labels[:, :-1], VOCABULARY)
    for wrong, ignored in ((labels.clamp(min=0) + VOCABULARY, -100), (labels.clamp(max=-100), 0)):
        for loss in (ForCausalLMLoss, TokenLoss(ForCausalLMLoss)):
            with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
                loss(logits, wrong, VOCABULARY, ignore_index=ignored)


# -- models ------------------------------------------------------------------------------------------------------------

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}


def llama():
    sizes = {**SIZES, "num_key_value_heads": 2, "vocab_size": VOCABULARY}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))


@pytest.mark.parametrize("mode", ["exact", "full"])
def test_wrapped_models_compute_the_plain_loss_in_chunks(mode, chunks):
    assert not LOSSES.refusal()
    model = llama().bfloat16()
    ids = torch.randint(0, VOCABULARY, (2, 40))
    wanted = copy.deepcopy(model)(input_ids=ids, labels=ids).loss
    assert not chunks
    optimizer = {"optimizer": torch.optim.AdamW(model.parameters())} if mode == "full" else {}
    vb = vbrt.wrap(model, mode, **optimizer)
    loss = vb(input_ids=ids, labels=ids).loss
    assert chunks == [80] and torch.equal(loss, wanted)
    model = vb.unwrap()
    assert "_loss_function" not in vars(model) and model.loss_function is ForCausalLMLoss
    model(input_ids=ids, labels=ids)
    assert chunks == [80]


def test_a_loss_of_the_users_own_stays(chunks):
    model = llama()
    own = lambda logits, labels, **kwargs: functional.mse_loss(logits, logits.detach() + 1)  # noqa: E731
    model.loss_function = own
    vb = vbrt.wrap(model, "exact")
    assert vb.module.loss_function is own and vb.unwrap().loss_function is own


def test_copies_and_pickles_of_a_wrapped_model_keep_it(chunks):
    vb = vbrt.wrap(llama(), "exact")
    other = copy.deepcopy(vb)
    ids = torch.randint(0, VOCABULARY, (2, 40))
    assert torch.equal(vb(input_ids=ids, labels=ids).loss, other(input_ids=ids, labels=ids).loss)
    assert chunks == [80, 80]
    other.unwrap()
    assert isinstance(vb.module.loss_function, TokenLoss)
    assert isinstance(pickle.loads(pickle.dumps(vb.module.loss_function)), TokenLoss)


def test_a_failed_wrap_leaves_the_plain_loss(monkeypatch):
    model = llama()
    monkeypatch.setattr("vbrt.model.runtime.Runtime.add", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        vbrt.wrap(model, "exact")
    assert model.loss_function is ForCausalLMLoss


@pytest.mark.parametrize("newest", [True, False])
def test_a_loss_with_unknown_arguments_stays(newest, monkeypatch):
    from transformers.loss import loss_utils

    def loss(logits, labels, vocab_size, num_items_in_batch, ignore_index, shift_labels, weights=None, **kwargs):
        return ForCausalLMLoss(logits, labels, vocab_size, **kwargs)

    monkeypatch.setitem(loss_utils.LOSS_MAPPING, "ForCausalLM", loss if newest else ForCausalLMLoss)
    with vbrt.wrap(llama(), "exact") as vb:
        assert isinstance(vb.module.loss_function, TokenLoss) is not newest


def test_an_estimate_counts_chunks():
    sizes = {**SIZES, "num_key_value_heads": 2, "vocab_size": 32000, "num_hidden_layers": 1}
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).bfloat16()
    sizes = {"lora": 4, "context": 2048, "batch": 8}
    plain, wrapped = (vbrt.estimate(model, "train", config, **sizes) for config in (None, "exact"))
    logits = 2048 * 8 * 32000 * 2
    assert plain.peak_bytes > 6 * logits > 2 * wrapped.peak_bytes > 2 * logits


def test_models_whose_loss_has_no_name_are_told_by_their_head(chunks):
    sizes = {"n_embd": 32, "n_layer": 1, "n_head": 2, "vocab_size": VOCABULARY}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).eval()
    ids = torch.randint(0, VOCABULARY, (2, 40))
    with vbrt.wrap(model, "exact") as vb:
        assert vb(input_ids=ids, labels=ids).loss and chunks == [80]
        assert "_loss_function" not in vars(model.transformer)
