"""What of a model should be in the tiers: every layer, modules of routed experts, lookup tables and output heads."""

from collections.abc import Mapping

from torch import nn

from vbrt import Plan
from vbrt.report.stats_data import LayerStats

__all__ = ["ALL", "looked_up", "refused_tables", "stacked_modules", "tables_and_heads"]

#: every layer is swapped, the smallest and the head too, and every table
ALL = {"min_parameters": 0, "keep_head": False, "embeddings": True}


def stacked_modules(model: nn.Module) -> list[str]:
    """Return the modules whose parameters stack matrices, or that hold experts otherwise than as modules: all that
    should be swapped as experts."""
    return [
        name
        for name, module in model.named_modules()
        if "Expert" in type(module).__name__
        and any(
            p is not None and (p.ndim == 3 or (p.ndim == 2 and "w1" in module._parameters))
            for p in module._parameters.values()
        )
    ]


def tables_and_heads(model: nn.Module) -> list[str]:
    """Return the modules that are lookup tables, of subclasses of nn.Embedding too, and the head that transformers
    names."""
    try:
        head = model.get_output_embeddings()
    except (AttributeError, NotImplementedError):  # of another library, or a base model
        head = None
    return [name for name, module in model.named_modules() if isinstance(module, nn.Embedding) or module is head]


def refused_tables(plan: Plan, names: list[str]) -> dict[str, str]:
    """Return those of `names` that the plan leaves out of the tiers, with the reason; "" where it gives none."""
    swapped = {module for swap in plan.swaps for module in swap.modules.values()}
    return {name: plan.skipped[name].reason if name in plan.skipped else "" for name in names if name not in swapped}


def looked_up(plan: Plan, layers: Mapping[str, LayerStats], names: list[str]) -> tuple[int, tuple[str, ...]]:
    """Return how many of the weights of tables and heads forwards have used, and the weights that a forward decoded
    whole, as it read `weight`."""
    swaps = [swap for swap in plan.swaps if not set(names).isdisjoint(swap.modules.values())]
    decoded = tuple(swap.name for swap in swaps if layers[swap.name].weight_reads)
    return sum(layers[swap.name].forwards > 0 for swap in swaps), decoded
