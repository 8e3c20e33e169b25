"""Tiny models of many families, and calls of generate that are compared."""

from typing import Any

import torch
from torch import nn

__all__ = ["FAMILIES", "MASK", "PROMPT", "generated", "tiny"]

SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "pad_token_id": 0,
    "eos_token_id": None,
}
MAMBA = {"mamba_d_state": 8, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1}
PAIRED = {"vocab_size": 97, "d_model": 32, "eos_token_id": None, "pad_token_id": 0, "decoder_start_token_id": 0}
#: class, config, and what the config says
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", SIZES),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", {"vocab_size": 97, "n_embd": 32, "n_layer": 2, "n_head": 4}),
    "bloom": ("BloomForCausalLM", "BloomConfig", {"vocab_size": 97, "hidden_size": 32, "n_layer": 2, "n_head": 4}),
    "gemma3": (
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        SIZES | {"head_dim": 8, "sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "qwen3_moe": (
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        SIZES | {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    ),
    "bamba": ("BambaForCausalLM", "BambaConfig", SIZES | MAMBA | {"attn_layer_indices": [1]}),
    "falcon_h1": ("FalconH1ForCausalLM", "FalconH1Config", SIZES | MAMBA | {"mamba_d_ssm": 64}),
    "mamba": ("MambaForCausalLM", "MambaConfig", {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2}),
    "t5": ("T5ForConditionalGeneration", "T5Config", PAIRED | {"d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}),
    "bart": (
        "BartForConditionalGeneration",
        "BartConfig",
        PAIRED
        | {"encoder_layers": 1, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
        | {"encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "forced_eos_token_id": None, "max_position_embeddings": 128},
    ),
}
PROMPT = torch.tensor([[0, 0, 7, 31, 5], [44, 3, 12, 9, 80]])  # the first one is padded
MASK = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])


def tiny(family: str, **other: Any) -> nn.Module:
    """A model of a family with random weights, which generates as long as it may; `other`: sizes of its config."""
    import transformers

    name, config, sizes = FAMILIES[family]
    torch.manual_seed(1)
    model = getattr(transformers, name)(getattr(transformers, config)(**sizes | other)).eval()
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    return model


def generated(model: nn.Module, **kwargs: Any) -> Any:
    """Generate 14 tokens for two prompts with a seed; with logits."""
    torch.manual_seed(2)
    given = {"attention_mask": MASK, "max_new_tokens": 14, "return_dict_in_generate": True, "output_logits": True}
    return model.generate(PROMPT, **given | {"do_sample": False} | kwargs)
