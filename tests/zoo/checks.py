"""What must hold for every architecture of the zoo: wrapped outputs equal the unwrapped ones, bit for bit.

`check(kind, name, directory)` is what `scripts/sweep` runs on all of them and `tests/test_sweep.py` on a sample.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tests.zoo import zoo
from tests.zoo.bits import difference, generate, reason_of
from tests.zoo.routed import ROUTED_CHECKS, check_routed
from tests.zoo.swaps import ALL, looked_up, refused_tables, stacked_modules, tables_and_heads
from vbrt import load_config, make_plan, wrap

__all__ = ["CHECKS", "Result", "check", "difference"]

CHECKS = ("dense-ssd", "exact-bf16", "generate", "experts", "tables", *ROUTED_CHECKS)


@dataclass
class Result:
    """One architecture: `reason` why it does not run unwrapped ("" when it does), and a verdict for each check.

    `stacked` counts the modules that stack the matrices of experts, of these classes, `experts` those that are swapped.
    `tables` counts lookup tables and output heads, `tables_used` their weights in the tiers that forwards have used;
    `refused` are those that stay, with the plan's reason, `decoded` those that a forward decodes whole.
    A verdict is "ok", "n/a: why" where the unwrapped model cannot do it either, or what went wrong.
    """

    kind: str
    name: str
    reason: str = ""
    verdicts: dict[str, str] = field(default_factory=dict)
    swapped: int = 0
    experts: int = 0
    stacked: int = 0
    classes: tuple[str, ...] = ()
    tables: int = 0
    tables_used: int = 0
    refused: dict[str, str] = field(default_factory=dict)
    decoded: tuple[str, ...] = ()
    parameters: int = 0
    misses: int = 0
    seconds: float = 0.0

    @property
    def runs(self) -> bool:
        """Whether the unwrapped model runs and repeats itself."""
        return not self.reason

    @property
    def failures(self) -> dict[str, str]:
        """The checks that went wrong."""
        return {k: v for k, v in self.verdicts.items() if v != "ok" and not v.startswith("n/a")}

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)


def _half(model: nn.Module) -> tuple[int, int]:
    """A cpu budget for about half of the pages, and at least the largest; and the bytes of all pages."""
    plan = make_plan(model, load_config("dense", weights=ALL))
    return max(plan.page_bytes // 2, plan.largest_layer_bytes), plan.page_bytes


def check(kind: str, name: str, directory: Path, *, unwrapped_done: Callable[[], None] = lambda: None) -> Result:
    """Builds one architecture, wraps it in each way and compares.

    `directory` holds the ssd tier's files. `unwrapped_done` is called when all that can go wrong from there on is ours.
    """
    result = Result(kind, name)
    try:
        model, inputs = zoo.build(kind, name)
    except zoo.Unbuildable as e:
        result.reason = str(e)
        return result
    modules = dict(model.named_modules())
    stacked = stacked_modules(model)
    result.stacked, result.classes = len(stacked), tuple(sorted({type(modules[n]).__name__ for n in stacked}))
    result.parameters = sum(p.numel() for p in model.parameters())
    expected = zoo.forward(model, inputs)
    if gap := difference(expected, zoo.forward(model, inputs)):
        result.reason = f"does not repeat itself unwrapped: {gap}"
        return result
    if not expected:
        result.reason = "its output holds no tensor"
        return result
    tokens, no_tokens = None, "not a causal language model"
    if kind == "causal":
        try:
            tokens = generate(model, inputs)
        except Exception as e:  # noqa: BLE001 - whatever the unwrapped model raises is the reason that is reported
            no_tokens = reason_of(e)
    unwrapped_done()
    try:
        _check_dense(model, inputs, expected, tokens, result, directory)
    except Exception as e:  # noqa: BLE001 - the same, for the wrapped model
        result.verdicts.setdefault("dense-ssd", reason_of(e))
    if result.stacked:
        swapped = f"{result.experts} of {result.stacked} modules of experts are swapped"
        result.verdicts["experts"] = "ok" if result.experts == result.stacked else swapped
        result.verdicts |= check_routed(kind, name, directory, model, inputs)
    if kind == "causal":
        result.verdicts.setdefault("generate", f"n/a: {no_tokens}" if tokens is None else "not reached")
    del model
    try:
        result.verdicts["exact-bf16"] = _check_exact(kind, name)
    except Exception as e:  # noqa: BLE001 - the same
        result.verdicts["exact-bf16"] = reason_of(e)
    return result


def _check_dense(
    model: nn.Module,
    inputs: Mapping[str, Any],
    expected: Mapping[str, Tensor],
    tokens: Tensor | None,
    result: Result,
    directory: Path,
) -> None:
    """fp32, half of the pages in the cpu tier, all of them on the ssd: twice forward, generate, and back."""
    tables = tables_and_heads(model)
    result.tables = len(tables)
    budget, total = _half(model)
    tiers = {"cpu": {"budget": budget}, "ssd": {"enabled": True, "path": str(directory)}} if total else {}
    vb = wrap(model, "dense", weights=ALL, tiers=tiers)
    with vb:
        result.swapped = len(vb.plan.swaps)
        result.experts = sum(len(swap.modules) for swap in vb.plan.swaps if swap.experts)
        result.refused = refused_tables(vb.plan, tables)
        gaps = [difference(expected, zoo.forward(vb, inputs)) for _ in range(2)]
        gap = next((f"forward {i + 1}: {g}" for i, g in enumerate(gaps) if g), "")
        if tokens is not None and not gap:
            try:
                result.verdicts["generate"] = difference({"ids": tokens}, {"ids": generate(vb, inputs)}) or "ok"
            except Exception as e:  # noqa: BLE001 - reported as this check's verdict
                result.verdicts["generate"] = reason_of(e)
        stats = vb.stats()
        result.misses = sum(layer.misses for layer in stats.layers.values())
        result.tables_used, result.decoded = looked_up(vb.plan, stats.layers, tables)
        silent = [name for name, reason in result.refused.items() if not reason]
        result.verdicts["tables"] = f"neither swapped nor skipped: {silent}" if silent else "ok"
        peak = stats.tiers["cpu"].peak_bytes if total else 0
        if not gap and peak > budget:
            gap = f"the cpu tier held {peak} bytes of a budget of {budget}"
        dense = vb.unwrap()
    if not gap and (back := difference(expected, zoo.forward(dense, inputs))):
        gap = f"after unwrap: {back}"
    result.verdicts["dense-ssd"] = gap or "ok"


def _check_exact(kind: str, name: str) -> str:
    """bf16, coarse and fine planes: the same bits as the unwrapped bf16 model, before and after."""
    try:
        model, inputs = zoo.build(kind, name, dtype=torch.bfloat16)
    except zoo.Unbuildable as e:
        return f"n/a: {str(e)[:300]}"
    expected = zoo.forward(model, inputs)
    if gap := difference(expected, zoo.forward(model, inputs)):
        return f"n/a: does not repeat itself unwrapped in bf16: {gap}"
    with wrap(model, "exact", weights=ALL) as vb:
        gaps = [difference(expected, zoo.forward(vb, inputs)) for _ in range(2)]
        gaps.append(difference(expected, zoo.forward(vb.unwrap(), inputs)))
    return next((f"pass {i + 1}: {g}" for i, g in enumerate(gaps) if g), "ok")
