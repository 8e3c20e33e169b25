"""Conversion on a GPU: the very planes that a CPU makes."""

from functools import partial

import pytest
import torch

import vbrt
from vbrt.saves.common.manifest import read_manifest
from vbrt.saves.convert.convert import convert
from vbrt.saves.load.sources import open_source

pytest.importorskip("transformers")
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

SIZES = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64}
SIZES |= {"num_hidden_layers": 1, "intermediate_size": 384}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "head_dim": 64}
MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "qwen3_moe": lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **MOE)),
}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("preset", ["fp4", "exact", "mxfp4", "nf4"])
@pytest.mark.parametrize("name", MODELS)
def test_a_conversion_on_a_gpu_writes_the_bytes_of_one_on_a_cpu(tmp_path, name, preset):
    torch.manual_seed(0)
    model = MODELS[name]().bfloat16()
    model.save_pretrained(tmp_path / "dense")
    digests = []
    for gpu in (True, False):
        config = vbrt.load_config(preset, tiers={"gpu": {"enabled": gpu}}, weights={"min_parameters": 0})
        with torch.device("meta"):
            empty = partial(type(model), model.config)()
        out = convert(open_source(tmp_path / "dense"), empty, config, tmp_path / str(gpu))
        digests.append({key: tensor.digest for key, tensor in read_manifest(out).tensors.items()})
    assert digests[0] == digests[1]
