"""Small models, prompts and answers of the tests of continuous batches."""

import torch
import transformers

from vbrt.integrations import batches
from vbrt.integrations.text_generation import Turn

SIZES = {"vocab_size": 128, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 3}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}


def llama(**more):
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES | HEADS | more))


def gemma(*, window=40):
    kinds = ["sliding_attention", "sliding_attention", "full_attention"]
    config = transformers.Gemma3TextConfig(**SIZES, **HEADS, sliding_window=window, layer_types=kinds)
    return transformers.Gemma3ForCausalLM(config)


def prompts(*lengths):
    generator = torch.Generator().manual_seed(1)
    return {str(length): torch.randint(3, 128, (length,), generator=generator).tolist() for length in lengths}


def generated(vb, asked, *, sequences=4, new=30, bits=16):
    found = list(batches.generate_many(vb, asked, Turn(new), sequences, kv_bits=bits))
    assert {result.request for result in found} == set(asked) and not any(result.error for result in found)
    return {result.request: result.tokens for result in found}
