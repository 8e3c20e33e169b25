"""Small models and configs that the tests of layers and wrapper share: every holding, resident and streamed."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

import vbrt
from vbrt.config import load_config
from vbrt.kernels.cuda import devices, tuned_configs
from vbrt.kernels.cuda.launch_table import has_rules

__all__ = [
    "FORMATS",
    "TOKENS",
    "config",
    "dtype_of",
    "fallbacks",
    "gpt2",
    "llama",
    "llama_of",
    "mlp",
    "qwen3_moe",
    "wrap",
    "wrap_streamed",
]

#: weights.format, or "exact" for nvfp4 with a fine plane
FORMATS = ("dense", "nvfp4", "exact")
TOKENS = torch.arange(3, 15).reshape(1, 12)


def dtype_of(format: str) -> torch.dtype:
    """A dtype of weights that the format holds as it is named."""
    return torch.bfloat16 if format == "exact" else torch.float32


def config(format: str, **weights: Any) -> dict[str, Any]:
    """Every layer is swapped, however small, and lives in host memory."""
    format, _, fine = ("nvfp4+exact" if format == "exact" else format).partition("+")
    return {
        "weights": {"format": format, "fine": fine or "none", "min_parameters": 0, **weights},
        "tiers": {"gpu": {"enabled": False}},
    }


#: captured steps of lossless weights attend to masked buckets
ROUNDED = {"exactness": "rounded"}


def wrap(
    model: nn.Module, format: str = "dense", *, compute: dict[str, Any] | None = None, **weights: Any
) -> vbrt.VBModelWrapper:
    """All pages resident."""
    return vbrt.wrap(model, config(format, **weights), compute=compute or {})


def wrap_streamed(model: nn.Module, format: str, path: Path, **weights: Any) -> vbrt.VBModelWrapper:
    """All pages at home on the ssd, with host memory for four layers."""
    settings = config(format, **weights)
    plan = vbrt.make_plan(model, load_config(settings))
    settings["tiers"]["cpu"] = {"budget": 4 * max(swap.page_bytes for swap in plan.swaps)}
    settings["tiers"]["ssd"] = {"enabled": True, "path": str(path)}
    vb = vbrt.wrap(model, settings)
    assert vb.plan.home_bytes("ssd") == vb.plan.page_bytes
    return vb


def fallbacks(vb: vbrt.VBModelWrapper) -> list[str]:
    """`stats().fallbacks`; on GPUs without launches of their own, without the notes that say so."""
    measured = has_rules(devices.capability(0))
    return [why for why in vb.stats().fallbacks if measured or not why.endswith(tuned_configs.HOW_TO_MEASURE)]


def mlp(*, width: int = 64, depth: int = 6, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """[.., width] -> [.., width], in eval mode."""
    torch.manual_seed(width * depth)
    layers = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.Tanh())]
    return nn.Sequential(*layers).to(dtype).eval()


def llama(*, tied: bool = False, dtype: torch.dtype = torch.float32, layers: int = 3) -> nn.Module:
    """A LlamaForCausalLM of 3 layers and 22 Linears."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    sizes = {
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
    }
    return LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=tied)).to(dtype).eval()


def llama_of(device: str = "meta", **sizes: int) -> nn.Module:
    """A LlamaForCausalLM in bfloat16 made on a device, with sizes as transformers names them."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    with torch.device(device):
        return AutoModelForCausalLM.from_config(LlamaConfig(**sizes), dtype=torch.bfloat16).eval()


def gpt2(*, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A GPT2LMHeadModel of 2 layers, 8 Conv1D; widths are not multiples of 64."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(4)
    sizes = {"vocab_size": 128, "n_embd": 40, "n_layer": 2, "n_head": 4, "n_positions": 64}
    return GPT2LMHeadModel(GPT2Config(**sizes)).to(dtype).eval()


def qwen3_moe(
    *, dtype: torch.dtype = torch.bfloat16, experts: str = "grouped_mm", layers: int = 2, count: int = 8
) -> nn.Module:
    """A Qwen3MoeForCausalLM with two of `count` routed experts a token, by one of transformers' implementations."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(5)
    sizes = {
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 96,
        "moe_intermediate_size": 32,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_experts": count,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 64,
    }
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes)).to(dtype).eval()
    model.set_experts_implementation(experts)
    return model
