"""Architectures that transformers has newer rules for: Qwen3.5, whose rows and columns files have in another order."""

import numpy as np
import pytest
import torch

import vbrt

gguf = pytest.importorskip("gguf")
transformers = pytest.importorskip("transformers")
pytest.importorskip("transformers.models.qwen3_5")
from tests.saves.published.gguf_files import Type, add_tokens, blocks  # noqa: E402 - needs them

pytestmark = pytest.mark.filterwarnings("ignore")
SETTINGS = {"weights": {"min_parameters": 0}, "tiers": {"gpu": {"enabled": False}}, "compute": {"backend": "reference"}}
METADATA = {
    "context_length": 64,
    "embedding_length": 64,
    "block_count": 4,
    "feed_forward_length": 96,
    "attention.head_count": 2,
    "attention.head_count_kv": 1,
    "attention.key_length": 32,
    "full_attention_interval": 4,
    "ssm.conv_kernel": 4,
    "ssm.state_size": 32,
    "ssm.group_count": 2,
    "ssm.time_step_rank": 4,
    "ssm.inner_size": 128,
    "rope.dimension_count": 16,
}
EVERY = {
    "attn_norm": (64,),
    "post_attention_norm": (64,),
    "ffn_gate": (96, 64),
    "ffn_up": (96, 64),
    "ffn_down": (64, 96),
}
FULL = {"attn_q": (128, 64), "attn_k": (32, 64), "attn_v": (32, 64), "attn_output": (64, 64)}
FULL |= {"attn_q_norm": (32,), "attn_k_norm": (32,)}
LINEAR = {"attn_qkv": (256, 64), "attn_gate": (128, 64), "ssm_alpha": (4, 64), "ssm_beta": (4, 64), "ssm_norm": (32,)}
LINEAR |= {"ssm_conv1d": (256, 4), "ssm_out": (64, 128), "ssm_a": (4,), "ssm_dt.bias": (4,)}


def write(path):
    """Write random values under the names of a Qwen3.5."""
    writer, values = gguf.GGUFWriter(path, "qwen35"), np.random.default_rng(0)
    for key, value in METADATA.items():
        writer.add_uint32(f"qwen35.{key}", value)
    writer.add_float32("qwen35.attention.layer_norm_rms_epsilon", 1e-6)
    writer.add_float32("qwen35.rope.freq_base", 1e4)
    writer.add_array("qwen35.rope.dimension_sections", [4, 2, 2, 0])
    add_tokens(writer, 64)
    shapes = {"token_embd": (64, 64), "output": (64, 64), "output_norm": (64,)}
    for layer in range(4):
        parts = EVERY | (FULL if layer == 3 else LINEAR)
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in parts.items()}
    for name, shape in shapes.items():
        value = (values.standard_normal(shape) * 0.1).astype(np.float32)
        value = -abs(value) - 0.1 if name.endswith("ssm_a") else value
        ending = "" if name.endswith(("ssm_a", ".bias")) else ".weight"
        if len(shape) == 1 or "conv" in name:
            writer.add_tensor(name + ending, value)
        else:
            writer.add_tensor(name + ending, blocks(value, Type.Q4_0), raw_dtype=Type.Q4_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_rows_in_another_order_keep_their_blocks_and_columns_are_decoded(tmp_path):
    path, tokens = tmp_path / "model.gguf", torch.arange(8).view(1, 8)
    write(path)
    vb = vbrt.from_pretrained(path, "dense", **SETTINGS)
    plain = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=path.name, dtype=torch.float32, quantization_config=transformers.GgufConfig(dequantize=True)
    )
    with torch.no_grad():
        assert torch.equal(vb(tokens).logits, plain.eval()(tokens).logits)
    assert vb.plan.notes[-2:] == (
        "30 layers: GGUF Q4_0, taken as symmetric32-float16 bit for bit",
        "3 layers: decoded and held as dense: GGUF Q4_0: transformers does more than permute its rows",
    )
    formats = {swap.name: swap.format for swap in vb.plan.swaps}
    assert formats["model.layers.0.linear_attn.in_proj_qkv"] == "symmetric32-float16", "its values' rows are moved"
    assert formats["model.layers.0.linear_attn.out_proj"] == "dense", "its columns are"
    vb.close()
