"""The classes of routed experts that transformers has, and a small module of each, without the model around it."""

import importlib
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from torch import nn
from transformers import CONFIG_MAPPING

from tests.zoo.inputs import tree

__all__ = [
    "DECORATED",
    "EXPERTS",
    "HIDDEN",
    "INNER",
    "SPECIAL",
    "TOP_K",
    "Holder",
    "called",
    "experts_module",
    "may_route",
    "routed",
    "special_module",
]

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


#: classes that nothing decorates -> the model that has them
SPECIAL = {
    "Step3p7Experts": "step3p7",
    "LongcatFlashExperts": "longcat_flash",
    "Llama4TextExperts": "llama4",
    "JetMoeParallelExperts": "jetmoe",
    "DbrxExperts": "dbrx",
    "InklingSharedExperts": "inkling",
}


_FOLDERS = {module.split(".")[2] for module in DECORATED.values()} | set(SPECIAL.values())


def may_route(kind: str, name: str) -> bool:
    """True if a model of that type may have routed experts: some class of its file has, or of those of its parts."""
    if kind not in ("causal", "base"):
        return False
    try:
        configs = list(tree(CONFIG_MAPPING[name]()))
    except Exception:  # noqa: BLE001 - a config without defaults raises anything: of its own file, then
        configs = []
    modules = {CONFIG_MAPPING[name].__module__, *(type(config).__module__ for config in configs)}
    return not _FOLDERS.isdisjoint(module.split(".")[2] for module in modules if module.startswith("transformers."))


def _config(act: str, implementation: str) -> SimpleNamespace:
    """Return a config that has what any class of experts reads."""
    experts = dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), EXPERTS)
    widths = dict.fromkeys(("hidden_size", "moe_hidden_size"), HIDDEN)
    inner = dict.fromkeys(("intermediate_size", "moe_intermediate_size", "expert_ffn_hidden_size"), INNER)
    acts = dict.fromkeys(("hidden_act", "hidden_activation", "mlp_hidden_act"), act)
    caps = {"mlp_gate_softcap": 4.0, "mlp_up_softcap": 6.0, "swiglu_alpha": 1.702, "swiglu_limit": 0.5}
    dbrx = {"ffn_hidden_size": INNER, "ffn_act_fn": {"name": act}, "moe_top_k": TOP_K}
    others = {
        "n_shared_experts": 3,
        **dbrx,
        "moe_latent_size": None,
        "post_norm_eps": 1e-6,
        "zero_expert_num": 3,
        "num_experts_per_tok": TOP_K,
    }
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
    return _filled(module, seed).to(dtype)


def special_module(name: str, *, dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Module:
    """Return experts of a class of SPECIAL, as `experts_module` does."""
    cls = getattr(importlib.import_module(f"transformers.models.{SPECIAL[name]}.modeling_{SPECIAL[name]}"), name)
    config = _config("silu", "eager")
    arguments = (EXPERTS, HIDDEN, INNER) if name == "JetMoeParallelExperts" else (config,)
    return _filled(cls(*arguments), seed).to(dtype)


def _filled(module: nn.Module, seed: int) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return module.requires_grad_(False).eval()


class Holder(nn.Module):
    """Calls its experts."""

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.experts = experts

    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        return self.experts(*args)


def called(name: str, tokens: int, *, dtype: torch.dtype = torch.float32, seed: int = 1) -> tuple[Any, ...]:
    """Return what a module of SPECIAL is called with: the routing sends no token to the last expert."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, HIDDEN, generator=generator).to(dtype)
    weights = torch.rand(tokens, TOP_K, generator=generator).to(dtype)
    last = EXPERTS + 3 if name == "LongcatFlashExperts" else EXPERTS
    ids = torch.rand(tokens, last - 1, generator=generator).topk(TOP_K).indices
    match name:
        case "Llama4TextExperts":
            scores = torch.zeros(tokens, EXPERTS).scatter_(1, ids[:, :1], 0.5).to(dtype)
            return ((x.repeat(EXPERTS, 1) * scores.t().reshape(-1, 1)),)
        case "JetMoeParallelExperts":
            sizes = torch.bincount(ids.reshape(-1), minlength=EXPERTS).tolist()
            return x[ids.reshape(-1).sort().indices // TOP_K], sizes
        case "DbrxExperts":
            return x.view(1, tokens, HIDDEN), ids, weights
        case "InklingSharedExperts":
            return x.view(1, tokens, HIDDEN), torch.rand(tokens, 3, generator=generator).to(dtype)
    return x, ids, weights


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
