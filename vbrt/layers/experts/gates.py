"""Mapping of an experts module's gate to a Gate of the kernels.

Modules of transformers gate by `_apply_gate`, which the library adds to a class that has none of its own, or, where
they have no gate, by `act_fn` alone. A Gate is used only if the module's function and activation are in the tables
below, and both agree on a sample of numbers: functions may change between versions of a library, and instances may have
their own. Any other module's gate is its own function, called on the product.
"""

from collections.abc import Callable
from dataclasses import replace
from math import isfinite

import torch
from torch import Tensor, nn

from vbrt.kernels.experts import Gate, apply_gate

__all__ = ["act_gate", "gate_of", "kept_gate", "own_gate"]

#: the gates of activations by name: the same but for rounding
_ACTIVATIONS = {
    "torch.nn.functional.silu": Gate("silu"),
    "torch.nn.modules.activation.SiLU": Gate("silu"),
    "torch.nn.modules.activation.ReLU": Gate("relu"),
    "torch.nn.modules.activation.GELU(none)": Gate("gelu"),
    "torch.nn.modules.activation.GELU(tanh)": Gate("gelu_tanh"),
    "torch.nn.modules.linear.Identity": Gate("none"),
    "transformers.activations.SiLUActivation": Gate("silu"),
    "transformers.activations.GELUActivation": Gate("gelu"),
    "transformers.activations.GELUTanh": Gate("gelu_tanh"),
    "transformers.activations.NewGELUActivation": Gate("gelu_tanh"),
    "transformers.activations.FastGELUActivation": Gate("gelu_tanh"),
    "transformers.activations.AccurateGELUActivation": Gate("gelu_tanh"),
    "transformers.activations.QuickGELUActivation": Gate("silu", alpha=1.702),
    "transformers.activations.ReLUSquaredActivation": Gate("relu2"),
    "transformers.activations.LinearActivation": Gate("none"),
}


def _activated(module: nn.Module) -> Gate | None:
    """act_fn(gate) * value."""
    act = getattr(module, "act_fn", None)
    name = _name_of(type(act) if isinstance(act, nn.Module) else act)
    return _ACTIVATIONS.get(f"{name}({act.approximate})" if isinstance(act, nn.GELU) else name)


def _clamped(module: nn.Module) -> Gate | None:
    """The same on gates of at most `limit`, and values between - `limit` and `limit`."""
    gate = _activated(module)
    return gate and replace(gate, limit=module.limit)


def _clamped_late(module: nn.Module) -> Gate | None:
    """The same, but clamped behind the activation: a Gate only where nothing is clamped."""
    return None if isfinite(module.limit) else _activated(module)


#: what Gates are made of, by the names of modules' attributes
_NUMBERS = ("limit", "alpha", "swiglu_limit", "swiglu_alpha", "has_gate")

#: the Gate of a module whose class has the function
_GATES: dict[str, Callable[[nn.Module], Gate | None]] = {
    "transformers.integrations.moe._default_apply_gate": _activated,
    "vbrt.layers.experts.gates.act_gate": _activated,
    "transformers.models.beam.modeling_beam.BeamExperts._apply_gate": _activated,
    "transformers.models.deepseek_v4.modeling_deepseek_v4.DeepseekV4Experts._apply_gate": _clamped,
    "transformers.models.step3p7.modeling_step3p7.Step3p7Experts._apply_gate": _clamped_late,
    "transformers.models.glm5_next.modeling_glm5_next.Glm5NextTextExperts._apply_gate": lambda module: Gate(
        "silu", limit=module.swiglu_limit
    ),
    "transformers.models.hy_v4.modeling_hy_v4.HYV4Experts._apply_gate": lambda module: Gate(
        "silu", limit=module.swiglu_limit
    ),
    "transformers.models.hy_v4_vl.modeling_hy_v4_vl.HYV4VLExperts._apply_gate": lambda module: Gate(
        "silu", limit=module.swiglu_limit
    ),
    "transformers.models.minimax_m3_vl.modeling_minimax_m3_vl.MiniMaxM3VLExperts._apply_gate": lambda module: Gate(
        "silu", alpha=module.swiglu_alpha, limit=module.swiglu_limit, shift=1.0
    ),
    "transformers.models.openai_privacy_filter.modeling_openai_privacy_filter.OpenAIPrivacyFilterExperts._apply_gate": (
        lambda module: Gate("silu", alpha=module.alpha, limit=module.limit, shift=1.0)
    ),
    "transformers.models.gpt_oss.modeling_gpt_oss.GptOssExperts._apply_gate": lambda module: Gate(
        "silu", interleaved=True, alpha=module.alpha, limit=module.limit, shift=1.0
    ),
}


def act_gate(module: nn.Module, v_PN: Tensor) -> Tensor:
    """Return act_fn(gates) * values, all gates before all values: `_apply_gate` of classes that write it out."""
    gates, values = v_PN.chunk(2, dim=-1)
    return module.act_fn(gates) * values


def own_gate(module: nn.Module) -> Callable[[Tensor], Tensor]:
    """Return the module's own function of the product with "up"."""
    return module._apply_gate if getattr(module, "has_gate", True) else module.act_fn


def gate_of(module: nn.Module) -> Gate | None:
    """Return the Gate that gives what the module's own gate gives, but for rounding; None if there is none."""
    if _is_watched(getattr(module, "act_fn", None)):
        return None
    if getattr(module, "has_gate", True):
        known = _GATES.get(_name_of(getattr(type(module), "_apply_gate", None)))
        gate = known(module) if known else None
    else:
        gate = _activated(module)
        gate = replace(gate, gated=False) if gate and gate.alpha == 1.0 else None
    return gate if gate and _agree(gate, own_gate(module)) else None


def _agree(gate: Gate, own: Callable[[Tensor], Tensor]) -> bool:
    """True if both give the same for a sample, which reaches beyond all limits."""
    span = max(12.0, 2.0 * (gate.limit or 0.0))
    order = torch.arange(128, dtype=torch.int64, device="cpu") * 37 % 128
    sample = torch.linspace(-span, span, 128, dtype=torch.float32, device="cpu")[order].view(1, -1)
    with torch.no_grad():
        expected, got = own(sample), apply_gate(sample, gate)
    return expected.shape == got.shape and torch.allclose(expected, got, rtol=1e-5, atol=1e-5)


def _name_of(thing: object) -> str:
    return f"{getattr(thing, '__module__', '')}.{getattr(thing, '__qualname__', '')}"


def _is_watched(act: object) -> bool:
    """True if an activation has hooks, or its forward was replaced on the instance."""
    held = act.__dict__ if isinstance(act, nn.Module) else {}
    return "forward" in held or bool(held and (held["_forward_hooks"] or held["_forward_pre_hooks"]))


def kept_gate(module: nn.Module) -> Gate | None:
    """Return `gate_of` a module, cached until the module's functions change."""
    follows_from = _followed(module)
    if "_vb_gate" not in module.__dict__ or module.__dict__["_vb_gate"][0] != follows_from:
        module.__dict__["_vb_gate"] = follows_from, gate_of(module)
    return module.__dict__["_vb_gate"][1]


def _followed(module: nn.Module) -> tuple:
    held, act = module.__dict__, getattr(module, "act_fn", None)
    numbers = [held.get(name) for name in _NUMBERS]
    own = held.get("_apply_gate"), getattr(type(module), "_apply_gate", None)
    return act, type(act), getattr(act, "approximate", None), _is_watched(act), *own, *numbers
