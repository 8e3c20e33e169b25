"""VBConv1D: the GPT-2 family's layers keep their weight as [in, out]."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F

from tests.models import FORMATS, TOKENS, gpt2, wrap, wrap_streamed

transformers = pytest.importorskip("transformers")
from transformers.pytorch_utils import Conv1D  # after the check that it is there

from vbrt.layers.modules.conv1d import VBConv1D


def layer(inputs=40, outputs=24, dtype=torch.float32):
    torch.manual_seed(2)
    made = Conv1D(outputs, inputs).to(dtype).eval()
    made.bias.data.normal_()
    return made


@pytest.mark.sample(4)
@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    ("format", "dtype"),
    [("dense", torch.float32), ("dense", torch.bfloat16), ("exact", torch.bfloat16), ("exact", torch.float16)],
)
def test_a_gpt2_gives_the_very_outputs_and_tokens_of_the_original(format, dtype, streamed, tmp_path):
    model = gpt2(dtype=dtype)
    with torch.no_grad():
        logits, tokens = model(TOKENS).logits, model.generate(TOKENS, max_new_tokens=6, do_sample=False)
    vb = wrap_streamed(model, format, tmp_path) if streamed else wrap(model, format)
    assert {swap.kind for swap in vb.plan.swaps} == {"Conv1D"} and len(vb.registry) == 8
    with torch.no_grad():
        assert torch.equal(vb(TOKENS).logits, logits)
        assert torch.equal(vb.generate(TOKENS, max_new_tokens=6, do_sample=False), tokens)
    unwrapped = vb.unwrap()
    assert type(unwrapped.transformer.h[0].attn.c_attn) is Conv1D
    with torch.no_grad():
        assert torch.equal(unwrapped(TOKENS).logits, logits)


@pytest.mark.parametrize("format", FORMATS)
def test_the_weight_reads_and_assigns_as_in_out(format):
    dtype = torch.bfloat16 if format == "exact" else torch.float32
    plain = layer(dtype=dtype)
    vb, x = wrap(copy.deepcopy(plain), format).materialize(), torch.randn(3, 40, dtype=dtype)
    conv = vb.module
    assert isinstance(conv, Conv1D) and type(conv) is VBConv1D and conv.weight.shape == (40, 24)
    assert torch.equal(conv.weight, plain.weight) or format == "nvfp4"
    torch.testing.assert_close(conv(x), x @ conv.weight + conv.bias)
    conv.weight = torch.ones(40, 24, dtype=dtype)
    torch.testing.assert_close(conv(x), F.linear(x, torch.ones(24, 40, dtype=dtype), conv.bias))
    vb.load_state_dict(plain.state_dict())
    assert torch.equal(conv.weight, plain.weight) or format == "nvfp4"


@pytest.mark.parametrize("format", FORMATS)
def test_gradients_are_those_of_a_dense_layer(format):
    dtype = torch.bfloat16 if format == "exact" else torch.float32
    vb, plain = wrap(layer(dtype=dtype), format).materialize(), layer(dtype=dtype)
    plain.load_state_dict(vb.state_dict())
    grads = []
    for model in (vb, plain):
        x = torch.linspace(-1, 1, 2 * 3 * 40, dtype=dtype).reshape(2, 3, 40).requires_grad_()
        model(x).square().sum().backward()
        grads.append(x.grad)
    torch.testing.assert_close(*grads)
    torch.testing.assert_close(vb.module.bias.grad, plain.bias.grad)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("when", ["before", "after"])
def test_casts_copies_and_pickles_keep_the_orientation(format, when):
    vb = wrap(layer(dtype=torch.bfloat16), format)
    if when == "after":
        vb.materialize()
    vb.float()
    x = torch.randn(2, 40)
    y = vb(x)
    torch.testing.assert_close(y, x @ vb.module.weight + vb.module.bias)
    for clone in (copy.deepcopy(vb), pickle.loads(pickle.dumps(vb))):
        assert torch.equal(clone(x), y) and torch.equal(clone.module.weight, vb.module.weight)
    assert torch.equal(vb.unwrap()(x), y) or format == "nvfp4"
