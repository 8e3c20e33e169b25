"""What must hold for every architecture with routed experts, beyond what `checks` asks of all. Tables and heads are in the
tiers, too."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import vbrt
from tests.zoo import zoo
from tests.zoo.bits import difference, generate, reason_of
from tests.zoo.swaps import ALL, stacked_modules, tables_and_heads
from vbrt.layers.experts import VBExperts

__all__ = ["IMPLEMENTATIONS", "ROUTED_CHECKS", "check_routed"]

IMPLEMENTATIONS = ("eager", "batched_mm", "grouped_mm")
#: experts in float32 and in exact bf16 with room for one token; 4 bits; saves and copies
ROUTED_CHECKS = ("one-token", "one-token-bf16", "4-bit", "save")


def check_routed(kind: str, name: str, directory: Path, model: nn.Module, inputs: Mapping[str, Any]) -> dict[str, str]:
    """Return a verdict for each of ROUTED_CHECKS."""
    checks: dict[str, Callable[[], str]] = {
        "one-token": lambda: _one_token(model, inputs, "dense", directory, generates=kind == "causal"),
        "one-token-bf16": lambda: _one_token_bf16(kind, name, directory),
        "4-bit": lambda: _4_bit(model, inputs, directory),
        "save": lambda: _saved(kind, name, model, inputs, directory),
    }
    return {check: _verdict(run) for check, run in checks.items()}


def _verdict(run: Callable[[], str]) -> str:
    try:
        return run() or "ok"
    except Exception as e:  # noqa: BLE001 - reported as this check's verdict
        return reason_of(e)


def _settings(model: nn.Module, format: str, directory: Path) -> dict[str, Any]:
    """An ssd tier, and host memory for what the largest layer takes for one token."""
    format, fine = ("nvfp4", "exact") if format == "exact" else (format, "none")
    settings: dict[str, Any] = {
        "weights": {"format": format, "fine": fine, **ALL},
        "tiers": {"gpu": {"enabled": False}},
    }
    plan = vbrt.make_plan(model, vbrt.load_config(settings))
    settings["tiers"]["cpu"] = {"budget": plan.largest_layer_bytes}
    settings["tiers"]["ssd"] = {"enabled": True, "path": str(directory)}
    return settings


def _one_token(
    model: nn.Module, inputs: Mapping[str, Any], format: str, directory: Path, *, generates: bool = False
) -> str:
    """Each implementation of experts gives its own bits, with room for one token."""
    configs = {id(m.config): m.config for m in model.modules() if hasattr(m, "has_gate")}.values()
    before = [config._experts_implementation for config in configs]
    settings = _settings(model, format, directory)
    for implementation in IMPLEMENTATIONS if before else ("own",):
        for config in configs:
            config._experts_implementation = implementation
        expected = zoo.forward(model, inputs)
        tokens = _tokens(model, inputs) if generates else {}
        with vbrt.wrap(model, settings) as vb:
            gap = difference(expected, zoo.forward(vb, inputs)) or (tokens and difference(tokens, _tokens(vb, inputs)))
            vb.unwrap()
        if gap:
            return f"{implementation}: {gap}"
    for config, implementation in zip(configs, before, strict=True):
        config._experts_implementation = implementation
    return ""


def _tokens(model: Any, inputs: Mapping[str, Any]) -> dict[str, Tensor]:
    return {"ids": generate(model, inputs)}


def _one_token_bf16(kind: str, name: str, directory: Path) -> str:
    try:
        model, inputs = zoo.build(kind, name, dtype=torch.bfloat16)
    except zoo.Unbuildable as e:
        return f"n/a: {str(e)[:300]}"
    if gap := difference(zoo.forward(model, inputs), zoo.forward(model, inputs)):
        return f"n/a: does not repeat itself unwrapped in bf16: {gap}"
    return _one_token(model, inputs, "exact", directory)


def _4_bit(model: nn.Module, inputs: Mapping[str, Any], directory: Path) -> str:
    """Experts, tables and heads in 4 bits: what the same model gives with the weights that 4 bits have rounded."""
    model = copy.deepcopy(model)
    settings = _settings(model, "nvfp4", directory)
    settings["weights"]["include"] = [*stacked_modules(model), *tables_and_heads(model)]
    with vbrt.wrap(model, settings) as vb:
        got = zoo.forward(vb, inputs)
        ways = {m.handle.forwards for m in model.modules() if isinstance(m, VBExperts)}
        vb.unwrap()
    if ways <= {0}:
        return "no experts ran"
    expected = zoo.forward(model, inputs)
    for path, a in expected.items():
        if a.is_floating_point() and a.numel() and a.isfinite().all():
            off = float((a - got[path]).abs().max())
            if not off <= 1e-3 * max(1.0, float(a.abs().max())):
                return f"{path}: {off:.3g} from what the decoded weights give, of {float(a.abs().max()):.3g}"
    return ""


def _saved(kind: str, name: str, model: nn.Module, inputs: Mapping[str, Any], directory: Path) -> str:
    """A save, loaded into another model, and a copy of a wrapped model compute the same; all weights come back."""
    expected = zoo.forward(model, inputs)
    weights = {k: v.clone() for k, v in model.state_dict().items()}
    settings = _settings(model, "dense", directory)
    with vbrt.wrap(model, settings) as vb:
        vb.materialize()
        if gap := difference(weights, vb.state_dict()):
            return f"state_dict: {gap}"
        vb.save(directory / "saved")
        with copy.deepcopy(vb) as twin:
            if gap := difference(expected, zoo.forward(twin, inputs)):
                return f"a copy: {gap}"
        vb.unwrap()
    if gap := difference(weights, model.state_dict()):
        return f"after unwrap: {gap}"
    other, _ = zoo.build(kind, name, seed=1)
    with vbrt.load(directory / "saved", other, tiers={"gpu": {"enabled": False}}) as vb:
        gap = difference(expected, zoo.forward(vb, inputs))
    return f"loaded: {gap}" if gap else ""
