"""The models of the README's stories: those of a directory, or random weights of a published shape.

A shape needs no download: its weights are drawn one at a time where they are encoded, as a loader reads them, so that a
model of 64 GB comes through a GPU of 12.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import vbrt
from vbrt.saves.common.renaming import Entry
from vbrt.saves.files.safetensors_file import TensorInfo
from vbrt.saves.published.dense_checkpoint import DenseCheckpoint
from vbrt.wrapper.load import load_from

#: name -> model type of transformers, and its sizes
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-32b": (
        "qwen3",
        {
            "vocab_size": 151936,
            "hidden_size": 5120,
            "intermediate_size": 25600,
            "num_hidden_layers": 64,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 128,
        },
    ),
    "llama-3-8b": (
        "llama",
        {
            "vocab_size": 128256,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
        },
    ),
    "llama-3-70b": (
        "llama",
        {
            "vocab_size": 128256,
            "hidden_size": 8192,
            "intermediate_size": 28672,
            "num_hidden_layers": 80,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 128,
        },
    ),
    "qwen3-30b-a3b": (
        "qwen3_moe",
        {
            "vocab_size": 151936,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
        },
    ),
    "tiny": (
        "llama",
        {
            "vocab_size": 256,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
        },
    ),
    "tiny-experts": (
        "qwen3_moe",
        {
            "vocab_size": 256,
            "hidden_size": 64,
            "intermediate_size": 96,
            "moe_intermediate_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "num_experts": 16,
            "num_experts_per_tok": 2,
        },
    ),
}


def outline(where: str) -> nn.Module:
    """Return the bf16 model of a directory or a shape on the meta device, in eval mode."""
    from transformers import AutoConfig, AutoModelForCausalLM

    if where in SHAPES:
        kind, sizes = SHAPES[where]
        config = AutoConfig.for_model(kind, **sizes, tie_word_embeddings=False, dtype="bfloat16")
    else:
        config = AutoConfig.from_pretrained(where, local_files_only=True)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def kept_bytes(where: str, preset: str) -> int:
    """Return the bytes that stay beside the pages: embeddings, output head, norms."""
    tiers = {"gpu": {"enabled": False}, "cpu": {"budget": "1TiB"}}
    return vbrt.make_plan(outline(where), vbrt.load_config(preset, tiers=tiers), machine=_LARGE).kept_bytes


_LARGE = vbrt.config.Machine(
    gpu_total_bytes=None, gpu_free_bytes=None, cpu_total_bytes=4 << 40, cpu_available_bytes=4 << 40
)


def wrapped(where: str, preset: str, **overrides: Any) -> vbrt.VBModelWrapper:
    """Return the wrapped model of a directory or a shape; the dense one never exists."""
    if where not in SHAPES:
        return vbrt.from_pretrained(Path(where), preset, **overrides)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    source = DenseCheckpoint(Path(where), (), partial(_random_entries, device=device))
    return load_from(source, outline(where), preset, runtime=None, **overrides)


def _random_entries(model: nn.Module, device: torch.device) -> dict[str, Entry]:
    """Return the model's parameters as tensors that are drawn when they are read: normal, norms all ones."""
    generator = torch.Generator(device).manual_seed(0)

    def entry(name: str, shape: tuple[int, ...]) -> Entry:
        draw: Callable[[], Tensor] = partial(_drawn, shape, generator)
        return Entry(TensorInfo(name, torch.bfloat16, shape), draw, draw)

    return {name: entry(name, tuple(parameter.shape)) for name, parameter in model.named_parameters()}


def _drawn(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    weight = torch.empty(shape, dtype=torch.bfloat16, device=generator.device)
    return weight.fill_(1.0) if len(shape) == 1 else weight.normal_(0, 0.02, generator=generator)
