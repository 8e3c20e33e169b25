"""The classes of routed experts that transformers has, and a small module of each, without the model around it."""

import importlib
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from torch import nn

__all__ = ["DECORATED", "EXPERTS", "HIDDEN", "INNER", "TOP_K", "experts_module", "routed"]

EXPERTS, TOP_K, HIDDEN, INNER = 8, 2, 64, 48

_DECORATED = re.compile(r"^@use_experts_implementation.*\nclass (\w+)", re.M)


def _decorated() -> dict[str, str]:
    """Return the classes of `@use_experts_implementation` in the installed transformers, with the file of each."""
    found = {}
    for path in sorted(Path(transformers.__file__).parent.glob("models/*/modeling_*.py")):
        module = f"transformers.models.{path.parent.name}.{path.stem}"
        found.update(dict.fromkeys(_DECORATED.findall(path.read_text()), module))
    return found


#: class name -> the module that defines it
DECORATED = _decorated()


def _config(act: str, implementation: str) -> SimpleNamespace:
    """Return a config that has what any class of experts reads."""
    experts = dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), EXPERTS)
    widths = dict.fromkeys(("hidden_size", "moe_hidden_size"), HIDDEN)
    inner = dict.fromkeys(("intermediate_size", "moe_intermediate_size", "expert_ffn_hidden_size"), INNER)
    acts = dict.fromkeys(("hidden_act", "hidden_activation", "mlp_hidden_act"), act)
    caps = {"mlp_gate_softcap": 4.0, "mlp_up_softcap": 6.0, "swiglu_alpha": 1.702, "swiglu_limit": 0.5}
    others = {"moe_latent_size": None, "post_norm_eps": 1e-6, "zero_expert_num": 3, "num_experts_per_tok": TOP_K}
    return SimpleNamespace(
        **experts, **widths, **inner, **acts, **caps, **others, _experts_implementation=implementation
    )


def experts_module(
    name: str,
    *,
    act: str = "silu",
    dtype: torch.dtype = torch.float32,
    implementation: str = "grouped_mm",
    seed: int = 0,
    **changes: Any,
) -> nn.Module:
    """Return experts of a class with random weights, in eval mode; `changes` go to its config."""
    cls = getattr(importlib.import_module(DECORATED[name]), name)
    config = _config(act, implementation)
    vars(config).update(changes)
    module = cls(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return module.to(dtype).requires_grad_(False).eval()


def routed(
    module: nn.Module, tokens: int = 12, top_k: int = TOP_K, *, dtype: torch.dtype = torch.float32, seed: int = 1
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return hidden states, ids and routing weights that the module takes; no expert twice for one token."""
    generator = torch.Generator().manual_seed(seed)
    hidden = next(p for n, p in module.named_parameters() if n.endswith("down_proj"))
    width = hidden.shape[-1] if module.is_transposed else hidden.shape[-2]
    x = torch.randn(tokens, width, generator=generator).to(dtype)
    ids = torch.rand(tokens, EXPERTS, generator=generator).topk(top_k).indices
    return x, ids, torch.rand(tokens, top_k, generator=generator).to(dtype)
